"""Processes that decode images. Python's lock keeps threads from decoding many small ones at once.

They are new interpreters that import this module and talk through pipes. So nothing is forked, a script that imports
data needs no ``if __name__ == "__main__"``, and a worker whose parent is gone finds its pipe closed and ends.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, cast

import numpy as np

from ifsl_bench.data.read.decode import Batch, ImageSpec, decode_rows, formats

WORTH = 3_000  # images for which starting processes pays
SENT = 1 << 15  # encoded bytes of an image, on average, up to which sending it costs less than Python's lock
PIXELS = 1 << 20  # of an image decoded by a worker; larger ones, by threads that keep a bound on all they hold together
_MOST = 16  # each has an interpreter with NumPy and Pillow in memory
_SERVE = (
    "import sys; sys.path[:] = sys.argv[2:]; from ifsl_bench.data.read.decode_workers import serve; serve(sys.argv[1])"
)

Place = tuple[str, int]  # of an array: its file, and where in it the array begins
Request = tuple[Place, Sequence[int], Sequence[bytes], ImageSpec]


class WorkerDied(Exception):
    """A worker gave no answer: for lack of memory, or by a fault in a decoder."""


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Worker:
    """One process, used by one thread at a time.

    Args:
        executable: the Python to start.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, executable: str | bytes) -> None:
        flags = ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site
        # Not -m, which would let the current folder hide modules.
        command = [executable, *flags, "-c", _SERVE, str(os.getpid()), *map(str, sys.path)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # In a session of its own Ctrl-C in the terminal does not reach it.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads},
            start_new_session=os.name == "posix",
        )
        self.requests, self.answers = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)

    def ask(self, request: Request) -> Batch:
        """What came of a request.

        Raises:
            WorkerDied: there is no answer, and there will be none.
            Exception: what decoding there raised.
        """
        try:
            pickle.dump(request, self.requests, pickle.HIGHEST_PROTOCOL)
            self.requests.flush()
            answer = pickle.load(self.answers)
        except Exception as error:  # of any kind, if what it reads is no answer
            answer = error
        else:
            if isinstance(answer, Batch):
                return answer
            if isinstance(answer, Exception) and not isinstance(answer, MemoryError):
                raise answer
        self.end()
        raise WorkerDied from answer if isinstance(answer, Exception) else None

    def end(self) -> None:
        """Ends it at once; when this returns, it writes no more."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.requests, self.answers):
            with suppress(OSError):
                pipe.close()


class Workers:
    """Decodes in other processes; in this one what is too large for them, and all once one of them died.

    Args:
        count: processes.
        executable: the Python to start.

    Attributes:
        lost: whether one died.

    Raises:
        OSError: they cannot be started.
    """

    def __init__(self, count: int, executable: str | bytes = sys.executable) -> None:
        self.count, self.lost = count, False
        self.started: list[_Worker] = []
        self.free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for _ in range(count):
                self.started.append(_Worker(executable))
        except BaseException:
            self.end()
            raise
        for worker in self.started:
            self.free.put(worker)

    def decode_rows(self, out: np.ndarray, rows: Sequence[int], contents: Sequence[bytes], spec: ImageSpec) -> Batch:
        """As the function of that name; called from more threads than there are processes, to keep all at work.

        Args:
            out: decoded by workers where it is a whole :class:`numpy.memmap`, whose file they write.
        """
        if self.lost or not _is_whole_map(out) or sum(map(len, contents)) > SENT * len(contents):
            return decode_rows(out, rows, contents, spec)
        place = str(cast(np.memmap, out).filename), cast(np.memmap, out).offset
        worker = self.free.get()
        try:
            batch: Batch | None = worker.ask((place, rows, contents, spec))
        except WorkerDied:
            self.lost, batch = True, None
        finally:
            self.free.put(worker)
        if batch is None:
            return decode_rows(out, rows, contents, spec)
        if left := batch.large:
            here = decode_rows(out, [rows[i] for i in left], [contents[i] for i in left], spec)
            batch.digests[left] = here.digests
            batch.bad += [(left[i], reason) for i, reason in here.bad]
        return batch

    def end(self) -> None:
        """Ends the processes."""
        for worker in self.started:
            worker.end()


def _is_whole_map(array: np.ndarray) -> bool:
    """Whether an array is all of a mapped file; a part of one does not know which."""
    return isinstance(array, np.memmap) and array.base is getattr(array, "_mmap", None)


@contextmanager
def decode_workers(images: int) -> Iterator[Workers | None]:
    """Processes to decode so many images, for the time of the block; None where threads do as well."""
    from multiprocessing.spawn import get_executable  # programs with Python inside say there which one to start

    count, executable = min(cores(), _MOST), get_executable()
    workers = None
    if count > 1 and images >= WORTH and executable and not getattr(sys, "frozen", False):
        with suppress(OSError):
            workers = Workers(count, executable)
    try:
        yield workers
    finally:
        if workers:
            workers.end()


def serve(parent: str) -> None:
    """In a worker: answers requests until there are no more.

    Args:
        parent: the number of the process that started this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, where a session does not keep it away
    gone = (EOFError, BrokenPipeError, pickle.UnpicklingError)  # how a pipe ends where its other end did
    with suppress(*gone), os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata
        formats()
        while True:
            request: Request = pickle.load(sys.stdin.buffer)
            answer: Batch | Exception
            try:
                answer = _answer(request, int(parent))
            except Exception as error:
                answer = error
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _answer(request: Request, parent: int) -> Batch:
    place, rows, contents, spec = request
    images = np.zeros((len(rows), spec.size, spec.size, 3), np.uint8)
    batch = decode_rows(images, range(len(rows)), contents, spec, PIXELS)
    _write(place, rows, images, parent)
    return batch


def _write(place: Place, rows: Sequence[int], images: np.ndarray, parent: int) -> None:
    """Writes images into the file of an array, where the parent's map shows them. A map here would cost a fifth of the
    time: a page at a time is found and cleared."""
    ends = np.flatnonzero(np.diff(rows) != 1) + 1  # of runs of consecutive rows, which are written together
    with open(place[0], "r+b") as file:
        # Where the parent was killed, this may be a file of the same name by an import that came after it. While it
        # lives, it holds the lock, so what was opened before this line is its own.
        if os.name == "posix" and os.getppid() != parent:
            sys.exit()
        for run, group in zip(np.split(np.asarray(rows), ends), np.split(images, ends), strict=True):
            file.seek(place[1] + int(run[0]) * images[0].nbytes)
            file.write(group.data)
