"""The README's examples run, and its table is the one the command prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ifsl_bench.cli import main as cli
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.preparing.prepare import prepare
from ifsl_bench.running import api

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, containing: str) -> str:
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.S) if containing in b]
    assert len(found) == 1
    return found[0]


def test_own_method_and_own_data(features_folder, tmp_path, monkeypatch):
    site = tmp_path / "site"
    info = site / "my_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    entry = re.search(r'^(nearest-mean) = "(.*)"$', block("toml", "entry-points"), re.M)
    (info / "entry_points.txt").write_text(f"[ifsl_bench.methods]\n{entry[1]} = {entry[2]}\n")
    (site / "my_package.py").write_text(block("python", "class NearestMean"))
    monkeypatch.syspath_prepend(str(site))

    text = block("toml", "[tasks.mine-5shot]") + "\n[evaluation]\nepisodes = 40\nvalidation_episodes = 10\n"
    (tmp_path / "mine.toml").write_text(text.replace("steps = 2000", "steps = 50"))
    work = api.workspace(tmp_path / "home", device="cpu")
    prepare(Home.locate(tmp_path / "home"), "mine", features_folder, False, Reporter())
    result = api.run("nearest-mean", str(tmp_path / "mine.toml"), options={"temperature": "5"}, work=work)
    assert result.label == "nearest-mean.temperature=5"
    assert result.summary["novel_alone"]["mean"] > 50
    sys.modules.pop("my_package", None)


@pytest.mark.parametrize("commands", [r"`ifsl-bench (table [^`]*--format markdown)`"])
def test_tables_are_the_ones_the_commands_print(commands, capsys, monkeypatch):
    found = re.findall(commands, README)
    assert found
    for command in found:
        monkeypatch.setattr(sys, "argv", ["ifsl-bench", *command.split()])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        assert len(rows) > 4
        for row in rows:
            assert row in README, f"not in the README: {row}"


def test_every_command_named_exists():
    for name in set(re.findall(r"ifsl-bench ([a-z]+)", README)):
        assert name in cli.cli.commands, name
