"""Recognises objects of another library that data sets are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.sets.labelled import is_exactly, kind_of

SIDES = ("train", "val", "test")
MODES = {"train": "train", "validation": "val", "val": "val", "test": "test"}  # an object's mode -> side
# Class of learn2learn -> the data set that its files make, and where they lie below the root that it was given.
FILES = {
    "MiniImagenet": ("mini-imagenet-held-out", "."),
    "TieredImagenet": ("tiered-imagenet-2018", "tiered-imagenet"),
}


def files_of(objects: Any) -> tuple[str, Path]:
    """The data set whose files learn2learn has loaded, and their folder.

    Args:
        objects: a list of objects of one class, each perhaps wrapped in what learn2learn makes tasks of.

    Raises:
        UserError: other objects, or objects that were loaded from several folders.
    """
    inner = [_unwrapped(value) for value in _listed(objects)]
    for kind, (name, folder) in FILES.items():
        if inner and all(is_exactly(value, "learn2learn", kind) for value in inner):
            roots = {str(value.root) for value in inner}
            if len(roots) > 1:
                raise UserError(f"{name} is made from one folder; these were loaded from {' and '.join(sorted(roots))}")
            return name, Path(*roots) / folder
    kinds = ", ".join(dict.fromkeys(map(kind_of, inner))) or "nothing"
    known = "; ".join(f"learn2learn.{kind} for {name}" for kind, (name, _) in FILES.items())
    raise UserError(
        f"no data set is made of {kinds}; known are {known}. Other labelled images make a data set of your own: give "
        f"it a name, as in name='mine'"
    )


def by_side(objects: Any) -> dict[str, Any]:
    """The objects of a list [train, validation, test] by side.

    Raises:
        UserError: there are not three, or they say of themselves that they are in another order.
    """
    if len(_listed(objects)) != len(SIDES):
        raise UserError(
            f"a data set is made of a list of three, [train, validation, test]; this one has {len(objects)}"
        )
    # Where all three say what they are, the list must agree; a part of train may well call itself "test".
    modes = [MODES.get(str(getattr(_unwrapped(value), "mode", ""))) for value in objects]
    if set(modes) == set(SIDES) and modes != list(SIDES):
        raise UserError(f"the list is to be [train, validation, test]; by their modes its objects are {modes}")
    return dict(zip(SIDES, objects, strict=True))


def _listed(objects: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(objects, (list, tuple)):
        raise UserError(f"data sets are given as a list, [train, validation, test], not as a {kind_of(objects)}")
    return objects


def _unwrapped(value: Any) -> Any:
    """The data set inside learn2learn's wrappers."""
    while is_exactly(value, "learn2learn", "Taskset", "TaskDataset", "MetaDataset"):
        value = value.dataset
    return value
