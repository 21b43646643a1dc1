"""``ifsl-bench pretrain``: what it prints, what later runs find, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from ifsl_bench.backbone.trainer import Trainer
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.preparing.prepare import ensure
from ifsl_bench.protocol.task_files import find

CPU = torch.device("cpu")
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say what to pretrain for, e.g.: ifsl-bench pretrain --task glyphs-5shot"),
        (
            ["--task", "clusters.toml", "--head", "cos"],
            "unknown head 'cos'; did you mean 'cosine'? available: cosine, ",
        ),
        (
            ["--task", "clusters.toml", "--compile"],
            "--compile is for accelerators, and this pretraining runs on the CPU",
        ),
        (["--task", "glyphs-5shots"], "unknown task 'glyphs-5shots'; did you mean 'glyphs-5shot'"),
        (["--task", "clusters.toml", "--device", "tpu"], "unknown device 'tpu'"),
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


def test_momentum_comes_back_in_the_layout_of_its_parameter(glyph_features_home, tmp_path):
    """Fused steps on devices go through memory and not through indices."""
    task = find(f"{glyph_features_home.parent / 'few.toml'}:few-1shot")[0]
    dataset = ensure(Home.locate(glyph_features_home), task.dataset, Reporter())
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
