"""Images of the user's own: one command makes the data set and its tasks, which run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ifsl_bench.data import suggested_tasks as own_task
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.sets.folder import OwnOptions, draw_sides, read_sides
from ifsl_bench.protocols.tasks.task_files import own_tasks
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import Reporter
from tests.data.helpers import of_class, refused

BIRDS = [f"bird {i}" for i in range(1, 25)]
FORMS = {"jpg": "JPEG", "JPEG": "JPEG", "png": "PNG", "webp": "WEBP"}


def colour(name: str, index: int) -> tuple[int, int, int]:
    return (int(name.split()[1]) * 10 % 256, (60 + 15 * index) % 256, 40)


def write_birds(root: Path, names: list[str] = BIRDS, images: int = 12) -> Path:
    """Class folders with images of one colour, of several formats and shapes, numbered without leading zeros."""
    for name in names:
        (root / name).mkdir(parents=True)
        for index in range(images):
            suffix = list(FORMS)[index % len(FORMS)]
            image = Image.new("RGB", (30 + index, 20 + index), colour(name, index))
            if index == 5:
                image = image.convert("CMYK")
            options = {"quality": 95} if FORMS[suffix] != "PNG" else {}
            image.save(root / name / f"image {index}.{suffix}", FORMS[suffix], **options)
        (root / name / "about.txt").write_text("no image")
    return root


def write_split(path: Path, sides: dict[str, str]) -> Path:
    path.write_text("\n".join(["class,split", *(f"{name},{side}" for name, side in sides.items())]) + "\n")
    return path


def test_split_by_a_file(tmp_path, home):
    """Base images are divided 80/10/10 in the order of their numbers, also beyond nine."""
    more = [f"bird {i}" for i in range(101, 113)]
    sides = {name: "base" if i < 13 else "val" if i < 18 else "test" for i, name in enumerate(BIRDS)}
    split = write_split(tmp_path / "split.csv", sides | dict.fromkeys(more, "train"))
    source = write_birds(tmp_path / "photos", [*BIRDS, *more])
    dataset = prepare_dataset(home, "birds", source, False, Reporter(), own=OwnOptions(split, size=32))
    assert dataset.shape == (32, 32, 3)
    assert not dataset.has_pool("novel/train")
    assert not dataset.is_partial
    base = [*BIRDS[:13], *more]  # in natural order: bird 101 after bird 13
    for name, classes, indices in (
        ("base/train", base, range(10)), ("base/val", base, [10]), ("base/test", base, [11]),
        ("novel/val", BIRDS[13:18], range(12)), ("novel/test", BIRDS[18:], range(12)),
    ):  # fmt: skip
        pool = dataset.pool(name)
        assert list(pool.class_names) == classes
        for bird in classes:
            for image, index in zip(of_class(pool, bird), indices, strict=True):
                assert np.abs(image.astype(int) - colour(bird, index)).max() <= 12, (name, bird, index)


@pytest.mark.slow("whole runs")
def test_one_command_makes_data_and_tasks_that_run(tmp_path, monkeypatch, call):
    write_birds(tmp_path / "photos", images=20)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(own_task, "PRETRAINING_EPOCHS", 2)
    status, out, err = call("data", "prepare", "birds", "--from", str(tmp_path / "photos"), "--size", "16")
    assert status == 0, err
    assert "birds-5shot" in err
    assert "fingerprint" in out
    run = ("run", "--method", "imprint", "--task")
    for arguments, text in (
        (("tasks",), "birds 14+5, 5 shots"),
        (("data", "list"), "your own"),
        ((*run, "birds-5shot+ways=3", "--episodes", "10"), "imprint"),
        (("table", "birds-5shot+ways=3"), "yours"),
        (("data", "stats", "birds"), "N. Img"),
    ):
        status, out, err = call(*arguments)
        assert status == 0, err
        assert text in out
    status, _, err = call(*run, "birds-7shot")
    assert status == 2
    assert "'birds-1shot' or 'birds-5shot'" in err or "'birds-5shot' or 'birds-1shot'" in err
    status, _, err = call(*run, "birds-5shot", "--home", str(tmp_path / "other"))
    assert status == 2
    assert "unknown task 'birds-5shot'" in err


def test_seeded_sides():
    names = [f"class {i}" for i in range(100)]

    def sides_of(names: list[str], seed: int, images: int = 20) -> dict[str, str]:
        return draw_sides({name: range(images) for name in names}, seed)

    sides = sides_of(names, 0)
    assert {side: list(sides.values()).count(side) for side in set(sides.values())} == {
        "base": 64, "novel/val": 16, "novel/test": 20,
    }  # fmt: skip
    assert sides == sides_of(names[::-1], 0)
    assert sides != sides_of(names, 1)
    fewer = sides_of(names[:-1], 0)
    assert sum(sides[name] != fewer[name] for name in fewer) <= 3
    for count, images, expected in (
        (20, 20, (10, 5, 5)),  # no two sessions with 10 base classes
        (27, 20, (17, 5, 5)),  # two sessions would leave 12 base classes, with 24 queries in all, one too few
        (28, 20, (13, 5, 10)),
        (30, 20, (15, 5, 10)),
        (30, 14, (19, 5, 6)),
        (60, 20, (38, 10, 12)),
    ):
        small = list(sides_of(names[:count], 0, images).values())
        assert (small.count("base"), small.count("novel/val"), small.count("novel/test")) == expected


def test_thirty_classes_have_sessions_and_the_division_is_reported(tmp_path, home, messages):
    folder = tmp_path / "photos"
    for number in range(30):
        (folder / f"class {number}").mkdir(parents=True)
        for i in range(20):
            Image.new("L", (16, 16), (number * 7 + i) % 256).save(folder / f"class {number}" / f"{i}.png")
    prepare_dataset(home, "mine", folder, False, messages, own=OwnOptions(size=16))
    assert any(
        "15 on base, 5 on novel/val, 10 on novel/test; novel/test has 10 in place of 6, for two sessions of 5" in line
        for line in messages.said
    )
    sessions = own_tasks(home)["mine-sessions"].sessions
    assert (sessions.count, sessions.ways) == (2, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its first line must name the columns 'class' and 'split', it is empty"),
        ("a,b\nx,base\n", "it is 'a', 'b'"),
        ("class,split\nx,bsae\n", r"unknown side 'bsae' of class 'x' in .*split\.csv, line 2.*did you mean 'base'"),
        ("class,split\nx,base\nx,test\n", "line 3: class 'x' is there twice"),
        ("class,split\n,base\n", "line 2: the class is missing"),
        ("class,split\nx\n", "unknown side '' of class 'x'"),
        (f"class,split\nx,base\n{'y' * 140_000},base\n", r"split\.csv, line 3: field larger than field limit"),
    ],
)
def test_wrong_split_files_say_where(tmp_path, text, message):
    (tmp_path / "split.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_sides(tmp_path / "split.csv")


def test_split_files_as_people_write_them(tmp_path):
    (tmp_path / "split.csv").write_bytes("\ufeffSplit, WNID,name\r\ntrain_b, n1 ,x\r\nTEST,n2,y\r\n".encode())
    assert read_sides(tmp_path / "split.csv") == {"n1": "novel/train", "n2": "novel/test"}
    with pytest.raises(UserError, match=r"cannot read the split .*none\.csv: No such file"):
        read_sides(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("names", "images", "message"),
    [
        (BIRDS[:19], 10, "need at least 20 classes, 10 on base, .*; there are 19: 9 on base, .*, by the seeded split"),
        (BIRDS, 9, r"24 of 24 classes have fewer than 10 images: bird 1 \(9\), .* and 21 more"),
        (BIRDS, 12, "a tenth of each base class's images makes 14 in 14 classes"),
    ],
)
def test_too_little_is_said(tmp_path, names, images, message, home):
    refused(home, "birds", write_birds(tmp_path / "photos", names, images), message)
    assert [p.name for p in home.data.iterdir() if p.suffix != ".lock"] == []
    assert not home.tasks.exists()


def test_what_is_missing_needs_consent(tmp_path, home):
    source = write_birds(tmp_path / "photos", BIRDS[:7], images=80)
    write_birds(source, BIRDS[9:])
    write_birds(source, BIRDS[7:8], images=5)
    sides = {name: "train_a" if i < 7 else "train_b" if i < 14 else "val" if i < 19 else "test"
             for i, name in enumerate(BIRDS)}  # fmt: skip
    options = OwnOptions(write_split(tmp_path / "split.csv", sides), size=16)
    refused(home, "birds", source, r"1 of 24 classes in .*split\.csv have no images in .*photos: bird 9\.", own=options)
    (source / "bird 9").mkdir()
    dataset = prepare_dataset(home, "birds", source, False, Reporter(), allow_partial=True, own=options)
    assert dataset.is_partial
    assert "bird 8 (5)" in dataset.manifest["about"]["missing"][1]
    assert not {"bird 8", "bird 9"} & set(dataset.pool("novel/train").class_names)


def into_train_and_val(root: Path) -> None:
    for i, name in enumerate(BIRDS):
        (root / ("train" if i < 12 else "val")).mkdir(exist_ok=True)
        shutil.move(root / name, root / ("train" if i < 12 else "val") / name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: Image.new("RGB", (9, 9)).save(root / "cover.png"), r"cover\.png is in no folder of a class"),
        (lambda root: [shutil.rmtree(root / n) for n in BIRDS[1:]], "all 10 images are in one folder, .*bird 1, which"),
        (into_train_and_val, "there are .* 0 on novel/test, by the folders train, val"),
        (lambda root: [p.unlink() for n in BIRDS for p in (root / n).glob("image*")], "none of the forms of data set"),
    ],
    ids=["stray", "one class", "train and val", "no images"],
)
def test_wrong_layouts_are_named(tmp_path, make, message, home):
    source = write_birds(tmp_path / "photos", images=10)
    make(source)
    refused(home, "birds", source, message, own=OwnOptions(size=16))


def test_other_settings_do_not_replace_a_data_set_silently(tmp_path, home, messages):
    source = write_birds(tmp_path / "photos", images=20)
    first = prepare_dataset(home, "birds", source, False, Reporter(), own=OwnOptions(size=16))
    again = prepare_dataset(home, "birds", source, False, messages, own=OwnOptions(size=16, split_seed=0))
    assert again.fingerprint == first.fingerprint
    assert any("prepared already" in line for line in messages.said)
    with pytest.raises(UserError, match="with other settings; --force replaces it"):
        prepare_dataset(home, "birds", source, False, Reporter(), own=OwnOptions(size=16, split_seed=1))
    second = prepare_dataset(home, "birds", source, True, Reporter(), own=OwnOptions(size=16, split_seed=1))
    assert second.fingerprint != first.fingerprint


def test_a_seed_divides_other_than_folders_do(tmp_path, home):
    source = tmp_path / "photos"
    for side, names in (("train", BIRDS[:14]), ("val", BIRDS[14:19]), ("test", BIRDS[19:])):
        write_birds(source / side, names, images=20)
    prepare_dataset(home, "birds", source, False, Reporter(), own=OwnOptions(size=16))
    with pytest.raises(UserError, match="with other settings; --force replaces it"):
        prepare_dataset(home, "birds", source, False, Reporter(), own=OwnOptions(size=16, split_seed=0))
    with pytest.raises(UserError, match="say where its files are with --from PATH"):
        prepare_dataset(home, "birds", None, True, Reporter())
    prepare_dataset(home, "birds", source, True, Reporter(), own=OwnOptions(size=16, split_seed=0))
    with pytest.raises(UserError, match="with other settings; --force replaces it"):
        prepare_dataset(home, "birds", source, False, Reporter(), own=OwnOptions(size=16))


def test_names_that_are_not_utf8_are_refused(tmp_path, home):
    source = write_birds(tmp_path / "photos", BIRDS[:4], images=4)
    try:
        os.rename(source / "bird 3", os.fsencode(source) + b"/caf\xe9")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    refused(home, "birds", source, r"holds 5 files with a name that is not UTF-8 \(caf\\xe9/about\.txt, .* 2 more")


def test_names_and_options_that_do_not_fit(tmp_path, features_folder, home):
    birds = write_birds(tmp_path / "photos", BIRDS[:2], images=1)
    message = (
        r"there is a task 'tiered-1shot' already, on data set 'tiered-imagenet', which 'ifsl-bench data prepare "
        r"tiered-imagenet' makes; for a data set of your own choose another name"
    )
    refused(home, "tiered", birds, message)
    message = "--size: for data sets of your own; 'tiny' is divided as it is published"
    refused(home, "tiny", birds, message, own=OwnOptions(size=32))
    message = "--split-seed: for images; .* holds frozen features"
    refused(home, "mine", features_folder, message, own=OwnOptions(split_seed=1))
    message = r"bird 1/image 0.*is neither a folder nor a zip or tar archive.*a JPEG image"
    refused(home, "mine", birds / "bird 1" / "image 0.jpg", message)
