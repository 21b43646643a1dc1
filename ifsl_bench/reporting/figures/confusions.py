"""Confusions of classes: which base classes take which novel ones' queries, and the accuracy of each class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ifsl_bench.experiments.evaluate_stage import EvaluationContext
from ifsl_bench.experiments.workspace import Workspace, workspace
from ifsl_bench.protocols.loader import choose_block_size
from ifsl_bench.protocols.metrics import Estimate
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.reporting.columns import format_plus_minus, round_unless_nan
from ifsl_bench.reporting.figures.models import (
    check_trained,
    make_figure_jobs,
    open_trained_model,
    readable_class_names,
)
from ifsl_bench.reporting.figures.style import (
    draw_legend_below,
    estimate_text_height,
    label_rows,
    line_styles,
    make_figure,
    short_names,
    strip_markup,
    with_figure_style,
)
from ifsl_bench.reporting.frames import Frame
from ifsl_bench.reporting.notebook import NameOrNames, as_name_tuple
from ifsl_bench.reporting.table import Column, Table
from ifsl_bench.utils.errors import UserError, escape_controls
from ifsl_bench.utils.threads import limit_evaluation_threads

AnsweredQueries = tuple[np.ndarray, ...]  # of each query: its unit, its class, the class that is answered
DEFAULT_EPISODES = 500
DEFAULT_SEQUENCES = 100  # each has as many queries as a hundred episodes
MAX_CLASS_PAIRS_DRAWN = 12
SEED_0_MODELS_NOTE = "models of seed 0 answer, without a bias on novel logits"


@dataclass(frozen=True)
class ConfusionSums:
    """Counts how often a model answers the queries of each class with each class.

    A unit is a test episode; in sessions it is an order of the classes, with what is answered after the last session.
    In a unit a class has q queries, h of which are answered in a certain way; sums are over units.

    Attributes:
        label: of the method.
        task: name of the task.
        class_names: [R] names of the K base classes, then of the C novel ones.
        n_base_classes: K.
        unit_counts: [R] in how many a class has queries.
        query_sums, query_square_sums: [R] sums of q and q^2.
        answer_sums, answer_query_product_sums, answer_square_sums: [R, R + 2] sums of h, h q and h^2, by the class that
            is answered; in the last two columns any wrong base class, and any wrong novel one.
    """

    label: str
    task: str
    class_names: tuple[str, ...]
    n_base_classes: int
    unit_counts: np.ndarray
    query_sums: np.ndarray
    query_square_sums: np.ndarray
    answer_sums: np.ndarray
    answer_query_product_sums: np.ndarray
    answer_square_sums: np.ndarray

    def answer_share(self, query_class: int, answer: int) -> Estimate:
        """Return the share of a class's queries with an answer, in percent, with the 95% interval over units.

        The interval is of a ratio of two means, which has t s / sqrt(n) where q is always the same, t being
        Student's quantile for n - 1 degrees of freedom: a class may have few units. It is NaN for fewer than two, as
        the mean is for none.

        Args:
            query_class: the class of the queries.
            answer: the class that is answered, or one of the last two columns of ``answers``.
        """
        from scipy.special import stdtrit

        n, q, h = self.unit_counts[query_class], self.query_sums[query_class], self.answer_sums[query_class, answer]
        if n == 0:
            return Estimate(math.nan, math.nan)
        spread = (
            self.answer_square_sums[query_class, answer]
            - 2 * h / q * self.answer_query_product_sums[query_class, answer]
            + (h / q) ** 2 * self.query_square_sums[query_class]
        )
        interval = stdtrit(n - 1, 0.975) * math.sqrt(max(spread, 0.0) * n / (n - 1)) / q if n > 1 else math.nan
        return Estimate(100 * h / q, 100 * interval)

    @property
    def base_shares_of_novel_classes(self) -> np.ndarray:
        """Return for each novel class and base class [C, K] the percentage of queries that the latter takes."""
        queries = np.maximum(self.query_sums[self.n_base_classes :, None], 1)
        return 100 * self.answer_sums[self.n_base_classes :, : self.n_base_classes] / queries


def count_confusions(
    methods: Sequence[str],
    task: str,
    work: Workspace,
    *,
    episodes: int | None = None,
    options: Mapping[str, Any] | None = None,
    train: bool = False,
) -> list[ConfusionSums]:
    """Let the models of methods answer the first test episodes of a task, or sequences; nothing is stored.

    Args:
        methods: their names.
        task: the name of the task.
        work: the workspace.
        episodes: :data:`EPISODES` or :data:`SEQUENCES` by default, or all where these are fewer.
        options: options of the methods.
        train: train what is not there yet, as ``run`` does.

    Raises:
        UserError: a task without base classes, an impossible number, a model that is not trained.
    """
    jobs = make_figure_jobs(methods, task, work.home, options=options)
    kind, most = jobs[0].task, jobs[0].task.evaluation.episodes
    if not kind.has_base:
        raise UserError(f"task {kind.name} has no base classes that could take the queries of novel ones")
    count = (
        min(DEFAULT_SEQUENCES if protocol_of_task(kind).learns_sessions else DEFAULT_EPISODES, most)
        if episodes is None
        else episodes
    )
    if not 1 <= count <= most:
        raise UserError(f"--episodes must be 1 to {most:,} for task {kind.name}, not {count}")
    if not train:  # what is missing is an error before anything is computed
        check_trained(jobs, work.home)
    return [_count_confusions(job.label, open_trained_model(job, work), count, work) for job in jobs]


@torch.no_grad()
@limit_evaluation_threads()
def _count_confusions(label: str, ready: EvaluationContext, episodes: int, work: Workspace) -> ConfusionSums:
    task, dataset, loader = ready.job.task, ready.prepared_task.dataset, ready.loader("test")
    names = *dataset.pool("base/train").class_names, *dataset.pool(task.pool("test", "novel")).class_names
    method, name, parts = ready.method.eval(), ready.job.method_name, []
    size = choose_block_size(loader, method)
    blocks = [(start, min(size, episodes - start)) for start in range(0, episodes, size)]
    with work.reporter.report_stage(f"confusions of {ready.job}", episodes) as stage:
        for answers in loader.predict_joint_label_batches(method, name, blocks):
            parts.append(_flatten_joint_labels(loader.n_base_classes, *answers))
            stage.advance(len(answers[0]))
    return sum_confusions(
        label, task.name, names, loader.n_base_classes, *map(np.concatenate, zip(*parts, strict=True))
    )


def _flatten_joint_labels(
    base: int, unit: torch.Tensor, labels: torch.Tensor, answer: torch.Tensor, drawn: torch.Tensor, there: torch.Tensor
) -> AnsweredQueries:
    """Return joint labels [E, Q], with novel classes by their number in the pool."""
    every = torch.arange(base, device=drawn.device).expand(len(drawn), -1)
    of_pool = torch.cat([every, base + drawn], 1)  # [E, K + N]
    columns = (unit.expand_as(answer), of_pool.gather(1, labels), of_pool.gather(1, answer))
    return tuple(x[there].cpu().numpy() for x in columns)


def sum_confusions(
    label: str, task: str, names: Sequence[str], base: int, unit: np.ndarray, truth: np.ndarray, answered: np.ndarray
) -> ConfusionSums:
    """Return the sums over units.

    Args:
        label: of the method.
        task: its name.
        names: of all classes, base ones first.
        base: how many base classes there are.
        unit: the unit of each query, [queries].
        truth: the class of each query, [queries].
        answered: the class that is answered to each query, [queries].
    """
    classes, columns, wrong = len(names), len(names) + 2, answered != truth
    of_class = unit * classes + truth  # numbers a class of a unit
    every = np.concatenate([of_class * columns + answered, (of_class * columns + classes + (answered >= base))[wrong]])
    (of_class, q), (pairs, h) = (np.unique(numbers, return_counts=True) for numbers in (of_class, every))
    of_pair = q[np.searchsorted(of_class, pairs // columns)]

    def by_class(weights: np.ndarray) -> np.ndarray:
        return np.bincount(of_class % classes, weights, classes)

    def by_pair(weights: np.ndarray) -> np.ndarray:
        return np.bincount(pairs % (classes * columns), weights, classes * columns).reshape(classes, columns)

    sums = by_class(np.ones(len(q))), by_class(q), by_class(q * q), by_pair(h), by_pair(h * of_pair), by_pair(h * h)
    return ConfusionSums(label, task, tuple(names), base, *sums)


def class_accuracy(
    task: str,
    methods: NameOrNames,
    *,
    options: Mapping[str, Any] | None = None,
    episodes: int | None = None,
    train: bool = False,
    work: Workspace | None = None,
) -> Frame:
    """Return the accuracy of each class and what is answered instead, in percent of its queries.

    Novel classes come before base ones, the worst first.

    Args:
        task: the name of the task.
        methods: as :func:`ifsl_bench.run` takes them.
        options: as :func:`ifsl_bench.run` takes them.
        episodes: how many test episodes, from the first, 500 by default; or sequences, 100 by default, whose answers
            after the last session count.
        train: train what is not trained yet.
        work: the workspace; the usual one by default.

    Returns:
        A table for each method, with a row for each class that has queries: ``class``, whether it is ``novel``,
        ``queries``; ``acc``, and the shares answered with a wrong base class, ``as_base``, and with a wrong novel one,
        ``as_novel``; the class that is answered most often in its place, ``taken_by``, and its share, ``taken``.

    Raises:
        UserError: unknown names, a task without base classes, models that are not trained.

    Example:
        >>> frame = ifsl_bench.class_accuracy("glyphs-5shot", "imprint", episodes=20)
        >>> sorted(frame.records()[0])[:3]
        ['acc', 'acc_interval', 'as_base']
    """
    of_methods = count_confusions(
        as_name_tuple(methods), task, work or workspace(), episodes=episodes, options=options, train=train
    )
    return Frame([_class_accuracy_table(of_method) for of_method in of_methods])


def _class_accuracy_table(of_method: ConfusionSums) -> Table[dict[str, Any]]:
    count = len(of_method.class_names)
    names = dict(zip(of_method.class_names, readable_class_names(of_method.class_names), strict=True))
    accuracies = of_method.answer_sums.diagonal() / np.maximum(of_method.query_sums, 1)
    rows = []
    for at in sorted(
        np.flatnonzero(of_method.unit_counts).tolist(), key=lambda at: (at < of_method.n_base_classes, accuracies[at])
    ):
        others = of_method.answer_sums[at, :count].copy()
        others[at] = 0
        taker = int(others.argmax())
        rows.append(
            {
                "class": of_method.class_names[at],
                "novel": at >= of_method.n_base_classes,
                "queries": int(of_method.query_sums[at]),
                "taken_by": of_method.class_names[taker] if others[taker] else None,
                "acc": of_method.answer_share(at, at),
                "as_base": of_method.answer_share(at, count),
                "as_novel": of_method.answer_share(at, count + 1),
                "taken": of_method.answer_share(at, taker),
            }
        )

    def share(name: str, heading: str) -> Column[dict[str, Any]]:
        def fields(row: dict[str, Any]) -> dict[str, float | None]:
            return {name: round_unless_nan(row[name].mean), f"{name}_interval": round_unless_nan(row[name].interval)}

        return Column(heading, lambda row: format_plus_minus(row[name]), fields)

    columns = [
        Column(make_record_fields=lambda row: {"task": of_method.task, "method": of_method.label}),
        Column("class", lambda row: names[row["class"]], lambda row: {"class": row["class"]}),
        Column("novel", lambda row: str(row["novel"]), lambda row: {"novel": row["novel"]}),
        Column("queries", lambda row: str(row["queries"]), lambda row: {"queries": row["queries"]}),
        Column("taken by", lambda row: names.get(row["taken_by"], ""), lambda row: {"taken_by": row["taken_by"]}),
        share("acc", "Acc."),
        share("as_base", "as base"),
        share("as_novel", "as novel"),
        share("taken", "taken"),
    ]
    return Table(columns, rows, f"{of_method.task}, {of_method.label}, in percent of a class's queries")


@with_figure_style()
def draw_confusions(of_methods: Sequence[ConfusionSums], wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw the pairs of a novel and a base class in which the base class takes most of the novel one's queries.

    These are the :data:`MAX_CLASS_PAIRS_DRAWN` with the largest shares, the mean over methods, in the episodes that are
    drawn.
    Bars are 95% intervals over episodes, or orders.

    Args:
        of_methods: the counts of each method.
        wide: two columns of a paper wide.

    Raises:
        UserError: no query of a novel class is answered with a base class.
    """
    first = of_methods[0]
    shares = np.mean([of_method.base_shares_of_novel_classes for of_method in of_methods], 0)
    order = [
        at for at in np.argsort(-shares, None, kind="stable")[:MAX_CLASS_PAIRS_DRAWN].tolist() if shares.flat[at] > 0
    ]
    if not order:
        raise UserError(f"{first.task}: no query of a novel class is answered with a base class")
    pairs = [divmod(at, first.n_base_classes) for at in order]
    names = readable_class_names(first.class_names)
    base, novel = short_names(names[: first.n_base_classes]), short_names(names[first.n_base_classes :])
    labels = [of_method.label for of_method in of_methods]
    looks, apart = line_styles(labels), 0.7 / len(labels)
    figure = make_figure(estimate_text_height(len(pairs), 0.1 + 0.08 * len(labels)), wide)
    axes = figure.add_subplot(xlabel="queries of the novel class (%)", ylim=(len(pairs) - 0.4, -0.6))
    for row, (of_method, look) in enumerate(zip(of_methods, looks, strict=True)):
        values = [of_method.answer_share(of_method.n_base_classes + of, answer) for of, answer in pairs]
        places = [at + (row - (len(labels) - 1) / 2) * apart for at in range(len(pairs))]
        means, intervals = [v.mean for v in values], [v.interval for v in values]
        axes.errorbar(
            means,
            places,
            xerr=intervals,
            **look | {"linestyle": "none"},
            elinewidth=0.8,
            capsize=1.5,
            capthick=0.6,
            label=of_method.label,
        )
    axes.set_xlim(left=0)
    label_rows(axes, [strip_markup(f"{novel[of]} as {base[answer]}") for of, answer in pairs])
    draw_legend_below(figure, [Line2D([], [], **look | {"linestyle": "none"}) for look in looks], labels)
    totals = [_describe_queries_lost_to_base_classes(of_method, pairs) for of_method in of_methods]
    head = f"queries of the novel class that the base class takes, in percent ± 95% interval, by {', '.join(labels)}:"
    return figure, [SEED_0_MODELS_NOTE, *totals, head, *(_name_class_pair(of_methods, *at) for at in pairs)]


def _name_class_pair(of_methods: Sequence[ConfusionSums], of: int, answer: int) -> str:
    first = of_methods[0]
    shares = ", ".join(
        format_plus_minus(of_method.answer_share(of_method.n_base_classes + of, answer)) for of_method in of_methods
    )
    names = readable_class_names(first.class_names)
    return escape_controls(f"  {names[first.n_base_classes + of]} as {names[answer]}: {shares}")


def _describe_queries_lost_to_base_classes(of_method: ConfusionSums, pairs: Sequence[tuple[int, int]]) -> str:
    novel = of_method.query_sums[of_method.n_base_classes :].sum()
    drawn = sum(of_method.answer_sums[of_method.n_base_classes + of, answer] for of, answer in pairs)
    taken = of_method.answer_sums[of_method.n_base_classes :, : of_method.n_base_classes].sum()
    of_pairs = f"; {100 * drawn / taken:.0f}% of these are in the pairs that are drawn" if taken else ""
    return f"{of_method.label}: base classes take {100 * taken / novel:.1f}% of the queries of novel classes{of_pairs}"
