"""Locks of folders: of processes that would make the same thing at once, one makes it, and the others find it made.

Reading what is complete needs none. A file system without locks is used all the same.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ifsl_bench.utils.files import disk_errors

if TYPE_CHECKING:
    from filelock import BaseFileLock

SOON = 1.0  # seconds; a wait as short as that, for a result that is being stored, is nothing to tell
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EIO}  # file systems mounted without
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextlib.contextmanager
def locked(
    folder: Path, warn: Callable[[str], None] | None = None, state: str = ", which is missing there or out of date"
) -> Iterator[None]:
    """Holds the lock of ``folder`` (a file beside it); the operating system drops it when the process dies.

    Args:
        warn: is told when another process keeps the lock, since the wait may be long.
        state: of the folder, for the one line that says why it cannot be written.

    Raises:
        UserError: nothing can be written there.
    """
    lock = _lock(folder)
    with disk_errors(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not _acquired(lock, SOON):
                if warn:
                    warn(f"another process is working on {folder.name}; waiting for it")
                _acquired(lock, -1)
        except OSError as error:
            if error.errno in _REFUSED:
                error.filename = f"{folder}{state}"  # and not its lock
            raise
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def try_lock(folder: Path) -> Iterator[bool]:
    """Holds the lock of ``folder`` if nobody does; yields whether nobody does, True where this process may not ask."""
    lock, free = _lock(folder), True
    with contextlib.suppress(OSError):
        free = _acquired(lock, 0)
    try:
        yield free
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Tells whether a process holds the lock of ``folder`` now; False where this process may not ask."""
    if not _file(folder).exists():
        return False
    with try_lock(folder) as free:
        return not free


def _file(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def _lock(folder: Path) -> BaseFileLock:
    import filelock

    return filelock.FileLock(_file(folder))


def _acquired(lock: BaseFileLock, timeout: float) -> bool:
    """Acquires a lock where there are locks; False where another process keeps it for so long."""
    import filelock

    try:
        lock.acquire(timeout=timeout)
    except filelock.Timeout:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
