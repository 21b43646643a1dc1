"""Calibration: does a method rank queries well, or only weigh base against novel classes well? Imports no torch.

All of it follows from one number a query, its *margin* t: its best base logit minus its best novel logit. With a bias b
added to all novel logits, a base query that is right among the base classes is right among all classes if t >= b, and a
novel query that is right among the novel classes if t < b. No bias makes the others right, so their margin is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_CURVE_POINTS = 51  # of the base-novel curve: quantiles of the validation margins, the ends included
N_BIAS_GRID_QUANTILES = 4096  # biases that are tried for resamples of sequences, which have a million margins
RESAMPLE_COUNT = 100  # of the validation episodes: the standard deviation over so many is known to 7%


def bootstrap_episode_counts(episodes: int) -> np.ndarray:
    """Return how often each of n validation episodes is in each bootstrap resample, [:data:`RESAMPLE_COUNT`, n].

    They are the same for all rows of a task, whose validation episodes are the same, so that what the choices of two
    rows have in common cancels in their difference. RandomState's numbers, unlike a Generator's, never change with the
    version of NumPy (NEP 19).
    """
    drawn = np.random.RandomState(0).randint(episodes, size=(RESAMPLE_COUNT, episodes))
    return np.stack([np.bincount(resample, minlength=episodes) for resample in drawn])


@dataclass(frozen=True)
class Margins:
    """The margins of n episodes; NaN where a query is wrong among its own classes already."""

    base_margins: np.ndarray  # [n, Qb] of the base queries
    novel_margins: np.ndarray  # [n, Qn] of the novel queries

    def joint_hits_with_bias(self, bias: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the base and novel queries right among all classes, [n] each, with a bias on the novel logits."""
        exact = np.array(
            [bias]
        )  # a number would be rounded to the margins' own precision; before NumPy 2 a float64, too
        return (self.base_margins >= exact).sum(1), (self.novel_margins < exact).sum(1)

    def doubled_ordered_pairs(self) -> np.ndarray:
        """Return the number of (base, novel) pairs of queries whose base query has the larger margin, times two, [n].

        A pair of equal margins counts as half a pair.
        """
        base, novel = self.base_margins[:, :, None], self.novel_margins[:, None, :]
        return (base > novel).sum((1, 2)) + (base >= novel).sum((1, 2))

    def hits_by_bias(self, biases: np.ndarray) -> np.ndarray:
        """Return the base and novel queries that are right among all classes with each of [m] ascending biases, [m, 2].

        Counts are over all episodes: the same as sums of :meth:`joint_hits_with_bias`, in one pass.
        """
        if not len(biases):
            return np.empty((0, 2), dtype=np.int64)
        sides, first, last = [], biases[:1], biases[-1:]  # as arrays, see above
        for part in (self.base_margins, self.novel_margins):
            between = part[(part >= first) & (part < last)]
            below = np.searchsorted(biases, between, side="right")  # how many biases are t or less
            sides.append(np.bincount(below, minlength=len(biases) + 1))
            sides[-1][[0, -1]] += (part < first).sum(), (part >= last).sum()
        # A base query with margin t is right at the biases up to t, a novel one at those above it.
        base, novel = sides[0][::-1].cumsum()[::-1][1:], sides[1].cumsum()[:-1]
        return np.stack([base, novel], 1)

    def finite_margins(self) -> np.ndarray:
        """Return all margins that a bias can reach."""
        values = np.concatenate([self.base_margins.ravel(), self.novel_margins.ravel()])
        return values[np.isfinite(values)]


def find_best_bias(margins: Margins) -> float:
    """Return the one bias on the novel logits with the most joint hits over all queries; exact over all biases.

    Hits change at the margins alone, so that all biases between two neighbours are as good as one another; neighbouring
    intervals that are equally good are one plateau. Taken is the middle of the best plateau, of several the widest, and
    of equally wide ones the one with the lowest bias. A plateau without an end, where it is best to answer with base
    classes always or with novel classes always, counts up to the lowest or the highest margin: the bias is never
    further out than is needed. Without any margin it is 0.
    """
    return float(find_best_bias_by_resample(margins, np.ones((1, len(margins.base_margins)), dtype=int))[0])


