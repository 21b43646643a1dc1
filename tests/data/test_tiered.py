"""tiered-ImageNet from the files that people have of it."""

from __future__ import annotations

import collections
import io
import pickle
import re
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.data.pools import verify_checksums
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.published_splits import read_rows, split_base_class_images
from ifsl_bench.data.read.images import ImageSpec, decode_image
from ifsl_bench.data.sets import tiered
from ifsl_bench.data.source import PoolSize
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.utils.progress import Reporter
from tests.data.helpers import of_class, refused

SIDES = {row["wnid"]: row["split"] for row in read_rows("tiered-imagenet.csv")}
A, B, VAL, TEST = ([w for w, s in SIDES.items() if s == side] for side in ("train_a", "train_b", "val", "test"))
CRANE, MACHINE = "n02012849", "n03126707"  # a bird of Train-B, and a machine that tiered-ImageNet does not have
PARTS = {  # prefix -> pool, classes, images of each
    "train_a_train_a_phase_train": ("base/train", A[:3], 9),
    "train_a_train_a_phase_val": ("base/val", A[:3], 4),
    "train_a_train_a_phase_test": ("base/test", A[:3], 5),
    "train_b": ("novel/train", [B[0], CRANE], 6),
    "val": ("novel/val", VAL[:2], 6),
    "test": ("novel/test", TEST[:2], 6),
}
COUNTS = {pool: PoolSize(len(classes), len(classes) * each) for pool, classes, each in PARTS.values()}


def called(wnid: str) -> str:
    return "crane" if wnid in (CRANE, MACHINE) else f"thing {wnid[-3:]}, Res {wnid}"


def png(image: np.ndarray) -> np.ndarray:
    """An RGB image as a PNG file, as an array of its bytes."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return np.frombuffer(out.getvalue(), np.uint8)


def part_values(classes: list[str], each: int, seed: int) -> tuple[np.ndarray, dict]:
    """Images [n, 84, 84, 3], smooth so that they differ by channel, and what the labels' file holds."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.repeat(np.arange(len(classes)), each)).astype(np.int32)
    small = generator.integers(0, 256, (len(labels), 4, 4, 3)).astype(np.uint8)
    images = np.stack([np.asarray(Image.fromarray(s).resize((84, 84), Image.Resampling.BILINEAR)) for s in small])
    names = [called(wnid) for wnid in reversed(classes)]
    return images, {"label_specific": labels, "label_specific_str": names}


@cache
def values() -> dict[str, tuple[np.ndarray, dict]]:
    return {prefix: part_values(classes, each, i) for i, (prefix, (_, classes, each)) in enumerate(PARTS.items())}


def write_names(folder: Path) -> None:
    wnids = [*SIDES, MACHINE]
    (folder / "class_names.txt").write_text("".join(f"{called(wnid)}\n" for wnid in wnids))
    (folder / "synsets.txt").write_text("".join(f"{wnid}\n" for wnid in wnids) + "\n")


def write_release(folder: Path, python2) -> Path:
    """The attractor release's files."""
    folder.mkdir(parents=True)
    write_names(folder)
    for i, (prefix, (images, labels)) in enumerate(values().items()):
        keyed = {key.encode(): value for key, value in labels.items()} if i % 2 else labels
        dumped = python2(labels) if i == 2 else pickle.dumps(keyed, (2, 4, 0, 5, 3, 1)[i])
        (folder / f"{prefix}_labels.pkl").write_bytes(dumped)
        pngs = [png(image).reshape((-1, 1) if n % 2 else -1) for n, image in enumerate(images)]
        dumped = python2(pngs) if i == 3 else pickle.dumps(pngs, (2, 4, 5, 0, 3, 1)[i])
        (folder / f"{prefix}_images_png.pkl").write_bytes(dumped)
    return folder


def check_release(dataset) -> None:
    content = values()
    for prefix, (name, classes, each) in PARTS.items():
        images, labels = content[prefix]
        pool = dataset.pool(name)
        assert pool.class_names == tuple(sorted(classes))
        for wnid in pool.class_names:
            mine = images[labels["label_specific"] == labels["label_specific_str"].index(called(wnid))]
            assert len(mine) == each
            np.testing.assert_array_equal(of_class(pool, wnid), mine)


@pytest.fixture
def exact(monkeypatch):
    """The counts of these small files take the place of the published ones."""
    monkeypatch.setattr(tiered, "POOL_COUNTS", COUNTS)


