"""What of the home folder is needed by stored results and by jobs, and the removal of the rest.

Removing something that is needed after all costs time, never a result: whoever needs it makes it again. Still, what a
running process may be using stays: what is locked, what was used within :data:`RECENT`, and what either was made from.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ifsl_bench.board import result_file
from ifsl_bench.board.result_file import Result
from ifsl_bench.common.building import remove
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import Home
from ifsl_bench.common.locks import is_locked, taken
from ifsl_bench.common.owners import is_abandoned, now_at
from ifsl_bench.data import registered
from ifsl_bench.data.pools import open_dataset
from ifsl_bench.data.preparing.of_task import data_of
from ifsl_bench.data.preparing.outline import remembered
from ifsl_bench.kernels.store import sources_folder
from ifsl_bench.plugin import registry
from ifsl_bench.running.cache import ASIDE, STAYS, UNFINISHED, UNKNOWN, Item, listed
from ifsl_bench.running.evaluating import Evaluate
from ifsl_bench.running.job import Job
from ifsl_bench.running.preparation import Features, PrepareData, Pretrain, Stage
from ifsl_bench.running.reproduce import job_of
from ifsl_bench.running.searching import LaterTrial, kept_accuracies
from ifsl_bench.running.stages import MetaTrain, Trial

OF_JOBS = ("trained", "trials", "evaluated")
RECENT = 2 * 3600.0  # seconds; clocks may differ by an hour
RECENTLY = f"used in the last {RECENT / 3600:.0f} hours, perhaps by a process that runs"
KEYS = 30 * 86400.0  # seconds that keys of a cluster stay, since jobs of a long campaign read them


@dataclass(frozen=True)
class Verdict:
    """What becomes of an item, and why."""

    item: Item
    goes: bool
    why: str

    @property
    def recent(self) -> bool:
        """Whether it stays because it was used lately, and for no other reason."""
        return self.why == RECENTLY


class Needed:
    """Paths that somebody needs, and who."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._who: dict[Path, str] = {}
        self._ranges: dict[str, str] = {}  # how names under ``evaluated`` begin
        self._features: dict[str, tuple[str, bool]] = {}  # pretraining -> who, and whether of augmented views too
        self._stems: dict[str, str] = {}
        self._pairs: dict[tuple[str, str], str] = {}  # task and method -> who needs all that is made for both
        self._all = ""  # who may need all pretrainings and features

    def by(self, item: Item) -> str:
        """Who needs it; "" for nobody."""
        path, found = item.path, self._who.get(item.path, "")
        if item.kind in OF_JOBS:
            found = found or self._pairs.get((item.of, item.method), "")
        if item.kind == "features" and not found:
            found, views = self._features.get(path.parent.name, ("", False))
            found = found if views or "-views" not in path.name else ""
        if item.kind in ("pretrained", "features"):
            found = found or self._all
        if item.kind == "evaluated" and not found:
            found = next((who for key, who in self._ranges.items() if path.name.startswith(key)), "")
        if item.kind == "logs":
            found = self._stems.get(path.stem) or self._features.get(path.parent.name, ("", False))[0]
        return found

    def add(self, path: Path, who: str) -> None:
        self._who.setdefault(path, who)
        self._stems.setdefault(path.stem if path.suffix == ".json" else path.name, who)

    def pretraining(self, key: str, who: str, views: bool = False) -> None:
        """The pretraining of that key, and the features under it."""
        self.add(self.home.pretrained / key, who)
        before = self._features.get(key, (who, False))
        self._features[key] = before[0], before[1] or views

    def features(self, key: str, who: str, views: bool) -> None:
        """Features that have a key of their own."""
        before = self._features.get(key, (who, False))
        self._features[key] = before[0], before[1] or views

    def ranges(self, key: str, who: str) -> None:
        """What has been evaluated for the model of that key."""
        self._ranges.setdefault(key, who)

    def everything(self, who: str) -> None:
        """All pretrainings and features."""
        self._all = self._all or who

    def result(self, result: Result, path: Path) -> None:
        """What a stored result was made of."""
        who = f"{result.label} on {result.task}, seed {result.seed}"
        self._stems.setdefault(path.stem, who)
        views = bool(result.train.get("views", 1) != 1)
        self.pretraining(str(result.pretraining.get("key", "")), who, views)
        self.features(str(result.pretraining.get("features", "")), who, views)
        if checkpoint := str(result.provenance.get("checkpoint") or ""):
            self.add(self.home.trained / Path(checkpoint).name, who)
        if result.tuned:
            try:
                self.job(job_of(result, self.home))
            except UserError:  # task or method are not here, as those of files: all that was tried for both, then
                self._pairs.setdefault((result.task, result.method), who)

    def job(self, job: Job) -> None:
        """What a job will use, or make."""
        who, seen = str(job), set[tuple[str, str]]()

        def visit(stage: Stage) -> None:
            key = type(stage).__name__, f"{stage} {stage.key(self.home)}"
            if key in seen:
                return
            seen.add(key)
            self._stage(stage, who)
            for needed in stage.needs():
                visit(needed)

        visit(Evaluate(job))
        self._stems.setdefault(job.result_path(self.home).stem, who)
        if job.trials:  # which one is chosen is known when all are tried
            for candidate in itertools.chain.from_iterable(job.rounds(kept_accuracies(self.home))):
                self._stage(MetaTrain(replace(candidate.job, seed=job.seed)), who)

    def _stage(self, stage: Stage, who: str) -> None:
        key = stage.key(self.home)
        if isinstance(stage, PrepareData):
            for spec in data_of(stage.task, self.home):
                self.add(self.home.data / spec.name, who)
        elif isinstance(stage, Pretrain):
            self.add(self.home.pretrained / key, who)
        elif isinstance(stage, Features):
            self.add(self.home.features / key, who)
        elif isinstance(stage, LaterTrial):
            if trial := stage.trial(self.home):
                self._stage(trial, who)
        elif isinstance(stage, Trial):
            self.add(stage.file(self.home), who)
            self._stage(MetaTrain(stage.job), who)
        elif isinstance(stage, MetaTrain):
            if stage.job.trains:
                self.add(stage.folder(self.home), who)
        elif isinstance(stage, Evaluate):
            self.ranges(key, who)


