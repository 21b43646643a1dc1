"""Trainings by recipes: what resumes, what a step costs, what is stored, and what is refused."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ifsl_bench.backbones import recipe_rules
from ifsl_bench.backbones.find_recipe import find_recipe, naming_recipe_errors
from ifsl_bench.backbones.pretrained import make_pretraining_key, open_pretrained
from ifsl_bench.backbones.trainer import PretrainingTrainer, pretrain
from ifsl_bench.data.preparing.prepare import open_or_build
from ifsl_bench.experiments.job import with_recipe
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.recipes.rotation import Rotation
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter
from tests.recipes.test_losses import LABELS, at, made, views

CPU = torch.device("cpu")
ALL = ["alice", "ce", "closer", "etf.neck=apart", "fact", "rotation", "savc", "supcon"]
RECIPES = ["closer", "savc.queue=50", "rotation.turns=no"]
OTHERS = ["alice", "closer.select=best", "ce.mixup=1", "etf.total=40", "fact.start=0", "supcon"]

NAN = """\
import torch

from ifsl_bench import LinearHead, Recipe


class Late(Recipe):
    def __init__(self, backbone, classes):
        super().__init__(backbone, classes)
        self.head = LinearHead(backbone.features, classes)

    def loss(self, views, labels, at):
        loss = torch.nn.functional.cross_entropy(self.head(self.features(views[0])), labels)
        return {"loss": loss * (float("nan") if at.step >= 7 else 1.0)}
