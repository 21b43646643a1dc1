"""Sequences of sessions: counts against plain loops, methods session by session against one pass, against their own
episodes and against SciPy, and a run from the command line to its table."""

from __future__ import annotations

import importlib
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import optimize

from ifsl_bench.backbones.features import FeaturePool
from ifsl_bench.experiments.workspace import workspace
from ifsl_bench.plugin.episode_contract import map_tensors
from ifsl_bench.plugin.find_method import find_method
from ifsl_bench.plugin.method import AdditiveClassifier, Base, Method, Prediction, Query, SessionOutput
from ifsl_bench.plugin.options import add_example_extras, make_method
from ifsl_bench.plugin.session_contract import (
    SessionLearner,
    check_session_rules,
    check_sessions,
    find_sequence_dependence_fault,
)
from ifsl_bench.protocols import loader as evaluation
from ifsl_bench.protocols import sequence_loader as session_answers
from ifsl_bench.protocols.calibration import find_best_bias
from ifsl_bench.protocols.loader import evaluate_method
from ifsl_bench.protocols.sampling.sequences import SequencePoolStarts, SequenceSampler
from ifsl_bench.protocols.sequence_loader import SequenceAnswers, SequenceLoader, SessionEvaluator, count_session_hits
from ifsl_bench.protocols.session_metrics import SessionCounts
from ifsl_bench.protocols.session_protocol import _hit_count_faults
from ifsl_bench.protocols.tasks.task import SessionSpec
from ifsl_bench.protocols.tasks.task_files import load_task
from ifsl_bench.solvers import minimise
from ifsl_bench.store.schema import read_result
from ifsl_bench.utils.errors import UserError
from tests.methods.test_methods_contract import methods_on_features

K, D, SHOTS = 6, 8, 3
SPEC = SessionSpec(count=3, ways=2, orders=3, supports=2)


def pool(name: str, classes: int, each: int, base: Base, seed: int) -> FeaturePool:
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(classes, 1, D, generator=generator, dtype=torch.float64)
    rows = (means + 0.6 * torch.randn(classes, each, D, generator=generator, dtype=torch.float64)).flatten(0, 1)
    return FeaturePool(name, rows, F.linear(rows, base.weight, base.bias), np.arange(classes + 1) * each, 1)


@pytest.fixture(scope="module")
def base() -> Base:
    generator = torch.Generator().manual_seed(7)
    weight, prototypes = (torch.randn(K, D, generator=generator, dtype=torch.float64) for _ in range(2))
    counts, within = torch.full((K,), 50.0, dtype=torch.float64), torch.eye(D, dtype=torch.float64)
    noise = torch.randn(9 * K, D, generator=generator, dtype=torch.float64)
    images = prototypes.repeat_interleave(9, 0) + noise, torch.arange(K).repeat_interleave(9)
    return Base(weight, torch.zeros(K, dtype=torch.float64), prototypes, 9.0, counts, within, lambda: images)


def loader_of(base: Base, hide: bool = False, spec: SessionSpec = SPEC) -> SequenceLoader:
    novel = pool("novel/test", 9 if not hide else K, 12, base, 1)
    bases = novel if hide else pool("base/test", K, 7, base, 2)
    spec = spec.hiding_base_classes(K) if hide else spec
    sampler = SequenceSampler(
        ("t", "test", 0), spec, SHOTS, SequencePoolStarts(novel.class_starts, bases.class_starts), hide
    )
    return SequenceLoader(sampler, novel, bases)


