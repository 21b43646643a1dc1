"""Processes that decode images: nothing is lost with one of them, none outlives its parent, none is seen by Ctrl-C."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from PIL import Image

from ifsl_bench.common.arrays import create_array
from ifsl_bench.data.read import decode as one_module
from ifsl_bench.data.read import decode_many
from ifsl_bench.data.read import decode_workers as module
from ifsl_bench.data.read.budget import Budget
from ifsl_bench.data.read.decode import ImageSpec, decode
from ifsl_bench.data.read.decode_many import decode_into
from ifsl_bench.data.read.decode_workers import Workers, decode_workers

EXACT = ImageSpec(24)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="processes are looked up in /proc")


def picture(height: int = 24, width: int = 24, seed: int = 0) -> np.ndarray:
    """A colour image, uint8 [H, W, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def given(pictures: list[np.ndarray]) -> list[tuple[int, str, bytes]]:
    return [(i, f"image {i}", encoded(pixels)) for i, pixels in enumerate(pictures)]


@contextmanager
def processes(count: int):
    """Workers, which are gone in the end."""
    before = set(multiprocessing.active_children())
    workers = Workers(count)
    try:
        yield workers
    finally:
        workers.end()
    assert set(multiprocessing.active_children()) <= before


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def all_end(pids: list[int]) -> bool:
    """Whether processes end soon; if not, they do now."""
    until = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not left


@pytest.mark.parametrize(("together", "extra", "here"), [(1, 3 << 20, [24 * 24]), (128, 0, [])])
def test_processes_leave_large_images_to_threads(monkeypatch, together, extra, here):
    """Those of many pixels, or many bytes, which threads decode within the budget that they share."""
    held: list[int] = []

    class Watched(Budget):
        @contextmanager
        def of(self, count):
            held.append(count)
            with super().of(count):
                yield

    monkeypatch.setattr(decode_many, "_CHUNK", together)
    monkeypatch.setattr(one_module, "_pixels", Watched(1 << 24))
    large = encoded(np.zeros((1100, 1000, 3), np.uint8))
    small = [encoded(picture(seed=seed)) for seed in (0, 3)]
    contents = [small[0], large, small[1], small[0] + bytes(extra), large[:-200]]
    spec, out = ImageSpec(24, "stretch"), np.zeros((5, 24, 24, 3), np.uint8)
    items = [(i, f"image {i}", content) for i, content in enumerate(contents)]
    with processes(2) as workers:
        result = decode_into(out, items, spec, workers=workers)
    assert sorted(held) == [*here, 1_100_000, 1_100_000]
    assert [row for row, _, _ in result.bad] == [4]
    for row in range(4):
        np.testing.assert_array_equal(out[row], decode(contents[row], spec))
    assert list(result.digests != 0) == [True, True, True, True, False]
    assert result.digests[0] == result.digests[3]


class Unreadable:
    """Can be pickled, and raises when it is read."""

    def __reduce__(self):
        return int, ("no number",)


def noisy(decode_rows):
    return lambda *arguments: (print("noise", flush=True), os.write(1, b"noise"), decode_rows(*arguments))[-1]


def raising(error):
    def decode_rows(*_):
        raise error

    return decode_rows


def changed(how: str) -> bool:
    """In a worker: makes its decoding do something else."""
    quiet = module.decode_rows
    changes = {
        "noise": ("decode_rows", noisy(quiet)),
        "nonsense": ("_decode", lambda *_: Unreadable()),
        "no memory": ("decode_rows", raising(MemoryError())),
        "dies": ("decode_rows", lambda *_: os.kill(os.getpid(), 9)),
        "an error": ("decode_rows", raising(ZeroDivisionError("in the worker"))),
    }
    setattr(module, *changes[how])
    return True


def decoded_after(how: str, count: int = 300):
    """Whether a worker is given up that has been changed in this way; what is decoded has to be right."""
    pictures = [picture(seed=i) for i in range(count)]
    out = np.zeros((count, 24, 24, 3), np.uint8)
    with processes(2) as workers:
        for future in [workers.pool.submit(changed, how) for _ in range(20)]:
            future.result()
        result = decode_into(out, given(pictures), EXACT, workers=workers)
    np.testing.assert_array_equal(out, np.stack(pictures))
    assert result.bad == []
    assert len(set(result.digests.tolist())) == count
    return workers.lost


def test_what_libraries_print_is_no_answer(capfd):
    assert not decoded_after("noise")
    assert "noise" in capfd.readouterr().out


@pytest.mark.parametrize("how", ["nonsense", "no memory", "dies"])
def test_a_worker_that_gives_no_answer_is_replaced_by_this_process(how):
    assert decoded_after(how)


def test_what_a_worker_raises_is_raised_here():
    with pytest.raises(ZeroDivisionError, match="in the worker"):
        decoded_after("an error")


@pytest.mark.parametrize("which", [1, 2])
def test_a_dead_process_loses_nothing(which):
    """One of two, or both, killed in the middle: this process goes on alone, and what it has is right."""
    out = np.zeros((400, 24, 24, 3), np.uint8)
    with processes(2) as workers:

        def items():
            for row in range(400):
                if row == 200:
                    for child in multiprocessing.active_children()[:which]:
                        with suppress(ProcessLookupError):  # with the first one dead, loky ends the other
                            os.kill(child.pid, signal.SIGKILL)
                        child.join()
                yield row, f"image {row}", encoded(picture(seed=row))

        result = decode_into(out, items(), EXACT, workers=workers)
        assert workers.lost
    assert result.bad == []
    np.testing.assert_array_equal(out, np.stack([picture(seed=row) for row in range(400)]))


def test_processes_are_started_where_they_pay(monkeypatch):
    monkeypatch.setattr(module, "cores", lambda: 2)
    with decode_workers(module.WORTH - 1) as few, decode_workers(module.WORTH) as many:
        assert few is None
        assert many is not None
        assert many.count == len(multiprocessing.active_children()) == 2
    with pytest.raises(KeyboardInterrupt), decode_workers(module.WORTH):
        raise KeyboardInterrupt
    assert multiprocessing.active_children() == []
    monkeypatch.setattr(module, "cores", lambda: 1)
    with decode_workers(1 << 20) as alone:
        assert alone is None


@pytest.mark.parametrize("error", [OSError("no semaphores"), NotImplementedError("too few"), ImportError("none")])
def test_where_processes_cannot_be_started_threads_decode(monkeypatch, error):
    def refused(count):
        raise error

    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(module, "Workers", refused)
    with decode_workers(1 << 20) as workers:
        assert workers is None


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("executable", None), ("frozen", True)])
def test_a_program_with_python_inside_is_not_started_again(monkeypatch, name, value):
    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(sys, name, value, raising=False)
    with decode_workers(1 << 20) as workers:
        assert workers is None


