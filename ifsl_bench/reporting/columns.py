"""The rows of a task's table as numbers, and its columns for readers and for programs. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ifsl_bench.analysis.aggregate import COMPUTED, SeedAggregate, lazy_rows
from ifsl_bench.analysis.ranking import Difference, Ranked
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.plugin.display_names import LAZY
from ifsl_bench.protocols.metrics import Estimate, Paired
from ifsl_bench.protocols.tasks.contamination import MARKS
from ifsl_bench.protocols.tasks.metric_sets import BALANCE, METRICS
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.reporting.table import Column


@dataclass(frozen=True, eq=False)
class Entry:
    """One row of a task's table.

    Attributes:
        comparable: whether it is of the task's own protocol, episodes and data.
        values: metric -> mean and half-width of its 95% interval, in percent, unrounded; the interval of published
            numbers is NaN.
        after: in sessions, mean and interval of the accuracy after each session.
        marks: of a published row in sessions, letters of :data:`~ifsl_bench.store.published.LETTERS`.
        source: "stored" or "yours" for measured rows, "computed" for lazy ones, the key of the paper for published
            ones.
        printed: the +- that a paper prints beside its accuracy, of unknown kind.
        seeds: how many training seeds.
        spread: standard deviation between the seeds' accuracies; NaN for fewer than two.
        partial: whether it was measured on a part of the data; None for published rows.
        place: ranks and distance from the best, where rows were ranked and this one is comparable with them.
        note: what a reader should know of a published row.
        measured: the row that it was made from; None for published rows.
    """

    task: Task
    comparable: bool
    label: str
    values: Mapping[str, Estimate]
    source: str
    printed: float | None = None
    seeds: int | None = None
    spread: float = math.nan
    partial: bool | None = None
    place: Ranked | None = None
    note: str = ""
    measured: SeedAggregate | None = None
    after: Sequence[Estimate] = ()
    marks: str = ""

    @property
    def kind(self) -> str:
        """ "measured", "computed" or "published"."""
        return "measured" if self.measured else COMPUTED if self.source == COMPUTED else "published"


def entries_of(board: TaskResults, rank: bool = False) -> list[Entry]:
    """Comparable measured rows (the best first, where they are ranked), lazy rows, other measured ones, published ones.

    Published rows in sessions have a table of their own, :mod:`ifsl_bench.reporting.published_table`. Ranks are among
    all of the task's comparable rows, whichever are shown.
    """
    if rank:
        comparable = [_measured(board, place.row, True, place) for place in board.places]
    else:
        comparable = [_measured(board, row, True) for row in board.rows]
    others = [_measured(board, row, False) for row in board.others]
    papers = [] if board.task.sessions else published_entries(board)
    return [*comparable, *_lazy(board), *others, *papers]


def _measured(board: TaskResults, row: SeedAggregate, comparable: bool, place: Ranked | None = None) -> Entry:
    return Entry(
        board.task,
        comparable,
        row.label,
        row.summary(),
        row.origin,
        seeds=len(row.results),
        spread=row.spread(),
        partial=row.partial,
        place=place,
        measured=row,
        after=row.after(),
    )


def _lazy(board: TaskResults) -> list[Entry]:
    """The rows, in sessions, of models that never answer with a novel class; each is named after a row of its A_0."""
    rows = [(lazy, alike) for lazy, alike in lazy_rows(board.rows) if LAZY not in {row.label for row in alike}]
    entries = []
    for lazy, alike in rows:
        labels = list(dict.fromkeys(row.label for row in alike))
        plainest = min(labels, key=lambda label: "." in label)
        name, note = LAZY if len(rows) == 1 else f"{LAZY} ({plainest})", f"the A_0 of {', '.join(labels)}"
        entries.append(
            Entry(board.task, True, name, lazy.summary(), COMPUTED, seeds=len(lazy.seeds), note=note,
                  after=lazy.after())
        )  # fmt: skip
    return entries


def published_entries(board: TaskResults) -> list[Entry]:
    """The published rows."""
    entries = []
    for paper in board.papers:
        after = [Estimate(value, math.nan) for value in paper.sequence.after] if paper.sequence else ()
        values = {name: Estimate(value, math.nan) for name, value in paper.values.items()}
        printed, marks = paper.values.get("plus_minus_as_printed"), paper.sequence.marks if paper.sequence else ""
        entries.append(Entry(board.task, not paper.protocol, paper.label, values, paper.source, printed=printed,
                             note=paper.remark, after=after, marks=marks))  # fmt: skip
    return entries


@dataclass(frozen=True)
class Heading:
    """The heading of a metric in tables, and which of them have it."""

    text: str  # in all formats but LaTeX in the layout of papers
    paper: str = ""  # there; "" where it has no such column
    short: bool = False  # whether tables without `--full` have it
    paper_short: bool = False  # the same for LaTeX in the layout of papers


# What a terminal without room leaves out, the highest first; what is not here stays.
FEW_SEEDS = " *"
AVERAGE = Heading("Avg.", r"Avg. $\uparrow$", short=True, paper_short=True)  # of sessions, in place of Acc.
IN_SESSIONS = {"acc": AVERAGE, "harmonic": Heading("harmonic", r"harmonic $\uparrow$", short=True)}
DROP = {
    "pd": 10,  # A_0 minus A_T, which stand beside it
    "first": 9,
    "last": 5,
    "gain": 4,
    "base": 3,  # one without the other misleads
    "novel": 3,
    "gacc": 2,
    "harmonic": 1,
    "delta_b": 9,
    "delta_a": 9,
    "state": 8,
    "spread": 7,
    "calibrated_acc": 6,
    "to_best": 5,
    "delta": 2,
}
ENDS = ("first", "last")  # A_0 and A_T, which tables with the accuracy after each session need not have
HEADINGS = {
    "acc": Heading("Acc.", r"Acc. $\uparrow$", short=True, paper_short=True),
    "calibrated_acc": Heading("cal. Acc.", r"cal. Acc. $\uparrow$", short=True),
    "delta": Heading("Delta", r"$\Delta \uparrow$", short=True, paper_short=True),
    "delta_a": Heading("Delta_a", r"$\Delta_a \uparrow$", short=True),
    "delta_b": Heading("Delta_b", r"$\Delta_b \uparrow$", short=True),
    "base_joint": Heading("base joint"),
    "base_alone": Heading("base alone"),
    "novel_joint": Heading("novel joint"),
    "novel_alone": Heading("novel alone"),
    "ausuc": Heading("AUSUC"),
    "calibrated_delta": Heading("cal. Delta"),
    # Of sequences of sessions.
    "first": Heading("A_0", r"$A_0 \uparrow$", short=True, paper_short=True),
    "last": Heading("A_T", r"$A_T \uparrow$", short=True, paper_short=True),
    "pd": Heading("PD", r"PD $\downarrow$", short=True),  # the less the better, unlike what papers print bold
    "gain": Heading("gain", r"gain $\uparrow$", short=True),
    "base": Heading("base", r"base $\uparrow$", short=True),
    "novel": Heading("novel", r"novel $\uparrow$", short=True),
    "harmonic": Heading("harmonic"),  # of episodes too
    "gacc": Heading("gAcc", r"gAcc $\uparrow$", short=True),
    "learned": Heading("just learned"),
    "novel_as_base": Heading("novel as base"),
    "base_as_novel": Heading("base as novel"),
}  # fmt: skip


def task_columns(
    task: Task, full: bool = False, ranked: bool = False, row_metrics: Collection[str] = METRICS
) -> list[Column[Entry]]:
    """The columns of a task's table.

    Args:
        full: also the joint and alone accuracies of base and novel classes, and what weighs one against the other; in
            sessions, the accuracy after each, and every metric.
        ranked: also the rank, and how far each row is from the best.
        row_metrics: the metrics that some row has. Readers are not shown what no row has; programs get it always.
    """
    kind = task.kind
    names = kind.fields if full else [name for name in HEADINGS if name in kind.fields and heading_of(name, task).short]
    metrics = [
        _metric(name, heading_of(name, task).text if kind.shows(name, row_metrics) else None, ranked)
        for name in names
        if not (full and name in ENDS)
    ]
    if task.sessions:
        metrics = [*metrics[:2], *(_after(t, full) for t in range(task.sessions.count + 1)), *metrics[2:]]
    others = kind.fields if task.sessions else BALANCE
    metrics += [_metric(name, None, bold=False) for name in others if name not in names or (full and name in ENDS)]
    about = Column[Entry](
        fields=lambda e: {"variant_of": e.task.variant_of or None, "kind": e.kind, "comparable": e.comparable}
    )
    return [
        Column(fields=lambda entry: {"task": entry.task.name}),
        *((about, Column("rank", rank_of, _rank_fields)) if ranked else ()),
        Column("method", lambda entry: entry.label, lambda entry: {"method": entry.label}, fold=18),
        *metrics,
        *((Column("to the best", _to_best, drop=DROP["to_best"]),) if ranked else ()),
        *((Column("bytes/class", state, lambda entry: {"state_bytes_per_class": rounded(_state_bytes(entry))},
                  drop=DROP["state"]),) if task.sessions else ()),
        Column("seeds", lambda entry: str(entry.seeds or ""), lambda entry: {"seeds": entry.seeds}),
        Column("sd of seeds", lambda entry: "" if math.isnan(entry.spread) else f"{entry.spread:.2f}",
               lambda entry: {"sd_of_seeds": rounded(entry.spread)}, drop=DROP["spread"]),
        _trials(full),
        _source(ranked),
        Column(fields=lambda e: {"partial_data": e.partial,
                                 "novel_seen": e.measured.novel_seen if e.measured else None}),
        *((Column(fields=_to_best_fields),) if ranked else ()),
    ]  # fmt: skip


def plus_minus(value: Estimate | Paired | Difference, sign: str = "") -> str:
    """Mean ± interval with two digits, or the mean alone where there is no interval; "+" shows a mean's sign too."""
    mean = f"{value.mean:{sign}.2f}"
    return mean if math.isnan(value.interval) else f"{mean} ± {value.interval:.2f}"


