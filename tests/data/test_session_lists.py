"""CIFAR-100 and CUB-200-2011 in the sessions of the common lists, from made-up files of the right form."""

from __future__ import annotations

import io
import lzma
import pickle
import re
import shutil
import tarfile
from collections import Counter
from csv import DictReader
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ifsl_bench.data.dataset_views import draw_base_class_names, with_fewer_base_classes, with_other_base_classes
from ifsl_bench.data.datasets import find_dataset_source
from ifsl_bench.data.pools import Dataset, open_dataset
from ifsl_bench.data.preparing.metadata import open_data
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.published_splits import (
    COUNTS_60_40,
    ListedImage,
    SessionSource,
    published_novel_class_order,
    read_mapping_of_columns,
    read_rows,
    session_pools,
)
from ifsl_bench.data.sets import cifar, cub, mini
from ifsl_bench.data.source import PoolSize
from ifsl_bench.protocols.sampling.episodes import make_side_sampler
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.store.schema import read_result as read_result
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter
from tests.data.helpers import of_class, refused
from tests.data.test_archive import add_files
from tests.data.test_cifar_fs import PER, image, write_pngs

SHARED = Path(__file__).parents[3] / "shared" / "fscil"
MODULES = (mini, cifar, cub)
MINI, CIFAR, CUB = (list(read_rows(module.SESSION_LISTS_FILE)) for module in MODULES)
NAMES = sorted(read_mapping_of_columns("cifar-fs.csv", "class", "split"))  # as CIFAR-100 numbers them
TRAIN, TEST = 8_000, 2_000  # images of the made-up files, the first of 50,000 and 10,000


@pytest.mark.parametrize("name", [module.SESSION_LISTS_FILE for module in MODULES])
@pytest.mark.skipif(not SHARED.exists(), reason="needs the lists in ../shared/fscil")
def test_the_packaged_lists_are_the_published_ones(name):
    assert list(DictReader(lzma.decompress((SHARED / name).read_bytes()).decode().splitlines())) == list(
        read_rows(name)
    )


def test_the_lists_have_the_published_counts():
    for rows_of_one in (MINI, CIFAR):
        counts = Counter((row["role"], row["session"] == "0") for row in rows_of_one)
        assert counts == {("train", True): 30_000, ("test", True): 6_000, ("train", False): 200, ("test", False): 4_000}
    sides = read_mapping_of_columns("mini-imagenet.csv", "wnid", "split")
    base = {row["wnid"] for row in MINI if row["session"] == "0"}
    assert Counter(sides[wnid] for wnid in base) == {"train": 36, "val": 11, "test": 13}
    counts = Counter((row["role"], row["session"] == "0") for row in CUB)
    assert counts == {("train", True): 3_000, ("test", True): 2_864, ("train", False): 500, ("test", False): 2_930}
    of_class = Counter((row["image"][:3], row["role"]) for row in CUB)
    assert {of_class[f"{c:03d}", "train"] for c in range(1, 101)} == {30}
    assert {of_class[f"{c:03d}", "train"] for c in range(101, 201)} == {5}


@pytest.mark.parametrize(
    ("name", "base", "sessions", "ways"),
    [("mini-imagenet-sessions", 60, 8, 5), ("cifar100-sessions", 60, 8, 5), ("cub-sessions", 100, 10, 10)],
)
def test_sessions_of_the_lists(name, base, sessions, ways):
    source = find_dataset_source(name)
    assert isinstance(source, SessionSource)
    class_sessions = source.session_of_class()
    assert Counter(class_sessions.values()) == {0: base} | dict.fromkeys(range(1, sessions + 1), ways)
    novel = sorted(c for c, session in class_sessions.items() if session)
    order = published_novel_class_order(name, novel)
    assert sorted(order) == list(range(sessions * ways))
    assert [class_sessions[novel[i]] for i in order] == [t for t in range(1, sessions + 1) for _ in range(ways)]


