"""Files on disk: where they live, how they are named, written (atomically), verified and quarantined.

Nothing is ever half-written under its final name: content goes to a temporary sibling, is flushed to the disk, and is
renamed; see :mod:`ifsl_bench.utils.locks` for folders. A process killed at any point leaves at most a temporary file or
folder whose name starts with ``.partial-``; the next build removes those of a build, the others go with
``ifsl-bench cache prune``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.limits import Limit

PARTIAL_MARK = ".partial-"  # prefix of unfinished files and folders
REMOVED_MARK = ".removed-"  # prefix of folders that are being removed
DOWNLOAD_PREFIX = ".download-"  # prefix of folders with what a data set is made from
MAX_NAME_LENGTH = 143  # bytes of a file's name, where file systems that encrypt names have the least room
_UNIQUE_TAG_PATTERN = re.compile(r"@[0-9a-f]{16}")


@dataclass(frozen=True)
class Paths:
    """The folders that ifsl_bench writes to.

    Args:
        cache: data sets, checkpoints and features; everything in it can be made again.
        results: result files, which cannot.
    """

    cache: Path
    results: Path

    @classmethod
    def locate(cls, home: str | Path | None = None, results: str | Path | None = None) -> Paths:
        """Find the folders: explicit arguments first, then ``IFSL_BENCH_HOME``, then the platform's user folders.

        Args:
            home: the folder of the cache, and of results where these are not given.
            results: the folder of results.

        Raises:
            UserError: a folder below the home of a user that there is not.
        """
        import platformdirs

        home = home or os.environ.get("IFSL_BENCH_HOME") or None
        cache = _resolve_user_folder(home or platformdirs.user_cache_dir("ifsl_bench"))
        if results:
            return cls(cache, _resolve_user_folder(results))
        return cls(
            cache, (cache if home else _resolve_user_folder(platformdirs.user_data_dir("ifsl_bench"))) / "results"
        )

    @property
    def data(self) -> Path:
        return self.cache / "data"

    @property
    def pretrained(self) -> Path:
        return self.cache / "pretrained"

    @property
    def weights(self) -> Path:
        """Weights of backbones that were pretrained elsewhere."""
        return self.cache / "weights"

    @property
    def features(self) -> Path:
        return self.cache / "features"

    @property
    def trained_models(self) -> Path:
        return self.cache / "trained"

    @property
    def logs(self) -> Path:
        """The logs of stages."""
        return self.cache / "logs"

    @property
    def tasks(self) -> Path:
        """Task files of the data sets that the user prepared from images of their own."""
        return self.cache / "tasks"


def _resolve_user_folder(path: str | Path) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # of expanduser alone
        raise UserError(f"{path}: no home folder is known for that user; give the whole path with --home") from error


def check_output_path(path: Path) -> None:
    """Raise :class:`UserError` if a file that ``--out`` names cannot be written, before anything is computed."""
    if os.path.isdir(path):
        raise UserError(f"--out: {path} is a folder; name the file to write")
    check_writable(path.absolute().parent, "--out")


def unique_name(name: str, end: str = "") -> str:
    """Return a name that no other call, of this process or another, returns.

    Args:
        name: its start, which is cut where the whole would be too long.
        end: its end, behind a random tag: ``name@tag`` and ``end``.
    """
    tag = f"@{secrets.token_hex(8)}{end}"
    return os.fsdecode(os.fsencode(name)[: MAX_NAME_LENGTH - len(tag)]) + tag


def strip_tag(name: str) -> str:
    """Return a name without the random tag of :func:`unique_name`."""
    return _UNIQUE_TAG_PATTERN.sub("", name)


PATH_OPTIONS = "--home or --results"  # the options by which most folders are chosen
_ADVICE_BY_ERRNO = {  # what another folder would help
    errno.ENOSPC: "the disk is full; free some space or choose",
    errno.EDQUOT: "your disk quota is used up; free space or choose",
    errno.EACCES: "no permission to write there; choose",
    errno.EPERM: "no permission to write there; choose",
    errno.EROFS: "the file system is read-only; choose",
    errno.ENOTDIR: "part of the path is a file, not a folder; choose",
    errno.EIO: "the disk fails (input/output error); choose",
    errno.ENAMETOOLONG: "the name is too long for this file system; choose",
    errno.EEXIST: "a file of that name is in the way; remove it or choose",
    errno.EISDIR: "a folder of that name is in the way; remove it or choose",
    errno.ELOOP: "a symbolic link of that name is in the way; remove it or choose",
}


@contextlib.contextmanager
def translate_disk_errors(path: Path, chosen_by: str = PATH_OPTIONS) -> Iterator[None]:
    """Turn the operating system's refusals (full disk, no permission) into a :class:`UserError` of one line.

    Args:
        path: the file or folder, where the system does not name it.
        chosen_by: options by which the user chooses another folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            reason = "the file would be larger than this system allows (see ulimit -f)"
        elif error.errno in _ADVICE_BY_ERRNO:
            reason = f"{_ADVICE_BY_ERRNO[error.errno]} another folder with {chosen_by}"
        else:
            raise
        shown = Path(strip_tag(os.fsdecode(error.filename or path)))
        shown = path if shown.name.startswith(PARTIAL_MARK) else shown  # what it was to be
        raise UserError(f"cannot write {shown}: {reason}") from error


