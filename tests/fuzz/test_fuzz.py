"""The harness finds what it should, and a few cases of every format end as they may."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from ifsl_bench.utils.errors import UserError
from tests.fuzz.formats import MODULES, RUNS, Format, case, formats
from tests.fuzz.kept import content_of, ended, keep, kept
from tests.fuzz.runner import rounds, run

CI = "FUZZ_SECONDS" in os.environ
SECONDS = float(os.environ.get("FUZZ_SECONDS", "2"))
CHOSEN = formats() if CI else formats(MODULES)  # whole runs need half a minute to begin


def test_a_case_is_always_the_same(monkeypatch):
    first = {name: [case(form, form.seeds(), 1, number) for number in range(8)] for name, form in formats().items()}
    monkeypatch.setattr(time, "time", lambda: 2e9)  # an archive may hold the time that it was written at
    for name, form in formats().items():
        assert [case(form, form.seeds(), 1, number) for number in range(8)] == first[name], name
        assert len(set(first[name])) > 3


@pytest.mark.parametrize("name", sorted(formats(MODULES)))
def test_the_files_to_begin_with_are_good_ones(name, tmp_path):
    form = formats()[name]
    for seed in form.seeds():
        (tmp_path / "case").write_bytes(seed)
        form.read(tmp_path / "case")


def _loop(path: Path) -> None:
    while True:
        pass


def _fill(path: Path) -> None:
    bytearray(b"x") * 2_200_000_000  # some of it may be what the parent had and gave back


def _refuse(text: str) -> None:
    raise UserError(text)


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda path: None, None),
        (lambda path: _refuse("one line"), None),
        (lambda path: _refuse(""), "told badly"),
        (lambda path: {}["key"], "KeyError: .* at test_fuzz.py"),
        (_loop, "more than 0.2 s"),
        pytest.param(_fill, r"it took [12]\.\d GB", marks=pytest.mark.slow("fills a gigabyte of memory")),
        (lambda path: os._exit(3), r"the process died \(3\)"),
    ],
)
def test_each_way_to_end_is_seen_and_the_next_case_is_tried(read, what):
    form = Format("x", lambda: [b"seed"], read, seconds=0.2 if read is _loop else 10)
    outcome = run(form, 5, range(2))
    assert outcome.cases["x"] == 2
    if what is None:
        assert not outcome.failures
    else:
        assert [failure.number for failure in outcome.failures] == [0, 1]
        for failure in outcome.failures:
            assert re.search(what, str(failure))


def _no_nines(path: Path) -> None:
    if b"999" in path.read_bytes():
        raise KeyError("999")


@pytest.mark.parametrize("size", [9, 9000])
def test_a_case_that_fails_is_kept_and_tried_again(size, tmp_path):
    form = Format("x", lambda: [b"x" * size], _no_nines, lambda random, content: content + b"99999")
    (failure,) = run(form, 0, range(4, 5)).failures
    assert str(failure).startswith("--only x --seed 0 --first 4 --cases 1: KeyError")
    path = keep(form, failure, tmp_path)
    assert kept(tmp_path) == [path]
    assert path.parent.name == "x"
    assert content_of(path) == b"x" * size + b"99999"
    assert ended(form, content_of(path)).how == "failed"


@pytest.mark.parametrize("path", kept(), ids=lambda path: path.name)
def test_kept_cases_fail_no_more(path):
    if path.parent.name not in CHOSEN:
        pytest.skip("whole runs need half a minute to begin; they are tried where FUZZ_SECONDS is set")
    verdict = ended(CHOSEN[path.parent.name], content_of(path))
    assert verdict.how != "failed", verdict.told


def test_hostile_files_end_in_success_or_in_one_line():
    """A few seconds of the fixed seed; with FUZZ_SECONDS=60 a minute, and damaged caches and killed runs too."""
    for form in CHOSEN.values():
        form.prepare()
    outcome = rounds(list(CHOSEN.values()), 0, time.monotonic() + SECONDS)
    assert not outcome.failures, "\n".join(map(str, outcome.failures))
    assert outcome.cases.total() > 20
    if CI:
        assert set(outcome.cases) == set(CHOSEN)
        assert all(outcome.cases[name] >= 2 for name in RUNS), outcome.cases
