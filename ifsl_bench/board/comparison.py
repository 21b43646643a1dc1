"""Rows of several seeds, and paired comparisons between them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ifsl_bench.board.result_file import Result
from ifsl_bench.common.errors import UserError
from ifsl_bench.protocol.metrics import Estimate, Paired, paired, student_quantile, summarise

PARTIAL = "the data set was made from less than its source should hold, and is marked partial"


@dataclass(frozen=True)
class Row:
    """One method on one task, over its seeds.

    Attributes:
        origin: "stored" for the leaderboard that comes with the package, "yours" for the results folder.
        results: by seed, ascending.
    """

    label: str
    origin: str
    results: tuple[Result, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(r.seed for r in self.results)

    @property
    def partial(self) -> bool:
        """Whether it was measured on a data set made from less than its source should hold."""
        return any(r.partial for r in self.results)

    @property
    def one_pretraining(self) -> bool:
        """Whether several seeds of meta-training start from one backbone: then what they share has no spread."""
        return len(self.results) > 1 and len({str(r.pretraining.get("key")) for r in self.results}) == 1

    def per_episode(self, seeds: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        """Each metric for each episode, [n], in percent, averaged over seeds."""
        chosen = [r.counts().per_episode() for r in self.results if seeds is None or r.seed in seeds]
        return {name: np.mean([values[name] for values in chosen], axis=0) for name in chosen[0]}

    def summary(self) -> dict[str, Estimate]:
        """Mean and 95% interval over episodes of the seeds' average."""
        return summarise(self.per_episode())

    def spread(self, metric: str = "acc") -> float:
        """Standard deviation between the seeds' means (n - 1), NaN for one seed."""
        means = [r.summary[metric]["mean"] for r in self.results]
        return float(np.std(means, ddof=1)) if len(means) > 1 else math.nan


def rows_of(results: Iterable[Result], origin: str) -> tuple[list[Row], list[str]]:
    """Groups results of one task by label, and a remark on each seed that is left out.

    The seeds of a row must come from the same method code, options, task, data and episodes as its newest result.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.label, []).append(result)
    rows, remarks = [], []
    for label, group in groups.items():
        newest = max(group, key=lambda r: str(r.provenance.get("time", "")))
        kept = []
        for result in sorted(group, key=lambda r: r.seed):
            if reason := mismatch(newest, result) or _other_method(newest, result):
                remarks.append(
                    f"left out: seed {result.seed} of {label} ({origin}) does not belong with seed {newest.seed}, "
                    f"which is newer: {reason}; run it again"
                )
            else:
                kept.append(result)
        rows.append(Row(label, origin, tuple(kept)))
    return rows, remarks


def _other_method(a: Result, b: Result) -> str:
    """Why two results of one label are not of the same method; tuned options may differ between seeds."""
    if a.provenance.get("method_source") != b.provenance.get("method_source"):
        return "the method's code differs"
    if a.train != b.train or a.options.keys() != b.options.keys() or (not a.tuned and a.options != b.options):
        return "options or training differ"
    return ""


def mismatch(a: Result, b: Result) -> str:
    """Why two results cannot be compared episode by episode; "" where they can."""
    if a.task != b.task:
        return f"the tasks differ ({a.task} and {b.task})"
    if a.task_hash != b.task_hash:
        return f"the task's definition differs (hash {a.task_hash} and {b.task_hash})"
    if a.fingerprint != b.fingerprint:
        return f"the data differ (fingerprint {a.fingerprint[:12]} and {b.fingerprint[:12]})"
    if a.digest != b.digest:
        n, m = len(a.episodes.base_joint), len(b.episodes.base_joint)
        count = f", {n} and {m} of them" if n != m else ""
        return f"the episodes differ (digest {a.digest[:12]} and {b.digest[:12]}{count})"
    return ""


@dataclass(frozen=True)
class Comparison:
    """A - B on the same episodes.

    Attributes:
        episodes: metric -> paired difference over episodes, holding the trained models fixed.
        seeds: the seeds both have.
        by_seed: metric -> mean difference of each common seed, [len(seeds)].
        by_seed_interval: metric -> mean over seeds and half-width of Student's 95% interval; one seed has none.
        partial: whether the data set is marked partial, which ``notes`` say too.
        notes: what a reader should know.
    """

    a: str
    b: str
    task: str
    count: int
    partial: bool
    episodes: dict[str, Paired]
    seeds: tuple[int, ...]
    by_seed: dict[str, np.ndarray]
    by_seed_interval: dict[str, Estimate]
    notes: tuple[str, ...]

    def overall(self, metric: str) -> Estimate:
        """A - B with a 95% interval over both things that chance has a hand in: the episodes and the training seeds.

        Each of the two intervals holds the other thing fixed. Episodes and seeds are drawn independently, so the errors
        add, and their half-widths do as the sides of a right angle: sqrt(episodes^2 + seeds^2), with 1.96 s / sqrt(n)
        over the paired episodes and Student's quantile over the seed-paired means. Both count what is left over between
        seed and episode, so the sum errs to the wide side; and it excludes zero only where each of the two does. With
        fewer than two common seeds only the episodes are left: a statement on these trained models, not on methods.
        """
        over, seeds = self.episodes[metric], self.by_seed_interval[metric]
        spread = 0.0 if math.isnan(seeds.interval) else seeds.interval
        return Estimate(over.mean, math.hypot(over.interval, spread))


def compare(a: Row, b: Row) -> Comparison:
    """Paired comparison over episodes, and over the seeds that both rows have.

    Raises:
        UserError: the two were not measured on the same episodes; says why.
    """
    if reason := mismatch(a.results[0], b.results[0]):
        raise UserError(f"{a.label!r} and {b.label!r} cannot be compared: {reason}")
    common = tuple(s for s in a.seeds if s in b.seeds)
    ours, theirs = a.per_episode(common or None), b.per_episode(common or None)
    notes = [PARTIAL] if (on_part := a.partial or b.partial) else []
    if common != a.seeds or common != b.seeds:
        used = f"only the common seeds {list(common)} are used" if common else "no seed is common, all are averaged"
        notes.append(f"{a.label} has seeds {list(a.seeds)}, {b.label} has {list(b.seeds)}: {used}")
    by_seed = {}
    for name in ours:
        values = []
        for seed in common:
            left, right = (next(r for r in row.results if r.seed == seed) for row in (a, b))
            values.append(left.summary[name]["mean"] - right.summary[name]["mean"])
        by_seed[name] = np.array(values)
    for seed in common:
        left, right = (next(r for r in row.results if r.seed == seed) for row in (a, b))
        same_key = left.pretraining.get("key") == right.pretraining.get("key")
        if same_key and left.pretraining.get("sha256") != right.pretraining.get("sha256"):
            notes.append(f"seed {seed}: the two start from backbones that were trained separately (another machine?)")
    if len(common) > 1 and a.one_pretraining and b.one_pretraining:
        notes.append("all seeds start from one pretraining: the intervals over seeds hold the backbone fixed")
    return Comparison(
        a.label,
        b.label,
        a.results[0].task,
        len(a.results[0].episodes.base_joint),
        on_part,
        {name: paired(ours[name], theirs[name]) for name in ours},
        common,
        by_seed,
        {name: _over_seeds(values) for name, values in by_seed.items()},
        tuple(notes),
    )


def _over_seeds(values: np.ndarray) -> Estimate:
    n = len(values)
    if n < 2:
        return Estimate(float(values.mean()) if n else math.nan, math.nan)
    return Estimate(float(values.mean()), student_quantile(0.975, n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n))
