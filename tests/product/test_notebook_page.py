"""The notebooks of docs/ run, and what they show of stored results is current."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ifsl_bench.board.result_folder import packaged_root

DOCS = Path(__file__).parents[2] / "docs"


def check_again(name, monkeypatch, home):
    """Runs a notebook and compares what it shows of stored results; returns it as it is kept, as it came out, and what
    runs it once more."""
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
    return notebook, again, nbclient.NotebookClient(again, timeout=300, kernel_name="python3").execute


@pytest.mark.slow("starts a kernel and runs a method in sessions")
def test_the_notebook_of_sessions_runs_and_its_outputs_are_current(tmp_path, monkeypatch):
    check_again("sessions.ipynb", monkeypatch, tmp_path / "home")


@pytest.mark.slow("starts a kernel, renders the letters and runs two methods")
def test_the_notebook_runs_and_its_outputs_are_current(tmp_path, monkeypatch):
    notebook, again, once_more = check_again("notebook.ipynb", monkeypatch, tmp_path / "home")
    (first_run,) = [cell for cell in again.cells if "mine = ifsl_bench.run(" in cell.source]
    text = "".join(output.get("text", "") for output in first_run.outputs)
    assert "evaluating imprint.episodes=500 on glyphs-5shot, seed 1" in text, "a first run is not silent"
    _store_what_the_tutorial_runs(tmp_path / "home" / "results" / "glyphs-5shot")
    once_more()
    for old, new in zip(notebook.cells, again.cells, strict=True):
        if old.cell_type == "code" and "(stored)" in old.source:
            assert [o.get("data", {}).get("text/plain") for o in old.outputs] == [
                o.get("data", {}).get("text/plain") for o in new.outputs
            ], "rows that are named stored are those, whatever the user has measured"


def _store_what_the_tutorial_runs(folder):
    """The results of docs/tutorial.md's commands: those of the package are of the same methods, task and seeds."""
    for label, seeds in (("imprint", 3), ("protonet", 3), ("lr", 1)):
        for seed in range(seeds):
            shutil.copy(packaged_root() / folder.name / f"{label}.seed-{seed}.json", folder)
