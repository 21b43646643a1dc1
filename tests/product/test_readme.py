"""The examples of README and docs run, and the tables of results are the ones that the commands print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ifsl_bench import api
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter

ROOT = Path(__file__).parents[2]
README, DATA, RESULTS, ARCHITECTURE = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/data.md", "docs/results.md", "docs/architecture.md")
)


def block(language: str, containing: str, page: str = README) -> str:
    matches = [b for b in re.findall(rf"```{language}\n(.*?)```", page, re.S) if containing in b]
    assert len(matches) == 1
    return matches[0]


def test_own_method_and_own_data(features_folder, tmp_path, monkeypatch):
    site = tmp_path / "site"
    info = site / "my_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (group,) = re.findall(r"an entry point `(.*?)`", README)
    (info / "entry_points.txt").write_text(f"[{group}]\nnearest-mean = my_package:NearestMean\n")
    (site / "my_package.py").write_text(block("python", "class NearestMean"))
    monkeypatch.syspath_prepend(str(site))

    text = block("toml", "[tasks.mine-5shot]", DATA) + "\n[evaluation]\nepisodes = 40\nvalidation_episodes = 10\n"
    (tmp_path / "mine.toml").write_text(text.replace("steps = 2000", "steps = 50"))
    work = api.workspace(tmp_path / "home", device="cpu")
    prepare_dataset(Paths.locate(tmp_path / "home"), "mine", features_folder, False, Reporter())
    result = api.run("nearest-mean", str(tmp_path / "mine.toml"), work=work)
    assert result.label == "nearest-mean"
    assert result.summary["novel_alone"]["mean"] > 50
    sys.modules.pop("my_package", None)


def tables(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs docs/tables.py."""
    command = [sys.executable, str(ROOT / "docs" / "tables.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.slow("makes all tables anew, from all results")
def test_the_tables_of_all_pages_are_current():
    process = tables("--check")
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


@pytest.mark.slow("makes tables of results twice")
def test_a_wrong_number_is_found_and_written_anew(tmp_path):
    page = tmp_path / "page.md"
    blocks = re.findall(r"<!-- (?:tables|script|differences): .*?<!-- end -->\n", RESULTS + ARCHITECTURE, re.S)
    of_kind = ([block for block in blocks if f"<!-- {kind}:" in block] for kind in ("tables", "script", "differences"))
    text = "\n".join(min(group, key=len) for group in of_kind)
    wrong = re.sub(r"(\| [+-]?\d+\.)(\d\d ± )", r"\g<1>9\2", text)  # accuracies and differences
    page.write_text(wrong)
    assert tables("--check", page).returncode == 1
    assert page.read_text() == wrong, "looked at alone"
    assert tables(page).returncode == 0
    assert page.read_text() == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<!-- tables: ifsl-bench table glyphs-1shot --format markdown -->\n\n# More\n", "a start and no end"),
        ("<!-- tables: ifsl-bench table glyphs-9shot -->\n<!-- end -->\n", "unknown task 'glyphs-9shot'"),
    ],
)
def test_a_page_whose_tables_cannot_be_made_stays_as_it_is(text, reason, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    process = tables(page)
    assert process.returncode == 2
    assert reason in process.stderr
    assert page.read_text() == text
