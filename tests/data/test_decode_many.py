"""Decoding many images: in threads and in processes the same comes out, and nothing is lost when a process is."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.common.files import create_array
from ifsl_bench.data.read import decode as one_module
from ifsl_bench.data.read import decode_many as module
from ifsl_bench.data.read import decode_workers as workers_module
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.decode import ImageSpec, decode
from ifsl_bench.data.read.decode_many import decode_into, refuse_bad, tree_items
from ifsl_bench.data.read.decode_workers import Workers, cores, decode_workers
from ifsl_bench.data.read.room import Room

EXACT = ImageSpec(24)


def picture(height: int = 24, width: int = 24, seed: int = 0) -> np.ndarray:
    """A colour image, uint8 [H, W, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(params=["threads", "processes"])
def workers(request):
    """None, or two processes."""
    if request.param == "threads":
        yield None
        return
    made = Workers(2)
    yield made
    made.end()
    assert all(worker.process.returncode is not None for worker in made.started)


@pytest.fixture
def array(tmp_path):
    """Makes uint8 [n, 24, 24, 3] in a file, full of sevens."""

    def make(n: int) -> np.memmap:
        out = create_array(tmp_path / f"{n}.npy", (n, 24, 24, 3), "uint8")
        out[:] = 7
        return out

    return make


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


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
    assert not (workers and workers.lost)


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
    """A process makes all of a chunk before it writes them: 8 MB, here two images."""
    done: list[int] = []
    items = [(i, "", encoded(picture(seed=i))) for i in range(8)]
    decode_into(np.zeros((8, 1300, 1300, 3), np.uint8), items, ImageSpec(1300, "stretch"), done.append)
    assert done == [2, 2, 2, 2]


def test_threads_hold_a_bounded_number_of_pixels_together(monkeypatch):
    class Watched(Room):
        most_held = 0

        @contextmanager
        def of(self, count):
            with super().of(count):
                self.most_held = max(self.most_held, self.most - self.left)
                yield

    room = Watched(2_000)
    monkeypatch.setattr(one_module, "_room", room)
    monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.setattr(module, "_CHUNK", 1)
    sizes = [(30, 30), (24, 24), (60, 60), (40, 20)] * 40  # of which one is larger than the room
    contents = [encoded(picture(*size, seed=i)) for i, size in enumerate(sizes)]
    out = np.zeros((len(sizes), 24, 24, 3), np.uint8)
    result = decode_into(out, [(i, "", content) for i, content in enumerate(contents)], ImageSpec(24, "stretch"))
    assert result.bad == []
    assert 900 < room.most_held <= 2_000
    assert room.left == 2_000
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


@pytest.mark.parametrize(("together", "extra", "here"), [(1, 3 << 20, [24 * 24]), (128, 0, [])])
def test_processes_leave_large_images_to_threads(monkeypatch, array, together, extra, here):
    """Those of many pixels, or many bytes, which threads decode within the room that they share."""
    held: list[int] = []

    class Watched(Room):
        @contextmanager
        def of(self, count):
            held.append(count)
            with super().of(count):
                yield

    monkeypatch.setattr(module, "_CHUNK", together)
    monkeypatch.setattr(one_module, "_room", Watched(1 << 24))
    large = encoded(np.zeros((1100, 1000, 3), np.uint8))
    small = [encoded(picture(seed=seed)) for seed in (0, 3)]
    contents = [small[0], large, small[1], small[0] + bytes(extra), large[:-200]]
    spec, out, workers = ImageSpec(24, "stretch"), array(5), Workers(2)
    result = decode_into(out, [(i, f"image {i}", content) for i, content in enumerate(contents)], spec, workers=workers)
    workers.end()
    assert sorted(held) == [*here, 1_100_000, 1_100_000]
    assert [row for row, _, _ in result.bad] == [4]
    for row in range(4):
        np.testing.assert_array_equal(out[row], decode(contents[row], spec))
    assert list(result.digests != 0) == [True, True, True, True, False]
    assert result.digests[0] == result.digests[3]


def test_what_libraries_print_is_no_answer(monkeypatch, array, capfd):
    noisy = """
import os, sys; sys.path[:] = sys.argv[2:]
from ifsl_bench.data.read import decode_workers as module
quiet = module.decode_rows
module.decode_rows = lambda *arguments: (print("noise"), os.write(1, b"noise"), quiet(*arguments))[-1]
module.serve(sys.argv[1])
"""
    monkeypatch.setattr(workers_module, "_SERVE", noisy)
    workers, out = Workers(1), array(3)
    items = [(i, f"image {i}", encoded(picture(seed=i))) for i in range(3)]
    decode_into(out, items, EXACT, workers=workers)
    workers.end()
    assert not workers.lost
    np.testing.assert_array_equal(out, np.stack([picture(seed=i) for i in range(3)]))
    assert "noise" in capfd.readouterr().err


@pytest.mark.parametrize("noise", ["hello", "Initialised", "N."])
def test_a_process_that_talks_nonsense_is_ended(monkeypatch, array, noise):
    """What an interpreter prints at its start comes before any answer. It must not write once it is given up."""
    start = f"import sys; sys.stdout.write('{noise}'); sys.stdout.flush(); "
    monkeypatch.setattr(workers_module, "_SERVE", start + workers_module._SERVE)
    contents = [encoded(np.full((1100, 1000, 3), 200, np.uint8)), *(encoded(picture(seed=i)) for i in range(1, 21))]
    workers, out, spec = Workers(2), array(21), ImageSpec(24, "stretch")
    decode_into(out, [(i, f"image {i}", content) for i, content in enumerate(contents)], spec, workers=workers)
    assert workers.lost
    assert any(worker.process.returncode is not None for worker in workers.started)
    workers.end()
    np.testing.assert_array_equal(out, np.stack([decode(content, spec) for content in contents]))


def test_what_a_process_raises_is_raised_here(array):
    """As in threads: here the file of the array is gone."""
    workers, out = Workers(1), array(3)
    Path(out.filename).unlink()
    with pytest.raises(FileNotFoundError, match=r"3\.npy"):
        decode_into(out, [(i, f"image {i}", encoded(picture())) for i in range(3)], EXACT, workers=workers)
    assert not workers.lost
    workers.end()


def test_a_process_without_memory_is_replaced_by_this_one(monkeypatch, array):
    poor = """
import sys; sys.path[:] = sys.argv[2:]
from ifsl_bench.data.read import decode_workers as module
def decode_rows(*_):
    raise MemoryError
module.decode_rows = decode_rows
module.serve(sys.argv[1])
"""
    monkeypatch.setattr(workers_module, "_SERVE", poor)
    workers, out = Workers(2), array(300)
    decode_into(out, [(i, f"image {i}", encoded(picture(seed=i))) for i in range(300)], EXACT, workers=workers)
    workers.end()
    assert workers.lost
    np.testing.assert_array_equal(out, np.stack([picture(seed=i) for i in range(300)]))


def test_a_part_of_an_array(workers, array):
    out = array(8)
    items = [(i, f"image {i}", encoded(picture(seed=i))) for i in range(3)]
    decode_into(out[5:], items, EXACT, workers=workers)
    np.testing.assert_array_equal(out[5:], np.stack([picture(seed=i) for i in range(3)]))
    assert (out[:5] == 7).all()


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a process does not learn that its parent is gone")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_an_orphan_does_not_write_into_the_next_import(tmp_path, name):
    """Killed in the middle of a batch that takes seconds; another file of the same name must stay as it is."""
    script = """
import numpy as np
from pathlib import Path
from ifsl_bench.data.read.decode import ImageSpec
from ifsl_bench.data.read.decode_many import decode_into
from ifsl_bench.data.read.decode_workers import Workers
from ifsl_bench.common.files import create_array
out, content, workers = create_array(Path("out.npy"), (256, 24, 24, 3), "uint8"), Path("i.png").read_bytes(), Workers(2)
print(*(worker.process.pid for worker in workers.started), flush=True)
decode_into(out, [(i, "", content) for i in range(256)], ImageSpec(24, "stretch"), workers=workers)
"""
    (tmp_path / "i.png").write_bytes(encoded(np.full((1000, 1000, 3), 9, np.uint8)))
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    orphans = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(1)
    assert parent.poll() is None
    parent.send_signal(getattr(signal, name))
    parent.communicate()
    assert all(map(alive, orphans)), "in the middle of a batch"
    (tmp_path / "out.npy").unlink()
    other = create_array(tmp_path / "out.npy", (100, 24, 24, 3), "uint8")
    size = (tmp_path / "out.npy").stat().st_size
    until = time.monotonic() + 30
    while any(map(alive, orphans)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(alive, orphans))
    assert not other.any()
    assert (tmp_path / "out.npy").stat().st_size == size


@pytest.mark.parametrize("which", [1, 2])
def test_a_dead_process_loses_nothing(which, array):
    """One of two, or both, killed in the middle: this process goes on alone, and what it has is right."""
    workers, out = Workers(2), array(400)

    def items():
        for row in range(400):
            if row == 200:
                for worker in workers.started[:which]:
                    worker.process.kill()
                    worker.process.wait()
            yield row, f"image {row}", encoded(picture(seed=row))

    result = decode_into(out, items(), EXACT, workers=workers)
    workers.end()
    assert workers.lost
    assert result.bad == []
    np.testing.assert_array_equal(out, np.stack([picture(seed=row) for row in range(400)]))
    assert len(set(result.digests.tolist())) == 400


def test_processes_are_started_where_they_pay(monkeypatch):
    monkeypatch.setattr(workers_module, "cores", lambda: 2)
    with decode_workers(workers_module.WORTH - 1) as few, decode_workers(workers_module.WORTH) as many:
        assert few is None
        assert many is not None
        assert many.count == len(many.started) == 2
    with pytest.raises(KeyboardInterrupt), decode_workers(workers_module.WORTH) as interrupted:
        raise KeyboardInterrupt
    assert all(worker.process.returncode == -signal.SIGKILL for worker in interrupted.started)
    monkeypatch.setattr(workers_module, "cores", lambda: 1)
    with decode_workers(1 << 20) as alone:
        assert alone is None
    monkeypatch.setattr(workers_module, "cores", lambda: 2)
    monkeypatch.setattr(spawn, "get_executable", lambda: "/nowhere/python")
    with decode_workers(1 << 20) as impossible:
        assert impossible is None
    monkeypatch.setattr(spawn, "get_executable", lambda: None)  # a program with Python inside
    with decode_workers(1 << 20) as unknown:
        assert unknown is None


SCRIPT = """
import signal, sys
import numpy as np
from pathlib import Path
from ifsl_bench.data.read import decode_workers as module
from ifsl_bench.data.read.decode import ImageSpec
from ifsl_bench.data.read.decode_many import decode_into
from ifsl_bench.common.files import create_array
content = Path("image.png").read_bytes()
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
module.cores = lambda: 2
out = create_array(Path("out.npy"), (100, 24, 24, 3), "uint8")
def items():
    row = 0
    while row < 100 or sys.argv[1] == "endless":
        yield row % 100, "image", content
        row += 1
with module.decode_workers(100_000) as workers:
    print(*(worker.process.pid for worker in workers.started), flush=True)
    decode_into(out, items(), ImageSpec(24), workers=workers)
print(workers.lost, (out == np.load("expected.npy")).all())
"""


@pytest.fixture
def folder(tmp_path):
    """A script without ``if __name__ == "__main__"``, among modules that would hide others if it were searched."""
    (tmp_path / "image.png").write_bytes(encoded(picture()))
    np.save(tmp_path / "expected.npy", picture())
    for name in ("pickle", "numpy", "PIL", "ifsl_bench"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/script.py").write_text(SCRIPT)
    return tmp_path


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "scripts/script.py", how]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_script_without_a_main_block(folder):
    out, errors = start(folder, "once").communicate(timeout=60)
    assert out.splitlines()[1:] == ["False True"], errors
    assert errors == ""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("after", [0.0, 1.0])
def test_processes_end_with_the_one_that_started_them(folder, name, after):
    """However it ends, Ctrl-C going to all that belongs to the terminal; at once or in the middle of the work."""
    parent = start(folder, "endless")
    try:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(after)
        assert all(map(alive, workers))
        (os.killpg if name == "SIGINT" else os.kill)(parent.pid, getattr(signal, name))
        _, errors = parent.communicate(timeout=20)
    finally:
        parent.kill()
    until = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(alive, workers))
    if name == "SIGINT":
        assert "KeyboardInterrupt" in errors  # of the script
        assert 'File "<string>"' not in errors  # which would be a process
    else:
        assert errors == ""
