"""Several processes, or machines, on one home without locks: what is there is whole, and the numbers are one run's."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ifsl_bench.board import result_file
from ifsl_bench.common import building as build_module
from ifsl_bench.common import files, owners
from ifsl_bench.common.building import building, publish, unfinished, whole
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Home, set_aside, write_bytes, write_new
from ifsl_bench.common.owners import is_abandoned, partial_of, tagged, what
from ifsl_bench.data.pools import open_dataset, verify
from tests.board.test_result import make

ELSEWHERE = "@node7.0123abcd-4711-89abcdef"  # the tag of a process on another machine
HOUR = 3600.0


def aged(path: Path, hours: float) -> Path:
    """A file or folder, and all that is in it, last written so many hours ago."""
    then = time.time() - hours * HOUR
    for one in (*path.rglob("*"), path):
        os.utime(one, (then, then))
    return path


def whole_or_none(home: Home) -> None:
    """Raises where anything that a reader would take is not what was written."""
    for manifest in home.data.glob("[!.]*/manifest.json"):
        verify(open_dataset(manifest.parent))
    for kind in (home.pretrained, home.trained):
        for json in kind.glob("[!.]*/checkpoint.json"):
            assert CheckpointFolder(json.parent).load() is not None
    for bank in home.features.glob("*/[!.]*/bank.json"):
        files.read_json(bank)
        assert files.sha256_file(bank.parent / "features.npy") == files.read_json(bank)["sha256"]


# -- two real processes ----------------------------------------------------------------------------------------------

TWO = """
import json, sys
from pathlib import Path
import torch
from tests.fuzz import small
torch.set_num_threads(1)
root = Path(sys.argv[1])
small.make_data(small.Home.locate(root / "warm-up" / sys.argv[2]))  # what is imported and compiled takes its time first
told = small.Told()
print("ready", flush=True)
sys.stdin.readline()
small.run(root, told)
print(json.dumps(told.warnings))
"""


# -- trainings -------------------------------------------------------------------------------------------------------


def state(step: int, finished: bool = False) -> tuple[dict[str, torch.Tensor], dict]:
    return {"x": torch.full((1000,), float(step))}, {"step": step, "finished": finished, "seed": 0}


def test_states_of_two_that_save_in_turn_are_never_mixed(tmp_path):
    """Each state is its own step's tensors, whoever saved it, and nothing but the last one's stays."""
    mine, yours = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    for step in range(5):
        for store, number in ((mine, step), (yours, 100 + step)):
            store.save(*state(number))
            found = CheckpointFolder(tmp_path).load()
            assert found.tensors["x"].unique().tolist() == [found.info["step"]] == [number]
    assert len(list(tmp_path.glob("state-*"))) == 1


def test_states_that_are_saved_at_once_are_never_mixed(tmp_path):
    """Two threads save as two processes would, and a third reads all the while."""
    ended = threading.Event()

    def save(first: int) -> None:
        store = CheckpointFolder(tmp_path)
        for step in range(first, first + 40):
            store.save(*state(step))

    def read() -> int:
        count = 0
        while not ended.is_set():
            if (now := CheckpointFolder(tmp_path).load()) is not None:
                assert now.tensors["x"].unique().tolist() == [now.info["step"]]
                count += 1
        return count

    with ThreadPoolExecutor(3) as threads:
        reader = threads.submit(read)
        savers = [threads.submit(save, first) for first in (0, 1000)]
        try:
            for saver in savers:
                saver.result()
        finally:
            ended.set()
        assert reader.result() > 0
    assert CheckpointFolder(tmp_path).load().info["step"] in (39, 1039)
    assert len(list(tmp_path.glob("state-*"))) <= 2


def test_tensors_of_killed_processes_go_and_those_of_others_stay(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = tagged("state-3", ".safetensors").replace(f"-{os.getpid()}-", f"-{gone.pid}-")
    for name in (dead, f"state-4{ELSEWHERE}.safetensors", f"state-5{ELSEWHERE}.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    aged(tmp_path / f"state-5{ELSEWHERE}.safetensors", 4)
    CheckpointFolder(tmp_path).save(*state(1))
    left = {what(path.name) for path in tmp_path.glob("state-*")}
    assert left == {"state-4.safetensors", "state-6.safetensors"}


def test_a_folder_that_is_moved_while_a_state_is_saved_gets_the_whole_state(tmp_path, monkeypatch):
    folder, moved, write = tmp_path / "training", [], files.write_bytes

    def and_then_move(path, content):
        write(path, content)
        if path.name.startswith("state-") and not moved:
            moved.append(set_aside(folder))

    monkeypatch.setattr("ifsl_bench.common.checkpoint.write_bytes", and_then_move)
    CheckpointFolder(folder).save(*state(7))
    assert CheckpointFolder(folder).load().info["step"] == 7


# -- folders ---------------------------------------------------------------------------------------------------------


def fill(partial: Path, text: str) -> None:
    for name in ("a", "b"):
        (partial / name).write_text(text)


def test_a_folder_is_replaced_whole(tmp_path):
    target = tmp_path / "set"
    for text in ("first", "second"):
        with building(target) as mine:
            fill(mine, text)
    assert [(target / name).read_text() for name in "ab"] == ["second", "second"]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_whoever_reads_a_folder_that_is_replaced_again_and_again_reads_one_of_them(tmp_path):
    target, ended, found = tmp_path / "set", threading.Event(), []
    with building(target) as partial:
        fill(partial, "0")

    def replace() -> None:
        for n in range(150):
            with building(target) as partial:
                fill(partial, str(n))
        ended.set()

    def read() -> tuple[str, str]:
        return (target / "a").read_text(), (target / "b").read_text()

    writer = threading.Thread(target=replace)
    writer.start()
    while not ended.is_set():
        try:
            found.append(whole(target, read))
        except FileNotFoundError:
            found.append(None)  # between two renames
    writer.join()
    pairs = [pair for pair in found if pair]
    assert len({a for a, _ in pairs}) > 1
    assert all(a == b for a, b in pairs)


def test_an_unfinished_folder_is_gone_on_in_and_others_are_removed(tmp_path):
    target, killed = tmp_path / "set", partial_of(tmp_path / "set")

    def interrupted() -> None:
        with building(target, resume=True) as partial:
            fill(partial, "half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == [unfinished(target).name]
    killed.mkdir()
    os.utime(killed, (0, 0))
    with building(target, resume=True) as mine:
        assert (mine / "a").read_text() == "half"
        fill(mine, "mine")
    assert (target / "a").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_folder_that_is_removed_while_it_is_filled_is_one_line(tmp_path):
    line = r"was removed while it was being filled; the same command starts it again"
    with pytest.raises(UserError, match=line), building(tmp_path / "set") as partial:
        shutil.rmtree(partial)


def test_files_that_nfs_keeps_for_others_stop_nobody(tmp_path, monkeypatch):
    """A removed file that is open elsewhere stays as .nfs..., and its folder cannot be removed."""
    target = tmp_path / "set"
    with building(target) as partial:
        fill(partial, "old")
    kept = []

    def rmtree(path, ignore_errors=False):
        kept.append(path)
        (path / "a").rename(path / ".nfs0000000000a1b2c300000001")
        assert ignore_errors

    monkeypatch.setattr(build_module.shutil, "rmtree", rmtree)
    with building(target) as partial:
        fill(partial, "new")
    monkeypatch.undo()
    assert (target / "a").read_text() == "new"
    (left,) = kept
    assert left.name.startswith(".removed-set@")
    monkeypatch.setattr(owners.psutil, "pid_exists", lambda process: False)
    with building(target) as partial:
        fill(partial, "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_name_that_is_taken_again_and_again_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "partial").mkdir()

    def again() -> bool:
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        (tmp_path / "set" / "x").mkdir(parents=True)
        return False

    again()
    done = build_module.remove
    monkeypatch.setattr(build_module, "remove", lambda path, of=None: (done(path, of), again()))
    with pytest.raises(UserError, match="other processes write it"):
        publish(tmp_path / "partial", tmp_path / "set")


# -- files -----------------------------------------------------------------------------------------------------------


def test_temporary_names_say_whose_they_are_and_are_never_the_same(tmp_path):
    names = {partial_of(tmp_path / "x.json").name for _ in range(100)}
    assert len(names) == 100
    for name in names:
        assert name.startswith(".partial-x.json@")
        assert f"-{os.getpid()}-" in name
        assert what(name) == ".partial-x.json"
    assert len(os.fsencode(tagged("é" * 200))) <= owners.LONGEST


@pytest.mark.skipif(os.name != "posix", reason="processes of POSIX")
def test_what_a_killed_process_was_writing_is_abandoned_at_once(tmp_path):
    code = "import sys; from pathlib import Path; from ifsl_bench.common.owners import partial_of\n"
    code += "path = partial_of(Path(sys.argv[1])); path.touch(); print(path, flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    path = Path(process.stdout.readline().rstrip("\n"))
    assert not is_abandoned(aged(path, 100)), "its process lives"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert is_abandoned(path)


def test_the_file_systems_clock_counts_and_not_this_machines(tmp_path, monkeypatch):
    path = tmp_path / f".partial-x{ELSEWHERE}"
    path.touch()
    (tmp_path / f".partial-y{ELSEWHERE}").touch()
    old = aged(tmp_path / f".partial-y{ELSEWHERE}", 4)
    for wrong in (1e12, 0.0):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        assert not is_abandoned(path)
        assert is_abandoned(old)


def test_a_new_file_replaces_none_and_one_is_written_where_there_are_no_links(tmp_path, monkeypatch):
    assert write_new(tmp_path / "x", b"first")
    assert not write_new(tmp_path / "x", b"second")
    assert (tmp_path / "x").read_bytes() == b"first"

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert write_new(tmp_path / "y", b"third")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


def test_a_file_whose_folder_is_moved_meanwhile_is_written_all_the_same(tmp_path, monkeypatch):
    folder, sync, moved = tmp_path / "folder", os.fsync, []

    def and_move(handle):
        sync(handle)
        if not moved:
            moved.append(folder.rename(tmp_path / "aside"))

    monkeypatch.setattr(os, "fsync", and_move)
    write_bytes(folder / "x", b"content")
    assert (folder / "x").read_bytes() == b"content"


def test_two_that_set_the_same_aside_lose_nothing(tmp_path, monkeypatch):
    """Between the look and the rename another process takes the name, or has renamed the file itself."""
    (tmp_path / "x").write_text("mine")
    exists, seen = os.path.lexists, []

    def taken_then(path):
        if not seen:
            seen.append(path)
            Path(path).write_text("theirs")
            return False
        return exists(path)

    monkeypatch.setattr(os.path, "lexists", taken_then)
    assert set_aside(tmp_path / "x").name == "x.corrupt-1"
    assert (tmp_path / "x.corrupt-0").read_text() == "theirs"
    assert (tmp_path / "x.corrupt-1").read_text() == "mine"
    assert set_aside(tmp_path / "x").exists(), "another process has just done it"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_another_machine_replaces_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    path, opened, failures = tmp_path / "x.json", files.open_file, [2]
    path.write_text("{}")

    def stale(path):
        if failures[0]:
            failures[0] -= 1
            with files.read_errors(path):
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return opened(path)

    monkeypatch.setattr(files, "open_file", stale)
    assert files.read_json(path) == {}
    failures[0] = 1000
    with pytest.raises(UserError, match="the disk or the network fails"):
        files.read_json(path)


# -- results ---------------------------------------------------------------------------------------------------------


def test_two_results_that_differ_are_both_kept_whoever_comes_first(tmp_path, monkeypatch):
    """The other one appears between the look for an old file and the write."""
    mine, theirs = make(noise=0), make(noise=1)
    look, written = result_file.keep_old, []

    def then_theirs(root, result):
        kept = look(root, result)
        if not written:
            written.append(result_file.write(root, theirs))
        return kept

    monkeypatch.setattr(result_file, "keep_old", then_theirs)
    (kept,) = result_file.put(tmp_path, mine)
    assert kept.name.endswith(".old-0")
    assert result_file.read(kept).episodes == theirs.episodes
    assert result_file.read(written[0]).episodes == mine.episodes
    assert result_file.put(tmp_path, mine) == []
    assert len(list(tmp_path.rglob("*.json*"))) == 2


def test_what_is_damaged_is_told_and_not_read_for_ever(tmp_path):
    def read() -> None:
        raise CorruptFile("damaged")

    (tmp_path / "set").mkdir()
    with pytest.raises(CorruptFile, match="damaged"):
        whole(tmp_path / "set", read)


def test_a_folder_that_gets_the_number_of_the_one_before_is_read_again(tmp_path):
    """File systems give the number of what is gone to what comes next; not while somebody has it open."""
    target, numbers = tmp_path / "set", []

    def put(text: str) -> int:
        with building(target) as partial:
            fill(partial, text)
        return target.stat().st_ino

    def read() -> tuple[str, str]:
        first = (target / "a").read_text()
        if len(numbers) == 1:
            for n in range(1, 30):
                shutil.rmtree(target)
                numbers.append(put(str(n)))
                if numbers[-1] == numbers[0]:
                    break
        return first, (target / "b").read_text()

    numbers.append(put("0"))
    found = whole(target, read)
    assert numbers[0] not in numbers[1:]
    assert found == ("29", "29")
