"""Images of the user's own, ``<root>/<class>/<image>``: which class is on which side, which image in which pool.

The classes are divided by the folders above them, a CSV file or a seed. A base class's images are divided 80/10/10 in
natural order of their names into train, val and test.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ifsl_bench.data.image_pools import T, divide_classes_into_pools, import_images
from ifsl_bench.data.read.archive import FileTree, format_first_names, natural_sort_key, normalise_unicode
from ifsl_bench.data.read.images import IMAGE_SUFFIXES, ImageSpec
from ifsl_bench.data.source import BuildContext, Layout
from ifsl_bench.data.suggested_tasks import BASE_QUERIES, QUERIES, SHOTS, WAYS
from ifsl_bench.utils.errors import UserError, unknown_name_error
from ifsl_bench.utils.files import sha256_json
from ifsl_bench.utils.limits import SPLIT_FILE_CHARACTERS
from ifsl_bench.utils.text_format import format_count
from ifsl_bench.utils.toml import read_user_file

SIDES = ("base", "novel/train", "novel/val", "novel/test")
SIDE_OF_SPELLING = {
    **{side: side for side in SIDES},
    **{side.replace("/", "-"): side for side in SIDES[1:]},
    **{side.replace("/", "_"): side for side in SIDES[1:]},
    "train": "base",
    "train_a": "base",
    "train-a": "base",
    "train_b": "novel/train",
    "train-b": "novel/train",
    "val": "novel/val",
    "valid": "novel/val",
    "validation": "novel/val",
    "test": "novel/test",
}
DEFAULT_IMAGE_SIZE = 84  # pixels, as on mini- and tiered-ImageNet
TEST_SHARE, VAL_SHARE = 0.2, 0.16  # of the classes, where no file or folder divides them
_CLASS_COLUMNS, _SIDE_COLUMNS = ("class", "wnid", "folder", "label", "name"), ("split", "side")


@dataclass(frozen=True)
class OwnOptions:
    """Settings by which a user's own images are divided and resized.

    Attributes:
        split: A CSV file with columns ``class`` and ``split``; sides are base (or train), novel/train, novel/val (val)
            and novel/test (test). Without novel/train the tasks have the shared protocol.
        split_seed: Divides the classes 64/16/20 into base, val and test, if there is no such file.
        size: Height and width of the images; the middle of an image that is not square is taken.
        depth: Number of nested folders in the name of a class; one by default.
        white: The number that is white in images of more than 8 bits; 65,535 by default.
    """

    split: Path | None = None
    split_seed: int | None = None
    size: int | None = None
    depth: int | None = None
    white: int | None = None

    def given_command_line_options(self) -> list[str]:
        """Return the options that were given, as on the command line."""
        options = {
            "--split": self.split,
            "--split-seed": self.split_seed,
            "--size": self.size,
            "--depth": self.depth,
            "--white": self.white,
        }
        return [name for name, value in options.items() if value is not None]

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON, for the manifest."""
        common = {"size": self.size or DEFAULT_IMAGE_SIZE}
        if self.depth not in (None, 1):
            common["depth"] = self.depth
        if self.white is not None:
            common["white"] = self.white
        if self.split is not None:
            return {"split": sha256_json(read_sides(self.split))[:16], **common}
        return {"split_seed": self.split_seed or 0, **common}


class ImageFolder(Layout):
    """Folders of images, one for each class."""

    title: ClassVar[str] = "images in a folder for each class"

    def __init__(self, options: OwnOptions) -> None:
        self.options = options

    def matches(self, tree: FileTree) -> bool:
        return any(has_image_suffix(entry.path) for entry in tree.entries)

    def build(self, context: BuildContext) -> None:
        options = self.options
        depth = options.depth or 1
        warn_about_ignored_files(context, options.split)
        folders = scan_class_folders(context.file_tree, depth)
        if warning := _warning_on_nested_folders(folders, depth):
            context.reporter.warn(warning)
        if folders.respelled_sides:
            context.reporter.warn(
                f"{format_count(len(folders.respelled_sides), 'class')} with several folders, whose names differ "
                "only in how "
                f"Unicode writes accents (NFC or NFD): {format_first_names(folders.respelled_sides)}; they are taken "
                "together"
            )
        classes, where = folders.image_paths_by_class, "the seeded split"
        sides: Mapping[str, str] | None = None
        if options.split is not None:
            sides, where = _read_checked_sides(context, classes, options.split), str(options.split)
        elif folders.side_by_class and options.split_seed is None:
            where = f"the folders {', '.join(folders.class_folders)}"
            context.reporter.say(f"{where} divide the classes: {_counts_in_words(folders.side_by_class)}")
            sides = folders.side_by_class
            context.about["division"] = where
        elif folders.side_by_class:
            context.reporter.warn(
                f"--split-seed divides the classes, not the folders {', '.join(folders.class_folders)}"
            )
            context.about["over_folders"] = True
        classes = select_large_classes(context, {name: classes[name] for name in sides or classes})
        if sides is None:
            sides = draw_sides(classes, options.split_seed or 0)
            context.reporter.say(
                f"{where} divides the classes: {_counts_in_words(sides)}{_surplus_test_classes_note(sides)}"
            )
        sides = {name: side for name, side in sides.items() if name in classes}
        check_sides(sides, classes, where)
        spec = ImageSpec(
            options.size or DEFAULT_IMAGE_SIZE,
            fit_mode="crop",
            applies_exif_orientation=True,
            white_level=options.white,
        )
        import_images(context, divide_classes_into_pools(classes, sides), spec)


