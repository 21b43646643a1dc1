"""mini-ImageNet from the files that people have of it."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ifsl_bench
from ifsl_bench.data.pools import verify_checksums
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.published_splits import read_rows, shuffle_by_hash
from ifsl_bench.data.sets import mini
from ifsl_bench.data.source import PoolSize
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter
from tests.data.helpers import of_class, refused

SIDES = {row["wnid"]: row["split"] for row in read_rows("mini-imagenet.csv")}
TRAIN, VAL, TEST = ([w for w, s in SIDES.items() if s == side] for side in ("train", "val", "test"))
FILES = {
    "base/train": ("train_phase_train", TRAIN[:3], 7),
    "base/val": ("train_phase_val", TRAIN[:3], 4),
    "base/test": ("train_phase_test", TRAIN[:3], 5),
    "novel/val": ("val", VAL[:2], 6),
    "novel/test": ("test", TEST[:2], 6),
}
COUNTS = {pool: PoolSize(len(classes), len(classes) * each) for pool, (_, classes, each) in FILES.items()}


def images_of(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 84, 84, 3)).astype(np.uint8)


def lwof_values() -> dict[str, dict]:
    """The five files' contents, with rows in random order and labels that are neither small nor in order of wnids."""
    values = {}
    for seed, (part, classes, each) in enumerate(FILES.values()):
        ids = {wnid: 70 - i + 100 * (part in ("val", "test")) for i, wnid in enumerate(classes)}
        labels = [int(v) for v in np.random.default_rng(seed).permutation(np.repeat(list(ids.values()), each))]
        values[part] = {"data": images_of(len(labels), seed), "labels": labels, "catname2label": ids}
    return values


def write_lwof(folder: Path, python2, values: dict[str, dict] | None = None) -> Path:
    """The five files: one as Python 2 writes it, one with keys of bytes, and the rest in other protocols."""
    folder.mkdir(parents=True)
    values = values or lwof_values()
    for i, (part, value) in enumerate(values.items()):
        path = folder / f"miniImageNet_category_split_{part}.pickle"
        if part == "train_phase_train":
            path.write_bytes(python2(value))
        elif part == "test":
            names = {name.encode(): label for name, label in value["catname2label"].items()}
            again = {b"data": value["data"], b"labels": value["labels"], b"catname2label": names}
            path.write_bytes(pickle.dumps(again, 3))
        else:
            path.write_bytes(pickle.dumps(value, (0, 2, 4, 5)[i % 4]))
    return folder


def check_lwof(dataset) -> None:
    values = lwof_values()
    assert set(dataset.manifest["pools"]) == set(FILES)
    for name, (part, classes, _) in FILES.items():
        pool, value = dataset.pool(name), values[part]
        assert pool.class_names == tuple(sorted(classes))
        for wnid in pool.class_names:
            mine = np.array(value["labels"]) == value["catname2label"][wnid]
            np.testing.assert_array_equal(of_class(pool, wnid), value["data"][mine])


@pytest.fixture
def exact(monkeypatch):
    """The counts of these small files take the place of the published ones."""
    monkeypatch.setattr(mini, "POOL_COUNTS", COUNTS)


def test_lwof_pickles_make_the_exact_pools(home, tmp_path, python2, exact, messages):
    folder = write_lwof(tmp_path / "files", python2)
    dataset = prepare_dataset(home, "mini-imagenet", folder, False, messages)
    check_lwof(dataset)
    verify_checksums(dataset)
    assert not dataset.is_partial
    assert "pickles of LwoF" in dataset.manifest["about"]["form"]
    assert any("pickles of LwoF" in line for line in messages.said)
    assert messages.warned == []


def test_differences_from_the_counts_of_the_paper_are_shown(home, tmp_path, python2, messages):
    folder = write_lwof(tmp_path / "files", python2)
    message = "base/train should have 64 classes with 38,400 images and has 3 classes with 21 images.*--allow-partial"
    refused(home, "mini-imagenet", folder, message)
    dataset = prepare_dataset(home, "mini-imagenet", folder, False, messages, allow_partial=True)
    assert dataset.is_partial
    assert any("38,400" in line for line in messages.warned)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": images_of(12, 0).transpose(0, 3, 1, 2)},
         r"'data' of .*_val\.pickle is uint8\[12, 3, 84, 84\], expected uint8\[n, 84, 84, 3\]"),
        ({"labels": [10**30] * 12},
         "'labels' of .* is a list whose item 0 is too large a number, expected a list of whole numbers"),
        ({"catname2label": [1]}, "'catname2label' of .* is no dict"),
        ({"catname2label": {TEST[0]: 170, VAL[0]: 169}},
         rf"has class '{TEST[0]}' among its val classes, which is a test class of mini-ImageNet"),
        ({"catname2label": {"n00000001": 170, VAL[0]: 169}},
         "has class 'n00000001' among its val classes, which is no class of mini-ImageNet"),
    ],
)  # fmt: skip
def test_wrong_content_is_named(changes, message, home, tmp_path, python2, exact):
    values = lwof_values()
    values["val"] |= changes
    refused(home, "mini-imagenet", write_lwof(tmp_path / "files", python2, values), message, allow_partial=True)


