"""The ranks that a row can have: intervals over training seeds and episodes, for all rows at once. Imports no torch.

A row i has accuracies x[i, s, e] on seeds s and episodes e, the same for all rows. The difference D of two rows is the
mean over both. Its variance has these parts:

* over seeds, v / m for m seeds, v the variance of the m differences of the seeds' means. Few seeds tell little of v, so
  it is moderated by what all rows say (Smyth 2004, Statistical Applications in Genetics and Molecular Biology 3(1):3);
* over episodes, w / n for n episodes, w the variance of the n differences of the episodes' means over seeds;
* of choices, where a bias or options were chosen on validation episodes: the variance over resamples of these;
* over test images, see :mod:`ifsl_bench.analysis.image_variance`, where results record the hits of single images.

Their sum V has Satterthwaite's degrees of freedom, and D / sqrt(V) Student's distribution with these. All n (n - 1)
one-sided hypotheses "row i is no better than row j" are tested at once by Holm's procedure. The rank of a row lies
between 1 + the number of rows that are significantly better and n - the number of rows that are significantly worse,
for all rows at once with a chance of 95% at least (Mogstad, Romano, Shaikh and Wilhelm 2024, Review of Economic Studies
91(1):476-518).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ifsl_bench.analysis.aggregate import EVERY, PAPER, STORED, SeedAggregate, variance_from_choices
from ifsl_bench.analysis.image_variance import IMAGES_HELD_FIXED, ImageVariance, estimate_image_variance
from ifsl_bench.protocols.calibration import RESAMPLE_COUNT
from ifsl_bench.utils.text_format import format_count

VARIANCE_ITERATIONS = 12  # in which weights and variances are found; they have then settled to a few percent
RANK_ERROR_RATE = 0.05  # chance that any of the intervals misses its rank


@dataclass(frozen=True)
class SeedVariancePrior:
    """A prior on one row's variance over seeds, from all rows.

    Attributes:
        variance: the variance over seeds that rows have in common.
        degrees_of_freedom: the weight of the prior, as a number of further seeds of that variance.
        mean_variance: the mean of the rows' variances, outliers included; degrees of freedom are computed with no less.
    """

    variance: float
    degrees_of_freedom: float
    mean_variance: float = 0.0


def fit_seed_variance_prior(row_means: np.ndarray, is_seed_independent: np.ndarray) -> SeedVariancePrior:
    """Return the rows' common variance over seeds, and how firmly they keep to it (Smyth 2004, section 6.2).

    A seed may move all rows alike, through the backbone that they share: that cancels in every difference, and is
    removed here. Three things differ from Smyth, who has thousands of rows where we have ten. The common variance is
    the mean of the rows' variances, not the one that fits their logarithms. The largest of them counts as the second
    largest, so that one row of which a seed has collapsed does not widen everybody's intervals. And it counts for no
    more than the row's own seeds. See docs/statistics.md for how often equal rows are found to differ.

    Args:
        row_means: [rows, seeds] means over episodes.
        is_seed_independent: [rows] bool, rows that are the same for every seed by construction, which say nothing of
            the others.
    """
    from scipy.special import digamma, polygamma

    x = row_means[~is_seed_independent]
    rows, seeds = x.shape
    if rows < 3 or seeds < 2:
        return SeedVariancePrior(0.0, 0.0)
    variances = _seed_variance_of_rows(x)
    degrees = (seeds - 1) * (1 - 1 / rows)
    logs = np.log(variances[variances > 0]) - digamma(degrees / 2) + math.log(degrees / 2)
    if len(logs) < 3:
        return SeedVariancePrior(0.0, 0.0)
    beyond = logs.var(ddof=1) - float(polygamma(1, degrees / 2))  # spread that chance does not explain
    firm = 2 * _inverse_trigamma(beyond) if beyond > 0 else math.inf
    common = np.minimum(variances, np.sort(variances)[-2]).mean()
    return SeedVariancePrior(float(common), min(firm, seeds - 1.0), float(variances.mean()))


def _seed_variance_of_rows(x: np.ndarray) -> np.ndarray:
    """Return the variance over seeds of each row, [rows], without the effect of a seed on all of [rows, seeds].

    That is a mean in which a row has the weight of one over its variance, so that a row of which a seed has collapsed
    moves no other row. Variance and weight follow from each other and are found in turns; so that no row takes all
    weight, the variance in it is moderated by the median, which counts as one more seed.
    """
    rows, seeds = x.shape
    centred, weights = x - x.mean(1, keepdims=True), np.full(rows, 1 / rows)
    for _ in range(VARIANCE_ITERATIONS):
        variances = ((centred - weights @ centred) ** 2).sum(1) / ((seeds - 1) * (1 - weights))
        steady = (seeds - 1) * variances + np.median(variances)
        if not steady.all():
            break  # rows that are all alike
        weights = (1 / steady) / (1 / steady).sum()
    return variances


def _inverse_trigamma(y: float) -> float:
    """Return x with trigamma(x) = y, by Newton's method on 1 / trigamma (Smyth 2004, appendix)."""
    from scipy.special import polygamma

    x = 0.5 + 1 / y
    for _ in range(50):
        value = float(polygamma(1, x))
        step = value * (1 - value / y) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-10:
            break
    return x


