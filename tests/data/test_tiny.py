"""Tiny-ImageNet: a download in its true layout, and the real pack where it is at hand."""

from __future__ import annotations

import io
import json
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.data import datasets
from ifsl_bench.data.pools import POOL_NAMES
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.published_splits import read_rows
from ifsl_bench.data.sets import tiny
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter
from tests.data.helpers import of_class, refused

JPEG = 2  # levels of 255 by which a quality of 95 moves the mean of an even colour
PACK = Path(__file__).parents[3] / "shared" / "data" / "tiny-imagenet-subset.zip"
SIDE_OF_POOL = {"base": "train_a", "novel/train": "train_b", "novel/val": "val", "novel/test": "test"}


def listed(side: str) -> list[str]:
    """The classes of a side, straight from the list."""
    return sorted(row["wnid"] for row in read_rows("tiny-tiered.csv") if row["split"] == side)


WNIDS = sorted(wnid for side in SIDE_OF_POOL.values() for wnid in listed(side))


def jpeg(wnid: str, number: int) -> bytes:
    """An image of one colour, under a row of black and white squares that no other image has."""
    colour = (int(wnid[1:]) * 7 % 251, number * 23 % 251, 90)
    grey = number % 5 == 3  # now and then, as in the download
    image = Image.new("L" if grey else "RGB", (64, 64), colour[0] if grey else colour)
    for bit in range(16):
        if (WNIDS.index(wnid) << 8 | number) >> bit & 1:
            image.paste(255 if grey else (255, 255, 255), (4 * bit, 0, 4 * bit + 4, 8))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=95)
    return out.getvalue()


