"""Tables of measured and published rows, in text, Markdown, LaTeX, CSV or JSON. Imports no torch."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ifsl_bench.board.comparison import PARTIAL, Comparison, Row, compare
from ifsl_bench.board.result_file import PublishedRow, Result
from ifsl_bench.board.rows import Board
from ifsl_bench.common.errors import UserError, unknown
from ifsl_bench.protocol.metrics import METRICS, REGULAR, Estimate

FORMATS = {"text": "simple", "markdown": "github", "latex": "latex_booktabs", "csv": "", "json": ""}
DATA = ("csv", "json")  # formats for programs: plain numbers, one table, no remarks
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
    """Rows as a table; in the formats for programs a row may lack columns of others (CSV: empty, JSON: null).

    Raises:
        UserError: an unknown format.
    """
    if style not in FORMATS:
        raise unknown("format", style, FORMATS)
    names = list(dict.fromkeys(name for row in rows for name in row))
    whole = [{name: row.get(name) for name in names} for row in rows]
    if style == "json":
        return json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)
    if style == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        for row in whole:
            writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})
        return out.getvalue().rstrip("\n")
    from tabulate import tabulate

    cells = [["" if value is None else value for value in row.values()] for row in whole]
    text = tabulate(cells, headers=names, tablefmt=FORMATS[style], disable_numparse=True)
    return text.replace("±", "$\\pm$") if style == "latex" else text


def plus_minus(value: Estimate) -> str:
    if math.isnan(value.interval):
        return f"{value.mean:.2f}"
    return f"{value.mean:.2f} ± {value.interval:.2f}"


def task_tables(boards: Iterable[Board], style: str = "text", full: bool = False) -> str:
    """The tables of several tasks; in the formats for programs one table, with the task in its first column."""
    if style in DATA:
        return render([row for board in boards for row in _entries(board, style, full)], style)
    return "\n\n".join(task_table(board, style, full) for board in boards)


def task_table(board: Board, style: str = "text", full: bool = False) -> str:
    """The table of one task: measured and published rows by accuracy, then rows that are not comparable.

    Args:
        full: also the joint and alone accuracies of base and novel classes.

    Raises:
        UserError: there is no row.
    """
    entries = _entries(board, style, full)
    if style in DATA:
        return render(entries, style)
    notes = notes_of(board)
    return "\n".join([board.name, "", render(entries, style), *([""] if notes else []), *notes])


def _entries(board: Board, style: str, full: bool) -> list[dict[str, Any]]:
    """The rows of a task's table."""
    if board.empty:
        raise nothing_stored(board)
    columns = columns_of(board, style, full)
    ordered = [(row.summary()["acc"].mean, measured_cells(row, columns, style)) for row in board.rows]
    ordered += [(row.values["acc"], published_cells(row, columns, style)) for row in board.papers]
    ordered.sort(key=lambda entry: -entry[0])
    entries = [cells for _, cells in ordered]
    entries += [
        measured_cells(row, columns, style) | {"source": f"{row.origin}, not comparable"} for row in board.others
    ]
    return [{"task": board.name, **cells} for cells in entries] if style in DATA else entries


def nothing_stored(board: Board) -> UserError:
    """The error for a task without any row."""
    remarks = f" ({'; '.join(board.remarks)})" if board.remarks else ""
    return UserError(
        f"no results of task {board.name!r} are stored{remarks}; "
        f"make one with: ifsl-bench run --method NAME --task {board.name}"
    )


def columns_of(board: Board, style: str, full: bool) -> tuple[str, ...]:
    """The metrics to show. In regular few-shot learning there is one; a program gets the same columns everywhere."""
    return REGULAR if board.task.regular and style not in DATA else METRICS if full else SHORT


def measured_cells(row: Row, columns: Sequence[str], style: str) -> dict[str, Any]:
    """A measured row: numbers in percent for programs, "mean ± interval" for people."""
    summary, spread = row.summary(), row.spread()
    cells: dict[str, Any] = {"method": row.label}
    for name in columns:
        value = summary.get(name)
        if style in DATA:
            numbers = (None, None) if value is None else (round(value.mean, 4), round(value.interval, 4))
            cells |= {name: numbers[0], f"{name}_interval": numbers[1]}
        else:
            cells[TITLES[name]] = "" if value is None else plus_minus(value)
    if style in DATA:
        return cells | {
            "seeds": len(row.results),
            "sd_of_seeds": None if math.isnan(spread) else round(spread, 4),
            "source": row.origin,
            "partial_data": row.partial,
        }
    return cells | {
        "seeds": str(len(row.results)),
        "sd of seeds": "" if math.isnan(spread) else f"{spread:.2f}",
        "source": row.origin,
    }


