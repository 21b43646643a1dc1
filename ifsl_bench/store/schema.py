"""Result files: one a run, ``<results>/<task>/<label>.seed-<n>.json``, complete enough to recompute every figure.

Imports no torch, so that tables come at once.
"""

from __future__ import annotations

import contextlib
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import numpy as np
from msgspec import Meta

from ifsl_bench.protocols.metrics import Counts, Estimate, summarise
from ifsl_bench.protocols.tasks.task_limits import LARGEST_SEED, MOST_SEEDS
from ifsl_bench.store.consistency import KINDS, odd_classes, odd_counts, odd_sequences
from ifsl_bench.store.episode_counts import EpisodeCounts, SequenceCounts
from ifsl_bench.store.selection_records import (
    Calibration,
    Choice,
    Hits,
    Part,
    odd_bias_of_sessions,
    odd_calibration,
    odd_choice,
)
from ifsl_bench.utils.errors import CorruptFile, UserError, is_printable
from ifsl_bench.utils.files import quarantine, read_json, write_json
from ifsl_bench.utils.limits import RESULT_FILE

if TYPE_CHECKING:
    import pandas

    from ifsl_bench.protocols.session_metrics import SessionCounts

SCHEMA = 1


class _Training(msgspec.Struct):
    """The part of ``training`` that tables and figures read."""

    validation: dict[Annotated[str, Meta(pattern="^[0-9]{1,18}$")], Annotated[float, Meta(ge=0, le=100)]] = {}
    kept_step: int = 0
    solves: dict[str, Hits] = {}


