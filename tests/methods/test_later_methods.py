"""Methods from after the paper against the numbers of their authors' code, and against formulas written out.

The numbers in tests/oracle/{teen,slda,fecam,fecam_options,subspace,castle,acastle,cec,ncm,ranpac}_s5.npz were computed
with the released code of each paper, run in double precision on the CPU (calls for a GPU and casts to single precision
taken out), on one episode of 5 novel and 12 base classes with 16 normal random features, which is in the files too;
fecam_options has their absolute values. Those of ncm are of the base model in CEC's code, with new classes by the
mean and the cosine (avg_cos).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ifsl_bench.methods.lda import LDA, invert_covariance
from torch import nn

from ifsl_bench.backbones.features import ClassMoments
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Base, Query, Support
from ifsl_bench.plugin.options import is_trainable
from ifsl_bench.utils.errors import UserError

K, N = 12, 5


def method(name: str, base: Base, **options):
    torch.manual_seed(0)
    return registry.get_method(name)(base, N, **options).double().eval()


def base_of(z, weight=None, bias=None, scale: float = 1.0) -> Base:
    starts = np.searchsorted(z["in/y_base"].numpy(), np.arange(K + 1))
    moments = ClassMoments.from_features(z["in/x_base"].numpy(), starts)
    means, counts, covariance = (torch.from_numpy(x) for x in (moments.means, moments.counts, moments.covariance))
    weight = means if weight is None else weight
    bias = torch.zeros(K, dtype=torch.float64) if bias is None else bias
    return Base(weight, bias, means, scale, counts, covariance)


def episode(z, base: Base, hide: tuple[int, ...] = ()) -> tuple[Support, Query]:
    x, q = z["in/x_support"][None], z["in/x_query"][None]
    hidden = torch.zeros(1, K, dtype=torch.bool)
    hidden[0, list(hide)] = True
    support = Support(x, (z["in/y_support"] - K)[None].long(), hidden, F.linear(x, base.weight, base.bias))
    return support, Query(q, F.linear(q, base.weight, base.bias))


def close(actual, expected, tolerance: float = 1e-10) -> None:
    """The default is for formulas alone: rounding, 2e-16, of sums of at most a hundred numbers up to a thousand, with
    room for a condition of some thousands."""
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("run", ["a", "b"])
def test_teen(oracle, run):
    z = oracle("teen_s5")
    model = method(
        "teen", base_of(z, scale=16.0), alpha=float(z[f"{run}/shift_weight"]), tau=float(z[f"{run}/softmax_t"])
    )
    close(model(*episode(z, model.base)).logits[0], z[f"{run}/logits"])


def test_teen_without_a_share_of_base_classes_is_the_nearest_mean_by_angle(oracle):
    z = oracle("teen_s5")
    base = base_of(z)
    means = torch.cat([base.prototypes, z["in/x_support"].view(N, -1, 16).mean(1)])
    expected = F.cosine_similarity(z["in/x_query"][:, None], means[None], dim=-1)
    close(method("teen", base, alpha=0.0)(*episode(z, base)).logits[0], expected)


@pytest.mark.parametrize("run", ["a", "b"])
def test_lda_in_the_form_of_deep_slda(oracle, run):
    z = oracle("slda_s5")
    model = method("lda", base_of(z), form="slda", shrinkage=float(z[f"{run}/shrinkage"]))
    logits = model(*episode(z, model.base)).logits[0]
    expected = z[f"{run}/scores"]  # the same up to a number for each query
    close(logits - logits[:, :1], expected - expected[:, :1], 1e-8)


@pytest.mark.parametrize("run", ["a", "b"])
def test_lda_in_the_form_of_fecam(oracle, run):
    z = oracle("fecam_s5")
    base = base_of(z)
    close(base.covariance, z["covariance"])
    model = method("lda", base, form="fecam", shrinkage=float(z[f"{run}/alpha"]))
    logits = model(*episode(z, base)).logits[0]
    expected = -z[f"{run}/distances"] / 2
    close(logits - logits[:, :1], expected - expected[:, :1], 1e-7)  # their unit vectors are off by 1e-8


@pytest.mark.parametrize("run", ["a", "b", "c"])
def test_lda_in_the_form_of_fecam_with_its_options_against_its_code(oracle, run):
    """Powers with covariances of classes, covariances of classes alone, and powers with a common one, shrunk once."""
    z = oracle("fecam_options_s5")
    base = replace(base_of(z), images=lambda: (z["in/x_base"], z["in/y_base"]))
    options = {"tukey": float(z[f"{run}/beta"]), "per_class": bool(z[f"{run}/per_class"])}
    model = method("lda", base, form="fecam", shrinkage=float(z[f"{run}/alpha"]), **options)
    logits, expected = model(*episode(z, base)).logits[0], -z[f"{run}/distances"] / 2
    if not options["per_class"]:  # the same up to a number for each query
        logits, expected = logits - logits[:, :1], expected - expected[:, :1]
    close(logits, expected, 1e-9)


@pytest.mark.parametrize("per_class", [False, True])
def test_the_parts_of_fecam_can_be_asked_for_in_a_run(per_class):
    """The class is made beside a small base classifier before a job is: its images must have a covariance."""
    assert not is_trainable(LDA, {"form": "fecam", "tukey": 0.5, "per_class": per_class})


@pytest.mark.parametrize("tukey", [0.5, 1.0])
@pytest.mark.parametrize("per_class", [True, False])
@pytest.mark.parametrize("shots", [1, 5])
def test_lda_in_the_form_of_fecam_with_its_options(tukey, per_class, shots):
    """The paper's steps for one query and one class at a time, in NumPy: powers, covariance, shrinkage, correlation,
    unit vectors, distance."""
    rng, size, gamma = np.random.default_rng(3), 6, 0.7
    x = np.abs(rng.normal(size=(N, shots, size)) + rng.normal(size=(N, 1, size)))
    queries, base_x = (
        np.abs(rng.normal(size=(4, size))),
        np.abs(rng.normal(size=(K, 9, size)) + rng.normal(size=(K, 1, size))),
    )
    images = torch.from_numpy(base_x.reshape(-1, size)), torch.arange(K).repeat_interleave(9)
    means, ones = torch.from_numpy(base_x.mean(1)), torch.ones(1, N * shots, K, dtype=torch.float64)
    within = torch.eye(size, dtype=torch.float64)  # of which the options make no use, but with tukey = 1
    if tukey == 1:
        apart = (base_x - base_x.mean(1, keepdims=True)).reshape(-1, size)
        within = torch.from_numpy(apart.T @ apart / len(apart))
    base = Base(means, torch.zeros(K).double(), means, 1.0, torch.full((K,), 9.0).double(), within, lambda: images)
    labels = torch.arange(N).repeat_interleave(shots)[None]
    support = Support(torch.from_numpy(x.reshape(1, -1, size)), labels, torch.zeros(1, K, dtype=torch.bool), ones)
    model = method("lda", base, form="fecam", shrinkage=gamma, tukey=tukey, per_class=per_class)
    logits = model(support, Query(torch.from_numpy(queries)[None], ones[:, :4])).logits[0].numpy()

    def correlation(s):
        off = [s[i, j] for i in range(size) for j in range(size) if i != j and s[i, j] != 0]
        mean = sum(off) / len(off)
        s = np.array(
            [[s[i, j] + gamma * (np.trace(s) / size if i == j else mean) for j in range(size)] for i in range(size)]
        )
        return np.array([[s[i, j] / np.sqrt(s[i, i] * s[j, j]) for j in range(size)] for i in range(size)])

    def distance(q, mean, metric):
        apart = q**tukey / np.linalg.norm(q**tukey) - mean**tukey / np.linalg.norm(mean**tukey)
        return apart @ metric @ apart

    of_base = base_x**tukey
    common = sum(np.cov(features.T, bias=True) for features in of_base) / K
    expected = np.empty((4, K + N))
    for k, features in enumerate([*base_x, *x]):
        if not per_class:
            metric = np.linalg.inv(correlation(common))
        elif len(features) == 1:
            metric = np.eye(size)
        else:
            metric = np.linalg.inv(correlation(np.cov((features**tukey).T)))
        expected[:, k] = [-distance(q, features.mean(0), metric) / 2 for q in queries]
    if not per_class:  # the same up to a number for each query
        logits, expected = logits - logits[:, :1], expected - expected[:, :1]
    np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)


def test_options_of_fecam_are_refused_where_they_have_no_meaning(oracle):
    base = base_of(oracle("fecam_s5"))
    without_images = {"form": "fecam", "per_class": True}, "has only their means"
    for options, reason in (
        ({"tukey": 0.5}, "form=fecam"),
        without_images,
        ({"form": "fecam", "tukey": 0.0}, "positive"),
    ):
        with pytest.raises(UserError, match=reason):
            method("lda", base, **options)


def test_the_correction_of_lda_is_what_noisy_means_add_to_a_distance_on_average():
    """Means of n images drawn about the true ones: corrected logits are on average those of the true means."""
    g = torch.Generator().manual_seed(0)
    episodes, features, shots = 20_000, 6, 3
    mix = torch.randn(features, features, generator=g, dtype=torch.float64)
    means = torch.randn(K + N, features, generator=g, dtype=torch.float64)
    many = torch.full((K,), 1e9, dtype=torch.float64)
    base = Base(means[:K], torch.zeros(K, dtype=torch.float64), means[:K], 1.0, many, mix @ mix.T)
    labels = torch.arange(N).repeat_interleave(shots)
    noise = torch.randn(episodes, N * shots, features, generator=g, dtype=torch.float64) @ mix.T
    hidden = torch.zeros(episodes, K, dtype=torch.bool)
    support = Support(means[K + labels] + noise, labels.expand(episodes, -1), hidden, noise[..., :1].expand(-1, -1, K))
    queries = torch.randn(1, 4, features, generator=g, dtype=torch.float64)
    query = Query(queries.expand(episodes, -1, -1), queries[..., :1].expand(episodes, -1, K))
    sure = Support(means[K + labels][None], labels[None], hidden[:1], support.base_logits[:1])
    for form, apart in (("corrected", 0.0), ("slda", features / shots / 2)):
        logits = method("lda", base, form=form, shrinkage=0.0)(support, query).logits.mean(0)
        true = method("lda", base, form="slda", shrinkage=0.0)(sure, Query(queries, query.base_logits[:1])).logits[0]
        torch.testing.assert_close(true - logits, F.pad(torch.full((4, N), apart).double(), (K, 0)), atol=0.05, rtol=0)


@pytest.mark.parametrize("form", ["corrected", "slda", "fecam"])
def test_lda_of_the_others_does_not_depend_on_where_hidden_classes_are(oracle, form):
    z = oracle("slda_s5")
    base = base_of(z)
    hide = (2, 7, 8)
    elsewhere = base.prototypes.clone()
    elsewhere[list(hide)] += 5.0
    inputs = episode(z, base, hide)
    logits, moved_logits = (
        method("lda", replace(base, prototypes=means), form=form)(*inputs).logits[0]
        for means in (base.prototypes, elsewhere)
    )
    keep = [k for k in range(K + N) if k not in hide]
    logits, moved_logits = logits[:, keep], moved_logits[:, keep]
    close(logits - logits[:, :1], moved_logits - moved_logits[:, :1], 1e-9)


@pytest.mark.parametrize("rank", [3, 8])
def test_the_inverse_of_a_covariance_is_the_pseudo_inverse_where_there_is_none(rank):
    x = np.random.default_rng(0).normal(size=(rank, 8))
    result = invert_covariance(torch.from_numpy(x.T @ x))
    np.testing.assert_allclose(
        result, np.linalg.pinv(x.T @ x, rcond=1e-10, hermitian=True), rtol=1e-6, atol=1e-9
    )  # of eigenvalues down to the cut


def test_lda_says_what_it_lacks(oracle):
    z = oracle("slda_s5")
    base = base_of(z)
    with pytest.raises(UserError, match="without the covariance"):
        method("lda", Base(base.weight, base.bias, base.prototypes))
    with pytest.raises(UserError, match=r"between 0 and 1, not 1\.5"):
        method("lda", base, shrinkage=1.5)
    still = Base(base.weight, base.bias, base.prototypes, 1.0, base.counts, torch.full_like(base.covariance, math.nan))
    with pytest.raises(UserError, match="has no inverse"):
        method("lda", still)


def fixed_base(z) -> Base:
    return base_of(z, weight=z["in/w_base"], bias=z["in/b_base"])


@pytest.mark.parametrize("run", ["a", "b"])
def test_subspace_finds_the_minimum_of_the_released_objective(oracle, run):
    """Theirs was minimised with PyTorch's L-BFGS to a gradient of 1e-8."""
    z = oracle("subspace_s5")
    base = fixed_base(z)
    options = {"gamma": float(z[f"{run}/gamma"]), "weight_decay": float(z[f"{run}/decay"])}
    prediction = method("subspace", base, **options)(*episode(z, base))
    close(prediction.logits[0], z[f"{run}/logits"], 1e-5)
    assert not prediction.statistics["solver_unconverged"].any()


