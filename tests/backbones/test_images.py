"""Images on their way into a network: augmentation against loops over single pixels, devices against the CPU."""

from __future__ import annotations

from contextlib import closing

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ifsl_bench.backbones.images import (
    DeviceBatchLoader,
    HostBatchLoader,
    apply_crops,
    apply_crops_on_device,
    draw_crops,
    fits_in_device_memory,
    plan_epoch,
)
from ifsl_bench.backbones.networks import PixelNormalisation
from ifsl_bench.data.pools import Pool
from ifsl_bench.protocols.tasks.task import DataSpec, Pretraining, Schedule

CPU = torch.device("cpu")
IMAGES = DataSpec(name="x", mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
SPEC = Pretraining(backbone="resnet18-gn", steps=10, schedule=Schedule(rate=0.1), crop_padding=2, flip=True)
PLAIN = msgspec.structs.replace(SPEC, crop_padding=0, flip=False)


def test_a_cut_is_pad_crop_mirror():
    pictures = torch.randint(1, 256, (40, 7, 9, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = apply_crops(pictures, draw_crops(40, 2, True, torch.Generator().manual_seed(5)))
    generator = torch.Generator().manual_seed(5)
    offsets = torch.randint(0, 5, (2, 40, 1), generator=generator)
    mirrored = torch.rand(40, 1, generator=generator) < 0.5
    assert 5 < mirrored.sum() < 35
    for i in range(40):
        padded = np.pad(pictures[i].numpy(), ((2, 2), (2, 2), (0, 0)))
        dy, dx = int(offsets[0, i]), int(offsets[1, i])
        cropped = padded[dy : dy + 7, dx : dx + 9]
        expected = cropped[:, ::-1] if mirrored[i] else cropped
        np.testing.assert_array_equal(out[i].numpy(), expected)


@pytest.mark.parametrize(("padding", "flip"), [(2, True), (9, True), (3, False), (0, True)])
def test_a_device_cuts_the_same_images_as_the_cpu(padding, flip):
    """Also crops that lie beside the image, all black."""
    pool = torch.randint(1, 256, (30, 7, 6, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = torch.randperm(30)[:20]
    crops = draw_crops(20, padding, flip, torch.Generator().manual_seed(3))
    expected = apply_crops(pool[rows], crops)
    assert torch.equal(apply_crops_on_device(pool, rows, crops), expected)


def pool(shape: tuple[int, ...] = (8, 7, 3)) -> Pool:
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(5), 6)
    images = generator.integers(0, 256, (30, *shape)).astype("uint8" if len(shape) == 3 else "float32")
    return Pool("base/train", images, labels, tuple("abcde"), np.arange(0, 31, 6))


def seen(feed, epoch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with closing(feed.load_batches(epoch)) as batches:
        return list(batches)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(
    ("shape", "spec"), [((8, 7, 3), SPEC), ((8, 7, 3), PLAIN), ((6,), PLAIN)], ids=["augmented", "plain", "features"]
)
def test_a_device_shows_the_network_what_the_cpu_does(shape, spec, resident):
    """Bit for bit, on a device that is the CPU."""
    images, normalise = pool(shape), PixelNormalisation(IMAGES if len(shape) == 3 else DataSpec(name="x"), shape, CPU)
    epoch = plan_epoch(images, spec, 3, 1, 8, 3)
    expected = seen(HostBatchLoader(images, normalise), epoch)
    batches = seen(DeviceBatchLoader(images, normalise, CPU, resident), epoch)
    assert [len(labels) for _, labels in batches] == [8, 8, 8]
    for (a, b), (c, d) in zip(batches, expected, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
        assert a.stride() == c.stride()


def test_epochs_and_seeds_differ():
    images = pool()
    drawn = [plan_epoch(images, SPEC, seed, epoch, 8, 3) for seed, epoch in ((3, 1), (3, 2), (4, 1))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not np.array_equal(drawn[a].rows_by_batch[0], drawn[b].rows_by_batch[0])
        assert not torch.equal(drawn[a].crops_by_batch[0], drawn[b].crops_by_batch[0])
    assert sorted(np.concatenate(plan_epoch(images, SPEC, 0, 0, 10, 3).rows_by_batch)) == list(range(30))


class Crossings(TorchDispatchMode):
    """Counts copies from the CPU to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        output = operation(*arguments, **(named or {}))
        sources = [a for a in arguments if isinstance(a, torch.Tensor)]
        if isinstance(output, torch.Tensor) and sources and output.device != CPU and sources[-1].device == CPU:
            self.count += 1
        return output


@pytest.mark.parametrize(("resident", "transfers"), [(True, 1), (False, 1 + 3)])
def test_transfers_of_an_epoch_are_one_and_one_a_step_where_the_images_are_not_there(resident, transfers):
    """On PyTorch's device without memory, ``meta``, on which a wait for a value is an error."""
    images, device = pool(), torch.device("meta")
    feed = DeviceBatchLoader(images, PixelNormalisation(IMAGES, (8, 7, 3), device), device, resident)
    with Crossings() as crossings:
        batches = seen(feed, plan_epoch(images, SPEC, 3, 1, 8, 3))
    assert [tuple(inputs.shape) for inputs, _ in batches] == [(8, 3, 8, 7)] * 3
    assert crossings.count == transfers


def test_images_stay_on_a_device_that_has_twice_the_room(monkeypatch):
    free = {"bytes": 200}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 10**9))
    cuda = torch.device("cuda", 0)
    assert fits_in_device_memory(100, cuda)
    assert not fits_in_device_memory(101, cuda)
