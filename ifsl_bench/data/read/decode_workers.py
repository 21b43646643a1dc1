"""Processes that decode images, where threads would wait for the interpreter's lock; loky starts them, and needs no
``if __name__ == "__main__"`` in the user's script. They write no file: what they decode comes back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait

import numpy as np

from ifsl_bench.data.read.decode import Batch, ImageSpec, decode_rows, formats

WORTH = 3_000  # images for which starting processes pays
SENT = 1 << 15  # encoded bytes of an image, on average, up to which sending it costs less than the lock
PIXELS = 1 << 20  # of an image decoded by a worker; larger ones, by threads that keep a bound on all they hold together
_MOST = 16  # each has an interpreter with NumPy and Pillow in memory
# No modules from the current folder; no remarks of Pillow on odd metadata, nor of loky as it cleans up after a parent
# that was killed; and the allocator keeps the memory of a batch, where it would clear new pages for the next.
_ENVIRONMENT = {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
                "MALLOC_TRIM_THRESHOLD_": str(1 << 26), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}  # fmt: skip


def cores() -> int:
    """The cores this process may use."""
    import loky

    return loky.cpu_count()


class Workers:
    """A pool of processes. This process decodes what is too large for them, and all once one has died (``lost``)."""

    def __init__(self, count: int) -> None:
        import loky

        self.count, self.lost = count, False
        self.theirs, self.ours = multiprocessing.Pipe(duplex=False)  # says nothing, and closes where this process ends
        with _starting():
            resource_tracker.ensure_running()  # this one, and loky's in the next line, would lift the mask later
            self.pool = loky.ProcessPoolExecutor(count, initializer=_start, initargs=(self.theirs,), env=_ENVIRONMENT)
        with _starting():
            self.pool.submit(formats)  # starts them all

    def decode_rows(self, out: np.ndarray, rows: Sequence[int], contents: Sequence[bytes], spec: ImageSpec) -> Batch:
        """As the function of that name; called from more threads than there are processes, to keep all at work."""
        if self.lost or sum(map(len, contents)) > SENT * len(contents):
            return decode_rows(out, rows, contents, spec)
        try:
            images, batch = self.pool.submit(_decode, contents, spec).result()
        except (BrokenExecutor, MemoryError):
            self.lost = True
            return decode_rows(out, rows, contents, spec)
        out[rows] = images
        if left := batch.large:
            here = decode_rows(out, [rows[i] for i in left], [contents[i] for i in left], spec)
            batch.digests[left] = here.digests
            batch.bad += [(left[i], reason) for i, reason in here.bad]
            batch.small += here.small
        return batch

    def end(self) -> None:
        """Ends the processes."""
        with self.ours:
            self.pool.shutdown()


@contextmanager
def decode_workers(images: int) -> Iterator[Workers | None]:
    """Processes for so many images, for the time of the block; None where threads do as well or have to do."""
    count, workers = min(cores(), _MOST), None
    able = os.name == "posix" and sys.executable and not hasattr(sys, "frozen")
    if able and not multiprocessing.current_process().daemon and images >= WORTH and count > 1:
        with suppress(OSError, RuntimeError, ImportError):  # there may be none to have
            workers = Workers(count)
    try:
        yield workers
    finally:
        if workers:
            workers.end()


@contextmanager
def _starting() -> Iterator[None]:
    """Gives all that is started meanwhile, loky's own helpers too, that environment, and Ctrl-C does not reach it."""
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name in _ENVIRONMENT:
            os.environ.pop(name) if name not in before else os.environ.update({name: before[name]})
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def _start(parent: Connection) -> None:
    """Prepares a worker."""
    threading.Thread(target=lambda: (wait([parent]), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also where loky starts one later, in the place of another


def _decode(contents: Sequence[bytes], spec: ImageSpec) -> tuple[np.ndarray, Batch]:
    """Decodes images in a worker: uint8 [n, size, size, 3], with zeros for those that are bad or too large."""
    images = np.zeros((len(contents), spec.size, spec.size, 3), np.uint8)
    return images, decode_rows(images, range(len(contents)), contents, spec, PIXELS)
