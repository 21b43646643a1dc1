"""What was found in a range of episodes, as it is kept in the home folder until the result is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ifsl_bench.common import packed
from ifsl_bench.episodic.evaluation import Evaluated
from ifsl_bench.protocol.calibration import Bias, Calibrated
from ifsl_bench.protocol.metrics import Counts


def record_of(found: Evaluated) -> dict[str, Any]:
    """What JSON holds of it, bit by bit: counts, statistics, and the hits on the base-novel curve."""
    return {
        "base_queries": found.counts.base_queries,
        "novel_queries": found.counts.novel_queries,
        "counts": {name: packed.pack(values) for name, values in found.counts.columns().items()},
        "statistics": {name: packed.pack(values) for name, values in found.statistics.items()},
        "curve": found.calibrated.curve[:, 1:].astype(int).tolist() if found.calibrated else [],
        "resampled": found.calibrated.resampled.tolist() if found.calibrated else [],
    }


def evaluated_of(record: Mapping[str, Any], episodes: int, bias: Bias | None) -> Evaluated:
    """The record of so many episodes, read again.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """

    def arrays(found: Mapping[str, str]) -> dict[str, np.ndarray]:
        read = {name: packed.unpack(text, episodes) for name, text in found.items()}
        if any(len(values) != episodes for values in read.values()):
            raise ValueError(f"it is not of {episodes:,} episodes")
        return read

    hits: dict[str, Any] = arrays(record["counts"])
    counts = Counts(**hits, base_queries=int(record["base_queries"]), novel_queries=int(record["novel_queries"]))
    statistics = arrays(record["statistics"])
    if bias is None:
        return Evaluated(counts, statistics)
    base, novel = counts.calibrated_base, counts.calibrated_novel
    if base is None or novel is None:
        raise ValueError("it has no hits with a bias")
    curve = np.concatenate([bias.points[:, None], np.reshape(record["curve"], (-1, 2))], 1)
    resampled = np.array(record["resampled"], dtype=np.int64).reshape(len(bias.resampled), 2)
    calibrated = Calibrated(bias.value, bias.validation_episodes, base, novel, curve, resampled)
    return Evaluated(counts, statistics, None, calibrated)