def open_temporary_file() -> BinaryIO:
    """Open a temporary file for :func:`append_to_temporary_file`; it is gone when it is closed."""
    try:
        return cast(BinaryIO, tempfile.NamedTemporaryFile())
    except OSError as error:
        raise UserError(
            f"no temporary file can be made ({error.strerror or error}); free some space or choose another folder with "
            "TMPDIR"
        ) from error


def append_to_temporary_file(file: BinaryIO, block: bytes) -> None:
    """Write to a temporary file.

    Args:
        file: from :func:`open_temporary_file`.
        block: the bytes to append.

    Raises:
        UserError: the system refuses, because its folder is full, for example.
    """
    try:
        with translate_disk_errors(Path(file.name), "TMPDIR"):
            file.write(block)
            file.flush()
    except UserError:
        with contextlib.suppress(OSError):  # what stays in the buffer is refused once more
            file.close()
        raise


def check_writable(folder: Path, chosen_by: str = PATH_OPTIONS) -> None:
    """Raise :class:`UserError` if a folder cannot be written to, or cannot be made; leave nothing there.

    Args:
        folder: the folder.
        chosen_by: as in :func:`translate_disk_errors`.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))  # the others will be made
    with translate_disk_errors(folder, chosen_by), tempfile.TemporaryFile(dir=there, prefix=PARTIAL_MARK):
        pass


@contextlib.contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to read a file of this package into errors of one line.

    A missing file stays a ``FileNotFoundError``.

    Raises:
        CorruptFile: it is no file, but a folder, or a link to itself.
        UserError: no permission, or the disk fails. What is there may be sound, so it must not be made again.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise CorruptFile(f"{path} is not a file") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise UserError(f"cannot read {path}: no permission; ask its owner, or choose another folder") from error
        if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
            raise UserError(f"cannot read {path}: {error.strerror}; the disk or the network fails") from error
        raise


def open_file(path: Path) -> BinaryIO:
    """Open a file of this package for reading; errors as in :func:`translate_read_errors`."""
    with translate_read_errors(path):
        return open(path, "rb")


def write_bytes(path: Path, content: bytes, chosen_by: str = PATH_OPTIONS) -> None:
    """Write a file atomically: readers see the old file or the new one, never a part.

    Args:
        path: the file.
        content: all of it.
        chosen_by: as in :func:`translate_disk_errors`.
    """
    with translate_disk_errors(path, chosen_by):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(unique_name(PARTIAL_MARK + path.name))
        try:
            with open(partial, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


_NUMBER_LIST_PATTERN = re.compile(r"\[\n\s+(-?[0-9][0-9.eE+\-]*(?:,\n\s+-?[0-9][0-9.eE+\-]*)*)\n\s+\]")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with lists of numbers on one line each.

    Args:
        path: of the file.
        value: without NaN or infinities.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    text = _NUMBER_LIST_PATTERN.sub(lambda match: "[" + re.sub(r"\s+", " ", match.group(1)) + "]", text)
    write_bytes(path, f"{text}\n".encode())


def read_json(path: Path, most: Limit | None = None) -> Any:
    """Read a JSON object.

    Args:
        path: the file.
        most: limit on its bytes, beyond which it is not parsed.

    Raises:
        CorruptFile: it holds no JSON object; others as in :func:`open_file`.
    """
    with open_file(path) as file, translate_read_errors(path):
        content = file.read(most.maximum + 1 if most else -1)
    if most:
        most.check(len(content), str(path), CorruptFile)
    return parse_json(content, str(path))


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Args:
        content: the text.
        where: its name in errors.

    Raises:
        CorruptFile: it is no JSON object.
    """
    try:
        value = msgspec.json.decode(content)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{where} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{where} holds {type(value).__name__} where a JSON object was expected")
    return value


def quarantine_path(path: Path, why: str = "corrupt") -> Path:
    """Rename a file or folder out of the way; nothing is deleted.

    Args:
        path: the file or folder.
        why: the word that its new name gets, before a number.

    Returns:
        The new path.
    """
    asides = (path.with_name(f"{path.name}.{why}-{n}") for n in itertools.count())
    aside = next(aside for aside in asides if not os.path.lexists(aside))
    with translate_disk_errors(path), contextlib.suppress(FileNotFoundError):  # another process has just done so
        os.rename(path, aside)
    return aside


def record_last_use(path: Path) -> None:
    """Record that something of the cache is used now, in the time at which its file of facts was last touched.

    The time is the file system's. Reading alone leaves no trace where a disk is mounted without access times.
    """
    with contextlib.suppress(OSError):
        os.utime(path)


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the hex SHA-256 of a file, read in blocks of 4 MiB; errors as in :func:`open_file`.

    Args:
        path: the file.
        advance: called with the bytes of each block.
    """
    digest = hashlib.sha256()
    with open_file(path) as file, translate_read_errors(path):
        for block in iter(lambda: file.read(1 << 22), b""):
            digest.update(block)
            if advance:
                advance(len(block))
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Return the hex SHA-256 of the canonical JSON form of a value: the identity of a definition."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@cache
def source_sha256(root: Path = Path(__file__).parents[1]) -> str:
    """Return the hex SHA-256 of the source files below a folder, by default of the package.

    Two processes, or an interrupted evaluation and the one that resumes it, run the same code where it is equal.
    """
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
