"""What stands in words under a task's table. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ifsl_bench.board.boards import Board
from ifsl_bench.board.comparison import compare, p_value
from ifsl_bench.board.measured import PARTIAL
from ifsl_bench.board.ranking import Ranked


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
    notes += [f"{paper.label} ({paper.source}): {paper.said}." for paper in board.papers if paper.said]
    return notes + [f"{remark}." for remark in board.remarks]


def few_seeds(places: Sequence[Ranked]) -> list[str]:
    """A line on the rows whose comparison with the best says nothing of other training seeds."""
    few = [f"{p.row.label} ({p.row.origin})" for p in places if p.gap is not None and p.common_seeds < 2]
    if not few:
        return []
    return [f"Fewer than two training seeds in common with the best row: {', '.join(few)}. There the comparison is of "
            f"these trained models, not of the methods."]  # fmt: skip


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
            f"{over.mean:+.2f} ± {over.interval:.2f} points, p {p_value(over.p)}{seeds}"
        )
    return lines
