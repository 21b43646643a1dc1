"""The choice of options: how the settings do on validation episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ifsl_bench.protocols.calibration import best_bias, resamples
from ifsl_bench.protocols.loader import MOST_UNCONVERGED, Evaluated
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import quarantine
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.serialization import check_kinds, read_checksummed, write_checksummed

LEAST_WINS, MOST_RIVALS = 2, 6  # resamples that choose a setting which is tried on test episodes; settings, at most
RIVAL_EPISODES = 1000  # test episodes, at most: a difference between settings spreads far less than a number


@dataclass(frozen=True)
class Tried:
    """The record of how a setting did.

    Attributes:
        accuracy: in percent, over the validation episodes; 0 where training diverged.
        episodes: the number of these episodes.
        unconverged: episodes whose inner solve failed.
        diverged: what was said of a training that diverged.
        hits: a count of :class:`ifsl_bench.protocols.metrics.Counts` -> its value in each episode; ``hits`` -> all of
            each sequence of sessions; empty where training diverged.
        bias: on the novel logits, best on these episodes; None where there is none.
    """

    accuracy: Annotated[float, Meta(ge=0, le=100)]
    episodes: Annotated[int, Meta(ge=1)]
    unconverged: Annotated[int, Meta(ge=0)] = 0
    diverged: str = ""
    hits: dict[str, list[int]] = field(default_factory=dict)
    bias: float | None = None

    @property
    def failed(self) -> str:
        """Says why it is no choice: its training, or more than ``MOST_UNCONVERGED`` of its inner solves; or ""."""
        if self.unconverged > MOST_UNCONVERGED * self.episodes:
            return f"inner solves fail in {self.unconverged} of {self.episodes} validation episodes"
        return self.diverged

    @property
    def to_compare(self) -> float:
        """Its accuracy; -inf where it cannot be chosen."""
        return -math.inf if self.failed else self.accuracy


def best_of(name: str, tried: Mapping[str, Tried], reporter: Reporter) -> str:
    """Return the setting with the highest accuracy, the first of equally good ones.

    Args:
        name: of the job, for warnings and errors.
        tried: the trial of each setting.
        reporter: receives a warning for each setting that is passed over, with the reason.

    Raises:
        UserError: none can be chosen.
    """
    for setting, trial in tried.items():
        if trial.failed:
            reporter.warn(f"{name}: {setting} is passed over: {trial.failed}")
    best = max(tried, key=lambda setting: tried[setting].to_compare)
    if tried[best].failed:
        raise UserError(f"{name}: none of {len(tried)} settings works; set the options by hand with --set")
    return best


def tried_with(evaluated: Evaluated) -> Tried:
    """Return the trial of a setting whose validation episodes were evaluated; calibrated counts are with its bias."""
    counts, margins = evaluated.counts, evaluated.margins
    bias = None if margins is None else best_bias(margins)
    hits = counts.selection_hits(margins, bias)
    return Tried(evaluated.accuracy, len(counts), evaluated.unconverged, hits=hits, bias=bias)


def firmness(tried: Mapping[str, Tried], best: str) -> dict[str, Any]:
    """Return the setting that each bootstrap resample of the validation episodes would choose, and the hits of all.

    Args:
        tried: the trial of each setting.
        best: the setting that was chosen.

    Returns:
        The fields of a result's ``choice``; see docs/statistics.md. Its ``rivals`` are the settings
        that at least ``LEAST_WINS`` resamples would choose, the most frequent first, at most ``MOST_RIVALS``.
    """
    hits = {name: [sum(trial.hits.get(name, [])) for trial in tried.values()] for name in tried[best].hits}
    right = [trial.hits if not trial.failed else {} for trial in tried.values()]
    nothing = [-1] * tried[best].episodes  # what cannot be chosen is worse than no hits at all
    joint = np.array([np.add(counts["base_joint"], counts["novel_joint"]) if counts else nothing for counts in right])
    winners = (resamples(tried[best].episodes) @ joint.T).argmax(1)
    chosen, wins = list(tried).index(best), np.bincount(winners, minlength=len(tried))
    rivals = [place for place in np.argsort(-wins, kind="stable").tolist() if place != chosen]
    return {
        "validation_episodes": tried[best].episodes,
        "chosen": chosen,
        "rivals": [place for place in rivals if wins[place] >= LEAST_WINS][:MOST_RIVALS],
        "winners": winners.tolist(),
        "hits": hits,
    }


def write_trial(file: Path, tried: Tried, pretraining_sha256: str, about: str, made_by: Mapping[str, Any]) -> None:
    """Store a trial, with the checksum of its backbone and the identity of its method.

    Args:
        file: to write.
        tried: the trial.
        pretraining_sha256: checksum of the backbone's weights.
        about: the job, for readers of the file.
        made_by: the facts that tell its method from others.
    """
    about_it = {"file": file.name, "of": about, "pretraining_sha256": pretraining_sha256, "made_by": made_by}
    write_checksummed(file, {**about_it, **asdict(tried)})


def read_trial(
    file: Path,
    pretraining_sha256: str | None,
    same: Callable[[Mapping[str, Any]], bool],
    reporter: Reporter | None = None,
) -> Tried | None:
    """Return the trial that was stored for a backbone; None where it is missing, damaged or of another method.

    A trial without the hits of episodes, which a choice needs, is made again; its model is in the cache.

    Args:
        file: of the trial.
        pretraining_sha256: checksum of the backbone's weights; None where there are no weights.
        same: whether what made the trial is the method in question.
        reporter: is warned of a damaged one, which is then set aside.

    Raises:
        UserError: it may not be read.
    """
    try:
        record = read_checksummed(file)
        check_kinds(file, record, {"file": str, "of": str, "pretraining_sha256": str, "made_by": dict})
        if record["file"] != file.name:
            raise CorruptFile(f"{file} is the trial of {record['of']}")
        if record["pretraining_sha256"] != pretraining_sha256 or not same(record["made_by"]):
            return None
        tried = msgspec.convert(record, Tried)
        return tried if tried.hits or tried.diverged else None
    except FileNotFoundError:
        return None
    except (CorruptFile, ValueError) as error:  # what does not fit msgspec's types among them
        if reporter:
            fault = error if isinstance(error, CorruptFile) else f"{file} is damaged: {error}"
            reporter.warn(f"{fault}; the setting is tried again, the old file is {quarantine(file)}")
        return None
