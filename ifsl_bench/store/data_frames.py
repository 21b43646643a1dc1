"""Results as rows of data frames, and as a line of text. Imports pandas where it is installed and used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ifsl_bench.protocols.metrics import EPISODE_COUNT_NAMES, OPTIONAL_EPISODE_COUNT_NAMES
from ifsl_bench.protocols.registry import all_metric_names
from ifsl_bench.utils.errors import MissingDependencyError, escape_controls

if TYPE_CHECKING:
    import pandas

Result = Any  # of ifsl_bench.store.schema, which imports this module


# The columns of a row for each episode.
EPISODE_COLUMNS = (
    "task",
    "method",
    "seed",
    "episode",
    "base_queries",
    "novel_queries",
    *EPISODE_COUNT_NAMES,
    *OPTIONAL_EPISODE_COUNT_NAMES,
    "acc",
)
INSTALL_PANDAS_COMMAND = 'pip install "ifsl_bench[pandas]"'
SUFFIX_OF_PART = {"mean": "", "interval": "_interval"}  # of a metric in a summary -> what its column ends in
COST_COLUMNS = ("training_seconds", "evaluation_seconds")
PROVENANCE_COLUMNS = ("device", "version", "commit", "time")
NULLABLE_DTYPES = {bool: "boolean", int: "Int64"}  # pandas's usual types would turn these into objects and floats


def import_pandas_or_explain() -> Any:
    """Import pandas and return it.

    Raises:
        Lacking: it is not installed, or does not fit the NumPy that is.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise MissingDependencyError(
                f"to_pandas(): pandas is installed but lacks {error.name}: {INSTALL_PANDAS_COMMAND}"
            ) from error
        raise MissingDependencyError(
            f"to_pandas() needs an extra (pandas is not installed): {INSTALL_PANDAS_COMMAND}"
        ) from None
    except Exception as error:  # compiled modules built for another NumPy raise more than ImportError
        raise MissingDependencyError(
            f"to_pandas(): pandas is installed but cannot be imported ({type(error).__name__}: {error}); "
            f"to install it again: {INSTALL_PANDAS_COMMAND} --force-reinstall"
        ) from error
    return pandas


def make_data_frame(records: Sequence[dict[str, Any]], names: Iterable[str] = ()) -> pandas.DataFrame:
    """Return a data frame with a column for each name, in the order of their first appearance.

    Where a record lacks a whole number or a truth value, its column has one of pandas's nullable types; what all
    records lack is NaN.

    Args:
        records: the rows.
        names: columns to have in any case, before those that some record has.
    """
    pandas = import_pandas_or_explain()
    names = dict.fromkeys([*names, *(name for record in records for name in record)])
    columns = {name: [record.get(name) for record in records] for name in names}
    frame = pandas.DataFrame(columns)
    for name, values in columns.items():
        kinds = set(map(type, values)) - {type(None)}
        if not kinds:
            frame[name] = np.full(len(values), np.nan)
        if None in values and len(kinds) == 1 and (kind := NULLABLE_DTYPES.get(kinds.pop())):
            with suppress(OverflowError):  # a number that no processor holds, from a file
                frame[name] = pandas.array(values, dtype=kind)
    return frame


def format_metric(entry: Mapping[str, float]) -> str:
    """Return a metric of a summary as text, mean ± half-width of its interval."""
    mean = f"{entry['mean']:.2f}"
    return f"{mean} ± {entry['interval']:.2f}" if "interval" in entry else mean


def format_result_line(result: Result) -> str:
    """Return a result in a line: its method and task, and its accuracy."""
    subject = f"{result.label} on {result.task}, seed {result.seed}"
    return escape_controls(
        f"{subject}: Acc. {format_metric(result.summary['acc'])}% of {len(result.episodes):,} "
        f"{result.protocol.drawn_items_noun}"
    )


def result_to_row(result: Result) -> dict[str, Any]:
    """Return a result as a row: its method and task, each metric and its interval in percent, seconds, and its origin.

    Every result has all of :func:`result_column_names`; a metric that it lacks is None.
    """
    summary, provenance = result.summary, result.provenance
    return {
        "task": result.task,
        "method": result.label,
        "seed": result.seed,
        "setting": result.setting,
        "episodes": len(result.episodes),
        **{
            f"{name}{end}": summary.get(name, {}).get(part)
            for name in all_metric_names()
            for part, end in SUFFIX_OF_PART.items()
        },
        **{name: result.cost.get(name) for name in COST_COLUMNS},
        "digest": result.digest,
        "backbone": result.pretraining.get("key"),
        "recipe": result.recipe,
        "passes": result.pretraining.get("passes", 1.0 if result.recipe else None),
        "knows_classes": result.pretraining.get("knows_classes", False if result.recipe else None),
        **{name: provenance.get(name) for name in PROVENANCE_COLUMNS},
    }


def result_column_names() -> list[str]:
    """Return the columns of :func:`result_to_row`, with the metrics of all protocols that are registered now."""
    metrics = [f"{name}{end}" for name in all_metric_names() for end in SUFFIX_OF_PART.values()]
    return [
        "task",
        "method",
        "seed",
        "setting",
        "episodes",
        *metrics,
        *COST_COLUMNS,
        "digest",
        "backbone",
        "recipe",
        "passes",
        "knows_classes",
        *PROVENANCE_COLUMNS,
    ]


def make_episodes_frame(result: Result) -> pandas.DataFrame:
    """Return a row for each episode, or for each sequence and session, see the counts' ``table``."""
    columns = {
        "task": result.task,
        "method": result.label,
        "seed": result.seed,
        **result.to_hit_counts().metrics_to_columns(),
    }
    return import_pandas_or_explain().DataFrame(columns)


def make_images_frame(result: Result) -> pandas.DataFrame:
    """Return a row for each test image, or group of neighbouring images of a class: how often its answers are right.

    ``image`` is the index of the first one in its pool, and ``images`` their number; ``half`` is 0 for even episodes
    and 1 for odd ones. Answers are counted as in :class:`ifsl_bench.protocols.image_counts.ImageHits`, in percent of
    the queries ``asked``. Without rows where a result does not record them.
    """
    if result.images is None:
        return import_pandas_or_explain().DataFrame()
    hits, frames = result.images.to_image_hits(), []
    for name, pool in hits.pools.items():
        label = np.repeat(np.arange(len(pool.images_per_class)), pool.groups_per_class)
        place = (np.arange(len(label)) - pool.first_group_of_class[label]) * pool.images_per_group
        of_pool = {
            "task": result.task,
            "method": result.label,
            "seed": result.seed,
            "pool": name,
            "class": label,
            "image": (np.cumsum(pool.images_per_class) - pool.images_per_class)[label] + place,
            "images": np.minimum(pool.images_per_group, pool.images_per_class[label] - place),
        }
        for half, asked in enumerate(pool.query_counts):
            of_half = {what: 100 * share[half] for what, share in hits.right_shares(name).items()}
            frames.append(import_pandas_or_explain().DataFrame({**of_pool, "half": half, "asked": asked, **of_half}))
    return import_pandas_or_explain().concat(frames, ignore_index=True)