@dataclass(frozen=True)
class FolderScan:
    """The classes and sides in the names of folders.

    Attributes:
        image_paths_by_class: Class -> paths of its images, both in natural order; names of classes in Unicode's NFC.
        side_by_class: Class -> side of the data set, if the folders above the classes are called after sides.
        class_folders: These folders, in natural order.
        inner_folders_by_class: Class -> the folders of its images, for each class without images outside of them.
        respelled_sides: Classes in several folders whose names differ only in how Unicode writes accents.
    """

    image_paths_by_class: Mapping[str, list[str]]
    side_by_class: Mapping[str, str]
    class_folders: Sequence[str]
    inner_folders_by_class: Mapping[str, Sequence[str]]
    respelled_sides: Sequence[str] = ()


def has_image_suffix(path: str) -> bool:
    """Return whether a file is an image by its name."""
    return path.lower().endswith(IMAGE_SUFFIXES)


def scan_class_folders(tree: FileTree, depth: int = 1) -> FolderScan:
    """Find the classes in ``<root>/<class>/<image>`` or ``<root>/<side>/<class>/<image>``.

    The root is the deepest folder that all images share. Folders below a class belong to the class.

    Args:
        tree: Folder or archive.
        depth: Number of nested folders in the name of a class, such as two in "alphabet/character".

    Raises:
        UserError: Images lie outside the folders of classes, there is one folder only, a class is on two sides, or
            some folders are called after sides and others are not.
    """
    paths = [entry.path for entry in tree.entries if has_image_suffix(entry.path)]
    parts = [path.split("/")[:-1] for path in paths]
    if paths and all(folders == parts[0] for folders in parts):
        where = tree.format_location("/".join(parts[0])) if parts[0] else str(tree.path)
        raise UserError(
            f"all {len(paths):,} images are in one folder, {where}, which makes one class; give the folder that holds "
            f"the folders of all classes, the layout is <root>/<class>/<image>"
        )
    root = 0
    while all(len(p) > root for p in parts) and len({p[root] for p in parts}) == 1:
        root += 1
    tops = sorted({normalise_unicode(p[root]) for p in parts if len(p) > root}, key=natural_sort_key)
    by_side = all(name.lower() in SIDE_OF_SPELLING for name in tops)
    named = [name for name in tops if name.lower() in SIDE_OF_SPELLING]
    sides_named = {SIDE_OF_SPELLING[name.lower()] for name in named}
    if not by_side and "base" in sides_named and len(sides_named) > 1:  # one alone may be a class called "test"
        raise UserError(
            f"{tree.path} has folders named after sides of a data set ({format_first_names(named)}) and others "
            f"({format_first_names([name for name in tops if name not in named])}); move the others elsewhere, or "
            "give the "
            f"folder of one side with --from, whose classes are then divided"
        )
    start = root + by_side
    form = "/".join(["<root>", *["<side>"] * by_side, *["<class>"] * (depth == 1), *["<folder>"] * depth * (depth > 1)])
    classes: dict[str, list[str]] = {}
    sides: dict[str, str] = {}
    inner: dict[str, dict[str, None]] = {}
    spellings: dict[str, set[str]] = {}
    for path, folders in zip(paths, parts, strict=True):
        if len(folders) < start + depth:
            raise UserError(f"{tree.format_location(path)} is in no folder of a class; the layout is {form}/<image>")
        spelling = "/".join(folders[start : start + depth])
        name = normalise_unicode(spelling)
        spellings.setdefault(name, set()).add(spelling)
        if (
            by_side
            and sides.setdefault(name, side := SIDE_OF_SPELLING[normalise_unicode(folders[root]).lower()]) != side
        ):
            raise UserError(
                f"class {name!r} is in several of the folders {', '.join(tops)} of {tree.path}, and novel classes must "
                f"be others than base classes; give one of these folders with --from, whose classes are then divided"
            )
        classes.setdefault(name, []).append(path)
        inner.setdefault(name, {})[folders[start + depth] if len(folders) > start + depth else ""] = None
    names = sorted(classes, key=natural_sort_key)
    return FolderScan(
        {name: sorted(classes[name], key=natural_sort_key) for name in names},
        {name: sides[name] for name in names} if by_side else {},
        tops if by_side else (),
        {
            name: sorted(inner[name], key=natural_sort_key)
            for name in names
            if "" not in inner[name] and len(inner[name]) > 1
        },
        [name for name in names if len(spellings[name]) > 1],
    )


