"""Folders that appear whole: they are filled under a name of one process's own, and get theirs by one rename.

Whoever fills one holds its lock (:mod:`ifsl_bench.common.locks`). Where locks exclude nobody, one of two that make the
same thing fails, in a line, and what is there stays whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Stale, disk_errors, fsync_folder
from ifsl_bench.common.owners import PARTIAL, REMOVED, partial_of, tagged, what

T = TypeVar("T")
_IN_THE_WAY = {errno.ENOTEMPTY, errno.EEXIST}
TRIES = 100  # of a rename, each after removing what is in the way, and of reading


@contextlib.contextmanager
def building(target: Path, resume: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` when the block ends well and vanishes when it does not.

    Who builds holds the lock of ``target``, so what is left of earlier blocks is nobody's any more: it is removed.

    Args:
        resume: go on in what an earlier block left, and leave this one's to the next if the block fails.

    Raises:
        UserError: the system refuses to write.
    """
    partial = partial_of(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in sorted(leftovers(target), key=_written, reverse=True):
            if resume and leftover.name.startswith(PARTIAL) and leftover.is_dir() and not partial.exists():
                os.rename(leftover, partial)
            else:
                remove(leftover, target)
        partial.mkdir(exist_ok=True)
        try:
            yield partial
            publish(partial, target)
        except BaseException:
            if resume and partial.is_dir() and any(partial.iterdir()):
                os.rename(partial, unfinished(target))
            else:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        fsync_folder(target.parent)


def unfinished(target: Path) -> Path:
    """The folder that a failed block leaves for the next one to continue."""
    return target.with_name(PARTIAL + target.name)


def leftovers(target: Path) -> list[Path]:
    """Lists the unfinished folders for ``target``; a process that holds its lock may still be filling one."""
    try:
        unfinished_paths = [path for path in target.parent.iterdir() if path.name.startswith((PARTIAL, REMOVED))]
    except OSError:
        return []
    return sorted(
        path for path in unfinished_paths if what(path.name) in (PARTIAL + target.name, REMOVED + target.name)
    )


def _written(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def publish(partial: Path, target: Path) -> None:
    """Renames a whole folder to ``target``; whatever is there goes first.

    A rename replaces no folder with content, so what is in the way is renamed, too. Between the two renames there is
    nothing at ``target``, never a mixture.
    """
    for _ in range(TRIES):
        try:
            os.rename(partial, target)
            return
        except FileNotFoundError as error:
            why = "was removed while it was being filled; the same command starts it again"
            raise UserError(f"{partial} {why}") from error
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
        remove(target)
    raise UserError(f"{target} appears again whenever it is replaced: other processes write it; end them first")


def remove(path: Path, of: Path | None = None) -> None:
    """Removes a folder or file: its name goes at once, so that no reader finds a half.

    Args:
        of: what it was to be, where that is not its name.
    """
    aside = path.with_name(tagged(REMOVED + (of or path).name))
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    # On a network file system, files that somebody has open stay as .nfs... until they are closed. Whatever is left is
    # removed with the next leftovers.
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            aside.unlink()


def whole(folder: Path, read: Callable[[], T]) -> T:
    """Calls ``read`` on the files of a folder, and makes sure that all came from the same folder.

    Another process may replace the folder between two files. Then it is read again, and so is what failed meanwhile.
    """
    for _ in range(TRIES):
        content, failed = None, None
        with _held(folder) as before:
            try:
                content = read()
            except (CorruptFile, Stale, FileNotFoundError) as error:
                failed = error
            same = _identity(folder) == before
        if same and failed is not None:
            raise failed
        if same and before is not None:  # else it was read between two moments without a folder
            return cast(T, content)
    raise UserError(f"{folder} changes faster than it can be read: other processes write it; end them")


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[tuple[int, int] | None]:
    """Yields the identity of a folder, which no other folder gets while the block runs."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # one that comes now is not held, and another might get its number
        yield None
        return
    except OSError:  # a system that opens no folders
        yield _identity(folder)
        return
    try:
        yield _identity(handle)
    finally:
        os.close(handle)


def _identity(folder: Path | int) -> tuple[int, int] | None:
    try:
        facts = os.stat(folder)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def is_silly(name: str) -> bool:
    """Tells whether NFS made this file, in place of one that was removed while somewhere still open."""
    return re.fullmatch(r"\.nfs[0-9a-f]+", name) is not None
