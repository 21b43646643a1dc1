"""Fine-tuning (Yosinski, Clune, Bengio and Lipson, NeurIPS 2014): gradient descent on the supports of each session."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.plugin.adapting import Adapting, SessionInfo, class_means
from ifsl_bench.plugin.method import Base, State
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.utils.cosine import cosine_similarities, normalise_exactly
from ifsl_bench.utils.errors import UserError

TEMPERATURE, MOMENTUM = 16.0, 0.9
CHANGED_PART_OF_WHAT = {"all": "the network", "stage": "the last stage", "head": "the classifier alone"}


class FineTune(Adapting):
    """Gradient descent on the supports of a session alone, which nothing keeps from forgetting earlier classes.

    Every class has a row w: at first the unit mean feature of a base class, or of the supports of a novel class when
    its session begins. Network and rows then minimise, over the supports of the session,

        mean CE(16 cos(h(x), w), y)

    with all classes met so far in the softmax, but for hidden base classes. All rows are free, those of earlier classes
    included. Steps are of gradient descent with momentum 0.9 on all supports at once; batch norms keep their running
    averages. With ``steps=0`` it is nearest class mean by angle, ``ncm``. Networks whose first layers stay or change
    are compared by Yosinski, Clune, Bengio & Lipson, How Transferable Are Features in Deep Neural Networks?
    (NeurIPS 2014), and papers on sessions have such a row as the lower bound. Rows that begin as class means are ours:
    theirs begin at random.

    Options:
        what: ``all`` changes every weight of the network, ``stage`` its last stage, ``head`` the rows alone.
        rate: of learning; chosen on validation episodes unless given, as are the steps.
        steps: of a session.
    """

    name = "fine-tune"
    display: ClassVar = {"fine-tune": ("fine-tuning", "gradient descent on the supports of each session")}
    space: ClassVar[SearchSpace] = {"rate": Range(1e-6, 0.1, log=True), "steps": Range(1, 300, log=True)}
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"rate": (1e-5, 1e-4, 1e-3, 1e-2), "steps": (5, 20)}

    def __init__(
        self,
        base: Base,
        ways: int,
        *,
        what: Literal["all", "stage", "head"] = "all",
        rate: float = 1e-3,
        steps: int = 20,
    ) -> None:
        super().__init__(base, ways)
        if not 0 < rate < math.inf:
            raise UserError(f"rate must be positive and finite, not {rate}")
        if steps < 0:
            raise UserError(f"steps must be 0 or more, not {steps}")
        self.what, self.rate, self.steps = what, rate, steps

    @cached_property
    def tuned_parameter_names(self) -> list[str]:
        """The names of the parameters of the network that change."""
        return [] if self.what == "head" else self.parameters_from(0 if self.what == "all" else -1)

    @classmethod
    def sees_with(cls, options: Mapping[str, Any]) -> str:
        return "images" if options.get("what", "all") == "all" else "maps:-1"

    @classmethod
    def changes_with(cls, options: Mapping[str, Any]) -> str:
        return CHANGED_PART_OF_WHAT[options.get("what", "all")]

    def start(self) -> State:
        network = self.network()
        weights = {name: network.get_parameter(name) for name in self.tuned_parameter_names}
        return {"weights": weights, "rows": normalise_exactly(self.base.prototypes)}

    def adapt(self, state: State, images: Tensor, labels: Tensor, session: SessionInfo) -> State:
        assert isinstance(state, dict)
        network = self.network(state["weights"])
        weights = {name: network.get_parameter(name) for name in self.tuned_parameter_names}
        means = class_means(network(images).detach(), labels, self.ways)
        rows = torch.cat([state["rows"], normalise_exactly(means)]).requires_grad_()
        out_of_play = F.pad(session.hidden, (0, len(rows) - len(session.hidden)))
        tuned = [*weights.values(), rows]
        speeds = [torch.zeros_like(x) for x in tuned]
        for _ in range(self.steps):
            logits = TEMPERATURE * cosine_similarities(network(images), rows)
            loss = F.cross_entropy(logits.masked_fill(out_of_play, -torch.inf), session.first_class + labels)
            gradients = torch.autograd.grad(loss, tuned)
            with torch.no_grad():
                for x, speed, gradient in zip(tuned, speeds, gradients, strict=True):
                    x.sub_(speed.mul_(MOMENTUM).add_(gradient), alpha=self.rate)
        return {"weights": weights, "rows": rows}

    def classify(self, state: State, images: Tensor) -> Tensor:
        assert isinstance(state, dict)
        return TEMPERATURE * cosine_similarities(self.network(state["weights"])(images), state["rows"])
