"""mini-ImageNet from its JPEGs: the held-out variant, and the classes and images of the session lists."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.published_splits import read_mapping_of_columns, read_rows, split_base_class_images
from ifsl_bench.data.sets import mini
from ifsl_bench.data.sets.mini import ORIGINAL_NAMES_FILE
from ifsl_bench.utils.errors import UserError
from tests.data.helpers import of_class, refused

LIST = list(read_rows(mini.SESSION_LISTS_FILE))
BASE = sorted({row["wnid"] for row in LIST if row["session"] == "0"})
NOVEL = sorted({row["wnid"] for row in LIST if row["session"] != "0"})
CLASSES = [*BASE[:2], *NOVEL[:2]]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    """The 600 images of two base and two novel classes of the session lists, each of one grey; in two folders."""
    root = tmp_path_factory.mktemp("photographs")
    for i, name in enumerate(
        name for name in read_mapping_of_columns(ORIGINAL_NAMES_FILE, "filename", "original") if name[:9] in CLASSES
    ):
        folder = root / ("images" if i % 2 else f"train/{name[:9]}")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (84, 84), grey(name)).save(folder / name)
    return root


def grey(name: str) -> int:
    return int(name[9:17]) % 251


def names_of(pool, wnid: str) -> list[int]:
    return of_class(pool, wnid)[:, 0, 0, 0].tolist()


def test_equal_images_across_training_and_test_are_where_the_manual_says():
    """Which images are equal was found by a checksum of all 60,000."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (line,) = (part for part in page.split("\n* ") if part.startswith("Eight pairs of mini-ImageNet's images"))
    names, roles = re.findall(r"n\d{16}\.jpg", line), {row["filename"]: row["role"] for row in LIST}
    assert len(set(names)) == 6
    assert set(names) <= set(read_mapping_of_columns(ORIGINAL_NAMES_FILE, "filename", "original"))
    assert [roles.get(name) for name in names] == ["test", "test", "test", "train", None, None]
    assert [name[:9] in BASE for name in names] == [True, True, True, True, False, False]


@pytest.mark.slow("2,400 photographs are written and read")
def test_sessions_take_the_images_of_the_lists_and_missing_ones_need_consent(home, photographs, messages):
    refused(home, "mini-imagenet-sessions", photographs, r"lacks 57,600 of the 60,000 images of mini-ImageNet \(n0")
    dataset = prepare_dataset(home, "mini-imagenet-sessions", photographs, False, messages, allow_partial=True)
    assert dataset.is_partial
    train, val, test, support, query = map(
        dataset.pool, ["base/train", "base/val", "base/test", "novel/support", "novel/test"]
    )
    for wnid in BASE[:2]:
        listed = {role: [row["filename"] for row in LIST if row["wnid"] == wnid and row["role"] == role]
                  for role in ("train", "test")}  # fmt: skip
        assert sorted(names_of(test, wnid)) == sorted(map(grey, listed["test"]))
        assert sorted(names_of(train, wnid) + names_of(val, wnid)) == sorted(map(grey, listed["train"]))
        assert len(names_of(val, wnid)) == 50
    for wnid in NOVEL[:2]:
        mine = [row for row in LIST if row["wnid"] == wnid]
        supports = [row["filename"] for row in mine if row["role"] == "train"]
        queries = [row["filename"] for row in mine if row["role"] == "test"]
        assert names_of(support, wnid)[:5] == list(map(grey, supports)), "the lists' own come first"
        assert sorted(names_of(query, wnid)) == sorted(map(grey, queries))
        everything = [
            name for name in read_mapping_of_columns(ORIGINAL_NAMES_FILE, "filename", "original") if name[:9] == wnid
        ]
        assert sorted(names_of(support, wnid) + names_of(query, wnid)) == sorted(map(grey, everything))


@pytest.mark.slow("2,400 photographs are written and read")
def test_the_held_out_variant_draws_a_classs_images_and_names_misshapen_ones(home, photographs, messages):
    train = [w for w in CLASSES if read_mapping_of_columns("mini-imagenet.csv", "wnid", "split")[w] == "train"]
    images = [
        name for name in read_mapping_of_columns(ORIGINAL_NAMES_FILE, "filename", "original") if name[:9] == train[0]
    ]
    misshapen = next(photographs.rglob(f"{NOVEL[0]}*.jpg"))
    content = misshapen.read_bytes()
    try:
        Image.new("L", (64, 84)).save(misshapen)
        dataset = prepare_dataset(home, "mini-imagenet-held-out", photographs, False, messages, allow_partial=True)
    finally:
        misshapen.write_bytes(content)
    assert any(misshapen.name in line and "84" in line for line in messages.warned)
    for pool, part in split_base_class_images(images, f"mini-imagenet-held-out:{train[0]}").items():
        assert names_of(dataset.pool(pool), train[0]) == list(map(grey, part))


def test_supports_have_the_classes_of_the_queries(home):
    from ifsl_bench.data.writer import build_dataset

    def fill(writer):
        for pool, classes in (("novel/test", ("a", "b")), ("novel/support", ("a", "c"))):
            with writer.write_pool(pool, np.array([0, 1]), classes, (2, 2, 3)):
                pass

    with pytest.raises(UserError, match="novel/support must have the classes of novel/test"):
        build_dataset(home.data / "odd", "odd", "1", fill, {})
