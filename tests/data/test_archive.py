"""Folders and archives: the same files from every kind, and what is wrong with a file, by name."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import pickle
import stat
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.file_tree import Entry, what_is
from ifsl_bench.utils.errors import UserError
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
        entries = [tree.by_path[name] for name in ("top/b/ä ö.png", "top/a/a_10.JPEG", "top/a/a_2.JPEG")]
        for entry in entries:
            assert tree.read(entry) == FILES[entry.path]
            with tree.open(entry) as file:
                assert file.read(7) + file.read() == FILES[entry.path]
        assert tree.named("a_2.JPEG").path == "top/a/a_2.JPEG"
        assert tree.named("a_3.JPEG") is None
        before = tree.identity()
        assert before == tree.identity()
    if path.is_file():
        os.utime(path, (1, 1))
    else:
        (path / "top/wnids.txt").write_bytes(b"longer than before")
    with open_tree(path) as tree:
        assert tree.identity() != before


@pytest.mark.parametrize("kind", ["zip", "tar of tars", "tar.gz"])
def test_random_reading_from_several_threads(kind, tmp_path):
    files = {f"top/a/a_{i}.JPEG": bytes([i]) * (i * 777) for i in range(60)}
    with open_tree(MAKERS[kind](tmp_path / "data", files)) as tree, ThreadPoolExecutor(8) as pool:
        entries = [tree.by_path[name] for _ in range(5) for name in files]
        for entry, content in zip(entries, pool.map(tree.read, entries), strict=True):
            assert content == files[entry.path]


@pytest.mark.parametrize("name", ["../evil.JPEG", "a/../../evil.JPEG", "/etc/evil", "C:/evil", "..\\evil.JPEG"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_paths_that_climb_out_are_refused(kind, name, tmp_path):
    path = MAKERS[kind](tmp_path / "data", {"a/b.JPEG": b"x", name: b"x"})
    with open_tree(path) as tree, pytest.raises(UserError, match="leads out of the archive") as error:
        _ = tree.entries
    assert repr(name) in str(error.value)
    assert str(path) in str(error.value)


def test_links_in_archives_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("a/link.JPEG")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        member = zipfile.ZipInfo("a/link.JPEG")
        member.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(member, "/etc/passwd")
    for name in ("a.tar", "a.zip"):
        with open_tree(tmp_path / name) as tree, pytest.raises(UserError, match=r"a/link\.JPEG.*link"):
            _ = tree.entries


def test_links_in_folders_are_followed_but_not_in_circles(tmp_path):
    make_folder(tmp_path / "real", {"x/1.png": b"1"})
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "linked").symlink_to(tmp_path / "real" / "x")
    (tmp_path / "tree" / "circle").symlink_to(tmp_path / "tree")
    (tmp_path / "tree" / "broken.png").symlink_to(tmp_path / "nowhere")
    with open_tree(tmp_path / "tree") as tree:
        assert tree.entries == [Entry("broken.png", 0, lost=True), Entry("linked/1.png", 1)]
        assert tree.read(tree.entries[1]) == b"1"
        with pytest.raises(UserError, match=r"cannot read .*broken\.png: No such file"):
            tree.read(tree.entries[0])
        assert tree.content() == tree.content()
        assert tree.identity() == tree.identity()


@pytest.mark.parametrize("kind", ["zip", "tar", "tar of tars", "tar.gz", "tar.bz2", "tar.xz"])
@pytest.mark.parametrize("share", [0.0002, 0.1, 0.5, 0.8, 0.9])
def test_archives_that_are_cut_short_are_named(kind, share, tmp_path):
    """Cut anywhere, also where the standard library takes the cut for the end of the list."""
    files = {f"top/a/a_{i}.JPEG": os.urandom(700) for i in range(90)}
    path = MAKERS[kind](tmp_path / "data", files)
    content = path.read_bytes()
    path.write_bytes(content[: max(600, int(share * len(content)))])
    with pytest.raises(UserError, match=r"cut short|damaged") as error, open_tree(path) as tree:
        _ = tree.entries
    assert str(path) in str(error.value)


@pytest.mark.parametrize("kind", ["zip", "stored zip", "lzma zip"])
def test_damaged_content_in_a_zip_archive_is_named(kind, tmp_path):
    files = {"top/good.JPEG": os.urandom(3000), "top/bad.JPEG": os.urandom(3000)}
    path = MAKERS[kind](tmp_path / "data", files)
    spoil(path, path.read_bytes().index(b"top/bad.JPEG") + 1000)
    with open_tree(path) as tree:
        assert tree.read(tree.by_path["top/good.JPEG"]) == files["top/good.JPEG"]
        with pytest.raises(UserError, match=r"cannot read top/bad\.JPEG in .*data: its content is damaged"):
            tree.read(tree.by_path["top/bad.JPEG"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[: 512 + 2 * 1024], "cut short"),
        (lambda content: content[: 512 + 2 * 1024] + b"\xff" * 20 + content[512 + 2 * 1024 + 20 :],
         "damaged where a file should begin"),
    ],
    ids=["cut between two files", "damaged header"],
)  # fmt: skip
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "packed"])
def test_a_tar_archive_does_not_end_silently(damage, message, pack, tmp_path):
    """As it does for the standard library."""
    path = make_tar(tmp_path / "data", {f"top/{i}.png": bytes([i + 1]) * 100 for i in range(4)})
    path.write_bytes(pack(damage(path.read_bytes())))
    with open_tree(path) as tree, pytest.raises(UserError, match=message):
        _ = tree.entries


def test_damaged_compression_is_noticed(tmp_path):
    path = make_tar(tmp_path / "data", {f"top/{i}.png": os.urandom(5000) for i in range(4)}, "w:gz")
    spoil(path, -8)  # of gzip's checksum
    with open_tree(path) as tree, pytest.raises(UserError, match=r"damaged \(CRC"):
        _ = tree.entries


def test_files_that_are_there_twice_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a/1.png", b"x")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a/1.png", b"y")
    with open_tree(tmp_path / "a.zip") as tree, pytest.raises(UserError, match=r"1 files twice.*\(a/1\.png\)"):
        _ = tree.entries
    make_tar(tmp_path / "a.tar", {"a/1.png": b"x", "./a/1.png": b"y"})
    with open_tree(tmp_path / "a.tar") as tree, pytest.raises(UserError, match=r"\(a/1\.png\)"):
        _ = tree.entries


def test_several_files_of_one_name_are_ambiguous(tmp_path):
    tree = open_tree(make_folder(tmp_path, {"a/x.pkl": b"", "b/x.pkl": b""}))
    with pytest.raises(UserError, match=r"2 files called x\.pkl \(a/x\.pkl, b/x\.pkl\)"):
        tree.named("x.pkl")


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
    assert words in what_is(content)
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
        tree.read(tree.entries[0])