def verdicts(home: Home, results: Sequence[Path], jobs: Iterable[Job], warn: Callable[[str], None]) -> list[Verdict]:
    """What becomes of each item of the home.

    Args:
        results: folders of stored results.
        jobs: of campaigns.
        warn: is told what cannot be found out.

    Raises:
        UserError: a result that cannot be read, so that nobody knows what it needs; or no such folder.
    """
    items, needed, now = listed(home), Needed(home), now_at(home.cache)
    fingerprints: dict[str, str] = {}
    with remembered():
        for path, result in _results(results):
            needed.result(result, path)
            for one in (result.fingerprint, result.novel_fingerprint):
                fingerprints.setdefault(one, f"{result.label} on {result.task}, seed {result.seed}")
        for job in jobs:
            needed.job(job)
    busy = [item for item in items if _busy(item, now)]
    pairs = {(item.of, item.method) for item in busy if item.kind in OF_JOBS}
    for item in items:
        if item.kind == "data":
            _of_data(item, needed, fingerprints, warn)
        elif item in busy or (item.kind in OF_JOBS and (item.of, item.method) in pairs):
            _of_running(item, busy, needed)
    return [_verdict(item, needed, now) for item in items]


def _results(folders: Sequence[Path]) -> Iterator[tuple[Path, Result]]:
    for folder in folders:
        for path in sorted(folder.glob("*/*.seed-*.json")):
            if path.parent.name != "published":
                try:
                    yield path, result_file.read(path)
                except CorruptFile as error:
                    raise UserError(f"{error}; what it needs is not known: repair it, or move it elsewhere") from error


