"""How firmly validation episodes choose options, as a result has it, and whether that can be. Imports no torch."""

from __future__ import annotations

import msgspec
import numpy as np

from ifsl_bench.protocol.calibration import RESAMPLES
from ifsl_bench.protocol.metrics import Counts
from ifsl_bench.protocol.task_kind import COUNTS, MORE_COUNTS


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How firmly validation episodes choose options; see :mod:`ifsl_bench.board.choices`.

    Attributes:
        validation_episodes: how many the settings were tried on.
        chosen: the place, in the order of ``tuned``, of the setting that was chosen.
        winners: the place of the one that each bootstrap resample of the validation episodes would have chosen.
        hits: a count of :class:`ifsl_bench.protocol.metrics.Counts` -> its sum over these episodes with each setting;
            in ``calibrated_base`` and ``calibrated_novel`` with the bias that is best for the setting.
        rivals: places of the settings that were tried on test episodes too, as
            :func:`ifsl_bench.episodic.choosing.firmness` has them.
        test_episodes: the first so many.
        test_hits: a count -> its sum over these episodes with the chosen setting, then with each rival; empty where
            there is no rival.
    """

    validation_episodes: int
    chosen: int
    winners: list[int]
    hits: dict[str, list[int]]
    rivals: list[int] = []
    test_episodes: int = 0
    test_hits: dict[str, list[int]] = {}


def odd_choice(choice: Choice, settings: int) -> str:
    """Why this is not how one of so many settings was chosen; "" where it may be."""
    if len(choice.winners) != RESAMPLES:
        return f"has other than {RESAMPLES} resamples"
    if any(not 0 <= place < settings for place in (choice.chosen, *choice.winners, *choice.rivals)):
        return f"has a place that none of {settings} settings has"
    if choice.validation_episodes < 1:
        return f"says that it is from {choice.validation_episodes} validation episodes"
    if choice.rivals and choice.test_episodes < 1:
        return f"says that rivals were tried on {choice.test_episodes} test episodes"
    for hits, count in ((choice.hits, settings), (choice.test_hits, 1 + len(choice.rivals))):
        if hits.keys() - {*COUNTS, *MORE_COUNTS} or any(len(each) != count for each in hits.values()):
            return f"has hits of something else, or of other than {count} settings"
        if any(not 0 <= n < 1 << 31 for each in hits.values() for n in each):
            return "has hits beyond all bounds"
    return ""


def odd_rivals(choice: Choice, counts: Counts, calibrated: bool) -> str:
    """Why the chosen setting cannot have these hits on the first test episodes; "" where it has them."""
    if choice.test_episodes > len(counts):
        return f"has {choice.test_episodes:,} test episodes, the result {len(counts):,}"
    for name in choice.test_hits.keys() - ({"base_joint", "novel_joint"} if calibrated else set()):
        hits = counts.columns().get(name, np.zeros(0, int))[: choice.test_episodes].sum()
        if choice.test_hits[name][0] != hits:
            return f"has {choice.test_hits[name][0]:,} test hits {name} of the chosen setting, its counts give {hits:,}"
    return ""