"""

# Written from the manual alone.
TURNS = '''\
import torch
from torch.nn.functional import cross_entropy, normalize

from ifsl_bench import LinearHead, Recipe


class Turns(Recipe):
    """Cross-entropy over 4 K classes, one for each quarter-turn of an image; at test cosines are means over turns."""

    passes = 4.0
    training_only = ("head",)

    def __init__(self, backbone, classes):
        super().__init__(backbone, classes)
        self.head = LinearHead(backbone.features, 4 * classes)

    def loss(self, views, labels, at):
        turned = torch.cat([torch.rot90(views[0], r, (2, 3)) for r in range(4)])
        targets = torch.cat([4 * labels + r for r in range(4)])
        return {"loss": cross_entropy(self.head(self.features(turned)), targets)}

    def embed(self, images):
        turns = [normalize(self.features(torch.rot90(images, r, (2, 3))), dim=1) for r in range(4)]
        return torch.cat(turns, 1) / 2
'''


@pytest.fixture
def hue_task(hues):
    """Make a task on colour images, trained by a recipe for 12 passes of a batch of 8 images."""
    home, task = Paths.locate(hues / "home"), load_tasks("hues.toml")[0]
    dataset = open_or_build(home, task.dataset, Reporter())

    def make(recipe: str, steps: int = 24):
        spec = msgspec.structs.replace(task.pretraining, steps=steps)
        return with_recipe(msgspec.structs.replace(task, pretraining=spec), recipe), dataset

    return make


def tensors(pretrained):
    return {**pretrained.network.state_dict(), **pretrained.base_classifier.state_dict(prefix="head.")}


@pytest.mark.slow("trains twice")
@pytest.mark.parametrize(
    "recipe", [*RECIPES, *(pytest.param(r, marks=pytest.mark.slow("trains twice")) for r in OTHERS)]
)
def test_an_interrupted_training_ends_with_the_same_weights(hue_task, recipe, tmp_path, monkeypatch):
    task, dataset = hue_task(recipe, 60)

    def run(home, stops):
        calls, original = {"n": 0}, PretrainingTrainer._train_step

        def step(self, *arguments):
            calls["n"] += 1
            if calls["n"] in stops:
                raise KeyboardInterrupt
            return original(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(PretrainingTrainer, "_train_step", step)
            for _ in stops:
                with pytest.raises(KeyboardInterrupt):
                    pretrain(home, task, dataset, "linear", 0, CPU, Reporter())
            return pretrain(home, task, dataset, "linear", 0, CPU, Reporter())

    whole = run(Paths.locate(tmp_path / "a"), ())
    broken = run(Paths.locate(tmp_path / "b"), (whole.training_record["steps"] // 2,))
    is_training_only = whole.network.is_training_only
    kept = {name: value for name, value in tensors(whole).items() if not is_training_only(name)}
    assert kept
    for name, value in kept.items():
        assert torch.equal(value, tensors(broken)[name]), name


@pytest.mark.slow("trains in processes that are killed")
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    "recipe",
    ["ce.mixup=1", "ce.select=best", "rotation.passes=4", "closer.passes=3", "alice.passes=4", "etf",
     "fact.passes=2.start=0.3", "supcon.passes=2", "savc.passes=8.queue=50", "means.py"],
)  # fmt: skip
def test_a_training_that_is_killed_in_every_epoch_ends_with_the_same_weights(recipe, hue_task, tmp_path):
    Path("means.py").write_text(MEANS)
    task, dataset = hue_task(recipe, 20)  # four epochs
    killed, whole = (Paths.locate(tmp_path / name) for name in ("killed", "whole"))

    def train(home: Paths) -> None:
        pretrain(home, task, dataset, "linear", 0, CPU, Reporter())

    def state() -> dict[str, Any]:
        files = list(killed.pretrained.glob("*/checkpoint.json"))
        return json.loads(files[0].read_text()) if files else {"epoch": 0, "finished": False}

    epochs = set()
    while not state()["finished"]:
        before = state()["epoch"]
        process = multiprocessing.get_context("fork").Process(target=train, args=(killed,))
        process.start()
        while process.is_alive() and state()["epoch"] == before:
            time.sleep(0.001)
        process.kill()
        process.join()
        epochs |= {state()["epoch"]} if process.exitcode == -signal.SIGKILL else set()
    assert len(epochs) >= 3
    trained = pretrain(whole, task, dataset, "linear", 0, CPU, Reporter())
    assert trained.sha256 == state()["tensors"]["sha256"]


def test_all_recipes_have_the_passes_of_the_task(hue_task, tmp_path):
    for recipe, steps, passes in (
        ("closer", 8, 3.0),
        ("closer.passes=2", 16, 3.0),
        ("rotation", 6, 4.0),
        ("ce.mixup=1", 24, 1.0),
    ):
        task, dataset = hue_task(recipe)
        trainer = PretrainingTrainer(tmp_path / recipe, task, dataset, "linear", 0, CPU)
        assert (trainer.steps, trainer.passes) == (steps, passes), recipe


@pytest.mark.slow("trains")
@pytest.mark.parametrize("recipe", ["ce", "rotation", "closer", "alice", "etf", "fact", "supcon", "savc.queue=50"])
def test_a_finished_training_is_read_again(recipe, hue_task, hues):
    """Network, base classifier and the rest of what is stored are those that training ended with."""
    home, (task, dataset) = Paths.locate(hues / "home"), hue_task(recipe)
    trained = pretrain(home, task, dataset, "linear", 0, CPU, Reporter())
    opened = open_pretrained(home, task, dataset, "linear", 0, CPU, Reporter())
    images = torch.randn(4, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(opened.network(images), trained.network(images))
        assert torch.equal(
            opened.base_classifier(opened.network(images)), trained.base_classifier(trained.network(images))
        )
    assert not list(home.pretrained.glob("*.corrupt-*"))
    assert opened.result_entry().get("recipe", "ce") == recipe
    if recipe.startswith("savc"):
        state = CheckpointFolder(home.pretrained / trained.pretraining_key).load()
        names = {name.removeprefix("network.recipe.").partition(".")[0] for name in state.tensors}
        assert names == {"backbone", "head"}, "no queue and no momentum encoder"
        assert opened.result_entry()["steps"] == round(24 / opened.result_entry()["passes"])


def test_keys_tell_recipes_apart_and_plain_cross_entropy_keeps_its_own(hue_task):
    plain, dataset = hue_task("ce")
    assert plain.recipe is None
    keys = {recipe: make_pretraining_key(hue_task(recipe)[0], dataset.fingerprint, "linear", 0)
            for recipe in ("ce", "closer", "closer.beta=1", "ce.passes=2", "etf")}  # fmt: skip
    assert len(set(keys.values())) == len(keys)
    assert "+closer-linear" in keys["closer"]
    assert hue_task("closer")[0].hash == plain.hash  # the episodes are the same


def test_the_default_of_an_option_is_no_other_recipe():
    assert find_recipe("closer.beta=0.5").label == "closer"
    assert find_recipe("ce.passes=1").label == "ce"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("closr", "unknown recipe 'closr'"),
        ("closer.bta=1", "unknown option 'bta' of recipe 'closer'"),
        ("closer.beta=much", "option 'beta' of recipe 'closer' takes float, not 'much'"),
        ("ce.passes=0", "passes of recipe 'ce' must be above 0 and 1,000 at most, not 0"),
        ("nowhere.py", "nowhere.py: No such file"),
    ],
)
def test_what_is_no_recipe_is_refused_in_a_line(recipe, message, hues, call):
    status, out, err = call("run", "--method", "ncm", "--task", "hues.toml", "--recipe", recipe)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_recipe_that_does_not_suit_the_task_is_refused(hue_task, call):
    status, _, err = call("run", "--method", "ncm", "--task", "tiny-features-5shot", "--recipe", "closer")
    assert status == 2
    assert "the data of tiny-features-5shot are features, and recipe closer trains on images" in err
    task, dataset = hue_task("etf.total=2")
    with pytest.raises(UserError, match="total=2 is fewer than the"):
        PretrainingTrainer(Path("x"), task, dataset, "linear", 0, CPU)
    task, dataset = hue_task("etf.total=4000")
    with pytest.raises(UserError, match="4000 classes need as many features"):
        PretrainingTrainer(Path("x"), task, dataset, "linear", 0, CPU)


def test_rows_name_their_recipe(hues, call):
    arguments = ("--method", "ncm", "--task", "hues.toml")
    assert call("run", *arguments, "--recipe", "ce,closer.beta=1", "-q")[0] == 0
    files = {path.name: json.loads(path.read_text()) for path in (hues / "home" / "results").rglob("*.json")}
    assert set(files) == {"ncm.seed-0.json", "ncm.recipe=closer.recipe.beta=1.seed-0.json"}
    plain, closer = files["ncm.seed-0.json"], files["ncm.recipe=closer.recipe.beta=1.seed-0.json"]
    assert plain["digest"] == closer["digest"]
    assert "recipe" not in plain["pretraining"]
    assert closer["pretraining"]["recipe"] == "closer.beta=1"
    assert "+closer-linear-seed0" in closer["pretraining"]["key"]


def test_a_recipe_of_a_file_is_known_by_its_code(hues, call):
    Path("late.py").write_text(NAN)
    keys = set()
    for old, new in (("late", "late"), ("at.step >= 7", "False")):
        Path("late.py").write_text(Path("late.py").read_text().replace(old, new))
        status, out, _ = call("run", "--method", "ncm", "--task", "hues.toml", "--recipe", "late.py", "--dry-run")
        assert status == 0
        keys |= {line for line in out.splitlines() if "Late" in line}
    task = load_tasks("hues.toml")[0]
    first = find_recipe("late.py").definition(task)
    Path("late.py").write_text(NAN)
    assert find_recipe("late.py").definition(task)["source"] != first["source"]


def test_a_loss_that_is_not_finite_ends_in_a_line(hues, call):
    Path("late.py").write_text(NAN)
    how = ("--pretraining-steps", "24", "--recipe", "late.py")
    status, _, err = call("run", "--method", "ncm", "--task", "hues.toml", *how, "-q")
    assert status == 2
    assert "pretraining diverged: the loss is nan at step 10 of 24" in err
    (folder,) = {path.parent for path in (hues / "home" / "pretrained").glob("*/checkpoint.json")}
    state = CheckpointFolder(folder).load()
    assert state.metadata["epoch"] == 1  # of five steps; NaN comes in the eighth
    assert all(bool(torch.isfinite(x).all()) for x in state.tensors.values())


def test_weights_that_become_nan_behind_a_finite_loss_are_not_written(hues, call):
    part = "def after_step(self, at): self.head.weight.data[0] = float('nan') if at.step == 9 else 0.0"
    recipe = write_broken(hues, CE.format(""), part)
    how = ("--pretraining-steps", "24", "--recipe", recipe)
    status, _, err = call("run", "--method", "ncm", "--task", "hues.toml", *how, "-q")
    assert status == 2
    assert "the backbone's recipe.head.weight is not finite after step 10 of 24" in err


def test_a_new_recipe_runs_at_once(hues, call):
    assert call("recipes", "new", "my-recipe")[0] == 0
    status, out, err = call("recipes", "--check", "my_recipe.py")
    assert (status, err) == (0, ""), out
    assert call("run", "--method", "ncm", "--task", "hues.toml", "--recipe", "my_recipe.py", "-q")[0] == 0
    status, _, err = call("recipes", "new", "my-recipe")
    assert status == 2
    assert "is there already" in err


@pytest.mark.slow("whole runs in both protocols")
def test_a_strangers_rotation_is_ours_and_has_rows_in_both_protocols(hues, call):
    Path("turns.py").write_text(TURNS)
    theirs, ours, images = made(find_recipe("turns.py").recipe_class), made(Rotation), views(1)
    assert torch.equal(theirs.loss(images, LABELS, at())["loss"], ours.loss(images, LABELS, at())["loss"])
    torch.testing.assert_close(theirs.embed(images[0]), ours.embed(images[0]))
    assert theirs.passes_per_step == ours.passes_per_step
    text = Path("hues.toml").read_text().replace("hues-1shot", "hues-sessions")
    Path("sessions.toml").write_text(
        f"{text}[tasks.hues-sessions.sessions]\norders = 2\nsupports = 2\ncount = 2\nways = 2\n"
    )
    for task in ("hues.toml", "sessions.toml"):
        status, out, err = call("run", "--method", "ncm", "--task", task, "--recipe", "rotation,turns.py", "-q")
        assert status == 0, err
        assert "\nncm | rotation  " in out
        assert "\nncm | Turns  " in out


CE = "torch.nn.functional.cross_entropy(self.head(self.features(views[0])), labels{})"
RANDOM = "__import__('random').random()"
# The rule that is broken, loss(), what else the recipe has, and what the check says.
BROKEN: list[tuple[str, str, str, str]] = [
    ("loss_moves_backbone", "self.features(views[0])", "", "no scalar tensor"),
    ("loss_moves_backbone", "self.features(views[0]).sum() * float('nan')", "", "term 'l' is nan"),
    ("loss_moves_backbone", "self.head.weight.sum()", "", "no parameter of the backbone has changed"),
    ("loss_moves_backbone", "self.nothing", "", "broken.py line 14: AttributeError"),
    ("loss_moves_backbone", CE.format(""), "def parameter_groups(self): return []", "has no parameters to train"),
    ("loss_is_repeatable", f"self.head.weight.sum() * {RANDOM}", "", "take random numbers from at.random"),
    ("batch_order", CE.format(".roll(1)"), "", "each image keeps its own label"),
    ("batch_order", CE.format(".zero_()"), "", "changed the labels or the images"),
    ("batch_order", "self.features(views[0].mul_(2)).sum()", "", "changed the labels or the images"),
    (
        "training_can_be_resumed",
        CE.format(""),
        "def after_step(self, at): self.n = 2 * self.n; self.head.weight.data *= self.n",
        "buffers",
    ),
    (
        "training_can_be_resumed",
        CE.format(""),
        "def after_step(self, at): self.n += 1; self.head.weight.data *= self.n",
        "buffers",
    ),
    (
        "training_can_be_resumed",
        CE.format(""),
        "def after_epoch(self, at, train): self.head.weight.data *= self.random",
        "buffers",
    ),
    ("feature_form", CE.format(""), "def embed(self, images): return self.features(images)[:1]", "expected [24, D]"),
    (
        "feature_form",
        CE.format(""),
        "def embed(self, images): return images.mean((2, 3)) - images.mean()",
        "other images",
    ),
    ("feature_form", CE.format(""), "def embed(self, images): return self.features(images).log()", "not finite"),
    (
        "training_only_parts",
        CE.format(""),
        "def classifier(self): return ifsl_bench.LinearHead(3, 2)",
        "a weight [6, 256]",
    ),
    ("training_only_parts", CE.format(""), "training_only = ('backbone',)", "the features depend on"),
    (
        "training_only_parts",
        CE.format(""),
        "training_only = ('projector',)",
        "'projector', which the recipe does not have",
    ),
    ("provided_extras", CE.format(""), "def extras(self): return {'mine': self.head.weight}", "provides() says []"),
]


def write_broken(folder: Path, loss: str, part: str = "") -> str:
    """Write a recipe whose loss is an expression, and which has another part, too."""
    head, _, _ = NAN.partition("    def loss")
    text = f"import ifsl_bench\n{head.rstrip()}\n        self.n, self.random = 1, {RANDOM}\n"
    text += f"\n    def loss(self, views, labels, at):\n        return {{'l': {loss}}}\n"
    (folder / "broken.py").write_text(f"{text}\n    {part}\n")
    return str(folder / "broken.py")


@pytest.mark.parametrize(("rule", "loss", "part", "message"), BROKEN)
def test_a_recipe_that_breaks_a_rule_is_named(rule, loss, part, message, tmp_path):
    choice = find_recipe(write_broken(tmp_path, loss, part))
    with pytest.raises(UserError, match=re.escape(message)), naming_recipe_errors(choice):
        getattr(recipe_rules, f"_check_{rule}")(choice)


def test_a_check_says_how_many_rules_are_broken(hues, call):
    status, out, err = call("recipes", "--check", write_broken(hues, "self.nothing"), "--format", "csv")
    assert status == 2
    assert out.count("AttributeError") == 4
    assert err == "ifsl-bench: recipe 'Late' breaks 4 of 7 rules\n"


@pytest.mark.parametrize(
    "recipe",
    ["rotation", *(pytest.param(r, marks=pytest.mark.slow("ten trainings")) for r in ALL if r != "rotation")],
)
def test_the_suites_recipes_keep_the_rules(recipe):
    assert [(rule, broken) for rule, broken in recipe_rules.check_recipe(find_recipe(recipe)) if broken] == []


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "def parameter_groups(self): return 2 * [ifsl_bench.ParameterGroup(list(self.parameters()))]",
            "recipe Late: parameter_groups() returned a parameter twice",
        ),
        ("def classifier(self): return ifsl_bench.LinearHead(3, 2)", "no LinearHead with a weight ["),
        ("def embed(self, images): return images", "embed() of 2 images returned [2, 3, 20, 20], expected [2, D]"),
        ("def after_step(self, at): raise ValueError('no')", "broken.py line 16: ValueError: no"),
        ("def after_epoch(self, at, train): raise ValueError('no')", "broken.py line 16: ValueError: no"),
        ("def parameter_groups(self): return [ifsl_bench.ParameterGroup([self.nothing])]", "line 16: AttributeError"),
    ],
)
def test_a_recipe_that_breaks_a_rule_is_refused(part, message, hues, call):
    recipe = write_broken(hues, CE.format(""), part)
    status, _, err = call("pretrain", "--task", "hues.toml", "--recipe", recipe, "-q")
    assert (status, len(err.splitlines())) == (2, 1), err
    assert message in err


MEANS = """\
import torch
from torch.nn.functional import cross_entropy

