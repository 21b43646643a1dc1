"""Runs the notebook anew, in an empty home, and writes its outputs: ``python docs/run_notebook.py``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parent / "notebook.ipynb"
ROOT = NOTEBOOK.parents[1]


def run(home: str) -> None:
    os.environ["IFSL_BENCH_HOME"] = home
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the time of day
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        run(home)
