"""Runs an import: it goes on where one of the same failed or was interrupted, and says how fast it was."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.source import BuildContext, DatasetSource
from ifsl_bench.data.writer import Writer, build
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import sha256_json
from ifsl_bench.utils.locks import unfinished


def run(
    folder: Path,
    source: DatasetSource,
    context: BuildContext,
    made_from: dict[str, str] | None,
    write: Callable[[BuildContext], None],
    force: bool = False,
) -> Dataset:
    """Builds a data set into ``folder``, whose lock the caller holds.

    Args:
        made_from: what the data set is made from, for the manifest; what changes when that does is its ``identity``.
            None for one that is made from nothing, and always from the start.
        write: writes the pools.
        force: use nothing of what is there, unless an import with ``force`` has left it.

    Raises:
        UserError: what the import cannot do; complete pools are kept, and the message says so.
    """
    recipe, complete = source.recipe(), dict[str, object]()
    keys: list[str] = []
    if made_from is not None:
        context.about["made_from"] = made_from
        # Of what was made for others, an import takes what is no worse: whole pools where parts would do.
        partly, forced = dict.fromkeys((context.allow_partial, False)), dict.fromkeys((force, True))
        keys = [sha256_json([recipe, made_from["identity"], *how]) for how in itertools.product(partly, forced)]

    def fill(writer: Writer) -> None:
        context.writer = writer
        complete.update(writer.pools)
        if complete:
            context.reporter.say(f"going on with an unfinished import; complete are {', '.join(complete)}")
        write(context)

    start = time.perf_counter()
    with _telling_what_is_kept(folder, context):
        dataset = build(folder, source.name, recipe, fill, context.about, keys)
    if made_from is not None:
        _say_speed(dataset, context, complete, time.perf_counter() - start)
    return dataset


@contextmanager
def _telling_what_is_kept(folder: Path, context: BuildContext) -> Iterator[None]:
    """Adds to an error what is left on the disk, and what becomes of it. Ctrl-C has a message of its own."""
    try:
        yield
    except Exception as error:
        writer = getattr(context, "writer", None)  # none where building had not begun
        if writer is None or not writer.keys or not writer.pools:
            raise
        kind = "command" if context.tree else "call"
        kind += "" if context.allow_partial else f", with or without {context.partial_option},"
        pools = ", ".join(writer.pools)
        told = f"Complete and kept: {pools} (in {unfinished(folder)}); the same {kind} goes on from there"
        if isinstance(error, UserError):
            raise type(error)(f"{error}. {told}") from error
        context.reporter.warn(told)
        raise


def _say_speed(dataset: Dataset, context: BuildContext, complete: Container[str], seconds: float) -> None:
    """The speed of what this run did; pools that an unfinished one had completed do not count."""
    entries = [entry for pool, entry in dataset.manifest["pools"].items() if pool not in complete]
    images = sum(entry["shape"][0] for entry in entries)
    written = sum(entry["images"]["bytes"] for entry in entries) / 1e6
    speed = f"{images / seconds:,.0f} images/s, {written / seconds:,.1f} MB/s written"
    if context.bytes_read:
        speed += f", {context.bytes_read / 1e6 / seconds:,.1f} MB/s read"
    mark = ", partial" if dataset.partial else ""
    context.reporter.say(f"{dataset.name}{mark}: {images:,} images, {written:,.1f} MB, in {seconds:.1f} s ({speed})")
