"""Labelled images in memory or behind an object of another library, as a data set of one's own.

An object is known by what it does: ``len(data)``, ``data[i]`` a pair (image, label), and ``data.labels_to_indices``
(label -> places) where it has some of the images only, as learn2learn's ``FilteredMetaDataset``. Each image is read
twice and kept never: first to learn its label, size and range, then to be written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from ifsl_bench.common.arrays import release
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import sha256_json
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.image_pools import ListItem, count_files, divide, note_duplicates
from ifsl_bench.data.read.archive import natural, printable
from ifsl_bench.data.read.decode import BadImage, rgb
from ifsl_bench.data.read.npz import reading
from ifsl_bench.data.sets.folder import check_sides, large_enough
from ifsl_bench.data.source import Import

POOL_OF = {"train": "base", "val": "novel/val", "test": "novel/test"}  # an object's side -> that of its classes
_RELEASE = 1 << 28  # bytes written between two releases of the pool's pages
_EXACT = 1e-3  # how far 255 times a float may be from a whole number


def is_exactly(value: Any, library: str, *names: str) -> bool:
    """Returns whether a value's class is one of these of the library. A subclass is none: it may give other images."""
    return type(value).__module__.partition(".")[0] == library and type(value).__name__ in names


def kind_of(value: Any) -> str:
    """A value's class as people know it, "library.Class"."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"


def _reading(what: str) -> AbstractContextManager[None]:
    """Makes one sentence of whatever another library raises meanwhile."""
    return reading(f"{what} cannot be read")


def as_array(value: Any) -> np.ndarray:
    """A tensor, wherever and however it is kept, or whatever else NumPy takes, as an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().to_dense()
        if value.is_floating_point():
            value = value.float()  # NumPy has no bfloat16
    return np.asarray(value)


def pixels(image: Any, what: str) -> np.ndarray:
    """An image as an array [H, W, C] of 1 or 3 channels, its numbers as they are.

    Args:
        image: of Pillow, or a tensor or an array [H, W], [C, H, W] or [H, W, C]. Where both could be, a tensor has its
            channels first, an array last.

    Raises:
        UserError: it is something else.
    """
    from PIL import Image

    given = f"{what} is a {kind_of(image)}"
    if isinstance(image, Image.Image):
        try:
            image = image.convert("L") if image.mode in ("1", "L") else rgb(image)
        except BadImage as error:
            raise UserError(f"{what}: {error}") from error
    with _reading(f"{given} which"):
        array = as_array(image)
    if array.ndim == 2:
        array = array[..., np.newaxis]
    likely = (0, 2) if hasattr(image, "detach") else (2, 0)
    channels = [axis for axis in likely if array.ndim == 3 and array.shape[axis] in (1, 3)]
    if not channels or array.dtype.kind not in "buif" or not array.size:
        raise UserError(
            f"{given} {array.dtype}{list(array.shape)}, expected an image [C, H, W] or [H, W, C] of 1 or 3 channels"
        )
    return np.moveaxis(array, channels[0], 2)


class Range:
    """The numbers that stand for black and white: 0 and 255, or 0 and 1 where no image has any above 1."""

    def __init__(self) -> None:
        self.largest, self.brightest, self.divided = 0.0, "", ""  # and by name an image that has them

    def add(self, image: np.ndarray, what: str) -> None:
        """Takes note of an image.

        Raises:
            UserError: it cannot be had back in whole numbers from 0 to 255, or not by the same rule as those before.
        """
        low, high = float(image.min()), float(image.max())
        if not (low >= 0 and high <= 255):  # as NaN is not
            raise UserError(
                f"{what} has values from {low:.4g} to {high:.4g}, expected 0 to 255, or 0 to 1; normalised images "
                f"cannot be undone: leave that step out of the data set's transform"
            )
        if high > self.largest:
            self.largest, self.brightest = high, what
        if image.dtype.kind == "f" and (off := image != np.rint(image)).any():
            scaled = image.astype(np.float32) * 255
            if high > 1 or np.abs(scaled - np.rint(scaled)).max() > _EXACT:
                raise UserError(
                    f"{what} has the value {float(image[off][0]):.6g}, which is neither a whole number from 0 to 255 "
                    f"nor 1/255 of one; images that were normalised, or resized as floats, cannot be undone: leave "
                    f"that step out of the data set's transform"
                )
            self.divided = what
        if self.divided and self.largest > 1:
            raise UserError(
                f"{self.divided} has values in 0 to 1, {self.brightest} has values up to {self.largest:g}; give all "
                f"images one range"
            )

    def to_bytes(self, image: np.ndarray) -> np.ndarray:
        """An image as uint8."""
        return np.rint(image.astype(np.float32) * (1 if self.largest > 1 else 255)).astype(np.uint8)