def labels_of(batch, loader: SequenceLoader) -> list[int]:
    """The classes of all queries, base queries first."""
    each = loader.sampler.queries
    return [*batch.base_labels.tolist(), *(K + n // each for n in range(batch.novel_rows.shape[1]))]


FECAM = "lda with a covariance of each class"


def chosen_and_options(name: str) -> tuple[type[Method], dict]:
    chosen, options, *_ = find_method("lda" if name == FECAM else name)
    more = {"form": "fecam", "tukey": 0.5, "per_class": True} if name == FECAM else {}
    return chosen.method, {**options, **more}


def seeded_method(name: str, base: Base, ways: int = 2) -> Method:
    method, options = chosen_and_options(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_method(method, add_example_extras(base, method), ways, options).double().eval()


# Of those that learn session by session; anil needs learn2learn.
METHODS = [name for name in methods_on_features() if name not in ("anil", "tapnet", "upper-bound")] + [FECAM]


@pytest.mark.slow("every method is asked query by query")
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("hide", [False, True], ids=["drawn", "hidden"])
@torch.no_grad()
def test_counts_are_those_of_a_plain_loop_over_sessions(name, hide, base, monkeypatch):
    """Each query of each sequence alone, after each session, argmax over all classes met so far."""
    monkeypatch.setattr(
        session_answers, "QUERIES_PER_MATRIX_PRODUCT", 7
    )  # base queries come in several parts, the last a shorter one
    method, loader = seeded_method(name, base), loader_of(base, hide)
    batch = loader.load_batch(0, 4)
    counts = evaluate_method(method, name, loader, range(4)).counts
    sessions, ways, labels = loader.sampler.shape.count, 2, labels_of(batch, loader)
    square = np.zeros((4, sessions + 1, sessions + 1), int)
    as_base, as_novel, alone = (np.zeros((4, sessions), int) for _ in range(3))
    for t in range(sessions + 1):
        if t:
            state = None
            for support in batch.supports_by_session[:t]:
                state = method.learn(support, state).state
            logits = method.answer(state, batch.queries_after_sessions(t)).logits
        else:
            logits = method.base_logits(batch.queries_after_sessions(0))
        for e in range(4):
            z = logits[e].clone()
            z[:, :K][:, batch.hidden_classes[e]] = -math.inf
            for answer, label in zip(z.argmax(-1).tolist(), labels, strict=False):
                if label < K and batch.hidden_classes[e, label]:
                    continue
                g = 0 if label < K else 1 + (label - K) // ways
                square[e, t, g] += answer == label
                if t:
                    as_base[e, t - 1] += g > 0 and answer < K
                    as_novel[e, t - 1] += g == 0 and answer >= K
            if t:
                best = K + z[:, K:].argmax(-1)
                alone[e, t - 1] = sum(a == b for a, b in zip(best.tolist(), labels, strict=False) if b >= K)
    rows = np.tril_indices(sessions + 1)
    assert (counts.hits == square[:, *rows]).all()
    assert (counts.novel_as_base == as_base).all()
    assert (counts.base_as_novel == as_novel).all()
    assert (counts.novel_alone == alone).all()
    novel = np.array([n for e in range(4) if (n := sum(label >= K for label in labels))])
    assert counts.metric_by_sequence("novel_alone") == pytest.approx(100 * alone[:, -1] / novel)


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_one_pass_answers_as_session_by_session_does(name, base):
    method, loader = seeded_method(name, base), loader_of(base)
    if not isinstance(method, AdditiveClassifier):
        pytest.skip("it is asked session by session anyway")
    batch, sessions = loader.load_batch(0, 6), SessionEvaluator(method, name, loader, False)
    once, steps = sessions.predict_all_sessions(method, batch), sessions._predict_session_by_session(method, batch)
    for part in (
        "base_right_before_sessions",
        "base_is_right_alone",
        "base_query_is_counted",
        "novel_query_is_counted",
    ):
        a, b = (getattr(output.sequence_answers, part) for output in (once, steps))
        assert torch.equal(a.expand_as(b), b), part
    scale = steps.sequence_answers.base_margins.abs().max()  # rounding of logits, which margins are differences of
    assert torch.allclose(
        once.sequence_answers.base_margins, steps.sequence_answers.base_margins, rtol=0, atol=float(1e-5 * scale)
    )
    for g in range(3):
        a, b = (output.sequence_answers.novel_margins[:, g:, g] for output in (once, steps))
        assert torch.allclose(a, b, rtol=0, atol=float(1e-5 * scale))
        assert torch.equal(
            once.sequence_answers.novel_is_right_alone[:, g:, g], steps.sequence_answers.novel_is_right_alone[:, g:, g]
        )
    assert once.state_bytes == steps.state_bytes


@torch.no_grad()
def test_few_sequences_are_learned_at_once_where_each_class_has_a_covariance(base, monkeypatch):
    """With their features and logits they stay within the bytes of a block; counts are those of one block."""
    method, loader, made_at_once = seeded_method(FECAM, base), loader_of(base), []
    learn = type(method).learn_classes

    def noted(self, support, earlier):
        learned = learn(self, support, earlier)
        made_at_once.append(learned.state["metrics"].nbytes)
        return learned

    monkeypatch.setattr(type(method), "learn_classes", noted)
    whole = evaluate_method(method, FECAM, loader, range(6)).counts
    (every,) = made_at_once
    assert every == 6 * 6 * 8 * D * D
    most, of_sequence = 4 * loader.estimated_bytes_per_item, every // 6
    monkeypatch.setattr(SequenceLoader, "cpu_block_bytes", most)
    parts = evaluate_method(method, FECAM, loader, range(6)).counts
    assert sum(made_at_once[1:]) == every
    assert all(
        of_block // of_sequence * loader.estimated_bytes_per_item + of_block <= most for of_block in made_at_once[1:]
    )
    assert (parts.hits == whole.hits).all()


@torch.no_grad()
def test_lr_in_a_later_session_minimises_the_objective_with_earlier_classes_fixed(base):
    """SciPy on the objective written out: cross-entropy over base, earlier and new classes, plus the weight decay."""
    decay = 0.05
    chosen, options, *_ = find_method("lr")
    method = make_method(chosen.method, base, 2, {**options, "weight_decay": decay}).double().eval()
    batch = loader_of(base).load_batch(0, 1)
    first, support, *_ = batch.supports_by_session
    before, query = method.learn(first).state, batch.queries_after_sessions(2)
    logits = method.answer(method.learn(support, before).state, query).logits[0].numpy()
    x, y = support.features[0].numpy(), support.labels[0].numpy()
    earlier = method.answer(before, Query(support.features, support.base_logits)).logits[0].numpy()  # [S, K + 2]

    def objective(flat: np.ndarray) -> float:
        w = flat.reshape(2, D + 1)
        z = np.concatenate([earlier, x @ w[:, :-1].T + w[:, -1]], 1)
        z = z - z.max(1, keepdims=True)
        loss = (np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), K + 2 + y]).mean()
        return float(loss + decay / 2 * (w**2).sum())

    best = optimize.minimize(objective, np.zeros(2 * (D + 1)), method="BFGS", options={"gtol": 1e-9}).x
    w = best.reshape(2, D + 1)
    expected = query.features[0].numpy() @ w[:, :-1].T + w[:, -1]
    # BFGS with finite differences stops where the gradient is 1e-6 or so, which the decay turns into 2e-5 of a weight.
    assert logits[:, K + 2 :] == pytest.approx(expected, abs=1e-3)


@torch.no_grad()
def test_the_upper_bound_is_softmax_regression_on_all_images_but_queries(base):
    """SciPy on the objective written out, for two sequences of one block; a session takes part of one answer."""
    decay, loader = 1e-2, loader_of(base)
    chosen, *_ = find_method("upper-bound")
    method = make_method(chosen.method, base, 2, {"weight_decay": decay}).double().eval()
    counts, batch = evaluate_method(method, "upper-bound", loader, range(2)).counts, loader.load_batch(0, 2)
    drawn = loader.sampler.sample(0, 2)
    base_x, base_y = (part.numpy() for part in base.images())
    for e in range(2):
        own = [[i for i in range(12 * c, 12 * c + 12) if i not in drawn.query[e]] for c in drawn.classes[e].tolist()]
        assert all(len(rows) == 12 - loader.sampler.queries > SHOTS for rows in own)
        x = np.concatenate([base_x, *(loader.novel.features[rows].numpy() for rows in own)])
        y = np.concatenate([base_y, *(np.full(len(rows), K + at) for at, rows in enumerate(own))])
        mean = x.mean(0)
        x, one_hot = np.hstack([x - mean, np.ones((len(x), 1))]), np.eye(K + 6)[y]

        def objective(flat, x=x, one_hot=one_hot):
            v = flat.reshape(K + 6, D + 1)
            z = x @ v.T
            z -= z.max(1, keepdims=True)
            log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
            gradient = (np.exp(log_p) - one_hot).T @ x / len(x) + decay * v
            return -(log_p * one_hot).sum(1).mean() + decay / 2 * (v**2).sum(), gradient.ravel()

        begin = np.zeros((K + 6) * (D + 1))
        best = optimize.minimize(objective, begin, jac=True, method="BFGS", options={"gtol": 1e-8}).x
        best, labels = best.reshape(K + 6, D + 1), labels_of(batch, loader)
        for t in (1, 2, 3):
            query = batch.queries_after_sessions(t).features[e].numpy()
            answers = ((query - mean) @ best[:, :-1].T + best[:, -1])[:, : K + 2 * t].argmax(1)
            right = int((answers == labels[: len(answers)]).sum())
            assert int(counts.hits[e][np.tril_indices(4)[0] == t].sum()) == right
    assert counts.state_bytes == 6 * (12 - loader.sampler.queries) * (8 * D + 8)


@torch.no_grad()
def test_the_upper_bound_is_fitted_once_to_the_same_images_in_any_order(base, monkeypatch):
    fits, module = [], importlib.import_module("ifsl_bench.methods.upper_bound")
    monkeypatch.setattr(module, "minimise", lambda *args: fits.append(args) or minimise(*args))
    method, batch = seeded_method("upper-bound", base, ways=6), loader_of(base).load_batch(0, 2)
    support, query = (
        batch.all_training_images(0),
        Query(*(part[:1] for part in vars(batch.queries_after_sessions(3)).values())),
    )
    logits = method(support, query).logits
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    rows = torch.cat([torch.nonzero(support.labels[0] == n)[:, 0] for n in order])
    shuffled = replace(support, features=support.features[:, rows], labels=order.argsort()[support.labels[:, rows]])
    assert torch.equal(method(shuffled, query).logits, logits[..., [*range(K), *(K + order).tolist()]])
    assert len(fits) == 1
    method(batch.all_training_images(1), query)
    assert len(fits) == 2, "other images"
    hidden = torch.zeros_like(support.hidden)
    hidden[0, 1] = True
    assert (method(replace(support, hidden=hidden), query).logits[..., 1] == -math.inf).all()
    assert len(fits) == 3, "a hidden class leaves its images out"


@pytest.mark.parametrize("name", ["ranpac", "upper-bound"])
def test_what_needs_base_images_is_refused_where_they_are_not_there(name, call):
    status, _, err = call("run", "--method", name, "--task", "tiny-features-sessions", "--device", "cpu")
    assert status == 2
    assert "images of base/train, and this data set has only their means" in err.splitlines()[-1]


@torch.no_grad()
def test_lr_that_keeps_supports_solves_for_all_novel_classes_anew(base):
    """SciPy on all supports so far; and the state is these supports."""
    decay, loader = 0.05, loader_of(base)
    chosen, options, *_ = find_method("lr")
    method = make_method(chosen.method, base, 2, {**options, "weight_decay": decay, "memory": "supports"}).double()
    batch, counts = loader.load_batch(0, 1), evaluate_method(method, "lr", loader, range(1)).counts
    labels = labels_of(batch, loader)
    for t in (1, 2, 3):
        support = batch.join_supports(t)
        x, y, fixed = (part[0].numpy() for part in (support.features, support.labels, support.base_logits))

        def joint(w: np.ndarray, rows: np.ndarray, base_logits: np.ndarray, count: int = 2 * t) -> np.ndarray:
            w = w.reshape(count, D + 1)
            return np.concatenate([base_logits, rows @ w[:, :-1].T + w[:, -1]], 1)

        def objective(w: np.ndarray, x=x, y=y, fixed=fixed, joint=joint) -> float:
            z = joint(w, x, fixed)
            loss = (np.logaddexp.reduce(z, 1) - z[np.arange(len(y)), K + y]).mean()
            return float(loss + decay / 2 * (w**2).sum())

        best = optimize.minimize(objective, np.zeros(2 * t * (D + 1)), method="BFGS", options={"gtol": 1e-7}).x
        query = batch.queries_after_sessions(t)
        answers = joint(best, query.features[0].numpy(), query.base_logits[0].numpy()).argmax(1)
        right = int((answers == labels[: len(answers)]).sum())
        assert abs(int(counts.hits[0][np.tril_indices(4)[0] == t].sum()) - right) <= 1, "a query on the boundary"
    assert counts.state_bytes == 3 * 2 * SHOTS * (8 * D + 8)


@pytest.mark.parametrize("name", ["mlp", "lr+a", "subspace"])
@torch.no_grad()
def test_solved_methods_may_keep_supports(name, base):
    """One session is the same either way; later ones are not."""
    chosen, options, *_ = find_method(name)
    loader = loader_of(base)
    counts = []
    for memory in ("none", "supports"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            method = make_method(chosen.method, base, 2, {**options, "memory": memory}).double().eval()
        counts.append(evaluate_method(method, name, loader, range(4)).counts)
    assert (counts[0].hits[:, :3] == counts[1].hits[:, :3]).all()
    assert (counts[0].hits[:, 3:] != counts[1].hits[:, 3:]).any()


def test_a_published_task_refuses_methods_that_keep_supports_or_see_every_image(call):
    for method, fault in (
        (("lr", "--set", "memory=supports"), "lr.memory=supports keeps the supports of all sessions"),
        (("upper-bound",), "upper-bound is trained on every image of all classes"),
    ):
        status, _, err = call("run", "--method", *method, "--task", "mini-sessions-published", "--device", "cpu")
        assert status == 2
        assert f"{fault}, and mini-sessions-published is for methods" in err


class Forward(Method):
    """Class means by Euclidean distance, an episode at once."""

    def forward(self, support, query):
        novel = -torch.cdist(query.features, support.class_means(self.ways))
        return Prediction(torch.cat([Forward.base_logits(self, query), novel], -1))

    def base_logits(self, query):
        return -torch.cdist(query.features, self.base.prototypes.expand(len(query.features), -1, -1))


class Stepwise(Forward):
    def learn(self, support, before=None):
        means = support.class_means(self.ways)
        return SessionOutput(means if before is None else torch.cat([before, means], 1))

    def answer(self, state, query):
        base = self.base.prototypes.expand(len(state), -1, -1)
        return Prediction(-torch.cdist(query.features, torch.cat([base, state], 1)))


FORWARD = """
import torch
from ifsl_bench import Method, Prediction

class Nearest(Method):
    def forward(self, support, query):
        means = torch.cat([self.base.prototypes.expand(len(query.features), -1, -1), support.class_means(self.ways)], 1)
        return Prediction(-torch.cdist(query.features, means))

class Named(Nearest):
    def learn(self):
        "Something of its own, which is no half of a way to learn sessions."

class Scaled(Nearest):
    def __init__(self, base, ways):
        super().__init__(base, ways)
        self.scales = torch.nn.Parameter(torch.ones(ways))

    def forward(self, support, query):
        logits = super().forward(support, query).logits
        return Prediction(torch.cat([logits[..., : -self.ways], logits[..., -self.ways :] * self.scales], -1))
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty home, which is the current folder too."""
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow("a whole run in sessions")
def test_a_plugin_with_forward_alone_runs_and_keeps_supports(call, home):
    """Class means of all supports so far are those of each session: the hits are ProtoNet's, session by session."""
    (home / "mine.py").write_text(FORWARD, encoding="utf-8")
    run = ("run", "--task", "tiny-features-sessions", "--device", "cpu", "--episodes", "4", "--method")
    status, out, err = call(*run, "mine.py:Nearest,mine.py:Named,protonet")
    assert status == 0, err
    marks = {line.split()[0]: "keeps supports" in line for line in out.splitlines() if ".episodes=4  " in line}
    assert marks == {"Nearest.episodes=4": True, "Named.episodes=4": True, "protonet.episodes=4": False}
    folder = home / "results" / "tiny-features-sessions"
    mine, named, protonet = (
        read_result(folder / f"{name}.episodes=4.seed-0.json") for name in ("Nearest", "Named", "protonet")
    )
    assert (mine.to_hit_counts().hits == protonet.to_hit_counts().hits).all()
    assert (named.to_hit_counts().hits == protonet.to_hit_counts().hits).all()
    assert mine.to_hit_counts().state_bytes_per_class == 5 * (4 * 512 + 8), (
        "five images of 512 numbers, with a label each"
    )
    assert "keeps supports" in call("table", "tiny-features-sessions", "--method", "Nearest.episodes=4")[1]
    status, _, err = call(*run, "mine.py:Scaled")
    assert (status, err.splitlines()[-1]) == (2, "ifsl-bench: Scaled has parameters for 5 ways alone (scales), and the "
                                                 "supports of all sessions so far are of 10")  # fmt: skip


@torch.no_grad()
def test_session_0_is_of_the_classifier_that_is_carried_on(base):
    class Silent(Stepwise):
        base_logits = Method.base_logits

    loader = loader_of(base)
    methods = (make_method(kind, base, 2, {}).eval() for kind in (Silent, Stepwise))
    a, b = (evaluate_method(method, "m", loader, range(4)).counts for method in methods)
    assert (a.hits == b.hits).all()


class Forgets(Stepwise):
    def learn(self, support, before=None):
        if before is not None:
            before += 1
        return super().learn(support, before)


class Hoards(Stepwise):
    def learn(self, support, before=None):
        means = super().learn(support, None if before is None else before[0]).state
        return SessionOutput((means, support.features))

    def answer(self, state, query):
        return super().answer(state[0], query)


class HoardsLater(Hoards):
    def learn(self, support, before=None):
        means, features = super().learn(support, before).state
        return SessionOutput((means, features if means.shape[1] > 2 * self.ways else means))


class Stashes(Stepwise):
    def learn(self, support, before=None):
        self.stash = support.features
        return super().learn(support, before)

    def answer(self, state, query):
        logits = super().answer(state, query).logits
        return Prediction(logits - torch.cdist(query.features, self.stash).amin(-1, keepdim=True) * logits)


class Grows(AdditiveClassifier):
    """Its logits depend on the class, the classes learned with it, and those of earlier sessions."""

    per_class_state = uses_earlier_logits = False

    def learn_classes(self, support, earlier):
        means = support.class_means(self.ways)
        return SessionOutput(means if earlier is None else means + earlier.mean((1, 2), keepdim=True))

    def class_logits(self, state, query):
        return query.features @ (state - state.mean(1, keepdim=True) / 2).mT


class LooksBack(Grows):
    uses_earlier_logits = True


class OfOneClass(LooksBack):
    per_class_state = True


class Peeks(Stepwise):
    def learn(self, support, before=None):
        learned = super().learn(support, before)
        return SessionOutput(learned.state + learned.state.mean(0, keepdim=True))

    def forward(self, support, query):
        return self.answer(self.learn(support).state, query)


class Differs(Stepwise):
    def answer(self, state, query):
        return Prediction(2 * super().answer(state, query).logits)


class Fades(Stepwise):
    order_free = True

    def learn(self, support, before=None):
        return super().learn(support, None if before is None else before / 2)


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow("fits each session")] * (m == "etf-neck")) for m in METHODS]
)
def test_methods_keep_the_rules_on_made_up_sequences(name):
    method, options = chosen_and_options(name)
    rules = dict(check_session_rules(name, method, options))
    assert len(rules) == 5 + method.order_free + issubclass(method, AdditiveClassifier)
    assert not any(rules.values()), rules


