"""ProtoNet, Imprint and LwoF against the numbers of the authors' code (float64)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Base, Query, Support
from tests.tolerances import rounding

LWOF = {
    "weight": "w_class_a",
    "to_query": "w_q",
    "keys": "k_b",
    "phi_mean": "w_p1",
    "phi_attended": "w_p2",
    "tau_query": "tau_q",
    "tau": "tau_b",
}

MEAN = rounding(torch.float64, 64 * 64)  # sums over 64 features, of numbers up to 64
LOGIT = 100 * MEAN  # of distances and products up to some hundreds


def episode(z):
    weight, bias = z["in/w_class_a"].T.contiguous(), z["in/b_class_a"]
    labels = (z["in/y_support"] - len(bias))[None]
    hidden = torch.zeros(1, len(bias), dtype=torch.bool)
    support = Support(z["in/x_support"][None], labels, hidden, F.linear(z["in/x_support"], weight, bias)[None])
    return support, Query(z["in/x_query"][None], F.linear(z["in/x_query"], weight, bias)[None])


def test_protonet(oracle):
    z = oracle("protonet_s5")
    support, query = episode(z)
    means = torch.stack([z["in/x_base_train"][z["in/y_base_train"] == k].mean(0) for k in range(12)])
    torch.testing.assert_close(means, z["prototypes_base"], rtol=0, atol=MEAN)
    base = Base(z["in/w_class_a"].T, z["in/b_class_a"], means)
    method = registry.method("protonet")(base, 5)
    torch.testing.assert_close(support.class_means(5)[0], z["prototypes_novel"], rtol=0, atol=MEAN)
    torch.testing.assert_close(method(support, query).logits[0], z["query_logits_euclidean"], rtol=0, atol=LOGIT)


def test_imprint(oracle):
    z = oracle("imprint_s5_nomask")
    support, query = episode(z)
    base = Base(z["param/w_class_a"].T, z["param/b_class_a"], torch.zeros(12, 64), float(z["param/tau"]))
    method = registry.method("imprint")(base, 5)
    torch.testing.assert_close(method(support, query).logits[0], z["query_logits_unmasked"], rtol=0, atol=LOGIT)


@pytest.fixture
def lwof(oracle):
    z = oracle("lwof_s5_nomask")
    weight = z["param/w_class_a"].T.contiguous()
    method = registry.method("lwof")(Base(weight, z["param/b_class_a"], weight), 5)
    with torch.no_grad():
        for ours, theirs in LWOF.items():
            value = z[f"param/{theirs}"]
            getattr(method, ours).copy_(value.T if theirs == "w_class_a" else value)
    return z, method


def test_lwof_logits(lwof):
    z, method = lwof
    support, query = episode(z)
    torch.testing.assert_close(method.novel_weights(support)[0], z["novel_weights"], rtol=0, atol=MEAN)
    torch.testing.assert_close(method(support, query).logits[0], z["query_logits_unmasked"], rtol=0, atol=LOGIT)


def test_lwof_gradients(lwof):
    z, method = lwof
    support, query = episode(z)
    loss = F.cross_entropy(method(support, query).logits[0], z["in/y_query"])
    assert loss.item() == pytest.approx(z["query_loss"].item(), abs=MEAN)
    loss.backward()
    assert {name for name, _ in method.named_parameters()} == set(LWOF)
    for ours, theirs in LWOF.items():
        gradient = getattr(method, ours).grad
        expected = z[f"grad/{theirs}"]
        torch.testing.assert_close(gradient.T if theirs == "w_class_a" else gradient, expected, rtol=LOGIT, atol=1e-14)


def test_lwof_of_a_batch_is_one_episode_at_a_time_with_hidden_classes(lwof):
    """Hiding classes equals removing them from the memory, the keys and the logits."""
    _, method = lwof
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 10, 64, dtype=torch.float64, generator=generator)
    q = torch.randn(3, 4, 64, dtype=torch.float64, generator=generator)
    labels = torch.arange(5).repeat(2).expand(3, -1)
    hidden = torch.zeros(3, 12, dtype=torch.bool)
    hidden[1, [2, 7]] = True
    hidden[2, [0, 3, 11]] = True
    logits = method(Support(x, labels, hidden, x[..., :12]), Query(q, q[..., :12])).logits
    for e in range(3):
        keep = ~hidden[e]
        base = Base(method.weight.detach()[keep], torch.zeros(int(keep.sum())), method.weight.detach()[keep])
        small = registry.method("lwof")(base, 5)
        with torch.no_grad():
            for name in ("to_query", "phi_mean", "phi_attended", "tau_query", "tau"):
                getattr(small, name).copy_(getattr(method, name))
            small.keys.copy_(method.keys[keep])
        none = torch.zeros(1, int(keep.sum()), dtype=torch.bool)
        alone = small(Support(x[e : e + 1], labels[:1], none, x[:1, :, :1]), Query(q[e : e + 1], q[:1, :, :1])).logits
        together = torch.cat([logits[e, :, :12][:, keep], logits[e, :, 12:]], -1)
        torch.testing.assert_close(together, alone[0], rtol=0, atol=MEAN)
