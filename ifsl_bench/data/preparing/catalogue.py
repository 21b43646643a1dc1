"""The commands ``ifsl-bench data ...`` and ``tasks new`` as functions."""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ifsl_bench.data.datasets import (
    format_prepare_command,
    is_generated,
    is_prepared,
    not_prepared_message,
    open_prepared,
)
from ifsl_bench.data.pools import ALL_POOL_NAMES, SUPPORT_POOL_NAME, Dataset, open_dataset, verify_checksums
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.read.archive import format_first_names
from ifsl_bench.data.sets.glyphs.fonts import font_directory
from ifsl_bench.data.suggested_tasks import make_suggested_task_tables, make_task_file_text
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import DataSpec, Task
from ifsl_bench.protocols.tasks.task_files import own_tasks, packaged_tasks, parse_tasks
from ifsl_bench.protocols.tasks.task_limits import NAME_PATTERN, NAME_RULE
from ifsl_bench.utils.errors import CorruptFile, UserError, escape_controls, unknown_name_error
from ifsl_bench.utils.files import PARTIAL_MARK, Paths, check_output_path, translate_disk_errors, write_bytes
from ifsl_bench.utils.locks import hold_lock, is_locked, remove_path, unfinished_path
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.toml import read_user_file

MAX_SHEET_SIDE, MAX_SHEET_PIXELS = 16_383, 100_000_000  # of a contact sheet, as WebP and the memory allow it
SHEET_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}  # of contact sheets
_MAX_NAME_WIDTH = 24  # letters of a class's name in a table
NAMES_WIDTH, LINE_WIDTH, LINE_HEIGHT = 124, 18, 12  # of names on a contact sheet: pixels, letters of a line, its pixels


def list_prepared_names(home: Paths) -> list[str]:
    """Return the names of the prepared data sets, sorted."""
    if not home.data.is_dir():
        return []
    folders = (p.name for p in home.data.iterdir() if not p.name.startswith(".") and ".corrupt-" not in p.name)
    return sorted(name for name in folders if is_prepared(home, name))


def list_unfinished_names(home: Paths) -> list[str]:
    """Return the data sets whose import is running, or was interrupted."""
    folders = home.data.glob(f"{PARTIAL_MARK}*") if home.data.is_dir() else []
    return sorted({path.name.removeprefix(PARTIAL_MARK) for path in folders if path.is_dir()})


def make_dataset_rows(home: Paths) -> list[dict[str, str]]:
    """Return a row for each data set that is registered, prepared, or used by a task."""
    rows = []
    registered = registry.registered_entry_points(registry.DATASET_GROUP)
    used = {task.dataset.name: task.dataset for task in packaged_tasks().values()}
    mine = {task.dataset.name for task in own_tasks(home).values()}
    unfinished = list_unfinished_names(home)
    for name in sorted({*registered, *list_prepared_names(home), *used, *mine, *unfinished}):
        state = "not prepared"
        if name in unfinished:
            state = "being imported" if is_locked(home.data / name) else "import unfinished"
        row = {"data set": name, "state": state, "fingerprint": "", "size": "", "what": ""}
        plugin = registry.load_plugin(registry.DATASET_GROUP, name) if name in registered else None
        if plugin:
            row["what"] = plugin.load_problem or plugin.loaded_object.summary
        elif name in used:
            row["what"] = used[name].obtain
        elif name in mine:
            row["what"] = "your own"
        if is_prepared(home, name):
            try:
                dataset = open_dataset(home.data / name)
                size = f"{_size_in_bytes(dataset) / 1e6:.1f} MB"
                state = "prepared, partial" if dataset.is_partial else "prepared"
                row |= {"state": state, "fingerprint": dataset.fingerprint[:12], "size": size}
            except UserError as error:
                state = "corrupt" if isinstance(error, CorruptFile) else "unreadable"
                row |= {"state": state, "what": str(error)}
        rows.append(row)
    return rows


def describe_availability(home: Paths, name: str) -> str:
    """Return in words whether a task's data set is there, or what makes it.

    Args:
        home: Folders of caches.
        name: Of the data set.
    """
    if is_prepared(home, name):
        return "prepared"
    if name not in registry.registered_entry_points(registry.DATASET_GROUP):
        return "to be obtained"
    plugin = registry.load_plugin(registry.DATASET_GROUP, name)
    if plugin.load_problem:
        return plugin.load_problem
    if not plugin.loaded_object.needs_source:
        return "made when first used"
    return f"to be prepared from files: {format_prepare_command(name)}"


