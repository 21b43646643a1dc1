"""Tables of tasks in sessions: published rows apart, each session's accuracy, the lazy row."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ifsl_bench.board.boards import load_board
from ifsl_bench.board.leaderboard import task_tables
from ifsl_bench.board.published import KINDS, ONE_ORDER, published
from ifsl_bench.board.render import render
from ifsl_bench.protocol.task import Task
from ifsl_bench.protocol.task_files import packaged

LIST = Path(__file__).parents[3] / "shared" / "fscil" / "published.json"
TASKS = {"mini-imagenet": "mini-sessions", "cifar100": "cifar100-sessions", "cub200": "cub-sessions"}


def task_of(name: str, count: int, ways: int) -> Task:
    """A task of that name, whose data need not be there."""
    plain = packaged()["tiny-features-sessions"]
    sessions = msgspec.structs.replace(plain.sessions, count=count, ways=ways)
    return msgspec.structs.replace(plain, name=name, sessions=sessions)


@pytest.mark.skipif(not LIST.exists(), reason="needs the published rows in ../shared/fscil")
def test_published_rows_are_those_of_the_list():
    """Accuracies, kind, base and novel accuracy of each; average and PD as the list has them, to its rounding."""
    listed = json.loads(LIST.read_text())
    rows = {name: published(f"{name}-published") for name in TASKS.values()}
    assert sum(map(len, rows.values())) == len(listed) == 100
    kinds = {"paper": "paper", "readme": "authors readme", "log": "authors log", "cited": "cited by another paper",
             "rerun": "rerun by another paper"}  # fmt: skip
    assert set(kinds) == set(KINDS)
    for entry in listed:
        (row,) = (
            row
            for row in rows[TASKS[entry["data"]]]
            if row.label == entry["method"] and row.sequence.after == entry["sessions"]
        )
        assert kinds[row.sequence.kind] == entry["kind"]
        assert row.values["acc"] == pytest.approx(entry["average"], abs=0.0101)
        assert row.values["pd"] == pytest.approx(entry["pd"], abs=0.0101)
        assert row.sequence.novel == entry.get("novel", [])
        assert row.sequence.seeds == entry.get("seeds")
        assert (row.sequence.novel_seen == "may") == entry.get("contaminated_pretraining", False)


def test_a_published_row_has_its_gain_over_its_own_lazy_row():
    (row,) = (row for row in published("mini-sessions-published") if row.label == "CEC")
    lazy = [row.values["first"] * 60 / (60 + 5 * t) for t in range(9)]
    assert row.values["gain"] == pytest.approx(np.mean(row.sequence.after) - np.mean(lazy))
    assert row.values["gain"] == pytest.approx(2.3, abs=0.05)


@pytest.mark.parametrize("style", ["text", "json"])
def test_published_rows_stand_in_a_block_of_their_own(style, tmp_path):
    board = load_board(task_of("mini-sessions", 8, 5), tmp_path)
    text = render(task_tables(board, full=True), style)
    assert all(row.protocol == ONE_ORDER for row in board.papers)
    if style == "json":
        records = {record["method"]: record for record in json.loads(text)}
        assert len(records) == len(board.papers) == 44
        fact = records["FACT (released log)"]
        assert (fact["published_as"], fact["chosen_on_test"], fact["knows_classes"]) == ("log", True, True)
        assert [fact[f"a_{t}"] for t in (0, 8)] == [76.6, 50.22]
        assert records["Joint-CNN"]["keeps_images"] == "all"
        assert records["BiMC"]["novel_seen"] == "may"
        assert not any("rank_first" in record for record in records.values())
    else:
        assert text.startswith("mini-sessions, published\n")
        assert "They are of one order of the classes and one support set." in text
        assert [line.split("  ")[0] for line in text.splitlines() if line.startswith("FACT")][:3] == [
            "FACT", "FACT (released log)", "FACT (rerun by M2SD)"
        ]  # fmt: skip
