"""Sentences of README.md and docs that compare rows, with the differences that they rest on: ``python docs/claims.py``.

``results/claims.toml`` has the sentences of README.md and docs. Each names pairs of rows, tasks and a metric, and what
it says of every A - B: the differences over episodes and seeds that ranks rest on. What has to
be shown, and what would contradict it, are statements "A - B > c". Holm's procedure tests at once what all claims
assert, at 4.5%, and apart from these what would contradict them, at 0.5%, since in one family each assertion would have
to be shown against all of these too. So with a chance of 95% at least, no verdict "supported", "equivalent" or
"contradicted" is wrong. Two rows are equivalent within m where both A - B > -m and B - A > -m are shown (two one-sided
tests, Schuirmann 1987, J. Pharmacokinetics and Biopharmaceutics 15(6):657): a large p-value is no evidence of that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.comparison import estimate_overall_difference
from ifsl_bench.analysis.grid_variance import INTERVAL_PERCENTILES
from ifsl_bench.analysis.ranking import RANK_ERROR_RATE, Ranking, RowDifference, common_setting, holm_rejections
from ifsl_bench.analysis.recipe_grid import GridVariance, make_recipe_grid
from ifsl_bench.analysis.task_results import (
    ALL_RECIPES,
    TaskResults,
    find_row_or_raise,
    find_row_to_compare_with,
    load_results_by_name,
    select_recipes,
)
from ifsl_bench.protocols.metrics import Estimate
from ifsl_bench.protocols.protocol import Protocol
from ifsl_bench.protocols.registry import title_by_metric
from ifsl_bench.reporting.columns import format_plus_minus
from ifsl_bench.store.result_folder import CLAIMS_FILE, packaged_results_folder
from ifsl_bench.utils.errors import UserError, unknown_name_error
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.text_format import join_or
from ifsl_bench.utils.toml import convert_tables, parse_toml, read_user_file

OPPOSED = RANK_ERROR_RATE / 10  # the part of the chance of a wrong verdict that statements against the claims have
ANY = "*"  # in place of B: every other row that is ranked with A
Statement = tuple[str, str, float]  # A, B, c: A - B > c
Key = tuple[str, str, str, str, float]  # task, metric, and such a statement


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sentence and what it rests on.

    Attributes:
        text: the sentence. ``{0.by:.1f}`` is the first difference in the direction that the sentence says, in points;
            ``{least.by:.0f}`` and ``{most.by:.0f}`` are the smallest and the largest.
        rows: pairs A, B of labels; each pair is compared on each task. B may be ``"*"``; in sessions ``"lazy"`` or
            ``"lazy (ROW)"``, as tables have it.
        recipes: pairs A, B of recipes, compared under each of ``methods`` on each task, in place of ``rows``.
        methods: the classifiers of ``recipes``, or the only ones in the grid of ``shares``: labels without a recipe.
        shares: pairs A, B of sources of variance in a grid of recipes and classifiers, as "recipe" or "test images", or
            a source and a number of percent, in place of ``rows``: A - B in percent of the variance of a single value.
        says: of every A - B. "not told apart" asserts nothing of A and B, only that the data leave it open.
        margin: in points, of "equivalent".
    """

    text: str
    tasks: list[str]
    says: Literal["ahead", "behind", "equivalent", "not told apart"]
    rows: list[tuple[str, str]] = []
    recipes: list[tuple[str, str]] = []
    methods: list[str] = []
    shares: list[tuple[str, str | float]] = []
    metric: str = "acc"
    margin: float = 0.0

    def assertions(self, a: str, b: str) -> list[Statement]:
        """The statements on A and B that have to be shown, all of them."""
        return {
            "ahead": [(a, b, 0.0)],
            "behind": [(b, a, 0.0)],
            "equivalent": [(a, b, -self.margin), (b, a, -self.margin)],
        }.get(self.says, [])

    def refutations(self, a: str, b: str) -> list[Statement]:
        """The statements of which each would contradict it."""
        if self.says == "equivalent":
            return [(a, b, self.margin), (b, a, self.margin)]
        return [statement for statement in ((a, b, 0.0), (b, a, 0.0)) if statement not in self.assertions(a, b)]

    def verdict(self, shown: bool) -> str:
        """The verdict where nothing contradicts the claim, once it has been shown or has not."""
        if self.says == "equivalent":
            return f"equivalent within {self.margin:g}" if shown else "not shown"
        return "supported" if shown and self.says != "not told apart" else "not told apart"


