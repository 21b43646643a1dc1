"""Finds the folders of a tree that are classes, and the sides of the data set that folders above them name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ifsl_bench.data.read.archive import FileTree, first_few, natural, nfc
from ifsl_bench.data.read.images import SUFFIXES
from ifsl_bench.utils.errors import UserError

SIDES = ("base", "novel/train", "novel/val", "novel/test")
SPELLED = {
    **{side: side for side in SIDES},
    **{side.replace("/", "-"): side for side in SIDES[1:]},
    **{side.replace("/", "_"): side for side in SIDES[1:]},
    "train": "base", "train_a": "base", "train-a": "base", "train_b": "novel/train", "train-b": "novel/train",
    "val": "novel/val", "valid": "novel/val", "validation": "novel/val", "test": "novel/test",
}  # fmt: skip


@dataclass(frozen=True)
class ClassFolders:
    """The classes and sides that the folders of a tree name.

    Attributes:
        classes: class -> paths of its images, both in natural order; names of classes in Unicode's NFC.
        sides: class -> side of the data set, where the folders above the classes are called after sides; else empty.
        folders: those folders, in natural order.
        inner: class -> the folders that hold its images, for each class that has no image beside them.
    """

    classes: Mapping[str, list[str]]
    sides: Mapping[str, str]
    folders: Sequence[str]
    inner: Mapping[str, Sequence[str]]


def is_image(path: str) -> bool:
    """Returns whether a file is an image by its name."""
    return path.lower().endswith(SUFFIXES)


def find_class_folders(tree: FileTree, depth: int = 1) -> ClassFolders:
    """Reads ``<root>/<class>/<image>``, or ``<root>/<side>/<class>/<image>``.

    The root is the deepest folder that all images share, so that it does not matter whether a whole folder or its
    content was packed. Folders below a class's belong to the class.

    Args:
        depth: of how many nested folders the class is named, as "alphabet/character" of two.

    Raises:
        UserError: images lie outside any class's folder, there is one folder only, a class is on two sides, or other
            folders are beside those of sides.
    """
    paths = [entry.path for entry in tree.entries if is_image(entry.path)]
    parts = [path.split("/")[:-1] for path in paths]
    if paths and all(folders == parts[0] for folders in parts):
        where = tree.where("/".join(parts[0])) if parts[0] else str(tree.path)
        raise UserError(
            f"all {len(paths):,} images are in one folder, {where}, which makes one class; give the folder that holds "
            f"those of all classes, the layout is <root>/<class>/<image>"
        )
    root = 0
    while all(len(p) > root for p in parts) and len({p[root] for p in parts}) == 1:
        root += 1
    tops = sorted({nfc(p[root]) for p in parts if len(p) > root}, key=natural)
    by_side = all(name.lower() in SPELLED for name in tops)
    named = [name for name in tops if name.lower() in SPELLED]
    sides_named = {SPELLED[name.lower()] for name in named}
    if not by_side and "base" in sides_named and len(sides_named) > 1:  # one alone may be a class called "test"
        raise UserError(
            f"{tree.path} has folders that are called after sides of a data set ({first_few(named)}), and beside them "
            f"{first_few([name for name in tops if name not in named])}; move these elsewhere, or give one of the "
            f"sides' folders with --from, whose classes are then divided"
        )
    start = root + by_side
    form = "/".join(["<root>", *["<side>"] * by_side, *["<class>"] * (depth == 1), *["<folder>"] * depth * (depth > 1)])
    classes: dict[str, list[str]] = {}
    sides: dict[str, str] = {}
    inner: dict[str, dict[str, None]] = {}
    for path, folders in zip(paths, parts, strict=True):
        if len(folders) < start + depth:
            raise UserError(
                f"{tree.where(path)} lies beside the folders of the classes, not in one; the layout is {form}/<image>"
            )
        name = nfc("/".join(folders[start : start + depth]))
        if by_side and sides.setdefault(name, side := SPELLED[nfc(folders[root]).lower()]) != side:
            raise UserError(
                f"class {name!r} is in several of the folders {', '.join(tops)} of {tree.path}, and novel classes must "
                f"be others than base classes; give one of these folders with --from, whose classes are then divided"
            )
        classes.setdefault(name, []).append(path)
        inner.setdefault(name, {})[folders[start + depth] if len(folders) > start + depth else ""] = None
    names = sorted(classes, key=natural)
    return ClassFolders(
        {name: sorted(classes[name], key=natural) for name in names},
        {name: sides[name] for name in names} if by_side else {},
        tops if by_side else (),
        {name: sorted(inner[name], key=natural) for name in names if "" not in inner[name] and len(inner[name]) > 1},
    )


def nested(layout: ClassFolders, depth: int) -> str:
    """A warning for someone whose classes may be folders of classes; empty where none is."""
    if not layout.inner:
        return ""
    name, folders = next(iter(layout.inner.items()))
    count = sum(map(len, layout.inner.values()))
    return (
        f"{len(layout.inner):,} of the {len(layout.classes):,} classes contain only folders, {count:,} in total "
        f"({name}: {first_few(folders)}); each is taken as one class. If the folders in them are the classes, add "
        f"--depth {depth + 1}"
    )
