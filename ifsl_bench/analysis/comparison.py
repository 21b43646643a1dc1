"""Paired comparisons of two measured rows. Imports no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ifsl_bench.analysis.aggregate import (
    FILE,
    PARTIAL,
    SeedAggregate,
    fixed_in_intervals,
    having,
    solve_notes,
    unrecorded_choices,
    variance,
)
from ifsl_bench.analysis.image_variance import over_images
from ifsl_bench.analysis.ranking import LEVEL, Difference, Ranking, setting_of
from ifsl_bench.plugin.display_names import shown_label
from ifsl_bench.protocols.calibration import RESAMPLE_COUNT
from ifsl_bench.protocols.metrics import Estimate, PairedDifference, mean_with_interval, paired_difference
from ifsl_bench.protocols.protocol import Protocol
from ifsl_bench.store.result_folder import pairing_fault
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_p_value, format_seeds

NONE = Estimate(math.nan, math.nan)


@dataclass(frozen=True)
class Comparison:
    """A - B on the same episodes.

    Attributes:
        a, b: the labels and whose rows they are, as in "lr (stored)"; readers see the recipe of one behind a bar.
        episodes: metric -> paired difference over episodes, holding the trained models fixed.
        seeds: the seeds both have.
        by_seed: metric -> mean difference of each common seed, [len(seeds)].
        by_seed_interval: metric -> mean over seeds and half-width of Student's 95% interval; one seed has none.
        overall: metric -> the difference over both episodes and seeds, which ranks rest on.
        over_images: metric -> the difference over other test images of the same classes, trained models held fixed;
            without metrics in which results do not record the hits of single images.
        over_classes: metric -> the difference over episodes and their novel classes, see
            :mod:`ifsl_bench.analysis.comparison`; empty where there is none, which ``notes`` say.
        classes: how many novel classes the episodes have; 0 where that is not recorded.
        effects: metric -> standard deviation of the effect that a novel class has on the difference; 0 where the
            estimate of its square is negative.
        partial: whether the data set is marked partial, which ``notes`` say too.
        namesakes: notes on further rows of the labels of the two, which could have been meant.
        notes: what else a reader should know.
    """

    a: str
    b: str
    task: str
    count: int
    protocol: Protocol
    partial: bool
    episodes: dict[str, PairedDifference]
    seeds: tuple[int, ...]
    by_seed: dict[str, np.ndarray]
    by_seed_interval: dict[str, Estimate]
    overall: dict[str, Difference]
    over_images: dict[str, Estimate]
    over_classes: dict[str, Estimate]
    classes: int
    effects: dict[str, float]
    namesakes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def units(self) -> str:
        """The units that intervals are over."""
        return self.protocol.units


def compare(
    a: SeedAggregate,
    b: SeedAggregate,
    among: Sequence[SeedAggregate] = (),
    namesakes: Sequence[SeedAggregate] = (),
) -> Comparison:
    """Compare two rows in pairs over episodes, and over the seeds that both have.

    Args:
        a: one row.
        b: another one.
        among: all comparable rows of the task, from which the variance over seeds is estimated.
        namesakes: further rows of the same labels, which could have been meant.

    Raises:
        UserError: the two were not measured on the same episodes; the message explains why.
    """
    from scipy.special import stdtrit

    first, second = _called(a), _called(b)
    others = [row for row in namesakes if row not in (a, b)]
    reason = pairing_fault(a.results[0], b.results[0])
    if reason:
        hint = f"; there is also {' and '.join(repr(_called(row)) for row in others)}" if others else ""
        raise UserError(f"{first!r} and {second!r} cannot be compared: {reason}{hint}")
    common = tuple(s for s in a.seeds if s in b.seeds)
    seeds = common or None
    ours, theirs = a.per_episode(seeds), b.per_episode(seeds)
    names = [name for name in ours if name in theirs]
    choices = {name: variance(a.choices(name, seeds) - b.choices(name, seeds)) for name in names}
    by_seed = {name: a.by_seed(name, common).mean(1) - b.by_seed(name, common).mean(1) for name in names}
    student = float(stdtrit(len(common) - 1, 0.975))
    differences = np.stack([ours[name] - theirs[name] for name in names], 1)
    over = over_classes(differences, a.results[0].classes(), np.array(list(choices.values())), a.units)
    by_class = over if isinstance(over, OverClasses) else None
    estimates = map(Estimate, by_class.means.tolist(), by_class.intervals.tolist()) if by_class else ()
    of_images = {name: over_images(a, b, name, common, models_fixed=True) for name in names}
    return Comparison(
        a=_named(a),
        b=_named(b),
        task=a.results[0].task,
        count=len(differences),
        protocol=a.protocol,
        partial=a.partial or b.partial,
        episodes={name: paired_difference(ours[name], theirs[name], choices[name], a.quantile) for name in names},
        seeds=common,
        by_seed=by_seed,
        by_seed_interval={
            name: mean_with_interval(v, quantile=student) if common else NONE for name, v in by_seed.items()
        },
        overall={name: overall(a, b, among, name) for name in names},
        over_images={
            name: Estimate(float(ours[name].mean() - theirs[name].mean()), images.interval)
            for name, images in of_images.items()
            if images
        },
        over_classes=dict(zip(names, estimates, strict=False)),
        classes=by_class.classes if by_class else 0,
        effects=dict(zip(names, by_class.effects.tolist(), strict=True)) if by_class else {},
        namesakes=tuple(
            f"{(first if row.label == a.label else second)!r} is compared; there is also {_called(row)!r}, "
            f"with {format_seeds(row.seeds)}"
            for row in others
        ),
        notes=tuple(_notes(a, b, common, None if by_class else f"no interval over classes: {over}")),
    )


def _notes(a: SeedAggregate, b: SeedAggregate, common: tuple[int, ...], classes: str | None) -> Iterator[str]:
    first, second = _called(a), _called(b)
    if a.partial or b.partial:
        yield PARTIAL
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
    if len(common) == 2 and not (a.fixed and b.fixed):
        yield "two seeds tell little of how far others would differ: claims need three or more"
    if len(common) > 1 and a.one_pretraining and b.one_pretraining:
        yield "all seeds start from one pretraining: the intervals over seeds hold the backbone fixed"
    if keeping := [f"{_called(row)} keeps {row.images_kept}" for row in (a, b) if row.images_kept]:
        yield f"{' and '.join(keeping)} of earlier sessions"
    if a.recipe != b.recipe:
        each = [f"{_called(row)} on one trained {f'by {row.recipe}' if row.recipe else 'elsewhere'}" for row in (a, b)]
        yield f"the two have different backbones, {', '.join(each)}"
    yield from unrecorded_choices([a, b])
    if a.trials != b.trials:
        yield f"chosen in validation: {'; '.join(_chosen(row) for row in (a, b))}"
    if "sessions" in a.protocol.features:
        yield "lower is better in PD, novel as base and base as novel"
        yield f"every interval holds fixed {fixed_in_intervals([a, b])}"
    if classes:
        yield classes
    for note in solve_notes({first: a.solves, second: b.solves}):
        yield f"{note[0].lower()}{note[1:-1]}"


def overall(a: SeedAggregate, b: SeedAggregate, among: Sequence[SeedAggregate], metric: str) -> Difference:
    """Return A - B over episodes and the seeds that both have.

    Args:
        a: one row.
        b: another one.
        among: all comparable rows of the task, which moderate the variance over seeds.
        metric: its name.
    """
    common = [seed for seed in a.seeds if seed in b.seeds]
    return Ranking(having(among, metric), metric, setting_of(a, b)).of(a, b).difference(a, b, common)


def _named(row: SeedAggregate) -> str:
    """Return the label of a row with its origin; of a file the label alone, which names it."""
    return row.label if row.origin == FILE else row.full_label


def _called(row: SeedAggregate) -> str:
    """Return the name of a row for readers."""
    return shown_label(_named(row))


def _chosen(row: SeedAggregate) -> str:
    """Return in words from how many settings a row was chosen."""
    if row.trials == 1:
        return f"nothing for {_called(row)}"
    how = "with one seed" if row.results[0].trials else "for each seed"
    return f"{_called(row)} from {row.trials} settings, {how}"


def verdict(comparison: Comparison) -> str:
    """Return a sentence on how the accuracies of the two differ: at 5%, over episodes and, if several, seeds."""
    whole = len(comparison.seeds) > 1 or comparison.over_images
    gap = comparison.overall["acc"] if whole else comparison.episodes["acc"]
    units, acc = comparison.units, comparison.protocol.column("acc").title
    a, b = shown_label(comparison.a), shown_label(comparison.b)
    if gap.mean == gap.interval == 0:
        return f"{a} and {b} have the same accuracy in every {units.removesuffix('s')}."
    if math.isnan(gap.p):
        return f"The difference is that of one {units.removesuffix('s')}: nothing says how much others would differ."
    if gap.p > LEVEL:
        sentence = f"{acc} does not tell {a} and {b} apart"
    else:
        better, worse = (a, b) if gap.mean > 0 else (b, a)
        sentence = f"{better} has a significantly higher {acc} than {worse}"
    sentence += f" (p {format_p_value(gap.p)}"
    if len(comparison.seeds) < 2:
        drawn = f"{units} and test images" if comparison.over_images else units
        sentence += f"), over {drawn} alone: of these trained models"
        return f"{sentence}; a claim about methods needs --seeds 3 or more."
    images = "" if comparison.overall["acc"].images_fixed else ", test images"
    if comparison.overall["acc"].models_fixed:
        return f"{sentence}, over {units}{images}; neither depends on the training seed)."
    return f"{sentence}, over {units}{images} and {len(comparison.seeds)} seeds)."


FEWEST = 3.0  # degrees of freedom
MANY = 5000  # episodes; tables then say what more of them do not do


@dataclass(frozen=True)
class OverClasses:
    """Differences over episodes and the classes that these draw from, for m metrics.

    Attributes:
        means: [m].
        intervals: [m] half-widths of 95% intervals.
        degrees: [m] of freedom.
        effects: [m] estimates of the standard deviation of a_c; 0 where that of its variance A is below 0.
        classes: how many there are in the episodes.
    """

    means: np.ndarray
    intervals: np.ndarray
    degrees: np.ndarray
    effects: np.ndarray
    classes: int


def over_classes(
    differences: np.ndarray, classes: np.ndarray, choices: np.ndarray | float = 0.0, units: str = "episodes"
) -> OverClasses | str:
    """Return the interval of each mean difference over novel classes, or why there is none.

    Args:
        differences: [n, m], one row minus another.
        classes: [n, N] class ids of each episode, all different.
        choices: [m] the variance that choices on validation episodes give each mean, over ``RESAMPLE_COUNT`` of them.
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
    variance = parts.sum(0) + choices
    spread = parts[0] ** 2 / (count - 1) + parts[1] ** 2 / (n - count) + choices**2 / (RESAMPLE_COUNT - 1)
    degrees = np.divide(variance**2, spread, out=np.full_like(variance, float(n - count)), where=spread > 0)
    degrees = np.maximum(degrees, FEWEST)
    effects = np.sqrt(np.maximum(0.0, between - mean_square) / k)
    return OverClasses(means, stdtrit(degrees, 0.975) * np.sqrt(variance), degrees, effects, count)
