"""Pretraining: what it optimises, how it resumes, what it records, what it refuses."""

from __future__ import annotations

import io
import re

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.backbones.pretrained import make_pretraining_key
from ifsl_bench.backbones.trainer import PretrainingTrainer, pretrain
from ifsl_bench.data.preparing.prepare import open_or_build
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import LogReporter, Reporter

CPU = torch.device("cpu")


@pytest.fixture
def few(hues):
    """(home, task, dataset) of a short pretraining on colour images: 2 steps of batch 8."""
    home, task = Paths.locate(hues / "home"), load_tasks("hues.toml")[0]
    return home, task, open_or_build(home, task.dataset, Reporter())


@pytest.fixture
def frozen(clusters):
    """(home, task, dataset) of a classifier on frozen features, which is trained in no time."""
    home = Paths.locate(clusters / "home")
    task = load_tasks(f"{clusters / 'clusters.toml'}:clusters-1shot")[0]
    return home, task, open_or_build(home, task.dataset, Reporter())


def tensors(pretrained):
    return {**pretrained.network.state_dict(), **pretrained.base_classifier.state_dict(prefix="head.")}


@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_records_what_was_done_and_is_cached(few, head):
    home, task, dataset = few
    first = pretrain(home, task, dataset, head, 0, CPU, Reporter())
    assert first.training_record["finished"]
    assert set(first.training_record["accuracy"]) == {"base/val", "base/test"}
    assert all(0 <= v <= 1 for v in first.training_record["accuracy"].values())
    assert "channels_last" in first.training_record["precision"]
    assert not any(p.requires_grad for p in first.network.parameters())
    log = io.StringIO()
    again = pretrain(home, task, dataset, head, 0, CPU, LogReporter(log))
    assert all("is at chance" in line for line in log.getvalue().splitlines()), "after so few steps, and told always"
    for key, value in tensors(first).items():
        assert torch.equal(value, tensors(again)[key])


def test_keys_differ_with_everything_that_matters(few):
    _, task, dataset = few
    keys = {
        make_pretraining_key(task, dataset.fingerprint, "linear", 0),
        make_pretraining_key(task, dataset.fingerprint, "cosine", 0),
        make_pretraining_key(task, dataset.fingerprint, "linear", 1),
        make_pretraining_key(task, "other", "linear", 0),
        make_pretraining_key(
            msgspec.structs.replace(task, pretraining=msgspec.structs.replace(task.pretraining, steps=7)),
            dataset.fingerprint, "linear", 0,
        ),
    }  # fmt: skip
    assert len(keys) == 5
    other_shots = msgspec.structs.replace(task, shots=5, name="x")
    assert make_pretraining_key(other_shots, dataset.fingerprint, "linear", 0) in keys, (
        "shared by the tasks of a data set"
    )


