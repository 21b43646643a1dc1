"""Makes data sets available: downloads, builds, resumes, rebuilds or refuses them."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from ifsl_bench.data import datasets
from ifsl_bench.data.datasets import (
    format_prepare_command,
    is_generated,
    is_prepared,
    not_prepared_message,
    open_prepared,
    open_prepared_with_pinned_fingerprint,
)
from ifsl_bench.data.pools import Dataset, open_dataset
from ifsl_bench.data.read.archive import FileTree, open_tree
from ifsl_bench.data.sets.folder import OwnOptions
from ifsl_bench.data.sets.labelled import LabelledObjects, learn2learn_dataset_and_folder
from ifsl_bench.data.sets.own import OwnData, OwnObjects
from ifsl_bench.data.source import BuildContext, DatasetSource, Downloadable
from ifsl_bench.data.writer import DatasetWriter, build_dataset
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import DataSpec
from ifsl_bench.protocols.tasks.task_limits import NAME_PATTERN
from ifsl_bench.utils.errors import CorruptFile, UserError, escape_controls, unknown_name_error
from ifsl_bench.utils.files import DOWNLOAD_PREFIX, Paths, record_last_use, sha256_json, translate_disk_errors
from ifsl_bench.utils.locks import hold_lock, remove_path, unfinished_path
from ifsl_bench.utils.progress import Reporter


def open_or_build(home: Paths, spec: DataSpec, reporter: Reporter) -> Dataset:
    """Return the data set of a task; it is built now if it is not there and needs no files.

    Args:
        home: Folders of caches.
        spec: Name and fingerprint in the task.
        reporter: Takes messages and progress.

    Raises:
        UserError: The data have to be obtained first, or are not the ones that the task is pinned to.
        CorruptFile: The cached copy is damaged and cannot be rebuilt without its source.
    """
    dataset = open_prepared_with_pinned_fingerprint(home, spec)
    if dataset is None and is_generated(spec.name):
        source = datasets.find_dataset_source(spec.name)
        dataset = _reuse_or_build(
            home, source, False, reporter, lambda _: None, lambda: _build_dataset(home, source, None, reporter)
        )
    if dataset is None and (dataset := open_prepared(home, spec.name)) is None:
        raise UserError(not_prepared_message(home, spec))
    if spec.fingerprint and dataset.fingerprint != spec.fingerprint:
        raise UserError(
            f"data set {spec.name!r} in {dataset.folder} has fingerprint {dataset.fingerprint[:16]}, the task is "
            f"pinned to {spec.fingerprint[:16]}: results on it would not be comparable. Rebuild it with "
            f"'{format_prepare_command(spec.name)} --force', or give your own task file without a fingerprint"
        )
    record_last_use(dataset.folder / "manifest.json")
    return dataset


def prepare_dataset(
    home: Paths,
    name: str,
    path: Path | None,
    force: bool,
    reporter: Reporter,
    allow_partial: bool = False,
    own: OwnOptions | None = None,
) -> Dataset:
    """Build a data set, from ``path`` if it needs files.

    A name that no plugin has makes a data set of the user's own: of images in folders, with tasks on them, or of
    frozen features; see :mod:`ifsl_bench.data.sets.own`.

    Args:
        home: Folders of caches.
        name: Of the data set.
        path: The folder or archive that the data are made from.
        force: Build again even if a good copy is there, and without the pools of an import that failed.
        reporter: Takes messages and progress.
        allow_partial: Accept less than the source should hold; the data set is then marked partial.
        own: How images of the user's own are divided and resized.

    Raises:
        UserError: Unknown name, nothing to build from, or unusable content.
    """
    names = registry.registered_entry_points(registry.DATASET_GROUP)
    _check_dataset_name(name)
    if name not in names and path is None:
        if is_prepared(home, name):
            if force or (own is not None and own.given_command_line_options()):
                raise UserError(
                    f"data set {name!r} is prepared already; to make it again say where its files are with --from PATH"
                )
            return open_dataset(home.data / name)
        raise unknown_name_error(
            "data set",
            name,
            names,
            where="(for images or features of your own, add --from FOLDER)",
            see="ifsl-bench data list",
        )
    if name in names and own is not None and own.given_command_line_options():
        raise UserError(
            f"{', '.join(own.given_command_line_options())}: for data sets of your own; {name!r} is divided as it is "
            "published"
        )
    source = datasets.find_dataset_source(name) if name in names else OwnData(name, own or OwnOptions())
    if not source.needs_source and path is not None:
        raise UserError(f"data set {name!r} needs no files: leave --from out; for your own data, choose another name")
    if source.needs_source and path is None:
        raise UserError(f"data set {name!r} is made from your own copy; say where that is with --from PATH")
    if path is not None and not os.path.exists(path):
        raise UserError(f"--from: there is no file or folder {path}")
    return _reuse_or_build(
        home,
        source,
        force,
        reporter,
        lambda ready: _check_same_source(source, ready, path, reporter),
        lambda: _build_dataset(home, source, path, reporter, allow_partial, force),
    )


def check_source_files(name: str, path: Path) -> None:
    """Check by the names of its files that a data set could be made from a folder or archive.

    Args:
        name: Of the data set.
        path: The folder or archive.

    Raises:
        UserError: It has none of the forms of that data set.
    """
    known = name in registry.registered_entry_points(registry.DATASET_GROUP)
    source = datasets.find_dataset_source(name) if known else OwnData(name, OwnOptions())
    with open_tree(path) as tree:
        _check_layout(source, tree)
        if source.layouts:
            source.find_required_layout(tree)


def prepare_from_objects(
    home: Paths, objects: Any, name: str | None, force: bool, reporter: Reporter, allow_partial: bool = False
) -> Dataset:
    """Build a data set of the user's own from objects in memory, or a known one from the files of the objects.

    Args:
        home: Folders of caches.
        objects: A list [train, validation, test].
        name: Of the data set of the user's own; None for the one whose files the objects have loaded.
        force: As in :func:`prepare_dataset`.
        reporter: Takes messages and progress.
        allow_partial: As in :func:`prepare_dataset`; without it a partial data set that is there already is refused,
            too.

    Raises:
        UserError: Objects of no known class, unusable content, or a data set that was made from something else.
    """
    if name is None:
        name, folder = learn2learn_dataset_and_folder(objects)
        return prepare_dataset(home, name, folder, force, reporter, allow_partial)
    _check_dataset_name(name)
    if name in registry.registered_entry_points(registry.DATASET_GROUP):
        raise UserError(f"{name!r} is made from files, not from objects; for a data set of your own, give a new name")
    source, layout = OwnObjects(name), LabelledObjects()
    source.check_name()
    made_from = {"identity": layout.identity(objects, reporter)}

    def check(ready: Dataset) -> None:
        if ready.manifest["about"].get("made_from") != made_from:
            origin = ready.manifest["about"].get("source")
            raise UserError(
                f"{_describe_stale_state(ready)}, from something else than these objects (from {origin}); force=True "
                "replaces it"
            )
        if ready.is_partial and not allow_partial:
            raise UserError(
                f"{_describe_stale_state(ready)}; allow_partial=True accepts that, force=True builds it again"
            )
        reporter.say(f"{_describe_stale_state(ready)} (force=True builds it again)")

    def make() -> Dataset:
        context = BuildContext(None, reporter, allow_partial, layout.title)
        context.about["form"] = layout.title
        return build_in_locked_folder(home.data / name, source, context, made_from, layout.build, force)

    return _reuse_or_build(home, source, force, reporter, check, make)


def _check_dataset_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise UserError(f"{name!r} is no name for a data set: use lower-case letters, digits, '-', '_', '.'")


def _reuse_or_build(
    home: Paths,
    source: DatasetSource,
    force: bool,
    reporter: Reporter,
    check: Callable[[Dataset], None],
    make: Callable[[], Dataset],
) -> Dataset:
    """Return the prepared data set if ``check`` does not raise, else build it by ``make``; write its tasks."""
    own = source if isinstance(source, OwnData) else None
    if (
        not force and (ready := _open_if_current(home, source)) is not None
    ):  # before the lock, which a read-only folder denies
        check(ready)
        if own is None or own.has_tasks(home, ready):
            return ready
    with hold_lock(home.data / source.name, reporter.warn):
        dataset = None if force else _open_if_current(home, source, reporter.warn)
        if dataset is None:
            dataset = make()
        else:
            check(dataset)
        if own is not None and not own.has_tasks(home, dataset):
            own.write_tasks(home, dataset, reporter)
        return dataset


def _open_if_current(
    home: Paths, source: DatasetSource, warn: Callable[[str], None] = lambda _: None
) -> Dataset | None:
    """Return the prepared data set; None if it is not there, damaged, or made by another version.

    Without the lock another process may be replacing it, so callers look again under the lock.
    """
    if not is_prepared(home, source.name):
        return None
    try:
        dataset = open_dataset(home.data / source.name)
    except CorruptFile as error:
        warn(f"{error}; building it again")
        return None
    # Data of the user's own have settings instead, and must not be replaced silently.
    if isinstance(source, OwnData) or dataset.manifest["recipe"] == source.recipe():
        return dataset
    warn(f"{dataset.folder} was made by another version; building it again")
    return None


def _describe_stale_state(dataset: Dataset) -> str:
    mark = " (partial)" if dataset.is_partial else ""
    return f"{dataset.name} is prepared already{mark} in {dataset.folder}"


def _check_same_source(source: DatasetSource, dataset: Dataset, path: Path | None, reporter: Reporter) -> None:
    """Raise UserError if a data set was made with other settings, or from something else than ``path``."""
    there = _describe_stale_state(dataset)
    remedy = "--force replaces it" + (", or choose another name" if isinstance(source, OwnData) else "")
    if isinstance(source, OwnData) and not source.has_same_settings(dataset):
        raise UserError(f"{there}, with other settings; {remedy}")
    if path is not None:
        about = dataset.manifest["about"]
        made_from = about.get("made_from", {})
        with open_tree(path) as tree:
            # The content counts if the files lie elsewhere; objects have an identity alone.
            same = (
                tree.identity_hash() == made_from.get("identity") or made_from.items() >= tree.content_hashes().items()
            )
        if not same:
            message = f"from other files than {path} holds now (it was made from {about.get('source')})"
            raise UserError(f"{there}, {message}; {remedy}")
    reporter.say(f"{there} (--force builds it again)")


def _build_dataset(
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
            return build_in_locked_folder(folder, source, context, None, source.build)
        _check_layout(source, tree)
        return build_in_locked_folder(
            folder, source, context, {"identity": tree.identity_hash(), **tree.content_hashes()}, source.build, force
        )


def _check_layout(source: DatasetSource, tree: FileTree) -> None:
    """Raise UserError if the files have no layout of this data set, but one of another."""
    if not source.layouts or source.find_layout(tree) is not None:
        return
    names = [
        name
        for name in registry.registered_entry_points(registry.DATASET_GROUP)
        if not registry.load_plugin(registry.DATASET_GROUP, name).load_problem
    ]
    others = [
        (source, layout)
        for source in map(datasets.find_dataset_source, names)
        if (layout := source.find_layout(tree)) is not None
    ]
    if others:
        titles = " and ".join(dict.fromkeys(layout.title for _, layout in others))
        choices = " or ".join(f"{source.name!r} ({source.summary})" for source, _ in others)
        commands = ", or ".join(f"ifsl-bench data prepare {source.name} --from {tree.path}" for source, _ in others)
        raise UserError(
            f"{tree.path} holds {titles}, which makes data set {choices}, not {source.name!r}; to prepare it: "
            f"{commands}"
        )


def build_in_locked_folder(
    folder: Path,
    source: DatasetSource,
    context: BuildContext,
    made_from: dict[str, str] | None,
    write: Callable[[BuildContext], None],
    force: bool = False,
) -> Dataset:
    """Build a data set into ``folder``, whose lock the caller holds; an unfinished import of the same is resumed.

    Args:
        folder: Of the data set.
        source: The plugin.
        context: State of the build.
        made_from: Identity and content of the source, for the manifest; None if there is no source.
        write: Writes the pools.
        force: Resume only an import that was forced.

    Raises:
        UserError: The import failed; complete pools are kept, as the message explains.
    """
    recipe, complete = source.recipe(), dict[str, object]()
    keys: list[str] = []
    if made_from is not None:
        context.about["made_from"] = made_from
        # Pools of a stricter import serve too: whole pools where parts would do.
        partly, forced = dict.fromkeys((context.allow_partial, False)), dict.fromkeys((force, True))
        keys = [sha256_json([recipe, made_from["identity"], *how]) for how in itertools.product(partly, forced)]

    def fill(writer: DatasetWriter) -> None:
        context.writer = writer
        complete.update(writer.pools)
        if complete:
            context.reporter.say(f"going on with an unfinished import; complete are {', '.join(complete)}")
        write(context)

    start = time.perf_counter()
    with _report_kept_pools_on_error(folder, context):
        dataset = build_dataset(folder, source.name, recipe, fill, context.about, keys)
    if made_from is not None:
        _report_speed(dataset, context, complete, time.perf_counter() - start)
    return dataset


@contextmanager
def _report_kept_pools_on_error(folder: Path, context: BuildContext) -> Iterator[None]:
    """Add to an error which pools are kept on the disk; Ctrl-C has a message of its own."""
    try:
        yield
    except Exception as error:
        writer = getattr(context, "writer", None)  # none where building had not begun
        if writer is None or not writer.keys or not writer.pools:
            raise
        kind = "command" if context.tree else "call"
        kind += "" if context.allow_partial else f", with or without {context.partial_option_text},"
        pools = ", ".join(writer.pools)
        message = f"Complete and kept: {pools} (in {unfinished_path(folder)}); the same {kind} goes on from there"
        if isinstance(error, UserError):
            raise type(error)(f"{error}. {message}") from error
        context.reporter.warn(message)
        raise


def _report_speed(dataset: Dataset, context: BuildContext, complete: Container[str], seconds: float) -> None:
    """Report the speed; pools of an unfinished import that was resumed do not count."""
    entries = [entry for pool, entry in dataset.manifest["pools"].items() if pool not in complete]
    count = sum(entry["shape"][0] for entry in entries)
    written = sum(entry["images"]["bytes"] for entry in entries) / 1e6
    speed = f"{count / seconds:,.0f} {dataset.item_noun}/s, {written / seconds:,.1f} MB/s written"
    if context.bytes_read:
        speed += f", {context.bytes_read / 1e6 / seconds:,.1f} MB/s read"
    mark = ", partial" if dataset.is_partial else ""
    context.reporter.say(
        f"{dataset.name}{mark}: {count:,} {dataset.item_noun}, {written:,.1f} MB, in {seconds:.1f} s ({speed})"
    )


def find_downloadable(name: str) -> Downloadable:
    """Return a data set that can be downloaded; raise UserError if it cannot."""
    names = registry.registered_entry_points(registry.DATASET_GROUP)
    if name not in names:
        raise unknown_name_error("data set", name, names, see="ifsl-bench data list")
    source = datasets.find_dataset_source(name)
    if not source.needs_source:
        raise UserError(f"data set {name!r} needs no files: leave --download out")
    if not isinstance(source, Downloadable):
        raise UserError(
            f"data set {name!r} cannot be downloaded by a program; docs/data.md lists the addresses. Then: "
            f"{format_prepare_command(name)}"
        )
    return source


@contextmanager
def download_archive(home: Paths, name: str, reporter: Reporter) -> Iterator[Path]:
    """Download the archive of a data set; it is removed at the end of the block if that succeeds.

    Args:
        home: Folders of caches.
        name: Of the data set.
        reporter: Takes messages.

    Raises:
        UserError: The data set has no address, or it cannot be reached, or the archive has another checksum.
    """
    source = find_downloadable(name)
    folder = home.cache / f"{DOWNLOAD_PREFIX}{name}"
    with translate_disk_errors(folder), hold_lock(folder, reporter.warn):
        folder.mkdir(parents=True, exist_ok=True)
        how = "checking what is here of" if any(folder.iterdir()) else "downloading"
        reporter.say(f"{how} {source.archive_url}")
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # a bar of another library's
                path = source.download_archive(folder)
        except (OSError, RuntimeError) as error:
            remove_path(folder)
            why = escape_controls(str(getattr(error, "reason", error)))[:120]
            raise UserError(
                f"{source.archive_url} cannot be downloaded here ({why}); get it elsewhere, then: "
                f"{format_prepare_command(name)}"
            ) from error
        yield path
        remove_path(folder)
