"""Episodes, with base classes among the classes and queries or without. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ifsl_bench.protocols.calibration import RESAMPLE_COUNT
from ifsl_bench.protocols.metrics import (
    BALANCE_METRIC_NAMES,
    EPISODE_COUNT_NAMES,
    EPISODE_METRIC_NAMES,
    OPTIONAL_EPISODE_COUNT_NAMES,
    EpisodeHitCounts,
)
from ifsl_bench.protocols.protocol import (
    FigureOrTableName,
    HitCount,
    MetricColumn,
    Protocol,
    StoredCounts,
    find_class_draw_faults,
)
from ifsl_bench.protocols.tasks.task import Task

if TYPE_CHECKING:
    from ifsl_bench.backbones.features import FeaturePool
    from ifsl_bench.protocols.episode_loader import EpisodeLoader

METRIC_COLUMNS = (
    MetricColumn("acc", "Acc.", r"Acc. $\uparrow$", is_in_short_tables=True, is_in_short_latex_tables=True),
    MetricColumn("calibrated_acc", "cal. Acc.", r"cal. Acc. $\uparrow$", is_in_short_tables=True, drop_priority=6),
    MetricColumn(
        "delta", "Delta", r"$\Delta \uparrow$", is_in_short_tables=True, is_in_short_latex_tables=True, drop_priority=2
    ),
    MetricColumn("delta_a", "Delta_a", r"$\Delta_a \uparrow$", is_in_short_tables=True, drop_priority=9),
    MetricColumn("delta_b", "Delta_b", r"$\Delta_b \uparrow$", is_in_short_tables=True, drop_priority=9),
    MetricColumn("base_joint", "base joint"),
    MetricColumn("base_alone", "base alone"),
    MetricColumn("novel_joint", "novel joint"),
    MetricColumn("novel_alone", "novel alone"),
    MetricColumn("ausuc", "AUSUC"),
    MetricColumn("calibrated_delta", "cal. Delta"),
    MetricColumn("harmonic", "harmonic", drop_priority=1),
)


class EpisodeCounts(StoredCounts, frozen=True):
    """Integer counts of each episode; see :class:`ifsl_bench.protocols.metrics.EpisodeHitCounts`.

    ``classes`` has the novel classes of each episode, one episode after the other, as labels of the novel test pool.
    What is missing, in regular few-shot learning or without validation episodes, is an empty list.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (*EPISODE_COUNT_NAMES, "classes", *OPTIONAL_EPISODE_COUNT_NAMES)
    SHAPE_FIELDS: ClassVar[tuple[str, ...]] = ("base_queries", "novel_queries")
    MARKER_FIELD: ClassVar[str] = "base_joint"

    base_queries: HitCount
    novel_queries: HitCount
    base_joint: list[int] | str
    base_alone: list[int] | str
    novel_joint: list[int] | str
    novel_alone: list[int] | str
    classes: list[int] | str
    pairs: list[int] | str = []  # noqa: RUF012 -- msgspec copies it
    calibrated_base: list[int] | str = []  # noqa: RUF012 -- msgspec copies it
    calibrated_novel: list[int] | str = []  # noqa: RUF012 -- msgspec copies it

    @property
    def protocol(self) -> Protocol:
        """Episodes with base queries, or without."""
        return EPISODES_PROTOCOL if self.base_queries else REGULAR_PROTOCOL

    def __len__(self) -> int:
        return self.column_length("base_joint")

    def to_hit_counts(self) -> EpisodeHitCounts:
        """Return the counts as arrays."""
        names = [*EPISODE_COUNT_NAMES, *(name for name in OPTIONAL_EPISODE_COUNT_NAMES if self.column_length(name))]
        arrays = {name: self.read_column(name) for name in names}
        return EpisodeHitCounts(**arrays, base_queries=self.base_queries, novel_queries=self.novel_queries)


