"""The content of the page, from boards, in plain dataclasses. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ifsl_bench.analysis.aggregate import COMPUTED, EVERY, PAPER, STORED, SeedAggregate, bias_curve, calibrated_point
from ifsl_bench.analysis.ranking import Ranking
from ifsl_bench.analysis.task_results import TaskResults, load_board, load_variants, nothing_stored, telling
from ifsl_bench.protocols.tasks.metric_sets import BALANCE, METRICS
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.reporting.claims import Judged
from ifsl_bench.reporting.columns import HEADINGS, Entry, entries_of, published_entries, rounded
from ifsl_bench.reporting.leaderboard import PUBLISHED_NOTES, task_table
from ifsl_bench.reporting.page.origins import Origin, origin_of
from ifsl_bench.reporting.page.references import Citation, citation_of_label, citation_of_paper, citation_of_row
from ifsl_bench.reporting.page.row_pairs import RowPair, digits_of, row_pairs
from ifsl_bench.reporting.plot_styles import DASHES, MARKERS, PlotStyle, look_of, looks_of
from ifsl_bench.reporting.table import Table
from ifsl_bench.reporting.variance_table import split_of
from ifsl_bench.store.published import LETTERS
from ifsl_bench.utils.errors import UserError

SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")  # Plotly's names for MARKERS
LINES = ("solid", "dash", "dot", "dashdot")  # Plotly's names for DASHES
FINEST = 3.0  # percent: what points of a curve are apart at least
OF_SEEDS = ("acc", "calibrated_acc", "harmonic", "ausuc", "delta")  # what the page can show of each seed


@dataclass(frozen=True, kw_only=True)
class PageRow:
    """A row of a task, measured or published.

    Attributes:
        name: its label, and where two rows of a task share one, where it is from.
        values: metric -> mean and half-width of its 95% interval (None where there is none), in percent.
        seeds: the training seeds, ascending.
        by_seed: metric -> the mean of each seed; of :data:`OF_SEEDS`.
        point: base and novel accuracy, in percent; None where they are not known.
        calibrated: the same with the bias that was chosen on validation episodes.
        curve: base and novel accuracy against ascending biases, [[base, ...], [novel, ...]]; None without
            validation episodes.
        validation: a [steps, accuracies] for each seed, in the order of ``seeds``; empty where none was meta-trained.
        cost: "seconds" of meta-training and evaluation, "milliseconds" an episode, "parameters" that are learned; the
            least of the seeds.
        after: in sessions, the accuracy after each: means over orders and seeds, and between what 95% of the orders
            are; of lazy and published rows the first alone.
        triangle: in sessions, a line for each session, with the accuracy after it on the classes of each session so
            far; none of rows that were not measured.
        variance: in sessions, the variance of a single average, "one", and of its parts, in squared points; empty where
            there is one order of the classes.
        look: colour, Plotly's names of marker and dash, and whether the row is a further one of its method on the task.
        cited: number in the list of citations.
        cited_method: of a published row, the number of its method's citation, where that is another one.
        note: what a reader should know of a published row.
        printed: the +- that a paper prints beside its accuracy, of unknown kind.
        origin: None for published rows.
    """

    task: str
    label: str
    name: str
    source: str
    setting: str = ""
    values: dict[str, tuple[float | None, float | None]]
    seeds: list[int] = field(default_factory=list)
    by_seed: dict[str, list[float]] = field(default_factory=dict)
    point: tuple[float, float] | None
    calibrated: tuple[float, float] | None = None
    curve: list[list[float]] | None = None
    validation: list[list[list[float]]] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)
    after: list[list[float]]
    triangle: list[list[float]] = field(default_factory=list)
    variance: dict[str, float] = field(default_factory=dict)
    look: tuple[str, str, str, bool]
    cited: int
    cited_method: int | None
    note: str
    printed: float | None
    origin: Origin | None = None


@dataclass(frozen=True)
class PageBoard:
    """A task in one setting."""

    task: Task
    setting: str
    table: Table[Entry]  # what `ifsl-bench table --rank --full --setting ...` prints
    rows: list[int]  # for each row of the table its number in the list of all rows
    queries: tuple[int, int]  # base and novel queries of an episode
    pairs: dict[str, list[RowPair]]  # metric -> all differences between its ranked rows


@dataclass(frozen=True)
class Page:
    """The content of the page."""

    boards: list[PageBoard]
    rows: list[PageRow]
    citations: list[Citation]
    claims: Sequence[Judged]


def boards_with_variants(tasks: Iterable[Task], results: Path, named: bool) -> list[TaskResults]:
    """The boards of tasks and of their variants that have rows.

    Args:
        named: the user named these tasks: one without rows is an error, and each is followed by its variants. Otherwise
            tasks with published rows alone come last, and before them letters; of each, first tasks in episodes, then
            those in sessions, then variants; and among these, those with one seed last.

    Raises:
        UserError: nothing is stored of such a task, nor of a variant of it.
    """
    boards = {task.name: load_board(task, results) for task in tasks}
    every: dict[str, TaskResults] = {}
    for board in boards.values():
        variants = [variant for variant in load_variants(board.task, results) if variant.name not in boards]
        if named and all(member.empty for member in (board, *variants)):
            raise nothing_stored(board)
        every |= {member.name: member for member in (board, *variants)}
    shown = [member for member in every.values() if not member.empty]

    def late(member: TaskResults) -> tuple[bool, ...]:
        task, measured = member.task, bool(member.rows or member.others)
        lone = not any(len(row.seeds) > 1 for row in member.rows)  # then nothing is ranked
        return not measured, task.dataset.name == "glyphs", bool(task.sessions), member.name not in boards, lone

    return telling(shown if named else sorted(shown, key=late), every.values())


def gather(boards: Iterable[TaskResults], claims: Sequence[Judged] = ()) -> Page:
    """The page of these boards, each in every setting that has rows of its own, and of claims on them."""
    page_boards: list[PageBoard] = []
    rows: list[PageRow] = []
    citations: dict[Citation, int] = {}
    for board in boards:
        names, looks = Counter(entry.label for entry in entries_of(board)), _looks(board)
        numbers: dict[object, int] = {}
        for setting in [PAPER, *sorted({row.setting for row in board.rows} - {PAPER, EVERY})]:
            view = replace(board.in_setting(setting), remarks=board.remarks)  # the page has a menu of settings
            table = task_table(view, full=True, ranked=True)
            if board.task.sessions and setting == PAPER:
                papers = sorted(published_entries(board), key=lambda entry: entry.label.lower())
                legend = "; ".join(f"{letter}: {meaning}" for letter, meaning in LETTERS.items())
                notes = [*table.notes, *([*PUBLISHED_NOTES, f"{legend}."] if papers else [])]
                table = replace(table, rows=[*table.rows, *papers], notes=notes)
            for entry in table.rows:
                if _key(entry) not in numbers:
                    numbers[_key(entry)] = len(rows)
                    rows.append(_row(entry, names[entry.label] > 1, looks, citations))
            page_boards.append(_board(view, table, numbers))
    return Page(page_boards, rows, list(citations), claims)


def _key(entry: Entry) -> object:
    return entry.measured or (entry.label, entry.source)


def _board(view: TaskResults, table: Table[Entry], numbers: dict[object, int]) -> PageBoard:
    shape = view.task.episode
    own = {row: numbers[row] for row in view.rows}
    pairs = {}
    for metric in ("acc", "calibrated_acc"):
        able = [row for row in view.compared if metric in row.metrics]
        if differences := row_pairs(Ranking(able, metric, view.setting), own):
            pairs[metric] = differences
    queries = shape.base_queries, shape.ways * shape.novel_queries
    order = [numbers[_key(entry)] for entry in table.rows]
    return PageBoard(view.task, view.setting, table, order, queries, pairs)


def _looks(board: TaskResults) -> dict[SeedAggregate, PlotStyle]:
    """The look of each measured row of a task, all its settings together."""
    rows = (*board.rows, *board.others)
    stored = {row.label for row in rows if row.origin == STORED}
    second = [row.label in stored and row.origin != STORED for row in rows]
    return dict(zip(rows, looks_of([row.label for row in rows], second), strict=True))


def _row(entry: Entry, shared: bool, looks: dict[SeedAggregate, PlotStyle], citations: dict[Citation, int]) -> PageRow:
    row = entry.measured
    of_method = citation_of_row(row.results[0].method, row.label) if row else citation_of_label(entry.label)
    computed = Citation(f"Computed here from {entry.note}.", "") if entry.kind == COMPUTED else None
    cited = of_method if row else computed or citation_of_paper(entry.source)
    cites_method = not row and of_method.bibtex and of_method.bibtex not in cited.bibtex
    values = {
        name: (rounded(v.mean, digits_of(v.mean)), rounded(v.interval, digits_of(v.interval)))
        for name, v in entry.values.items()
        if name in HEADINGS
    }
    look = looks[row] if row else look_of(entry.label)
    return PageRow(
        task=entry.task.name,
        label=entry.label,
        name=f"{entry.label} ({entry.source})" if shared else entry.label,
        source=entry.source,
        values={name: values[name] for name in (*METRICS, *BALANCE) if name in values},
        point=_point([entry.values[name].mean for name in ("base_joint", "novel_joint") if name in entry.values]),
        after=_after(entry),
        look=(look.colour, SYMBOLS[MARKERS.index(look.marker)], LINES[DASHES.index(look.dash)], look.further),
        cited=citations.setdefault(cited, len(citations)),
        cited_method=citations.setdefault(of_method, len(citations)) if cites_method else None,
        note=entry.note,
        printed=entry.printed,
        **_measured(row) if row else {},
    )


def _measured(row: SeedAggregate) -> dict[str, Any]:
    """The page's fields of measured rows alone."""
    in_sessions = bool(row.after())
    return {
        "setting": row.setting,
        "seeds": list(row.seeds),
        "by_seed": {n: [round(float(v), 2) for v in row.by_seed(n).mean(1)] for n in OF_SEEDS if n in row.metrics},
        "calibrated": _point(calibrated_point(row) or ()),
        "curve": _curve(row),
        "validation": [_validation(r.training) for r in row.results] if any(r.training for r in row.results) else [],
        "cost": _cost(row),
        "triangle": [[round(float(v), 1) for v in line[: t + 1]] for t, line in enumerate(row.triangle())]
        if in_sessions
        else [],
        "variance": _variance(row) if in_sessions else {},
        "origin": origin_of(row),
    }


