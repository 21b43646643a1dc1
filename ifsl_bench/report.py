"""Paper-style tables of measured and published rows, in text, Markdown, LaTeX or CSV. Imports no torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ifsl_bench.compare import Comparison, Row, compare, mismatch, rows_of
from ifsl_bench.errors import UserError, unknown
from ifsl_bench.metrics import METRICS, Estimate
from ifsl_bench.result import PublishedRow, Result, packaged_root, published, stored
from ifsl_bench.task import Task

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


@dataclass(frozen=True)
class Board:
    """What is known of one task.

    Attributes:
        rows: measured rows of today's definition of the task, on all of its episodes.
        others: measured rows on other episodes or data, shown apart and never ranked with ``rows``.
        papers: published rows.
        remarks: on files and rows that are left out.
    """

    task: str
    rows: tuple[Row, ...]
    others: tuple[Row, ...]
    papers: tuple[PublishedRow, ...]
    remarks: tuple[str, ...]

    def row(self, label: str) -> Row | None:
        """The row of that label: yours if there is one, else the stored one."""
        return next((row for row in (*self.rows, *self.others) if row.label == label), None)


def load_board(task: Task, results: Path) -> Board:
    """The measured rows of a task, yours first, then those that come with the package, and the published ones."""
    packaged = packaged_root()
    same = results.resolve() == packaged.resolve()
    rows: list[Row] = []
    remarks: list[str] = []
    for root, origin in [(packaged, "stored")] if same else [(results, "yours"), (packaged, "stored")]:
        found, left_out = stored(root, [task.name])
        today = [r for r in found if r.task_hash == task.hash]
        remarks += left_out
        remarks += [
            f"left out: {r.label}, seed {r.seed} ({origin}) is of another definition of the task; run it again"
            for r in found
            if r.task_hash != task.hash
        ]
        grouped, odd = rows_of(today, origin)
        rows += grouped
        remarks += odd
    reference = _reference(task, rows)
    comparable = [row for row in rows if reference is None or not mismatch(reference, row.results[0])]
    others = [row for row in rows if row not in comparable]
    return Board(task.name, tuple(comparable), tuple(others), tuple(published(task.name)), tuple(remarks))


def _reference(task: Task, rows: Sequence[Row]) -> Result | None:
    """A result on all episodes of the task, and on its data: what the others are held against."""
    whole = [r for row in rows for r in row.results if len(r.episodes.base_joint) == task.evaluation.episodes]
    pinned = [r for r in whole if r.fingerprint == task.dataset.fingerprint]
    return next(iter(pinned or whole or [r for row in rows for r in row.results]), None)


def task_table(board: Board, style: str = "text", full: bool = False) -> str:
    """The table of one task: measured and published rows by accuracy, then rows that are not comparable.

    Args:
        full: also the joint and alone accuracies of base and novel classes.
    """
    entries = [(row.summary()["acc"].mean, _measured(row, full, style)) for row in board.rows]
    entries += [(row.values["acc"], _published(row, full, style)) for row in board.papers]
    entries.sort(key=lambda entry: -entry[0])
    cells = [cells for _, cells in entries]
    cells += [_measured(row, full, style) | {"source": f"{row.origin}, not comparable"} for row in board.others]
    if not cells:
        remarks = f" ({'; '.join(board.remarks)})" if board.remarks else ""
        raise UserError(
            f"no results of task {board.task!r} are stored{remarks}; "
            f"make one with: ifsl-bench run --method NAME --task {board.task}"
        )
    if style == "csv":
        return render([{"task": board.task, **row} for row in cells], style)
    notes = _notes(board)
    return "\n".join([board.task, "", render(cells, style), *([""] if notes else []), *notes])


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


def _notes(board: Board) -> list[str]:
    notes = []
    if board.rows:
        count = len(board.rows[0].results[0].episodes.base_joint)
        notes.append(f"Measured: mean ± 95% interval over {count:,} episodes, averaged over seeds, in percent.")
    for row in board.others:
        if board.rows:
            reason = mismatch(board.rows[0].results[0], row.results[0])
            notes.append(f"{row.label} ({row.origin}) is not comparable with the rows above: {reason}.")
    if board.papers:
        notes.append("Published: as printed, in parentheses the printed +-, of unknown kind; in no significance test.")
    notes += [f"{row.label} ({row.source}): {row.note}." for row in board.papers if row.note]
    return notes + [f"{remark}." for remark in board.remarks]


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


def standing(board: Board, label: str) -> list[str]:
    """A row among the measured ones: its rank, and the paired differences to the best and the nearest."""
    mine = board.row(label)
    if mine is None or mine not in board.rows:
        return [f"{label} is not comparable with the stored rows."] if mine else []
    others = [row for row in board.rows if row is not mine]
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
        found = compare(mine, row)
        over = found.episodes["acc"]
        seeds = f" (common seeds {list(found.seeds)})" if found.seeds and mine.seeds != row.seeds else ""
        lines.append(
            f"  to the {title}, {row.label} ({row.origin}): "
            f"{over.mean:+.2f} ± {over.interval:.2f} points, p {_p(over.p)}{seeds}"
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
