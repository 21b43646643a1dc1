"""Benchmarks that time something use every core; the other tests keep to one."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _all_threads(request):
    if not request.config.getoption("benchmark_enable"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)
