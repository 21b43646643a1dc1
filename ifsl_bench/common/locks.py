"""Locks of folders, for processes that make the same thing at once. Reading what is complete needs none."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import disk_errors

# What flock answers on network file systems that are mounted without locks, and on broken ones.
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
def locked(folder: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Holds the lock of ``folder`` (a file beside it); the operating system drops it when the process dies.

    Args:
        waiting: is told when another process holds the lock. A warning, since the wait may be long.

    Raises:
        UserError: the lock's file cannot be written, or the file system has no locks.
    """
    import filelock

    path = folder.parent / f".{folder.name}.lock"
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            _probe(path)
            lock = filelock.FileLock(path)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                if waiting:
                    waiting(f"another process is working on {folder.name}; waiting for it")
                lock.acquire()
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            raise UserError(
                f"cannot lock {path}: its file system has no working locks ({error}); "
                "choose a folder on a local disk with --home or --results"
            ) from error
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of ``folder`` now; False where this process may not ask."""
    import filelock

    path = folder.parent / f".{folder.name}.lock"
    if not path.exists():
        return False
    lock = filelock.FileLock(path)
    try:
        _probe(path)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    except (OSError, NotImplementedError):
        return False
    lock.release()
    return False
