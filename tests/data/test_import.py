"""The framework of imports: what is recognised, how counts are compared, interruption and resumption, memory."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench import data_commands, registry
from ifsl_bench.data import image_pools
from ifsl_bench.data.archive import Tree
from ifsl_bench.data.counts import Count, differences
from ifsl_bench.data.decode import ImageSpec
from ifsl_bench.data.pools import POOLS, verify
from ifsl_bench.data.prepare import prepare
from ifsl_bench.data.source import DatasetSource, Form, Import
from ifsl_bench.errors import UserError
from ifsl_bench.reporter import LogReporter, Reporter
from ifsl_bench.store import Home

SIDES = {"base": ("a", "b"), "novel/train": ("c",), "novel/val": ("d",), "novel/test": ("e",)}
PER_CLASS = 4


class Toy(Form):
    """Files ``<class>/<number>.png``; four a class are the whole."""

    title = "toy files (<class>/<number>.png)"

    def recognises(self, tree: Tree) -> bool:
        return "toy.txt" in tree.by_path

    def build(self, to: Import) -> None:
        pools = {}
        for pool in POOLS:
            classes = SIDES["base" if pool.startswith("base") else pool]
            pools[pool] = {c: [e.path for e in to.files.entries if e.path.startswith(f"{pool}/{c}/")] for c in classes}
        expected = {pool: Count(len(files), PER_CLASS * len(files)) for pool, files in pools.items()}
        to.check_counts("the toys", expected, image_pools.count_files(pools))
        image_pools.import_images(to, pools, ImageSpec(8))


class ToySource(DatasetSource):
    name = "toy"
    summary = "toys"
    forms = (Toy(),)

    def recipe(self) -> str:
        return "toy 1"


class OtherSource(ToySource):
    name = "other-toy"
    forms = ()


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """A folder of toys, and the data sets ``toy`` and ``other-toy`` as if a package had registered them."""
    generator = np.random.default_rng(0)
    for pool in POOLS:
        for c in SIDES["base" if pool.startswith("base") else pool]:
            (tmp_path / "toys" / pool / c).mkdir(parents=True)
            for i in range(PER_CLASS):
                image = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                image.save(tmp_path / "toys" / pool / c / f"{i}.png")
    (tmp_path / "toys" / "toy.txt").write_text("")
    sources = {"toy": ToySource, "other-toy": OtherSource}
    monkeypatch.setattr(registry, "names", lambda group: dict.fromkeys(sources))
    monkeypatch.setattr(registry, "load", lambda group, name: registry.Plugin(name, "tests", sources[name]))
    monkeypatch.setattr(registry, "dataset_source", lambda name: sources[name]())
    return tmp_path / "toys"


def test_pools_hold_the_pixels(toy, tmp_path):
    log = io.StringIO()
    dataset = prepare(Home.locate(tmp_path / "home"), "toy", toy, False, LogReporter(log))
    for name in POOLS:
        pool = dataset.pool(name)
        paths = sorted((toy / name).glob("*/*.png"))
        np.testing.assert_array_equal(pool.images, np.stack([np.asarray(Image.open(p)) for p in paths]))
    verify(dataset)
    assert dataset.manifest["about"]["form"] == Toy.title
    assert f"{toy}: {Toy.title} (folder)" in log.getvalue()
    assert "toy: 36 images, 0.0 MB, in" in log.getvalue()
    assert not [p for p in dataset.folder.iterdir() if "side" in p.name or "progress" in p.name]


def test_files_of_another_data_set_are_recognised(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(OtherSource, "forms", (type("Never", (Toy,), {"recognises": lambda self, tree: False})(),))
    with pytest.raises(UserError, match=r"makes data set 'toy' .*ifsl-bench data prepare toy --from"):
        prepare(Home.locate(tmp_path / "home"), "other-toy", toy, False, Reporter())


def test_unknown_files_are_described(toy, tmp_path):
    (toy / "toy.txt").unlink()
    with pytest.raises(UserError, match=r"it holds base/test/a/0\.png, .*\.\.\. Known are: toy files"):
        prepare(Home.locate(tmp_path / "home"), "toy", toy, False, Reporter())


def test_counts_stand_side_by_side():
    expected = {"base/train": Count(2, 1000), "novel/val": Count(1, 5)}
    assert differences(expected, dict(expected)) == []
    found = {"base/train": Count(2, 999), "novel/test": Count(3, 3)}
    assert differences(expected, found) == [
        "base/train should have 2 classes with 1,000 images and has 2 classes with 999 images",
        "novel/val should have 1 classes with 5 images and has 0 classes with 0 images",
        "novel/test should have 0 classes with 0 images and has 3 classes with 3 images",
    ]


def test_partial_data_say_so_everywhere(toy, tmp_path):
    home = Home.locate(tmp_path / "home")
    (toy / "novel/val/d/3.png").unlink()
    with pytest.raises(
        UserError, match="novel/val should have 1 classes with 4 images and has 1 classes with 3 images"
    ):
        prepare(home, "toy", toy, False, Reporter())
    dataset = prepare(home, "toy", toy, False, Reporter(), allow_partial=True)
    assert dataset.partial
    listed = next(row for row in data_commands.listing(home) if row["data set"] == "toy")
    assert listed["state"] == "prepared, partial"
    assert "partial" in data_commands.statistics(home, "toy", Reporter())[0][0]
    log = io.StringIO()
    prepare(home, "toy", toy, False, LogReporter(log), allow_partial=True)
    assert "toy is prepared already (partial)" in log.getvalue()


def _interrupted_once(monkeypatch, at: int) -> list[int]:
    """Makes the decoding of one pool end by Ctrl-C; returns the list of the sizes of pools as they are decoded."""
    decoded: list[int] = []
    original = image_pools.decode_into

    def counting(out, *arguments):
        decoded.append(len(out))
        if len(decoded) == at:
            raise KeyboardInterrupt
        return original(out, *arguments)

    monkeypatch.setattr(image_pools, "decode_into", counting)
    return decoded


def test_an_interrupted_import_goes_on(toy, tmp_path, monkeypatch):
    """Stopped in the third pool: nothing is there, and the next run decodes the last four pools alone."""
    home = Home.locate(tmp_path / "home")
    whole = prepare(Home.locate(tmp_path / "whole"), "toy", toy, False, Reporter())
    decoded = _interrupted_once(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        prepare(home, "toy", toy, False, Reporter())
    assert not (home.data / "toy").exists()
    assert next(row for row in data_commands.listing(home) if row["data set"] == "toy")["state"] == "import interrupted"
    log = io.StringIO()
    dataset = prepare(home, "toy", toy, False, LogReporter(log))
    assert len(decoded) == 3 + 4
    assert "going on with an interrupted import; complete are base/train, base/val" in log.getvalue()
    assert "importing 36 images (resumed at 16 of 36)" in log.getvalue()
    assert "toy: 20 images" in log.getvalue(), "the speed of this run"
    assert dataset.fingerprint == whole.fingerprint
    assert dataset.manifest["pools"] == whole.manifest["pools"]
    assert [p.name for p in home.data.iterdir() if p.suffix != ".lock"] == ["toy"]


@pytest.mark.parametrize("change", ["files", "damage", "consent"])
def test_an_interrupted_import_of_something_else_starts_anew(toy, tmp_path, monkeypatch, change):
    home = Home.locate(tmp_path / "home")
    decoded = _interrupted_once(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        prepare(home, "toy", toy, False, Reporter())
    partial = home.data / ".partial-toy"
    if change == "files":
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(toy / "base/train/a/0.png")
    elif change == "damage":
        content = bytearray((partial / "base-val.images.npy").read_bytes())
        content[-1] ^= 1
        (partial / "base-val.images.npy").write_bytes(content)
    dataset = prepare(home, "toy", toy, False, Reporter(), allow_partial=change == "consent")
    assert len(decoded) == 3 + (5 if change == "damage" else 6)
    fresh = prepare(Home.locate(tmp_path / "fresh"), "toy", toy, False, Reporter())
    assert dataset.fingerprint == fresh.fingerprint


def test_files_changed_in_place_are_not_mixed_with_older_ones(toy, tmp_path, monkeypatch):
    """Between an interruption and the next run the pixels change, names and sizes of the files do not."""
    for path in toy.rglob("*.png"):
        Image.open(path).save(path.with_suffix(".bmp"))
        path.with_suffix(".bmp").replace(path)
    home = Home.locate(tmp_path / "home")
    decoded = _interrupted_once(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        prepare(home, "toy", toy, False, Reporter())
    sizes = {path: path.stat().st_size for path in toy.rglob("*.png")}
    for path in sizes:
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path, "BMP")
    assert sizes == {path: path.stat().st_size for path in toy.rglob("*.png")}
    dataset = prepare(home, "toy", toy, False, Reporter())
    assert len(decoded) == 3 + 6
    assert dataset.fingerprint == prepare(Home.locate(tmp_path / "new"), "toy", toy, False, Reporter()).fingerprint


def test_another_source_is_not_ignored(toy, tmp_path):
    home = Home.locate(tmp_path / "home")
    first = prepare(home, "toy", toy, False, Reporter())
    moved = Path(shutil.copytree(toy, tmp_path / "elsewhere" / "toys"))
    packed = [
        Path(shutil.make_archive(str(tmp_path / "a"), "zip", toy)),
        Path(shutil.make_archive(str(tmp_path / "b"), "gztar", tmp_path, "toys")),
        Path(shutil.make_archive(str(tmp_path / "c"), "tar", tmp_path, "toys")),
    ]
    for same in (toy, moved, *packed):
        os.utime(same)
        assert prepare(home, "toy", same, False, Reporter()).fingerprint == first.fingerprint
    (moved / "base/train/a/0.png").write_bytes((toy / "base/train/b/1.png").read_bytes() + b"more")
    told = r"toy is prepared already in .*, from other files than .*/toys holds now \(it was made from toys\); --force"
    with pytest.raises(UserError, match=told):
        prepare(home, "toy", moved, False, Reporter())
    assert prepare(home, "toy", moved, True, Reporter()).fingerprint != first.fingerprint
    assert prepare(home, "toy", moved, False, Reporter()).fingerprint != first.fingerprint


def test_more_than_a_partial_data_set_was_made_of_is_not_ignored(toy, tmp_path):
    home = Home.locate(tmp_path / "home")
    content = (toy / "novel/val/d/3.png").read_bytes()
    (toy / "novel/val/d/3.png").unlink()
    assert prepare(home, "toy", toy, False, Reporter(), allow_partial=True).partial
    (toy / "novel/val/d/3.png").write_bytes(content)
    with pytest.raises(UserError, match=r"toy is prepared already \(partial\) in .*, from other files than"):
        prepare(home, "toy", toy, False, Reporter())
    assert not prepare(home, "toy", toy, True, Reporter()).partial


def test_features_of_the_same_shapes_are_told_apart(write_features, tmp_path):
    """Names and sizes of these files are equal; only what is in them differs."""
    home = Home.locate(tmp_path / "home")
    prepare(home, "mine", write_features(tmp_path / "a", seed=0), False, Reporter())
    with pytest.raises(UserError, match=r"from other files than .*b holds now .*; --force replaces it, or choose"):
        prepare(home, "mine", write_features(tmp_path / "b", seed=1), False, Reporter())


def test_a_data_set_prepared_before_sources_were_recorded_is_accepted(toy, tmp_path):
    home = Home.locate(tmp_path / "home")
    first = prepare(home, "toy", toy, False, Reporter())
    path = first.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["about"]["made_from"]
    path.write_text(json.dumps(manifest))
    (toy / "novel/val/d/3.png").unlink()
    assert prepare(home, "toy", toy, False, Reporter()).fingerprint == first.fingerprint


def test_what_is_prepared_is_found_where_nothing_can_be_written(toy, tmp_path, monkeypatch, write_features):
    home = Home.locate(tmp_path / "home")
    mine = write_features(tmp_path / "features")
    made = {"toy": prepare(home, "toy", toy, False, Reporter()), "mine": prepare(home, "mine", mine, False, Reporter())}
    monkeypatch.setattr("ifsl_bench.data.prepare.locked", lambda *_: pytest.fail("a read-only folder grants no lock"))
    assert prepare(home, "toy", toy, False, Reporter()).fingerprint == made["toy"].fingerprint
    assert prepare(home, "mine", mine, False, Reporter()).fingerprint == made["mine"].fingerprint


def test_a_running_import_is_no_interrupted_one(toy, tmp_path):
    home = Home.locate(tmp_path / "home")
    (home.data / ".partial-toy").mkdir(parents=True)

    def state() -> str:
        return next(row for row in data_commands.listing(home) if row["data set"] == "toy")["state"]

    assert state() == "import interrupted"
    script = f"""
