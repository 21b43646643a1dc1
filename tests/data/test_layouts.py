"""Which folders are classes, which sides they are on, and what an import says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.pools import POOLS
from ifsl_bench.data.preparing.prepare import prepare
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.sets.folder import OwnOptions, seeded_sides
from ifsl_bench.data.sets.layout import find_layout
from ifsl_bench.protocol.task_files import find

SMALL = OwnOptions(size=16)
CHARACTERS = [f"alphabet {a}/character {c}" for a in range(6) for c in range(5)]


def written(root: Path, folders: list[str], images: int = 20, size: int = 16) -> Path:
    for number, name in enumerate(folders):
        (root / name).mkdir(parents=True)
        for i in range(images):
            Image.new("L", (size, size + i % 2), (number * 7 + i * 3) % 256).save(root / name / f"{i}.png")
    return root


def by_side(sides: dict[str, int]) -> dict[str, list[str]]:
    return {side: [f"{side} {i}" for i in range(count)] for side, count in sides.items()}


USUAL = {"train": 25, "val": 5, "test": 6}
FOUR = {"base": 30, "novel-train": 7, "novel-val": 5, "novel-test": 6}


@pytest.mark.parametrize("write", [str.lower, str.upper, str.capitalize], ids=["lower", "upper", "capital"])
def test_folders_called_train_val_and_test_are_the_division(write, tmp_path, home, messages):
    named = by_side(USUAL)
    root = written(tmp_path / "x" / "images", [f"{write(side)}/{name}" for side in named for name in named[side]])
    dataset = prepare(home, "mine", root.parent, False, messages, own=SMALL)
    for pool, side in (("base/train", "train"), ("novel/val", "val"), ("novel/test", "test")):
        assert list(dataset.pool(pool).classes) == named[side]
    assert not dataset.has("novel/train")
    assert any("divide the classes: 25 on base, 5 on novel/val, 6 on novel/test" in line for line in messages.said)
    assert find("mine-5shot", home=home)[0].protocol == "shared"


def test_four_folders_make_the_separate_protocol(tmp_path, home, messages):
    named = by_side(FOUR)
    root = written(tmp_path / "x", [f"{side}/{name}" for side in named for name in named[side]], images=20)
    dataset = prepare(home, "mine", root, False, messages, own=SMALL)
    assert [len(dataset.pool(pool).classes) for pool in POOLS] == [30, 30, 30, 7, 5, 6]
    assert list(dataset.pool("novel/train").classes) == named["novel-train"]
    assert find("mine-5shot", home=home)[0].protocol == "separate"


def test_the_same_classes_in_train_and_val_are_no_division_of_classes(tmp_path, home, messages):
    root = written(tmp_path / "x", [f"{side}/class {i}" for side in ("train", "val") for i in range(24)])
    with pytest.raises(UserError, match=r"class 'class 0' is in several of the folders train, val of .*with --from"):
        prepare(home, "mine", root, False, messages, own=SMALL)
    assert prepare(home, "mine", root / "train", False, messages, own=SMALL).has("base/train")


def test_a_folder_beside_train_val_and_test_is_named(tmp_path, home, messages):
    """It would be a class, and the sides classes too."""
    named = by_side(USUAL)
    folders = [f"{side}/{name}" for side in named for name in named[side]]
    root = written(tmp_path / "images", [*folders, "extra/x"], images=2)
    with pytest.raises(UserError, match=r"sides of a data set \(test, train, val\), and beside them extra; move these"):
        prepare(home, "mine", root, False, messages, own=SMALL)
    plain = written(tmp_path / "plain", ["test", *(f"class {i}" for i in range(30))])  # a class may be called that
    with open_tree(plain) as tree:
        assert "test" in find_layout(tree).classes


def test_a_seed_or_a_file_goes_before_folders(tmp_path, home, messages):
    named = by_side(USUAL)
    root = written(tmp_path / "x", [f"{side}/{name}" for side in named for name in named[side]])
    dataset = prepare(home, "seeded", root, False, messages, own=OwnOptions(size=16, split_seed=4))
    sides = seeded_sides(sorted(name for names in named.values() for name in names), 4)
    assert set(dataset.pool("novel/test").classes) == {name for name, side in sides.items() if side == "novel/test"}
    assert any("--split-seed divides the classes, not the folders test, train, val" in line for line in messages.warned)
    lines = [f"{name},{'test' if side == 'val' else 'val' if side == 'test' else 'base'}"
             for side, names in named.items() for name in names]  # fmt: skip
    (tmp_path / "split.csv").write_text("\n".join(["class,split", *lines]))
    dataset = prepare(home, "listed", root, False, messages, own=OwnOptions(tmp_path / "split.csv", size=16))
    assert list(dataset.pool("novel/test").classes) == named["val"]


# -- folders of classes


def test_classes_that_hold_folders_alone_are_told(tmp_path, home, messages):
    root = written(tmp_path / "x", [f"alphabet {a}/character {c}" for a in range(24) for c in range(2)])
    dataset = prepare(home, "mine", root, False, messages, own=SMALL)
    assert dataset.pool("base/train").classes[0].startswith("alphabet ")
    (told,) = (line for line in messages.warned if "only folders" in line)
    assert "24 of the 24 classes contain only folders, 48 in total (alphabet 0: character 0, character 1)" in told
    assert told.endswith("add --depth 2")


def test_with_depth_the_inner_folders_are_the_classes(tmp_path, home, call):
    root = written(tmp_path / "x", CHARACTERS)
    status, out, err = call("data", "prepare", "mine", "--from", str(root), "--size", "16", "--depth", "2",
                            "--home", str(home.cache))  # fmt: skip
    assert status == 0, err
    assert "folders alone" not in err
    assert "alphabet 0/character" in out
    dataset = prepare(home, "mine", root, False, Silent(), own=OwnOptions(size=16, depth=2))
    names = [name for pool in POOLS[2:] if dataset.has(pool) for name in dataset.pool(pool).classes]
    assert sorted(names) == sorted(CHARACTERS)
    with pytest.raises(UserError, match="with other settings"):
        prepare(home, "mine", root, False, Silent(), own=SMALL)


class Silent:
    def __getattr__(self, name: str) -> object:
        return lambda *_: None


# -- enlarged


def test_images_that_are_enlarged_are_counted(tmp_path, home, messages):
    root = written(tmp_path / "x", [f"class {i}" for i in range(24)])
    for i in range(7):
        Image.new("RGB", (40 + i, 90), (i * 9, 3, 3)).save(root / "class 3" / f"large {i}.png")
    Image.new("RGB", (60, 11), (1, 2, 3)).save(root / "class 4" / "flat.jpg")
    dataset = prepare(home, "mine", root, False, messages, own=OwnOptions(size=40))
    (told,) = (line for line in messages.warned if "were enlarged" in line)
    assert "481 of 488 images were enlarged to 40 x 40 pixels; the smallest had a side of 11; --size sets" in told
    pools = dataset.manifest["pools"].values()
    assert sum(pool["enlarged"]["images"] for pool in pools) == 24 * 20 + 1