class Result(Part, frozen=True):
    """One method, one task, one training seed; docs/result-file.md explains every field.

    Attributes:
        options: the method's options that were given or tuned.
        tuned: options -> {values: validation accuracy in percent}; empty where nothing was chosen.
        train: what was changed about meta-training, ``rate`` also where it was chosen.
        digest: identity of the episodes; results are comparable only where it is equal.
        summary: metric -> mean and half-width of the 95% interval over test episodes, choices held fixed, in percent.
        training: validation accuracy by step, the step kept, how solves went; empty where nothing was meta-trained.
        novel_fingerprint: identity of the data that novel classes come from, where these are other data; else "".
        setting: "paper" for the method as published, "tuned-12" for the best of 12 trials, "every" for what is the same
            in all settings.
        passed_over: values that were tried and could not be chosen, since inner solves failed there.
        edge: the options whose chosen value is the smallest or the largest that was tried, though the option takes
            values beyond.
        rounds: how many settings each round of the search for options tried; empty where nothing was searched.
        calibration: None in regular few-shot learning, and where no validation episodes can be drawn.
        choice: None where nothing was chosen, and where it is not recorded.
    """

    schema: int
    method: str
    label: str
    options: dict[str, Any]
    tuned: dict[str, dict[str, float]]
    train: dict[str, Any]
    task: str
    task_hash: str
    digest: str
    fingerprint: str
    seed: Annotated[int, Meta(ge=0, le=LARGEST_SEED + MOST_SEEDS)]
    episodes: EpisodeCounts
    summary: dict[str, dict[str, float]]
    solver: dict[str, dict[str, float]]
    pretraining: dict[str, Any]
    training: dict[str, Any]
    cost: dict[str, float]
    provenance: dict[str, Any]
    novel_fingerprint: str
    partial: bool
    setting: str
    passed_over: list[str]
    edge: list[str]
    calibration: Calibration | None
    transductive: bool
    places: dict[str, str]
    rounds: list[int] = msgspec.field(default_factory=list)
    choice: Choice | None = None

    @property
    def trials(self) -> int:
        """The number of settings that ``--tune`` tried; 0 for a method as published."""
        return int(self.setting.removeprefix("tuned-")) if re.fullmatch(r"tuned-\d{1,6}", self.setting) else 0

    @property
    def calibrated(self) -> bool:
        """Returns whether the bias of its calibration is part of the row."""
        return self.calibration is not None and self.calibration.applied

    @property
    def chosen(self) -> set[str]:
        """Names what was chosen on validation episodes: options, ``train.rate`` for the learning rate."""
        return {name for names in self.tuned for name in names.split(", ")}

    def accuracy(self, setting: str) -> float | None:
        """The validation accuracy of a setting, -inf where it was passed over; None where it was not tried."""
        if setting in self.passed_over:
            return -math.inf
        return next((tried[setting] for tried in self.tuned.values() if setting in tried), None)

    def own_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options and changes of meta-training that somebody set: those that a label may say."""
        options = {key: value for key, value in self.options.items() if key not in self.chosen}
        return options, {key: value for key, value in self.train.items() if f"train.{key}" not in self.chosen}

    def counts(self) -> Counts:
        """The counts as arrays."""
        return self.episodes.counts()

    def to_pandas(self) -> pandas.DataFrame:
        """One row, see :func:`ifsl_bench.reporting.data_frames.facts`."""
        from ifsl_bench.reporting.data_frames import data_frame, facts

        return data_frame([facts(self)])

    def episodes_to_pandas(self) -> pandas.DataFrame:
        """A row for each episode, see :func:`ifsl_bench.reporting.data_frames.episodes`."""
        from ifsl_bench.reporting.data_frames import episodes

        return episodes(self)

    def __repr__(self) -> str:
        from ifsl_bench.reporting.data_frames import line

        return f"<{line(self)}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    def classes(self) -> np.ndarray:
        """The novel classes of each episode, int64 [n, N]."""
        return self.episodes.column("classes").reshape(len(self.episodes), -1)


class SessionResult(Result, frozen=True):
    """A result on sequences of sessions."""

    episodes: SequenceCounts  # type: ignore[assignment]

    def counts(self) -> SessionCounts:  # type: ignore[override]
        return self.episodes.counts()

    def classes(self) -> np.ndarray:
        """The novel classes of each order, int64 [orders, T N]."""
        return self.episodes.column("classes").reshape(self.counts().orders, -1)


def summary_entry(summary: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    parts = {name: asdict(value) for name, value in summary.items()}  # one sequence has no interval
    return {name: {k: round(v, 6) for k, v in part.items() if math.isfinite(v)} for name, part in parts.items()}


def file_name(label: str, seed: int) -> str:
    """The file of a result; characters that have no place in a file name are escaped as in an address."""
    return f"{quote(label, safe='=+,@ ')}.seed-{seed}.json"


def path_of(root: Path, result: Result) -> Path:
    return root / result.task / file_name(result.label, result.seed)


def write(root: Path, result: Result) -> Path:
    """Writes a result under ``root`` and returns its path."""
    path = path_of(root, result)
    write_json(path, msgspec.to_builtins(result))
    return path


def put(root: Path, result: Result) -> Path | None:
    """Writes a result under ``root``, whose lock is held; one with other hits that was there is renamed.

    Returns:
        The new name of what was renamed.
    """
    old = keep_old(root, result)
    write(root, result)
    return old


def keep_old(root: Path, result: Result) -> Path | None:
    """Renames the file that ``result`` would overwrite if its hits are others; the new name, None if nothing was."""
    path = path_of(root, result)
    if not path.exists():
        return None
    with contextlib.suppress(CorruptFile):
        old, new = read(path).episodes, result.episodes
        if old.shape == new.shape and old.same(new, new.COLUMNS):
            return None
    return quarantine(path, "old")


def read(path: Path) -> Result:
    """Reads a result and recomputes its summary from the counts.

    Raises:
        CorruptFile: not a result, another schema, or a summary that does not follow from the counts.
        UserError: the file cannot be read.
    """
    result = parse(path)
    if reason := inconsistency(result):
        raise CorruptFile(f"{path}: {reason}")
    return result


def read_raw(path: Path) -> dict[str, Any]:
    """Reads the JSON of a file that may be a result; raises as :func:`read`, and for one that is too large."""
    try:
        raw: dict[str, Any] = read_json(path, RESULT_FILE)
    except OSError as error:
        raise UserError(f"cannot read the result {path}: {error.strerror}") from error
    return raw


def parse(path: Path, raw: Mapping[str, Any] | None = None) -> Result:
    """A result as it is, held against the schema alone; raises as :func:`read`.

    Args:
        raw: what the file holds, where it was read before.
    """
    raw = read_raw(path) if raw is None else raw
    if raw.get("schema") != SCHEMA:
        raise CorruptFile(f"{path} is no result of schema {SCHEMA} (it says {reprlib.repr(raw.get('schema'))})")
    try:
        # Stored results have a probe, which nothing reads any more, until they are measured again.
        kind = SessionResult if "hits" in (raw.get("episodes") or ()) else Result
        result = msgspec.convert({key: value for key, value in raw.items() if key != "probe"}, kind, strict=True)
    except (msgspec.ValidationError, UnicodeError) as error:  # the latter for names with half a character
        raise CorruptFile(f"{path} is not a valid result: {error}") from error
    for name in result.episodes.COLUMNS:
        if isinstance(getattr(result.episodes, name), str):
            try:
                result.episodes.column(name)
            except ValueError as error:
                raise CorruptFile(f"{path} is not a valid result: episodes.{name}: {error}") from error
    for name in ("method", "label", "task", "task_hash", "digest", "fingerprint"):  # which tables and remarks print
        if not is_printable(getattr(result, name)):
            raise CorruptFile(f"{path} is not a valid result: {name} {getattr(result, name)!r} is not printable text")
    return result


def inconsistency(result: Result) -> str:
    """Says why a result contradicts itself; "" where it does not."""
    try:
        return next(_odd(result), "")
    except OverflowError:
        return "a count is beyond all bounds"


def _odd(result: Result) -> Iterator[str]:
    try:
        counts, classes = result.counts(), result.episodes.column("classes")
    except ValueError:
        yield "columns differ in length"
        return
    try:
        parts = {name: result.training[name] for name in _Training.__struct_fields__ if name in result.training}
        solves = msgspec.convert(parts, _Training, strict=True).solves
    except (msgspec.ValidationError, UnicodeError) as error:
        yield f"training: {error}"
        return
    for kind, (total, _) in KINDS.items():
        if solves.get(kind, 0) > solves.get(total, 0):
            yield f"training.solves has {kind} in more episodes than the {total}"
    if not isinstance(counts, Counts):
        yield from odd_sequences(counts)
        yield from odd_classes(classes, counts.orders)
        if (result.calibration is None) != (counts.calibrated_hits is None):
            yield "calibration and episodes.calibrated_hits are not both there"
        if result.calibration:
            yield from (f"calibration {reason}" for reason in odd_bias_of_sessions(result.calibration, counts))
    else:
        yield from odd_counts(counts)
        yield from odd_classes(classes, len(counts))
        yield from (f"calibration {reason}" for reason in odd_calibration(result.calibration, counts))
        if result.choice:
            settings = sum(map(len, result.tuned.values()))
            reasons = odd_choice(result.choice, settings, counts, result.calibrated)
            yield from (f"choice {reason}" for reason in reasons)
    expected = summary_entry(summarise(counts.per_episode(), counts.quantile))
    for name in dict.fromkeys((*expected, *result.summary)):
        of_counts, of_file = expected.get(name, {}), result.summary.get(name, {})
        for part in dict.fromkeys((*of_counts, *of_file)):
            if part not in of_counts:
                yield f"summary.{name}.{part} does not follow from the counts"
            elif not math.isclose(stored := of_file.get(part, math.nan), of_counts[part], rel_tol=0, abs_tol=2e-6):
                yield f"summary.{name}.{part} is {stored}, the counts give {of_counts[part]}"
