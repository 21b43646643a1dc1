"""The numbers of our own methods, whose results are known by their `revision`: what moves them has to raise it."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import masked_logits
from ifsl_bench.plugin.options import add_example_extras, make_method
from tests.methods.test_methods_contract import METHODS, E, K, N, Q, make_base, make_episodes

PINNED = Path(__file__).with_name("pinned_numbers.json")
ELSEWHERE = {"anil"}  # test_learn2learn.py holds its numbers against learn2learn's own code
OURS = {
    name
    for name, point in registry.registered_entry_points(registry.METHOD_GROUP).items()
    if registry.distribution_name(point) == registry.OWN_PACKAGE and name in METHODS
}
NAMES = sorted((OURS | registry.list_shorthands_by_name().keys()) - ELSEWHERE)
# Where a network is pulled at as weakly as by default, it has several minima in these episodes, and the last bit of its
# initial parameters, which processors round differently, decides between them (logits 0.3 apart). Pulled at like this
# it has one: a change of 1e-8 moves no logit by more than 2e-7, however it is rounded.
PULLED = {
    "attractor": {"gamma": 1.0}, "mlp+a": {"gamma": 1.0}, "static-attractor": {"gamma": 1.0}, "mlp+s": {"gamma": 1.0},
    "mlp": {"weight_decay": 0.01},
}  # fmt: skip
# A search stops where its gradient has fallen far enough, a step sooner or later by rounding; logits move by less.
WITHIN = 1e-4


def truncated(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0):
    """In place of PyTorch's own draw, which is not the same in all releases."""
    with torch.no_grad():
        return tensor.normal_(mean, std).clamp_(a, b)


def numbers(name: str) -> dict[str, list[float]]:
    """Revision, one query's logits in two episodes with hidden classes, and the norms of the parameters' gradients."""
    _, kind, meant = registry.resolve_method(name)
    torch.manual_seed(0)
    with mock.patch.object(torch.nn.init, "trunc_normal_", truncated):
        method = (
            make_method(kind, add_example_extras(make_base(), kind), N, {**meant, **PULLED.get(name, {})})
            .double()
            .eval()
        )
    support, query = make_episodes(method.base, hide=True)
    logits = masked_logits(method(support, query), support.hidden)
    result = {"revision": [kind.revision], "logits": logits[:2, 0].flatten().nan_to_num(neginf=-10.0).tolist()}
    if parameters := list(method.parameters()):
        target = K + torch.arange(Q).expand(E, -1) % N
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        result["gradients"] = [float(gradient.norm()) for gradient in gradients]
    return result


@pytest.mark.parametrize("name", NAMES)
def test_what_moves_a_methods_numbers_raises_its_revision(name):
    """``python -m tests.methods.test_methods_numbers`` writes them anew where it was raised, and for a new method."""
    pinned = json.loads(PINNED.read_text())[name]
    for key, values in numbers(name).items():
        close = pytest.approx(pinned[key], rel=WITHIN, abs=WITHIN * max(map(abs, pinned[key])))
        assert values == close, f"{key}: raise the revision of {name}"


if __name__ == "__main__":
    PINNED.write_text(json.dumps({name: numbers(name) for name in NAMES}, indent=1) + "\n")
