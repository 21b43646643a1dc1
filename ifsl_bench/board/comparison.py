"""Paired comparisons of two measured rows. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ifsl_bench.board.measured import FILE, PARTIAL, Row, having, holding_choices, mismatch, variance
from ifsl_bench.board.over_classes import OverClasses, over_classes
from ifsl_bench.board.rank_intervals import LEVEL, Difference
from ifsl_bench.board.ranking import Ranking, setting_of
from ifsl_bench.board.solves import solve_notes
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.wording import seeds_in_words
from ifsl_bench.protocol.metrics import Estimate, Paired, paired


@dataclass(frozen=True)
class Comparison:
    """A - B on the same episodes.

    Attributes:
        a, b: the labels and whose rows they are, as in "lr (stored)".
        episodes: metric -> paired difference over episodes, holding the trained models fixed.
        seeds: the seeds both have.
        by_seed: metric -> mean difference of each common seed, [len(seeds)].
        by_seed_interval: metric -> mean over seeds and half-width of Student's 95% interval; one seed has none.
        overall: metric -> the difference over both episodes and seeds, which ranks rest on.
        over_classes: metric -> the difference over episodes and their novel classes, see
            :mod:`ifsl_bench.board.over_classes`; empty where there is none, which ``notes`` say.
        classes: how many novel classes the episodes have; 0 where nobody knows.
        effects: metric -> standard deviation of the effect that a novel class has on the difference; 0 where the
            estimate of its square is negative.
        partial: whether the data set is marked partial, which ``notes`` say too.
        notes: what a reader should know.
    """

    a: str
    b: str
    task: str
    count: int
    partial: bool
    episodes: dict[str, Paired]
    seeds: tuple[int, ...]
    by_seed: dict[str, np.ndarray]
    by_seed_interval: dict[str, Estimate]
    overall: dict[str, Difference]
    over_classes: dict[str, Estimate]
    classes: int
    effects: dict[str, float]
    notes: tuple[str, ...]


def compare(a: Row, b: Row, among: Sequence[Row] = ()) -> Comparison:
    """Paired comparison over episodes, and over the seeds that both rows have.

    Args:
        among: all comparable rows of the task, which say how much rows vary over seeds.

    Raises:
        UserError: the two were not measured on the same episodes; says why.
    """
    first, second = _called(a), _called(b)
    if reason := mismatch(a.results[0], b.results[0]):
        raise UserError(f"{first!r} and {second!r} cannot be compared: {reason}")
    common = tuple(s for s in a.seeds if s in b.seeds)
    ours, theirs = a.per_episode(common or None), b.per_episode(common or None)
    ours = {name: values for name, values in ours.items() if name in theirs}
    notes = [PARTIAL] if (on_part := a.partial or b.partial) else []
    if common != a.seeds or common != b.seeds:
        used = (
            f"only those in common, {seeds_in_words(common)}"
            if common
            else "they have none in common, so all are averaged"
        )
        notes.append(f"{first} has {seeds_in_words(a.seeds)}, {second} has {seeds_in_words(b.seeds)}: {used}")
    theirs_by_seed = {result.seed: result for result in b.results}
    pairs = [(left, theirs_by_seed[left.seed]) for left in a.results if left.seed in theirs_by_seed]
    by_seed = {name: a.by_seed(name, common).mean(1) - b.by_seed(name, common).mean(1) for name in ours}
    notes += [
        f"seed {left.seed}: the two start from backbones that were trained separately (another machine?)"
        for left, right in pairs
        if left.pretraining.get("key") == right.pretraining.get("key")
        and left.pretraining.get("sha256") != right.pretraining.get("sha256")
    ]
    if len(common) > 1 and a.one_pretraining and b.one_pretraining:
        notes.append("all seeds start from one pretraining: the intervals over seeds hold the backbone fixed")
    choices = {name: variance(a.choices(name, common or None) - b.choices(name, common or None)) for name in ours}
    differences = np.stack([ours[name] - theirs[name] for name in ours], 1)
    notes += holding_choices([a, b])
    by_class = _over_classes(a, differences, np.array(list(choices.values())))
    if isinstance(by_class, str):
        notes.append(by_class)
        of_classes, classes, effects = {}, 0, {}
    else:
        estimates = map(Estimate, by_class.means.tolist(), by_class.intervals.tolist())
        of_classes, classes = dict(zip(ours, estimates, strict=True)), by_class.classes
        effects = dict(zip(ours, by_class.effects.tolist(), strict=True))
    notes += [f"{note[0].lower()}{note[1:-1]}" for note in solve_notes({first: a.solves, second: b.solves})]
    notes += [
        f"there is also {_called(other)!r}, with {seeds_in_words(other.seeds)}"
        for other in among
        if other.label in (a.label, b.label) and all(other is not one for one in (a, b))
    ]
    return Comparison(
        first,
        second,
        a.results[0].task,
        len(a.results[0].episodes),
        on_part,
        {name: paired(ours[name], theirs[name], choices[name]) for name in ours},
        common,
        by_seed,
        {name: _over_seeds(values) for name, values in by_seed.items()},
        {name: overall(a, b, among, name) for name in ours},
        of_classes,
        classes,
        effects,
        tuple(notes),
    )


def overall(a: Row, b: Row, among: Sequence[Row], metric: str) -> Difference:
    """A - B over episodes and the seeds that both have, the variance over seeds moderated by the rows ``among``."""
    common = [seed for seed in a.seeds if seed in b.seeds]
    return Ranking(having(among, metric), metric, setting_of(a, b)).of(a, b).difference(a, b, common)


def _called(row: Row) -> str:
    """A row's label and whose it is, as commands take both; of a file the label alone, which names it."""
    return row.label if row.origin == FILE else f"{row.label} ({row.origin})"


def _over_classes(a: Row, differences: np.ndarray, choices: np.ndarray) -> OverClasses | str:
    """Of differences [n, m], to whose means choices add variances [m], or why there is no such interval."""
    found = over_classes(differences, a.results[0].classes(), choices)
    return f"no interval over classes: {found}" if isinstance(found, str) else found


def _over_seeds(values: np.ndarray) -> Estimate:
    from scipy.special import stdtrit

    n = len(values)
    if n < 2:
        return Estimate(float(values.mean()) if n else math.nan, math.nan)
    return Estimate(float(values.mean()), float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1)) / math.sqrt(n))


def verdict(found: Comparison) -> str:
    """What the accuracies say of the two, in a sentence: at 5%, over episodes and seeds where there are several."""
    gap = found.overall["acc"] if len(found.seeds) > 1 else found.episodes["acc"]
    if gap.mean == gap.interval == 0:
        return f"{found.a} and {found.b} have the same accuracy in every episode."
    if gap.p > LEVEL:
        said = f"Acc. does not tell {found.a} and {found.b} apart"
    else:
        better, worse = (found.a, found.b) if gap.mean > 0 else (found.b, found.a)
        said = f"{better} has a significantly higher Acc. than {worse}"
    said += f" (p {p_value(gap.p)}"
    if len(found.seeds) < 2:
        return f"{said}), over episodes alone: of these trained models; a claim about methods needs --seeds 3 or more."
    if found.overall["acc"].models_fixed:
        return f"{said}, over episodes; neither depends on the training seed)."
    return f"{said}, over episodes and {len(found.seeds)} seeds)."


def p_value(value: float) -> str:
    """As in "p = 0.01"; smaller ones than 1e-15 rest on tails that no test has looked at."""
    return f"= {value:.2g}" if value >= 1e-15 else "< 1e-15"