def _of_data(item: Item, needed: Needed, fingerprints: dict[str, str], warn: Callable[[str], None]) -> None:
    try:
        fingerprint = open_dataset(item.path).fingerprint
    except UserError as error:
        warn(str(error))
        return
    if who := fingerprints.get(fingerprint):
        needed.add(item.path, who)


def _of_running(item: Item, busy: Sequence[Item], needed: Needed) -> None:
    """What is made for a method on a task, while some of that is in use, is in use; so is what it was made from."""
    who = "what is in use: " + " on ".join(filter(None, (item.method, item.of)))
    if item not in busy and item.kind in OF_JOBS:
        needed.add(item.path, who)
    if item.kind == "trained":
        with contextlib.suppress(UserError):
            info = CheckpointFolder(item.path).info() or {}
            if isinstance(key := info.get("pretraining"), str):
                needed.pretraining(key, who, views=True)
    elif item.kind == "evaluated":
        needed.everything(who)  # nothing there says on which features
    elif item.kind == "features":
        needed.add(needed.home.pretrained / item.path.parent.name, who)


def _busy(item: Item, now: float) -> str:
    """Why an item may be in use; "" where nothing says so."""
    if is_locked(item.path):
        return "a process holds its lock"
    if item.kind == "keys" and now - item.used < KEYS:
        return f"of a cluster that was started in the last {KEYS / 86400:.0f} days, and perhaps runs"
    if now - item.used < RECENT:
        return RECENTLY
    return ""


def _verdict(item: Item, needed: Needed, now: float) -> Verdict:
    if item.kind == UNKNOWN:
        return Verdict(item, False, "not made by ifsl-bench, as far as it knows")
    if item.kind in STAYS:
        return Verdict(item, False, "perhaps not to be had again")
    if item.kind == UNFINISHED:
        if not is_abandoned(item.path):
            return Verdict(item, False, "perhaps being written")
        return Verdict(item, True, "left by an import that could go on" if item.of.startswith("data:") else "left over")
    if item.kind == "compiled" and item.path.name == sources_folder():
        return Verdict(item, False, "needed by this version")
    if who := needed.by(item):
        return Verdict(item, False, f"needed by {who}")
    if why := _busy(item, now):
        return Verdict(item, False, why)
    if item.kind == "data" and not _can_be_made(item.path.name):
        return Verdict(item, False, "made from your own files; remove it by hand")
    reasons = {
        ASIDE: "was replaced",
        "compiled": "of another version",
        "probes": "made again in seconds",
        "keys": "of a cluster that has ended",
    }
    return Verdict(item, True, reasons.get(item.kind, "no stored result and no campaign needs it"))


def _can_be_made(name: str) -> bool:
    return name in registry.names(registry.DATASETS) and not registered.dataset_source(name).needs_source


def prune(found: Sequence[Verdict], say: Callable[[str], None]) -> int:
    """Removes what goes, what was made from others first; returns how many bytes that were.

    What has been used, locked or removed since it was looked at stays as it is.
    """
    freed = 0
    for verdict in reversed(found):
        item = verdict.item
        if not verdict.goes:
            continue
        with taken(item.path) as free:
            if not free or _used(item) > item.used:
                say(f"{item.path} is in use by now, and stays")
                continue
            if item.path.exists() or item.path.is_symlink():
                remove(item.path)
                freed += item.bytes
                with contextlib.suppress(OSError):
                    (item.path.parent / f".{item.path.name}.lock").unlink()
        with contextlib.suppress(OSError):
            item.path.parent.rmdir()  # which needs it to be empty
    return freed


def _used(item: Item) -> float:
    for name in ("manifest.json", "checkpoint.json", "bank.json", "checksums.json"):
        with contextlib.suppress(OSError):
            return (item.path / name).stat().st_mtime
    with contextlib.suppress(OSError):
        return item.path.stat().st_mtime if item.path.is_file() else item.used
    return item.used
