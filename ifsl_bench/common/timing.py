"""How long something takes here, roughly."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

ENOUGH = 0.3  # seconds of timing after which an estimate is good enough
WARM = 1.0  # seconds after which it is warm
FASTER = 0.8  # a call that took less than this share of the one before says that it was not warm yet
CROWDED = 0.2  # cores that other programs must keep busy for them to count


@dataclass
class Crowd:
    """How much longer than alone everything took that was timed in this process, since others had the cores."""

    alone: float = 0.0
    taken: float = 0.0

    @property
    def factor(self) -> float:
        return max(1.0, self.taken / self.alone) if self.alone else 1.0


crowd = Crowd()


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Of a call on a machine that has nothing else to do: the fastest of a few, after some to warm up.

    Where other programs have the cores, so that none is free, it is the processor's time by the number of threads, or
    that of one thread where it is less: threads that wait for one which has no core can take ten times as long.
    """
    start = time.perf_counter()
    before = _timed(call, device)[0]
    while time.perf_counter() - start < WARM:
        now = _timed(call, device)[0]
        if now > FASTER * before:
            break
        before = now
    took: list[tuple[float, float]] = []
    start, busy, own = time.perf_counter(), _busy(), time.process_time()
    while not took or (len(took) < repeats and time.perf_counter() - start < ENOUGH):
        took.append(_timed(call, device))
    passed, own = time.perf_counter() - start, time.process_time() - own
    wall, processor = (min(one) for one in zip(*took, strict=True))
    cores = psutil.cpu_count() or 1
    others = (_busy() - busy - own) / passed
    idle = cores - others - own / passed
    alone = wall
    if device.type == "cpu" and others > CROWDED and idle < others:
        alone = min(wall, processor / min(torch.get_num_threads(), cores), _by_one_thread(call, device))
    crowd.alone += alone * len(took)
    crowd.taken += passed
    return alone


def _by_one_thread(call: Callable[[], object], device: torch.device) -> float:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        _timed(call, device)
        return _timed(call, device)[1]
    finally:
        torch.set_num_threads(threads)


def _timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds of a call, and those of all threads of this process on the processor."""
    start, own = time.perf_counter(), time.process_time()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, time.process_time() - own


def _busy() -> float:
    """Seconds that all cores of the machine have spent on anything."""
    spent = psutil.cpu_times()
    return float(sum(spent) - spent.idle - getattr(spent, "iowait", 0.0) - getattr(spent, "guest", 0.0)
                 - getattr(spent, "guest_nice", 0.0))  # fmt: skip


def roughly(seconds: float | None) -> str:
    """A rough time in words."""
    if seconds is None:
        return "unknown"
    if seconds < 100:
        return f"about {seconds:.0f} s"
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"about {10 * round(seconds / 10):.0f} s"
