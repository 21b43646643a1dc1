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

from ifsl_bench.data.image_pools import T, divide, import_images
from ifsl_bench.data.read.archive import FileTree, first_few, nfc
from ifsl_bench.data.read.images import SUFFIXES, ImageSpec
from ifsl_bench.data.sets.layout import SIDES, SPELLED, find_class_folders, is_image, nested
from ifsl_bench.data.source import BuildContext, Layout
from ifsl_bench.utils.errors import UserError, unknown
from ifsl_bench.utils.files import sha256_json
from ifsl_bench.utils.limits import SPLIT_FILE
from ifsl_bench.utils.toml import read_user_file

SIZE = 84  # pixels, as on mini- and tiered-ImageNet
WAYS, SHOTS, QUERIES, BASE_QUERIES = 5, 5, 5, 25  # of the tasks that are written for a data set of one's own
_CLASS_COLUMNS, _SIDE_COLUMNS = ("class", "wnid", "folder", "label", "name"), ("split", "side")


@dataclass(frozen=True)
class OwnOptions:
    """Settings by which a user's own images are divided and resized.

    Attributes:
        split: a CSV file with columns ``class`` and ``split``; sides are base (or train), novel/train, novel/val (val)
            and novel/test (test). Without novel/train the tasks have the shared protocol.
        split_seed: divides the classes 64/16/20 into base, val and test, where there is no such file.
        size: height and width that images are resized to; the middle of an image that is not square is taken.
        depth: of how many nested folders a class is named; one unless said.
    """

    split: Path | None = None
    split_seed: int | None = None
    size: int | None = None
    depth: int | None = None

    def flags(self) -> list[str]:
        """The options that the user gave, as the command line spells them."""
        options = {"--split": self.split, "--split-seed": self.split_seed, "--size": self.size, "--depth": self.depth}
        return [name for name, value in options.items() if value is not None]

    def settings(self) -> dict[str, Any]:
        """The settings as JSON; for the manifest, and to tell whether a data set was made with the same."""
        common = {"size": self.size or SIZE, **({"depth": self.depth} if self.depth not in (None, 1) else {})}
        if self.split is not None:
            return {"split": sha256_json(read_sides(self.split))[:16], **common}
        return {"split_seed": self.split_seed or 0, **common}


class ImageFolder(Layout):
    """Folders of images, one for each class."""

    title: ClassVar[str] = "images in a folder for each class"

    def __init__(self, options: OwnOptions) -> None:
        self.options = options

    def matches(self, tree: FileTree) -> bool:
        return any(is_image(entry.path) for entry in tree.entries)

    def build(self, context: BuildContext) -> None:
        options = self.options
        depth = options.depth or 1
        tell_ignored(context, options.split)
        folders = find_class_folders(context.files, depth)
        if told := nested(folders, depth):
            context.reporter.warn(told)
        classes, where = folders.classes, "the seeded split"
        sides: Mapping[str, str] | None = None
        if options.split is not None:
            sides, where = _listed(context, classes, options.split), str(options.split)
        elif folders.sides and options.split_seed is None:
            where = f"the folders {', '.join(folders.folders)}"
            context.reporter.say(f"{where} divide the classes: {_counts(folders.sides)}")
            sides = folders.sides
            context.about["division"] = where
        elif folders.sides:
            context.reporter.warn(f"--split-seed divides the classes, not the folders {', '.join(folders.folders)}")
            context.about["over_folders"] = True
        classes = large_enough(context, {name: classes[name] for name in sides or classes})
        if sides is None:
            sides = seeded_sides(list(classes), options.split_seed or 0)
        sides = {name: side for name, side in sides.items() if name in classes}
        check_sides(sides, classes, where)
        spec = ImageSpec(options.size or SIZE, fit="crop", upright=True)
        import_images(context, divide(classes, sides), spec)


def _counts(sides: Mapping[str, str]) -> str:
    counts = Counter(sides.values())
    return ", ".join(f"{counts[side]} on {side}" for side in SIDES if counts[side])


def tell_ignored(context: BuildContext, split: Path | None = None) -> None:
    """Warns of files that do not have the name of an image.

    Args:
        split: a file that is used otherwise, wherever it lies.

    Raises:
        UserError: among them are links that cannot be followed, perhaps to whole classes, and the user has not allowed
            less. (Such a link by the name of an image is an image that cannot be read.)
    """
    others = [entry for entry in context.files.entries if not is_image(entry.path)]
    if lost := [entry.path for entry in others if entry.lost]:
        told = f"{len(lost):,} links in {context.files.path} cannot be followed: {first_few(lost)}"
        context.require_complete(told, f"{told}. Mend or remove them")
    used = split.resolve() if split else None
    if ignored := [e for e in others if not (e.lost or (used and (context.files.path / e.path).resolve() == used))]:
        context.reporter.warn(
            f"ignored {len(ignored):,} files that do not look like images: {first_few([e.path for e in ignored])}; "
            f"images end in {', '.join(SUFFIXES)}"
        )


