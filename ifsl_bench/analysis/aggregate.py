"""Measured rows of tables: one method on one task, aggregated over its seeds. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ifsl_bench.plugin.display_names import LAZY_ROW_LABEL, display_name_of_label, parse_label
from ifsl_bench.plugin.method_source import is_same_method
from ifsl_bench.protocols.calibration import RESAMPLE_COUNT
from ifsl_bench.protocols.image_counts import ImageHits
from ifsl_bench.protocols.metrics import Estimate, HitCounts, mean_with_interval
from ifsl_bench.protocols.protocol import Protocol
from ifsl_bench.protocols.tasks.contamination import SEEN_LEVELS
from ifsl_bench.store.result_folder import LEFT_OUT_PREFIX, reason_not_to_pair
from ifsl_bench.store.schema import SOLVES_KEY_OF_FAILURE, Result

PAPER, EVERY = "paper", "every"  # settings: the method as published, and what is the same in all of them
COMPUTED_ORIGIN = "computed"  # the origin of lazy rows, which follow from the A_0 of other rows
STORED, FILE = "stored", "file"  # origins: rows that come with the package, and a result file by itself
PARTIAL_DATA_NOTE = "the data set was made from less than its source should hold, and is marked partial"


@dataclass(frozen=True, eq=False)
class SeedAggregate:
    """One method on one task, over its seeds; equal to itself alone.

    Attributes:
        label: of the row.
        results_origin: "stored" for the leaderboard that comes with the package, "yours" for the results folder,
            "file" for a result file that was named.
        results: by seed, ascending.
    """

    label: str
    results_origin: str
    results: tuple[Result, ...]

    @property
    def display_name(self) -> str:
        """Its name in tables: the label, and where it has one the recipe behind a bar, as in "ncm | closer"."""
        return display_name_of_label(self.label)

    @property
    def name_with_origin(self) -> str:
        """Its name in tables with its origin: "lr (stored)"; commands take both."""
        return f"{self.display_name} ({self.results_origin})"

    @property
    def label_with_origin(self) -> str:
        """Its label with its origin, which commands take too."""
        return f"{self.label} ({self.results_origin})"

    @property
    def label_without_recipe(self) -> str:
        """The label that it has under the task's own recipe."""
        return parse_label(self.label).without_recipe

    @property
    def has_other_recipe(self) -> bool:
        """Whether a run chose another recipe than the task's own to train the backbone, which the label has."""
        return bool(parse_label(self.label).recipe)

    @property
    def recipe(self) -> str | None:
        """The recipe that trained the backbone; None where it was not trained on the task's images."""
        return parse_label(self.label).recipe or self.results[0].recipe

    @property
    def knows_number_of_classes(self) -> bool:
        """Whether that recipe is given the number of novel classes to come."""
        return any(r.pretraining.get("knows_classes") is True for r in self.results)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(r.seed for r in self.results)

    @property
    def is_partial(self) -> bool:
        """Whether it was measured on a data set made from less than its source should hold."""
        return any(r.partial for r in self.results)

    @property
    def is_transductive(self) -> bool:
        """Whether the method uses an episode's other queries, which others must not."""
        return any(r.transductive for r in self.results)

    @property
    def method_flags(self) -> tuple[str, ...]:
        """What the method says of itself, in a few words each, such as what it changes in the network."""
        return tuple(dict.fromkeys(flag for r in self.results for flag in r.flags))

    @property
    def protocol(self) -> Protocol:
        """The protocol that it was measured by."""
        return self.results[0].protocol

    @property
    def interval_units_noun(self) -> str:
        """The unit that its intervals are over."""
        return self.protocol.interval_units_noun

    @property
    def has_single_interval_unit(self) -> bool:
        """Whether it has one episode, or one order, so that nothing is known of the spread of others."""
        return self._hit_counts_by_seed[0].n_interval_units == 1

    @property
    def images_kept_by_method(self) -> str:
        """The images of earlier sessions that the method keeps: "supports", "all images", or ""."""
        of_seeds = {r.episodes.images_kept for r in self.results}
        return max(of_seeds, key=("", "supports", "all images").index)

    @property
    def state_bytes_per_class(self) -> float | None:
        """Bytes that a method carries on for each novel class, from session to session; None in episodes."""
        return self._hit_counts_by_seed[0].state_bytes_per_class

    @property
    def novel_classes_seen(self) -> str:
        """Whether the backbone has seen the novel classes elsewhere, one of :data:`SEEN_LEVELS`."""
        states = (str(r.pretraining.get("seen", SEEN_LEVELS[0])) for r in self.results)
        return max((state if state in SEEN_LEVELS else "may" for state in states), key=SEEN_LEVELS.index)

    @property
    def has_one_pretraining(self) -> bool:
        """Whether its seeds of meta-training start from one backbone, whose spread is then not in theirs."""
        return len(self.results) > 1 and len({str(r.pretraining.get("key")) for r in self.results}) == 1

    @cached_property
    def solve_failures(self) -> SolveFailures:
        """Failures of inner solves, summed over the seeds that record them."""
        sums: dict[str, tuple[int, int]] = {}
        for result in self.results:
            for kind, (count, total) in count_solve_failures(result).items():
                before = sums.get(kind, (0, 0))
                sums[kind] = before[0] + count, before[1] + total
        return sums

    @property
    def has_replaced_gradient(self) -> bool:
        """Whether the training of a seed had another gradient than the row's in most of its episodes."""
        replaced = (count_solve_failures(r).get("adjoint_diverged", (0, 0)) for r in self.results)
        return any(2 * count > total for count, total in replaced)

    @property
    def is_seed_independent(self) -> bool:
        """Whether all seeds are the same by construction: one backbone, and nothing meta-trained on it."""
        backbones = {str(r.pretraining.get("sha256")) for r in self.results}
        return self.has_one_pretraining and len(backbones) == 1 and not any(r.training for r in self.results)

    @property
    def ranking_setting(self) -> str:
        """The setting that it is ranked with, see :attr:`Result.setting`."""
        return self.results[0].setting

    @property
    def n_trials(self) -> int:
        """The number of settings that were tried to choose from; 1 where nothing was chosen."""
        return max([1, *(len(tried) for r in self.results for tried in r.tuned.values())])

    @property
    def options_at_edge(self) -> list[str]:
        """The options whose chosen value is the smallest or the largest that was tried, for some seed."""
        return sorted({name for r in self.results for name in r.edge})

    @property
    def has_changed_options(self) -> bool:
        """Whether the user changed the method's options or training, which the label has after a dot."""
        return "." in self.label_without_recipe.removeprefix(self.results[0].method)

    @cached_property
    def _hit_counts_by_seed(self) -> tuple[HitCounts, ...]:
        """Counts by seed. Metrics are computed on demand: of many episodes each takes 8 times the memory."""
        return tuple(r.to_hit_counts().to_smallest_dtypes() for r in self.results)

    @property
    def interval_quantile(self) -> float:
        """The quantile for 95% intervals over its episodes, or over the orders of its sequences."""
        return self._hit_counts_by_seed[0].interval_quantile

    @cached_property
    def _resampled_counts(self) -> tuple[HitCounts | None, ...]:
        """Counts by seed with the choices that resamples of the validation episodes would have made."""
        both = zip(self.results, self._hit_counts_by_seed, strict=True)
        return tuple(self.protocol.resampled_counts(counts, r.calibration, r.choice) for r, counts in both)

    @property
    def lacks_bias_resamples(self) -> bool:
        """Whether its intervals hold a bias fixed, as older results do."""
        return any(r.calibration and not r.calibration.resampled_base for r in self.results)

    @property
    def lacks_choice_resamples(self) -> bool:
        """Whether its intervals hold a choice on validation episodes fixed, as older results do."""
        unrecorded = self.lacks_bias_resamples or any(r.tuned and not r.choice for r in self.results)
        return unrecorded and "choices" in self.protocol.figures_and_tables

    def metric_by_resample(self, metric: str, seeds: Sequence[int] | None = None) -> np.ndarray:
        """Return a metric with the choices of each resample of the validation episodes, [RESAMPLES], in percent.

        It is averaged over seeds, and for variances: where nothing was chosen or recorded, it is 0.

        Args:
            metric: its name.
            seeds: only these; by default all.
        """

        def value(result: Result, counts: HitCounts | None) -> np.ndarray:
            moved = self.protocol.metric_of_resampled_counts(metric, self.includes_bias(result))
            return counts.metric_by_unit(moved) if counts is not None and moved else np.zeros(RESAMPLE_COUNT)

        both = zip(self.results, self._resampled_counts, strict=True)
        values = [value(result, counts) for result, counts in both if seeds is None or result.seed in seeds]
        return np.mean(values, axis=0) if values else np.zeros(RESAMPLE_COUNT)

    @cached_property
    def image_hits(self) -> tuple[ImageHits | None, ...]:
        """The hits of single test images by seed; None where a result does not record them."""
        return tuple(result.images.to_image_hits() if result.images else None for result in self.results)

    def image_weights(self, metric: str, seed: int) -> dict[str, dict[str, float]] | None:
        """Return how a metric is made of hits of images, see :meth:`.HitCounts.image_weights_of_metric`.

        Args:
            metric: its name.
            seed: of its seeds.
        """
        return self._hit_counts_by_seed[self.seeds.index(seed)].image_weights_of_metric(metric)

    def includes_bias(self, result: Result) -> bool:
        """Return whether the bias of one of its seeds is part of all its numbers."""
        return result.includes_bias

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that the results of all seeds have."""
        first, *rest = (counts.metrics for counts in self._hit_counts_by_seed)
        return tuple(name for name in first if all(name in names for names in rest))

    def metric_by_seed(self, metric: str, seeds: Sequence[int] | None = None) -> np.ndarray:
        """Return a metric for each seed and episode, [seeds, n], in percent.

        Args:
            metric: its name.
            seeds: only these; by default all.
        """
        of_seeds = [
            c for c, seed in zip(self._hit_counts_by_seed, self.seeds, strict=True) if seeds is None or seed in seeds
        ]
        values = [counts.metric_by_unit(metric) for counts in of_seeds]
        return np.stack(values) if values else np.empty((0, len(self._hit_counts_by_seed[0].metric_by_unit(metric))))

    def metrics_by_episode(self, seeds: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        """Return each metric for each episode, [n], in percent, averaged over seeds.

        Args:
            seeds: only these; by default all.
        """
        return {name: self.metric_by_seed(name, seeds).mean(0) for name in self.metric_names}

    def summarise_metrics(self) -> dict[str, Estimate]:
        """Return means and 95% intervals over episodes of the seeds' average, with the uncertainty of choices."""
        values = self.metrics_by_episode().items()
        return {
            name: mean_with_interval(
                of_metric, variance_from_choices(self.metric_by_resample(name)), self.interval_quantile
            )
            for name, of_metric in values
        }

    def metric_by_sequence(self, metric: str, seeds: Sequence[int]) -> np.ndarray:
        """Return a metric in sessions for each seed, order and support set, [seeds, orders, supports].

        Args:
            metric: its name.
            seeds: only these.
        """
        counts = [c for c, s in zip(self._hit_counts_by_seed, self.seeds, strict=True) if s in seeds]
        whole = len(counts[0]) // counts[0].supports * counts[0].supports  # the last order may lack support sets
        values = np.stack([c.metric_by_sequence(metric) for c in counts])
        return values[:, :whole].reshape(len(counts), -1, counts[0].supports)

    def metric_after_sessions(self, metric: str = "acc") -> list[Estimate]:
        """Return a metric after each session: mean and 95% interval over the orders, of the seeds' average.

        The intervals have the uncertainty of the bias where it is known. Empty in episodes.

        Args:
            metric: one of :data:`~ifsl_bench.protocols.session_metrics.METRIC_NAMES_AFTER_SESSION`.
        """
        over_orders = self.metric_after_sessions_by_order(metric)
        biases = [
            counts.metric_after_sessions(metric)
            for result, counts in zip(self.results, self._resampled_counts, strict=True)
            if counts is not None
            and self.protocol.metric_of_resampled_counts(metric, self.includes_bias(result)) == metric
        ]  # [seeds with a bias, RESAMPLES, T + 1]
        of_seeds = (
            np.sum(biases, axis=0) / len(self.results) if biases else np.zeros((RESAMPLE_COUNT, over_orders.shape[1]))
        )
        pairs = zip(over_orders.T, of_seeds.T, strict=True)
        return [
            mean_with_interval(of_orders, variance_from_choices(of_bias), self.interval_quantile)
            for of_orders, of_bias in pairs
        ]

    def metric_after_sessions_by_order(self, metric: str = "acc") -> np.ndarray:
        """Return a metric after each session for each order, [orders, T + 1]; [n, 0] in episodes."""
        return np.mean(
            [counts.average_within_units(counts.metric_after_sessions(metric)) for counts in self._hit_counts_by_seed],
            axis=0,
        )

    def accuracy_triangle(self) -> np.ndarray:
        """Return the accuracy after session t on the classes of session g, [T + 1, T + 1], NaN for g > t."""
        return np.mean([counts.accuracy_triangle().mean(0) for counts in self._hit_counts_by_seed], axis=0)

    def sd_of_seeds(self, metric: str = "acc") -> float:
        """Return the standard deviation between the seeds' means (n - 1), NaN for one seed."""
        means = [r.summary[metric]["mean"] for r in self.results]
        return float(np.std(means, ddof=1)) if len(means) > 1 else math.nan


