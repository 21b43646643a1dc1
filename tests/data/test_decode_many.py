"""Decoding many images: in threads and in processes the same comes out, within bounds of memory."""

from __future__ import annotations

import io
import re
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.common.arrays import create_array
from ifsl_bench.data.read import decode as one_module
from ifsl_bench.data.read import decode_many as module
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.budget import Budget
from ifsl_bench.data.read.decode import ImageSpec, decode
from ifsl_bench.data.read.decode_many import decode_into, refuse_bad, tree_items
from ifsl_bench.data.read.decode_workers import Workers, cores

EXACT = ImageSpec(24)


def picture(height: int = 24, width: int = 24, seed: int = 0) -> np.ndarray:
    """A colour image, uint8 [H, W, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def processes():
    made = Workers(2)
    yield made
    made.end()
    assert not made.lost


@pytest.fixture(params=["threads", "processes"])
def workers(request):
    return request.getfixturevalue("processes") if request.param == "processes" else None


@pytest.fixture
def array(tmp_path):
    """Makes uint8 [n, 24, 24, 3] in a file, full of sevens."""

    def make(n: int) -> np.memmap:
        out = create_array(tmp_path / f"{n}.npy", (n, 24, 24, 3), "uint8")
        out[:] = 7
        return out

    return make


def test_many_images_into_rows_in_any_order(workers, array):
    pictures = [picture(seed=i) for i in range(150)]
    pictures[77] = pictures[12]
    rows = np.random.default_rng(0).permutation(150)
    out, done = array(150), []
    items = [(int(row), f"image {row}", encoded(pictures[row])) for row in rows]
    items[3] = (int(rows[3]), f"image {rows[3]}", lambda content=items[3][2]: content)
    result = decode_into(out, iter(items), EXACT, done.append, workers)
    np.testing.assert_array_equal(out, np.stack(pictures))
    assert sum(done) == 150
    assert result.bytes_read == sum(len(encoded(p)) for p in pictures)
    same = {(i, j) for i in range(150) for j in range(i) if result.digests[i] == result.digests[j]}
    assert same == {(77, 12)}
    assert (np.load(out.filename) == out).all()


@pytest.mark.parametrize("cores", [2, 64])
def test_encoded_images_in_memory_are_bounded_in_bytes(monkeypatch, cores):
    """300 images of 4 MB each (a picture with something behind it); those given out and not yet done are counted."""
    monkeypatch.setattr(module, "cores", lambda: cores)
    content = encoded(picture()) + bytes(1 << 22)
    out, given, done, most = np.zeros((300, 24, 24, 3), np.uint8), 0, 0, 0

    def images():
        nonlocal given, most
        for row in range(len(out)):
            given += 1
            most = max(most, given - done)
            yield row, f"image {row}", content

    def advance(count: int) -> None:
        nonlocal done
        done += count

    result = decode_into(out, images(), EXACT, advance)
    assert (done, result.bad) == (300, [])
    assert (out == picture()).all()
    assert most * len(content) <= 1 << 28


def test_files_read_by_threads_are_bounded_in_bytes():
    """60 of 4 MB each, of which two threads hold one and what it was appended to."""
    content, out = encoded(picture()), np.zeros((60, 24, 24, 3), np.uint8)
    tracemalloc.start()
    try:
        result = decode_into(out, [(i, "", lambda: content + bytes(1 << 22)) for i in range(60)], EXACT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.bad == []
    assert peak < (cores() + 1) * (10 << 20)


def test_large_results_are_made_few_at_a_time():
    """A process makes all of a chunk before it hands them over: 8 MB, here two images."""
    done: list[int] = []
    items = [(i, "", encoded(picture(seed=i))) for i in range(8)]
    decode_into(np.zeros((8, 1300, 1300, 3), np.uint8), items, ImageSpec(1300, "stretch"), done.append)
    assert done == [2, 2, 2, 2]


def test_threads_hold_a_bounded_number_of_pixels_together(monkeypatch):
    class Watched(Budget):
        most_held = 0

        @contextmanager
        def of(self, count):
            with super().of(count):
                self.most_held = max(self.most_held, self.most - self.left)
                yield

    budget = Watched(2_000)
    monkeypatch.setattr(one_module, "_pixels", budget)
    monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.setattr(module, "_CHUNK", 1)
    sizes = [(30, 30), (24, 24), (60, 60), (40, 20)] * 40  # of which one is larger than the budget
    contents = [encoded(picture(*size, seed=i)) for i, size in enumerate(sizes)]
    out = np.zeros((len(sizes), 24, 24, 3), np.uint8)
    result = decode_into(out, [(i, "", content) for i, content in enumerate(contents)], ImageSpec(24, "stretch"))
    assert result.bad == []
    assert 900 < budget.most_held <= 2_000
    assert budget.left == 2_000
    for row, content in enumerate(contents):
        np.testing.assert_array_equal(out[row], decode(content, ImageSpec(24, "stretch")))


def test_bad_images_are_listed_by_row_and_name(workers, array):
    items = [(i, f"image {i}", encoded(picture(seed=i)) if i % 40 else b"<html>") for i in range(100)]
    out = array(100)
    result = decode_into(out, items, EXACT, workers=workers)
    assert [(row, name) for row, name, _ in result.bad] == [(0, "image 0"), (40, "image 40"), (80, "image 80")]
    assert not out[[0, 40, 80]].any()
    assert not result.digests[[0, 40, 80]].any()
    text = str(refuse_bad([(i, f"image {i}", "why") for i in range(5)], 1000))
    assert text.startswith("5 of 1,000 images cannot be used: image 0: why; image 1: why; image 2: why; and 2 more.")


def test_a_file_that_cannot_be_read_is_a_bad_image(tmp_path, workers, array):
    """One is cut, one removed, after they were listed."""
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.png").write_bytes(encoded(picture(seed=i)))
    with open_tree(folder) as tree:
        paths = [entry.path for entry in tree.entries]
        (folder / "1.png").write_bytes(b"half")
        (folder / "2.png").unlink()
        out = array(4)
        result = decode_into(out, tree_items(tree, paths), EXACT, workers=workers)
    cut, gone = result.bad
    assert cut[:2] == (1, str(folder / "1.png"))
    assert re.fullmatch(r"it is cut short: 4 of [\d,]+ bytes are there", cut[2])
    assert gone == (2, str(folder / "2.png"), "No such file or directory")
    assert not out[1:3].any()
    np.testing.assert_array_equal(out[[0, 3]], [picture(seed=0), picture(seed=3)])


def test_an_error_in_reading_stops_at_once(workers, array):
    def fail() -> bytes:
        raise OSError("gone")

    def endless():
        yield 0, "image 0", fail
        while True:
            yield 1, "image 1", encoded(picture())

    with pytest.raises(OSError, match="gone"):
        decode_into(array(2), endless(), EXACT, workers=workers)


def test_a_part_of_an_array(workers, array):
    out = array(8)
    items = [(i, f"image {i}", encoded(picture(seed=i))) for i in range(3)]
    decode_into(out[5:], items, EXACT, workers=workers)
    np.testing.assert_array_equal(out[5:], np.stack([picture(seed=i) for i in range(3)]))
    assert (out[:5] == 7).all()
