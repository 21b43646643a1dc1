"""Folders that are made once, by one process, and appear whole: they are filled under another name, and get theirs by
one rename.

Whoever fills one holds its lock (:mod:`ifsl_bench.utils.locks`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import disk_errors, quarantine
from ifsl_bench.utils.locks import locked
from ifsl_bench.utils.tempnames import PARTIAL, REMOVED, unique_name

T = TypeVar("T")


def get_or_create(
    folder: Path, read: Callable[[], T | None], make: Callable[[], T], warn: Callable[[str], None], again: str
) -> T:
    """Reads what is in a folder, or makes it under the folder's lock.

    Args:
        read: returns None where there is nothing to use; raises :class:`CorruptFile` for what is damaged, which is then
            set aside with a warning.
        again: what the warning says, "it is computed again".
    """
    with contextlib.suppress(CorruptFile):  # before the lock, which a read-only folder does not grant
        if (there := read()) is not None:
            return there
    with locked(folder, warn):
        try:
            if (there := read()) is not None:
                return there
        except CorruptFile as error:
            warn(f"{error}; {again}, the damaged files are in {quarantine(folder)}")
        return make()


@contextlib.contextmanager
def atomic_folder(target: Path, resume: bool = False) -> Iterator[Path]:
    """A folder to fill, which replaces ``target`` when the block ends well and vanishes when it does not.

    Between two renames there is nothing at ``target``, never a mixture.

    Args:
        resume: go on in what an earlier block left, and leave this one's to the next if the block fails.

    Raises:
        UserError: the system refuses to write.
    """
    partial = unfinished(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            shutil.rmtree(partial, ignore_errors=True)  # which nobody reads
        partial.mkdir(exist_ok=True)
        try:
            yield partial
            remove(target)
            os.rename(partial, target)
        except BaseException:
            if not (resume and any(partial.iterdir())):
                shutil.rmtree(partial, ignore_errors=True)
            raise


def unfinished(target: Path) -> Path:
    """The folder that is filled to become ``target``."""
    return target.with_name(PARTIAL + target.name)


def remove(path: Path) -> None:
    """Removes a folder or file: its name goes at once, so that no reader finds a half."""
    aside = path.with_name(unique_name(REMOVED + path.name))
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)  # what is open elsewhere stays, on a network file system
    else:
        with contextlib.suppress(OSError):
            aside.unlink()
