"""Runs notebooks anew, each in an empty home, and writes their outputs: ``python docs/run_notebook.py [FILE...]``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

DOCS = Path(__file__).parent


def run(path: Path, home: str) -> None:
    os.environ["IFSL_BENCH_HOME"] = home
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(DOCS.parent), os.environ.get("PYTHONPATH")]))
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the time of day
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = output.text.replace(home, "~/ifsl")  # a folder of this run alone
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(DOCS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as home:
            run(path, home)
