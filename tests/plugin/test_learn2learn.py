"""learn2learn beside us: our episodes as its tasks, its MAML in a method of ours, and what is said where it is missing.

Its data sets are imported in ``tests/data``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ifsl_bench
from ifsl_bench import api
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.experiments.workspace import PreparedTask
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.learn2learn import INSTALL_COMMAND, load_learn2learn
from ifsl_bench.plugin.method import Base, Query, Support
from ifsl_bench.protocols.tasks.task_files import load_tasks

ROOT = Path(__file__).parents[2]
REGULAR = '\n[variants.clusters-regular-5shot]\nof = "clusters-5shot"\nregular = true\n'


@pytest.fixture
def work(clusters):
    """A workspace with small frozen features; their task file has a task of regular few-shot learning too."""
    with open(clusters / "clusters.toml", "a") as file:
        file.write(REGULAR)
    return api.workspace(clusters / "home", device="cpu")


def named(clusters, name: str) -> str:
    return f"{clusters / 'clusters.toml'}:{name}"


def split(X, y, shots: int):
    """Support and query as learn2learn's examples separate them (``fast_adapt``)."""
    support = np.zeros(X.size(0), dtype=bool)
    support[np.arange(shots * 5) * 2] = True
    support = torch.from_numpy(support)
    return (X[support], y[support]), (X[~support], y[~support])


# -- our episodes as learn2learn's tasks


@pytest.mark.parametrize("order", ["interleaved", "support-first"])
@pytest.mark.parametrize("name", ["clusters-1shot", "clusters-shared-5shot", "clusters-regular-5shot"])
def test_tasks_are_our_episodes(learn2learn, clusters, work, name, order):
    """Held against what our methods are given of the same episodes; learn2learn's examples know their order, too."""
    task = load_tasks(named(clusters, name))[0]
    of_sides = ifsl_bench.to_learn2learn(named(clusters, name), seed=3, order=order, work=work)
    for side, ours in {"train": "train", "validation": "val", "test": "test"}.items():
        tasks = getattr(of_sides, side)
        assert isinstance(tasks, learn2learn.data.Taskset)
        expected = PreparedTask(task, "linear", 3, work).loader(ours).load_batch(0, 12)
        K = expected.support.hidden.shape[1]
        for i in (11, 0, 5, 0):
            X, y = tasks[i]
            x, support, q, query = tasks.split(X, y)
            if order == "interleaved":
                examples = split(X, y, task.shots)
                assert all(map(torch.equal, (x, support, q, query), (*examples[0], *examples[1])))
            assert torch.equal(x, expected.support.features[i])
            assert torch.equal(support, expected.support.labels[i])
            assert torch.equal(q, expected.query.features[i])
            novel = expected.query_is_novel[i]
            assert torch.equal(query[novel], expected.query_labels[i][novel] - K)
            assert torch.equal(query[~novel], expected.query_labels[i][~novel] + 5)
            assert y.dtype == torch.int64
            assert torch.equal(tasks.hidden(i) - 5, expected.support.hidden[i].nonzero().flatten())
    with pytest.raises(ifsl_bench.UserError, match=rf"a task has {len(y)} rows, X has 1 and y has 1"):
        tasks.split(X[None], y[None])


def test_tasks_come_in_order_or_at_random_and_end(learn2learn, clusters, work):
    tasks = ifsl_bench.to_learn2learn(named(clusters, "clusters-5shot"), num_tasks=7, work=work)
    assert [len(part) for part in tasks] == [7, 20, 60]
    assert not work.home.pretrained.exists(), "images need no backbone"
    inputs = [X for X, _ in tasks.train]
    assert len(inputs) == 7
    assert all(torch.equal(X, tasks.train[i][0]) for i, X in enumerate(inputs))
    assert torch.equal(tasks.train[-1][0], inputs[6])
    random.seed(0)
    drawn = [tasks.train.sample()[0] for _ in range(40)]
    assert {i for X in drawn for i, reference in enumerate(inputs) if torch.equal(X, reference)} == set(range(7))
    with pytest.raises(IndexError):
        tasks.train[7]
    other_tasks = ifsl_bench.to_learn2learn(named(clusters, "clusters-5shot"), seed=1, work=work)
    assert not torch.equal(other_tasks.train[0][0], inputs[0])
    assert torch.equal(other_tasks.test[0][0], tasks.test[0][0])


