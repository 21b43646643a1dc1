"""Output of commands: laid out for a terminal, and the same for everybody in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.utils.errors import escape_controls
from ifsl_bench.utils.text_format import format_count

if TYPE_CHECKING:
    from rich.console import Console

    from ifsl_bench.reporting.table import Table
    from ifsl_bench.utils.progress import Reporter

TEXT_FORMAT = "text"
_replaced_streams: list[object] = []  # kept for good: a wrapper that is freed closes the stream that it wraps


class StandardStreams:
    """The standard streams as they are now, to be put back where the code of a method replaces them."""

    def __init__(self) -> None:
        self.streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}

    def put_back(self, reporter: Reporter) -> None:
        """Put the streams back, with a warning for each that was replaced."""
        names = [name for name, stream in self.streams.items() if getattr(sys, name) is not stream]
        for name in names:
            _replaced_streams.append(getattr(sys, name))
            setattr(sys, name, self.streams[name])
        for name in names:
            reporter.warn(f"the code of a method has replaced sys.{name}, which is put back")


def is_at_terminal(table_format: str = TEXT_FORMAT) -> bool:
    """Return whether a person at a terminal reads this; other formats are the same everywhere."""
    return table_format == TEXT_FORMAT and sys.stdout.isatty()


def print_tables_in_format(tables: Iterable[Table[Any]], table_format: str = TEXT_FORMAT, closing: str = "") -> None:
    """Print tables in a format; at a terminal, text is laid out for its width.

    Args:
        tables: the tables.
        table_format: one of :data:`ifsl_bench.reporting.table.FORMATS`.
        closing: a line for readers below all tables.
    """
    from ifsl_bench.reporting.table import RECORD_FORMATTERS, render_tables
    from ifsl_bench.store.result_folder import LEFT_OUT_PREFIX

    if not is_at_terminal(table_format):
        tables = list(tables)
        click.echo(render_tables(tables, table_format, closing))
        if table_format in RECORD_FORMATTERS:  # which get no notes
            print_warnings(note for table in tables for note in table.notes if note.startswith(LEFT_OUT_PREFIX))
        return
    from ifsl_bench.reporting.terminal import print_tables

    print_tables(tables, _console(), closing)


@contextmanager
def redirect_prints_to_stderr(table_format: str) -> Iterator[None]:
    """Send what methods print to standard error, where a program reads standard output."""
    from ifsl_bench.reporting.table import RECORD_FORMATTERS

    with redirect_stdout(sys.stderr) if table_format in RECORD_FORMATTERS else nullcontext():
        yield


def print_warnings(notes: Iterable[str]) -> None:
    """Print each warning once on standard error, so that it is not among the data that programs read."""
    for note in dict.fromkeys(notes):
        click.echo(escape_controls(f"warning: {note}"), err=True)


def print_lines(text: str = "", table_format: str = TEXT_FORMAT) -> None:
    """Print lines of text next to tables for readers; at a terminal, each is folded at its width.

    Args:
        text: the lines.
        table_format: the format of the tables.
    """
    from ifsl_bench.reporting.table import format_prose

    for line in text.split("\n"):
        if not is_at_terminal(table_format):
            click.echo(format_prose(line, table_format))
            continue
        from ifsl_bench.reporting.terminal import print_text

        print_text(line, _console())


def _console() -> Console:
    from rich.console import Console

    from ifsl_bench.reporting.terminal import MIN_TERMINAL_WIDTH

    console = Console()
    console.width = max(MIN_TERMINAL_WIDTH, console.width)
    return console


def print_paragraphs(text: str, table_format: str = TEXT_FORMAT) -> None:
    """Print paragraphs; at a terminal, those without indented lines are folded at its width.

    Args:
        text: paragraphs with an empty line between them.
        table_format: the format of the tables next to them; "text" is folded.
    """
    if not is_at_terminal(table_format):
        click.echo(text)
        return
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        if any(line.startswith("    ") for line in lines):
            print_lines(paragraph)
        else:
            print_lines(" ".join(line.strip() for line in lines))
        click.echo()


def print_missing(lacking: Mapping[str, int]) -> None:
    """Print which jobs cannot be run here before something is installed."""
    for why, count in lacking.items():
        click.echo(f"ifsl-bench: {format_count(count, 'job')} cannot be run here: {why}", err=True)
