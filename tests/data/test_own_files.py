"""People's folders: their contents, which are classes, and what becomes of an edited task file."""

from __future__ import annotations

import re
import struct
import unicodedata
import zipfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ifsl_bench.backbones.trainer import PretrainingTrainer, measure_seconds_per_step
from ifsl_bench.data.pools import POOL_NAMES, open_dataset
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.sets.folder import OwnOptions, draw_sides, read_sides, scan_class_folders, warn_about_ignored_files
from ifsl_bench.data.source import BuildContext
from ifsl_bench.data.suggested_tasks import list_infeasible_tasks
from ifsl_bench.protocols.tasks.task_files import load_tasks, own_tasks
from ifsl_bench.utils.errors import UserError
from tests.data.helpers import refused

CLASSES = [f"class {i}" for i in range(24)]
SMALL = OwnOptions(size=16)
COMPOSED, APART = (unicodedata.normalize(form, "Größe ü") for form in ("NFC", "NFD"))


def written(root: Path, folders: list[str] = CLASSES, images: int = 20, size: int = 16) -> Path:
    for number, name in enumerate(folders):
        (root / name).mkdir(parents=True)
        for i in range(images):
            Image.new("L", (size, size + i % 2), (number * 7 + i * 3) % 256).save(root / name / f"{i}.png")
    return root


@pytest.fixture
def photos(tmp_path) -> Path:
    return written(tmp_path / "photos")


