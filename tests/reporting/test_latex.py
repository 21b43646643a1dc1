"""LaTeX in the layout of papers."""

from __future__ import annotations

import json
import re

import pytest

from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.reporting.latex import make_latex_tables
from tests.store.result_fields import leaderboard, row


def table_rows(latex: str) -> list[list[str]]:
    """The cells of each row of a LaTeX table, after its heads."""
    body = latex.split("\\midrule", 1)[1].split("\\bottomrule")[0]
    return [
        [cell.strip() for cell in line.removesuffix("\\\\").split(" & ")] for line in body.splitlines() if "&" in line
    ]


@pytest.mark.parametrize("full", [False, True])
def test_latex_has_the_papers_layout(stored_rows, full):
    stored_rows(
        row("a_b", [15.0, 15.1, 15.0], noise=1, n=2000), row("c", [15.0, 15.0, 15.0], noise=2, n=2000),
        row("d", [10.0, 10.1, 10.0], noise=3, n=2000), row("e", [15.0], noise=4, n=2000),
        row("a_b", [12.0, 12.1], noise=1, n=2000, task="mini-1shot"),
    )  # fmt: skip
    pair = [load_task_results(packaged_tasks()[name], stored_rows.root) for name in ("mini-5shot", "mini-1shot")]
    latex = make_latex_tables(pair, full)
    width = 4 if full else 2
    assert f"\\begin{{tabular}}{{c|{'c' * width}|{'c' * width}}}" in latex
    assert f"\\multicolumn{{{width}}}{{c|}}{{1-shot}} & \\multicolumn{{{width}}}{{c}}{{5-shot}}" in latex
    assert latex.count("Acc. $\\uparrow$") == 2
    assert "\\caption{mini-ImageNet 64+5}" in latex
    rows = table_rows(latex)
    assert {len(cells) for cells in rows} == {1 + 2 * width}
    table = {cells[0]: cells[1:] for cells in rows}
    five = width  # the first column of 5-shot
    bold = [{label for label in ("a\\_b", "c", "d", "e") if "textbf" in table[label][five + i]} for i in (0, 1)]
    assert bold[0] == {"a\\_b", "c"}, "each may be the best; e is, but has one seed"
    assert bold[1] == {"a\\_b", "c", "d"}, "by the column's own metric, which is 0 for all"
    assert table["c"][:width] == [""] * width, "not measured on 1-shot"
    assert table["d"][five].startswith("39.8")
    # The bold numbers of the paper's ablation tables.
    assert table["LR+A"][:2] == ["\\textbf{55.31} $\\pm$ 0.32", "\\textbf{$-$11.72}"]
    assert table["MLP+A"][five : five + 2] == ["\\textbf{63.04} $\\pm$ 0.30", "\\textbf{$-$10.66}"]
    assert table["ProtoNet"][five].startswith("57.05 $\\pm$ 0.10")
    if full:
        assert table["MLP+S"][:4] == ["54.46 $\\pm$ 0.31", "$-$11.74", "$-$12.73", "$-$10.74"]
    assert "% mini-5shot: Provisional, without a rank. 1 seed: e (yours)." in latex.splitlines()
    assert latex.splitlines()[1] == r"\begin{table}[t]", "one line of comment above, the others below"
    outside = re.sub(r"(?m)^%.*$", "", latex)
    assert "±" not in outside
    assert outside.count("{") == outside.count("}")
    assert re.findall(r"\\(begin|end)\{(\w+)\}", outside) == [
        ("begin", "table"), ("begin", "center"), ("begin", "tabular"),
        ("end", "tabular"), ("end", "center"), ("end", "table"),
    ]  # fmt: skip


def test_latex_has_ranks_where_they_are_asked_for(stored_rows):
    stored_rows(
        row("a", [15.0, 15.1, 15.0], noise=1, n=2000), row("c", [15.0, 15.0, 15.0], noise=2, n=2000),
        row("d", [10.0, 10.1, 10.0], noise=3, n=2000), row("e", [15.0], noise=4, n=2000),
        row("t", [20.0, 20.1, 20.0], noise=5, n=2000, transductive=True),
    )  # fmt: skip
    latex = make_latex_tables([load_task_results(packaged_tasks()["mini-5shot"], stored_rows.root)], rank=True)
    assert " & Acc. $\\uparrow$ & $\\Delta \\uparrow$ & rank \\\\" in latex
    ranks = {cells[0]: cells[-1] for cells in table_rows(latex)}
    assert [ranks[label] for label in ("a", "c", "d", "e", "LR+A")] == ["1--2", "1--2", "3", "--", ""]
    assert ranks["t, transductive"] == "1"  # among rows of its kind


