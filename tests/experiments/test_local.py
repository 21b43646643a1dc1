"""Worker processes, for real: their counts are those of one process, whatever happens to them."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
import pytest
from loky.backend import resource_tracker

from ifsl_bench.experiments.backends import LokyPool, check_picklable, local_backend, parse_device_numbers
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.logs import Log, log_path, read_log
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.runner import WorkItem, run_jobs
from ifsl_bench.plugin.method import Method
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import ConsumerDisconnected, LogReporter, Reporter

# A method that learns one number. Its process is killed while it trains in a worker, as often as there are files that
# say so; and one that cannot answer more than 30 episodes at once, as no probe and no validation here asks it to.
METHODS = """
import multiprocessing, os, pathlib, signal
import torch
from torch import nn
from ifsl_bench import Method, Prediction

class Scaled(Method):
    \"\"\"Class means, at a scale that is learnt.\"\"\"

    def __init__(self, base, ways):
        super().__init__(base, ways)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, support, query):
        if self.training and multiprocessing.parent_process() is not None:
            print("a word of the method's own")
            for file in sorted(pathlib.Path("kills").glob("*"))[:1]:
                file.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        novel = self.scale * query.features @ support.class_means(self.ways).mT
        return Prediction(torch.cat([query.base_logits, novel], -1))

class Broken(Scaled):
    fault = RuntimeError("too many at once")

    def forward(self, support, query):
        if len(query.features) > 30:
            raise self.fault
        return super().forward(support, query)

class Piped(Broken):
    fault = BrokenPipeError(32, "Broken pipe", "its own")
"""
TASKS = "clusters.toml:clusters-1shot,clusters.toml:clusters-5shot"
ROWS = ["--method", "my.py:Scaled,lwof", "--task", TASKS, "--train", "steps=40", "--device", "cpu"]


def start(*arguments: str, stderr: int | IO[str] = subprocess.PIPE) -> subprocess.Popen:
    """Start a run in a process of its own, which Ctrl-C ends also where the tests run in the background."""
    signals = {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    command = [sys.executable, "-m", "ifsl_bench", "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, **signals)


def counts(results: Path) -> dict[str, object]:
    facts = {}
    for path in sorted(results.glob("*/*.json")):
        value = json.loads(path.read_text())
        trained = value["training"].get("history"), value["pretraining"]["sha256"]
        facts[f"{path.parent.name}/{path.name}"] = value["episodes"], *trained
    return facts


@pytest.fixture
def mine(here):
    (here / "my.py").write_text(METHODS)
    (here / "kills").mkdir()
    return here


@pytest.fixture
def undisturbed(mine, call):
    """The counts of one process."""
    shutil.copytree(mine / "home", mine / "home-one")
    status, _, err = call("run", *ROWS, "--results", "one", "--home", "home-one", "-q")
    assert status == 0, err
    return counts(mine / "one")


@pytest.mark.slow("workers are started")
def test_two_workers_find_what_one_process_finds_though_a_job_fails(mine, undisturbed, call):
    rows = [word.replace("lwof", "lwof,my.py:Broken") for word in ROWS]
    status, out, err = call("run", *rows, "--results", "two", "--jobs", "2", "--format", "json")
    assert status == 1
    assert counts(mine / "two") == undisturbed
    json.loads(out)  # with no word of the method's in it
    assert "2 of 6 jobs failed:" in err
    *_, first, second = err.strip().splitlines()
    for line, task in ((first, "clusters-1shot"), (second, "clusters-5shot")):
        assert line.startswith(f"  Broken.train.steps=40 on {task}, seed 0, in evaluation: method 'Broken' failed")
        log = Path(line.rsplit("(log: ", 1)[1].removesuffix(")"))
        assert re.search(
            r"Z failed .*too many at once \(ifsl-bench --traceback .*\)$", log.read_text().splitlines()[-1]
        )
    logs = mine / "home" / "logs"
    (trained,) = (logs / "result").glob("clusters-5shot-*/Scaled.*.log")
    assert "validation" in trained.read_text()
    assert read_log(trained).state_name == "done"
    assert any("a word of the method's own" in path.read_text() for path in (logs / "workers").glob("*.log"))


@pytest.mark.slow("four workers are started, two of them again")
def test_killed_workers_items_go_on_from_their_checkpoints_and_are_given_up_the_third_time(mine, undisturbed, call):
    for number in range(2):
        (mine / "kills" / str(number)).touch()
    status, _, err = call("run", *ROWS, "--results", "two", "--jobs", "2")
    assert status == 0, err
    assert counts(mine / "two") == undisturbed
    assert err.count("was killed by SIGKILL") == 2
    assert err.count("it is run again, from its last checkpoint") == 2
    texts = [path.read_text() for path in (mine / "home" / "logs" / "result").glob("*/Scaled*")]
    assert sum(text.count("Z begun ") for text in texts) == 2 + 2, "two, and two once more"
    for number in range(3):
        (mine / "kills" / str(number)).touch()
    words = ["--method", "my.py:Scaled,protonet", *ROWS[2:], "--retrain", "--results", "three", "--jobs", "2", "-q"]
    status, _, err = call("run", *[word.replace(TASKS, TASKS.split(",")[0]) for word in words])
    assert status == 1
    assert "1 of 2 jobs failed" in err
    assert ": its worker was killed by SIGKILL, perhaps for want of memory, 3 times (log: " in err
    assert len(counts(mine / "three")) == 1


def children(process: subprocess.Popen, count: int) -> list[psutil.Process]:
    """The workers of a command, once there are so many."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with suppress(psutil.Error):  # one of them may have ended since it was listed
            workers = [p for p in psutil.Process(process.pid).children() if "popen_loky" in " ".join(p.cmdline())]
            if len(workers) == count:
                return workers
        time.sleep(0.02)
    raise AssertionError("the workers never came")


