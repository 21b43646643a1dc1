"""What a bias found on validation episodes costs against the best one.

``python docs/simulations/calibration.py`` prints how far the stored results of episodes are from the best bias of their
curves on test episodes, by task. Tasks that differ in the number of base classes alone are one row.
"""

from __future__ import annotations

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


def lost(result: Result) -> float:
    """How many points the best bias of the curve would add."""
    return best_on_test(result) - result.summary["calibrated_acc"]["mean"]


def task(results: list[Result]) -> dict[str, str]:
    """One task, over its stored results with any number of base classes."""
    points = np.array([lost(result) for result in results])
    worst = results[int(points.argmax())]
    return {
        "task": worst.task.partition("=")[0],
        "results": str(len(results)),
        "within 0.3": f"{(points <= 0.3).mean():.0%}",
        "median": f"{np.median(points):+.2f}",
        "largest": f"{points.max():+.2f} ({worst.label}, seed {worst.seed})",
    }


if __name__ == "__main__":
    groups: dict[str, list[Result]] = {}
    for path in sorted(packaged_results_folder().glob("*/*.seed-*.json")):
        result = read_result(path)
        if result.calibration and result.calibration.curve.base_joint:  # sessions have no curve
            groups.setdefault(result.task.partition("=")[0], []).append(result)
    print(render_tables([table_from_dicts([task(group) for group in groups.values()])], "markdown"))
