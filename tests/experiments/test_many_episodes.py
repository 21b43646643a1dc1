"""Many episodes: an episode's counts do not depend on the range it is asked for in, and memory is that of counts."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import numpy as np
import pytest
import torch

from ifsl_bench import api
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.experiments.evaluate_stage import EvaluationStage
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.reproduce import reproduce
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.stages import make_pretrain_stage
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method, Prediction
from ifsl_bench.plugin.options import make_method
from ifsl_bench.protocols import loader as evaluation
from ifsl_bench.protocols.calibration import find_bias
from ifsl_bench.protocols.loader import EvaluationResult, evaluate_method, join_evaluation_results
from ifsl_bench.protocols.metrics import EPISODE_COUNT_NAMES, OPTIONAL_EPISODE_COUNT_NAMES
from ifsl_bench.store.schema import read_result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import Reporter


@pytest.fixture
def task(clusters):
    return f"{clusters / 'clusters.toml'}:clusters-1shot"


def job_of(method, task, work, episodes, steps=False):
    train = {"steps": 5} if steps else {}
    return make_jobs(RunConfig([method], [task], {}, train, episodes=episodes), work.home)[0]


def same(a: EvaluationResult, b: EvaluationResult) -> bool:
    """Bit by bit, NaN where the other is NaN."""
    pairs = [
        (getattr(a.counts, name), getattr(b.counts, name))
        for name in (*EPISODE_COUNT_NAMES, *OPTIONAL_EPISODE_COUNT_NAMES)
    ]
    pairs += [(a.method_statistics[name], b.method_statistics[name]) for name in a.method_statistics]
    if a.margins and b.margins:
        pairs += [(a.margins.base_margins, b.margins.base_margins), (a.margins.novel_margins, b.margins.novel_margins)]
    if a.calibrated_hits and b.calibrated_hits:
        pairs += [
            (a.calibrated_hits.hits_by_curve_bias, b.calibrated_hits.hits_by_curve_bias),
            (a.calibrated_hits.base_joint, b.calibrated_hits.base_joint),
        ]
    alike = all((x is None) == (y is None) for x, y in ((a.margins, b.margins), (a.calibrated_hits, b.calibrated_hits)))
    return alike and a.method_statistics.keys() == b.method_statistics.keys() and all(
        (x is None and y is None) or (x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())
        for x, y in pairs
    )  # fmt: skip


def cuts(seed: int, count: int) -> list[range]:
    """The episodes, cut at random points."""
    points = [0, *sorted(random.Random(seed).sample(range(1, count), 6)), count]
    return [range(a, b) for a, b in itertools.pairwise(points)]


class Neighbours(Method):
    """Its answers are those of the whole batch: of how many episodes it has, what they are, and at which place."""

    def forward(self, support, query):
        E, Q, _ = query.features.shape
        classes = support.hidden.shape[1] + self.ways
        place = torch.arange(E * Q * classes).reshape(E, Q, classes)
        return Prediction(torch.sin(place * (1 + E) + query.features.sum()), statistics={"size": torch.full((E,), E)})


@pytest.mark.parametrize("name", ["lr+a", "neighbours"])
def test_what_is_found_in_an_episode_does_not_depend_on_the_range_it_is_in(name, task, work, monkeypatch):
    monkeypatch.setattr(evaluation, "choose_block_size", lambda *_: 8)
    prepared = make_pretrain_stage(job_of("protonet", task, work, None)).open_task(work)
    loader, count = prepared.loader("test"), 75  # the last block is of three
    torch.manual_seed(0)
    if name == "neighbours":
        method: Method = Neighbours(prepared.base_classifier, 5)
    else:
        _, kind, meant = registry.resolve_method(name)
        method = make_method(kind, prepared.base_classifier, 5, meant)
    once = evaluate_method(method, name, loader, range(count))
    parts = [evaluate_method(method, name, loader, part, whole=count) for part in cuts(1, count)]
    assert same(join_evaluation_results(parts), once)
    bias = find_bias(once.margins)
    counted = evaluate_method(method, name, loader, range(count), bias=bias)
    parts = [evaluate_method(method, name, loader, part, whole=count, bias=bias) for part in cuts(2, count)]
    assert same(join_evaluation_results(parts), counted)
    base, novel = once.margins.joint_hits_with_bias(bias.bias_on_novel_logits)
    assert np.array_equal(counted.counts.calibrated_base, base)
    assert np.array_equal(counted.counts.calibrated_novel, novel)
    for at, *hits in counted.calibrated_hits.hits_by_curve_bias:
        assert [int(part.sum()) for part in once.margins.joint_hits_with_bias(at)] == hits


def test_more_episodes_than_the_task_has_are_checked_on_its_own_first(clusters, work, call):
    text = (clusters / "clusters.toml").read_text()
    (clusters / "clusters.toml").write_text(text + f'digest = "{"0" * 64}"\n')
    name = f"{clusters / 'clusters.toml'}:clusters-shared-5shot"
    with pytest.raises(UserError, match="the test episodes of clusters-shared-5shot have digest"):
        api.run("protonet", name, episodes=100, work=work)


def test_a_result_of_many_episodes_is_reproduced(task, work, monkeypatch):
    monkeypatch.setattr("ifsl_bench.protocols.protocol.MOST_READABLE_NUMBERS", 100)
    monkeypatch.setattr("ifsl_bench.experiments.evaluate_stage.read_git_commit", lambda: "")
    result = api.run("imprint", task, episodes=100, work=work)
    assert result.label.endswith(".episodes=100")
    assert len(result.episodes) == 100
    path, own = next(work.home.results.rglob("*.json")), job_of("protonet", task, work, None).task
    assert check_file(path, {own.name: own}, work.home).failures == ()
    assert isinstance(read_result(path).episodes.base_joint, str)
    reproduction = reproduce(path, work, task=task.rpartition(":")[0])
    assert reproduction.is_identical, reproduction.summary_line


def test_memory_grows_by_the_counts_of_an_episode_and_not_by_its_margins(task, work):
    """NumPy's arrays alone are traced, and blocks take PyTorch's: what grows is what is kept of each episode."""
    job = job_of("protonet", task, work, 4000)
    context = EvaluationStage(job).open(work)
    queries = context.loader("test").load_batch(0, 1).query_labels.numel()
    margins = evaluate_method(context.method, job.method_name, context.loader("val"), range(20)).margins
    for bias in (None, find_bias(margins)):
        peaks = []
        for episodes in (2000, 4000):
            tracemalloc.start()
            context.evaluate(range(episodes), bias, Reporter(), "")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        counts = 8 * (len(EPISODE_COUNT_NAMES) + len(OPTIONAL_EPISODE_COUNT_NAMES))
        assert (peaks[1] - peaks[0]) / 2000 < 3 * counts < 4 * queries