def wait_for_checkpoints(home: Path, count: int) -> None:
    end = time.monotonic() + 120
    while len(list(home.glob("trained/*/checkpoint.json"))) < count:
        assert time.monotonic() < end
        time.sleep(0.02)


LONG = ["--method", "lwof", "--task", TASKS, "--train", "steps=15000", "--device", "cpu", "--jobs", "2", "-v"]


@pytest.mark.slow("workers are started twice, and train for a while")
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_the_death_of_the_parent_ends_all_workers_without_a_word_and_loses_no_checkpoint(mine):
    with open("errors", "w+") as errors:
        process = start(*LONG, stderr=errors)
        workers = children(process, 2)
        wait_for_checkpoints(mine / "home", 2)
        before = errors.tell()
        process.kill()
        process.communicate(timeout=120)
        tracker = [p for p in psutil.process_iter(["cmdline"]) if str(mine) in " ".join(p.info["cmdline"] or ())]
        assert not psutil.wait_procs([*workers, *tracker], timeout=60)[1]
        time.sleep(1)  # the tracker of semaphores ends after them
        assert "Warning" not in Path("errors").read_text()[before:]
    process = start(*LONG)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert len(re.findall(r"meta-training lwof\S*, seed 0: resumed at [1-9]", err)) == 2


class OfANotebook(Method):
    def forward(self, support, query): ...


OfANotebook.__module__ = "__main__"


def test_a_method_that_workers_cannot_find_is_refused_in_one_line(here, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "OfANotebook", OfANotebook, raising=False)
    (job,) = make_jobs(RunConfig([OfANotebook], ["clusters.toml:clusters-1shot"]))
    with pytest.raises(UserError, match=r"file.py:OfANotebook\), or run with --jobs 1"):
        check_picklable([job])
    check_picklable(make_jobs(RunConfig(["protonet"], ["clusters.toml:clusters-1shot"])))


