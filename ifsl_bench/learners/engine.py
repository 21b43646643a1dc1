"""Two ways to the same numbers, and the one place that chooses between them.

All episodes at once in torch (`dual`), or one after the other in NumPy and double precision (`single`): for the few
episodes of a meta-training step on a CPU a call of torch costs several times what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ifsl_bench.solve.outcome import Outcome
from ifsl_bench.solve.single import SingleSpace

from . import dual, single
from .softmax import Regression

FEW = 6  # episodes up to which one after the other is faster than all at once, for LR and MLP, at 1 and 5 shots


class Engine(Protocol):
    """What there is in both ways; both modules say it in detail."""

    def newton(
        self, args: Regression, tolerance: float | None, max_steps: int, inner_steps: int, chunk: int
    ) -> Outcome: ...

    def system(self, k: Tensor, pi: Tensor, b: Tensor, tolerance: float, max_steps: int) -> tuple[Tensor, Tensor]: ...

    def one_by_one(self, space: Any) -> tuple[Any, Sequence[SingleSpace]] | None: ...


def engine(like: Tensor, most: int | None = None) -> Engine:
    """The faster way for the episodes of `like` [E, ...]; most: solve up to so many one by one, by default FEW."""
    few = like.device.type == "cpu" and 1 <= like.shape[0] <= (FEW if most is None else most)
    return single if few else dual
