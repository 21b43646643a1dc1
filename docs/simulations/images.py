"""How often overall intervals hold the truth where test images, orders and training seeds are drawn anew.

    python docs/simulations/images.py --cases 2000

prints a table of docs/statistics.md. Eight equal rows have the same orders (or episodes), test images and seeds. Each
has effects of its own of every seed, order and image, and of every image with one seed alone, so large that the
differences of two rows have the standard errors of ``DESIGNS`` with three seeds. "Skewed" effects are exponential.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from ifsl_bench.analysis.image_variance import ImageVariance, WeightedPoolShares, sum_pool_variances
from ifsl_bench.analysis.ranking import SeedVariancePrior, estimate_difference, fit_seed_variance_prior, rank_intervals

ROWS, ORDERS, CLASSES, EACH, SEEDS = 8, 60, 40, 15, 3
DESIGNS = {  # standard errors of a difference, in points: of images, of an image with one seed, of seeds, of orders
    "images": (0.4, 0.1, 0.05, 0.05),
    "seeds": (0.1, 0.1, 0.4, 0.05),
    "images and seeds": (0.3, 0.1, 0.3, 0.05),
    "orders": (0.05, 0.02, 0.05, 0.3),
}
EFFECTS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {  # of mean 0 and deviation 1
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "skewed": lambda rng, shape: rng.standard_exponential(shape) - 1,
}
LABELS = np.repeat(np.arange(CLASSES), EACH)
ASKED = np.full((1, CLASSES * EACH), 10)


def case(
    rng: np.random.Generator, seeds: int, errors: tuple[float, ...], effects: str
) -> tuple[np.ndarray, np.ndarray]:
    """Accuracies of equal rows in percent, [ROWS, seeds, ORDERS], and shares of images, [ROWS, seeds, images]."""
    draw, images = EFFECTS[effects], CLASSES * EACH
    image, both, seed, order = (error / np.sqrt(2) for error in errors)
    shares = image * np.sqrt(images) * draw(rng, (ROWS, 1, images))
    shares = shares + both * np.sqrt(SEEDS * images) * draw(rng, (ROWS, seeds, images))
    x = seed * np.sqrt(SEEDS) * draw(rng, (ROWS, seeds, 1)) + order * np.sqrt(ORDERS) * draw(rng, (ROWS, 1, ORDERS))
    return x + shares.mean(2, keepdims=True), shares / 100


def of_images(shares: np.ndarray) -> ImageVariance:
    """The variance over images of a difference with these shares, [seeds, images]."""
    return sum_pool_variances([WeightedPoolShares(shares[:, None], ASKED, LABELS)], models_fixed=False)


def coverage(seeds: int, errors: tuple[float, ...], effects: str, cases: int) -> tuple[float, ...]:
    """How often the interval of a difference holds 0: with images held fixed, not moderated, and as it is."""
    rng, held = np.random.default_rng(0), np.zeros(3)
    for _ in range(cases):
        x, shares = case(rng, seeds, errors, effects)
        images, alone = of_images(shares[0] - shares[1]), SeedVariancePrior(0.0, 0.0)
        prior = fit_seed_variance_prior(x.mean(2), np.zeros(ROWS, bool))
        gaps = [
            estimate_difference(x[0], x[1], prior, 2),
            estimate_difference(x[0], x[1], alone, 2, image_variance=images),
            estimate_difference(x[0], x[1], prior, 2, image_variance=images),
        ]
        held += [abs(gap.mean) <= gap.interval for gap in gaps]
    return tuple(held / cases)


def told_apart(seeds: int, errors: tuple[float, ...], effects: str, cases: int) -> float:
    """The share of cases in which the ranks of equal rows exclude any place: the familywise error."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(cases):
        x, shares = case(rng, seeds, errors, effects)
        pairs = {(i, j): of_images(shares[i] - shares[j]) for j in range(ROWS) for i in range(j)}
        ranks = rank_intervals(x, np.zeros(ROWS, bool), image_variance_of_pair=lambda i, j, pairs=pairs: pairs[i, j])
        wrong += any((rank.best_rank, rank.worst_rank) != (1, ROWS) for rank in ranks)
    return wrong / cases


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    cases = parser.parse_args().cases
    print("| what varies most | effects | seeds | images held fixed | not moderated | overall | any told apart |")
    print("|---|---|---|---|---|---|---|")
    for design, errors in DESIGNS.items():
        for effects in EFFECTS:
            for seeds in (2, 3, 5):
                shares = coverage(seeds, errors, effects, cases)
                shares = *shares, told_apart(seeds, errors, effects, cases // 4)
                cells = " | ".join(f"{100 * share:.1f}%" for share in shares)
                print(f"| {design} | {effects} | {seeds} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
