"""Stages on Dask workers: who gets work, what becomes of it when something dies, and that the counts are the same."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("distributed", reason='the extra is not installed: pip install "ifsl_bench[cluster]"')

import dask
import distributed

from ifsl_bench.api import workspace
from ifsl_bench.experiments import dask_pool
from ifsl_bench.experiments.cluster import (
    ClusterSpec,
    find_unmet_requirement,
    parse_cluster,
    version,
    write_shared_requirements,
)
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.logs import DONE
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.runner import WorkOutcome, run_jobs
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin.method_source import hash_method_source
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from tests.reporters import Messages


def cluster_toml(folder: Path, text: str = "n_workers = 1", above: str = "") -> str:
    (folder / "cluster.toml").write_text(f'class = "LocalCluster"\n{above}\n[arguments]\n{text}\n')
    return str(folder / "cluster.toml")


def counts(home: Path) -> dict[str, object]:
    files = sorted((home / "results").rglob("*.json"))
    return {str(f.relative_to(home)): json.loads(f.read_text())["episodes"] for f in files}


def jobs_of(home: Path, methods: list[str], tasks: list[str], episodes: int | None = None):
    work = workspace(home, device="cpu", reporter=Messages())
    return make_jobs(RunConfig(methods, tasks, {}, {"steps": "30"}, episodes=episodes), work.home), work


# -- what is asked of a worker


@pytest.fixture
def home(tmp_path: Path) -> Paths:
    return Paths.locate(tmp_path / "home")


def test_a_worker_that_has_what_the_command_has_is_fit_and_nothing_is_left_behind(home):
    with write_shared_requirements(home) as needed:
        assert find_unmet_requirement(pickle.loads(pickle.dumps(needed))) is None
    assert list(home.cache.iterdir()) == [home.results]
    assert not list(home.results.iterdir())


def test_a_worker_without_the_home_folder_or_with_another_one_there_is_refused(home):
    with write_shared_requirements(home) as needed:
        home.cache.rename(home.cache.with_name("elsewhere"))  # as if it were not mounted
        assert f"lacks the folder {home.cache}" in find_unmet_requirement(needed)
        home.cache.with_name("elsewhere").rename(home.cache)
        for token in needed.home_tokens:
            Path(token).write_text("of another run")
        assert f"lacks the folder {home.cache} of this machine, or has another" in find_unmet_requirement(needed)


def test_of_a_home_that_cannot_be_written_to_nothing_is_asked(home, monkeypatch):
    def refused(self, text):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refused)
    with write_shared_requirements(home) as needed:
        assert find_unmet_requirement(needed) is None


def test_a_worker_with_other_code_or_versions_is_refused_and_both_are_named(home, monkeypatch):
    with write_shared_requirements(home) as needed:
        monkeypatch.setattr("ifsl_bench.experiments.cluster.source_sha256", lambda: "other")
        assert "has code of ifsl_bench other (the command: " in find_unmet_requirement(needed)
        monkeypatch.setattr(
            "ifsl_bench.experiments.cluster.environment_versions",
            lambda: {**needed.package_versions, "python": "3.10", "torch": "1.0"},
        )
        message = find_unmet_requirement(needed)
    assert f"has python 3.10 (the command: {needed.package_versions['python']}), torch 1.0 (the command: " in message
    assert "numpy" not in message


def test_a_worker_is_told_which_method_it_lacks_or_has_otherwise(home, tmp_path):
    (tmp_path / "own.py").write_text(
        "from ifsl_bench.methods.imprint import Imprint\n\nclass Own(Imprint):\n    pass\n"
    )
    (job,) = make_jobs(RunConfig([f"{tmp_path}/own.py:Own"], ["glyphs-5shot"]))
    local_method = ("Own", pickle.dumps(job.method_ref), hash_method_source(job.method))
    with write_shared_requirements(home, [local_method]) as needed:
        assert find_unmet_requirement(needed) is None
        (tmp_path / "own.py").unlink()
        assert "cannot load method Own" in find_unmet_requirement(needed)
    (job,) = make_jobs(RunConfig(["imprint"], ["glyphs-5shot"]))
    with write_shared_requirements(home, [(job.method_name, pickle.dumps(job.method_ref), "other")]) as needed:
        assert "has other code of method" in find_unmet_requirement(needed)


# -- clusters


@contextlib.contextmanager
def opened(spec: ClusterSpec, home: Paths, warn: Callable[[str], None]) -> Iterator[dask_pool.DaskPool]:
    """The workers of a cluster that is started, or connected to."""
    reporter = Messages()
    reporter.warn = warn
    workers = dask_pool.DaskPool(spec, Workspace(home, reporter=reporter), "cpu", [])
    try:
        assert workers.client
        yield workers
    finally:
        workers.close()


@pytest.mark.slow("a cluster is started")
def test_a_cluster_on_one_machine_listens_on_the_loopback_interface_alone(home, tmp_path):
    heard: list[str] = []
    with opened(parse_cluster(cluster_toml(tmp_path)), home, heard.append) as cluster:
        assert cluster.client.scheduler.address.startswith("tcp://127.0.0.1:")
    assert not heard
    with opened(parse_cluster(cluster_toml(tmp_path, 'n_workers = 1\nhost = "0.0.0.0"')), home, heard.append):
        pass
    assert len(heard) == 1
    assert "without TLS" in heard[0]


@pytest.mark.slow("a cluster is started")
def test_with_keys_a_cluster_answers_only_who_has_them(home, tmp_path):
    own = distributed.Security.temporary()
    heard: list[str] = []
    file = cluster_toml(tmp_path, 'n_workers = 1\nhost = "0.0.0.0"\nmemory_limit = "2GB"', "security = true")
    with opened(parse_cluster(file), home, heard.append) as cluster:
        address = cluster.client.scheduler.address
        assert address.startswith("tls://")
        cluster.client.wait_for_workers(1, timeout=20)
        (worker,) = cluster.client.scheduler_info()["workers"].values()
        assert worker["memory_limit"] == 2_000_000_000
        with pytest.raises(UserError, match="no scheduler answers"), opened(ClusterSpec(address), home, heard.append):
            pass
        with pytest.raises(OSError, match=r"TLS certificate does not match|Timed out"):
            distributed.Client(address, security=own, timeout=1, set_as_default=False)
    assert not heard


@pytest.mark.slow("a cluster is started")
def test_keys_of_dasks_own_settings_are_those_of_the_cluster(home, tmp_path):
    security, settings = distributed.Security.temporary(), {}
    for role in ("client", "scheduler", "worker"):
        for kind in ("cert", "key"):
            (tmp_path / f"{role}-{kind}.pem").write_text(getattr(security, f"tls_{role}_{kind}"))
            settings[f"distributed.comm.tls.{role}.{kind}"] = str(tmp_path / f"{role}-{kind}.pem")
    (tmp_path / "ca.pem").write_text(security.tls_ca_file)
    settings["distributed.comm.tls.ca-file"] = str(tmp_path / "ca.pem")
    with (
        dask.config.set({**settings, "distributed.comm.require-encryption": True}),
        opened(parse_cluster(cluster_toml(tmp_path, 'n_workers = 1\nhost = "0.0.0.0"')), home, print) as cluster,
    ):
        address = cluster.client.scheduler.address
        assert address.startswith("tls://")
        with opened(parse_cluster(address), home, print) as second_cluster:
            assert second_cluster.client.submit(os.getpid).result() != os.getpid()


def test_keys_of_jobs_are_removed_with_the_cluster_also_where_no_job_is_taken(home, tmp_path, monkeypatch):
    """Not only when Python takes the cluster apart, which a command that ends does not wait for."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    file = tmp_path / "slurm.toml"
    file.write_text('class = "SLURMCluster"\nsecurity = true\n[arguments]\nn_workers = 1\ncores = 1\nmemory = "1GB"\n'
                    'interface = "lo"\n')  # fmt: skip
    clusters = []
    with contextlib.suppress(UserError), opened(parse_cluster(str(file)), home, lambda text: None) as cluster:
        clusters.append(cluster)
        assert len(list((home.cache / "keys").iterdir())) == 3
        cluster.update_workers()
    assert clusters
    assert not list((home.cache / "keys").iterdir())


