"""Rates: how long stages took on this machine, and a coarse table before any have run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths, write_json
from ifsl_bench.utils.locks import locked

Rate = Annotated[float, msgspec.Meta(gt=0)]  # seconds a unit
# Seconds a unit: medians of the stored results, which two cores made. Units are pixels of images that a network is
# trained on or asked for, episodes, and sequences of sessions.
COARSE: Mapping[str, float] = {
    "pretraining": 1e-6, "features": 3e-7, "meta-training": 3.3e-3, "answering episodes": 2.5e-4,
    "answering sequences": 0.03,
}  # fmt: skip
ACCELERATED = 0.05  # of that on an accelerator


@dataclass(frozen=True)
class Amount:
    """The work of a stage."""

    kind: str  # of work, as in COARSE
    name: str  # of what takes equally long a unit, from the most telling part on: `lr+a/glyphs-5shot/cpu`
    units: float  # of work that are left; one of an earlier run is not done again
    # seconds a unit before any are known here, if better is known than the table's
    coarse: float | None = None


class Rates:
    """Seconds a unit of work, by kind and name, as the stages of earlier runs have shown them."""

    def __init__(self, home: Paths) -> None:
        self.path = home.logs / "rates.json"
        self.measured = self._read()

    def _read(self) -> dict[str, dict[str, float]]:
        with contextlib.suppress(OSError, ValueError):
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, dict[str, Rate]])
        return {}

    def seconds(self, amount: Amount | None) -> float | None:
        """About how long it takes with nothing else to do; None where nobody knows.

        By its own rate, else by that of the likest name, else by the amount's own guess, else by the table.
        """
        if amount is None:
            return None
        if not amount.units:
            return 0.0
        rate = self._likest(amount)
        if rate is None:
            rate = amount.coarse or COARSE.get(amount.kind)
            # A row's own guess is of a processor; nobody knows how much faster this row is elsewhere.
            if rate is not None and amount.coarse is None and amount.name.endswith("/cuda"):
                rate *= ACCELERATED
        return None if rate is None else rate * amount.units

    def knows(self, amount: Amount | None) -> bool:
        """Tells whether a stage like this has run here."""
        return amount is not None and (not amount.units or self._likest(amount) is not None)

    def _likest(self, amount: Amount) -> float | None:
        rates = self.measured.get(amount.kind, {})
        if amount.name in rates:
            return rates[amount.name]
        first, *_, device = amount.name.split("/")
        like = [rate for name, rate in rates.items() if name.startswith(f"{first}/") and name.endswith(f"/{device}")]
        return sum(like) / len(like) if like else None

    def learn(self, amount: Amount, seconds: float) -> None:
        """Keeps the geometric mean of this rate and of what was known; a home that cannot be written learns nothing."""
        if amount.units <= 0 or seconds <= 0:
            return
        with contextlib.suppress(OSError, UserError), locked(self.path):
            self.measured = self._read()
            rates = self.measured.setdefault(amount.kind, {})
            rate = seconds / amount.units
            rates[amount.name] = math.sqrt(rate * rates.get(amount.name, rate))
            write_json(self.path, self.measured)


def seconds_together(stages: Iterable[tuple[float, int]], workers: int, cores: int) -> float:
    """About how long stages take together, each of (seconds, threads): those that want all cores one by one, and the
    others at once, as many as there are workers."""
    alone = part = longest = 0.0
    for seconds, threads in stages:
        if workers == 1 or threads >= max(2, cores):
            alone += seconds
        else:
            part, longest = part + seconds, max(longest, seconds)
    return alone + max(part / workers, longest)


def roughly(seconds: float | None) -> str:
    """A rough time in words."""
    if seconds is None:
        return "unknown"
    if seconds < 100:
        return f"about {seconds:.0f} s"
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"about {10 * round(seconds / 10):.0f} s"
