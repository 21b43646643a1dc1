"""The tests themselves: workers that leave each other's cores alone, few slow tests, benchmarks that time something."""

from __future__ import annotations

import os
import re
from pathlib import Path

import threadpoolctl
import torch

ROOT = Path(__file__).parents[2]
COMMANDS = [line.strip() for line in (ROOT / "BENCHMARKS.md").read_text().splitlines() if re.search(r"\bpytest ", line)]


def test_every_worker_computes_with_one_thread():
    assert torch.get_num_threads() == 1
    assert {pool["num_threads"] for pool in threadpoolctl.threadpool_info()} == {1}
    assert os.environ["OMP_NUM_THREADS"] == "1", "commands that tests start keep to it too"


def test_benchmark_commands_run_in_one_process():
    """Pytest-benchmark times nothing where tests run in several."""
    assert len(COMMANDS) >= 4
    named = [line for path in (ROOT / "tests" / "benchmarks").glob("*.py") for line in path.read_text().splitlines()
             if re.search(r"\bpytest tests/benchmarks", line)]  # fmt: skip
    assert named
    for line in COMMANDS + named:
        assert "--benchmark-enable -n 0" in line, line
