"""Makes data sets available: opens, builds, rebuilds or refuses them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ifsl_bench.data import datasets
from ifsl_bench.data.datasets import command, is_made_here, is_prepared, not_prepared, pinned, prepared
from ifsl_bench.data.pools import Dataset, open_dataset
from ifsl_bench.data.preparing.importing import run
from ifsl_bench.data.read.archive import FileTree, open_tree
from ifsl_bench.data.sets.folder import OwnOptions
from ifsl_bench.data.sets.labelled import LabelledObjects, files_of
from ifsl_bench.data.sets.own import OwnData, OwnObjects
from ifsl_bench.data.source import BuildContext, DatasetSource
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import DataSpec
from ifsl_bench.protocols.tasks.task_limits import NAME
from ifsl_bench.utils.errors import CorruptFile, UserError, unknown
from ifsl_bench.utils.files import Paths, mark_used
from ifsl_bench.utils.locks import locked
from ifsl_bench.utils.progress import Reporter


def ensure(home: Paths, spec: DataSpec, reporter: Reporter) -> Dataset:
    """The data set of a task, built now if it can be.

    Raises:
        UserError: the data have to be obtained first, or are not the ones that the task is pinned to.
        CorruptFile: the cached copy is damaged and cannot be rebuilt without its source.
    """
    dataset = pinned(home, spec)
    if dataset is None and is_made_here(spec.name):
        source = datasets.dataset_source(spec.name)
        dataset = _prepared(home, source, False, reporter, lambda _: None, lambda: _build(home, source, None, reporter))
    if dataset is None and (dataset := prepared(home, spec.name)) is None:
        raise UserError(not_prepared(home, spec))
    if spec.fingerprint and dataset.fingerprint != spec.fingerprint:
        raise UserError(
            f"data set {spec.name!r} in {dataset.folder} has fingerprint {dataset.fingerprint[:16]}, the task is "
            f"pinned to {spec.fingerprint[:16]}: results on it would not be comparable. Rebuild it with "
            f"'{command(spec.name)} --force', or give your own task file without a fingerprint"
        )
    mark_used(dataset.folder / "manifest.json")
    return dataset


def prepare(
    home: Paths,
    name: str,
    path: Path | None,
    force: bool,
    reporter: Reporter,
    allow_partial: bool = False,
    own: OwnOptions | None = None,
) -> Dataset:
    """``ifsl-bench data prepare``: builds a data set, from ``path`` where it needs one.

    A name that no plugin has makes a data set of the user's own: of images in folders, with tasks on them, or of
    frozen features; see :mod:`ifsl_bench.data.sets.own`.

    Args:
        path: the folder or archive that the data are made from.
        force: build again even if a good copy is there, and without what an import that failed has left.
        allow_partial: accept less than the source should hold; the data set is then marked partial.
        own: how images of the user's own are divided and resized.

    Raises:
        UserError: unknown name, nothing to build from, or unusable content.
    """
    names = registry.names(registry.DATASETS)
    _check_name(name)
    if name not in names and path is None:
        if is_prepared(home, name):
            if force or (own is not None and own.flags()):
                raise UserError(
                    f"data set {name!r} is prepared already; to make it again say where its files are with --from PATH"
                )
            return open_dataset(home.data / name)
        raise unknown("data set", name, names, where="(for images or features of your own, add --from FOLDER)",
                      see="ifsl-bench data list")  # fmt: skip
    if name in names and own is not None and own.flags():
        raise UserError(f"{', '.join(own.flags())}: for data sets of your own; {name!r} is divided as it is published")
    source = datasets.dataset_source(name) if name in names else OwnData(name, own or OwnOptions())
    if not source.needs_source and path is not None:
        raise UserError(f"data set {name!r} needs no files: leave --from out; for your own data, choose another name")
    if source.needs_source and path is None:
        raise UserError(f"data set {name!r} is made from your own copy; say where that is with --from PATH")
    if path is not None and not os.path.exists(path):
        raise UserError(f"--from: there is no file or folder {path}")
    return _prepared(
        home,
        source,
        force,
        reporter,
        lambda ready: _check_same(source, ready, path, reporter),
        lambda: _build(home, source, path, reporter, allow_partial, force),
    )


def prepare_objects(
    home: Paths, objects: Any, name: str | None, force: bool, reporter: Reporter, allow_partial: bool = False
) -> Dataset:
    """Builds a data set of the user's own from objects in memory, or a known one from the files they were loaded from.

    Args:
        objects: a list of one object for each of train, validation and test.
        name: of the data set of the user's own; None for the one whose files the objects have loaded.
        force: as in :func:`prepare`.
        allow_partial: as in :func:`prepare`; without it a partial data set that is there already is refused, too.

    Raises:
        UserError: objects of no known class, unusable content, or a data set that was made from something else.
    """
    if name is None:
        name, folder = files_of(objects)
        return prepare(home, name, folder, force, reporter, allow_partial)
    _check_name(name)
    if name in registry.names(registry.DATASETS):
        raise UserError(f"{name!r} is made from files, not from objects; for a data set of your own, give a new name")
    source, layout = OwnObjects(name), LabelledObjects()
    source.check_name()
    made_from = {"identity": layout.identity(objects, reporter)}

    def check(ready: Dataset) -> None:
        if ready.manifest["about"].get("made_from") != made_from:
            origin = ready.manifest["about"].get("source")
            raise UserError(
                f"{_there(ready)}, from something else than these objects (from {origin}); force=True replaces it"
            )
        if ready.partial and not allow_partial:
            raise UserError(f"{_there(ready)}; allow_partial=True accepts that, force=True builds it again")
        reporter.say(f"{_there(ready)} (force=True builds it again)")

    def make() -> Dataset:
        context = BuildContext(None, reporter, allow_partial, layout.title)
        context.about["form"] = layout.title
        return run(home.data / name, source, context, made_from, layout.build, force)

    return _prepared(home, source, force, reporter, check, make)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise UserError(f"{name!r} is no name for a data set: use lower-case letters, digits, '-', '_', '.'")


def _prepared(
    home: Paths,
    source: DatasetSource,
    force: bool,
    reporter: Reporter,
    check: Callable[[Dataset], None],
    make: Callable[[], Dataset],
) -> Dataset:
    """The data set as it was prepared before, unless ``check`` refuses it, or as ``make`` builds it; with its tasks."""
    own = source if isinstance(source, OwnData) else None
    if not force and (ready := _current(home, source)) is not None:  # before the lock, which a read-only folder denies
        check(ready)
        if own is None or own.has_tasks(home, ready):
            return ready
    with locked(home.data / source.name, reporter.warn):
        dataset = None if force else _current(home, source, reporter.warn)
        if dataset is None:
            dataset = make()
        else:
            check(dataset)
        if own is not None and not own.has_tasks(home, dataset):
            own.write_tasks(home, dataset, reporter)
        return dataset


def _current(home: Paths, source: DatasetSource, warn: Callable[[str], None] = lambda _: None) -> Dataset | None:
    """The data set as it was prepared before; None where it is not there, damaged, or made by another version.

    Where no lock is held, another process may be replacing it: who gets None looks again under the lock.

    Args:
        warn: told why what is there is built again.
    """
    if not is_prepared(home, source.name):
        return None
    try:
        dataset = open_dataset(home.data / source.name)
    except CorruptFile as error:
        warn(f"{error}; building it again")
        return None
    # What is the user's own has settings instead, which must not be replaced without a word.
    if isinstance(source, OwnData) or dataset.manifest["recipe"] == source.recipe():
        return dataset
    warn(f"{dataset.folder} was made by another version; building it again")
    return None


def _there(dataset: Dataset) -> str:
    mark = " (partial)" if dataset.partial else ""
    return f"{dataset.name} is prepared already{mark} in {dataset.folder}"


def _check_same(source: DatasetSource, dataset: Dataset, path: Path | None, reporter: Reporter) -> None:
    """Raises :class:`UserError` where a data set was made with other settings, or from something else than ``path``."""
    there = _there(dataset)
    remedy = "--force replaces it" + (", or choose another name" if isinstance(source, OwnData) else "")
    if isinstance(source, OwnData) and not source.has_same_settings(dataset):
        raise UserError(f"{there}, with other settings; {remedy}")
    if path is not None:
        about = dataset.manifest["about"]
        made_from = about.get("made_from", {})
        with open_tree(path) as tree:
            # The content is looked at where the files lie elsewhere; what objects gave has an identity alone.
            same = tree.identity() == made_from.get("identity") or made_from.items() >= tree.content().items()
        if not same:
            told = f"from other files than {path} holds now (it was made from {about.get('source')})"
            raise UserError(f"{there}, {told}; {remedy}")
    reporter.say(f"{there} (--force builds it again)")


def _build(
    home: Paths,
    source: DatasetSource,
    path: Path | None,
    reporter: Reporter,
    allow_partial: bool = False,
    force: bool = False,
) -> Dataset:
    folder = home.data / source.name
    with open_tree(path) if path is not None else nullcontext() as tree:
        context = BuildContext(tree, reporter, allow_partial)
        if tree is None:
            return run(folder, source, context, None, source.build)
        _check_form(source, tree)
        return run(folder, source, context, {"identity": tree.identity(), **tree.content()}, source.build, force)


def _check_form(source: DatasetSource, tree: FileTree) -> None:
    """Holds the form of files against those of all data sets.

    Raises:
        UserError: they are of no form of this data set, but of one of another; names every one that fits.
    """
    if not source.layouts or source.layout(tree) is not None:
        return
    names = [name for name in registry.names(registry.DATASETS) if not registry.load(registry.DATASETS, name).problem]
    others = [
        (source, layout)
        for source in map(datasets.dataset_source, names)
        if (layout := source.layout(tree)) is not None
    ]
    if others:
        titles = " and ".join(dict.fromkeys(layout.title for _, layout in others))
        choices = " or ".join(f"{source.name!r} ({source.summary})" for source, _ in others)
        commands = ", or ".join(f"ifsl-bench data prepare {source.name} --from {tree.path}" for source, _ in others)
        raise UserError(
            f"{tree.path} holds {titles}, which makes data set {choices}, not {source.name!r}; to prepare it: "
            f"{commands}"
        )
