"""CIFAR-FS from CIFAR-100's own files, written small in their true layout."""

from __future__ import annotations

import copy
import hashlib
import pickle
import shutil
import tarfile
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR100

from ifsl_bench.data.pools import open_dataset, verify_checksums
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.published_splits import read_mapping_of_columns
from ifsl_bench.data.sets import cifar
from ifsl_bench.data.source import PoolSize
from tests.data.helpers import of_class, refused

SIDES = read_mapping_of_columns("cifar-fs.csv", "class", "split")
NAMES = sorted(SIDES)  # as CIFAR-100 numbers them
PER = {"train": 9, "test": 3}  # images of a class in each of the two files
COUNTS = {
    "base/train": PoolSize(64, 64 * 9), "base/val": PoolSize(64, 64), "base/test": PoolSize(64, 64 * 2),
    "novel/val": PoolSize(16, 16 * 12), "novel/test": PoolSize(20, 20 * 12),
}  # fmt: skip


def values() -> dict[str, dict]:
    """A copy of what the three files hold."""
    return copy.deepcopy(_values())


@cache
def _values() -> dict[str, dict]:
    """The three files' contents: rows in random order, channels first."""
    files: dict[str, dict] = {}
    for seed, (part, each) in enumerate(PER.items()):
        random = np.random.default_rng(seed)
        labels = random.permutation(np.repeat(np.arange(100), each))
        files[part] = {
            "filenames": [f"{NAMES[label]}_s_{i:06d}.png" for i, label in enumerate(labels)],
            "batch_label": f"{part}ing batch 1 of 1",
            "fine_labels": [int(v) for v in labels],
            "coarse_labels": [0] * len(labels),
            "data": random.integers(0, 256, (len(labels), 3072)).astype(np.uint8),
        }
    return files | {"meta": {"fine_label_names": list(NAMES), "coarse_label_names": ["fish"]}}


def write(folder: Path, python2, content: dict[str, dict] | None = None) -> Path:
    """The folder that the archive holds: pickled by Python 2, as CIFAR-100 is."""
    folder.mkdir(parents=True)
    for name, value in (content or values()).items():
        (folder / name).write_bytes(python2(value))
    (folder / "file.txt~").write_text("\n")
    return folder


def write_pngs(folder: Path, path: str = "{part}/{name}") -> Path:
    """The same images as PNG files, as others unpack them; their names are CIFAR-100's, in the order of the rows."""
    for part in PER:
        content = _values()[part]
        for file, label, flat in zip(content["filenames"], content["fine_labels"], content["data"], strict=True):
            target = folder / path.format(part=part, name=NAMES[label]) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(flat.reshape(3, 32, 32).transpose(1, 2, 0)).save(target)
    return folder


def image(name: str, row: int) -> np.ndarray:
    """A class's image by its place: first those of train, then those of test; [32, 32, 3], straight from the files."""
    content = _values()
    if (part := "train") and row >= PER["train"]:
        part, row = "test", row - PER["train"]
    place = np.flatnonzero(np.array(content[part]["fine_labels"]) == NAMES.index(name))[row]
    flat = content[part]["data"][place]
    return np.stack([flat[channel * 1024 : (channel + 1) * 1024].reshape(32, 32) for channel in range(3)], -1)


@pytest.fixture
def small(monkeypatch):
    """The counts of these small files take the place of the true ones."""
    monkeypatch.setattr(cifar, "POOL_COUNTS", COUNTS)
    monkeypatch.setattr(cifar, "IMAGES_PER_CLASS_OF_FILE", PER)


def check(dataset) -> None:
    images = {name: [image(name, row).tobytes() for row in range(12)] for name in (NAMES[0], "baby", "crab", "whale")}
    for name, count in COUNTS.items():
        pool = dataset.pool(name)
        side = "train" if name.startswith("base") else name.removeprefix("novel/")
        assert list(pool.class_names) == [c for c in NAMES if SIDES[c] == side]
        assert (len(pool.class_names), len(pool)) == (count.n_classes, count.n_images)
    class_rows: dict[str, list[bytes]] = {}
    for name in COUNTS:
        pool = dataset.pool(name)
        for c, cls in enumerate(pool.class_names):
            rows = [pool.images[i].tobytes() for i in range(pool.class_starts[c], pool.class_starts[c + 1])]
            assert cls not in images or rows == [row for row in images[cls] if row in rows]  # in the files' order
            class_rows[cls] = class_rows.get(cls, []) + rows
    for cls, rows in images.items():
        assert sorted(class_rows[cls]) == sorted(rows)  # each once, over the pools


