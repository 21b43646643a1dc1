"""LaTeX tables in the layout of Ren et al. (NeurIPS 2019): a method a row, 1-shot and 5-shot side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ifsl_bench.analysis.aggregate import COMPUTED, STORED, having
from ifsl_bench.analysis.ranking import Ranking, setting_of
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.plugin.bibliography import Paper, papers, printed
from ifsl_bench.protocols.tasks.contamination import MARKS
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.variants import split
from ifsl_bench.reporting.columns import HEADINGS, Entry, entries_of, heading_of, published_entries, rank_of, state
from ifsl_bench.reporting.notes import notes_of, notes_of_ranks, of_calibration
from ifsl_bench.reporting.published_table import WARNING
from ifsl_bench.reporting.render import escaped
from ifsl_bench.store.published import LETTERS, bibtex
from ifsl_bench.utils.errors import one_line

BOLD = (
    "Bold: among ranked rows, those that may be the best in the column, with 95% confidence for all rows at once, over "
    "{} and training seeds; for each paper, its highest number, without a test."
)
ARROWS = (
    "Delta is joint accuracy minus accuracy among base or novel classes alone, so it is negative and higher is better. "
    "Ren et al. (2019) print the same numbers as decreases, with a down arrow."
)
RANKS = "rank: the places by {} that a row can have, with 95% confidence for all rows at once; --: provisional, none."
BESIDE = ("base", "novel", "harmonic", "gacc", "calibrated_acc", "state")  # in sessions, more columns
NOT_METRICS = {"state": "bytes/class", "rank": "rank"}  # columns without an arrow
APART = (3, "Measured, not comparable")  # a block of a table, by its place


def paper_tables(boards: Sequence[TaskResults], full: bool = False, rank: bool = False) -> str:
    """One ``table`` for tasks that differ in shots alone; needs the packages booktabs and multirow.

    Variants of a task have a table of their own, whose caption says so. Rows that are not comparable (on other
    episodes, or on a part of the data) are in a block of their own, without bold.

    In bold are the measured numbers whose ranks, by the column's own metric, begin at 1; see
    :class:`ifsl_bench.analysis.ranking.Ranking`. Rows that are all of one setting, as tuned ones, are ranked in that.
    Of each paper the highest of several is bold too, as papers do, which is no statement on significance. Published ±
    are as printed.

    Args:
        full: the columns of the paper's full ablation tables, with Delta_a and Delta_b; in sessions, :data:`BESIDE`.
        rank: also the ranks that each measured row can have.
    """
    groups: dict[str, list[TaskResults]] = {}
    for board in boards:
        ranked = replace(board, setting=setting_of(*board.rows, default=board.setting))
        groups.setdefault(_kind(board.task), []).append(ranked)
    return "\n\n".join(_table(sorted(group, key=lambda b: b.task.shots), full, rank) for group in groups.values())


def _kind(task: Task) -> str:
    """Describes what tasks of one table have in common: all but the shots, and these too where a variant has others."""
    if task.sessions:
        return task.name  # of which one fills the width
    definition = {k: v for k, v in task.definition().items() if k not in ("name", "shots")}
    plain, change = split(task.name)
    return json.dumps([definition, bool(task.variant_of), change.shots and plain], sort_keys=True)


def _table(boards: Sequence[TaskResults], full: bool, rank: bool) -> str:
    columns = [name for name, heading in HEADINGS.items() if heading.paper and (full or heading.paper_short)]
    measured = [row for board in boards for row in (*board.rows, *board.others)]
    filled = [name for name in columns if having(measured, name)]
    columns = [name for name in columns if boards[0].task.kind.shows(name, filled)]
    if sessions := boards[0].task.sessions:
        after = ["first", *(f"a_{t}" for t in range(1, sessions.count)), "last"]
        beside = [name for name in BESIDE if full and (name != "calibrated_acc" or name in filled)]
        columns = [*after, "acc", "pd", "gain", *beside]
    columns += ["rank"] if rank else []
    # Rows of one label may come from two places, the package and the user; then the user's says so.
    twice = {row.label for row in measured if row.origin != STORED} & {
        row.label for row in measured if row.origin == STORED
    }
    blocks: dict[tuple[int, str], dict[str, dict[str, Entry]]] = {}
    bold: set[tuple[Entry, str]] = set()
    for board in boards:
        entries = [*entries_of(board, rank), *(published_entries(board) if sessions else [])]
        bold |= _bold(board, entries, columns)
        for entry in entries:
            blocks.setdefault(_block(entry), {}).setdefault(_label(entry, twice), {})[board.name] = entry
    notes = _notes(boards, columns)
    notes += [WARNING] if sessions and board.papers else []
    notes += [RANKS.format(heading_of("acc", boards[0].task).text)] if rank else []
    lines = [
        f"% {' '.join(board.name for board in boards)}; needs booktabs and multirow",
        f"% {BOLD.partition(';')[0] + '.' if sessions else BOLD}".format(boards[0].task.kind.units),
        *_not_shown(boards, bold),
        *([f"% {ARROWS}"] if set(columns) & {"delta", "delta_a", "delta_b"} else []),
        *(f"% {one_line(line)}" for line in dict.fromkeys(notes)),
        *([f"% {of_calibration(boards[0].task)}"] if "calibrated_acc" in columns else []),
        r"\begin{table}[t]",
        r"\begin{center}",
        rf"\caption{{{escaped(_caption(boards))}}}",
        rf"\begin{{tabular}}{{c|{'|'.join(['c' * len(columns)] * len(boards))}}}",
        r"\toprule",
        *(_sessions_header(boards[0].task, columns[len(after) :]) if sessions else _header(boards, columns)),
    ]
    for block in sorted(blocks):
        lines.append(r"\midrule")
        if len(blocks) > 1 or block == APART:
            width = 1 + len(boards) * len(columns)
            lines.append(rf"\multicolumn{{{width}}}{{c}}{{\textit{{{escaped(block[1])}}}}} \\")
        for label, by_task in sorted(blocks[block].items(), key=lambda item: _place(item[1]), reverse=True):
            cells = [_cell(by_task.get(board.name), name, bold) for board in boards for name in columns]
            marks = next(iter(by_task.values())).marks
            brace = "{}" * label.startswith(("[", "*"))  # else it would be an argument of the \\ before it
            first = brace + escaped(label) + (f"$^{{{','.join(marks)}}}$" if marks else "")
            lines.append(" & ".join([first, *cells]) + r" \\")
    marked = {
        mark for block in blocks.values() for by_task in block.values() for e in by_task.values() for mark in e.marks
    }
    if legend := "; ".join(f"{letter}: {text}" for letter, text in LETTERS.items() if letter in marked):
        span = rf"\multicolumn{{{1 + len(columns)}}}{{p{{0.95\linewidth}}}}"
        lines += [r"\midrule", rf"{span}{{\footnotesize {escaped(legend)}}} \\"]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{center}", r"\end{table}"])


def _notes(boards: Sequence[TaskResults], columns: Sequence[str]) -> list[str]:
    """The notes on all boards, and those on some of them with their names."""
    of_each = [[*notes_of(board, "their ± too", columns), *notes_of_ranks(board, to_best=False)] for board in boards]
    return [
        note if all(note in others for others in of_each) else f"{board.name}: {note}"
        for board, own in zip(boards, of_each, strict=True)
        for note in own
    ]


def _caption(boards: Sequence[TaskResults]) -> str:
    """Says what the tasks' titles have in common, and what a reader of the printed table must not miss."""
    titles = [(board.task.title or board.name).split(", ") for board in boards]
    caption = ", ".join(part for part in titles[0] if all(part in title for title in titles))
    parts = [caption or ", ".join(board.name for board in boards)]
    if of := " and ".join(dict.fromkeys(board.task.variant_of for board in boards if board.task.variant_of)):
        changes = "; ".join(change for board in boards if (change := board.name.partition("+")[2]))
        parts.append(f"a variant of {of}{f' ({changes})' if changes else ''}, not comparable with the original")
    if any(row.partial for board in boards for row in board.rows):
        parts.append("data set marked partial")
    return "; ".join(parts)


