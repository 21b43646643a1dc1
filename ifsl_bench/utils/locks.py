"""Folders that one process makes while the others wait: locks, atomic creation, and the identity of processes.

A folder is filled under another name and gets its own by one rename, so that it appears whole. Reading a complete
folder needs no lock. A file system without locks is used all the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import PARTIAL_MARK, REMOVED_MARK, quarantine_path, translate_disk_errors, unique_name

if TYPE_CHECKING:
    from filelock import BaseFileLock

SILENT_WAIT_SECONDS = 1.0  # seconds; a shorter wait, for a result that is being stored, is not reported
CLOCK_DRIFT_SECONDS = 5  # seconds by which the start of a process may seem to move: the clock is set while it runs
_UNSUPPORTED_ERRNOS = {
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOLCK,
    errno.EINVAL,
    errno.EIO,
}  # file systems mounted without
_DENIED_ERRNOS = {errno.EROFS, errno.EACCES, errno.EPERM}
T = TypeVar("T")


@contextlib.contextmanager
def hold_lock(
    folder: Path, warn: Callable[[str], None] | None = None, state: str = ", which is missing there or out of date"
) -> Iterator[None]:
    """Hold the lock of a folder, which the operating system drops when the process dies.

    Args:
        folder: the folder; the lock is a file in its parent.
        warn: called when another process keeps the lock, since the wait may be long.
        state: of the folder, for the error if it cannot be written.

    Raises:
        UserError: nothing can be written there.
    """
    lock = _make_lock(folder)
    with translate_disk_errors(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not _acquire_lock(lock, SILENT_WAIT_SECONDS):
                if warn:
                    warn(f"another process is working on {folder.name}; waiting for it")
                _acquire_lock(lock, -1)
        except OSError as error:
            if error.errno in _DENIED_ERRNOS:
                error.filename = f"{folder}{state}"  # and not its lock
            raise
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def try_lock(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder if it is free; yield whether it is, True where this process may not ask."""
    lock, free = _make_lock(folder), True
    with contextlib.suppress(OSError):
        free = _acquire_lock(lock, 0)
    try:
        yield free
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder now; False where this process may not ask."""
    if not _lock_file(folder).exists():
        return False
    with try_lock(folder) as free:
        return not free


def _lock_file(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def _make_lock(folder: Path) -> BaseFileLock:
    import filelock

    return filelock.FileLock(_lock_file(folder))


def _acquire_lock(lock: BaseFileLock, timeout: float) -> bool:
    """Acquire a lock where there are locks; return False where another process keeps it until the timeout."""
    import filelock

    try:
        lock.acquire(timeout=timeout)
    except filelock.Timeout:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
    return True


# -- folders that appear whole


def get_or_create(
    folder: Path, read: Callable[[], T | None], make: Callable[[], T], warn: Callable[[str], None], again: str
) -> T:
    """Read the content of a folder, or make it under the folder's lock.

    Args:
        folder: the folder to read or make.
        read: returns None where there is nothing to use; raises :class:`CorruptFile` if it is damaged; it is then
            quarantined with a warning.
        make: fills the folder and returns what ``read`` would.
        warn: called with the warning.
        again: the part of the warning on what follows, "it is computed again".
    """
    with contextlib.suppress(CorruptFile):  # before the lock, which a read-only folder does not grant
        content = read()
        if content is not None:
            return content
    with hold_lock(folder, warn):
        try:
            content = read()
            if content is not None:
                return content
        except CorruptFile as error:
            warn(f"{error}; {again}, the damaged files are in {quarantine_path(folder)}")
        return make()


@contextlib.contextmanager
def atomic_folder(target: Path, resume: bool = False) -> Iterator[Path]:
    """Yield a folder to fill, which replaces ``target`` when the block ends well and vanishes when it does not.

    Between two renames there is nothing at ``target``, never a mixture.

    Args:
        target: the folder to make or replace; the caller holds its lock.
        resume: go on in what an earlier block left, and leave this one's to the next if the block fails.

    Raises:
        UserError: the system refuses to write.
    """
    partial = unfinished_path(target)
    with translate_disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            shutil.rmtree(partial, ignore_errors=True)  # no process reads it
        partial.mkdir(exist_ok=True)
        try:
            yield partial
            remove_path(target)
            os.rename(partial, target)
        except BaseException:
            if not (resume and any(partial.iterdir())):
                shutil.rmtree(partial, ignore_errors=True)
            raise


def unfinished_path(target: Path) -> Path:
    """Return the folder that is filled to become ``target``."""
    return target.with_name(PARTIAL_MARK + target.name)


def remove_path(path: Path) -> None:
    """Remove a folder or file: its name goes at once, so that no reader finds a half."""
    aside = path.with_name(unique_name(REMOVED_MARK + path.name))
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)  # open files stay, on a network file system
    else:
        with contextlib.suppress(OSError):
            aside.unlink()


# -- identity of processes


@lru_cache(maxsize=1)
def _machine_id() -> str:
    """Return a name of where this process's number means something.

    It has the host, and a hash of its kernel's boot and of the container, since hosts may have one name and containers
    one kernel.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    host = re.sub(r"[^A-Za-z0-9_-]", "_", parts[0].partition(".")[0])[:16]
    return f"{host}.{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:8]}"


def make_process_name() -> str:
    """Return a name of this process that no other has: machine, number, and the second in which it began."""
    return f"{_machine_id()}-{os.getpid()}-{_process_start_time(os.getpid()) or 0}"


def is_process_alive(name: str) -> bool | None:
    """Return whether the process with a name of :func:`make_process_name` is alive; None if no one here can tell.

    That is the case for a process of another machine, and for a text that is no such name.

    The number of a process that has ended may be another's by now, which began at another time.
    """
    try:
        machine, process, start = name.rsplit("-", 2)
        if machine != _machine_id():
            return None
        began = _process_start_time(int(process))
        return began is not None and abs(began - int(start)) <= CLOCK_DRIFT_SECONDS
    except (ValueError, OverflowError):  # of a damaged log
        return None


def _process_start_time(process: int) -> int | None:
    try:
        return round(psutil.Process(process).create_time())
    except psutil.Error:
        return None
