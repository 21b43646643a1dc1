"""How far a result rests on the draw of validation episodes, on which a bias and options are chosen. Imports no torch.

Each bootstrap resample of the validation episodes would have chosen a bias of its own, and perhaps other options. The
test hits with each such bias are counted. Options that more than one resample would have chosen are tried on test
episodes, and what they have more there than the chosen ones is added to the hits of these. For the rest, it is what
they have more on the validation episodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ifsl_bench.board.firmness import Choice
from ifsl_bench.board.result_file import Result, SessionResult
from ifsl_bench.protocol.metrics import Counts
from ifsl_bench.protocol.session_metrics import SessionCounts


def holds_choices(result: Result) -> bool:
    """Whether something was chosen that the result, of an older version, does not say more of."""
    calibration = result.calibration
    if isinstance(result, SessionResult):
        return False
    return bool(calibration and not calibration.resampled_base) or bool(result.tuned and not result.choice)


def resampled_sums(result: Result, counts: Counts | SessionCounts) -> Counts | None:
    """The result's hits over all test episodes with what each resample would have chosen, as if each were an episode.

    Pairs are multiplied by the number of episodes, as their share of all pairs is made of two sums. None where nothing
    was chosen, where an older result does not say it, and in sequences, whose intervals hold the bias fixed.
    """
    if isinstance(counts, SessionCounts):
        return None
    calibration, choice, n = result.calibration, result.choice, len(counts)
    resampled = {
        "calibrated_base": calibration.resampled_base if calibration else [],
        "calibrated_novel": calibration.resampled_novel if calibration else [],
    }
    if not any(resampled.values()) and not choice:
        return None
    sums: dict[str, Any] = {}
    for name, values in counts.columns().items():
        sums[name] = np.asarray(resampled.get(name) or [values.sum(dtype=np.int64)], dtype=np.float64)
        if choice and name in choice.hits:
            sums[name] = sums[name] + n * gains(choice, name)[choice.winners]
    if result.calibrated:
        sums |= {"base_joint": sums["calibrated_base"], "novel_joint": sums["calibrated_novel"]}
    if "pairs" in sums:
        sums["pairs"] = n * sums["pairs"]
    whole = {name: np.round(values) for name, values in zip(sums, np.broadcast_arrays(*sums.values()), strict=True)}
    return Counts(**whole, base_queries=n * counts.base_queries, novel_queries=n * counts.novel_queries)


def gains(choice: Choice, count: str) -> np.ndarray:
    """Hits that each setting has more than the chosen one, a mean over episodes: on the test where it was tried."""
    hits = np.array(choice.hits[count])
    gains = (hits - hits[choice.chosen]) / choice.validation_episodes
    if choice.rivals and count in choice.test_hits:
        chosen, *tested = choice.test_hits[count]
        gains[choice.rivals] = (np.array(tested) - chosen) / choice.test_episodes
    return gains
