"""A campaign's planned stages and progress: `plan` and `status`."""

from __future__ import annotations

import json
import os
import platform
import re
import time

import pytest

from ifsl_bench import api
from ifsl_bench.experiments.campaign_file import load_configs
from ifsl_bench.experiments.job import expand_configs
from ifsl_bench.experiments.logs import SILENT_SECONDS, log_path, read_log
from ifsl_bench.experiments.run_config import RunConfig, find_tasks
from ifsl_bench.experiments.runner import divide_into_work_items, result_item_key
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.utils.locks import is_process_alive, make_process_name

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


@pytest.mark.slow("plans of many jobs")
def test_a_plan_says_what_is_missing_and_stages_that_jobs_share_are_counted_once(campaign, call):
    before = sorted(campaign.rglob("*"))
    document = planned(call)
    assert sorted(campaign.rglob("*")) == before, "nothing is made"
    assert len(document["jobs"]) == 2 * 2 * 2
    assert {job["state"] for job in document["jobs"]} == {"to do"}
    assert document["missing"] == {"pretraining": 2 * 2, "meta-training": 2 * 2, "evaluation": 8}, (
        "of each head and seed"
    )
    status, out, _ = call("plan", "c.toml", "--device", "cpu")
    assert status == 0
    assert "8 jobs: 0 stored, 8 to do" in out
    assert re.search(r"lwof.train.steps=20 on clusters-5shot, seeds 0, 1 +to do +pretraining, meta-training, eval", out)
    part = ("--task", "clusters.toml:clusters-1shot", "--seeds", "1")
    assert call("run", "c.toml", *part, "--device", "cpu", "-q")[0] == 0
    after = planned(call, *part)
    assert {job["state"] for job in after["jobs"]} == {"stored"}
    assert after["missing"] == {}
    assert planned(call, *part, "--rerun")["missing"] == {"evaluation": 2}
    assert planned(call, *part, "--retrain")["missing"] == {"meta-training": 1, "evaluation": 2}


def test_a_plan_has_the_cost_of_the_stored_row_and_its_device(campaign, call):
    options = ("--method", "protonet", "--task", "clusters.toml:clusters-5shot", "--device", "cpu")
    (job,) = planned_jobs(call, *options)
    assert job["took"] == {}
    assert call("run", *options, "-q")[0] == 0
    result = json.loads(next((campaign / "home" / "results").rglob("protonet.seed-0.json")).read_text())
    (job,) = planned_jobs(call, *options, "--rerun")
    cost = {"seconds": result["cost"]["evaluation_seconds"], "on": result["provenance"]["device"]}
    assert job["took"]["evaluation"] == cost
    packaged = json.loads((packaged_results_folder() / "glyphs-5shot" / "lr+a.seed-0.json").read_text())
    (job,) = planned_jobs(call, "--method", "lr+a", "--task", "glyphs-5shot")
    assert job["took"]["meta-training"]["seconds"] == packaged["cost"]["training_seconds"]
    assert job["took"]["pretraining"]["on"] == packaged["places"]["pretraining"]


def planned_jobs(call, *options):
    status, out, err = call("plan", *options, "--format", "json")
    assert (status, err) == (0, "")
    return json.loads(out)["jobs"]


def test_a_plan_says_what_is_out_of_date_and_why(campaign, call):
    assert call("run", "c.toml", "--method", "protonet", "--seeds", "1", "--device", "cpu", "-q")[0] == 0
    text = (campaign / "clusters.toml").read_text()
    (campaign / "clusters.toml").write_text(text.replace("seed = 0", "").replace("episodes = 60", "episodes = 50"))
    document = planned(call, "--method", "protonet", "--seeds", "1")
    for job in document["jobs"]:
        assert job["state"] == "out of date"
        assert "changed: task" in job["why"]
    _, out, _ = call("plan", "c.toml", "--method", "protonet", "--seeds", "1", "--device", "cpu")
    assert "and 1 more: out of date: changed: task" in out
    _, out, _ = call("status", "c.toml", "--method", "protonet", "--seeds", "1")
    assert "2 jobs: 0 stored, 2 out of date" in out


def test_data_that_are_missing_are_planned_by_their_published_numbers(call, tmp_path):
    options = ("--method", "protonet", "--task", "mini-5shot", "--device", "cpu")
    status, out, _ = call("plan", *options)
    assert status == 0
    assert "missing" in out
    assert "It needs the five files" in out
    assert re.search("protonet on mini-5shot, seed 0 +data missing +data, pretraining, features, evaluation", out)
    (tmp_path / "five").mkdir()
    (tmp_path / "five" / "miniImageNet_category_split_val.pickle").touch()
    made_from = ("--data", f"mini-imagenet={tmp_path / 'five'}")
    for command in (("plan", *options), ("run", *options, "--dry-run")):
        status, out, _ = call(*command, *made_from)
        assert status == 0
        assert f"data set mini-imagenet: made from {tmp_path / 'five'} first" in out
    assert "unknown data set 'mini' of these tasks" in call("plan", *options, "--data", "mini=x")[2]
    assert "there is no /nowhere" in call("plan", *options, "--data", "mini-imagenet=/nowhere")[2]
    status, out, _ = call("run", *options, "--dry-run")
    assert status == 2, "a run would be refused"
    assert "1 job: 0 stored, 1 data missing" in out
    assert "It needs the five files" in out
    (tmp_path / "other" / "n01532829").mkdir(parents=True)
    (tmp_path / "other" / "n01532829" / "a.txt").touch()
    for command in (("plan", *options), ("run", *options, "--dry-run")):
        status, out, err = call(*command, "--data", f"mini-imagenet={tmp_path / 'other'}")
        assert (status, out) == (2, "")
        assert "has none of the forms of data set 'mini-imagenet': it holds n01532829/a.txt" in err


