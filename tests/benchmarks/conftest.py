"""Benchmarks that time something use every core, or as many as OMP_NUM_THREADS says; the other tests keep to one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps one case of each benchmark where none is timed, to show that it runs; `-m ""` takes all."""
    if config.getoption("benchmark_enable") or not config.getoption("markexpr"):
        return
    names, rest = set(), []
    for item in items:
        name = item.path, getattr(item, "originalname", item.name)
        if HERE in item.path.parents and name in names:
            rest.append(item)
        names.add(name)
    if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if item not in rest]


@pytest.fixture(autouse=True)
def _all_threads(request):
    before = torch.get_num_threads()
    if request.config.getoption("benchmark_enable"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or cores))
    yield
    torch.set_num_threads(before)