def test_a_python_that_is_not_there_loses_nothing(monkeypatch):
    with processes(1):  # what the library starts once, before any of its processes
        pass
    pictures, out = [picture(seed=i) for i in range(100)], np.zeros((100, 24, 24, 3), np.uint8)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with processes(2) as workers:
        decode_into(out, given(pictures), EXACT, workers=workers)
    assert workers.lost
    np.testing.assert_array_equal(out, np.stack(pictures))


SCRIPT = """
import multiprocessing, signal, sys
import numpy as np
from pathlib import Path
from ifsl_bench.data.read import decode_workers as module
from ifsl_bench.data.read.decode import ImageSpec
from ifsl_bench.data.read.decode_many import decode_into
from ifsl_bench.common.arrays import create_array
content = Path("image.png").read_bytes()
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
module.cores = lambda: 2
def items():
    row = 0
    while row < 100 or sys.argv[1] == "endless":
        yield row % 100, "image", content
        row += 1
def decoded():
    out = create_array(Path("out.npy"), (100, 24, 24, 3), "uint8")
    with module.decode_workers(100_000) as workers:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        decode_into(out, items(), ImageSpec(24), workers=workers)
    print(workers and workers.lost, (out == np.load("expected.npy")).all(), flush=True)
if sys.argv[1] == "daemonic":
    daemon = multiprocessing.get_context("fork").Process(target=decoded, daemon=True)
    daemon.start()
    daemon.join()
else:
    decoded()
"""


@pytest.fixture
def folder(tmp_path):
    """A script without ``if __name__ == "__main__"``, among modules that would hide others if it were searched."""
    (tmp_path / "image.png").write_bytes(encoded(picture()))
    np.save(tmp_path / "expected.npy", picture())
    for name in ("pickle", "queue", "numpy", "PIL", "loky", "ifsl_bench"):
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


@pytest.mark.skipif(os.name != "posix", reason="the process is forked")
def test_a_daemonic_process_decodes_in_threads(folder):
    """As Dask's workers are, which may start no processes."""
    out, errors = start(folder, "daemonic").communicate(timeout=60)
    assert out.splitlines() == ["", "None True"]
    assert errors == ""


@needs_proc
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("after", [0.0, 1.0])
def test_processes_end_with_the_one_that_started_them(folder, name, after):
    """However it ends, Ctrl-C going to all that belongs to the terminal; at once or in the middle of the work."""
    parent = start(folder, "endless")
    try:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(after)
        assert len(workers) == 2
        assert all(map(alive, workers))
        (os.killpg if name == "SIGINT" else os.kill)(parent.pid, getattr(signal, name))
        parent.wait(timeout=20)
    finally:
        parent.kill()
        ended = all_end(workers)
    assert ended
    _, errors = parent.communicate(timeout=20)
    if name == "SIGINT":
        assert "KeyboardInterrupt" in errors  # of the script
        assert "popen_loky" not in errors  # which would be a process
        assert errors.count("Traceback") == 1
    else:
        assert errors == ""


@needs_proc
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_an_orphan_does_not_write_into_the_next_import(tmp_path, name):
    """Killed in the middle of a batch that takes seconds; another file of the same name must stay as it is."""
    script = """
import multiprocessing
from pathlib import Path
from ifsl_bench.data.read.decode import ImageSpec
from ifsl_bench.data.read.decode_many import decode_into
from ifsl_bench.data.read.decode_workers import Workers
from ifsl_bench.common.arrays import create_array
out, content, workers = create_array(Path("out.npy"), (256, 24, 24, 3), "uint8"), Path("i.png").read_bytes(), Workers(2)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
decode_into(out, [(i, "", content) for i in range(256)], ImageSpec(24, "stretch"), workers=workers)
"""
    (tmp_path / "i.png").write_bytes(encoded(np.full((1000, 1000, 3), 9, np.uint8)))
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    orphans = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(1)
    assert parent.poll() is None
    parent.send_signal(getattr(signal, name))
    parent.wait(timeout=20)
    (tmp_path / "out.npy").unlink()
    other = create_array(tmp_path / "out.npy", (100, 24, 24, 3), "uint8")
    size = (tmp_path / "out.npy").stat().st_size
    assert all_end(orphans)
    assert not other.any()
    assert (tmp_path / "out.npy").stat().st_size == size
