"""Uncertainty of choices on validation episodes: what a result would be with other draws of these. Imports no torch.

Each bootstrap resample of the validation episodes would have chosen a bias of its own, and perhaps other options. The
test hits with each such bias are counted. Options that more than one resample would have chosen are tried on test
episodes, and what they have more there than the chosen ones is added to the hits of these. For the rest, it is what
they have more on the validation episodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ifsl_bench.protocols.calibration import RESAMPLES
from ifsl_bench.protocols.metrics import Counts
from ifsl_bench.store.schema import Calibration, Choice

if TYPE_CHECKING:
    from ifsl_bench.protocols.session_metrics import SessionCounts

OF_BIAS = ("acc", "last", "pd", "gain", "base", "novel", "harmonic", "gacc")  # in sessions, metrics of resamples


def resampled_sequences(calibration: Calibration | None, counts: SessionCounts) -> SessionCounts | None:
    """Return hits over all test sequences with the bias of each resample, as if each were a sequence.

    They are for metrics of :data:`OF_BIAS`; all novel hits are those of session 1. None where no bias was chosen, or
    where an older result does not record it.

    Args:
        calibration: of the result.
        counts: of the result.
    """
    from ifsl_bench.protocols.session_metrics import SessionCounts, triangle_rows

    if calibration is None or not calibration.resampled_base:
        return None
    sessions = counts.sessions
    _, group = triangle_rows(sessions)
    base, novel = (
        np.reshape(hits, (RESAMPLES, sessions)) for hits in (calibration.resampled_base, calibration.resampled_novel)
    )
    hits = np.zeros((RESAMPLES, len(group)), np.int64)
    first = np.full((RESAMPLES, 1), counts.hits[:, 0].sum(dtype=np.int64))
    hits[:, group == 0], hits[:, group == 1] = np.concatenate([first, base], 1), novel
    queries = np.tile(counts.queries.sum(0, dtype=np.int64), (RESAMPLES, 1))
    return SessionCounts(hits, np.zeros_like(base), np.zeros_like(base), queries, counts.base_classes, counts.ways)


def resampled_sums(calibration: Calibration | None, choice: Choice | None, counts: Counts) -> Counts | None:
    """Return hits over all test episodes with the choices of each resample, as if each were an episode.

    Pairs are multiplied by the number of episodes, as their share of all pairs is made of two sums. None where nothing
    was chosen, or where an older result does not record it.

    Args:
        calibration: of the result.
        choice: of the result.
        counts: of the result.
    """
    resampled = {
        "calibrated_base": calibration.resampled_base if calibration else [],
        "calibrated_novel": calibration.resampled_novel if calibration else [],
    }
    if not any(resampled.values()) and not choice:
        return None
    n = len(counts)
    sums: dict[str, Any] = {}
    for name, values in counts.columns().items():
        sums[name] = np.asarray(resampled.get(name) or [values.sum(dtype=np.int64)], dtype=np.float64)
        if choice and name in choice.hits:
            sums[name] = sums[name] + n * gains(choice, name)[choice.winners]
    if calibration and calibration.applied:
        sums |= {"base_joint": sums["calibrated_base"], "novel_joint": sums["calibrated_novel"]}
    if "pairs" in sums:
        sums["pairs"] = n * sums["pairs"]
    whole = {name: np.round(values) for name, values in zip(sums, np.broadcast_arrays(*sums.values()), strict=True)}
    return Counts(**whole, base_queries=n * counts.base_queries, novel_queries=n * counts.novel_queries)


def gains(choice: Choice, count: str) -> np.ndarray:
    """Return the hits that each setting has more than the chosen one, a mean over episodes, on test ones where tried.

    Args:
        choice: of a result.
        count: the name of a count.
    """
    hits = np.array(choice.hits[count])
    gains = (hits - hits[choice.chosen]) / choice.validation_episodes
    if choice.rivals and count in choice.test_hits:
        chosen, *tested = choice.test_hits[count]
        gains[choice.rivals] = (np.array(tested) - chosen) / choice.test_episodes
    return gains
