"""The ranks that a row can have: intervals over training seeds and episodes, for all rows at once. Imports no torch.

A row i has accuracies x[i, s, e] on seeds s and episodes e, the same for all rows. The difference D of two rows is the
mean over both. Its variance has three parts:

* over seeds, v / m for m seeds, v the variance of the m differences of the seeds' means. Few seeds tell little of v, so
  it is moderated by what all rows say (Smyth 2004, Statistical Applications in Genetics and Molecular Biology 3(1):3);
* over episodes, w / n for n episodes, w the variance of the n differences of the episodes' means over seeds;
* of choices, where a bias or options were chosen on validation episodes: the variance over resamples of these.

Their sum V has Satterthwaite's degrees of freedom, and D / sqrt(V) Student's distribution with these. All n (n - 1)
one-sided hypotheses "row i is no better than row j" are tested at once by Holm's procedure. The rank of a row lies
between 1 + the number of rows that are significantly better and n - the number of rows that are significantly worse,
for all rows at once with a chance of 95% at least (Mogstad, Romano, Shaikh and Wilhelm 2024, Review of Economic Studies
91(1):476-518).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ifsl_bench.protocols.calibration import RESAMPLES

TURNS = 12  # in which weights and variances are found; they have then settled to a few percent
LEVEL = 0.05  # chance that any of the intervals misses its rank


@dataclass(frozen=True)
class Prior:
    """A prior on one row's variance over seeds, from all rows.

    Attributes:
        variance: that rows have in common.
        degrees: how firmly they keep to it: it says as much as so many more seeds of that variance would.
        mean: of the rows' variances, whatever stands out; degrees of freedom are computed with no less.
    """

    variance: float
    degrees: float
    mean: float = 0.0


def fit_prior(means: np.ndarray, fixed: np.ndarray) -> Prior:
    """The rows' common variance over seeds, and how firmly they keep to it (Smyth 2004, section 6.2).

    A seed may move all rows alike, through the backbone that they share: that cancels in every difference, and is
    removed here. Three things differ from Smyth, who has thousands of rows where we have ten. The common variance is
    the mean of the rows' variances, not the one that fits their logarithms. The largest of them counts as the second
    largest, so that one row of which a seed has collapsed does not widen everybody's intervals. And it counts for no
    more than the row's own seeds. See docs/statistics.md for how often equal rows are told apart.

    Args:
        means: [rows, seeds] means over episodes.
        fixed: [rows] bool, rows that are the same for every seed by construction, which say nothing of the others.
    """
    from scipy.special import digamma, polygamma

    x = means[~fixed]
    rows, seeds = x.shape
    if rows < 3 or seeds < 2:
        return Prior(0.0, 0.0)
    variances = _variances(x)
    degrees = (seeds - 1) * (1 - 1 / rows)
    logs = np.log(variances[variances > 0]) - digamma(degrees / 2) + math.log(degrees / 2)
    if len(logs) < 3:
        return Prior(0.0, 0.0)
    beyond = logs.var(ddof=1) - float(polygamma(1, degrees / 2))  # spread that chance does not explain
    firm = 2 * _inverse_trigamma(beyond) if beyond > 0 else math.inf
    common = np.minimum(variances, np.sort(variances)[-2]).mean()
    return Prior(float(common), min(firm, seeds - 1.0), float(variances.mean()))


def _variances(x: np.ndarray) -> np.ndarray:
    """The variance over seeds of each row, [rows], without what a seed does to all of [rows, seeds].

    That is a mean in which a row has the weight of one over its variance, so that a row of which a seed has collapsed
    moves no other row. Variance and weight follow from each other and are found in turns; so that no row takes all
    weight, the variance in it is moderated by the median, which counts as one more seed.
    """
    rows, seeds = x.shape
    centred, weights = x - x.mean(1, keepdims=True), np.full(rows, 1 / rows)
    for _ in range(TURNS):
        variances = ((centred - weights @ centred) ** 2).sum(1) / ((seeds - 1) * (1 - weights))
        steady = (seeds - 1) * variances + np.median(variances)
        if not steady.all():
            break  # rows that are all alike
        weights = (1 / steady) / (1 / steady).sum()
    return variances


def _inverse_trigamma(y: float) -> float:
    """x with trigamma(x) = y, by Newton's method on 1 / trigamma (Smyth 2004, appendix)."""
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
class Difference:
    """Row a minus row b, in the units of the rows.

    Attributes:
        mean: over the seeds and episodes that both have.
        error: its standard error, over seeds and episodes; NaN with a single episode, which says nothing of others.
        degrees: of freedom of ``mean / error`` under Student's distribution.
        models_fixed: whether it is over episodes alone: a statement on these trained models, not on methods.
    """

    mean: float
    error: float
    degrees: float
    models_fixed: bool = False

    @property
    def interval(self) -> float:
        """Half-width of the 95% interval."""
        from scipy.special import stdtrit

        return float(stdtrit(min(self.degrees, 1e9), 0.975)) * self.error

    def p_better(self) -> float:
        """One-sided p-value of the hypothesis that a is no better than b."""
        from scipy.special import stdtr

        if self.error == 0:
            return 0.0 if self.mean > 0 else 1.0
        return float(stdtr(min(self.degrees, 1e9), -self.mean / self.error))

    @property
    def p(self) -> float:
        """Two-sided p-value of the hypothesis that a and b are equal."""
        return float(np.minimum(1.0, 2 * replace(self, mean=abs(self.mean)).p_better()))