def make_task_rows(home: Paths) -> list[dict[str, str]]:
    """Return a row for each task, packaged or the user's own; those with available data come first."""

    @cache
    def state(name: str) -> str:
        return describe_availability(home, name)

    def order(task: Task) -> tuple[int, str]:
        name = task.dataset.name
        return ("prepared", "made when first used", state(name)).index(state(name)), name

    return [
        {
            "task": task.name,
            "what": task.title,
            "protocol": task.protocol,
            "shots": str(task.shots),
            "episodes": task.test_size_text,
            "backbone": task.pretraining.backbone,
            "data": f"{task.dataset.name}: {state(task.dataset.name)}",
        }
        for task in sorted([*packaged_tasks().values(), *own_tasks(home).values()], key=order)
    ]


def open_or_generate(home: Paths, name: str, reporter: Reporter) -> Dataset:
    """Open a prepared data set; one that needs no files is built now.

    Args:
        home: Folders of caches.
        name: Of the data set.
        reporter: Takes messages and progress.

    Raises:
        UserError: It is not prepared, or there is none of that name.
    """
    if (ready := open_prepared(home, name)) is not None:
        return ready
    if is_generated(name):
        return prepare_dataset(home, name, None, False, reporter)
    specs = {task.dataset.name: task.dataset for task in [*packaged_tasks().values(), *own_tasks(home).values()]}
    names = {*registry.registered_entry_points(registry.DATASET_GROUP), *list_prepared_names(home), *specs}
    if name not in names:
        raise unknown_name_error("data set", name, names, see="ifsl-bench data list")
    spec = specs.get(name, DataSpec(name=name))
    raise UserError(not_prepared_message(home, spec))


def verify_datasets(home: Paths, names: Sequence[str], reporter: Reporter) -> Iterator[str]:
    """Verify data sets, and yield a line for each whose checksums are right.

    Args:
        home: Folders of caches.
        names: Of the data sets; all of them if empty.
        reporter: Takes progress.

    Raises:
        CorruptFile: Names the first bad file of each damaged data set, at the end.
    """
    damaged = []
    if missing := [name for name in names if not is_prepared(home, name)]:
        there = ", ".join(list_prepared_names(home)) or "none"
        raise UserError(f"data set {missing[0]!r} is not prepared in {home.data}; there are: {there}")
    for name in names or list_prepared_names(home):
        try:
            dataset = open_dataset(home.data / name)
            size = _size_in_bytes(dataset)
            with reporter.report_stage(f"verifying {name}", size) as stage:
                verify_checksums(dataset, stage.advance)
        except CorruptFile as error:
            damaged.append(f"{error}; build it again with: {format_prepare_command(name)} --force")
        else:
            yield f"{name}: {size / 1e6:.1f} MB verified, fingerprint {dataset.fingerprint}"
    if damaged:
        raise CorruptFile("; ".join(damaged))


def _size_in_bytes(dataset: Dataset) -> int:
    return sum(e[p]["bytes"] for e in dataset.manifest["pools"].values() for p in ("images", "labels"))


def list_removable_paths(home: Paths, name: str) -> list[Path]:
    """Return the paths that :func:`remove_data` removes.

    The task file stays as long as there are results, which are read with it.

    Args:
        home: Folders of caches, results and task files.
        name: Of the data set.

    Raises:
        UserError: There is nothing to remove, or a process imports it now.
    """
    folder, written = home.data / name, home.tasks / f"{name}.toml"
    tasks: list[Task] = []
    with suppress(UserError, FileNotFoundError):  # a file that is wrong stays
        tasks = parse_tasks(read_user_file(written, "task file"), str(written))
    tasks = tasks if all(task.dataset.name == name for task in tasks) else []
    names = {*list_prepared_names(home), *list_unfinished_names(home), *([name] if tasks else ())}
    if name not in names:
        raise unknown_name_error("prepared data set", name, names, see="ifsl-bench data list")
    if is_locked(folder):
        raise UserError(f"data set {name!r} is being imported by another process; wait for it, or end it first")
    of_results = [pattern for task in tasks for pattern in (f"{task.name}/*.json", f"{task.name}+*/*.json")]
    needed = any(path for pattern in of_results for path in home.results.glob(pattern))
    files = [written] if tasks and not needed else []
    paths = [path for path in (folder, unfinished_path(folder), *files) if path.exists()]
    if not paths:
        raise UserError(f"data set {name!r} is removed; {written} stays, with which results in {home.results} are read")
    return paths


