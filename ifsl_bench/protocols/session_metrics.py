"""The accuracies of sequences of sessions as integer counts, and what is computed from them. Imports no torch.

Session 0 is the base session of K classes; each of the T sessions after it brings N novel classes. A query is right
after session t if its answer among all classes met so far, sessions 0 to t, is its class. docs/protocol.md defines all
metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ifsl_bench.protocols.calibration import Margins
from ifsl_bench.protocols.metrics import HitCounts, harmonic_mean_by_episode, harmonic_mean_derivatives

SEQUENCE_COUNT_NAMES = ("hits", "novel_as_base", "base_as_novel", "queries")
NOVEL_ALONE_COUNT_NAME = "novel_alone"  # that older results lack
CALIBRATED_COUNT_NAMES = (
    "calibrated_hits",
    "calibrated_novel_as_base",
    "calibrated_base_as_novel",
)  # where there is a bias
SEQUENCE_METRIC_NAMES = (
    "first", "last", "pd", "gain", "base", "novel", "harmonic", "gacc", "learned", "novel_as_base", "base_as_novel"
)  # fmt: skip

# After every session; novel ones have no value (NaN) after session 0.
METRIC_NAMES_AFTER_SESSION = ("acc", "base", "novel", "harmonic", "gacc", "learned", "novel_as_base", "base_as_novel")
# Of a sequence: those named like one of AFTER are its value after the last session, but for acc, gacc and learned.
SUMMARY_METRIC_NAMES = ("first", "last", "pd", "gain", *METRIC_NAMES_AFTER_SESSION)


def session_and_group_indices(sessions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (t, g) of each column of :attr:`SessionCounts.hits_by_bias`, of T sessions: t = 0..T, g = 0..t."""
    return np.tril_indices(sessions + 1)


