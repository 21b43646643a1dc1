"""ProtoNet, Imprint and LwoF against the numbers of the authors' code (float64)."""

from __future__ import annotations

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
    method = registry.get_method("protonet")(base, 5)
    torch.testing.assert_close(support.class_means(5)[0], z["prototypes_novel"], rtol=0, atol=MEAN)
    torch.testing.assert_close(method(support, query).logits[0], z["query_logits_euclidean"], rtol=0, atol=LOGIT)


def test_class_means_of_classes_of_different_size():
    x = torch.arange(12.0).view(1, 4, 3)
    none = torch.zeros(1, 0)
    means = Support(x, torch.tensor([[1, 0, 1, 1]]), none.bool(), none.expand(1, 4, 0)).class_means(2)
    torch.testing.assert_close(means, torch.stack([x[0, 1], x[0, [0, 2, 3]].mean(0)])[None])


def test_imprint(oracle):
    z = oracle("imprint_s5_nomask")
    support, query = episode(z)
    base = Base(z["param/w_class_a"].T, z["param/b_class_a"], torch.zeros(12, 64), float(z["param/tau"]))
    method = registry.get_method("imprint")(base, 5)
    torch.testing.assert_close(method(support, query).logits[0], z["query_logits_unmasked"], rtol=0, atol=LOGIT)


def test_lwof(oracle):
    z = oracle("lwof_s5_nomask")
    weight = z["param/w_class_a"].T.contiguous()
    method = registry.get_method("lwof")(Base(weight, z["param/b_class_a"], weight), 5)
    with torch.no_grad():
        for ours, theirs in LWOF.items():
            value = z[f"param/{theirs}"]
            getattr(method, ours).copy_(value.T if theirs == "w_class_a" else value)
    support, query = episode(z)
    torch.testing.assert_close(method.compose_novel_weights(support)[0], z["novel_weights"], rtol=0, atol=MEAN)
    logits = method(support, query).logits[0]
    torch.testing.assert_close(logits, z["query_logits_unmasked"], rtol=0, atol=LOGIT)
    F.cross_entropy(logits, z["in/y_query"]).backward()
    assert {name for name, _ in method.named_parameters()} == set(LWOF)
    for ours, theirs in LWOF.items():
        gradient = getattr(method, ours).grad
        expected = z[f"grad/{theirs}"]
        torch.testing.assert_close(gradient.T if theirs == "w_class_a" else gradient, expected, rtol=LOGIT, atol=1e-14)
