"""LaTeX tables in the layout of Ren et al. (NeurIPS 2019): a method a row, 1-shot and 5-shot side by side."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ifsl_bench.analysis.aggregate import COMPUTED_ORIGIN, STORED, select_rows_with_metric
from ifsl_bench.analysis.ranking import Ranking, common_setting
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.plugin.bibliography import display_label_in_paper
from ifsl_bench.plugin.display_names import PaperEntry, read_papers
from ifsl_bench.protocols.registry import protocol_of_task, title_by_metric
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.variants import split_task_name
from ifsl_bench.reporting.columns import TableRow, list_remarks, list_table_rows, paper_columns, published_table_rows
from ifsl_bench.reporting.leaderboard import DIFFERENT_BACKBONES_NOTE
from ifsl_bench.reporting.notes import explain_calibration, rank_notes, table_notes
from ifsl_bench.reporting.table import Column, escape_latex
from ifsl_bench.store.published import FLAG_LETTERS, read_bibtex_by_source
from ifsl_bench.utils.errors import escape_controls

BOLD_CELLS_NOTE = (
    "Bold: among ranked rows, those that may be the best in the column, with 95% confidence for all rows at once, over "
    "{} and training seeds; for each paper, its highest number, without a test."
)
DELTA_ARROWS_NOTE = (
    "Delta is joint accuracy minus accuracy among base or novel classes alone, so it is negative and higher is better. "
    "Ren et al. (2019) print the same numbers as decreases, with a down arrow."
)
RANKS_NOTE_TEMPLATE = (
    "rank: the places by {} that a row can have, with 95% confidence for all rows at once; --: provisional, none."
)
INCOMPARABLE_BLOCK = (3, "Measured, not comparable")  # a block of a table: its place and title

BoldCells = set[tuple[TableRow, str]]  # entries, each with a metric


def make_latex_tables(results_of_tasks: Sequence[TaskResults], full: bool = False, rank: bool = False) -> str:
    """Return one ``table`` for tasks that differ in shots alone; it needs the packages booktabs and multirow.

    Variants of a task have a table of their own, whose caption says so. Rows that are not comparable (on other
    episodes, or on a part of the data) are in a block of their own, without bold.

    In bold are the measured numbers whose ranks, by the column's own metric, begin at 1; see
    :class:`ifsl_bench.analysis.ranking.Ranking`. Rows that are all of one setting, as tuned ones, are ranked in that.
    Of each paper the highest of several is bold too, as papers do, which is no statement on significance. Published ±
    are as printed.

    Args:
        results_of_tasks: the results of each task.
        full: the columns of the paper's full ablation tables, such as Delta_a and Delta_b.
        rank: also the ranks that each measured row can have.
    """
    groups: dict[str, list[TaskResults]] = {}
    for task_results in results_of_tasks:
        ranked = replace(
            task_results, ranking_setting=common_setting(*task_results.rows, default=task_results.ranking_setting)
        )
        groups.setdefault(_table_key(task_results.task), []).append(ranked)
    return "\n\n".join(_latex_table(sorted(group, key=lambda b: b.task.shots), full, rank) for group in groups.values())


def _table_key(task: Task) -> str:
    """Return what tasks of one table have in common: all but the shots, and these too where a variant has others."""
    if protocol_of_task(task).has_latex_table_per_task:
        return task.name
    definition = {k: v for k, v in task.definition().items() if k not in ("name", "shots")}
    plain, change = split_task_name(task.name)
    return json.dumps([definition, bool(task.variant_of), change.shots and plain], sort_keys=True)


def _latex_table(results_of_tasks: Sequence[TaskResults], full: bool, rank: bool) -> str:
    task = results_of_tasks[0].task
    protocol = protocol_of_task(task)
    measured = [row for task_results in results_of_tasks for row in task_results.measured_rows]
    recipes = any(row.has_other_recipe for row in measured)
    columns = paper_columns(
        task, full, rank, [name for name in title_by_metric() if select_rows_with_metric(measured, name)], recipes
    )
    names = [column.name for column in columns if column.name]
    # Rows of one label may come from two places, the package and the user; then the user's says so.
    stored, own = ({row.label for row in measured if (row.results_origin == STORED) is here} for here in (True, False))
    blocks: dict[tuple[int, str], dict[str, dict[str, TableRow]]] = {}
    bold: BoldCells = set()
    for task_results in results_of_tasks:
        entries = [
            *list_table_rows(task_results, rank),
            *(published_table_rows(task_results) if protocol.has_separate_published_table else []),
        ]
        bold |= _find_bold_cells(task_results, entries, names)
        for entry in entries:
            lines = blocks.setdefault(_block_place_and_title(entry), {})
            lines.setdefault(_line_label(entry, stored & own), {})[task_results.task_name] = entry
    body: list[str] = []
    for block in sorted(blocks):
        body.append(r"\midrule")
        if len(blocks) > 1 or block == INCOMPARABLE_BLOCK:
            width = 1 + len(results_of_tasks) * len(columns)
            body.append(rf"\multicolumn{{{width}}}{{c}}{{\textit{{{escape_latex(block[1])}}}}} \\")
        for label, by_task in sorted(
            blocks[block].items(), key=lambda item: _latex_row_sort_key(item[1]), reverse=True
        ):
            cells = [
                _format_cell(by_task.get(task_results.task_name), column, bold)
                for task_results in results_of_tasks
                for column in columns
            ]
            marks = next(iter(by_task.values())).label_marks
            brace = "{}" * label.startswith(("[", "*"))  # else it would be an argument of the \\ before it
            first = brace + escape_latex(label) + (f"$^{{{','.join(marks)}}}$" if marks else "")
            body.append(" & ".join([first, *cells]) + r" \\")
    entries = [entry for lines in blocks.values() for by_task in lines.values() for entry in by_task.values()]
    marked = {mark for entry in entries for mark in entry.label_marks}
    if legend := "; ".join(f"{letter}: {text}" for letter, text in FLAG_LETTERS.items() if letter in marked):
        span = rf"\multicolumn{{{1 + len(columns)}}}{{p{{0.95\linewidth}}}}"
        body += [r"\midrule", rf"{span}{{\footnotesize {escape_latex(legend)}}} \\"]
    return "\n".join(
        [
            f"% {' '.join(task_results.task_name for task_results in results_of_tasks)}; needs booktabs and multirow",
            r"\begin{table}[t]",
            r"\begin{center}",
            rf"\caption{{{escape_latex(_table_caption(results_of_tasks))}}}",
            rf"\begin{{tabular}}{{c|{'|'.join(['c' * len(columns)] * len(results_of_tasks))}}}",
            r"\toprule",
            *(
                _sessions_header(columns)
                if protocol.sessions_in_tables(task)
                else _table_header(results_of_tasks, columns)
            ),
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{center}",
            r"\end{table}",
            *(f"% {comment}" for comment in _table_comments(results_of_tasks, names, bold, rank)),
        ]
    )


def _table_comments(
    results_of_tasks: Sequence[TaskResults], names: Sequence[str], bold: BoldCells, rank: bool
) -> list[str]:
    """Return the comments below the table: what is bold, then the notes on all tasks, then those on some tasks."""
    task = results_of_tasks[0].task
    protocol = protocol_of_task(task)
    of_each = [
        [*table_notes(task_results, "their ± too", names), *rank_notes(task_results, to_best=False)]
        for task_results in results_of_tasks
    ]
    notes = [
        note if all(note in others for others in of_each) else f"{task_results.task_name}: {note}"
        for task_results, own in zip(results_of_tasks, of_each, strict=True)
        for note in own
    ]
    notes += (
        [DIFFERENT_BACKBONES_NOTE]
        if protocol.has_separate_published_table and results_of_tasks[0].published_rows
        else []
    )
    notes += [RANKS_NOTE_TEMPLATE.format(protocol.metric_column("acc").title)] if rank else []
    return [
        (BOLD_CELLS_NOTE.partition(";")[0] + "." if protocol.has_separate_published_table else BOLD_CELLS_NOTE).format(
            protocol.interval_units_noun
        ),
        *_note_hidden_best_rows(results_of_tasks, bold),
        *([DELTA_ARROWS_NOTE] if {"delta", "delta_a", "delta_b"}.intersection(names) else []),
        *map(escape_controls, dict.fromkeys(notes)),
        *([explain_calibration(task)] if "calibrated_acc" in names else []),
    ]


def _table_caption(results_of_tasks: Sequence[TaskResults]) -> str:
    """Return what the tasks' titles have in common, and what a reader of the printed table must not miss."""
    titles = [(task_results.task.title or task_results.task_name).split(", ") for task_results in results_of_tasks]
    caption = ", ".join(part for part in titles[0] if all(part in title for title in titles))
    parts = [caption or ", ".join(task_results.task_name for task_results in results_of_tasks)]
    if of := " and ".join(
        dict.fromkeys(task_results.task.variant_of for task_results in results_of_tasks if task_results.task.variant_of)
    ):
        changes = "; ".join(
            change for task_results in results_of_tasks if (change := task_results.task_name.partition("+")[2])
        )
        parts.append(f"a variant of {of}{f' ({changes})' if changes else ''}, not comparable with the original")
    if any(row.is_partial for task_results in results_of_tasks for row in task_results.rows):
        parts.append("data set marked partial")
    return "; ".join(parts)


