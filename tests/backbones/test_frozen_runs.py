"""Whole commands with a backbone from elsewhere: run, table, campaign, check, sessions."""

from __future__ import annotations

import json

import pytest
import torch


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


@pytest.mark.slow("two runs, a check, a plan and a campaign")
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
    assert set(json.loads(out)["missing"]) == {"search", "evaluation"}, "data, backbone and features are cached"
    status, _, err = call("run", "campaign.toml", "-q")
    assert status == 0, err


@pytest.mark.slow("a whole run")
def test_sessions_on_a_backbone_from_elsewhere_have_one_for_both_heads(hues, call):
    options = ("--backbone", "timm:test_resnet", "--weights", "mine.safetensors", "--sessions", "2", "--ways", "2")
    status, _, err = call("run", "--method", "lr,imprint", "--task", "hues.toml", *options, "-q")
    assert status == 0, err
    results = [json.loads(file.read_text()) for file in sorted((hues / "home" / "results").rglob("*.json"))]
    assert [result["episodes"]["sessions"] for result in results] == [2, 2]
    assert len({result["pretraining"]["key"] for result in results}) == 2, "a head each"
    assert len(list((hues / "home" / "features").iterdir())) == 1, "on the same features"


BY_IMAGES = """
import torch
from torch.nn.functional import normalize
from ifsl_bench import Adapting

class ByImages(Adapting):
    changes = "nothing"

    def start(self):
        return normalize(self.base.prototypes, dim=-1)

    def adapt(self, state, images, labels, session):
        features = self.network()(images)
        means = [features[labels == label].mean(0) for label in range(self.ways)]
        return torch.cat([state, normalize(torch.stack(means), dim=-1)])

    def classify(self, state, images):
        return normalize(self.network()(images), dim=-1) @ state.mT
"""


@pytest.mark.slow("a whole run")
def test_methods_that_see_images_have_the_same_centred_features(hues, call):
    (hues / "m.py").write_text(BY_IMAGES)
    options = ("--backbone", "timm:test_resnet", "--weights", "mine.safetensors")
    status, _, err = call("run", "--method", "m.py,ncm", "--task", "hues.toml", *options, "-q")
    assert status == 0, err
    images, features = (json.loads(file.read_text()) for file in sorted((hues / "home" / "results").rglob("*.json")))
    assert (images["label"], features["label"]) == ("ByImages", "ncm")
    assert images["episodes"] == features["episodes"]
