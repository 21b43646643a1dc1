"""Speed of all that images pass: ``pytest tests/benchmarks/test_image_speed.py --benchmark-enable -n 0``.

Ratios are to a bare loop in turns.
"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import time
import zipfile
from collections import Counter

import loky
import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from ifsl_bench.backbones.device import choose_device, choose_precision
from ifsl_bench.backbones.features import compute_features
from ifsl_bench.backbones.networks import make_backbone, make_head, to_channels_last
from ifsl_bench.backbones.trainer import PretrainingTrainer, pretrain
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.sets.folder import OwnOptions
from ifsl_bench.data.writer import build_dataset
from ifsl_bench.experiments.job import with_recipe
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter

DEVICE = choose_device("auto")
TASK = packaged_tasks()["tiny-pack-5shot"]
ROUNDS = 3


def synchronised(value: torch.Tensor) -> float:
    """A number from the device, so that all the work before it is done."""
    return float(value.sum())


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(benchmark, ours, bare, work: int) -> None:
    """Ours and the bare loop in turns, so that both meet the same machine; the best round of each counts."""
    times = [(seconds(ours), seconds(bare)) for _ in range(1 if benchmark.disabled else ROUNDS + 1)]
    mine, peer = (min(column) for column in zip(*times, strict=True))  # the first round warms up
    benchmark.pedantic(lambda: None)
    benchmark.extra_info.update(images_per_second=round(work / mine), ratio_to_bare_loop=round(peer / mine, 3))


@pytest.fixture
def photos(tmp_path, benchmark) -> Dataset:
    """Random images in the shape of the task's, enough for some steps."""
    generator = np.random.default_rng(0)
    classes, train = (8, 1) if benchmark.disabled else (95, 30)

    def fill(writer) -> None:
        for pool, each in (("base/train", train), ("base/val", 1)):
            labels = np.repeat(np.arange(classes), each)
            with writer.write_pool(pool, labels, tuple(map(str, range(classes))), (64, 64, 3)) as images:
                images[:] = generator.integers(0, 256, images.shape, dtype=np.uint8)

    return build_dataset(tmp_path / "photos", "photos", "random", fill, {})


def test_pretraining(benchmark, photos, tmp_path):
    """Goal 0.95 of a bare training step on one batch in memory."""
    steps, batch = (1, 8) if benchmark.disabled else (20, TASK.pretraining.batch)
    spec = msgspec.structs.replace(TASK.pretraining, steps=steps, batch=batch)
    task = msgspec.structs.replace(TASK, pretraining=spec)
    trainer = PretrainingTrainer(tmp_path / "a", task, photos, "linear", 0, DEVICE)
    pool = photos.pool("base/train")
    network = to_channels_last(make_backbone(spec.backbone, photos.shape), DEVICE)
    head = make_head("linear", network.features, len(pool.class_names)).to(DEVICE)
    parameters = [*network.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)
    precision = choose_precision(DEVICE)
    images = trainer.normalise(torch.from_numpy(pool.images[: spec.batch].copy()).to(DEVICE))
    labels = torch.from_numpy(pool.labels[: spec.batch].copy()).to(DEVICE)

    def bare() -> None:
        for _ in range(steps):
            with precision.autocast(DEVICE):
                features = network(images)
            loss = F.cross_entropy(head(features.float()), labels)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
        synchronised(loss.detach())

    def ours() -> None:
        trainer.info |= {"epoch": 0, "finished": False}
        trainer._measure_accuracy = lambda pool, batch: 0.0  # evaluation is no training step
        trainer.train(Reporter())
        synchronised(trainer.head.weight.detach())

    ratio(benchmark, ours, bare, steps * spec.batch)


SEEN = """
from itertools import groupby

import torch
import torch.nn.functional as F

from ifsl_bench import LinearHead, Recipe
from ifsl_bench.recipes.{module} import {name}


class Seen(Recipe):
    views = {name}.views

    def __init__(self, backbone, classes):
        super().__init__(backbone, classes)
        self.head = LinearHead(backbone.features, classes)

    def loss(self, views, labels, at):
        of_size = [torch.cat(list(group)) for _, group in groupby(views, key=lambda x: x.shape[-1])]
        logits = [self.head(self.features(x)) for x in of_size]
        return {{"loss": sum(F.cross_entropy(x, labels.repeat(len(x) // len(labels))) for x in logits)}}

    def classifier(self):
        return self.head
"""