class BaseOnlyAggregate(SeedAggregate):
    """The model with the A_0 of a row in sessions which never answers with a novel class."""

    @property
    def name_with_origin(self) -> str:
        """Its label, as in tables."""
        return self.label

    label_with_origin = name_with_origin

    @property
    def options_at_edge(self) -> list[str]:
        """The options at an edge: none, as none matters to it."""
        return []

    @cached_property
    def _hit_counts_by_seed(self) -> tuple[HitCounts, ...]:
        return tuple(r.to_hit_counts().base_only_counts().to_smallest_dtypes() for r in self.results)

    def image_weights(self, metric: str, seed: int) -> dict[str, dict[str, float]] | None:
        """Return the weights of image hits in a metric: those of base images in session 0 alone.

        Args:
            metric: a metric of the row.
            seed: of the result whose hits are weighted.
        """
        weights = super().image_weights(metric, seed)
        return weights and {"base": {"first": sum(weights.get("base", {}).values())}}

    @cached_property
    def _resampled_counts(self) -> tuple[HitCounts | None, ...]:
        """The counts of resampled biases: none, as no bias moves it."""
        return (None,) * len(self.results)


class NovelBiasAggregate(SeedAggregate):
    """A row in sessions with one bias on all novel logits, where one was chosen."""

    def image_weights(self, metric: str, seed: int) -> dict[str, dict[str, float]] | None:
        """Return the weights of image hits in a metric; with the bias, only the average has them.

        Args:
            metric: a metric of the row.
            seed: of the result whose hits are weighted.
        """
        return super().image_weights("calibrated_acc", seed) if metric == "acc" else None

    def includes_bias(self, result: Result) -> bool:
        """Return whether one was chosen."""
        return result.calibration is not None

    @cached_property
    def _hit_counts_by_seed(self) -> tuple[HitCounts, ...]:
        return tuple(r.to_hit_counts().use_calibrated_counts().to_smallest_dtypes() for r in self.results)