def test_the_packaged_lists_are_the_published_split():
    assert collections.Counter(SIDES.values()) == {"train_a": 200, "train_b": 151, "val": 97, "test": 160}
    images = list(read_rows("tiered-imagenet-train-a-images.csv.xz"))
    phases = collections.Counter(row["phase"] for row in images)
    assert {f"base/{phase}": PoolSize(200, n) for phase, n in phases.items()} == {
        pool: tiered.POOL_COUNTS[pool] for pool in ("base/train", "base/val", "base/test")
    }
    per_class = collections.Counter(row["image"].split("_")[0] for row in images)
    assert set(per_class) == set(A)
    drawn = collections.Counter()
    for wnid, count in per_class.items():
        drawn.update({pool: len(part) for pool, part in split_base_class_images(range(count), wnid).items()})
    assert drawn == {f"base/{phase}": n for phase, n in phases.items()}  # the same shares of each class


def test_the_release_makes_the_exact_pools(home, tmp_path, python2, exact, messages):
    folder = write_release(tmp_path / "files", python2)
    dataset = prepare_dataset(home, "tiered-imagenet", folder, False, messages)
    check_release(dataset)
    verify_checksums(dataset)
    assert not dataset.is_partial
    assert any("files of Ren et al. (2019)" in line for line in messages.said)
    assert messages.warned == []


def test_partial_data_say_at_once_which_tasks_are_out_of_reach_and_what_would_do(home, tmp_path, python2, call):
    folder = write_release(tmp_path / "files", python2)
    home_option = ("--home", str(home.cache))
    status, _, err = call("data", "prepare", "tiered-imagenet", "--from", str(folder), "--allow-partial", *home_option)
    assert status == 0, err
    tasks = [t.name for t in packaged_tasks().values() if t.dataset.name == "tiered-imagenet" and not t.novel_from]
    run = ("run", "--method", "imprint", "--dry-run", *home_option, "--task")
    for name in tasks:
        (line,) = (line for line in err.splitlines() if f" {name} is out of reach: " in line)
        options = re.search(r"within reach with ((?:--(?:ways|queries) \d+ ?)+)$", line)[1].split()
        assert call(*run, name, *options)[0] == 0, line
    status, _, refused = call(*run, "tiered-5shot", "--ways", "2", "--queries", "4")
    assert status == 2
    assert re.search(rf"class '{VAL[0]}|{VAL[1]}' of novel/val has 6; --queries 1 would do here", refused) or re.search(
        rf"class '({'|'.join(TEST)})' of novel/test has 6; --queries 1 would do here", refused
    )
    assert "--ways 2 would do here" in call(*run, "tiered-5shot")[2]


def labels_of_val(**changes: object) -> Callable[[Path], None]:
    return lambda folder: write_pickle(folder / "val_labels.pkl", values()["val"][1] | changes)


def images_of_val(change: Callable[[np.ndarray], object]) -> Callable[[Path], None]:
    return lambda folder: write_pickle(folder / "val_images_png.pkl", change(values()["val"][0]))


def write_pickle(path: Path, value: object) -> None:
    path.write_bytes(pickle.dumps(value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (labels_of_val(label_specific=np.zeros(11, np.int32)),
         r"val_images_png\.pkl has 12 images, the labels beside it are 11"),
        (labels_of_val(label_specific_str=["unicorn", called(VAL[0])]),
         "has a class 'unicorn', which is none of tiered-ImageNet's in class_names.txt"),
        (labels_of_val(label_specific_str=[called(TEST[0]), called(VAL[0])]),
         rf"has class {TEST[0]}, which tiered-ImageNet has on side test"),
        (labels_of_val(label_specific=np.zeros((6, 2), np.int32)),
         r"'label_specific' of .* is int32\[6, 2\], expected a list of whole numbers"),
        (images_of_val(lambda images: {"images": 1}),
         r"val_images_png\.pkl holds a dict, expected a list of arrays"),
        (images_of_val(list), r"item 2 of .* is uint8\[84, 84, 3\], expected an encoded"),
    ],
)  # fmt: skip
def test_wrong_files_are_named(change, message, home, tmp_path, python2, exact):
    folder = write_release(tmp_path / "files", python2)
    change(folder)
    refused(home, "tiered-imagenet", folder, message, allow_partial=True)


# -- the files of 2018


