"""How often rank intervals of equal methods exclude a rank, and how many true differences they find.

    python docs/simulations/ranks.py --cases 1000

prints the tables of docs/statistics.md. Ten methods on common episodes; these give each mean a standard error of 0.1
points, so that seeds matter more, as they do in our results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from ifsl_bench.analysis.ranking import find_significantly_better, rank_intervals

ROWS, EPISODES, EPISODE_ERROR, LEFT_OVER = 10, 40, 0.1, 0.05
SPREADS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {  # standard deviation over seeds of each method
    "equal": lambda rng: np.full(ROWS, 0.4),
    "around a common one (inverse gamma, 4 degrees of freedom)": lambda rng: np.sqrt(0.16 / rng.gamma(2, 0.5, ROWS)),
    "half 0.1, half 0.8": lambda rng: np.where(np.arange(ROWS) % 2, 0.1, 0.8),
    "one 2.0, nine 0.3": lambda rng: np.where(np.arange(ROWS) == 0, 2.0, 0.3),
    "one 0.8, nine 0.05": lambda rng: np.where(np.arange(ROWS) < 9, 0.05, 0.8),
    "two 0.8, eight 0.05": lambda rng: np.where(np.arange(ROWS) < 8, 0.05, 0.8),
}


def accuracies(rng: np.random.Generator, spread: np.ndarray, seeds: int, better: np.ndarray) -> np.ndarray:
    """[ROWS, seeds, EPISODES] of methods that differ by ``better``; a seed moves all of them alike, too."""
    common = 0.5 * rng.normal(size=(1, seeds, 1))
    own = spread[:, None, None] * rng.normal(size=(ROWS, seeds, 1))
    of_episodes = EPISODE_ERROR * np.sqrt(EPISODES) * rng.normal(size=(ROWS, 1, EPISODES))
    rest = LEFT_OVER * np.sqrt(EPISODES) * rng.normal(size=(ROWS, seeds, EPISODES))
    return better[:, None, None] + common + own + of_episodes + rest


def wrong(spread: Callable[[np.random.Generator], np.ndarray], seeds: int, cases: int) -> float:
    """The share of cases in which equal methods are told apart anywhere: the familywise error."""
    rng, nothing, errors = np.random.default_rng(0), np.zeros(ROWS), 0
    for _ in range(cases):
        intervals = rank_intervals(accuracies(rng, spread(rng), seeds, nothing), np.zeros(ROWS, bool))
        errors += any((interval.best_rank, interval.worst_rank) != (1, ROWS) for interval in intervals)
    return errors / cases


def power(gap: float, seeds: int, cases: int, collapse: float = 0.0) -> float:
    """Five methods are better than the five others by ``gap`` points: the share of these differences that is found.

    Args:
        collapse: by how many points one seed of the last method is worse; its own differences do not count then.
    """
    rng, better, detections = np.random.default_rng(0), np.where(np.arange(ROWS) < 5, gap, 0.0), 0
    worse = range(5, ROWS - 1 if collapse else ROWS)
    for _ in range(cases):
        x = accuracies(rng, np.full(ROWS, 0.4), seeds, better)
        x[-1, 0] -= collapse
        told = find_significantly_better(x, np.zeros(ROWS, bool))
        detections += int(told[:5, worse].sum())
    return detections / cases / (5 * len(worse))


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    cases = parser.parse_args().cases
    print("| standard deviation over seeds | 3 seeds | 5 seeds | 10 seeds |\n|---|---|---|---|")
    for name, spread in SPREADS.items():
        shown = (f"{100 * wrong(spread, seeds, cases):.1f}%" for seeds in (3, 5, 10))
        print(f"| {name} | {' | '.join(shown)} |", flush=True)
    seeds_of = "3 seeds | 5 seeds | 10 seeds"
    print(f"\n| difference in points | {seeds_of} | one collapsed: {seeds_of} |\n|---|---|---|---|---|---|---|")
    for gap in (0.5, 1.0, 2.0, 4.0):
        shown = (f"{100 * power(gap, seeds, max(1, cases // 4)):.0f}%" for seeds in (3, 5, 10))
        collapsed = (f"{100 * power(gap, seeds, max(1, cases // 4), 20):.0f}%" for seeds in (3, 5, 10))
        print(f"| {gap} | {' | '.join(shown)} | {' | '.join(collapsed)} |", flush=True)


if __name__ == "__main__":
    main()