from ifsl_bench import LinearHead, Recipe


class Means(Recipe):
    training_only = ("means", "noise")

    def __init__(self, backbone, classes):
        super().__init__(backbone, classes)
        self.head = LinearHead(backbone.features, classes)
        self.register_buffer("means", torch.zeros(classes, backbone.features))
        self.register_buffer("noise", torch.zeros(()))

    def loss(self, views, labels, at):
        features = self.features(views[0])
        return {
            "ce": cross_entropy(self.head(features), labels),
            "means": 0.01 * (1 + self.noise) * (features - self.means[labels]).square().mean(),
        }

    def after_epoch(self, at, train):
        assert not self.training
        for _ in range(2):  # as often as it likes
            sums, counts = torch.zeros_like(self.means), torch.zeros(self.classes)
            for images, labels in train:
                sums.index_add_(0, labels, self.features(images))
                counts += labels.bincount(minlength=self.classes)
        self.means.copy_(sums / counts[:, None])
        self.noise.fill_(at.random.random())
"""


def test_a_recipe_sees_all_base_images_after_each_epoch(hue_task, tmp_path, monkeypatch):
    (tmp_path / "means.py").write_text(MEANS)
    task, dataset = hue_task(str(tmp_path / "means.py"))
    trainer = PretrainingTrainer(tmp_path / "a", task, dataset, "linear", 0, CPU)
    followed = []

    def follow(at, train, original=trainer.recipe.after_epoch):
        original(at, train)
        pool = dataset.pool("base/train")
        with torch.inference_mode():
            features = trainer.recipe.backbone(trainer.normalise(torch.from_numpy(np.array(pool.images))))
        means = [features[torch.from_numpy(pool.labels == k)].mean(0) for k in range(len(pool.class_names))]
        torch.testing.assert_close(trainer.recipe.means, torch.stack(means))
        followed.append((at.step, at.epoch, float(trainer.recipe.noise)))

    trainer.recipe.after_epoch = follow
    trainer.train(Reporter())
    each = task.pretraining.batch_size_and_steps_of_epoch(len(dataset.pool("base/train")))[1]
    assert [(step, epoch) for step, epoch, _ in followed] == [
        (min((epoch + 1) * each, 24) - 1, epoch) for epoch in range(len(followed))
    ]
    assert len({noise for _, _, noise in followed}) == len(followed) > 1


def test_the_epoch_that_is_best_on_base_val_is_taken(hue_task, tmp_path, monkeypatch):
    """The accuracies are made up; another training says which weights each epoch has."""
    accuracies, states = iter([0.2, 0.7, 0.7, 0.1]), []
    task, dataset = hue_task("closer", 60)

    def remember(trainer, at, original=PretrainingTrainer._end_epoch):
        original(trainer, at)
        states.append({name: x.clone() for name, x in trainer.network.state_dict().items()})

    with monkeypatch.context() as patch:
        patch.setattr(PretrainingTrainer, "_end_epoch", remember)
        PretrainingTrainer(tmp_path / "last", task, dataset, "linear", 0, CPU).train(Reporter())
    assert len(states) == 4
    best = PretrainingTrainer(tmp_path / "best", hue_task("closer.select=best", 60)[0], dataset, "linear", 0, CPU)
    best._measure_accuracy = lambda pool, batch: next(accuracies, 0.5)
    best.train(Reporter())
    assert best.info["best"] == {"epoch": 2, "accuracy": 0.7}
    for name, x in best.network.state_dict().items():
        expected = states[1][name]
        assert torch.equal(x, expected.half().float() if name.endswith(("weight", "bias")) else expected), name


def test_the_recipe_of_the_manual_is_the_one_that_new_writes(hues, call):
    page = (Path(__file__).parents[2] / "docs" / "backbones.md").read_text(encoding="utf-8")
    program = page.partition("```python\n")[2].partition("```")[0]
    assert call("recipes", "new", "my-recipe")[0] == 0

    def code(text: str) -> str:
        return ast.unparse(ast.parse(text.partition("import torch")[2]))

    assert code(program) == code(Path("my_recipe.py").read_text())


def test_a_recipe_that_fails_in_training_is_named_with_its_line(hues, call):
    head = NAN.split("    def loss")[0] + "    def loss(self, views, labels, at):\n"
    for line, cause in (("return {'l': self.nothing}", "AttributeError: "), ("raise SystemExit", "SystemExit")):
        Path("failing.py").write_text(f"{head}        {line}\n")
        status, _, err = call("pretrain", "--task", "hues.toml", "--recipe", "failing.py", "-q")
        assert status == 2
        assert re.search(rf"recipe Late failed: \S*failing.py line \d+: {cause}", err), err
        assert "Traceback" not in err
