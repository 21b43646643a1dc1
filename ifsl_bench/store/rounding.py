"""Explains differences between two measurements of one job by another processor's rounding.

Processors round differently. Where nothing is trained anew, that moves the few queries whose logits nearly tie, up as
often as down. A training carries rounding on over thousands of steps, and ends about as far away as another seed does.
docs/releases.md has the rule and what it was seen to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ifsl_bench.protocols.metrics import COUNTS, MORE_COUNTS
from ifsl_bench.store.schema import Result

HITS = "hits"  # of sequences of sessions
SHARE = 0.1  # of the episodes that rounding may give other counts
CHOICE = 1.0  # points of calibrated accuracy that a bias from other validation hits may cost or gain
LEVEL = 0.05  # of all counts of a result together
NAMES = dict(zip((*COUNTS, *MORE_COUNTS), ("base joint", "base alone", "novel joint", "novel alone", "AUSUC",
                                           "calibrated base", "calibrated novel"), strict=True))  # fmt: skip
NAMES |= {HITS: "right answers"}


@dataclass(frozen=True)
class Change:
    """One of the counts, now minus stored."""

    name: str
    episodes: int  # in how many of them it differs
    points: float  # the mean difference, in percentage points
    interval: float  # half-width of the paired interval over episodes, at LEVEL for all counts of a result at once
    hits: int  # the sum of the differences

    @property
    def line(self) -> str:
        return f"{NAMES[self.name]}: {self.episodes:,} episodes, {self.points:+.3f} ± {self.interval:.3f} points"


def changes(stored: Result, rerun: Result) -> dict[str, Change]:
    """Compares all counts that two results on the same episodes have in common."""
    then, now = _arrays(stored), _arrays(rerun)
    if HITS in then.columns():
        then_hits, now_hits = (counts.hits.sum(1, dtype=np.int64) for counts in (then, now))
        return {HITS: _change(HITS, now_hits - then_hits, 100 / _asked(stored), 1)}
    base, novel = then.base_queries, then.novel_queries
    most = {"base": base, "novel": novel, "pairs": 2 * base * novel}
    sides = {name: most[name.removeprefix("calibrated_").partition("_")[0]] for name in NAMES if name != HITS}
    columns = {name: (getattr(now, name), getattr(then, name)) for name, side in sides.items() if side}
    gaps = {
        name: np.asarray(after, np.int64) - np.asarray(before, np.int64)
        for name, (after, before) in columns.items()
        if after is not None and before is not None
    }
    return {name: _change(name, gap, 100 / sides[name], len(gaps)) for name, gap in gaps.items()}


def _arrays(result: Result) -> Any:
    return result.counts()


def _asked(result: Result) -> float:
    """The number of queries of a sequence in all sessions together, on average."""
    return float(_arrays(result).queries.astype(np.int64).cumsum(1).sum(1).mean())


def _percent(result: Result, name: str) -> float:
    """The mean of a count, in per cent of its queries."""
    if HITS in result.counts().columns():
        return 100 * float(_arrays(result).hits.sum(1, dtype=np.int64).mean()) / _asked(result)
    return float(result.counts().value(name).mean())


def _change(name: str, gap: np.ndarray, scale: float, counts: int) -> Change:
    """One of so many counts: the differences of hits [n], a hit being so many points."""
    from scipy.special import stdtrit

    half = 0.0
    if gap.any():
        n = len(gap)
        wide = float(stdtrit(n - 1, 1 - LEVEL / (2 * counts))) if n > 1 else math.inf
        half = wide * scale * float(np.std(gap, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return Change(name, int(np.count_nonzero(gap)), scale * float(gap.mean()), half, int(gap.sum()))


def retrained(stored: Result, rerun: Result) -> str:
    """Names what was trained anew, so that rounding went through a training; "" where nothing was."""
    if stored.pretraining.get("sha256") != rerun.pretraining.get("sha256"):
        return "a backbone that was trained anew"
    return "meta-training" if rerun.training else ""


def unexplained(stored: Result, rerun: Result, seeds: Sequence[Result]) -> tuple[str, ...]:
    """Lists what another processor does not explain, for one job on the same episodes, a phrase each.

    Args:
        seeds: the stored results of the row that ``stored`` is of, one for each training seed.
    """
    if all(stored.provenance.get(name) == rerun.provenance.get(name) for name in ("device", "libraries")):
        return ("on the same device with the same libraries nothing differs",)
    moved = changes(stored, rerun)
    anew, chosen_anew = bool(retrained(stored, rerun)), (stored.options, stored.train) != (rerun.options, rerun.train)
    why = _choice(stored, rerun, anew) if chosen_anew else ()
    if anew:
        return (*why, *_training(moved, seeds))
    return tuple(why if chosen_anew else _rounding(moved, stored))


def _choice(stored: Result, rerun: Result, anew: bool) -> Iterator[str]:
    """Settings that nearly tie on validation episodes change places; each then does on the test as it did before."""
    then, now = stored.choice, rerun.choice
    if then is None or now is None or [*map(list, stored.tuned.values())] != [*map(list, rerun.tuned.values())]:
        yield "the options are others, and not by a choice among the same settings"
        return
    if anew:
        if now.chosen not in {then.chosen, *then.winners}:
            yield "no other validation episodes would have chosen these options"
        return
    joint = [np.add(choice.hits["base_joint"], choice.hits["novel_joint"]) for choice in (then, now)]
    moved, gap = int(np.abs(joint[1] - joint[0]).max()), int(joint[0][then.chosen] - joint[0][now.chosen])
    if gap > 2 * moved:
        yield f"the options were {gap} validation hits behind, and rounding moved no setting's by more than {moved}"
    if now.chosen in then.rivals:
        place, counts = 1 + then.rivals.index(now.chosen), rerun.counts()
        for name in COUNTS:
            hits = int(getattr(counts, name)[: then.test_episodes].sum()) - then.test_hits[name][place]
            if abs(hits) > _flips(then.test_episodes):
                yield f"{NAMES[name]} has {hits:+,} hits against the same setting's in the stored result"


def _flips(episodes: int) -> float:
    """Bounds how far flips in :data:`SHARE` of the episodes move a sum, at :data:`LEVEL` for all counts together."""
    from scipy.special import ndtri

    return float(ndtri(1 - LEVEL / (2 * len(COUNTS)))) * math.sqrt(SHARE * episodes)


def _rounding(moved: dict[str, Change], stored: Result) -> Iterator[str]:
    calibrated = [change for name, change in moved.items() if name.startswith("calibrated")]
    for change in moved.values():
        if change in calibrated:
            continue
        if change.episodes > SHARE * len(stored.episodes):
            yield f"{NAMES[change.name]} differs in more than {100 * SHARE:g}% of the episodes"
        elif abs(change.points) > change.interval:
            yield f"{NAMES[change.name]} goes to one side"
    if calibrated:  # the bias is chosen from validation hits, and moves where some of them do
        queries = sum(stored.episodes.shape.values())
        points = 100 * sum(change.hits for change in calibrated) / (queries * len(stored.episodes))
        if abs(points) > CHOICE:
            yield f"calibrated Acc. moves by {points:+.2f} points, more than another choice of the bias does"


def _training(moved: dict[str, Change], seeds: Sequence[Result]) -> Iterator[str]:
    """Two trainings of one job differ as two seeds do: by sqrt(2) of their standard deviation, which few seeds know."""
    from scipy.special import stdtrit

    if len(seeds) < 2:
        yield "one stored seed does not say how far another training ends"
        return
    names = [name for name in (*COUNTS, HITS) if name in moved]
    wide = float(stdtrit(len(seeds) - 1, 1 - LEVEL / (2 * len(names)))) * math.sqrt(2)
    for name in names:
        spread = float(np.std([_percent(result, name) for result in seeds], ddof=1))
        if abs(moved[name].points) > wide * spread + moved[name].interval:
            yield f"{NAMES[name]} is further away than other seeds are (± {wide * spread:.2f} points)"
