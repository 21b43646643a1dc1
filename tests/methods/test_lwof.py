"""LwoF beside its formulas written out: Gidaris and Komodakis' (``normalise=True``), and Ren et al.'s."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from ifsl_bench.methods.lwof import LwoF
from torch import Tensor

from ifsl_bench.plugin.method import Base, Query, Support, masked_logits

N = 5  # novel classes
# Of two ways to one formula in double precision: sums of 64 products, numbers of some tens, two softmaxes on the way.
# Each of some hundred steps may lose a unit in the last place, 2e-16 of the number.
ROUNDING = 1e-12


def published(p: dict[str, Tensor], x: Tensor, labels: Tensor, queries: Tensor, hidden: Tensor) -> Tensor:
    """Sections 3.1 and 3.2 of the paper for one episode, image by image; -> logits of the shown classes, base first.

    z' / |z'| everywhere; Att(phi_q z', k_b) a softmax over base classes of gamma cos; phi_q with a bias. Without that
    bias it is Ren et al.'s: lengths in the attention are 1e-5 longer, and what is mixed has the length it has.
    """
    length = lambda v: v / v.pow(2).sum().sqrt()  # noqa: E731
    mixed, unit = length, length
    if "query_bias" not in p:
        mixed, unit = torch.clone, lambda v: v / (v.pow(2).sum().sqrt() + 1e-5)
    classes = [b for b in range(len(hidden)) if not hidden[b]]
    memory, keys = [mixed(p["weight"][b]) for b in classes], [unit(p["keys"][b]) for b in classes]
    novel = []
    for k in range(N):
        images = [mixed(x[i]) for i in range(len(x)) if labels[i] == k]
        attended = []
        for z in images:
            query = unit(p["to_query"].T @ z + p.get("query_bias", 0))
            grades = torch.stack([p["tau_query"] * (query * key).sum() for key in keys]).exp()
            attended.append(sum(a * w for a, w in zip(grades / grades.sum(), memory, strict=True)))
        mean, attended_mean = sum(images) / len(images), sum(attended) / len(attended)
        novel.append(p["phi_mean"] * mean + p["phi_attended"] * attended_mean)
    weights = [*(length(p["weight"][b]) for b in classes), *map(length, novel)]
    return torch.stack([torch.stack([p["tau"] * (length(q) * w).sum() for w in weights]) for q in queries])


@pytest.mark.parametrize("shots", [1, 5])
@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_logits_and_gradients_are_those_of_the_published_formulas(normalise, hide, shots):
    D, K, E, Q = 64, 12, 2, 6
    generator = torch.Generator().manual_seed(shots)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    weight, x, q = draw(K, D), 3 * draw(E, N * shots, D), 3 * draw(E, Q, D)
    method = LwoF(Base(weight, torch.zeros(K), weight, 9.0), N, normalise=normalise)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.copy_(draw(*parameter.shape) if parameter.dim() else 7 + draw())
        method.to_query.mul_(0.3)
    labels = torch.arange(N).repeat_interleave(shots)
    hidden = torch.zeros(E, K, dtype=torch.bool)
    if hide:
        hidden[0, [1, 4, 5, 8, 11]] = hidden[1, [0, 2, 3, 6, 7]] = True
    target = torch.tensor([9, K, K + 1, K + 2, K + 3, K + 4])
    support = Support(x, labels.expand(E, -1), hidden, x[..., :K])
    ours = masked_logits(method(support, Query(q, q[..., :K])), hidden)
    F.cross_entropy(ours.flatten(0, 1), target.repeat(E)).backward()
    gradients = {name: parameter.grad for name, parameter in method.named_parameters()}

    copies = {name: value.detach().clone().requires_grad_() for name, value in method.named_parameters()}
    loss = torch.zeros((), dtype=torch.float64)
    for e in range(E):
        shown_mask = torch.cat([~hidden[e], torch.ones(N, dtype=torch.bool)])
        theirs = published(copies, x[e], labels, q[e], hidden[e])
        assert float((ours[e][:, shown_mask] - theirs).detach().abs().max()) < ROUNDING
        loss = loss + F.cross_entropy(theirs, (shown_mask.cumsum(0) - 1)[target]) / E
    loss.backward()
    assert set(gradients) == set(copies)
    for name, copy in copies.items():
        assert float((gradients[name] - copy.grad).abs().max()) < ROUNDING, name


@pytest.mark.parametrize("normalise", [False, True])
def test_initial_values_of_gidaris_and_komodakis(normalise):
    torch.manual_seed(0)
    K, D = 100, 256
    base = Base(torch.randn(K, D), torch.zeros(K), torch.zeros(K, D), scale=13.5)
    method = LwoF(base, 5, normalise=normalise, init="gidaris")
    noise = method.to_query.detach() - torch.eye(D)
    assert float(noise.std()) == pytest.approx(0.001, rel=0.02)  # of 65,000 and 25,600 draws: four standard errors
    assert float(method.keys.detach().std()) == pytest.approx(math.sqrt(2 / D), rel=0.02)
    assert method.tau.item() == 13.5
    assert method.tau_query.item() == 10
    assert torch.equal(method.weight, base.weight)
    assert ("query_bias" in method.state_dict()) == normalise
    if normalise:
        assert not method.query_bias.any()
    torch.manual_seed(0)
    torch.randn(K, D)
    plain = LwoF(base, 5)
    assert plain.tau.item() == 10
    torch.testing.assert_close(
        plain.to_query.detach(), 100 * noise, rtol=1e-3, atol=1e-4
    )  # noise of 1e-3 beside ones in float32
