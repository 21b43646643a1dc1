"""kill -9, Ctrl-C, two runs at once and a full disk, for real: in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
COMMAND = ["--method", "lwof", "--device", "cpu", "--train", "steps=40", "-v"]


def start(home: Path, task: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "ifsl_bench", "run", *COMMAND, "--task", task, "--home", str(home)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Whoever runs the tests in the background may have had Ctrl-C ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out + err


def counts(home: Path) -> dict:
    (path,) = (home / "results").glob("*/lwof*.json")
    value = json.loads(path.read_text())
    return {"episodes": value["episodes"], "training": value["training"], "sha": value["pretraining"]["sha256"]}


def wait_for(process: subprocess.Popen, home: Path, pattern: str, timeout: float = 240) -> bool:
    """Until a file like ``pattern`` appears; False if the process ended first."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if any(home.glob(pattern)):
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    raise AssertionError(f"{pattern} never appeared")


@pytest.fixture(scope="module")
def undisturbed(glyphs_source, made_once):
    """The numbers of a run that nobody disturbs, on letters that were rendered before."""

    def fill(root: Path) -> None:
        shutil.copytree(glyphs_source / "home", root / "home")
        text = (glyphs_source / "few.toml").read_text().replace("steps = 6", "steps = 170")  # one epoch and a bit
        text = text.replace("\nepisodes = 40", "\nepisodes = 2000")  # long enough to be hit
        (root / "few.toml").write_text(text)
        finish(start(root / "home", f"{root / 'few.toml'}:few-1shot"))

    return made_once("undisturbed", fill)


def stop(process: subprocess.Popen, number: int = signal.SIGKILL) -> str:
    """Sends a signal and waits for the end; what was printed."""
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    return out + err


@pytest.mark.slow("seven runs, all but the last two stopped on the way from rendering to the result")
def test_stopped_in_every_stage_and_beside_another_run_it_ends_with_the_same_numbers(undisturbed, tmp_path):
    """One home: runs are killed, or stopped with Ctrl-C, as soon as a stage has begun; the last two end, at once."""
    home, task = tmp_path / "home", f"{undisturbed / 'few.toml'}:few-1shot"

    process = start(home, task)
    assert wait_for(process, home, "data/.partial-glyphs/*.npy")
    stop(process)

    process = start(home, task)
    assert wait_for(process, home, "pretrained/*/checkpoint.json")
    log = stop(process, signal.SIGINT)
    assert process.returncode == 130
    assert "the same command goes on from where it stopped" in log
    assert "Traceback" not in log

    first, second = start(home, task), start(home, task)
    assert wait_for(second, home, "features/*/.partial-*/features.npy")
    log = stop(first)
    assert wait_for(second, home, "trained/*/checkpoint.json"), "it takes over what the other had begun"
    log += stop(second)
    assert "(resumed at" in log
    assert "another process is working on" in log
    assert log.count("pretraining resnet-small, cosine head, seed 0: done") == 1

    process = start(home, task)
    assert any(line.startswith("evaluating") for line in process.stderr)
    stop(process)
    assert not list((home / "results").glob("*/*.json"))

    processes = [start(home, task), start(home, task)]
    for log in [finish(process) for process in processes]:
        assert "pretraining resnet-small" not in log
        assert "meta-training" not in log
    assert counts(home) == counts(undisturbed / "home")
    assert not [*home.rglob(".partial-*"), *home.rglob(".removed-*")]


def limited(megabytes: int, arguments: list[str]) -> subprocess.CompletedProcess:
    """Runs with a limit on the size of files, which refuses writes as a full disk does."""
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes << 20, megabytes << 20))

    return subprocess.run([sys.executable, "-m", "ifsl_bench", *arguments], capture_output=True, text=True,
                          preexec_fn=limit, timeout=120)  # fmt: skip


def test_refused_writes_leave_nothing_half_written(tmp_path):
    process = limited(4, ["data", "prepare", "glyphs", "--home", str(tmp_path / "home"), "-q"])
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    assert "cannot write" in process.stderr
    assert not [p for p in (tmp_path / "home").rglob("*") if not p.name.endswith(".lock") and p.is_file()]
