"""Labelled images in memory or behind objects of another library, as a data set of one's own.

An object has ``len(data)``, ``data[i]``, a pair (image, label), and perhaps ``data.labels_to_indices`` (label ->
indices) if it has some of the images only, like learn2learn's ``FilteredMetaDataset``. Each image is read twice: first
for its label, size and range, then to be written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from ifsl_bench.data.image_pools import (
    ListItem,
    divide_classes_into_pools,
    iterate_unfinished_pools,
    make_pool_labels,
    report_duplicates,
)
from ifsl_bench.data.read.archive import escape_undecoded_bytes, natural_sort_key
from ifsl_bench.data.read.arrays import translate_library_errors
from ifsl_bench.data.read.images import to_rgb
from ifsl_bench.data.sets.folder import check_sides, select_large_classes
from ifsl_bench.data.source import BuildContext
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import sha256_json
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.serialization import make_memory_releaser

POOL_OF_SIDE = {"train": "base", "val": "novel/val", "test": "novel/test"}  # side of an object -> side of its classes
SIDE_OF_MODE = {"train": "train", "validation": "val", "val": "val", "test": "test"}  # an object's mode -> side
# Class of learn2learn -> the data set that its files make, and where they lie below the root that it was given.
DATASET_OF_CLASS = {
    "MiniImagenet": ("mini-imagenet-held-out", "."),
    "TieredImagenet": ("tiered-imagenet-2018", "tiered-imagenet"),
}
_ROUNDING_TOLERANCE = 1e-3  # how far 255 times a float may be from a whole number


def learn2learn_dataset_and_folder(objects: Any) -> tuple[str, Path]:
    """Return the data set whose files learn2learn has loaded, and their folder.

    Raises:
        UserError: Other objects, or objects that were loaded from several folders.
    """
    inner = [_unwrap_learn2learn(value, "Taskset", "TaskDataset", "MetaDataset") for value in _as_list(objects)]
    for kind, (name, folder) in DATASET_OF_CLASS.items():
        if inner and all(_is_learn2learn_class(value, kind) for value in inner):
            roots = {str(value.root) for value in inner}
            if len(roots) > 1:
                raise UserError(f"{name} is made from one folder; these were loaded from {' and '.join(sorted(roots))}")
            return name, Path(*roots) / folder
    kinds = ", ".join(dict.fromkeys(map(_class_name, inner))) or "nothing"
    choices = "; ".join(f"learn2learn.{kind} for {name}" for kind, (name, _) in DATASET_OF_CLASS.items())
    raise UserError(
        f"no data set is made of {kinds}; they are made of {choices}. Other labelled images make a data set of your "
        f"own: give it a name, as in name='mine'"
    )


def _group_objects_by_side(objects: Any) -> dict[str, LabelledSplit]:
    """Return side -> data set of a list [train, validation, test].

    Raises:
        UserError: There are not three, or their modes are in another order.
    """
    if len(_as_list(objects)) != len(POOL_OF_SIDE):
        raise UserError(
            f"a data set is made of a list of three, [train, validation, test]; this one has {len(objects)}"
        )
    data = [_unwrap_learn2learn(value, "Taskset", "TaskDataset") for value in objects]
    # If all three have a mode, they must be in this order; a part of train alone may well have the mode "test".
    modes = [SIDE_OF_MODE.get(str(getattr(_unwrap_learn2learn(value, "MetaDataset"), "mode", ""))) for value in data]
    if set(modes) == set(POOL_OF_SIDE) and modes != list(POOL_OF_SIDE):
        raise UserError(f"the list is to be [train, validation, test]; by their modes its objects are {modes}")
    return {side: LabelledSplit(value, side) for side, value in zip(POOL_OF_SIDE, data, strict=True)}


def _as_list(objects: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(objects, (list, tuple)):
        raise UserError(f"data sets are given as a list, [train, validation, test], not as a {_class_name(objects)}")
    return objects


def _unwrap_learn2learn(value: Any, *wrappers: str) -> Any:
    """Return the data set inside wrappers of learn2learn."""
    while _is_learn2learn_class(value, *wrappers):
        value = value.dataset
    return value


def _is_learn2learn_class(value: Any, *names: str) -> bool:
    """Return whether a value's class is one of these of learn2learn; not a subclass, which may have other images."""
    return type(value).__module__.partition(".")[0] == "learn2learn" and type(value).__name__ in names