@dataclass(frozen=True)
class Evidence:
    """A - B on one task."""

    a: SeedAggregate
    b: SeedAggregate
    task: str
    difference: RowDifference
    by: float  # the difference in the direction that the claim says
    fixed: str  # what is held fixed; and the backbones, where those of A and B differ

    def p_beyond(self, beyond: float, reverse: bool) -> float:
        """One-sided p-value of the hypothesis that A - B, or B - A, is no larger than a number of points."""
        gap = self.difference
        return replace(gap, mean=(-gap.mean if reverse else gap.mean) - beyond).one_sided_p_value()


@dataclass(frozen=True)
class Source:
    """A source of variance in a grid, in the place of a row; or a number of percent."""

    label: str
    grid: GridVariance
    options_at_edge: tuple[str, ...] = ()  # at the edge of what was tried

    @property
    def protocol(self) -> Protocol:
        """The protocol of the grid."""
        return self.grid.protocol

    @property
    def units(self) -> str:
        """The units that intervals are over."""
        return self.protocol.interval_units_noun

    @property
    def draws(self) -> np.ndarray | float:
        """Draws of its percent of the variance; the number itself."""
        return (
            self.grid.share_by_source[self.label].percent_draws
            if self.label in self.grid.share_by_source
            else float(self.label)
        )

    @property
    def percent(self) -> float:
        """Its percent of the variance; the number itself."""
        return (
            self.grid.share_by_source[self.label].percent_of_total_variance.estimated_value
            if self.label in self.grid.share_by_source
            else float(self.label)
        )


@dataclass(frozen=True)
class ShareEvidence:
    """The percent of the variance that source A explains minus that of B, on one task."""

    a: Source
    b: Source
    task: str
    by: float
    fixed: str

    @property
    def difference(self) -> Estimate:
        """A - B in percent, and how far from it the farther end of the 95% interval is."""
        gap = self.a.percent - self.b.percent
        low, high = np.percentile(self.a.draws - self.b.draws, INTERVAL_PERCENTILES)
        return Estimate(gap, float(max(high - gap, gap - low)))

    def p_beyond(self, beyond: float, reverse: bool) -> float:
        """One-sided p-value of the hypothesis that A - B, or B - A, is no larger than a number of percent."""
        gaps = np.asarray(self.a.draws - self.b.draws) * (-1 if reverse else 1) - beyond
        return float(((gaps <= 0).sum() + 1) / (len(gaps) + 1))


@dataclass(frozen=True)
class EvaluatedClaim:
    """A claim with its evidence."""

    name: str
    claim: Claim
    evidence: list[Evidence] | list[ShareEvidence]
    verdict: str  # "supported", "not told apart" or "contradicted"; "equivalent within m" or "not shown"
    holds: bool  # whether the verdict is what the claim says

    @property
    def text(self) -> str:
        """The sentence with its numbers."""
        least, *_, most = sorted(self.evidence, key=lambda evidence: evidence.by) * 2
        return self.claim.text.format(*self.evidence, least=least, most=most, margin=self.claim.margin)


def read_claims(path: Path) -> dict[str, Claim]:
    """The claims of a file, by their names.

    Raises:
        UserError: it cannot be read, or has an unknown key or a value of another type.
    """
    raw = parse_toml(read_user_file(path, "file of claims"), str(path))
    keys = [field.encode_name for field in msgspec.structs.fields(Claim)]
    claims = convert_tables(raw, dict[str, Claim], str(path), keys)
    for name, claim in claims.items():
        if claim.metric not in title_by_metric():
            raise unknown_name_error("metric", claim.metric, title_by_metric(), where=f"of claim {name}")
        if sum(map(bool, (claim.rows, claim.recipes, claim.shares))) != 1 or (claim.recipes and not claim.methods):
            raise UserError(f"{path}: {name}: a claim is on rows, on recipes under methods, or on shares")
        if (claim.says == "equivalent") != (claim.margin > 0):
            raise UserError(f"{path}: {name}: equivalence needs a margin above 0, and no other claim has one")
    return claims


def evaluate_all(root: Path | None = None) -> list[EvaluatedClaim]:
    """All claims, computed from the stored results.

    Args:
        root: a folder of results whose rows take the place of the stored ones; None for the stored ones alone.

    Raises:
        UserError: a claim on a row or task that is not there.
    """
    claims = read_claims(packaged_results_folder() / CLAIMS_FILE)
    return evaluate(claims, replace(Paths.locate(), results=root or packaged_results_folder()))


