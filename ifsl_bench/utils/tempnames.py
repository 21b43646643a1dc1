"""Names of what is being written, so that no two processes ever share one, and of the processes that write."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
from functools import lru_cache
from pathlib import Path

import psutil

PARTIAL = ".partial-"  # prefix of unfinished files and folders
REMOVED = ".removed-"  # prefix of folders that are being removed
DOWNLOAD = ".download-"  # prefix of folders with what a data set is made from
CLOCK = 5  # seconds by which a process may seem to have begun at another time: the clock is set while it runs
LONGEST = 143  # bytes of a file's name, where file systems that encrypt names have the least room
_TAG = re.compile(r"@[0-9a-f]{16}")


@lru_cache(maxsize=1)
def _machine() -> str:
    """A name of where this process's number means something: the host, and a hash of its kernel's boot and of the
    container, since hosts may have one name and containers one kernel."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    host = re.sub(r"[^A-Za-z0-9_-]", "_", parts[0].partition(".")[0])[:16]
    return f"{host}.{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:8]}"


def unique_name(name: str, end: str = "") -> str:
    """A name that no other call, of this process or another, gives: ``name@random`` and ``end``."""
    tag = f"@{secrets.token_hex(8)}{end}"
    return os.fsdecode(os.fsencode(name)[: LONGEST - len(tag)]) + tag


def strip_tag(name: str) -> str:
    """A tagged name without its tag."""
    return _TAG.sub("", name)


def process_id() -> str:
    """This process, in a word that no other has: machine, number, and the second in which it began."""
    return f"{_machine()}-{os.getpid()}-{_began(os.getpid()) or 0}"


def is_alive(writer: str) -> bool | None:
    """Returns whether a process that called itself so is alive; None where that cannot be told from here: another
    machine's, or none that :func:`process_id` named.

    The number of a process that has ended may be another's by now, which began at another time.
    """
    try:
        machine, process, start = writer.rsplit("-", 2)
        if machine != _machine():
            return None
        began = _began(int(process))
        return began is not None and abs(began - int(start)) <= CLOCK
    except (ValueError, OverflowError):  # of a damaged log
        return None


def _began(process: int) -> int | None:
    """Looks up when a process began, in seconds; None where there is no such process."""
    try:
        return round(psutil.Process(process).create_time())
    except psutil.Error:
        return None
