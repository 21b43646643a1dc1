"""LaTeX tables in the layout of Ren et al. (NeurIPS 2019): a method a row, 1-shot and 5-shot side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ifsl_bench.board.ranking import ranked
from ifsl_bench.board.rows import Board
from ifsl_bench.board.text import notes_of
from ifsl_bench.protocol.metrics import Estimate
from ifsl_bench.protocol.task import Task
from ifsl_bench.protocol.variants import split

HEADS = {"acc": r"Acc. $\uparrow$", "delta": r"$\Delta \downarrow$", "delta_a": r"$\Delta_a \downarrow$",
         "delta_b": r"$\Delta_b \downarrow$"}  # fmt: skip
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}
BOLD = (
    "Bold: of the measured rows those that share the top of the column, by paired differences at 95%; of each paper "
    "the highest of its numbers, without a test."
)
APART = (3, "Measured, not comparable")  # a block of a table, by its place


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(SPECIAL.get(character, character) for character in text)


def paper_tables(boards: Sequence[Board], full: bool = False) -> str:
    """One ``table`` for tasks that differ in shots alone; needs the packages booktabs and multirow.

    Variants of a task have a table of their own, whose caption says so. Rows that are not comparable (on other
    episodes, or on a part of the data) are in a block of their own, without bold.

    In bold are the measured numbers that share the top of their column by the rule of
    :func:`ifsl_bench.board.ranking.ranked`; and of each paper the highest of several, as papers do, which is no
    statement on significance. Published +- are as printed.

    Args:
        full: the columns of the paper's full ablation tables, with Delta_a and Delta_b.
    """
    groups: dict[str, list[Board]] = {}
    for board in boards:
        groups.setdefault(_kind(board.task), []).append(board)
    return "\n\n".join(_table(sorted(group, key=lambda b: b.task.shots), full) for group in groups.values())


def _kind(task: Task) -> str:
    """What tasks of one table have in common: all but the shots, and these too where a variant has others."""
    definition = {k: v for k, v in task.definition().items() if k not in ("name", "shots")}
    plain, change = split(task.name)
    return json.dumps([definition, bool(task.variant_of), change.shots and plain], sort_keys=True)


@dataclass(frozen=True)
class _Entry:
    """A method on one task: the block of the table it belongs to, its accuracy to order by, and its cells."""

    block: tuple[int, str]
    label: str
    accuracy: float
    cells: tuple[str, ...]


def _table(boards: Sequence[Board], full: bool) -> str:
    columns: tuple[str, ...] = ("acc", "delta", "delta_a", "delta_b") if full else ("acc", "delta")
    columns = ("acc",) if boards[0].task.regular else columns
    blocks: dict[tuple[int, str], dict[str, dict[str, _Entry]]] = {}
    for board in boards:
        for entry in (*_published(board, columns), *_measured(board, columns, _origins(boards))):
            blocks.setdefault(entry.block, {}).setdefault(entry.label, {})[board.name] = entry
    lines = [
        f"% {' '.join(board.name for board in boards)}; needs booktabs and multirow",
        f"% {BOLD}",
        *(f"% {line}" for line in dict.fromkeys(note for board in boards for note in notes_of(board, "their +- too"))),
        r"\begin{table}[t]",
        r"\begin{center}",
        rf"\caption{{{escaped(_caption(boards))}}}",
        rf"\begin{{tabular}}{{c|{'|'.join(['c' * len(columns)] * len(boards))}}}",
        r"\toprule",
        *_header(boards, columns),
    ]
    for block in sorted(blocks):
        lines.append(r"\midrule")
        if len(blocks) > 1 or block == APART:
            width = 1 + len(boards) * len(columns)
            lines.append(rf"\multicolumn{{{width}}}{{c}}{{\textit{{{escaped(block[1])}}}}} \\")
        for label, found in sorted(blocks[block].items(), key=lambda item: _place(item[1]), reverse=True):
            empty = ("",) * len(columns)
            cells = [cell for b in boards for cell in (found[b.name].cells if b.name in found else empty)]
            lines.append(" & ".join([escaped(label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{center}", r"\end{table}"])


def _caption(boards: Sequence[Board]) -> str:
    """What the tasks' titles have in common, and what a reader of the printed table must not miss."""
    titles = [(board.task.title or board.name).split(", ") for board in boards]
    caption = ", ".join(part for part in titles[0] if all(part in title for title in titles))
    parts = [caption or ", ".join(board.name for board in boards)]
    if of := " and ".join(dict.fromkeys(board.task.variant_of for board in boards if board.task.variant_of)):
        changes = "; ".join(change for board in boards if (change := board.name.partition("+")[2]))
        parts.append(f"a variant of {of}{f' ({changes})' if changes else ''}, not comparable with the original")
    if any(row.partial for board in boards for row in board.rows):
        parts.append("data set marked partial")
    return "; ".join(parts)


