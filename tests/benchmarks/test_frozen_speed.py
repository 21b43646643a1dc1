"""Features under a frozen backbone against a bare loop with the same network, images and batch.

``pytest tests/benchmarks/test_frozen_speed.py --benchmark-enable -n 0 -s``, with ``--cuda`` on an accelerator.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ifsl_bench.backbones.features import BATCH_SIZE, _compute_batches
from ifsl_bench.backbones.frozen import FrozenPreprocessing
from ifsl_bench.backbones.networks import make_backbone
from ifsl_bench.backbones.torchvision_zoo import Torchvision
from ifsl_bench.data.pools import Pool

MODEL = "resnet18.IMAGENET1K_V1"
ROUNDS = 3


def test_features_are_as_fast_as_a_bare_loop(benchmark):
    if benchmark.disabled:
        pytest.skip("a measurement: --benchmark-enable")
    on_device = torch.cuda.is_available()
    device = torch.device("cuda" if on_device else "cpu")
    count = 16_384 if on_device else 64
    # What a device does is no processor time; on the processor, what else the machine does is none of ours.
    now = time.perf_counter if on_device else time.process_time
    network = make_backbone(f"torchvision:{MODEL}", (64, 64, 3)).to(device, memory_format=torch.channels_last)
    normalise = FrozenPreprocessing(Torchvision().describe(MODEL), device)
    images = np.random.default_rng(0).integers(0, 255, (count, 64, 64, 3), dtype=np.uint8)
    pool = Pool("novel/test", images, np.zeros(count, np.int64), ("a",), np.array([0, count]))
    backbone = SimpleNamespace(network=network, normalise=normalise)
    all_at_once = torch.from_numpy(images)

    def bare():
        with torch.inference_mode():
            return [network(normalise(part.to(device))).float().cpu() for part in all_at_once.split(BATCH_SIZE)]

    def ours():
        return list(_compute_batches(SimpleNamespace(), backbone, pool, device, 1))

    seconds = {bare: [], ours: []}
    for _ in range(ROUNDS):  # in turn, so that what else the machine does meets both
        for call in (bare, ours):
            begun = now()
            call()
            seconds[call].append(now() - begun)
    ratio = min(seconds[bare]) / min(seconds[ours])
    benchmark.extra_info["ratio"] = ratio
    benchmark.pedantic(lambda: None)
    print(f"{device}: features at {ratio:.3f} of a bare loop's rate, {count / min(seconds[ours]):.1f} images/s")
    assert ratio > 0.95
