"""Methods that learn across episodes which centres pull at the fast weights, and how strongly."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ifsl_bench.plugin.method import (
    DEFAULT_GPU_MIN_EPISODES,
    AdditiveClassifier,
    Base,
    MemoryPolicy,
    Query,
    SessionOutput,
    State,
    Support,
)
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Range, SearchSpace
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.solvers import make_learner
from ifsl_bench.solvers.attractor_prior import to_prior
from ifsl_bench.solvers.episode_problems import WEIGHT_DECAY, ConvergedSolve, InnerSolve, UnrolledSolve, fixed_logsumexp
from ifsl_bench.solvers.linear import Neumann
from ifsl_bench.utils.errors import UserError

GAMMA, GAMMA_OF_ONE_SHOT = 0.01, 0.1

GradientKind = Literal["rbp", "implicit", "t-bptt"]
OPTIONS_OF_GRADIENT: Mapping[GradientKind, tuple[str, ...]] = {
    "rbp": ("steps", "damping", "rate"), "implicit": (), "t-bptt": ("steps", "rate", "converge"),
}  # fmt: skip


class AttractorMethod(AdditiveClassifier):
    """Fast weights V learned in each episode under a meta-learned regulariser R, as in Ren et al. (NeurIPS 2019).

        L(V) = mean_i CE([W_a x_i + b_a ; h(x_i; V)], y_i)  +  weight_decay/2 |V|^2  +  R(V)
        R(V) = (1/N) sum_k sum_d exp(log_gamma_d) (V_kd - u_kd)^2

    A subclass has an option ``gamma`` (default `GAMMA`) beside its own, registers what its centres u are made of, calls
    `register_log_gamma`, and answers `centres`. Its docstring gets the options below, behind its own.

    Options:
        learner: ``lr``, convex and solved by Newton's method in dual numbers, or ``mlp``, solved by L-BFGS.
        gradient: how query losses reach what is learned. ``rbp``: solved to convergence, then a damped Neumann series
            of ``steps`` terms for F(V) = V - rate grad L(V), as in the paper. ``implicit``: the exact gradient at the
            solution. ``t-bptt``: ``steps`` gradient steps from fixed initial values, differentiated through.
        steps: terms of the series (rbp), gradient steps (t-bptt).
        damping: of the series (rbp).
        rate: step size in F (rbp), or of the gradient steps (t-bptt), there no more than 1.8 over the largest
            curvature at an episode's start; the rate used is among the statistics.
        converge: whether t-bptt goes on to the minimum in evaluation, or stops after ``steps`` steps there too.
        gamma: initial exp(log_gamma); in tasks of one shot the default is 0.1.
        weight_decay: of all fast weights; the default is the released code's.
        memory: in sessions, ``none`` keeps the fast weights of earlier sessions as they are; ``supports`` keeps all
            supports, and solves for all novel classes anew in each session. In episodes they are the same.
    An option that ``gradient`` does not read is refused unless it has its default.
    """

    space: ClassVar[SearchSpace] = {
        "gamma": Range(1e-5, 10.0, log=True),
        "weight_decay": Range(1e-9, 1.0, log=True),
        LEARNING_RATE_OPTION: Range(3e-5, 3e-2, log=True),
    }

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if cls.__doc__ and AttractorMethod.__doc__:
            own, _, options = inspect.cleandoc(cls.__doc__).partition("\n\nOptions:\n")
            shared = inspect.cleandoc(AttractorMethod.__doc__).partition("\n\nOptions:\n")[2]
            cls.__doc__ = "\n".join([f"{own}\n\nOptions:", *filter(None, (options, shared)), ""])

    def __init__(
        self,
        base: Base,
        ways: int,
        *,
        learner: Literal["lr", "mlp"] = "mlp",
        gradient: GradientKind = "rbp",
        steps: int = 20,
        damping: float = 0.1,
        rate: float = 1.0,
        converge: bool = True,
        weight_decay: float = WEIGHT_DECAY,
        memory: MemoryPolicy = "none",
    ) -> None:
        super().__init__(base, ways)
        if not 0 <= weight_decay < float("inf"):
            raise UserError(f"weight_decay must be 0 or positive, and finite, not {weight_decay}")
        self.weight_decay = weight_decay
        self.meta = make_inner_solve(gradient, steps=steps, damping=damping, rate=rate, converge=converge)
        self.learner = make_learner(learner, ways, base.weight.shape[1])
        self.per_class_state = learner == "lr"  # hidden units serve all classes of a session
        start = self.learner.draw_start() if isinstance(self.meta, UnrolledSolve) else []
        self.starts = [f"start_{i}" for i in range(len(start))]
        for name, weights in zip(self.starts, start, strict=True):
            self.register_buffer(name, weights, persistent=False)

    def register_log_gamma(self, gamma: float) -> None:
        """Register log_gamma, [size] for each group of fast weights; the end of a subclass's constructor.

        All parameters move to the type and device of the base weights.

        Args:
            gamma: the initial exp(log_gamma).

        Raises:
            UserError: a gamma that is not positive and finite.
        """
        if not 0 < gamma < float("inf"):
            raise UserError(f"gamma must be positive and finite, not {gamma}")
        self.log_gamma = nn.ParameterList(torch.full((group.size,), math.log(gamma)) for group in self.learner.groups)
        self.to(self.base.weight)

    @classmethod
    def gpu_min_episodes(cls, options: Mapping[str, Any]) -> int | None:
        """Return what was measured on an H100 and 16 cores (BENCHMARKS.md).

        The cores were always faster at exact gradients of a network.
        """
        if options["learner"] == "mlp" and options["gradient"] != "t-bptt":
            return None if options["gradient"] == "implicit" else 2 * DEFAULT_GPU_MIN_EPISODES
        return DEFAULT_GPU_MIN_EPISODES

    @classmethod
    def defaults(cls, task: Task) -> dict[str, Any]:
        return {"gamma": GAMMA_OF_ONE_SHOT} if task.shots == 1 else {}

    @abstractmethod
    def centres(self, support: Support) -> list[Tensor]:
        """Return u of each group: [(E,) rows, size], or [(E,) 1, size] where one centre serves all rows."""

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        base_logsumexp = fixed_logsumexp(support.base_logits, support.hidden, earlier)  # [E, S]
        priors = [
            to_prior(u, log_gamma, self.weight_decay, group.rows)
            for group, u, log_gamma in zip(self.learner.groups, self.centres(support), self.log_gamma, strict=True)
        ]
        rows = (support.features, support.labels, base_logsumexp)
        start = [self.get_buffer(name) for name in self.starts]
        return SessionOutput(*self.meta.solve(self.learner, rows, priors, start, self.training))

    def class_logits(self, state: State, query: Query) -> Tensor:
        return self.learner.logits(state, query.features)


def make_inner_solve(gradient: GradientKind, *, steps: int, damping: float, rate: float, converge: bool) -> InnerSolve:
    """Return the `InnerSolve` that the options of `AttractorMethod` ask for.

    Args:
        gradient: how gradients of the meta-learned parameters are computed.
        steps: terms of the Neumann series with "rbp", gradient steps with "t-bptt".
        damping: of the Neumann series, at least 0 and below 1.
        rate: step size of the series or of gradient descent, positive and finite.
        converge: whether "t-bptt" goes on to the minimum in evaluation.

    Raises:
        UserError: a value out of range, or one that differs from its default where nothing reads it.
    """
    if steps < 1:
        raise UserError(f"steps must be at least 1, not {steps}")
    if not 0 <= damping < 1:
        raise UserError(f"damping must be at least 0 and below 1, not {damping}")
    if not 0 < rate < float("inf"):
        raise UserError(f"rate must be positive and finite, not {rate}")
    declared, read = inspect.signature(AttractorMethod.__init__).parameters, OPTIONS_OF_GRADIENT[gradient]
    for name, value in {"steps": steps, "damping": damping, "rate": rate, "converge": converge}.items():
        if value != declared[name].default and name not in read:
            raise UserError(
                f"{name} has no effect with gradient={gradient}, which reads {', '.join(read) or 'no such option'}: "
                f"leave it out"
            )
    if gradient == "rbp":
        return ConvergedSolve(Neumann(steps, damping, rate))
    return ConvergedSolve() if gradient == "implicit" else UnrolledSolve(steps, rate, converge)
