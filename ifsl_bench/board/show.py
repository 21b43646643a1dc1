"""One result in full, and the comparison of two rows in full. Imports no torch."""

from __future__ import annotations

from ifsl_bench.board.columns import HEADINGS, plus_minus, rounded
from ifsl_bench.board.comparison import Comparison, p_value
from ifsl_bench.board.measured import PARTIAL
from ifsl_bench.board.over_classes import MANY
from ifsl_bench.board.result_file import Calibration, Result, summary_entry
from ifsl_bench.board.table import Column, Table
from ifsl_bench.common.errors import one_line
from ifsl_bench.protocol.metrics import summarise


def result_table(result: Result, title: str = "") -> Table[str]:
    """A row for each metric of a result."""
    values = summary_entry(summarise(result.counts().per_episode()))  # older files do not have all of them

    def number(heading: str, part: str) -> Column[str]:
        return Column(heading, lambda name: f"{values[name][part]:.2f}", lambda name: {part: values[name][part]})

    metric: Column[str] = Column("metric", lambda name: HEADINGS[name].text, lambda name: {"metric": name})
    return Table([metric, number("mean", "mean"), number("95% interval", "interval")], list(values), title)


def result_facts(result: Result) -> str:
    """Everything else a result says about itself, a line each; what would steer a terminal is written out."""
    cost, training = result.cost, result.training
    lines = [
        f"method       {result.label}  options {result.options or 'default'}",
        f"task         {result.task} (hash {result.task_hash}), seed {result.seed}",
        f"episodes     {len(result.episodes):,}, digest {result.digest}",
        f"data         fingerprint {result.fingerprint}{f'; {PARTIAL}' if result.partial else ''}",
        f"pretraining  {result.pretraining.get('key')}, accuracy {result.pretraining.get('accuracy')}",
        f"training     {training or 'none'}",
        *([f"calibration  {_calibration(result.calibration)}"] if result.calibration else []),
        *(f"tuned        {key}: {values}" for key, values in result.tuned.items()),
        *(f"solver       {key}: {values}" for key, values in result.solver.items()),
        *(f"where        {stage} on {place}" for stage, place in result.places.items()),
        f"cost         {', '.join(f'{k} {v:g}' for k, v in cost.items())}",
        *(f"{key:12} {value}" for key, value in result.provenance.items()),
    ]
    return "\n".join(map(one_line, lines))


def _calibration(found: Calibration) -> str:
    said = f"bias {found.bias:g} on the novel logits, found on {found.validation_episodes:,} validation episodes"
    return f"{said}; part of the row" if found.applied else said


def comparison_table(found: Comparison) -> Table[str]:
    """A row for each metric: A - B over episodes and, where there are common seeds, over these."""

    several = len(found.seeds) > 1  # else only episodes are left

    def difference(name: str) -> dict[str, float | None]:
        over = found.episodes[name]
        return {"difference": rounded(over.mean, 6), "interval": rounded(over.interval, 6)}

    def difference_of_seeds(name: str) -> dict[str, float | None]:
        over = found.by_seed_interval[name]
        return {"difference_of_seeds": rounded(over.mean, 6), "interval_of_seeds": rounded(over.interval, 6)}

    def difference_overall(name: str) -> dict[str, float | None]:
        both = found.overall[name]
        return {"interval_overall": rounded(both.interval, 6), "p_overall": both.p} if several else {}

    def difference_over_classes(name: str) -> dict[str, float | int | None]:
        if not found.classes:
            return {}
        interval, effect = rounded(found.over_classes[name].interval, 6), rounded(found.effects[name], 6)
        return {"interval_of_classes": interval, "sd_of_classes": effect, "classes": found.classes}

    def each_seed(name: str) -> dict[str, list[float]]:
        return {"each_seed": [round(float(value), 6) for value in found.by_seed[name]]}

    columns: list[Column[str]] = [
        Column("metric", lambda name: HEADINGS[name].text, lambda name: {"metric": name}),
        Column("A - B", lambda name: plus_minus(found.episodes[name], "+"), difference),
        Column(
            "p (episodes)",
            lambda name: p_value(found.episodes[name].p).removeprefix("= "),
            lambda name: {"p": found.episodes[name].p},
            drop=2,
        ),
        Column(
            "A - B over seeds" if found.seeds else None,
            lambda name: plus_minus(found.by_seed_interval[name], "+"),
            difference_of_seeds,
            drop=3,
        ),
        Column(
            "A - B overall" if several else None,
            lambda name: plus_minus(found.overall[name], "+"),
            difference_overall,
        ),
        Column(
            "A - B over classes" if found.classes else None,
            lambda name: plus_minus(found.over_classes[name], "+"),
            difference_over_classes,
        ),
        Column(
            "each seed" if found.seeds else None,
            lambda name: "  ".join(f"{value:+.2f}" for value in found.by_seed[name]),
            each_seed,
            fold=14,
            drop=4,
        ),
        Column(fields=lambda name: {"seeds": list(found.seeds), "partial_data": found.partial}),
    ]
    title = f"A = {found.a}, B = {found.b}, task {found.task}, {found.count:,} episodes, seeds {list(found.seeds)}"
    notes = [
        "A - B: percentage points, 95% interval and paired t-test over episodes; trained models held fixed.",
        "A - B over seeds: mean of the seed-paired differences, Student's 95% interval, over other training seeds.",
        *(["A - B overall: over episodes and seeds, as ranks are; for claims about methods."] if several else []),
        *_of_classes(found),
        *(f"Note: {note}." for note in found.notes),
    ]
    return Table(columns, list(found.episodes), title, notes)


def _of_classes(found: Comparison) -> list[str]:
    """What an interval over classes is, where there is one."""
    if not found.classes:
        return []
    said = (
        f"A - B over classes: over episodes and the {found.classes} novel classes that they draw from; trained models "
        "held fixed; for claims about other classes."
    )
    none = [name for name, over in found.over_classes.items() if over.interval and not found.effects[name]]
    if none:
        metrics = ", ".join(HEADINGS[name].text for name in none)
        said += f" The variance of class effects is estimated below 0, and counts as 0, for {metrics}."
    if found.count > MANY:
        said += " More episodes make the interval over episodes narrower, and leave this one as wide as its classes do."
    return [said]
