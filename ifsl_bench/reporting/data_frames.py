"""Results and tables in notebooks: a short text, HTML, and data frames where pandas is installed. Imports no torch.

Labels, titles and notes may come from a file of unknown origin: HTML has them escaped.
"""

from __future__ import annotations

import re
from collections import UserList
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ifsl_bench.protocols.session_metrics import AFTER, SessionCounts
from ifsl_bench.protocols.tasks.metric_sets import BALANCE, COUNTS, METRICS, MORE_COUNTS, SESSIONS
from ifsl_bench.reporting.columns import HEADINGS
from ifsl_bench.reporting.render import render
from ifsl_bench.reporting.table import Table, plain_table
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import Lacking, one_line

if TYPE_CHECKING:
    import pandas

# The columns of a row for each episode.
EPISODE = ("task", "method", "seed", "episode", "base_queries", "novel_queries", *COUNTS, *MORE_COUNTS, "acc")
INSTALL = 'pip install "ifsl_bench[pandas]"'
NULLABLE = {bool: "boolean", int: "Int64"}  # pandas's usual types would turn these into objects and floats
ONE_LINE = ' style="white-space: nowrap"'  # a number and its interval
OWN = ' style="font-weight: bold"'  # a row of the user's own
MOST = 30  # rows that a notebook shows as text
MOST_HTML = 200  # and as HTML: a page of all tasks, not all results of a user


class Frame:
    """Tables in a notebook, as ``ifsl-bench table``, ``leaderboard`` or ``compare`` print them.

    Iterating gives a dict for each row, with the names and plain numbers of ``--format json``: percent, and half-widths
    of 95% intervals under the same name with ``_interval``.
    """

    def __init__(self, tables: Sequence[Table[Any]], closing: str = "") -> None:
        self._tables, self._closing = tuple(tables), closing

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each row of all tables."""
        return [record for table in self._tables for record in table.records()]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row for each of :meth:`records`; raise an error without pandas."""
        return data_frame(self.records())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records())

    def __len__(self) -> int:
        return sum(len(table.rows) for table in self._tables)

    def _more(self, most: int) -> list[str]:
        return [f"... and {len(self) - most} more rows; to_pandas() has them all"] if len(self) > most else []

    def __repr__(self) -> str:
        lines: list[str] = []
        room = MOST
        for table in self._tables:
            if room <= 0:
                break
            grid = render([Table(table.columns, table.rows)]).split("\n")
            above = [one_line(text) for text in (table.title, table.lead) if text]
            lines += ["", *above, *([""] if above else []), *grid[: 2 + room]]
            room -= len(table.rows)
        return "\n".join([*lines[1:], *self._more(MOST)])

    def _repr_html_(self) -> str:
        shown, room = list[str](), MOST_HTML
        for table in self._tables:
            if room > 0:
                shown.append(_html(table, room))
            room -= len(table.rows)
        closing = [*self._more(MOST_HTML), *([self._closing] if self._closing else [])]
        return "".join([*shown, *(f"<p>{escape(one_line(text))}</p>" for text in closing)])


def _html(table: Table[Any], most: int) -> str:
    from tabulate import tabulate

    cells = [[one_line(cell.text) for cell in row] for row in table.cells()[:most]]  # tabulate escapes them
    grid = tabulate(cells, table.headings(), "html", disable_numparse=True)
    mine = iter([table.mine(row) for row in table.rows])
    grid = re.sub("<tr><td>", lambda _: f"<tr{OWN if next(mine) else ''}><td>", grid)
    grid = grid.replace("<td>", f"<td{ONE_LINE}>")
    notes = "<br>".join(escape(one_line(note)) for note in table.notes)
    lead = f"<p>{escape(one_line(table.lead))}</p>" if table.lead else ""
    title = f"<p><b>{escape(one_line(table.title))}</b></p>" if table.title else ""
    below = f"<p><small>{notes}</small></p>" if notes else ""
    return f"{title}{lead}{grid}{below}"


class Results(UserList[Result]):
    """Results in a notebook."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each result, see :func:`facts`; raise an error without pandas."""
        return data_frame([facts(result) for result in self], FACTS)

    def episodes_to_pandas(self) -> pandas.DataFrame:
        """Return a row for each episode of each result, see :func:`episodes`; raise an error without pandas."""
        frames = [episodes(result) for result in self]
        return pandas_module().concat(frames, ignore_index=True) if frames else data_frame([], EPISODE)

    def __repr__(self) -> str:
        shown = [f"  {line(result)}" for result in self[:MOST]]
        more = [f"  ... and {len(self) - MOST} more"] if len(self) > MOST else []
        return "\n".join([f"{len(self)} result{'s' * (len(self) != 1)}", *shown, *more])

    def _repr_html_(self) -> str:
        if not len(self):
            return "<p>no results</p>"
        rows = []
        for result in self:
            names = [name for name in ("acc", "calibrated_acc", "delta") if name in result.summary]
            row = {"task": result.task, "method": result.label, "seed": str(result.seed)}
            row |= {HEADINGS[name].text: with_interval(result.summary[name]) for name in names}
            rows.append(row | {"episodes": f"{len(result.episodes):,}"})
        more = f"<p>... and {len(self) - MOST_HTML} more; to_pandas() has them all</p>" if len(self) > MOST_HTML else ""
        return _html(plain_table(rows), MOST_HTML) + more