@pytest.fixture(scope="module")
def cifar() -> dict[str, np.ndarray]:
    """Labels of the first images of both files: the list's, and where it gives a session alone, of a class in it."""
    random = np.random.default_rng(0)
    labels = {"train": 60 + random.integers(0, 40, TRAIN), "test": np.zeros(TEST, np.int64)}
    for row in CIFAR:
        index, session = int(row["index"]), int(row["session"])
        if index < len(labels[row["role"]]):
            first, classes = (0, 60) if session == 0 else (55 + 5 * session, 5)
            label = int(row["fine_label"] or first + random.integers(classes))
            labels[row["role"]][index] = label
    return labels


def images_of(labels: np.ndarray) -> np.ndarray:
    """Its place in the file in the first two bytes of each image, its label in the third; uint8 [n, 3072]."""
    images = np.zeros((len(labels), 3072), np.uint8)
    places = np.arange(len(labels))
    images[:, 0], images[:, 1024], images[:, 2048] = places // 256, places % 256, labels
    return images


def write_cifar(folder: Path, labels: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    for part, values in labels.items():
        content = {b"data": images_of(values), b"fine_labels": values.tolist()}
        (folder / part).write_bytes(pickle.dumps(content, 2))
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [name.encode() for name in NAMES]}, 2))
    return folder


@pytest.fixture(scope="module")
def prepared(cifar, tmp_path_factory) -> Dataset:
    """CIFAR-100 in sessions, of the made-up files."""
    root = tmp_path_factory.mktemp("cifar")
    files = write_cifar(root / "files", cifar)
    return prepare_dataset(
        Paths.locate(root / "home"), "cifar100-sessions", files, False, Reporter(), allow_partial=True
    )


def places(pool, name: str) -> list[int]:
    first = of_class(pool, name)[:, 0, 0]
    assert (first[:, 2] == NAMES.index(name)).all()
    return (256 * first[:, 0].astype(int) + first[:, 1]).tolist()


def test_cifars_pools_are_those_of_the_list(prepared, cifar):
    assert prepared.is_partial
    pools = {name: prepared.pool(name) for name in COUNTS_60_40}
    for label, name in enumerate(NAMES):
        listed = [int(row["index"]) for row in CIFAR if row["role"] == "train" and int(row["index"]) < TRAIN]
        mine = [i for i in listed if cifar["train"][i] == label]
        test = [int(row["index"]) for row in CIFAR if row["fine_label"] == str(label) and int(row["index"]) < TEST]
        if label < 60:
            train, val = places(pools["base/train"], name), places(pools["base/val"], name)
            assert sorted(train + val) == sorted(mine)
            assert len(val) == 50
            assert sorted(places(pools["base/test"], name)) == sorted(test)
        else:
            support = places(pools["novel/support"], name)
            assert support[: len(mine)] == mine, "the list's own come first"
            assert sorted(support) == np.flatnonzero(cifar["train"] == label).tolist()
            assert sorted(places(pools["novel/test"], name)) == sorted(test)


def test_other_base_classes_of_a_list_take_all_images_with_them(prepared, tmp_path):
    """Training and test images of every class are those that it has in the list, whichever side it is on now."""
    whole = open_dataset(shutil.copytree(prepared.folder, tmp_path / "copy"))
    view = with_other_base_classes(whole, 1)
    assert (view.fingerprint, view.shape, view.is_partial) == (whole.fingerprint, whole.shape, True)
    pools = {name: view.pool(name) for name in COUNTS_60_40}
    base = draw_base_class_names(NAMES, 60, 1)
    assert [set(pools[f"base/{part}"].class_names) for part in ("train", "val", "test")] == [base] * 3
    assert set(pools["novel/test"].class_names) == set(pools["novel/support"].class_names) == set(NAMES) - base
    for name, pool in pools.items():
        assert view.manifest["pools"][name]["classes"] == list(pool.class_names)
        assert view.manifest["pools"][name]["shape"] == list(pool.images.shape) == [len(pool), 32, 32, 3]
        assert np.array_equal(pool.class_starts, np.searchsorted(pool.labels, np.arange(len(pool.class_names) + 1)))
        view.check_image_checksum(name)
    original = {name: whole.pool(name) for name in COUNTS_60_40}
    for label, name in enumerate(NAMES):
        listed = ("base/train", "base/val", "base/test") if label < 60 else ("novel/support", "novel/test")
        *train, test = (places(original[pool], name) for pool in listed)
        if name in base:
            train_places, held_out = places(pools["base/train"], name), places(pools["base/val"], name)
            assert sorted(train_places + held_out) == sorted([*chain(*train)])
            share = len(original["base/val"]) / (len(original["base/val"]) + len(original["base/train"]))
            assert len(held_out) == round(share * len(train_places + held_out))
            assert places(pools["base/test"], name) == test
        else:
            assert places(pools["novel/support"], name) == [*chain(*train)]
            assert places(pools["novel/test"], name) == test
    few = with_fewer_base_classes(view, 10)
    assert set(few.pool("base/val").class_names) < base
    assert np.array_equal(pools["base/test"].images[7], pools["base/test"].images[:9][7])
    with (whole.folder / "novel-support.images.npy").open("r+b") as file:
        file.write(b"0")
    few.check_image_checksum("base/test")
    with pytest.raises(CorruptFile, match=r"novel-support\.images\.npy is not what was written"):
        few.check_image_checksum("base/val")


