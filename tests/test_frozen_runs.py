"""Whole commands with a backbone from elsewhere: run, table, campaign, check, cache prune; and one that has learned."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.backbone.preprocess import Preprocess
from ifsl_bench.backbone.timm_zoo import Timm
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
    lines = [line for line in (out + err).splitlines() if ".json: " in line]
    assert all(".json: ok: " in line or "files changed since commit" in line for line in lines)  # of this checkout

    digits = folder.partition("+weights=")[2]
    (hues / "campaign.toml").write_text(
        f'[[run]]\nmethods = ["protonet", "lr"]\ntasks = ["hues.toml"]\n'
        f'backbone = "timm:test_resnet"\nweights = "{digits}"\n'
    )
    status, out, err = call("plan", "campaign.toml", "--format", "json")
    assert status == 0, err
    nodes = [node for node in json.loads(out)["nodes"] if node["kind"] in ("data", "pretraining", "features")]
    assert len(nodes) == 7
    assert {node["state"] for node in nodes} == {"cached"}
    status, _, err = call("run", "campaign.toml", "-q")
    assert status == 0, err

    kept = sorted(path.name for path in (hues / "home" / "features").iterdir())
    status, out, err = call("cache", "prune", "--campaign", "campaign.toml", "--yes")
    assert status == 0, err
    assert sorted(path.name for path in (hues / "home" / "features").iterdir()) == kept


def test_a_network_of_timms_that_learned_the_base_classes_tells_new_ones_apart(hues, monkeypatch, call):
    """Trained by timm's own optimiser on what its own preprocessing makes of the images."""
    from safetensors.torch import save_file
    from timm.optim import create_optimizer_v2

    pool = open_dataset(hues / "home" / "data" / "hues").pool("base/train")
    images, labels = torch.from_numpy(np.array(pool.images)), torch.from_numpy(pool.labels.astype(np.int64))
    rows = Preprocess(Timm().card("test_vit", True), torch.device("cpu"))(images)
    torch.manual_seed(0)
    network = timm.create_model("test_vit", pretrained=False, num_classes=len(pool.starts) - 1)
    optimiser = create_optimizer_v2(network, "adamw", lr=1e-3)
    for _ in range(12):
        loss = F.cross_entropy(network(rows), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_file(network.state_dict(), "learned.safetensors")

    said = ("--backbone", "timm:test_vit", "--weights", "learned.safetensors", "--episodes", "100")
    status, _, err = call("run", "--method", "imprint", "--task", "hues.toml", *said, "-q")
    assert status == 0, err
    (file,) = (hues / "home" / "results").rglob("*.json")
    found = json.loads(file.read_text())
    assert found["pretraining"]["accuracy"]["base/val"] > 80  # percent; chance is 20
    assert found["summary"]["novel_alone"]["mean"] > 60  # chance is 33
    assert found["summary"]["acc"]["mean"] > 45  # chance is 13