def rounded(value: float, digits: int = 4) -> float | None:
    """A number for programs, which know no NaN."""
    return None if math.isnan(value) else round(value, digits)


def heading_of(metric: str, task: Task) -> Heading:
    """The heading of a metric in the tables of a task."""
    return IN_SESSIONS.get(metric, HEADINGS[metric]) if task.sessions else HEADINGS[metric]


def _metric(name: str, heading: str | None, bold: bool) -> Column[Entry]:
    """A metric in percent. In regular few-shot learning readers see the accuracy alone, programs the same fields."""

    def text(entry: Entry) -> str:
        if name not in entry.values:
            return ""
        printed = f" ({entry.printed:.2f})" if name == "acc" and entry.printed is not None else ""
        return plus_minus(entry.values[name]) + printed

    def fields(entry: Entry) -> dict[str, float | None]:
        value = entry.values.get(name, Estimate(math.nan, math.nan))
        return {name: rounded(value.mean), f"{name}_interval": rounded(value.interval)}

    def top(entry: Entry) -> bool:
        return bold and name == "acc" and entry.place is not None and entry.place.top

    return Column(heading, text, fields, top, drop=DROP.get(name, 0))


def _after(t: int, shown: bool) -> Column[Entry]:
    """The accuracy after session t."""

    def fields(entry: Entry) -> dict[str, float | None]:
        value = entry.after[t] if entry.after else Estimate(math.nan, math.nan)
        return {f"a_{t}": rounded(value.mean), f"a_{t}_interval": rounded(value.interval)}

    return Column(f"A_{t}" if shown else None, lambda entry: plus_minus(entry.after[t]) if entry.after else "", fields)