def remove_data(home: Paths, name: str) -> None:
    """Remove a data set, its unfinished imports and its task file; the caches made from it stay.

    Args:
        home: Folders of caches, results and task files.
        name: Of the data set.

    Raises:
        UserError: As :func:`list_removable_paths`; or it cannot be removed.
    """
    paths = list_removable_paths(home, name)
    with hold_lock(home.data / name):
        for path in paths:
            with translate_disk_errors(path):
                remove_path(path)
            if path.exists():
                raise UserError(f"{path} cannot be removed: no permission to change its folder, or it is in use")


def make_pool_rows(dataset: Dataset) -> list[dict[str, str]]:
    """Return a row for each pool: classes, images or features, and the first names of classes."""
    rows = []
    for pool, (classes, images, each), entry in _iterate_pool_entries(dataset):
        names = [
            name if len(name) <= _MAX_NAME_WIDTH else f"{name[:_MAX_NAME_WIDTH]}…" for name in entry.get("classes", ())
        ]
        rows.append(
            {
                "pool": pool,
                "classes": classes,
                dataset.item_noun: images,
                f"{dataset.item_noun} per class": each,
                "first classes": format_first_names(names),
            }
        )
    return rows


def _iterate_pool_entries(dataset: Dataset) -> Iterator[tuple[str, tuple[str, str, str], Mapping[str, Any]]]:
    """Yield each pool that a data set has or should have, with (classes, images, images of a class) and its entry."""
    for pool in ALL_POOL_NAMES:
        if dataset.has_pool(pool):
            entry = dataset.manifest["pools"][pool]
            counts = entry["statistics"]
            ends = dict.fromkeys((counts["fewest"], counts["most"]))
            each = " to ".join(f"{end:,}" for end in ends)
            yield pool, (f"{counts['classes']:,}", f"{counts['images']:,}", each), entry
        elif pool != SUPPORT_POOL_NAME:
            yield pool, ("", "", "= base/train" if pool == "novel/train" else "missing"), {}


def make_statistics_tables(home: Paths, name: str, reporter: Reporter) -> list[tuple[str, list[dict[str, object]]]]:
    """Return a titled table of a data set's pools, like the paper's "Dataset Statistics".

    Args:
        home: Folders of caches.
        name: Of the data set.
        reporter: Takes messages and progress.
    """
    dataset = open_or_generate(home, name, reporter)
    rows: list[dict[str, object]] = []
    for pool, (classes, images, each), entry in _iterate_pool_entries(dataset):
        part, side = pool.split("/")
        facts = entry.get("statistics", {})
        moments = {key: ", ".join(f"{value:.2f}" for value in facts.get(key, ())) for key in ("mean", "std")}
        rows.append(
            {
                "Classes": part,
                "Purpose": side,
                "N. Cls": classes,
                "N. Img" if dataset.has_images else "N. Feat": images,
                f"{dataset.item_noun} per class": each,
                **moments,
            }
        )
    mark = ", partial" if dataset.is_partial else ""
    return [(f"{name}: {'x'.join(map(str, dataset.shape))}, fingerprint {dataset.fingerprint[:12]}{mark}", rows)]


