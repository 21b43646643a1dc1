"""What a bias found on validation episodes costs against the best one, and how it varies with the training seed.

``python docs/simulations/calibration.py RESULT.json...`` prints a row for each method and task among result files.
Without files it prints how far the stored results of episodes are from the best bias, by task.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ifsl_bench.reporting.table import render_tables, table_from_dicts
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.store.schema import Result, read_result


def best_on_test(result: Result) -> float:
    """The highest Acc. in percent on the stored curve of test episodes, which no validation episode has chosen."""
    if result.calibration is None:
        raise ValueError(f"{result.label} on {result.task}, seed {result.seed}, has no calibration")
    curve, queries = result.calibration.curve, result.episodes.base_queries + result.episodes.novel_queries
    hits = np.add(curve.base_joint, curve.novel_joint)
    return float(100 * hits.max() / (queries * len(result.episodes)))


def row(results: list[Result]) -> dict[str, str]:
    """One method on one task, over its seeds."""
    biases = np.array([r.calibration.bias for r in results if r.calibration])
    plain, calibrated = (np.array([r.summary[name]["mean"] for r in results]) for name in ("acc", "calibrated_acc"))
    points = np.array([lost(r) for r in results])
    return {
        "row": f"{results[0].label}, {results[0].task}",
        "bias": f"{biases.mean():.2f} (sd {biases.std(ddof=1):.2f})",
        "Acc.": f"{plain.mean():.2f} (sd {plain.std(ddof=1):.2f})",
        "cal. Acc.": f"{calibrated.mean():.2f} (sd {calibrated.std(ddof=1):.2f})",
        "the best bias of the curve would add": f"{points.mean():+.2f} (at most {points.max():+.2f})",
    }


def lost(result: Result) -> float:
    """How many points the best bias of the curve would add."""
    return best_on_test(result) - result.summary["calibrated_acc"]["mean"]


def task(results: list[Result]) -> dict[str, str]:
    """One task, over its stored results."""
    points = np.array([lost(result) for result in results])
    worst = results[int(points.argmax())]
    return {
        "task": worst.task,
        "results": str(len(results)),
        "within 0.3": f"{(points <= 0.3).mean():.0%}",
        "median": f"{np.median(points):+.2f}",
        "largest": f"{points.max():+.2f} ({worst.label}, seed {worst.seed})",
    }


if __name__ == "__main__":
    groups: dict[tuple[str, str], list[Result]] = {}
    for path in sys.argv[1:] or sorted(packaged_results_folder().glob("*/*.seed-*.json")):
        result = read_result(Path(path))
        if sys.argv[1:] or (result.calibration and result.calibration.curve.base_joint):  # sessions have no curve
            groups.setdefault((result.task, result.label if sys.argv[1:] else ""), []).append(result)
    line = row if sys.argv[1:] else task
    print(render_tables([table_from_dicts([line(group) for group in groups.values()])], "markdown"))
