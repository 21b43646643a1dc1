"""Folders and archives: the same files from every kind, and what is wrong with a file, by name."""

from __future__ import annotations

import bz2
import io
import os
import pickle
import re
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ifsl_bench.data.read.archive import Entry, describe_file_kind, open_tree
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import sha256_json
from ifsl_bench.utils.limits import ARCHIVE_MEMBERS
from tests.data.helpers import spoil

FILES = {
    "top/wnids.txt": b"a\nb\n",
    "top/a/a_2.JPEG": b"two" * 400,
    "top/a/a_10.JPEG": bytes(range(256)) * 5000,  # more than any buffer
    "top/b/ä ö.png": b"",
}


def make_folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def make_zip(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.mkdir("top/a")
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def add_files(archive: tarfile.TarFile, files: dict[str, bytes], prefix: str = "") -> None:
    for name, content in files.items():
        member = tarfile.TarInfo(prefix + name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


def make_tar(path: Path, files: dict[str, bytes], mode: str = "w", prefix: str = "") -> Path:
    with tarfile.open(path, mode) as archive:
        folder = tarfile.TarInfo(prefix + "top")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        add_files(archive, files, prefix)
    return path


def make_tar_of_tars(path: Path, files: dict[str, bytes]) -> Path:
    """A tar archive for each folder below ``top``, as ILSVRC-2012 is distributed."""
    inner: dict[str, dict[str, bytes]] = {}
    for name, content in files.items():
        folder, _, rest = name.removeprefix("top/").rpartition("/")
        inner.setdefault(folder, {})[rest] = content
    outer = {f"top/{rest}": content for rest, content in inner.pop("", {}).items()}
    for folder, members in inner.items():
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            add_files(archive, members)
        outer[f"top/{folder}.tar"] = buffer.getvalue()
    return make_tar(path, outer)


MAKERS = {
    "folder": make_folder,
    "zip": make_zip,
    "stored zip": lambda p, f: make_zip(p, f, zipfile.ZIP_STORED),
    "lzma zip": lambda p, f: make_zip(p, f, zipfile.ZIP_LZMA),
    "tar": make_tar,
    "tar of ./": lambda p, f: make_tar(p, f, prefix="./"),
    "tar of tars": make_tar_of_tars,
    "tar.gz": lambda p, f: make_tar(p, f, "w:gz"),
    "tar.bz2": lambda p, f: make_tar(p, f, "w:bz2"),
    "tar.xz": lambda p, f: make_tar(p, f, "w:xz"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_holds_the_same_files(kind, tmp_path):
    """The name does not matter: each archive is called ``data``."""
    path = MAKERS[kind](tmp_path / "data", FILES)
    with open_tree(path) as tree:
        assert tree.entries == [Entry(name, len(FILES[name])) for name in sorted(FILES)]
        entries = [tree.entry_by_path[name] for name in ("top/b/ä ö.png", "top/a/a_10.JPEG", "top/a/a_2.JPEG")]
        for entry in entries:
            assert tree.read_bytes(entry) == FILES[entry.path]
            with tree.open(entry) as file:
                assert file.read(7) + file.read() == FILES[entry.path]
        assert tree.find_by_name("a_2.JPEG").path == "top/a/a_2.JPEG"
        assert tree.find_by_name("a_3.JPEG") is None
        before = tree.identity_hash()
        assert before == tree.identity_hash()
    if path.is_file():
        os.utime(path, (1, 1))
    else:
        (path / "top/wnids.txt").write_bytes(b"longer than before")
    with open_tree(path) as tree:
        assert tree.identity_hash() != before


@pytest.mark.parametrize("kind", ["zip", "tar of tars", "tar.gz"])
def test_random_reading_from_several_threads(kind, tmp_path):
    files = {f"top/a/a_{i}.JPEG": bytes([i]) * (i * 777) for i in range(60)}
    with open_tree(MAKERS[kind](tmp_path / "data", files)) as tree, ThreadPoolExecutor(8) as pool:
        entries = [tree.entry_by_path[name] for _ in range(5) for name in files]
        for entry, content in zip(entries, pool.map(tree.read_bytes, entries), strict=True):
            assert content == files[entry.path]


def test_links_in_folders_are_followed_but_not_in_circles(tmp_path):
    make_folder(tmp_path / "real", {"x/1.png": b"1"})
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "linked").symlink_to(tmp_path / "real" / "x")
    (tmp_path / "tree" / "circle").symlink_to(tmp_path / "tree")
    (tmp_path / "tree" / "broken.png").symlink_to(tmp_path / "nowhere")
    with open_tree(tmp_path / "tree") as tree:
        assert tree.entries == [Entry("broken.png", 0, is_broken_link=True), Entry("linked/1.png", 1)]
        assert tree.read_bytes(tree.entries[1]) == b"1"
        with pytest.raises(UserError, match=r"cannot read .*broken\.png: No such file"):
            tree.read_bytes(tree.entries[0])
        assert tree.content_hashes() == tree.content_hashes()
        assert tree.identity_hash() == tree.identity_hash()


def test_files_that_are_there_twice_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a/1.png", b"x")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a/1.png", b"y")
    with open_tree(tmp_path / "a.zip") as tree, pytest.raises(UserError, match=r"1 file twice.*\(a/1\.png\)"):
        _ = tree.entries
    make_tar(tmp_path / "a.tar", {"a/1.png": b"x", "./a/1.png": b"y"})
    with open_tree(tmp_path / "a.tar") as tree, pytest.raises(UserError, match=r"\(a/1\.png\)"):
        _ = tree.entries


def test_several_files_of_one_name_are_ambiguous(tmp_path):
    tree = open_tree(make_folder(tmp_path, {"a/x.pkl": b"", "b/x.pkl": b""}))
    with pytest.raises(UserError, match=r"2 files called x\.pkl \(a/x\.pkl, b/x\.pkl\)"):
        tree.find_by_name("x.pkl")


@pytest.mark.parametrize("shared", ["", "top/", "top/of/it/"])
def test_what_tells_one_content_from_another_is_below_the_folder_that_all_share(shared, tmp_path):
    paths = ["a-b/1.png", "a/1.png", "a/b/2.png", "ab.png"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for path in paths:
            archive.writestr(shared + path, path)
    with open_tree(tmp_path / "a.zip") as tree:
        assert tree.content_hashes()["names"] == sha256_json([[path, len(path)] for path in paths])


def test_an_entry_is_found_again_after_the_archive_was_read(tmp_path):
    """A step back in a member that is compressed reads it anew."""
    content = os.urandom(300_000)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = tmp_path / "a.zip"
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("x.pkl", content)
        with open_tree(path) as tree, tree.open(Entry("x.pkl", len(content))) as file:
            assert file.read(200_000) == content[:200_000]
            file.seek(5)
            assert file.read(100) == content[5:105]
            file.seek(-3, os.SEEK_END)
            assert file.read() == content[-3:]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"\n <!DOCTYPE html><title>404</title>", "HTML page"),
        (b'<!-- x --><html lang="en">', "HTML page"),
        (b'{"error": "quota exceeded"}', "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        (b"7z\xbc\xaf\x27\x1c000", "7z"),
        (b"\x80\x04\x95", "pickle"),
        (b"what is this", "a file of no known kind"),
    ],
)
def test_what_is_no_archive_is_called_what_it_is(content, words, tmp_path):
    path = tmp_path / "tiny-imagenet-200.zip"
    path.write_bytes(content)
    assert words in describe_file_kind(content)
    with pytest.raises(UserError, match=r"tiny-imagenet-200\.zip is neither a folder nor a zip or tar") as error:
        open_tree(path)
    assert words in str(error.value)


def test_compressed_things_that_are_no_tar_archive(tmp_path):
    (tmp_path / "x").write_bytes(bz2.compress(pickle.dumps({"a": 1})))
    inside = "is compressed by bzip2, but what is inside is no tar archive but a Python pickle"
    with open_tree(tmp_path / "x") as tree, pytest.raises(UserError, match=inside):
        _ = tree.entries


def test_encrypted_files_are_said_to_be(tmp_path):
    path = tmp_path / "data"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/1.png", b"secret")
    content = bytearray(path.read_bytes())
    for start, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(start) + offset] |= 1
    path.write_bytes(content)
    with open_tree(path) as tree, pytest.raises(UserError, match="encrypted"):
        tree.read_bytes(tree.entries[0])