def test_subspace_pulls_at_what_is_outside_the_span_alone(oracle):
    """With a strong pull, novel weights lie in the span; and there the minimum is that of LR in its coordinates."""
    z = oracle("subspace_s5")
    base = fixed_base(z)
    support, query = episode(z, base)
    out = torch.linalg.svd(base.weight).Vh[K:]  # [D - K, D], orthogonal to the span
    moved = Query(query.features + 3 * out[0], query.base_logits)
    for gamma, moves in ((1e6, False), (1e-3, True)):
        model = method("subspace", base, gamma=gamma, weight_decay=1e-2)
        logits, moved_logits = model(support, query).logits[0, :, K:], model(support, moved).logits[0, :, K:]
        assert bool((logits - moved_logits).abs().max() > 1e-2) == moves
    model = method("subspace", base, gamma=1e6, weight_decay=1e-2)
    within = torch.linalg.qr(base.weight.T).Q  # [D, K]
    small = Support(support.features @ within, support.labels, support.hidden, support.base_logits)
    flat = Base(base.weight @ within, base.bias, base.prototypes @ within)
    plain = method("ridge", flat, weight_decay=1e-2)(small, Query(query.features @ within, query.base_logits))
    close(model(support, query).logits, plain.logits, 1e-4)


def test_subspace_is_refused_where_the_base_weights_span_all_features(oracle):
    z = oracle("subspace_s5")
    weight = torch.randn(20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    base = Base(weight, torch.zeros(20), weight)
    with pytest.raises(UserError, match=r"20 base classes span all 16 features: nothing is left .*--method lr"):
        method("subspace", base)
    equal = torch.cat([fixed_base(z).weight] * 2)  # more classes than features, and a span of 12 dimensions
    assert method("subspace", Base(equal, torch.zeros(24), equal)).span.shape == (16, 12)


CASTLE = {
    "to_query": "slf_attn.w_qs.weight",
    "to_key": "slf_attn.w_ks.weight",
    "to_value": "slf_attn.w_vs.weight",
    "to_output": "slf_attn.fc.weight",
    "dictionary": "shared_key",
}


def castle(z, name: str):
    weight = z["param/cls.weight"]
    base = base_of(z, weight=weight)
    model = method(name, base, temperature=float(z["temperature"]))
    with torch.no_grad():
        for ours, theirs in CASTLE.items():
            getattr(model, ours).copy_(z[f"param/{theirs}"].view_as(getattr(model, ours)))
    return model


@pytest.mark.parametrize("name", ["castle", "acastle"])
def test_castle_logits_and_gradients(oracle, name):
    z = oracle(f"{name}_s5")
    model = castle(z, name)
    logits = model(*episode(z, model.base)).logits[0]
    close(logits, z["logits"])
    F.cross_entropy(logits, z["in/y_query"].long()).backward()
    assert {key for key, _ in model.named_parameters()} == set(CASTLE)
    for ours, theirs in CASTLE.items():
        close(getattr(model, ours).grad.flatten(), z[f"grad/{theirs}"].flatten())


def test_castle_draws_initial_values_as_the_released_code():
    """Normal, with deviations of PyTorch's Xavier rule, and of its Kaiming rule for a tensor [1, 2K, D]."""
    weight = torch.randn(40, 128)
    model = method("castle", Base(weight, torch.zeros(40), weight))
    expected = [nn.init.xavier_normal_(torch.empty(128, 128)), nn.init.kaiming_normal_(torch.zeros(1, 80, 128))]
    parameters = [model.to_output, model.dictionary]
    for ours, theirs in zip(parameters, expected, strict=True):
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.05)
    assert method("castle", Base(weight, torch.zeros(40), weight)).to_key.std().item() == pytest.approx(
        math.sqrt(2 / (128 + 128)), rel=0.05
    )