def _point(means: Sequence[float]) -> tuple[float, float] | None:
    """Base and novel accuracy; None where one of them is not known."""
    if len(means) < 2 or math.isnan(sum(means)):
        return None
    base, novel = means
    return round(base, 3), round(novel, 3)


def _curve(row: SeedAggregate) -> list[list[float]] | None:
    """A row's base-novel curve, thinned to points that an eye can tell apart; five seeds have some 250."""
    curve = bias_curve(row)
    if curve is None:
        return None
    base, novel = curve[:, 1].tolist(), curve[:, 2].tolist()
    places = [0]
    for i in range(1, len(base)):
        if math.dist((base[i], novel[i]), (base[places[-1]], novel[places[-1]])) >= FINEST or i == len(base) - 1:
            places.append(i)
    return [[round(part[i], 1) for i in places] for part in (base, novel)]


def _after(entry: Entry) -> list[list[float]]:
    means = [value.mean for value in entry.after]
    bands = np.percentile(entry.measured.orders_after(), (2.5, 97.5), axis=0) if entry.measured and means else ()
    return [[round(float(value), 2) for value in line] for line in (means, *bands) if len(line)]


def _variance(row: SeedAggregate) -> dict[str, float]:
    try:
        return {part: float(f"{variance.value:.4g}") for part, variance in split_of(row, "acc").parts.items()}
    except UserError:
        return {}


def _validation(training: dict[str, Any]) -> list[list[float]]:
    """Steps, and the accuracy on validation episodes at each, in percent."""
    points = sorted((int(step), round(float(value), 1)) for step, value in training.get("validation", {}).items())
    return [[step for step, _ in points], [value for _, value in points]]


def _cost(row: SeedAggregate) -> dict[str, float]:
    """The least of the seeds: they do the same work, and other programs only lengthen it."""

    def least(*names: str) -> float:
        sums = [sum(r.cost[name] for name in names) for r in row.results if all(name in r.cost for name in names)]
        return min(sums, default=math.nan)

    rate = max((r.cost.get("episodes_per_second", 0.0) for r in row.results), default=0.0)
    costs = {
        "seconds": least("training_seconds", "evaluation_seconds"),
        "milliseconds": 1000 / rate if rate > 0 else math.nan,
        "parameters": least("parameters"),
    }
    return {name: float(f"{value:.4g}") for name, value in costs.items() if math.isfinite(value)}
