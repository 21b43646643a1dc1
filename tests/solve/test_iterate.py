"""The loop that all solvers share, and names that plugins still import from here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from ifsl_bench.solve.iterate import State, iterate


@dataclass
class Countdown(State):
    outputs: ClassVar = ("left", "steps")

    left: Tensor  # [E]
    steps: Tensor  # [E]


def take_from(sizes, batches, split):
    """Steps for some of those there are, who may be some of others."""

    def take(index):
        nonlocal sizes
        sizes = sizes[index]
        return step_for(sizes, batches) if split else None

    return take


def step_for(sizes, batches):
    """Every episode loses its size in each step; `batches` notes for whom a step was made."""

    def step(s):
        batches.append(sizes.tolist())
        going = s.left > 0
        return replace(s, left=s.left - sizes * going, steps=s.steps + going)

    return step


def run(limit=99, split=True, every=1):
    sizes, batches = torch.tensor([4, 2, 8, 1, 3]), []
    start = Countdown(torch.full((5,), 24), torch.zeros(5, dtype=torch.long))

    settle, take = lambda s: (s, s.left > 0), take_from(sizes, batches, split)
    end = iterate(step_for(sizes, batches), start, limit, settle, take, every, every)
    return end, batches


@pytest.mark.parametrize("split", [True, False])
def test_every_episode_makes_its_own_number_of_steps(split):
    end, batches = run(split=split)
    assert end.steps.tolist() == [6, 12, 3, 24, 8]
    assert end.left.tolist() == [0] * 5
    assert len(batches) == 24


def test_episodes_leave_the_batch_once_they_are_half_of_it():
    _, batches = run()
    assert [len(batch) for batch in batches] == [5] * 8 + [2] * 4 + [1] * 12
    assert batches[8] == [2, 1]
    assert batches[-1] == [1]
    assert {len(batch) for batch in run(split=False)[1]} == {5}


@pytest.mark.parametrize("split", [True, False])
def test_a_look_in_some_steps_alone_changes_who_waits_and_not_what_is_found(split):
    end, batches = run(split=split, every=5)
    assert end.steps.tolist() == [6, 12, 3, 24, 8]
    assert len(batches) == 25
    assert [len(batch) for batch in batches] == ([5] * 10 + [2] * 5 + [1] * 10 if split else [5] * 25)


def test_the_limit_holds_for_all_and_those_who_left_keep_what_they_had():
    end, batches = run(limit=13)
    assert end.steps.tolist() == [6, 12, 3, 13, 8]
    assert end.left.tolist() == [0, 0, 0, 11, 0]
    assert len(batches) == 13
