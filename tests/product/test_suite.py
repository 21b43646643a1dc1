"""The tests themselves: workers that leave each other's cores alone, few slow tests, benchmarks that time something."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("command", COMMANDS[:1])
@pytest.mark.slow("runs pytest in pytest")
def test_a_benchmark_command_times_something(command):
    words = shlex.split(command)
    settings = dict(word.split("=") for word in words[: words.index("pytest")])
    # A worker's environment would tell pytest-benchmark that it is in one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | settings
    tiny = ["-k", "test_sampler", "--benchmark-max-time=0.01", "--benchmark-min-rounds=1", "-p", "no:cacheprovider"]
    line = [sys.executable, "-m", *words[words.index("pytest") :], *tiny]
    process = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    row = re.search(r"^Name \(time in \w+\) .* Mean .*\n-+\ntest_sampler_on_one_core +([\d.,]+)", process.stdout, re.M)
    assert row, process.stdout
    assert float(row[1].replace(",", "")) > 0