@pytest.mark.slow("rows of several tasks are ranked")
def test_ranks_of_several_tasks_and_of_sessions_are_those_of_the_text_table(call):
    for tasks, labels in (
        (["glyphs-1shot", "glyphs-5shot"], {"lwof": "LwoF"}),
        (["tiny-features-sessions"], {"ncm": "NCM", "lazy (imprint)": "lazy (imprint)"}),
    ):
        plain = [json.loads(call("table", task, "--rank", "--format", "json")[1]) for task in tasks]
        table = {cells[0]: cells[1:] for cells in table_rows(call("table", *tasks, "--rank", "--format", "latex")[1])}
        for label, printed in labels.items():
            rows = [next(row for row in of_task if row["method"] == label) for of_task in plain]
            ends = [dict.fromkeys((row["rank_first"], row["rank_last"])) for row in rows]
            width = len(table[printed]) // len(tasks)
            cells = table[printed][width - 1 :: width]
            assert cells == ["--".join(str(end) for end in pair if end) for pair in ends]


def test_latex_of_regular_tasks_and_of_several_data_sets(stored_rows):
    stored_rows(row("a", [15.0, 15.1], task="mini-regular-5shot"))
    names = ("mini-regular-1shot", "tiered-5shot", "mini-regular-5shot")
    latex = make_latex_tables([load_task_results(packaged_tasks()[name], stored_rows.root) for name in names])
    assert latex.count("\\begin{table}") == 2
    regular = latex.split("\\end{table}")[0]
    assert "Model & 1-shot & 5-shot \\\\" in regular
    table = {cells[0]: cells[1:] for cells in table_rows(regular)}
    assert table["MLP+A"] == ["\\textbf{55.75} $\\pm$ 0.51", "70.14 $\\pm$ 0.44"]
    assert table["LwoF"] == ["55.45 $\\pm$ 0.89", "\\textbf{70.92} $\\pm$ 0.35"]
    assert table["matchingnets"] == ["43.60", "55.30"]
    assert table["a"][0] == ""


def test_latex_keeps_variants_apart_and_says_so(stored_rows):
    names = ("mini-5shot", "mini-5shot+shots=1", "mini-5shot+shots=3", "mini-1shot+shots=3", "mini-5shot+ways=10",
             "mini-held-out-1shot", "mini-held-out-5shot", "mini-1shot")  # fmt: skip
    stored_rows(*(row("m", [15.0], noise=i, task=name) for i, name in enumerate(names)))
    board = [load_task_results(packaged_tasks()[name], stored_rows.root) for name in ("mini-1shot", "mini-5shot")]
    tables = leaderboard(board, stored_rows.root, "latex").split("\n\n")
    heads = {
        tuple(re.search(r"^% (.*); needs", t, re.M)[1].split()): re.search(r"\\caption\{(.*)\}", t)[1] for t in tables
    }
    apart = "not comparable with the original"
    assert heads == {
        ("mini-1shot", "mini-5shot"): "mini-ImageNet 64+5",
        ("mini-5shot+shots=1", "mini-5shot+shots=3"):
            f"mini-ImageNet 64+5, 5 shots; a variant of mini-5shot (shots=1; shots=3), {apart}",
        ("mini-1shot+shots=3",):
            f"mini-ImageNet 64+5, 1 shot, with shots=3; a variant of mini-1shot (shots=3), {apart}",
        ("mini-5shot+ways=10",):
            f"mini-ImageNet 64+5, 5 shots, with ways=10; a variant of mini-5shot (ways=10), {apart}",
        ("mini-held-out-1shot", "mini-held-out-5shot"):
            f"mini-ImageNet 64+5, base queries held out; a variant of mini-1shot and mini-5shot, {apart}",
    }  # fmt: skip
    assert ["Published" in t for t in tables] == [name[0] == "mini-1shot" for name in heads]
