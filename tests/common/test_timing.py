"""Rough times."""

import time

import pytest
import torch

from ifsl_bench.common import timing
from ifsl_bench.common.timing import roughly, seconds_of

CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch):
    """No other program has the processor."""
    monkeypatch.setattr(timing, "_busy", time.process_time)


def test_what_only_the_first_call_takes_is_no_part_of_an_estimate(alone):
    took = [1.2, 0.01, 0.01, 0.01, 0.01]
    assert seconds_of(lambda: time.sleep(took.pop(0)), CPU) < 0.5


def test_calls_that_still_get_faster_are_no_part_of_one_either(alone):
    took = [0.4, 0.2, 0.1, 0.02, *[0.02] * 9]
    assert seconds_of(lambda: time.sleep(took.pop(0)), CPU) < 0.05


def test_what_takes_long_is_called_twice(alone):
    calls = []
    assert seconds_of(lambda: calls.append(time.sleep(1.05)), CPU) >= 1
    assert len(calls) == 2


def test_where_others_have_all_cores_the_processors_time_counts_and_the_plan_is_told(monkeypatch):
    monkeypatch.setattr(timing, "_busy", lambda: time.perf_counter() * 1000)
    monkeypatch.setattr(timing, "crowd", timing.Crowd())

    def half_of_the_time() -> None:
        start = time.process_time()
        while time.process_time() - start < 0.05:
            pass
        time.sleep(0.05)

    seconds = seconds_of(half_of_the_time, CPU)
    assert 0.05 / torch.get_num_threads() * 0.99 <= seconds < 0.09
    assert timing.crowd.factor > 1.5


def test_threads_that_wait_for_each_other_are_no_part_of_an_estimate(monkeypatch):
    """Two threads on a core that others want take many times as long as one."""
    monkeypatch.setattr(timing, "_busy", lambda: time.perf_counter() * 1000)
    monkeypatch.setattr(timing, "crowd", timing.Crowd())
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def wait_for_each_other() -> None:
        start = time.process_time()
        while time.process_time() - start < (0.01 if torch.get_num_threads() == 1 else 0.4):
            pass

    try:
        assert seconds_of(wait_for_each_other, CPU) < 0.1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_times_are_told_in_the_unit_that_people_would_use():
    said = [roughly(s) for s in (None, 3.2, 119, 148, 3000, 7200, 90000, 400000)]
    assert said == ["unknown", "about 3 s", "about 120 s", "about 2.5 min", "about 50 min", "about 2.0 h", "about 25 h",
                    "about 4.6 days"]  # fmt: skip
