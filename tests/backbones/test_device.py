"""The process that a run is: what its allocator does with freed memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

BLOCK = 64  # MiB, as the activations of a batch of images
CODE = f"""
import json, resource
import torch
from ifsl_bench.backbones.device import release_freed_memory, keep_freed_memory_in_allocator

def faults(after_each=lambda: None):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros({BLOCK}, 1 << 20, dtype=torch.uint8)
        after_each()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
left, is_kept = faults(), keep_freed_memory_in_allocator()
faults()
print(json.dumps([is_kept, left, faults(), faults(release_freed_memory)]))
"""


def page_faults(**environment: str) -> tuple[bool, int, int, int]:
    """Returns if memory is kept, and the page faults of ten blocks in turn: as left, kept, and given back."""
    clean = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES" and not k.startswith("MALLOC_")}
    process = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=clean | environment
    )
    return json.loads(process.stdout)


@pytest.mark.slow("allocates in a process of its own, again and again")
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_used_again():
    is_kept, left, count, given_back = page_faults()
    if not is_kept:
        pytest.skip("another C library, which is left as it is")
    assert count < 1000, "ten blocks of 64 MiB have 163,840 pages of 4 KiB"
    assert min(left, given_back) > 10 * max(count, 1)
    assert page_faults(MALLOC_MMAP_MAX_="1000")[0] is False, "what the environment says stays"
