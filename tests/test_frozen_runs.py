"""Whole commands with a backbone from elsewhere: run, table, campaign, check, cache prune; and one that has learned."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.backbone.preprocess import Preprocess
from ifsl_bench.common.files import Home
from ifsl_bench.data.pools import open_dataset
from ifsl_bench.data.writer import build

timm = pytest.importorskip("timm", reason='pip install "ifsl_bench[backbones]"')

POOLS = {"base/train": (5, 8), "base/val": (5, 4), "base/test": (5, 4), "novel/train": (4, 8), "novel/val": (4, 8),
         "novel/test": (4, 8)}  # fmt: skip
TASKS = """
[dataset]
name = "hues"
mean = [0.5, 0.5, 0.5]
std = [0.2, 0.2, 0.2]
[pretraining]
backbone = "resnet-small"
steps = 2
batch = 8
[pretraining.schedule]
rate = 0.05
[evaluation]
episodes = 12
validation_episodes = 6
[episode]
ways = 3
novel_queries = 3
base_queries = 3
[tasks.hues-1shot]
shots = 1
"""


def save(seed: int, path) -> None:
    """The weights of timm's smallest network, as they begin."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    save_file(timm.create_model("test_resnet", pretrained=False).state_dict(), path)


@pytest.fixture
def hues(tmp_path, monkeypatch):
    """A folder with small colour images in its home, a task on them, and the weights of a network; the current one."""
    home, random = Home.locate(tmp_path / "home"), np.random.default_rng(0)

    def fill(writer) -> None:
        for name, (classes, each) in POOLS.items():
            side = name if name.startswith("novel") else "base"
            hue = np.random.default_rng(sum(side.encode())).integers(30, 226, (classes, 1, 1, 3)).repeat(each, 0)
            labels, names = np.repeat(np.arange(classes), each), tuple(f"{side} {i}" for i in range(classes))
            with writer.pool(name, labels, names, (20, 20, 3)) as images:
                images[:] = np.clip(hue + random.integers(-20, 20, (classes * each, 20, 20, 3)), 0, 255)

    home.data.mkdir(parents=True)
    build(home.data / "hues", "hues", "made of noise", fill, {})
    (tmp_path / "hues.toml").write_text(TASKS)
    save(0, tmp_path / "mine.safetensors")
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_table_check_campaign_and_prune(hues, call):
    said = ("--backbone", "timm:test_resnet", "--weights", "mine.safetensors")
    status, out, err = call("run", "--method", "protonet,imprint", "--task", "hues.toml", *said, "-q")
    assert status == 0, err
    assert "enlarged" in err
    assert out.count("novel classes perhaps seen in pretraining") == 2
    files = sorted((hues / "home" / "results").rglob("*.json"))
    assert len(files) == 2
    (folder,) = {file.parent.name for file in files}
    assert folder.startswith("hues-1shot+backbone=timm:test_resnet+weights=")
    assert json.loads(files[0].read_text())["pretraining"]["seen"] == "may"
    _, out, err = call("check", *map(str, files), "--task", "hues.toml")
    wrong = [line for line in (out + err).splitlines() if ".json: " in line and "files changed since commit" not in line]
    assert not wrong  # this checkout may have changed files


    digits = folder.partition("+weights=")[2]
    (hues / "campaign.toml").write_text(
        f'[[run]]\nmethods = ["protonet", "lr"]\ntasks = ["hues.toml"]\nset = {{}}\n'
        f'backbone = "timm:test_resnet"\nweights = "{digits}"\n'
    )
    status, out, err = call("plan", "campaign.toml", "--format", "json")
    assert status == 0, err
    stages = json.loads(out)["stages"]
    assert {s["state"] for s in stages if s["kind"] in ("pretrain", "features")} <= {"cached", "done"}, stages
    status, _, err = call("run", "campaign.toml", "-q")
    assert status == 0, err

    kept = sorted(path.name for path in (hues / "home" / "features").iterdir())
    status, out, err = call("cache", "prune", "--campaign", "campaign.toml", "--yes")
    assert status == 0, err
    assert sorted(path.name for path in (hues / "home" / "features").iterdir()) == kept


@pytest.mark.slow("trains a model of timm's for a minute and computes its features of all glyphs")
def test_a_network_of_timms_that_learned_the_base_letters_tells_new_ones_apart(glyph_home, tmp_path, monkeypatch, call):
    """Trained by timm's own optimiser on what its own preprocessing makes of the images."""
    from safetensors.torch import save_file
    from timm.optim import create_optimizer_v2

    from ifsl_bench.backbone.timm_zoo import Timm

    home = Home.locate(glyph_home)
    pool = open_dataset(home.data / "glyphs").pool("base/train")
    classes, normalise = len(pool.starts) - 1, Preprocess(Timm().card("test_resnet", True), torch.device("cpu"))
    images, labels = torch.from_numpy(np.array(pool.images)), torch.from_numpy(pool.labels.astype(np.int64))
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False, num_classes=classes)
    optimiser = create_optimizer_v2(network, "adamw", lr=3e-3)
    for _ in range(250):
        batch = torch.randint(len(labels), (64,))
        loss = F.cross_entropy(network(normalise(images[batch])), labels[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_file(network.state_dict(), tmp_path / "letters.safetensors")

    monkeypatch.setenv("IFSL_BENCH_HOME", str(glyph_home))
    status, _, err = call("run", "--method", "imprint", "--task", "glyphs-5shot", "--backbone", "timm:test_resnet",
                          "--weights", str(tmp_path / "letters.safetensors"), "--episodes", "400", "-q")  # fmt: skip
    assert status == 0, err
    (file,) = (glyph_home / "results").rglob("*.json")
    found = json.loads(file.read_text())
    assert found["pretraining"]["accuracy"]["base/val"] > 20  # percent; chance is 1
    assert found["summary"]["novel_alone"]["mean"] > 45  # chance is 20
    assert found["summary"]["acc"]["mean"] > 20  # chance is below 1
