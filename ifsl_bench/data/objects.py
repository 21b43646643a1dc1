"""Data sets that another library has loaded, as what importers read: nothing of that library is imported for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ifsl_bench import registry
from ifsl_bench.data.pickled import SHAPE
from ifsl_bench.data.source import DatasetSource, ObjectForm
from ifsl_bench.errors import UserError

SIDES = {"train": "train", "validation": "val", "val": "val", "test": "test"}  # an object's mode -> side
_WRAPPERS = ("MetaDataset", "Taskset")  # whose ``dataset`` is what they were made of


def is_a(value: Any, library: str, *names: str) -> bool:
    """Whether a value is an instance of a class of that library, or of a subclass, known by name."""
    return any(t.__module__.partition(".")[0] == library and t.__name__ in names for t in type(value).__mro__)


def find_form(given: Sequence[Any]) -> tuple[DatasetSource, ObjectForm, dict[str, Any]]:
    """The data set that three objects make, the form they have, and the object of each of train, val and test.

    Args:
        given: the objects in any order, each perhaps wrapped in what learn2learn makes tasks of.

    Raises:
        UserError: they are of no known class, or not one of each side.
    """
    forms = [(source, form) for source in _sources() for form in source.object_forms]
    objects = [_unwrapped(value, {form.kind.partition(".")[0] for _, form in forms}) for value in given]
    for source, form in forms:
        library, _, name = form.kind.partition(".")
        if objects and all(is_a(value, library, name) for value in objects):
            sides = {SIDES.get(str(value.mode), str(value.mode)): value for value in objects}
            if len(objects) != 3 or sides.keys() != set(SIDES.values()):
                modes = ", ".join(str(value.mode) for value in objects)
                raise UserError(f"{source.name} is made of a train, a validation and a test {name}, not of: {modes}")
            return source, form, {side: sides[side] for side in ("train", "val", "test")}
    kinds = ", ".join(dict.fromkeys(f"{type(v).__module__.partition('.')[0]}.{type(v).__name__}" for v in objects))
    known = "; ".join(f"{form.kind} for {source.name}" for source, form in forms)
    raise UserError(f"no data set is made of {kinds or 'nothing'}; three objects of one class are: {known}")


def _sources() -> Iterator[DatasetSource]:
    for name in registry.names(registry.DATASETS):
        if not registry.load(registry.DATASETS, name).problem:
            yield registry.dataset_source(name)


def _unwrapped(value: Any, libraries: set[str]) -> Any:
    while any(is_a(value, library, *_WRAPPERS) for library in libraries):
        value = value.dataset
    return value


def attribute(loaded: Any, name: str, where: str) -> Any:
    """What an object holds under that name.

    Raises:
        UserError: nothing; some people delete it to save memory.
    """
    if not hasattr(loaded, name):
        raise UserError(f"{where} has no {name!r}, which its library gives it; load it again")
    return getattr(loaded, name)


def rows_by_name(value: Any) -> Any:
    """A mapping of rows whose numbers may be NumPy's; anything else comes back as it is, for its reader to refuse."""
    if not isinstance(value, Mapping):
        return value
    return {name: np.asarray(rows).reshape(-1) if len(rows) else [] for name, rows in value.items()}


class LoadedImages:
    """Images in memory as floats, channels first: [n, 3, 84, 84] of whole numbers from 0 to 255."""

    def __init__(self, x: Any, where: str) -> None:
        shape = tuple(getattr(x, "shape", ()))
        if shape[1:] != (SHAPE[2], *SHAPE[:2]):
            raise UserError(f"'x' of {where} is a {type(x).__name__} {list(shape)}, expected a tensor [n, 3, 84, 84]")
        self.x, self.where, self.nbytes = x, where, len(x) * math.prod(SHAPE)

    def __len__(self) -> int:
        return len(self.x)

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """uint8 [rows, 84, 84, 3] after another.

        Raises:
            UserError: a value is no whole number from 0 to 255.
        """
        for start in range(0, len(self), rows):
            given = np.asarray(self.x[start : start + rows])
            with np.errstate(invalid="ignore"):
                block = given.astype(np.uint8)
            if not (block == given).all():
                raise UserError(
                    f"'x' of {self.where} has values that are no whole numbers from 0 to 255; give the object as its "
                    f"library loads it"
                )
            yield block.transpose(0, 2, 3, 1)
