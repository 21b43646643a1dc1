"""How long something takes here, roughly."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

ENOUGH = 1.0  # seconds of timing after which an estimate is good enough


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Of a call, the fastest of a few after one to warm up, which may compile what is called; of one that takes long,
    the first of them."""
    took: list[float] = []
    while len(took) < 2 or (len(took) <= repeats and sum(took[1:]) < ENOUGH):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    return min(took[1:])


def roughly(seconds: float | None) -> str:
    """A rough time in words."""
    if seconds is None:
        return "unknown"
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {10 * round(seconds / 10):.0f} s"
