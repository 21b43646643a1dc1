"""Paper-style tables of measured and published rows, in text, Markdown, LaTeX or CSV. Imports no torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifsl_bench.compare import Comparison, Row, compare, mismatch, rows_of
from ifsl_bench.errors import UserError, unknown
from ifsl_bench.metrics import METRICS, Estimate
from ifsl_bench.result import PublishedRow, Result, packaged_root, published, stored

FORMATS = {"text": "simple", "markdown": "github", "latex": "latex_booktabs", "csv": ""}
TITLES = {
    "acc": "Acc.",
    "base_joint": "base joint",
    "base_alone": "base alone",
    "novel_joint": "novel joint",
    "novel_alone": "novel alone",
    "delta_a": "Delta_a",
    "delta_b": "Delta_b",
    "delta": "Delta",
}
SHORT = ("acc", "delta", "delta_a", "delta_b")


def render(rows: Sequence[Mapping[str, Any]], style: str) -> str:
    """Rows of equal keys as a table.

    Raises:
        UserError: an unknown format.
    """
    if style not in FORMATS:
        raise unknown("format", style, FORMATS)
    if style == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue().rstrip("\n")
    from tabulate import tabulate

    text = tabulate([list(r.values()) for r in rows], headers=list(rows[0]) if rows else [], tablefmt=FORMATS[style],
                    disable_numparse=True)  # fmt: skip
    return text.replace("±", "$\\pm$") if style == "latex" else text


def plus_minus(value: Estimate) -> str:
    if math.isnan(value.interval):
        return f"{value.mean:.2f}"
    return f"{value.mean:.2f} ± {value.interval:.2f}"


def load_rows(task: str, results: Path) -> list[Row]:
    """Measured rows of a task: the user's first, then those that come with the package."""
    rows = rows_of(stored(results, [task]), "yours")
    packaged = packaged_root()
    if results.resolve() == packaged.resolve():
        return [Row(row.label, "stored", row.results) for row in rows]
    return rows + rows_of(stored(packaged, [task]), "stored")


def task_table(task: str, rows: Sequence[Row], style: str = "text", full: bool = False) -> str:
    """The table of one task: measured and published rows by accuracy, the published ones marked as such.

    Args:
        full: also the joint and alone accuracies of base and novel classes.
    """
    entries = [(row.summary()["acc"].mean, _measured(row, full, style)) for row in rows]
    papers = published(task)
    entries += [(row.values["acc"], _published(row, full, style)) for row in papers]
    if not entries:
        raise UserError(
            f"no results of task {task!r} are stored; make one with: ifsl-bench run --method NAME --task {task}"
        )
    entries.sort(key=lambda entry: -entry[0])
    lines = [f"{task}", "", render([cells for _, cells in entries], style)] if style != "csv" else [
        render([{"task": task, **cells} for _, cells in entries], style)
    ]  # fmt: skip
    if style != "csv":
        notes = _notes(rows, papers)
        if notes:
            lines += ["", *notes]
    return "\n".join(lines)


def _columns(full: bool) -> tuple[str, ...]:
    return METRICS if full else SHORT


def _measured(row: Row, full: bool, style: str) -> dict[str, str]:
    summary, spread = row.summary(), row.spread()
    cells = {"method": row.label}
    for name in _columns(full):
        if style == "csv":
            cells |= {name: f"{summary[name].mean:.4f}", f"{name}_interval": f"{summary[name].interval:.4f}"}
        else:
            cells[TITLES[name]] = plus_minus(summary[name])
    cells["seeds"] = str(len(row.results))
    cells["sd of seeds"] = "" if math.isnan(spread) else f"{spread:.2f}"
    cells["source"] = row.origin
    return cells


def _published(row: PublishedRow, full: bool, style: str) -> dict[str, str]:
    cells = {"method": row.label}
    for name in _columns(full):
        value = row.values.get(name)
        shown = "" if value is None else f"{value:.2f}"
        if style == "csv":
            cells |= {name: shown, f"{name}_interval": ""}
        elif name == "acc" and "plus_minus_as_printed" in row.values:
            cells[TITLES[name]] = f"{shown} ({row.values['plus_minus_as_printed']:.2f})"
        else:
            cells[TITLES[name]] = shown
    cells |= {"seeds": "", "sd of seeds": "", "source": f"published: {row.source}"}
    return cells


