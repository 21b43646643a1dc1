"""Worker processes of loky on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

import psutil
import torch

from ifsl_bench.backbones.device import keep_freed_memory
from ifsl_bench.experiments.executors import HERE, Executor, Place, Setting, packed, run_packed
from ifsl_bench.experiments.graph import Node
from ifsl_bench.experiments.logs import LOST, Event, event_now
from ifsl_bench.utils.errors import UserError, format_error

if TYPE_CHECKING:
    import loky

MEMORY = 0.9  # of the memory that is free at the beginning, for all workers together


class LocalWorkers(Executor):
    """Worker processes that share the cores of this machine, each with an accelerator if there are any.

    Each is a pool of one of loky's: a pool gives up all its work where one of its processes is killed, and its
    processes see the same accelerators.

    Args:
        devices: numbers of accelerators, as CUDA counts them here, which the processes get in turn, and see no others.
            None: all see what this process sees.

    Raises:
        UserError: there are no such accelerators.
    """

    def __init__(self, setting: Setting, count: int, devices: Sequence[int] | None = None) -> None:
        seen = [visible(device) for device in devices] if devices else [HERE]
        share, memory = max(1, setting.cores // count), MEMORY * psutil.virtual_memory().available / count
        super().__init__([Place(str(n), "", share, memory, seen[n % len(seen)]) for n in range(count)])
        self.setting = setting
        self._pools: dict[str, loky.ProcessPoolExecutor] = {}
        self._theirs, self._ours = Pipe(duplex=False)  # says nothing, and closes where this process ends

    def _send(self, place: Place, node: Node, share: int) -> Future[Event]:
        with _no_interrupts():  # nor are they heard by what is started meanwhile
            if place.name not in self._pools:
                self._pools[place.name] = self._start(place)
            return self._pools[place.name].submit(run_packed, packed(node), self.setting, share)

    def _start(self, place: Place) -> loky.ProcessPoolExecutor:
        import loky

        # No modules from the current folder; and a process that has read large data has not lost memory.
        environment = {"PYTHONSAFEPATH": "1", "LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}
        if place.device != HERE:
            environment["CUDA_VISIBLE_DEVICES"] = place.device
        about = self._theirs, self.setting, place.name
        return loky.ProcessPoolExecutor(1, initializer=_begin_worker, initargs=about, env=environment)

    def _lost(self, place: Place, error: Exception) -> Event:
        if (pool := self._pools.pop(place.name, None)) is not None:
            pool.shutdown(wait=False, kill_workers=True)
        if isinstance(error, BrokenExecutor):
            return event_now(LOST, f"its worker {_end(str(error))}")
        return event_now(LOST, f"its worker cannot be started ({format_error(error)})")

    def close(self) -> None:
        with _no_interrupts():  # who presses Ctrl-C twice shall not leave workers behind
            for pool in self._pools.values():
                pool.shutdown(kill_workers=True)
            self._pools.clear()
            self._ours.close()


def _end(message: str) -> str:
    """Says how a process of loky's ended, from the status in its message: ``{SIGKILL(-9)}``, ``{EXIT(1)}``."""
    status = re.search(r"\((-?\d+)\)\}", message)
    if status is None:
        return "died"
    number = int(status[1])
    if number >= 0:
        return f"ended with status {number}"
    return f"was killed by signal {-number}" + (", perhaps for want of memory" if number == -9 else "")


def _begin_worker(parent: Connection, setting: Setting, name: str) -> None:
    """Prepares a worker process."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    print_to(setting, name)
    keep_freed_memory()


def _end_with(parent: Connection) -> None:
    wait([parent])
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(1)


def print_to(setting: Setting, name: str) -> None:
    """Sends what methods and libraries print in this process to a file: standard output is for tables.

    Another run that is not over may write to the same one.
    """
    try:
        path = setting.home.logs / "workers" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o644)
    except OSError:
        target = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Inside, Ctrl-C is not heard, and what is started never hears it."""
    hears = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if hears else None
    try:
        yield
    finally:
        if hears:
            signal.signal(signal.SIGINT, before)


def visible(device: int) -> str:
    """Returns the name that CUDA_VISIBLE_DEVICES has for the device of a number."""
    if (there := torch.cuda.device_count()) <= device:
        raise UserError(f"--devices {device}: PyTorch sees {there} CUDA devices here, numbered from 0")
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[device].strip() if names else str(device)


def local_workers(setting: Setting, device: torch.device, count: int | None, devices: str | None) -> LocalWorkers:
    """The workers of this machine that a user asks for.

    Args:
        device: of the run.
        count: of processes; one for each device by default.
        devices: numbers of accelerators, ``0-7`` or ``0,2``.

    Raises:
        UserError: no such devices, or more of them than workers.
    """
    numbers = numbers_in(devices) if devices else None
    if numbers and setting.device not in ("auto", "cuda"):
        raise UserError(f"--devices says which accelerators there are, and --device {setting.device} which one to use: "
                        f"leave one of them out")  # fmt: skip
    if numbers and count and count < len(numbers):
        raise UserError(f"--jobs {count} leaves some of --devices {devices} without a worker: leave --jobs out, for "
                        "one worker each, or name fewer devices")  # fmt: skip
    if numbers is None and device.type == "cuda" and device.index is None and count:
        numbers = list(range(min(count, torch.cuda.device_count())))
    return LocalWorkers(setting, count or len(numbers or ()), numbers)


def numbers_in(listed: str) -> list[int]:
    """``0-2,5`` as [0, 1, 2, 5]; raises :class:`UserError` for what is no such list."""
    parts = [re.fullmatch(r"\s*([0-9]{1,4})\s*(?:-\s*([0-9]{1,4})\s*)?", part) for part in listed.split(",")]
    ranges = [part and range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts]
    numbers = [number for numbers in ranges for number in numbers or ()]
    if not all(ranges) or len(set(numbers)) != len(numbers):
        raise UserError(f"--devices takes numbers, each once, as in 0-7 or 0,2, not {listed!r}")
    return numbers
