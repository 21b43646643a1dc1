"""Many episodes: evaluation in ranges, which finds the same however it is cut, and resumes."""

from __future__ import annotations

import itertools
import pickle
import random
import shutil

import msgspec
import numpy as np
import pytest
import torch

from ifsl_bench.experiments import api, evaluation, ranges
from ifsl_bench.experiments import evaluation_context as ready
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.experiments.evaluate_stage import stages_of
from ifsl_bench.experiments.evaluation import Evaluated, evaluate, joined
from ifsl_bench.experiments.graph import graph_of
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.ranges import Calibrate, EvaluateRange, evaluated_of, ranges_of, record_of
from ifsl_bench.experiments.reproduce import reproduce, run_unstored
from ifsl_bench.experiments.request import Request
from ifsl_bench.experiments.run import run_campaign
from ifsl_bench.experiments.training_stage import MetaTrain, backbone_of
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method, Prediction
from ifsl_bench.plugin.options import make_method
from ifsl_bench.protocols.calibration import find_bias
from ifsl_bench.protocols.tasks.metric_sets import COUNTS, MORE_COUNTS
from ifsl_bench.store.schema import Result, read
from ifsl_bench.utils.errors import UserError


@pytest.fixture
def task(clusters):
    return f"{clusters / 'clusters.toml'}:clusters-1shot"


@pytest.fixture
def in_ranges(monkeypatch):
    """Sixteen episodes make a range."""
    monkeypatch.setattr(ready, "RANGE", 16)


def job_of(method, task, work, episodes, steps=False):
    train = {"steps": 5} if steps else {}
    return make_jobs(Request([method], [task], {}, train, episodes=episodes), work.home)[0]


