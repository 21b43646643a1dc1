"""``ifsl-bench tasks NAME``: what a task is, in the words of its definition."""

from __future__ import annotations

import json

import pytest

from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.store.result_folder import packaged_results_folder


@pytest.mark.parametrize(
    "name", ["glyphs-shared-5shot", "glyphs-regular-5shot", "mini-1shot", "glyphs-sessions", "cub-sessions-published"]
)
def test_a_task_says_what_it_is(name, call, tmp_path):
    task = packaged_tasks()[name]
    status, out, err = call("tasks", name, "--home", str(tmp_path), "--format", "json")
    assert (status, err) == (0, "")
    (sheet,) = json.loads(out)
    assert sheet["task"] == f"{name}: {task.title}"
    if task.sessions:
        spec = task.sessions
        assert sheet["sessions"].startswith(f"{spec.count} sessions of {spec.ways} ways, {task.shots} ")
    else:
        assert sheet["episode"].startswith(f"{task.episode.ways} ways, {task.shots} shot")
        assert ("no base classes" in sheet["episode"]) == (not task.has_base) == ("base" not in sheet)
    assert ("hidden base classes in place" in sheet["evaluation"]) == bool(task.sessions and task.sessions.listed)
    assert sheet["definition"] == task.hash
    assert sheet["backbone"].startswith(task.pretraining.backbone)
    stored = {path.name.rpartition(".seed-")[0] for path in packaged_results_folder().glob(f"{name}/*.json")}
    rows = {label for label in stored if ".recipe=" not in label}  # on the backbone of the task
    assert (f"{len(rows)} measured row" in sheet["results"]) == bool(rows)
    status, out, _ = call("tasks", "show", name, "--home", str(tmp_path))
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [key.split()[0] for key in sheet]


def test_a_changed_task_and_a_file_of_ones_own(call, here):
    status, out, _ = call("tasks", "glyphs-5shot+ways=10+base-classes=40")
    assert status == 0
    assert "10 ways, 5 shots; 50 novel queries, 50 base queries" in out
    assert "variant of     glyphs-5shot; " in out
    status, out, _ = call("tasks", "clusters.toml")
    assert status == 0
    assert out.count("\ndefinition ") == 3, "the file has three tasks"
    assert "none: the data are features" in out
    _, text, _ = call("tasks", "--home", str(here / "none"), "clusters.toml:clusters-5shot")
    assert "clusters: to be obtained" in text, "options may stand before the name"


def test_a_frozen_backbone_and_what_it_may_have_seen_are_said(call):
    pytest.importorskip("timm")
    status, out, _ = call("tasks", "cub-5shot+backbone=timm:resnet18.a1_in1k")
    assert status == 0
    assert "timm:resnet18.a1_in1k, frozen" in out
    assert "novel classes" in out.partition("\nseen")[2].partition("\n")[0]