def test_a_missing_file_and_a_file_of_another_kind_are_named(home, tmp_path, python2, exact):
    folder = write_lwof(tmp_path / "files", python2)
    path = folder / "miniImageNet_category_split_train_phase_val.pickle"
    for replacement, message in (
        (b"<!DOCTYPE html><html><title>Google Drive - Virus scan warning</title>", "no pickle but an HTML page"),
        (pickle.dumps([1, 2]), "holds a list, expected a dict with data, labels, catname2label"),
    ):
        path.write_bytes(replacement)
        assert path.name in refused(home, "mini-imagenet", folder, message)
    path.unlink()
    message = f"lacks {path.name}, a part of the pickles of LwoF"
    refused(home, "mini-imagenet", folder, message, allow_partial=True)


# -- learn2learn's caches


def cache_values(each: int = 20) -> dict[str, dict]:
    values = {}
    for seed, (side, classes) in enumerate({"train": TRAIN[:3], "validation": VAL[:2], "test": TEST[:2]}.items()):
        order = np.random.default_rng(seed).permutation(len(classes) * each).reshape(len(classes), each)
        members = {wnid: sorted(order[i].tolist()) for i, wnid in reversed(list(enumerate(classes)))}
        values[side] = {"image_data": images_of(order.size, 10 + seed), "class_dict": members}
    return values


def write_caches(folder: Path, values: dict[str, dict]) -> Path:
    folder.mkdir(parents=True)
    for protocol, (side, value) in zip((2, 4, 0), values.items(), strict=True):
        (folder / f"mini-imagenet-cache-{side}.pkl").write_bytes(pickle.dumps(value, protocol))
    return folder


def test_learn2learns_caches_hold_base_queries_out_of_the_training_images(home, tmp_path, monkeypatch):
    values = cache_values()
    folder = write_caches(tmp_path / "caches", values)
    counts = {"base/train": PoolSize(3, 48), "base/val": PoolSize(3, 6), "base/test": PoolSize(3, 6),
              "novel/val": PoolSize(2, 40), "novel/test": PoolSize(2, 40)}  # fmt: skip
    monkeypatch.setattr(mini, "HELD_OUT_COUNTS", counts)
    dataset = prepare_dataset(home, "mini-imagenet-held-out", folder, False, Reporter())
    assert not dataset.is_partial
    for wnid in TRAIN[:3]:
        source_images = values["train"]["image_data"][values["train"]["class_dict"][wnid]]
        mine = [of_class(dataset.pool(f"base/{part}"), wnid) for part in ("train", "val", "test")]
        assert [len(images) for images in mine] == [16, 2, 2]
        pool_images = {image.tobytes() for images in mine for image in images}
        assert pool_images == {image.tobytes() for image in source_images}
    for side, classes in (("validation", VAL[:2]), ("test", TEST[:2])):
        pool = dataset.pool(f"novel/{side[:3] if side == 'validation' else side}")
        assert pool.class_names == tuple(sorted(classes))
        rows = [row for wnid in pool.class_names for row in values[side]["class_dict"][wnid]]
        np.testing.assert_array_equal(pool.images, values[side]["image_data"][rows])
    (folder / "mini-imagenet-cache-validation.pkl").rename(folder / "mini-imagenet-cache-val.pkl")
    again = prepare_dataset(Paths.locate(tmp_path / "again"), "mini-imagenet-held-out", folder, False, Reporter())
    assert again.fingerprint == dataset.fingerprint


def test_draws_are_the_same_everywhere():
    assert shuffle_by_hash("abcdefgh", "salt") == list("fhgabdce")  # sha256sum of "salt:0", "salt:1", ...


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["class_dict"][TEST[0]].append(40), "names row 40, 'image_data' has 40"),
        (lambda v: v["class_dict"][TEST[0]].append(v["class_dict"][TEST[1]][0]), "names an image twice"),
        (lambda v: v["class_dict"].update({TEST[0]: "rows"}), rf"class '{TEST[0]}' of .* is a str, expected a list"),
        (lambda v: v.update(class_dict=[1]), "'class_dict' of .* is a list, expected a dict"),
        (lambda v: v["class_dict"].update({TRAIN[0]: v["class_dict"].pop(TEST[0])}), "which is a train class"),
    ],
)
def test_wrong_caches_are_named(change, message, home, tmp_path):
    values = cache_values()
    change(values["test"])
    folder = write_caches(tmp_path / "caches", values)
    refused(home, "mini-imagenet-held-out", folder, message, allow_partial=True)