class Labelled:
    """The data set of one side.

    Attributes:
        classes: name -> places of its images, ascending; names are the labels with the side before them, since sides
            are of different classes whatever their labels. There once :meth:`survey` has been exhausted.
        digests: uint64 [n], for each place that was read.
    """

    def __init__(self, given: Any, side: str) -> None:
        self.side, self.where = side, f"the {side} data set"
        while is_exactly(given, "learn2learn", "Taskset", "TaskDataset"):  # whose items are tasks
            given = given.dataset
        self.data = given
        with _reading(f"{self.where} is a {kind_of(given)} which"):
            self.digests = np.zeros(len(given), np.uint64)
        self.filed = self._filed()
        self.classes: dict[str, list[int]] = {}

    def _filed(self) -> dict[int, Hashable] | None:
        """place -> label where the object has a list of its own; a wrapper need not have all images."""
        groups = getattr(self.data, "labels_to_indices", None)
        if groups is None:
            return None
        filed: dict[int, Hashable] = {}
        with _reading(f"'labels_to_indices' of {self.where}"):
            for label, places in groups.items():
                for place in as_array(places).astype(np.int64, casting="safe").tolist() if len(places) else ():
                    if not 0 <= place < len(self.digests):
                        raise UserError(f"{self.where} names image {place}, it has {len(self.digests):,}")
                    if place in filed:
                        raise UserError(f"{self.where} names image {place} twice")
                    filed[place] = self._label(label, place)
        return filed

    def __len__(self) -> int:
        return len(self.digests) if self.filed is None else len(self.filed)

    def name(self, place: int) -> str:
        """The name of an image in messages."""
        return f"image {place} of {self.where}"

    def _label(self, value: Any, place: int) -> Hashable:
        with _reading(f"the label of {self.name(place)}"):
            found: Hashable = value.item() if hasattr(value, "item") else value
            hash(found)
            return found

    def read(self, place: int) -> tuple[np.ndarray, Hashable]:
        """An image [H, W, C] and its label.

        Raises:
            UserError: there is no such pair.
        """
        with _reading(self.name(place)):
            item = self.data[place]
        if not isinstance(item, (tuple, list)) or len(item) < 2:
            raise UserError(f"{self.name(place)} is a {kind_of(item)}, expected a pair (image, label)")
        return pixels(item[0], self.name(place)), self._label(item[1], place)

    def survey(self) -> Iterator[tuple[np.ndarray, str]]:
        """Every image [H, W, C] and what messages call it, while labels and digests are collected.

        Raises:
            UserError: it cannot be read, or has another label than the object's own list says.
        """
        groups: dict[Hashable, list[int]] = {}
        for place in range(len(self.digests)) if self.filed is None else sorted(self.filed):
            image, label = self.read(place)
            if self.filed is not None and self.filed[place] != label:
                raise UserError(
                    f"{self.name(place)} has label {label!r}, 'labels_to_indices' says {self.filed[place]!r}; where a "
                    f"bookkeeping file of other data was loaded, remove it and load the data set again"
                )
            groups.setdefault(label, []).append(place)
            self.digests[place] = digest(image)
            yield image, self.name(place)
        names = {label: f"{self.side}-{label}" for label in groups}
        if len(set(names.values())) < len(names):  # 1 and "1"
            names = {label: f"{self.side}-{label!r}" for label in groups}
        self.classes = {printable(names[label]): places for label, places in groups.items()}