@dataclass(frozen=True)
class RowDifference:
    """Row a minus row b, in the units of the rows.

    Attributes:
        mean: over the seeds and episodes that both have.
        standard_error: its standard error, over seeds and episodes; NaN with a single episode, which says nothing of
            others.
        degrees_of_freedom: of ``mean / standard_error`` under Student's distribution.
        models_fixed: whether it is over episodes alone: a statement on these trained models, not on methods.
        images_fixed: whether it holds the test images fixed.
    """

    mean: float
    standard_error: float
    degrees_of_freedom: float
    models_fixed: bool = False
    images_fixed: bool = True

    @property
    def interval(self) -> float:
        """Half-width of the 95% interval."""
        from scipy.special import stdtrit

        return float(stdtrit(min(self.degrees_of_freedom, 1e9), 0.975)) * self.standard_error

    def one_sided_p_value(self) -> float:
        """Return the one-sided p-value of the hypothesis that a is no better than b."""
        from scipy.special import stdtr

        if self.standard_error == 0:
            return 0.0 if self.mean > 0 else 1.0
        return float(stdtr(min(self.degrees_of_freedom, 1e9), -self.mean / self.standard_error))

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the hypothesis that a and b are equal."""
        return float(np.minimum(1.0, 2 * replace(self, mean=abs(self.mean)).one_sided_p_value()))


def estimate_difference(
    a: np.ndarray,
    b: np.ndarray,
    prior: SeedVariancePrior,
    n_seed_dependent: int,
    choice_variance: float = 0.0,
    image_variance: ImageVariance | None = None,
) -> RowDifference:
    """Return the difference of two rows on the same seeds and episodes.

    Args:
        a: one row, [seeds, episodes].
        b: the other one.
        prior: of the variance over seeds.
        n_seed_dependent: how many of the two rows vary between seeds by construction. With none, or with one seed, the
            comparison is over episodes alone.
        choice_variance: the variance that choices on validation episodes give the mean, over
            ``RESAMPLE_COUNT`` resamples of these.
        image_variance: the variance that test images give it; None where they are held fixed.
    """
    d, of_images = a - b, image_variance or IMAGES_HELD_FIXED
    seeds, episodes = d.shape
    if (
        not d.any() and not choice_variance
    ):  # in every episode of every seed: they do the same, and chance has no hand in it
        return RowDifference(0.0, 0.0, math.inf, not n_seed_dependent or seeds < 2, image_variance is None)
    over_episodes = float(d.mean(0).var(ddof=1)) / episodes if episodes > 1 else math.nan
    over_seeds, degrees = 0.0, math.inf
    models_fixed = not n_seed_dependent or seeds < 2
    if not models_fixed:
        own, degrees = float(d.mean(1).var(ddof=1)), prior.degrees_of_freedom + seeds - 1
        common = max(n_seed_dependent * prior.variance, own)  # moderation makes no variance smaller
        over_seeds = (prior.degrees_of_freedom * common + (seeds - 1) * own) / degrees / seeds
    variance = over_seeds + over_episodes + choice_variance + of_images.variance
    # A variance that few seeds make small by chance would raise the degrees of freedom too.
    least = max(over_seeds, n_seed_dependent * prior.mean_variance / seeds) if over_seeds else 0.0
    shares = (least**2 / degrees if least else 0.0) + over_episodes**2 / max(1, episodes - 1)
    shares += choice_variance**2 / (RESAMPLE_COUNT - 1) + of_images.variance**2 / of_images.degrees_of_freedom
    degrees = (least + over_episodes + choice_variance + of_images.variance) ** 2 / shares if shares else math.inf
    return RowDifference(float(d.mean()), math.sqrt(variance), degrees, models_fixed, image_variance is None)


def holm_rejections(p_values: np.ndarray, level: float = RANK_ERROR_RATE) -> np.ndarray:
    """Return the hypotheses that Holm's procedure rejects, [n] bool.

    Args:
        p_values: their p-values, [n].
        level: the greatest chance that any is rejected wrongly.
    """
    order = np.argsort(p_values, kind="stable")
    rejected = np.zeros(len(p_values), dtype=bool)
    rejected[order] = np.logical_and.accumulate(p_values[order] <= level / (len(p_values) - np.arange(len(p_values))))
    return rejected


def signs_of_significant_differences(differences: Sequence[RowDifference]) -> np.ndarray:
    """Return whether each difference is above 0, and whether below, by Holm's procedure over all: [n, 2] bool."""
    p = np.array([(d.one_sided_p_value(), replace(d, mean=-d.mean).one_sided_p_value()) for d in differences])
    return holm_rejections(p.reshape(-1)).reshape(-1, 2)


