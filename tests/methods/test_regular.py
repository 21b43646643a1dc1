"""Regular few-shot learning: no base class in the softmax, an attention that still reads W_a, one accuracy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ifsl_bench import api
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.data.pools import open_dataset
from ifsl_bench.experiments.workspace import PreparedTask
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Base, Query, Support, check_prediction, masked_logits
from ifsl_bench.plugin.options import add_example_extras
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.leaderboard import make_task_table
from ifsl_bench.reporting.table import OUTPUT_FORMATS, RECORD_FORMATTERS, render_tables
from ifsl_bench.store.schema import read_result
from tests.methods.test_methods_contract import METHODS, E, K, N, Q, make_base, make_episodes

ROWS = sorted(  # the shorthands of a method stand for it: one of them is what it does by default
    row
    for name in METHODS
    if not (plugin := registry.load_plugin(registry.METHOD_GROUP, name)).load_problem
    for row in plugin.loaded_object.shorthands or (name,)
)
VARIANTS = """
[variants.regular]
of = "clusters-5shot"
regular = true
[variants.regular-shared]
of = "clusters-shared-5shot"
regular = true
"""


def episodes(base_logit: float = -torch.inf) -> tuple[Support, Query]:
    """Episodes whose base logits are all the same."""
    return tuple(replace(part, base_logits=torch.full_like(part.base_logits, base_logit))
                 for part in make_episodes(make_base()))  # fmt: skip


def make(name: str, base: Base | None = None):
    _, kind, options = registry.resolve_method(name)
    torch.manual_seed(0)
    return kind(add_example_extras(base or make_base(), kind), N, **options).double().eval()


@pytest.mark.parametrize("name", ROWS)
def test_every_method_answers_among_the_novel_classes_alone(name):
    method = make(name)
    support, query = episodes()
    prediction = check_prediction(name, method(support, query), torch.ones(E, K, dtype=torch.bool), Q, N)
    logits = masked_logits(prediction, torch.ones(E, K, dtype=torch.bool))
    novel = logits[..., K:].detach()
    assert torch.isfinite(novel).all()
    assert (logits[..., :K] == -torch.inf).all()
    # What base classes with a share of 1e-26 in every softmax leave over is the same.
    nearly = method(*episodes(-60.0)).logits[..., K:].detach()
    torch.testing.assert_close(novel, nearly, rtol=1e-6, atol=1e-6)  # the solvers' stop, 1e-9, of logits up to 100
    assert not any("unconverged" in key and value.any() for key, value in prediction.statistics.items())


@pytest.mark.parametrize("name", ROWS)
def test_parameters_still_learn(name):
    method = make(name).train()
    if not list(method.parameters()):
        return
    support, query = episodes()
    target = K + torch.randint(0, N, (E * Q,), generator=torch.Generator().manual_seed(4))

    def loss() -> torch.Tensor:
        torch.manual_seed(5)
        logits = masked_logits(method(support, query), torch.ones(E, K, dtype=torch.bool))
        return F.cross_entropy(logits.flatten(0, 1), target)

    value = loss()
    value.backward()
    moved = 0
    for key, parameter in method.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        if parameter.grad.abs().max() > 0:
            moved += 1
            continue
        # What concerns base classes alone (a margin, say) has no say here: then its value does not matter either.
        with torch.no_grad():
            parameter += 0.1
            torch.testing.assert_close(loss(), value.detach(), msg=key)
            parameter -= 0.1
    assert moved


@pytest.mark.parametrize("name", ["lwof", "lr+a", "mlp+a"])
def test_an_attention_still_reads_the_base_weights(name):
    before, base = make(name), make_base()
    scaled_method = make(name, replace(base, weight=1.5 * base.weight))
    if name == "lwof":
        scaled_method.load_state_dict({**before.state_dict(), "weight": 1.5 * before.weight.detach()})
    else:
        scaled_method.load_state_dict(before.state_dict())
    a, b = (method(*episodes()).logits[..., K:].detach() for method in (before, scaled_method))
    assert (a - b).abs().max() > 1e-4


@pytest.fixture
def task(clusters):
    """Names a regular task of the small data set; the folder's home is the fixture's."""
    path = clusters / "clusters.toml"
    path.write_text(path.read_text() + VARIANTS)
    return lambda name: f"{path}:{name}"


@pytest.mark.parametrize(("name", "side"), [("regular", "test"), ("regular", "train"), ("regular-shared", "train")])
def test_episodes_have_no_base_images(clusters, task, name, side):
    bench = PreparedTask(load_tasks(task(name))[0], "linear", 0, api.workspace(clusters / "home", device="cpu"))
    loader = bench.loader(side)
    batch = loader.load_batch(3, 9)
    assert batch.query_labels.shape == (9, 25)
    assert batch.query_is_novel.all()
    assert (torch.bincount(batch.query_labels[0], minlength=13)[8:] == 5).all()
    assert (batch.support.base_logits == -torch.inf).all()
    assert (batch.query.base_logits == -torch.inf).all()
    assert batch.support.base_logits.shape == (9, 25, 8)
    drawn = loader.sampler.sample(3, 9)
    # In meta-training on the base classes themselves, the pretended novel ones are out of the attention too.
    hidden = torch.zeros(9, 8, dtype=torch.bool)
    if name == "regular-shared":
        hidden.scatter_(1, drawn.classes, True)
    assert torch.equal(batch.support.hidden, hidden)
    assert batch.masked_base_classes.all()
    assert batch.select_episode_range(2, 4).masked_base_classes.all()
    pool = bench.dataset.pool(load_tasks(task(name))[0].pool(side, "novel"))
    assert np.array_equal(batch.support.features.numpy(), pool.images[drawn.support.numpy()])
    assert np.array_equal(batch.query.features.numpy(), pool.images[drawn.query.numpy()])
    way = np.take_along_axis(drawn.classes.numpy(), batch.query_labels.numpy() - 8, 1)
    assert np.array_equal(pool.labels[drawn.query.numpy()], way), "labels are those of the images"
    assert loader.sampler.digest(20) == loader.sampler.digest(20, batch=3)


@pytest.mark.parametrize(("name", "method"), [("regular", "lr"), ("regular-shared", "lwof")])
def test_a_run_from_training_to_the_table(task, name, method, work):
    options = {"weight_decay": 1e-3} if method == "lr" else {}
    result = api.run(method, task(name), options=options, train={"steps": 10}, work=work)
    assert (result.episodes.base_queries, result.episodes.novel_queries) == (0, 25)
    assert set(result.summary) == {"acc"}
    assert result.episodes.novel_joint == result.episodes.novel_alone
    assert result.episodes.base_joint == result.episodes.base_alone == [0] * 60
    assert result.summary["acc"]["mean"] > 50
    path = next((work.home.results / name).glob("*.json"))
    assert read_result(path) == result
    board = load_task_results(load_tasks(task(name))[0], work.home.results)
    for style in OUTPUT_FORMATS:
        text = render_tables([make_task_table(board, full=True)], style)
        mean = result.summary["acc"]["mean"]
        assert (f"{round(mean, 4)}" if style in RECORD_FORMATTERS else f"{mean:.2f}") in text
        assert "nan" not in text.lower()
        assert "elta" not in text or style in RECORD_FORMATTERS


def test_accuracy_is_that_of_a_plain_loop(clusters, task, work):
    """ProtoNet by hand: the nearest of five means."""
    result = api.run("protonet", task("regular"), work=work)
    drawn = PreparedTask(load_tasks(task("regular"))[0], "linear", 0, work).sampler("test").sample(0, 60)
    images = open_dataset(clusters / "home" / "data" / "clusters").pool("novel/test").images
    for e in range(60):
        means = images[drawn.support[e].numpy()].reshape(5, 5, -1).mean(1)
        queries = images[drawn.query[e].numpy()]
        nearest = ((queries[:, None] - means) ** 2).sum(-1).argmin(1)
        hits = int((nearest == drawn.query_labels[e].numpy() - 8).sum())
        assert result.episodes.novel_alone[e] == hits
