"""What a bias found on validation episodes costs against the best one, and how it varies with the training seed.

``python docs/simulations/calibration.py RESULT.json...`` prints a row for each method and task among result files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ifsl_bench.board.render import render
from ifsl_bench.board.result_file import Result, read
from ifsl_bench.board.table import plain_table


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
    lost = np.array([best_on_test(r) for r in results]) - calibrated
    return {
        "row": f"{results[0].label}, {results[0].task}",
        "bias": f"{biases.mean():.2f} (sd {biases.std(ddof=1):.2f})",
        "Acc.": f"{plain.mean():.2f} (sd {plain.std(ddof=1):.2f})",
        "cal. Acc.": f"{calibrated.mean():.2f} (sd {calibrated.std(ddof=1):.2f})",
        "the best bias of the curve would add": f"{lost.mean():+.2f} (at most {lost.max():+.2f})",
    }


if __name__ == "__main__":
    groups: dict[tuple[str, str], list[Result]] = {}
    for path in sys.argv[1:]:
        result = read(Path(path))
        groups.setdefault((result.task, result.label), []).append(result)
    print(render([plain_table([row(found) for found in groups.values()])], "markdown"))