@dataclass(frozen=True)
class RankInterval:
    """Ranks from ``best_rank`` to ``worst_rank``, 1 the best."""

    best_rank: int
    worst_rank: int

    def __str__(self) -> str:
        return str(self.best_rank) if self.best_rank == self.worst_rank else f"{self.best_rank}-{self.worst_rank}"


ImageVarianceOfPair = Callable[[int, int], ImageVariance | None]  # of the difference of two rows


def rank_intervals(
    rows: Sequence[np.ndarray],
    is_seed_independent: np.ndarray,
    means_by_resample: np.ndarray | None = None,
    image_variance_of_pair: ImageVarianceOfPair | None = None,
) -> list[RankInterval]:
    """Return the ranks that each row can have; see the top of this module.

    Args:
        rows: see :func:`find_significantly_better`, also for the others.
        is_seed_independent: rows that are the same for every seed.
        means_by_resample: means with other choices.
        image_variance_of_pair: variance over test images.
    """
    better = find_significantly_better(rows, is_seed_independent, means_by_resample, image_variance_of_pair)
    n = len(rows)
    return [RankInterval(1 + int(better[:, i].sum()), n - int(better[i].sum())) for i in range(n)]


def find_significantly_better(
    rows: Sequence[np.ndarray],
    is_seed_independent: np.ndarray,
    means_by_resample: np.ndarray | None = None,
    image_variance_of_pair: ImageVarianceOfPair | None = None,
) -> np.ndarray:
    """Return whether row i is significantly better than row j, of all such hypotheses at once: [rows, rows] bool.

    Args:
        rows: [seeds, episodes] each, more is better. Two are in memory at a time, so that they may be made on demand.
        is_seed_independent: [rows] bool, rows that are the same for every seed by construction.
        means_by_resample: [rows, RESAMPLES] the mean of each row with what each resample of the validation episodes
            would have chosen, but for a constant; None where nothing was chosen.
        image_variance_of_pair: the variance that test images give the difference of rows i and j; None where they are
            held fixed.
    """
    n = len(rows)
    chosen = np.zeros((n, RESAMPLE_COUNT)) if means_by_resample is None else means_by_resample
    prior = fit_seed_variance_prior(np.stack([rows[i].mean(1) for i in range(n)]), is_seed_independent)
    pairs, differences = [], []
    for i in range(n):
        row = rows[i]
        for j in range(i + 1, n):
            pairs.append((i, j))
            random = int(not is_seed_independent[i]) + int(not is_seed_independent[j])
            of_choices = float((chosen[i] - chosen[j]).var(ddof=1))
            of_images = image_variance_of_pair(i, j) if image_variance_of_pair else None
            differences.append(estimate_difference(row, rows[j], prior, random, of_choices, of_images))
    better = np.zeros((n, n), dtype=bool)
    for (i, j), (ours, theirs) in zip(pairs, signs_of_significant_differences(differences), strict=True):
        better[i, j], better[j, i] = ours, theirs
    return better