@pytest.mark.slow("two whole runs")
def test_the_ten_lines_of_the_manual_run_in_sessions_and_in_episodes(call, home):
    """Also held against all rules; and a method with ``forward`` alone has none of sessions."""
    page = (Path(__file__).parents[2] / "docs" / "writing-a-method.md").read_text(encoding="utf-8")
    code = next(part for part in page.split("```python\n") if part.startswith("# session_means.py")).split("```")[0]
    (home / "session_means.py").write_text(code, encoding="utf-8")
    status, out, err = call("methods", "--check", "session_means.py:SessionMeans")
    assert status == 0, err
    assert "Learning a session leaves the state before it as it is" in " ".join(out.split())
    for task in ("tiny-features-sessions", "tiny-features-5shot"):
        row = "run", "--method", "session_means.py:SessionMeans", "--task", task, "--device", "cpu", "--episodes", "8"
        status, out, err = call(*row)
        assert status == 0, err
        assert "SessionMeans" in out


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgets, "learning a session changes the state of the sessions before it"),
        (Hoards, "its state grows with the number of support images"),
        (HoardsLater, "its state grows with the number of support images"),
        (Stashes, "the answer from a state changes when other sessions are learned"),
        (Grows, "sessions learned and answered at once have other logits than one by one"),
        (OfOneClass, "sessions learned and answered at once have other logits than one by one"),
        (Peeks, "the answer to a sequence depends on the other sequences in its batch"),
        (Differs, "one session is answered otherwise than the same episode"),
        (Fades, "the answer depends on the order of sessions, against order_free"),
    ],
)
def test_each_rule_of_sessions_is_held(kind, message, base):
    broken = [fault for _, fault in check_session_rules("m", kind, {})]
    assert any(fault and fault.startswith(message) for fault in broken), "methods --check says so too"
    loader = loader_of(base)
    with pytest.raises(UserError, match=message):
        check_sessions(
            "m",
            make_method(kind, base, 2, {}),
            loader.load_batch(0, 4).supports_by_session,
            loader.load_first_episodes(4).query,
        )