def _source(ranked: bool) -> Column[Entry]:
    """The column of a row's source, and whether it stands apart; ``comparable`` has that where rows are ranked."""

    def plain(entry: Entry) -> str:
        marks = f" ({', '.join(entry.marks)})" if entry.marks else ""
        return f"published: {entry.source}{marks}" if entry.kind == "published" else entry.source

    def text(entry: Entry) -> str:
        source = plain(entry) + (", transductive" if entry.measured and entry.measured.transductive else "")
        source += f", keeps {images}" if entry.measured and (images := entry.measured.images_kept) else ""
        if entry.measured and (mark := MARKS[entry.measured.novel_seen]):
            source += f", {mark}"
        if entry.comparable or not (entry.measured or ranked):
            return source
        return f"{source}, {'not comparable' if entry.measured else 'other protocol'}"

    return Column("source", text, lambda entry: {"source": plain(entry) if ranked else text(entry)}, fold=11)


def _trials(shown: bool) -> Column[Entry]:
    """The column of how options were chosen: for programs, and among more columns for readers."""

    def text(entry: Entry) -> str:
        row = entry.measured
        return "" if row is None else f"{row.trials}" + (f", edge: {', '.join(row.edge)}" if row.edge else "")

    def fields(entry: Entry) -> dict[str, str | int | None]:
        row = entry.measured
        if row is None:
            return {"setting": None, "trials": None, "edge": None}
        return {"setting": row.setting, "trials": row.trials, "edge": ", ".join(row.edge)}

    return Column("trials" if shown else None, text, fields, fold=8)


def _to_best(entry: Entry) -> str:
    """Format the difference to the best row.

    A mark that :func:`ifsl_bench.reporting.notes.notes_of_ranks` explains stands where it is over episodes alone.
    """
    if not (entry.place and entry.place.gap):
        return ""
    few = entry.place.common_seeds < 2 and not entry.place.row.single
    return plus_minus(entry.place.gap, "+") + (FEW_SEEDS if few else "")


def rank_of(entry: Entry) -> str:
    """The ranks that a row can have, as text; "-" where it is provisional."""
    if entry.place is None:
        return ""
    return "-" if entry.place.ranks is None else str(entry.place.ranks)


def _rank_fields(entry: Entry) -> dict[str, int | bool | None]:
    ranks = entry.place.ranks if entry.place else None
    return {
        "rank_first": ranks.first if ranks else None,
        "rank_last": ranks.last if ranks else None,
        "provisional": entry.place.provisional if entry.place else None,
    }


def _to_best_fields(entry: Entry) -> dict[str, float | str | None]:
    """The difference to the best row, and what papers print beside their numbers."""
    gap = entry.place.gap if entry.place else None
    return {
        "to_best": rounded(gap.mean) if gap else None,
        "to_best_interval": rounded(gap.interval) if gap else None,
        "common_seeds": entry.place.common_seeds if entry.place else None,
        "plus_minus_as_printed": entry.printed,
        "note": entry.note or None,
    }


def _state_bytes(entry: Entry) -> float:
    """Bytes that a row carries on for each novel class; NaN where nobody knows."""
    known = entry.measured.state_bytes if entry.measured else 0.0 if entry.kind == COMPUTED else None
    return math.nan if known is None else known


def state(entry: Entry) -> str:
    """The bytes that a row carries on for each novel class, as text; "" where nobody knows."""
    return "" if math.isnan(size := _state_bytes(entry)) else f"{size:,.0f}"
