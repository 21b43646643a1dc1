"""Worker processes on this machine.

They are started anew, by multiprocessing's ``spawn``: forked ones would inherit the threads of PyTorch and the state of
CUDA, which do not survive it. An executor, multiprocessing's or loky's, gives up all its work when one of its processes
is killed, and cannot give each its own accelerator; here the loop hands a dead worker's node to another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from ifsl_bench.campaigns.graph import Node
from ifsl_bench.campaigns.schedule import Event
from ifsl_bench.campaigns.served import serve
from ifsl_bench.campaigns.work import Outcome, Setting, plainly
from ifsl_bench.common.errors import UserError
from ifsl_bench.running.job import Job

PATIENCE = 2.5  # seconds that workers have to end by themselves, before they are killed
STARTS = 3  # workers in a row that die before they are ready, after which nothing is tried any more
MEMORY = 0.9  # of the memory that is free at the beginning, for all workers together


@dataclass
class _Place:
    """A place for a process, which may have to be started again.

    Attributes:
        node: what it runs; None while it waits.
        last: key of the node before: what that has opened, this one may use.
    """

    number: int
    device: str | None
    process: BaseProcess | None = None
    pipe: Connection | None = None
    ready: bool = False
    node: Node | None = None
    last: str = ""


class LocalWorkers:
    """So many processes, which share the cores; each with an accelerator, if there are any.

    Args:
        devices: numbers of accelerators, as CUDA counts them here; each is visible to its worker alone, or to some
            where there are more workers than accelerators. None: workers see what this process sees.

    Raises:
        UserError: there are no such accelerators.
    """

    in_order = False

    def __init__(self, setting: Setting, count: int, devices: Sequence[int] | None = None) -> None:
        self.setting, self.count = setting, count
        self.share = max(1, setting.cores // count)
        seen = [visible(device) for device in devices] if devices else [None]
        self.workers = [_Place(number, seen[number % len(seen)]) for number in range(count)]
        self.memory = int(MEMORY * psutil.virtual_memory().available)
        self._context = multiprocessing.get_context("spawn")
        self._unready = 0  # starts that failed since one went well
        self._stillborn: list[Outcome] = []

    # -- what the loop asks

    def fits(self, node: Node) -> bool:
        running = [worker.node for worker in self.workers if worker.node]
        if not running:
            return True
        slots = sum(self._slots(other) for other in running) + self._slots(node)
        memory = sum(other.wants.memory for other in running) + node.wants.memory
        return slots <= self.count and memory <= self.memory and self._free(node) is not None

    def submit(self, node: Node, priority: int) -> None:
        worker = self._free(node)
        assert worker is not None
        try:
            self._start(worker)
        except OSError as error:  # no memory for another process, or one that ended before it was told what to do
            self._forget(worker)
            self._unready += 1
            self._stillborn.append(Outcome(node.key, "lost", f"its worker cannot be started ({plainly(error)})"))
            return
        assert worker.pipe is not None
        worker.node = node
        # What only the loop needs stays here: of hundreds of jobs it would fill the pipe before anybody listens.
        with contextlib.suppress(OSError):  # a worker that died is found by wait
            worker.pipe.send_bytes(pickle.dumps(replace(node, needs=(), results=())))

    def wait(self) -> Iterable[Event | Outcome]:
        self._check_starts()
        if self._stillborn:
            yield self._stillborn.pop()
            return
        busy = [worker for worker in self.workers if worker.process is not None]
        listened: list[Any] = [x for worker in busy for x in (worker.pipe, worker.process and worker.process.sentinel)]
        wait(listened, timeout=0.5)
        for worker in busy:
            yield from self._heard(worker)

    def close(self, at_once: bool = False) -> None:
        with _no_interrupts():
            started = [worker.process for worker in self.workers if worker.process is not None]
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    if worker.process is not None and at_once:
                        worker.process.terminate()
                    elif worker.pipe is not None:
                        worker.pipe.send_bytes(b"")
            end = time.monotonic() + PATIENCE
            for process in started:
                process.join(max(0.0, end - time.monotonic()))
            for process in started:
                _kill(process)
            for worker in self.workers:
                self._forget(worker)

    # -- one worker

    def _slots(self, node: Node) -> int:
        """Of as many as there are workers; all of them for work that takes the whole machine."""
        if node.wants.threads >= self.setting.cores > 1:
            return self.count
        return min(self.count, -(-node.wants.threads // self.share))

    def _free(self, node: Node) -> _Place | None:
        """An idle worker, the one that has open what the node needs rather than another."""
        taken = (
            {w.device for w in self.workers if w.node and w.node.wants.accelerator} if node.wants.accelerator else ()
        )
        idle = [worker for worker in self.workers if worker.node is None and worker.device not in taken]
        return min(idle, key=lambda w: (w.last not in node.needs, w.process is None), default=None)

    def _start(self, worker: _Place) -> None:
        if worker.process is not None and worker.process.is_alive():
            return
        self._forget(worker)
        worker.pipe, theirs = self._context.Pipe()
        about = theirs, self.setting, self.share, worker.number
        process = self._context.Process(target=serve, args=about, name=f"ifsl_bench worker {worker.number}")
        more = {} if worker.device is None else {"CUDA_VISIBLE_DEVICES": worker.device}
        with _environment(more):
            process.start()
        worker.process = process
        theirs.close()  # so that the pipe ends where the worker does

    def _heard(self, worker: _Place) -> Iterator[Event | Outcome]:
        assert worker.process is not None
        assert worker.pipe is not None
        dead = not worker.process.is_alive()  # asked first: what a dying worker has said is in the pipe by then
        with contextlib.suppress(EOFError, OSError):
            while worker.pipe.poll():
                said = worker.pipe.recv()
                if said is None:
                    worker.ready, self._unready = True, 0
                    continue
                if isinstance(said, Outcome) and worker.node is not None:
                    said = replace(said, key=worker.node.key)  # which one that cannot load it does not know
                    worker.node, worker.last = None, said.key
                yield said
        if dead:
            node, status = worker.node, worker.process.exitcode
            if not worker.ready:
                self._unready += 1
            self._forget(worker)
            self._check_starts()  # first: at this outcome the loop may give the node up
            if node is not None:
                yield Outcome(node.key, "lost", f"its worker {_end(status)}")

    def _check_starts(self) -> None:
        if self._unready >= STARTS:
            raise UserError(f"worker processes end as they start: run with --jobs 1, or see what they say in "
                            f"{self.setting.home.logs / 'workers'}")  # fmt: skip

    def _forget(self, worker: _Place) -> None:
        if worker.pipe is not None:
            worker.pipe.close()
        worker.process, worker.pipe, worker.ready, worker.node, worker.last = None, None, False, None, ""


def check_sendable(jobs: Iterable[Job]) -> None:
    """Raises :class:`UserError` where another process could not load a job's method."""
    for method, job in {job.method: job for job in jobs}.items():
        remedy = f"move it to a file (file.py:{method.__name__}), or run with --jobs 1"
        if method.__module__ == "__main__" and not job.chosen.file:
            raise UserError(f"method {job.name!r} is defined in a notebook or script, where other processes cannot "
                            f"find it: {remedy}")  # fmt: skip
        try:
            pickle.dumps(job)
        except Exception as error:
            said = f"method {job.name!r} cannot be handed to other processes ({plainly(error)}): {remedy}"
            raise UserError(said) from error


def _end(status: int | None) -> str:
    if status is not None and status < 0:
        why = ", perhaps for want of memory" if -status == getattr(signal, "SIGKILL", 9) else ""
        return f"was killed by signal {-status}{why}"
    return f"ended with status {status}"


def visible(device: int) -> str:
    """What CUDA_VISIBLE_DEVICES calls the device of that number."""
    import torch

    if (there := torch.cuda.device_count()) <= device:
        seen = f"sees {there} CUDA devices here, numbered from 0" if there else "sees no CUDA device here; --jobs N"
        raise UserError(f"--devices {device}: PyTorch {seen}" + ("" if there else " is for the processor's cores"))
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[device].strip() if names else str(device)


def _kill(process: BaseProcess) -> None:
    """Ends a process, and those that it has started, for good."""
    if process.is_alive():
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        process.kill()
        process.join(1.0)


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """Variables that a process started inside inherits."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Inside, Ctrl-C is not heard: who presses it twice shall not leave workers behind."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone hears it
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