def test_a_growing_method_that_declares_what_it_does_keeps_all_rules(base):
    assert not any(broken for _, broken in check_session_rules("m", LooksBack, {}))
    loader = loader_of(base)
    check_sessions(
        "m",
        make_method(LooksBack, base, 2, {}),
        loader.load_batch(0, 4).supports_by_session,
        loader.load_first_episodes(4).query,
    )


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ("base_logits", "infinite logits in 4 of 4 sequences"),
        ("class_logits", "infinite logits in 4 of 4 sequences"),
        ("transform_query", "m. breaks the contract: it writes into query.features"),
    ],
)
@torch.no_grad()
def test_sequences_are_no_place_for_infinite_logits_or_for_writing(logits, message, base):
    """In every batch, not only in the first sequences, and of the pool that other methods are given too."""
    kind = LooksBack.class_logits
    changes = {
        "base_logits": lambda self, query: torch.full_like(query.base_logits, -torch.inf),
        "class_logits": lambda self, state, query: torch.full_like(kind(self, state, query), -torch.inf),
        "transform_query": lambda self, query: Query(query.features.mul_(2), query.base_logits),
    }
    method, loader = make_method(type("X", (LooksBack,), {logits: changes[logits]}), base, 2, {}), loader_of(base)
    with pytest.raises(UserError, match=message):
        SessionEvaluator(method, "m", loader, False).predict_all_sessions(method, loader.load_batch(0, 4))