def refused_to_open(spec: ClusterSpec, home: Paths, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)), opened(spec, home, lambda text: None):
        pass


def test_an_address_where_nobody_listens_or_what_listens_says_nothing_is_told(home, monkeypatch):
    monkeypatch.setattr("ifsl_bench.experiments.cluster.CONNECT_SECONDS", 0.5)
    refused_to_open(ClusterSpec("tcp://127.0.0.1:9"), home, "no scheduler answers at tcp://127.0.0.1:9: ")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        refused_to_open(ClusterSpec(address), home, f"no scheduler answers at {address}: TimeoutError")


def test_a_cluster_that_cannot_be_started_says_why(home, tmp_path):
    local = cluster_toml(tmp_path, 'n_workers = 1\ninterface = "none7"')
    refused_to_open(parse_cluster(local), home, "no cluster can be started of class LocalCluster: ")
    jobs = 'class = "{}"\n[arguments]\nn_workers = 1\ncores = 1\nmemory = "1GB"\n'
    (tmp_path / "c.toml").write_text(jobs.format("SLURMCluster") + 'quue = "x"')
    refused_to_open(parse_cluster(str(tmp_path / "c.toml")), home, "unexpected keyword argument 'quue'")
    (tmp_path / "c.toml").write_text(jobs.format("MoabCluster"))
    with (
        pytest.raises(UserError, match=r"MoabCluster: msub refuses a job: .*No such file"),
        opened(parse_cluster(str(tmp_path / "c.toml")), home, lambda text: None) as cluster,
    ):
        cluster.update_workers()


