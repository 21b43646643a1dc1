"""One row or one result in full. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ifsl_bench.analysis.aggregate import (
    FILE,
    PARTIAL_DATA_NOTE,
    NovelBiasAggregate,
    SeedAggregate,
    list_notes_on_solve_failures,
)
from ifsl_bench.protocols.calibration import RESAMPLE_COUNT
from ifsl_bench.protocols.session_metrics import METRIC_NAMES_AFTER_SESSION
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.reporting.columns import format_plus_minus, metric_name_column, round_unless_nan
from ifsl_bench.reporting.table import Column, Table
from ifsl_bench.store.schema import Result, StoredCalibration
from ifsl_bench.utils.errors import escape_controls
from ifsl_bench.utils.text_format import format_count, format_options

TRIED_SETTINGS_HEADING = "tried, best first"
PROVENANCE_FIELD_TITLES = {"method_source": "code of method"}  # what `show` calls it
PERCENT_NOTE_TEMPLATE = "In percent; intervals are over {}, trained models held fixed."


def _fixed_factor_notes(row: SeedAggregate) -> list[str]:
    """Return what the intervals of a row hold fixed."""
    if row.has_single_interval_unit:
        return [f"In percent; of one {row.interval_units_noun.removesuffix('s')}, so there are no intervals."]
    notes = [PERCENT_NOTE_TEMPLATE.format(row.interval_units_noun)]
    if "sessions" in row.protocol.figures_and_tables and any(map(row.includes_bias, row.results)):
        unmoved = [
            name
            for name in METRIC_NAMES_AFTER_SESSION
            if row.protocol.metric_of_resampled_counts(name, biased=True) is None
        ]
        titles = [row.protocol.metric_column(name).title for name in unmoved]
        which = "Intervals" if row.lacks_bias_resamples else f"Those of {', '.join(titles[:-1])} and {titles[-1]}"
        notes.append(f"{which} hold the bias on novel logits fixed, too.")
    return notes


def seed_table(row: SeedAggregate) -> Table[str]:
    """Return a line for each metric of a row: the mean over its seeds, and the mean of each seed.

    Of a result file there is the mean alone.
    """
    summary, first, of_file = row.summarise_metrics(), row.results[0], row.results_origin == FILE

    def number(heading: str, field: str, value: Mapping[str, float], drop: int = 0) -> Column[str]:
        digits = 6 if of_file else 4
        return Column(
            heading,
            lambda name: f"{value[name]:.2f}",
            lambda name: {field: round_unless_nan(value[name], digits)},
            drop_priority=drop,
        )

    columns = [
        metric_name_column(row.protocol),
        number("mean", "mean", {name: value.mean for name, value in summary.items()}),
    ]
    if not row.has_single_interval_unit:
        columns.append(number("95% interval", "interval", {name: value.interval for name, value in summary.items()}))
    for place, seed in enumerate(() if of_file else row.seeds):
        means = {name: float(row.metric_by_seed(name)[place].mean()) for name in summary}
        columns.append(number(f"seed {seed}", f"seed_{seed}", means, 1 + place))  # where there is no room, the last go
    seeds = f", seed {first.seed}" if of_file else f" ({row.results_origin}), {format_count(len(row.seeds), 'seed')}"
    notes = [
        *_fixed_factor_notes(row),
        *([] if of_file else list_notes_on_solve_failures({row.display_name: row.solve_failures})),
    ]
    return Table(columns, list(summary), f"{row.display_name} on {first.task}{seeds}", notes)


def session_tables(row: SeedAggregate) -> list[Table[int]]:
    """Return tables, in sessions, of every metric after each: plain, and with one bias where one was chosen."""
    if "sessions" not in row.protocol.figures_and_tables:
        return []
    tables = [_session_table(row, "after each session", "")]
    if "calibrated_acc" in row.metric_names:
        biased = NovelBiasAggregate(row.label, row.results_origin, row.results)
        tables.append(_session_table(biased, "after each session, with one bias on all novel logits", "calibrated_"))
    return tables


def _session_table(row: SeedAggregate, title: str, prefix: str) -> Table[int]:
    def column(name: str) -> Column[int]:
        values = row.metric_after_sessions(name)

        def fields(t: int) -> dict[str, float | None]:
            return {
                f"{prefix}{name}": round_unless_nan(values[t].mean),
                f"{prefix}{name}_interval": round_unless_nan(values[t].interval),
            }

        heading = "Acc." if name == "acc" else row.protocol.metric_column(name).title
        return Column(heading, lambda t: "" if math.isnan(values[t].mean) else format_plus_minus(values[t]), fields)

    columns: list[Column[int]] = [
        Column("session", str, lambda t: {"session": t}),
        *map(column, METRIC_NAMES_AFTER_SESSION),
    ]
    return Table(
        columns,
        range(len(row.metric_after_sessions())),
        f"{row.display_name}, {title}",
        _fixed_factor_notes(row)[1:],
        keeps_all_columns=True,
    )


def describe_validation_pools(task: Task) -> str:
    """Return the pools of classes that options, bias and checkpoints were chosen on."""
    if task.hides_base_classes("val"):
        return "base/val, with hidden base classes in place of novel ones"
    return " and ".join(dict.fromkeys(task.pool("val", part) for part in task.query_class_kinds))


def describe_facts(results: Sequence[Result], further_facts: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return what results of one row record next to their numbers, a line each: what they share once, the rest by seed.

    What would steer a terminal is written out.

    Args:
        results: the results of a row, by seed.
        further_facts: further names and texts of all of them.
    """
    each = [_collect_facts(result) | {name: [text] for name, text in further_facts.items()} for result in results]
    names = dict.fromkeys(name for facts in each for name, texts in facts.items() if any(texts))
    width = 2 + max(map(len, names))
    lines = []
    for name in names:
        texts_of = [facts.get(name, [""]) for facts in each]
        alike = all(texts == texts_of[0] for texts in texts_of)
        seeds = [f"seed {result.seed}: {'; '.join(texts)}" for result, texts in zip(results, texts_of, strict=True)]
        for place, text in enumerate(texts_of[0] if alike else seeds):
            lines.append(f"{name if not place else '':{width - 1}} {text}")
    return "\n".join(map(escape_controls, lines))


