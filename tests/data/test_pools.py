"""The form on disk: building, opening, verifying, refusing; and frozen features of one's own."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ifsl_bench.data.pools import POOL_NAMES, open_dataset, verify_checksums
from ifsl_bench.data.preparing.prepare import open_or_build, prepare_dataset
from ifsl_bench.data.writer import build_dataset
from ifsl_bench.protocols.tasks.task import DataSpec
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter
from tests.data.helpers import spoil


def make(folder, seed=0, sides=("a", "n", "v", "t"), shape=(4, 5, 3)):
    generator = np.random.default_rng(seed)
    arrays = {}

    def fill(writer):
        for pool in POOL_NAMES:
            side = sides[0] if pool.startswith("base") else sides[POOL_NAMES.index(pool) - 2]
            labels = np.repeat(np.arange(3), 4)
            arrays[pool] = generator.integers(0, 256, (12, *shape), dtype=np.uint8)
            with writer.write_pool(pool, labels, tuple(f"{side}{i}" for i in range(3)), shape) as out:
                out[:] = arrays[pool]

    return build_dataset(folder, "toy", "recipe 1", fill, {"source": "test"}), arrays


def test_round_trip(tmp_path):
    dataset, arrays = make(tmp_path / "toy")
    again = open_dataset(tmp_path / "toy")
    assert again.shape == (4, 5, 3)
    for pool, images in arrays.items():
        opened = again.pool(pool)
        assert isinstance(opened.images, np.memmap)
        np.testing.assert_array_equal(opened.images, images)
        assert opened.class_starts.tolist() == [0, 4, 8, 12]
        s = again.manifest["pools"][pool]["statistics"]
        np.testing.assert_allclose(s["mean"], images.mean((0, 1, 2)), rtol=0, atol=5.1e-7)  # six decimals
        np.testing.assert_allclose(s["std"], images.std((0, 1, 2)), rtol=0, atol=5.1e-7)
        assert (s["classes"], s["images"], s["fewest"], s["most"]) == (3, 12, 4, 4)
    verify_checksums(again)
    assert dataset.fingerprint == again.fingerprint


def test_fingerprint_is_of_the_content(tmp_path):
    changes = {"first": {}, "same": {}, "pixels": {"seed": 1}, "names": {"sides": ("a", "n", "v", "x")}}
    prints = {name: make(tmp_path / name, **change)[0].fingerprint for name, change in changes.items()}
    assert prints.pop("first") == prints["same"]
    assert len({*prints.values()}) == 3


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("base-test.images.npy", lambda path: path.write_bytes(path.read_bytes()[:-3]), ""),
        ("novel-val.labels.npy", lambda path: path.write_bytes(path.read_bytes()[:-3]), ""),
        ("novel-test.images.npy", lambda path: path.unlink(), " is missing"),
    ],
)
def test_a_truncated_or_missing_file_is_named_on_opening(tmp_path, file, damage, message):
    make(tmp_path / "toy")
    damage(tmp_path / "toy" / file)
    with pytest.raises(CorruptFile, match=re.escape(file) + message):
        open_dataset(tmp_path / "toy")


def test_a_changed_byte_is_named_by_verify(tmp_path):
    make(tmp_path / "toy")
    spoil(tmp_path / "toy" / "base-val.images.npy", -1)
    dataset = open_dataset(tmp_path / "toy")
    with pytest.raises(CorruptFile, match=r"base-val\.images\.npy"):
        verify_checksums(dataset)


def test_sides_must_be_disjoint(tmp_path):
    with pytest.raises(UserError, match="must be disjoint"):
        make(tmp_path / "toy", sides=("a", "n", "v", "a"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([1, 0], ("a", "b"), "must be 0 to 1 in order"),
        ([0, 2], ("a", "b", "c"), "must be 0 to 2 in order"),
        ([0, 1], ("a", "a"), "not unique"),
        ([], (), "at least once"),
    ],
)
def test_bad_pools_are_refused(tmp_path, labels, classes, message):
    def fill(writer):
        with writer.write_pool("base/train", np.array(labels, dtype=np.int64), classes, (2, 2, 1)):
            pass

    with pytest.raises(UserError, match=message):
        build_dataset(tmp_path / "toy", "toy", "r", fill, {})


def test_packaged_glyphs_are_the_ones_that_tasks_are_pinned_to(glyph_home):
    """The same bytes on every machine: the fingerprint in the task file is the one built here."""
    home = Paths.locate(glyph_home)
    verify_checksums(open_or_build(home, packaged_tasks()["glyphs-1shot"].dataset, Reporter()))
    with pytest.raises(UserError, match="pinned"):
        open_or_build(home, DataSpec(name="glyphs", fingerprint="0" * 64), Reporter())


def test_missing_data_say_how_to_get_them(tmp_path):
    home = Paths.locate(tmp_path)
    with pytest.raises(UserError, match="It needs an email to the authors"):
        open_or_build(home, DataSpec(name="rare", obtain="an email to the authors"), Reporter())
    with pytest.raises(UserError, match=r"unknown data set 'glyph'.*did you mean 'glyphs'"):
        prepare_dataset(home, "glyph", None, False, Reporter())
    with pytest.raises(UserError, match="is no name for a data set"):
        prepare_dataset(home, "../../escape", tmp_path, False, Reporter())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="needs no files"):
        prepare_dataset(home, "glyphs", tmp_path, False, Reporter())