def published_cells(row: PublishedRow, columns: Sequence[str], style: str) -> dict[str, Any]:
    """A published row as printed; its +- is no interval of ours, and in parentheses."""
    cells: dict[str, Any] = {"method": row.label}
    for name in columns:
        value = row.values.get(name)
        shown = "" if value is None else f"{value:.2f}"
        if style in DATA:
            cells |= {name: value, f"{name}_interval": None}
        elif name == "acc" and "plus_minus_as_printed" in row.values:
            cells[TITLES[name]] = f"{shown} ({row.values['plus_minus_as_printed']:.2f})"
        else:
            cells[TITLES[name]] = shown
    source = f"published: {row.source}"
    if style in DATA:
        return cells | {"seeds": None, "sd_of_seeds": None, "source": source, "partial_data": None}
    return cells | {"seeds": "", "sd of seeds": "", "source": source}


def notes_of(board: Board, plus_minus: str = "in parentheses their +-") -> list[str]:
    """What a reader of the task's table should know, a line each.

    Args:
        plus_minus: where the table has the +- that papers print.
    """
    notes = []
    if board.rows:
        count = len(board.rows[0].results[0].episodes.base_joint)
        notes.append(f"Measured: mean ± 95% interval over {count:,} episodes, averaged over seeds, in percent.")
    if any(row.one_pretraining for row in board.rows):
        notes.append("Seeds are of meta-training alone, on one pretraining: every interval holds the backbone fixed.")
    if any(row.partial for row in board.rows):
        notes.append(f"{PARTIAL.capitalize()}.")
    above = "the rows above" if board.rows or board.papers else "results on the whole"
    apart = ((row, reason) for row in board.others if (reason := board.apart(row)))
    notes += [f"{row.label} ({row.origin}) is not comparable with {above}: {reason}." for row, reason in apart]
    if board.papers:
        notes.append(f"Published: as printed, {plus_minus}, which is of unknown kind; in no significance test.")
    said = ((p, "; ".join(part for part in (p.protocol, p.note) if part)) for p in board.papers)
    notes += [f"{paper.label} ({paper.source}): {text}." for paper, text in said if text]
    return notes + [f"{remark}." for remark in board.remarks]


def result_table(result: Result, style: str = "text") -> str:
    """One result in full: the five accuracies and the three differences."""
    if style in DATA:
        return render([{"metric": name, **result.summary[name]} for name in result.counts().metrics], style)
    rows = [
        {"metric": TITLES[name], "mean": f"{result.summary[name]['mean']:.2f}",
         "95% interval": f"{result.summary[name]['interval']:.2f}"}
        for name in result.counts().metrics
    ]  # fmt: skip
    return render(rows, style)


def _p(value: float) -> str:
    """A p-value; below 1e-15 its digits are rounding."""
    return f"= {value:.2g}" if value >= 1e-15 else "< 1e-15"


def comparison_table(found: Comparison, style: str = "text") -> str:
    """A - B for every metric, over episodes and over seeds."""
    if style in DATA:
        return render([_comparison_numbers(found, name) for name in found.episodes], style)
    rows = []
    for name in found.episodes:
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
    return "\n".join([head, "", render(rows, style), "", *explain, *(f"Note: {note}." for note in found.notes)])


def _comparison_numbers(found: Comparison, metric: str) -> dict[str, Any]:
    over, seeds = found.episodes[metric], found.by_seed_interval[metric]
    return {
        "metric": metric,
        "difference": round(over.mean, 6),
        "interval": round(over.interval, 6),
        "p": over.p,
        "difference_of_seeds": None if math.isnan(seeds.mean) else round(seeds.mean, 6),
        "interval_of_seeds": None if math.isnan(seeds.interval) else round(seeds.interval, 6),
        "each_seed": [round(float(value), 6) for value in found.by_seed[metric]],
        "seeds": list(found.seeds),
        "partial_data": found.partial,
    }


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
        f"data         fingerprint {result.fingerprint}{f'; {PARTIAL}' if result.partial else ''}",
        f"pretraining  {result.pretraining.get('key')}, accuracy {result.pretraining.get('accuracy')}",
        f"training     {training or 'none'}",
        *(f"tuned        {key}: {values}" for key, values in result.tuned.items()),
        *(f"solver       {key}: {values}" for key, values in result.solver.items()),
        f"cost         {', '.join(f'{k} {v:g}' for k, v in cost.items())}",
        *(f"{key:12} {value}" for key, value in result.provenance.items()),
    ]
    return "\n".join(lines)
