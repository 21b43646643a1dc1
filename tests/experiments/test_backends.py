"""This process, workers of loky and workers of Dask, for real: equal counts, Ctrl-C, a full disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ifsl_bench.api import workspace
from ifsl_bench.experiments.backends import local_backend
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.runner import run_jobs
from tests.experiments.test_local import counts, start, wait_for_checkpoints
from tests.reporters import Messages

HAS_DASK = importlib.util.find_spec("distributed") is not None
BACKENDS = [
    "this process",
    "loky",
    pytest.param("dask", marks=pytest.mark.skipif(not HAS_DASK, reason="the extra is not installed")),
]
PRELOAD = """
import time

def dask_setup(worker):
    if worker.name == 0:
        real = time.time
        time.time = lambda: real() + 3600
"""
TASK = "clusters.toml:clusters-5shot"
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@pytest.fixture(params=BACKENDS)
def options(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The options of ``run`` that choose a back end."""
    (tmp_path / "two.toml").write_text('class = "LocalCluster"\n[arguments]\nn_workers = 2\n')
    choices = {"this process": [], "loky": ["--jobs", "2"], "dask": ["--cluster", str(tmp_path / "two.toml")]}
    return choices[request.param]


@pytest.mark.slow("trains twice in each back end, and starts workers twice: a minute")
@pytest.mark.skipif(not HAS_DASK, reason="the extra is not installed")
def test_counts_in_episodes_and_sessions_are_equal_in_every_back_end_though_a_workers_clock_is_wrong(here, tmp_path):
    from ifsl_bench.experiments.cluster import parse_cluster
    from ifsl_bench.experiments.dask_pool import DaskPool

    (tmp_path / "preload.py").write_text(PRELOAD)
    toml = f'class = "LocalCluster"\n[arguments]\nn_workers = 2\npreload = ["{tmp_path}/preload.py"]\n'
    (tmp_path / "clock.toml").write_text(toml)
    cluster = parse_cluster(str(tmp_path / "clock.toml"))
    config = RunConfig(["imprint", "lwof"], [TASK, "tiny-features-sessions"], {}, {"steps": "30"}, episodes=12)
    found = []
    for name in ("alone", "loky", "dask"):
        shutil.copytree("home", name)
        work = workspace(here / name, device="cpu", reporter=Messages())
        jobs = make_jobs(config, work.home)
        backend = DaskPool(cluster, work, "cpu", jobs) if name == "dask" else None
        summary = run_jobs(jobs, work, backend or local_backend(jobs, work, "cpu", 1 if name == "alone" else 2))
        assert summary.jobs_stored == jobs, summary.failure_messages
        found.append(counts(here / name / "results"))
    assert len(found[0]) == 4
    assert found[0] == found[1] == found[2]


@pytest.mark.slow("a training is begun and ended in each back end: a minute")
@posix
def test_ctrl_c_ends_a_run_in_one_line_and_the_same_command_resumes(options, here):
    command = "--method", "lwof", "--task", TASK, "--train", "steps=8000", "--device", "cpu", "-v", *options
    process = start(*command)
    wait_for_checkpoints(here / "home", 1)
    processes = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers of the same session receive it too
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "ifsl-bench: interrupted; the same command goes on from where it stopped"
    assert "Traceback" not in err
    assert not psutil.wait_procs(processes, timeout=60)[1]
    process = start(*command)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert re.search(r"meta-training lwof\S*, seed 0:? \(?resumed at [1-9]", err), err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight MiB, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow("three runs in each back end: half a minute")
def test_a_full_disk_is_one_line_and_nothing_is_lost(options, here, small_disk):
    home = small_disk / "home"
    shutil.copytree("home", home)
    words = "--task", TASK, "--train", "steps=30", "--device", "cpu", "--home", str(home), "-q"
    process = start("--method", "imprint", *words[:2], *words[4:])
    assert process.communicate(timeout=120)
    assert process.returncode == 0
    before = counts(home / "results")
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    files = {path for path in home.rglob("*") if path.is_file() and path.stat().st_size}
    process = start("--method", "lwof", *words, *options)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert re.fullmatch(r"ifsl-bench: cannot write \S+[^\n]*: the disk is full[^\n]*\n", err), err
    assert counts(home / "results") == before
    left = {path for path in home.rglob("*") if path.is_file() and not path.name.endswith(".lock")} - files
    assert not [path for path in left if path.suffix != ".log"], "no half-written file"
    (small_disk / "filler").unlink()
    process = start("--method", "lwof", *words, *options)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert len(counts(home / "results")) == 2
