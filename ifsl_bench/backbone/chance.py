"""Whether a base classifier has learned anything."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ifsl_bench.data.pools import Dataset

DEVIATIONS = 2.0  # above what guessing gives, from which on it has


def at_chance(accuracy: Mapping[str, float], dataset: Dataset, then: str = "steps and rate of [pretraining]") -> str:
    """What to tell someone whose base classifier is no better than one that always guesses the commonest class.

    Args:
        accuracy: share of images labelled right, of each pool that it was measured on.
        then: what to look at besides the images.

    Returns:
        A sentence; nothing where it is better in all pools together, by :data:`DEVIATIONS` standard deviations.
    """
    hits = guessed = variance = 0.0
    for name, share in accuracy.items():
        pool = dataset.pool(name)
        chance = float(np.diff(pool.starts).max()) / len(pool)
        hits += share * len(pool)
        guessed += chance * len(pool)
        variance += chance * (1 - chance) * len(pool)
    if not accuracy or hits > guessed + DEVIATIONS * math.sqrt(variance):
        return ""
    shown = ", ".join(f"{name} {100 * share:.2f}%" for name, share in accuracy.items())
    classes = len(dataset.manifest["pools"]["base/train"]["classes"])
    first = (
        f"Look at the images ('ifsl-bench data show {dataset.name}'), then at" if len(dataset.shape) == 3 else "Look at"
    )
    return (
        f"the base classifier is at chance ({shown}, of {classes} classes): what it and its backbone have learned does "
        f"not hold for other images, and no method on them means anything. {first} {then}"
    )