CEC = {
    "to_query": "w_qs.weight", "to_key": "w_ks.weight", "to_value": "w_vs.weight", "to_output": "fc.weight",
    "output_bias": "fc.bias", "gain": "layer_norm.weight", "bias": "layer_norm.bias",
}  # fmt: skip


def cec(z, base: Base):
    model = method("cec", base, temperature=float(z["temperature"]))
    with torch.no_grad():
        for ours, theirs in CEC.items():
            getattr(model, ours).copy_(z[f"param/{theirs}"])
    return model


def test_cec_logits_and_gradients(oracle):
    z = oracle("cec_s5")
    model = cec(z, base_of(z))
    support, query = episode(z, model.base)
    close(model.base_logits(query)[0], z["base_logits"])
    logits = model(support, query).logits[0]
    close(logits, z["logits"])
    F.cross_entropy(logits, z["in/y_query"].long()).backward()
    assert {key for key, _ in model.named_parameters()} == set(CEC)
    for ours, theirs in CEC.items():
        close(getattr(model, ours).grad, z[f"grad/{theirs}"])


@torch.no_grad()
def test_cec_is_attention_among_the_nodes_of_one_query_at_a_time(oracle):
    """Plain loops over nodes, also after a second session."""
    z = oracle("cec_s5")
    model = cec(z, base_of(z))
    support, query = episode(z, model.base)
    later = replace(support, features=support.features.flip(-1))
    state = model.learn(later, model.learn(support).state).state
    means = [*model.base.prototypes, *support.class_means(N)[0], *later.class_means(N)[0]]
    logits = model.answer(state, query).logits[0]
    for at, h in enumerate(query.features[0, :3]):
        nodes = []
        for node in (h, *means):
            scores = torch.stack([(model.to_query @ node) @ (model.to_key @ peer) / 4 for peer in (h, *means)])
            shares = zip(scores.softmax(0), (h, *means), strict=True)
            message = model.to_output @ sum(share * (model.to_value @ peer) for share, peer in shares)
            v = node + message + model.output_bias
            v = (v - v.mean()) / (((v - v.mean()) ** 2).mean() + 1e-5).sqrt()
            nodes.append(v * model.gain + model.bias)
        cosines = [nodes[0] @ v / (nodes[0].norm() * v.norm()) for v in nodes[1:]]
        close(logits[at], 16 * torch.stack(cosines))


