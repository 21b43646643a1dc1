"""Backbones of somebody else's package, as docs/backbones.md writes them: installed, and run by whole commands."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "backbones.md").read_text(encoding="utf-8")


@pytest.fixture
def site(hues) -> Path:
    """A folder with the page's package, as pip would have installed it."""
    modules = dict(re.findall(r"```python\n# (my_package/\w+\.py)\n(.*?)```", PAGE, re.S))
    assert sorted(modules) == ["my_package/nets.py", "my_package/zoo.py"]
    (entries,) = re.findall(r'```toml\n\[project\.entry-points\."ifsl_bench\.backbones"\]\n(.*?)```', PAGE, re.S)
    plain = re.sub('"', "", entries)
    files = {
        **modules,
        "my_package/__init__.py": "",
        "my_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n",
        "my_package-1.0.dist-info/entry_points.txt": f"[ifsl_bench.backbones]\n{plain}",
    }
    for name, text in files.items():
        (hues / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (hues / "site" / name).write_text(text)
    return hues / "site"


@pytest.fixture
def command(site, call, monkeypatch):
    """`ifsl-bench` with the package as its files are now; (status, standard output, standard error)."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
            del sys.modules[name]

    def run(*arguments: str) -> tuple[int, str, str]:
        forget()
        return call(*arguments)

    yield run
    forget()


def stored(hues: Path) -> dict[str, dict]:
    results = {path.parent.name: json.loads(path.read_text()) for path in (hues / "home" / "results").rglob("*.json")}
    return {name.partition("+backbone=")[2]: result for name, result in results.items()}


@pytest.mark.slow("pretrains a network and asks a frozen one, three commands")
def test_a_network_of_ones_own_is_pretrained_and_a_frozen_one_used_as_it_is(site, hues, command):
    status, _, err = command("run", "--method", "imprint", "--task", "hues.toml", "--backbone", "my-net", "-q")
    assert status == 0, err
    trained = stored(hues)["my-net"]["pretraining"]
    assert trained["accuracy"].keys() == {"base/val", "base/test"}
    assert "pretrained_on" not in trained

    # The source of the frozen one is a file here, by an address like any other.
    weights = hues / "published.pth"
    torch.save(importlib.import_module("my_package.nets").MyNet().state_dict(), weights)
    zoo = site / "my_package" / "zoo.py"
    zoo.write_text(re.sub(r'URL = ".*"', f'URL = "{weights.as_uri()}"', zoo.read_text()))
    line = ("run", "--method", "imprint", "--task", "hues.toml", "--backbone", "my-frozen-net", "-q")
    status, out, err = command(*line)
    assert status == 0, err
    assert "enlarged" in err  # from 20 x 20 to 32 x 32
    frozen = stored(hues)["my-frozen-net"]
    assert frozen["pretraining"]["pretrained_on"] == ["imagenet-1k"]
    assert frozen["pretraining"]["seen"] == "may"
    assert out.count("novel classes perhaps seen") == 1

    status, _, err = command(*line, "--weights", "published.pth")
    assert status == 0, err
    given_result = next(result for name, result in stored(hues).items() if name.startswith("my-frozen-net+weights="))
    # The same network, and so the same base classifier; the task has another name, and so other episodes.
    assert all(
        given_result["pretraining"][name] == frozen["pretraining"][name] for name in ("weights", "sha256", "accuracy")
    )
    assert given_result["digest"] != frozen["digest"]


def test_what_goes_wrong_in_ones_own_backbone_is_one_line(site, hues, command):
    line = ("run", "--method", "imprint", "--task", "hues.toml", "-q", "--backbone")
    torch.save({"other": torch.zeros(3)}, hues / "wrong.pth")
    status, _, err = command(*line, "my-frozen-net", "--weights", "wrong.pth")
    assert status == 2
    assert err.count("holds the weights of another network") == 1
    assert "Traceback" not in err

    (site / "my_package" / "nets.py").write_text("raise RuntimeError('no such driver')\n")
    status, _, err = command(*line, "my-net")
    assert status == 2
    assert "no such driver" in err
    assert "Traceback" not in err

    status, _, err = command(*line, "my-nett")
    assert status == 2
    assert "my-net" in err
