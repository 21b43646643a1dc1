"""Folders of results: the one that comes with the package, and the user's own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import msgspec

from ifsl_bench.board.result_file import Result, path_of, read
from ifsl_bench.common.errors import UserError

CLAIMS = "claims.toml"  # in the folder of the package: what README and docs say of its rows
LEFT_OUT = "left out: "  # how remarks on such files and rows begin
SETTLED = 2_000_000_000  # nanoseconds after which a file that is written again has another time, on usual file systems
MOST_KNOWN = 2048  # results that a process keeps, of 20 KB each

_known: dict[Path, tuple[tuple[int, ...], Result]] = {}  # as they were when they were read


def packaged_root() -> Path:
    """The folder of the stored leaderboard that comes with the package."""
    return Path(str(resources.files("ifsl_bench.results")))


def stored(root: Path, tasks: Iterable[str] | None = None) -> tuple[list[Result], list[str]]:
    """The results under ``root`` for these tasks (all where None), and a remark on each file that is left out.

    A damaged file, or one that is not in its place (another task, label or seed than its path says), is left out.
    """
    if not root.is_dir():
        return [], []
    names = sorted(tasks) if tasks is not None else sorted(p.name for p in root.iterdir() if p.is_dir())
    results, remarks, paths = [], list[str](), list[Path]()
    for name in (name for name in names if name != "published"):
        try:
            paths += sorted(path for path in (root / name).iterdir() if path.match("*.seed-*.json"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            remarks.append(f"{LEFT_OUT}{root / name} cannot be read ({error.strerror})")
    for path in paths:
        try:
            result = read_once(path)
        except UserError as error:
            remarks.append(f"{LEFT_OUT}{error}")
            continue
        if path != path_of(root, result):
            remarks.append(
                f"{LEFT_OUT}{path} holds {result.label}, seed {result.seed}, of {result.task}: not its place"
            )
        else:
            results.append(result)
    return results, remarks


def read_once(path: Path) -> Result:
    """As :func:`read`; a file that is as it was when this process read it last is not read again.

    A notebook asks for one table after another, of some hundred files. What comes back is shared: whoever hands it out
    hands out what is :func:`copied`.
    """
    try:
        at = os.stat(path)
    except (OSError, ValueError):
        return read(path)  # which says why it cannot be read
    if not 0 <= max(at.st_mtime_ns, at.st_ctime_ns) <= time.time_ns() - SETTLED:
        return read(path)
    stamp = at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns
    known_stamp, result = _known.get(path, ((), None))
    if result is None or known_stamp != stamp:
        result = read(path)
        if path in _known or len(_known) < MOST_KNOWN:
            _known[path] = stamp, result
    return result


def copied(result: Result) -> Result:
    """A result that nobody else holds."""
    return msgspec.convert(msgspec.to_builtins(result), type(result))
