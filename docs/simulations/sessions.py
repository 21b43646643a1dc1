"""How often intervals of a difference in sessions hold what they should, and those of its parts of variance.

    python docs/simulations/sessions.py --cases 2000

prints the tables of docs/statistics.md, for 100 orders with 4 support sets each. In the first, two rows differ by 0.2
points on average; the standard deviations of their difference's effects, in points, are those of ``DESIGNS``, and
"skewed" ones are exponential. In the second, ten rows are equal: how often ranks tell any two of them apart. Each
row's effects are so large that the difference of two has these deviations. The third has the chance of a wrong sign,
and the mean of its estimates, for two differences.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np

from ifsl_bench.analysis.ranking import rank_intervals
from ifsl_bench.analysis.session_variance import (
    DESIGN_VARIANCE_SOURCES,
    estimate_mean_difference,
    estimate_wrong_sign_chance,
    split_variance,
)

ORDERS, SUPPORTS, MEAN = 100, 4, 0.2
DESIGNS = {  # deviations of PARTS: order, support, seed, seed by order, rest
    "supports": (0.0, 0.3, 0.0, 0.0, 0.1),
    "orders and supports": (0.2, 0.3, 0.1, 0.1, 0.2),
    "seeds": (0.1, 0.2, 0.4, 0.1, 0.1),
}
EFFECTS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {  # of mean 0 and deviation 1
    "normal": lambda rng, shape: rng.normal(size=shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape) - 1,
}
ONE_SEED = (*DESIGN_VARIANCE_SOURCES[:2], "one")


def case(
    rng: np.random.Generator, seeds: int, deviations: tuple[float, ...], effects: str, mean: float = MEAN
) -> tuple[np.ndarray, float]:
    """Differences [seeds, orders, supports], and their mean with these seeds over all orders and support sets."""
    draw, (order, support, seed, both, rest) = EFFECTS[effects], deviations
    of_seed = seed * draw(rng, (seeds, 1, 1))
    x = mean + of_seed + order * draw(rng, (1, ORDERS, 1)) + support * draw(rng, (1, ORDERS, SUPPORTS))
    x = x + both * draw(rng, (seeds, ORDERS, 1)) + rest * draw(rng, (seeds, ORDERS, SUPPORTS))
    return x, mean + float(of_seed.mean())


def coverage(seeds: int, deviations: tuple[float, ...], effects: str, cases: int) -> dict[str, float]:
    """How often each interval holds the truth; "sign" is that of the chance of a wrong sign."""
    rng, held = np.random.default_rng(0), dict[str, int]()
    truth = {part: deviation**2 for part, deviation in zip(DESIGN_VARIANCE_SOURCES, deviations, strict=True)}
    if seeds == 1:  # what a seed does is the same in every value of one row
        truth = {"order": truth["order"] + truth["seed by order"], "support": truth["support"] + truth["rest"]}
    truth["one"] = sum(truth.values())
    for _ in range(cases):
        x, with_these_seeds = case(rng, seeds, deviations, effects)
        of_orders, of_all = estimate_mean_difference(x.mean(0, keepdims=True)), estimate_mean_difference(x)
        sign, mean = estimate_wrong_sign_chance(x), MEAN if seeds > 1 else with_these_seeds
        chance = 0.5 * math.erfc(abs(mean) / math.sqrt(2 * truth["one"]))
        coverages = {
            "over orders": abs(of_orders.mean - with_these_seeds) <= of_orders.interval,
            "overall": abs(of_all.mean - mean) <= of_all.interval,
            "sign": sign.lower_limit <= chance <= sign.upper_limit,
        }
        coverages |= {part: v.lower_limit <= truth[part] <= v.upper_limit for part, v in split_variance(x).items()}
        for name, holds in coverages.items():
            held[name] = held.get(name, 0) + holds
    return {name: times / cases for name, times in held.items()}


def told_apart(seeds: int, deviations: tuple[float, ...], effects: str, cases: int, rows: int = 10) -> float:
    """The share of cases in which the ranks of equal rows exclude any place: the familywise error."""
    rng, wrong, own = np.random.default_rng(0), 0, tuple(deviation / math.sqrt(2) for deviation in deviations)
    for _ in range(cases):
        means = np.stack([case(rng, seeds, own, effects)[0].mean(2) for _ in range(rows)])
        intervals = rank_intervals(means, np.zeros(rows, bool))
        wrong += any((interval.best_rank, interval.worst_rank) != (1, rows) for interval in intervals)
    return wrong / cases


def chances(seeds: int, deviations: tuple[float, ...], effects: str, mean: float, cases: int) -> tuple[float, float]:
    """The chance that a single comparison has the wrong sign under normal effects, and the mean of its estimates."""
    rng = np.random.default_rng(0)
    signs = [estimate_wrong_sign_chance(case(rng, seeds, deviations, effects, mean)[0]) for _ in range(cases)]
    truth = 0.5 * math.erfc(mean / math.sqrt(2 * sum(deviation**2 for deviation in deviations)))
    return truth, float(np.mean([sign.chance for sign in signs if sign]))


def print_chances(cases: int) -> None:
    """Prints the table of :func:`chances`."""
    print("\n| what varies | effects | difference | truth | 3 seeds | 5 seeds |\n|---|---|---|---|---|---|")
    for design, deviations in DESIGNS.items():
        for effects in EFFECTS:
            for mean in (0.05, MEAN):
                found = [chances(seeds, deviations, effects, mean, cases) for seeds in (3, 5)]
                cells = " | ".join(f"{100 * share:.1f}%" for share in (found[0][0], *(each[1] for each in found)))
                print(f"| {design} | {effects} | {mean} | {cells} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    cases = parser.parse_args().cases
    shown = ("over orders", "overall", "order", "support", "seed", "one", "sign")
    print(
        "| what varies | effects | seeds | over orders | overall | order | support | seed | a single one | wrong sign |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for design, deviations in DESIGNS.items():
        for effects in EFFECTS:
            for seeds in (1, 3, 5):
                shares = coverage(seeds, deviations, effects, cases)
                cells = [f"{100 * shares[name]:.1f}%" if name in shares else "" for name in shown]
                print(f"| {design} | {effects} | {seeds} | {' | '.join(cells)} |", flush=True)
    print("\n| what varies | effects | 3 seeds | 5 seeds |\n|---|---|---|---|")
    for design, deviations in DESIGNS.items():
        for effects in EFFECTS:
            shares = (f"{100 * told_apart(seeds, deviations, effects, cases // 2):.1f}%" for seeds in (3, 5))
            print(f"| {design} | {effects} | {' | '.join(shares)} |", flush=True)
    print_chances(cases)


if __name__ == "__main__":
    main()
