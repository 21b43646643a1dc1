"""Changes that a user may make to meta-training. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ifsl_bench.protocols.tasks.task import MetaTraining
from ifsl_bench.protocols.tasks.task_limits import AT_ONCE, STEPS
from ifsl_bench.utils.errors import UserError, unknown

TAKES = {
    "episodes_per_step": "a whole number", "select": "last or best", "rate": "a number", "views": "a whole number",
    "steps": "a whole number", "sessions": "a whole number",
}  # fmt: skip


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that a user may make to meta-training (``--train name=value``).

    Attributes:
        episodes_per_step: episodes whose mean loss makes one step; the paper uses 1.
        select: "last" keeps the final parameters, as Ren et al. (2019); "best" those with the best validation accuracy.
        rate: the learning rate to begin with; 0 for the schedule's own.
        views: augmented views of each meta-training image; 1 means the plain images.
        sessions: of a training episode. More than 1 make it a sequence: this many groups of as many novel classes as
            the task's episodes have, learned one after the other; the loss is the mean of the losses after each.
        steps: 0 for the schedule of the method or task; otherwise the schedule is stretched to this many steps.
    """

    episodes_per_step: int = 1
    select: Literal["last", "best"] = "last"
    rate: float = 0.0
    views: int = 1
    steps: int = 0
    sessions: int = 1

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Training:
        """Read the changes from strings or values.

        Raises:
            UserError: unknown name (with the nearest ones), or an impossible value.
        """
        for key in values:
            if key not in TAKES:
                raise unknown("training option", key, TAKES)
            if isinstance(values[key], bool):
                raise UserError(f"--train: {key} is not {values[key]}")
        for key, value in values.items():
            try:
                msgspec.convert({key: value}, cls, strict=False)
            except (msgspec.ValidationError, UnicodeError) as error:  # the latter for half a character
                raise UserError(f"--train: {key} takes {TAKES[key]}, not {value!r}") from error
        training = msgspec.convert(dict(values), cls, strict=False)
        if "steps" in values and training.steps < 1:
            raise UserError("--train: steps must be at least 1; leave it out for the task's own")
        counts = training.episodes_per_step, training.views, training.sessions
        if min(counts) < 1:
            raise UserError("--train: episodes_per_step, views and sessions must be at least 1")
        if max(counts) > AT_ONCE or training.steps > STEPS:
            raise UserError(f"--train: episodes_per_step, views and sessions must be at most {AT_ONCE:,}, steps at "
                            f"most {STEPS:,}")  # fmt: skip
        if not 0 <= training.rate < math.inf:
            raise UserError(f"--train: rate must be positive and finite (or 0 for the schedule's), not {training.rate}")
        return training

    def changes(self) -> dict[str, Any]:
        """Return the values that are not the default."""
        return {
            f.name: getattr(self, f.name) for f in msgspec.structs.fields(self) if getattr(self, f.name) != f.default
        }

    def applied(self, spec: MetaTraining) -> MetaTraining:
        """Return the schedule with ``rate`` and ``steps``."""
        if self.rate:
            spec = msgspec.structs.replace(spec, schedule=msgspec.structs.replace(spec.schedule, rate=self.rate))
        if not self.steps:
            return spec
        factor = self.steps / spec.steps
        every = max(1, round(spec.validate_every * factor))
        schedule = spec.schedule.stretched(factor)
        return msgspec.structs.replace(spec, steps=self.steps, schedule=schedule, validate_every=every)