# -- campaigns


def on_cluster(home: Path, methods: list[str], tasks: list[str], cluster: str, episodes: int | None = None):
    jobs, work = jobs_of(home, methods, tasks, episodes)
    backend = dask_pool.DaskPool(parse_cluster(cluster), work, "auto", jobs)
    return run_jobs(jobs, work, backend), work.reporter


@pytest.mark.slow("a cluster is started")
def test_other_versions_on_the_workers_are_refused_before_anything_runs(here, tmp_path, monkeypatch):
    real = version
    versions = {"ifsl_bench": "9.9", "torch": "1.0", "numba": "0.1"}
    monkeypatch.setattr("ifsl_bench.experiments.cluster.version", lambda name: versions.get(name) or real(name))
    with pytest.raises(UserError) as error:
        on_cluster(here / "home", ["imprint"], ["clusters.toml:clusters-5shot"], cluster_toml(tmp_path))
    assert re.search(r"worker tcp://\S+ on \S+ has ifsl_bench \S+ \(the command: 9.9\), torch", str(error.value))
    assert "numpy" not in str(error.value)
    assert not (here / "home" / "logs").exists() or not list((here / "home" / "logs").rglob("result/*"))


def test_a_campaign_that_is_done_starts_no_cluster(here, tmp_path, monkeypatch):
    jobs, work = jobs_of(here / "home", ["imprint"], ["clusters.toml:clusters-5shot"])
    run_jobs(jobs, work)
    monkeypatch.setattr(dask_pool, "connect_to_scheduler", None)
    ended, _ = on_cluster(here / "home", ["imprint"], ["clusters.toml:clusters-5shot"], cluster_toml(tmp_path))
    assert ended.jobs_stored == jobs


def test_of_two_commands_a_worker_with_two_threads_runs_one_stage_at_a_time(home, monkeypatch):
    inside, most = [], []

    def run_packed(content, *_):
        inside.append(content)
        most.append(len(inside))
        time.sleep(0.3)
        inside.remove(content)
        return WorkOutcome(DONE, content.decode())

    monkeypatch.setattr(dask_pool, "run_pickled_item", run_packed)
    how = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**how) as cluster:
        clients = [distributed.Client(cluster, set_as_default=False) for _ in range(2)]
        futures = [client.submit(dask_pool.run_on_worker, b"%d" % i, b"", 2, 2) for i, client in enumerate(clients)]
        assert [future.result(timeout=30).failure_message for future in futures] == ["0", "1"]
        for client in clients:
            client.close()
    assert most == [1, 1]


# -- a scheduler of somebody else's