@dataclass(frozen=True)
class SessionCounts(HitCounts):
    """Hits in each of n sequences, for each session and each group of classes that one session brings.

    Attributes:
        hits: [n, (T + 1) (T + 2) / 2] right queries after session t of the classes of session g <= t, in the order of
            :func:`session_and_group_indices`: (0, 0), (1, 0), (1, 1), (2, 0), ...
        novel_as_base: [n, T] novel queries answered with a base class, after sessions 1 to T.
        base_as_novel: [n, T] base queries answered with a novel class.
        queries: [n, T + 1] queries of the classes of each session.
        base_classes: K.
        ways: N.
        state_bytes: what the method carries on after session T, without the base classifier; None where not known.
        supports: support sets of each order of the classes; sequences of one order follow one another.
        calibrated_hits, calibrated_novel_as_base, calibrated_base_as_novel: the same with a bias on the novel logits
            that was chosen on validation sequences; None where none was.
        novel_alone: [n, T] novel queries that are right among the novel classes met so far, which no bias changes; None
            where it is not recorded.
    """

    hits: np.ndarray
    novel_as_base: np.ndarray
    base_as_novel: np.ndarray
    queries: np.ndarray
    base_classes: int
    ways: int
    state_bytes: int | None = None
    supports: int = 1
    calibrated_hits: np.ndarray | None = None
    calibrated_novel_as_base: np.ndarray | None = None
    calibrated_base_as_novel: np.ndarray | None = None
    novel_alone: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.hits)

    @property
    def n_orders(self) -> int:
        return -(-len(self) // self.supports)

    @property
    def n_interval_units(self) -> int:
        return self.n_orders

    @property
    def interval_quantile(self) -> float:  # type: ignore[override]
        """The quantile of Student's distribution for 95% intervals over the means of few orders; NaN for one."""
        from scipy.special import stdtrit

        return float(stdtrit(self.n_orders - 1, 0.975)) if self.n_orders > 1 else math.nan

    @property
    def sessions(self) -> int:
        """T."""
        return self.queries.shape[1] - 1

    @property
    def state_bytes_per_class(self) -> float | None:  # type: ignore[override]
        """Bytes of the state for each novel class."""
        return None if self.state_bytes is None else self.state_bytes / (self.sessions * self.ways)

    @property
    def session_of_column(self) -> np.ndarray:
        """The group of classes of each column of :attr:`hits_by_bias`, g of (t, g)."""
        return session_and_group_indices(self.sessions)[1]

    @cached_property
    def _hit_matrix(self) -> np.ndarray:
        """[n, T + 1, T + 1] hits after session t of the classes of session g; 0 for g > t."""
        square = np.zeros((len(self), self.sessions + 1, self.sessions + 1), np.int64)
        square[(slice(None), *session_and_group_indices(self.sessions))] = self.hits
        return square

    def accuracy_triangle(self) -> np.ndarray:
        """Return accuracies after session t on the classes of session g, in percent, [n, T + 1, T + 1]; NaN for g > t.

        A column falls as its classes are forgotten; the diagonal has those just learned.
        """
        share = 100 * self._hit_matrix / self.queries[:, None].astype(np.int64)
        share[:, ~np.tri(self.sessions + 1, dtype=bool)] = np.nan
        return share

    def metric_after_sessions(self, metric: str) -> np.ndarray:
        """Return a metric in each sequence after each session, [n, T + 1], in percent.

        Args:
            metric: one of :data:`METRIC_NAMES_AFTER_SESSION`.
        """
        return _METRIC_AFTER_SESSION[metric](self)

    @cached_property
    def _metric_cache(self) -> dict[str, np.ndarray]:
        """Answers that :meth:`metric_by_unit` has given: comparisons ask again and again."""
        return {}

    @property
    def metrics(self) -> tuple[str, ...]:
        there = {
            "calibrated_acc": self.calibrated_hits is not None,
            NOVEL_ALONE_COUNT_NAME: self.novel_alone is not None,
        }
        return ("acc", *SEQUENCE_METRIC_NAMES, *(name for name, is_there in there.items() if is_there))

    def metric_by_unit(self, metric: str) -> np.ndarray:
        """Return one of :attr:`metrics` as its mean over the sequences of each order, [orders], in percent.

        Orders are the units that intervals are over: sequences of one order have their classes in common.
        """
        if metric not in self._metric_cache:
            self._metric_cache[metric] = self.average_within_units(self.metric_by_sequence(metric))
        return self._metric_cache[metric]

    def average_within_units(self, values: np.ndarray) -> np.ndarray:
        """Return the mean over the sequences of each order, [orders, ...], of values [n, ...]."""
        first = np.arange(0, len(self), self.supports)
        sizes = np.diff(np.append(first, len(values)))
        return np.asarray(np.add.reduceat(values, first) / sizes.reshape(-1, *[1] * (values.ndim - 1)))

    def metric_by_sequence(self, metric: str) -> np.ndarray:
        """Return one of :attr:`metrics` in each sequence, [n], in percent.

        ``first`` and ``last`` are A_0 and A_T, ``acc`` is the mean of A_0 to A_T, ``pd`` is A_0 - A_T (Zhang et al.
        2021). ``gacc`` is a mean over all sessions, ``learned`` one over sessions 1 to T. ``gain`` is the ``acc`` above
        the ``acc`` of :meth:`base_only_counts`.
        """
        if metric == "calibrated_acc":
            return self.use_calibrated_counts().metric_by_sequence("acc")
        if metric == "gain":
            return self.metric_by_sequence("acc") - self.base_only_counts().metric_by_sequence("acc")
        if metric in ("first", "last", "acc", "pd"):
            acc = self.metric_after_sessions("acc")
            return {"first": acc[:, 0], "last": acc[:, -1], "acc": acc.mean(1), "pd": acc[:, 0] - acc[:, -1]}[metric]
        after = self.metric_after_sessions(metric)
        if metric == "gacc":
            return np.asarray(after.mean(1))
        return np.asarray(after[:, 1:].mean(1) if metric == "learned" else after[:, -1])

    def count_arrays(self) -> dict[str, np.ndarray]:
        """Return the name of a count -> its values in each sequence, [n, ...], for all that there are."""
        names = (*SEQUENCE_COUNT_NAMES, *CALIBRATED_COUNT_NAMES, NOVEL_ALONE_COUNT_NAME)
        return {name: values for name in names if (values := getattr(self, name)) is not None}

    def use_calibrated_counts(self) -> SessionCounts:
        """Return the counts with the bias in place of the plain ones.

        Raises:
            KeyError: no bias was chosen.
        """
        if self.calibrated_hits is None:
            raise KeyError("calibrated_acc")
        return replace(
            self, **{name.removeprefix("calibrated_"): getattr(self, name) for name in CALIBRATED_COUNT_NAMES}
        )

    def with_calibrated_counts_of(self, biased: SessionCounts) -> SessionCounts:
        """Return these counts, with the counts of ``biased`` as the calibrated ones."""
        return replace(
            self, **{name: getattr(biased, name.removeprefix("calibrated_")) for name in CALIBRATED_COUNT_NAMES}
        )

    def base_only_counts(self) -> SessionCounts:
        """Return the counts of a model that is the same in session 0 and never answers with a novel class."""
        first = self.hits[:, :1].astype(np.int64)
        novel = self.queries[:, 1:].astype(np.int64).cumsum(1)
        none: dict[str, Any] = dict.fromkeys((*CALIBRATED_COUNT_NAMES, NOVEL_ALONE_COUNT_NAME))
        hits, as_novel = np.where(self.session_of_column == 0, first, 0), np.zeros_like(novel)
        return replace(self, hits=hits, novel_as_base=novel, base_as_novel=as_novel, state_bytes=0, **none)

    def selection_hits(self, margins: Margins | None, bias: float | None) -> dict[str, list[int]]:
        return {"hits": self.hits.sum(1, dtype=np.int64).tolist()}

    def image_weights_of_metric(self, metric: str) -> dict[str, dict[str, float]] | None:
        if metric == "harmonic":
            slopes = harmonic_mean_derivatives(
                *(float(self.metric_after_sessions(name)[:, -1].mean()) for name in ("base", "novel"))
            )
            return {"base": {"last": slopes[0]}, "novel": {"last": slopes[1]}}
        queries, session = self.queries.mean(0).cumsum(), np.arange(1, self.sessions + 1)
        base = queries[0] / queries  # the share of base queries among all, after each session
        average, last, most = float(base.mean()), float(base[-1]), self.base_classes / self.ways
        of_gacc = float(np.append(1 - session * np.log1p(most / session) / most, 1).mean())
        weights: dict[str, dict[str, dict[str, float]]] = {
            "acc": {"base": {"acc": average}, "novel": {"acc": 1 - average}},
            "calibrated_acc": {"base": {"calibrated": average}, "novel": {"calibrated": 1 - average}},
            "first": {"base": {"first": 1.0}},
            "last": {"base": {"last": last}, "novel": {"last": 1 - last}},
            "pd": {"base": {"first": 1.0, "last": -last}, "novel": {"last": last - 1}},
            "gain": {"base": {"acc": average, "first": -average}, "novel": {"acc": 1 - average}},
            "base": {"base": {"last": 1.0}},
            "novel": {"novel": {"last": 1.0}},
            "gacc": {"base": {"gacc": of_gacc}, "novel": {"gacc": 1 - of_gacc}},
        }
        return weights.get(metric)

    def total_image_hits(self) -> dict[str, dict[str, int | None]]:
        hits, queries = self._hit_matrix.sum(0), self.queries.sum(0, dtype=np.int64)
        more = {"acc": None, "gacc": None, **({} if self.calibrated_hits is None else {"calibrated": None})}
        base, novel = int(hits[-1, 0]), int(hits[-1, 1:].sum())
        return {
            "base": {"asked": int(queries[0]), "first": int(hits[0, 0]), "last": base, **more},
            "novel": {"asked": int(queries[1:].sum()), "last": novel, **more},
        }

    def metrics_to_columns(self) -> dict[str, Any]:
        """Return a row for each sequence and session t, with all that is measured after it, in percent.

        ``of_0`` to ``of_T`` are the accuracy on the classes of each session so far, NaN for later ones.
        """
        sequence, session = np.divmod(np.arange(len(self) * (self.sessions + 1)), self.sessions + 1)
        columns: dict[str, Any] = {"sequence": sequence, "order": sequence // self.supports, "session": session}
        columns |= {name: self.metric_after_sessions(name).reshape(-1) for name in METRIC_NAMES_AFTER_SESSION}
        return columns | {
            f"of_{group}": self.accuracy_triangle()[:, :, group].reshape(-1) for group in range(self.sessions + 1)
        }


def _hit_percentages(hits: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return 100 hits / queries; NaN where there are no queries."""
    return np.divide(100 * hits, queries, out=np.full(hits.shape, np.nan), where=queries > 0)


def _novel_accuracy_after_sessions(counts: SessionCounts) -> np.ndarray:
    """Return the accuracy over all novel queries of the classes met so far, each query alike."""
    return _hit_percentages(counts._hit_matrix[:, :, 1:].sum(2), _novel_queries_after_sessions(counts))


def _novel_queries_after_sessions(counts: SessionCounts) -> np.ndarray:
    """Count the queries [n, T + 1] of the novel classes met so far."""
    queries = counts.queries.astype(np.int64).cumsum(1)
    return queries - queries[:, :1]


def _harmonic_accuracy_after_sessions(counts: SessionCounts) -> np.ndarray:
    """Return the harmonic mean of mean base and novel accuracy, by :func:`~.metrics.spread_harmonic_mean`."""
    base, novel = counts.metric_after_sessions("base"), counts.metric_after_sessions("novel")
    columns = [np.full(len(counts), np.nan), *map(harmonic_mean_by_episode, base.T[1:], novel.T[1:])]
    return np.stack(columns, 1)


def _generalized_accuracy_after_sessions(counts: SessionCounts) -> np.ndarray:
    """Return generalized accuracy (Tang et al., ECCV 2024, section 3), as the exact area.

    With a_g the accuracy after session t on the classes of session g, the mean that gives the base session the weight w
    is (w a_0 + a_1 + ... + a_t) / (w + t), and its mean over w from 0 to M = K / N is
    a_0 + (a_1 + ... + a_t - t a_0) ln(1 + M / t) / M.
    """
    triangle, most = counts.accuracy_triangle(), counts.base_classes / counts.ways
    base, learned = triangle[:, :, 0], np.nansum(triangle[:, :, 1:], axis=2)
    session = np.arange(1, counts.sessions + 1)
    area = base.copy()
    area[:, 1:] += (learned - base * np.arange(counts.sessions + 1))[:, 1:] * np.log1p(most / session) / most
    return area


def _novel_as_base_share(counts: SessionCounts) -> np.ndarray:
    """Return the share of the novel queries met so far that go to base classes."""
    taken = np.pad(counts.novel_as_base.astype(np.int64), ((0, 0), (1, 0)))
    return _hit_percentages(taken, _novel_queries_after_sessions(counts))


def _novel_alone_share(counts: SessionCounts) -> np.ndarray:
    """Return the share of the novel queries met so far that are right among the novel classes met so far."""
    assert counts.novel_alone is not None
    right = np.pad(counts.novel_alone.astype(np.int64), ((0, 0), (1, 0)))
    return _hit_percentages(right, _novel_queries_after_sessions(counts))


def _base_as_novel_share(counts: SessionCounts) -> np.ndarray:
    """Return the share of base queries that go to novel classes; 0 after session 0."""
    taken = np.pad(counts.base_as_novel.astype(np.int64), ((0, 0), (1, 0)))
    return _hit_percentages(taken, np.repeat(counts.queries[:, :1].astype(np.int64), counts.sessions + 1, 1))


_METRIC_AFTER_SESSION: dict[str, Callable[[SessionCounts], np.ndarray]] = {
    "acc": lambda counts: _hit_percentages(counts._hit_matrix.sum(2), counts.queries.astype(np.int64).cumsum(1)),
    "base": lambda counts: counts.accuracy_triangle()[:, :, 0],
    "novel": _novel_accuracy_after_sessions,
    "harmonic": _harmonic_accuracy_after_sessions,
    "gacc": _generalized_accuracy_after_sessions,
    "learned": lambda counts: np.diagonal(counts.accuracy_triangle(), axis1=1, axis2=2),
    "novel_as_base": _novel_as_base_share,
    "base_as_novel": _base_as_novel_share,
    NOVEL_ALONE_COUNT_NAME: _novel_alone_share,
}
