"""The content of the page, from the results of tasks, in plain dataclasses. Imports no torch."""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ifsl_bench.analysis.aggregate import (
    COMPUTED_ORIGIN,
    EVERY,
    PAPER,
    PARTIAL_DATA_NOTE,
    STORED,
    SeedAggregate,
    calibrated_accuracies,
    mean_bias_curve,
)
from ifsl_bench.analysis.ranking import Ranking
from ifsl_bench.analysis.session_variance import split_variance_of_row
from ifsl_bench.analysis.task_results import (
    ALL_RECIPES,
    TaskResults,
    append_remarks_of_hidden_tasks,
    load_task_results,
    load_variant_results,
    make_no_results_error,
    select_recipes,
)
from ifsl_bench.plugin.display_names import display_name_of_label
from ifsl_bench.protocols.metrics import BALANCE_METRIC_NAMES, EPISODE_METRIC_NAMES
from ifsl_bench.protocols.registry import protocol_of_task, title_by_metric
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.reporting.columns import TableRow, list_table_rows, published_table_rows, round_unless_nan
from ifsl_bench.reporting.leaderboard import PUBLISHED_NOTES, make_task_table
from ifsl_bench.reporting.page.references import Citation, cite_measured_row, cite_paper, cite_published_method
from ifsl_bench.reporting.plot_styles import (
    MATPLOTLIB_DASHES,
    MATPLOTLIB_MARKERS,
    PlotStyle,
    distinct_styles,
    style_of_label,
)
from ifsl_bench.reporting.recipe_tables import make_grid_tables
from ifsl_bench.reporting.table import Table
from ifsl_bench.store.published import FLAG_LETTERS
from ifsl_bench.store.schema import Result, result_path
from ifsl_bench.utils.errors import UserError, escape_controls

PLOTLY_MARKERS = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "triangle-down",
    "cross",
    "x",
)  # Plotly's names for MATPLOTLIB_MARKERS
PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot")  # Plotly's names for MATPLOTLIB_DASHES
MIN_CURVE_POINT_DISTANCE = 3.0  # percent: what points of a curve are apart at least
METRICS_SHOWN_BY_SEED = ("acc", "calibrated_acc", "harmonic", "ausuc", "delta")  # what the page can show of each seed