import sys
from pathlib import Path
from ifsl_bench.store import locked
with locked(Path({str(home.data / "toy")!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    assert state() == "being imported"
    other.communicate(timeout=60)
    assert state() == "import interrupted"


def test_a_killed_import_leaves_nothing_half_made(toy, tmp_path):
    """SIGKILL in the middle of the fourth pool, in a process of its own; then the same again."""
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from pathlib import Path
from test_import import ToySource
from ifsl_bench import registry
from ifsl_bench.data import image_pools, prepare as module
from ifsl_bench.reporter import Reporter
from ifsl_bench.store import Home
registry.names = lambda group: {{"toy": None}}
registry.dataset_source = lambda name: ToySource()
original, calls = image_pools.decode_into, []
def killing(out, *arguments):
    calls.append(1)
    if len(calls) == 4 and sys.argv[1] == "kill":
        out[0] = 9
        os.kill(os.getpid(), signal.SIGKILL)
    return original(out, *arguments)
image_pools.decode_into = killing
made = module.prepare(Home.locate({str(tmp_path / "home")!r}), "toy", Path({str(toy)!r}), False, Reporter())
print(len(calls), made.fingerprint)
"""
    killed = subprocess.run([sys.executable, "-c", script, "kill"], capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "home/data/toy").exists()
    done = subprocess.run([sys.executable, "-c", script, "finish"], capture_output=True, timeout=120, check=True)
    count, fingerprint = done.stdout.split()
    whole = prepare(Home.locate(tmp_path / "whole"), "toy", toy, False, Reporter())
    assert (int(count), fingerprint.decode()) == (3, whole.fingerprint)


def test_a_failed_import_leaves_nothing(toy, tmp_path):
    (toy / "novel/test/e/2.png").write_bytes(b"<html>")
    (toy / "base/train/a/1.png").write_bytes(b"")
    home = Home.locate(tmp_path / "home")
    with pytest.raises(UserError, match=r"2 of 36 images cannot be used: .*no image but an empty file; .*an HTML page"):
        prepare(home, "toy", toy, False, Reporter())
    assert [p.name for p in home.data.iterdir() if p.suffix != ".lock"] == []


def test_a_class_without_usable_images_is_an_error_in_any_case(toy, tmp_path):
    for path in (toy / "novel/test/e").glob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="novel/test: no image of class 'e' can be used"):
        prepare(Home.locate(tmp_path / "home"), "toy", toy, False, Reporter(), allow_partial=True)


def test_left_out_images_survive_an_interruption(toy, tmp_path, monkeypatch):
    """What a pool lacks is known, though the pool was finished by another run."""
    (toy / "base/train/a/1.png").write_bytes(b"")
    home = Home.locate(tmp_path / "home")
    original, calls = image_pools.decode_into, []

    def stopping(out, *arguments):
        calls.append(len(out))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(out, *arguments)

    monkeypatch.setattr(image_pools, "decode_into", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare(home, "toy", toy, False, Reporter(), allow_partial=True)
    dataset = prepare(home, "toy", toy, False, Reporter(), allow_partial=True)
    assert calls == [8, 7, 8, 8, 8, 4, 4, 4]
    assert dataset.partial
    assert dataset.manifest["pools"]["base/train"]["skipped"]["images"] == 1
    assert "base/train: 1 images that cannot be used" in dataset.manifest["about"]["missing"][0]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is known on Linux only")
def test_memory_does_not_grow_with_the_data(tmp_path):
    """A pool of 500 MB, its images made on the fly, takes a small part of that in memory."""
    script = f"""
import io
import numpy as np
from pathlib import Path
from PIL import Image
from ifsl_bench.data import decode
from ifsl_bench.data.writer import Writer
out = io.BytesIO()
Image.fromarray(np.arange(12288, dtype=np.uint8).reshape(64, 64, 3)).save(out, "PNG", compress_level=0)
content, count = out.getvalue(), 40_000
decode._RELEASE = 1 << 25
def peak():  # of this program; getrusage would count the one that started it
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
before = peak()
with Writer(Path({str(tmp_path)!r})).pool("base/train", np.zeros(count, np.int64), ("a",), (64, 64, 3)) as images:
    decode.decode_into(images, ((i, "", content) for i in range(count)), decode.ImageSpec(64))
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert float(done.stdout) < 150