MIN_SEEDS_FOR_RANK = 3  # what a rank needs


@dataclass(frozen=True)
class RankedRow:
    """A row of a ranking, in order.

    Attributes:
        row: with the results of its seeds.
        ranking: the ranking that the row has its place in.
        reason_for_provisional_rank: why the row is provisional; None where it is ranked.
        difference_to_best: this row minus the best ranked one, in percentage points; None for the best.
        n_common_seeds: the number of training seeds that the difference is over, or for the best row its rank.
        adjusted_mean: the best row's mean plus the difference, which rows are placed by; their own means may be over
            other seeds.
    """

    row: SeedAggregate
    ranking: Ranking
    reason_for_provisional_rank: str | None
    difference_to_best: RowDifference | None
    n_common_seeds: int
    adjusted_mean: float

    @property
    def is_provisional(self) -> bool:
        return self.reason_for_provisional_rank is not None

    @cached_property
    def rank_interval(self) -> RankInterval | None:
        """The ranks that it can have; None for a provisional row."""
        return None if self.is_provisional else self.ranking.rank_interval_of(self.row)

    @property
    def n_ranked_together(self) -> int:
        """How many rows it is ranked among, itself included; 0 for a provisional row."""
        family = self.ranking.family
        return 0 if self.is_provisional else len(family) + (self.row not in family)

    @property
    def may_be_best_row(self) -> bool:
        """Whether it may be the best."""
        return self.rank_interval is not None and self.rank_interval.best_rank == 1


