"""``ifsl-bench pretrain``: what it prints, what later runs find, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from ifsl_bench.backbones.trainer import pretrain
from ifsl_bench.data.preparing.prepare import open_or_build
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter

CPU = torch.device("cpu")


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
    """Earlier versions pretrained in several processes, too."""
    home, task = Paths.locate(here / "home"), load_tasks("clusters.toml:clusters-1shot")[0]
    dataset = open_or_build(home, task.dataset, Reporter())
    weights = pretrain(home, task, dataset, "linear", 0, CPU, Reporter())
    folder = CheckpointFolder(home.pretrained / weights.pretraining_key)
    state = folder.load()
    del state.metadata["tensors"]
    assert "processes" not in weights.result_entry()
    folder.write_tensors(state.tensors, state.metadata | {"processes": [2, 1]})
    assert pretrain(home, task, dataset, "linear", 0, CPU, Reporter()).result_entry()["processes"] == [2, 1]


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
