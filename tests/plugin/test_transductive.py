"""Methods that declare that they look at an episode's other queries: let through, marked, and ranked apart."""

from __future__ import annotations

import msgspec
import pytest

from ifsl_bench import api
from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.task_results import TaskResults
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.leaderboard import make_task_table
from ifsl_bench.reporting.notes import table_notes
from ifsl_bench.reporting.table import render_tables
from ifsl_bench.store import result_folder
from ifsl_bench.store import schema as result_file
from ifsl_bench.utils.errors import UserError

TOGETHER = """
import torch
from ifsl_bench import Method, Prediction

class Together(Method):
    {declared}

    def forward(self, support, query):
        queries = query.features
        means = support.class_means(self.ways)
        for _ in range(3):
            share = (queries @ means.mT).softmax(-1)
            means = means + 0.5 * share.mT @ queries / queries.shape[1]
        logits = torch.cat([query.base_logits, queries @ means.mT], -1)
        {broken}
        return Prediction(logits)
"""


@pytest.fixture
def run(tmp_path, task, work):
    def call(declared, broken="pass"):
        (tmp_path / "x.py").write_text(TOGETHER.format(declared=declared, broken=broken))
        return api.run(f"{tmp_path / 'x.py'}:Together", task, work=work)

    return call


def test_only_a_class_that_says_so_may_look_at_other_queries(run):
    with pytest.raises(UserError, match="depends on the other queries"):
        run("pass")
    assert run("transductive = True").transductive
    with pytest.raises(UserError, match="depends on the other episodes"):
        run("transductive = True", "logits = logits - 3 * logits.mean(0)")


@pytest.fixture(scope="module")
def board():
    """Three stored rows of glyphs-5shot; the best and the last are said to be transductive."""
    (task,) = load_tasks("glyphs-5shot")
    root = result_folder.packaged_results_folder() / task.name

    def row(label, transductive):
        results = [result_file.read_result(root / f"{label}.seed-{seed}.json") for seed in range(3)]
        return SeedAggregate(
            label, "stored", tuple(msgspec.structs.replace(r, transductive=transductive) for r in results)
        )

    rows = (row("lwof", True), row("imprint", False), row("protonet", True))
    return TaskResults(task, rows, rows, (), (), ())


def test_transductive_rows_are_ranked_by_themselves_and_marked(board):
    places = [
        (place.row.label, str(place.rank_interval), place.n_ranked_together) for place in board.ranking.ranked_rows
    ]
    assert places == [("imprint", "1", 1), ("lwof", "1", 2), ("protonet", "2", 2)]
    table = render_tables([make_task_table(board)], "text")
    marked = [line.split()[0] for line in table.splitlines() if "stored, transductive" in line]
    assert sorted(marked) == ["lwof", "protonet"]
    assert any("ranked apart: lwof (stored), protonet (stored)" in note for note in table_notes(board))