class Running:
    """A scheduler and its worker, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        file, log = folder / f"scheduler-{uuid.uuid4().hex}.json", open(folder / "dask.log", "ab")  # noqa: SIM115
        common = ["--scheduler-file", str(file), "--host", "127.0.0.1", "--no-dashboard"]
        start = [sys.executable, "-m", "distributed.cli.dask_"]
        self.scheduler = subprocess.Popen([*start[:2], f"{start[2]}scheduler", *common, "--port", "0"], stderr=log)
        worker = [*start[:2], f"{start[2]}worker", *common, "--nthreads", "1", "--death-timeout", "10"]
        self.worker = subprocess.Popen(worker, stderr=log)
        for _ in range(300):
            with contextlib.suppress(OSError, ValueError):
                self.address = json.loads(file.read_text())["address"]
                return
            time.sleep(0.1)
        raise AssertionError((folder / "dask.log").read_text())

    def end(self) -> None:
        for process in (self.worker, self.scheduler):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[], Running]]:
    started: list[Running] = []

    def start() -> Running:
        started.append(Running(tmp_path))
        return started[-1]

    yield start
    for cluster in started:
        cluster.end()


def command(*arguments: str, errors=subprocess.PIPE) -> subprocess.Popen[str]:
    """A run in a process of its own, which hears Ctrl-C also where the tests run in the background."""
    line = [sys.executable, "-m", "ifsl_bench", "run", *arguments]
    hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True, **hears)


LOGS = Path("home/logs/result")


def await_(there: Callable[[], object]) -> None:
    """Waits until something is there, for 100 seconds at most."""
    until = time.monotonic() + 100
    while not there() and time.monotonic() < until:
        time.sleep(0.1)


@pytest.mark.slow("starts a scheduler, a worker and the command, twice, to train 3,000 steps: half a minute")
def test_a_scheduler_that_dies_ends_the_run_in_one_line_and_the_same_command_goes_on(running, here):
    cluster = running()
    arguments = ["--method", "lwof", "--task", "clusters.toml:clusters-5shot", "--train", "steps=3000", "--quiet"]
    first = command(*arguments, "--cluster", cluster.address)
    await_(lambda: any("meta-training lwof" in log.read_text() for log in LOGS.glob("*/*.log")))
    await_(lambda: list(Path("home/trained").glob("*/state-*")))  # a checkpoint to go on from
    cluster.scheduler.kill()
    _, err = first.communicate(timeout=60)
    assert first.returncode == 2
    assert err.strip().splitlines() == [
        f"ifsl-bench: the scheduler of {cluster.address} is gone; the same command goes on from where it stopped"
    ]
    cluster.worker.wait(60)  # it has nobody to work for
    (log,) = LOGS.glob("*/*.log")
    assert "its command has ended" in log.read_text()
    again = command(*arguments, "--cluster", running().address)
    again.communicate(timeout=200)
    assert again.returncode == 0
    assert "(resumed at" in log.read_text()


# -- what dies


@pytest.mark.slow("waits for a worker that does not end: 3 s")
def test_workers_that_do_not_end_by_themselves_are_killed(home, tmp_path):
    with opened(parse_cluster(cluster_toml(tmp_path)), home, lambda text: None) as cluster:
        (pid,) = cluster.client.run(os.getpid).values()
        stuck = cluster.client.submit(time.sleep, 3600)  # far beyond the limit on a test
        time.sleep(0.2)
        process = psutil.Process(pid)
    del stuck
    assert not psutil.wait_procs([process], timeout=3)[1]


@pytest.mark.slow("trains on images twice, while two workers are killed: half a minute")
def test_two_workers_one_killed_in_pretraining_one_in_meta_training_end_with_the_counts_of_one_process(hues):
    """As jobs of Slurm where it has an idle node, else as processes of this machine. Each is killed in mid-training."""
    tasks = hues / "hues.toml"
    tasks.write_text(tasks.read_text().replace("steps = 2\n", "steps = 400\n"))
    shutil.copytree("home", "alone")
    options = ["--method", "imprint,lwof", "--task", str(tasks), "--train", "steps=3000", "--device", "cpu"]
    alone = command(*options, "--jobs", "1", "--home", str(hues / "alone"))
    assert alone.communicate(timeout=300)
    assert alone.returncode == 0
    idle = shutil.which("sinfo") and subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True).stdout
    slurm = bool(idle and re.search("idle|mix", idle))
    file, alive = hues / "slurm.toml", {"pretraining", "result"}
    file.write_text('class = "SLURMCluster"\n[arguments]\nn_workers = 2\ncores = 1\nmemory = "2GB"\ninterface = "lo"\n')
    cluster = str(file) if slurm else cluster_toml(hues, "n_workers = 2")
    with open("errors", "w") as errors:
        running = command(*options, "--home", str(hues / "home"), "--cluster", cluster, errors=errors)
    while running.poll() is None:
        time.sleep(0.05)
        for log in (hues / "home" / "logs").rglob("*.log"):
            text, kind = log.read_text(), log.relative_to(hues / "home" / "logs").parts[0]
            training = {"pretraining": " - pretraining", "result": " - meta-training"}.get(kind, "no such line")
            if kind in alive and training in text and "Z done " not in text:
                time.sleep(1)  # some steps
                os.kill(int(re.findall(r"Z begun \S+ \S*-(\d+)-\d+ ", text)[-1]), signal.SIGKILL)
                alive.remove(kind)
    assert not alive
    assert running.returncode == 0
    assert Path("errors").read_text().count("died; it is run again") == 2
    assert len(counts(hues / "home")) == 2
    assert counts(hues / "home") == counts(hues / "alone")
    if slurm:
        assert not subprocess.run(["squeue", "-h", "-n", "dask-worker", "-t", "R,PD"], capture_output=True).stdout
