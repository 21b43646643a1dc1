"""What people's folders hold beside images, how their names are written, and what becomes of an edited task file."""

from __future__ import annotations

import unicodedata
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.preparing.prepare import prepare
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.sets.folder import OwnOptions, read_sides, tell_ignored
from ifsl_bench.data.sets.layout import find_layout
from ifsl_bench.data.source import Import
from ifsl_bench.protocol.task_files import find, own

CLASSES = [f"class {i}" for i in range(24)]
SMALL = OwnOptions(size=16)
COMPOSED, APART = (unicodedata.normalize(form, "Größe ü") for form in ("NFC", "NFD"))


def write_photos(root: Path, names: list[str] = CLASSES, images: int = 20) -> Path:
    for c, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for i in range(images):
            Image.new("RGB", (16, 16), (c * 9, i * 11, 7)).save(root / name / f"{i}.png")
    return root


@pytest.fixture
def photos(tmp_path) -> Path:
    return write_photos(tmp_path / "photos")


def touched(root: Path, *names: str) -> Path:
    """Empty files, which the listing of classes does not open."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def classes_of(path: Path) -> dict[str, list[str]]:
    with open_tree(path) as tree:
        return dict(find_layout(tree).classes)


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
            tell_ignored(Import(tree, messages))
    assert messages.warned == []


def test_files_that_are_no_images_are_counted_and_named(tmp_path, messages):
    heic = [f"a/{i}.heic" for i in range(8)] + ["b/1.HEIC"]
    folder = touched(tmp_path / "x", "a/1.png", "b/1.png", *heic, "b/1.dng", "b/noending", "b/2.dng")
    with open_tree(folder) as tree:
        to = Import(tree, messages)
        tell_ignored(to)
    (told,) = messages.warned
    assert "ignored 12 files that do not look like images: a/0.heic, a/1.heic, a/2.heic and 9 more" in told
    assert "images end in .jpg, .jpeg, .png" in told
    assert not to.about["partial"]


# -- links


@pytest.mark.parametrize("target", ["nowhere", "class 99"], ids=["nowhere", "itself"])
def test_a_broken_link_to_a_class_is_not_passed_over(photos, home, messages, target):
    (photos / "class 99").symlink_to(target)
    with pytest.raises(UserError, match=r"1 links in .*photos cannot be followed: class 99\. Mend or remove them, or"):
        prepare(home, "mine", photos, False, Reporter(), own=SMALL)
    dataset = prepare(home, "mine", photos, False, messages, allow_partial=True, own=SMALL)
    assert dataset.partial
    assert "class 99" in dataset.manifest["about"]["missing"][0]
    assert any("class 99" in line for line in messages.warned)


# -- layouts and names


@pytest.mark.parametrize(
    ("names", "where"),
    [(["one/only/1.png", "one/only/2.png"], "/x/one/only"), (["1.png", "2.png"], "/x")],
    ids=["a folder", "no folder"],
)
def test_one_folder_of_images_is_said_to_be_one(tmp_path, names, where):
    with pytest.raises(UserError) as caught:
        classes_of(touched(tmp_path / "x", *names))
    assert f"all 2 images are in one folder, {tmp_path}{where}, which makes one class" in str(caught.value)


def test_names_are_the_same_however_their_accents_are_written(tmp_path):
    """macOS writes o and its dots apart, in its file system or in archives; most others as one letter."""
    assert COMPOSED != APART
    with zipfile.ZipFile(tmp_path / "mac.zip", "w") as archive:
        for name in (f"{APART}/1.png", "b/a\u030a.png", "b/b.png", "b/z.png"):
            archive.writestr(name, b"")
    assert list(classes_of(tmp_path / "mac.zip")) == [COMPOSED, "b"]
    assert classes_of(tmp_path / "mac.zip")["b"][-1] == "b/a\u030a.png", "in the place of one letter, after z"
    for written in (APART, COMPOSED):
        (tmp_path / "split.csv").write_text(f"class,split\n{written},base\n", encoding="utf-8")
        assert read_sides(tmp_path / "split.csv") == {COMPOSED: "base"}
    (tmp_path / "split.csv").write_text(f"class,split\n{APART},base\n{COMPOSED},val\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"line 3: class '{COMPOSED}' is there twice"):
        read_sides(tmp_path / "split.csv")


def test_an_error_is_one_line_whatever_a_file_is_called(photos, call):
    try:
        (photos / "class 3" / "a\nb\x1b[2J.png").write_bytes(b"<html>")
    except OSError:
        pytest.skip("this file system takes no such names")
    arguments = ("data", "prepare", "mine", "--from", str(photos), "--size", "16")
    status, _, shown = call(*arguments)
    assert status == 2
    (told,) = (line for line in shown.splitlines() if line.startswith("ifsl-bench: "))
    assert r"class 3/a\nb\x1b[2J.png: it is no image but an HTML page" in told
    assert "\x1b" not in shown
    status, _, shown = call(*arguments, "--allow-partial")
    assert status == 0, shown
    (told,) = (line for line in shown.splitlines() if line.startswith("warning: left out"))
    assert r"a\nb\x1b[2J.png" in told


# -- tasks


def test_a_task_file_is_for_other_data_only_if_it_says_so(photos, home, messages):
    dataset = prepare(home, "mine", photos, False, messages, own=SMALL)
    path = home.tasks / "mine.toml"
    pin = f'fingerprint = "{dataset.fingerprint}"\n'
    unpinned = path.read_text().replace(pin, "").replace("flip = false", "flip = true")
    assert unpinned != path.read_text()
    bare = "".join(line for line in unpinned.splitlines(keepends=True) if not line.startswith("#"))
    for text in (unpinned, bare):
        path.write_text(text)
        prepare(home, "mine", photos, False, messages, own=SMALL)
        assert path.read_text() == text
        assert find("mine-1shot", home=home)[0].dataset.fingerprint is None
    path.write_text(unpinned)
    other = prepare(home, "mine", photos, True, messages, own=OwnOptions(size=20))  # its mean is not that of these
    assert own(home)["mine-1shot"].dataset.fingerprint == other.fingerprint
    assert (home.tasks / "mine.toml.old-0").read_text() == unpinned


def test_a_name_whose_tasks_are_there_is_pointed_to_its_data_set(photos, home):
    with pytest.raises(
        UserError,
        match=r"there is a task 'tiered-1shot' already, on data set 'tiered-imagenet', which 'ifsl-bench data prepare "
        r"tiered-imagenet' makes; for a data set of your own choose another name",
    ):
        prepare(home, "tiered", photos, False, Reporter(), own=SMALL)


# -- images of a published data set


def test_files_of_several_data_sets_are_sent_to_each(home, tmp_path):
    folder = touched(tmp_path / "il", "n01440764/n01440764_10026.JPEG")
    with pytest.raises(UserError) as caught:
        prepare(home, "tiered-imagenet-2018", folder, False, Reporter())
    told = str(caught.value)
    assert "holds the training images of ILSVRC-2012" in told
    assert "which makes data set 'mini-imagenet-ilsvrc' (" in told
    assert " or 'tiered-imagenet' (" in told
    assert "not 'tiered-imagenet-2018'; to prepare it: " in told
    for name in ("mini-imagenet-ilsvrc", "tiered-imagenet"):
        assert f"ifsl-bench data prepare {name} --from {folder}" in told