def pandas_module() -> Any:
    """Import pandas and return it.

    Raises:
        Lacking: it is not installed, or does not fit the NumPy that is.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise Lacking(f"to_pandas(): pandas is installed but lacks {error.name}: {INSTALL}") from error
        raise Lacking(f"to_pandas() needs an extra (pandas is not installed): {INSTALL}") from None
    except Exception as error:  # compiled modules built for another NumPy raise more than ImportError
        raise Lacking(
            f"to_pandas(): pandas is installed but cannot be imported ({type(error).__name__}: {error}); "
            f"to install it again: {INSTALL} --force-reinstall"
        ) from error
    return pandas


def data_frame(records: Sequence[dict[str, Any]], names: Iterable[str] = ()) -> pandas.DataFrame:
    """Return a data frame with a column for each name, in the order of their first appearance.

    Where a record lacks a whole number or a truth value, its column has one of pandas's nullable types; what all
    records lack is NaN.

    Args:
        records: the rows.
        names: columns to have in any case, before those that some record has.
    """
    pandas = pandas_module()
    names = dict.fromkeys([*names, *(name for record in records for name in record)])
    columns = {name: [record.get(name) for record in records] for name in names}
    frame = pandas.DataFrame(columns)
    for name, values in columns.items():
        kinds = set(map(type, values)) - {type(None)}
        if not kinds:
            frame[name] = np.full(len(values), np.nan)
        if None in values and len(kinds) == 1 and (kind := NULLABLE.get(kinds.pop())):
            with suppress(OverflowError):  # a number that no processor holds, from a file
                frame[name] = pandas.array(values, dtype=kind)
    return frame


def with_interval(entry: Mapping[str, float]) -> str:
    """Return a metric of a summary as text, mean ± half-width of its interval."""
    mean = f"{entry['mean']:.2f}"
    return f"{mean} ± {entry['interval']:.2f}" if "interval" in entry else mean


def line(result: Result) -> str:
    """Return a result in a line: its method and task, and its accuracy."""
    subject = f"{result.label} on {result.task}, seed {result.seed}"
    unit = "sequences" if isinstance(result.counts(), SessionCounts) else "episodes"
    return one_line(f"{subject}: Acc. {with_interval(result.summary['acc'])}% of {len(result.episodes):,} {unit}")


def facts(result: Result) -> dict[str, Any]:
    """Return a result as a row: its method and task, each metric and its interval in percent, seconds, and its origin.

    Every result has all of :data:`FACTS`; a metric that it lacks is None.
    """
    return {name: value(result) for name, value in FACTS.items()}


def _metric(name: str, part: str) -> Callable[[Result], float | None]:
    return lambda result: result.summary.get(name, {}).get(part)


FACTS: dict[str, Callable[[Result], Any]] = {
    "task": lambda result: result.task,
    "method": lambda result: result.label,
    "seed": lambda result: result.seed,
    "setting": lambda result: result.setting,
    "episodes": lambda result: len(result.episodes),
    **{
        f"{name}{end}": _metric(name, part)
        for name in (*METRICS, *BALANCE, *SESSIONS.metrics[1:])
        for part, end in (("mean", ""), ("interval", "_interval"))
    },
    "training_seconds": lambda result: result.cost.get("training_seconds"),
    "evaluation_seconds": lambda result: result.cost.get("evaluation_seconds"),
    "digest": lambda result: result.digest,
    "backbone": lambda result: result.pretraining.get("key"),
    "device": lambda result: result.provenance.get("device"),
    "version": lambda result: result.provenance.get("version"),
    "commit": lambda result: result.provenance.get("commit"),
    "time": lambda result: result.provenance.get("time"),
}


def episodes(result: Result) -> pandas.DataFrame:
    """Return a row for each episode: its number, counts of right queries, and ``acc``, percent of all queries.

    ``base_joint`` and ``novel_joint`` are right among all classes, ``base_alone`` and ``novel_alone`` among the classes
    of their kind, of ``base_queries`` and ``novel_queries``; ``calibrated_*`` with the bias found on validation. What
    the result lacks is NaN.

    Of a result in sessions, a row for each sequence and session t, with every metric after it in percent; ``of_0`` to
    ``of_T`` are the accuracy on the classes of each session so far, NaN for later ones.
    """
    counts = result.counts()
    columns: dict[str, Any] = {"task": result.task, "method": result.label, "seed": result.seed}
    if isinstance(counts, SessionCounts):
        sequence, session = np.divmod(np.arange(len(counts) * (counts.sessions + 1)), counts.sessions + 1)
        columns |= {"sequence": sequence, "order": sequence // counts.supports, "session": session}
        columns |= {name: counts.after(name).reshape(-1) for name in AFTER}
        columns |= {f"of_{group}": counts.triangle()[:, :, group].reshape(-1) for group in range(counts.sessions + 1)}
        return pandas_module().DataFrame(columns)
    columns |= {"episode": np.arange(len(counts))}
    columns |= {"base_queries": counts.base_queries, "novel_queries": counts.novel_queries}
    columns |= {name: counts.columns().get(name, np.nan) for name in (*COUNTS, *MORE_COUNTS)}
    columns |= {"acc": counts.value("acc")}
    return pandas_module().DataFrame({name: np.broadcast_to(values, len(counts)) for name, values in columns.items()})
