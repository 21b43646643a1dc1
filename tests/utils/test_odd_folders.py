"""Caches that cannot be written or locked, homes that are none, streams that are closed."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import filelock
import pytest
import torch

from ifsl_bench import api
from ifsl_bench.experiments.evaluate_stage import collect_provenance
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import UserError, is_printable
from ifsl_bench.utils.files import Paths, write_json
from ifsl_bench.utils.locks import hold_lock, is_locked
from ifsl_bench.utils.progress import LogReporter, Reporter

posix = pytest.mark.skipif(os.name != "posix", reason="shells and locks of POSIX")


def run(folder: Path, reporter: Reporter | None = None, seed: int = 0, results: Path | None = None):
    work = api.workspace(folder / "home", results, device="cpu", reporter=reporter)
    task = f"{folder / 'clusters.toml'}:clusters-1shot"
    return api.run("lwof", task, train={"steps": 40}, tune=2, seed=seed, rerun=True, work=work)


@pytest.fixture
def mounted(tmp_path):
    """Mounts small file systems, where the tests may."""
    folders = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk-{len(folders)}"
        folder.mkdir()
        process = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False,
                                 capture_output=True) if shutil.which("mount") else None  # fmt: skip
        if process is None or process.returncode:
            pytest.skip("mounting a file system is not permitted here")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=False)  # maps of its files may still be open


# -- read-only -------------------------------------------------------------------------------------------------------


def test_a_complete_cache_on_a_read_only_mount_is_used_and_an_incomplete_one_is_one_line(here, mounted, tmp_path):
    disk = mounted("64m")
    expected = run(here)
    shutil.copytree(here, disk / "here", ignore=shutil.ignore_patterns("*.lock"))
    shutil.rmtree(disk / "here" / "home" / "results")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    result = run(disk / "here", results=tmp_path / "results")
    assert (result.episodes, result.calibration) == (expected.episodes, expected.calibration)
    lacking = r"cannot write .*/pretrained/\S*seed1-\w*, which is missing there or out of date: the file system is r"
    with pytest.raises(UserError, match=lacking + "ead-only; choose another folder") as error:
        run(disk / "here", seed=1, results=tmp_path / "results")
    assert "\n" not in str(error.value)


# -- locks -----------------------------------------------------------------------------------------------------------


@posix
def test_a_file_system_without_locks_is_not_waited_for(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with hold_lock(tmp_path / "thing", pytest.fail):
        assert not is_locked(tmp_path / "thing")


@pytest.mark.slow("it waits for seconds")
def test_a_quiet_run_tells_that_it_waits(here):
    """Holds the lock of the pretraining, in another handle, until somebody is told of it."""
    log = io.StringIO()
    held: list[filelock.FileLock] = []

    class Quiet(LogReporter):
        def warn(self, text: str) -> None:
            super().warn(text)
            held.pop().release()

    folder = here / "home" / "pretrained"
    run(here)
    (entry,) = folder.glob("clusters*seed0*")
    shutil.rmtree(entry)
    held.append(filelock.FileLock(folder / f".{entry.name}.lock"))
    held[0].acquire(timeout=0)
    run(here, Quiet(log, verbose=False))
    assert f"warning: another process is working on {entry.name}; waiting for it" in log.getvalue()


def test_a_folder_in_place_of_a_lock_is_one_line(tmp_path):
    (tmp_path / ".thing.lock").mkdir()
    with pytest.raises(UserError, match="a folder of that name is in the way"), hold_lock(tmp_path / "thing"):
        pass


# -- folders of the user's -------------------------------------------------------------------------------------------


def test_a_folder_whose_name_is_no_utf8_keeps_what_was_trained(tmp_path):
    try:
        folder = CheckpointFolder(tmp_path / os.fsdecode(b"h\xff"))
        folder.write_tensors({"a": torch.arange(3)}, {})
    except (OSError, UnicodeError):
        pytest.skip("there are no such names on this file system")
    assert folder.load().tensors["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["t\udcff.toml", "t\x1b[2J.toml"])
def test_a_command_with_a_name_that_is_no_text_is_recorded_as_one_that_can_be_printed(name, tmp_path):
    record = collect_provenance(f"ifsl-bench run --task {name}", "cpu", ())
    write_json(tmp_path / "a.json", record)
    assert is_printable(record["command"])
    assert record["command"].endswith(".toml")


def test_an_account_without_a_home_is_told(monkeypatch):
    """``expanduser`` leaves the tilde then, which would name a folder of the current one."""
    monkeypatch.delenv("IFSL_BENCH_HOME")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda _: "~/.cache/ifsl_bench")

    def nobody(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    with pytest.raises(UserError, match="no home folder is known"):
        Paths.locate()


def test_results_on_a_full_disk_are_one_line_and_the_run_can_be_repeated(here, mounted):
    disk = mounted("64k")
    with suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(UserError, match=r"cannot write .*: the disk is full; .* with --home or --results"):
        run(here, results=disk / "results")
    assert not list(disk.rglob("*.json"))
    assert not list(disk.rglob(".partial-*"))
    (disk / "filler").unlink()
    assert run(here, results=disk / "results").episodes == run(here).episodes


# -- streams ---------------------------------------------------------------------------------------------------------


def shell(line: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {line}', "sh", sys.executable, "-m", "ifsl_bench", *arguments],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False,
    )  # fmt: skip


@posix
def test_an_encoding_that_lacks_a_character_gets_an_escape(here):
    run(here)
    process = shell("", "table", "clusters.toml:clusters-1shot", PYTHONIOENCODING="iso8859-5")
    assert (process.returncode, process.stderr) == (0, "")
    assert r" \xb1 " in process.stdout


@posix
def test_a_full_disk_behind_standard_output_is_one_line():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    process = shell("> /dev/full", "tasks")
    assert process.returncode == 2
    assert process.stderr == "ifsl-bench: the system refused: No space left on device\n"


@posix
def test_a_process_ends_with_its_status_after_all_that_is_to_happen_at_exit(tmp_path):
    code = (
        "import atexit, sys, threading, time\n"
        "from ifsl_bench.cli import main as cli\n"
        "later = lambda: (threading.main_thread().join(), time.sleep(0.1), print('thread', flush=True))\n"
        "original = cli.main\n"
        "def main():\n"
        "    threading.Thread(target=later).start()\n"
        "    atexit.register(lambda: print('after'))\n"
        "    original()\n"
        "cli.main = main\n"
        "cli.entry()\n"
    )
    ended = {}
    for command in ("tasks", "nonsense"):
        process = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, timeout=120)
        ended[command] = process.returncode, process.stdout.split("\n")[-3:-1], process.stderr
    assert ended["tasks"][:2] == (0, ["thread", "after"])
    assert ended["nonsense"][:2] == (2, ["thread", "after"])
    assert ended["nonsense"][2].startswith("ifsl-bench: unknown command")