def write_contact_sheet(home: Paths, name: str, path: Path, classes: int, images: int, reporter: Reporter) -> None:
    """Write a picture with a row of images for some classes of each pool.

    Args:
        home: Folders of caches.
        name: Of the data set.
        path: The file; its suffix is the format.
        classes: Classes of each pool, at most.
        images: Images of each class, at most.
        reporter: Takes messages and progress.

    Raises:
        UserError: Another format, no such data set, features, or a picture larger than the format allows.
    """
    if (kind := SHEET_FORMATS.get(path.suffix.lower())) is None:
        raise UserError(f"{path}: a contact sheet ends in {', '.join(SHEET_FORMATS)}")
    check_output_path(path)
    dataset = open_or_generate(home, name, reporter)
    if not dataset.has_images:
        raise UserError(f"data set {name!r} holds features, not images; there is nothing to show")
    pools = [dataset.pool(pool) for pool in ALL_POOL_NAMES if dataset.has_pool(pool)]
    classes = min(classes, max(len(pool.class_names) for pool in pools))
    images = min(images, max(int(np.diff(pool.class_starts).max()) for pool in pools))
    tile, across, gap = dataset.shape[0] + 2, min(2, len(pools)), 16  # of pixels; the gap has room for a line of text
    block = NAMES_WIDTH + images * tile + 2 + gap, classes * tile + 2 + gap
    width, height = gap + across * block[0], gap + -(-len(pools) // across) * block[1]
    if max(width, height) > MAX_SHEET_SIDE or width * height > MAX_SHEET_PIXELS:
        raise UserError(
            f"{classes:,} classes with {images:,} images of each make a picture of {width:,} x {height:,} "
            "pixels; ask for fewer with --classes and --images"
        )
    sheet = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(sheet), _load_font()
    for i, pool in enumerate(pools):
        x, y = gap + i % across * block[0], gap + i // across * block[1]
        draw.text((x, y - 14), f"{pool.name} ({len(pool.class_names)} classes, {len(pool):,} images)", 0, font)
        chosen = np.unique(
            np.linspace(0, len(pool.class_names) - 1, min(classes, len(pool.class_names))).round().astype(int)
        )
        for row, c in enumerate(chosen):
            top = y + 2 + row * tile
            draw.text(
                (x, top), "\n".join(_wrap_to_lines(pool.class_names[c], tile // LINE_HEIGHT or 1)), 0, font, spacing=0
            )
            shown = pool.images[pool.class_starts[c] : min(pool.class_starts[c + 1], pool.class_starts[c] + images)]
            for column, image in enumerate(np.broadcast_to(shown, (*shown.shape[:3], 3))):
                place = x + NAMES_WIDTH + 2 + column * tile, top
                sheet.paste(Image.fromarray(np.ascontiguousarray(image)), place)
    out = io.BytesIO()
    sheet.save(out, format=kind)
    write_bytes(path, out.getvalue(), "--out")


def _load_font() -> ImageFont.FreeTypeFont:
    """Return DejaVu, which Matplotlib ships: class names may be in any script."""
    file = font_directory() / "DejaVuSans.ttf"
    return ImageFont.truetype(str(file), 10, layout_engine=ImageFont.Layout.BASIC)


def _wrap_to_lines(name: str, most: int) -> list[str]:
    """Wrap the name of a class; if there are too many lines, leave out words after the first."""
    words = escape_controls(name).split()
    for start in range(1, len(words) + 1):
        shown = [f"{words[0]}…", *words[start:]] if start > 1 else words
        if len(lines := _wrap_words(" ".join(shown))) <= most:
            return lines
    return _wrap_words(name)[:most]


def _wrap_words(name: str) -> list[str]:
    """Wrap a name between words or after a stroke."""
    wrapper = textwrap.TextWrapper(LINE_WIDTH)
    wrapper.wordsep_re = re.compile(r"(\s+|[^\s/_]*[/_])")
    return wrapper.wrap(name)


def write_new_tasks(home: Paths, name: str, data: str, path: Path, reporter: Reporter) -> list[str]:
    """Write tasks ``name-1shot``, ``name-5shot`` and, if the data suffice, ``name-sessions``; return their names.

    Training is as in the first task on the data set, or else as for data of the user's own.

    Args:
        home: Folders of caches and task files.
        name: Beginning of the names of the tasks.
        data: Name of a data set that is prepared, or needs no files.
        path: The file to write.
        reporter: Takes messages.

    Raises:
        UserError: No such name or data set, the data are not prepared, the file or tasks of the name are there.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise UserError(f"{name!r} is no name for tasks: {NAME_RULE}")
    if ending := re.search(r"-(\d+shot|sessions)$", name):
        plain = name.removesuffix(ending[0])
        raise UserError(
            f"the tasks are called NAME-1shot, NAME-5shot and NAME-sessions; leave out {ending[0]!r}: "
            f"ifsl-bench tasks new {plain or 'NAME'} --data {data}"
        )
    if os.path.exists(path):
        raise UserError(f"{path} is there already; choose another name, or another file with --out")
    dataset = open_or_generate(home, data, reporter)
    tasks_there = {**packaged_tasks(), **own_tasks(home)}
    content: dict[str, Any] = make_suggested_task_tables(dataset)
    like = next((task for task in tasks_there.values() if task.dataset.name == data and task.has_base), None)
    if like is not None:
        tables = msgspec.to_builtins(like)
        content = {key: tables[key] for key in ("dataset", "pretraining", "episode", "meta_training", "evaluation")}
        content["dataset"]["fingerprint"] = dataset.fingerprint
    text = make_task_file_text(dataset, name, content, f"# Tasks on the data set {data}.\n", reporter)
    tasks = [task.name for task in parse_tasks(text, str(path))]
    if taken := [task for task in tasks if task in tasks_there]:
        raise UserError(f"there is a task {taken[0]!r} already; choose another name")
    with translate_disk_errors(path):
        write_bytes(path, text.encode())
    return tasks
