"""What takes space in the home folder: of which task and method, and when it was last used.

Whatever is used is touched (:func:`ifsl_bench.common.files.mark_used`), so its file of facts says when: access times
are switched off on many disks, and on others every backup is an access.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Home
from ifsl_bench.common.owners import PARTIAL, REMOVED, what
from ifsl_bench.common.sealed import read_sealed
from ifsl_bench.protocol.task_files import own, packaged

KINDS = ("data", "pretrained", "features", "trained", "trials", "evaluated", "probes", "compiled", "logs", "keys")
STAYS = ("digests", "tasks", "stored", "weights")  # what is pinned, for the user to change, noted, and given
UNFINISHED, ASIDE, UNKNOWN = "unfinished", "set aside", "unknown"
_ASIDE = re.compile(r"(.+)\.(?:corrupt|replaced|old)-[0-9]+")
_SEED = re.compile(r"(.+?)-seed[0-9]+(?:-.*)?")
_TRIAL = re.compile(r".+ on (\S+), seed [0-9]+")


@dataclass(frozen=True)
class Item:
    """A file or folder of the home that is made, used and removed as a whole.

    Attributes:
        kind: one of :data:`KINDS` or :data:`STAYS`, or what else it is.
        of: the task; of data, pretrainings and features, the data set with what else they were made with.
        method: "" where it belongs to none, or to several.
        bytes: that its files hold.
        used: when it was last used, in seconds, by the file system's clock.
    """

    kind: str
    path: Path
    of: str
    method: str
    bytes: int
    used: float


def listed(home: Home) -> list[Item]:
    """Everything in the home but the results, by kind."""
    return sorted(_found(home), key=lambda item: (_order(item.kind), item.of, item.method, item.path))


def _order(kind: str) -> int:
    kinds = (*KINDS, *STAYS, ASIDE, UNFINISHED, UNKNOWN)
    return kinds.index(kind)


def _found(home: Home) -> Iterator[Item]:
    tasks = sorted({*packaged(), *_own(home)}, key=len, reverse=True)
    for top in _inside(home.cache):
        if top == home.results or _is_lock(top):
            continue
        if top.name not in (*KINDS, *STAYS):
            yield _item(UNKNOWN, top, top.name, "")
        elif top.name == "features":
            for folder in _inside(top):
                yield from (_one("features", path, tasks) for path in _inside(folder) if not _is_lock(path))
                banks = (bank for bank in _inside(folder) if not bank.name.startswith((PARTIAL, REMOVED)))
                yield from (_item(UNFINISHED, path, "features", "") for bank in banks for path in _unfinished(bank))
        elif top.name == "logs":
            files = (path for path in sorted(top.rglob("*")) if path.is_file())
            yield from (_item("logs", path, path.relative_to(top).parts[0], "") for path in files)
        else:
            yield from (_one(top.name, path, tasks) for path in _inside(top) if not _is_lock(path))
            whole = (folder for folder in _inside(top) if not folder.name.startswith((PARTIAL, REMOVED)))
            yield from (_item(UNFINISHED, path, top.name, "") for folder in whole for path in _unfinished(folder))
    for folder in (home.results, *_inside(home.results)):
        yield from (_item(UNFINISHED, path, "results", "") for path in _unfinished(folder))


def _unfinished(folder: Path) -> list[Path]:
    return [path for path in _inside(folder) if path.name.startswith((PARTIAL, REMOVED))]


def _own(home: Home) -> list[str]:
    try:
        return list(own(home))
    except UserError:
        return []


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_lock(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".lock")


def _one(kind: str, path: Path, tasks: list[str]) -> Item:
    name = path.name
    if name.startswith((PARTIAL, REMOVED)):
        return _item(UNFINISHED, path, f"{kind}: {what(name).removeprefix(PARTIAL).removeprefix(REMOVED)}", "")
    if match := _ASIDE.fullmatch(name):
        return _item(ASIDE, path, f"{kind}: {match[1]}", "")
    return _item(kind, path, *_OF[kind](path, tasks)) if kind in _OF else _item(kind, path, "", "")


def _item(kind: str, path: Path, of: str, method: str) -> Item:
    size, used = 0, 0.0
    try:
        facts = [path / name for name in ("manifest.json", "checkpoint.json", "bank.json", "checksums.json")]
        times = [one.stat().st_mtime for one in facts if one.is_file()]
        inside = [one.lstat() for one in (path, *(path.rglob("*") if path.is_dir() else ()))]
        size = sum(one.st_size for one in inside if not _is_folder(one.st_mode))
        used = max(times or [one.st_mtime for one in inside])
    except OSError:
        pass  # another process removes it just now
    return Item(kind, path, of, method, size, used)


def _is_folder(mode: int) -> bool:
    return mode & 0o170000 == 0o040000


def _pretraining(path: Path, _: list[str]) -> tuple[str, str]:
    match = _SEED.fullmatch(path.name)
    return (match[1] if match else path.name), ""


def _model(path: Path, tasks: list[str]) -> tuple[str, str]:
    return _of_job(path, str(_facts(path / "checkpoint.json").get("task") or ""), tasks)


def _trial(path: Path, tasks: list[str]) -> tuple[str, str]:
    match = _TRIAL.fullmatch(str(_facts(path).get("of", "")))
    return _of_job(path, match[1] if match else "", tasks)


def _of_job(path: Path, task: str, tasks: list[str]) -> tuple[str, str]:
    """Task and method of what is named after both; by the name alone, the longest known task that it begins with."""
    match = _SEED.fullmatch(path.name)
    said = match[1] if match else path.name
    task = task or next((one for one in tasks if said.startswith(f"{one}-")), "")
    return (task, unquote(said.removeprefix(f"{task}-"))) if task else (said, "")


def _facts(path: Path) -> dict[str, Any]:
    try:
        return read_sealed(path)
    except (CorruptFile, UserError, OSError):
        return {}


_OF: dict[str, Callable[[Path, list[str]], tuple[str, str]]] = {
    "data": lambda path, _: (path.name, ""),
    "pretrained": _pretraining,
    "features": lambda path, tasks: _pretraining(path.parent, tasks),
    "trained": _model,
    "evaluated": _model,
    "trials": _trial,
}