def test_known_classes_lie_where_the_paper_has_them():
    assert (SIDES["apple"], SIDES["crab"], SIDES["whale"]) == ("train", "val", "test")


def test_the_official_files_make_the_pools(home, tmp_path, python2, small, messages):
    dataset = prepare_dataset(home, "cifar-fs", write(tmp_path / "cifar-100-python", python2), False, messages)
    check(dataset)
    verify_checksums(dataset)
    assert dataset.shape == (32, 32, 3)
    assert not dataset.is_partial
    assert messages.warned == []
    assert any("Python version of CIFAR-100" in line for line in messages.said)


def test_images_that_repeat_another_are_named_by_file_and_row(home, tmp_path, python2, small, messages):
    content = values()
    labels = {part: content[part]["fine_labels"] for part in PER}
    apple, baby = labels["train"].index(NAMES.index("apple")), labels["test"].index(NAMES.index("baby"))
    content["test"]["data"][baby] = content["train"]["data"][apple]
    dataset = prepare_dataset(home, "cifar-fs", write(tmp_path / "cifar-100-python", python2, content), False, messages)
    assert dataset.manifest["about"]["duplicates"]["first"] == [[f"train[{apple}]", f"test[{baby}]"]]
    assert "1 image equal to another one pixel by pixel, 1 in another pool and 1 on another side" in messages.warned[0]


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("train", {"data": None}, r"train lacks data; it has filenames"),
        ("train", {"data": np.zeros((900, 3072), np.float32)}, r"is float32\[900, 3072\], expected uint8\[n, 3072\]"),
        ("train", {"fine_labels": [0] * 899}, r"900 images and 899 labels"),
        ("train", {"fine_labels": [0] * 899 + [100]}, "images of label 100, which has no class name"),
        ("meta", {"fine_label_names": [*NAMES[:99], "unicorn"]}, r"class 'unicorn', which is none of CIFAR-100's"),
        ("meta", {"fine_label_names": [*NAMES[:99], "apple"]}, r"gives two labels one name"),
        ("meta", {"fine_label_names": 7}, r"is a int, expected a list of names"),
    ],
)
def test_files_that_are_not_as_they_should_be_are_named(part, changes, said, home, tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, value in values().items():
        content = {k: v for k, v in (value | (changes if name == part else {})).items() if v is not None}
        (folder / name).write_bytes(pickle.dumps(content, 2))
    assert "\n" not in refused(home, "cifar-fs", folder, said)


def test_a_missing_file_and_two_copies_are_said(home, tmp_path, python2):
    folder = write(tmp_path / "files" / "cifar-100-python", python2)
    (folder / "test").rename(tmp_path / "aside")
    refused(home, "cifar-fs", folder.parent, "lacks test, a part of the Python version of CIFAR-100")
    (tmp_path / "aside").rename(folder / "test")
    write(tmp_path / "files" / "copy", python2)
    refused(home, "cifar-fs", folder.parent, "holds CIFAR-100 2 times .*; give one of them")


def test_png_files_make_the_same_data_set(home, tmp_path, python2, small, messages):
    whole = prepare_dataset(home, "cifar-fs", write(tmp_path / "cifar-100-python", python2), False, messages)
    pngs = prepare_dataset(home, "cifar-fs", write_pngs(tmp_path / "images"), True, messages)
    assert pngs.fingerprint == whole.fingerprint
    assert any("CIFAR-100 as PNG files" in line for line in messages.said)
    assert not pngs.is_partial
    assert messages.warned == []


@pytest.mark.slow("the data set is made twice more")
def test_png_files_in_other_folders_make_it_too(home, tmp_path, small, messages):
    """Below folders of superclasses in a zip archive; and with the folders spelled otherwise."""
    nested = write_pngs(tmp_path / "nested" / "cifar100", "{part}/vehicles_1/{name}")
    check(
        prepare_dataset(home, "cifar-fs", Path(shutil.make_archive(str(nested), "zip", nested.parent)), False, messages)
    )
    folder = write_pngs(tmp_path / "spelled", "{part}")
    for path in [*folder.glob("*/*.png")]:
        part, name = {"train": "Training", "test": "val"}[path.parent.name], path.name.partition("_s_")[0]
        target = folder / "images" / part / name.replace("_", " ").title() / f"{path.stem}.PNG"
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    check(prepare_dataset(home, "cifar-fs", folder, True, messages))


def test_png_files_that_are_missing_are_counted_by_class(home, tmp_path, small, messages):
    folder = write_pngs(tmp_path / "images")
    for path in sorted((folder / "train" / "wolf").iterdir())[:4]:
        path.unlink()
    shutil.rmtree(folder / "test" / "baby")
    lacks = (
        "lacks 7 of CIFAR-100's 1,200 images: 4 of train/wolf, 3 of test/baby. Get the whole, or add --allow-partial"
    )
    assert "\n" not in refused(home, "cifar-fs", folder, lacks)
    extra = folder / "train" / "unicorn" / "unicorn_s_000001.png"
    extra.parent.mkdir()
    shutil.copy(next((folder / "train" / "wolf").iterdir()), extra)
    refused(home, "cifar-fs", folder, r"has 1 classes that are not CIFAR-100's \(train/unicorn\)", allow_partial=True)
    shutil.rmtree(extra.parent)
    dataset = prepare_dataset(home, "cifar-fs", folder, False, messages, allow_partial=True)
    assert dataset.is_partial
    assert [len(of_class(dataset.pool("novel/test"), name)) for name in ("baby", "bed")] == [9, 12]
    assert "missing are 7 of CIFAR-100's 1,200 images: 4 of train/wolf, 3 of test/baby" in messages.warned


@pytest.fixture
def served(tmp_path, python2, monkeypatch):
    """CIFAR-100's archive on a server of this machine, which torchvision takes for the authors'."""
    (site := tmp_path / "site").mkdir()
    folder = write(tmp_path / "cifar-100-python", python2)
    with tarfile.open(site / CIFAR100.filename, "w:gz") as archive:
        archive.add(folder, folder.name)
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        content = (site / CIFAR100.filename).read_bytes()
        monkeypatch.setattr(CIFAR100, "url", f"http://127.0.0.1:{server.server_port}/{CIFAR100.filename}")
        monkeypatch.setattr(CIFAR100, "tgz_md5", hashlib.md5(content).hexdigest())
        yield site
        server.shutdown()


def test_it_is_downloaded_checked_and_made_and_nothing_else_stays(served, small, home, call, monkeypatch):
    prepare_it = ("data", "prepare", "cifar-fs", "--download", "--home", str(home.cache))
    monkeypatch.setattr(CIFAR100, "tgz_md5", "0" * 32)
    status, out, err = call(*prepare_it)
    assert (status, out) == (2, "")
    assert f"{CIFAR100.url} cannot be downloaded here" in err
    assert "then: ifsl-bench data prepare cifar-fs --from PATH" in err
    monkeypatch.setattr(CIFAR100, "tgz_md5", hashlib.md5((served / CIFAR100.filename).read_bytes()).hexdigest())
    with monkeypatch.context() as patch:
        patch.setattr(cifar, "POOL_COUNTS", COUNTS | {"novel/test": PoolSize(1, 1)})
        assert call(*prepare_it)[0] == 2
    shutil.move(served / CIFAR100.filename, served / "moved")
    status, out, err = call(*prepare_it)
    assert status == 0, f"{err}: it has been downloaded already"
    shutil.move(served / "moved", served / CIFAR100.filename)
    check(open_dataset(home.data / "cifar-fs"))
    assert not [path for path in home.cache.iterdir() if path.name.startswith(".download-")]
    (served / CIFAR100.filename).unlink()
    assert call(*prepare_it)[0] == 0, "it is prepared already"
    status, _, err = call(*prepare_it, "--force")
    assert (status, "cannot be downloaded here (" in err) == (2, True)
    for arguments, message in (
        (("tiny", "--download"), "cannot be downloaded by a program; docs/data.md lists the addresses"),
        (("glyphs", "--download"), "needs no files: leave --download out"),
        (("cifar-fz", "--download"), "did you mean 'cifar-fs'"),
        (("cifar-fs", "--download", "--from", "x"), "leave one of them out"),
    ):
        assert message in call("data", "prepare", *arguments)[2]