def test_interrupted_run_ends_with_the_same_weights_and_says_where_it_goes_on(clusters, monkeypatch):
    """Stopped in the middle of an epoch, and again later: bit for bit the undisturbed weights."""
    printed = io.StringIO()
    task = load_tasks(f"{clusters / 'clusters.toml'}:clusters-1shot")[0]

    def run(home, stops):
        dataset = open_or_build(Paths.locate(clusters / "home"), task.dataset, Reporter())
        steps = {"n": 0}
        original = PretrainingTrainer._train_step

        def step(self, *arguments):
            steps["n"] += 1
            if steps["n"] in stops:
                raise KeyboardInterrupt
            return original(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(PretrainingTrainer, "_train_step", step)
            for _ in stops:
                with pytest.raises(KeyboardInterrupt):
                    pretrain(home, task, dataset, "linear", 0, CPU, Reporter())
            return pretrain(home, task, dataset, "linear", 0, CPU, LogReporter(printed)), steps["n"]

    whole, plain = run(Paths.locate(clusters / "a"), ())
    broken, total = run(Paths.locate(clusters / "b"), (9, 27))
    assert plain == 60
    assert 60 < total < 90, "it went on from a checkpoint"
    assert re.findall(r"(?m)^pretraining .* \(resumed at (\d+) of (\d+)\) \.\.\.$", printed.getvalue()) == [
        (f"{60 - (total - 27)}", "60")
    ], "27 of the steps were before, so the others are the last ones"
    for key, value in tensors(whole).items():
        assert torch.equal(value, tensors(broken)[key])


def test_first_step_is_plain_sgd_with_weight_decay_on_matrices(frozen, tmp_path):
    """One step of the loop against the formula, in NumPy."""
    _, task, dataset = frozen
    spec = msgspec.structs.replace(task.pretraining, steps=1, weight_decay=0.1, batch=100_000)
    task = msgspec.structs.replace(task, pretraining=spec)
    trainer = PretrainingTrainer(tmp_path / "x", task, dataset, "linear", 0, CPU)
    weight, bias = trainer.head.weight.detach().clone().double(), trainer.head.bias.detach().clone().double()
    trainer.info["bf16"] = False
    trainer.train(Reporter())
    pool = dataset.pool("base/train")
    x, y = torch.from_numpy(np.array(pool.images)).double(), torch.from_numpy(pool.labels)
    probability = F.softmax(x @ weight.T + bias, -1) - F.one_hot(y, len(pool.class_names))
    expected = weight - 0.05 * (probability.T @ x / len(y) + 0.1 * weight)
    half = 2.0**-11  # of a value, by which rounding moves it at most
    # atol: float32 sums over all images of a step
    torch.testing.assert_close(trainer.head.weight.double(), expected, atol=1e-5, rtol=half)
    torch.testing.assert_close(trainer.head.bias.double(), bias - 0.05 * probability.mean(0), atol=1e-6, rtol=half)


def test_finished_weights_are_half_precision_and_accuracy_is_theirs(few):
    """In memory as on disk; the statistics of batch norm stay whole, and so do weights on the way."""
    home, task, dataset = few
    task = msgspec.structs.replace(task, pretraining=msgspec.structs.replace(task.pretraining, steps=5))
    model = pretrain(home, task, dataset, "linear", 0, CPU, Reporter())
    parameters = dict(model.network.named_parameters()) | dict(model.base_classifier.named_parameters())
    for name, value in parameters.items():
        assert torch.equal(value, value.half().float()), name
    whole = {k: v for k, v in model.network.state_dict().items() if "running" in k}
    assert any(not torch.equal(value, value.half().float()) for value in whole.values())
    weights = CheckpointFolder(home.pretrained / model.pretraining_key).load().tensors
    kinds = {k: str(v.dtype) for k, v in weights.items()}
    assert {kind for k, kind in kinds.items() if "running" in k} == {"torch.float32"}
    assert {kind for k, kind in kinds.items() if "running" not in k and "tracked" not in k} == {"torch.float16"}
    assert model.result_entry()["rounded"] == "float16"
    images = torch.from_numpy(np.array(dataset.pool("base/val").images))
    with torch.inference_mode():
        hits = (
            model.base_classifier(model.network(model.normalise_images(images))).argmax(1).numpy()
            == dataset.pool("base/val").labels
        )
    # an image whose logits tie up to rounding, in batches of another size
    assert model.training_record["accuracy"]["base/val"] == pytest.approx(hits.mean(), abs=1 / len(hits))


def test_weights_beyond_half_precision_are_refused(frozen, monkeypatch):
    home, task, dataset = frozen
    original = PretrainingTrainer._train_step

    def step(self, *arguments):
        result = original(self, *arguments)
        with torch.no_grad():
            self.head.bias[0] = 70_000.0
        return result

    monkeypatch.setattr(PretrainingTrainer, "_train_step", step)
    with pytest.raises(UserError, match="bias is not finite in half precision, whose largest number is 65504;"):
        pretrain(home, task, dataset, "linear", 0, CPU, Reporter())


def test_features_are_learned(frozen):
    home, task, dataset = frozen
    for head in ("linear", "cosine"):
        assert pretrain(home, task, dataset, head, 0, CPU, Reporter()).training_record["accuracy"]["base/test"] > 0.7


def test_divergence_is_said(frozen):
    home, task, dataset = frozen
    schedule = msgspec.structs.replace(task.pretraining.schedule, rate=1e30)
    task = msgspec.structs.replace(task, pretraining=msgspec.structs.replace(task.pretraining, schedule=schedule))
    with pytest.raises(UserError, match="pretraining diverged: the loss is"):
        pretrain(home, task, dataset, "linear", 0, CPU, Reporter())


def test_wrong_number_of_channels_is_said(few):
    home, task, dataset = few
    data = msgspec.structs.replace(task.dataset, mean=(0.5, 0.5), std=(0.5, 0.5))
    with pytest.raises(UserError, match="2 values, but its images have 3 channels"):
        pretrain(home, msgspec.structs.replace(task, dataset=data), dataset, "linear", 0, CPU, Reporter())


def test_momentum_comes_back_in_the_layout_of_its_parameter(few, tmp_path):
    """Fused steps on devices go through memory and not through indices."""
    _, task, dataset = few
    first, second = (PretrainingTrainer(tmp_path / "x", task, dataset, "linear", 0, CPU) for _ in range(2))
    for i, parameter in enumerate(first.parameters):
        first.optimiser.state[parameter]["momentum_buffer"] = torch.full_like(parameter, i).contiguous()
    first.info["epoch"] = 0
    first._save_checkpoint()
    second.restore_from_checkpoint()
    for i, parameter in enumerate(second.parameters):
        buffer = second.optimiser.state[parameter]["momentum_buffer"]
        assert buffer.stride() == parameter.stride()
        assert (buffer == i).all()