@torch.no_grad()
def test_ncm_over_two_sessions(oracle):
    z = oracle("ncm_s5")
    model = method("ncm", base_of(z, scale=float(z["temperature"])))
    first, query = episode(z, model.base)
    session_logits, state = [model.base_logits(query)[0]], None
    for support in (first, replace(first, features=first.features.flip(-1))):
        state = model.learn(support, state).state
        session_logits.append(model.answer(state, query).logits[0])
    for t, logits in enumerate(session_logits):
        close(logits, z[f"{t}/logits"])
        assert torch.equal(logits.argmax(-1), z[f"{t}/logits"].argmax(-1))
    assert session_logits[2].argmax(-1).max() >= K + N, "or no answer would be of the last session"


@torch.no_grad()
def test_ranpac_over_two_sessions(oracle):
    """The released code chooses a ridge after each session; its random matrix is the one that is drawn here.

    Both solve for 40 projections with a condition of up to a million, which leaves eight of sixteen digits at worst.
    """
    z = oracle("ranpac_s5")
    base = replace(base_of(z), images=lambda: (z["in/x_base"], z["in/y_base"]))
    first, query = episode(z, base)
    later, state = replace(first, features=first.features.flip(-1)), None
    for t, support in enumerate((None, first, later)):
        model = method("ranpac", base, projections=40, ridge=float(z[f"{t}/ridge"]))
        if support is None:
            close(model.projection, z["projection"])
            close(model.base_logits(query)[0], z["0/logits"], 1e-8)
        else:
            state = model.learn(support, state).state
            close(model.answer(state, query).logits[0], z[f"{t}/logits"], 1e-8)