def find_best_bias_by_resample(margins: Margins, times: np.ndarray) -> np.ndarray:
    """Return the bias that :func:`find_best_bias` finds in each of m samples of n episodes, [m].

    Args:
        margins: of the n episodes.
        times: [m, n] how often an episode is in a sample.
    """
    at, inverse = np.unique(margins.finite_margins(), return_inverse=True)  # [M]
    biases = np.zeros(len(times))
    episodes = [
        np.nonzero(np.isfinite(part))[0] for part in (margins.base_margins, margins.novel_margins)
    ]  # of each finite margin
    places = np.split(inverse, [len(episodes[0])])
    for sample, often in enumerate(times):
        # Interval i is (at[i - 1], at[i]]: base queries from at[i] on are right, and novel ones below, up to at[i - 1].
        lost, gained = (np.bincount(p, often[e], len(at)) for p, e in zip(places, episodes, strict=True))
        if (there := np.flatnonzero(lost + gained)).size:
            biases[sample] = _find_best_plateau_middle(
                at, np.concatenate([[0], np.cumsum(gained - lost)]), there[0], there[-1]
            )
    return biases


def find_best_grid_bias_by_resample(margins: Margins, times: np.ndarray) -> np.ndarray:
    """Return the best bias of each of m samples among :data:`N_BIAS_GRID_QUANTILES` quantiles of the margins, [m].

    It works as :func:`find_best_bias_by_resample`, in less time where margins are many.

    Args:
        margins: of the n episodes.
        times: [m, n] how often an episode is in a sample.
    """
    at = np.unique(np.quantile(margins.finite_margins().astype(np.float64), np.linspace(0, 1, N_BIAS_GRID_QUANTILES)))
    episodes, intervals = len(margins.base_margins), len(at) + 1
    sides = []
    for part in (margins.base_margins, margins.novel_margins):
        episode, query = np.nonzero(np.isfinite(part))
        below = np.searchsorted(at, part[episode, query], side="right")  # how many of these biases are t or less
        sides.append(np.bincount(episode * intervals + below, minlength=episodes * intervals))
    base, novel = (side.reshape(episodes, intervals)[:, :-1].cumsum(1) for side in sides)
    right = novel - base  # with each bias, beside a constant: a base query with margin t is right at the biases up to t
    return np.asarray(at[(times @ right).argmax(1)])


def _find_best_plateau_middle(at: np.ndarray, hits: np.ndarray, lowest: int, highest: int) -> float:
    """Return the middle of the best plateau.

    Args:
        at: [M] ascending margins, the sample's own from ``lowest`` to ``highest``.
        hits: [M + 1] in the interval before each and after the last, up to a constant.
        lowest: the place of the sample's lowest margin.
        highest: the place of its highest margin.
    """
    edges = np.diff((hits == hits.max()).astype(int), prepend=0, append=0)
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1  # intervals of each best plateau
    ends = np.concatenate([at[:1], at, at[-1:]]).astype(np.float64).clip(at[lowest], at[highest])
    low, high = ends[first], ends[last + 1]
    widest = int(np.argmax(high - low))
    if first[widest] > highest:  # above all margins, where a bias equal to the highest is not enough
        return float(np.nextafter(at[highest], at.dtype.type(np.inf)))
    return float((low[widest] + high[widest]) / 2)


def choose_curve_biases(margins: Margins) -> np.ndarray:
    """Return biases for the base-novel curve, ascending, at most :data:`MOST_CURVE_POINTS`.

    They are quantiles of the margins, to six digits.
    """
    at = margins.finite_margins().astype(np.float64)
    quantiles = np.quantile(at, np.linspace(0, 1, MOST_CURVE_POINTS)) if len(at) else at
    return np.unique([float(f"{bias:.6g}") for bias in quantiles])


