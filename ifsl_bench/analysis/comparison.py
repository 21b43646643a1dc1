"""Paired comparisons of two measured rows. Imports no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ifsl_bench.analysis.aggregate import (
    FILE,
    PARTIAL_DATA_NOTE,
    SeedAggregate,
    describe_fixed_factors,
    list_notes_on_solve_failures,
    list_notes_on_unrecorded_choices,
    select_rows_with_metric,
    variance_from_choices,
)
from ifsl_bench.analysis.image_variance import estimate_image_variance
from ifsl_bench.analysis.ranking import RANK_ERROR_RATE, Ranking, RowDifference, common_setting
from ifsl_bench.plugin.display_names import display_name_of_label
from ifsl_bench.protocols.calibration import RESAMPLE_COUNT
from ifsl_bench.protocols.metrics import Estimate, PairedDifference, mean_with_interval, paired_difference
from ifsl_bench.protocols.protocol import Protocol
from ifsl_bench.store.result_folder import reason_not_to_pair
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_p_value, format_seeds

UNKNOWN_ESTIMATE = Estimate(math.nan, math.nan)


@dataclass(frozen=True)
class Comparison:
    """A - B on the same episodes.

    Attributes:
        label_a, label_b: the labels and whose rows they are, as in "lr (stored)"; readers see the recipe of one behind
        a bar.
        episode_differences: metric -> paired difference over episodes, holding the trained models fixed.
        seeds: the seeds both have.
        seed_differences: metric -> mean difference of each common seed, [len(seeds)].
        mean_seed_differences: metric -> mean over seeds and half-width of Student's 95% interval; one seed has none.
        overall_differences: metric -> the difference over both episodes and seeds, which ranks rest on.
        image_intervals: metric -> the difference over other test images of the same classes, trained models held fixed;
            without metrics in which results do not record the hits of single images.
        class_intervals: metric -> the difference over episodes and their novel classes, see
            :mod:`ifsl_bench.analysis.comparison`; empty where there is none, which ``notes`` say.
        n_classes: how many novel classes the episodes have; 0 where that is not recorded.
        class_effect_sds: metric -> standard deviation of the effect that a novel class has on the difference; 0 where
            the estimate of its square is negative.
        is_partial: whether the data set is marked partial, which ``notes`` say too.
        same_label_notes: notes on further rows of the labels of the two, which could have been meant.
        notes: what else a reader should know.
    """

    label_a: str
    label_b: str
    task: str
    n_interval_units: int
    protocol: Protocol
    is_partial: bool
    episode_differences: dict[str, PairedDifference]
    seeds: tuple[int, ...]
    seed_differences: dict[str, np.ndarray]
    mean_seed_differences: dict[str, Estimate]
    overall_differences: dict[str, RowDifference]
    image_intervals: dict[str, Estimate]
    class_intervals: dict[str, Estimate]
    n_classes: int
    class_effect_sds: dict[str, float]
    same_label_notes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def interval_units_noun(self) -> str:
        """The units that intervals are over."""
        return self.protocol.interval_units_noun


def compare_rows(
    a: SeedAggregate,
    b: SeedAggregate,
    comparable_rows: Sequence[SeedAggregate] = (),
    same_label_rows: Sequence[SeedAggregate] = (),
) -> Comparison:
    """Compare two rows in pairs over episodes, and over the seeds that both have.

    Args:
        a: one row.
        b: another one.
        comparable_rows: all comparable rows of the task, from which the variance over seeds is estimated.
        same_label_rows: further rows of the same labels, which could have been meant.

    Raises:
        UserError: the two were not measured on the same episodes; the message explains why.
    """
    from scipy.special import stdtrit

    first, second = _row_name_in_text(a), _row_name_in_text(b)
    others = [row for row in same_label_rows if row not in (a, b)]
    reason = reason_not_to_pair(a.results[0], b.results[0])
    if reason:
        hint = f"; there is also {' and '.join(repr(_row_name_in_text(row)) for row in others)}" if others else ""
        raise UserError(f"{first!r} and {second!r} cannot be compared: {reason}{hint}")
    common = tuple(s for s in a.seeds if s in b.seeds)
    seeds = common or None
    ours, theirs = a.metrics_by_episode(seeds), b.metrics_by_episode(seeds)
    names = [name for name in ours if name in theirs]
    choices = {
        name: variance_from_choices(a.metric_by_resample(name, seeds) - b.metric_by_resample(name, seeds))
        for name in names
    }
    by_seed = {name: a.metric_by_seed(name, common).mean(1) - b.metric_by_seed(name, common).mean(1) for name in names}
    student = float(stdtrit(len(common) - 1, 0.975))
    differences = np.stack([ours[name] - theirs[name] for name in names], 1)
    over = estimate_class_intervals(
        differences, a.results[0].drawn_novel_classes(), np.array(list(choices.values())), a.interval_units_noun
    )
    by_class = over if isinstance(over, ClassIntervals) else None
    estimates = (
        map(Estimate, by_class.mean_differences.tolist(), by_class.interval_half_widths.tolist()) if by_class else ()
    )
    of_images = {name: estimate_image_variance(a, b, name, common, models_fixed=True) for name in names}
    return Comparison(
        label_a=_label_with_origin(a),
        label_b=_label_with_origin(b),
        task=a.results[0].task,
        n_interval_units=len(differences),
        protocol=a.protocol,
        is_partial=a.is_partial or b.is_partial,
        episode_differences={
            name: paired_difference(ours[name], theirs[name], choices[name], a.interval_quantile) for name in names
        },
        seeds=common,
        seed_differences=by_seed,
        mean_seed_differences={
            name: mean_with_interval(v, quantile=student) if common else UNKNOWN_ESTIMATE for name, v in by_seed.items()
        },
        overall_differences={name: estimate_overall_difference(a, b, comparable_rows, name) for name in names},
        image_intervals={
            name: Estimate(float(ours[name].mean() - theirs[name].mean()), images.interval_half_width)
            for name, images in of_images.items()
            if images
        },
        class_intervals=dict(zip(names, estimates, strict=False)),
        n_classes=by_class.n_classes if by_class else 0,
        class_effect_sds=dict(zip(names, by_class.class_effect_sds.tolist(), strict=True)) if by_class else {},
        same_label_notes=tuple(
            f"{(first if row.label == a.label else second)!r} is compared; there is also {_row_name_in_text(row)!r}, "
            f"with {format_seeds(row.seeds)}"
            for row in others
        ),
        notes=tuple(_list_comparison_notes(a, b, common, None if by_class else f"no interval over classes: {over}")),
    )


def _list_comparison_notes(
    a: SeedAggregate, b: SeedAggregate, common: tuple[int, ...], classes: str | None
) -> Iterator[str]:
    first, second = _row_name_in_text(a), _row_name_in_text(b)
    if a.is_partial or b.is_partial:
        yield PARTIAL_DATA_NOTE
    if common != a.seeds or common != b.seeds:
        used = f"only those in common, {format_seeds(common)}"
        used = used if common else "they have none in common, so all are averaged"
        yield f"{first} has {format_seeds(a.seeds)}, {second} has {format_seeds(b.seeds)}: {used}"
    of_b = {result.seed: result.pretraining for result in b.results}
    separate = defaultdict[str, list[int]](list)
    for result in a.results:
        mine, theirs = result.pretraining, of_b.get(result.seed, result.pretraining)
        if mine.get("key") == theirs.get("key") and mine.get("sha256") != theirs.get("sha256"):
            separate["base classifiers" if "features" in mine else "backbones"].append(result.seed)
    for trained, seeds in separate.items():
        yield f"{format_seeds(seeds)}: the two start from {trained} that were trained separately (another machine?)"
    if len(common) == 2 and not (a.is_seed_independent and b.is_seed_independent):
        yield "two seeds tell little of how far others would differ: claims need three or more"
    if len(common) > 1 and a.has_one_pretraining and b.has_one_pretraining:
        yield "all seeds start from one pretraining: the intervals over seeds hold the backbone fixed"
    if keeping := [
        f"{_row_name_in_text(row)} keeps {row.images_kept_by_method}" for row in (a, b) if row.images_kept_by_method
    ]:
        yield f"{' and '.join(keeping)} of earlier sessions"
    for row in (a, b):
        if row.method_flags:
            yield f"{_row_name_in_text(row)} {', '.join(row.method_flags)}"
    if a.recipe != b.recipe:
        each = [
            f"{_row_name_in_text(row)} on one trained {f'by {row.recipe}' if row.recipe else 'elsewhere'}"
            for row in (a, b)
        ]
        yield f"the two have different backbones, {', '.join(each)}"
    yield from list_notes_on_unrecorded_choices([a, b])
    if a.n_trials != b.n_trials:
        yield f"chosen in validation: {'; '.join(_describe_selection(row) for row in (a, b))}"
    if "sessions" in a.protocol.figures_and_tables:
        yield "lower is better in PD, novel as base and base as novel"
        yield f"every interval holds fixed {describe_fixed_factors([a, b])}"
    if classes:
        yield classes
    for note in list_notes_on_solve_failures({first: a.solve_failures, second: b.solve_failures}):
        yield f"{note[0].lower()}{note[1:-1]}"


def estimate_overall_difference(
    a: SeedAggregate, b: SeedAggregate, comparable_rows: Sequence[SeedAggregate], metric: str
) -> RowDifference:
    """Return A - B over episodes and the seeds that both have.

    Args:
        a: one row.
        b: another one.
        comparable_rows: all comparable rows of the task, which moderate the variance over seeds.
        metric: its name.
    """
    common = [seed for seed in a.seeds if seed in b.seeds]
    return (
        Ranking(select_rows_with_metric(comparable_rows, metric), metric, common_setting(a, b))
        .find_ranking_containing(a, b)
        .estimate_row_difference(a, b, common)
    )


def _label_with_origin(row: SeedAggregate) -> str:
    """Return the label of a row with its origin; of a file the label alone, which names it."""
    return row.label if row.results_origin == FILE else row.label_with_origin


def _row_name_in_text(row: SeedAggregate) -> str:
    """Return the name of a row for readers."""
    return display_name_of_label(_label_with_origin(row))


def _describe_selection(row: SeedAggregate) -> str:
    """Return in words from how many settings a row was chosen."""
    if row.n_trials == 1:
        return f"nothing for {_row_name_in_text(row)}"
    how = "with one seed" if row.results[0].n_trials else "for each seed"
    return f"{_row_name_in_text(row)} from {row.n_trials} settings, {how}"


def describe_verdict(comparison: Comparison) -> str:
    """Return a sentence on how the accuracies of the two differ: at 5%, over episodes and, if several, seeds."""
    whole = len(comparison.seeds) > 1 or comparison.image_intervals
    gap = comparison.overall_differences["acc"] if whole else comparison.episode_differences["acc"]
    units, acc = comparison.interval_units_noun, comparison.protocol.metric_column("acc").title
    a, b = display_name_of_label(comparison.label_a), display_name_of_label(comparison.label_b)
    if gap.mean == gap.interval == 0:
        return f"{a} and {b} have the same accuracy in every {units.removesuffix('s')}."
    if math.isnan(gap.p_value):
        return f"The difference is that of one {units.removesuffix('s')}: nothing says how much others would differ."
    if gap.p_value > RANK_ERROR_RATE:
        sentence = f"{acc} does not tell {a} and {b} apart"
    else:
        better, worse = (a, b) if gap.mean > 0 else (b, a)
        sentence = f"{better} has a significantly higher {acc} than {worse}"
    sentence += f" (p {format_p_value(gap.p_value)}"
    if len(comparison.seeds) < 2:
        drawn = f"{units} and test images" if comparison.image_intervals else units
        sentence += f"), over {drawn} alone: of these trained models"
        return f"{sentence}; a claim about methods needs --seeds 3 or more."
    images = "" if comparison.overall_differences["acc"].images_fixed else ", test images"
    if comparison.overall_differences["acc"].models_fixed:
        return f"{sentence}, over {units}{images}; neither depends on the training seed)."
    return f"{sentence}, over {units}{images} and {len(comparison.seeds)} seeds)."


MIN_DEGREES_OF_FREEDOM = 3.0  # degrees of freedom
MANY_EPISODES_THRESHOLD = 5000  # episodes; tables then say what more of them do not do


@dataclass(frozen=True)
class ClassIntervals:
    """Differences over episodes and the classes that these draw from, for m metrics.

    Attributes:
        mean_differences: [m].
        interval_half_widths: [m] half-widths of 95% intervals.
        degrees_of_freedom: [m] of freedom.
        class_effect_sds: [m] estimates of the standard deviation of a_c; 0 where that of its variance A is below 0.
        n_classes: how many there are in the episodes.
    """

    mean_differences: np.ndarray
    interval_half_widths: np.ndarray
    degrees_of_freedom: np.ndarray
    class_effect_sds: np.ndarray
    n_classes: int


def estimate_class_intervals(
    differences: np.ndarray, classes: np.ndarray, choice_variances: np.ndarray | float = 0.0, units: str = "episodes"
) -> ClassIntervals | str:
    """Return the interval of each mean difference over novel classes, or why there is none.

    Args:
        differences: [n, m], one row minus another.
        classes: [n, N] class ids of each episode, all different.
        choice_variances: [m] the variance that choices on validation episodes give each mean, over ``RESAMPLE_COUNT``
            of them.
        units: the name of the n.
    """
    from scipy.special import stdtrit

    n, ways = classes.shape
    if n == 1:
        return f"there is one {units.removesuffix('s')}"
    ids, at = np.unique(classes, return_inverse=True)
    at, count = at.reshape(n, ways), len(ids)
    together = np.zeros((count, count))  # episodes that hold both classes; N^2 times Z'Z
    np.add.at(together, (at[:, :, None], at[:, None, :]), 1)
    values, vectors = np.linalg.eigh(together)
    if n <= count or values[0] < 1e-9 * values[-1]:
        return f"{n:,} {units} with {count} novel classes do not tell the classes apart"
    means = differences.mean(0)
    centred = differences - means
    sums = np.zeros((count, centred.shape[1]))  # over the episodes that hold a class; N times Z'd
    np.add.at(sums, at, centred[:, None])
    fitted = ways * vectors @ ((vectors.T @ sums) / values[:, None])  # [C, m]
    residuals = centred - fitted[at].mean(1)
    mean_square = (residuals**2).sum(0) / (n - count)  # s_E
    between = ((centred**2).sum(0) - (residuals**2).sum(0)) / (count - 1)  # s_M
    holding = together.diagonal()  # n_c
    weight = float(((holding / (ways * n)) ** 2).sum())
    k = (n / ways - float((holding**2).sum()) / (n * ways**2)) / (count - 1)
    negative = between < mean_square
    shares = np.where(negative, [[0.0], [1 / n]], [[weight / k], [1 / n - weight / k]])
    parts = shares * [between, mean_square]  # [2, m]
    variance = parts.sum(0) + choice_variances
    spread = parts[0] ** 2 / (count - 1) + parts[1] ** 2 / (n - count) + choice_variances**2 / (RESAMPLE_COUNT - 1)
    degrees = np.divide(variance**2, spread, out=np.full_like(variance, float(n - count)), where=spread > 0)
    degrees = np.maximum(degrees, MIN_DEGREES_OF_FREEDOM)
    effects = np.sqrt(np.maximum(0.0, between - mean_square) / k)
    return ClassIntervals(means, stdtrit(degrees, 0.975) * np.sqrt(variance), degrees, effects, count)
