"""Counts, estimates and paired tests against SciPy and against plain loops over episodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from ifsl_bench.episodic.evaluation import evaluate
from ifsl_bench.episodic.loader import Batch, EpisodeLoader
from ifsl_bench.plugin.method import Base, Method, Prediction, Query, Support
from ifsl_bench.protocol.metrics import Counts, estimate, paired, summarise
from ifsl_bench.protocol.task_kind import METRICS


def test_paired_is_scipys_paired_t_test():
    generator = np.random.default_rng(0)
    a = generator.normal(0.05, 1, 500)
    b = generator.normal(0.0, 1, 500) + 0.5 * a
    result, expected = paired(a, b), stats.ttest_rel(a, b)
    assert result.p == pytest.approx(expected.pvalue, rel=1e-9)  # the rounding of t, 1e-15, times its square
    assert result.mean == pytest.approx((a - b).mean())
    assert result.interval == pytest.approx(1.96 * stats.sem(a - b))
    assert paired(a, a).p == 1.0
    far = paired(a + 1, b)
    assert far.p == pytest.approx(stats.ttest_rel(a + 1, b).pvalue, rel=1e-6), "the far tail too, where t is above 15"
    assert 0 < far.p < 1e-50
    two = paired(a[:2], b[:2])
    assert two.p == pytest.approx(stats.ttest_rel(a[:2], b[:2]).pvalue), "one degree of freedom"


def test_estimate():
    values = np.array([1.0, 2.0, 4.0])
    assert estimate(values).mean == pytest.approx(7 / 3)
    assert estimate(values).interval == pytest.approx(1.96 * stats.sem(values))


def test_metrics_by_hand():
    counts = Counts(np.array([20, 25]), np.array([24, 25]), np.array([10, 0]), np.array([20, 5]), 25, 25)
    values = counts.per_episode()
    assert set(values) == {*METRICS, "harmonic"}
    assert values["acc"].tolist() == [60.0, 50.0]
    assert values["base_joint"].tolist() == [80.0, 100.0]
    assert values["delta_a"] == pytest.approx([-16.0, 0.0])
    assert values["delta_b"] == pytest.approx([-40.0, -20.0])
    assert values["delta"] == pytest.approx([-28.0, -10.0])
    assert summarise(values)["acc"].mean == 55.0


class _Stored(Method):
    """Answers with logits that the query features carry."""

    def forward(self, support: Support, query: Query) -> Prediction:
        return Prediction(query.features, {"steps": support.features.sum((1, 2))})


class _Loader(EpisodeLoader):
    """Random logits and labels in the place of episodes."""

    def __init__(self, episodes: int, classes: int, ways: int, spec) -> None:
        generator = torch.Generator().manual_seed(0)
        q = spec.base_queries + ways * spec.novel_queries
        self.logits = torch.randint(0, 4, (episodes, q, classes + ways), generator=generator).float()  # many ties
        novel = torch.zeros(episodes, q, dtype=torch.bool)
        for e in range(episodes):
            novel[e, torch.randperm(q, generator=generator)[: ways * spec.novel_queries]] = True
        base = torch.randint(0, classes, (episodes, q), generator=generator)
        self.labels = torch.where(novel, classes + torch.randint(0, ways, (episodes, q), generator=generator), base)
        self.is_novel = novel
        self.hidden = torch.rand(episodes, classes, generator=generator) < 0.3
        self.ways, self.classes = ways, classes
        self.sampler = type("S", (), {"shape": spec, "shots": 1})()
        self.novel = type("P", (), {"features": self.logits[0]})()

    def batch(self, start: int, count: int, room: object = None) -> Batch:
        at = slice(start, start + count)
        support = Support(
            torch.ones(count, self.ways, 2), torch.zeros(count, self.ways), self.hidden[at], torch.zeros(0)
        )
        return Batch(support, Query(self.logits[at], torch.zeros(0)), self.labels[at], self.is_novel[at])


def test_hits_are_those_of_a_plain_loop(monkeypatch):
    from ifsl_bench.episodic import evaluation
    from ifsl_bench.protocol.task import EpisodeSpec

    spec = EpisodeSpec(ways=3, novel_queries=2, base_queries=4)
    loader = _Loader(50, 7, 3, spec)
    monkeypatch.setattr(evaluation, "batch_size", lambda *_: 16)
    method = _Stored(Base(torch.zeros(7, 2), torch.zeros(7), torch.zeros(7, 2)), 3)
    result = evaluate(method, "stored", loader, range(50))
    for e in range(50):
        expected = dict.fromkeys(("base_joint", "base_alone", "novel_joint", "novel_alone"), 0)
        for i in range(10):
            logits = loader.logits[e, i].numpy().copy()
            logits[:7][loader.hidden[e].numpy()] = -np.inf
            label = int(loader.labels[e, i])
            side = "novel" if loader.is_novel[e, i] else "base"
            expected[f"{side}_joint"] += int(np.argmax(logits) == label)
            alone = 7 + np.argmax(logits[7:]) if side == "novel" else np.argmax(logits[:7])
            expected[f"{side}_alone"] += int(alone == label)
        for name, value in expected.items():
            assert getattr(result.counts, name)[e] == value
    assert result.statistics["steps"].tolist() == [6.0] * 50
    assert [hits.tolist() for hits in result.margins.joint_hits(0)] == [
        result.counts.base_joint.tolist(), result.counts.novel_joint.tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("bias", [-1.0, 1.0, 0.5])
def test_hits_with_a_bias_are_those_of_logits_with_it(monkeypatch, bias):
    """And AUSUC, which is a sweep over all biases, does not change."""
    from ifsl_bench.episodic import evaluation
    from ifsl_bench.protocol.task import EpisodeSpec

    spec = EpisodeSpec(ways=3, novel_queries=2, base_queries=4)
    loader = _Loader(50, 7, 3, spec)
    loader.logits[:5, :, 7:] = -torch.inf  # no bias raises these
    monkeypatch.setattr(evaluation, "batch_size", lambda *_: 16)
    method = _Stored(Base(torch.zeros(7, 2), torch.zeros(7), torch.zeros(7, 2)), 3)
    plain = evaluate(method, "stored", loader, range(50))
    loader.logits[..., 7:] += bias
    biased = evaluate(method, "stored", loader, range(50))
    base, novel = plain.margins.joint_hits(bias)
    assert np.array_equal(base, biased.counts.base_joint)
    assert np.array_equal(novel, biased.counts.novel_joint)
    assert not np.array_equal(novel, plain.counts.novel_joint)
    assert np.array_equal(plain.counts.pairs, biased.counts.pairs)
    for name in ("base", "novel"):
        right = np.isfinite(getattr(plain.margins, name)[5:]).sum(1)
        assert np.array_equal(right, getattr(plain.counts, f"{name}_alone")[5:])