def read_sides(path: Path) -> dict[str, str]:
    """Class -> side of a CSV file with columns ``class`` and ``split``, in its order; classes in Unicode's NFC.

    Raises:
        UserError: no such file, columns or side; a class that is there twice; a field beyond csv's limit.
    """
    text = read_user_file(path, "split", SPLIT_FILE, "utf-8-sig")
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
        raise UserError(
            f"{path}: its first line must name the columns 'class' and 'split', it is "
            f"{', '.join(repr(name) for name in fields) or 'empty'}"
        )
    sides: dict[str, str] = {}
    for line, row in rows:
        name, side = nfc(row[kind] or "").strip(), (row[side_column] or "").strip()
        where = f"{path}, line {line}"
        if not name:
            raise UserError(f"{where}: the class is missing")
        if side.lower() not in SPELLED:
            raise unknown("side", side, SIDES, where=f"of class {name!r} in {where}")
        if name in sides:
            raise UserError(f"{where}: class {name!r} is there twice")
        sides[name] = SPELLED[side.lower()]
    return sides


def _listed(context: BuildContext, classes: Mapping[str, Sequence[str]], split: Path) -> dict[str, str]:
    """The sides of the classes that are both in the CSV file and in the tree."""
    sides = read_sides(split)
    missing = [name for name in sides if name not in classes]
    if missing:
        told = f"{len(missing)} of {len(sides)} classes in {split} have no images in {context.files.path}"
        told += f": {first_few(missing)}"
        context.require_complete(told, f"{told}. Correct the file")
    if extra := [name for name in classes if name not in sides]:
        context.reporter.say(f"{len(extra)} folders are not in {split} and left out: {first_few(extra)}")
    return {name: sides[name] for name in classes if name in sides}


def large_enough(context: BuildContext, classes: Mapping[str, list[T]]) -> dict[str, list[T]]:
    """The classes with enough images for 5-shot episodes, or for the three base pools."""
    need = SHOTS + QUERIES
    small = {name: len(paths) for name, paths in classes.items() if len(paths) < need}
    if small:
        shown = first_few([f"{name} ({count})" for name, count in small.items()])
        told = f"{len(small)} of {len(classes)} classes have fewer than {need} images: {shown}"
        context.require_complete(told, f"{told}. Leave these classes out")
    return {name: paths for name, paths in classes.items() if name not in small}


def seeded_sides(names: Sequence[str], seed: int) -> dict[str, str]:
    """A side for each class: 20% test, 16% val (5 classes at least), the others base.

    Classes are ordered by a hash of seed and name, so a class that is added or removed moves few others.
    """
    order = sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
    test, val = (max(WAYS, round(share * len(names))) for share in (0.2, 0.16))
    side = ["novel/test"] * test + ["novel/val"] * val + ["base"] * max(0, len(names) - test - val)
    drawn = dict(zip(order, side, strict=False))
    return {name: drawn[name] for name in names}


def check_sides(sides: Mapping[str, str], classes: Mapping[str, Sequence[object]], where: str) -> None:
    counts = {side: sum(s == side for s in sides.values()) for side in SIDES}
    shared = counts["novel/train"] == 0
    need = {"base": 2 * WAYS if shared else 2, "novel/train": 0 if shared else WAYS,
            "novel/val": WAYS, "novel/test": WAYS}  # fmt: skip
    if any(counts[side] < least for side, least in need.items()):
        needed = ", ".join(f"{least} on {side}" for side, least in need.items() if least)
        counted = ", ".join(f"{counts[side]} on {side}" for side in need if need[side] or counts[side])
        raise UserError(
            f"{WAYS}-way episodes need at least {sum(need.values())} classes, {needed}; there are "
            f"{sum(counts.values())}: {counted}, by {where}"
        )
    # base/val and base/test; where meta-training draws on base/val too, validation has the odd half of each class.
    tenths = [len(paths) // 10 for name, paths in classes.items() if sides[name] == "base"]
    held = sum(tenths if shared else (tenth // 2 for tenth in tenths))
    if held < BASE_QUERIES:
        part = "tenth" if shared else "twentieth"
        raise UserError(
            f"episodes have {BASE_QUERIES} queries of base classes; a {part} of each base class's images makes "
            f"{held} in {counts['base']} classes: more images or more base classes are needed"
        )
