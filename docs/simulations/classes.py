"""How often intervals of a difference, over episodes and over novel classes, hold the mean over all classes.

    python docs/simulations/classes.py --cases 4000

prints the table of docs/statistics.md: at the numbers of novel test classes of our tasks, 2,000 episodes of 5 of them.
What is left over of an episode has a standard deviation of 4.5 points, about that of differences at one shot, and the
effect of a class one of 0 to 4.5 points.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from ifsl_bench.analysis.comparison import estimate_class_intervals

EPISODES, WAYS, LEFT_OVER, DESIGNS = 2000, 5, 4.5, 20
TASKS = {"mini-ImageNet": 20, "Tiny-ImageNet": 45, "glyphs": 108, "tiered-ImageNet": 160}
EFFECTS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {  # of mean 0 and deviation 1
    "normal": lambda rng, shape: rng.normal(size=shape),
    "skewed (exponential)": lambda rng, shape: rng.exponential(size=shape) - 1,
}


def coverage(classes: int, spread: float, effects: str, cases: int) -> tuple[float, float, float]:
    """How often intervals over episodes and over classes hold the truth, 0; how much wider the latter are."""
    rng, held, ratio = np.random.default_rng(0), np.zeros(2), 0.0
    for _ in range(DESIGNS):
        drawn = rng.random((EPISODES, classes)).argsort(1)[:, :WAYS]
        of_class = spread * EFFECTS[effects](rng, (classes, cases // DESIGNS))  # [C, cases]
        d = of_class[drawn].mean(1) + LEFT_OVER * rng.normal(size=(EPISODES, cases // DESIGNS))
        over_episodes = 1.96 * d.std(0, ddof=1) / np.sqrt(EPISODES)
        outcome = estimate_class_intervals(d, drawn)
        assert not isinstance(outcome, str)
        held += [(np.abs(d.mean(0)) <= interval).sum() for interval in (over_episodes, outcome.interval_half_widths)]
        ratio += float(np.median(outcome.interval_half_widths / over_episodes)) / DESIGNS
    episodes, over = held / (cases // DESIGNS * DESIGNS)
    return float(episodes), float(over), ratio


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=4000)
    cases = parser.parse_args().cases
    print("| novel classes | effects of classes | their deviation | over episodes | over classes | times as wide |")
    print("|---|---|---|---|---|---|")
    for task, classes in TASKS.items():
        for effects in EFFECTS:
            for spread in (0.0, 0.5, 1.5, 4.5):
                if spread or effects == "normal":
                    episodes, over, ratio = coverage(classes, spread, effects, cases)
                    shown = f"{100 * episodes:.1f}% | {100 * over:.1f}% | {ratio:.1f}"
                    print(f"| {classes} ({task}) | {effects} | {spread} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
