"""One result in full, and the comparison of two rows in full. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ifsl_bench.board.columns import HEADINGS, plus_minus, rounded
from ifsl_bench.board.comparison import MANY, Comparison, p_value, verdict
from ifsl_bench.board.consistency import solve_notes
from ifsl_bench.board.measured import PARTIAL, Row
from ifsl_bench.board.rank_intervals import Difference
from ifsl_bench.board.result_file import Calibration, Result, summary_entry
from ifsl_bench.board.table import Column, Table
from ifsl_bench.common.errors import one_line
from ifsl_bench.common.wording import seeds_in_words, spelled
from ifsl_bench.protocol.calibration import RESAMPLES
from ifsl_bench.protocol.metrics import Estimate, Paired

NO_ESTIMATE = Estimate(math.nan, math.nan)
TRIED = "tried, best first"
PROVENANCE = {"method_source": "code of method"}  # what `show` calls it
PERCENT = "In percent; intervals are over episodes, trained models held fixed."
METRIC: Column[str] = Column("metric", lambda name: HEADINGS[name].text, lambda name: {"metric": name})


def result_table(result: Result, title: str = "") -> Table[str]:
    """A row for each metric of a result."""
    values = summary_entry(Row(result.label, "", (result,)).summary())

    def number(heading: str, part: str) -> Column[str]:
        return Column(heading, lambda name: f"{values[name][part]:.2f}", lambda name: {part: values[name][part]})

    return Table([METRIC, number("mean", "mean"), number("95% interval", "interval")], list(values), title, [PERCENT])


def row_table(row: Row) -> Table[str]:
    """A line for each metric of a row: the mean over its seeds, and the mean of each seed."""
    summary = row.summary()

    def seed(place: int, number: int) -> Column[str]:
        value = {name: float(row.by_seed(name)[place].mean()) for name in summary}
        # The first seeds are the last to go where there is no room for all.
        return Column(f"seed {number}", lambda name: f"{value[name]:.2f}",
                      lambda name: {f"seed_{number}": rounded(value[name])}, drop=1 + place)  # fmt: skip

    columns: list[Column[str]] = [
        METRIC,
        Column("mean", lambda name: f"{summary[name].mean:.2f}", lambda name: {"mean": rounded(summary[name].mean)}),
        Column("95% interval", lambda name: f"{summary[name].interval:.2f}",
               lambda name: {"interval": rounded(summary[name].interval)}),
        *(seed(place, number) for place, number in enumerate(row.seeds)),
    ]  # fmt: skip
    first = row.results[0]
    title = f"{row.label} on {first.task} ({row.origin}), {len(row.seeds)} seed{'s' * (len(row.seeds) > 1)}"
    return Table(columns, list(summary), title, [PERCENT, *solve_notes({row.label: row.solves})])


def facts_of(results: Sequence[Result], again: str = "") -> str:
    """What results of one row say about themselves beside their numbers, a line each: what they share once, the rest
    by seed. What would steer a terminal is written out.

    Args:
        again: the command that measures them again.
    """
    each = [_facts(result) | {"again": [again]} for result in results]
    names = dict.fromkeys(name for facts in each for name, texts in facts.items() if any(texts))
    width = 2 + max(map(len, names))
    lines = []
    for name in names:
        said = [facts.get(name, [""]) for facts in each]
        alike = all(texts == said[0] for texts in said)
        seeds = [f"seed {result.seed}: {'; '.join(texts)}" for result, texts in zip(results, said, strict=True)]
        for place, text in enumerate(said[0] if alike else seeds):
            lines.append(f"{name if not place else '':{width - 1}} {text}")
    return "\n".join(map(one_line, lines))


def _facts(result: Result) -> dict[str, list[str]]:
    """Name and text, in one line or several, of everything that a result says beside its numbers."""
    training = dict(result.training)
    validation = training.pop("validation", None)
    if isinstance(solves := training.get("solves"), Mapping):  # what did not happen is not listed
        training["solves"] = {key: count for key, count in solves.items() if count != 0}
    pretraining = dict(result.pretraining)
    facts = {
        "method": f"{result.label}, options {spelled(result.options) or 'at their defaults'}",
        "task": f"{result.task}, definition {result.task_hash}",
        "episodes": f"{len(result.episodes):,}",
        "digest": result.digest,
        "data": f"{result.fingerprint}{f'; {PARTIAL}' if result.partial else ''}",
        "pretraining": f"{pretraining.get('key')}: {_words(pretraining.get('accuracy'), _percent) or 'no accuracy'}",
        "training": ", ".join(filter(None, [spelled(result.train), _words(training)])) or "none",
    }
    if validation:
        facts["validation"] = f"by step: {_words(validation, _percent)}"
    if result.calibration:
        facts["calibration"] = _calibration(result, result.calibration)
    if result.choice:
        again = np.not_equal(result.choice.winners, result.choice.chosen).sum()
        facts["choice"] = f"{again} of {RESAMPLES} resamples of the validation episodes would have chosen other options"
    found = {key: [text] for key, text in facts.items()}
    for tried in result.tuned.values():
        best_first = sorted(tried, key=lambda setting: _order(tried[setting]), reverse=True)
        found.setdefault(TRIED, []).extend(f"{setting}: {_percent(tried[setting])}" for setting in best_first)
    facts = {}
    if result.at_edge:
        facts["chosen at an end"] = f"{', '.join(result.at_edge)}: better values may lie beyond what was tried"
    if result.earlier_search:
        facts["search"] = "an earlier one, with narrower ranges; nothing was tried beside the best"
    facts |= {str(key): _statistic(values, len(result.episodes)) for key, values in result.solver.items()}
    facts |= {f"{stage} on": str(place) for stage, place in result.places.items()}
    facts["cost"] = _words(result.cost)
    facts |= {PROVENANCE.get(str(key), str(key)): _words(value) for key, value in result.provenance.items()}
    return found | {key: [text] for key, text in facts.items()}


def _order(accuracy: object) -> float:
    """To sort by; what is no number, in a stranger's file, comes last."""
    return accuracy if isinstance(accuracy, int | float) else -math.inf


