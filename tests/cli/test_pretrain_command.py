"""``ifsl-bench pretrain``: what it prints, what later runs find, what it refuses; alone and among several processes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from ifsl_bench.backbones import processes
from ifsl_bench.backbones.device import Precision
from ifsl_bench.backbones.networks import make_backbone
from ifsl_bench.backbones.processes import World, device_name, share_norms
from ifsl_bench.backbones.trainer import Trainer, _Classifier, pretrain
from ifsl_bench.data.preparing.prepare import ensure
from ifsl_bench.protocols.tasks.task_files import find
from ifsl_bench.utils import torchrun
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.torchrun import Launch, launch

CPU = torch.device("cpu")
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def among_two(monkeypatch):
    """Sets what torchrun tells the first of two processes, or another one."""
    monkeypatch.setattr(torchrun, "PATIENCE", 0.0)

    def set_environment(**settings: str) -> None:
        for name, value in (TWO | settings).items():
            monkeypatch.setenv(name, value)

    return set_environment


def test_a_run_finds_what_the_command_has_made(here, call):
    """The tasks of a file that share a pretraining count as one."""
    status, out, err = call("pretrain", "--task", "clusters.toml", "--device", "cpu")
    assert status == 0, err
    assert "pretraining none, linear head, seed 0: done" in err
    key, weights = out.splitlines()
    (folder,) = (path for path in (here / "home" / "pretrained").iterdir() if path.is_dir())
    info = json.loads((folder / "checkpoint.json").read_text())
    assert key.startswith(f"{folder.name}: base/val {100 * info['accuracy']['base/val']:.2f}%, base/test ")
    assert weights == f"weights: {folder / info['tensors']['file']}"
    assert info["processes"] == [1]
    status, again, err = call("pretrain", "--task", "clusters.toml:clusters-1shot", "--device", "cpu")
    assert (status, again, err) == (0, out, "")
    status, _, err = call("run", "--method", "protonet", "--task", "clusters.toml:clusters-5shot", "--device", "cpu")
    assert status == 0, err
    assert "evaluating protonet" in err
    assert "pretraining" not in err
    status, out, _ = call("pretrain", "--task", "clusters.toml", "--head", "cosine", "--seed", "3", "--device", "cpu")
    assert status == 0
    assert "-none-cosine-seed3-" in out


def test_a_result_says_of_how_many_processes_its_pretraining_was_unless_it_was_one(here):
    home, task = Paths.locate(here / "home"), find("clusters.toml:clusters-1shot")[0]
    dataset = ensure(home, task.dataset, Reporter())
    weights = pretrain(home, task, dataset, "linear", 0, CPU, Reporter())
    folder = CheckpointFolder(home.pretrained / weights.key)
    state = folder.load()
    del state.info["tensors"]
    assert "processes" not in weights.entry()
    folder.save(state.tensors, state.info | {"processes": [2, 1]})
    assert pretrain(home, task, dataset, "linear", 0, CPU, Reporter()).entry()["processes"] == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say what to pretrain for, e.g.: ifsl-bench pretrain --task glyphs-5shot"),
        (["--task", "clusters.toml", "--head", "cos"], "unknown head 'cos'; did you mean 'cosine'?"),
        (["--task", "clusters.toml", "--compile"], "--compile is for accelerators"),
        (["--task", "two.toml"], "the tasks of two.toml have different pretrainings (clusters-1shot, fewer-1shot)"),
        (["--task", "mini-5shot"], "ifsl-bench data prepare mini-imagenet --from PATH"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_one_line(here, call, arguments, said):
    text = (here / "clusters.toml").read_text().split("[tasks.clusters-5shot]")[0]
    (here / "two.toml").write_text(text + '[variants.fewer-1shot]\nof = "clusters-1shot"\nbase_classes = 5\n')
    status, out, err = call("pretrain", "--device", "cpu", *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


# -- what torchrun says ----------------------------------------------------------------------------------------------


def test_a_process_knows_who_it_is(monkeypatch, among_two):
    assert launch() is None
    among_two(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert launch() == Launch(5, 8, 1, 4)
    among_two(WORLD_SIZE="1")
    assert launch() is None, "alone"
    among_two(LOCAL_RANK="x")
    with pytest.raises(UserError, match=r"the environment has .*LOCAL_RANK='x'"):
        launch()


@pytest.mark.parametrize(
    "command", [["run", "--method", "protonet", "--task", "glyphs-5shot"], ["reproduce", "x.json"]]
)
def test_other_commands_are_for_one_process(call, among_two, command):
    among_two()
    status, _, err = call(*command)
    assert status == 2
    assert err == (
        f"ifsl-bench: ifsl-bench {command[0]} is for one process, and torchrun started 2: pretrain first, with "
        f"torchrun --nproc-per-node 2 -m ifsl_bench pretrain --task TASK, then ifsl-bench {command[0]} "
        "without torchrun\n"
    )
    among_two(RANK="1")
    assert call(*command) == (2, "", "")


def test_each_process_takes_the_accelerator_of_its_number(monkeypatch):
    third = Launch(rank=6, size=8, local_rank=2, local_size=4)
    assert device_name("auto", None) == "auto"
    assert device_name("cuda:1", None) == "cuda:1"
    assert device_name("cpu", third) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_name("auto", third) == "cpu"
    with pytest.raises(UserError, match="4 processes on a machine with no CUDA device; add --device cpu"):
        device_name("cuda", third)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_name("auto", third) == device_name("cuda", third) == "cuda:2"
    with pytest.raises(UserError, match="--device cuda:0 is one device for 8 processes"):
        device_name("cuda:0", third)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="4 processes on a machine with 2 CUDA devices; start --nproc-per-node 2"):
        device_name("auto", third)


def test_batch_norm_is_shared_on_devices_and_refused_on_the_cpu(monkeypatch):
    two = World(0, 2)
    normed, grouped = (make_backbone(name, (32, 32, 1)) for name in ("resnet-small", "resnet18-gn"))
    assert share_norms(grouped, CPU, two) is grouped
    assert share_norms(normed, CPU, World()) is normed
    with pytest.raises(UserError, match=r"batch norm, which 2 processes cannot share on the CPU; .*resnet18-gn"):
        share_norms(normed, CPU, two)
    parameters = list(normed.parameters())
    monkeypatch.setattr(processes.nn.SyncBatchNorm, "convert_sync_batchnorm", lambda n, g: SimpleNamespace(of=(n, g)))
    assert share_norms(normed, torch.device("cuda", 0), two).of == (normed, None)
    monkeypatch.undo()
    shared = share_norms(normed, torch.device("cuda", 0), two)
    assert sum(isinstance(module, torch.nn.SyncBatchNorm) for module in shared.modules()) == 8
    assert [id(p) for p in shared.parameters()] == [id(p) for p in parameters]
    assert shared.state_dict().keys() == make_backbone("resnet-small", (32, 32, 1)).state_dict().keys()


# -- the gradient of a batch that is shared --------------------------------------------------------------------------


def test_gradients_of_unequal_parts_average_to_that_of_the_batch(here, tmp_path):
    """Which is what DistributedDataParallel does with them. A batch of 32 in 3 parts: 10, 11 and 11."""
    task = find("clusters.toml:clusters-1shot")[0]
    dataset = ensure(Paths.locate(here / "home"), task.dataset, Reporter())
    pool = dataset.pool("base/train")
    inputs, labels = torch.from_numpy(pool.images[100:132].copy()), torch.from_numpy(pool.labels[100:132])

    def gradient(world: World) -> torch.Tensor:
        trainer = Trainer(tmp_path / "x", task, dataset, "linear", 0, CPU, world)
        trainer.optimiser.step = lambda: None
        part = world.part(32)
        model = _Classifier(trainer.network, trainer.head, Precision(False, ""))
        trainer._step(model, inputs[part], labels[part], 1)
        return torch.cat([p.grad.flatten() for p in trainer.parameters])

    whole = gradient(World())
    mean = torch.stack([gradient(World(rank, 3)) for rank in range(3)]).mean(0)
    # the same float32 sums over 32 images, in parts: some ten eps
    torch.testing.assert_close(mean, whole, rtol=1e-5, atol=1e-7)


def test_momentum_comes_back_in_the_layout_of_its_parameter(glyph_features_home, tmp_path):
    """Fused steps on devices go through memory and not through indices."""
    task = find(f"{glyph_features_home.parent / 'few.toml'}:few-1shot")[0]
    dataset = ensure(Paths.locate(glyph_features_home), task.dataset, Reporter())
    first, second = (Trainer(tmp_path / "x", task, dataset, "linear", 0, CPU) for _ in range(2))
    for i, parameter in enumerate(first.parameters):
        first.optimiser.state[parameter]["momentum_buffer"] = torch.full_like(parameter, i).contiguous()
    first.info["epoch"] = 0
    first._save()
    second.restore()
    for i, parameter in enumerate(second.parameters):
        buffer = second.optimiser.state[parameter]["momentum_buffer"]
        assert buffer.stride() == parameter.stride()
        assert (buffer == i).all()