def _table_header(results_of_tasks: Sequence[TaskResults], columns: Sequence[Column[TableRow]]) -> list[str]:
    shots = [f"{task_results.task.shots}-shot" for task_results in results_of_tasks]
    if len(columns) == 1:
        return [" & ".join(["Model", *shots]) + r" \\"]
    sides = ["c|"] * (len(results_of_tasks) - 1) + ["c"]
    spans = [rf"\multicolumn{{{len(columns)}}}{{{side}}}{{{name}}}" for side, name in zip(sides, shots, strict=True)]
    heads = [column.latex_heading for _ in results_of_tasks for column in columns]
    return [" & ".join([r"\multirow{2}{*}{Model}", *spans]) + r" \\", " & ".join([" ", *heads]) + r" \\"]


def _sessions_header(columns: Sequence[Column[TableRow]]) -> list[str]:
    """Return the header as papers on sessions have it: the accuracy after each, then what sums it up."""
    count = 1 + next(i for i, column in enumerate(columns) if column.name == "last")
    heads = [rf"\multirow{{2}}{{*}}{{{column.latex_heading}}}" for column in columns[count:]]
    over = rf"\multicolumn{{{count}}}{{c}}{{Acc. after each session (\%) $\uparrow$}}"
    numbers = " & ".join(map(str, range(count)))
    return [" & ".join([r"\multirow{2}{*}{Model}", over, *heads]) + r" \\", f" & {numbers}{' &' * len(heads)} " + r"\\"]