class Ranking:
    """All measured rows of one task, by one metric.

    The *family* is ranked together: of the rows of one setting, the stored ones with three seeds or more and no
    options of their own, or where there are none the user's. All are compared on the same seeds: those that three
    in four of them have, or else those that all have, or two of them, whichever most rows have. Another row
    that has three of these seeds, a user's or one with fewer seeds than the others, is ranked in the family plus itself
    alone, so that it moves nobody's rank. All other rows are provisional.
    Transductive rows, beside others, are ranked by themselves and come later; so do, last, those whose backbone has
    seen the novel classes elsewhere, or may have.

    Args:
        rows: comparable rows, all that there are; see
            :attr:`ifsl_bench.analysis.task_results.TaskResults.comparable_rows`.
        metric: where more is better, as it is for every metric here (Delta is negative where joint prediction hurts).
        setting: "paper", or "tuned-12" for the best of so many trials; rows that are the same in all are in each.

    Attributes:
        family: the rows that are ranked together.
        seeds: what they are compared on.
    """

    def __init__(self, rows: Sequence[SeedAggregate], metric: str = "acc", setting: str = PAPER) -> None:
        self.group_key = min(map(_ranking_group_key, rows), default=(False, False))
        excluded = [row for row in rows if _ranking_group_key(row) != self.group_key]
        self.excluded_ranking = Ranking(excluded, metric, setting) if excluded else None
        self.rows = tuple(row for row in rows if _ranking_group_key(row) == self.group_key)
        self.metric, self.setting = metric, setting
        able = [row for row in self.rows if self._matches_setting(row) and not row.has_changed_options]
        able = [
            row
            for row in able
            if len(row.seeds) >= MIN_SEEDS_FOR_RANK
            and not row.has_replaced_gradient
            and not row.has_single_interval_unit
        ]
        able = [row for row in able if row.results_origin == STORED] or able
        self.seeds = _seeds_of_three_quarters_of_rows(able) or _most_widely_shared_seeds(able)
        self.family = tuple(row for row in able if set(self.seeds) <= set(row.seeds))
        self._priors: dict[tuple[SeedAggregate, ...], SeedVariancePrior] = {}
        self._image_variances: dict[tuple[SeedAggregate, SeedAggregate, tuple[int, ...]], ImageVariance | None] = {}

    @cached_property
    def ranked_rows(self) -> list[RankedRow]:
        """Every row in its place, the best first: by their difference to the best on the seeds that both have."""
        places = sorted(map(self._make_ranked_row, self.rows), key=lambda place: -place.adjusted_mean)
        return places + (self.excluded_ranking.ranked_rows if self.excluded_ranking else [])

    def estimate_row_difference(
        self, a: SeedAggregate, b: SeedAggregate, seeds: Sequence[int] | None = None
    ) -> RowDifference:
        """Return row a minus row b, over episodes and seeds, the variance over seeds moderated by the family.

        Args:
            a: one row.
            b: another one.
            seeds: in place of :meth:`common_seeds`. Where the two have none in common, the difference is over episodes
                alone, each row averaged over its own seeds.
        """
        over = self.common_seeds(a, b) if seeds is None else seeds
        x, y = self._paired_metric_values(a, b, over)
        choices = variance_from_choices(
            a.metric_by_resample(self.metric, over or None) - b.metric_by_resample(self.metric, over or None)
        )
        random = int(not a.is_seed_independent) + int(not b.is_seed_independent)
        return estimate_difference(
            x, y, self._seed_variance_prior(a, b), random, choices, self.estimate_image_variance(a, b, over)
        )

    def estimate_image_variance(self, a: SeedAggregate, b: SeedAggregate, seeds: Sequence[int]) -> ImageVariance | None:
        """Return the variance that test images give row a minus row b; None where they are held fixed.

        Args:
            a: one row.
            b: another one.
            seeds: that they are compared on.
        """
        key = (a, b, tuple(seeds))
        if key not in self._image_variances:
            models_fixed = (a.is_seed_independent and b.is_seed_independent) or len(seeds) < 2
            self._image_variances[key] = estimate_image_variance(a, b, self.metric, seeds, models_fixed)
        return self._image_variances[key]

    def adjusted_mean(self, row: SeedAggregate) -> float:
        """Return the best row's mean plus the difference to it, by which rows are placed."""
        ranking = self.find_ranking_containing(row)
        best = float(ranking.best_row.metric_by_seed(self.metric).mean())
        mine, theirs = ranking.means_on_common_seeds(row, ranking.best_row)
        return best if row is ranking.best_row else best + mine - theirs

    def means_on_common_seeds(self, a: SeedAggregate, b: SeedAggregate) -> tuple[float, float]:
        """Return the means of two rows on the seeds that they are compared on; on their own where none are common.

        Args:
            a: one row.
            b: another one.
        """
        x, y = self._paired_metric_values(a, b, self.common_seeds(a, b))
        return float(x.mean()), float(y.mean())

    def _paired_metric_values(
        self, a: SeedAggregate, b: SeedAggregate, over: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the metric of both by seed and episode, [seeds, n]; without common seeds their means, [1, n]."""
        x, y = (row.metric_by_seed(self.metric, over) for row in (a, b))
        if len(x) and len(y):
            return x, y
        x, y = (row.metric_by_seed(self.metric).mean(0, keepdims=True) for row in (a, b))
        return x, y

    def find_ranking_containing(self, *rows: SeedAggregate) -> Ranking:
        """Return the ranking with these rows in it: this one, or the excluded rows' if all are there."""
        here = any(row in self.rows for row in rows)
        return self if here or self.excluded_ranking is None else self.excluded_ranking.find_ranking_containing(*rows)

    def common_seeds(self, a: SeedAggregate, b: SeedAggregate) -> tuple[int, ...]:
        """Return the seeds that two rows are compared on: if both are ranked the ranks' seeds, else all they share.

        Args:
            a: one row.
            b: another one.
        """
        both = tuple(seed for seed in a.seeds if seed in b.seeds)
        ranked = not self._reason_for_provisional_rank(a) and not self._reason_for_provisional_rank(b)
        return tuple(seed for seed in both if seed in self.seeds) if ranked else both

    def significant_pairs(self, guest: SeedAggregate | None = None) -> set[tuple[SeedAggregate, SeedAggregate]]:
        """Return the differences that ranks rest on: pairs (a, b) of which a is significantly better.

        Args:
            guest: a further row that is ranked with the family; None for the family's own ranks.
        """
        rows = [*self.family, *([guest] if guest is not None else [])]
        if not rows:
            return set()
        seeds = self.seeds if guest is None else self.common_seeds(guest, guest)
        better = find_significantly_better(*self._rank_interval_arguments(rows, seeds))
        return {(rows[i], rows[j]) for i, j in np.argwhere(better)}

    @cached_property
    def best_row(self) -> SeedAggregate:
        """The row of the family with the highest mean over its seeds; of all rows where none is ranked."""
        seeds = self.seeds if self.family else None
        return max(self.family or self.rows, key=lambda row: row.metric_by_seed(self.metric, seeds).mean())

    @cached_property
    def _family_rank_intervals(self) -> dict[SeedAggregate, RankInterval]:
        """The ranks of the family."""
        return dict(
            zip(self.family, rank_intervals(*self._rank_interval_arguments(self.family, self.seeds)), strict=True)
        )

    def rank_interval_of(self, row: SeedAggregate) -> RankInterval:
        """Return the ranks that a row can have, one of the family or one that is ranked in the family plus itself."""
        if row in self.family:
            return self._family_rank_intervals[row]
        return rank_intervals(*self._rank_interval_arguments([*self.family, row], self.common_seeds(row, row)))[-1]

    def _make_ranked_row(self, row: SeedAggregate) -> RankedRow:
        level, reason = self.adjusted_mean(row), self._reason_for_provisional_rank(row)
        if row is self.best_row:
            return RankedRow(row, self, reason, None, len(self.seeds) or len(row.seeds), level)
        gap = self.estimate_row_difference(row, self.best_row)
        return RankedRow(row, self, reason, gap, len(self.common_seeds(row, self.best_row)), level)

    def _is_ranked_as_guest(self, row: SeedAggregate) -> bool:
        """Return whether a row that is not of the family is ranked with it."""
        able = _ranking_group_key(row) == self.group_key and not self._reason_for_provisional_rank(row)
        return able and bool(self.family) and row not in self.family

    def _matches_setting(self, row: SeedAggregate) -> bool:
        return row.ranking_setting in (self.setting, EVERY)

    def _reason_for_provisional_rank(self, row: SeedAggregate) -> str | None:
        """Return why a row is provisional; None where it is ranked."""
        if not self._matches_setting(row):
            return f"ranked separately, with --setting {row.ranking_setting}"
        if row.has_replaced_gradient:
            count, total = row.solve_failures["adjoint_diverged"]
            return f"not trained with the gradient that it names, replaced in {count:,} of {total:,} episodes"
        if row.has_single_interval_unit:
            return f"one {row.interval_units_noun.removesuffix('s')}"
        if len(row.seeds) < MIN_SEEDS_FOR_RANK:
            return format_count(len(row.seeds), "seed")
        if row.has_changed_options:
            return "options of its own"
        if sum(seed in row.seeds for seed in self.seeds) < MIN_SEEDS_FOR_RANK:
            lacking = [str(seed) for seed in self.seeds if seed not in row.seeds]
            return f"it lacks {'seed' if len(lacking) == 1 else 'seeds'} {', '.join(lacking)}"
        return None

    def _seed_variance_prior(self, *rows: SeedAggregate) -> SeedVariancePrior:
        """Return the prior of the variance over seeds, from the family and those of these rows ranked with it."""
        together, seeds = (*self.family, *(row for row in rows if self._is_ranked_as_guest(row))), self.seeds
        if not together:  # two seeds rank no rows, but tell how much rows vary
            seeds = tuple(seed for seed in rows[0].seeds if all(seed in row.seeds for row in rows))
            together = tuple(row for row in self.rows if self._matches_setting(row) and set(seeds) <= set(row.seeds))
        if not together or len(seeds) < 2:
            return SeedVariancePrior(0.0, 0.0)
        if together not in self._priors:
            seeds = tuple(seed for seed in seeds if all(seed in row.seeds for row in together))
            means = np.stack([row.metric_by_seed(self.metric, seeds).mean(1) for row in together])
            self._priors[together] = fit_seed_variance_prior(means, _seed_independence(together))
        return self._priors[together]

    def _rank_interval_arguments(
        self, rows: Sequence[SeedAggregate], seeds: Sequence[int]
    ) -> tuple[_MetricBySeed, np.ndarray, np.ndarray, ImageVarianceOfPair]:
        """Return the arguments of :func:`rank_intervals`."""
        choices = np.stack([row.metric_by_resample(self.metric, seeds) for row in rows])

        def images(i: int, j: int) -> ImageVariance | None:
            return self.estimate_image_variance(rows[i], rows[j], seeds)

        return _MetricBySeed(rows, self.metric, seeds), _seed_independence(rows), choices, images


def common_setting(*rows: SeedAggregate, default: str = PAPER) -> str:
    """Return the setting that rows are ranked in together.

    Args:
        rows: to be ranked.
        default: the setting where they have none in common, or any.
    """
    settings = {row.ranking_setting for row in rows} - {EVERY}
    return settings.pop() if len(settings) == 1 else default


def _ranking_group_key(row: SeedAggregate) -> tuple[bool, bool]:
    """Return the kind of a row, each ranked by itself: (novel classes may have been seen before, transductive)."""
    return row.novel_classes_seen != "no", row.is_transductive


class _MetricBySeed(Sequence[np.ndarray]):
    """A metric of rows, [seeds, n] each, made on demand."""

    def __init__(self, rows: Sequence[SeedAggregate], metric: str, seeds: Sequence[int]) -> None:
        self.rows, self.metric, self.seeds = rows, metric, seeds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        return self.rows[at].metric_by_seed(self.metric, self.seeds)


def _seed_independence(rows: Iterable[SeedAggregate]) -> np.ndarray:
    return np.array([row.is_seed_independent for row in rows])


def _seeds_of_three_quarters_of_rows(rows: Sequence[SeedAggregate]) -> tuple[int, ...]:
    """Return the seeds that three in four rows have, if three in four have them all, and they are three or more."""
    holders = Counter(seed for row in rows for seed in row.seeds)
    seeds = {seed for seed, count in holders.items() if 4 * count >= 3 * len(rows)}
    together = sum(seeds <= set(row.seeds) for row in rows)
    return tuple(sorted(seeds)) if len(seeds) >= MIN_SEEDS_FOR_RANK and 4 * together >= 3 * len(rows) else ()


def _most_widely_shared_seeds(rows: Sequence[SeedAggregate]) -> tuple[int, ...]:
    """Return three seeds or more that all rows have, or two rows, as most rows have them; the lowest of several."""
    each = [frozenset(row.seeds) for row in rows]
    shared = {a & b for a in each for b in each} | ({frozenset.intersection(*each)} if each else set())
    candidates = sorted(tuple(sorted(seeds)) for seeds in shared if len(seeds) >= MIN_SEEDS_FOR_RANK)
    return max(candidates, key=lambda seeds: (sum(own.issuperset(seeds) for own in each), len(seeds)), default=())