def evaluate(claims: Mapping[str, Claim], folders: Paths) -> list[EvaluatedClaim]:
    """Claims with their verdicts, all statements tested at once; boards are those of these folders."""
    boards = {
        task: load_results_by_name(task, folders)
        for task in {name for claim in claims.values() for name in claim.tasks}
    }
    evidence = {name: _evidence(claim, boards) for name, claim in claims.items()}
    asserted, opposed = dict[Key, float](), dict[Key, float]()  # of each statement once, however many claims share it
    for name, claim in claims.items():
        for compared in evidence[name]:
            assertions, refutations = _keys(claim, compared)
            # "Not told apart" needs nothing, and asserts that neither direction can be shown.
            asserted |= {key: _p(compared, key) for key in assertions or refutations}
            opposed |= {key: _p(compared, key) for key in refutations if assertions}
    families = (asserted, RANK_ERROR_RATE - OPPOSED), (opposed, OPPOSED)
    shown = set()
    for p_values, level in families:
        rejected = holm_rejections(np.array(list(p_values.values())), level)
        shown |= {key for key, is_rejected in zip(p_values, rejected, strict=True) if is_rejected}
    return [_evaluated(name, claim, evidence[name], shown) for name, claim in claims.items()]


def _evaluated(
    name: str, claim: Claim, evidence: list[Evidence] | list[ShareEvidence], shown: set[Key]
) -> EvaluatedClaim:
    assertions, refutations = (
        set(chain.from_iterable(keys)) for keys in zip(*(_keys(claim, compared) for compared in evidence), strict=True)
    )
    if refutations & shown:
        return EvaluatedClaim(name, claim, evidence, "contradicted", False)
    holds = assertions <= shown
    return EvaluatedClaim(name, claim, evidence, claim.verdict(holds), holds)


def _keys(claim: Claim, evidence: Evidence | ShareEvidence) -> tuple[list[Key], list[Key]]:
    """The keys of the statements that have to be shown of one difference, and of those that contradict the claim."""
    a, b, at = evidence.a.label, evidence.b.label, (evidence.task, claim.metric)
    if claim.shares:
        at = (evidence.task, f"share of {claim.metric} among {claim.methods or 'all'}")
    return [(*at, *statement) for statement in claim.assertions(a, b)], [
        (*at, *statement) for statement in claim.refutations(a, b)
    ]


def _p(evidence: Evidence | ShareEvidence, key: Key) -> float:
    """One-sided p-value of the hypothesis that a statement is wrong."""
    *_, first, _, beyond = key
    return evidence.p_beyond(beyond, first != evidence.a.label)


def _evidence(claim: Claim, boards: Mapping[str, TaskResults]) -> list[Evidence] | list[ShareEvidence]:
    if claim.shares:
        return [_share(claim, boards[task], a, str(b)) for a, b in claim.shares for task in claim.tasks]
    evidence = []
    for a, b in claim.recipes:
        for method in claim.methods:
            for task in claim.tasks:
                (board,) = select_recipes([boards[task]], [a, b])
                labels = {row.recipe: row.label for row in board.rows if row.label_without_recipe == method}
                if missing := [recipe for recipe in (a, b) if recipe not in labels]:
                    raise UserError(f"there is no row of {method} on {task} under the recipe {missing[0]}")
                first, second = (find_row_or_raise(board, labels[recipe]) for recipe in (a, b))
                evidence.append(_compared(claim, board, first, second))
    for a, b in claim.rows:
        for task in claim.tasks:
            board = boards[task]
            first = find_row_or_raise(board, a)
            family = Ranking(board.comparable_rows, claim.metric, common_setting(first)).family
            rivals = family if b == ANY else [find_row_to_compare_with(board, b, a)]
            evidence += [_compared(claim, board, first, rival) for rival in rivals if rival is not first]
    return evidence


def _share(claim: Claim, task_results: TaskResults, a: str, b: str) -> ShareEvidence:
    """The share of source A minus that of source B, or minus a number of percent."""
    every = task_results.select_recipes([ALL_RECIPES])
    grid = make_recipe_grid(every.select_labels(claim.methods) if claim.methods else every, claim.metric)
    split = grid.variance_splits[0]
    for source in (a, b):
        if source not in split.share_by_source and not (source == b and source.replace(".", "", 1).isdigit()):
            where = f"of the variance on {task_results.task_name}"
            raise unknown_name_error("source", source, split.share_by_source, where=where)
    first, second = Source(a, split), Source(b, split)
    gap = first.percent - second.percent
    images = "" if "test images" in split.share_by_source else ", test images"
    fixed = f"recipes, classifiers, base and novel classes{images}"
    return ShareEvidence(first, second, task_results.task_name, -gap if claim.says == "behind" else gap, fixed)


