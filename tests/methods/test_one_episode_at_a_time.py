"""LR, MLP and the attractors once more: one episode at a time, formulas as they are printed, dense matrices, SciPy.

The formulas here first give the authors' stored numbers (5 shots, no hidden class, one set of decays), then hold the
methods to what no stored case has: 1 shot, hidden base classes, other decays, gammas, steps, dampings and rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from ifsl_bench.methods.attractor import Attractor
from ifsl_bench.methods.ridge import Ridge
from ifsl_bench.methods.static_attractor import StaticAttractor
from torch import Tensor

from ifsl_bench.plugin.method import Base, Query, Support, masked_logits
from tests.methods import test_attractors as stored
from tests.methods.test_attractors import relative
from tests.tolerances import rounding

FORMULA = rounding(torch.float64, 25 * 64 * 3)  # sums over 25 rows of 64 features, in three layers
N, UNITS = 5, 40
Theta = Mapping[str, Tensor]  # meta-parameters by the methods' names; empty without an attractor


def unit(v: Tensor) -> Tensor:
    return v / (v.square().sum().sqrt() + 1e-5)


@dataclass(frozen=True)
class Episode:
    """x [S, D], y [S] in 0..N-1, q [Q, D], t [Q] in 0..K+N-1, base classifier w [K, D] and b [K], shown [K] bool.

    regular: no base class in any softmax, though the attention reads w.
    """

    x: Tensor
    y: Tensor
    q: Tensor
    t: Tensor
    w: Tensor
    b: Tensor
    shown: Tensor
    learner: str = "lr"
    weight_decay: float = 1e-5
    regular: bool = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        d = self.x.shape[1]
        return [(N, d + 1)] if self.learner == "lr" else [(N, UNITS + 1), (N, d), (UNITS, d + 1)]

    def parts(self, z: Tensor) -> list[Tensor]:
        """The fast weights, from one long vector."""
        pieces = z.split([rows * size for rows, size in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def joint(self, z: Tensor, images: Tensor) -> Tensor:
        """Logits of what is in the softmax: the base classes that are shown, then the novel ones."""
        ones = torch.ones(len(images), 1, dtype=z.dtype)
        if self.learner == "lr":
            novel = torch.cat([images, ones], 1) @ self.parts(z)[0].T
        else:
            outer, skip, inner = self.parts(z)
            hidden = torch.tanh(torch.cat([images, ones], 1) @ inner.T)
            novel = torch.cat([hidden, ones], 1) @ outer.T + images @ skip.T
        if self.regular:
            return novel
        return torch.cat([(images @ self.w.T + self.b)[:, self.shown], novel], 1)

    def query_loss(self, z: Tensor) -> Tensor:
        mask = torch.cat([self.shown & (not self.regular), torch.ones(N, dtype=torch.bool)])
        return F.cross_entropy(self.joint(z, self.q), (mask.cumsum(0) - 1)[self.t])

    def centres(self, theta: Theta) -> list[Tensor]:
        """u of each part, [rows, size]."""
        if "centre.0" in theta:
            return [theta[f"centre.{i}"].expand(shape) for i, shape in enumerate(self.shapes)]
        parts = []
        for i, (rows, size) in enumerate(self.shapes):
            if i == 2:  # one centre for all hidden units
                asking, tau = [self.x.mean(0)], theta["tau"][1]
            else:
                asking, tau = [self.x[self.y == k].mean(0) for k in range(N)], theta["tau"][0]
            centres = []
            for p in asking:
                memory = [w for w, visible in zip(self.w, self.shown, strict=True) if visible]
                shares = torch.stack([tau * (unit(p) * unit(w)).sum() for w in memory]).softmax(0)
                u = theta[f"offset.{i}"]
                for a, w in zip(shares, memory, strict=True):
                    h = torch.tanh(theta["memory.inner.weight"] @ w + theta["memory.inner.bias"])
                    u = u + a * (theta[f"memory.outer.{i}.weight"] @ h + theta[f"memory.outer.{i}.bias"])
                centres.append(u)
            parts.append(torch.stack(centres).expand(rows, size))
        return parts

    def pull(self, theta: Theta) -> list[tuple[Tensor, Tensor]]:
        """Centres and gammas of the parts; nothing without an attractor."""
        return [(u, theta[f"log_gamma.{i}"].exp()) for i, u in enumerate(self.centres(theta))] if theta else []

    def inner(self, z: Tensor, pull: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """L(V)."""
        f = self.joint(z, self.x)
        loss = F.cross_entropy(f, self.y + f.shape[1] - N) + self.weight_decay / 2 * z.square().sum()
        for v, (u, gamma) in zip(self.parts(z), pull, strict=False):
            loss = loss + (gamma * (v - u).square()).sum() / v.shape[0]
        return loss

    def slope(self, z: Tensor, theta: Theta, graph: bool = False) -> Tensor:
        z = z if z.requires_grad else z.detach().requires_grad_()
        return torch.autograd.grad(self.inner(z, self.pull(theta)), z, create_graph=graph)[0]

    def hessian(self, z: Tensor, theta: Theta) -> Tensor:
        pull = [(u.detach(), gamma.detach()) for u, gamma in self.pull(theta)]
        return torch.autograd.functional.hessian(lambda v: self.inner(v, pull), z.detach(), vectorize=True)

    def minimum(self, theta: Theta, near: Tensor) -> tuple[Tensor, Tensor]:
        """A minimum and its Hessian: LR's one, by SciPy from zero; of MLP's the one beside `near`, if there is one."""
        z = near.detach()
        if self.learner == "lr":
            tensor = torch.as_tensor
            z = tensor(scipy.optimize.minimize(
                lambda v: self.inner(tensor(v), self.pull(theta)).item(), np.zeros(len(z)), method="trust-exact",
                jac=lambda v: self.slope(tensor(v), theta).numpy(), options={"gtol": 1e-10},
                hess=lambda v: self.hessian(tensor(v), theta).numpy(),
            ).x)  # fmt: skip
        h = self.hessian(z, theta)
        assert float(torch.linalg.eigvalsh(h)[0]) > 0
        polished = z - torch.linalg.solve(h, self.slope(z, theta))
        assert float(self.slope(polished, theta).norm()) < 1e-10  # a Newton step squares the 1e-6 that SciPy leaves
        assert relative(polished, z) < 1e-6
        return polished, h

    def unrolled(self, z: Tensor, theta: Theta, steps: int, rate: float) -> Tensor:
        z = z.detach().requires_grad_()
        for _ in range(steps):
            z = z - rate * self.slope(z, theta, graph=True)
        return z

    def meta_gradient(
        self, z: Tensor, h: Tensor, theta: Theta, series: tuple[int, float, float] | None
    ) -> dict[str, Tensor]:
        """At a minimum z with Hessian h: exact, or with RBP's series of (steps, damping, alpha)."""
        z = z.detach().requires_grad_()
        v = torch.autograd.grad(self.query_loss(z), z)[0]
        if series is None:
            u = torch.linalg.solve(h, v)
        else:
            steps, damping, alpha = series
            jacobian, term, g = torch.eye(len(z)) - alpha * h, v, v
            for _ in range(steps):
                before, term = term, jacobian.T @ term - damping * term
                g = g + term
            grown = bool(term.norm() > before.norm())  # replaced by what a series that does not grow tends to
            u = torch.linalg.solve(h + damping / alpha * torch.eye(len(z)), v) if grown else alpha * g
        answer = torch.autograd.grad(-(u.detach() * self.slope(z, theta, graph=True)).sum(), list(theta.values()))
        return dict(zip(theta, answer, strict=True))