def test_devices_are_numbers_and_ranges():
    assert parse_device_numbers("0-2,5") == [0, 1, 2, 5]
    for wrong in ("", "a", "1,1", "3-1", "0,3-1", "-1", "0-", "0;1", "1-2-3", "999999999"):
        with pytest.raises(UserError, match="--devices takes numbers"):
            parse_device_numbers(wrong)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cluster", "tcp://127.0.0.1:9", "--jobs", "2"], "leave out --jobs and --devices"),
        (["--cluster", "tcp://127.0.0.1:9", "--devices", "0"], "leave out --jobs and --devices"),
        (["--devices", "0-7", "--jobs", "1"], "leaves some of --devices 0-7 without a worker"),
        (["--devices", "0-99"], "PyTorch sees"),
        (["--devices", "0", "--device", "cpu"], "leave one of them out"),
    ],
)
def test_options_that_cannot_be_together_are_refused_before_anything_is_made(more, message, here, call, monkeypatch):
    if "--cluster" in more:
        pytest.importorskip("distributed", reason="the extra is not installed")
    monkeypatch.setattr("ifsl_bench.experiments.runner.prepare_from_paths", None)
    monkeypatch.setattr("ifsl_bench.experiments.plan.plan_jobs", None)
    arguments = "--method", "protonet", "--task", "clusters.toml:clusters-1shot", "--home", "home"
    for dry in ((), ("--dry-run",)):
        status, out, err = call("run", *arguments, *more, *dry)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_workers_that_cannot_start_are_given_up(here, monkeypatch, work):
    """As where a library that they import is broken."""
    jobs = make_jobs(RunConfig(["protonet"], ["clusters.toml:clusters-1shot"]))
    resource_tracker.ensure_running()  # which is started in the same way
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(UserError, match="its worker ended with status 1, 3 times"):
        run_jobs(jobs, work, LokyPool(work.reporter, 2, []))


def test_cores_are_shared_and_what_takes_the_whole_machine_runs_alone(monkeypatch):
    monkeypatch.setattr("ifsl_bench.utils.threads.whole_machine_threads", lambda: 8)
    pool = LokyPool(Reporter(), 3, [])
    assert [worker.threads for worker in pool.workers] == [2, 2, 2]
    whole, part = WorkItem("pretraining/x", "", needs_whole_machine=True), WorkItem("result/x", "")
    assert pool._can_take_item(pool.workers[0], whole)
    pool.workers[1].running_item = part
    assert pool._can_take_item(pool.workers[0], part)
    assert not pool._can_take_item(pool.workers[0], whole)
    pool.workers[1].running_item = whole
    assert not pool._can_take_item(pool.workers[0], part)


def test_processes_get_accelerators_in_turn(monkeypatch, work):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    pool = local_backend([], work, "cuda", 3, "0,1")
    assert [worker.device for worker in pool.workers] == ["4", "6", "4"]
    assert [worker.device for worker in local_backend([], work, "auto", None, "1").workers] == ["6"]


def test_a_broken_pipe_of_a_methods_own_is_its_failure_and_stops_nothing_else(mine, call):
    methods = "--method", "my.py:Piped,imprint", "--train", "steps=5"
    arguments = *methods, "--task", "clusters.toml:clusters-5shot"
    status, _, err = call("run", *arguments, "--home", "home", "--device", "cpu")
    assert status == 1
    assert "Broken pipe" in err.splitlines()[-1]
    assert "run again" not in err
    assert len(list(Path("home/results").rglob("imprint*.json"))) == 1
    assert "2 jobs: 1 stored, 1 failed" in call("status", *arguments, "--home", "home")[1]


class Closed(io.StringIO):
    """Its reader is gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def test_a_run_that_nobody_listens_to_any_more_ends_and_has_not_failed(here):
    home = Paths.locate(here / "home")
    log = Log(home, LogReporter(Closed()))
    with pytest.raises(ConsumerDisconnected), log.open_log_of_item("dig/1", "it"):
        log.say("a word")
    assert read_log(log_path(home, "dig/1")).state_name == "interrupted"
