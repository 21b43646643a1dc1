"""A campaign's planned stages and progress: `plan` and `status`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import time

import msgspec
import pytest
from ifsl_bench.experiments.graph import graph_of

from ifsl_bench.experiments import api, meta_training
from ifsl_bench.experiments.expansion import asked, jobs_of, with_tasks
from ifsl_bench.experiments.logs import Event, log_path
from ifsl_bench.experiments.request import Request
from ifsl_bench.experiments.status import SILENT, read_log
from ifsl_bench.utils.tempnames import writer, writes_still

CAMPAIGN = """
[[run]]
methods = ["protonet", "lwof"]
tasks = "clusters.toml:clusters-?shot"
seeds = 2
train = { steps = 20 }
"""


@pytest.fixture
def campaign(here):
    (here / "c.toml").write_text(CAMPAIGN)
    return here


def planned(call, *more):
    status, out, err = call("plan", "c.toml", "--device", "cpu", "--format", "json", *more)
    assert (status, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize(("task", "told"), [("mini-sessions", True), ("tiered-5shot", False), ("glyphs-5shot", False)])
def test_a_plan_without_the_data_says_that_the_package_may_have_the_weights(here, call, task, told):
    """It has none for tiered-ImageNet; whether it has those for letters is known, whose images it renders itself."""
    _, out, _ = call("plan", "--method", "lr", "--task", task)
    assert ("is the data set of the package's weights" in out) == told
    assert ("no time if mini-imagenet-sessions is" in out) == told


def test_a_plan_is_the_graph_with_what_is_cached_and_a_total(campaign, call):
    before = sorted(campaign.rglob("*"))
    document = planned(call)
    assert sorted(campaign.rglob("*")) == before, "nothing is made"
    assert len(document["jobs"]) == 2 * 2 * 2
    nodes = {node["key"]: node for node in document["nodes"]}
    assert len(nodes) == len(document["nodes"])
    assert all(needed in nodes for node in nodes.values() for needed in node["needs"])
    kinds = [node["kind"] for node in document["nodes"] if node["state"] == "to do"]
    assert kinds.count("pretraining") == 2 * 2, "of each head and seed one, for both tasks"
    assert kinds.count("meta-training") == 2 * 2
    assert kinds.count("evaluation") == 8
    assert [node["state"] for node in nodes.values() if node["kind"] == "data"] == ["cached"]
    # Three decimals.
    assert document["seconds"] == pytest.approx(
        sum(node["seconds"] or 0 for node in nodes.values()), abs=5.1e-4 * (len(nodes) + 1)
    )
    status, out, _ = call("plan", "c.toml", "--device", "cpu")
    assert status == 0
    assert "8 jobs: 0 stored, 8 to do" in out
    assert "total: about" in out
    assert "meta-training lwof.train.steps=20 on clusters-5shot, seeds 0 to 1: 20 steps" in out
    part = ("--task", "clusters.toml:clusters-1shot", "--seeds", "1")
    assert call("run", "c.toml", *part, "--device", "cpu", "-q")[0] == 0
    after = planned(call, *part)
    assert {job["state"] for job in after["jobs"]} == {"cached"}
    assert (after["nodes"], after["seconds"]) == ([], 0)


def test_a_plan_says_what_is_out_of_date_and_why(campaign, call):
    assert call("run", "c.toml", "--method", "protonet", "--seeds", "1", "--device", "cpu", "-q")[0] == 0
    text = (campaign / "clusters.toml").read_text()
    (campaign / "clusters.toml").write_text(text.replace("seed = 0", "").replace("episodes = 60", "episodes = 50"))
    document = planned(call, "--method", "protonet", "--seeds", "1")
    for job in document["jobs"]:
        assert job["state"] == "to do"
        assert "changed: task" in job["why"]
    _, out, _ = call("plan", "c.toml", "--method", "protonet", "--seeds", "1", "--device", "cpu")
    assert "and 1 more: out of date: changed: task" in out
    _, out, _ = call("status", "c.toml", "--method", "protonet", "--seeds", "1")
    assert "0 of 2 jobs done, 2 out of date" in out


def test_times_are_guesses_until_such_stages_have_run_here(campaign, call, tmp_path):
    options = ("--method", "protonet", "--task", "clusters.toml:clusters-5shot", "--device", "cpu")
    _, out, _ = call("plan", *options)
    assert re.search(r"total: about .*\n\d+ of the times are coarse guesses", out)
    assert call("run", *options, "-q")[0] == 0
    measured = json.loads((campaign / "home" / "logs" / "rates.json").read_text())
    result = json.loads(next((campaign / "home" / "results").rglob("protonet.seed-0.json")).read_text())
    (rate,) = measured["answering episodes"].values()
    assert rate >= result["cost"]["evaluation_seconds"] / (60 + 10), "the whole stage, of test and validation episodes"
    status, out, _ = call("plan", *options, "--rerun", "--format", "json")
    (evaluation,) = (node for node in json.loads(out)["nodes"] if node["kind"] == "evaluation")
    assert (status, evaluation["seconds"]) == (0, pytest.approx(rate * (60 + 10), abs=1e-3))
    _, out, _ = call("plan", *options, "--rerun")
    assert "guesses" not in out


def test_a_long_plan_has_tasks_together(campaign, call):
    options = "plan", "--method", "paper", "--task", "glyphs-?shot,glyphs-shared-?shot", "--seeds", "2"
    _, out, _ = call(*options, "--device", "cpu")
    _, full, _ = call(*options, "--device", "cpu", "--full")
    assert "trials of lr on 4 tasks" in out
    assert "meta-training lr+a on 4 tasks" in out
    assert "evaluating on 4 tasks" in out
    assert "Tasks share lines here; --full has a line for each." in out
    assert "--full has" not in full
    assert "trials of lr on glyphs-shared-1shot" in full
    assert len(out.splitlines()) < 50 < len(full.splitlines())

    def counts(text: str) -> int:
        return sum(int(n.replace(",", "")) for n in re.findall(r"  ([\d,]+) to do\b", text)) + text.count("  to do")

    assert counts(out) == counts(full), "nothing is lost"
    assert out.split("total:")[1] == full.split("total:")[1]


def test_what_was_begun_takes_the_rest_of_the_time(campaign, call, monkeypatch):
    """A meta-training that was stopped at a checkpoint."""
    options = ("--method", "lwof", "--task", "clusters.toml:clusters-5shot", "--train", "steps=4000", "--device", "cpu")

    def seconds() -> float:
        status, out, _ = call("plan", *options, "--format", "json")
        assert status == 0
        (training_seconds,) = (node["seconds"] for node in json.loads(out)["nodes"] if node["kind"] == "meta-training")
        return training_seconds

    whole = seconds()

    save, saved = meta_training.Course._save, []

    def stop(*arguments):  # before the second checkpoint is saved
        if saved:
            raise KeyboardInterrupt
        saved.append(save(*arguments))

    monkeypatch.setattr(meta_training.Course, "_save", stop)
    assert call("run", *options, "-q")[0] == 130
    (info,) = (json.loads(path.read_text()) for path in campaign.glob("home/trained/*/checkpoint.json"))
    assert not info["finished"]
    assert seconds() == pytest.approx(whole * (1 - info["step"] / 4000), rel=1e-3)
    assert info["step"] > 0


def test_data_that_are_missing_are_planned_by_their_published_numbers(call, tmp_path):
    options = ("--method", "protonet", "--task", "mini-5shot", "--device", "cpu")
    status, out, _ = call("plan", *options)
    assert status == 0
    assert "missing" in out
    assert "It needs the five files" in out
    assert "grows by about 2.3 GB" in out, "97,948 images of 84 x 84 x 3, and 512 features each"
    (tmp_path / "five").mkdir()
    made_from = ("--data", f"mini-imagenet={tmp_path / 'five'}")
    for command in (("plan", *options), ("run", *options, "--dry-run")):
        status, out, _ = call(*command, *made_from)
        assert status == 0
        assert f"data set mini-imagenet: made from {tmp_path / 'five'} first" in out
    assert "unknown data set 'mini' of these tasks" in call("plan", *options, "--data", "mini=x")[2]
    assert "there is no /nowhere" in call("plan", *options, "--data", "mini-imagenet=/nowhere")[2]
    status, _, err = call("run", *options, "--dry-run")
    assert status == 2, "a run would be refused"
    assert "It needs the five files" in err


def log(path, *events: tuple[str, dict]) -> None:
    """Writes a log of events, a second apart; another machine's process wrote them, unless they say who."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noon = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    entries = [Event(noon + datetime.timedelta(seconds=i), kind, **facts) for i, (kind, facts) in enumerate(events)]
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in entries))