@dataclass(frozen=True, kw_only=True)
class PageRow:
    """A row of a task, measured or published.

    Attributes:
        name: as in tables, and where two rows of a task share a label, where it is from.
        values: metric -> mean and half-width of its 95% interval (None where there is none), in percent.
        seeds: the training seeds, ascending.
        by_seed: metric -> the mean of each seed; of :data:`METRICS_SHOWN_BY_SEED`.
        point: base and novel accuracy, in percent; None where they are not known.
        calibrated: base and novel accuracy with the bias that was chosen on validation episodes.
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
        printed: the +- that a paper prints next to its accuracy, of unknown kind.
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
    origin: RowOrigin | None = None


@dataclass(frozen=True)
class TaskSection:
    """A task in one setting."""

    task: Task
    setting: str
    table: Table[TableRow]  # what `ifsl-bench table --rank --full --setting ...` prints
    row_numbers: list[int]  # for each row of the table its number in the list of all rows
    query_counts: tuple[int, int]  # base and novel queries of an episode
    row_pairs: dict[str, list[RowPair]]  # metric -> all differences between its ranked rows


@dataclass(frozen=True)
class Page:
    """The content of the page."""

    sections: list[TaskSection]
    rows: list[PageRow]
    citations: list[Citation]
    grids: list[tuple[Task, list[Table[Any]]]]  # tables of recipes and classifiers, of tasks in sessions first


def load_results_with_variants(
    tasks: Iterable[Task], results: Path, named: bool, recipes: Sequence[str] = ()
) -> list[TaskResults]:
    """Return the results of tasks and of their variants that have rows.

    Args:
        tasks: the tasks.
        results: the folder of results.
        named: the user named these tasks: one without rows is an error, and each is followed by its variants. Otherwise
            tasks with published rows alone come last, and before them letters; of each, first tasks in episodes, then
            those in sessions, then variants; and among these, those with one seed last.
        recipes: only rows of these, see :meth:`TaskResults.select_recipes`.

    Raises:
        UserError: nothing is stored of such a task, nor of a variant of it, or of a recipe.
    """
    results_of_tasks = {
        task_results.task_name: task_results
        for task_results in select_recipes([load_task_results(task, results) for task in tasks], recipes)
    }
    every: dict[str, TaskResults] = {}
    for task_results in results_of_tasks.values():
        variants = [
            variant
            for variant in load_variant_results(task_results.task, results)
            if variant.task_name not in results_of_tasks
        ]
        variants = [variant.select_recipes(recipes) for variant in variants]
        if named and all(member.is_empty for member in (task_results, *variants)):
            raise make_no_results_error(task_results)
        every |= {member.task_name: member for member in (task_results, *variants)}
    shown = [member for member in every.values() if not member.is_empty]

    def late(member: TaskResults) -> tuple[bool, ...]:
        task, measured = member.task, bool(member.rows or member.incomparable_rows)
        in_sessions = protocol_of_task(task).learns_sessions
        lone = not any(len(row.seeds) > 1 for row in member.rows)  # then nothing is ranked
        return (
            not measured,
            task.dataset.name == "glyphs",
            in_sessions,
            member.task_name not in results_of_tasks,
            lone,
        )

    return append_remarks_of_hidden_tasks(shown if named else sorted(shown, key=late), every.values())


def collect_page(results_of_tasks: Iterable[TaskResults]) -> Page:
    """Return the content of the page.

    Args:
        results_of_tasks: the results of the tasks, shown in every setting that has rows of its own.
    """
    results_of_tasks = list(results_of_tasks)
    sections: list[TaskSection] = []
    rows: list[PageRow] = []
    citations: dict[Citation, int] = {}
    for task_results in results_of_tasks:
        names, looks = Counter(entry.label for entry in list_table_rows(task_results)), _plot_styles(task_results)
        numbers: dict[object, int] = {}
        for setting in [PAPER, *sorted({row.ranking_setting for row in task_results.rows} - {PAPER, EVERY})]:
            view = replace(
                task_results.select_setting(setting), remarks=task_results.remarks
            )  # the page has a menu of settings
            table = make_task_table(view, full=True, ranked=True)
            if protocol_of_task(task_results.task).has_separate_published_table and setting == PAPER:
                papers = sorted(published_table_rows(task_results), key=lambda entry: entry.label.lower())
                legend = "; ".join(f"{letter}: {meaning}" for letter, meaning in FLAG_LETTERS.items())
                notes = [*table.notes, *([*PUBLISHED_NOTES, f"{legend}."] if papers else [])]
                table = replace(table, rows=[*table.rows, *papers], notes=notes)
            for entry in table.rows:
                if _row_key(entry) not in numbers:
                    numbers[_row_key(entry)] = len(rows)
                    rows.append(_page_row(entry, names[entry.label] > 1, looks, citations))
            sections.append(_task_section(view, table, numbers))
    return Page(sections, rows, list(citations), _recipe_grids(results_of_tasks))


def _recipe_grids(results_of_tasks: Sequence[TaskResults]) -> list[tuple[Task, list[Table[Any]]]]:
    """Return the tables of recipes and classifiers of the tasks that have several of both."""
    grids = []
    for task_results in results_of_tasks:
        every = task_results.select_recipes(task_results.recipes or [ALL_RECIPES])
        if len({row.recipe for row in every.rows if row.recipe}) > 1:
            with suppress(UserError):  # no classifier is measured under two of them
                grids.append((task_results.task, make_grid_tables(every)))
    return sorted(grids, key=lambda grid: not protocol_of_task(grid[0]).learns_sessions)


def _row_key(entry: TableRow) -> object:
    return entry.measured_row or (entry.label, entry.source_text)


def _task_section(view: TaskResults, table: Table[TableRow], numbers: dict[object, int]) -> TaskSection:
    shape = view.task.episode
    own = {row: numbers[row] for row in view.rows}
    pairs = {}
    for metric in ("acc", "calibrated_acc"):
        able = [row for row in view.comparable_rows if metric in row.metric_names]
        if differences := ranked_row_pairs(Ranking(able, metric, view.ranking_setting), own):
            pairs[metric] = differences
    queries = shape.base_queries, shape.ways * shape.novel_queries
    order = [numbers[_row_key(entry)] for entry in table.rows]
    return TaskSection(view.task, view.ranking_setting, table, order, queries, pairs)


def _plot_styles(task_results: TaskResults) -> dict[SeedAggregate, PlotStyle]:
    """Return the look of each measured row of a task, all its settings together."""
    rows = task_results.measured_rows
    stored = {row.label for row in rows if row.results_origin == STORED}
    second = [row.label in stored and row.results_origin != STORED for row in rows]
    return dict(zip(rows, distinct_styles([row.label for row in rows], second), strict=True))


def _page_row(
    entry: TableRow, shared: bool, looks: dict[SeedAggregate, PlotStyle], citations: dict[Citation, int]
) -> PageRow:
    row = entry.measured_row
    of_method = cite_measured_row(row.results[0].method, row.label) if row else cite_published_method(entry.label)
    computed = (
        Citation(f"Computed here from {entry.published_note}.", "") if entry.row_kind == COMPUTED_ORIGIN else None
    )
    cited = of_method if row else computed or cite_paper(entry.source_text)
    cites_method = not row and of_method.bibtex and of_method.bibtex not in cited.bibtex
    values = {
        name: (round_unless_nan(v.mean, count_digits(v.mean)), round_unless_nan(v.interval, count_digits(v.interval)))
        for name, v in entry.metric_estimates.items()
        if name in title_by_metric()
    }
    look = looks[row] if row else style_of_label(entry.label)
    return PageRow(
        task=entry.task.name,
        label=entry.label,
        name=f"{display_name_of_label(entry.label)} ({entry.source_text})"
        if shared
        else display_name_of_label(entry.label),
        source=entry.source_text,
        values={name: values[name] for name in (*EPISODE_METRIC_NAMES, *BALANCE_METRIC_NAMES) if name in values},
        point=_base_novel_point(
            [
                entry.metric_estimates[name].mean
                for name in ("base_joint", "novel_joint")
                if name in entry.metric_estimates
            ]
        ),
        after=_session_accuracies(entry),
        look=(
            look.colour,
            PLOTLY_MARKERS[MATPLOTLIB_MARKERS.index(look.marker)],
            PLOTLY_DASHES[MATPLOTLIB_DASHES.index(look.dash)],
            look.is_further_row,
        ),
        cited=citations.setdefault(cited, len(citations)),
        cited_method=citations.setdefault(of_method, len(citations)) if cites_method else None,
        note=entry.published_note,
        printed=entry.printed_interval,
        **_measured_row_fields(row) if row else {},
    )


def _measured_row_fields(row: SeedAggregate) -> dict[str, Any]:
    """Return the page's fields of measured rows alone."""
    in_sessions = bool(row.metric_after_sessions())
    return {
        "setting": row.ranking_setting,
        "seeds": list(row.seeds),
        "by_seed": {
            n: [round(float(v), 2) for v in row.metric_by_seed(n).mean(1)]
            for n in METRICS_SHOWN_BY_SEED
            if n in row.metric_names
        },
        "calibrated": _base_novel_point(calibrated_accuracies(row) or ()),
        "curve": _thinned_bias_curve(row),
        "validation": [_validation_curve(r.training) for r in row.results]
        if any(r.training for r in row.results)
        else [],
        "cost": _collect_costs(row),
        "triangle": [[round(float(v), 1) for v in line[: t + 1]] for t, line in enumerate(row.accuracy_triangle())]
        if in_sessions
        else [],
        "variance": _variances_by_source(row) if in_sessions else {},
        "origin": collect_row_origin(row),
    }