def _header(boards: Sequence[Board], columns: Sequence[str]) -> list[str]:
    shots = [f"{board.task.shots}-shot" for board in boards]
    if len(columns) == 1:
        return [" & ".join(["Model", *shots]) + r" \\"]
    sides = ["c|"] * (len(boards) - 1) + ["c"]
    spans = [rf"\multicolumn{{{len(columns)}}}{{{side}}}{{{name}}}" for side, name in zip(sides, shots, strict=True)]
    heads = [HEADS[name] for _ in boards for name in columns]
    return [" & ".join([r"\multirow{2}{*}{Model}", *spans]) + r" \\", " & ".join([" ", *heads]) + r" \\"]


def _origins(boards: Sequence[Board]) -> bool:
    """Whether rows of one label may come from two places, the package and the user, so that labels must say which."""
    return len({row.origin for board in boards for row in (*board.rows, *board.others)}) > 1


def _place(found: Mapping[str, _Entry]) -> tuple[int, float]:
    """What rows are ordered by: on how many of the tasks they are, then their mean accuracy there."""
    return len(found), sum(entry.accuracy for entry in found.values()) / len(found)


def _measured(board: Board, columns: Sequence[str], origins: bool) -> Iterator[_Entry]:
    top = {name: [place.row for place in ranked(board.rows, name) if place.top] for name in columns}
    for row in board.rows:
        summary = row.summary()
        cells = tuple(_cell(name, summary[name], any(row is other for other in top[name])) for name in columns)
        label = f"{row.label} ({row.origin})" if origins else row.label
        yield _Entry((2, "Measured"), label, summary["acc"].mean, cells)
    for row in board.others:
        summary = row.summary()
        cells = tuple(_cell(name, summary[name], False) for name in columns)
        label = f"{row.label} ({row.origin})" if origins else row.label
        label += ", partial data" if row.partial else ""
        yield _Entry(APART, label, summary["acc"].mean, cells)


def _published(board: Board, columns: Sequence[str]) -> Iterator[_Entry]:
    printed: dict[tuple[str, str], list[float]] = {}
    for paper in board.papers:
        for name in set(columns) & paper.values.keys():
            printed.setdefault((paper.source, name), []).append(paper.values[name])
    best = {key: max(values) for key, values in printed.items() if len(values) > 1}
    for paper in board.papers:
        values = {name: Estimate(value, float("nan")) for name, value in paper.values.items()}
        if "plus_minus_as_printed" in paper.values:
            values["acc"] = Estimate(paper.values["acc"], paper.values["plus_minus_as_printed"])
        cells = tuple(
            _cell(name, values[name], values[name].mean == best.get((paper.source, name))) if name in values else ""
            for name in columns
        )
        block = (
            (1, f"Published, other protocol: {paper.source}") if paper.protocol else (0, f"Published: {paper.source}")
        )
        yield _Entry(block, paper.label, paper.values["acc"], cells)


def _cell(name: str, value: Estimate, bold: bool) -> str:
    """A number as the paper prints it: its +- beside an accuracy only."""
    text = rf"\textbf{{{value.mean:.2f}}}" if bold else f"{value.mean:.2f}"
    has_interval = name == "acc" and value.interval == value.interval  # not NaN
    return rf"{text} $\pm$ {value.interval:.2f}" if has_interval else text