def test_base_classes_are_a_function_of_number_and_names_alone():
    assert sorted(draw_base_class_names(NAMES, 3, 1)) == ["cup", "orange", "skunk"], "never changes: results rest on it"
    assert (
        draw_base_class_names(NAMES[::-1], 60, 1)
        == draw_base_class_names(NAMES, 60, 1)
        != draw_base_class_names(NAMES, 60, 2)
    )


def test_labels_that_are_not_cifars_are_refused(home, tmp_path, cifar):
    row = next(row for row in CIFAR if row["role"] == "train" and int(row["index"]) < TRAIN)
    wrong = {"train": cifar["train"].copy(), "test": cifar["test"]}
    wrong["train"][int(row["index"])] = 99
    message = rf"train\[{row['index']}\] is of class 'worm', in CIFAR-100's session lists"
    refused(home, "cifar100-sessions", write_cifar(tmp_path / "c", wrong), message, allow_partial=True)


def test_png_files_make_the_sessions_but_not_the_published_supports(home, tmp_path, monkeypatch, messages, call):
    counts = {pool: PoolSize(60, 60 * each) for pool, each in (("base/train", 7), ("base/val", 2), ("base/test", 3))}
    counts |= {"novel/support": PoolSize(40, 40 * 9), "novel/test": PoolSize(40, 40 * 3)}
    for name, value in {"IMAGES_PER_CLASS_OF_FILE": PER, "HELD_OUT_PER_CLASS": 2, "COUNTS_60_40": counts}.items():
        monkeypatch.setattr(f"ifsl_bench.data.sets.cifar.{name}", value)
    dataset = prepare_dataset(home, "cifar100-sessions", write_pngs(tmp_path / "images"), False, messages)
    assert messages.warned == []
    pools = {name: dataset.pool(name) for name in counts}
    assert {name: PoolSize(len(pool.class_names), len(pool)) for name, pool in pools.items()} == counts
    for label, name in enumerate(NAMES):
        train, test = ([image(name, row).tobytes() for row in rows] for rows in (range(9), range(9, 12)))
        side = "base" if label < 60 else "novel"
        assert [x.tobytes() for x in of_class(pools[f"{side}/test"], name)] == test
        parts = ["base/train", "base/val"] if side == "base" else ["novel/support"]
        assert sorted(x.tobytes() for part in parts for x in of_class(pools[part], name)) == sorted(train)
    for more in ([], ["--dry-run"]):
        run = ("run", "--method", "ncm", "--task", "cifar100-sessions-published", "--home", str(home.cache), *more)
        status, _, err = call(*run)
        assert status == 2
        assert "PNG files do not say what rows they were; make the data set from cifar-100-python.tar.gz" in err
        assert "Traceback" not in err
    with pytest.raises(UserError, match="which this copy of data set 'cifar100-sessions' cannot tell"):
        open_data(packaged_tasks()["cifar100-sessions-published"], home, messages)
    assert open_data(packaged_tasks()["cifar100-sessions"], home, messages).fingerprint == dataset.fingerprint