def _base_novel_point(means: Sequence[float]) -> tuple[float, float] | None:
    """Return base and novel accuracy; None where one of them is not known."""
    if len(means) < 2 or math.isnan(sum(means)):
        return None
    base, novel = means
    return round(base, 3), round(novel, 3)


def _thinned_bias_curve(row: SeedAggregate) -> list[list[float]] | None:
    """Return a row's base-novel curve, thinned to points that an eye can tell apart; five seeds have some 250."""
    curve = mean_bias_curve(row)
    if curve is None:
        return None
    base, novel = curve[:, 1].tolist(), curve[:, 2].tolist()
    places = [0]
    for i in range(1, len(base)):
        if (
            math.dist((base[i], novel[i]), (base[places[-1]], novel[places[-1]])) >= MIN_CURVE_POINT_DISTANCE
            or i == len(base) - 1
        ):
            places.append(i)
    return [[round(part[i], 1) for i in places] for part in (base, novel)]


def _session_accuracies(entry: TableRow) -> list[list[float]]:
    means = [value.mean for value in entry.accuracy_after_sessions]
    bands = (
        np.percentile(entry.measured_row.metric_after_sessions_by_order(), (2.5, 97.5), axis=0)
        if entry.measured_row and means
        else ()
    )
    return [[round(float(value), 2) for value in line] for line in (means, *bands) if len(line)]