def touched(root: Path, *names: str) -> Path:
    """Empty files, which the listing of classes does not open."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def classes_of(path: Path) -> dict[str, list[str]]:
    with open_tree(path) as tree:
        return dict(scan_class_folders(tree).image_paths_by_class)


HIDDEN = [
    ".ipynb_checkpoints/1.png", "a/.ipynb_checkpoints/1-checkpoint.png", ".cache/b/1.png", "@eaDir/1.png/thumb.png",
    "a/@eaDir/2.png", "__MACOSX/a/._1.png", "a/.2.png", "THUMBS.DB", "a/ehthumbs.db", "Desktop.ini", ".git/HEAD",
]  # fmt: skip


def test_what_is_hidden_is_no_class_and_no_image(tmp_path, messages):
    folder = touched(tmp_path / "x", "a/1.png", "b/1.png", *HIDDEN)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in ("a/1.png", "b/1.png", *HIDDEN):
            archive.writestr(name, b"")
    for path in (folder, tmp_path / "x.zip"):
        assert classes_of(path) == {"a": ["a/1.png"], "b": ["b/1.png"]}
        with open_tree(path) as tree:
            warn_about_ignored_files(BuildContext(tree, messages))
    assert messages.warned == []


def test_files_that_are_no_images_are_counted_and_named(tmp_path, messages):
    heic = [f"a/{i}.heic" for i in range(8)] + ["b/1.HEIC"]
    folder = touched(tmp_path / "x", "a/1.png", "b/1.png", *heic, "b/1.dng", "b/noending", "b/2.dng")
    with open_tree(folder) as tree:
        context = BuildContext(tree, messages)
        warn_about_ignored_files(context)
    (warning,) = messages.warned
    assert "ignored 12 files not named like an image: a/0.heic, a/1.heic, a/2.heic and 9 more" in warning
    assert "images end in .jpg, .jpeg, .png" in warning
    assert not context.about["partial"]


# -- links


@pytest.mark.parametrize("target", ["nowhere", "class 99"], ids=["nowhere", "itself"])
def test_a_broken_link_to_a_class_is_not_passed_over(photos, home, messages, target):
    (photos / "class 99").symlink_to(target)
    message = r"1 link in .*photos cannot be followed: class 99\. Mend or remove what is broken, or"
    refused(home, "mine", photos, message, own=SMALL)
    dataset = prepare_dataset(home, "mine", photos, False, messages, allow_partial=True, own=SMALL)
    assert dataset.is_partial
    assert "class 99" in dataset.manifest["about"]["missing"][0]
    assert any("class 99" in line for line in messages.warned)


# -- layouts and names


def test_names_are_the_same_however_their_accents_are_written(tmp_path):
    """macOS writes o and its dots apart, in its file system or in archives; most others as one letter."""
    assert COMPOSED != APART
    with zipfile.ZipFile(tmp_path / "mac.zip", "w") as archive:
        for name in (f"{APART}/1.png", "b/a\u030a.png", "b/b.png", "b/z.png"):
            archive.writestr(name, b"")
    assert list(classes_of(tmp_path / "mac.zip")) == [COMPOSED, "b"]
    assert classes_of(tmp_path / "mac.zip")["b"][-1] == "b/a\u030a.png", "in the place of one letter, after z"
    for spelling in (APART, COMPOSED):
        (tmp_path / "split.csv").write_text(f"class,split\n{spelling},base\n", encoding="utf-8")
        assert read_sides(tmp_path / "split.csv") == {COMPOSED: "base"}
    (tmp_path / "split.csv").write_text(f"class,split\n{APART},base\n{COMPOSED},val\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"line 3: class '{COMPOSED}' is there twice"):
        read_sides(tmp_path / "split.csv")


def test_two_folders_whose_accents_alone_differ_are_one_class_with_a_warning(photos, home, messages):
    for name in (COMPOSED, APART):
        written(photos, [name], images=6)
    if len(list(photos.glob("Gr*"))) < 2:
        pytest.skip("this file system writes names in one form")
    dataset = prepare_dataset(home, "mine", photos, False, messages, own=SMALL)
    assert sum(
        COMPOSED in dataset.manifest["pools"][pool]["classes"] for pool in POOL_NAMES if dataset.has_pool(pool)
    ) in (
        1,
        3,
    )
    assert any(f"how Unicode writes accents (NFC or NFD): {COMPOSED}" in line for line in messages.warned)


@pytest.mark.parametrize("name", [" class 3", "class 3 ", "\xa0class 3"])
def test_a_class_whose_name_has_spaces_at_its_ends_can_be_listed(name, photos, home, messages, tmp_path):
    (photos / "class 3").rename(photos / name)
    sides = {each: "base" if int(each[6:]) < 14 else "val" if int(each[6:]) < 19 else "test" for each in CLASSES}
    rows = [f'"{name if each == "class 3" else each}",{side}' for each, side in sides.items()]
    (tmp_path / "split.csv").write_text("\n".join(["class,split", *rows]), encoding="utf-8")
    dataset = prepare_dataset(home, "mine", photos, False, messages, own=OwnOptions(tmp_path / "split.csv", size=16))
    assert name in dataset.manifest["pools"]["base/train"]["classes"]
    (tmp_path / "split.csv").write_text("class , split\n a , base\n b,val ", encoding="utf-8")
    assert read_sides(tmp_path / "split.csv") == {"a": "base", "b": "novel/val"}


@pytest.mark.parametrize(("mark", "word"), [(";", "semicolons"), ("\t", "tabs")])
def test_another_separator_is_named(mark, word, tmp_path):
    (tmp_path / "split.csv").write_text(f"class{mark}split\na{mark}base\n")
    with pytest.raises(UserError, match=f"separated by {word}, save it with commas"):
        read_sides(tmp_path / "split.csv")


def test_images_that_are_dark_or_not_turned_are_counted(photos, home, messages):
    for i in range(5):
        wide = np.arange(256, dtype=np.uint16).reshape(16, 16) * 16 + i
        Image.fromarray(wide).save(photos / "class 0" / f"{i}.png")
    text = struct.pack("<HHL4s", 274, 2, 4, b"abc")
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + text + bytes(4)
    Image.new("RGB", (16, 16)).save(photos / "class 1" / "x.jpg", exif=exif)
    dataset = prepare_dataset(home, "mine", photos, False, messages, own=SMALL)
    warned = "\n".join(messages.warned)
    assert "5 of 481 images have 16 bits and use less than a tenth of them, up to 4,084 of 65,535" in warned
    assert "--white 4095 --force" in warned
    assert "1 of 481 images have an orientation (EXIF) that cannot be read; they are not turned" in warned
    again = prepare_dataset(home, "mine", photos, True, messages, own=OwnOptions(size=16, white=4095))
    assert again.fingerprint != dataset.fingerprint
    later = messages.warned[len(warned.splitlines()) :]
    assert "have 16 bits" not in "\n".join(later)
    assert "--white" not in "\n".join(later)
    prepare_dataset(home, "mine", photos, True, messages, own=OwnOptions(size=16, white=255))
    assert any(
        "5 of 481 images have more than a tenth of their pixels beyond --white 255, up to 4,084" in line
        for line in messages.warned
    )


def test_what_a_run_takes_is_measured_and_how_to_rehearse_it(photos, home, call):
    arguments = ("data", "prepare", "mine", "--from", str(photos), "--size", "16", "--home", str(home.cache))
    status, _, err = call(*arguments)
    assert status == 0, err
    found = re.search(
        r"first pretrains resnet10-stempool: about (\d+) (s|minutes) on .*\((\d+) steps of ([\d.]+) s", err
    )
    assert found, err
    total = int(found[1]) * {"s": 1, "minutes": 60}[found[2]]
    assert total == pytest.approx(int(found[3]) * float(found[4]), rel=0.3, abs=1.1)  # both are rounded
    assert int(found[3]) == own_tasks(home)["mine-5shot"].pretraining.steps
    assert "first pretrains" not in call(*arguments, "--quiet")[2]


def test_the_first_step_does_not_count_even_on_a_slow_machine(photos, home, messages, monkeypatch):
    dataset = prepare_dataset(home, "mine", photos, False, messages, own=SMALL)
    steps, step = [], PretrainingTrainer._train_step
    monkeypatch.setattr(
        PretrainingTrainer, "_train_step", lambda self, *arguments: steps.append(step(self, *arguments))
    )
    measure_seconds_per_step(own_tasks(home)["mine-5shot"], dataset, torch.device("cpu"), most=0.0)
    assert len(steps) == 2


def test_an_error_is_one_line_whatever_a_file_is_called(photos, call):
    try:
        (photos / "class 3" / "a\nb\x1b[2J.png").write_bytes(b"<html>")
    except OSError:
        pytest.skip("this file system takes no such names")
    arguments = ("data", "prepare", "mine", "--from", str(photos), "--size", "16")
    status, _, err = call(*arguments)
    assert status == 2
    (message,) = (line for line in err.splitlines() if line.startswith("ifsl-bench: "))
    assert r"class 3/a\nb\x1b[2J.png: it is no image but an HTML page" in message
    assert "\x1b" not in err
    status, _, err = call(*arguments, "--allow-partial")
    assert status == 0, err
    (message,) = (line for line in err.splitlines() if line.startswith("warning: left out"))
    assert r"a\nb\x1b[2J.png" in message


# -- tasks


def test_a_task_file_is_for_other_data_only_if_it_says_so(photos, home, messages):
    dataset = prepare_dataset(home, "mine", photos, False, messages, own=SMALL)
    path = home.tasks / "mine.toml"
    pin = f'fingerprint = "{dataset.fingerprint}"\n'
    unpinned = path.read_text().replace(pin, "").replace("flip = false", "flip = true")
    assert unpinned != path.read_text()
    bare = "".join(line for line in unpinned.splitlines(keepends=True) if not line.startswith("#"))
    for text in (unpinned, bare):
        path.write_text(text)
        prepare_dataset(home, "mine", photos, False, messages, own=SMALL)
        assert path.read_text() == text
        assert load_tasks("mine-1shot", home=home)[0].dataset.fingerprint is None
    path.write_text(unpinned)
    other_data = prepare_dataset(
        home, "mine", photos, True, messages, own=OwnOptions(size=20)
    )  # its mean is not that of these
    assert own_tasks(home)["mine-1shot"].dataset.fingerprint == other_data.fingerprint
    assert (home.tasks / "mine.toml.old-0").read_text() == unpinned


# -- images of a published data set


def test_files_of_several_data_sets_are_sent_to_each(home, tmp_path):
    folder = touched(tmp_path / "il", "n01440764/n01440764_10026.JPEG")
    message = refused(home, "tiered-imagenet-2018", folder, "holds the training images of ILSVRC-2012")
    assert "which makes data set 'mini-imagenet-ilsvrc' (" in message
    assert " or 'tiered-imagenet' (" in message
    assert "not 'tiered-imagenet-2018'; to prepare it: " in message
    for name in ("mini-imagenet-ilsvrc", "tiered-imagenet"):
        assert f"ifsl-bench data prepare {name} --from {folder}" in message


CHARACTERS = [f"alphabet {a}/character {c}" for a in range(6) for c in range(5)]


def by_side(sides: dict[str, int]) -> dict[str, list[str]]:
    return {side: [f"{side}/{side.lower()} {i}" for i in range(count)] for side, count in sides.items()}


def names(folders: list[str]) -> list[str]:
    return [folder.partition("/")[2] for folder in folders]


USUAL = by_side({"train": 25, "val": 5, "test": 6})


@pytest.mark.parametrize(
    ("counts", "of_pools", "protocol"),
    [
        ({"Train": 25, "VAL": 5, "test": 6}, ["base/train", "novel/val", "novel/test"], "shared"),
        ({"base": 30, "novel-train": 7, "novel-val": 5, "novel-test": 6}, ["base/train", *POOL_NAMES[3:]], "separate"),
    ],
)
def test_folders_called_after_sides_are_the_division(counts, of_pools, protocol, tmp_path, home, messages):
    sides = by_side(counts)
    root = written(tmp_path / "x" / "images", [*chain(*sides.values())])
    dataset = prepare_dataset(home, "mine", root.parent, False, messages, own=SMALL)
    for pool, folders in zip(of_pools, sides.values(), strict=True):
        assert list(dataset.pool(pool).class_names) == names(folders)
    assert dataset.has_pool("novel/train") == ("novel/train" in of_pools)
    told = ", ".join(f"{count} on {pool}" for pool, count in zip(["base", *of_pools[1:]], counts.values(), strict=True))
    assert any(f"divide the classes: {told}" in line for line in messages.said)
    assert load_tasks("mine-5shot", home=home)[0].protocol == protocol


@pytest.mark.parametrize(("base", "novel", "count"), [(20, 12, 2), (20, 55, 10), (20, 9, None), (60, 12, None)])
def test_a_task_in_sessions_is_written_where_classes_and_images_suffice(base, novel, count, tmp_path, home, messages):
    """Ten images of a class are too few for five shots and as many queries as a base class has: a tenth of 60, 6."""
    for side, folders in by_side({"train": 20, "val": 5, "test": novel}).items():
        written(tmp_path / "x", folders, base if side == "train" else 10)
    dataset = prepare_dataset(home, "mine", tmp_path / "x", False, messages, own=SMALL)
    tasks = {task.name: task for task in own_tasks(home).values()}
    assert tasks.keys() == {"mine-1shot", "mine-5shot", *(["mine-sessions"] if count else [])}
    lines = [line for line in messages.said if "mine-sessions is out of reach" in line]
    few = [line for line in messages.said if "two sessions of 5 need 10 classes in novel/test, which has 9" in line]
    command = "--method ncm --task mine-5shot --sessions 2 --ways 4"
    assert [line.partition("run ")[2] for line in few] == [command] * (novel == 9)
    assert not few or not list_infeasible_tasks(dataset, load_tasks("mine-5shot+ways=4+sessions=2", home=home))
    if count:
        assert (tasks["mine-sessions"].sessions.count, tasks["mine-sessions"].sessions.ways) == (count, 5)
    assert len(lines) == (base == 60)


def test_the_same_classes_in_train_and_val_are_no_division_of_classes(tmp_path, home):
    root = touched(tmp_path / "x", *(f"{side}/class {i}/1.png" for side in ("train", "val") for i in range(24)))
    message = r"class 'class 0' is in several of the folders train, val of .*with --from"
    refused(home, "mine", root, message, own=SMALL)


def test_a_folder_beside_train_val_and_test_is_named(tmp_path, home):
    """It would be a class, and the sides classes too."""
    root = touched(tmp_path / "images", *(f"{folder}/1.png" for folder in [*chain(*USUAL.values()), "extra/x"]))
    message = r"sides of a data set \(test, train, val\) and others \(extra\); move the others elsewhere"
    refused(home, "mine", root, message, own=SMALL)
    assert "test" in classes_of(touched(tmp_path / "plain", "test/1.png", "a/1.png")), "a class may be called that"


def test_a_seed_or_a_file_goes_before_folders(tmp_path, home, messages):
    root = written(tmp_path / "x", [*chain(*USUAL.values())])
    dataset = prepare_dataset(home, "seeded", root, False, messages, own=OwnOptions(size=16, split_seed=4))
    sides = draw_sides({name: range(20) for name in names([*chain(*USUAL.values())])}, 4)
    assert set(dataset.pool("novel/test").class_names) == {name for name, side in sides.items() if side == "novel/test"}
    assert any("--split-seed divides the classes, not the folders test, train, val" in line for line in messages.warned)
    lines = [f"{name},{'test' if side == 'val' else 'val' if side == 'test' else 'base'}"
             for side, folders in USUAL.items() for name in names(folders)]  # fmt: skip
    (tmp_path / "split.csv").write_text("\n".join(["class,split", *lines]))
    dataset = prepare_dataset(home, "listed", root, False, messages, own=OwnOptions(tmp_path / "split.csv", size=16))
    assert list(dataset.pool("novel/test").class_names) == names(USUAL["val"])


# -- folders of classes


def test_classes_that_hold_folders_alone_are_told(tmp_path, home, messages):
    root = written(tmp_path / "x", [f"alphabet {a}/character {c}" for a in range(24) for c in range(2)], images=10)
    dataset = prepare_dataset(home, "mine", root, False, messages, own=SMALL)
    assert dataset.pool("base/train").class_names[0].startswith("alphabet ")
    (warning,) = (line for line in messages.warned if "only folders" in line)
    assert "24 of the 24 classes contain only folders, 48 in total (alphabet 0: character 0, character 1)" in warning
    assert warning.endswith("add --depth 2")


def test_with_depth_the_inner_folders_are_the_classes(tmp_path, home, call):
    root = written(tmp_path / "x", CHARACTERS)
    arguments = ("data", "prepare", "mine", "--from", str(root), "--home", str(home.cache), "--size", "16")
    status, _, err = call(*arguments, "--depth", "2")
    assert status == 0, err
    assert "only folders" not in err
    dataset = open_dataset(home.data / "mine")
    classes = [name for pool in POOL_NAMES[2:] if dataset.has_pool(pool) for name in dataset.pool(pool).class_names]
    assert sorted(classes) == sorted(CHARACTERS)
    assert "with other settings" in call(*arguments)[2]


# -- enlarged


def test_images_that_are_enlarged_are_counted(tmp_path, home, messages):
    root = written(tmp_path / "x", [f"class {i}" for i in range(24)])
    for i in range(7):
        Image.new("RGB", (40 + i, 90), (i * 9, 3, 3)).save(root / "class 3" / f"large {i}.png")
    Image.new("RGB", (60, 11), (1, 2, 3)).save(root / "class 4" / "flat.jpg")
    dataset = prepare_dataset(home, "mine", root, False, messages, own=OwnOptions(size=40))
    (warning,) = (line for line in messages.warned if "were enlarged" in line)
    assert "481 of 488 images were enlarged to 40 x 40 pixels; the smallest had a side of 11" in warning
    pools = dataset.manifest["pools"].values()
    assert sum(pool["enlarged"]["images"] for pool in pools) == 24 * 20 + 1