class Rounds(Stepwise):
    """Adds a large number, another for each size of a batch, and takes it off: in single precision that rounds."""

    def learn(self, support, before=None):
        means = super().learn(support, before).state
        return SessionOutput(means + 1e5 * len(means) - 1e5 * len(means))

    def forward(self, support, query):
        return self.answer(self.learn(support).state, query)


def test_rounding_that_differs_between_batches_is_no_breach(base):
    def single(x):
        return x.float() if x.is_floating_point() else x

    loader, method = loader_of(base), make_method(Rounds, base.to(dtype=torch.float32), 2, {})
    supports, query = (
        [map_tensors(x, single) for x in loader.load_batch(0, 4).supports_by_session],
        map_tensors(loader.load_first_episodes(4).query, single),
    )
    assert find_sequence_dependence_fault(SessionLearner(method, supports[:2], query, False)), "in single precision"
    check_sessions("m", method, supports, query)


def test_a_bias_is_the_best_of_all_and_counts_follow_it(base):
    method, loader = seeded_method("ncm", base), loader_of(base)
    with torch.no_grad():
        answers = (
            SessionEvaluator(method, "ncm", loader, False)
            .predict_all_sessions(method, loader.load_batch(0, 6))
            .sequence_answers
        )
    best = find_best_bias(answers.to_margins())

    def right(bias: float) -> int:
        counts = count_session_hits(answers, K, 2, bias)
        return int(counts.hits.sum()) - int(counts.hits[:, 0].sum())

    margins = np.concatenate([part.ravel() for part in (answers.base_margins, answers.novel_margins)])
    tried = np.unique(margins)
    assert right(best) == max(right(float(b)) for b in [*tried, *np.nextafter(tried, np.inf)])
    many = count_session_hits(answers, K, 2, 1e9)
    assert many.base_as_novel.max() == 0 or (many.novel_as_base == 0).all()


