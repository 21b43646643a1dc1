"""How often 95% intervals of calibrated and tuned numbers contain the truth, with and without the choice in them.

    python docs/simulations/choices.py --cases 400

prints the tables of docs/statistics.md. The truth is the mean accuracy over all test episodes and all draws of 300
validation episodes. Validation and test have different classes, so that what is best on one is not best on the other.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.special import ndtr

from ifsl_bench.protocol.calibration import Margins, find_bias, resamples
from ifsl_bench.protocol.metrics import estimate

VALIDATION, TEST, QUERIES = 300, 2000, 25  # episodes; base queries of an episode, and novel ones
OF_EPISODE, RIGHT, APART = 0.5, 0.9, 1.0  # sd of an episode's margins; right among their own classes; base from novel


def margins(rng: np.random.Generator, episodes: int, shift: float, rows: int) -> list[Margins]:
    """Margins of rows that share three quarters of their variance; the second one's best bias moves the other way."""
    sizes = (episodes, QUERIES)
    shared = [OF_EPISODE * rng.normal(size=(episodes, 1)) + rng.normal(size=sizes) for _ in range(2)]
    found = []
    for row in range(rows):
        values = [np.sqrt(0.75) * of + np.sqrt(0.25 * (1 + OF_EPISODE**2)) * rng.normal(size=sizes) for of in shared]
        parts = [v + (-shift if row else shift) + sign * APART for v, sign in zip(values, (1, -1), strict=True)]
        found.append(Margins(*(np.where(rng.random(sizes) < RIGHT, part, np.nan) for part in parts)))
    return found


def accuracy(bias: np.ndarray, shift: float) -> np.ndarray:
    """In percent, over all episodes whose margins are shifted."""
    spread = np.sqrt(1 + OF_EPISODE**2)
    return 50 * RIGHT * (ndtr((APART + shift - bias) / spread) + ndtr((bias + APART - shift) / spread))


def calibrated(shift: float, rows: int, cases: int) -> tuple[float, float, float]:
    """Coverage of intervals with the bias held fixed and with its choice in them, and how many times as wide these are.

    Args:
        shift: of the test margins against those of validation.
        rows: 1 for a calibrated accuracy, 2 for the difference of two.
    """
    rng, found = np.random.default_rng(0), []
    for _ in range(cases):
        validation, test = margins(rng, VALIDATION, 0.0, rows), margins(rng, TEST, shift, rows)
        biases = [find_bias(one) for one in validation]
        results = [bias.applied(one) for bias, one in zip(biases, test, strict=True)]
        per_episode = [50 * (r.base_joint + r.novel_joint) / QUERIES for r in results]
        resampled = [50 * r.resampled.sum(1) / QUERIES / TEST for r in results]
        there = [accuracy(bias.value, -shift if row else shift) for row, bias in enumerate(biases)]
        values, again, truth = (of[0] - of[1] if rows > 1 else of[0] for of in (per_episode, resampled, there))
        with_choice = estimate(values, float(again.var(ddof=1)))
        found.append((with_choice.mean, estimate(values).interval, with_choice.interval, truth))
    return coverage(np.array(found))


def tuned(curvature: float, shift: float, cases: int) -> tuple[float, float, float]:
    """The same of the best of 11 settings.

    Args:
        curvature: points that a setting is behind its neighbour at the best one.
        shift: of the test's best setting against that of validation.
    """
    rng, settings, found = np.random.default_rng(0), np.arange(11), []
    levels = [70 - curvature * (settings - 5 - moved) ** 2 for moved in (0.0, shift)]
    for _ in range(cases):
        validation, test = (
            level + 7 * rng.normal(size=(n, 1)) + 3 * rng.normal(size=(n, len(settings)))
            for level, n in zip(levels, (VALIDATION, TEST), strict=True)
        )
        means = validation.mean(0)
        winners = (resamples(VALIDATION) @ validation).argmax(1)
        values = test[:, means.argmax()]
        with_choice = estimate(values, float(means[winners].var(ddof=1)))
        truth = float(levels[1][means.argmax()])
        found.append((with_choice.mean, estimate(values).interval, with_choice.interval, truth))
    return coverage(np.array(found))


def coverage(found: np.ndarray) -> tuple[float, float, float]:
    """Of [cases, 4]: an estimate, two half-widths of intervals, and its expectation given what was chosen."""
    off = np.abs(found[:, 0] - found[:, 3].mean())
    return (off <= found[:, 1]).mean(), (off <= found[:, 2]).mean(), (found[:, 2] / found[:, 1]).mean()


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=400)
    cases = parser.parse_args().cases
    columns = "choice held fixed | choice in it | times as wide |\n|---|---|---|---|"
    print(f"| calibrated Acc. | {columns}")
    for what, rows in (("one row", 1), ("difference of two rows", 2)):
        for shift in (0.0, 0.25, 0.5):
            fixed, whole, wide = calibrated(shift, rows, cases)
            print(f"| {what}, best bias moved by {shift} | {fixed:.1%} | {whole:.1%} | {wide:.2f} |", flush=True)
    print(f"\n| the best of 11 settings | {columns}")
    for curvature in (0.002, 0.02, 0.2):
        for shift in (0.0, 2.0):
            fixed, whole, wide = tuned(curvature, shift, cases)
            print(f"| {curvature} points a step, best moved by {shift:g} | {fixed:.1%} | {whole:.1%} | {wide:.2f} |")


if __name__ == "__main__":
    main()