class Episodes(Protocol):
    """Few-shot episodes: N novel classes each, and with base classes K more.

    Without base classes joint and alone accuracy are one, and there is nothing to lose: then the accuracy is the only
    metric.
    """

    name: ClassVar[str] = "episodes"
    full_table_metrics = (*EPISODE_METRIC_NAMES, *BALANCE_METRIC_NAMES)
    data_only_metrics = BALANCE_METRIC_NAMES
    metric_columns = METRIC_COLUMNS
    stored_counts_type = EpisodeCounts

    def __init__(self, with_base: bool) -> None:
        self.metrics, self.optional_metrics = (
            (EPISODE_METRIC_NAMES, BALANCE_METRIC_NAMES) if with_base else (EPISODE_METRIC_NAMES[:1], ())
        )
        both: tuple[FigureOrTableName, ...] = ("episode", "choices")
        self.figures_and_tables = frozenset((*both, "tradeoff") if with_base else both)

    def describe_drawn_items(self, task: Task) -> tuple[str, str]:
        spec, shots = task.episode, f"{task.shots} shot{'s' * (task.shots > 1)}"
        base = f"{spec.base_queries} base queries" if task.has_base else "no base classes"
        return "episode", f"{spec.ways} ways, {shots}; {spec.ways * spec.novel_queries} novel queries, {base}"

    def make_loader(
        self, task: Task, sampler: Any, novel: FeaturePool, base: FeaturePool | None, support: FeaturePool | None
    ) -> EpisodeLoader:
        from ifsl_bench.protocols.episode_loader import EpisodeLoader

        return EpisodeLoader(sampler, novel, base if task.has_base else None)

    def expected_counts_shape(self, task: Task, count: int) -> tuple[dict[str, int], int]:
        spec = task.episode
        shape = {"base_queries": spec.base_queries, "novel_queries": spec.ways * spec.novel_queries}
        return shape, count * spec.ways

    def find_contradictions(self, counts: EpisodeHitCounts, result: Any) -> Iterator[str]:
        yield from _hit_count_faults(counts)
        yield from find_class_draw_faults(result.episodes.read_column("classes"), len(counts))
        yield from (f"calibration {reason}" for reason in _calibration_faults(counts, result.calibration))
        if result.choice:
            settings = sum(map(len, result.tuned.values()))
            reasons = _option_choice_faults(counts, result.choice, settings, result.includes_bias)
            yield from (f"choice {reason}" for reason in reasons)

    def resampled_counts(self, counts: EpisodeHitCounts, calibration: Any, choice: Any) -> EpisodeHitCounts | None:
        """Return a result's hits over all test episodes with what each resample would have chosen.

        Pairs are multiplied by the number of episodes, as their share of all pairs is made of two sums.

        Args:
            counts: of the result, as arrays.
            calibration: its record in the result, or None.
            choice: the record of the choice of options, or None.
        """
        resampled = {
            "calibrated_base": calibration.resampled_base if calibration else [],
            "calibrated_novel": calibration.resampled_novel if calibration else [],
        }
        if not any(resampled.values()) and not choice:
            return None
        n = len(counts)
        sums: dict[str, Any] = {}
        for name, values in counts.count_arrays().items():
            sums[name] = np.asarray(resampled.get(name) or [values.sum(dtype=np.int64)], dtype=np.float64)
            if choice and name in choice.hits:
                sums[name] = sums[name] + n * mean_hit_gains(choice, name)[choice.winners]
        if calibration and calibration.applied:
            sums |= {"base_joint": sums["calibrated_base"], "novel_joint": sums["calibrated_novel"]}
        if "pairs" in sums:
            sums["pairs"] = n * sums["pairs"]
        whole = {name: np.round(values) for name, values in zip(sums, np.broadcast_arrays(*sums.values()), strict=True)}
        return EpisodeHitCounts(**whole, base_queries=n * counts.base_queries, novel_queries=n * counts.novel_queries)


EPISODES_PROTOCOL, REGULAR_PROTOCOL = Episodes(with_base=True), Episodes(with_base=False)


def mean_hit_gains(choice: Any, count: str) -> np.ndarray:
    """Return hits that each setting has more than the chosen one, a mean over episodes: of the test, if tried there.

    Args:
        choice: the record of a result.
        count: name of a count.
    """
    hits = np.array(choice.hits[count])
    differences = (hits - hits[choice.chosen]) / choice.validation_episodes
    if choice.rivals and count in choice.test_hits:
        chosen, *tested = choice.test_hits[count]
        differences[choice.rivals] = (np.array(tested) - chosen) / choice.test_episodes
    return differences


