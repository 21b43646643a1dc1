"""The notes in words under a table."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ifsl_bench.reporting.notes import _loses_base_queries

BOTH = ("acc", "delta_a", "base_joint", "base_alone")


@pytest.mark.parametrize(
    ("joint", "alone", "metrics", "expected"),
    [
        ([2, 0, 1], [90, 95, 85], BOTH, True),
        ([20, 5, 1], [90, 80, 80], BOTH, False),  # 8.67 of 83.3: more than a tenth
        ([8, 0, 0], [15, 10, 20], BOTH, False),  # nothing that could be lost
        ([0, 0, 0], [90, 90, 90], ("acc",), False),  # regular few-shot learning
        ([80, 85, 75], [90, 95, 85], BOTH, False),
    ],
)
def test_a_row_that_loses_its_base_queries_is_told(joint, alone, metrics, expected):
    values = {"base_joint": joint, "base_alone": alone}
    row = SimpleNamespace(metric_names=metrics, metric_by_seed=lambda metric: np.array([values[metric]], float))
    assert _loses_base_queries(row) is expected
