"""Locks of folders, for processes that would make the same thing at once: the second one waits, and finds it made.

A file system without locks is used all the same: what is written is complete by one rename, whoever else writes.
Reading what is complete needs none anyway.
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
# What flock answers on network file systems that are mounted without locks, and on broken ones.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EIO, errno.ESTALE}


@contextlib.contextmanager
def locked(
    folder: Path, warn: Callable[[str], None] | None = None, state: str = ", which is missing there or out of date"
) -> Iterator[None]:
    """Holds the lock of ``folder`` (a file beside it); the operating system drops it when the process dies.

    Where there are no working locks, the block runs without one.

    Args:
        warn: is told when another process keeps the lock, since the wait may be long.
        state: of the folder, for the one line that says why it cannot be written.

    Raises:
        UserError: nothing can be written there.
    """
    with disk_errors(folder), _named(f"{folder}{state}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if (release := _acquire(folder, SOON)) is None:
            if warn:
                warn(f"another process is working on {folder.name}; waiting for it")
            release = _acquire(folder, -1)
    try:
        with contextlib.suppress(OSError), os.scandir(folder.parent) as entries:
            next(entries, None)  # a network file system notices what other machines have made there
        yield
    finally:
        if release is not None:
            release()


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[bool]:
    """Holds the lock of ``folder`` if nobody does; yields whether it does, True where there are no working locks."""
    try:
        release = _acquire(folder, 0)
    except OSError:  # this process may not ask
        release = _nothing
    try:
        yield release is not None
    finally:
        if release is not None:
            release()


def is_locked(folder: Path) -> bool:
    """Tells whether a process holds the lock of ``folder`` now; False where this process may not ask."""
    if not _file(folder).exists():
        return False
    with taken(folder) as free:
        return not free


def _file(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def _nothing() -> None:
    """Releases the lock of a file system that has none."""


def _acquire(folder: Path, timeout: float) -> Callable[[], None] | None:
    """Acquires the lock of a folder and returns what releases it; None where another process keeps it for so long."""
    import filelock

    lock = filelock.FileLock(_file(folder))
    try:
        _try_flock(_file(folder))
        lock.acquire(timeout=timeout)
    except filelock.Timeout:
        return None
    except NotImplementedError:
        return _nothing
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return _nothing
    return lock.release


def _try_flock(path: Path) -> None:
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
def _named(what: str) -> Iterator[None]:
    """Makes an error name what cannot be written, instead of its lock."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise OSError(error.errno, error.strerror, what) from error
        raise
