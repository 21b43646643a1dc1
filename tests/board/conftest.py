"""A folder of results beside no packaged ones."""

from __future__ import annotations

import pytest

from ifsl_bench.board import boards
from ifsl_bench.board.measured import Row
from ifsl_bench.board.result_file import write


@pytest.fixture
def stored_rows(tmp_path, monkeypatch):
    """A results folder and no packaged results."""
    monkeypatch.setattr(boards, "packaged_root", lambda: tmp_path / "none")
    root = tmp_path / "results"

    def store(*rows: Row) -> None:
        for row in rows:
            for measured in row.results:
                write(root, measured)

    store.root = root
    return store