def colour_of(wnid: str, number: int) -> np.ndarray:
    red, green = int(wnid[1:]) * 7 % 251, number * 23 % 251
    return np.array([red, red, red] if number % 5 == 3 else [red, green, 90])


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The public zip with ten images per class, their numbers with gaps: training images, the unused val and test
    folders, lists and boxes; members in random order."""
    wnids = random.Random(0).sample(WNIDS, len(WNIDS))
    files: dict[str, bytes] = {
        "wnids.txt": "\n".join(wnids).encode(),
        "val/val_annotations.txt": f"val_0.JPEG\t{wnids[0]}\t0\t0\t63\t63\n".encode(),
        "val/images/val_0.JPEG": jpeg(wnids[0], 1),
        "test/images/test_0.JPEG": jpeg(wnids[0], 2),
    }
    for wnid in wnids:
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"0\t0\t63\t63\n"
        for number in ORDER:
            files[f"train/{wnid}/images/{wnid}_{number}.JPEG"] = jpeg(wnid, number)
    path = tmp_path_factory.mktemp("tiny") / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in random.Random(1).sample(sorted(files), len(files)):
            archive.writestr(f"tiny-imagenet-200/{name}", files[name])
    return path


@pytest.fixture
def ten_a_class(monkeypatch):
    """The whole download has ten images per class here; everything else is as it is."""
    monkeypatch.setattr(tiny, "IMAGES_PER_CLASS", 10)


ORDER = [0, 2, 4, 8, 9, 10, 31, 77, 100, 250]  # by number: 10 after 9, not after 1
PARTS = {"base/train": ORDER[:8], "base/val": ORDER[8:9], "base/test": ORDER[9:]}


def check_class(pool, wnid: str, numbers: list[int]) -> None:
    colours = of_class(pool, wnid)[:, 16:].astype(int).mean((1, 2))  # [n, 3]
    np.testing.assert_allclose(colours, [colour_of(wnid, number) for number in numbers], atol=JPEG)


@pytest.mark.usefixtures("ten_a_class")
def test_the_whole_download(small, home, messages):
    dataset = prepare_dataset(home, "tiny", small, False, messages)
    assert dataset.shape == (64, 64, 3)
    assert not dataset.is_partial
    for name in POOL_NAMES:
        pool = dataset.pool(name)
        assert list(pool.class_names) == listed(SIDE_OF_POOL["base" if name.startswith("base") else name])
        for wnid in pool.class_names:
            check_class(pool, wnid, PARTS.get(name, ORDER))
    assert any("tiny-imagenet-200.zip: Tiny-ImageNet's download" in line for line in messages.said)


def test_a_part_of_the_download_is_refused_or_marked(small, home, messages):
    said = refused(home, "tiny", small, "does not give all of Tiny-ImageNet")
    assert "base/train should have 95 classes with 38,000 images and has 95 classes with 760 images" in said
    assert "novel/test should have 45 classes with 22,500 images and has 45 classes with 450 images" in said
    dataset = prepare_dataset(home, "tiny", small, False, messages, allow_partial=True)
    assert dataset.is_partial
    assert "has 45 classes with 450 images" in dataset.manifest["about"]["missing"][0]
    assert any("partial" in line for line in messages.warned)


def test_the_pack_takes_the_first_images_of_each_class(small, home, monkeypatch):
    most = {"base": 10, "novel/train": 3, "novel/val": 2, "novel/test": 4}
    monkeypatch.setattr(tiny.TinyPack, "max_images_per_class", most)
    monkeypatch.setattr(datasets, "find_dataset_source", lambda name: tiny.TinyPack())
    dataset = prepare_dataset(home, "tiny-pack", small, False, Reporter(), allow_partial=True)
    for name in ("novel/train", "novel/val", "novel/test"):
        pool = dataset.pool(name)
        for wnid in pool.class_names:
            check_class(pool, wnid, ORDER[: most[name]])


def repack(source: Path, target: Path, change) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            for path, content in change(name.removeprefix("tiny-imagenet-200/"), old.read(name)):
                new.writestr(path, content)
    return target


@pytest.mark.usefixtures("ten_a_class")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, c: [(p.replace("n01443537", "n99999999"), c)], "1 classes that are not Tiny-ImageNet's"),
        (lambda p, c: [(p, c)] if "n01443537_9." not in p else [(p, c), (p.replace("_9.", "_09."), c)],
         "n01443537_9.JPEG twice"),
        (lambda p, c: [(p, c)] if "n01443537/" not in p else [],
         "base/train should have 95 classes with 760 images and has 94 classes with 752 images"),
    ],
    ids=["class", "number", "missing"],
)  # fmt: skip
def test_what_is_wrong_is_named(small, tmp_path, change, message, home):
    refused(home, "tiny", repack(small, tmp_path / "data.zip", change), message)


@pytest.mark.slow("55,125 images")
@pytest.mark.skipif(not PACK.exists(), reason="the pack of real photographs is not here")
def test_the_real_pack(tmp_path):
    """All 55,125 images; some of them compared with Pillow, and the digests with those of the task file."""
    from ifsl_bench.experiments.workspace import PreparedTask, Workspace

    dataset = prepare_dataset(Paths.locate(tmp_path), "tiny-pack", PACK, False, Reporter(), allow_partial=True)
    task = packaged_tasks()["tiny-pack-1shot"]
    assert dataset.fingerprint == task.dataset.fingerprint
    assert dataset.is_partial
    counts = {name: (len(dataset.pool(name).class_names), len(dataset.pool(name))) for name in POOL_NAMES}
    assert counts == {"base/train": (95, 27_360), "base/val": (95, 3_420), "base/test": (95, 3_420),
                      "novel/train": (38, 6_840), "novel/val": (22, 3_960), "novel/test": (45, 10_125)}  # fmt: skip
    with zipfile.ZipFile(PACK) as archive:
        for name, first in (("base/train", 0), ("base/val", 288), ("base/test", 324), ("novel/test", 0)):
            pool = dataset.pool(name)
            assert list(pool.class_names) == listed(SIDE_OF_POOL["base" if "base" in name else name])
            for c in range(0, len(pool.class_names), 9):
                wnid, at = pool.class_names[c], c % 36
                with archive.open(f"tiny-imagenet-200/train/{wnid}/images/{wnid}_{first + at}.JPEG") as file:
                    expected = np.asarray(Image.open(file).convert("RGB"))
                np.testing.assert_array_equal(pool.images[pool.class_starts[c] + at], expected)
    duplicates = dataset.manifest["about"]["duplicates"]
    assert "n01945685_164" in json.dumps(duplicates["first"][0])
    assert "n01944390_66" in json.dumps(duplicates["first"][0])
    PreparedTask(task, "linear", 0, Workspace(Paths.locate(tmp_path))).check_digest()