@pytest.mark.parametrize(("alone", "wrong"), [(3, True), (4, False), (6, False), (7, True)])
def test_novel_queries_right_alone_are_the_hits_and_perhaps_some_that_base_classes_take(alone, wrong):
    """Of 9 novel queries 4 are right and 2 are answered with a base class: 4 to 6 can be right alone."""
    one = np.ones((1, 1), int)
    counts = SessionCounts(np.array([[5, 5, 4]]), 2 * one, 0 * one, np.array([[6, 9]]), 3, 2, novel_alone=alone * one)
    assert any("novel_alone" in fault for fault in _hit_count_faults(counts)) == wrong


def test_counts_with_ties_and_missing_queries():
    """The base class is the answer of equal logits; queries that are not there count nowhere."""
    zero = torch.zeros(1, 1, 2)
    answers = SequenceAnswers(
        base_right_before_sessions=torch.tensor([[True, True]]),
        base_margins=zero,
        base_is_right_alone=torch.tensor([[[True, True]]]),
        base_query_is_counted=torch.tensor([[True, False]]),
        novel_margins=torch.tensor([[[[-1.0, 0.0, -1.0]]]]),
        novel_is_right_alone=torch.ones(1, 1, 1, 3, dtype=torch.bool),
        novel_query_is_counted=torch.tensor([[[True, True, False]]]),
    )
    counts = count_session_hits(answers, K, 2)
    assert counts.hits.tolist() == [[1, 1, 1]]
    assert counts.queries.tolist() == [[1, 2]]
    assert counts.novel_as_base.tolist() == [[1]]
    assert counts.base_as_novel.tolist() == [[0]]
    assert counts.novel_alone.tolist() == [[2]]


