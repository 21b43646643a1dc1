"""Everything on a CUDA device: the numbers are the CPU's, and nothing waits that need not.

pytest --cuda -n 0 -m "" tests/product/test_cuda.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paper_shapes import Episodes

from ifsl_bench import api
from ifsl_bench.backbones.device import PrecisionChoice
from ifsl_bench.backbones.features import _compute_batches, compute_features
from ifsl_bench.backbones.trainer import pretrain
from ifsl_bench.data.preparing.prepare import open_or_build
from ifsl_bench.experiments.stages import MetaTrainStage, make_untrained_method
from ifsl_bench.plugin.method import DEFAULT_GPU_MIN_EPISODES
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter
from tests.product import test_pretend as pretend
from tests.product.test_pretend import CPU, _job, _other_home, _prepared, on, seeded_method, variants

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here, or hidden: see --cuda")
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(("name", "options"), variants())
def test_every_method_gives_the_answers_and_gradients_of_the_cpu(name, options, monkeypatch):
    monkeypatch.setattr(F, "dropout", lambda x, *_, **__: x)  # each device draws its own
    pretend.check_answers_and_gradients(name, options, DEVICE)


@pytest.mark.parametrize("name", ["lwof", "imprint", "protonet", "lr+a", "mlp+a"])
def test_a_device_waits_as_often_as_the_pretend_one_says(name, recwarn):
    """PyTorch itself names the calls that wait, at the paper's shapes."""
    drawn, label = Episodes(256, 5), {"lr+a": "attractor", "mlp+a": "attractor"}
    options = {"learner": name[:-2]} if name.endswith("+a") else {}
    method = seeded_method(label.get(name, name), options, on(drawn.base(), DEVICE)).to(DEVICE).eval()
    support, query = on(drawn.support(), DEVICE), on(drawn.queries(), DEVICE)
    with torch.no_grad():
        method(support, query)  # with what is made on a first call alone
        torch.cuda.synchronize()
        recwarn.clear()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            method(support, query)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in recwarn if "called a synchronizing" in str(w.message)]
    most = pretend.EVALUATION[name][1]
    assert len(waits) <= most, [f"{w.filename}:{w.lineno}" for w in waits]
    if most:
        assert waits, "each look at convergence is one"