def stored_episode(z, learner: str, kind: str) -> tuple[Episode, dict[str, Tensor]]:
    labels, k = z["in/y_support"].long(), z["in/b_class_a"].shape[0]
    decay = float(np.float32(1e-3 if kind == "none" else 1e-5))
    episode = Episode(
        z["in/x_support"], labels - (k if int(labels.max()) >= N else 0), z["in/x_query"], z["in/y_query"].long(),
        z["in/w_class_a"].T, z["in/b_class_a"], torch.ones(k, dtype=torch.bool), learner, decay,
    )  # fmt: skip
    theta = {} if kind == "none" else stored.pieces(kind, learner, z, "meta")
    return episode, {name: value.clone().requires_grad_() for name, value in theta.items()}


def stored_point(z, prefix: str, learner: str) -> Tensor:
    rows = lambda s: torch.cat([z[f"{prefix}/w_class_b{s}"], z[f"{prefix}/b_class_b{s}"][None]]).T.flatten()  # noqa: E731
    return rows("") if learner == "lr" else torch.cat([rows(""), z[f"{prefix}/w_class_b3"].T.flatten(), rows("2")])


@pytest.mark.parametrize(  # every formula once: a network's Hessian has 3,000 rows here
    ("learner", "kind"), [("lr", "none"), ("lr", "static"), ("lr", "attn"), ("mlp", "attn")]
)
def test_the_formulas_give_the_stored_numbers(oracle, learner, kind):
    z = oracle(f"{learner}_{kind}_s5_nomask")
    episode, theta = stored_episode(z, learner, kind)
    start, probe, tight = (stored_point(z, f"{name}/w", learner) for name in ("init", "probe", "tight"))
    torch.testing.assert_close(
        episode.slope(probe, theta), stored_point(z, "probe/grad", learner), rtol=FORMULA, atol=FORMULA
    )
    pull = episode.pull(theta)
    fall = episode.inner(start, pull) - episode.inner(tight, pull)  # W_3's stored centre adds a constant to both
    assert fall.item() == pytest.approx(float(z["init/inner_loss"] - z["tight/inner_loss"]), rel=1e-10)  # a difference
    assert float(episode.slope(tight, theta).norm()) < 1e-12  # what theirs was solved to
    if learner == "lr":
        assert (
            relative(episode.minimum(theta, tight)[0], tight) < 1e-8
        )  # 1e-12 over a decay of 1e-5, and less where data pull
    assert relative(episode.joint(tight, episode.q), z["tight/query_logits_no_dummy_step"]) < FORMULA
    assert episode.query_loss(tight).item() == pytest.approx(float(z["tight/query_loss"]), rel=FORMULA)
    if not theta:
        return
    hessian = episode.hessian(tight, theta)
    for prefix, series in (("meta_grad", (20, float(np.float32(0.1)), 1.0)), ("exact_meta_grad", None)):
        expected = stored.pieces(kind, learner, z, f"tight/{prefix}")
        gradients = episode.meta_gradient(tight, hessian, theta, series)
        assert set(gradients) == set(expected)
        for name, gradient in gradients.items():
            assert relative(gradient, expected[name]) < 1e-7, (prefix, name)  # 1e-12 through the inverse, twice


