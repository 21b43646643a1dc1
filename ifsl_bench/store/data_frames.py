"""Results as rows of data frames, and as a line of text. Imports pandas where it is installed and used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ifsl_bench.protocols.metrics import COUNTS, MORE_COUNTS
from ifsl_bench.protocols.protocol import metric_names
from ifsl_bench.utils.errors import Lacking, one_line

if TYPE_CHECKING:
    import pandas

# The columns of a row for each episode.
EPISODE = ("task", "method", "seed", "episode", "base_queries", "novel_queries", *COUNTS, *MORE_COUNTS, "acc")
INSTALL = 'pip install "ifsl_bench[pandas]"'
NULLABLE = {bool: "boolean", int: "Int64"}  # pandas's usual types would turn these into objects and floats


def pandas_module() -> Any:
    """Imports pandas.

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
    """A column for each of ``names`` and for each name that a record has, in the order of their first appearance.

    Where a record lacks a whole number or a truth value, its column has one of pandas's nullable types; what all
    records lack is NaN.
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
            with suppress(OverflowError):  # a number from a stranger's file
                frame[name] = pandas.array(values, dtype=kind)
    return frame


def line(result: Any) -> str:
    """A result in a line: what it is of, and its accuracy."""
    subject = f"{result.label} on {result.task}, seed {result.seed}"
    return one_line(
        f"{subject}: Acc. {with_interval(result.summary['acc'])}% of {len(result.episodes):,} {result.protocol.drawn}"
    )


def facts(result: Any) -> dict[str, Any]:
    """A result as a row: what it is of, each metric and its interval in percent, seconds, and where it was made.

    Every result has all of :data:`FACTS`; a metric that it lacks is None.
    """
    return {name: value(result) for name, value in FACTS.items()}


def _metric(name: str, part: str) -> Callable[[Any], float | None]:
    return lambda result: result.summary.get(name, {}).get(part)


FACTS: dict[str, Callable[[Any], Any]] = {
    "task": lambda result: result.task,
    "method": lambda result: result.label,
    "seed": lambda result: result.seed,
    "setting": lambda result: result.setting,
    "episodes": lambda result: len(result.episodes),
    **{
        f"{name}{end}": _metric(name, part)
        for name in metric_names()
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


def episodes(result: Any) -> pandas.DataFrame:
    """Return a row for each episode, or for each sequence and session, see the counts' ``table``."""
    fixed = {"task": result.task, "method": result.label, "seed": result.seed}
    return pandas_module().DataFrame({**fixed, **result.counts().table()})


def with_interval(entry: Mapping[str, float]) -> str:
    """A metric of a summary as text, mean ± half-width of its interval."""
    mean = f"{entry['mean']:.2f}"
    return f"{mean} ± {entry['interval']:.2f}" if "interval" in entry else mean
