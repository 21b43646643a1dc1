"""How far the best of N trials stays below the best that there is, for `--tune` and for other searches.

    python docs/simulations/search.py measure FILE [--home HOME]
    python docs/simulations/search.py compare FILE

``measure`` evaluates methods that need no meta-training on a fine lattice of their spaces, on the validation episodes
that options are chosen on, and keeps the accuracies in FILE. ``compare`` lets each search choose its trials there, with
accuracies interpolated between the lattice's points, and prints the table of docs/statistics.md: the points of accuracy
that are lost on average over methods and tasks, and at most. Optuna's row is left out where Optuna is not installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from ifsl_bench.experiments.search import OptionPoint, propose_next_round
from ifsl_bench.plugin.find_method import find_method
from ifsl_bench.plugin.options import declared_search_space, default_options
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.protocols.tasks.variants import TrainingChanges

METHODS = ("lr", "subspace", "lda", "teen")
TASKS = ("glyphs-1shot", "glyphs-5shot")
BUDGETS = (6, 9, 12, 24)
LATTICE = {1: 43, 2: 12}  # values of an option, by the number of options
REPEATS = 20  # of a search that draws

Accuracy = Callable[[OptionPoint], float]


def lattice(space: SearchSpace) -> Iterator[OptionPoint]:
    """Evenly spaced values of each range with all choices."""
    count = LATTICE[len(space)]
    values = [
        [dimension.value_at_share(i / (count - 1)) for i in range(count)]
        if isinstance(dimension, Range)
        else list(dimension.values)
        for dimension in space.values()
    ]
    return (dict(zip(space, point, strict=True)) for point in itertools.product(*values))


def measure(file: Path, home: str | None) -> None:
    """Fills the file; what is in it already is kept."""
    from ifsl_bench.experiments.job import make_jobs
    from ifsl_bench.experiments.stages import MetaTrainStage
    from ifsl_bench.experiments.workspace import workspace
    from ifsl_bench.protocols.loader import evaluate_method

    measured = json.loads(file.read_text()) if file.exists() else {}
    work = workspace(home)
    for task, name in itertools.product(TASKS, METHODS):
        accuracies = measured.setdefault(f"{task} {name}", {})
        for point in lattice(declared_search_space(find_method(name)[0].method)):
            if (key := json.dumps(point)) in accuracies:
                continue
            (job,) = make_jobs([name], [task], point, TrainingChanges(), [0], None, home=work.home)
            stage = MetaTrainStage(job)
            loader = stage.backbone.open_task(work).loader("val", device=stage.evaluation(work).device)
            method = stage.to_evaluate(work, stage.fresh(work)).eval()
            accuracies[key] = evaluate_method(method, name, loader, job.task.evaluation.validation_halves[0]).accuracy
        file.write_text(json.dumps(measured))
        print(f"{task} {name}: {max(accuracies.values()):.2f}", flush=True)


def interpolated(space: SearchSpace, accuracies: Mapping[str, float]) -> Accuracy:
    """The accuracy anywhere in a space: linear between the lattice's points in each range, by choice."""
    ranges = {key: dimension for key, dimension in space.items() if isinstance(dimension, Range)}
    choices = [key for key in space if key not in ranges]
    tables: dict[tuple[Any, ...], dict[tuple[float, ...], float]] = {}
    for text, accuracy in accuracies.items():
        point = json.loads(text)
        shares = tuple(round(dimension.share_of_value(point[key]), 6) for key, dimension in ranges.items())
        tables.setdefault(tuple(point[key] for key in choices), {})[shares] = accuracy
    between = {}
    for choice, table in tables.items():
        axes = [sorted(set(axis)) for axis in zip(*table, strict=True)]
        values = np.array([table[shares] for shares in itertools.product(*axes)])
        shape = [len(axis) for axis in axes]
        between[choice] = RegularGridInterpolator(axes, values.reshape(shape), bounds_error=False, fill_value=None)

    def accuracy(point: OptionPoint) -> float:
        shares = [dimension.share_of_value(point[key]) for key, dimension in ranges.items()]
        return float(between[tuple(point[key] for key in choices)](shares)[0])

    return accuracy


def ours(space: SearchSpace, default: OptionPoint, trials: int, accuracy: Accuracy, seed: int) -> float:
    """``--tune``, which draws nothing."""
    rounds: list[list[tuple[OptionPoint, float]]] = []
    while points := propose_next_round(space, default, trials, rounds):
        rounds.append([(point, accuracy(point)) for point in points])
    return max(value for pairs in rounds for _, value in pairs)


def halton(space: SearchSpace, default: OptionPoint, trials: int, accuracy: Accuracy, seed: int) -> float:
    """The default and points of a scrambled Halton sequence."""
    from scipy.stats.qmc import Halton

    shares = Halton(len(space), scramble=True, seed=2019).random(trials - 1)
    points = [
        {key: dimension.value_at_share(float(u)) for (key, dimension), u in zip(space.items(), row, strict=True)}
        for row in shares
    ]
    return max(accuracy(point) for point in (default, *points))


def random(space: SearchSpace, default: OptionPoint, trials: int, accuracy: Accuracy, seed: int) -> float:
    """The default and points drawn at random."""
    shares = np.random.default_rng(seed).random((trials - 1, len(space)))
    points = [
        {key: dimension.value_at_share(float(u)) for (key, dimension), u in zip(space.items(), row, strict=True)}
        for row in shares
    ]
    return max(accuracy(point) for point in (default, *points))


def tpe(space: SearchSpace, default: OptionPoint, trials: int, accuracy: Accuracy, seed: int) -> float:
    """The default, then Optuna's tree-structured Parzen estimator, as it is unless told otherwise."""
    import optuna

    def objective(trial: Any) -> float:
        return accuracy({
            key: trial.suggest_float(key, dimension.low, dimension.high, log=dimension.log)
            if isinstance(dimension, Range) else trial.suggest_categorical(key, dimension.values)
            for key, dimension in space.items()
        })  # fmt: skip

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial(default)
    study.optimize(objective, n_trials=trials)
    return float(study.best_value)


def compare(file: Path) -> None:
    """Prints the table."""
    searches = {"`--tune`": (ours, 1), "scrambled Halton points": (halton, 1), "random points": (random, REPEATS)}
    try:
        import optuna  # noqa: F401

        searches["Optuna's TPE"] = (tpe, REPEATS)
    except ImportError:
        pass
    cases = []
    for key, accuracies in json.loads(file.read_text()).items():
        task, name = key.split()
        method = find_method(name)[0].method
        space, default = declared_search_space(method), default_options(method, load_tasks(task)[0])
        accuracy = interpolated(space, accuracies)
        cases.append((space, {key: default[key] for key in space}, accuracy, max(accuracies.values())))
    print("| search | " + " | ".join(f"{budget} trials" for budget in BUDGETS) + " |")
    print("|---|" + "---|" * len(BUDGETS))
    for title, (search, repeats) in searches.items():
        cells = []
        for budget in BUDGETS:
            lost = [
                np.mean([best - search(space, default, budget, accuracy, seed) for seed in range(repeats)])
                for space, default, accuracy, best in cases
            ]
            cells.append(f"{np.mean(lost):.2f} (at most {np.max(lost):.2f})")
        print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("measure", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--home")
    options = parser.parse_args()
    measure(options.file, options.home) if options.what == "measure" else compare(options.file)
