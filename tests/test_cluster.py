"""Stages on Dask workers: who gets work, what becomes of it when something dies, and that the counts are the same."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("distributed", reason='the extra is not installed: pip install "ifsl_bench[cluster]"')

import distributed

from ifsl_bench.campaigns import dask_workers, on_dask, worker_check
from ifsl_bench.campaigns.cluster import opened
from ifsl_bench.campaigns.cluster_file import ClusterSpec, read_cluster
from ifsl_bench.campaigns.run import run_campaign
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Reporter
from ifsl_bench.protocol.training import Training
from ifsl_bench.running.api import workspace
from ifsl_bench.running.job import make_jobs


class Heard(Reporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)


def cluster_toml(folder: Path, text: str = "n_workers = 1", above: str = "") -> str:
    (folder / "cluster.toml").write_text(f'class = "LocalCluster"\n{above}\n[arguments]\n{text}\n')
    return str(folder / "cluster.toml")


def counts(home: Path) -> dict[str, object]:
    files = sorted((home / "results").rglob("*.json"))
    return {str(f.relative_to(home)): json.loads(f.read_text())["episodes"] for f in files}


def jobs_of(home: Path, methods: list[str], task: str):
    work = workspace(home, device="cpu", reporter=Heard())
    return make_jobs(methods, [task], {}, Training(), [0], None, home=work.home), work


# -- what is asked of a worker


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.locate(tmp_path / "home")


def test_a_worker_that_has_what_the_command_has_is_fit_and_nothing_is_left_behind(home):
    with worker_check.wanted(home) as needed:
        assert worker_check.unfit(pickle.loads(pickle.dumps(needed))) == ""
    assert list(home.cache.iterdir()) == [home.results]
    assert not list(home.results.iterdir())


def test_a_worker_without_the_home_folder_is_refused_with_the_path_it_lacks(home):
    with worker_check.wanted(home) as needed:
        home.cache.rename(home.cache.with_name("elsewhere"))  # as if it were not mounted
        assert f"lacks the folder {home.cache}" in worker_check.unfit(needed)
        home.cache.with_name("elsewhere").rename(home.cache)


def test_a_worker_with_another_folder_at_that_path_is_refused(home):
    with worker_check.wanted(home) as needed:
        for token in needed.tokens:
            Path(token).unlink()
        assert f"another folder at {home.cache}" in worker_check.unfit(needed)
        for token in needed.tokens:
            Path(token).write_text("of another run")
        assert f"another folder at {home.cache}" in worker_check.unfit(needed)


def test_a_worker_with_other_code_is_refused(home, monkeypatch):
    with worker_check.wanted(home) as needed:
        monkeypatch.setattr(worker_check, "own_code", lambda: "other")
        assert "runs other code of ifsl_bench" in worker_check.unfit(needed)


def test_a_daemonic_worker_is_refused_with_the_setting_it_needs(home, monkeypatch):
    class Daemon:
        daemon = True

    with worker_check.wanted(home) as needed:
        monkeypatch.setattr(worker_check.multiprocessing, "current_process", Daemon)
        assert "DASK_DISTRIBUTED__WORKER__DAEMON=False" in worker_check.unfit(needed)


def test_a_worker_is_told_which_method_it_lacks_or_has_otherwise(home, tmp_path):
    (tmp_path / "own.py").write_text(
        "from ifsl_bench.methods.imprint import Imprint\n\nclass Own(Imprint):\n    pass\n"
    )
    (job,) = make_jobs([f"{tmp_path}/own.py:Own"], ["glyphs-5shot"], {}, Training(), [0], None)
    here = ("Own", pickle.dumps(job.chosen), job.source)
    with worker_check.wanted(home, [here]) as needed:
        assert worker_check.unfit(needed) == ""
        (tmp_path / "own.py").unlink()
        assert "cannot load method Own" in worker_check.unfit(needed)
    with worker_check.wanted(home, [("Own", b"cnowhere\nOwn\n.", job.source)]) as needed:
        assert "cannot load method Own (No module named 'nowhere')" in worker_check.unfit(needed)
    with worker_check.wanted(
        home,
        [
            (
                job.name,
                pickle.dumps(make_jobs(["imprint"], ["glyphs-5shot"], {}, Training(), [0], None)[0].chosen),
                "other",
            )
        ],
    ) as needed:
        assert "has other code of method" in worker_check.unfit(needed)


def test_of_a_home_that_cannot_be_written_to_it_is_asked_that_it_is_there(home, monkeypatch):
    def refused(self, text):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refused)
    with worker_check.wanted(home) as needed:
        assert set(needed.tokens) == {str(home.cache), str(home.results)}
        assert worker_check.unfit(needed) == ""
        shutil.rmtree(home.results)
        assert f"lacks the folder {home.results}" in worker_check.unfit(needed)


def test_versions_are_held_against_each_other_and_both_are_named():
    mine = {"python": "3.11", "ifsl_bench": "0.2.0", "torch": "2.5.0"}
    same = {"packages": {"python": "3.11.9.final.0", "ifsl_bench": "0.2.0", "torch": "2.5.0"}}
    assert dask_workers._mismatch(mine, same) == ""
    other = {"packages": {"python": "3.12.1.final.0", "ifsl_bench": "0.2.0", "torch": None}}
    said = dask_workers._mismatch(mine, other)
    assert "has python 3.12, this command has 3.11" in said
    assert "has no torch, this command has 2.5.0" in said


# -- clusters


def test_a_cluster_on_one_machine_listens_on_the_loopback_interface_alone(home, tmp_path):
    heard: list[str] = []
    with opened(read_cluster(cluster_toml(tmp_path)), home, heard.append) as cluster:
        assert cluster.client.scheduler.address.startswith("tcp://127.0.0.1:")
        daemonic = cluster.client.run(lambda: __import__("multiprocessing").current_process().daemon)
        assert list(daemonic.values()) == [False]
    assert not heard
    with opened(read_cluster(cluster_toml(tmp_path, 'n_workers = 1\nhost = "0.0.0.0"')), home, heard.append):
        pass
    assert len(heard) == 1
    assert "without TLS" in heard[0]


@pytest.mark.parametrize("files", [False, True], ids=["made-for-it", "files"])
def test_with_keys_a_cluster_answers_only_who_has_them(files, home, tmp_path):
    above = "security = true"
    if files:
        made = distributed.Security.temporary()
        above = "[security]\n"
        for name in ("tls_ca_file", *(f"tls_{role}_{what}" for role in ("client", "scheduler", "worker")
                                      for what in ("cert", "key"))):  # fmt: skip
            (tmp_path / f"{name}.pem").write_text(getattr(made, name))
            above += f'{name} = "{name}.pem"\n'
    said = cluster_toml(tmp_path, 'n_workers = 1\nhost = "0.0.0.0"', above)
    heard: list[str] = []
    with opened(read_cluster(said), home, heard.append) as cluster:
        address = cluster.client.scheduler.address
        assert address.startswith("tls://")
        cluster.client.wait_for_workers(1, timeout=20)
        with pytest.raises(UserError, match="needs keys"), opened(read_cluster(address), home, heard.append):
            pass
        with pytest.raises(OSError), warnings.catch_warnings():  # noqa: PT011 (Dask's own)
            other = distributed.Security.temporary()
            distributed.Client(address, security=other, timeout=1, set_as_default=False)
        if files:
            keys = "".join(line + "\n" for line in above.splitlines() if "client" in line or "_ca_" in line)
            (tmp_path / "address.toml").write_text(f'address = "{address}"\n[security]\n{keys}')
            with opened(read_cluster(str(tmp_path / "address.toml")), home, heard.append) as another:
                assert another.client.submit(os.getpid).result() != os.getpid()
    assert not heard


def test_a_scheduler_that_is_not_there_is_told_at_once(home):
    start = time.monotonic()
    with pytest.raises(UserError, match=r"no scheduler answers at tcp://127.0.0.1:9: "):
        with opened(ClusterSpec("x", "tcp://127.0.0.1:9"), home, lambda text: None):
            pass
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('n_workers = 1\ninterface = "none7"', "cannot be started"),
        ('n_workers = 1\nthreads_per_worker = "two"', "cannot be started"),
    ],
)
def test_a_cluster_that_cannot_be_started_says_why(arguments, told, home, tmp_path):
    with pytest.raises(UserError, match=told):
        with opened(read_cluster(cluster_toml(tmp_path, arguments)), home, lambda text: None):
            pass


def test_a_queueing_system_that_is_not_there_is_named(home, tmp_path):
    (tmp_path / "c.toml").write_text('class = "MoabCluster"\n[arguments]\nn_workers = 1\ncores = 1\nmemory = "1GB"\n')
    with pytest.raises(UserError, match="needs the command msub"):
        with opened(read_cluster(str(tmp_path / "c.toml")), home, lambda text: None):
            pass