def _header(boards: Sequence[TaskResults], columns: Sequence[str]) -> list[str]:
    shots = [f"{board.task.shots}-shot" for board in boards]
    if len(columns) == 1:
        return [" & ".join(["Model", *shots]) + r" \\"]
    sides = ["c|"] * (len(boards) - 1) + ["c"]
    spans = [rf"\multicolumn{{{len(columns)}}}{{{side}}}{{{name}}}" for side, name in zip(sides, shots, strict=True)]
    heads = [_head(name, boards[0].task) for _ in boards for name in columns]
    return [" & ".join([r"\multirow{2}{*}{Model}", *spans]) + r" \\", " & ".join([" ", *heads]) + r" \\"]


def _head(name: str, task: Task) -> str:
    return NOT_METRICS.get(name) or heading_of(name, task).paper


def _sessions_header(task: Task, columns: Sequence[str]) -> list[str]:
    """The header as papers on sessions have it: the accuracy after each, then what sums it up."""
    numbers = [str(t) for t in range(task.sessions.count + 1)] if task.sessions else []
    heads = [_head(name, task) for name in columns]
    over = rf"\multicolumn{{{len(numbers)}}}{{c}}{{Acc. after each session (\%) $\uparrow$}}"
    return [
        " & ".join([r"\multirow{2}{*}{Model}", over, *(rf"\multirow{{2}}{{*}}{{{head}}}" for head in heads)]) + r" \\",
        f" & {' & '.join(numbers)}{' &' * len(heads)} " + r"\\",
    ]


