"""The learner of a tanh network, with the solver that suits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ifsl_bench.solvers.attractor_prior import QuadraticPrior
from ifsl_bench.solvers.episode_problems import Learner, Rows, WeightGroup
from ifsl_bench.solvers.lbfgs import LBFGS
from ifsl_bench.solvers.network import TanhNetwork
from ifsl_bench.solvers.network_space import Network, NetworkArgs
from ifsl_bench.solvers.objective import Objective
from ifsl_bench.solvers.outcome import Solver
from ifsl_bench.solvers.tree import Tree, dot, pack

ESCAPES = 8  # from saddles, in one solve


@dataclass(frozen=True)
class NetworkLearner(Learner):
    """h(x) = W tanh(W_2 x + b_2) + W_3 x + b. Parts: [W, b], N x (H+1); W_3, N x D; [W_2, b_2], H x (D+1).

    One centre serves all hidden units.
    """

    ways: int
    features: int
    units: int = 40
    convex: bool = False

    @property
    def objective(self) -> Objective:  # type: ignore[override]
        return TanhNetwork(self.ways, self.units)

    def onward(self, args: Tree, start: Tree, there: Tree) -> tuple[Objective, Solver]:
        objective, solver = TanhNetwork(self.ways, self.units, begin=there), self.solver(args.features.dtype)
        space = objective.space(None, args)
        z = space.initial()
        _, _, remainder = space.evaluate(z, space.image(z))  # [E]
        slope = pack(objective.gradient(start, args))
        # As near to the minimum as a search from `start` would come: much of that way is done.
        done = dot(slope, slope).sqrt() / remainder.clamp_min(torch.finfo(remainder.dtype).tiny)
        done = done.nan_to_num(1, 1).clamp_min(1e-3)  # an episode that is beyond help must not stop the others
        return objective, replace(solver, tolerance=self.tolerance(remainder.dtype) * done)

    def solver(self, dtype: torch.dtype, training: bool = False) -> LBFGS:
        tolerance = self.tolerance(dtype, training)
        return LBFGS(tolerance, gap=1e-4) if training else LBFGS(tolerance, gap=1e-8)

    def past_saddles(self, solver: Solver) -> Solver:
        return replace(solver, escapes=ESCAPES) if isinstance(solver, LBFGS) else solver

    def tolerance(self, dtype: torch.dtype, training: bool = False) -> float:
        # The minimum is flat: at 1e-5 some logits are a tenth off, which training's noise hides and a result would not.
        return 1e-10 if dtype == torch.float64 else 1e-5 if training else 1e-6

    @property
    def groups(self) -> tuple[WeightGroup, ...]:  # type: ignore[override]
        d = self.features
        return (
            WeightGroup(self.ways, self.units + 1),
            WeightGroup(self.ways, d),
            WeightGroup(self.units, d + 1, common=True),
        )

    def join(self, parts: Sequence[Tensor]) -> Tree:
        return Network(*parts)

    def arguments(self, support: Rows, priors: Sequence[QuadraticPrior]) -> Tree:
        return NetworkArgs(*support, *priors[0], *priors[1], *priors[2])

    def logits(self, v: Tree, x: Tensor) -> Tensor:
        t = torch.tanh(torch.baddbmm(v.hidden[:, None, :, -1], x, v.hidden[..., :-1].mT))  # [E, Q, H]
        outer = torch.baddbmm(v.output[:, None, :, -1], t, v.output[..., :-1].mT)
        return torch.baddbmm(outer, x, v.skip.mT)
