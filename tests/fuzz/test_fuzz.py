"""The harness finds each kind of failure, and cases of every format end in success or in one line.

``FUZZ_SECONDS=60 pytest -q -n 0 tests/fuzz`` tries more of them, and damaged caches, also of killed runs; FUZZ_SEED
selects other cases. A case that fails is written to ``kept/FORMAT/``, and tried again by every run.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from ifsl_bench.utils.errors import UserError
from tests.fuzz import cache
from tests.fuzz.formats import FORMATS
from tests.fuzz.harness import KEPT, Format, case, content_of, keep, tried

CI = "FUZZ_SECONDS" in os.environ
SECONDS, SEED = float(os.environ.get("FUZZ_SECONDS", "0")), int(os.environ.get("FUZZ_SEED", "0"))
RUNS = (cache.FORMAT,) if CI else ()  # it needs half a minute to begin


@pytest.mark.parametrize("name", FORMATS)
def test_a_case_is_always_the_same_and_begins_with_a_good_file(name, tmp_path, monkeypatch):
    form = FORMATS[name]
    first = [case(form, 1, index) for index in range(8)]
    monkeypatch.setattr(time, "time", lambda: 2e9)  # an archive may hold the time that it was written at
    assert [case(form, 1, index) for index in range(8)] == first
    assert len(set(first)) > 3
    for seed in form.seeds():
        (tmp_path / "case").write_bytes(seed)
        form.read(tmp_path / "case")


def _refuse(text: str) -> None:
    raise UserError(text)


def _loop(path: Path) -> None:
    while True:
        pass


def _fill(path: Path) -> None:
    bytearray(b"x") * 2_200_000_000  # some of it may be what the parent had and gave back


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda path: None, None),
        (lambda path: _refuse("one line"), None),
        (lambda path: _refuse(""), "not one line"),
        (lambda path: {}["key"], "KeyError: .* at test_fuzz.py"),
        (_loop, "more than 0.2 s"),
        pytest.param(_fill, r"it took [12]\.\d GB", marks=pytest.mark.slow("fills a gigabyte of memory")),
        (lambda path: os._exit(3), r"the process died \(3\)"),
    ],
)
def test_each_way_to_end_is_seen_and_the_next_case_is_tried(read, message):
    form = Format("x", lambda: [b"seed"], read, seconds=0.2 if read is _loop else 10)
    verdicts = list(tried(form, partial(case, form, 5), range(2)))
    assert [index for index, _ in verdicts] == [0, 1]
    for _, verdict in verdicts:
        assert (verdict.how != "failed") if message is None else re.search(message, verdict.message)


@pytest.mark.parametrize("size", [9, 9000])
def test_a_case_that_fails_is_kept_and_read_again(size, tmp_path):
    content = b"x" * size
    path = keep(Format("x", list, _loop), content, "KeyError: '9'", tmp_path)
    assert path.parent.name == "x"
    assert path.name.startswith("KeyError-")
    assert content_of(path) == content


@pytest.mark.parametrize("path", sorted(KEPT.glob("*/*")), ids=lambda path: path.name)
def test_kept_cases_fail_no_more(path):
    ((_, verdict),) = tried(FORMATS[path.parent.name], lambda _: content_of(path), range(1))
    assert verdict.how != "failed", verdict.message


def test_hostile_files_end_in_success_or_in_one_line():
    forms, ends, failures = [*FORMATS.values(), *RUNS], Counter[tuple[str, str]](), []
    for form in forms:
        form.prepare()
    until = time.monotonic() + (SECONDS if CI else float("inf"))
    for turn in itertools.count():
        for form in forms:
            numbers = range(turn * form.share, (turn + 1) * form.share)
            if not CI:
                numbers = numbers[:10]
            for index, verdict in tried(form, partial(case, form, SEED), numbers, until):
                ends[form.name, verdict.how] += 1
                if verdict.how == "failed":
                    path = keep(form, case(form, SEED, index), verdict.message)
                    failures.append(f"{path}: {verdict.message}")
        if not CI or time.monotonic() >= until:
            break
    assert not failures, "\n".join(failures)
    assert ends.total() > 20
    assert not CI or {name for name, _ in ends} == {form.name for form in forms}, ends
