"""Atomic files, locks and identities."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import (
    MAX_NAME_LENGTH,
    Paths,
    quarantine_path,
    read_json,
    sha256_json,
    strip_tag,
    unique_name,
    write_bytes,
    write_json,
)
from ifsl_bench.utils.locks import atomic_folder, hold_lock, unfinished_path


def test_home_prefers_arguments_over_environment_over_platform(tmp_path, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "env"))
    assert Paths.locate().cache == tmp_path / "env"
    assert Paths.locate().results == tmp_path / "env" / "results"
    assert Paths.locate(tmp_path / "arg").cache == tmp_path / "arg"
    assert Paths.locate(tmp_path / "arg", tmp_path / "out").results == tmp_path / "out"
    monkeypatch.delenv("IFSL_BENCH_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    if sys.platform == "linux":
        assert Paths.locate().cache == tmp_path / "cache" / "ifsl_bench"
        assert Paths.locate().results == tmp_path / "data" / "ifsl_bench" / "results"


def test_failed_write_leaves_old_content_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def refuse(*_):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match="disk is full"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_building_replaces_what_was_there_whole_or_not_at_all(tmp_path):
    target = tmp_path / "set"
    (tmp_path / ".partial-set").mkdir()
    (tmp_path / ".partial-set" / "junk").write_text("of a killed process")
    for text in ("first", "second"):
        with atomic_folder(target) as partial:
            (partial / "whole").write_text(text)
            assert (target / "whole").exists() == (text == "second")
        assert (target / "whole").read_text() == text
        assert [path.name for path in (target, *tmp_path.iterdir())] == ["set", "set"]

    def fail() -> None:
        with atomic_folder(target) as partial:
            (partial / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in (*target.iterdir(), *tmp_path.iterdir())] == ["whole", "set"]


def test_an_interrupted_build_that_may_be_resumed_is_gone_on_with(tmp_path):
    target = tmp_path / "set"

    def interrupted() -> None:
        with atomic_folder(target, resume=True) as partial:
            (partial / "a").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == [unfinished_path(target)]
    with atomic_folder(target, resume=True) as partial:
        assert (partial / "a").read_text() == "half"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_state_is_replaced_whole_and_what_a_killed_process_left_goes(tmp_path):
    store = CheckpointFolder(tmp_path)
    for step in range(3):
        (tmp_path / "state-7.safetensors").write_bytes(b"written, and not named yet")
        (tmp_path / unique_name(".partial-state-8.safetensors")).write_bytes(b"half")
        store.write_tensors({"x": torch.full((9,), float(step))}, {"step": step})
        checkpoint = CheckpointFolder(tmp_path).load()
        assert (checkpoint.tensors["x"].unique().tolist(), checkpoint.metadata["step"]) == ([step], step)
    (name,) = {path.name for path in tmp_path.iterdir()} - {"checkpoint.json"}
    assert name == checkpoint.metadata["tensors"]["file"]


def test_a_state_of_any_order_in_memory_is_kept(tmp_path):
    values = torch.arange(120.0).reshape(2, 3, 4, 5)
    tensors = {"channels last": values.to(memory_format=torch.channels_last), "part": values[:, 1], "one": values[0, 0]}
    store = CheckpointFolder(tmp_path)
    store.write_tensors(tensors, {})
    stored_tensors = store.load().tensors
    assert all(torch.equal(stored_tensors[name], value) for name, value in tensors.items())


def test_temporary_names_are_never_the_same_and_never_too_long():
    assert len({unique_name("x.json") for _ in range(100)}) == 100
    assert strip_tag(unique_name("x.json")) == "x.json"
    assert len(os.fsencode(unique_name("é" * 200))) <= MAX_NAME_LENGTH


def test_lock_excludes_other_processes_and_dies_with_them(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from ifsl_bench.utils.locks import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    target = tmp_path / "thing"
    holder = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    notices = []

    def waiting(text):
        notices.append(text)
        holder.kill()

    with hold_lock(target, waiting):
        pass
    assert notices
    assert "thing" in notices[0]
    assert holder.wait() == -signal.SIGKILL, "it did not end by itself"


def test_json_round_trip_keeps_numbers_on_one_line(tmp_path):
    value = {"a": [1, 2, 3], "b": {"c": [-1.5, 2e-07], "d": ["x", "y"], "e": []}, "s": "[ 1, 2 ]"}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == value == read_json(tmp_path / "x.json")
    assert '"a": [1, 2, 3]' in text


def test_set_aside_never_overwrites(tmp_path):
    for n in range(3):
        (tmp_path / "x").write_text(str(n))
        assert quarantine_path(tmp_path / "x").read_text() == str(n)
    assert len(list(tmp_path.iterdir())) == 3
    assert quarantine_path(tmp_path / "x").name == "x.corrupt-3", "another process has just done so"


def test_hash_ignores_order_of_keys():
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1}) != sha256_json({"a": 1, "b": 3})
