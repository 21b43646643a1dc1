"""The choice of options: how the settings do on validation episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import read_json, write_json
from ifsl_bench.common.progress import Reporter
from ifsl_bench.episodic.evaluation import MOST_UNCONVERGED


@dataclass(frozen=True)
class Tried:
    """How a setting did.

    Attributes:
        accuracy: in percent, over so many validation episodes.
        unconverged: episodes whose inner solve failed.
    """

    accuracy: float
    episodes: int
    unconverged: int

    @property
    def failed(self) -> bool:
        """Whether more than ``MOST_UNCONVERGED`` of the solves did: the accuracy is not to be trusted then."""
        return self.unconverged > MOST_UNCONVERGED * self.episodes


def best_of(name: str, tried: Mapping[str, Tried], reporter: Reporter) -> str:
    """The setting with the highest accuracy, the first of equally good ones; says which are passed over.

    Raises:
        UserError: solves fail in all settings.
    """
    if failed := {setting: one for setting, one in tried.items() if one.failed}:
        said = ", ".join(f"{key} ({one.unconverged} of {one.episodes} failed)" for key, one in failed.items())
        reporter.warn(f"{name}: settings passed over, since inner solves fail on validation episodes: {said}")
        if len(failed) == len(tried):
            raise UserError(f"{name}: in no setting do the inner solves converge; set the option by hand with --set")
    return max((setting for setting in tried if setting not in failed), key=lambda setting: tried[setting].accuracy)


def write_trial(file: Path, tried: Tried, pretraining_sha256: str, about: str) -> None:
    """Keeps a trial, with the checksum of the backbone that it is of."""
    write_json(file, {"of": about, "pretraining_sha256": pretraining_sha256, **asdict(tried)})


def read_trial(file: Path, pretraining_sha256: str | None) -> Tried | None:
    """The trial that was kept for that backbone; None where there is none, or a damaged one."""
    try:
        found = read_json(file)
        if found.pop("pretraining_sha256") == pretraining_sha256 and found.pop("of"):
            return Tried(**found)
    except (OSError, CorruptFile, TypeError, KeyError, AttributeError):
        pass
    return None