def unique_row_names(rows: Sequence[SeedAggregate]) -> list[str]:
    """Return names of rows as tables have them, with the origin where two share one."""
    often = Counter(row.label for row in rows)
    return [row.display_name if often[row.label] == 1 else row.name_with_origin for row in rows]


def base_only_aggregate(row: SeedAggregate) -> BaseOnlyAggregate:
    """Return the lazy row of a row in sessions."""
    return BaseOnlyAggregate(LAZY_ROW_LABEL, COMPUTED_ORIGIN, row.results)


def group_by_base_only(rows: Iterable[SeedAggregate]) -> list[tuple[BaseOnlyAggregate, list[SeedAggregate]]]:
    """Return a lazy row for each A_0 that rows in sessions have, to two digits, with the rows that have it."""
    groups: dict[str, list[SeedAggregate]] = {}
    for row in rows:
        if "lazy" in row.protocol.figures_and_tables:
            groups.setdefault(f"{row.metric_after_sessions()[0].mean:.2f}", []).append(row)
    return [(base_only_aggregate(group[0]), group) for group in groups.values()]


def variance_from_choices(by_resample: np.ndarray) -> float:
    """Return the variance that choices on validation episodes add to a mean, over resamples [RESAMPLES]."""
    return float(by_resample.var(ddof=1))


