"""Schema of result files: what stands in them, and how they are read and written.

A file is of one run, ``<results>/<task>/<label>.seed-<n>.json``, and complete enough to recompute every number of it:
docs/python.md explains each field. The form of the counts in :class:`Result` is its protocol's, see
:mod:`ifsl_bench.protocols.protocol`. Reading checks the types and limits that stand here, and
whether a file contradicts itself; the first reason counts, as later checks rely on earlier ones. Imports no torch:
tables come at once.
"""

from __future__ import annotations

import contextlib
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast
from urllib.parse import quote

import msgspec
import numpy as np
from msgspec import Meta

from ifsl_bench.protocols.calibration import RESAMPLE_COUNT, CalibratedHits
from ifsl_bench.protocols.image_counts import SHARE_LEVELS, ImageHits, PoolHits
from ifsl_bench.protocols.metrics import Estimate, HitCounts
from ifsl_bench.protocols.protocol import MOST_STORED_NUMBERS, HitCount, Protocol, StoredCounts
from ifsl_bench.protocols.registry import stored_counts_type_of_fields
from ifsl_bench.protocols.tasks.contamination import SEEN_LEVELS
from ifsl_bench.protocols.tasks.task import CROSS_ENTROPY_RECIPE, INCLUDED_BACKBONE, NO_BACKBONE
from ifsl_bench.protocols.tasks.task_limits import LARGEST_SEED, MOST_SEEDS
from ifsl_bench.utils.deprecated import accept_old_names
from ifsl_bench.utils.errors import CorruptFile, UserError, is_printable
from ifsl_bench.utils.files import quarantine_path, read_json, write_json
from ifsl_bench.utils.limits import RESULT_FILE_BYTES
from ifsl_bench.utils.serialization import COUNT_KINDS, pack_array, unpack_array

if TYPE_CHECKING:
    import pandas

SCHEMA_VERSION = 1
PRINTED_FIELDS = ("method", "label", "task", "task_hash", "digest", "fingerprint")  # by tables and remarks
EpisodeCount = Annotated[int, Meta(ge=1)]
NonNegativeInteger = Annotated[int, Meta(ge=0)]


class ResultSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of a result file, to which nothing may be added."""


# -- choices on validation episodes, and how far a result rests on the draw of these


class StoredBiasCurve(ResultSection, frozen=True):
    """A base-novel curve: ascending biases, and the queries that are right among all classes with each."""

    bias: list[float]
    base_joint: list[HitCount]
    novel_joint: list[HitCount]


class StoredCalibration(ResultSection, frozen=True):
    """The bias found on validation episodes; see :class:`ifsl_bench.protocols.calibration.CalibratedHits`.

    Attributes:
        bias: on the novel logits, of ``episodes.calibrated_base`` and ``calibrated_novel``.
        validation_episodes: how many it was found on.
        curve: over all test episodes.
        applied: whether the bias is part of the row, so that ``episodes.base_joint`` and ``novel_joint`` have it too.
        resampled_base: the base queries that are right over all test episodes with the bias that each bootstrap
            resample of the validation episodes would have chosen; in sessions after each of sessions 1 to T, one
            resample after the other. Empty in older files.
        resampled_novel: the same of novel queries.
    """

    bias: float
    validation_episodes: EpisodeCount
    curve: StoredBiasCurve
    applied: bool
    resampled_base: list[HitCount] = []
    resampled_novel: list[HitCount] = []

    @classmethod
    def from_calibrated_hits(cls, calibrated: CalibratedHits, applied: bool) -> StoredCalibration:
        """Make the section of a calibration; the hits of each episode are among the counts.

        Args:
            calibrated: the bias, its curve and its resamples.
            applied: whether the bias is part of the row.
        """
        bias, base, novel = calibrated.hits_by_curve_bias.T
        return cls(
            bias=calibrated.bias_on_novel_logits,
            validation_episodes=calibrated.n_validation_episodes,
            curve=StoredBiasCurve(
                bias=bias.tolist(), base_joint=base.astype(int).tolist(), novel_joint=novel.astype(int).tolist()
            ),
            applied=applied,
            resampled_base=calibrated.hits_by_resample[:, 0].ravel().tolist(),
            resampled_novel=calibrated.hits_by_resample[:, 1].ravel().tolist(),
        )


class StoredOptionChoice(ResultSection, frozen=True):
    """The choice of options on validation episodes, and what other validation episodes would have chosen.

    Attributes:
        validation_episodes: how many the settings were tried on.
        chosen: the index, in the order of ``tuned``, of the setting that was chosen.
        winners: the index of the one that each bootstrap resample of the validation episodes would have chosen.
        hits: a count of :class:`ifsl_bench.protocols.metrics.EpisodeHitCounts` -> its sum over these episodes with
            each setting; in ``calibrated_base`` and ``calibrated_novel`` with the bias that is best for the setting.
        rivals: indices of the settings that were tried on test episodes too: those that several resamples would have
            chosen.
        test_episodes: the number of the first test episodes that these were tried on.
        test_hits: a count -> its sum over these episodes with the chosen setting, then with each rival; empty where
            there is no rival.
    """

    validation_episodes: EpisodeCount
    chosen: NonNegativeInteger
    winners: Annotated[list[NonNegativeInteger], Meta(min_length=RESAMPLE_COUNT, max_length=RESAMPLE_COUNT)]
    hits: dict[str, list[HitCount]]
    rivals: list[NonNegativeInteger] = []
    test_episodes: NonNegativeInteger = 0
    test_hits: dict[str, list[HitCount]] = {}


# -- hits of single images


class StoredPoolHits(ResultSection, frozen=True):
    """Hits of the images of a pool; see :class:`ifsl_bench.protocols.image_counts.PoolHits`.

    Attributes:
        sizes: images of each class, in the order of the pool; a packed array, as are all others.
        step: neighbouring images of a class that are counted together.
        asked: how often each group of so many images was a query, group by group; in episodes of the even episodes,
            then of the odd ones.
        right: name -> how often each of these was right, or what share of its queries.
    """

    sizes: str
    step: Annotated[int, Meta(ge=1, lt=1 << 31)]
    asked: str
    right: dict[str, str]


class StoredImageHits(ResultSection, frozen=True):
    """Hits of the test images; see :class:`ifsl_bench.protocols.image_counts.ImageHits`.

    Attributes:
        shares: whether ``right`` has shares in 1/255, as in sessions, and not counts.
        pools: "base" and "novel" -> the images that base and novel queries are drawn from.
    """

    shares: bool
    pools: dict[Literal["base", "novel"], StoredPoolHits]

    @classmethod
    def from_image_hits(cls, hits: ImageHits) -> StoredImageHits:
        """Make the section of some hits."""
        pools = {}
        for name, pool in hits.pools.items():
            texts = pool.packed_arrays
            pools[name] = StoredPoolHits(
                sizes=pack_array(pool.images_per_class),
                step=pool.images_per_group,
                asked=texts.pop("asked"),
                right=texts,
            )
        return cls(shares=hits.right_counts_are_shares, pools=pools)  # type: ignore[arg-type]

    def to_image_hits(self) -> ImageHits:
        """Return the hits as arrays.

        Raises:
            ValueError: a text that holds no such array, or arrays that differ in length.
        """
        pools = {}
        for name, pool in self.pools.items():
            sizes, parts = unpack_array(pool.sizes, MOST_STORED_NUMBERS, COUNT_KINDS), 1 if self.shares else 2
            numbers = parts * int((-(-sizes // pool.step)).sum())
            texts = {"asked": pool.asked, **pool.right}
            arrays = {key: unpack_array(text, MOST_STORED_NUMBERS, COUNT_KINDS) for key, text in texts.items()}
            if not numbers or any(len(values) != numbers for values in arrays.values()):
                raise ValueError(f"{name} does not have {numbers:,} numbers throughout")
            right = {key: values.reshape(parts, -1) for key, values in arrays.items()}
            pools[str(name)] = PoolHits(sizes, pool.step, right.pop("asked"), right)
        return ImageHits(pools, self.shares)


# -- the file


@accept_old_names(counts="to_hit_counts", classes="drawn_novel_classes")
class Result(ResultSection, frozen=True):
    """One method, one task, one training seed; docs/python.md explains every field.

    Attributes:
        options: the method's options that were given or tuned.
        tuned: options -> {values: validation accuracy in percent}; empty where nothing was chosen.
        train: the changes of meta-training, ``rate`` also where it was chosen.
        digest: identity of the episodes; results are comparable only where it is equal.
        summary: metric -> mean and half-width of the 95% interval over test episodes, choices held fixed, in percent.
        training: validation accuracy by step, the step kept, how solves went; empty where nothing was meta-trained.
        novel_fingerprint: identity of the data that novel classes come from, where these are other data; else "".
        setting: "paper" for the method as published, "tuned-12" for the best of 12 trials, "every" for a row that is
            the same in all settings.
        passed_over: values that were tried and could not be chosen, since inner solves failed there.
        edge: the options whose chosen value is the smallest or the largest that was tried, though the option takes
            values beyond.
        rounds: the number of settings that each round of the search tried; empty where nothing was searched.
        calibration: None in regular few-shot learning, and where no validation episodes can be drawn.
        choice: None where nothing was chosen, and where it is not recorded.
        images: hits of single test images; None where they are not recorded.
        flags: what rows say of the method, in a few words each, as what it changes in the network.
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
    episodes: StoredCounts
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
    calibration: StoredCalibration | None
    transductive: bool
    places: dict[str, str]
    rounds: list[int] = msgspec.field(default_factory=list)
    choice: StoredOptionChoice | None = None
    images: StoredImageHits | None = None
    flags: list[Annotated[str, Meta(max_length=80)]] = msgspec.field(default_factory=list)

    @property
    def n_trials(self) -> int:
        """The number of settings that ``--tune`` tried; 0 for a method as published."""
        return int(self.setting.removeprefix("tuned-")) if re.fullmatch(r"tuned-\d{1,6}", self.setting) else 0

    @property
    def includes_bias(self) -> bool:
        """Whether the bias of its calibration is part of the row."""
        return self.calibration is not None and self.calibration.applied

    @property
    def recipe(self) -> str | None:
        """The recipe that trained the backbone, with its options; None where it was not trained on the task's data."""
        if "recipe" in self.pretraining:
            return str(self.pretraining["recipe"])
        key = str(self.pretraining.get("key"))
        features = re.search(rf"-({NO_BACKBONE}|{INCLUDED_BACKBONE})-(linear|cosine)-seed\d+-\w+$", key)
        return None if features or "backbone" in self.pretraining else CROSS_ENTROPY_RECIPE

    @property
    def chosen_option_names(self) -> set[str]:
        """The names of what was chosen on validation episodes: options, ``train.rate`` for the learning rate."""
        return {name for names in self.tuned for name in names.split(", ")}

    def validation_accuracy(self, setting: str) -> float | None:
        """Return the validation accuracy of a setting, -inf where it was passed over; None where it was not tried."""
        if setting in self.passed_over:
            return -math.inf
        return next((tried[setting] for tried in self.tuned.values() if setting in tried), None)

    def user_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options and changes of meta-training that the user set, which may be part of the label."""
        options = {key: value for key, value in self.options.items() if key not in self.chosen_option_names}
        return options, {
            key: value for key, value in self.train.items() if f"train.{key}" not in self.chosen_option_names
        }

    @property
    def protocol(self) -> Protocol:
        """The protocol that it was measured by, see :mod:`ifsl_bench.protocols.protocol`."""
        return self.episodes.protocol

    def to_hit_counts(self) -> HitCounts:
        """Return the counts as arrays."""
        return self.episodes.to_hit_counts()

    def drawn_novel_classes(self) -> np.ndarray:
        """Return the novel classes of each episode or order, int64 [n, N]."""
        return self.episodes.drawn_classes()

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame of one row, see :func:`ifsl_bench.store.data_frames.result_to_row`."""
        from ifsl_bench.store.data_frames import make_data_frame, result_to_row

        return make_data_frame([result_to_row(self)])

    def episodes_to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row for each episode; see :func:`~.data_frames.make_episodes_frame`."""
        from ifsl_bench.store.data_frames import make_episodes_frame

        return make_episodes_frame(self)

    def images_to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row for each test image; see :func:`~.data_frames.make_images_frame`."""
        from ifsl_bench.store.data_frames import make_images_frame

        return make_images_frame(self)

    def __repr__(self) -> str:
        from ifsl_bench.store.data_frames import format_result_line

        return f"<{format_result_line(self)}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


