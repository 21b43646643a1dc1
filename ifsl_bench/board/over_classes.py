"""Intervals of a difference over novel classes, beside those over episodes and over seeds. Imports no torch.

Test episodes draw their novel classes from C classes, which are themselves a sample of those that a method may meet.
Episode e has N of them, and two rows differ there by

    d_e = mu + (1/N) sum of a_c over its classes + eps_e,

a_c the effect of class c, with mean 0 and variance A over all classes there might be, and eps_e what is left over, with
variance E. With n_c the episodes that hold class c, and n episodes, the mean of d has the variance

    V = w A + E / n,    w = sum over c of (n_c / (N n))^2,

where an interval over episodes has (A / N + E) / n: near 0 for many episodes, however few the classes.

A and E follow from an analysis of variance (Henderson 1953, Biometrics 9:226, method 3). Let Z [n, C] hold 1/N where an
episode has a class; its rows add up to 1, so that the mean lies in its span. S is the sum of squares that the least-
squares fit of d on Z leaves, and M what that fit explains beyond the mean. Their expectations are

    E(S) = (n - C) E,    E(M) = (C - 1) (k A + E),    k = (n / N - sum of n_c^2 / (n N^2)) / (C - 1),

the latter since the projection onto the span of Z, less that onto the mean, maps Z to Z less its column means. Were all
pairs of classes together equally often, M / (k A + E) and S / E would be independent chi-squares with C - 1 and n - C
degrees of freedom, and independent of the mean (normal effects); random draws are close to that. So with
s_E = S / (n - C) and s_M = M / (C - 1)

    A = (s_M - s_E) / k,    V = (w / k) s_M + (1/n - w / k) s_E,

and V has Satterthwaite's degrees of freedom, V^2 / ((w s_M / k)^2 / (C - 1) + ((1/n - w / k) s_E)^2 / (n - C)). An
estimate of A below 0 counts as 0; V is then s_E / n, with n - C degrees. Where it is just above 0 and C is small, as
the 20 of mini-ImageNet, Satterthwaite's degrees fall below 1 and the interval is of no use: fewer than 3 count as 3.
docs/statistics.md has the share of such intervals that hold the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ifsl_bench.protocol.calibration import RESAMPLES

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


def over_classes(differences: np.ndarray, classes: np.ndarray, choices: np.ndarray | float = 0.0) -> OverClasses | str:
    """The interval of each mean difference over novel classes, or why there is none.

    Args:
        differences: [n, m], one row minus another.
        classes: [n, N] class ids of each episode, all different.
        choices: [m] the variance that choices on validation episodes give each mean, over ``RESAMPLES`` of them.
    """
    from scipy.special import stdtrit

    n, ways = classes.shape
    ids, at = np.unique(classes, return_inverse=True)
    at, count = at.reshape(n, ways), len(ids)
    together = np.zeros((count, count))  # episodes that hold both classes; N^2 times Z'Z
    np.add.at(together, (at[:, :, None], at[:, None, :]), 1)
    values, vectors = np.linalg.eigh(together)
    if n <= count or values[0] < 1e-9 * values[-1]:
        return f"{n:,} episodes with {count} novel classes do not tell the classes apart"
    means = differences.mean(0)
    centred = differences - means
    sums = np.zeros((count, centred.shape[1]))  # over the episodes that hold a class; N times Z'd
    np.add.at(sums, at, centred[:, None])
    fitted = ways * vectors @ ((vectors.T @ sums) / values[:, None])  # [C, m]
    left = centred - fitted[at].mean(1)
    left_over = (left**2).sum(0) / (n - count)  # s_E
    between = ((centred**2).sum(0) - (left**2).sum(0)) / (count - 1)  # s_M
    held = together.diagonal()  # n_c
    weight = float(((held / (ways * n)) ** 2).sum())
    k = (n / ways - float((held**2).sum()) / (n * ways**2)) / (count - 1)
    negative = between < left_over
    parts = np.where(negative, [[0.0], [1 / n]], [[weight / k], [1 / n - weight / k]]) * [between, left_over]  # [2, m]
    variance = parts.sum(0) + choices
    spread = parts[0] ** 2 / (count - 1) + parts[1] ** 2 / (n - count) + choices**2 / (RESAMPLES - 1)
    degrees = np.divide(variance**2, spread, out=np.full_like(variance, float(n - count)), where=spread > 0)
    degrees = np.maximum(degrees, FEWEST)
    effects = np.sqrt(np.maximum(0.0, between - left_over) / k)
    return OverClasses(means, stdtrit(degrees, 0.975) * np.sqrt(variance), degrees, effects, count)
