"""Methods that see images: the manual's code in both protocols, class means by images against features, the rules, a
killed run, and the bytes of a state."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ifsl_bench import api
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.stages import FeatureStage, list_backbone_stages, make_pretrain_stage
from ifsl_bench.plugin.adapting_contract import check_adapting_rules, make_random_learner
from ifsl_bench.plugin.find_method import find_method
from ifsl_bench.plugin.method import NonFiniteLogitsError
from ifsl_bench.plugin.new_method import IMAGE_METHOD_TEMPLATE
from ifsl_bench.plugin.options import make_method
from ifsl_bench.protocols.tasks.task_files import load_task
from ifsl_bench.solvers.tree import list_leaves
from ifsl_bench.store.schema import read_result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from tests.small_run import TASKS, make_data

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-method.md").read_text(encoding="utf-8")
(SHOWN,) = re.findall(r"```python\n# tune_last_block.py\n(.*?)```", PAGE, re.DOTALL)
CODE = SHOWN.replace("steps: int = 20", "steps: int = 2")  # which takes a tenth of the time
SESSIONS = """
[variants.tiny-images-sessions]
of = "tiny-images-2shot"
sessions = { count = 2, ways = 2, orders = 2, supports = 1, queries = 6 }
[variants.tiny-images-none]
of = "tiny-images-2shot"
sessions = { count = 2, ways = 2, orders = 2, supports = 1, queries = 6, memory = "none" }
"""
EPISODES, IN_SESSIONS = "tiny-images-2shot", "tiny-images-sessions"


@pytest.fixture
def here(tmp_path, monkeypatch, made_once):
    """A folder with a small data set of images, its tasks, and the code of the manual."""
    made = made_once("tiny-images", lambda folder: make_data(Paths.locate(folder)))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "data").symlink_to(made / "data")
    tasks = TASKS.replace("-1shot]\nshots = 1", "-2shot]\nshots = 2").replace(
        "validation_episodes = 8", "validation_episodes = 4"
    )
    tasks = tasks.replace("episodes = 12", "episodes = 4")
    (tmp_path / "tiny.toml").write_text(tasks + SESSIONS)
    (tmp_path / "tune_last_block.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def run(here):
    """Runs a method on a task of the folder, and returns the result as its file has it."""
    work = api.workspace(here / "home", device="cpu")

    def call(method: str, task: str, **more):
        api.run(method, f"tiny.toml:{task}", work=work, **more)
        (path,) = (here / "home" / "results" / task).glob(f"{method.partition(':')[2] or method}*.json")
        return read_result(path)

    return call


CLASS_MEANS = """
import torch
from torch.nn.functional import normalize
from ifsl_bench import Adapting

class ByImages(Adapting):
    changes = "nothing"

    def start(self):
        return normalize(self.base.prototypes, dim=-1)

    def adapt(self, state, images, labels, session):
        features = self.network()(images)
        means = [features[labels == label].mean(0) for label in range(self.ways)]
        return torch.cat([state, normalize(torch.stack(means), dim=-1)])

    def classify(self, state, images):
        return normalize(self.network()(images), dim=-1) @ state.mT