def _variances_by_source(row: SeedAggregate) -> dict[str, float]:
    try:
        return {
            part: float(f"{variance.estimated_value:.4g}")
            for part, variance in split_variance_of_row(row, "acc").variances.items()
        }
    except UserError:
        return {}


def _validation_curve(training: dict[str, Any]) -> list[list[float]]:
    """Return steps, and the accuracy on validation episodes at each, in percent."""
    points = sorted((int(step), round(float(value), 1)) for step, value in training.get("validation", {}).items())
    return [[step for step, _ in points], [value for _, value in points]]


def _collect_costs(row: SeedAggregate) -> dict[str, float]:
    """Return the least of the seeds: they do the same work, and other programs only lengthen it."""

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


MIN_SHOWN_P_VALUE = 1e-15  # p-value; smaller ones are tails of a distribution that no data can test


@dataclass(frozen=True)
class RowPair:
    """Row a minus row b.

    Attributes:
        a, b: the rows, numbers in the list of all rows.
        mean: points of accuracy.
        interval: half-width of the 95% interval of this difference alone, over episodes and seeds.
        p_value: two-sided p-value of this difference alone; 0 where it is below :data:`MIN_SHOWN_P_VALUE`.
        is_significant: whether it is one of those that ranks rest on: all comparisons of the ranking at once, by Holm's
            procedure.
        seeds: training seeds that both rows are compared on.
        models_fixed: whether it holds the trained models fixed.
        images_fixed: whether it holds the test images fixed.
    """

    a: int
    b: int
    mean: float
    interval: float
    p_value: float
    is_significant: bool
    seeds: tuple[int, ...]
    models_fixed: bool
    images_fixed: bool


def count_digits(value: float) -> int:
    """Return the page's digits of a number: more where its two, or fewer, would be another number's."""
    return 9 if f"{value:.4f}".endswith(("50", "500", "5000")) else 4


def ranked_row_pairs(ranking: Ranking, numbers: dict[SeedAggregate, int]) -> list[RowPair]:
    """Return each pair of ranked rows once; a user's rows are compared with the family, not with each other.

    Args:
        ranking: of the rows.
        numbers: row -> its number in the list of all rows. Rows without a number are left out.
    """
    ranked = [place.row for place in ranking.ranked_rows if place.rank_interval and place.row in numbers]
    pairs = []
    part: Ranking | None = ranking
    while part:
        here = [row for row in ranked if row in part.rows]
        family = [row for row in here if row in part.family]
        pairs += _pairs_with_family(part, family, None, numbers)
        for row in here:
            if row not in family:
                pairs += _pairs_with_family(part, family, row, numbers)
        part = part.excluded_ranking
    return pairs


