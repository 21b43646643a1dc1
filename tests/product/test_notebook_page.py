"""The notebooks of docs/ run, and what they show of stored results is current."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def check_again(name, home, monkeypatch):
    """Runs a notebook and compares what it shows of stored results; returns it as it came out."""
    nbformat = pytest.importorskip("nbformat", reason="the packages of notebooks are not installed")
    nbclient = pytest.importorskip("nbclient", reason="the packages of notebooks are not installed")
    pytest.importorskip("ipykernel", reason="the packages of notebooks are not installed")
    monkeypatch.setenv("IFSL_BENCH_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")]))
    notebook, again = nbformat.read(DOCS / name, 4), nbformat.read(DOCS / name, 4)
    nbclient.NotebookClient(again, timeout=300, kernel_name="python3").execute()
    compared = 0
    for old, new in zip(notebook.cells, again.cells, strict=True):
        if old.cell_type != "code":
            continue
        old_tables, new_tables = ([o.data["text/plain"] for o in cell.outputs if "data" in o and "text/html" in o.data]
                                  for cell in (old, new))  # fmt: skip
        assert len(old_tables) == len(new_tables)
        if "mine" not in old.source:  # what is run here is another machine's
            assert old_tables == new_tables, old.source
            compared += len(old_tables)
    assert compared >= 3
    assert (DOCS / name).stat().st_size < 300_000
    return again


@pytest.mark.slow("starts a kernel and runs a method in sessions")
def test_the_notebook_of_sessions_runs_and_its_outputs_are_current(tmp_path, monkeypatch):
    check_again("sessions.ipynb", tmp_path / "home", monkeypatch)


@pytest.mark.slow("starts a kernel and runs two methods")
def test_the_notebook_runs_and_its_outputs_are_current(glyph_home, monkeypatch):
    again = check_again("notebook.ipynb", glyph_home, monkeypatch)
    (first_run,) = [cell for cell in again.cells if "mine = ifsl_bench.run(" in cell.source]
    text = "".join(output.get("text", "") for output in first_run.outputs)
    assert "evaluating imprint.episodes=500 on glyphs-5shot, seed 1" in text, "a first run is not silent"
