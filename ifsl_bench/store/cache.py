"""List of what takes space in the home folder and when it was last used, and its removal by kind.

Removing something that is needed after all costs time, never a result: the next run makes it again. Still, everything
that a running process may be using stays: what is locked, what was used within :data:`RECENT`, and what runs start
from. Whatever is used is touched (:func:`ifsl_bench.utils.files.mark_used`), since access times are switched off on
many disks, and on others every backup is an access.
"""

from __future__ import annotations

import contextlib
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ifsl_bench.data import datasets
from ifsl_bench.solvers.numba_code_cache import sources_folder
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import DOWNLOAD, PARTIAL, REMOVED, Paths, strip_tag
from ifsl_bench.utils.locks import is_locked, remove, try_lock

STARTS = ("data", "pretrained", "features")  # what every run starts from
OF_JOBS = ("trained", "trials")
KINDS = (*STARTS, *OF_JOBS, "compiled", "logs", "rates", "keys")
STAYS = ("digests", "tasks", "weights")  # pinned, for the user to change, and given
UNFINISHED, ASIDE, UNKNOWN = "unfinished", "set aside", "unknown"
ORDER = (*KINDS, *STAYS, ASIDE, UNFINISHED, UNKNOWN)
LEFTOVER = (UNFINISHED, ASIDE, "compiled", "keys")  # needs no more than seconds to be made again
DAY, RECENT, KEYS = 86400.0, 2 * 3600.0, 30 * 86400.0  # seconds; clocks may differ by an hour
_IN_FOLDERS = ("features", "logs")  # kinds that are kept in a folder for each pretraining or stage
_FACTS = ("manifest.json", "checkpoint.json", "bank.json", "checksums.json")
_ASIDE = re.compile(r"(.+)\.(?:corrupt|replaced|old)-[0-9]+")
_SEED = re.compile(r"-seed[0-9]+(-.*)?(\.json)?$")


@dataclass(frozen=True)
class Item:
    """A file or folder of the home that is made, used and removed as a whole."""

    kind: str  # one of KINDS or STAYS, or what else it is
    path: Path
    of: str  # the data set, with the backbone; or the task, with the method
    bytes: int  # that its files hold
    used: float  # when it was last used, in seconds


def listed(home: Paths) -> list[Item]:
    """Return everything in the home but the results, by kind."""
    return sorted(_items(home), key=lambda item: (ORDER.index(item.kind), item.of, item.path))


def _items(home: Paths) -> Iterator[Item]:
    for top in _inside(home.cache):
        if top.name not in (*KINDS, *STAYS):
            if top != home.results:
                kind = UNFINISHED if top.name.startswith(DOWNLOAD) else UNKNOWN
                yield Item(kind, top, top.name.removeprefix(DOWNLOAD), *_size_and_use(top))
            continue
        for path in _inside(top):
            in_folder = top.name in _IN_FOLDERS and path.is_dir() and not path.name.startswith((PARTIAL, REMOVED))
            for part in _inside(path) if in_folder else (path,):
                yield Item(*_kind_and_name(top.name, part), *_size_and_use(part))
    for folder in (home.results, *_inside(home.results)):
        for path in _inside(folder):
            if path.name.startswith((PARTIAL, REMOVED)):
                yield Item(*_kind_and_name("results", path), *_size_and_use(path))


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not re.fullmatch(r"\..*\.lock", path.name))
    except OSError:
        return []


def _kind_and_name(kind: str, path: Path) -> tuple[str, Path, str]:
    if path.name.startswith((PARTIAL, REMOVED)):
        return UNFINISHED, path, f"{kind}: {strip_tag(path.name).removeprefix(PARTIAL).removeprefix(REMOVED)}"
    if match := _ASIDE.fullmatch(path.name):
        return ASIDE, path, f"{kind}: {match[1]}"
    if kind == "logs" and path.name == "rates.json":
        return "rates", path, ""
    name = path.parent.name if kind in _IN_FOLDERS else path.name
    return kind, path, _SEED.sub("", unquote(name)) if kind in (*STARTS, *OF_JOBS, "logs") else ""


def _size_and_use(path: Path) -> tuple[int, float]:
    with contextlib.suppress(OSError):  # another process removes it just now
        inside = [entry.lstat() for entry in (path, *(path.rglob("*") if path.is_dir() else ()))]
        facts = [(path / name).stat().st_mtime for name in _FACTS if (path / name).is_file()]
        size = sum(entry.st_size for entry in inside if not stat.S_ISDIR(entry.st_mode))
        return size, max(facts or [entry.st_mtime for entry in inside])
    return 0, 0.0


def select(home: Paths, kinds: Sequence[str] = ()) -> tuple[list[Item], list[tuple[Item, str]]]:
    """Return the items of some kinds that may be removed, and those that stay, with the reason.

    Args:
        home: the folders.
        kinds: by default what is left over.

    Raises:
        UserError: the home has nothing of a kind.
    """
    items, now = listed(home), time.time()
    for kind in kinds:
        if not any(item.kind == kind for item in items):
            raise UserError(f"nothing in {home.cache} is called {kind!r}; 'ifsl-bench cache' lists what is there")
    reasons = {item: _why_it_stays(item, now) for item in items}
    running = any(reasons[item] and item.kind in (*OF_JOBS, "features") for item in items)
    going, staying = list[Item](), list[tuple[Item, str]]()
    for item in items:
        if item.kind not in (kinds or LEFTOVER):
            continue
        needed = "perhaps needed by a process that runs" if running and item.kind in (*STARTS, *OF_JOBS) else None
        if why := reasons[item] or needed:
            staying.append((item, why))
        else:
            going.append(item)
    return going, staying


def _why_it_stays(item: Item, now: float) -> str | None:
    """Return why an item may not be removed; None where nothing keeps it."""
    idle, name = now - item.used, strip_tag(item.path.name).removeprefix(PARTIAL)
    if item.kind == UNKNOWN:
        return "not made by this version of ifsl-bench"
    if item.kind in STAYS:
        return "may not be available again"
    if item.kind == "compiled" and name == sources_folder():
        return "needed by this version"
    if item.kind == "data" and not datasets.is_made_here(name):
        return "made from files of yours: ifsl-bench data remove"
    if is_locked(item.path.with_name(name)):
        return "a process holds its lock"
    if item.kind == "keys" and idle < KEYS:
        return f"of a cluster that was started in the last {KEYS / DAY:.0f} days, and perhaps runs"
    return f"used in the last {RECENT / 3600:.0f} hours" if idle < RECENT else None


def prune(going: Sequence[Item], say: Callable[[str], None]) -> int:
    """Remove items, what was made from others first; return how many bytes that were.

    An item that has been used, locked or removed since it was listed stays as it is. A folder that is empty now stays
    too: a run that starts may be about to write into it.

    Args:
        going: the items.
        say: prints a line on an item that stays.
    """
    freed = 0
    for item in sorted(going, key=lambda item: ORDER.index(item.kind), reverse=True):
        with try_lock(item.path) as free:
            if not free or _size_and_use(item.path)[1] > item.used:
                say(f"{item.path} is in use by now, and stays")
                continue
            if item.path.exists() or item.path.is_symlink():
                remove(item.path)
                freed += item.bytes
                with contextlib.suppress(OSError):
                    (item.path.parent / f".{item.path.name}.lock").unlink()
    return freed