@pytest.mark.parametrize("task", ["clusters-5shot", "clusters-shared-5shot"])
@pytest.mark.parametrize("side", ["train", "test"])
def test_the_loader_gives_the_same_batches_and_never_waits(here, task, side):
    prepared = _prepared(here, task, "cuda")
    ours, theirs = prepared.loader(side), prepared.loader(side, device=DEVICE)
    theirs.load_batch(5, 9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = theirs.load_batch(5, 9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pretend.check_batches(batch, ours.load_batch(5, 9))


@pytest.mark.parametrize("name", sorted(pretend.SEQUENCES))
def test_sequences_count_what_the_cpu_counts(here, name):
    pretend.add_sessions(here)
    prepared = _prepared(here, "in-sessions", "cuda")
    ours, theirs = (pretend.evaluate_sequences(prepared, name, device).count_arrays() for device in (CPU, DEVICE))
    for column, values in ours.items():
        assert (values != theirs[column]).mean() <= pretend.ON_A_BOUNDARY, column


@pytest.mark.parametrize(("name", "given"), [("lwof", {}), ("lr+a", {}), ("lr+a", {"gradient": "implicit"})])
def test_meta_training_moves_the_parameters_as_on_the_cpu(here, name, given):
    """Without dropout, which each device draws for itself.

    Adam takes the sign of a gradient that is next to nothing, so single parameters may move the other way.
    """
    job, moves = _job(here, name, {"steps": 3, "episodes_per_step": 8}), []
    job = replace(job, set_options={**job.set_options, **given, **({"dropout": 0.0} if name == "lr+a" else {})})
    _prepared(here, "clusters-5shot", "cpu").base_classifier  # noqa: B018 - both start from one pretraining
    for device, home in (("cpu", "one"), ("cuda", "two")):
        folder = _other_home(here, home)
        (folder / "pretrained").symlink_to(here / "home" / "pretrained")
        work = api.workspace(folder, device=device)
        model, initial = MetaTrainStage(job).compute(work), make_untrained_method(job, work)
        moved = [
            p.detach().cpu() - q.detach().cpu()
            for p, q in zip(model.method.parameters(), initial.parameters(), strict=True)
        ]
        moves.append(torch.cat([x.flatten() for x in moved]))
        assert model.training_record.device_description.startswith(device)
    assert F.cosine_similarity(*moves, dim=0) > 0.99
    assert 0.98 < moves[0].norm() / moves[1].norm() < 1.02


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_whole_run_says_where_it_was_made_and_counts_what_the_cpu_does(call, here, device):
    command = ["run", "--method", "lwof,lr+a,imprint", "--task", "clusters.toml:clusters-5shot", "--train", "steps=8"]
    _prepared(here, "clusters-5shot", "cpu").base_classifier  # noqa: B018
    status, _, err = call(*command, "--device", device, "-v")
    assert status == 0, err
    folder = _other_home(here, "cpu-home")
    (folder / "pretrained").symlink_to(here / "home" / "pretrained")
    status, _, err = call(*command, "--device", "cpu", "--results", "other", "--home", str(folder))
    assert status == 0, err
    for ours in pretend.compared(here, 3):
        assert ours.places["evaluation"].startswith("cuda")
        assert ours.provenance["device"] == torch.cuda.get_device_name(DEVICE)
        if ours.training:
            few = f"cpu: 1 episode a step, fewer than {DEFAULT_GPU_MIN_EPISODES}"
            assert ours.places["meta-training"] == (few if device == "auto" else "cuda: --device cuda")


def test_pretraining_in_float32_and_features_are_those_of_the_cpu(glyph_home, monkeypatch):
    """At a low rate: larger ones blow rounding up."""
    monkeypatch.setattr(
        "ifsl_bench.backbones.trainer.choose_precision", lambda device: PrecisionChoice(False, "float32")
    )
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    ours, bank = pretend.pretrained_on(CPU, glyph_home, 1e-4)
    theirs, other_bank = pretend.pretrained_on(DEVICE, glyph_home, 1e-4)
    for a, b in zip(ours, theirs, strict=True):
        # float32 rounding that the steps of a pretraining amplify, on another processor
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(bank, other_bank, rtol=1e-2, atol=1e-2)


@pytest.mark.slow("torch.compile, and commands of their own")
@pytest.mark.parametrize("options", [[], ["--compile"]], ids=["plain", "compiled"])
def test_the_command_pretrains(glyph_home, options):
    command = [sys.executable, "-m", "ifsl_bench", "pretrain", "--home", str(glyph_home), "--task"]
    command += [f"{glyph_home.parent / 'few.toml'}:few-1shot", *options]
    environment = {**os.environ, "IFSL_BENCH_HOME": ""}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    (path,) = glyph_home.glob("pretrained/*/checkpoint.json")
    info = json.loads(path.read_text())
    assert "has bf16" in json.dumps(info)
    assert torch.cuda.get_device_name(DEVICE) in json.dumps(info)


def test_features_are_those_of_the_cpu_to_all_digits_of_float32(glyph_features_home):
    """A thousandth is lost where cuDNN rounds the convolutions' numbers to TF32."""
    home = Paths.locate(glyph_features_home)
    task = load_tasks(f"{glyph_features_home.parent / 'few.toml'}:few-1shot")[0]
    dataset = open_or_build(home, task.dataset, Reporter())
    trained = pretrain(home, task, dataset, "linear", 0, CPU, Reporter())
    ours = np.array(compute_features(home, task, dataset, trained, "base/val", CPU, Reporter()))
    device_trained = pretrain(home, task, dataset, "linear", 0, DEVICE, Reporter())  # the same weights, from the cache
    blocks = _compute_batches(task, device_trained, dataset.pool("base/val"), DEVICE, 1)
    theirs = np.concatenate(list(blocks))
    # float32 through one network: a hundred eps; TF32 would lose 5e-4
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(ours).max()
