"""Scores of the answer to a batch: hits, margins and pairs of each episode."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ifsl_bench.backbones.device import to_host
from ifsl_bench.plugin.method import Prediction, bad_episodes, check_numbers, masked_logits
from ifsl_bench.protocols.calibration import Margins
from ifsl_bench.protocols.episode_loader import Batch
from ifsl_bench.protocols.tasks.metric_sets import COUNTS
from ifsl_bench.solvers import numba_backend as compiled

KINDS = (torch.float32, torch.float64)  # of logits that a kernel looks at


class Hits(NamedTuple):
    """Hits, margins and pairs of E episodes.

    Attributes:
        counts: by the names of ``COUNTS``, int64 [E] each.
        statistics: the method's own numbers, name -> [E].
        margins: of the queries; None where there are no base queries, as are the pairs.
        pairs: [E], see :meth:`Margins.pairs`.
    """

    counts: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    margins: Margins | None
    pairs: np.ndarray | None


def hits(name: str, prediction: Prediction, batch: Batch, base_queries: int) -> Hits:
    """The hits of a checked form of answer; ``name`` is what errors call the method.

    Args:
        base_queries: in each episode.

    Raises:
        NonFinite: logits that are NaN or +inf.
    """
    count = _by_kernel if compiled.kernels_loaded(prediction.logits) and prediction.logits.dtype in KINDS else _in_torch
    counts, statistics, margins, pairs, bad = count(prediction, batch, base_queries)
    check_numbers(name, int(bad.sum()), len(batch))
    by_name = dict(zip(COUNTS, counts, strict=True)), dict(zip(prediction.statistics, statistics, strict=True))
    return Hits(*by_name, margins, pairs) if base_queries else Hits(*by_name, None, None)


Counted = tuple[list[np.ndarray], list[np.ndarray], Margins, np.ndarray, np.ndarray]


def _by_kernel(prediction: Prediction, batch: Batch, base_queries: int) -> Counted:
    """Counts in one pass over the logits, see `ifsl_bench.solvers.numba_counting`."""
    from ifsl_bench.solvers import numba_counting as counting

    inputs = (prediction.logits, batch.masked, batch.labels, batch.novel)
    logits, masked, labels, novel = (x.detach().contiguous().numpy() for x in inputs)
    episodes, queries = labels.shape
    if (np.count_nonzero(novel, 1) != queries - base_queries).any():  # for the kernel would write elsewhere
        raise ValueError(f"every episode needs {base_queries} base queries among its {queries}")
    counts, pairs = np.empty((4, episodes), np.int64), np.empty(episodes, np.int64)
    margins = (np.empty((episodes, size), np.float32) for size in (base_queries, queries - base_queries))
    both, bad = Margins(*margins), np.empty(episodes, np.bool_)
    compiled.each(
        counting.count, episodes, logits, masked, labels, novel, counts, both.base, both.novel, pairs, bad
    )  # fmt: skip
    return [*counts], to_host([*prediction.statistics.values()]), both, pairs, bad


def _in_torch(prediction: Prediction, batch: Batch, base_queries: int) -> Counted:
    """An accelerator is waited for once."""
    counts, margin = _counts(prediction, batch)
    values = (bad_episodes(prediction), margin, batch.novel, *counts, *prediction.statistics.values())
    bad, margin_values, novel, *rest = to_host(values)
    margins = _apart(margin_values, novel)
    return [x.astype(np.int64) for x in rest[:4]], rest[4:], margins, margins.pairs() if base_queries else bad, bad


def _apart(margin: np.ndarray, novel: np.ndarray) -> Margins:
    """Margins [E, Q] of queries in any order, the base ones apart from those that are ``novel``, [E, Q]."""
    return Margins(margin[~novel].reshape(len(margin), -1), margin[novel].reshape(len(margin), -1))


def _counts(prediction: Prediction, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The counts of each episode, [E] each, and the margin of each query, float32 [E, Q].

    A novel class at -inf stays there with any bias, so that the margin is then +inf.
    """
    classes = batch.support.hidden.shape[1]
    logits = masked_logits(prediction, batch.masked)  # [E, Q, K + N]
    base, base_at = logits[..., :classes].max(-1)  # [E, Q]
    novel, novel_at = logits[..., classes:].max(-1)
    base_right = ~batch.novel & (base_at == batch.labels)
    novel_right = batch.novel & (novel_at + classes == batch.labels)
    margin = torch.where(novel == -torch.inf, torch.inf, base - novel).float()
    return [
        (base_right & (base >= novel)).sum(1),
        base_right.sum(1),
        (novel_right & (novel > base)).sum(1),
        novel_right.sum(1),
    ], margin.masked_fill(~(base_right | novel_right), torch.nan)
