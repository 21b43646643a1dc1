"""How long something takes here, roughly."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

ENOUGH = 1.0  # seconds of timing after which an estimate is good enough


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Of a call, the fastest of a few after one to warm up; of one that takes long, the first few."""
    took: list[float] = []
    while len(took) <= repeats and sum(took) < ENOUGH:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    return min(took[1:] or took)


def roughly(seconds: float | None) -> str:
    """A rough time in words."""
    if seconds is None:
        return "unknown"
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {10 * round(seconds / 10):.0f} s"
