"""The choice of options: how the settings do on validation episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import read_json, write_json
from ifsl_bench.common.progress import Reporter
from ifsl_bench.episodic.evaluation import MOST_UNCONVERGED


@dataclass(frozen=True)
class Tried:
    """How a setting did.

    Attributes:
        accuracy: in percent, over so many validation episodes; 0 where training diverged.
        unconverged: episodes whose inner solve failed.
        diverged: what was said of a training that diverged.
    """

    accuracy: float
    episodes: int
    unconverged: int = 0
    diverged: str = ""

    @property
    def failed(self) -> str:
        """Why it cannot be chosen: its training, or more than ``MOST_UNCONVERGED`` of its inner solves; else ""."""
        if self.unconverged > MOST_UNCONVERGED * self.episodes:
            return f"inner solves fail in {self.unconverged} of {self.episodes} validation episodes"
        return self.diverged


def best_of(name: str, tried: Mapping[str, Tried], reporter: Reporter) -> str:
    """The setting with the highest accuracy, the first of equally good ones; says which are passed over, and why.

    Raises:
        UserError: none can be chosen.
    """
    sound = {setting: one.accuracy for setting, one in tried.items() if not one.failed}
    for setting, one in tried.items():
        if one.failed:
            reporter.warn(f"{name}: {setting} is passed over: {one.failed}")
    if not sound:
        raise UserError(f"{name}: none of {len(tried)} settings works; set the options by hand with --set")
    return max(sound, key=sound.__getitem__)


def write_trial(
    file: Path, tried: Tried, pretraining_sha256: str, about: str, made_by: Mapping[str, Any]
) -> None:  # fmt: skip
    """Keeps a trial, with the checksum of the backbone that it is of, and what tells its method from others."""
    write_json(file, {"of": about, "pretraining_sha256": pretraining_sha256, "made_by": made_by, **asdict(tried)})


def read_trial(
    file: Path, pretraining_sha256: str | None, same: Callable[[Mapping[str, Any]], bool]
) -> Tried | None:  # fmt: skip
    """The trial that was kept for that backbone; None where there is none, a damaged one, or one of another method.

    Args:
        same: whether what made the trial is the method in question.
    """
    try:
        found = read_json(file)
        made_by = found.pop("made_by")
        if found.pop("pretraining_sha256") == pretraining_sha256 and found.pop("of") and same(made_by):
            return Tried(**found)
    except (OSError, CorruptFile, TypeError, KeyError, AttributeError, ValueError):
        pass
    return None