def test_the_formulas_give_the_stored_unrolled_numbers(oracle):
    z = oracle("bptt20_lr_attn_s5_nomask")
    episode, theta = stored_episode(z, "lr", "attn")
    point = episode.unrolled(stored_point(z, "init/w", "lr"), theta, 20, 1.0)
    assert relative(episode.joint(point, episode.q), z["query_logits"]) < FORMULA
    gradient = torch.autograd.grad(episode.query_loss(point), list(theta.values()))
    for name, value in zip(theta, gradient, strict=True):
        assert relative(value, stored.pieces("attn", "lr", z, "meta_grad")[name]) < 20 * FORMULA, (
            name
        )  # through as many steps


D, K, Q = 8, 9, 12
METHODS = {"attn": Attractor, "static": StaticAttractor}
HIDDEN = {"separate": [[], []], "shared": [[0, 2, 3, 5, 8], [1, 2, 4, 6, 7]], "regular": [[], []]}
CASES = [(1, "separate", 0.1), (1, "shared", 0.01), (1, "regular", 0.5), (5, "shared", 0.03)]  # shots, mode, strength
EXACT = {"lr": 1e-7, "mlp": 3e-5}  # of meta-gradients; conjugate gradients end early at the flat minima of MLP


def draw(seed: int, shots: int, mode: str, scale: float = 1.0) -> tuple[Base, Support, Query, Tensor]:
    """Two episodes as a method gets them, in the form of a task of one's protocol, and the queries' labels [2, Q]."""
    torch.manual_seed(seed)
    randn = lambda *shape: torch.randn(shape, dtype=torch.float64)  # noqa: E731
    base = Base(0.3 * randn(K, D), 0.3 * randn(K), randn(K, D), 7.0)
    y, novel = torch.arange(N).repeat_interleave(shots), torch.arange(Q) % N
    centre = randn(2, N, D)
    x = scale * (centre[:, y] + 0.7 * randn(2, N * shots, D))
    q = scale * (centre[:, novel] + 0.7 * randn(2, Q, D))
    hidden = torch.zeros(2, K, dtype=torch.bool)
    t = (K + novel).expand(2, -1).clone()
    for e, classes in enumerate(HIDDEN[mode]):
        hidden[e, classes] = True
        if mode != "regular":
            visible_classes = (~hidden[e]).nonzero()[:, 0]
            t[e, : Q // 2] = visible_classes[torch.arange(Q // 2) % len(visible_classes)]
    logits = [F.linear(images, base.weight, base.bias) for images in (x, q)]
    if mode == "regular":
        logits = [torch.full_like(values, -torch.inf) for values in logits]
    return base, Support(x, y.expand(2, -1), hidden, logits[0]), Query(q, logits[1]), t


def ours(
    method, support: Support, query: Query, t: Tensor
) -> tuple[Tensor, Tensor, list[Tensor], Mapping[str, Tensor]]:
    """Logits [2, Q, K+N] as the harness masks them, the loss, each episode's fast weights, statistics."""
    calls: list[Sequence[Tensor]] = []
    logits_of = method.learner.logits

    def spy(v, images):
        calls.append([v] if isinstance(v, Tensor) else list(v))
        return logits_of(v, images)

    object.__setattr__(method.learner, "logits", spy)
    prediction = method(support, query)
    logits = masked_logits(prediction, support.hidden | query.base_logits[:, 0].isinf())
    points = [torch.cat([part[e].detach().flatten() for part in calls[0]]) for e in range(2)]
    return logits, F.cross_entropy(logits.flatten(0, 1), t.flatten()), points, prediction.statistics


def one_by_one(base: Base, support: Support, query: Query, t: Tensor, **more) -> list[Episode]:
    more["regular"] = bool(query.base_logits.isinf().all())
    rows = zip(support.features, support.labels, query.features, t, ~support.hidden, strict=True)
    return [Episode(x, y, q, t, base.weight, base.bias, mask, **more) for x, y, q, t, mask in rows]


def same_answers(single: list[Episode], points: list[Tensor], logits: Tensor, loss: Tensor, tolerance: float) -> None:
    for ep, z, row in zip(single, points, logits, strict=True):
        mask = torch.cat([ep.shown & (not ep.regular), torch.ones(N, dtype=torch.bool)])
        assert bool(row[:, ~mask].isneginf().all())
        assert relative(row[:, mask], ep.joint(z, ep.q)) < tolerance
    expected = sum(ep.query_loss(z) for ep, z in zip(single, points, strict=True)) / 2
    assert relative(loss, expected) < tolerance


def same_gradients(method, expected: Sequence[Mapping[str, Tensor]], tolerance: float) -> None:
    """Checks the mean loss's gradients; those zero by symmetry are compared with the rest."""
    total = torch.cat([p.grad.flatten() for p in method.parameters()]).norm()
    for name, parameter in method.named_parameters():
        mean = (expected[0][name] + expected[1][name]) / 2
        assert float((parameter.grad - mean).norm()) < tolerance * float(mean.norm()) + 1e-9 * float(total), name


@pytest.mark.parametrize(("shots", "mode", "weight_decay"), CASES)
@pytest.mark.parametrize("learner", ["lr", "mlp"])
def test_baselines(learner, shots, mode, weight_decay):
    base, *case = draw(shots, shots, mode)
    logits, loss, solutions, _ = ours(Ridge(base, N, learner=learner, weight_decay=weight_decay), *case)
    single = one_by_one(base, *case, learner=learner, weight_decay=weight_decay)
    points = [ep.minimum({}, near)[0] for ep, near in zip(single, solutions, strict=True)]
    same_answers(single, points, logits, loss, 1e-6)


def attractor(kind: str, base: Base, mode: str, gamma: float, **options) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A method whose meta-parameters are away from their initial values, and these for the formulas.

    Where base classes are hidden, as in meta-training, it is solved as in meta-training.
    """
    options |= {"dropout": 0.0} if kind == "attn" else {}
    method = METHODS[kind](base, N, gamma=gamma, **options).train(mode == "shared")
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return method, {name: p.detach().clone().requires_grad_() for name, p in method.named_parameters()}


@pytest.mark.parametrize(("shots", "mode", "gamma"), CASES)
@pytest.mark.parametrize("learner", ["lr", "mlp"])
@pytest.mark.parametrize("kind", ["static", "attn"])
def test_attractors(kind, learner, shots, mode, gamma):
    base, *case = draw(shots + 10, shots, mode)
    weight_decay = {1: 1e-5, 5: 0.02}[shots]
    single = one_by_one(base, *case, learner=learner, weight_decay=weight_decay)
    points: list[tuple[Tensor, Tensor]] = []
    for series in (None, (7, 0.4, 0.6)):
        options = {"learner": learner, "gradient": "rbp" if series else "implicit", "weight_decay": weight_decay}
        options |= dict(zip(("steps", "damping", "rate"), series, strict=True)) if series else {}
        torch.manual_seed(shots)
        method, theta = attractor(kind, base, mode, gamma, **options)
        logits, loss, solutions, _ = ours(method, *case)
        points = points or [ep.minimum(theta, near) for ep, near in zip(single, solutions, strict=True)]
        same_answers(single, [z for z, _ in points], logits, loss, 1e-6)
        loss.backward()
        expected = [ep.meta_gradient(*point, theta, series) for ep, point in zip(single, points, strict=True)]
        same_gradients(method, expected, EXACT[learner])


@pytest.mark.parametrize(("shots", "mode", "gamma"), CASES)
@pytest.mark.parametrize("learner", ["lr", "mlp"])
@pytest.mark.parametrize("kind", ["static", "attn"])
def test_attractors_unrolled(kind, learner, shots, mode, gamma):
    rate, steps, scale = (0.3, 5, 1.0) if mode == "separate" else (1.0, 8, 8.0)
    base, *case = draw(shots + 20, shots, mode, scale)
    options = {"learner": learner, "gradient": "t-bptt", "steps": steps, "rate": rate, "converge": False}
    method, theta = attractor(kind, base, mode, gamma, **options)
    logits, loss, _, statistics = ours(method, *case)
    start = torch.cat([part.flatten() for part in method.buffers()])
    single = one_by_one(base, *case, learner=learner)
    largest = [float(torch.linalg.eigvalsh(ep.hessian(start, theta)).abs().max()) for ep in single]
    rates = statistics["step_rate"].tolist()
    assert all(
        step == rate if rate * top <= 1.8 else 1.8 <= step * top < 2 for step, top in zip(rates, largest, strict=True)
    )
    assert (min(rates) < rate) == (mode != "separate")
    points = [ep.unrolled(start, theta, steps, step) for ep, step in zip(single, rates, strict=True)]
    same_answers(single, points, logits, loss, 1e-9)
    loss.backward()
    expected = [
        torch.autograd.grad(ep.query_loss(z), list(theta.values())) for ep, z in zip(single, points, strict=True)
    ]
    same_gradients(method, [dict(zip(theta, gradients, strict=True)) for gradients in expected], 1e-7)