def _statistic(values: Mapping[str, float], episodes: int) -> str:
    """Of a number for each episode: its mean and maximum, and how many episodes it is of where not of all."""
    of = values.get("episodes", episodes)
    unusual = {"episodes": of} if of != episodes else {}
    unusual |= {"not finite": values["not_finite"]} if values.get("not_finite") else {}
    return _words({key: values[key] for key in ("mean", "max") if key in values} | unusual)


def _words(value: object, write: Callable[[object], str] | None = None) -> str:
    """A value in words: mappings as "name value, name value", numbers with as many digits as anybody reads."""
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {_words(one, write)}" for key, one in value.items())
    if write is not None:
        return write(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _percent(value: object) -> str:
    return f"{value:.2f}%" if isinstance(value, int | float) else str(value)


def _calibration(result: Result, found: Calibration) -> str:
    episodes = result.episodes
    said = f"bias {found.bias:g} on the novel logits, found on {found.validation_episodes:,} validation episodes"
    if found.resampled_base:
        hits = np.add(found.resampled_base, found.resampled_novel)
        spread = 100 * hits.std(ddof=1) / (len(episodes) * (episodes.base_queries + episodes.novel_queries))
        said += f", others of which move cal. Acc. by {spread:.2f} (standard deviation)"
    return f"{said}; part of the row" if found.applied else said


def comparison_table(found: Comparison) -> Table[str]:
    """A row for each metric: A - B, with the interval that claims about methods need first, and what it is over."""
    several = len(found.seeds) > 1  # else only episodes are left

    def record(name: str) -> dict[str, Any]:
        over, seeds, both = found.episodes[name], found.by_seed_interval[name], found.overall[name]
        classes = found.over_classes.get(name, NO_ESTIMATE).interval
        return {
            "difference": rounded(over.mean, 6), "interval": rounded(over.interval, 6), "p": over.p,
            "difference_of_seeds": rounded(seeds.mean, 6), "interval_of_seeds": rounded(seeds.interval, 6),
            "interval_overall": rounded(both.interval, 6) if several else None,
            "p_overall": both.p if several else None,
            "interval_of_classes": rounded(classes, 6), "sd_of_classes": rounded(found.effects.get(name, math.nan), 6),
            "classes": found.classes or None,
            "each_seed": [round(float(value), 6) for value in found.by_seed[name]], "seeds": list(found.seeds),
            "partial_data": found.partial, "a": found.a, "b": found.b,
        }  # fmt: skip

    def main(name: str) -> Difference | Paired:
        return found.overall[name] if several else found.episodes[name]

    def half(values: Mapping[str, Paired | Estimate], name: str) -> str:
        return f"± {values[name].interval:.2f}"

    columns: list[Column[str]] = [
        METRIC,
        Column("A - B overall" if several else "A - B over episodes", lambda name: plus_minus(main(name), "+")),
        Column("p", lambda name: p_value(main(name).p).removeprefix("= ")),
        Column("over episodes" if several else None, lambda name: half(found.episodes, name), drop=2),
        Column("over seeds" if several else None, lambda name: half(found.by_seed_interval, name), drop=3),
        Column("over classes" if found.classes else None, lambda name: half(found.over_classes, name)),
        Column(
            "each seed" if several else None,
            lambda name: "  ".join(f"{value:+.2f}" for value in found.by_seed[name]),
            drop=4,
        ),
        Column(fields=record),
    ]
    title = f"A = {found.a}, B = {found.b}, task {found.task}, {found.count:,} episodes, {seeds_in_words(found.seeds)}"
    overall = [
        "A - B overall: percentage points, with 95% interval and p-value over episodes and seeds, as in ranks, "
        "for claims about methods. The other columns have 95% intervals of the same difference:",
        "over episodes: trained models held fixed (paired t-test); over seeds: other trainings (Student's, paired).",
    ]
    alone = ["A - B over episodes: percentage points, 95% interval and paired t-test; trained models held fixed."]
    notes = [
        *(overall if several else alone),
        *_of_classes(found),
        *(f"Note: {note}." for note in found.notes),
    ]
    return Table(columns, list(found.episodes), title, notes, lead=verdict(found))


def _of_classes(found: Comparison) -> list[str]:
    """What an interval over classes is, where there is one."""
    if not found.classes:
        return []
    said = (
        f"over classes: over episodes and the {found.classes} novel classes that they draw from; trained models held "
        "fixed; for claims about other classes."
    )
    none = [name for name, over in found.over_classes.items() if over.interval and not found.effects[name]]
    if none:
        metrics = ", ".join(HEADINGS[name].text for name in none)
        said += f" The variance of class effects is estimated below 0, and counts as 0, for {metrics}."
    if found.count > MANY:
        said += " More episodes narrow the interval over episodes, but the number of classes limits this one."
    return [said]