# -- objects of learn2learn


def loaded(kind: str, *roots: object) -> list:
    """Stand-ins for three objects that learn2learn has loaded, which know where from."""
    stand_in = type(kind, (), {"__module__": "learn2learn.vision.datasets"})
    objects = [stand_in() for _ in range(3)]
    for value, root in zip(objects, roots * 3, strict=False):
        value.root = str(root)
    return objects


def test_what_learn2learn_has_loaded_is_made_from_its_files(tmp_path):
    folder = write_caches(tmp_path / "caches", cache_values())
    files = prepare_dataset(
        Paths.locate(tmp_path / "files"), "mini-imagenet-held-out", folder, False, Reporter(), allow_partial=True
    )
    objects = loaded("MiniImagenet", folder)
    wrapper = type("MetaDataset", (), {"__module__": "learn2learn.data"})()
    wrapper.dataset = objects[0]
    work = ifsl_bench.workspace(tmp_path / "objects")
    dataset = ifsl_bench.from_learn2learn([wrapper, *objects[1:]], work=work, allow_partial=True)
    assert (dataset.name, dataset.fingerprint) == ("mini-imagenet-held-out", files.fingerprint)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ([], "no data set is made of nothing; .*learn2learn.MiniImagenet for mini-imagenet-held-out"),
        ({"train": 1}, "given as a list, .*, not as a builtins.dict"),
        (loaded("FilteredMetaDataset", "a"), "made of learn2learn.FilteredMetaDataset; .*give it a name"),
        (loaded("TieredImagenet", "a", "b"), "made from one folder; these were loaded from a and b"),
        (loaded("TieredImagenet", "nowhere"), "no file or folder nowhere/tiered-imagenet"),
    ],
)
def test_objects_that_make_no_data_set_are_refused(objects, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ifsl_bench.from_learn2learn(objects, work=ifsl_bench.workspace(tmp_path / "home"))


# -- ILSVRC-2012


def test_ilsvrc_gives_the_listed_images_and_draws_base_queries(ilsvrc, home, messages):
    message = r"novel/test should have 20 classes with 12,000 images and has \d+ classes"
    refused(home, "mini-imagenet-ilsvrc", ilsvrc, message)
    dataset = prepare_dataset(home, "mini-imagenet-ilsvrc", ilsvrc, False, messages, allow_partial=True)
    assert dataset.is_partial
    originals = {row["original"] for row in read_rows("mini-imagenet-original-names.csv.xz")}
    with zipfile.ZipFile(ilsvrc) as archive:
        names = [n.split("/")[1] for n in archive.namelist()]
        members: dict[str, list[str]] = {}
        for name in sorted(names, key=lambda n: int(n.split("_")[1].split(".")[0])):
            members.setdefault(name.split("_")[0], []).append(name)

        def resized(name: str) -> np.ndarray:
            with Image.open(io.BytesIO(archive.read(f"{name.split('_')[0]}/{name}"))) as image:
                return np.asarray(image.convert("RGB").resize((84, 84), Image.Resampling.BICUBIC))

        for name, side in (("base/train", "train"), ("novel/val", "val"), ("novel/test", "test")):
            pool = dataset.pool(name)
            listed = {w: [n for n in members[w] if n in originals] for w in sorted(members) if SIDES.get(w) == side}
            listed = {w: files for w, files in listed.items() if files}
            assert pool.class_names == tuple(listed)
            assert np.diff(pool.class_starts).tolist() == [len(files) for files in listed.values()]
            for wnid, files in listed.items():
                ends = of_class(pool, wnid)[[0, -1]]
                np.testing.assert_array_equal(ends, [resized(files[0]), resized(files[-1])])
        val, test = dataset.pool("base/val"), dataset.pool("base/test")
        for wnid in val.class_names:
            unlisted_images = {resized(n).tobytes() for n in members[wnid] if n not in originals}
            drawn = [{image.tobytes() for image in of_class(pool, wnid)} for pool in (val, test)]
            assert drawn[0] | drawn[1] == unlisted_images
            assert abs(len(drawn[0]) - len(drawn[1])) <= 1
