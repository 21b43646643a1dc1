"""The harness finds what it should, and a few cases of every format end as they may."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ifsl_bench.common.errors import UserError
from tests.fuzz.earlier import EARLIER, GOOD
from tests.fuzz.formats import MODULES, RUNS, Format, case, formats
from tests.fuzz.kept import content_of, ended, keep, kept, kind
from tests.fuzz.rounds import batches, divided, outcomes, rounds
from tests.fuzz.runner import Failure, Outcome, run

CI = "FUZZ_SECONDS" in os.environ
SECONDS = float(os.environ.get("FUZZ_SECONDS", "4"))
CHOSEN = formats() if CI else formats(MODULES)  # whole runs need half a minute to begin


def test_a_case_is_always_the_same():
    for form in formats().values():
        first, second = (case(form, form.seeds(), 1, 7) for _ in range(2))
        assert first == second, form.name
        assert len({case(form, form.seeds(), 1, number) for number in range(20)}) > 3


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
        (_loop, "more than 1 s"),
        pytest.param(_fill, r"it took [12]\.\d GB", marks=pytest.mark.slow("fills a gigabyte of memory")),
        (lambda path: os._exit(3), r"the process died \(3\)"),
    ],
)
def test_each_way_to_end_is_seen_and_the_next_case_is_tried(read, what):
    form = Format("x", lambda: [b"seed"], read, seconds=1 if read is _loop else 10)
    outcome = run(form, 5, range(2))
    assert outcome.cases["x"] == 2
    if what is None:
        assert not outcome.failures
    else:
        assert [failure.number for failure in outcome.failures] == [0, 1]
        for failure in outcome.failures:
            assert re.search(what, str(failure))


def test_cases_are_divided_by_shares_and_each_is_tried_once():
    chosen = [
        Format("a", list, print, share=20),
        Format("b", list, print, share=0.4),
        Format("c", list, print, share=3),
    ]
    for cases in (1, 2, 3, 100, 9999):
        counts = divided(chosen, cases)
        assert sum(counts.values()) == cases
        assert cases < 3 or min(counts.values()) >= 1
        found: dict[str, list[int]] = {form.name: [] for form in chosen}
        for form, numbers in batches(chosen, 7, counts):
            found[form.name] += numbers
        assert found == {name: list(range(7, 7 + count)) for name, count in counts.items()}
    assert divided(chosen, 9999) == {"a": 8545, "b": 172, "c": 1282}
    first = [form.name for (form, _), _ in zip(batches(chosen, 0, None), range(3), strict=False)]
    assert first == ["a", "b", "c"], "all formats have cases in the first round, whatever their share"


def test_the_cases_are_the_same_in_two_processes():
    chosen = [formats()[name] for name in ("csv", "toml")]
    found = []
    for processes in (1, 2):
        whole = Outcome()
        for one in outcomes(chosen, 3, float("inf"), 0, 90, processes):
            whole.add(one)
        found.append((whole.good, whole.refused, whole.failures))
    assert found[0] == found[1]
    assert (found[0][0] + found[0][1]).total() == 90


def _no_nines(path: Path) -> None:
    content = path.read_bytes()
    if b"999" in content:
        raise KeyError("999")
    if content.startswith(b"x"):
        raise IndexError("x")


def test_a_case_that_fails_is_kept_small_and_tried_again(tmp_path):
    """The smallest file that fails in the same way, not in another."""
    form = Format("x", lambda: [b"x" * 300], _no_nines, lambda random, content: content[1:] + b"99999" + b"y" * 300)
    (failure,) = run(form, 0, range(4, 5)).failures
    assert str(failure).startswith("--only x --seed 0 --first 4 --cases 1: KeyError")
    path = keep(form, failure, tmp_path)
    assert list(kept(tmp_path)) == [("x", path)]
    assert path.name.startswith("KeyError-test-fuzz-py")
    assert content_of(form, path) == b"999"
    (again,) = ended(form, [content_of(form, path)])
    assert again.how == "failed"
    assert kind(again.told) == kind(failure.what)


@pytest.mark.parametrize("size", [10_000, 100_000])
def test_a_case_that_cannot_be_made_small_is_packed_or_a_recipe(size, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.fuzz.kept.minimised", lambda form, content, what: content)
    form = Format("x", lambda: [b""], _loop, lambda random, content: random.randbytes(size))
    path = keep(form, Failure("x", 3, 5, "it took too long"), tmp_path)
    assert path.suffix == (".xz" if size == 10_000 else ".recipe")
    assert content_of(form, path) == case(form, [b""], 3, 5)


@pytest.mark.parametrize(("name", "what"), [key for key in EARLIER if CI or key[0] in formats(MODULES)])
def test_what_broke_it_earlier_does_so_no_more(name, what):
    form = formats()[name]
    (found,) = ended(form, [EARLIER[name, what]()])
    assert found.how == ("good" if (name, what) in GOOD else "refused"), found.told


@pytest.mark.parametrize(("name", "path"), [pytest.param(*one, id=one[1].name) for one in kept()])
def test_kept_cases_fail_no_more(name, path):
    if name not in CHOSEN:
        pytest.skip("whole runs need half a minute to begin; they are tried where FUZZ_SECONDS is set")
    (found,) = ended(CHOSEN[name], [content_of(CHOSEN[name], path)])
    assert found.how != "failed", found.told


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


COMPUTES = """
import os, signal, tests.fuzz.__main__, torch
wide = torch.ones(400, 400)
(wide * wide).exp().sum()
if os.fork() == 0:
    signal.alarm(60)
    (wide * wide).exp().sum()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_cases_can_compute_though_the_process_that_they_are_forks_of_has():
    """Threads of OpenMP do not live on in a fork, which would wait for them for ever."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", COMPUTES], cwd=Path(__file__).parents[2], env=environment, check=False)
    assert done.returncode == 0