def _hit_count_faults(counts: EpisodeHitCounts) -> Iterator[str]:
    """Yield why no method has these counts."""
    n, base, novel = len(counts), counts.base_queries, counts.novel_queries
    if novel < 1:
        yield "an episode has no novel queries"
    for name in EPISODE_COUNT_NAMES:
        values, limit = getattr(counts, name), base if name.startswith("base") else novel
        if len(values) != n or n < 2:
            yield f"episodes.{name} has {len(values)} entries, episodes.base_joint has {n}; at least 2 are needed"
        if values.min() < 0 or values.max() > limit:
            yield f"episodes.{name} has hits outside 0..{limit}"
    if (counts.base_joint > counts.base_alone).any() or (counts.novel_joint > counts.novel_alone).any():
        yield "more joint hits than hits alone in some episode, which cannot be"
    if not base and (counts.novel_joint != counts.novel_alone).any():
        yield "joint hits differ from hits alone though the episodes have no base classes"
    limits = (2 * counts.base_alone * counts.novel_alone, counts.base_alone, counts.novel_alone)
    for name, most in zip(OPTIONAL_EPISODE_COUNT_NAMES, limits, strict=True):
        if (values := getattr(counts, name)) is None:
            continue
        if not base:
            yield f"episodes.{name} is there though the episodes have no base classes"
        if len(values) != n:
            yield f"episodes.{name} has {len(values)} entries, episodes.base_joint has {n}"
        if (values < 0).any() or (values > most).any():
            yield f"episodes.{name} has an episode with less than 0, or more than its hits alone allow"
    if (counts.calibrated_base is None) != (counts.calibrated_novel is None):
        yield "episodes.calibrated_base and episodes.calibrated_novel are not both there"
    if counts.pairs is None:
        if base:
            yield "episodes.pairs is missing"
        return
    # Queries that are right with one and the same bias are pairs in the right order.
    least = counts.base_joint * counts.novel_joint
    if counts.calibrated_base is not None and counts.calibrated_novel is not None:
        least = np.maximum(least, counts.calibrated_base * counts.calibrated_novel)
    if (counts.pairs < 2 * least).any():
        yield "episodes.pairs has fewer than the joint hits of an episode make"


def _calibration_faults(counts: EpisodeHitCounts, calibration: Any) -> Iterator[str]:
    """Yield why no method has these hits at these biases on the novel logits."""
    base, novel = counts.calibrated_base, counts.calibrated_novel
    if calibration is None or base is None or novel is None:
        if bool(calibration) != (base is not None):
            yield "and episodes.calibrated_base are not both there"
        return
    curve, resampled = calibration.curve, (calibration.resampled_base, calibration.resampled_novel)
    if len({len(curve.bias), len(curve.base_joint), len(curve.novel_joint)}) > 1:
        yield "has a curve whose parts differ in length"
    if {*map(len, resampled)} not in ({0}, {RESAMPLE_COUNT}):
        yield f"has other than {RESAMPLE_COUNT} resamples"
    joint = counts.base_joint, counts.novel_joint
    if calibration.applied and not all(map(np.array_equal, joint, (base, novel))):
        yield "is applied, and yet joint hits and calibrated ones differ"
    if (np.diff(curve.bias) <= 0).any():
        yield "has a curve whose biases do not ascend"
    of_counts = [
        (calibration.bias, base.sum(), novel.sum()),
        (calibration.bias if calibration.applied else 0.0, joint[0].sum(), joint[1].sum()),
    ]
    on_curve = np.array([curve.bias, curve.base_joint, curve.novel_joint], dtype=np.float64).T
    points = np.concatenate([on_curve, of_counts])
    points = points[np.lexsort((-points[:, 1], points[:, 0]))]
    if (np.diff(points[:, 1]) > 0).any() or (np.diff(points[:, 2]) < 0).any():
        yield "has base hits that rise, or novel hits that fall, as the bias grows"
    hits = np.concatenate([points[:, 1:], np.array(resampled).T.reshape(-1, 2)])
    if (hits > [counts.base_alone.sum(), counts.novel_alone.sum()]).any():
        yield "has more hits than there are alone"


def _option_choice_faults(counts: EpisodeHitCounts, choice: Any, settings: int, calibrated: bool) -> Iterator[str]:
    """Yield why one of this number of settings was not chosen like this, for a result with these counts."""
    if max(choice.chosen, *choice.winners, *choice.rivals) >= settings:
        yield f"has a place that none of {settings} settings has"
    for hits, count in ((choice.hits, settings), (choice.test_hits, 1 + len(choice.rivals))):
        if hits.keys() - {*EPISODE_COUNT_NAMES, *OPTIONAL_EPISODE_COUNT_NAMES} or any(
            len(each) != count for each in hits.values()
        ):
            yield f"has hits of something else, or of other than {count} settings"
    if not bool(choice.rivals) <= choice.test_episodes <= len(counts):
        yield f"has {choice.test_episodes:,} test episodes, the result {len(counts):,}"
    for name in choice.test_hits.keys() - ({"base_joint", "novel_joint"} if calibrated else set()):
        hits = counts.count_arrays().get(name, np.zeros(0, int))[: choice.test_episodes].sum()
        if choice.test_hits[name][0] != hits:
            yield f"has {choice.test_hits[name][0]:,} test hits {name} of the chosen setting, its counts give {hits:,}"
