"""Which data set three objects of another library make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ifsl_bench.common.errors import UserError
from ifsl_bench.data import registered
from ifsl_bench.data.loaded_objects import is_exactly, kind_of
from ifsl_bench.data.sets.labelled import LabelledObjects
from ifsl_bench.data.sets.own import OwnObjects
from ifsl_bench.data.source import DatasetSource, ObjectForm
from ifsl_bench.plugin import registry

MODES = {"train": "train", "validation": "val", "val": "val", "test": "test"}  # an object's mode -> side
SIDES = ("train", "val", "test")


def find_form(given: Any, name: str | None) -> tuple[DatasetSource, ObjectForm, dict[str, Any]]:
    """The data set that three objects make, the form they have, and the object of each of train, val and test.

    Args:
        given: a list of the objects. Those that a data set is known to be made of come in any order, since they say
            what they are, and each may be wrapped in what learn2learn makes tasks of.
        name: of a data set of the user's own, which any labelled images make, in that order.

    Raises:
        UserError: they are no list, of no known class, or not one of each side.
    """
    if not isinstance(given, (list, tuple)):
        raise UserError(f"data sets are given as a list, [train, validation, test], not as a {kind_of(given)}")
    if name is not None and name not in registry.names(registry.DATASETS):
        return OwnObjects(name), LabelledObjects(), _in_order(given)
    source, form, sides = _known(given)
    if name not in (None, source.name):
        raise UserError(f"{form.title} make {source.name!r}, not {name!r}; for a data set of your own, give a new name")
    return source, form, sides


def _in_order(given: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    """The object of each side, by its place."""
    if len(given) != len(SIDES):
        raise UserError(f"a data set is made of a list of three, [train, validation, test]; this one has {len(given)}")
    # Where three objects say what they are, the list must not say something else; a part of train may well be "test".
    modes = [MODES.get(str(getattr(_inside(value), "mode", ""))) for value in given]
    if set(modes) == set(SIDES) and modes != list(SIDES):
        raise UserError(f"the list is to be [train, validation, test]; by their modes its objects are {modes}")
    return dict(zip(SIDES, given, strict=True))


def _inside(value: Any, whole: bool = False) -> Any:
    """What wrappers of learn2learn were made of.

    Raises:
        UserError: a wrapper leaves images out, where ``whole`` says that it must not.
    """
    while is_exactly(value, "learn2learn", "Taskset", "TaskDataset", "MetaDataset"):
        inner = value.dataset
        if whole and hasattr(value, "indices_to_labels") and len(value.indices_to_labels) != len(inner):
            raise UserError(
                f"a MetaDataset has {len(value.indices_to_labels):,} of the {len(inner):,} images of its "
                f"{type(inner).__name__}; to import these as a data set of your own, give it a name, as in name='mine'"
            )
        value = inner
    return value


def _known(given: list[Any] | tuple[Any, ...]) -> tuple[DatasetSource, ObjectForm, dict[str, Any]]:
    forms = [(source, form) for source in _sources() for form in source.object_forms]
    objects = [_inside(value, whole=True) for value in given]
    for source, form in forms:
        library, _, kind = form.kind.partition(".")
        if objects and all(is_exactly(value, library, kind) for value in objects):
            modes = [str(getattr(value, "mode", None)) for value in objects]
            sides = {MODES.get(mode, mode): value for mode, value in zip(modes, objects, strict=True)}
            if len(objects) != len(SIDES) or sides.keys() != set(SIDES):
                raise UserError(
                    f"{source.name} is made of a train, a validation and a test {kind}, not of: {', '.join(modes)}"
                )
            return source, form, {side: sides[side] for side in SIDES}
    kinds = ", ".join(dict.fromkeys(kind_of(value) for value in objects))
    known = "; ".join(f"{form.kind} for {source.name}" for source, form in forms)
    raise UserError(
        f"no data set is made of {kinds or 'nothing'}; three objects of one class are: {known}. Other labelled images "
        f"make a data set of your own: give it a name, as in name='mine'"
    )


def _sources() -> Iterator[DatasetSource]:
    for name in registry.names(registry.DATASETS):
        if not registry.load(registry.DATASETS, name).problem:
            yield registered.dataset_source(name)
