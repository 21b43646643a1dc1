"""Files on disk: where they live, how they are written (atomically), locked and verified.

Nothing is ever half-written under its final name: content goes to a temporary sibling, is flushed to the disk, and is
renamed. A process killed at any point leaves at most a temporary file or folder whose name starts with ``.partial-``;
those of a build are removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifsl_bench.common.errors import CorruptFile, UserError

if TYPE_CHECKING:
    import numpy as np

PARTIAL = ".partial-"  # prefix of unfinished files and folders; only the holder of the lock may remove them


@dataclass(frozen=True)
class Home:
    """The folders that ifsl_bench writes to.

    Args:
        cache: data sets, checkpoints and features; everything in it can be made again.
        results: result files, which cannot.
    """

    cache: Path
    results: Path

    @classmethod
    def locate(cls, home: str | Path | None = None, results: str | Path | None = None) -> Home:
        """Explicit arguments first, then ``IFSL_BENCH_HOME``, then the platform's user folders."""
        import platformdirs

        home = home or os.environ.get("IFSL_BENCH_HOME") or None
        cache = Path(home).expanduser().absolute() if home else Path(platformdirs.user_cache_dir("ifsl_bench"))
        if results:
            return cls(cache, Path(results).expanduser().absolute())
        return cls(cache, cache / "results" if home else Path(platformdirs.user_data_dir("ifsl_bench")) / "results")

    @property
    def data(self) -> Path:
        return self.cache / "data"

    @property
    def pretrained(self) -> Path:
        return self.cache / "pretrained"

    @property
    def features(self) -> Path:
        return self.cache / "features"

    @property
    def trained(self) -> Path:
        return self.cache / "trained"

    @property
    def probes(self) -> Path:
        """What methods compute on made-up episodes."""
        return self.cache / "probes"

    @property
    def tasks(self) -> Path:
        """Task files of the data sets that the user prepared from images of their own."""
        return self.cache / "tasks"


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals (full disk, no permission) into one plain line."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full; free some space or choose another folder with --home",
            errno.EDQUOT: "your disk quota is used up; free some space or choose another folder with --home",
            errno.EACCES: "no permission to write there; choose another folder with --home or --results",
            errno.EPERM: "no permission to write there; choose another folder with --home or --results",
            errno.EROFS: "the file system is read-only; choose another folder with --home or --results",
            errno.ENOTDIR: "part of the path is a file, not a folder; choose another folder with --home or --results",
            errno.EEXIST: "a file of that name is in the way; remove it or choose another folder",
            errno.EFBIG: "the file would be larger than this system allows (see ulimit -f)",
        }
        if error.errno in reasons:
            raise UserError(f"cannot write {error.filename or path}: {reasons[error.errno]}") from error
        raise


@contextlib.contextmanager
def locked(folder: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Holds the lock of ``folder`` (a file beside it); the operating system drops it when the process dies."""
    import filelock

    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder.parent / f".{folder.name}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if waiting:
                waiting(f"another process is working on {folder.name}; waiting for it")
            lock.acquire()
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
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    except OSError:
        return False
    lock.release()
    return False


def fsync_folder(folder: Path) -> None:
    """Makes a rename in ``folder`` survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically: readers see the old file or the new one, never a part."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.parent / f"{PARTIAL}{path.name}.{os.getpid()}"
        try:
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        fsync_folder(path.parent)


_NUMBERS = re.compile(r"\[\n\s+(-?[0-9][0-9.eE+\-]*(?:,\n\s+-?[0-9][0-9.eE+\-]*)*)\n\s+\]")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON with lists of numbers on one line each."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    text = _NUMBERS.sub(lambda match: "[" + re.sub(r"\s+", " ", match.group(1)) + "]", text)
    write_bytes(path, (text + "\n").encode())


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice")
    return value


def read_json(path: Path) -> Any:
    """Reads a JSON object; raises :class:`CorruptFile` if it is not one.

    NaN, infinities and a key that is there twice, which Python would let pass, are none either.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} holds {type(value).__name__} where a JSON object was expected")
    return value


@contextlib.contextmanager
def building(target: Path, resume: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` when the block ends well and vanishes when it does not.

    The caller holds ``locked(target)``; leftovers of killed processes are removed first.

    Args:
        resume: keep the leftovers instead, and what a block that fails leaves in the folder: the next one can go on
            from it.
    """
    partial = target.parent / f"{PARTIAL}{target.name}"
    if not resume:
        sweep(target)
    with disk_errors(target):
        partial.mkdir(parents=True, exist_ok=resume)
        try:
            yield partial
            if target.exists():
                shutil.rmtree(target)
            os.replace(partial, target)
        except BaseException:
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):
                partial.rmdir()  # which needs it to be empty
            raise
        fsync_folder(target.parent)


def sweep(target: Path) -> None:
    """Removes what a killed process left of ``target``; the caller holds its lock."""
    shutil.rmtree(target.parent / f"{PARTIAL}{target.name}", ignore_errors=True)


def set_aside(path: Path, why: str = "corrupt") -> Path:
    """Renames a file or folder out of the way and returns its new name, which says why; nothing is deleted."""
    for n in range(1000):
        aside = path.with_name(f"{path.name}.{why}-{n}")
        if not aside.exists():
            with disk_errors(path):
                os.replace(path, aside)
            return aside
    raise UserError(f"{path} is {why}, and so are a thousand copies beside it; remove {path.parent}")


def create_array(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap:
    """A new .npy file to fill through a memory map, its room on the disk reserved.

    Without the reservation a full disk would show only when a page is written, as a killing signal and no error.
    """
    import numpy as np
    from numpy.lib.format import open_memmap

    with disk_errors(path):
        array: np.memmap = open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
        if hasattr(os, "posix_fallocate"):
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def release(array: np.ndarray) -> None:
    """Hands the memory of a memory-mapped array back to the system; its content stays, in the file.

    Pages of a map count as memory in use until they are handed back, so a long sequential pass calls this now and then.
    """
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a file, read in blocks of 4 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            if advance:
                advance(len(block))
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON form of a value: the identity of a definition."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
