"""Methods that need what a recipe learned: their formulas in plain loops, whole runs, and who is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ifsl_bench.backbones.find_recipe import find_recipe
from ifsl_bench.backbones.networks import make_backbone
from ifsl_bench.backbones.recipe import RecipeBackbone
from ifsl_bench.experiments.job import with_recipe
from ifsl_bench.experiments.workspace import PreparedTask, workspace
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Base, Query, Support
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.recipes.etf import ProjectionNeck
from ifsl_bench.utils.errors import UserError

K, N, D, SHOTS, QUERIES = 6, 2, 8, 3, 5
EXACT = 1e-10
SESSIONS = """
[tasks.hues-sessions]
shots = 2
[tasks.hues-sessions.sessions]
orders = 6
supports = 2
count = 2
ways = 2
"""


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def base_with(**extras: torch.Tensor) -> Base:
    return Base(randn(K, D), torch.zeros(K).double(), 1 + randn(K, D, seed=1), extras=extras)


def session(seed: int, hide: tuple[int, ...] = ()) -> Support:
    hidden = torch.zeros(1, K, dtype=torch.bool)
    hidden[0, list(hide)] = True
    labels = torch.arange(N).repeat_interleave(SHOTS)[None]
    return Support(1 + randn(1, N * SHOTS, D, seed=seed), labels, hidden, torch.zeros(1, N * SHOTS, K).double())


def queries() -> Query:
    return Query(1 + randn(1, QUERIES, D, seed=9), torch.zeros(1, QUERIES, K).double())


def answered(method, *sessions: Support) -> list[list[float]]:
    state = None
    for support in sessions:
        state = method.learn(support, state).state
    return method.answer(state, queries()).logits[0].tolist()


def softmax(scores: dict[int, float]) -> dict[int, float]:
    total = sum(math.exp(s) for s in scores.values())
    return {i: math.exp(s) / total for i, s in scores.items()}


@pytest.mark.parametrize("vote", ["released", "written"])
@pytest.mark.parametrize("rows", [5, 50])  # fewer and more than the 40 that may speak
@pytest.mark.parametrize("hide", [(), (1, 4)])
def test_the_vote_of_virtual_classes(vote, rows, hide):
    base, eta, temperature = base_with(virtual=randn(rows, D, seed=2)), 0.3, 9.0
    method = registry.get_method("fact-virtual")(base, N, eta=eta, temperature=temperature, vote=vote)
    sessions = session(3, hide), session(4, hide)
    logits = answered(method, *sessions)
    means = {i: p.numpy() for i, p in enumerate(base.prototypes)}
    for t, support in enumerate(sessions):
        for y in range(N):
            means[K + t * N + y] = support.features[0, y * SHOTS : (y + 1) * SHOTS].numpy().mean(0)
    seen = {i: m for i, m in means.items() if i not in hide}
    lengths = [math.sqrt(sum(m[d] ** 2 for m in seen.values())) for d in range(D)]
    virtual = [v / math.sqrt(v @ v) for v in base.extras["virtual"].numpy()]
    for h, row in zip(queries().features[0].numpy(), logits, strict=True):
        h = h / math.sqrt(h @ h)
        nearest = sorted(((float(h @ v), j) for j, v in enumerate(virtual)), reverse=True)[:40]
        votes = {}
        for i, m in seen.items():
            q = [m[d] / (lengths[d] if vote == "released" else math.sqrt(m @ m)) for d in range(D)]
            votes[i] = sum(s * sum(virtual[j][d] * q[d] for d in range(D)) for s, j in nearest)
        plain = softmax({i: temperature * float(h @ m) / math.sqrt(m @ m) for i, m in seen.items()})
        voted = softmax(votes)
        for i in seen:
            assert row[i] == pytest.approx(math.log(eta * voted[i] + (1 - eta) * plain[i]), abs=EXACT)


def test_without_a_share_the_vote_is_that_of_class_means():
    base = base_with(virtual=randn(5, D, seed=2))
    method, means = registry.get_method("fact-virtual")(base, N, eta=0.0), registry.get_method("ncm")(base, N)
    ours, theirs = (torch.tensor(answered(m, session(3))).argmax(-1) for m in (method, means))
    assert torch.equal(ours, theirs)
    with pytest.raises(UserError, match="eta must be between 0 and 1"):
        registry.get_method("fact-virtual")(base, N, eta=1.5)


def neck_and_base(corners: int = K + 3 * N) -> tuple[nn.Module, Base]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        neck = ProjectionNeck(D).double()
    unit = F.normalize(randn(corners, D, seed=5), dim=1)
    return neck, base_with(corners=unit, **{f"neck.{name}": x.detach() for name, x in neck.named_parameters()})


@pytest.mark.parametrize("hide", [(), (1, 4)])
def test_a_neck_is_tuned_on_one_mean_of_each_class(hide):
    """Against a module, PyTorch's SGD, and the schedule step by step."""
    neck, base = neck_and_base()
    steps, rate = 25, 0.05
    method = registry.get_method("etf-neck")(base, N, steps=steps, rate=rate)
    sessions = session(3, hide), session(4, hide), session(6, hide)
    logits = answered(method, *sessions)
    memory = [(p, i) for i, p in enumerate(base.prototypes) if i not in hide]
    for t, support in enumerate(sessions):
        new = [(x, K + t * N + y) for x, y in zip(support.features[0], support.labels[0].tolist(), strict=True)]
        optimiser = torch.optim.SGD(neck.parameters(), 1.0, momentum=0.9, weight_decay=5e-4)
        for step in range(1, steps + 1):
            now = 0.01 * rate + 0.99 * rate * 0.5 * (1 + math.cos(math.pi * step / (steps - 5)))
            if step < 5:
                now -= (1 - step / 5) * 0.9 * now  # a rise from a tenth
            if step > steps - 5:
                now = 0.001 * rate
            optimiser.param_groups[0]["lr"] = now
            optimiser.zero_grad()
            loss = 0.0
            for x, y in memory + new:
                g = neck(x)
                loss = loss + 10 * 0.5 * (g @ base.extras["corners"][y] / g.norm() - 1) ** 2 / len(memory + new)
            loss.backward()
            optimiser.step()
        memory += [(torch.stack([x for x, of in new if of == y]).mean(0), y) for y in sorted({y for _, y in new})]
    for h, row in zip(queries().features[0], logits, strict=True):
        g = neck(h).detach()
        expected = [float(g @ e / g.norm()) for e in base.extras["corners"][: K + 3 * N]]
        assert row == pytest.approx(expected, abs=1e-8)  # of 75 steps, each of which rounds


