"""``ifsl-bench reproduce`` and ``run --retrain``."""

from __future__ import annotations

import msgspec
import pytest
import torch

from ifsl_bench.board import result_file
from ifsl_bench.common.errors import UserError
from ifsl_bench.plugin.method import Method, Prediction
from ifsl_bench.protocol.task import MetaTraining
from ifsl_bench.running import api
from ifsl_bench.running.reproduce import job_of

LEARNED = """
import torch
from ifsl_bench import Method, MetaTraining, Prediction

class Learned(Method):
    schedule = MetaTraining(steps=4, validate_every=2)

    def __init__(self, base, ways):
        super().__init__(base, ways)
        self.weight = torch.nn.Parameter(torch.ones_like(base.weight[0]))

    def forward(self, support, query):
        novel = {scale} * (query.features * self.weight) @ support.class_means(self.ways).mT
        return Prediction(torch.cat([query.base_logits, novel], -1))
"""


@pytest.fixture
def stored(clusters, tmp_path):
    """A meta-trained method in a file, and its stored result."""
    (tmp_path / "learned.py").write_text(LEARNED.format(scale=1.0))
    task = f"{clusters / 'clusters.toml'}:clusters-5shot"
    api.run(str(tmp_path / "learned.py"), task, work=api.workspace(clusters / "home", device="cpu"))
    return clusters / "home" / "results" / "clusters-5shot" / "Learned.seed-0.json"


def again(call, stored, tmp_path, clusters, *more):
    method, task = tmp_path / "learned.py", clusters / "clusters.toml"
    return call("reproduce", str(stored), "--method", str(method), "--task", str(task), "--device", "cpu", *more)


def test_the_same_job_in_an_empty_home_gives_the_same_counts(call, stored, tmp_path, clusters, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    before = {path: path.stat().st_mtime_ns for path in (clusters / "home").rglob("*") if path.is_file()}
    status, out, err = again(call, stored, tmp_path, clusters)
    assert (status, "identical, all counts of 60 episodes" in out) == (0, True), (out, err)
    assert {p: p.stat().st_mtime_ns for p in (clusters / "home").rglob("*") if p.is_file()} == before


def test_other_code_and_other_counts_are_said_with_status_1(call, stored, tmp_path, clusters):
    home = ("--home", str(clusters / "home"))
    (tmp_path / "learned.py").write_text(LEARNED.format(scale=0.2))
    status, out, _ = again(call, stored, tmp_path, clusters, *home)
    assert status == 1
    assert "differs, Acc." in out
    assert "of 60 episodes (the method differs in logits of 1-shot joint episodes, float64" in out
    (tmp_path / "learned.py").write_text(LEARNED.format(scale=1.0))
    assert again(call, stored, tmp_path, clusters, *home)[0] == 0
    # Counts that somebody has changed by one query in one episode.
    result = result_file.read(stored)
    hits = list(result.episodes.novel_joint)
    hits[3] -= 1
    without = {name: [] for name in result_file.LATER}  # as older files are
    episodes = msgspec.structs.replace(result.episodes, novel_joint=hits, **without)
    changed = msgspec.structs.replace(result, episodes=episodes, calibration=None)
    summary = result_file.summary_entry(result_file.summarise(changed.counts().per_episode()))
    result_file.write(tmp_path / "other", msgspec.structs.replace(changed, summary=summary))
    (path,) = (tmp_path / "other").rglob("*.json")
    status, out, _ = again(call, path, tmp_path, clusters, *home)
    assert status == 1
    assert "other counts in 1 of 60 episodes" in out
    assert again(call, path, tmp_path, clusters, *home, "--within", "0.5")[0] == 0


def test_a_result_whose_method_is_not_here_is_the_users_mistake(call, stored, clusters):
    status, _, err = call("reproduce", str(stored), "--home", str(clusters / "home"))
    assert status == 2
    assert "Learned on clusters-5shot cannot be run again here" in err
    assert call("reproduce", "nothing.json")[0] == 2


def test_the_job_of_a_result_has_its_options(clusters):
    work = api.workspace(clusters / "home", device="cpu")
    task = f"{clusters / 'clusters.toml'}:clusters-5shot"
    result = api.run("lr", task, options={"weight_decay": 0.01}, episodes=20, work=work)
    job = job_of(result, work.home, str(clusters / "clusters.toml"))
    assert (job.label, job.episodes, dict(job.given)["weight_decay"]) == (result.label, 20, 0.01)
    with pytest.raises(UserError, match="cannot be run again here"):
        job_of(msgspec.structs.replace(result, method="nobodys"), work.home, task)


class Weighed(Method):
    """One parameter a feature."""

    schedule = MetaTraining(steps=4, validate_every=2)

    def __init__(self, base, ways):
        super().__init__(base, ways)
        self.weight = torch.nn.Parameter(torch.ones_like(base.weight[0]))

    def forward(self, support, query):
        novel = (query.features * self.weight) @ support.class_means(self.ways).mT
        return Prediction(torch.cat([query.base_logits, novel], -1))


def test_retrain_trains_again_and_keeps_the_old_model(clusters):
    work = api.workspace(clusters / "home", device="cpu")
    task, trained = f"{clusters / 'clusters.toml'}:clusters-5shot", work.home.trained
    first = api.run(Weighed, task, work=work)
    (folder,) = (path for path in trained.iterdir() if path.is_dir())
    made = (folder / "checkpoint.json").stat().st_mtime_ns
    api.run(Weighed, task, work=work, rerun=True)
    assert (folder / "checkpoint.json").stat().st_mtime_ns == made
    second = api.run(Weighed, task, work=work, retrain=True)
    assert second.episodes == first.episodes
    kept = trained / f"{folder.name}.replaced-0"
    assert (kept / "checkpoint.json").stat().st_mtime_ns == made
    assert (folder / "checkpoint.json").stat().st_mtime_ns > made
