"""The files of a data set, fetched from where their authors have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from ifsl_bench.data import datasets
from ifsl_bench.data.datasets import command
from ifsl_bench.data.source import Downloadable
from ifsl_bench.plugin import registry
from ifsl_bench.utils.errors import UserError, one_line, unknown
from ifsl_bench.utils.files import DOWNLOAD, Paths, disk_errors
from ifsl_bench.utils.locks import locked, remove
from ifsl_bench.utils.progress import Reporter


def downloadable(name: str) -> Downloadable:
    """The data set of that name; raises :class:`UserError` where it cannot be fetched."""
    names = registry.names(registry.DATASETS)
    if name not in names:
        raise unknown("data set", name, names, see="ifsl-bench data list")
    source = datasets.dataset_source(name)
    if not source.needs_source:
        raise UserError(f"data set {name!r} needs no files: leave --download out")
    if not isinstance(source, Downloadable):
        raise UserError(f"data set {name!r} has to be got by hand, docs/data.md says where; then: {command(name)}")
    return source


@contextmanager
def downloaded(home: Paths, name: str, reporter: Reporter) -> Iterator[Path]:
    """Inside, the archive that a data set is made from; it stays in the home until the data set is made.

    Raises:
        UserError: nobody knows an address, or it cannot be reached, or what came has another checksum.
    """
    source = downloadable(name)
    folder = home.cache / f"{DOWNLOAD}{name}"
    with disk_errors(folder), locked(folder, reporter.warn):
        folder.mkdir(parents=True, exist_ok=True)
        how = "checking what is here of" if any(folder.iterdir()) else "downloading"
        reporter.say(f"{how} {source.address}")
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # a bar of another library's
                path = source.fetch(folder)
        except (OSError, RuntimeError) as error:
            remove(folder)
            why = one_line(str(getattr(error, "reason", error)))[:120]
            raise UserError(f"{source.address} cannot be downloaded here ({why}); get it elsewhere, then: "
                            f"{command(name)}") from error  # fmt: skip
        yield path
        remove(folder)
