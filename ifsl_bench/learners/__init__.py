"""The episodes' own problems: softmax regression, a tanh network, and the attractors that pull at them.

Two objectives for `ifsl_bench.solve.minimise` come with closed forms and with coordinates in which their size is that
of the support set: `SoftmaxRegression` (convex; `DualNewton()` solves thousands of episodes a second) and `TanhNetwork`
(`LBFGS()` with v0 = None works in its dual numbers). `fold` turns an attractor into the centres and precisions they
take:

    c, p = fold(u, log_gamma, weight_decay=1e-5, rows=N)
    args = Regression(features, labels, base_logits.logsumexp(-1), c, p)
    solution = minimise(SoftmaxRegression(), DualNewton(), None, args, Implicit(Neumann()))
    novel = query @ solution.value[..., :-1].mT + solution.value[..., None, :, -1]      # [E, Q, N]

A `Learner` puts these together for the episodes of a method; see `episodic`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from ifsl_bench.common.cosine import unit

from .attractor import Memory, attention, fold, ridge
from .episodic import (
    STRONG_WEIGHT_DECAYS,
    WEIGHT_DECAY,
    WEIGHT_DECAYS,
    Converged,
    Learner,
    LinearLearner,
    Meta,
    Part,
    Unrolled,
    fixed_class,
    statistics,
)  # fmt: skip
from .regression import DualNewton, SoftmaxRegression
from .softmax import Regression

if TYPE_CHECKING:
    from .network import TanhNetwork
    from .network_learner import NetworkLearner
    from .network_space import Network, NetworkArgs

__all__ = [
    "STRONG_WEIGHT_DECAYS", "WEIGHT_DECAY", "WEIGHT_DECAYS", "Converged", "DualNewton", "Learner", "LinearLearner",
    "Memory", "Meta", "Network", "NetworkArgs", "NetworkLearner", "Part", "Regression", "SoftmaxRegression",
    "TanhNetwork", "Unrolled", "attention", "fixed_class", "fold", "learner_of", "ridge", "statistics",
    "unit",
]  # fmt: skip

_OF_NETWORKS = {
    "Network": "network_space", "NetworkArgs": "network_space", "NetworkLearner": "network_learner",
    "TanhNetwork": "network",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports what networks need where it is asked for: most methods are linear."""
    if name not in _OF_NETWORKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OF_NETWORKS[name]}"), name)


def learner_of(name: Literal["lr", "mlp"], ways: int, features: int) -> Learner:
    """The learner that an option names: ``lr``, convex, or ``mlp``, the tanh network."""
    if name == "lr":
        return LinearLearner(ways, features)
    from .network_learner import NetworkLearner

    return NetworkLearner(ways, features)