def test_without_steps_the_neck_is_the_recipes():
    neck, base = neck_and_base()
    method = registry.get_method("etf-neck")(base, N, steps=0)
    expected = F.normalize(neck(queries().features), dim=-1) @ base.extras["corners"].T
    ours = torch.tensor(answered(method, session(3)), dtype=torch.float64)
    torch.testing.assert_close(ours, expected[0, :, : K + N].detach())
    torch.testing.assert_close(method.base_logits(queries())[0], expected[0, :, :K].detach())


def test_a_simplex_with_fewer_corners_than_classes_is_refused():
    _, base = neck_and_base(K + N)
    method = registry.get_method("etf-neck")(base, N, steps=1)
    with pytest.raises(UserError, match=f"has {K + N} corners for {K + 2 * N} classes"):
        answered(method, session(3), session(4))
    with pytest.raises(UserError, match=f"has {K + N} corners for {K + N + 1} classes"):
        registry.get_method("etf-neck")(base, N + 1)


@pytest.fixture
def hue_sessions(hues):
    text = Path("hues.toml").read_text()
    Path("both.toml").write_text(text + SESSIONS)
    return hues


@pytest.mark.slow("whole runs in both protocols")
@pytest.mark.parametrize(
    ("method", "recipe", "options"),
    [("fact-virtual", "fact.start=0", ()), ("etf-neck", "etf.neck=apart", ("--set", "steps=6"))],
)
def test_runs_in_episodes_and_in_sessions(method, recipe, options, hue_sessions, call):
    for task in ("hues-1shot", "hues-sessions"):
        how = ("--task", f"both.toml:{task}", "--recipe", recipe)
        status, out, err = call("run", "--method", method, *how, *options, "-q")
        assert status == 0, err
        assert f" | {recipe.partition('.')[0]}, " in out
    files = sorted((hue_sessions / "home" / "results" / "hues-sessions").glob(f"{method}*.json"))
    (stored,) = [json.loads(file.read_text()) for file in files]
    assert stored["pretraining"]["recipe"] == recipe