def difference(a: np.ndarray, b: np.ndarray, prior: Prior, random: int, choices: float = 0.0) -> Difference:
    """Two rows on the same seeds and episodes.

    Args:
        a, b: [seeds, episodes].
        random: how many of the two rows vary between seeds by construction. With none, or with one seed, the comparison
            is over episodes alone.
        choices: the variance that choices on validation episodes give the mean, over ``RESAMPLES`` resamples of these.
    """
    d = a - b
    seeds, episodes = d.shape
    if not d.any() and not choices:  # in every episode of every seed: they do the same, and chance has no hand in it
        return Difference(0.0, 0.0, math.inf, not random or seeds < 2)
    over_episodes = float(d.mean(0).var(ddof=1)) / episodes if episodes > 1 else math.nan
    over_seeds, degrees = 0.0, math.inf
    models_fixed = not random or seeds < 2
    if not models_fixed:
        own, degrees = float(d.mean(1).var(ddof=1)), prior.degrees + seeds - 1
        common = max(random * prior.variance, own)  # moderation makes no variance smaller
        over_seeds = (prior.degrees * common + (seeds - 1) * own) / degrees / seeds
    variance = over_seeds + over_episodes + choices
    # A variance that few seeds make small by chance would raise the degrees of freedom too.
    least = max(over_seeds, random * prior.mean / seeds) if over_seeds else 0.0
    shares = (least**2 / degrees if least else 0.0) + over_episodes**2 / max(1, episodes - 1)
    shares += choices**2 / (RESAMPLES - 1)
    degrees = (least + over_episodes + choices) ** 2 / shares if shares else math.inf
    return Difference(float(d.mean()), math.sqrt(variance), degrees, models_fixed)


def holm(p: np.ndarray, level: float = LEVEL) -> np.ndarray:
    """The hypotheses that Holm's procedure rejects, [n] bool: with a chance of ``level`` at most, any wrongly."""
    order = np.argsort(p, kind="stable")
    rejected = np.zeros(len(p), dtype=bool)
    rejected[order] = np.logical_and.accumulate(p[order] <= level / (len(p) - np.arange(len(p))))
    return rejected


def told_apart(differences: Sequence[Difference]) -> np.ndarray:
    """Whether each difference is above 0, and whether below, by Holm's procedure over all of these: [n, 2] bool."""
    p = np.array([(d.p_better(), replace(d, mean=-d.mean).p_better()) for d in differences])
    return holm(p.reshape(-1)).reshape(-1, 2)


@dataclass(frozen=True)
class RankInterval:
    """Ranks from ``first`` to ``last``, 1 the best."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def rank_intervals(
    rows: Sequence[np.ndarray], fixed: np.ndarray, choices: np.ndarray | None = None
) -> list[RankInterval]:
    """The ranks that each row can have; see the top of this module, and :func:`significantly_better` for arguments."""
    better, n = significantly_better(rows, fixed, choices), len(rows)
    return [RankInterval(1 + int(better[:, i].sum()), n - int(better[i].sum())) for i in range(n)]


def significantly_better(
    rows: Sequence[np.ndarray], fixed: np.ndarray, choices: np.ndarray | None = None
) -> np.ndarray:
    """[rows, rows] bool: whether row i is significantly better than row j, of all such hypotheses at once.

    Args:
        rows: [seeds, episodes] each, more is better. They may be made when they are asked for: two are in memory at a
            time.
        fixed: [rows] bool, rows that are the same for every seed by construction.
        choices: [rows, RESAMPLES] the mean of each row with what each resample of the validation episodes would have
            chosen, beside a constant; None where nothing was chosen.
    """
    n = len(rows)
    chosen = np.zeros((n, RESAMPLES)) if choices is None else choices
    prior = fit_prior(np.stack([rows[i].mean(1) for i in range(n)]), fixed)
    pairs, differences = [], []
    for i in range(n):
        row = rows[i]
        for j in range(i + 1, n):
            pairs.append((i, j))
            random, of_choices = int(not fixed[i]) + int(not fixed[j]), float((chosen[i] - chosen[j]).var(ddof=1))
            differences.append(difference(row, rows[j], prior, random, of_choices))
    better = np.zeros((n, n), dtype=bool)
    for (i, j), (ours, theirs) in zip(pairs, told_apart(differences), strict=True):
        better[i, j], better[j, i] = ours, theirs
    return better