@dataclass(frozen=True)
class CalibratedHits:
    """Hits in n test episodes with a bias found on validation episodes.

    Attributes:
        bias_on_novel_logits: added to all novel logits.
        n_validation_episodes: how many it was found on.
        base_joint: [n] base queries right among all classes, with it.
        novel_joint: [n] novel queries right among all classes, with it.
        hits_by_curve_bias: [m, 3] a bias, and the base and the novel queries that are right among all classes with it,
            over all test episodes; ascending in the bias.
        hits_by_resample: [RESAMPLES, 2] the base and the novel queries that are right among all classes, over all test
            episodes, with the bias that each resample of the validation episodes would have chosen; of sequences
            after each of T sessions, [RESAMPLES, 2, T].
    """

    bias_on_novel_logits: float
    n_validation_episodes: int
    base_joint: np.ndarray
    novel_joint: np.ndarray
    hits_by_curve_bias: np.ndarray
    hits_by_resample: np.ndarray


@dataclass(frozen=True)
class ValidationBias:
    """A bias found on validation episodes."""

    bias_on_novel_logits: float  # to be added to all novel logits
    n_validation_episodes: int  # how many it was found on
    curve_biases: np.ndarray  # [m] biases for the base-novel curve, ascending
    best_bias_by_resample: np.ndarray  # [RESAMPLES] the biases that are best on each resample of these episodes

    def apply_to_episodes(self, test: Margins) -> CalibratedHits:
        """Count the hits of test episodes with this bias."""
        curve = np.concatenate([self.curve_biases[:, None], test.hits_by_bias(self.curve_biases)], 1)
        joint = test.joint_hits_with_bias(self.bias_on_novel_logits)
        return CalibratedHits(
            self.bias_on_novel_logits, self.n_validation_episodes, *joint, curve, self.count_hits_by_resample(test)
        )

    def apply_to_sequences(self, test: Margins, sessions: int) -> CalibratedHits:
        """Return the resampled hits of sequences after each session; other hits are counted elsewhere.

        Args:
            test: margins [n, T ...] of the test sequences, session by session.
            sessions: T.
        """
        none = np.empty(0, np.int64)
        parts = [part.reshape(len(part), sessions, -1) for part in (test.base_margins, test.novel_margins)]
        after = [self.count_hits_by_resample(Margins(*(part[:, t] for part in parts))) for t in range(sessions)]
        return CalibratedHits(
            self.bias_on_novel_logits, self.n_validation_episodes, none, none, np.empty((0, 3)), np.stack(after, 2)
        )

    def count_hits_by_resample(self, test: Margins) -> np.ndarray:
        """Return the base and novel queries right with each of ``resampled``, over all test episodes, [m, 2]."""
        order = np.argsort(self.best_bias_by_resample)
        hits = np.empty((len(order), 2), dtype=np.int64)
        hits[order] = test.hits_by_bias(self.best_bias_by_resample[order])
        return hits


def find_bias(validation: Margins, sequences: bool = False) -> ValidationBias:
    """Return the bias that is best on validation episodes.

    Args:
        validation: margins of the validation episodes.
        sequences: whether these are sequences of sessions, which have no curve.
    """
    episodes = len(validation.base_margins)
    times, value = bootstrap_episode_counts(episodes), find_best_bias(validation)
    if sequences:
        many = len(validation.finite_margins()) > N_BIAS_GRID_QUANTILES
        return ValidationBias(
            value,
            episodes,
            np.empty(0),
            (find_best_grid_bias_by_resample if many else find_best_bias_by_resample)(validation, times),
        )
    return ValidationBias(
        value, episodes, choose_curve_biases(validation), find_best_bias_by_resample(validation, times)
    )


def join_calibrated_hits(parts: Sequence[CalibratedHits]) -> CalibratedHits:
    """Join test episodes in several parts, with one bias."""
    base, novel = (np.concatenate([getattr(part, name) for part in parts]) for name in ("base_joint", "novel_joint"))
    curve = parts[0].hits_by_curve_bias.copy()
    curve[:, 1:] = sum(part.hits_by_curve_bias[:, 1:] for part in parts)
    resampled = np.sum([part.hits_by_resample for part in parts], axis=0)
    return CalibratedHits(parts[0].bias_on_novel_logits, parts[0].n_validation_episodes, base, novel, curve, resampled)
