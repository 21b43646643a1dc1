"""The stages of a run, and a method from a file or a class."""

from __future__ import annotations

import pickle
import sys
import types

import pytest

from ifsl_bench import api
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.plan import _stored_seconds, plan_jobs
from ifsl_bench.experiments.reproduce import run_without_storing
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.runner import list_stages
from ifsl_bench.experiments.stages import MetaTrainStage, PretrainStage
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.find_method import find_method
from ifsl_bench.plugin.method_source import hash_method_source, hash_source_of_class
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.serialization import read_checksummed, write_checksummed

FILE = """
import torch
from ifsl_bench import Method, Prediction

SHIFT = 0.0

class Base(Method):
    def forward(self, support, query):
        raise AssertionError


class Means(Base):
    '''Nearest class mean, cosine.'''

    def __init__(self, base, ways, *, temperature: float = 10.0):
        super().__init__(base, ways)
        self.temperature = temperature

    def forward(self, support, query):
        E = len(query.features)
        means = torch.cat([self.base.prototypes.expand(E, -1, -1), support.class_means(self.ways)], 1)
        h, c = (torch.nn.functional.normalize(x, dim=-1) for x in (query.features, means))
        return Prediction(self.temperature * h @ c.mT + SHIFT)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


def jobs_of(methods, task, work, train=None):
    return make_jobs(RunConfig(methods, [task], {}, train or {}), work.home)


@pytest.mark.slow("whole runs")
@pytest.mark.parametrize("name", ["lwof", "lr"])
def test_a_plan_lists_what_a_run_does_and_a_run_leaves_it_cached(name, task, work):
    (job,) = jobs_of([name], task, work, {"steps": "5"})
    stages = list_stages(job)
    (plan,) = plan_jobs([job], work)
    assert (plan.state, plan.missing_stages) == ("to do", stages[1:]), "data are there"
    run_without_storing(job, work)
    assert all(stage.is_cached(work.home) for stage in stages[:-1])
    assert plan_jobs([job], work)[0].missing_stages == stages[-1:]
    api.run_job(job, work)
    (plan,) = plan_jobs([job], work)
    assert (plan.state, plan.missing_stages) == ("stored", ())
    (again,) = plan_jobs([job], work, rerun=True)
    assert again.missing_stages == stages[-1:]
    assert _stored_seconds(job, work.home)["evaluation"][0] == api.run_job(job, work).cost["evaluation_seconds"]


@pytest.mark.slow("methods are trained")
def test_meta_training_takes_augmented_views_and_the_same_pretraining(hues, call):
    text = (hues / "hues.toml").read_text().replace("batch = 8\n", "batch = 8\nflip = true\n")
    (hues / "hues.toml").write_text(text)
    command = ("run", "--method", "lwof", "--task", "hues.toml", "--device", "cpu", "--train")
    assert call(*command, "steps=2")[0] == 0
    status, _, err = call(*command, "steps=2", "--train", "views=2", "-v")
    assert status == 0, err
    assert "features of novel/train, 2 views: done" in err
    assert "pretraining resnet-small" not in err
    names = {path.name for path in (hues / "home" / "results").rglob("*.json")}
    assert names == {"lwof.train.steps=2.seed-0.json", "lwof.train.views=2.train.steps=2.seed-0.json"}


@pytest.mark.slow("a backbone is trained")
def test_a_job_needs_the_plain_images_too_where_its_training_has_views(glyph_home, clusters):
    work = api.workspace(glyph_home, device="cpu")
    (job,) = make_jobs(RunConfig(["lwof"], ["glyphs-5shot"], {}, {"views": 3}), work.home)
    pools = [(s.pool_name, s.n_views) for s in list_stages(job) if hasattr(s, "pool_name")]
    assert ("base/val", 3) in pools
    assert ("base/val", 1) in pools, "validation sees plain images"
    assert ("novel/train", 3) in pools
    assert ("novel/train", 1) not in pools


def test_keys_change_with_what_makes_the_artefact_and_with_nothing_else(task, work):
    def key(name, **train):
        (job,) = jobs_of([name], task, work, train)
        return MetaTrainStage(job).key(work.home)

    assert key("lwof") == key("lwof", select="last"), "every state holds both models"
    assert len({key("lwof"), key("lwof", steps="7"), key("lr+s"), key("mlp+s"), key("lr+a")}) == 5
    (job,) = jobs_of(["lwof"], task, work)
    keys = {PretrainStage(job.task, head, seed).key(work.home) for head in ("linear", "cosine") for seed in (0, 1)}
    assert len(keys) == 4


def test_a_file_is_enough_to_try_a_method(task, work, file):
    result = api.run(f"{file}:Means", task, options={"temperature": 5}, work=work)
    assert (result.method, result.label) == ("Means", "Means.temperature=5")
    assert result.summary["acc"]["mean"] > 50
    assert api.run(str(file) + ":Means", task, options={"temperature": 5}, work=work) == result, "stored"
    chosen, _ = find_method(f"{file}:Means")
    again = api.run(chosen.method, task, options={"temperature": 5}, work=work)
    assert again.episodes == result.episodes
    # Another content of the file is another method, though nobody left this process.
    file.write_text(FILE.replace("SHIFT = 0.0", "SHIFT = torch.arange(13.0) * 9"))
    assert api.run(f"{file}:Means", task, options={"temperature": 5}, work=work).episodes != result.episodes


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("nowhere.py:Means", "cannot read .*nowhere.py: No such file"),
        ("own.py:Meens", "unknown class 'Meens' in .*own.py; did you mean 'Means'"),
        ("own.py:torch", "torch in .*own.py is not a subclass of ifsl_bench.Method"),
        ("own.py", "own.py defines 2 methods; say which one: own.py:CLASS, one of Base, Means"),
        ("broken.py:X", r"broken.py cannot be run: line 2: ZeroDivisionError"),
        ("odd.py:X", r"odd.py cannot be run: line 3: SyntaxError"),
        ("needs.py:X", r"option 'size' of X needs an annotation and a default value"),
        (3, "a method is a name, path/to/file.py:Class or a subclass of ifsl_bench.Method, not 3"),
        (dict, "<class 'dict'> is not a subclass of ifsl_bench.Method"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(said, message, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("x = 1\ny = x / 0\n")
    (file.parent / "odd.py").write_text("x = 1\n\ndef :\n")
    (file.parent / "needs.py").write_text(
        "from ifsl_bench import Method\nclass X(Method):\n    def __init__(self, base, ways, *, size):\n        pass\n"
        "    def forward(self, support, query):\n        pass\n"
    )
    with pytest.raises(UserError, match=message) as error:
        find_method(said)
    assert "\n" not in str(error.value)


def test_a_class_with_the_name_of_another_method_is_refused():
    namesake = type("lwof", (registry.get_method("protonet"),), {})
    with pytest.raises(UserError, match=r"has the name of a registered method, lwof .*rename the class"):
        find_method(namesake)


def sourced(method) -> str:
    hash_source_of_class.cache_clear()
    return hash_method_source(method)


def test_a_file_that_is_edited_during_a_run_does_not_pass_for_what_runs(file):
    chosen, _ = find_method(f"{file}:Means")
    sent = pickle.dumps(chosen)
    before = hash_method_source(chosen.method)
    file.write_text(FILE.replace("10.0", "20.0"))
    assert sourced(chosen.method) == before, "what was executed, not what the file holds now"
    with pytest.raises(UserError, match="has changed since it was chosen"):
        pickle.loads(sent)
    assert hash_method_source(find_method(f"{file}:Means")[0].method) != before
    file.write_text(FILE)
    assert hash_method_source(find_method(f"{file}:Means")[0].method) == before


def test_a_class_without_a_file_is_known_by_what_it_does(work, task):
    cell = FILE.replace("class Base", "def helper(x):\n    return x * FACTOR\n\nFACTOR = 1.0\n\nclass Base")
    cell = cell.replace("h @ c.mT + SHIFT", "helper(h @ c.mT) + SHIFT")
    sources, results = [], []
    for i, text in enumerate((cell, cell, cell.replace("R = 1.0", "R = -1.0"), cell.replace("x * F", "x / F"))):
        module = types.ModuleType(f"cell{i}")
        sys.modules[module.__name__] = module
        exec(compile(text, "<stdin>", "exec"), vars(module))
        sources.append(hash_method_source(module.Means))
        results.append(api.run(module.Means, task, work=work))
    assert sources[0] == sources[1]
    assert len(set(sources)) == 3
    assert results[0] == results[1], "stored"
    assert results[2].episodes != results[0].episodes, "another cell is another method"


def test_a_copy_of_a_method_does_not_take_its_label(task, work, tmp_path):
    own = tmp_path / "copy.py"
    own.write_text("from ifsl_bench.methods.attractor import Attractor as A\nclass Copied(A):\n    'A copy.'\n"
                   "    shorthands = {'lr+a': {'learner': 'lr'}}\n")  # fmt: skip
    (job,) = jobs_of([f"{own}:Copied"], task, work)
    assert job.label == "Copied"
    (theirs,) = jobs_of(["lr+a"], task, work)
    assert theirs.label == "lr+a"


def test_two_methods_of_one_label_are_refused_and_one_that_is_named_twice_is_run_once(task, work, file, tmp_path):
    second_file = tmp_path / "other.py"
    second_file.write_text(FILE)
    with pytest.raises(UserError, match="two different methods are called 'Means'; rename a class"):
        jobs_of([f"{file}:Means", f"{second_file}:Means"], task, work)
    assert len(jobs_of([f"{file}:Means", f"{file}:Means", "protonet", "protonet"], task, work)) == 2


def test_a_stored_model_of_a_file_runs_no_code_that_its_folder_names(task, work, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("from ifsl_bench.methods.lwof import LwoF\nclass Learned(LwoF):\n    pass\n")
    result = api.run(f"{own}:Learned", task, train={"steps": 5}, work=work)
    folder = work.home.trained_models / result.provenance["checkpoint"]
    file = CheckpointFolder(folder).metadata_file
    own.write_text("raise SystemExit('ran')")
    for changed in ({}, {"method": str(own)}):
        write_checksummed(file, read_checksummed(file) | changed)
        with pytest.raises(UserError, match=r"is of a method in a file, .*; run that file to evaluate it"):
            api.evaluate_checkpoint(folder, task, work=work)
    with pytest.raises(UserError, match="nobody"):
        api.evaluate_checkpoint("nobody", task, work=work)


def test_features_of_other_weights_are_not_cached(hues, monkeypatch):
    work = api.workspace(hues / "home", device="cpu")
    (job,) = make_jobs(RunConfig(["protonet"], ["hues.toml:hues-1shot"]), work.home)
    run_without_storing(job, work)
    features = list_stages(job)[2]
    assert features.is_cached(work.home)
    monkeypatch.setattr("ifsl_bench.experiments.stages.read_features_sha256", lambda home, key: "another")
    assert not features.is_cached(work.home)