def _compared(claim: Claim, board: TaskResults, a: SeedAggregate, b: SeedAggregate) -> Evidence:
    if {id(a), id(b)} & set(map(id, board.hidden_rows)):
        board = board.select_recipes([row.recipe for row in (a, b) if row.recipe])
    gap = estimate_overall_difference(a, b, board.comparable_rows, claim.metric)
    held = {"test images": gap.images_fixed, "trained models": gap.models_fixed}
    fixed = ["novel classes", *(name for name, is_fixed in held.items() if is_fixed)]
    fixed += ["backbone"] if a.has_one_pretraining and b.has_one_pretraining else []
    fixed_text = ", ".join(fixed) + ("" if _backbones(a) == _backbones(b) else "; backbones differ")
    return Evidence(a, b, board.task_name, gap, -gap.mean if claim.says == "behind" else gap.mean, fixed_text)


def _backbones(row: SeedAggregate) -> set[str]:
    """The names of the row's backbones, whatever the seed; pretrainings have keys like NAME-seed0-DIGEST.

    A head on the features of another pretraining has the backbone of that.
    """
    pretrainings = (result.pretraining for result in row.results)
    return {str(about.get("features", about.get("key"))).rpartition("-seed")[0] for about in pretrainings}


def heading_of_claim(claim: EvaluatedClaim) -> str:
    """The heading of the metric that a claim is on: in sessions alone, Acc. is an average."""
    metric = claim.claim.metric
    if claim.claim.shares:
        return f"percent of the variance of {claim.evidence[0].a.protocol.metric_column(metric).title}"
    of_rows = {evidence.a.protocol.metric_column(metric).title for evidence in claim.evidence}
    return of_rows.pop() if len(of_rows) == 1 else title_by_metric()[metric]


def edges_of(claim: EvaluatedClaim) -> str:
    """The options of a claim's rows that were chosen at the edge of what was tried, in words."""
    rows = {row.label: row.options_at_edge for e in claim.evidence for row in (e.a, e.b) if row.options_at_edge}
    return "; ".join(f"{label}: {', '.join(options)}" for label, options in sorted(rows.items()))


def summary(claims: Collection[EvaluatedClaim]) -> str:
    """Return how many claims there are, how many hold, and what the verdicts rest on."""
    holding = sum(claim.holds for claim in claims)
    units = join_or(evidence.a.interval_units_noun for claim in claims for evidence in claim.evidence)
    return (
        f"{holding} of {len(claims)} claims hold. A - B: points, with 95% interval over {units} and seeds. Verdicts: "
        f"all claims at once, by Holm's procedure at {RANK_ERROR_RATE:.0%}."
    )


def lines_of(claim: EvaluatedClaim) -> list[str]:
    """Return a claim in lines: its verdict and sentence, each difference, and options at the edge."""
    lines = [f"{claim.name}: {claim.verdict}", claim.text]
    heading = heading_of_claim(claim)
    for evidence in claim.evidence:
        gap = format_plus_minus(evidence.difference, "+")
        lines.append(
            f"  {evidence.task}: {evidence.a.label} - {evidence.b.label}: {gap} {heading}; held fixed: {evidence.fixed}"
        )
    if edge := edges_of(claim):
        lines.append(f"  chosen at the edge of what was tried: {edge}")
    return lines


def main() -> int:
    """Print the claims; return 1 if one does not hold, 2 if there is none of a name."""
    parser = argparse.ArgumentParser(description="Compute what README and docs say of the stored rows.")
    parser.add_argument("names", nargs="*", help="[all claims]")
    parser.add_argument("--results", type=Path, help="take the rows of this folder in place of the stored ones")
    options = parser.parse_args()
    claims = {claim.name: claim for claim in evaluate_all(options.results)}
    if odd := [name for name in options.names if name not in claims]:
        print(unknown_name_error("claim", odd[0], claims, see="python docs/claims.py"), file=sys.stderr)
        return 2
    shown = [claims[name] for name in options.names or claims]
    for claim in shown:
        print("\n".join(lines_of(claim)), end="\n\n")
    print(summary(shown))
    return int(not all(claim.holds for claim in shown))


if __name__ == "__main__":
    sys.exit(main())
