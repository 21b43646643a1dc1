"""List of what takes space in the home folder and when it was last used, and its removal by kind.

Removing something that is needed after all costs time, never a result: the next run makes it again. Still, everything
that a running process may be using stays: what is locked, what was used within :data:`RECENT_SECONDS`, and what runs
start from. Whatever is used is touched (:func:`ifsl_bench.utils.files.record_last_use`), since access times are
switched off on many disks, and on others every backup is an access.
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
from ifsl_bench.solvers.numba_code_cache import code_folder_name
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import DOWNLOAD_PREFIX, PARTIAL_MARK, REMOVED_MARK, Paths, strip_tag
from ifsl_bench.utils.locks import is_locked, remove_path, try_lock

INPUT_KINDS = ("data", "pretrained", "features")  # what every run starts from
JOB_KINDS = ("trained", "trials")
CACHE_KINDS = (*INPUT_KINDS, *JOB_KINDS, "compiled", "logs", "rates", "keys")
PERMANENT_KINDS = ("digests", "tasks", "weights")  # pinned, for the user to change, and given
UNFINISHED, SET_ASIDE, UNKNOWN = "unfinished", "set aside", "unknown"
KIND_ORDER = (*CACHE_KINDS, *PERMANENT_KINDS, SET_ASIDE, UNFINISHED, UNKNOWN)
LEFTOVER_KINDS = (UNFINISHED, SET_ASIDE, "compiled", "keys")  # needs no more than seconds to be made again
DAY_SECONDS, RECENT_SECONDS, KEYS_MAX_AGE_SECONDS = (
    86400.0,
    2 * 3600.0,
    30 * 86400.0,
)  # seconds; clocks may differ by an hour
_FOLDER_KINDS = ("features", "logs")  # kinds that are kept in a folder for each pretraining or stage
_MANIFEST_NAMES = ("manifest.json", "checkpoint.json", "bank.json", "checksums.json")
_SET_ASIDE_NAME_PATTERN = re.compile(r"(.+)\.(?:corrupt|replaced|old)-[0-9]+")
_SEED_SUFFIX_PATTERN = re.compile(r"-seed[0-9]+(-.*)?(\.json)?$")


@dataclass(frozen=True)
class CacheItem:
    """A file or folder of the home that is made, used and removed as a whole."""

    cache_kind: str  # one of KINDS or STAYS, or what else it is
    path: Path
    belongs_to: str  # the data set, with the backbone; or the task, with the method
    n_bytes: int  # that its files hold
    last_used: float  # when it was last used, in seconds


def list_items(home: Paths) -> list[CacheItem]:
    """Return everything in the home but the results, by kind."""
    return sorted(
        _iterate_items(home), key=lambda item: (KIND_ORDER.index(item.cache_kind), item.belongs_to, item.path)
    )


def _iterate_items(home: Paths) -> Iterator[CacheItem]:
    for top in _list_folder_entries(home.cache):
        if top.name not in (*CACHE_KINDS, *PERMANENT_KINDS):
            if top != home.results:
                kind = UNFINISHED if top.name.startswith(DOWNLOAD_PREFIX) else UNKNOWN
                yield CacheItem(kind, top, top.name.removeprefix(DOWNLOAD_PREFIX), *_size_and_last_use(top))
            continue
        for path in _list_folder_entries(top):
            in_folder = (
                top.name in _FOLDER_KINDS and path.is_dir() and not path.name.startswith((PARTIAL_MARK, REMOVED_MARK))
            )
            for part in _list_folder_entries(path) if in_folder else (path,):
                yield CacheItem(*_find_kind_path_and_owner(top.name, part), *_size_and_last_use(part))
    for folder in (home.results, *_list_folder_entries(home.results)):
        for path in _list_folder_entries(folder):
            if path.name.startswith((PARTIAL_MARK, REMOVED_MARK)):
                yield CacheItem(*_find_kind_path_and_owner("results", path), *_size_and_last_use(path))


def _list_folder_entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not re.fullmatch(r"\..*\.lock", path.name))
    except OSError:
        return []


def _find_kind_path_and_owner(kind: str, path: Path) -> tuple[str, Path, str]:
    if path.name.startswith((PARTIAL_MARK, REMOVED_MARK)):
        return UNFINISHED, path, f"{kind}: {strip_tag(path.name).removeprefix(PARTIAL_MARK).removeprefix(REMOVED_MARK)}"
    if match := _SET_ASIDE_NAME_PATTERN.fullmatch(path.name):
        return SET_ASIDE, path, f"{kind}: {match[1]}"
    if kind == "logs" and path.name == "rates.json":
        return "rates", path, ""
    name = path.parent.name if kind in _FOLDER_KINDS else path.name
    return kind, path, _SEED_SUFFIX_PATTERN.sub("", unquote(name)) if kind in (*INPUT_KINDS, *JOB_KINDS, "logs") else ""


def _size_and_last_use(path: Path) -> tuple[int, float]:
    with contextlib.suppress(OSError):  # another process removes it just now
        inside = [entry.lstat() for entry in (path, *(path.rglob("*") if path.is_dir() else ()))]
        facts = [(path / name).stat().st_mtime for name in _MANIFEST_NAMES if (path / name).is_file()]
        size = sum(entry.st_size for entry in inside if not stat.S_ISDIR(entry.st_mode))
        return size, max(facts or [entry.st_mtime for entry in inside])
    return 0, 0.0


def divide_into_removable_and_kept(
    home: Paths, kinds: Sequence[str] = ()
) -> tuple[list[CacheItem], list[tuple[CacheItem, str]]]:
    """Return the items of some kinds that may be removed, and those that stay, with the reason.

    Args:
        home: the folders.
        kinds: by default what is left over.

    Raises:
        UserError: the home has nothing of a kind.
    """
    items, now = list_items(home), time.time()
    for kind in kinds:
        if not any(item.cache_kind == kind for item in items):
            raise UserError(f"nothing in {home.cache} is called {kind!r}; 'ifsl-bench cache' lists what is there")
    reasons = {item: _reason_to_keep(item, now) for item in items}
    running = any(reasons[item] and item.cache_kind in (*JOB_KINDS, "features") for item in items)
    going, staying = list[CacheItem](), list[tuple[CacheItem, str]]()
    for item in items:
        if item.cache_kind not in (kinds or LEFTOVER_KINDS):
            continue
        needed = (
            "perhaps needed by a process that runs"
            if running and item.cache_kind in (*INPUT_KINDS, *JOB_KINDS)
            else None
        )
        if why := reasons[item] or needed:
            staying.append((item, why))
        else:
            going.append(item)
    return going, staying


def _reason_to_keep(item: CacheItem, now: float) -> str | None:
    """Return why an item may not be removed; None where nothing keeps it."""
    idle, name = now - item.last_used, strip_tag(item.path.name).removeprefix(PARTIAL_MARK)
    if item.cache_kind == UNKNOWN:
        return "not made by this version of ifsl-bench"
    if item.cache_kind in PERMANENT_KINDS:
        return "may not be available again"
    if item.cache_kind == "compiled" and name == code_folder_name():
        return "needed by this version"
    if item.cache_kind == "data" and not datasets.is_generated(name):
        return "made from files of yours: ifsl-bench data remove"
    if is_locked(item.path.with_name(name)):
        return "a process holds its lock"
    if item.cache_kind == "keys" and idle < KEYS_MAX_AGE_SECONDS:
        return (
            f"of a cluster that was started in the last {KEYS_MAX_AGE_SECONDS / DAY_SECONDS:.0f} days, and perhaps runs"
        )
    return f"used in the last {RECENT_SECONDS / 3600:.0f} hours" if idle < RECENT_SECONDS else None


def remove_items(items: Sequence[CacheItem], report: Callable[[str], None]) -> int:
    """Remove items, what was made from others first; return how many bytes that were.

    An item that has been used, locked or removed since it was listed stays as it is. A folder that is empty now stays
    too: a run that starts may be about to write into it.

    Args:
        items: the items.
        report: prints a line on an item that stays.
    """
    freed = 0
    for item in sorted(items, key=lambda item: KIND_ORDER.index(item.cache_kind), reverse=True):
        with try_lock(item.path) as free:
            if not free or _size_and_last_use(item.path)[1] > item.last_used:
                report(f"{item.path} is in use by now, and stays")
                continue
            if item.path.exists() or item.path.is_symlink():
                remove_path(item.path)
                freed += item.n_bytes
                with contextlib.suppress(OSError):
                    (item.path.parent / f".{item.path.name}.lock").unlink()
    return freed