@pytest.mark.parametrize(("module", "name"), [("closer", "Closer"), ("savc", "Savc")])
def test_training_with_the_views_of_a_recipe(benchmark, photos, tmp_path, module, name):
    """Goal 0.9 of a bare training step on as many images of the same sizes, in memory."""
    steps, batch = (1, 8) if benchmark.disabled else (4, 32)
    (tmp_path / "seen.py").write_text(SEEN.format(module=module, name=name))
    spec = msgspec.structs.replace(TASK.pretraining, steps=1, batch=batch)
    task = with_recipe(msgspec.structs.replace(TASK, pretraining=spec), str(tmp_path / "seen.py"))
    trainer = PretrainingTrainer(tmp_path / "a", task, photos, "linear", 0, DEVICE)
    trainer.steps = steps
    pool = photos.pool("base/train")
    network = to_channels_last(make_backbone(spec.backbone, photos.shape), DEVICE)
    head = make_head("linear", network.features, len(pool.class_names)).to(DEVICE)
    optimiser = torch.optim.SGD([*network.parameters(), *head.parameters()], lr=0.1, momentum=0.9, weight_decay=5e-4)
    precision = choose_precision(DEVICE)
    whole = trainer.normalise(torch.from_numpy(pool.images[:batch].copy()).to(DEVICE))
    labels = torch.from_numpy(pool.labels[:batch].copy()).to(DEVICE)
    sides = Counter(round(view.side * whole.shape[-1]) for view in trainer.recipe.views)
    batches = [whole[..., :side, :side].repeat(count, 1, 1, 1) for side, count in sides.items()]

    def bare() -> None:
        for _ in range(steps):
            loss = 0.0
            for images in batches:
                with precision.autocast(DEVICE):
                    features = network(images)
                loss = loss + F.cross_entropy(head(features.float()), labels.repeat(len(images) // batch))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
        synchronised(loss.detach())

    def ours() -> None:
        trainer.info |= {"epoch": 0, "finished": False}
        trainer._measure_accuracy = lambda pool, batch: 0.0  # evaluation is no training step
        trainer.train(Reporter())
        synchronised(trainer.head.weight.detach())

    ratio(benchmark, ours, bare, steps * batch * len(trainer.recipe.views))


def test_features(benchmark, photos, tmp_path):
    """Goal 0.9 of a bare forward loop on one batch in memory; 64x64 images."""
    home = Paths.locate(tmp_path / "home")
    task = msgspec.structs.replace(TASK, pretraining=msgspec.structs.replace(TASK.pretraining, steps=0))
    photos.manifest["pools"].pop("base/val")  # nothing to evaluate on
    pretrained = pretrain(home, task, photos, "linear", 0, DEVICE, Reporter())
    count = len(photos.pool("base/train"))
    batch = pretrained.normalise_images(torch.from_numpy(photos.pool("base/train").images[:256].copy()).to(DEVICE))
    rounds = iter(range(100))

    @torch.inference_mode()
    def bare() -> None:
        offset = 0
        while offset < count:
            out = pretrained.network(batch[: count - offset])
            offset += len(batch)
        synchronised(out)

    def ours() -> None:
        folder = Paths.locate(tmp_path / f"features-{next(rounds)}")
        compute_features(folder, task, photos, pretrained, "base/train", DEVICE, Reporter())

    ratio(benchmark, ours, bare, count)


DECODE = """
import io, pickle, sys
import numpy as np
from PIL import Image
contents, rounds = pickle.load(sys.stdin.buffer)
Image.open(io.BytesIO(contents[0])).load()
print("ready", flush=True)
sys.stdin.buffer.readline()
for _ in range(rounds):
    for content in contents:
        image = Image.open(io.BytesIO(content))
        if image.size != (64, 64):
            image.draft("RGB", (128, 128))
            side, middle = min(image.size), image.width / 2
            box = (middle - side / 2, 0, middle + side / 2, side)
            image = image.resize((64, 64), Image.Resampling.BICUBIC, box=box)
        np.asarray(image)
"""


@pytest.mark.parametrize("kind", ["thumbnails", "photos"])
def test_import(benchmark, tmp_path, kind):
    """An import of JPEG files to 64x64 against processes, one a core, that only decode and resize them from memory."""
    images, classes, size, quality = (200, 240, (64, 64), 75) if kind == "thumbnails" else (20, 200, (500, 375), 95)
    if benchmark.disabled:
        images, classes = 10, 40
    generator = np.random.default_rng(0)
    contents = []
    for _ in range(images):
        out = io.BytesIO()
        coarse = Image.fromarray(generator.integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=quality)
        contents.append(out.getvalue())
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for c in range(classes):
            for i, content in enumerate(contents):
                archive.writestr(f"photos/class {c}/{i}.JPEG", content)
    home, count = Paths.locate(tmp_path / "home"), loky.cpu_count()
    times: list[tuple[float, float]] = []
    for _ in range(1 if benchmark.disabled else ROUNDS + 1):
        ours = seconds(lambda: prepare_dataset(home, "photos", path, True, Reporter(), own=OwnOptions(size=64)))
        peers = [
            subprocess.Popen([sys.executable, "-c", DECODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(count)
        ]
        for i, peer in enumerate(peers):
            pickle.dump((contents, len(range(i, classes, count))), peer.stdin)
            peer.stdin.flush()
        assert [peer.stdout.readline() for peer in peers] == [b"ready\n"] * count

        def decode(peers=peers) -> None:
            for peer in peers:
                peer.stdin.write(b"go\n")
                peer.stdin.close()
            assert [peer.wait() for peer in peers] == [0] * len(peers)

        times.append((ours, seconds(decode)))
        for peer in peers:
            peer.stdout.close()
    mine, bare = (min(column) for column in zip(*times, strict=True))
    benchmark.pedantic(lambda: None)
    benchmark.extra_info.update(
        bytes_per_image=round(sum(map(len, contents)) / images),
        images_per_second=round(images * classes / mine),
        ratio_to_bare_decoding=round(bare / mine, 3),
    )