def _class_name(value: Any) -> str:
    """Return the name of a value's class, "library.Class"."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"


def _to_pixels(image: Any, what: str) -> np.ndarray:
    """Return an image as an array [H, W, C] of 1 or 3 channels, its numbers unchanged.

    Args:
        image: Of Pillow, or a tensor or an array [H, W], [C, H, W] or [H, W, C]. If both are possible, a tensor has its
            channels first, an array last.
        what: Name of the image in messages.

    Raises:
        UserError: It is something else.
    """
    kind, axes = _class_name(image), (2, 0)
    if isinstance(image, Image.Image):
        image = image.convert("L") if image.mode in ("1", "L") else to_rgb(image)
    elif hasattr(image, "detach"):
        image, axes = image.detach().cpu().to_dense(), (0, 2)
        image = image.float() if image.is_floating_point() else image  # NumPy has no bfloat16
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., np.newaxis]
    channels = [axis for axis in axes if array.ndim == 3 and array.shape[axis] in (1, 3)]
    if not channels or array.dtype.kind not in "buif" or not array.size:
        raise UserError(
            f"{what} is a {kind} {array.dtype}{list(array.shape)}, expected an image [C, H, W] or "
            "[H, W, C] of 1 or 3 channels"
        )
    return np.moveaxis(array, channels[0], 2)


class PixelValueScale:
    """The numbers that stand for black and white: 0 and 255, or 0 and 1 where no image has any above 1.

    Attributes:
        whole: Name of an image with numbers above 1.
        divided: Name of an image with fractions.
    """

    def __init__(self) -> None:
        self.whole: str | None = None
        self.divided: str | None = None

    def update_range(self, image: np.ndarray, what: str) -> None:
        """Note the range of an image.

        Args:
            image: [H, W, C].
            what: Name of the image in messages.

        Raises:
            UserError: It cannot be converted to whole numbers from 0 to 255, or not like the images before.
        """
        low, high = float(image.min()), float(image.max())
        scaled = image.astype(np.float32) * (255 if high <= 1 else 1)
        if not (low >= 0 and high <= 255) or np.abs(scaled - np.rint(scaled)).max() > _ROUNDING_TOLERANCE:  # or NaN
            raise UserError(
                f"{what} has values from {low:.4g} to {high:.4g}, expected whole numbers from 0 to 255, or 255ths from "
                f"0 to 1; images that were normalised, or resized as floats, cannot be undone: leave that step out of "
                f"the data set's transform"
            )
        if high > 1:
            self.whole = what
        if (image != np.rint(image)).any():
            self.divided = what
        if self.divided and self.whole:
            raise UserError(f"{self.divided} has values in 0 to 1, {self.whole} larger ones; give all images one range")

    def to_bytes(self, image: np.ndarray) -> np.ndarray:
        """Return an image as uint8."""
        return np.rint(image.astype(np.float32) * (1 if self.whole else 255)).astype(np.uint8)


class LabelledSplit:
    """The data set of one side.

    Attributes:
        indices: Of its images; a wrapper need not have all.
        digests: uint64 [n], for each index that was read.
        classes: Name -> indices of its images, ascending; complete once :meth:`iterate_images_and_names` is exhausted.
            A name is the label with the side before it, since sides have different classes whatever their labels.
    """

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name, self.where = data, name, f"the {name} data set"
        groups = getattr(data, "labels_to_indices", None)
        with translate_library_errors(f"{self.where} is a {_class_name(data)} which cannot be read"):
            listed = range(len(data)) if groups is None else (index for group in groups.values() for index in group)
            self.indices = sorted({int(index) for index in listed})
            self.digests = np.zeros(len(data), np.uint64)
        if self.indices and not 0 <= self.indices[0] <= self.indices[-1] < len(self.digests):
            odd = min(self.indices[0], 0) or self.indices[-1]
            raise UserError(f"{self.where} names image {odd}, it has {len(self.digests):,}")
        self.classes: dict[str, list[int]] = {}

    def image_name(self, index: int) -> str:
        return f"image {index} of {self.where}"

    def read_image_and_label(self, index: int) -> tuple[np.ndarray, Hashable]:
        """Return an image [H, W, C] and its label; raise UserError if it is no such pair."""
        name = self.image_name(index)
        with translate_library_errors(f"{name} cannot be read"):
            item = self.data[index]
            if not isinstance(item, (tuple, list)) or len(item) < 2:
                raise UserError(f"{name} is a {_class_name(item)}, expected a pair (image, label)")
            image = _to_pixels(item[0], name)
        with translate_library_errors(f"the label of {name} cannot be read"):
            label: Hashable = item[1].item() if hasattr(item[1], "item") else item[1]
            hash(label)
        return image, label

    def reread_image(self, index: int) -> np.ndarray:
        """Return an image of the survey; raise UserError if it has changed."""
        image, _ = self.read_image_and_label(index)
        if _image_digest(image) != self.digests[index]:
            raise UserError(
                f"{self.image_name(index)} is another one each time it is read; leave random steps out of the data "
                "set's transform"
            )
        return image

    def iterate_images_and_names(self) -> Iterator[tuple[np.ndarray, str]]:
        """Yield every image [H, W, C] and its name in messages; collect labels and digests.

        Raises:
            UserError: An image cannot be read.
        """
        groups: dict[Hashable, list[int]] = {}
        for index in self.indices:
            image, label = self.read_image_and_label(index)
            groups.setdefault(label, []).append(index)
            self.digests[index] = _image_digest(image)
            yield image, self.image_name(index)
        names = {label: f"{self.name}-{label}" for label in groups}
        if len(set(names.values())) < len(names):  # 1 and "1"
            names = {label: f"{self.name}-{label!r}" for label in groups}
        self.classes = {escape_undecoded_bytes(names[label]): indices for label, indices in groups.items()}


def _image_digest(image: np.ndarray) -> int:
    """Return 64 bits of a hash over size and numbers of an image."""
    head = f"{image.dtype.str}{image.shape}".encode()
    return int.from_bytes(hashlib.sha256(head + image.tobytes()).digest()[:8], "little")


class LabelledObjects:
    """The layout of three objects: classes of train are base classes, and tasks have the shared protocol."""

    title: ClassVar[str] = "labelled images from Python"

    def __init__(self) -> None:
        self.sides: dict[str, LabelledSplit] = {}
        self.scale, self.shape = PixelValueScale(), tuple[int, ...]()

    def identity(self, objects: Any, reporter: Reporter) -> str:
        """Read all images and return a hash of them and their labels.

        Args:
            objects: A list [train, validation, test].
            reporter: Takes progress.

        Raises:
            UserError: No data set can be made of the objects.
        """
        self.sides = _group_objects_by_side(objects)
        total = sum(len(side.indices) for side in self.sides.values())
        first = ""
        with reporter.report_stage(f"looking at {total:,} images", total) as stage:
            for side in self.sides.values():
                for image, what in side.iterate_images_and_names():
                    first, self.shape = first or what, self.shape or image.shape
                    if image.shape != self.shape:
                        raise UserError(
                            f"{what} is {_format_image_size(image.shape)}, {first} is "
                            f"{_format_image_size(self.shape)}; images must "
                            f"be of one size: have the data set's transform resize them, and make them of one kind"
                        )
                    self.scale.update_range(image, what)
                    stage.advance(1)
        content = hashlib.sha256(b"".join(side.digests.astype("<u8").tobytes() for side in self.sides.values()))
        return sha256_json([content.hexdigest(), {name: side.classes for name, side in self.sides.items()}])

    def build(self, context: BuildContext) -> None:
        """Write the pools from the objects of :meth:`identity`."""
        side_of = {name: side for side in self.sides.values() for name in side.classes}
        classes = {
            name: [ListItem(side_of[name].name, index) for index in side_of[name].classes[name]]
            for name in sorted(side_of, key=natural_sort_key)
        }
        classes = select_large_classes(context, classes)
        roles = {name: POOL_OF_SIDE[side_of[name].name] for name in classes}
        check_sides(roles, classes, "what was given")
        pools = divide_classes_into_pools(classes, roles)
        with iterate_unfinished_pools(context, pools) as (names, stage):
            for pool in names:
                files = pools[pool]
                side = side_of[next(iter(files))]
                indices = np.array([item.index for items in files.values() for item in items], np.int64)
                with context.writer.write_pool(pool, make_pool_labels(files), tuple(files), self.shape) as images:
                    written = make_memory_releaser(images)
                    for row, index in enumerate(indices.tolist()):
                        images[row] = self.scale.to_bytes(side.reread_image(index))
                        written(images[row].nbytes)
                        stage.advance(1)
                    np.save(context.writer.side_file_path(pool), side.digests[indices])
        report_duplicates(context, pools)


def _format_image_size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]} pixels of {shape[2]} channel{'s' if shape[2] > 1 else ''}"
