"""Processes that decode images. Python's lock keeps threads from decoding many small ones at once.

They are new interpreters that import this module alone and talk through pipes. So nothing is forked, a script that
imports data needs no ``if __name__ == "__main__"``, and a worker whose parent is gone finds its pipe closed and ends.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, cast

import numpy as np

from ifsl_bench.data.decode import Batch, ImageSpec, decode_rows, formats

WORTH = 3_000  # images for which starting processes, a third of a second, pays
SENT = 1 << 21  # encoded bytes sent to another process at a time; a large image is decoded where it is
PIXELS = 1 << 20  # of an image decoded by a worker; larger ones, by threads that keep a bound on all they hold together
_MOST = 16  # each has an interpreter with NumPy and Pillow in memory
_SERVE = "import sys; sys.path[:] = sys.argv[1:]; from ifsl_bench.data.decode_workers import serve; serve()"

Place = tuple[str, int]  # of an array: its file, and where in it the array begins
Request = tuple[Place, Sequence[int], Sequence[bytes], ImageSpec]


class WorkerDied(Exception):
    """A worker ended without an answer: for lack of memory, or by a fault in a decoder."""


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Worker:
    """One process, used by one thread at a time.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        # Not -m, which would let the current folder hide modules.
        command = [sys.executable, "-c", _SERVE, *map(str, sys.path)]
        # In a session of its own Ctrl-C in the terminal does not reach it.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=os.name == "posix"
        )
        self.requests, self.answers = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)

    def ask(self, request: Request) -> Batch:
        try:
            pickle.dump(request, self.requests, pickle.HIGHEST_PROTOCOL)
            self.requests.flush()
            return cast(Batch, pickle.load(self.answers))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerDied from error

    def end(self) -> None:
        for pipe in (self.requests, self.answers):
            with suppress(OSError):
                pipe.close()
        self.process.wait()


class Workers:
    """Decodes in other processes; in this one what is too large for them, and all once one of them died.

    Args:
        count: processes.

    Attributes:
        lost: whether one died.

    Raises:
        OSError: they cannot be started.
    """

    def __init__(self, count: int) -> None:
        self.count, self.lost = count, False
        self.started: list[_Worker] = []
        self.free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for _ in range(count):
                self.started.append(_Worker())
        except BaseException:
            self.end(kill=True)
            raise
        for worker in self.started:
            self.free.put(worker)

    def decode_rows(self, out: np.ndarray, rows: Sequence[int], contents: Sequence[bytes], spec: ImageSpec) -> Batch:
        """As the function of that name; called from more threads than there are processes, to keep all at work.

        Args:
            out: decoded by workers where it is a :class:`numpy.memmap`, whose file they write.
        """
        if self.lost or not isinstance(out, np.memmap) or sum(map(len, contents)) > SENT:
            return decode_rows(out, rows, contents, spec)
        place = str(out.filename), out.offset
        worker = self.free.get()
        try:
            batch = worker.ask((place, rows, contents, spec))
        except WorkerDied:
            self.lost = True
        finally:
            self.free.put(worker)
        if self.lost:
            return decode_rows(out, rows, contents, spec)
        if left := batch.large:
            here = decode_rows(out, [rows[i] for i in left], [contents[i] for i in left], spec)
            batch.digests[left] = here.digests
            batch.bad += [(left[i], reason) for i, reason in here.bad]
        return batch

    def end(self, kill: bool = False) -> None:
        """Ends the processes, at once or when they have answered."""
        for worker in self.started:
            if kill:
                worker.process.kill()
            worker.end()


@contextmanager
def decode_workers(images: int) -> Iterator[Workers | None]:
    """Processes to decode so many images, for the time of the block; None where threads do as well."""
    count = min(cores(), _MOST)
    workers = None
    if count > 1 and images >= WORTH:
        with suppress(OSError):
            workers = Workers(count)
    try:
        yield workers
    except BaseException:
        if workers:
            workers.end(kill=True)
        raise
    if workers:
        workers.end()


def serve() -> None:
    """In a worker: answers requests until there are no more."""
    gone = (EOFError, BrokenPipeError, pickle.UnpicklingError)  # how a pipe ends where its other end did
    with suppress(*gone), os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata
        formats()
        while True:
            (path, start), rows, contents, spec = pickle.load(sys.stdin.buffer)
            images = np.zeros((len(rows), spec.size, spec.size, 3), np.uint8)
            batch = decode_rows(images, range(len(rows)), contents, spec, PIXELS)
            _write(path, start, rows, images)
            pickle.dump(batch, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _write(path: str, start: int, rows: Sequence[int], images: np.ndarray) -> None:
    """Writes images into the file of an array, where the parent's map shows them. A map here would cost a fifth of the
    time: a page at a time is found and cleared."""
    ends = np.flatnonzero(np.diff(rows) != 1) + 1  # of runs of consecutive rows, which are written together
    with open(path, "r+b") as file:
        for run, group in zip(np.split(np.asarray(rows), ends), np.split(images, ends), strict=True):
            file.seek(start + int(run[0]) * images[0].nbytes)
            file.write(group.data)
