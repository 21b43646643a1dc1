"""Atomic files, locks and identities."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from ifsl_bench.common.building import building
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import (
    Home,
    disk_errors,
    read_json,
    set_aside,
    sha256_json,
    write_bytes,
    write_json,
)
from ifsl_bench.common.locks import locked


def test_home_prefers_arguments_over_environment_over_platform(tmp_path, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "env"))
    assert Home.locate().cache == tmp_path / "env"
    assert Home.locate().results == tmp_path / "env" / "results"
    assert Home.locate(tmp_path / "arg").cache == tmp_path / "arg"
    assert Home.locate(tmp_path / "arg", tmp_path / "out").results == tmp_path / "out"
    monkeypatch.delenv("IFSL_BENCH_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    if sys.platform == "linux":
        assert Home.locate().cache == tmp_path / "cache" / "ifsl_bench"
        assert Home.locate().results == tmp_path / "data" / "ifsl_bench" / "results"


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


def test_building_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "set"

    def fail() -> None:
        with building(target) as partial:
            (partial / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with building(target) as partial:
        (partial / "whole").write_text("x")
        assert not target.exists()
    assert (target / "whole").read_text() == "x"
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_leftovers_of_a_killed_process_are_swept(tmp_path):
    (tmp_path / ".partial-set").mkdir()
    (tmp_path / ".partial-set" / "junk").write_text("x")
    with building(tmp_path / "set") as partial:
        assert not (partial / "junk").exists()


def test_permission_is_said_plainly(tmp_path):
    with pytest.raises(UserError, match="no permission"), disk_errors(tmp_path):
        raise PermissionError(13, "Permission denied", str(tmp_path / "x"))


def test_lock_excludes_other_processes_and_dies_with_them(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from ifsl_bench.common.locks import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    target = tmp_path / "thing"
    holder = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    said = []

    def waiting(text):
        said.append(text)
        holder.kill()

    with locked(target, waiting):
        pass
    assert said
    assert "thing" in said[0]
    assert holder.wait() == -signal.SIGKILL, "it did not end by itself"


def test_json_round_trip_keeps_numbers_on_one_line(tmp_path):
    value = {"a": [1, 2, 3], "b": {"c": [-1.5, 2e-07], "d": ["x", "y"], "e": []}, "s": "[ 1, 2 ]"}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == value == read_json(tmp_path / "x.json")
    assert '"a": [1, 2, 3]' in text


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\xff"])
def test_broken_json_is_named(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content.encode("latin1"))
    with pytest.raises(CorruptFile, match=r"x\.json"):
        read_json(path)


def test_set_aside_never_overwrites(tmp_path):
    for n in range(3):
        (tmp_path / "x").write_text(str(n))
        assert set_aside(tmp_path / "x").read_text() == str(n)
    assert len(list(tmp_path.iterdir())) == 3


def test_hash_ignores_order_of_keys():
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1}) != sha256_json({"a": 1, "b": 3})