def begun(host: str, by: str = "node7.01234567-1-1", title: str = "meta-training lwof") -> tuple[str, dict]:
    return "begun", {"text": title, "host": host, "writer": by}


def at(step: int, **figures: float) -> tuple[str, dict]:
    return "advance", {"text": "meta-training lwof", "done": step, "total": 20, "figures": figures}


def test_status_reads_what_runs_where_since_when_and_how_far_and_what_failed(campaign, call):
    work = api.workspace(device="cpu")
    full_campaign, _ = with_tasks(asked("c.toml", Request()), work.home)
    jobs = jobs_of(full_campaign, work.home, print, print)[0]
    assert call("run", "c.toml", "--method", "protonet", "--seeds", "1", "--device", "cpu", "-q")[0] == 0
    graph = graph_of(jobs, work)
    training = [node for node in graph.nodes.values() if node.stage.kind == "meta-training"]
    paths = [log_path(work.home, node.key) for node in training]
    machine = writer().rsplit("-", 2)[0]
    log(paths[0], begun(platform.node(), writer()), at(7, loss=2.0))
    log(paths[1], begun("elsewhere"), ("say", {"text": "the inner solve"}), ("failed", {"text": "it diverged"}))
    log(paths[2], begun(platform.node(), f"{machine}-999999999-1"), at(3))
    log(paths[3], begun("elsewhere"), ("failed", {"text": "x"}), begun("node7"))
    status, out, err = call("status", "c.toml", "--format", "json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["summary"] == "2 of 8 jobs done, 2 running, 1 failed, 3 missing"
    states = {(job["label"], job["task"], job["seed"]): job for job in document["jobs"]}
    of = [
        states[jobs[node.results[0]].label, jobs[node.results[0]].task.name, jobs[node.results[0]].seed]
        for node in training
    ]
    assert [job["state"] for job in of] == ["running", "failed", "missing", "running"]
    assert (of[0]["where"], of[0]["since"]) == (platform.node(), "2026-01-31T12:00:00Z")
    assert of[0]["last"] == "meta-training lwof: 7/20  loss 2"
    assert of[1]["why"] == "failed: it diverged"
    assert "interrupted" in of[2]["why"], "no process of that number is here"
    assert of[3]["where"] == "node7", "it failed there once, and runs again"
    os.utime(paths[3], (time.time() - 10 * SILENT,) * 2)
    _, out, _ = call("status", "c.toml")
    assert "no word for 20 min: it may have been killed" in out
    assert "2 of 8 jobs done, 2 running, 1 failed, 3 missing" in out
    assert str(paths[1]) in out


def test_a_stage_does_not_run_while_the_number_of_its_process_is_anothers(tmp_path):
    name, began = writer().rsplit("-", 1)
    log(tmp_path / "who.log", begun("here", f"{name}-{int(began) - 60}"))
    assert read_log(tmp_path / "who.log").state == "interrupted"


def test_plans_and_states_have_every_format(campaign, call):
    for command in ("plan", "status"):
        for style, sign in (("csv", ","), ("markdown", "|"), ("latex", "&")):
            status, out, err = call(command, "c.toml", "--format", style)
            assert (status, sign in out) == (0, True), err


def test_a_stage_runs_however_long_its_log_has_grown(tmp_path):
    path = tmp_path / "x.log"
    log(path, begun("h"), *[("say", {"text": "." * 10_000})] * 200)
    assert read_log(path).begun.host == "h"


def test_a_log_that_is_no_log_says_nothing(tmp_path):
    path = tmp_path / "x.log"
    for content in (b"", b"\xff\xfe\0", b'{"kind":"failed"}\n', b'{"time":"now","kind":"begun"}\n', b"[" * 100_000):
        path.write_bytes(content)
        assert read_log(path) is None
    assert read_log(tmp_path / "none.log") is None
    log(path, begun("h"), ("say", {"text": "\x1b[2J"}))
    path.write_bytes(path.read_bytes() + b'{"time":"2026-01-31T12:00:0')  # whose process died in the middle of a line
    assert read_log(path).last == "\\x1b[2J"


@pytest.mark.parametrize("end", ["", "-x-1", "-1-x", f"-{10**30}-1"])
def test_a_damaged_log_does_not_say_whether_its_writer_is_alive(end):
    assert not writes_still(writer().rsplit("-", 2)[0] + end)