def describe_fixed_factors(rows: Sequence[SeedAggregate], *more_factors: str) -> str:
    """Name the things that every interval of rows in sessions holds fixed: classes, choices on validation sequences.

    A bias is one of these where a result does not record the choices of resamples.

    Args:
        rows: in sessions.
        more_factors: further things that are fixed.
    """
    names = [*more_factors, "the base and novel classes"]
    if fixed := [row.display_name for row in rows if row.lacks_bias_resamples]:
        all_of_them = len(fixed) == sum(any(result.calibration for result in row.results) for row in rows)
        names.append("the bias on novel logits" + ("" if all_of_them else f" of {', '.join(fixed)}"))
    tuned = [row.display_name for row in rows if any(result.tuned for result in row.results)]
    if tuned:
        names.append(f"the chosen options of {', '.join(tuned)}")
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def list_notes_on_unrecorded_choices(rows: Sequence[SeedAggregate]) -> list[str]:
    """Return a remark on rows that do not record choices, whose intervals are without their uncertainty."""
    names = [row.display_name for row in rows if row.lacks_choice_resamples]
    if not names:
        return []
    which = ", ".join(names) if len(names) < 3 else f"{len(names)} of {len(rows)} measured rows"
    return [
        f"the intervals of {which} do not include the choice of a bias or options: their results were written before "
        "it was recorded"
    ]