def log(path, *lines: str) -> None:
    """Write the lines of a log, a second apart, each a kind and a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"2026-01-31T12:00:{i:02}Z {line}\n" for i, line in enumerate(lines)))


def begun(host: str, writer: str = "node7.01234567-1-1", title: str = "meta-training lwof") -> str:
    return f"begun {host} {writer} {title}"


def test_status_reads_what_runs_where_since_when_and_how_far_and_what_failed(campaign, call):
    work = api.workspace(device="cpu")
    jobs, _ = expand_configs(find_tasks(load_configs("c.toml", RunConfig()))[0], work.reporter)
    assert call("run", "c.toml", "--method", "protonet", "--seeds", "1", "--device", "cpu", "-q")[0] == 0
    training = [job for job in jobs if job.is_meta_trained]
    paths = [log_path(work.home, result_item_key(job, work.home)) for job in training]
    machine = make_process_name().rsplit("-", 2)[0]
    log(paths[0], begun(platform.node(), make_process_name()), "-   meta-training lwof: 7/20  loss 2")
    log(paths[1], begun("elsewhere"), "- the inner solve", "failed it diverged")
    log(paths[2], begun(platform.node(), f"{machine}-999999999-1"), "-   meta-training lwof: 3/20")
    log(paths[3], begun("elsewhere"), "failed x", begun("node7", title="another"))
    status, out, err = call("status", "c.toml", "--format", "json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["summary"] == "8 jobs: 2 stored, 2 running, 1 failed, 3 to do"
    states = {(job["label"], job["task"], job["seed"]): job for job in document["jobs"]}
    of = [states[job.label, job.task.name, job.seed] for job in training]
    assert [job["state"] for job in of] == ["running", "failed", "to do", "running"]
    assert (of[0]["where"], of[0]["since"]) == (platform.node(), "2026-01-31T12:00:00Z")
    assert of[0]["why"] == "meta-training lwof: 7/20  loss 2"
    assert of[1]["why"] == "failed: it diverged"
    assert "interrupted" in of[2]["why"], "no process of that number is here"
    assert of[3]["where"] == "node7", "it failed there once, and runs again"
    os.utime(paths[3], (time.time() - 10 * SILENT_SECONDS,) * 2)
    _, out, _ = call("status", "c.toml")
    assert "no line for 20 min: it may have been killed" in out
    assert "8 jobs: 2 stored, 2 running, 1 failed, 3 to do" in out
    assert str(paths[1]) in out


def test_jobs_wait_for_an_item_that_they_share(campaign, call):
    """Pretraining that fails is told of each job that needs it."""
    work = api.workspace(device="cpu")
    jobs, _ = expand_configs(find_tasks(load_configs("c.toml", RunConfig()))[0], work.reporter)
    (item,) = (item for item in divide_into_work_items({0: jobs[0]}, work)[1] if item.log_key.startswith("pretraining"))
    log(log_path(work.home, item.log_key), begun("elsewhere"), "failed no such weights")
    sharing = [job for job in jobs if (job.method.head, job.seed) == (jobs[0].method.head, jobs[0].seed)]
    _, out, _ = call("status", "c.toml")
    assert f"8 jobs: 0 stored, {len(sharing)} failed" in out


def test_a_stage_does_not_run_while_the_number_of_its_process_is_anothers(tmp_path):
    name, began = make_process_name().rsplit("-", 1)
    log(tmp_path / "who.log", begun("here", f"{name}-{int(began) - 60}"))
    assert read_log(tmp_path / "who.log").state_name == "interrupted"


def test_plans_and_states_have_every_format(campaign, call):
    for command in ("plan", "status"):
        for style, sign in (("csv", ","), ("markdown", "|"), ("latex", "&")):
            status, out, err = call(command, "c.toml", "--format", style)
            assert (status, sign in out) == (0, True), err


def test_a_stage_runs_however_long_its_log_has_grown(tmp_path):
    path = tmp_path / "x.log"
    log(path, begun("h"), *["- " + "." * 10_000] * 200)
    assert read_log(path).host_name == "h"


def test_a_file_that_is_no_log_has_no_state(tmp_path):
    path = tmp_path / "x.log"
    for content in (b"", b"\xff\xfe\0", b"now failed it\n", b"now begun here\n", b"[" * 100_000):
        path.write_bytes(content)
        assert read_log(path) is None
    assert read_log(tmp_path / "none.log") is None
    log(path, begun("h"), "- \x1b[2J")
    path.write_bytes(path.read_bytes() + b"2026-01-31T12:00:0")  # whose process died in the middle of a line
    assert read_log(path).last_line == "\\x1b[2J"


@pytest.mark.parametrize("end", ["", "-x-1", "-1-x", f"-{10**30}-1"])
def test_a_damaged_log_does_not_say_whether_its_writer_is_alive(end):
    assert not is_process_alive(make_process_name().rsplit("-", 2)[0] + end)