@pytest.mark.slow("draws all sequences of three data sets")
@pytest.mark.parametrize("name", ["mini", "cifar100", "cub"])
def test_the_sequences_of_the_tasks_are_those_of_whole_data_sets(name):
    """The pinned digests, from the counts of the lists: no image is needed to know which image is what."""
    source = find_dataset_source("mini-imagenet-sessions" if name == "mini" else f"{name}-sessions")
    tests = Counter(row["image"].partition("/")[0] for row in CUB if row["role"] == "test")
    whole = {row["class"]: int(row["images"]) for row in read_rows("cub.csv")}

    def classes(pool: str) -> list[str]:
        return sorted(
            c for c, session in source.session_of_class().items() if (session > 0) == pool.startswith("novel")
        )

    def starts(pool: str) -> np.ndarray:
        if name == "cub":
            each = [whole[c] - tests[c] if pool == "novel/support" else tests[c] for c in classes(pool)]
        else:
            each = [500 if pool == "novel/support" else 100 for _ in classes(pool)]
        assert sum(each) == source.expected_shape_and_counts()[1][pool].n_images
        return np.cumsum([0, *each])

    tasks = [task for task in packaged_tasks().values() if task.dataset.name == source.name]
    for task in sorted(tasks, key=lambda task: task.name):  # the published one comes last
        assert task.sessions is not None
        order = published_novel_class_order(task.novel_data, classes("novel")) if task.sessions.published else None
        sampler = make_side_sampler(task, "test", 0, starts, classes=classes, order=order)
        assert sampler.digest(task.evaluation.episodes) == task.digest
    drawn = sampler.sample(0, 1)
    sessions = [source.session_of_class()[classes("novel")[c]] for c in drawn.classes[0]]
    assert sessions == sorted(sessions), "the order of the list"
    first = torch.from_numpy(starts("novel/support"))[drawn.classes[0]]
    assert torch.equal(drawn.support[0], first[:, None] + torch.arange(5)), "its supports, which come first"


@pytest.mark.slow("features of 7,000 images by a network")
def test_a_run_on_the_published_order(home, prepared, call, monkeypatch):
    """One sequence: no interval anywhere, no test, and the result is sound."""
    monkeypatch.setenv("IFSL_BENCH_HOME", str(home.cache))
    shutil.copytree(prepared.folder, home.data / prepared.name)
    task = "cifar100-sessions-published+pretraining-steps=3+backbone=resnet10-stempool"
    status, out, err = call("run", "--method", "ncm,teen", "--task", task, "--device", "cpu")
    assert status == 0, err
    assert "±" not in out
    status, out, err = call("table", task)
    assert (status, "±" in out) == (0, False), err
    status, out, err = call("compare", "ncm", "teen", "--task", task)
    assert status == 0, err
    assert "The difference is that of one order: nothing says how much others would differ." in out
    assert "unknown" in out
    result = read_result(next(home.results.rglob("ncm.seed-0.json")))
    assert (result.episodes.sessions, result.episodes.supports, len(result.episodes)) == (8, 1, 1)
    assert all(part.keys() == {"mean"} for part in result.summary.values())
    status, out, err = call("run", "--method", "ncm", "--task", "cifar100-sessions-published")
    assert status == 2
    assert "the test episodes of cifar100-sessions-published have digest" in err


def test_a_list_of_sessions_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="data set 'glyphs' has no published list of sessions"):
        published_novel_class_order("glyphs", ["a"])
    with pytest.raises(UserError, match=r"'cub-sessions' lacks 100 of the 100 novel classes of its list \(101\."):
        published_novel_class_order("cub-sessions", BIRDS[:1])


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("listed", "has no pool novel/support; .*; without a published list of sessions leave out listed = true"),
        ("published", "has no published list of sessions; leave out published = true"),
    ],
)
@pytest.mark.parametrize(("data", "own"), [("clusters", True), ("tiny-features", False)])
def test_data_without_a_list_are_refused_in_one_line(here, call, data, own, key, said):
    text = (here / "clusters.toml").read_text() if own else ""
    sessions = f"[variants.x.sessions]\ncount = 1\nways = 5\nqueries = 5\n{key} = true\n"
    (here / "mine.toml").write_text(f'{text}[variants.x]\nof = "{data}-5shot"\n{sessions}')
    for only_planned in ([], ["--dry-run"]):
        status, _, err = call("run", "--method", "ncm", "--task", "mine.toml:x", *only_planned)
        assert status == 2
        assert re.fullmatch(f"ifsl-bench: data set '{data}' {said}", err.splitlines()[-1])
        assert "Traceback" not in err


