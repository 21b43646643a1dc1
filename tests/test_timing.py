"""Rough times."""

import time

import torch

from ifsl_bench.common.timing import seconds_of


def test_what_only_the_first_call_takes_is_no_part_of_an_estimate():
    took = [1.2, 0.01, 0.01, 0.01, 0.01]
    assert seconds_of(lambda: time.sleep(took.pop(0)), torch.device("cpu")) < 0.5


def test_what_takes_long_is_called_twice():
    calls = []
    assert seconds_of(lambda: calls.append(time.sleep(1.05)), torch.device("cpu")) >= 1
    assert len(calls) == 2