def same(a: Evaluated, b: Evaluated) -> bool:
    """Bit by bit, NaN where the other is NaN."""
    pairs = [(getattr(a.counts, name), getattr(b.counts, name)) for name in (*COUNTS, *MORE_COUNTS)]
    pairs += [(a.statistics[name], b.statistics[name]) for name in a.statistics]
    if a.margins and b.margins:
        pairs += [(a.margins.base, b.margins.base), (a.margins.novel, b.margins.novel)]
    if a.calibrated and b.calibrated:
        pairs += [(a.calibrated.curve, b.calibrated.curve), (a.calibrated.base_joint, b.calibrated.base_joint)]
    alike = all((x is None) == (y is None) for x, y in ((a.margins, b.margins), (a.calibrated, b.calibrated)))
    return alike and a.statistics.keys() == b.statistics.keys() and all(
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
    monkeypatch.setattr(evaluation, "batch_size", lambda *_: 8)
    prepared = backbone_of(job_of("protonet", task, work, None)).prepared(work)
    loader, count = prepared.loader("test"), 75  # the last block is of three
    torch.manual_seed(0)
    if name == "neighbours":
        method: Method = Neighbours(prepared.base, 5)
    else:
        _, kind, meant = registry.resolve(name)
        method = make_method(kind, prepared.base, 5, meant)
    once = evaluate(method, name, loader, range(count))
    parts = [evaluate(method, name, loader, part, whole=count) for part in cuts(1, count)]
    assert same(joined(parts), once)
    bias = find_bias(once.margins)
    counted = evaluate(method, name, loader, range(count), bias=bias)
    parts = [evaluate(method, name, loader, part, whole=count, bias=bias) for part in cuts(2, count)]
    assert same(joined(parts), counted)
    base, novel = once.margins.joint_hits(bias.value)
    assert np.array_equal(counted.counts.calibrated_base, base)
    assert np.array_equal(counted.counts.calibrated_novel, novel)
    for at, *hits in counted.calibrated.curve:
        assert [int(part.sum()) for part in once.margins.joint_hits(at)] == hits
    records = [{name: np.array(value) for name, value in record_of(part).items()} for part in parts]
    again = [evaluated_of(record) for record in records]
    for part, read_again in zip(parts, again, strict=True):
        for key, values in part.statistics.items():
            assert np.array_equal(read_again.statistics[key], values, equal_nan=True)
    assert joined(again).described() == counted.described()


def _plain(result: Result) -> Result:
    """Without times."""
    keep = {"parameters"}
    return msgspec.structs.replace(
        result,
        cost={key: value for key, value in result.cost.items() if key in keep},
        provenance={key: value for key, value in result.provenance.items() if key not in ("time", "command")},
    )


@pytest.mark.parametrize("about", [{}, {"calibrate": True}, {"options": {"learner": "lr"}, "tune": 2}])
def test_a_result_in_ranges_is_that_of_one_pass(about, task, work, monkeypatch):
    """Also beyond the task's own 60 episodes, the last range shorter than the others."""
    monkeypatch.setattr("ifsl_bench.experiments.evaluate_stage.commit", lambda: "")
    method = "ridge" if "tune" in about else "imprint"
    once = api.run(method, task, episodes=100, work=work, **about)
    shutil.rmtree(work.home.results)
    monkeypatch.setattr(ready, "RANGE", 16)
    result = api.run(method, task, episodes=100, work=work, **about)
    assert _plain(result) == _plain(once)
    assert result.label.endswith(".episodes=100")
    assert len(result.episodes) == 100
    assert not list((work.home.cache / "evaluated").glob("*")), "removed when the result is stored"
    path, own = next(work.home.results.rglob("*.json")), job_of("protonet", task, work, None).task
    assert check_file(path, {own.name: own}, work.home).failures == ()


def test_ranges_run_anywhere_in_any_order_and_a_run_that_was_stopped_goes_on(task, work, in_ranges, monkeypatch):
    job = job_of("lr+a", task, work, 100, steps=True)
    graph = graph_of([job], work)
    nodes = [node for node in graph.nodes.values() if isinstance(node.stage, EvaluateRange)]
    assert [(node.stage.start, node.stage.stop) for node in nodes][::6] == [(0, 16), (96, 100)]
    assert all(graph.nodes[key].stage == Calibrate(job) for node in nodes for key in node.needs)
    (last,) = (node for node in graph.nodes.values() if node.last)
    assert set(last.needs) == {node.key for node in nodes}
    for node in graph.nodes.values():
        if node not in nodes and node is not last:
            node.stage.compute(work)
    random.Random(0).shuffle(nodes)
    for node in nodes[:5]:
        elsewhere = api.workspace(work.home.cache, work.home.results, "cpu")
        pickle.loads(pickle.dumps(node.stage)).compute(elsewhere)
    assert sum(node.stage.cached(work.home) for node in nodes) == 5
    assert len([n for n in graph_of([job], work).nodes.values() if isinstance(n.stage, EvaluateRange)]) == 2
    evaluated_ranges = []
    real = ready.evaluate
    monkeypatch.setattr(ready, "evaluate", lambda *a, **k: evaluated_ranges.append(a[3]) or real(*a, **k))
    damaged_file, cut_file = (node.stage.file(work.home) for node in nodes[:2])
    content = bytearray(damaged_file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged_file.write_bytes(content)
    cut_file.write_bytes(cut_file.read_bytes()[:50])
    result = api.run_job(job, work)
    assert sorted((r.start, r.stop) for r in evaluated_ranges) == sorted(
        (n.stage.start, n.stage.stop) for n in [*nodes[:2], *nodes[5:]]
    )
    monkeypatch.setattr(ready, "RANGE", 10_000)
    once = api.run_job(job, work, rerun=True)
    assert _plain(once) == _plain(result)


def test_what_was_found_by_another_method_is_not_used(task, work, in_ranges, monkeypatch):
    job = job_of("lwof", task, work, 40, steps=True)
    *_, evaluation_ = stages_of(job)
    run_unstored(job, work)
    cached_stages = [stage for stage in (Calibrate(job), *ranges_of(job)) if stage.cached(work.home)]
    assert len(cached_stages) == 4
    monkeypatch.setattr(ranges, "own_code", lambda: "other code")
    assert not any(stage.cached(work.home) for stage in cached_stages)
    monkeypatch.undo()
    monkeypatch.setattr(ready, "RANGE", 16)
    (folder,) = (path for path in work.home.trained.glob("*") if path.is_dir())
    folder.rename(folder.with_name("gone"))
    assert not any(stage.cached(work.home) for stage in cached_stages), "another training would have other weights"
    assert evaluation_.inputs() == ranges_of(job)


def test_more_episodes_than_the_task_has_are_checked_on_its_own_first(clusters, work, call):
    text = (clusters / "clusters.toml").read_text()
    (clusters / "clusters.toml").write_text(text + f'digest = "{"0" * 64}"\n')
    name = f"{clusters / 'clusters.toml'}:clusters-shared-5shot"
    with pytest.raises(UserError, match="the test episodes of clusters-shared-5shot have digest"):
        api.run("protonet", name, episodes=100, work=work)


def test_a_result_of_many_episodes_is_reproduced(task, work, in_ranges, monkeypatch):
    monkeypatch.setattr("ifsl_bench.store.schema.READABLE", 100)
    api.run("imprint", task, episodes=100, work=work)
    path = next(work.home.results.rglob("*.json"))
    assert isinstance(read(path).episodes.base_joint, str)
    reproduction = reproduce(path, work, task=task.rpartition(":")[0])
    assert reproduction.identical, reproduction.line
    assert not list((work.home.cache / "evaluated").glob("*"))


def test_what_is_forgotten_goes_at_once_and_a_second_run_keeps_what_it_writes_meanwhile(
    task, work, in_ranges, monkeypatch
):
    job = job_of("imprint", task, work, 40)
    first, *_ = ranges_of(job)
    first.compute(work)
    file, real = first.file(work.home), shutil.rmtree

    def beside(folder, **how):
        assert first.read(work.home, None) is None, "there is nothing, and no half"
        assert not file.parent.exists()
        first.compute(work)  # of the second run
        real(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", beside)
    ranges.remove_evaluated(job, work.home)
    assert file.exists()
    assert [path.name for path in file.parent.parent.iterdir()] == [file.parent.name]


def test_retrain_after_an_interrupted_run_of_many_episodes_trains_anew(task, work, in_ranges):
    job = job_of("lwof", task, work, 40, steps=True)
    for stage in stages_of(job)[:-1]:
        stage.compute(work)  # interrupted before the result: all ranges of the old model are there
    old = MetaTrain(job).folder(work.home)
    (old / "mark").touch()
    assert all(part.cached(work.home) for part in ranges_of(job))
    assert run_campaign([job], work, retrain=True).stored == [job]
    assert not (MetaTrain(job).folder(work.home) / "mark").exists()
    (aside,) = [path.parent for path in work.home.trained.rglob("mark")]
    assert "replaced" in aside.name