def files_2018(folder: Path) -> dict[str, tuple[np.ndarray, dict]]:
    """Train-A and Train-B classes side by side in one pair of files."""
    folder.mkdir(parents=True)
    write_names(folder)
    content = {
        "train": part_values([A[0], B[0], A[1], CRANE], 30, 20),
        "val": part_values(VAL[:2], 6, 21),
        "test": part_values(TEST[:2], 6, 22),
    }
    for prefix, (images, labels) in content.items():
        general = {"label_general": labels["label_specific"] * 0, "label_general_str": ["thing"]}
        keyed = {key.encode(): value for key, value in (labels | general).items()}
        (folder / f"{prefix}_labels.pkl").write_bytes(pickle.dumps(keyed, 2))
        (folder / f"{prefix}_images_png.pkl").write_bytes(pickle.dumps([png(i)[:, None] for i in images], 2))
    return content


def test_the_files_of_2018_are_divided_by_class_name_and_their_base_images_drawn(home, tmp_path, monkeypatch):
    content = files_2018(tmp_path / "files")
    counts = {"base/train": PoolSize(2, 48), "base/val": PoolSize(2, 6), "base/test": PoolSize(2, 6),
              "novel/train": PoolSize(2, 60), "novel/val": PoolSize(2, 12), "novel/test": PoolSize(2, 12)}  # fmt: skip
    monkeypatch.setattr(tiered, "POOL_COUNTS", counts)
    dataset = prepare_dataset(home, "tiered-imagenet-2018", tmp_path / "files", False, Reporter())
    assert not dataset.is_partial
    images, labels = content["train"]

    def images_of(wnid: str) -> np.ndarray:
        return images[labels["label_specific"] == labels["label_specific_str"].index(called(wnid))]

    for wnid in A[:2]:
        pools = [dataset.pool(f"base/{part}") for part in ("train", "val", "test")]
        mine = [[image.tobytes() for image in of_class(pool, wnid)] for pool in pools]
        assert [len(part) for part in mine] == [24, 3, 3]
        order = [i.tobytes() for i in images_of(wnid)]
        assert {i for part in mine for i in part} == set(order)
        assert all([order.index(i) for i in part] == sorted(order.index(i) for i in part) for part in mine)
    novel = dataset.pool("novel/train")
    assert novel.class_names == tuple(sorted([B[0], CRANE]))
    np.testing.assert_array_equal(novel.images, np.concatenate([images_of(wnid) for wnid in novel.class_names]))
    refused(home, "tiered-imagenet", tmp_path / "files", "which makes data set 'tiered-imagenet-2018'")


# -- ILSVRC-2012


@pytest.mark.slow("the whole split is checked image by image")
def test_ilsvrc_gives_the_listed_phases_and_all_other_images(ilsvrc, home):
    refused(home, "tiered-imagenet", ilsvrc, "base/val should have 200 classes with 25,460 images and has")
    dataset = prepare_dataset(home, "tiered-imagenet", ilsvrc, False, Reporter(), allow_partial=True)
    assert dataset.is_partial
    assert "ILSVRC-2012" in dataset.manifest["about"]["form"]
    phases = {row["image"]: row["phase"] for row in read_rows("tiered-imagenet-train-a-images.csv.xz")}
    spec = ImageSpec(84, fit_mode="stretch", resampling_filter="cubic-opencv")
    with zipfile.ZipFile(ilsvrc) as archive:
        members: dict[str, list[str]] = {}
        for name in archive.namelist():
            members.setdefault(name.split("/")[0], []).append(name)
        for names in members.values():
            names.sort(key=lambda n: int(n.rsplit("_")[-1].split(".")[0]))
        base = {}
        for wnid, names in members.items():
            if SIDES.get(wnid) == "train_a":
                groups = {p: [n for n in names if phases.get(n.split("/")[1]) == p] for p in ("train", "val", "test")}
                base |= {wnid: groups} if all(groups.values()) else {}
        for name in dataset.manifest["pools"]:
            part, phase = name.split("/")
            side = {"train": "train_b"}.get(phase, phase)
            expected = ({w: groups[phase] for w, groups in base.items()} if part == "base"
                        else {w: names for w, names in members.items() if SIDES.get(w) == side})  # fmt: skip
            pool = dataset.pool(name)
            assert pool.class_names == tuple(sorted(expected))
            assert np.diff(pool.class_starts).tolist() == [len(expected[wnid]) for wnid in pool.class_names]
            for wnid in pool.class_names:
                last = archive.read(expected[wnid][-1])
                np.testing.assert_array_equal(of_class(pool, wnid)[-1], decode_image(last, spec)[0])