def _notes(rows: Sequence[Row], papers: Sequence[PublishedRow]) -> list[str]:
    notes = []
    if rows:
        counts = sorted({len(r.episodes.base_joint) for row in rows for r in row.results})
        episodes = " or ".join(f"{n:,}" for n in counts)
        notes.append(f"Measured: mean ± 95% interval over {episodes} episodes, averaged over seeds, in percent.")
    notes += [
        f"{row.label} ({row.origin}) is not comparable with {rows[0].label} ({rows[0].origin}): {reason}."
        for row in rows
        if (reason := mismatch(rows[0].results[0], row.results[0]))
    ]
    if papers:
        notes.append("Published: as printed, in parentheses the printed +-, of unknown kind; in no significance test.")
    notes += [f"{row.label} ({row.source}): {row.note}." for row in papers if row.note]
    return notes


def result_table(result: Result, style: str = "text") -> str:
    """One result in full: the five accuracies and the three differences."""
    rows = [
        {"metric": TITLES[name], "mean": f"{result.summary[name]['mean']:.2f}",
         "95% interval": f"{result.summary[name]['interval']:.2f}"}
        for name in METRICS
    ]  # fmt: skip
    return render(rows, style)


def _p(value: float) -> str:
    """A p-value; below 1e-15 its digits are rounding."""
    return f"= {value:.2g}" if value >= 1e-15 else "< 1e-15"


def comparison_table(found: Comparison, style: str = "text") -> str:
    """A - B for every metric, over episodes and over seeds."""
    rows = []
    for name in METRICS:
        over, seeds = found.episodes[name], found.by_seed_interval[name]
        cells = {
            "metric": TITLES[name],
            "A - B": f"{over.mean:+.2f} ± {over.interval:.2f}",
            "p (episodes)": _p(over.p).removeprefix("= "),
        }
        if found.seeds:
            cells["A - B over seeds"] = f"{seeds.mean:+.2f}" + (
                "" if math.isnan(seeds.interval) else f" ± {seeds.interval:.2f}"
            )
            cells["each seed"] = "  ".join(f"{v:+.2f}" for v in found.by_seed[name])
        rows.append(cells)
    head = f"A = {found.a}, B = {found.b}, task {found.task}, {found.count:,} episodes, seeds {list(found.seeds)}"
    explain = [
        "A - B: percentage points, 95% interval and paired t-test over episodes; trained models held fixed.",
        "A - B over seeds: mean of the seed-paired differences, Student's 95% interval; for claims about methods.",
    ]
    if style == "csv":
        return render(rows, style)
    return "\n".join([head, "", render(rows, style), "", *explain, *(f"Note: {note}." for note in found.notes)])


def standing(rows: Sequence[Row], label: str) -> list[str]:
    """A row among the measured ones: its rank, and the paired differences to the best and the nearest."""
    mine = next((row for row in rows if row.label == label and row.origin == "yours"), None)
    mine = mine or next((row for row in rows if row.label == label), None)
    if mine is None:
        return []
    others = [row for row in rows if row is not mine and not mismatch(row.results[0], mine.results[0])]
    if not others:
        return [f"{label} is the only measured row on these episodes."]
    accuracy = mine.summary()["acc"].mean
    gaps = [(row.summary()["acc"].mean, row) for row in others]
    rank = 1 + sum(value > accuracy for value, _ in gaps)
    lines = [f"{label}: rank {rank} of {len(others) + 1} measured rows by Acc."]
    best = max(gaps, key=lambda g: g[0])[1]
    nearest = min(gaps, key=lambda g: abs(g[0] - accuracy))[1]
    for title, row in (("best other", best), ("nearest", nearest)):
        if title == "nearest" and nearest is best:
            continue
        over = compare(mine, row).episodes["acc"]
        lines.append(
            f"  to the {title}, {row.label} ({row.origin}): "
            f"{over.mean:+.2f} ± {over.interval:.2f} points, p {_p(over.p)}"
        )
    return lines


def result_facts(result: Result) -> str:
    """Everything else a result says about itself, a line each."""
    cost, training = result.cost, result.training
    lines = [
        f"method       {result.label}  options {result.options or 'default'}",
        f"task         {result.task} (hash {result.task_hash}), seed {result.seed}",
        f"episodes     {len(result.episodes.base_joint):,}, digest {result.digest}",
        f"data         fingerprint {result.fingerprint}",
        f"pretraining  {result.pretraining.get('key')}, accuracy {result.pretraining.get('accuracy')}",
        f"training     {training or 'none'}",
        *(f"tuned        {key}: {values}" for key, values in result.tuned.items()),
        *(f"solver       {key}: {values}" for key, values in result.solver.items()),
        f"cost         {', '.join(f'{k} {v:g}' for k, v in cost.items())}",
        *(f"{key:12} {value}" for key, value in result.provenance.items()),
    ]
    return "\n".join(lines)