def _pairs_with_family(
    ranking: Ranking, family: list[SeedAggregate], guest: SeedAggregate | None, numbers: dict[SeedAggregate, int]
) -> list[RowPair]:
    """Return the pairs of the family, or of one guest and the family."""
    better = ranking.significant_pairs(guest)
    pairs = []
    for a, b in itertools.combinations(family, 2) if guest is None else ((guest, row) for row in family):
        gap = ranking.estimate_row_difference(a, b)
        significant = (a, b) in better or (b, a) in better
        p = float(f"{gap.p_value:.3g}") if gap.p_value >= MIN_SHOWN_P_VALUE else 0.0
        mean, interval = (round(value, count_digits(value)) for value in (gap.mean, gap.interval))
        seeds = ranking.common_seeds(a, b)
        fixed = gap.models_fixed, gap.images_fixed
        pairs.append(RowPair(numbers[a], numbers[b], mean, interval, p, significant, seeds, *fixed))
    return pairs


@dataclass(frozen=True)
class RowOrigin:
    """The origin of a row's numbers."""

    shared_facts: dict[str, str]  # facts that are the same for all of its seeds
    facts_by_seed: list[dict[str, str]]  # the other facts of each seed; the same names for all


def collect_row_origin(row: SeedAggregate) -> RowOrigin:
    """Return all that a reader needs to find a row's results, and to make them again."""
    facts = [_origin_facts(result) for result in row.results]
    names = list(dict.fromkeys(name for of_seed in facts for name in of_seed))
    same = [name for name in names if len({of_seed.get(name, "") for of_seed in facts}) == 1 and name != "seed"]
    shared = {name: facts[0][name] for name in same}
    return RowOrigin(shared, [{name: of_seed.get(name, "") for name in names if name not in same} for of_seed in facts])


def _origin_facts(result: Result) -> dict[str, str]:
    provenance, backbone = result.provenance, result.pretraining
    libraries = provenance.get("libraries") or {}
    facts: dict[str, Any] = {
        "seed": result.seed,
        "file": result_path(Path(), result).as_posix(),
        "Acc.": f"{result.summary['acc']['mean']:.2f}",
        "command": provenance.get("command"),
        "again": shlex.join(["ifsl-bench", "reproduce", result.label, result.task]),
        "commit": provenance.get("commit"),
        "version": provenance.get("version"),
        "device": provenance.get("device"),
        "Python": provenance.get("python"),
        "libraries": ", ".join(f"{k} {v}" for k, v in libraries.items()) if isinstance(libraries, Mapping) else "",
        "time": provenance.get("time"),
        "options": _format_options(result.options),
        "training": _format_options(result.train),
        "chosen": "; ".join(map(_describe_best_trial, result.tuned.values())),
        "chosen at an end of what was tried": ", ".join(result.edge),
        "episodes": f"{len(result.episodes):,}",
        "digest of the episodes": result.digest,
        "hash of the task": result.task_hash,
        "fingerprint of the data": result.fingerprint,
        "of the novel classes' data": result.novel_fingerprint,
        "data": PARTIAL_DATA_NOTE if result.partial else "",
        "backbone": backbone.get("key"),
        "recipe": backbone.get("recipe"),
        "SHA-256 of its weights": f"{sha256[:16]}..." if (sha256 := str(backbone.get("sha256") or "")) else "",
        "code of the method": provenance.get("method_source"),
        "seconds": _format_options(
            {k.removesuffix("_seconds"): v for k, v in result.cost.items() if k.endswith("_seconds")}
        ),
    }
    return {name: escape_controls(str(value)) for name, value in facts.items() if value not in (None, "", {})}


def _format_options(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _describe_best_trial(tried: Mapping[str, float]) -> str:
    """Return the best of what was tried on validation episodes."""
    if not tried:
        return ""
    best = max(tried, key=lambda name: tried[name])
    return f"{best} ({tried[best]:.2f}% on validation episodes, the best of {len(tried)})"