def test_a_pool_that_own_features_lack_is_said_before_any_work(here, call):
    (here / "features" / "novel-train.npz").unlink()
    assert call("data", "prepare", "few", "--from", "features")[0] == 0
    (here / "few.toml").write_text((here / "clusters.toml").read_text().replace('name = "clusters"', 'name = "few"'))
    status, _, err = call("run", "--method", "lwof", "--task", "few.toml:clusters-5shot", "--dry-run")
    assert status == 2
    assert "data set 'few' has no pool novel/train; it has base/train, base/val, " in err
    assert err.endswith('; a task without it needs protocol = "shared"\n')


def unlisted(bird: str) -> list[str]:
    return [f"{bird}/Unlisted_{i:04d}_1.jpg" for i in range(3)]


BIRDS = ["001.Black_footed_Albatross", "100.Brown_Pelican", "101.White_Pelican", "200.Common_Yellowthroat"]
LISTED = {bird: [row["image"] for row in CUB if row["image"].startswith(bird)] for bird in BIRDS}
# All listed photographs of four classes and three others of each; each is of a grey of its own in its class.
GREYS = {image: grey for bird in BIRDS for grey, image in enumerate([*LISTED[bird], *unlisted(bird)])}


@pytest.fixture(scope="module")
def birds(tmp_path_factory) -> Path:
    """The photographs as CUB_200_2011.tgz has them."""
    path = tmp_path_factory.mktemp("cub") / "CUB_200_2011.tgz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for image, grey in GREYS.items():
            out = io.BytesIO()
            Image.new("L", (30, 20), grey).save(out, "PNG")
            add_files(archive, {f"CUB_200_2011/images/{image}": out.getvalue()})
    return path


def test_birds_pools_are_those_of_the_list_and_missing_birds_need_consent(home, birds, messages):
    first = next(row["image"] for row in CUB if row["image"] not in GREYS)
    refused(home, "cub-sessions", birds, rf"images of CUB-200-2011's session lists \({first}, ")
    dataset = prepare_dataset(home, "cub-sessions", birds, False, messages, allow_partial=True)
    pools = {name: dataset.pool(name) for name in cub.SESSION_COUNTS}
    assert dataset.shape == (224, 224, 3)
    assert any("images are missing: 002." in line for line in messages.warned)

    def greys(pool: str, bird: str) -> list[int]:
        return of_class(pools[pool], bird)[:, 112, 112, 0].tolist()

    for bird in BIRDS:
        listed = {role: [GREYS[row["image"]] for row in CUB if row["image"] in LISTED[bird] and row["role"] == role]
                  for role in ("train", "test")}  # fmt: skip
        side = "base" if bird < "101" else "novel"
        assert greys(f"{side}/test", bird) == listed["test"]
        if side == "base":
            assert sorted(greys("base/train", bird) + greys("base/val", bird)) == sorted(listed["train"])
            assert len(greys("base/val", bird)) == 8
        else:
            assert greys("novel/support", bird) == listed["train"] + [GREYS[image] for image in unlisted(bird)]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (("a", "owl", 0, False), ("b", "owl", 2, True), r"class owl is both base and novel \(sessions 0 and 2\)"),
        (("a", "owl", 1, False), ("b", "owl", 2, True), r"class owl is in two sessions \(sessions 1 and 2\)"),
        (("a", "owl", 1, False), ("a", "owl", 1, True), "image a is both for training and for testing"),
        (("a", "owl", 1, False), ("a", "owl", 1, False), "image a is there twice"),
    ],
)
def test_a_list_that_contradicts_itself_is_refused(first, second, message):
    with pytest.raises(UserError, match=f"mine: {message}"):
        session_pools("mine", [ListedImage(*first), ListedImage(*second)], {}, 0, "x")