def _warning_on_nested_folders(layout: FolderScan, depth: int) -> str | None:
    if not layout.inner_folders_by_class:
        return None
    name, folders = next(iter(layout.inner_folders_by_class.items()))
    count = sum(map(len, layout.inner_folders_by_class.values()))
    return (
        f"{len(layout.inner_folders_by_class):,} of the {len(layout.image_paths_by_class):,} classes contain only "
        f"folders, {count:,} in total "
        f"({name}: {format_first_names(folders)}); each is taken as one class. If the folders in them are the "
        "classes, add "
        f"--depth {depth + 1}"
    )


def _counts_in_words(sides: Mapping[str, str]) -> str:
    counts = Counter(sides.values())
    return ", ".join(f"{counts[side]} on {side}" for side in SIDES if counts[side])


def warn_about_ignored_files(context: BuildContext, split: Path | None = None) -> None:
    """Warn of files whose names are no image names.

    Args:
        context: State of the build.
        split: A file that is used otherwise.

    Raises:
        UserError: There are links that cannot be followed, perhaps to whole classes, and the user has not allowed it.
    """
    others = [entry for entry in context.file_tree.entries if not has_image_suffix(entry.path)]
    if lost := [entry.path for entry in others if entry.is_broken_link]:
        links = f"{format_count(len(lost), 'link')} in {context.file_tree.path}"
        message = f"{links} cannot be followed: {format_first_names(lost)}"
        context.require_complete_unless_partial(message, f"{message}. Mend or remove what is broken")
    used = split.resolve() if split else None
    if ignored := [
        e for e in others if not (e.is_broken_link or (used and (context.file_tree.path / e.path).resolve() == used))
    ]:
        context.reporter.warn(
            f"ignored {format_count(len(ignored), 'file')} not named like an image: "
            f"{format_first_names([e.path for e in ignored])}; images end in {', '.join(IMAGE_SUFFIXES)}"
        )