@pytest.mark.parametrize("kind", ["zip", "tar", "tar of tars", "tar.gz", "tar.bz2", "tar.xz"])
@pytest.mark.parametrize("share", [0.0002, 0.5, 0.9])
def test_archives_that_are_cut_short_are_named(kind, share, tmp_path):
    """Cut anywhere, also where the standard library takes the cut for the end of the list."""
    path = MAKERS[kind](tmp_path / "data", {f"top/a/a_{i}.JPEG": os.urandom(700) for i in range(90)})
    content = path.read_bytes()
    path.write_bytes(content[: max(600, int(share * len(content)))])
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}.*(cut short|damaged)"), open_tree(path) as tree:
        _ = tree.entries


@pytest.mark.parametrize("kind", ["zip", "stored zip", "lzma zip"])
def test_damaged_content_in_a_zip_archive_is_named(kind, tmp_path):
    files = {"top/good.JPEG": os.urandom(3000), "top/bad.JPEG": os.urandom(3000)}
    path = MAKERS[kind](tmp_path / "data", files)
    spoil(path, path.read_bytes().index(b"top/bad.JPEG") + 1000)
    with open_tree(path) as tree:
        assert tree.read_bytes(tree.entry_by_path["top/good.JPEG"]) == files["top/good.JPEG"]
        with pytest.raises(UserError, match=r"cannot read top/bad\.JPEG in .*data: its content is damaged"):
            tree.read_bytes(tree.entry_by_path["top/bad.JPEG"])


@pytest.mark.slow("a long list is made and read")
@pytest.mark.parametrize("kind", ["stored zip", "tar"])
def test_a_list_as_long_as_is_taken_fits_into_a_gigabyte(kind, tmp_path, traced):
    """Measured on a short one, whose files are empty."""
    names = [f"n{i // 100:04}/image_{i:07}.png" for i in range(3_000)]
    path = MAKERS[kind](tmp_path / "data", dict.fromkeys(names, b""))
    peaks = []
    for _ in range(3):  # modules imported on first use, and other threads of the process, take memory too
        with traced() as memory, open_tree(path) as tree:
            assert len(tree.entries) == len(names)
            digest = tree.content_hashes()["names"]
        peaks.append(memory.peak)
    assert digest == sha256_json([[name, 0] for name in names])
    assert min(peaks) / len(names) * ARCHIVE_MEMBERS.maximum < 1e9