@pytest.mark.slow("whole runs on all sessions of a packaged task")
def test_a_run_from_the_command_to_the_table(call, home):
    task = "tiny-features-sessions"
    status, out, err = call("run", "--method", "ncm,imprint", "--task", task, "--device", "cpu")
    assert status == 0, err
    assert "Avg." in out
    assert "100 orders of the novel classes (400 sequences)" in out
    files = sorted((home / "results" / "tiny-features-sessions").iterdir())
    assert [file.name for file in files] == ["imprint.seed-0.json", "ncm.seed-0.json"]
    result = json.loads(files[1].read_text())
    assert result["episodes"]["sessions"] == 9
    assert result["episodes"]["state_bytes"] == 45 * 512 * 4
    assert result["pretraining"]["accuracy"]["base/test"] == pytest.approx(50.2, abs=0.1)
    for command in (("compare", "ncm", "imprint", "--task", task), ("show", str(files[1]))):
        assert call(*command)[0] == 0, command
    damaged = dict(result, episodes=result["episodes"] | {"ways": 0})
    files[1].write_text(json.dumps(damaged))
    assert call("check", str(files[1]))[0] == 2


@pytest.mark.slow("a whole run in sessions")
def test_an_upper_bound_has_no_calibrated_numbers_in_sessions(call, here):
    """Each validation sequence would be another fit to all images."""
    sessions = "{ count = 3, ways = 2, orders = 2, supports = 2, queries = 9 }"
    with (here / "clusters.toml").open("a", encoding="utf-8") as file:
        file.write(f"[tasks.in-sessions]\nshots = 2\nsessions = {sessions}\n")
    status, out, err = call("run", "--method", "upper-bound,ncm", "--task", "clusters.toml:in-sessions")
    assert status == 0, err
    heading, *lines = out[out.index("method") :].splitlines()
    start = heading.index("cal. Acc.")
    cells = {line.split()[0]: line[start : start + 9].strip() for line in lines[1:3]}
    assert cells["ncm"]
    assert not cells["upper-bound"]


