"""Whole commands with a backbone from elsewhere: run, table, campaign, check; and one that has learned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.backbone.frozen import Preprocess
from ifsl_bench.backbone.timm_zoo import Timm
from ifsl_bench.data.pools import open_dataset


@pytest.fixture(autouse=True)
def _timm():  # not above: it takes seconds, of every worker that collects the tests
    pytest.importorskip("timm", reason='pip install "ifsl_bench[backbones]"')


def save(seed: int, path) -> None:
    """The weights of timm's smallest network, as they begin."""
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    save_file(timm.create_model("test_resnet", pretrained=False).state_dict(), path)


@pytest.fixture
def hues(_timm, hues):
    """With the weights of a network of timm's besides."""
    save(0, hues / "mine.safetensors")
    return hues


def test_run_table_check_and_campaign(hues, call):
    options = ("--backbone", "timm:test_resnet", "--weights", "mine.safetensors")
    status, out, err = call("run", "--method", "protonet,imprint", "--task", "hues.toml", *options, "-q")
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


def test_sessions_on_a_backbone_from_elsewhere_have_one_for_both_heads(hues, call):
    options = ("--backbone", "timm:test_resnet", "--weights", "mine.safetensors", "--sessions", "2", "--ways", "2")
    status, _, err = call("run", "--method", "lr,imprint", "--task", "hues.toml", *options, "-q")
    assert status == 0, err
    results = [json.loads(file.read_text()) for file in sorted((hues / "home" / "results").rglob("*.json"))]
    assert [result["episodes"]["sessions"] for result in results] == [2, 2]
    assert len({result["pretraining"]["key"] for result in results}) == 2, "a head each"
    assert len(list((hues / "home" / "features").iterdir())) == 1, "on the same features"


def learn(pool, path: Path) -> None:
    """Trains a network of timm's from scratch, by timm's own optimiser and on what its preprocessing makes of the
    images, and writes its weights."""
    import timm
    from safetensors.torch import save_file
    from timm.optim import create_optimizer_v2

    prepare_images = Preprocess(Timm().card("test_vit", True), torch.device("cpu"))
    torch.manual_seed(0)
    network = timm.create_model("test_vit", pretrained=False, num_classes=5)
    optimiser = create_optimizer_v2(network, opt="adamw", lr=1e-3)
    images, labels = (torch.from_numpy(np.array(x)) for x in (pool.images, pool.labels))
    for _ in range(12):
        loss = F.cross_entropy(network(prepare_images(images)), labels.long())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save_file(network.state_dict(), path)


def test_a_network_of_timms_that_learned_the_base_classes_tells_new_ones_apart(hues, call):
    pool = open_dataset(hues / "home" / "data" / "hues").pool("base/train")
    learn(pool, hues / "learned.safetensors")
    options = ("--backbone", "timm:test_vit", "--weights", "learned.safetensors", "--episodes", "100")
    status, _, err = call("run", "--method", "imprint", "--task", "hues.toml", *options, "-q")
    assert status == 0, err
    (file,) = (hues / "home" / "results").rglob("*.json")
    result = json.loads(file.read_text())
    assert result["pretraining"]["accuracy"]["base/val"] > 80  # percent; chance is 20
    assert result["summary"]["novel_alone"]["mean"] > 60  # chance is 33
    assert result["summary"]["acc"]["mean"] > 45  # chance is 13
