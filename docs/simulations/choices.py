"""How often 95% intervals of calibrated and tuned numbers contain the truth, with and without the choice in them.

    python docs/simulations/choices.py --cases 400

prints the tables of docs/statistics.md. The truth is the mean accuracy over all test episodes and all draws of 300
validation episodes. Validation and test have different classes, so that what is best on one is not best on the other.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.special import ndtr

from ifsl_bench.experiments.search import RIVAL_EPISODES, TrialRecord, bootstrap_selection
from ifsl_bench.protocols.calibration import Margins, find_bias
from ifsl_bench.protocols.episode_protocol import mean_hit_gains
from ifsl_bench.protocols.metrics import mean_with_interval
from ifsl_bench.store.schema import StoredOptionChoice

VALIDATION, TEST, QUERIES = 300, 2000, 25  # episodes; base queries of an episode, and novel ones
HITS = 100  # in a point
OF_EPISODE, RIGHT, APART = 0.5, 0.9, 1.0  # sd of an episode's margins; right among their own classes; base from novel


def margins(rng: np.random.Generator, episodes: int, shift: float) -> Margins:
    """Margins of a row."""
    sizes, parts = (episodes, QUERIES), []
    shared = [OF_EPISODE * rng.normal(size=(episodes, 1)) + rng.normal(size=sizes) for _ in range(2)]
    for of, sign in zip(shared, (1, -1), strict=True):
        own = np.sqrt(0.25 * (1 + OF_EPISODE**2)) * rng.normal(size=sizes)
        parts.append(np.sqrt(0.75) * of + own + shift + sign * APART)
    return Margins(*(np.where(rng.random(sizes) < RIGHT, part, np.nan) for part in parts))


def accuracy(bias: float, shift: float) -> float:
    """In percent, over all episodes whose margins are shifted."""
    spread = np.sqrt(1 + OF_EPISODE**2)
    return 50 * RIGHT * (ndtr((APART + shift - bias) / spread) + ndtr((bias + APART - shift) / spread))


def calibrated(shift: float, cases: int) -> tuple[float, float, float]:
    """Coverage of intervals with the bias held fixed and with its choice in them, and how many times as wide these are.

    Args:
        shift: of the test margins against those of validation.
    """
    rng, intervals = np.random.default_rng(0), []
    for _ in range(cases):
        validation, test = margins(rng, VALIDATION, 0.0), margins(rng, TEST, shift)
        bias = find_bias(validation)
        result = bias.apply_to_episodes(test)
        values, again = (
            50 * of / QUERIES for of in (result.base_joint + result.novel_joint, result.hits_by_resample.sum(1))
        )
        with_choice = mean_with_interval(values, float((again / TEST).var(ddof=1)))
        truth = float(accuracy(bias.bias_on_novel_logits, shift))
        intervals.append((with_choice.mean, mean_with_interval(values).interval, with_choice.interval, truth))
    return coverage(np.array(intervals))


def tuned(curvature: float, shift: float, cases: int) -> tuple[float, float, float]:
    """The same of the best of 11 settings.

    Args:
        curvature: points that a setting is behind its neighbour at the best one.
        shift: of the test's best setting against that of validation.
    """
    rng, settings, intervals = np.random.default_rng(0), np.arange(11), []
    levels = [70 - curvature * (settings - 5 - moved) ** 2 for moved in (0.0, shift)]
    for _ in range(cases):
        validation, test = (
            level + 7 * rng.normal(size=(n, 1)) + 3 * rng.normal(size=(n, len(settings)))
            for level, n in zip(levels, (VALIDATION, TEST), strict=True)
        )
        best = int(validation.mean(0).argmax())
        values, choice = test[:, best], choice_of(validation, test, best)
        more = mean_hit_gains(choice, "base_joint")[choice.winners] / HITS
        with_choice = mean_with_interval(values, float(more.var(ddof=1)))
        truth = float(levels[1][best])
        intervals.append((with_choice.mean, mean_with_interval(values).interval, with_choice.interval, truth))
    return coverage(np.array(intervals))


def choice_of(validation: np.ndarray, test: np.ndarray, best: int) -> StoredOptionChoice:
    """What a result says of the choice, from accuracies [episodes, settings]; hits are in hundredths of a point."""
    hits = np.rint(HITS * validation).astype(int)
    none = [0] * len(hits)
    tried = {str(i): TrialRecord(0.0, len(hits), hits={"base_joint": column.tolist(), "novel_joint": none})
             for i, column in enumerate(hits.T)}  # fmt: skip
    fields = bootstrap_selection(tried, str(best))
    sums = np.rint(HITS * test[:RIVAL_EPISODES]).sum(0).astype(int)
    on_test = {"base_joint": sums[[best, *fields["rivals"]]].tolist()}
    return StoredOptionChoice(**fields, test_episodes=RIVAL_EPISODES, test_hits=on_test)


def coverage(intervals: np.ndarray) -> tuple[float, float, float]:
    """Of [cases, 4]: an estimate, two half-widths of intervals, and its expectation given what was chosen."""
    off = np.abs(intervals[:, 0] - intervals[:, 3].mean())
    return (off <= intervals[:, 1]).mean(), (off <= intervals[:, 2]).mean(), (intervals[:, 2] / intervals[:, 1]).mean()


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=400)
    cases = parser.parse_args().cases
    columns = "choice held fixed | choice in it | times as wide |\n|---|---|---|---|"
    print(f"| calibrated Acc. | {columns}")
    for shift in (0.0, 0.25, 0.5):
        fixed, whole, wide = calibrated(shift, cases)
        print(f"| best bias moved by {shift} | {fixed:.1%} | {whole:.1%} | {wide:.2f} |", flush=True)
    print(f"\n| the best of 11 settings | {columns}")
    for curvature in (0.002, 0.02, 0.2):
        for shift in (0.0, 2.0):
            fixed, whole, wide = tuned(curvature, shift, cases)
            print(f"| {curvature} points a step, best moved by {shift:g} | {fixed:.1%} | {whole:.1%} | {wide:.2f} |")


if __name__ == "__main__":
    main()
