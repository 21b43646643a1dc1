"""Counts and metrics of sessions against plain loops over the predictions of random classifiers, SciPy's quadrature,
and what published tables say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate

from ifsl_bench.protocols.sequence_loader import SequenceAnswers, count_session_hits
from ifsl_bench.protocols.session_metrics import METRIC_NAMES_AFTER_SESSION, SUMMARY_METRIC_NAMES, SessionCounts

K, N, T, E = 7, 2, 3, 5
B, EACH = 70, 15  # base queries, and queries of each novel class


@pytest.fixture(scope="module")
def predictions():
    """Logits of a random classifier [E, Q, K + T N] that leans to the true class, and labels, some of them -1."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(0, K, (E, B), generator=generator)
    novel = torch.arange(K, K + T * N).repeat_interleave(EACH).expand(E, -1)
    labels = torch.cat([base, novel], 1)
    logits = torch.randn(*labels.shape, K + T * N, generator=generator)
    logits.scatter_add_(2, labels.unsqueeze(-1), torch.full((*labels.shape, 1), 1.3))
    labels[:, [3, B, B + 1, -1]] = -1
    return logits, labels


def answers_of(logits, labels):
    """[E][t] lists of (true class, answer), one query at a time."""

    def after(t: int, e: int) -> list[tuple[int, int]]:
        pairs, met = zip(logits[e].numpy(), labels[e].tolist(), strict=True), K + t * N
        return [(y, int(np.argmax(z[:met]))) for z, y in pairs if 0 <= y < met]

    return [[after(t, e) for t in range(T + 1)] for e in range(E)]


def share(pairs) -> float:
    pairs = list(pairs)
    return 100 * sum(pairs) / len(pairs) if pairs else math.nan


def counts_of(logits, labels) -> SessionCounts:
    """Counts from the margins of all queries, base queries first, then those of each session's classes."""
    best, at = logits[..., :K].max(-1)
    novel = [logits[..., K : K + t * N].max(-1) for t in range(1, T + 1)]
    margin = torch.stack([best - part.values for part in novel], 1)
    right = torch.stack([part.indices + K == labels for part in novel], 1)
    mask = labels >= 0
    base_right = (at == labels)[:, :B]
    of_novel = [part[..., B:].unflatten(-1, (T, -1)) for part in (margin, right, mask)]
    return count_session_hits(
        SequenceAnswers(base_right, margin[..., :B], base_right.unsqueeze(1), mask[:, :B], *of_novel), K, N
    )


