"""Locks of folders, for processes that would make the same thing at once: the second one waits, and finds it made.

They save double work, and no more than that: what is written is complete by one rename, whoever else writes. So a file
system without working locks, or one where they exclude nobody, is used all the same; ``IFSL_BENCH_LOCKS=0`` says that
none are to be tried. Reading what is complete needs none anyway.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ifsl_bench.common.files import disk_errors

SOON = 1.0  # seconds; a wait as short as that, for a result that is being stored, is nothing to tell
_told: set[int] = set()  # devices whose lack of locks was said
# What flock answers on network file systems that are mounted without locks, and on broken ones.
SETTING = "IFSL_BENCH_LOCKS"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EIO, errno.ESTALE}


def _probe(path: Path) -> None:
    """Raises ``OSError`` where flock does not work. There filelock would take the file itself for the lock: one left
    behind by a real lock, which is never removed, would be waited for without end."""
    if sys.platform != "win32":
        import fcntl

        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_UN)  # of a lock that this handle does not hold: changes nothing
        finally:
            os.close(handle)


@contextlib.contextmanager
def locked(
    folder: Path, warn: Callable[[str], None] | None = None, state: str = ", which is missing there or out of date"
) -> Iterator[None]:
    """Holds the lock of ``folder`` (a file beside it); the operating system drops it when the process dies.

    Where there are no working locks, the block runs without one.

    Args:
        warn: is told when another process keeps the lock, since the wait may be long; and, once for each file system,
            that there are none.
        state: of the folder, for the one line that says why it cannot be written.

    Raises:
        UserError: nothing can be written there.
    """
    with _lock(folder, warn, state):
        _look_again(folder.parent)
        yield


def _look_again(folder: Path) -> None:
    """Has a network file system notice what other machines have made there since it last looked."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        next(entries, None)


@contextlib.contextmanager
def _lock(folder: Path, warn: Callable[[str], None] | None, state: str) -> Iterator[None]:
    import filelock

    path, lock = folder.parent / f".{folder.name}.lock", None
    with disk_errors(folder), _named(f"{folder}{state}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if wanted():
            try:
                _probe(path)
                lock = filelock.FileLock(path)
                try:
                    lock.acquire(timeout=SOON)
                except filelock.Timeout:
                    if warn:
                        warn(f"another process is working on {folder.name}; waiting for it")
                    lock.acquire()
            except (OSError, NotImplementedError) as error:
                if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                    raise
                lock = None
                _tell(path, error, warn)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Lets an error say what cannot be written, not that its lock cannot."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise OSError(error.errno, error.strerror, what) from error
        raise


def wanted() -> bool:
    """Whether locks are to be tried."""
    return os.environ.get(SETTING, "1") != "0"


def _tell(path: Path, error: Exception, warn: Callable[[str], None] | None) -> None:
    try:
        device = path.parent.stat().st_dev
    except OSError:
        device = -1
    if warn and device not in _told:
        _told.add(device)
        warn(
            f"the file system of {path.parent} has no working locks ({error}): processes that make the same thing at "
            f"once each make it, to the same end; {SETTING}=0 tries none and says nothing"
        )


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[bool]:
    """Holds the lock of ``folder`` if nobody does; whether it does, and True where there are no working locks."""
    import filelock

    path, lock = folder.parent / f".{folder.name}.lock", None
    if wanted():
        try:
            _probe(path)
            lock = filelock.FileLock(path)
            lock.acquire(timeout=0)
        except filelock.Timeout:
            yield False
            return
        except (OSError, NotImplementedError):
            lock = None
    try:
        yield True
    finally:
        if lock is not None:
            lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of ``folder`` now; False where this process may not ask."""
    if not (folder.parent / f".{folder.name}.lock").exists():
        return False
    with taken(folder) as free:
        return not free
