"""Rows on backbones that have seen the novel classes elsewhere, or may have: marked in tables, and ranked apart."""

from __future__ import annotations

import json

import msgspec
import pytest

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.ranking import Ranking
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.leaderboard import make_task_table
from ifsl_bench.reporting.notes import describe_standing, table_notes
from ifsl_bench.reporting.table import render_tables
from ifsl_bench.store import result_folder
from ifsl_bench.store import schema as result_file


@pytest.fixture(scope="module")
def board():
    """Four stored rows of glyphs-5shot: the best has seen the novel classes, the third may have."""
    (task,) = load_tasks("glyphs-5shot")
    root = result_folder.packaged_results_folder() / task.name

    def row(label, answer):
        results = [result_file.read_result(root / f"{label}.seed-{seed}.json") for seed in range(3)]
        more = {"seen": answer} if answer else {}
        return SeedAggregate(label, "stored", tuple(
            msgspec.structs.replace(result, pretraining=result.pretraining | more) for result in results
        ))  # fmt: skip

    rows = (row("lr+a", "yes"), row("lwof", None), row("imprint", "may"), row("protonet", "no"))
    return TaskResults(task, rows, rows, (), (), ())


def test_rows_that_may_have_seen_the_novel_classes_are_ranked_by_themselves(board):
    places = {
        place.row.label: (str(place.rank_interval), place.n_ranked_together) for place in board.ranking.ranked_rows
    }
    assert places == {"lwof": ("1", 2), "protonet": ("2", 2), "lr+a": ("1", 2), "imprint": ("2", 2)}
    alone = Ranking([row for row in board.rows if row.novel_classes_seen == "no"]).ranked_rows
    levels = {place.row.label: place.adjusted_mean for place in board.ranking.ranked_rows}
    assert {place.row.label: place.adjusted_mean for place in alone}.items() <= levels.items()
    assert "rank 1 of 2" in describe_standing(board, "lr+a")[0]


@pytest.mark.parametrize("form", ["text", "latex", "json"])
def test_every_form_of_the_table_says_so(board, form):
    output = render_tables([make_task_table(board)], form)
    if form == "json":
        rows = {row["method"]: row["novel_seen"] for row in json.loads(output)}
        assert rows == {"lr+a": "yes", "lwof": "no", "imprint": "may", "protonet": "no"}
        return
    lines = {name: [line for line in output.splitlines() if name in line and "00" not in name] for name in
             ("lr+a", "lwof", "imprint", "protonet")}  # fmt: skip
    marks = {name: any("seen" in line or "yes" in line for line in matches) for name, matches in lines.items()}
    assert marks["lr+a"]
    assert not marks["lwof"]
    assert not marks["protonet"]


def test_the_notes_name_them(board):
    notes = "\n".join(table_notes(board))
    for phrase, label in (("has seen", "lr+a"), ("may have seen", "imprint")):
        note = f"that {phrase} images of the novel classes when it was pretrained elsewhere, and ranked apart: {label}"
        assert note in notes


def test_a_verdict_that_this_version_does_not_know_counts_as_may(board):
    (first, *_) = board.rows
    results = tuple(msgspec.structs.replace(r, pretraining={**r.pretraining, "seen": "perhaps"}) for r in first.results)
    assert SeedAggregate("x", "stored", results).novel_classes_seen == "may"
