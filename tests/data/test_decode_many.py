"""Decoding many images: each comes out in its row, within bounds of memory; what cannot be used is named."""

from __future__ import annotations

import re
from contextlib import contextmanager

import numpy as np
import pytest

from ifsl_bench.data.read import decode as one_module
from ifsl_bench.data.read import decode_many as module
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.decode import ImageSpec, MemorySemaphore, decode
from ifsl_bench.data.read.decode_many import decode_into, tree_items
from ifsl_bench.utils.serialization import create_array
from tests.data.test_decode import EXACT, encoded, picture


def item(row: int, content: bytes):
    return row, f"image {row}", lambda: content


@pytest.fixture
def array(tmp_path):
    """Makes uint8 [n, 24, 24, 3] in a file, full of sevens."""

    def make(n: int) -> np.memmap:
        out = create_array(tmp_path / f"{n}.npy", (n, 24, 24, 3), "uint8")
        out[:] = 7
        return out

    return make


def test_many_images_into_rows_in_any_order(array):
    pictures = [picture(seed=i) for i in range(150)]
    pictures[77] = pictures[12]
    out, progress = array(160), []
    items = [item(int(row), encoded(pictures[row])) for row in np.random.default_rng(0).permutation(150)]
    result = decode_into(out[10:], iter(items), EXACT, progress.append)
    np.testing.assert_array_equal(out[10:], np.stack(pictures))
    assert (out[:10] == 7).all()
    assert sum(progress) == 150
    assert result.bytes_read == sum(len(encoded(p)) for p in pictures)
    same = {(i, j) for i in range(150) for j in range(i) if result.digests[i] == result.digests[j]}
    assert same == {(77, 12)}
    assert (np.load(out.filename) == out).all()


def test_encoded_images_in_memory_are_few(traced):
    """60 of 4 MB each (a picture with something behind it), of which two threads hold one and what it was added to."""
    out = np.zeros((60, 24, 24, 3), np.uint8)
    content = encoded(picture())
    with traced() as memory:
        result = decode_into(out, [(i, "", lambda: content + bytes(1 << 22)) for i in range(60)], EXACT)
    assert result.bad == []
    assert (out == picture()).all()
    assert memory.peak < (module.loky.cpu_count() + 1) * (10 << 20)


def test_threads_hold_a_bounded_number_of_pixels_together(monkeypatch):
    class Watched(MemorySemaphore):
        most_held = 0

        @contextmanager
        def of(self, count):
            with super().of(count):
                self.most_held = max(self.most_held, self.most - self.available)
                yield

    budget = Watched(2_000)
    monkeypatch.setattr(one_module, "_pixels", budget)
    monkeypatch.setattr(module.loky, "cpu_count", lambda: 8)
    monkeypatch.setattr(module, "_CHUNK", 1)
    sizes = [(30, 30), (24, 24), (60, 60), (40, 20)] * 40  # of which one is larger than the budget
    contents = [encoded(picture(*size, seed=i)) for i, size in enumerate(sizes)]
    out = np.zeros((len(sizes), 24, 24, 3), np.uint8)
    result = decode_into(out, map(item, range(len(sizes)), contents), ImageSpec(24, "stretch"))
    assert result.bad == []
    assert (result.enlarged, result.smallest) == (40, 20)
    assert 900 < budget.most_held <= 2_000
    assert budget.available == 2_000
    for row, content in enumerate(contents):
        np.testing.assert_array_equal(out[row], decode(content, ImageSpec(24, "stretch"))[0])


def test_bad_images_are_listed_by_row_and_name(tmp_path, array):
    """One is no image; one is cut and one removed, after they were listed."""
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.png").write_bytes(encoded(picture(seed=i)) if i else b"<html>")
    with open_tree(folder) as tree:
        paths = [entry.path for entry in tree.entries]
        (folder / "1.png").write_bytes(b"half")
        (folder / "2.png").unlink()
        out = array(4)
        result = decode_into(out, tree_items(tree, paths), EXACT)
    assert [(row, name) for row, name, _ in result.bad] == [(row, str(folder / f"{row}.png")) for row in range(3)]
    page, cut_file, missing_file = (reason for *_, reason in result.bad)
    assert "an HTML page" in page
    assert re.fullmatch(r"it is cut short: 4 of [\d,]+ bytes are there", cut_file)
    assert missing_file == "No such file or directory"
    assert not out[:3].any()
    assert not result.digests[:3].any()
    np.testing.assert_array_equal(out[3], picture(seed=3))


def test_an_error_in_reading_stops_at_once(array):
    def fail() -> bytes:
        raise OSError("gone")

    def endless():
        yield 0, "image 0", fail
        while True:
            yield item(1, encoded(picture()))

    with pytest.raises(OSError, match="gone"):
        decode_into(array(2), endless(), EXACT)