def _place(entries: Mapping[str, Entry]) -> tuple[int, float]:
    """The key that orders lines: on how many of the tasks they are, then their mean accuracy there."""
    return len(entries), sum(entry.values["acc"].mean for entry in entries.values()) / len(entries)


def _block(entry: Entry) -> tuple[int, str]:
    """The block of a table that an entry is in: its place and its title."""
    if entry.kind == "measured":
        return (2, "Measured") if entry.comparable else APART
    if entry.kind == COMPUTED:
        return 2, "Measured"
    paper = next((paper.short for paper in papers("methods") if paper.key.startswith(entry.source)), entry.source)
    if text := bibtex().get(entry.source):
        paper = Paper(entry.source, (), text).short
    return (0, f"Published: {paper}") if entry.comparable else (1, f"Published, other protocol: {paper}")


def _label(entry: Entry, twice: Collection[str]) -> str:
    label = printed(entry.label)
    if entry.measured and entry.measured.origin != STORED and entry.label in twice:
        label += f", {entry.source}"
    if entry.measured and entry.measured.transductive:
        label += ", transductive"
    if entry.measured and (mark := MARKS[entry.measured.novel_seen]):
        label += f", {mark}"
    if entry.measured and (images := entry.measured.images_kept):
        label += f", keeps {images}"
    return f"{label}, partial data" if entry.partial and not entry.comparable else label


def _bold(board: TaskResults, entries: Sequence[Entry], columns: Sequence[str]) -> set[tuple[Entry, str]]:
    """The entries and metrics that may be the best of the ranked ones, or are the highest of several of a paper."""
    bold = set()
    for name in set(columns) - {"pd"}:  # of which the least is the best, where A_0 are alike
        ranking = Ranking(having(board.compared, name), name, board.setting)
        tops = {place.row for place in ranking.places if place.top}
        bold |= {(entry, name) for entry in entries if entry.measured in tops}
        printed = [e for e in entries if e.kind == "published" and name in e.values and not board.task.sessions]
        for source in {entry.source for entry in printed}:
            values = {entry: entry.values[name].mean for entry in printed if entry.source == source}
            if len(values) > 1:
                bold |= {(entry, name) for entry, value in values.items() if value == max(values.values())}
    return bold


def _not_shown(boards: Sequence[TaskResults], bold: Collection[tuple[Entry, str]]) -> list[str]:
    """A comment on each task of whose measured accuracies none is bold, since what may be the best is not shown."""
    shown = {entry.measured for entry, name in bold if name == "acc"}
    lines = []
    for board in boards:
        tops = [place.row for place in board.ranking.places if place.top]
        if board.rows and tops and not shown.intersection(tops):
            names = ", ".join(row.label for row in tops)
            lines.append(f"% None is bold among the measured rows of {board.name}: {one_line(names)} may be the best, "
                         "and is not shown.")  # fmt: skip
    return lines


def _cell(entry: Entry | None, name: str, bold: Collection[tuple[Entry, str]]) -> str:
    """A number as the paper prints it: its ± beside an accuracy only."""
    if entry is not None and name.startswith("a_"):
        return f"{entry.after[int(name[2:])].mean:.2f}"
    if entry is not None and name == "state":
        return state(entry)
    if entry is not None and name == "rank":
        return rank_of(entry).replace("-", "--")  # an en dash
    if entry is None or name not in entry.values:
        return ""
    value = entry.values[name]
    number = f"{value.mean:.2f}".replace("-", "$-$")  # not a hyphen
    text = rf"\textbf{{{number}}}" if (entry, name) in bold else number
    interval = value.interval if entry.printed is None else entry.printed
    accuracy = name in ("acc", "calibrated_acc")
    return rf"{text} $\pm$ {interval:.2f}" if accuracy and not math.isnan(interval) else text
