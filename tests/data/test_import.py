"""The framework of imports: what is recognised, how counts are compared, interruption and resumption, memory."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.data import datasets, image_pools
from ifsl_bench.data.pools import POOL_NAMES, verify_checksums
from ifsl_bench.data.preparing import catalogue as data_commands
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.read.archive import FileTree
from ifsl_bench.data.read.images import ImageSpec
from ifsl_bench.data.source import BuildContext, DatasetSource, Layout, PoolSize, count_files
from ifsl_bench.plugin import registry
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.locks import hold_lock
from ifsl_bench.utils.progress import LogReporter, Reporter
from tests.data.helpers import refused, spoil

SIDES = {"base": ("a", "b"), "novel/train": ("c",), "novel/val": ("d",), "novel/test": ("e",)}
PER_CLASS = 4


class Toy(Layout):
    """Files ``<class>/<number>.png``; four a class are the whole."""

    title = "toy files (<class>/<number>.png)"

    def matches(self, tree: FileTree) -> bool:
        return "toy.txt" in tree.entry_by_path

    def build(self, context: BuildContext) -> None:
        pools = {}
        for pool in POOL_NAMES:
            classes = SIDES["base" if pool.startswith("base") else pool]
            pools[pool] = {
                c: [e.path for e in context.file_tree.entries if e.path.startswith(f"{pool}/{c}/")] for c in classes
            }
        expected = {pool: PoolSize(len(files), PER_CLASS * len(files)) for pool, files in pools.items()}
        context.check_counts("the toys", expected, count_files(pools))
        image_pools.import_images(context, pools, ImageSpec(8))


class ToySource(DatasetSource):
    name = "toy"
    summary = "toys"
    layouts = (Toy(),)

    def recipe(self) -> str:
        return "toy 1"


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """A folder of toys, and the data set ``toy`` as if a package had registered it."""
    generator = np.random.default_rng(0)
    for pool in POOL_NAMES:
        for c in SIDES["base" if pool.startswith("base") else pool]:
            (tmp_path / "toys" / pool / c).mkdir(parents=True)
            for i in range(PER_CLASS):
                image = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                image.save(tmp_path / "toys" / pool / c / f"{i}.png")
    (tmp_path / "toys" / "toy.txt").write_text("")
    monkeypatch.setattr(registry, "registered_entry_points", lambda group: {"toy": None})
    monkeypatch.setattr(registry, "load_plugin", lambda group, name: registry.Plugin(name, "tests", ToySource))
    monkeypatch.setattr(datasets, "find_dataset_source", lambda name: ToySource())
    return tmp_path / "toys"


def state(home: Paths) -> str:
    return next(row for row in data_commands.make_dataset_rows(home) if row["data set"] == "toy")["state"]


def test_pools_hold_the_pixels(toy, home, messages):
    dataset = prepare_dataset(home, "toy", toy, False, messages)
    for name in POOL_NAMES:
        pool = dataset.pool(name)
        paths = sorted((toy / name).glob("*/*.png"))
        np.testing.assert_array_equal(pool.images, np.stack([np.asarray(Image.open(p)) for p in paths]))
    verify_checksums(dataset)
    assert dataset.manifest["about"]["form"] == Toy.title
    assert any(f"{toy}: {Toy.title} (folder)" in line for line in messages.said)
    assert any("toy: 36 images, 0.0 MB, in" in line for line in messages.said)
    assert not [p for p in dataset.folder.iterdir() if "side" in p.name or "progress" in p.name]


def test_partial_data_say_so_everywhere(toy, home, messages):
    (toy / "novel/val/d/3.png").unlink()
    refused(home, "toy", toy, "novel/val should have 1 classes with 4 images and has 1 classes with 3 images")
    dataset = prepare_dataset(home, "toy", toy, False, Reporter(), allow_partial=True)
    assert dataset.is_partial
    assert state(home) == "prepared, partial"
    assert "partial" in data_commands.make_statistics_tables(home, "toy", Reporter())[0][0]
    prepare_dataset(home, "toy", toy, False, messages, allow_partial=True)
    assert "toy is prepared already (partial)" in messages.said[-1]


def test_an_interrupted_import_goes_on(toy, tmp_path, interrupted, home):
    """Stopped in the third pool: nothing is there, and the next run decodes the last four pools alone."""
    whole = prepare_dataset(Paths.locate(tmp_path / "whole"), "toy", toy, False, Reporter())
    decoded = interrupted(image_pools, "decode_into", 3)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(home, "toy", toy, False, Reporter())
    assert not (home.data / "toy").exists()
    assert state(home) == "import unfinished"
    log = io.StringIO()
    dataset = prepare_dataset(home, "toy", toy, False, LogReporter(log))
    assert len(decoded) == 3 + 4
    assert "going on with an unfinished import; complete are base/train, base/val" in log.getvalue()
    assert "importing 36 images (resumed at 16 of 36)" in log.getvalue()
    assert "toy: 20 images" in log.getvalue(), "the speed of this run"
    assert dataset.fingerprint == whole.fingerprint
    assert dataset.manifest["pools"] == whole.manifest["pools"]
    assert [p.name for p in home.data.iterdir() if p.suffix != ".lock"] == ["toy"]


@pytest.mark.parametrize("change", ["files", "images", "side", "missing"])
def test_an_interrupted_import_of_something_else_starts_anew(toy, tmp_path, interrupted, change, home):
    decoded = interrupted(image_pools, "decode_into", 3)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(home, "toy", toy, False, Reporter())
    partial = home.data / ".partial-toy"
    if change == "files":
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(toy / "base/train/a/0.png")
    elif change == "missing":
        (partial / "base-val.labels.npy").unlink()
    else:
        spoil(partial / f"base-val.{change}.npy", -1)
    dataset = prepare_dataset(home, "toy", toy, False, Reporter())
    assert len(decoded) == 3 + (6 if change == "files" else 5)
    fresh = prepare_dataset(Paths.locate(tmp_path / "fresh"), "toy", toy, False, Reporter())
    assert dataset.fingerprint == fresh.fingerprint


def test_another_source_is_not_ignored(toy, tmp_path, home):
    first = prepare_dataset(home, "toy", toy, False, Reporter())
    moved = Path(shutil.copytree(toy, tmp_path / "elsewhere" / "toys"))
    packed = Path(shutil.make_archive(str(tmp_path / "a"), "gztar", tmp_path, "toys"))
    for same in (toy, moved, packed):
        os.utime(same)
        assert prepare_dataset(home, "toy", same, False, Reporter()).fingerprint == first.fingerprint
    (moved / "base/train/a/0.png").write_bytes((toy / "base/train/b/1.png").read_bytes() + b"more")
    regex = r"toy is prepared already in .*, from other files than .*/toys holds now \(it was made from toys\); --force"
    with pytest.raises(UserError, match=regex):
        prepare_dataset(home, "toy", moved, False, Reporter())
    assert prepare_dataset(home, "toy", moved, True, Reporter()).fingerprint != first.fingerprint
    assert prepare_dataset(home, "toy", moved, False, Reporter()).fingerprint != first.fingerprint


def test_what_is_prepared_is_found_where_nothing_can_be_written(toy, tmp_path, monkeypatch, write_features, home):
    mine = write_features(tmp_path / "features")
    sets = {
        "toy": prepare_dataset(home, "toy", toy, False, Reporter()),
        "mine": prepare_dataset(home, "mine", mine, False, Reporter()),
    }
    monkeypatch.setattr(
        "ifsl_bench.data.preparing.prepare.hold_lock", lambda *_: pytest.fail("a read-only folder grants no lock")
    )
    assert prepare_dataset(home, "toy", toy, False, Reporter()).fingerprint == sets["toy"].fingerprint
    assert prepare_dataset(home, "mine", mine, False, Reporter()).fingerprint == sets["mine"].fingerprint


def test_what_is_damaged_or_outdated_is_made_again(toy, home, messages, monkeypatch):
    first = prepare_dataset(home, "toy", toy, False, Reporter())
    path = first.folder / "base-val.images.npy"
    path.write_bytes(path.read_bytes()[:-5])
    assert prepare_dataset(home, "toy", toy, False, messages).fingerprint == first.fingerprint
    assert re.search(r"base-val\.images\.npy .*; building it again$", messages.warned[-1])
    monkeypatch.setattr(ToySource, "recipe", lambda self: "toy 2")
    assert prepare_dataset(home, "toy", toy, False, messages).manifest["recipe"] == "toy 2"
    assert "was made by another version" in messages.warned[-1]


def test_a_running_import_is_no_interrupted_one(toy, home):
    (home.data / ".partial-toy").mkdir(parents=True)
    with hold_lock(home.data / "toy"):
        assert state(home) == "being imported"
    assert state(home) == "import unfinished"


def test_a_killed_import_leaves_nothing_half_made(toy, tmp_path, home, interrupted, monkeypatch):
    """SIGKILL in the middle of the fourth pool, in a fork of this process; then the same again."""
    decode, calls = image_pools.decode_into, []

    def killing(out, *arguments):
        calls.append(out)
        if len(calls) == 4:
            out[0] = 9
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(out, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(image_pools, "decode_into", killing)
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=prepare_dataset, args=(home, "toy", toy, False, Reporter()))
        child.start()
        child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert not (home.data / "toy").exists()
    decoded = interrupted(image_pools, "decode_into", 0)
    made = prepare_dataset(home, "toy", toy, False, Reporter())
    assert len(decoded) == 3
    assert (
        made.fingerprint == prepare_dataset(Paths.locate(tmp_path / "whole"), "toy", toy, False, Reporter()).fingerprint
    )


def _left(home: Paths) -> set[str]:
    """The files that an import has left, but for its lock."""
    return {path.name for path in home.data.rglob("*") if path.is_file() and path.suffix != ".lock"}


def _files_of(*pools: str) -> set[str]:
    parts = ("images", "labels", "side")
    return {"progress.json", *(f"{pool.replace('/', '-')}.{part}.npy" for pool in pools for part in parts)}


def test_a_failed_import_keeps_what_is_complete(toy, tmp_path, interrupted, home):
    """Strict, it fails for two images, in the first and the last pool; allowed to leave them out, it does those two."""
    (toy / "novel/test/e/2.png").write_bytes(b"<html>")
    (toy / "base/train/a/1.png").write_bytes(b"")
    for count in (6, 2):
        decoded = interrupted(image_pools, "decode_into", 0)
        message = refused(home, "toy", toy, "2 of 36 images cannot be used: .*an empty file; .*an HTML page")
        assert "\n" not in message
        assert re.search(
            r"Complete and kept: base/val, base/test, novel/train, novel/val \(in .*/\.partial-toy\); the same "
            r"command, with or without --allow-partial, goes on from there$",
            message,
        )
        assert _left(home) == _files_of("base/val", "base/test", "novel/train", "novel/val")
        assert len(decoded) == count
    decoded = interrupted(image_pools, "decode_into", 0)
    dataset = prepare_dataset(home, "toy", toy, False, Reporter(), allow_partial=True)
    assert [len(out) for out, *_ in decoded] == [8, 7, 4, 3]
    fresh = prepare_dataset(Paths.locate(tmp_path / "fresh"), "toy", toy, False, Reporter(), allow_partial=True)
    assert dataset.is_partial
    assert dataset.fingerprint == fresh.fingerprint
    assert dataset.manifest["pools"] == fresh.manifest["pools"]
    assert _left(home) == {path.name for path in fresh.folder.iterdir()}


def test_an_image_that_can_be_read_once_and_not_again_is_no_black_one(toy, home, monkeypatch):
    (toy / "novel/test/e/2.png").write_bytes(b"")
    decode_into, lengths = image_pools.decode_into, []

    def spoiling(images, *rest):
        lengths.append(len(images))
        if lengths[-2:] == [4, 3]:  # the last pool again, without that image
            (toy / "novel/test/e/1.png").write_bytes(b"")
        return decode_into(images, *rest)

    monkeypatch.setattr(image_pools, "decode_into", spoiling)
    message = refused(home, "toy", toy, "e/1.png: .*; it could be read a moment ago, so try again", allow_partial=True)
    assert message.endswith("; the same command goes on from there"), "a strict import takes nothing of these"


def test_force_uses_what_an_import_with_force_has_left_and_nothing_else(toy, interrupted, home):
    for force, at, count in ((False, 3, 3), (True, 2, 2), (True, 2, 2), (False, 2, 2), (True, 0, 4)):
        decoded = interrupted(image_pools, "decode_into", at)
        with contextlib.suppress(KeyboardInterrupt):
            prepare_dataset(home, "toy", toy, force, Reporter())
        assert len(decoded) == count, (force, at)
    assert (home.data / "toy/manifest.json").exists()


def test_a_failed_import_without_a_complete_pool_leaves_nothing(toy, interrupted, home):
    interrupted(image_pools, "decode_into", 1)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(home, "toy", toy, False, Reporter())
    assert not (home.data / ".partial-toy").exists()
    (toy / "novel/val/d/3.png").unlink()
    refused(home, "toy", toy, "for a data set that is marked partial wherever it is used$")
    assert not (home.data / ".partial-toy").exists()


def test_a_mistake_in_a_plugin_is_not_hidden(toy, monkeypatch, messages, home):
    monkeypatch.setattr(image_pools, "report_duplicates", lambda *_: {}["no such key"])
    with pytest.raises(KeyError, match="no such key"):
        prepare_dataset(home, "toy", toy, False, messages)
    assert re.match("Complete and kept: base/train, .*; the same command,", messages.warned[-1])


@pytest.mark.parametrize("kind", ["zip archive", "folder"])
def test_a_single_file_that_cannot_be_read_is_a_bad_image(toy, tmp_path, messages, kind, home):
    """A member of an archive whose content has another checksum, and a file that nobody may read."""
    if kind == "folder":
        if not Path("/proc/self/mem").exists():
            pytest.skip("no file here that nobody can read")
        (toy / "novel/val/d/1.png").unlink()
        (toy / "novel/val/d/1.png").symlink_to("/proc/self/mem")
        source, why = toy, r"d/1\.png: Input/output error"
    else:
        source = tmp_path / "toys.zip"
        with zipfile.ZipFile(source, "w") as archive:
            for path in sorted(toy.rglob("*.*")):
                archive.write(path, path.relative_to(toy))
            start = archive.getinfo("novel/val/d/1.png").header_offset
        spoil(source, start + 80)
        why = r"novel/val/d/1\.png in .*toys\.zip: its content is damaged \(Bad CRC-32 .*\); get it again"
    regex = rf"1 of 36 images cannot be used: .*{why}\. Get these files again, or add --allow-partial"
    refused(home, "toy", source, regex)
    dataset = prepare_dataset(home, "toy", source, False, messages, allow_partial=True)
    assert dataset.is_partial
    assert re.search(rf"left out of novel/val: .*{why}$", messages.warned[-1])
    images = [np.asarray(Image.open(toy / f"novel/val/d/{i}.png")) for i in (0, 2, 3)]
    np.testing.assert_array_equal(dataset.pool("novel/val").images, np.stack(images))
    assert prepare_dataset(home, "toy", source, False, messages).fingerprint == dataset.fingerprint


@pytest.mark.slow("200 MB of images")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is known on Linux only")
def test_memory_does_not_grow_with_the_data(tmp_path):
    """A pool of 200 MB, its images made on the fly, takes a small part of that in memory."""
    script = f"""
import io
import numpy as np
from pathlib import Path
from PIL import Image
from ifsl_bench.data.read.images import ImageSpec, decode_into
from ifsl_bench.data.writer import DatasetWriter
out = io.BytesIO()
Image.fromarray(np.arange(12288, dtype=np.uint8).reshape(64, 64, 3)).save(out, "PNG", compress_level=0)
content, count = out.getvalue(), 16_000

def peak():  # getrusage would count the one that started it
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
before = peak()
writer, labels = DatasetWriter(Path({str(tmp_path)!r})), np.zeros(count, np.int64)
with writer.write_pool("base/train", labels, ("a",), (64, 64, 3)) as images:
    decode_into(images, ((i, "", lambda: content) for i in range(count)), ImageSpec(64))
print(peak() - before)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert float(process.stdout) < 120
