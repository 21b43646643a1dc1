"""A row's base-novel curve: its accuracies with each bias on all novel logits. Imports no torch."""

from __future__ import annotations

import numpy as np

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.store.schema import Result


def bias_curve(row: SeedAggregate) -> np.ndarray | None:
    """Base and novel accuracy of a row against a bias, the mean over its seeds: [m, 3], bias and two percentages.

    The bias is on a method's own logits, so that seeds are averaged at the same bias, as those of a table are at none.
    Between the biases that a seed's file has (some fifty, none, and the one found in validation) it is taken to be
    straight. None where there are no validation episodes, and so no curve.
    """
    if "calibrated_delta" not in row.metrics:  # sequences of sessions have a bias and no curve
        return None
    curves = [_curve(result) for result in row.results]
    low, high = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    at = np.unique(np.concatenate([curve[:, 0] for curve in curves]))
    at = at[(at >= low) & (at <= high)]
    means = [np.mean([np.interp(at, curve[:, 0], curve[:, part]) for curve in curves], 0) for part in (1, 2)]
    return np.stack([at, *means], 1)


def calibrated_point(row: SeedAggregate) -> tuple[float, float] | None:
    """Base and novel accuracy in percent, each seed with its own bias from validation, the mean over seeds.

    None where there are no validation episodes, and so no bias.
    """
    if "calibrated_delta" not in row.metrics:  # sequences of sessions have a bias and no curve
        return None
    shares = []
    for counts in (result.counts() for result in row.results):
        hits = counts.columns()
        base, novel = hits["calibrated_base"].mean(), hits["calibrated_novel"].mean()
        shares.append((base / counts.base_queries, novel / counts.novel_queries))
    base, novel = 100 * np.mean(shares, 0)
    return float(base), float(novel)


def _curve(result: Result) -> np.ndarray:
    """The curve of one seed, [m, 3], ascending in the bias."""
    calibration, counts = result.calibration, result.counts()
    assert calibration is not None
    curve, applied = calibration.curve, calibration.bias if calibration.applied else 0.0
    points = {b: hits for b, *hits in zip(curve.bias, curve.base_joint, curve.novel_joint, strict=True)}
    sums = {name: int(hits.sum()) for name, hits in counts.columns().items()}
    points[calibration.bias] = [sums["calibrated_base"], sums["calibrated_novel"]]
    points[applied] = [sums["base_joint"], sums["novel_joint"]]
    base, novel = len(counts) * counts.base_queries, len(counts) * counts.novel_queries
    return np.array([(b, 100 * points[b][0] / base, 100 * points[b][1] / novel) for b in sorted(points)])