def digest(image: np.ndarray) -> int:
    """64 bits of a hash over size and numbers of an image."""
    head = f"{image.dtype.str}{image.shape}".encode()
    return int.from_bytes(hashlib.sha256(head + image.tobytes()).digest()[:8], "little")


class LabelledObjects:
    """The classes of train are the base ones, whose images are divided as :func:`divide` does; there is no pool of
    novel classes for training, so that tasks have the shared protocol."""

    title: ClassVar[str] = "labelled images from Python"

    def __init__(self) -> None:
        self.sides: dict[str, Labelled] = {}
        self.range, self.shape = Range(), tuple[int, ...]()

    def identity(self, sides: Mapping[str, Any], reporter: Reporter) -> str:
        """Looks at all images and returns what changes when they or their labels do.

        Args:
            sides: the object of each of train, val and test.

        Raises:
            UserError: the objects hold what no data set can be made of.
        """
        self.sides = {side: Labelled(given, side) for side, given in sides.items()}
        total = sum(map(len, self.sides.values()))
        first = ""
        with reporter.stage(f"looking at {total:,} images", total) as stage:
            for side in self.sides.values():
                for image, what in side.survey():
                    first, self.shape = first or what, self.shape or image.shape
                    if image.shape != self.shape:
                        raise UserError(
                            f"{what} is {_size(image.shape)}, {first} is {_size(self.shape)}; images must be of one "
                            f"size: have the data set's transform resize them, and make them of one kind"
                        )
                    self.range.add(image, what)
                    stage.advance(1)
        content = hashlib.sha256(b"".join(side.digests.astype("<u8").tobytes() for side in self.sides.values()))
        return sha256_json([content.hexdigest(), {name: side.classes for name, side in self.sides.items()}])

    def build(self, to: Import) -> None:
        """Writes the pools from the objects that :meth:`identity` looked at."""
        named = {name: side for side in self.sides for name in self.sides[side].classes}
        classes = {
            name: [ListItem(named[name], place) for place in self.sides[named[name]].classes[name]]
            for name in sorted(named, key=natural)
        }
        classes = large_enough(to, classes)
        roles = {name: POOL_OF[named[name]] for name in classes}
        check_sides(roles, classes, "what was given")
        pools = divide(classes, roles)
        counts = count_files(pools)
        total = sum(count.images for count in counts.values())
        done = sum(count.images for pool, count in counts.items() if to.writer.has(pool))
        with to.reporter.stage(f"importing {total:,} images", total, done) as stage:
            for pool, files in pools.items():
                if not to.writer.has(pool):
                    self._write(to, pool, files, self.sides[named[next(iter(files))]], stage.advance)
        note_duplicates(to, pools)

    def _write(
        self,
        to: Import,
        pool: str,
        classes: Mapping[str, Sequence[ListItem]],
        side: Labelled,
        advance: Callable[[int], None],
    ) -> None:
        """Writes a pool, having seen that each image is the one that was looked at."""
        places = np.array([item.index for items in classes.values() for item in items], np.int64)
        labels = np.repeat(np.arange(len(classes)), [len(items) for items in classes.values()])
        with to.writer.pool(pool, labels, tuple(classes), self.shape) as images:
            written = 0
            for row, place in enumerate(places.tolist()):
                image, _ = side.read(place)
                if digest(image) != side.digests[place]:
                    raise UserError(
                        f"{side.name(place)} is another one each time it is read; leave what is random out of the data "
                        f"set's transform"
                    )
                images[row] = self.range.to_bytes(image)
                written += images[row].nbytes
                if written >= _RELEASE:
                    release(images)
                    written = 0
                advance(1)
            np.save(to.writer.side_file(pool), side.digests[places])


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]} pixels of {shape[2]} channel{'s' if shape[2] > 1 else ''}"