def test_extras_are_of_the_stored_weights(hue_sessions, call):
    """In another home that imports the weights they are the same, bit by bit."""
    task = with_recipe(load_tasks("both.toml:hues-1shot")[0], "etf.neck=apart")
    prepared = PreparedTask(task, "linear", 0, workspace(device="cpu"))
    trained, recipe = prepared.base_classifier.extras, prepared.pretrained_backbone.network.recipe
    assert set(trained) == {"corners", *(f"neck.{name}" for name in recipe.neck.state_dict())}
    images = torch.randn(4, 3, 20, 20)
    with torch.inference_mode():
        assert torch.equal(recipe.embed(images), recipe.backbone(images))  # not the neck's
    again = PreparedTask(task, "cosine", 0, workspace(device="cpu")).base_classifier.extras
    for name, x in trained.items():
        assert torch.equal(again[name], x), name
    plain = PreparedTask(load_tasks("both.toml:hues-1shot")[0], "linear", 0, workspace(device="cpu"))
    assert plain.base_classifier.extras == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fact-virtual",), "method fact-virtual needs a recipe that learns its virtual, and recipe ce does not; add"
                            " --recipe fact"),
        (("fact-virtual", "--recipe", "closer"), "recipe closer does not; add --recipe fact"),
        (("etf-neck", "--recipe", "etf"), "learns its neck, and recipe etf does not; add --recipe etf.neck=apart"),
        (("etf-neck", "--recipe", "etf.neck=apart,ce"), "learns its corners and neck, and recipe ce does not"),
    ],
)  # fmt: skip
def test_other_recipes_are_refused_before_anything_is_trained(arguments, message, hues, call):
    status, out, err = call("run", "--task", "hues.toml", "--method", *arguments)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert not (hues / "home" / "pretrained").exists()


def test_features_and_weights_from_elsewhere_have_no_extras(hues, call):
    status, _, err = call("run", "--task", "tiny-features-5shot", "--method", "fact-virtual")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "needs a recipe that learns its virtual, and nothing that tiny-features-5shot is given does" in err


def test_all_leaves_them_out(hues, call):
    status, out, err = call("run", "--method", "all", "--task", "glyphs-5shot", "--dry-run", "--format", "csv")
    assert status == 0, err
    assert "ncm" in out
    assert "fact-virtual" not in out + err
    assert "etf-neck" not in out + err


@pytest.mark.parametrize(("recipe", "stages"), [("closer", 3), ("rotation", 1)])
def test_a_backbone_has_stages_where_its_recipe_leaves_features_as_they_are(recipe, stages):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = find_recipe(recipe).recipe_class(make_backbone("resnet-small", (16, 16, 1)), 5)
    network = RecipeBackbone(made, (1, 16, 16)).eval()
    assert len(network.stages) == stages
    images = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    out = images
    for stage in network.stages:
        out = stage(out)
    torch.testing.assert_close(out, network(images))
