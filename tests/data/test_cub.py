"""CUB-200-2011 from its archive, written small in its true layout."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.published_splits import read_rows
from ifsl_bench.data.sets import cub
from ifsl_bench.data.source import PoolSize
from tests.data.helpers import of_class, refused
from tests.data.test_archive import add_files

LISTED = list(read_rows("cub.csv"))
SIDES = {row["class"]: row["split"] for row in LISTED}
EACH = 10
COUNTS = {
    "base/train": PoolSize(100, 800), "base/val": PoolSize(100, 100), "base/test": PoolSize(100, 100),
    "novel/val": PoolSize(50, 500), "novel/test": PoolSize(50, 500),
}  # fmt: skip


def colour(name: str, number: int) -> tuple[int, int, int]:
    return (int(name[:3]), 20 * number, 37 * int(name[:3]) % 256)


def photograph(name: str, number: int) -> bytes:
    """One colour, and neither square nor of one shape, as in the download."""
    out = io.BytesIO()
    image = Image.new("RGB", (20 + number, 12), colour(name, number))
    if number == 7:
        image = image.convert("L")  # a few are greyscale
    image.save(out, "JPEG", quality=95)
    return out.getvalue()


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """The download, in random order; with files on the way to the photographs too."""
    files = {
        "attributes.txt": b"1 has_bill_shape::curved_(up_or_down)\n",
        "CUB_200_2011/classes.txt": b"1 001.Black_footed_Albatross\n",
        "CUB_200_2011/parts/parts.txt": b"1 back\n",
    }
    for name in SIDES:
        bird = name[4:].title()
        for number in range(EACH):
            files[f"CUB_200_2011/images/{name}/{bird}_{number:04d}_{9000 - number}.jpg"] = photograph(name, number)
    path = tmp_path_factory.mktemp("cub") / "CUB_200_2011.tgz"
    with tarfile.open(path, "w:gz", compresslevel=1) as packed:
        add_files(packed, {name: files[name] for name in random.Random(0).sample(sorted(files), len(files))})
    return path


@pytest.fixture(scope="module")
def unpacked(archive, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as packed:
        packed.extractall(folder)
    return folder / "CUB_200_2011"


@pytest.fixture
def small(monkeypatch):
    """The counts of these small files take the place of the true ones."""
    monkeypatch.setattr(cub, "POOL_COUNTS", COUNTS)


def test_the_list_is_that_of_chen_et_al():
    """Their rule, over the classes in order: base, validation, base, novel, and so on."""
    assert [int(name[:3]) for name in SIDES] == list(range(1, 201))
    for i, side in enumerate(SIDES.values()):
        assert side == {0: "train", 1: "val", 2: "train", 3: "test"}[i % 4]


def test_the_counts_follow_from_the_images_of_each_class():
    images = {side: [int(row["images"]) for row in LISTED if row["split"] == side] for side in ("train", "val", "test")}
    assert sum(map(sum, images.values())) == 11_788  # as published
    train, val = sum(n * 8 // 10 for n in images["train"]), sum(n // 10 for n in images["train"])
    assert {pool: (c.n_classes, c.n_images) for pool, c in cub.POOL_COUNTS.items()} == {
        "base/train": (100, train), "base/val": (100, val), "base/test": (100, sum(images["train"]) - train - val),
        "novel/val": (50, sum(images["val"])), "novel/test": (50, sum(images["test"])),
    }  # fmt: skip


def check(dataset, size: int) -> None:
    assert dataset.shape == (size, size, 3)
    image_numbers: dict[str, list[int]] = {}
    for name, count in COUNTS.items():
        pool = dataset.pool(name)
        side = "train" if name.startswith("base") else name.removeprefix("novel/")
        assert list(pool.class_names) == [c for c in SIDES if SIDES[c] == side]
        assert (len(pool.class_names), len(pool)) == (count.n_classes, count.n_images)
        for cls in pool.class_names:
            colours = of_class(pool, cls).astype(int).mean((1, 2))  # [n, 3]
            expected = np.array([colour(cls, number) for number in range(EACH)])
            expected[7] = expected[7] @ [0.299, 0.587, 0.114]
            distance = np.abs(colours[:, None] - expected[None]).max(-1)  # [n, EACH]
            assert (distance.min(1) < 4).all()
            numbers = distance.argmin(1).tolist()
            assert numbers == sorted(numbers)  # by name
            image_numbers.setdefault(cls, []).extend(numbers)
    assert all(sorted(numbers) == list(range(EACH)) for numbers in image_numbers.values())  # each once, over the pools


@pytest.mark.slow("11,788 images are made and read")
@pytest.mark.parametrize(
    ("name", "size", "source"),
    [("cub", 84, lambda archive, unpacked: archive), ("cub", 84, lambda archive, unpacked: unpacked),
     ("cub-64", 64, lambda archive, unpacked: unpacked / "images")],
    ids=["archive", "folder", "its images alone"],
)  # fmt: skip
def test_the_download_makes_the_pools(name, size, source, archive, unpacked, home, small, messages):
    dataset = prepare_dataset(home, name, source(archive, unpacked), False, messages)
    check(dataset, size)
    assert not dataset.is_partial
    assert any("photographs of CUB-200-2011" in line for line in messages.said)


def test_whole_photographs_are_stretched(tmp_path, home, messages):
    """The left quarter is black and the rest white; in a crop of the middle, all would be white."""
    image = Image.new("RGB", (200, 50))
    image.paste((255, 255, 255), (50, 0, 200, 50))
    for name, count in zip(SIDES, (EACH, 1, 0, 1), strict=False):  # a base class, and one for each other pool
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(count):
            image.save(tmp_path / "images" / name / f"a_{number}.jpg", quality=95)
    dataset = prepare_dataset(home, "cub", tmp_path / "images", False, messages, allow_partial=True)
    first = dataset.pool("base/train").images[0][:, :, 0].astype(int)
    assert (first[:, :18] < 40).all()  # a quarter of 84 is 21
    assert (first[:, 24:] > 215).all()


def test_wrong_folders_are_told(unpacked, home, tmp_path):
    (folder := tmp_path / "images").mkdir()
    for path in (unpacked / "images").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "201.Dodo").mkdir()
    (folder / "201.Dodo" / "dodo_0001_1.jpg").write_bytes(photograph("001.", 1))
    refused(home, "cub", folder, r"1 classes that are not CUB-200-2011's \(201\.Dodo\)")
    (folder / "201.Dodo" / "dodo_0001_1.jpg").unlink()
    (folder / "cropped").symlink_to(unpacked / "images")
    refused(home, "cub", folder, "twice, .*give the folder of the images alone")
    refused(home, "cub", unpacked / "parts", "has none of the forms of data set 'cub'")
    refused(home, "tiny", unpacked, "which makes data set 'cub' .* or 'cub-64'")
