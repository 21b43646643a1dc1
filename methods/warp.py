"""WaRP: weights in a rotated basis, of which the important coefficients stay (Kim, Han, Seo and Moon, ICLR 2023)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.plugin.adapting import Adapting, SessionInfo, class_means
from ifsl_bench.plugin.method import Base, State
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.utils.cosine import cosine_similarities, normalise_exactly
from ifsl_bench.utils.errors import UserError

TEMPERATURE, MOMENTUM = 16.0, 0.9
COVARIANCE_IMAGES, COVARIANCE_BATCH = 2560, 32  # base images whose inputs give the bases
IMPORTANCE_BATCH_SIZE = 60  # base images of each gradient
CHANGED_PART_OF_WHAT = {"all": "the network", "stage": "the last stage"}

TensorByName = dict[str, Tensor]


class WaRP(Adapting):
    """Each session tunes the coefficients of the weights that were not important for earlier classes.

    The weight W of a layer, [outputs, inputs], is A U' with U the singular vectors of the second moments X' X of the
    layer's inputs on base images (of a convolution, of all patches). A coefficient's importance is the sum of
    |dL/dA| over batches, with

        L = mean CE(16 cos(h(x), w), y)

    and w the mean feature of each class. The ``keep`` most important coefficients of the whole network stay as they
    are. A session appends the mean features of its classes to w, makes ``steps`` steps of gradient descent with
    momentum 0.9 on L of all its supports, in the free coefficients alone, and then keeps as many more, by the
    importances of its supports one by one. Biases and batch norms stay. With ``keep=1`` it is nearest class mean by
    angle, ``ncm``. Kim, Han, Seo & Moon, Warping the Space: Weight Space Rotation for Class-Incremental Few-Shot
    Learning (ICLR 2023), with numbers of the released code. Differences: base images for U are spread evenly, theirs
    drawn at random. Importances are of all base classes, those included that an episode hides. Bases and importances of
    the base session are not counted in its bytes.

    Options:
        what: ``all`` layers of the network, or those of its last ``stage``.
        keep: the share of the coefficients that each session keeps.
        rate: of learning.
        steps: of a session; epochs in their code, whose batch is a whole session.
    """

    name = "warp"
    display: ClassVar = {"warp": ("WaRP", "tunes what base classes need least, rotated")}
    space: ClassVar[SearchSpace] = {"keep": Range(0.01, 0.99), "rate": Range(1e-5, 0.3, log=True)}

    def __init__(
        self,
        base: Base,
        ways: int,
        *,
        what: Literal["all", "stage"] = "all",
        keep: float = 0.1,
        rate: float = 0.01,
        steps: int = 30,
    ) -> None:
        super().__init__(base, ways)
        if not 0 <= keep <= 1:
            raise UserError(f"keep must be between 0 and 1, not {keep}")
        if not 0 < rate < math.inf:
            raise UserError(f"rate must be positive and finite, not {rate}")
        if steps < 0:
            raise UserError(f"steps must be 0 or more, not {steps}")
        self.what, self.keep, self.rate, self.steps = what, keep, rate, steps

    @classmethod
    def sees_with(cls, options: Mapping[str, Any]) -> str:
        return "images" if options.get("what", "all") == "all" else "maps:-1"

    @classmethod
    def changes_with(cls, options: Mapping[str, Any]) -> str:
        return CHANGED_PART_OF_WHAT[options.get("what", "all")]

    @cached_property
    def layer_input_bases(self) -> TensorByName:
        """U of each layer, by the name of its weight, [inputs, inputs]."""
        network, used = self.network(), set(self.parameters_from(0 if self.what == "all" else -1))
        moments: TensorByName = {}

        def add_inputs(layer: nn.Module, given: tuple[Tensor], name: str) -> None:
            x = given[0]
            if isinstance(layer, nn.Conv2d):
                how = layer.kernel_size, layer.dilation, layer.padding, layer.stride
                x = F.unfold(x, *how).mT.flatten(0, 1)  # type: ignore[arg-type]
            moments[name] = moments.get(name, 0) + x.mT @ x

        for name, layer in network.named_modules():
            whole = isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
            if whole and f"{name}.weight" in used:
                layer.register_forward_pre_hook(lambda it, given, name=f"{name}.weight": add_inputs(it, given, name))
        rows, _ = self.base_images()
        chosen = torch.linspace(0, len(rows) - 1, min(len(rows), COVARIANCE_IMAGES)).long()
        with torch.no_grad():
            for part in chosen.split(COVARIANCE_BATCH):
                network(self.rows_to_images(rows[part]))
        return {name: torch.linalg.svd(moment)[0] for name, moment in moments.items()}

    @cached_property
    def coefficients_kept_for_base_classes(self) -> TensorByName:
        """The coefficients that the base classes keep, bool [outputs, inputs] of each layer."""
        assert self.base.images is not None
        features, of_features = self.base.images()
        means = class_means(features, of_features, len(self.base.weight)).to(self.base.weight)
        rows, labels = self.base_images()
        batches = torch.arange(len(rows)).split(IMPORTANCE_BATCH_SIZE)
        images = ((self.rows_to_images(rows[at]), labels[at].to(means.device)) for at in batches)
        hidden = torch.zeros(len(means), dtype=torch.bool, device=means.device)
        return self.find_most_important_coefficients(self.network(), images, means, hidden)

    def find_most_important_coefficients(
        self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], rows: Tensor, hidden: Tensor
    ) -> TensorByName:
        """Return the share ``keep`` of all coefficients with the largest importances, bool [outputs, inputs] each.

        Args:
            network: as it is now.
            batches: images, and their labels among the classes.
            rows: w of all classes, [C, D].
            hidden: [C] bool, classes that are in no softmax.
        """
        importances = {name: torch.zeros(()) for name in self.layer_input_bases}
        for images, labels in batches:
            for name, gradient in self.compute_coefficient_gradients(network, images, labels, rows, hidden).items():
                importances[name] = importances[name].to(gradient) + gradient.abs()
        flat = torch.cat([x.flatten() for x in importances.values()])
        count = round(self.keep * len(flat))
        least = flat.kthvalue(len(flat) - count + 1).values if count else torch.inf
        return {name: x >= least for name, x in importances.items()}

    def compute_coefficient_gradients(
        self, network: nn.Module, images: Tensor, labels: Tensor, rows: Tensor, hidden: Tensor
    ) -> TensorByName:
        """Return dL/dA of each layer, [outputs, inputs].

        Arguments are those of :meth:`find_most_important_coefficients`.
        """
        weights = [network.get_parameter(name) for name in self.layer_input_bases]
        with torch.enable_grad():
            logits = TEMPERATURE * cosine_similarities(network(images), rows)
            loss = F.cross_entropy(logits.masked_fill(hidden, -torch.inf), labels)
            found = torch.autograd.grad(loss, weights)
        return {
            name: x.flatten(1) @ basis for x, (name, basis) in zip(found, self.layer_input_bases.items(), strict=True)
        }

    def start(self) -> State:
        network = self.network()
        weights = {name: network.get_parameter(name) for name in self.layer_input_bases}
        return {
            "weights": weights,
            "kept": self.coefficients_kept_for_base_classes,
            "rows": normalise_exactly(self.base.prototypes),
        }

    def adapt(self, state: State, images: Tensor, labels: Tensor, session: SessionInfo) -> State:
        assert isinstance(state, dict)
        network = self.network(state["weights"])
        weights = {name: network.get_parameter(name) for name in self.layer_input_bases}
        with torch.no_grad():
            rows = torch.cat([state["rows"], normalise_exactly(class_means(network(images), labels, self.ways))])
        labels = session.first_class + labels
        hidden = F.pad(session.hidden, (0, len(rows) - len(session.hidden)))
        speeds = {name: torch.zeros_like(kept, dtype=rows.dtype) for name, kept in state["kept"].items()}
        for _ in range(self.steps):
            for name, gradient in self.compute_coefficient_gradients(network, images, labels, rows, hidden).items():
                speed = speeds[name].mul_(MOMENTUM).add_(gradient.masked_fill(state["kept"][name], 0.0))
                with torch.no_grad():
                    weights[name].sub_(
                        (speed @ self.layer_input_bases[name].mT).view_as(weights[name]), alpha=self.rate
                    )
        one_by_one = zip(images.split(1), labels.split(1), strict=True)
        new = self.find_most_important_coefficients(network, one_by_one, rows, hidden)
        kept = {name: mask | new[name] for name, mask in state["kept"].items()}
        return {"weights": weights, "kept": kept, "rows": rows}

    def classify(self, state: State, images: Tensor) -> Tensor:
        assert isinstance(state, dict)
        return TEMPERATURE * cosine_similarities(self.network(state["weights"])(images), state["rows"])
