"""Features that come with the package: bytes that stand for features, with their base classifiers and moments."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ifsl_bench import api
from ifsl_bench.backbones import pretrained
from ifsl_bench.backbones.pretrained import make_pretraining_key
from ifsl_bench.data import datasets
from ifsl_bench.data.preparing.prepare import open_or_build
from ifsl_bench.data.sets import embedded
from ifsl_bench.experiments.workspace import PreparedTask
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import LogReporter, Reporter
from tests.data.helpers import spoil
from tests.tools.embed_features import _Named, embed

NOTICE = "features of letters, for tests"
TASKS = """
[dataset]
name = "embedded"
mean = [0.0]
std = [1.0]
[pretraining]
backbone = "included"
steps = 0
seed = 0
[pretraining.schedule]
rate = 0.1
[meta_training]
steps = 40
validate_every = 10
[meta_training.schedule]
rate = 1e-3
[evaluation]
episodes = 40
validation_episodes = 10
[tasks.embedded-1shot]
shots = 1
[tasks.embedded-shared-1shot]
shots = 1
protocol = "shared"
"""


@pytest.fixture(scope="module")
def made(clusters_source, tmp_path_factory):
    """(folder with the features, the weights and a task file; the home they were made in)."""
    root = tmp_path_factory.mktemp("embedded")
    (root / "embedded.toml").write_text(TASKS)
    shutil.copy(clusters_source / "clusters.toml", root)
    with pytest.MonkeyPatch.context() as patch:
        (root / "features").mkdir()
        (root / "weights").mkdir()
        patch.setattr(embedded, "FEATURES_FOLDER", root / "features")
        patch.setattr(pretrained, "PACKAGED_FOLDERS", (root / "weights",))
        home = Paths.locate(shutil.copytree(clusters_source / "home", root / "home"))
        (of,) = load_tasks(f"{clusters_source / 'clusters.toml'}:clusters-1shot")
        of = msgspec.structs.replace(of, pretraining=msgspec.structs.replace(of.pretraining, seed=0))
        (task,) = load_tasks(f"{root / 'embedded.toml'}:embedded-1shot")
        fingerprint = embed(of, task, NOTICE, api.workspace(home.cache, device="cpu", reporter=Reporter()))
    return root, home, of, task, fingerprint


@pytest.fixture
def used(made, tmp_path, monkeypatch):
    """A stranger's home, where the features come with the package; and what :func:`made` gives."""
    root, *rest = made
    monkeypatch.setattr(embedded, "FEATURES_FOLDER", root / "features")
    monkeypatch.setattr(pretrained, "PACKAGED_FOLDERS", (root / "weights",))
    names, source = registry.registered_entry_points, datasets.find_dataset_source
    monkeypatch.setattr(
        registry,
        "registered_entry_points",
        lambda group: names(group) | ({"embedded": None} if group == registry.DATASET_GROUP else {}),
    )
    monkeypatch.setattr(
        datasets, "find_dataset_source", lambda name: _Named(name) if name == "embedded" else source(name)
    )
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(root)
    return Paths.locate(tmp_path / "home"), *rest


def test_features_moments_and_classifier_are_those_of_the_backbones(used):
    home, theirs, of, task, fingerprint = used
    for head in ("linear", "cosine"):
        log = io.StringIO()
        mine = PreparedTask(task, head, 0, api.workspace(home.cache, device="cpu", reporter=LogReporter(log)))
        true = PreparedTask(of, head, 0, api.workspace(theirs.cache, device="cpu", reporter=Reporter()))
        assert mine.dataset.fingerprint == fingerprint
        network = mine.pretrained_backbone.network
        for pool in ("novel/test", "base/test", "novel/train"):
            apart = np.abs(mine.open_features(pool) - true.open_features(pool))
            assert (apart <= network.scale.numpy() * 0.501 + 1e-5).all(), "half a level at most"
            assert apart.max() > 0
        # stored in float32, as they are computed: some eps
        torch.testing.assert_close(
            mine.base_classifier.prototypes, true.base_classifier.prototypes, rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(
            mine.base_classifier.covariance, true.base_classifier.covariance, rtol=1e-6, atol=1e-6
        )
        assert mine.base_classifier.counts.tolist() == true.base_classifier.counts.tolist()
        assert torch.equal(mine.base_classifier.weight, true.base_classifier.weight)
        assert mine.base_classifier.scale == true.base_classifier.scale
        for pool, value in true.pretrained_backbone.training_record["accuracy"].items():
            # a share: one point at most, since features are bytes here, off by half a level
            assert mine.pretrained_backbone.training_record["accuracy"][pool] == pytest.approx(value, abs=0.01)
        assert len(mine.dataset.pool("base/train")) == len(mine.base_classifier.weight), "a row a class"


def test_terms_are_said_at_first_use_and_rows_are_near_those_on_images(used, call):
    home, theirs, _, task, _ = used
    arguments = ["run", "--method", "imprint,protonet", "--task", "embedded.toml:embedded-1shot", "--device", "cpu"]
    status, _, err = call(*arguments)
    assert status == 0, err
    assert err.count(NOTICE) == 1
    results = {path.name.split(".")[0]: json.loads(path.read_text()) for path in home.results.rglob("*.json")}
    assert {result["task"] for result in results.values()} == {"embedded-1shot"}
    keys = {name: result["pretraining"]["key"] for name, result in results.items()}
    assert keys["imprint"] == make_pretraining_key(task, used[-1], "cosine", 0)
    status, _, err = call(*arguments, "--rerun")
    assert (status, NOTICE in err) == (0, False)
    work = api.workspace(theirs.cache, device="cpu", reporter=Reporter())
    file = theirs.cache.parent / "clusters.toml"
    for method in ("imprint", "protonet"):
        true = api.run(method, f"{file}:clusters-1shot", work=work)
        # points: features are bytes here, off by half a level
        assert results[method]["summary"]["acc"]["mean"] == pytest.approx(true.summary["acc"]["mean"], abs=1.0)


def test_what_needs_images_is_refused(used, call):
    for arguments, message in (
        (["embedded.toml:embedded-1shot", "--train", "views=4"], "has no augmentation to make views with"),
        (["embedded.toml:embedded-1shot", "--base-classes", "6"], "there are no images to train one on"),
        (["embedded.toml:embedded-1shot", "--pretrain"], "its features come without the images they are of"),
        (["embedded.toml:embedded-shared-1shot"], "base/train"),
    ):
        for only_planned in ([],) if "--pretrain" in arguments else ([], ["--dry-run"]):
            status, _, err = call("run", "--method", "lwof", "--device", "cpu", "--task", *arguments, *only_planned)
            assert status == 2, (arguments, err)
            assert message in err


def test_a_damaged_file_is_named(used, made, tmp_path, monkeypatch):
    home = used[0]
    (path,) = (made[0] / "features").iterdir()
    damaged = Path(shutil.copy(path, tmp_path))
    spoil(damaged, -5)
    monkeypatch.setattr(embedded, "FEATURES_FOLDER", tmp_path)
    with pytest.raises(CorruptFile, match="its checksum differs; install ifsl_bench again"):
        open_or_build(home, used[3].dataset, Reporter())
    damaged.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptFile, match="damaged or missing"):
        open_or_build(home, used[3].dataset, Reporter())
