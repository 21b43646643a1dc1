"""Splits the variance of a number in a grid of recipes and classifiers by its sources. Imports no torch.

The value x of recipe r and classifier c with training seed s on order o and support set p of that order is modelled by

    x[r, c, s, o, p] = mu + recipe[r] + classifier[c] + both[r, c]
                       + seed[s] + order[o] + support[o, p] + seed-by-order[s, o] + rest[s, o, p]
                       + the five effects of the last line once more by recipe, by classifier, and by both.

Recipes and classifiers are those of the grid and no others: their effects are fixed and sum to 0, and their variances
are means of squares over the grid's recipes, classifiers and cells. The other effects are random and independent. So
the variances add up to that of one value of a cell that is drawn at random, on one order, with one support set and one
seed. Where results record the hits of single test images, one more effect is of the set of test images, by cell.

The grid is divided into four parts, the mean over all cells, and what recipes, classifiers and both add to it. To each
part the analysis of variance of :mod:`ifsl_bench.analysis.session_variance` applies, summed over its levels. The mean
of the squares of fixed effects is estimated without bias, by taking off the variance of their errors.

Intervals are those of generalized pivotal quantities (Tsui and Weerahandi 1989, Journal of the American Statistical
Association 84:602-607; Hannig, Iyer and Patterson 2006, ibid. 101:254-269): each mean square S with n degrees of
freedom gives draws S n / chi2(n) of its expectation, and the estimated fixed effects draws with errors of the drawn
variance. Shares of the total are computed from each draw; their quantiles are the ends of the intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ifsl_bench.analysis.image_variance import ImageEffects
from ifsl_bench.analysis.session_variance import (
    DESIGN_VARIANCE_SOURCES,
    IMAGE_SOURCE_NAME,
    MeanSquare,
    VarianceEstimate,
    compute_mean_squares,
    weights_of_mean_squares,
)

RECIPE, CLASSIFIER, BOTH = "recipe", "classifier", "recipe by classifier"
FIXED_EFFECT_SOURCES = (RECIPE, CLASSIFIER, BOTH)
GRID_VARIANCE_SOURCES = (*FIXED_EFFECT_SOURCES, *DESIGN_VARIANCE_SOURCES, IMAGE_SOURCE_NAME)
COMMON_GRID_PART = "alike"  # the part of the grid that is the same in all cells
GRID_PART_NAMES = (COMMON_GRID_PART, *FIXED_EFFECT_SOURCES)
N_INTERVAL_DRAWS = 10_000
INTERVAL_PERCENTILES = (2.5, 97.5)  # percent


@dataclass(frozen=True, eq=False)
class SourceShare:
    """What one source has in the variance of a single value.

    Attributes:
        variance: in squared points, with its 95% interval.
        percent_of_total_variance: of the total variance, with its 95% interval.
        percent_by_grid_part: of a random effect, the percent of the total that are alike in all cells, and that differ
            by recipe, by classifier and by both.
        percent_draws: of the percent, [N_INTERVAL_DRAWS], from which intervals and p-values are taken.
    """

    variance: VarianceEstimate
    percent_of_total_variance: VarianceEstimate
    percent_by_grid_part: Mapping[str, float]
    percent_draws: np.ndarray


@dataclass(frozen=True, eq=False)
class _GridPart:
    """The mean squares of a part of the grid, as means over its levels, with draws of what they estimate.

    Attributes:
        level_effects: [n] effects of the levels.
        mean_squares: name of a source -> its mean square.
        mean_products: name -> mean squares and products of the levels, [n, n]; of "seed", "order" and "seed by order".
        images: covariances of the levels over test images, [n, n], and the degrees of freedom of their mean variance.
    """

    level_effects: np.ndarray
    mean_squares: Mapping[str, MeanSquare]
    mean_products: Mapping[str, np.ndarray]
    images: tuple[np.ndarray, float] | None


def split_grid(
    x: np.ndarray, images: ImageEffects | None = None, draws: int = N_INTERVAL_DRAWS
) -> dict[str, SourceShare]:
    """Return the share of each source in the variance of a single value, by :data:`GRID_VARIANCE_SOURCES`.

    A source that the design cannot tell from others is left out, as in
    :func:`ifsl_bench.analysis.session_variance.split_variance`; with one recipe, or one classifier, so are those of it.

    Args:
        x: values [recipes, classifiers, seeds, orders, supports].
        images: what test images do to the cells, recipe by recipe; None where they are held fixed.
        draws: how many intervals are made from.

    Raises:
        UserError: there is one order.
    """
    recipes, classifiers, *design = x.shape
    cells = x.reshape(recipes * classifiers, *design)
    weights = weights_of_mean_squares(*design)
    weights.pop("one")
    rng = np.random.default_rng(0)
    values = dict.fromkeys(GRID_VARIANCE_SOURCES, 0.0)
    drawn = {name: np.zeros(draws) for name in GRID_VARIANCE_SOURCES}
    by_part: dict[str, dict[str, float]] = {name: {} for name in GRID_VARIANCE_SOURCES}
    there = set(weights)
    for name, (levels, free) in _levels_and_degrees_of_freedom(recipes, classifiers).items():
        part = _make_grid_part(
            levels @ cells.reshape(len(cells), -1), free, design, images and images.effects_on_weighted_sums(levels)
        )
        squares = part.mean_squares
        # A mean square times one of these factors is a draw of its expectation.
        factors = {
            n: square.effective_degrees_of_freedom / rng.chisquare(square.effective_degrees_of_freedom, draws)
            for n, square in squares.items()
        }
        for source, of_source in weights.items():
            estimate = sum(w * squares[square].value for square, w in of_source.items())
            values[source] += estimate
            drawn[source] += sum(w * squares[square].value * factors[square] for square, w in of_source.items())
            by_part[source][name] = estimate
        scale = np.ones(draws)
        if part.images:
            covariance, degrees = part.images
            there.add(IMAGE_SOURCE_NAME)
            value = float(np.trace(covariance)) / len(levels)
            if value > 0:
                scale = degrees / rng.chisquare(degrees, draws)
            values[IMAGE_SOURCE_NAME] += value
            drawn[IMAGE_SOURCE_NAME] += max(0.0, value) * scale
            by_part[IMAGE_SOURCE_NAME][name] = value
        if name != COMMON_GRID_PART:
            there.add(name)
            values[name], drawn[name] = _mean_square_of_fixed_effects(rng, part, design, factors, scale)
    return _shares_of_total_variance(
        {name: (values[name], drawn[name], by_part[name]) for name in GRID_VARIANCE_SOURCES if name in there}
    )


def _shares_of_total_variance(
    sources: Mapping[str, tuple[float, np.ndarray, Mapping[str, float]]],
) -> dict[str, SourceShare]:
    """Return estimates below 0 as 0, and all of them as shares of their sum."""
    total = sum(max(0.0, value) for value, _, _ in sources.values())
    all_draws = np.sum([np.maximum(0.0, draws) for _, draws, _ in sources.values()], 0)
    shares = {}
    for name, (value, draws, by_part) in sources.items():
        kept, of_total = np.maximum(0.0, draws), max(0.0, value) / total if total else 0.0
        percent = 100 * np.divide(kept, all_draws, out=np.zeros_like(kept), where=all_draws > 0)
        shares[name] = SourceShare(
            VarianceEstimate(max(0.0, value), *map(float, np.percentile(kept, INTERVAL_PERCENTILES))),
            VarianceEstimate(100 * of_total, *map(float, np.percentile(percent, INTERVAL_PERCENTILES))),
            {part: 100 * max(0.0, of_part) / total if total else 0.0 for part, of_part in by_part.items()},
            percent,
        )
    return shares


def _levels_and_degrees_of_freedom(recipes: int, classifiers: int) -> dict[str, tuple[np.ndarray, int]]:
    """Return for each part of the grid its levels, as weighted sums of the cells [n, cells], and how many are free."""
    count = recipes * classifiers
    mean = np.full((1, count), 1 / count)
    of_recipe = np.kron(np.eye(recipes), np.full((1, classifiers), 1 / classifiers))
    of_classifier = np.kron(np.full((1, recipes), 1 / recipes), np.eye(classifiers))
    both = np.eye(count) - np.repeat(of_recipe, classifiers, 0) - np.tile(of_classifier, (recipes, 1)) + mean
    parts = {
        COMMON_GRID_PART: (mean, 1),
        RECIPE: (of_recipe - mean, recipes - 1),
        CLASSIFIER: (of_classifier - mean, classifiers - 1),
        BOTH: (both, (recipes - 1) * (classifiers - 1)),
    }
    return {name: (levels, free) for name, (levels, free) in parts.items() if free}


def _make_grid_part(y: np.ndarray, free: int, design: list[int], images: ImageEffects | None) -> _GridPart:
    """Return the mean squares of a part.

    Args:
        y: values of its levels, [n, seeds * orders * supports].
        free: how many levels are free.
        design: seeds, orders, supports.
        images: what test images do to the levels.
    """
    seeds, orders, supports = design
    y = y.reshape(-1, *design)
    by_level = [compute_mean_squares(level) for level in y]
    means = y.mean(3)  # [n, seeds, orders]
    by_seed, by_order, mean = means.mean(2), means.mean(1), means.mean((1, 2))
    d = by_order - mean[:, None]
    products = {"order": seeds * supports * d @ d.T / (orders - 1)}
    if seeds > 1:
        d = by_seed - mean[:, None]
        products["seed"] = orders * supports * d @ d.T / (seeds - 1)
        d = (means - by_seed[:, :, None] - by_order[:, None] + mean[:, None, None]).reshape(len(y), -1)
        products["seed by order"] = supports * d @ d.T / ((seeds - 1) * (orders - 1))
    squares = {}
    for name, first in by_level[0].items():
        of_levels = [level[name] for level in by_level]
        if first.order_contributions is None:
            value, most = float(np.mean([square.value for square in of_levels])), free * first.degrees_of_freedom
            squares[name] = MeanSquare(
                value, most, _trace_degrees_of_freedom(products[name], first.degrees_of_freedom, free)
            )
        else:
            parts = np.mean(
                [square.order_contributions for square in of_levels if square.order_contributions is not None], 0
            )
            squares[name] = MeanSquare.from_orders(parts, free * first.degrees_of_freedom)
    of_images = (images.estimate_covariance(), images.estimate_mean_variance().degrees_of_freedom) if images else None
    return _GridPart(mean, squares, products, of_images)


def _trace_degrees_of_freedom(products: np.ndarray, degrees: float, free: int) -> float:
    """Return the degrees of freedom of the trace of a matrix of mean squares and products, from ``degrees`` upwards.

    With the true matrix P they are ``degrees`` tr(P)^2 / tr(P^2) (Box 1954, Annals of Mathematical Statistics 25:290),
    fewer than ``free * degrees`` where some level varies more than others. tr(P^2) is estimated without bias.
    """
    if degrees < 2 or free < 2:
        return degrees
    trace, square = float(np.trace(products)), float((products**2).sum())
    unbiased = degrees**2 / ((degrees + 2) * (degrees - 1)) * (square - trace**2 / degrees)
    return float(np.clip(degrees * trace**2 / unbiased, degrees, free * degrees)) if unbiased > 0 else degrees * free


def _mean_square_of_fixed_effects(
    rng: np.random.Generator,
    part: _GridPart,
    design: list[int],
    factors: Mapping[str, np.ndarray],
    of_images: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Return the mean over levels of the square of their fixed effects, and draws of it, [draws].

    Args:
        rng: of the draws.
        part: with the estimated effects, and the mean squares of their errors.
        design: seeds, orders, supports.
        factors: name of a mean square -> its factors, [draws].
        of_images: [draws] factors of the variance over test images.
    """
    count, draws = np.prod(design), len(of_images)
    of_orders = part.mean_products["order"] - part.mean_products.get("seed by order", 0.0)
    errors = [(of_orders / count, factors["order"])]
    if "seed" in part.mean_products:
        errors.append((part.mean_products["seed"] / count, factors["seed"]))
    if part.images:
        errors.append((part.images[0], of_images))
    effects, taken = np.tile(part.level_effects, (draws, 1)), np.zeros(draws)
    variance = 0.0
    for covariance, scale in errors:
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(0.0, values))
        effects += np.sqrt(scale)[:, None] * (rng.normal(size=(draws, len(root))) @ root.T)
        mean = float(np.trace(covariance)) / len(root)
        variance += mean
        taken += mean * (1 + scale)  # the variance of the estimate, and of the error that a draw adds
    return float((part.level_effects**2).mean()) - variance, (effects**2).mean(1) - taken