def select_rows_with_metric(rows: Iterable[SeedAggregate], metric: str) -> list[SeedAggregate]:
    """Return the rows that have a metric.

    Args:
        rows: to choose from.
        metric: its name.
    """
    return [row for row in rows if metric in row.metric_names]


def aggregate_seeds(results: Iterable[Result], origin: str) -> tuple[list[SeedAggregate], list[str]]:
    """Group results of one task by label, with remarks on what does not fit.

    The seeds of a row must come from the same method, options, task, data and episodes as its newest result; those that
    do not belong are left out.

    Args:
        results: of one task.
        origin: of the rows.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.label, []).append(result)
    rows, remarks = [], []
    for label, group in groups.items():
        newest = max(group, key=lambda r: str(r.provenance.get("time", "")))
        members = []
        for result in sorted(group, key=lambda r: r.seed):
            if reason := reason_not_to_pair(newest, result) or _reason_methods_differ(newest, result):
                remarks.append(
                    f"{LEFT_OUT_PREFIX}seed {result.seed} of {label} ({origin}) does not belong with seed "
                    f"{newest.seed}, "
                    f"which is newer: {reason}; run it again"
                )
            else:
                members.append(result)
        rows.append(SeedAggregate(label, origin, tuple(members)))
    return rows, remarks


def _reason_methods_differ(a: Result, b: Result) -> str | None:
    """Return why two results of one label are not of the same method; the choices of a grid may differ by seed."""
    if not is_same_method(a.provenance, b.provenance):
        return "the method's code differs"
    if a.user_settings() != b.user_settings():
        return "options or training differ"
    if a.n_trials and (a.options, a.train, list(map(list, a.tuned.values()))) != (
        b.options,
        b.train,
        list(map(list, b.tuned.values())),
    ):
        return "another choice was made, or among other settings"
    if a.setting != b.setting and EVERY not in (a.setting, b.setting):
        return "options or checkpoints were chosen in another way"
    return None


def mean_bias_curve(row: SeedAggregate) -> np.ndarray | None:
    """Return the bias, and base and novel accuracy of a row with it, the mean over its seeds, [m, 3].

    The bias is on a method's own logits, so that seeds are averaged at the same bias, as a table's are at none.
    Between the biases that a seed's file has (some fifty, none, and the one found in validation) it is taken to be
    straight. None where there are no validation episodes, and so no curve.
    """
    if "calibrated_delta" not in row.metric_names:  # sequences of sessions have a bias and no curve
        return None
    curves = [_bias_curve_of_seed(result) for result in row.results]
    low, high = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    at = np.unique(np.concatenate([curve[:, 0] for curve in curves]))
    at = at[(at >= low) & (at <= high)]
    means = [np.mean([np.interp(at, curve[:, 0], curve[:, part]) for curve in curves], 0) for part in (1, 2)]
    return np.stack([at, *means], 1)


def calibrated_accuracies(row: SeedAggregate) -> tuple[float, float] | None:
    """Return base and novel accuracy in percent, each seed with its bias from validation, the mean over seeds.

    None where there are no validation episodes, and so no bias.
    """
    if "calibrated_delta" not in row.metric_names:  # sequences of sessions have a bias and no curve
        return None
    shares = []
    for result in row.results:
        hits, shape = result.to_hit_counts().count_arrays(), result.episodes.shape_values
        base, novel = hits["calibrated_base"].mean(), hits["calibrated_novel"].mean()
        shares.append((base / shape["base_queries"], novel / shape["novel_queries"]))
    base, novel = 100 * np.mean(shares, 0)
    return float(base), float(novel)


def _bias_curve_of_seed(result: Result) -> np.ndarray:
    """Return the curve of one seed, [m, 3], ascending in the bias."""
    calibration, counts = result.calibration, result.to_hit_counts()
    assert calibration is not None
    curve, applied = calibration.curve, calibration.bias if calibration.applied else 0.0
    points = {b: hits for b, *hits in zip(curve.bias, curve.base_joint, curve.novel_joint, strict=True)}
    sums = {name: int(hits.sum()) for name, hits in counts.count_arrays().items()}
    points[calibration.bias] = [sums["calibrated_base"], sums["calibrated_novel"]]
    points[applied] = [sums["base_joint"], sums["novel_joint"]]
    base, novel = (len(counts) * result.episodes.shape_values[f"{part}_queries"] for part in ("base", "novel"))
    return np.array([(b, 100 * points[b][0] / base, 100 * points[b][1] / novel) for b in sorted(points)])


# -- inner solves

EVALUATION_STAGE_NAME = "evaluation"
SOLVE_FAILURE_DESCRIPTIONS = {  # failures of inner solves in words; all but the last are in meta-training
    "adjoint_diverged": "the series for the gradient grew, and what it tends to took its place",
    "adjoint_indefinite": "the solve stopped at a saddle, where the gradient is no minimum's",
    "adjoint_failed": "the linear solve for the gradient missed its tolerance",
    "unconverged": "the inner solve did not converge",
    EVALUATION_STAGE_NAME: "the inner solve did not converge",
}
SolveFailures = Mapping[str, tuple[int, int]]  # kind of event -> in how many episodes, of how many


def count_solve_failures(result: Result) -> SolveFailures:
    """Return how often inner solves failed in meta-training and in the test episodes of one seed."""
    recorded = result.training.get("solves", {})
    counts = {
        kind: (recorded[kind], recorded[total]) for kind, total in SOLVES_KEY_OF_FAILURE.items() if kind in recorded
    }
    if statistic := result.solver.get("solver_unconverged"):
        episodes = len(result.episodes)
        failed = statistic.get("total", 0.0) + statistic.get("not_finite", 0.0)
        counts[EVALUATION_STAGE_NAME] = int(min(max(failed, 0), episodes)), episodes
    return counts


def list_notes_on_solve_failures(failures_by_row: Mapping[str, SolveFailures]) -> list[str]:
    """Return a note for each kind of event in the inner solves of some rows.

    Args:
        failures_by_row: name of a row -> its counts over seeds.
    """
    notes = []
    for kind, event in SOLVE_FAILURE_DESCRIPTIONS.items():
        counts = [(name, *solves[kind]) for name, solves in failures_by_row.items() if solves.get(kind, (0, 0))[0]]
        if counts:
            which = ", ".join(f"{name} in {count:,} of {total:,}" for name, count, total in counts)
            stage = "test episodes" if kind == EVALUATION_STAGE_NAME else "episodes of meta-training, over all seeds"
            notes.append(f"{event[0].upper()}{event[1:]}: {which} {stage}.")
    return notes