def read_sides(path: Path) -> dict[str, str]:
    """Return class -> side of a CSV file with columns ``class`` and ``split``; names of classes in Unicode's NFC.

    Raises:
        UserError: There is no such file, column or side, or a class is there twice.
    """
    text = read_user_file(path, "split", SPLIT_FILE_CHARACTERS)
    content = text.lstrip()  # blank lines may come first
    above = text[: len(text) - len(content)].count("\n")
    reader = csv.DictReader(io.StringIO(content), skipinitialspace=True)
    try:
        rows = [(above + reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UserError(f"{path}, line {above + reader.line_num + 1}: {error}") from error
    fields = reader.fieldnames or ()
    columns = {(name or "").strip().lower(): name for name in fields}
    kind = next((columns[c] for c in _CLASS_COLUMNS if c in columns), None)
    side_column = next((columns[c] for c in _SIDE_COLUMNS if c in columns), None)
    if kind is None or side_column is None:
        separators = {";": "semicolons", "\t": "tabs", "|": "strokes"}
        other = next((word for mark, word in separators.items() if len(fields) == 1 and mark in fields[0]), None)
        remedy = f"; it is separated by {other}, save it with commas" if other else ""
        raise UserError(
            f"{path}: its first line must name the columns 'class' and 'split', it is "
            f"{', '.join(repr(name) for name in fields) or 'empty'}{remedy}"
        )
    sides: dict[str, str] = {}
    for line, row in rows:
        name, side = normalise_unicode(row[kind] or ""), (row[side_column] or "").strip()
        if f'"{row[kind]}"' not in content:  # in quotes, spaces at the ends of a name belong to it
            name = name.strip()
        where = f"{path}, line {line}"
        if not name:
            raise UserError(f"{where}: the class is missing")
        if side.lower() not in SIDE_OF_SPELLING:
            raise unknown_name_error("side", side, SIDES, where=f"of class {name!r} in {where}")
        if name in sides:
            raise UserError(f"{where}: class {name!r} is there twice")
        sides[name] = SIDE_OF_SPELLING[side.lower()]
    return sides


def _read_checked_sides(context: BuildContext, classes: Mapping[str, Sequence[str]], split: Path) -> dict[str, str]:
    """Return the sides of the classes that are both in the CSV file and in the tree."""
    sides = read_sides(split)
    missing = [name for name in sides if name not in classes]
    if missing:
        message = f"{len(missing)} of {len(sides)} classes in {split} have no images in {context.file_tree.path}"
        message += f": {format_first_names(missing)}"
        context.require_complete_unless_partial(message, f"{message}. Correct the file")
    if extra := [name for name in classes if name not in sides]:
        context.reporter.say(f"{len(extra)} folders are not in {split} and left out: {format_first_names(extra)}")
    return {name: sides[name] for name in classes if name in sides}


def select_large_classes(context: BuildContext, classes: Mapping[str, list[T]]) -> dict[str, list[T]]:
    """Return the classes with enough images for 5-shot episodes.

    Args:
        context: Of the import; decides whether the other classes may be left out.
        classes: Class -> its images.

    Raises:
        UserError: Some classes are too small, and may not be left out.
    """
    need = SHOTS + QUERIES
    small = {name: len(paths) for name, paths in classes.items() if len(paths) < need}
    if small:
        shown = format_first_names([f"{name} ({count})" for name, count in small.items()])
        message = f"{len(small)} of {len(classes)} classes have fewer than {need} images: {shown}"
        context.require_complete_unless_partial(message, f"{message}. Leave these classes out")
    return {name: paths for name, paths in classes.items() if name not in small}


def draw_sides(classes: Mapping[str, Sequence[object]], seed: int) -> dict[str, str]:
    """Return a side for each class: 20% test, 16% val (at least 5 classes each), the others base.

    Test has ten classes, which make two sessions, if enough base classes and images are left for episodes. Classes are
    ordered by a hash of seed and name, so a class that is added or removed moves few others.

    Args:
        classes: Class -> its images.
        seed: Of the hash.
    """
    order = sorted(classes, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
    val, test = (_count_classes_of_share(len(classes), share) for share in (VAL_SHARE, TEST_SHARE))
    for novel in (max(test, 2 * WAYS), test):
        base = order[novel + val :]
        if len(base) >= 2 * WAYS and sum(len(classes[name]) // 10 for name in base) >= BASE_QUERIES:
            break
    sides = {**dict.fromkeys(order[:novel], "novel/test"), **dict.fromkeys(order[novel : novel + val], "novel/val")}
    return {name: sides.get(name, "base") for name in classes}


def _count_classes_of_share(classes: int, share: float) -> int:
    return max(WAYS, round(share * classes))


def _surplus_test_classes_note(sides: Mapping[str, str]) -> str:
    """Return why novel/test has more classes than its share, for a message; empty if it has not."""
    usual, novel = _count_classes_of_share(len(sides), TEST_SHARE), sum(side == "novel/test" for side in sides.values())
    return f"; novel/test has {novel} in place of {usual}, for two sessions of {WAYS}" if novel > usual else ""


def check_sides(sides: Mapping[str, str], classes: Mapping[str, Sequence[object]], where: str) -> None:
    """Raise UserError if a side has too few classes for 5-way episodes, or the base classes have too few images.

    Args:
        sides: Class -> side.
        classes: Class -> images.
        where: Origin of the sides in messages.
    """
    counts = {side: sum(s == side for s in sides.values()) for side in SIDES}
    shared = counts["novel/train"] == 0
    need = {
        "base": 2 * WAYS if shared else 2,
        "novel/train": 0 if shared else WAYS,
        "novel/val": WAYS,
        "novel/test": WAYS,
    }
    if any(counts[side] < least for side, least in need.items()):
        needed = ", ".join(f"{least} on {side}" for side, least in need.items() if least)
        counted = ", ".join(f"{counts[side]} on {side}" for side in need if need[side] or counts[side])
        raise UserError(
            f"{WAYS}-way episodes need at least {sum(need.values())} classes, {needed}; there are "
            f"{sum(counts.values())}: {counted}, by {where}"
        )
    # base/val and base/test; where meta-training draws on base/val too, validation has the odd half of each class.
    tenths = [len(paths) // 10 for name, paths in classes.items() if sides[name] == "base"]
    queries = sum(tenths if shared else (tenth // 2 for tenth in tenths))
    if queries < BASE_QUERIES:
        part = "tenth" if shared else "twentieth"
        raise UserError(
            f"episodes have {BASE_QUERIES} queries of base classes; a {part} of each base class's images makes "
            f"{queries} in {counts['base']} classes: more images or more base classes are needed"
        )
