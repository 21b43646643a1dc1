"""How the inner solves of a result went. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

EVALUATION = "evaluation"
# What is counted, of which episodes, and what happened in them. All but the last are under training.solves.
KINDS = {
    "adjoint_diverged": ("adjoint_episodes", "the series for the gradient grew, and what it tends to took its place"),
    "adjoint_indefinite": ("adjoint_episodes", "the solve stopped at a saddle, where the gradient is no minimum's"),
    "adjoint_failed": ("adjoint_episodes", "the linear solve for the gradient missed its tolerance"),
    "unconverged": ("episodes", "the inner solve did not converge"),
    EVALUATION: ("", "the inner solve did not converge"),
}
Counted = Mapping[str, tuple[int, int]]  # kind -> in how many episodes, of how many


def odd_solves(solves: Any) -> str:
    """Why tables cannot say how the solves of meta-training went; "" where they can, or where nothing is said."""
    if not isinstance(solves, dict):
        return "is not an object"
    for kind, (total, _) in KINDS.items():
        if kind in solves:
            for name in (kind, total):
                if type(solves.get(name)) is not int:
                    return f"has no whole number {name}"
            if not 0 <= solves[kind] <= solves[total] < 1 << 63:
                return f"has {kind} in other episodes than the {total}"
    return ""


def counted(solves: Mapping[str, int], statistics: Mapping[str, Mapping[str, float]], episodes: int) -> Counted:
    """Of one seed: what meta-training says of its solves, and the statistics of so many test episodes."""
    found = {kind: (solves[kind], solves[total]) for kind, (total, _) in KINDS.items() if kind in solves}
    if told := statistics.get("solver_unconverged"):
        failed = told.get("total", 0.0) + told.get("not_finite", 0.0)
        found[EVALUATION] = int(min(max(failed, 0), episodes)), episodes
    return found


def over_seeds(seeds: Iterable[Counted]) -> Counted:
    """Of all seeds; of a kind that not all say, of those that do."""
    each = [*seeds]
    return {
        kind: (sum(one[kind][0] for one in each if kind in one), sum(one[kind][1] for one in each if kind in one))
        for kind in KINDS
        if any(kind in one for one in each)
    }


def solve_notes(rows: Mapping[str, Counted]) -> list[str]:
    """What a reader of these rows should know of their solves, a line for each kind of thing that happened.

    Args:
        rows: what rows are called -> counts over their seeds.
    """
    notes = []
    for kind, (_, happened) in KINDS.items():
        told = [(name, *solves[kind]) for name, solves in rows.items() if solves.get(kind, (0, 0))[0]]
        if told:
            which = ", ".join(f"{name} in {count:,} of {total:,}" for name, count, total in told)
            stage = "test episodes" if kind == EVALUATION else "episodes of meta-training, over all seeds"
            notes.append(f"{happened[0].upper()}{happened[1:]}: {which} {stage}.")
    return notes
