"""The graph of many jobs, against each job's own list of what it needs."""

from __future__ import annotations

import pytest
import torch

from ifsl_bench.data.preparing.metadata import DatasetMetadata
from ifsl_bench.experiments import graph
from ifsl_bench.experiments.evaluate_stage import Evaluate
from ifsl_bench.experiments.graph import Graph, graph_of, key_of, wants_of
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.request import Request
from ifsl_bench.experiments.run import run_campaign
from ifsl_bench.experiments.stages import Pretrain, Stage
from ifsl_bench.experiments.workspace import PreparedTask
from ifsl_bench.protocols.tasks.task_files import find
from ifsl_bench.utils.errors import UserError

METHODS = ["protonet", "imprint", "lwof"]


def jobs_on(folder, methods=METHODS, seeds=(0, 1), tasks=("clusters-1shot", "clusters-5shot"), **more):
    names = [f"{folder / 'clusters.toml'}:{task}" for task in tasks]
    return make_jobs(Request(methods, names, {}, {"steps": "20"}, seeds=list(seeds), **more))


def closure(stage: Stage, home) -> dict[str, Stage]:
    """All that a stage needs, and itself, by key."""
    stages = {key_of(stage, home): stage}
    for needed in stage.inputs():
        stages |= closure(needed, home)
    return stages


def brute(jobs, home) -> tuple[dict[str, Stage], dict[str, set[int]]]:
    """Every stage that is not done, by key, and the jobs that wait for it."""
    stages: dict[str, Stage] = {}
    results: dict[str, set[int]] = {}
    for index, job in enumerate(jobs):
        for key, stage in closure(Evaluate(job), home).items():
            if not stage.cached(home):
                stages.setdefault(key, stage)
                results.setdefault(key, set()).add(index)
    return stages, results


def check(graph: Graph, jobs, home) -> None:
    stages, results = brute(jobs, home)
    assert graph.nodes.keys() == stages.keys()
    earlier_keys: set[str] = set()
    for key, node in graph.nodes.items():
        assert set(node.needs) == {key_of(s, home) for s in stages[key].inputs()} & stages.keys()
        assert earlier_keys.issuperset(node.needs), "each comes after what it waits for"
        assert sorted(node.results) == sorted(results[key])
        assert len(set(node.results)) == len(node.results)
        earlier_keys.add(key)


def test_each_stage_is_there_once_after_those_it_needs_for_all_that_wait_for_it(here, work):
    jobs = jobs_on(here) + jobs_on(here, ["lwof"], trials=3)
    graph = graph_of(jobs, work)
    check(graph, jobs, work.home)
    assert sum(node.last for node in graph.nodes.values()) == len(jobs)
    kinds = [node.stage.kind for node in graph.nodes.values()]
    assert kinds.count("pretraining") == 4  # two heads, two seeds; for 16 jobs


def test_what_is_done_has_no_node(here, work):
    first, more = jobs_on(here, ["lwof"], seeds=(0,)), jobs_on(here, seeds=(0,))
    assert not run_campaign(first, work).failed
    check(graph_of(more[:2] + more[3:5], work), more[:2] + more[3:5], work.home)
    graph = graph_of(more, work)
    assert graph.stored == (2, 5)
    assert not [key for key in graph.nodes if key.startswith("meta-training")]
    again = graph_of(first, work, rerun=True)
    assert {node.stage.kind for node in again.nodes.values()} >= {"evaluation"}
    assert not [key for key in again.nodes if key.startswith(("meta-training", "pretraining"))]
    anew = graph_of(first, work, retrain=True)
    assert [node.stage.kind for node in anew.nodes.values() if node.anew].count("meta-training") == 2
    assert not [node for node in anew.nodes.values() if node.anew and node.stage.kind == "pretraining"]


def test_a_job_whose_episodes_cannot_be_drawn_is_refused_and_the_others_are_not(here, work):
    wide = make_jobs(Request(["protonet"], [f"{here / 'clusters.toml'}:clusters-1shot+ways=8"]))
    graph = graph_of([*wide, *jobs_on(here, ["imprint"], seeds=(0,))], work)
    assert list(graph.refused) == [0]
    assert isinstance(graph.refused[0], UserError)
    assert {index for node in graph.nodes.values() for index in node.results} == {1, 2}
    ended = run_campaign([*wide, *jobs_on(here, ["imprint"], seeds=(0,))], work)
    assert [job.name for job in ended.stored] == ["imprint", "imprint"]
    assert ended.failed == wide
    (line,) = ended.causes
    assert str(wide[0]) in line
    with pytest.raises(UserError):
        run_campaign(wide, work)


def test_what_stops_many_jobs_is_said_once(here, monkeypatch, work):
    """Pretraining that fails; and the one job on another seed, whose pretraining does not."""
    jobs = jobs_on(here, ["protonet", "ridge"], seeds=(0, 1))
    whole = PreparedTask.pretrained.func

    def pretrained(prepared):
        if prepared.seed == 0:
            raise UserError("no ground to stand on")
        return whole(prepared)

    monkeypatch.setattr(PreparedTask, "pretrained", property(pretrained))
    ended = run_campaign(jobs, work)
    assert [job.seed for job in ended.failed] == [0] * 4
    assert [job.seed for job in ended.stored] == [1] * 4
    (line,) = ended.causes
    assert line.startswith(f"{jobs[0]}; {jobs[1]}; and 2 more, in pretraining: no ground to stand on (log: ")


def test_a_pretraining_says_what_memory_a_step_takes(here, work):
    """On two cores the glyphs took 1.25 GB, tiny-pack's 2.1, with all of a process; on a device the host has little."""
    (glyphs,), (tiny,) = find("glyphs-5shot"), find("tiny-pack-5shot")
    for task, shape, least, most in ((glyphs, (32, 32, 1), 1.2, 1.8), (tiny, (64, 64, 3), 2.0, 2.8)):
        stage, data = Pretrain(task, "linear", 0), DatasetMetadata(None, shape, {}, False)
        assert least < wants_of(stage, data, work).memory / 1e9 < most
        assert stage.memory(data, torch.device("cuda")) < 6e8


def test_a_job_whose_stored_result_cannot_be_looked_at_is_refused_and_the_others_are_not(here, monkeypatch, work):
    """As where the method's own defaults fail by now."""
    jobs = jobs_on(here, ["imprint", "protonet"], seeds=(0,), tasks=("clusters-5shot",))
    looked = graph.stored_result

    def look(job, work):
        if job.name == "imprint":
            raise UserError("its defaults fail")
        return looked(job, work)

    monkeypatch.setattr(graph, "stored_result", look)
    planned = graph_of(jobs, work)
    assert {jobs[job].name: str(error) for job, error in planned.refused.items()} == {"imprint": "its defaults fail"}
    assert {jobs[index].name for node in planned.nodes.values() for index in node.results} == {"protonet"}
