"""The harness finds what it should, and a few cases of every format end as they may."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from ifsl_bench.common.errors import UserError
from tests.fuzz.formats import Format, case, formats
from tests.fuzz.runner import Outcome, rounds, run

SECONDS = float(os.environ.get("FUZZ_SECONDS", "6"))


def test_a_case_is_always_the_same():
    for form in formats().values():
        first, second = (case(form, form.seeds(), 1, 7) for _ in range(2))
        assert first == second, form.name
        assert len({case(form, form.seeds(), 1, number) for number in range(20)}) > 3


@pytest.mark.parametrize("name", sorted(formats()))
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
        (_loop, "more than 1 s"),
        (_fill, r"it took [12]\.\d GB"),
        (lambda path: os._exit(3), r"the process died \(3\)"),
    ],
)
def test_each_way_to_end_is_seen_and_the_next_case_is_tried(read, what, monkeypatch):
    if read is _loop:
        monkeypatch.setattr("tests.fuzz.runner.SECONDS", 1)
    form = Format("x", lambda: [b"seed"], read)
    outcome = Outcome()
    run(form, 5, range(2), outcome)
    assert outcome.cases["x"] == 2
    if what is None:
        assert not outcome.failures
    else:
        assert [failure.number for failure in outcome.failures] == [0, 1]
        for failure in outcome.failures:
            assert re.search(what, str(failure))


def test_hostile_files_end_in_success_or_in_one_line():
    """A few seconds of the fixed seed; with FUZZ_SECONDS=60 a minute."""
    outcome = rounds(list(formats().values()), 0, time.monotonic() + SECONDS)
    assert not outcome.failures, "\n".join(map(str, outcome.failures))
    assert outcome.cases.total() > 20
