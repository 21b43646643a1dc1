"""How often intervals of shares of variance in a grid of recipes and classifiers hold what they should.

    python docs/simulations/grid.py --cases 1000

prints the table of docs/statistics.md: 5 recipes and 4 classifiers, 100 orders with 4 support sets each. The standard
deviations of the effects, in points, are those of ``DESIGNS``; each random effect is drawn alike for all cells, by
recipe, by classifier and by cell, with variances in the shares of ``PARTS_OF``. "Skewed" effects are exponential.
Recipes and classifiers have the same fixed effects in all cases.
"""

from __future__ import annotations

import argparse

import numpy as np

from ifsl_bench.analysis.grid_variance import BOTH, CLASSIFIER, RECIPE, split_grid
from ifsl_bench.analysis.session_variance import DESIGN_VARIANCE_SOURCES

RECIPES, CLASSIFIERS, ORDERS, SUPPORTS = 5, 4, 100, 4
DESIGNS = {  # deviations of recipe, classifier, both, and of PARTS: order, support, seed, seed by order, rest
    "recipes": (2.0, 1.0, 0.5, 0.5, 0.3, 0.4, 0.2, 0.2),
    "small effects": (0.3, 0.3, 0.3, 0.5, 0.3, 0.4, 0.2, 0.2),
    "seeds": (1.0, 0.5, 0.0, 0.2, 0.2, 1.0, 0.1, 0.1),
}
PARTS_OF = (0.4, 0.4, 0.1, 0.1)  # of a random effect's variance: alike, by recipe, by classifier, by cell
EFFECTS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape) - 1,
}
DRAWS = 2000


def fixed_effects(deviations: tuple[float, ...]) -> np.ndarray:
    """Return effects of the cells [R, C, 1, 1, 1] whose variances in the grid are these: recipe, classifier, both."""
    rng = np.random.default_rng(1)
    recipe, classifier = rng.normal(size=(RECIPES, 1)), rng.normal(size=(1, CLASSIFIERS))
    both = rng.normal(size=(RECIPES, CLASSIFIERS))
    both += both.mean() - both.mean(0) - both.mean(1, keepdims=True)
    effects = ((part - part.mean()) / part.std() for part in (recipe, classifier, both))
    return sum(d * effect for d, effect in zip(deviations, effects, strict=True))[:, :, None, None, None]


def case(rng: np.random.Generator, seeds: int, design: str, effects: str) -> tuple[np.ndarray, dict[str, float]]:
    """Return values [R, C, seeds, orders, supports], and the percent of each source in the variance of one value."""
    deviations, draw = DESIGNS[design], EFFECTS[effects]
    cells = fixed_effects(deviations[:3])
    x = np.broadcast_to(cells, (RECIPES, CLASSIFIERS, seeds, ORDERS, SUPPORTS)).copy()
    truth = dict(zip((RECIPE, CLASSIFIER, BOTH), np.square(deviations[:3]), strict=True))
    shapes = [(1, ORDERS, 1), (1, ORDERS, SUPPORTS), (seeds, 1, 1), (seeds, ORDERS, 1), (seeds, ORDERS, SUPPORTS)]
    of_cells = [(1, 1), (RECIPES, 1), (1, CLASSIFIERS), (RECIPES, CLASSIFIERS)]
    of_one_seed = cells[:, :, 0, 0, 0].copy()
    for part, deviation, shape in zip(DESIGN_VARIANCE_SOURCES, deviations[3:], shapes, strict=True):
        truth[part] = deviation**2
        for share, of_cell in zip(PARTS_OF, of_cells, strict=True):
            effect = deviation * share**0.5 * draw(rng, (*of_cell, *shape))
            x += effect
            if part == "seed":
                of_one_seed = of_one_seed + effect[:, :, 0, 0, 0]
    if seeds == 1:  # what a seed does to a cell is the cell's
        rows, columns = of_one_seed.mean(1), of_one_seed.mean(0)
        rest = of_one_seed - rows[:, None] - columns + of_one_seed.mean()
        truth |= {RECIPE: rows.var(), CLASSIFIER: columns.var(), BOTH: (rest**2).mean()}
        truth["order"] += truth.pop("seed by order")
        truth["support"] += truth.pop("rest")
        del truth["seed"]
    total = sum(truth.values())
    return x, {name: 100 * value / total for name, value in truth.items()}


def coverage(seeds: int, design: str, effects: str, cases: int) -> dict[str, float]:
    """Return how often the interval of each share holds the truth."""
    rng, held = np.random.default_rng(0), dict[str, int]()
    for _ in range(cases):
        x, truth = case(rng, seeds, design, effects)
        for name, share in split_grid(x, draws=DRAWS).items():
            held[name] = held.get(name, 0) + (
                share.percent_of_total_variance.lower_limit
                <= truth[name]
                <= share.percent_of_total_variance.upper_limit
            )
    return {name: times / cases for name, times in held.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    cases = parser.parse_args().cases
    shown = (RECIPE, CLASSIFIER, BOTH, "order", "support", "seed")
    print(f"| what varies | effects | seeds | {' | '.join(shown)} |\n|---|---|---|{'---|' * len(shown)}")
    for design in DESIGNS:
        for effects in EFFECTS:
            for seeds in (1, 3, 5):
                shares = coverage(seeds, design, effects, cases)
                cells = [f"{100 * shares[name]:.1f}%" if name in shares else "" for name in shown]
                print(f"| {design} | {effects} | {seeds} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