"""


@pytest.mark.slow("whole runs")
@pytest.mark.parametrize("task", [EPISODES, IN_SESSIONS])
def test_class_means_have_the_same_hits_from_images_as_from_features(run, here, task):
    (here / "m.py").write_text(CLASS_MEANS)
    by_images, by_features = run("m.py:ByImages", task), run("ncm", task)
    for ours, theirs in zip(*(x.to_hit_counts().count_arrays().items() for x in (by_images, by_features)), strict=True):
        assert ours[0] == theirs[0]
        if not ours[0].startswith(("calibrated", "pairs")):  # which rounding moves
            assert (ours[1] == theirs[1]).all(), ours[0]
    assert by_images.flags == ["changes nothing"]


@pytest.mark.slow("whole runs in both protocols")
def test_the_code_of_the_manual_runs_in_both_protocols_beside_class_means(run, here, call):
    importlib.import_module("ifsl_bench.solvers.numba_compiling")  # as after a method that solves by kernels
    status, out, err = call("methods", "--check", "tune_last_block.py")
    assert status == 0, err
    assert out.count(" ok") == 7
    for task in (EPISODES, IN_SESSIONS):
        _, planned, _ = call("plan", "--method", "tune_last_block.py", "--task", f"tiny.toml:{task}")
        of = ("6", "4 test and 2 validation episodes") if task == EPISODES else ("8", "2 test and 2 validation seq")
        assert f"learns {of[0]} sessions one at a time, of {of[1]}" in planned
        assert (tuned := run("tune_last_block.py:TuneLastBlock", task)).flags == ["changes the last stage"]
        run("ncm", task)
        _, table, _ = call("table", f"tiny.toml:{task}")
        assert re.search(r"^TuneLastBlock .* yours, changes the last stage", table, re.MULTILINE), table
        assert re.search(r"^ncm ", table, re.MULTILINE)
        _, compared, _ = call("compare", "TuneLastBlock", "ncm", "--task", f"tiny.toml:{task}")
        assert "TuneLastBlock (yours) changes the last stage" in compared
    # 96 and 192 channels: the last block with its shortcut and norms, the norm behind it, and the linear layer.
    last = 96 * 192 * 10 + 192 * 192 * 9 + 2 * 2 * 192 + 2 * 192 + (4 * 192 + 1) * 256
    assert tuned.episodes.state_bytes == 4 * (last + (5 + 2 * 2) * 256)
    assert IMAGE_METHOD_TEMPLATE.partition("\n\n")[2].replace("$kind", "TuneLastBlock") == SHOWN


def test_maps_are_cached_in_float16_and_give_the_features_within_its_error(here):
    work = api.workspace(here / "home", device="cpu")
    (job,) = make_jobs(RunConfig(methods=("tune_last_block.py",), tasks=(f"tiny.toml:{EPISODES}",)))
    assert job.method.sees == "maps:-1"
    features = [stage for stage in list_backbone_stages(job) if isinstance(stage, FeatureStage)]
    stages = [stage for stage in features if stage.n_backbone_stages]
    assert not any(stage.is_cached(work.home) for stage in stages)
    for stage in stages:
        stage.compute(work)
    assert all(stage.is_cached(work.home) for stage in stages)
    assert {stage.pool_name for stage in stages} == {"base/train", "base/val", "base/test", "novel/val", "novel/test"}
    prepared = make_pretrain_stage(job).open_task(work)
    pool, base = prepared.feature_pool("novel/test"), prepared.base_classifier
    assert pool.features.dtype == torch.float16
    assert base.network is not None
    with torch.no_grad():
        images = prepared.pretrained_backbone.normalise_images(
            torch.from_numpy(np.array(prepared.dataset.pool("novel/test").images))
        )
        maps = base.network.normalise(pool.features)
        for stage in prepared.pretrained_backbone.network.stages[:-1]:
            images = stage(images)
        features = base.network.network(maps)
    torch.testing.assert_close(maps, images.half().float(), rtol=1e-3, atol=1e-6)  # a half may round to the next one
    own = torch.from_numpy(np.array(prepared.open_features("novel/test")))
    assert 0 < (features - own).norm() / own.norm() < 1e-3


def test_a_network_without_such_a_stage_is_refused(run, here):
    (here / "m.py").write_text(CODE.replace('sees = "maps:-1"', 'sees = "maps:3"'))
    with pytest.raises(UserError, match="maps:3 of a network that has 3 stages: its class needs `stages`"):
        run("m.py:TuneLastBlock", EPISODES)


def check(folder: Path, code: str) -> dict[str, str | None]:
    """What each rule finds in a class of this code, on made-up images."""
    (folder / "m.py").write_text(code)
    chosen, options = find_method(str(folder / "m.py"))
    return dict(check_adapting_rules(chosen.name, chosen.method, options))


RANDOM = CODE.replace("features = network(images)", "features = network.train()(images)")  # with dropout


def test_random_numbers_are_seeded_by_the_training_seed_the_session_and_its_images(tmp_path):
    (tmp_path / "m.py").write_text(RANDOM)
    kind = find_method(str(tmp_path / "m.py"))[0].method
    learner = make_random_learner("m", kind, {})

    def means(seed: int, session: int, shift: int = 0) -> torch.Tensor:
        torch.manual_seed(seed)
        method = make_method(kind, learner.method.base, 3, {})
        torch.manual_seed(session)  # what is drawn outside has no say
        support = replace(
            learner.support_of_both_sessions[0], features=learner.support_of_both_sessions[0].features + shift
        )
        return method.learn(support).state["state"]["means"]

    assert torch.equal(means(0, 5), means(0, 6))
    assert not torch.equal(means(0, 5), means(1, 5))
    assert not any(check(tmp_path, RANDOM).values())


MEANS = '"means": torch.cat([state["means"], means])}'
LAST_LINE = "        means = self.class_means(network(images), labels)\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('(state["weights"])(images), s', '(state["weights"]).train()(images), s', "batch norm in training mode"),
        (MEANS, '"means": torch.cat([state["means"], means]) * torch.nan}',
         "TuneLastBlock.adapt returned a state with NaN or infinite numbers"),
        ('return {"weights": weights', 'return {"weights": network',
         "no tree of tensors: a tree holds tensors, None, tuples, lists and dicts, not "),
        (LAST_LINE, '        next(iter(state["weights"].values())).zero_()\n' + LAST_LINE,
         "changes the state of the session before it"),
        (LAST_LINE, LAST_LINE.replace("\n", " + self.training_bug()\n"), "has no attribute 'training_bug'"),
        (LAST_LINE, "        self.steps += 1\n" + LAST_LINE, "the same session, learned again, gives another state"),
        ('state["means"])\n', 'state["means"])[:, :4]\n', "before any session it answers with 4 classes"),
        ('state["means"])\n', 'state["means"])[0]\n', "classify returned [6], expected logits [28, classes]"),
        ("parameters_from(-1)", "parameters_from(7)", "changes stage 7 of a network that has 2"),
        (MEANS, MEANS.replace("}", ', "all": images}'), "grows with the number of support images"),
        (MEANS, '"means": torch.cat([state["means"], means + self.base.prototypes[1]])}', "base class leaves a trace"),
    ],
)  # fmt: skip
def test_what_breaks_the_contract_is_refused_in_one_line(tmp_path, old, new, message):
    assert CODE.count(old) == 1
    found, error = "", None
    try:
        found = "; ".join(filter(None, check(tmp_path, CODE.replace(old, new)).values()))
    except UserError as refused:
        error = refused
    assert isinstance(error, NonFiniteLogitsError) == ("NaN" in message), "which a search passes over"
    found = str(error or found)
    assert message in found
    assert "\n" not in found


def test_batch_norm_in_training_mode_may_be_declared(tmp_path):
    training = "\n\ndef training(network):\n    for module in network.modules():\n"
    training += "        module.train(isinstance(module, torch.nn.BatchNorm2d))\n    return network\n"
    code = CODE.replace('self.network(state["weights"])(im', 'training(self.network(state["weights"]))(im') + training
    assert "batch norm in training mode" in str(check(tmp_path, code))
    assert not any(check(tmp_path, code.replace('changes = "', 'transductive = True\n    changes = "')).values())


def test_kept_images_are_said_counted_and_refused_where_tasks_allow_none(here):
    keeping = CODE.replace(MEANS, MEANS.replace("}", ', "images": images}'))
    keeping = keeping.replace('changes = "', 'keeps = "images:4"\n    changes = "')
    assert not any(check(here, keeping).values())
    (job,) = make_jobs(RunConfig(methods=("m.py",), tasks=(f"tiny.toml:{IN_SESSIONS}",)))
    assert job.method.flags(job.method_options) == ["changes the last stage", "keeps 4 images a class"]
    learner = make_random_learner("m", job.method, {})
    kept = [x.numel() for x in list_leaves(learner.state_after_first_session) if x is not None]
    assert kept[-1] == 3 * 4 * 8 * 8
    with pytest.raises(UserError, match="keeps 4 images of each class, and tiny-images-none is for methods"):
        make_jobs(RunConfig(methods=("m.py",), tasks=("tiny.toml:tiny-images-none",)))


def test_data_that_are_features_are_refused_before_anything_is_computed(here, call):
    status, _, err = call("run", "--method", "tune_last_block.py", "--task", "tiny-features-5shot")
    assert (status, err.count("\n")) == (2, 1)
    assert "TuneLastBlock sees maps:-1, and the data of tiny-features-5shot are features" in err
    assert not (here / "home" / "features").exists()


def test_the_command_that_begins_one_writes_what_the_manual_shows(here, call):
    status, out, _ = call("methods", "new", "my-method", "--images", "--package")
    assert status == 0
    assert "--task glyphs-sessions+orders=4" in out
    assert (here / "my-method" / "my_method.py").read_text().partition("\n\n")[2] == SHOWN.replace(
        "TuneLastBlock", "MyMethod"
    )
    assert call("methods", "--images")[0] == 2


@pytest.mark.slow("three runs in processes of their own")
def test_a_killed_run_loses_nothing_and_ends_with_the_same_bits(here):
    words = ["run", "--method", "slow.py:TuneLastBlock", "--task", f"tiny.toml:{IN_SESSIONS}", "--device", "cpu"]
    words = [sys.executable, "-m", "ifsl_bench", *words]
    copied = '        network = self.network(state["weights"])  #'
    slow = CODE.replace(copied, f"        open('learned', 'a').write('x')\n{copied}")
    (here / "slow.py").write_text(slow)
    ends = []
    for home, kill in (("killed", True), ("whole", False)):
        (here / home).mkdir()
        (here / home / "data").symlink_to(here / "home" / "data")
        environment = {**os.environ, "IFSL_BENCH_HOME": str(here / home)}
        (here / "learned").write_text("")
        process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if kill:
            while len((here / "learned").read_text()) < 8 and process.poll() is None:  # in the evaluation
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            assert not list((here / home).glob("results/*/*.json"))
            process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()
        (path,) = (here / home).glob("results/*/*.json")
        raw = json.loads(path.read_text())
        ends.append([raw[key] for key in ("episodes", "calibration", "images", "summary", "digest", "options")])
    assert ends[0] == ends[1]


def test_few_orders_are_another_task_with_one_support_set_each(here, call):
    task = load_task("glyphs-sessions+orders=10")
    assert task.sessions is not None
    assert (task.sessions.orders, task.sessions.supports, task.evaluation.episodes) == (10, 1, 10)
    assert [len(half) for half in task.evaluation.validation_halves] == [10, 10]
    assert load_task("glyphs-sessions").hash == "7b9fbf5d52ed4019"
    for name in ("glyphs-5shot", "mini-sessions-published"):
        status, _, err = call("plan", "--method", "ncm", "--task", name, "--orders", "3")
        assert status == 2
        assert "orders is the number of orders of the novel classes" in err
    assert load_task("glyphs-5shot+sessions=2+orders=3").name == "glyphs-5shot+sessions=2+orders=3"