def test_second_head_is_of_the_linear_backbone():
    task, work = load_task("tiny-features-sessions"), workspace(device="cpu")
    linear = work.open_task(task, "linear", 0)
    rows = np.array(linear.open_features("base/test"))
    weights = linear.pretrained_backbone.features_sha256
    cosine = work.open_task(task, "cosine", 0)
    assert (cosine.open_features("base/test") == rows).all()
    assert cosine.pretrained_backbone.features_sha256 == weights
    base, means = cosine.base_classifier, cosine.base_classifier.prototypes
    assert torch.allclose(F.normalize(base.weight), F.normalize(means), atol=1e-5)
    pool, even = cosine.dataset.pool("base/val"), []
    for start, stop in zip(pool.class_starts[:-1], pool.class_starts[1:], strict=True):
        even += range(int(start), int(stop), 2)
    rows = torch.from_numpy(np.array(cosine.open_features("base/val"))[even])
    cosines = F.normalize(rows).double() @ F.normalize(means).double().T
    labels = torch.from_numpy(pool.labels[even].astype(np.int64))
    scale = torch.tensor(base.scale, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(scale * cosines, labels).backward()
    assert abs(float(scale.grad)) < 1e-4, "its temperature is where the loss is least"
    assert (work.home.pretrained / cosine.pretrained_backbone.pretraining_key).is_dir()


def test_more_shots_than_there_are_images_is_said_with_a_number_that_works(call):
    status, _, err = call("run", "--method", "ncm", "--task", "tiny-features-sessions+shots=300", "--dry-run")
    assert status == 2
    assert err.endswith("has 225; --shots 189 would do here\n")
    status, _, err = call("run", "--method", "ncm", "--task", "tiny-features-sessions+shots=189", "--dry-run")
    assert status == 0, err


def test_ranges_of_sequences_have_the_counts_of_the_whole(base, monkeypatch):
    monkeypatch.setattr(evaluation, "choose_block_size", lambda loader, method: 2)
    method, loader = seeded_method("lr", base), loader_of(base)
    whole = evaluate_method(method, "lr", loader, range(6), whole=6)
    parts = [evaluate_method(method, "lr", loader, part, whole=6) for part in (range(3), range(3, 5), range(5, 6))]
    result = evaluation.join_evaluation_results(parts)
    for name, values in whole.counts.count_arrays().items():
        assert (result.counts.count_arrays()[name] == values).all(), name
    assert all((result.method_statistics[name] == values).all() for name, values in whole.method_statistics.items())


OF_FAULTS = """
import os, signal, torch
from pathlib import Path
from ifsl_bench import AdditiveClassifier, Method, Prediction, SessionOutput

class Means(AdditiveClassifier):
    calls = 0

    def learn_classes(self, support, earlier):
        Means.calls += 1
        if Means.calls > 300 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return SessionOutput(support.class_means(self.ways))

    def class_logits(self, state, query):
        return -torch.cdist(query.features, state)

    def base_logits(self, query):
        return -torch.cdist(query.features, self.base.prototypes.expand(len(query.features), -1, -1))

class Breaks(Means):
    def learn_classes(self, support, earlier):
        broken = earlier is not None and earlier.shape[-1] == 30
        return SessionOutput(support.class_means(self.ways) * (float("nan") if broken else 1))

class BreaksStepByStep(Method):
    broken = 7

    def learn(self, support, before=None):
        return SessionOutput((*(before or ()), support.class_means(self.ways)))

    def answer(self, state, query):
        logits = torch.cat([query.base_logits, *(query.features @ means.mT for means in state)], -1)
        return Prediction(logits * (float("nan") if len(state) == self.broken else 1))

class BreaksSoon(BreaksStepByStep):
    broken = 2
"""


@pytest.mark.slow("whole runs in sessions")
def test_nan_in_session_7_ends_a_run_and_loses_nothing(home, call):
    (home / "faults.py").write_text(OF_FAULTS, encoding="utf-8")
    task = ("--task", "tiny-features-sessions", "--episodes", "10", "--device", "cpu")
    for name, where in (
        ("Breaks", "8 of 8 sequences of a batch,"),
        ("BreaksStepByStep", "8 of 8 sequences of a batch after session 7,"),
        ("BreaksSoon", "8 of 8 first sequences after session 2,"),
    ):
        status, _, err = call("run", "--method", f"faults.py:{name}", *task)
        assert status == 2
        said = f"ifsl-bench: method '{name}' returned NaN or infinite logits in {where} expected finite ones"
        assert err.splitlines()[-1].startswith(said)
    status, _, err = call("run", "--method", "ncm,faults.py:Breaks", *task)
    assert status == 1, "of several jobs, one fails"
    assert "1 of 2 jobs failed" in err
    names = [file.name for file in (home / "results").rglob("*.json")]
    assert names == ["ncm.episodes=10.seed-0.json"]


OF_TYPES = """
from ifsl_bench import AdditiveClassifier, Method, Prediction, SessionOutput

class Bare(Method):
    def learn(self, support, before=None):
        return support.class_means(self.ways)

    def answer(self, state, query):
        return query.base_logits

class Unwrapped(Bare):
    def learn(self, support, before=None):
        return SessionOutput(support.class_means(self.ways))

class Grown(AdditiveClassifier):
    def learn_classes(self, support, earlier):
        return (support.class_means(self.ways),)

    def class_logits(self, state, query):
        return query.features @ state.mT
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Bare", "Bare.learn returned Tensor, expected ifsl_bench.SessionOutput"),
        ("Unwrapped", "Bare.answer returned Tensor, expected ifsl_bench.Prediction"),
        ("Grown", "Grown.learn_classes returned tuple, expected ifsl_bench.SessionOutput"),
    ],
)
def test_what_learn_and_answer_return_is_held_against_their_types(name, said, call, home):
    (home / "wrong.py").write_text(OF_TYPES, encoding="utf-8")
    for command in (
        ("methods", "--check", f"wrong.py:{name}"),
        ("run", "--method", f"wrong.py:{name}", "--task", "tiny-features-5shot", "--episodes", "2"),
        ("run", "--method", f"wrong.py:{name}", "--task", "tiny-features-sessions", "--episodes", "2"),
    ):
        status, _, err = call(*command)
        assert status == 2
        assert err.splitlines()[-1].startswith(f"ifsl-bench: {said}")


@pytest.mark.slow("a run that is killed and begun again")
def test_a_killed_run_has_the_counts_of_one_in_another_process(home, call):
    """Killed in the middle of 400 sequences of nine sessions, a few at a time."""
    (home / "faults.py").write_text(OF_FAULTS, encoding="utf-8")
    task = ("--method", "faults.py:Means", "--task", "tiny-features-sessions", "--device", "cpu")
    command = (sys.executable, "-m", "ifsl_bench", "run", *task)
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert not list((home / "results").rglob("*.json"))
    assert subprocess.run(command, capture_output=True).returncode == 0
    (file,) = (home / "results").rglob("*.json")
    counts = json.loads(file.read_text())["episodes"]
    status, _, err = call("run", "--rerun", "--jobs", "2", *task)
    assert status == 0, err
    assert json.loads(file.read_text())["episodes"] == counts