def test_tasks_go_to_spawned_workers_and_never_to_a_gpu(learn2learn, clusters, work):
    name = named(clusters, "clusters-shared-5shot")
    elsewhere = replace(work, device=torch.device("cuda"))  # whether there is one or not
    tasks = ifsl_bench.to_learn2learn(name, num_tasks=4, work=elsewhere).train
    assert tasks.sampler.device.type == "cpu"
    assert tasks.dataset.dataset.pools[0].images.nbytes  # mapped here, opened again there
    loader = torch.utils.data.DataLoader(tasks, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    pairs = [pair for X, y in loader for pair in zip(X, y, strict=True)]
    assert len(pairs) == 4
    for (X, y), (inputs, labels) in zip(pairs, tasks, strict=True):
        assert torch.equal(X, inputs)
        assert torch.equal(y, labels)


def test_images_are_normalised_or_transformed_and_the_data_set_is_learn2learns(learn2learn, glyph_home):
    work, name = api.workspace(glyph_home, device="cpu"), f"{glyph_home.parent / 'few.toml'}:few-1shot"
    tasks = ifsl_bench.to_learn2learn(name, work=work).test
    bench = PreparedTask(load_tasks(name)[0], "linear", 0, work)
    novel, base = bench.dataset.pool("novel/test"), bench.dataset.pool("base/test")
    drawn = bench.sampler("test").sample(4, 1)
    (x, _), (q, _) = split(*tasks[4], 1)
    expected = novel.images[drawn.support[0].numpy()].transpose(0, 3, 1, 2)
    np.testing.assert_allclose(x.numpy(), (expected / 255 - 0.5) / 0.25, atol=1e-6)  # of numbers up to 2 in float32
    pools = {True: novel, False: base}
    queries = zip(drawn.query[0].tolist(), drawn.query_is_novel[0].tolist(), strict=True)
    expected = np.stack([pools[is_novel].images[row] for row, is_novel in queries])
    np.testing.assert_allclose(q.numpy(), (expected.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.25, atol=1e-6)

    raw = ifsl_bench.to_learn2learn(name, transform=lambda image: image[:, ::2].float(), work=work).test
    np.testing.assert_array_equal(split(*raw[4], 1)[1][0].numpy(), expected.transpose(0, 3, 1, 2)[:, :, ::2])

    whole = tasks.dataset
    assert isinstance(whole, learn2learn.data.MetaDataset)
    assert len(whole) == len(novel) + len(base)
    assert len(whole.labels) == len(novel.class_names) + len(base.class_names)
    for label in (0, len(novel.class_names), len(whole.labels) - 1):
        for row in (whole.labels_to_indices[label][0], whole.labels_to_indices[label][-1]):
            assert whole[row][1] == whole.indices_to_labels[row] == label
    # learn2learn's own tasks can be made of it as well.
    transforms = learn2learn.data.transforms
    steps = [transforms.FusedNWaysKShots(whole, n=5, k=2), transforms.LoadData(whole), transforms.RemapLabels(whole)]
    X, y = learn2learn.data.Taskset(whole, steps, num_tasks=1).sample()
    assert X.shape == (10, 1, 32, 32)
    assert sorted(y.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_impossible_tasks_are_refused(learn2learn, clusters, work):
    for name, arguments, message in (
        ("clusters-5shot", {"order": "sorted"}, "order is 'interleaved' or 'support-first', not 'sorted'"),
        ("clusters-5shot", {"change": {"shots": 8, "queries": 1}}, "40 support images of .* with 10 query images"),
        ("", {}, "defines several tasks"),
    ):
        with pytest.raises(ifsl_bench.UserError, match=message):
            ifsl_bench.to_learn2learn(named(clusters, name).removesuffix(":"), work=work, **arguments)


def test_the_document_shows_what_learns(learn2learn, glyph_home, monkeypatch):
    document = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (program,) = (text for text in re.findall(r"```python\n(.*?)```", document, re.S) if "to_learn2learn" in text)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(glyph_home))
    scope: dict = {}
    assert "range(600)" in program
    exec(program.replace("range(600)", "range(300)"), scope)
    assert f"# {list(scope['X'].shape)} and {list(scope['y'].shape)}" in program
    assert scope["accuracy"] > 0.3  # 0.36 measured; chance is 0.2, and before the first step it has 0.23


# -- ANIL


E, N, SHOTS, Q, D, K = 3, 4, 2, 6, 7, 5


def make_episodes(hide: bool) -> tuple[Base, Support, Query]:
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    base = Base(rand(K, D), rand(K), rand(K, D))
    x, q = rand(E, N * SHOTS, D), rand(E, Q, D)
    hidden = torch.zeros(E, K, dtype=torch.bool)
    if hide:
        hidden[torch.arange(E), torch.tensor([0, 3, 1])] = True
    labels = torch.arange(N).repeat_interleave(SHOTS).expand(E, -1)
    logits = [F.linear(rows, base.weight, base.bias) for rows in (x, q)]
    return base, Support(x, labels, hidden, logits[0]), Query(q, logits[1])


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("first_order", [False, True])
def test_anil_makes_the_steps_of_a_loop_written_out(learn2learn, hide, first_order):
    """One episode at a time over all K + N logits, in plain autograd; the meta-gradient by finite differences."""
    base, support, query = make_episodes(hide)
    torch.manual_seed(2)
    options = {"inner_steps": 3, "inner_rate": 0.7, "first_order": first_order}
    method = registry.get_method("anil")(base, N, **options).double()
    target = torch.randint(0, K + N, (E, Q), generator=torch.Generator().manual_seed(5))
    target[target == torch.tensor([0, 3, 1]).unsqueeze(1)] = K  # never a hidden class

    def loss_of(logits) -> torch.Tensor:
        old = logits[..., :K].masked_fill(support.hidden[:, None], -torch.inf)
        return F.cross_entropy(torch.cat([old, logits[..., K:]], -1).flatten(0, 1), target.flatten())

    def written_out(weight, bias, constant: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [E, Q, K + N] and their loss; ``constant`` takes what the steps add as a constant."""
        rows = []
        for e in range(E):
            w, b = weight, bias
            for _ in range(3):
                old = support.base_logits[e].masked_fill(support.hidden[e], -torch.inf)
                logits = torch.cat([old, support.features[e] @ w.T + b], -1)
                loss = F.cross_entropy(logits, support.labels[e] + K)
                grads = torch.autograd.grad(loss, (w, b), create_graph=not constant)
                w, b = w - 0.7 * grads[0], b - 0.7 * grads[1]
            rows.append(torch.cat([query.base_logits[e], query.features[e] @ w.T + b], -1))
        logits = torch.stack(rows)
        return logits, loss_of(logits)

    weight, bias = method.parameters()
    assert (weight.shape, bias.shape) == ((1, N, D), (1, N))
    prediction = method(support, query)
    plain = [weight[0].detach().requires_grad_(), bias[0].detach().requires_grad_()]
    logits, loss = written_out(*plain, first_order)
    torch.testing.assert_close(prediction.logits, logits)
    loss_of(prediction.logits).backward()
    expected = torch.autograd.grad(loss, plain)
    torch.testing.assert_close(weight.grad[0], expected[0])
    torch.testing.assert_close(bias.grad[0], expected[1])

    direction = torch.randn(N, D, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    step = 1e-5
    ends = [(plain[0] + sign * step * direction).detach().requires_grad_() for sign in (1, -1)]
    losses = [float(written_out(end, plain[1], True)[1].detach()) for end in ends]
    slope = (losses[0] - losses[1]) / (2 * step)
    exact = abs(float((weight.grad[0] * direction).sum()) - slope) < 1e-6 * max(1, abs(slope))  # step^2, and eps / step
    assert exact != first_order  # first order is not the gradient
    with torch.no_grad():
        torch.testing.assert_close(method.eval()(support, query).logits, logits.detach())


def test_anil_runs_learns_and_is_tuned(learn2learn, clusters, work):
    name = named(clusters, "clusters-5shot")
    result = api.run("anil", name, train={"episodes_per_step": 4}, work=work)
    assert (result.label, result.setting, result.tuned) == ("anil.train.episodes_per_step=4", "paper", {})
    tuned = api.run("anil", name, train={"steps": 5}, tune=3, work=work)
    (tried,) = tuned.tuned.values()
    assert list(tuned.tuned) == ["inner_rate, train.rate"]
    assert len(tried) == 3
    assert next(iter(tried)).startswith("inner_rate=0.3, ")
    untrained = api.run("anil", name, train={"steps": 1}, options={"inner_rate": 0.001}, work=work)
    assert result.summary["novel_alone"]["mean"] > untrained.summary["novel_alone"]["mean"] + 10
    assert result.provenance["libraries"]["learn2learn"] == importlib.metadata.version("learn2learn")
    again = api.run("anil", name, train={"episodes_per_step": 4}, rerun=True, work=work)
    assert again.episodes == result.episodes


# -- without learn2learn


def test_there_is_one_version_and_one_way_to_install_it():
    name, option = re.fullmatch(r'pip install "(.*?)" (--config-settings ".*")', INSTALL_COMMAND).groups()
    assert f"\n{name} {option}\n" in (ROOT / "docs" / "learn2learn-requirements.txt").read_text()
    assert INSTALL_COMMAND in (ROOT / "docs" / "python.md").read_text()
    assert f'learn2learn = ["{name}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def without(monkeypatch):
    """An environment that has no learn2learn, whatever this one has."""
    monkeypatch.setitem(sys.modules, "learn2learn", None)


def test_a_missing_learn2learn_is_one_line_that_says_how_to_install_it(without, clusters, work):
    assert "--config-settings" in INSTALL_COMMAND
    for call in (
        load_learn2learn,
        lambda: api.run("anil", named(clusters, "clusters-5shot"), work=work),
        lambda: ifsl_bench.to_learn2learn(named(clusters, "clusters-5shot"), work=work),
    ):
        with pytest.raises(ifsl_bench.UserError) as caught:
            call()
        assert INSTALL_COMMAND in str(caught.value)
        assert "\n" not in str(caught.value)
    assert registry.load_plugin(registry.METHOD_GROUP, "anil").missing_module == "learn2learn"
    assert not registry.load_plugin(registry.METHOD_GROUP, "imprint").load_problem


@pytest.fixture
def unloaded():
    """As if nothing had imported learn2learn yet; what a test imports under its name is forgotten."""

    def take() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "learn2learn"}

    loaded = take()
    yield
    take()
    sys.modules.update(loaded)


def test_a_broken_learn2learn_is_not_called_missing(unloaded, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a file that is written again within a second
    for content, message in (
        ("import a_package_that_nobody_has", r"cannot be imported \(ModuleNotFoundError: .*a_package_that_nobody_has"),
        ("raise AttributeError('np.bool8')", r"cannot be imported \(AttributeError: np.bool8\).*--force-reinstall"),
        ("import learn2learn.data", r"cannot be imported \(ModuleNotFoundError: .*learn2learn.data.*--force-reinstall"),
    ):
        (tmp_path / "learn2learn.py").write_text(content)
        with pytest.raises(ifsl_bench.UserError, match=message):
            load_learn2learn()


def test_a_result_of_a_method_that_cannot_be_made_here_is_checked_as_far_as_it_can(clusters, work, monkeypatch):
    api.run("imprint", named(clusters, "clusters-5shot"), work=work)
    (path,) = work.home.results.glob("*/imprint.seed-0.json")
    tasks = {task.name: task for task in load_tasks(str(clusters / "clusters.toml"))}
    before = check_file(path, tasks, work.home)
    assert not before.unverified_notes
    monkeypatch.setattr(registry.get_method("imprint"), "requires", {"a_package_that_nobody_has": "pip install it"})
    report = check_file(path, tasks, work.home)
    assert report.failures == before.failures
    assert "a_package_that_nobody_has, which method imprint needs, is not installed" in report.unverified_notes[0]