def _latex_row_sort_key(entries: Mapping[str, TableRow]) -> tuple[int, float]:
    """Return the key that orders lines: on how many of the tasks they are, then their mean accuracy there."""
    return len(entries), sum(entry.metric_estimates["acc"].mean for entry in entries.values()) / len(entries)


def _block_place_and_title(entry: TableRow) -> tuple[int, str]:
    """Return the place and the title of the block that an entry is in."""
    if entry.row_kind == COMPUTED_ORIGIN or (entry.measured_row and entry.is_comparable):
        return 2, "Measured"
    if entry.measured_row:
        return INCOMPARABLE_BLOCK
    paper = next(
        (paper.author_year for paper in read_papers("methods") if paper.bibtex_key.startswith(entry.source_text)),
        entry.source_text,
    )
    if text := read_bibtex_by_source().get(entry.source_text):
        paper = PaperEntry(entry.source_text, (), text).author_year
    return (0, f"Published: {paper}") if entry.is_comparable else (1, f"Published, other protocol: {paper}")


def _line_label(entry: TableRow, twice: Collection[str]) -> str:
    parts = [display_label_in_paper(entry.label)]
    if entry.measured_row:
        parts += [entry.source_text] if entry.measured_row.results_origin != STORED and entry.label in twice else []
        parts += list_remarks(entry.measured_row)
    return ", ".join([*parts, *(["partial data"] if entry.is_partial and not entry.is_comparable else [])])


def _format_cell(entry: TableRow | None, column: Column[TableRow], bold: BoldCells) -> str:
    return "" if entry is None else column.format_latex(entry, (entry, column.name) in bold)


def _find_bold_cells(task_results: TaskResults, entries: Sequence[TableRow], names: Sequence[str]) -> BoldCells:
    """Return the entries and metrics that may be the best of the ranked ones, or the highest of several of a paper."""
    bold = set()
    for name in set(names) - {"pd"}:  # of which the least is the best, where A_0 are alike
        ranking = Ranking(
            select_rows_with_metric(task_results.comparable_rows, name), name, task_results.ranking_setting
        )
        tops = {place.row for place in ranking.ranked_rows if place.may_be_best_row}
        bold |= {(entry, name) for entry in entries if entry.measured_row in tops}
        apart = protocol_of_task(task_results.task).has_separate_published_table
        published = [e for e in entries if e.row_kind == "published" and name in e.metric_estimates and not apart]
        for source in {entry.source_text for entry in published}:
            values = {entry: entry.metric_estimates[name].mean for entry in published if entry.source_text == source}
            if len(values) > 1:
                bold |= {(entry, name) for entry, value in values.items() if value == max(values.values())}
    return bold


def _note_hidden_best_rows(results_of_tasks: Sequence[TaskResults], bold: BoldCells) -> list[str]:
    """Return a comment on each task of whose measured accuracies none is bold, as what may be the best is not shown."""
    shown = {entry.measured_row for entry, name in bold if name == "acc"}
    lines = []
    for task_results in results_of_tasks:
        tops = [place.row for place in task_results.ranking.ranked_rows if place.may_be_best_row]
        if task_results.rows and tops and not shown.intersection(tops):
            names = escape_controls(", ".join(row.display_name for row in tops))
            lines.append(
                f"None is bold among the measured rows of {task_results.task_name}: {names} may be the best, "
                "and is not shown."
            )
    return lines