def test_metrics_are_those_of_a_plain_loop(predictions):
    pairs, counts = answers_of(*predictions), counts_of(*predictions)
    for e in range(E):
        after = {
            name: counts.metric_after_sessions(name)[e] for name in METRIC_NAMES_AFTER_SESSION if name != "harmonic"
        }
        for t, met in enumerate(pairs[e]):
            base, novel = [p for p in met if p[0] < K], [p for p in met if p[0] >= K]
            of_session = [[y == a for y, a in met if (y - K) // N + 1 == g or (g == 0 and y < K)]
                          for g in range(t + 1)]  # fmt: skip
            of_session[0] = [y == a for y, a in base]
            shares = [share(group) for group in of_session]
            expected = {
                "acc": share(y == a for y, a in met),
                "base": share(y == a for y, a in base),
                "novel": share(y == a for y, a in novel),
                "learned": shares[-1],
                "novel_as_base": share(a < K for _, a in novel),
                "base_as_novel": share(a >= K for _, a in base),
                "gacc": integrate.quad(
                    lambda w, s=shares, t=t: (w * s[0] + sum(s[1:])) / (w + t) if w + t else s[0], 0, K / N
                )[0] / (K / N),
            }  # fmt: skip
            for name, value in expected.items():
                assert after[name][t] == pytest.approx(value, nan_ok=True), (name, t)
            assert counts.accuracy_triangle()[e, t, : t + 1] == pytest.approx(shares)
            assert np.isnan(counts.accuracy_triangle()[e, t, t + 1 :]).all()


def test_summaries(predictions):
    counts = counts_of(*predictions)
    acc, base, novel = (
        counts.metric_after_sessions("acc"),
        counts.metric_after_sessions("base"),
        counts.metric_after_sessions("novel"),
    )
    assert counts.metric_by_sequence("first") == pytest.approx(acc[:, 0])
    assert counts.metric_by_sequence("last") == pytest.approx(acc[:, -1])
    assert counts.metric_by_sequence("acc") == pytest.approx(acc.sum(1) / (T + 1))
    assert counts.metric_by_sequence("pd") == pytest.approx(acc[:, 0] - acc[:, -1])
    assert counts.metric_by_sequence("learned") == pytest.approx(counts.metric_after_sessions("learned")[:, 1:].mean(1))
    b, n = base.mean(0), novel.mean(0)
    assert counts.metric_after_sessions("harmonic").mean(0)[1:] == pytest.approx((2 * b * n / (b + n))[1:])
    assert counts.metric_by_sequence("harmonic").mean() == pytest.approx(2 * b[-1] * n[-1] / (b[-1] + n[-1]))
    assert set(SUMMARY_METRIC_NAMES) > {"gacc", "novel_as_base", "base_as_novel"}
    for name in SUMMARY_METRIC_NAMES:
        assert counts.metric_by_sequence(name).shape == (E,), name


def published_shape(queries: np.ndarray, base_classes: int, ways: int) -> SessionCounts:
    """Counts with every base query right in session 0."""
    t = len(queries) - 1
    hits = np.zeros((1, (t + 1) * (t + 2) // 2), np.int64)
    hits[0, 0] = queries[0]
    none = np.zeros((1, t), np.int64)
    return SessionCounts(hits, none, none, queries[None], base_classes, ways)


def test_the_lazy_row_of_the_common_lists():
    """0.770 A_0 on mini-ImageNet and CIFAR-100, 0.600 A_0 at the end; 0.696 A_0 on CUB."""
    mini = published_shape(np.array([6000, *[500] * 8]), 60, 5).base_only_counts()
    assert mini.metric_by_sequence("acc")[0] == pytest.approx(100 * sum(60 / (60 + 5 * t) for t in range(9)) / 9)
    assert mini.metric_by_sequence("acc")[0] == pytest.approx(77.0, abs=0.05)
    assert mini.metric_by_sequence("last")[0] == pytest.approx(60.0)
    cub = published_shape(
        np.array([2864, 279, 287, 298, 300, 298, 288, 297, 295, 288, 300]), 100, 10
    ).base_only_counts()
    assert cub.metric_by_sequence("acc")[0] == pytest.approx(69.6, abs=0.05)
    for name, percent in {"novel": 0, "harmonic": 0, "base": 100, "novel_as_base": 100, "base_as_novel": 0}.items():
        assert cub.metric_by_sequence(name)[0] == percent, name
    assert cub.state_bytes_per_class == 0
    assert replace(cub, state_bytes=100 * 2048).state_bytes_per_class == 2048, "one class mean of 512 numbers"


def test_the_weights_of_images_make_each_metric_of_shares():
    """A model whose accuracy on all base queries is b, and on all novel ones n, after every session."""
    b, n, sessions, base_queries, each = 0.6, 0.3, 3, 50, 10
    _, g = np.tril_indices(sessions + 1)
    hits = np.where(g == 0, b * base_queries, n * each).astype(int)[None].repeat(2, 0)
    queries = np.array([[base_queries, *[each] * sessions]] * 2)
    none = np.zeros((2, sessions), int)
    counts = SessionCounts(hits, none, none, queries, base_classes=12, ways=2)
    counts = counts.with_calibrated_counts_of(counts)
    for metric in ("acc", "calibrated_acc", "first", "last", "pd", "gain", "base", "novel", "gacc"):
        weights = counts.image_weights_of_metric(metric)
        found = sum(b * weight for weight in weights.get("base", {}).values())
        found += sum(n * weight for weight in weights.get("novel", {}).values())
        assert 100 * found == pytest.approx(counts.metric_by_unit(metric).mean()), metric
    slopes = [next(iter(counts.image_weights_of_metric("harmonic")[pool].values())) for pool in ("base", "novel")]
    assert slopes == pytest.approx([2 * n**2 / (b + n) ** 2, 2 * b**2 / (b + n) ** 2])
    assert counts.image_weights_of_metric("learned") is None