def round_summary(summary: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    """Return a summary as a file has it: rounded, without the intervals that one sequence does not have."""
    parts = {name: asdict(value) for name, value in summary.items()}
    return {name: {k: round(v, 6) for k, v in part.items() if math.isfinite(v)} for name, part in parts.items()}


# -- fields as runs of this version write them, which `ifsl-bench check` asks of contributed files; older ones have less

SETTING_PATTERN = r"^(paper|every|tuned-([2-9]|[1-9][0-9]{1,5}))\Z"
HEX16_PATTERN, HEX64_PATTERN, HEX64_OR_EMPTY_PATTERN = r"^[0-9a-f]{16}\Z", r"^[0-9a-f]{64}\Z", r"^([0-9a-f]{64})?\Z"
COMMIT_PATTERN = r"^([0-9a-f]{40}|.*\+changes)?\Z"
TIME_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\+00:00\Z"  # so that times sort as texts
PACKAGE_PATTERN, STEP_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?\Z", r"^[1-9][0-9]{0,17}\Z"
PATTERNS_IN_WORDS = {
    SETTING_PATTERN: "'paper', 'every' or 'tuned-N' with N from 2",
    HEX16_PATTERN: "16 hexadecimal digits",
    HEX64_PATTERN: "64 hexadecimal digits",
    HEX64_OR_EMPTY_PATTERN: "64 hexadecimal digits or none",
    COMMIT_PATTERN: "a commit of Git",
    TIME_PATTERN: "a time such as 2026-01-31T12:00:00+00:00",
    PACKAGE_PATTERN: "the name of a package",
    STEP_PATTERN: "the number of a step",
}
NonEmptyText = Annotated[str, Meta(min_length=1)]
Hex16 = Annotated[str, Meta(pattern=HEX16_PATTERN)]
Hex64 = Annotated[str, Meta(pattern=HEX64_PATTERN)]
Percent = Annotated[float, Meta(ge=0, le=100)]
CostKey = Literal["parameters", "pretraining_seconds", "training_seconds", "evaluation_seconds", "episodes_per_second"]
StatisticKey = Literal["mean", "max", "total", "episodes", "not_finite"]
SolveKey = Literal[
    "episodes", "unconverged", "adjoint_episodes", "adjoint_diverged", "adjoint_failed", "adjoint_indefinite"
]


class DistributionFields(ResultSection, frozen=True):
    """The package that a method is from."""

    name: str = ""
    version: str = ""


class ProvenanceFields(ResultSection, frozen=True):
    """The origin of a result; a release has no commit, and a method in a file no distribution."""

    command: NonEmptyText
    version: NonEmptyText
    commit: Annotated[str, Meta(pattern=COMMIT_PATTERN)]
    device: NonEmptyText
    python: NonEmptyText
    libraries: Annotated[dict[Annotated[str, Meta(pattern=PACKAGE_PATTERN)], str], Meta(min_length=1)]
    time: Annotated[str, Meta(pattern=TIME_PATTERN)]
    method_source: Hex16
    distribution: DistributionFields
    checkpoint: str
    revision: int = 0


class PretrainingFields(ResultSection, frozen=True):
    """The backbone.

    Fields from ``backbone`` to ``centre`` are of frozen backbones, later ones of backbones that a recipe trained.
    """

    key: NonEmptyText
    sha256: Hex64
    accuracy: Annotated[dict[Literal["base/val", "base/test"], Percent], Meta(min_length=1)]
    precision: str = ""
    device: str = ""
    processes: Annotated[tuple[Annotated[int, Meta(gt=0, lt=1 << 31)], ...], Meta(min_length=1)] = (1,)
    rounded: Literal["float16"] = "float16"
    backbone: str = ""
    weights: Annotated[str, Meta(pattern=HEX64_OR_EMPTY_PATTERN)] = ""
    features: Any = None
    pretrained_on: list[str] = []
    seen: Literal[tuple(SEEN_LEVELS)] = "no"  # type: ignore[valid-type]
    centre: Literal["mean", "none"] = "none"
    recipe: NonEmptyText = ""
    steps: Annotated[int, Meta(gt=0)] = 1
    passes: Annotated[float, Meta(gt=0)] = 1.0
    knows_classes: bool = False


class TrainingFields(ResultSection, frozen=True):
    """Meta-training: validation accuracy by step, the step kept, how many inner solves went how."""

    validation: dict[Annotated[str, Meta(pattern=STEP_PATTERN)], Percent] = {}
    kept_step: int = 0
    solves: dict[SolveKey, int] = {}


class WrittenResultFields(msgspec.Struct, kw_only=True):
    """Fields of :class:`Result` with their types as runs write them."""

    task_hash: Hex16
    digest: Hex64
    fingerprint: Hex64
    novel_fingerprint: Annotated[str, Meta(pattern=HEX64_OR_EMPTY_PATTERN)]
    setting: Annotated[str, Meta(pattern=SETTING_PATTERN)]
    tuned: dict[str, dict[str, Percent]]
    solver: dict[str, dict[StatisticKey, float]]
    cost: dict[CostKey, Annotated[float, Meta(ge=0)]]
    training: TrainingFields
    pretraining: PretrainingFields
    provenance: ProvenanceFields


# -- files


def result_file_name(label: str, seed: int) -> str:
    """Return the name of a result's file; characters that do not belong in one are escaped as in an address.

    Args:
        label: of the row.
        seed: of training.
    """
    return f"{quote(label, safe='=+,@ ')}.seed-{seed}.json"


def result_path(root: Path, result: Result) -> Path:
    """Return the path of a result.

    Args:
        root: the folder of results.
        result: what the file holds.
    """
    return root / result.task / result_file_name(result.label, result.seed)


def write_result(root: Path, result: Result) -> Path:
    """Write a result and return its path.

    Args:
        root: the folder of results.
        result: what the file shall hold.
    """
    path = result_path(root, result)
    write_json(path, msgspec.to_builtins(result))
    return path


def rename_replaced_result(root: Path, result: Result) -> Path | None:
    """Rename the file that a result would overwrite if it has other hits.

    Args:
        root: the folder of results.
        result: what will be written.

    Returns:
        The new name; None if nothing was renamed.
    """
    path = result_path(root, result)
    if not path.exists():
        return None
    with contextlib.suppress(CorruptFile):
        old, new = read_result(path).episodes, result.episodes
        recorded = [name for name in new.COLUMNS if len(getattr(old, name))]  # a newer version may count more
        if old.shape_values == new.shape_values and old.has_same_numbers(new, recorded):
            return None
    return quarantine_path(path, "old")


SOLVES_KEY_OF_FAILURE = {  # failures of inner solves -> the solves that they are among, under training.solves
    "adjoint_diverged": "adjoint_episodes",
    "adjoint_indefinite": "adjoint_episodes",
    "adjoint_failed": "adjoint_episodes",
    "unconverged": "episodes",
}


class _ReadableTraining(msgspec.Struct):
    """The part of ``training`` that tables and figures read."""

    validation: dict[Annotated[str, Meta(pattern="^[0-9]{1,18}$")], Annotated[float, Meta(ge=0, le=100)]] = {}
    kept_step: int = 0
    solves: dict[str, Annotated[int, Meta(ge=0, lt=1 << 31)]] = {}


def find_first_contradiction(result: Result) -> str | None:
    """Return why a result contradicts itself; None where it does not."""
    try:
        return next(_find_contradictions(result), None)
    except OverflowError:
        return "a count is beyond all bounds"


def _find_contradictions(result: Result) -> Iterator[str]:
    try:
        counts = result.to_hit_counts()
        result.episodes.read_column("classes")
    except ValueError:
        yield "columns differ in length"
        return
    try:
        parts = {name: result.training[name] for name in _ReadableTraining.__struct_fields__ if name in result.training}
        solves = msgspec.convert(parts, _ReadableTraining, strict=True).solves
    except (msgspec.ValidationError, UnicodeError) as error:
        yield f"training: {error}"
        return
    for kind, total in SOLVES_KEY_OF_FAILURE.items():
        if solves.get(kind, 0) > solves.get(total, 0):
            yield f"training.solves has {kind} in more episodes than the {total}"
    yield from result.protocol.find_contradictions(counts, result)
    if result.images:
        yield from (
            f"images: {reason}" for reason in _image_hit_contradictions(result.images, counts.total_image_hits())
        )
    expected = round_summary(counts.summarise_metrics())
    for name in dict.fromkeys((*expected, *result.summary)):
        of_counts, of_file = expected.get(name, {}), result.summary.get(name, {})
        for part in dict.fromkeys((*of_counts, *of_file)):
            stored = of_file.get(part, math.nan)
            if part not in of_counts:
                yield f"summary.{name}.{part} does not follow from the counts"
            elif not math.isclose(stored, of_counts[part], rel_tol=0, abs_tol=2e-6):
                yield f"summary.{name}.{part} is {stored}, the counts give {of_counts[part]}"


def _image_hit_contradictions(images: StoredImageHits, totals: Mapping[str, Mapping[str, int | None]]) -> Iterator[str]:
    """Yield why these are not the hits of single images of counts with these totals."""
    try:
        hits = images.to_image_hits()
    except ValueError as error:
        yield str(error)
        return
    if totals.keys() != hits.pools.keys():
        yield f"queries are of the pools {', '.join(totals)}, not {', '.join(hits.pools)}"
    for name, pool in hits.pools.items():
        if totals[name].keys() != {"asked", *pool.right_counts}:
            yield f"{name} has {', '.join(pool.right_counts)} beside asked, its counts have {', '.join(totals[name])}"
        if any(
            (values > (SHARE_LEVELS if images.shares else pool.query_counts)).any()
            for values in pool.right_counts.values()
        ):
            yield f"{name} has an image that is right more often than it is a query"
        for what, total in totals[name].items():
            shares = images.shares and what != "asked"
            values = pool.query_counts if what == "asked" else pool.right_counts[what]
            found = float((values * pool.query_counts).sum()) / SHARE_LEVELS if shares else int(values.sum())
            rounded = (
                float(pool.query_counts.sum()) / SHARE_LEVELS * pool.images_per_group.bit_length() if shares else 0
            )
            if total is not None and abs(found - total) > rounded / 2:
                yield f"{name} has {what} {found:,.0f} times in all, its counts give {total:,}"


def read_result(path: Path) -> Result:
    """Read a result, and recompute its summary from its counts.

    Raises:
        CorruptFile: it is no result, of another schema, or contradicts itself.
        UserError: it cannot be read.
    """
    result = parse_result(path)
    if reason := find_first_contradiction(result):
        raise CorruptFile(f"{path}: {reason}")
    return result


def read_raw_result(path: Path) -> dict[str, Any]:
    """Read the JSON of a file that may be a result; raise as :func:`read_result`, and for one that is too large."""
    try:
        raw: dict[str, Any] = read_json(path, RESULT_FILE_BYTES)
    except OSError as error:
        raise UserError(f"cannot read the result {path}: {error.strerror}") from error
    return raw


@lru_cache
def _make_result_type_with_counts(form: type[StoredCounts]) -> type[Result]:
    """Return a result with the counts of one protocol, for its types to be checked."""
    kind = msgspec.defstruct("Result", [("episodes", form)], bases=(Result,), frozen=True, kw_only=True)
    return cast("type[Result]", kind)


def parse_result(path: Path, raw: Mapping[str, Any] | None = None) -> Result:
    """Read a result and check it by the schema alone; raise as :func:`read_result`.

    Args:
        path: of the file.
        raw: its content, where it was read before.
    """
    raw = read_raw_result(path) if raw is None else raw
    if raw.get("schema") != SCHEMA_VERSION:
        raise CorruptFile(f"{path} is no result of schema {SCHEMA_VERSION} (it says {reprlib.repr(raw.get('schema'))})")
    try:
        # Stored results have a probe, which nothing reads any more, until they are measured again.
        kind = _make_result_type_with_counts(stored_counts_type_of_fields(raw.get("episodes")))
        checked = msgspec.convert({key: value for key, value in raw.items() if key != "probe"}, kind, strict=True)
        result = Result(**{name: getattr(checked, name) for name in Result.__struct_fields__})
    except (msgspec.ValidationError, UnicodeError) as error:  # the latter for names with half a character
        raise CorruptFile(f"{path} is not a valid result: {error}") from error
    for name in result.episodes.COLUMNS:
        if isinstance(getattr(result.episodes, name), str):
            try:
                result.episodes.read_column(name)
            except ValueError as error:
                raise CorruptFile(f"{path} is not a valid result: episodes.{name}: {error}") from error
    named = [(name, getattr(result, name)) for name in PRINTED_FIELDS] + [("flags", flag) for flag in result.flags]
    for name, text in named:
        if not is_printable(text):
            raise CorruptFile(f"{path} is not a valid result: {name} {text!r} is not printable text")
    return result