def _collect_facts(result: Result) -> dict[str, list[str]]:
    """Return name and text, in one line or several, of all that a result records next to its numbers."""
    training = dict(result.training)
    validation = training.pop("validation", None)
    if "solves" in training:  # what did not happen is not listed
        training["solves"] = {key: count for key, count in training["solves"].items() if count != 0}
    pretraining = dict(result.pretraining)
    accuracies = _format_fact_in_words(pretraining.get("accuracy"), _format_percent)
    facts = {
        "method": f"{result.label}, options {format_options(result.options) or 'at their defaults'}",
        "task": f"{result.task}, definition {result.task_hash}",
        result.protocol.drawn_items_noun: f"{len(result.episodes):,}",
        "digest": result.digest,
        "data": f"{result.fingerprint}{f'; {PARTIAL_DATA_NOTE}' if result.partial else ''}",
        "pretraining": f"{pretraining.get('key')}: {accuracies or 'no accuracy'}",
        "training": ", ".join(filter(None, [format_options(result.train), _format_fact_in_words(training)])) or "none",
    }
    if validation:
        facts["validation"] = f"by step: {_format_fact_in_words(validation, _format_percent)}"
    if "recipe" in pretraining:
        knows = ", given the number of novel classes to come" if pretraining.get("knows_classes") else ""
        each = f"{pretraining['steps']:,} steps of {pretraining['passes']:g} passes"
        facts["recipe"] = f"{pretraining['recipe']}{knows}: {each} of the backbone for each image"
    if result.calibration:
        facts["calibration"] = _describe_calibration(result, result.calibration)
    if result.choice:
        again = np.not_equal(result.choice.winners, result.choice.chosen).sum()
        facts["choice"] = (
            f"{again} of {RESAMPLE_COUNT} resamples of the validation episodes would have chosen other options"
        )
    lines = {key: [text] for key, text in facts.items()}
    for tried in result.tuned.values():
        best_first = sorted(tried, key=tried.__getitem__, reverse=True)
        lines.setdefault(TRIED_SETTINGS_HEADING, []).extend(
            f"{setting}: {_format_percent(tried[setting])}" for setting in best_first
        )
    facts = {}
    if result.edge:
        facts["chosen at an end"] = f"{', '.join(result.edge)}: better values may lie beyond what was tried"
    facts |= {str(key): _format_statistic(values, len(result.episodes)) for key, values in result.solver.items()}
    facts |= {f"{stage} on": str(place) for stage, place in result.places.items()}
    facts["cost"] = _format_fact_in_words(result.cost)
    facts |= {
        PROVENANCE_FIELD_TITLES.get(str(key), str(key)): _format_fact_in_words(value)
        for key, value in result.provenance.items()
    }
    return lines | {key: [text] for key, text in facts.items()}


def _format_statistic(values: Mapping[str, float], episodes: int) -> str:
    """Return a number for each episode in words: mean and maximum, and of how many episodes where not of all."""
    of = values.get("episodes", episodes)
    unusual = {"episodes": of} if of != episodes else {}
    unusual |= {"not finite": values["not_finite"]} if values.get("not_finite") else {}
    return _format_fact_in_words({key: values[key] for key in ("mean", "max") if key in values} | unusual)


def _format_fact_in_words(value: object, write: Callable[[object], str] | None = None) -> str:
    """Return a value in words: mappings as "name value, name value", numbers with six digits."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{str(key).replace('_', ' ')} {_format_fact_in_words(part, write)}" for key, part in value.items()
        )
    if write is not None:
        return write(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _format_percent(value: object) -> str:
    return f"{value:.2f}%" if isinstance(value, int | float) else str(value)


def _describe_calibration(result: Result, calibration: StoredCalibration) -> str:
    protocol = result.protocol
    found_on = f"{calibration.validation_episodes:,} validation {protocol.drawn_items_noun}"
    text = f"bias {calibration.bias:g} on the novel logits, found on {found_on}"
    resampled = protocol.resampled_counts(result.to_hit_counts(), calibration, None)
    moved = protocol.metric_of_resampled_counts("calibrated_acc", biased=False)
    if resampled is not None and moved is not None:
        spread = float(resampled.metric_by_unit(moved).std(ddof=1))
        text += f", others of which move cal. Acc. by {spread:.2f} (standard deviation)"
    return f"{text}; part of the row" if calibration.applied else text
