"""Published rows and other protocols apart; what stands in tables and below them; the formats."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from scipy import stats

from ifsl_bench.analysis import task_results
from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.comparison import compare_rows
from ifsl_bench.analysis.task_results import find_row_or_raise, load_task_results, load_variant_results
from ifsl_bench.protocols.tasks.task_files import load_tasks, packaged_tasks
from ifsl_bench.reporting.detail_tables import seed_table
from ifsl_bench.reporting.latex import make_latex_tables
from ifsl_bench.reporting.leaderboard import COMMON_SEEDS_NOTE, make_short_task_tables, make_task_table
from ifsl_bench.reporting.notes import describe_standing, describe_standings, table_notes
from ifsl_bench.reporting.page.data import collect_page
from ifsl_bench.reporting.page.page import render_page
from ifsl_bench.reporting.table import RECORD_FORMATTERS
from ifsl_bench.store.published import read_published_rows
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.store.schema import write_result
from ifsl_bench.utils.errors import UserError
from tests.store.result_fields import DIGITS, accuracies, document, leaderboard, row


def test_a_row_asked_for_by_its_file_is_told_by_its_label(tmp_path, monkeypatch):
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "none")
    for result in row("Mine.x=2", [15.0]).results:
        write_result(tmp_path, result)
    board = load_task_results(packaged_tasks()["mini-5shot"], tmp_path)
    with pytest.raises(UserError, match=r"my\.py:Mine is a method; its rows on mini-5shot are called Mine\.x=2"):
        find_row_or_raise(board, "my.py:Mine")
    with pytest.raises(UserError, match=r"unknown row 'my\.py:Other'"):
        find_row_or_raise(board, "my.py:Other")


def test_one_view_of_measured_and_published_rows(stored_rows):
    stored_rows(
        row("mine", [15.0, 15.1, 15.3], noise=1, n=2000), row("other", [15.0, 15.0, 15.2], noise=2, n=2000),
        row("worse", [12.0, 12.1, 12.0], noise=3, n=2000), row("one", [11.0], noise=4, n=2000),
        row("few.episodes=50", [20.0], n=50),
    )  # fmt: skip
    task = packaged_tasks()["mini-5shot"]
    board = load_task_results(task, stored_rows.root)
    rows = document(leaderboard([board], stored_rows.root, "json"))
    measured = [r for r in rows if r["kind"] == "measured"]
    assert {r["method"]: (r["rank_first"], r["rank_last"], r["provisional"]) for r in measured} == {
        "mine": (1, 2, False), "other": (1, 2, False), "worse": (3, 3, False), "one": (None, None, True),
        "few.episodes=50": (None, None, None),
    }  # fmt: skip
    assert {r["method"]: r["comparable"] for r in measured if not r["comparable"]} == {"few.episodes=50": False}
    assert [r["common_seeds"] for r in measured if r["method"] in ("mine", "worse", "one")] == [3, 3, 1]
    papers = [r for r in rows if r["kind"] == "published"]
    assert {(r["method"], r["acc"]) for r in papers} == {
        (p.label, p.values["acc"]) for p in read_published_rows("mini-5shot")
    }
    assert all(
        r["rank_first"] is None and r["provisional"] is None and r["to_best"] is None and r["acc_interval"] is None
        for r in papers
    )
    assert [r["source"] for r in papers if not r["comparable"]] == ["published: gidaris2018"], "another protocol"
    by_csv = document(leaderboard([board], stored_rows.root, "csv"), "csv")
    assert [{k: "" if v is None else str(v) for k, v in r.items()} for r in rows] == by_csv

    text = leaderboard([board], stored_rows.root, "text")
    lines = [line.split() for line in text.splitlines()]
    values = [float(re.search(r"\d\d\.\d\d", " ".join(words))[0]) for words in lines
                  if words and words[-1] in ("yours", "ren2019", "yoon2020")]  # fmt: skip
    assert len(values) == 4 + 10
    assert values == sorted(values, reverse=True)
    assert text.index("other protocol") > text.index("imprint"), "after the last row of the same protocol"
    assert text.count("published: gidaris2018") == text.count("published: gidaris2018, other protocol") == 1
    assert "not comparable with the rows above: the episodes differ" in text
    assert "not used in any significance test" in text
    assert "for all rows at once with 95% confidence" in text
    assert "Ranks are among 3 rows on seeds 0, 1, 2" in text
    assert "Provisional, without a rank. 1 seed: one (yours)." in text
    assert [line.split()[:2] for line in text.splitlines() if line.endswith(" yours")] == [
        ["1-2", "mine"], ["1-2", "other"], ["3", "worse"], ["-", "one"],
    ]  # fmt: skip
    markdown = leaderboard([board], stored_rows.root, "markdown")
    bold = [line.split("|")[2].strip() for line in markdown.splitlines() if "**" in line]
    assert sorted(bold) == ["mine", "other"]


def test_numbers_of_a_ranked_table_follow_from_the_counts(stored_rows):
    """For programs to four digits, for readers to two; the distance from the best is paired."""
    rows = {"a": row("a", [15.0, 15.3, 15.1], noise=1), "b": row("b", [12.0, 12.1, 12.3], noise=2)}
    stored_rows(*rows.values())
    acc = {
        name: np.array([r.to_hit_counts().metrics_by_unit()["acc"] for r in entry.results])
        for name, entry in rows.items()
    }
    board_list = [load_task_results(packaged_tasks()["mini-5shot"], stored_rows.root)]
    text = leaderboard(board_list, stored_rows.root).splitlines()
    table = {
        r["method"]: r for r in document(leaderboard(board_list, stored_rows.root, "json")) if r["kind"] == "measured"
    }
    for name, values in acc.items():
        mean, interval, spread = values.mean(), 1.96 * stats.sem(values.mean(0)), values.mean(1).std(ddof=1)
        gap = (values - acc["a"]).mean()
        numbers = [table[name][field] for field in ("acc", "acc_interval", "sd_of_seeds")]
        assert numbers == pytest.approx([mean, interval, spread], abs=DIGITS)
        assert table[name]["to_best"] == (None if name == "a" else pytest.approx(gap, abs=DIGITS))
        (line,) = [line for line in text if f" {name} " in line and line.endswith("yours")]
        assert f"{mean:.2f} ± {interval:.2f}" in line
        assert f"{spread:.2f}" in line
        assert (f"{gap:+.2f} ± {table[name]['to_best_interval']:.2f}" in line) if name == "b" else "+" not in line


def test_variants_are_shown_apart(stored_rows):
    stored_rows(
        row("m", [15.0, 15.1, 15.2], noise=1), row("m", [20.0, 20.1, 20.2], noise=2, task="mini-5shot+ways=10"),
        row("m", [19.0, 19.1, 19.2], noise=3, task="mini-held-out-5shot"),
    )  # fmt: skip
    (stored_rows.root / "mini-5shot+ways=11").mkdir()
    (stored_rows.root / "mini-5shot+nonsense").mkdir()
    (stored_rows.root / "mini-5shot+shots=5").mkdir()
    task = packaged_tasks()["mini-5shot"]
    assert [b.task_name for b in load_variant_results(task, stored_rows.root)] == [
        "mini-held-out-5shot",
        "mini-5shot+ways=10",
    ]
    rows = document(leaderboard([load_task_results(task, stored_rows.root)], stored_rows.root, "json"))
    measured = {(r["task"], r["variant_of"]): r["rank_last"] for r in rows if r["kind"] == "measured"}
    assert measured == {
        ("mini-5shot", None): 1, ("mini-5shot+ways=10", "mini-5shot"): 1, ("mini-held-out-5shot", "mini-5shot"): 1,
    }  # fmt: skip
    assert {r["task"] for r in rows if r["kind"] == "published"} == {"mini-5shot"}
    text = leaderboard([load_task_results(task, stored_rows.root)], stored_rows.root)
    titles = [line for line in text.splitlines() if line.startswith("mini-")]
    assert titles == [
        "mini-5shot",
        "mini-held-out-5shot, a variant of mini-5shot: not comparable with it",
        "mini-5shot+ways=10, a variant of mini-5shot: not comparable with it",
    ]
    pair = [load_task_results(load_tasks(name)[0], stored_rows.root) for name in ("mini-5shot", "mini-5shot+ways=10")]
    assert leaderboard(pair, stored_rows.root).count("mini-5shot+ways=10, a variant") == 1


@pytest.mark.parametrize(
    ("task", "variant"), [("mini-5shot", "mini-held-out-5shot"), ("glyphs-1shot", "glyphs-1shot+base-classes=20")]
)
def test_the_command_for_a_stored_variant_shows_it(call, task, variant):
    _, out, _ = call("leaderboard", task)
    (command,) = re.findall(r"Stored as well: .* \(`ifsl-bench (.*)`\)", out)
    status, out, _ = call(*command.split())
    assert (status, out.splitlines()[0].split(",")[0]) == (0, variant)


@pytest.mark.parametrize("name", ["mini-5shot", "tiny-5shot"])
def test_rows_on_partial_data_stand_apart(stored_rows, name):
    """However good they are and whatever else is stored: neither task is pinned, and one has published rows."""
    data = {"fingerprint": "part", "partial": True, "task": name}
    stored_rows(row("aaa", [20.0, 20.1], n=2000, **data))
    alone = load_task_results(packaged_tasks()[name], stored_rows.root)
    assert ([r.label for r in alone.rows], [r.label for r in alone.incomparable_rows]) == ([], ["aaa"])
    stored_rows(row("b", [15.0] * 3, n=2000, noise=1, task=name), row("c", [12.0] * 3, n=2000, noise=2, task=name))
    board = load_task_results(packaged_tasks()[name], stored_rows.root)
    assert ([r.label for r in board.rows], [r.label for r in board.incomparable_rows]) == (["b", "c"], ["aaa"])
    for view in (alone, board):
        table = {
            r["method"]: r for r in document(leaderboard([view], stored_rows.root, "json")) if r["kind"] == "measured"
        }
        assert (table["aaa"]["rank_first"], table["aaa"]["comparable"], table["aaa"]["partial_data"]) == (
            None,
            False,
            True,
        )
        text = leaderboard([view], stored_rows.root)
        assert re.search(r"^ +aaa .* yours, not comparable$", text, re.M)
        assert re.search(r"^aaa \(yours\) is not comparable with .*: the data set .* is marked partial\.$", text, re.M)
        latex = re.sub(r"(?m)^%.*$", "", leaderboard([view], stored_rows.root, "latex"))
        apart = latex.split("\\textit{Measured, not comparable}")[1]
        assert re.search(r"aaa, partial data & 59\.\d\d", apart)
        assert "textbf" not in apart
        assert "marked partial" not in latex.split("\\toprule")[0], "the other rows are not on a part"
    assert {k: (v["rank_first"], v["partial_data"]) for k, v in table.items()} == {
        "b": (1, False), "c": (2, False), "aaa": (None, True),
    }  # fmt: skip


def test_a_row_whose_training_met_saddles_says_so(stored_rows):
    task = packaged_tasks()["mini-5shot"]

    def trained(base: SeedAggregate, *solves: dict[str, int]) -> SeedAggregate:
        copies = [msgspec.structs.replace(r, training={"solves": s}) for r, s in zip(base.results, solves, strict=True)]
        return SeedAggregate(base.label, base.results_origin, tuple(copies))

    counts = [{"adjoint_episodes": 8000, "adjoint_indefinite": count} for count in (0, 3)]
    met = trained(row("a", [15.0, 15.1], n=2000, task=task.name), *counts)
    none = trained(row("b", [14.0], n=2000, task=task.name), {"adjoint_episodes": 9, "adjoint_indefinite": 0})
    stored_rows(met, none, row("c", [12.0], n=2000, task=task.name))
    board = load_task_results(task, stored_rows.root)
    line = "stopped at a saddle, where the gradient is no minimum's: a (yours) in 3 of 16,000 episodes of meta-training"
    page, latex = render_page(collect_page([board])), make_latex_tables([board])
    texts = (
        leaderboard([board], stored_rows.root),
        make_short_task_tables([board])[0][0].notes[-1],
        latex,
        page.replace("&#39;", "'"),
    )
    for text in texts:
        assert text.count(line) == 1
        assert text.count("at a saddle") == 1
    assert any("a (yours) in 3 of 16,000" in note for note in compare_rows(*board.rows[:2]).notes)
    assert "a in 3 of 16,000" in seed_table(board.find_row("a")).notes[-1]


def test_rows_on_partial_data_rank_where_the_task_is_of_a_part(stored_rows):
    task = packaged_tasks()["tiny-pack-5shot"]
    data = {"fingerprint": task.dataset.fingerprint, "partial": True, "task": task.name}
    stored_rows(row("a", [15.0] * 3, n=2000, noise=1, **data), row("b", [12.0] * 3, n=2000, noise=2, **data))
    board = load_task_results(task, stored_rows.root)
    rows = document(leaderboard([board], stored_rows.root, "json"))
    assert [(r["method"], r["rank_first"], r["comparable"], r["partial_data"]) for r in rows] == [
        ("a", 1, True, True), ("b", 2, True, True),
    ]  # fmt: skip
    text = leaderboard([board], stored_rows.root)
    assert "The data set was made from less than its source should hold, and is marked partial." in text
    latex = leaderboard([board], stored_rows.root, "latex")
    assert "\\caption{Tiny-ImageNet pack 95+5, 5 shots; data set marked partial}" in latex
    assert "not comparable" not in latex


def test_stored_rows_say_which_data_are_meant(stored_rows, tmp_path, monkeypatch):
    """A user's rows on other data push nobody out, those on the same data are ranked, newer as they are."""
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "stored")
    for result in row("s", [14.0], n=2000).results:
        write_result(tmp_path / "stored", result)
    stored_rows(row("aaa", [20.0], n=2000, fingerprint="other"),
                row("s", [15.0], n=2000, noise=1, provenance={"time": "2026"}),
                row("t", [15.0], n=2000, noise=2, provenance={"time": "2026"}))  # fmt: skip
    board = load_task_results(packaged_tasks()["mini-5shot"], stored_rows.root)
    assert {(r.label, r.results_origin) for r in board.rows} == {("s", "stored"), ("s", "yours"), ("t", "yours")}
    assert [r.label for r in board.incomparable_rows] == ["aaa"]
    assert board.find_row("s").results_origin == "yours"
    stored_rows(row("s", [15.0], n=2000, noise=1, fingerprint="other"))
    board = load_task_results(packaged_tasks()["mini-5shot"], stored_rows.root)
    assert board.find_row("s") in board.incomparable_rows, (
        "yours, even where it stands apart: it is never taken for the stored one"
    )
    text = leaderboard([board], stored_rows.root)
    assert re.search(r"(aaa \(yours\), s|s \(yours\), aaa) \(yours\) are not comparable with .*: the data differ", text)


@pytest.mark.slow("all stored results are read")
def test_without_a_task_the_command_shows_the_best_rows_of_each_and_those_of_the_user(call, tmp_path):
    (tmp_path / "glyphs-1shot").mkdir()
    for path in packaged_results_folder().glob("glyphs-1shot/teen.seed-*.json"):
        shutil.copy(path, tmp_path / "glyphs-1shot")
    status, out, _ = call("leaderboard", "--results", str(tmp_path))
    assert not status
    whole = document(call("leaderboard", "--results", str(tmp_path), "--format", "json")[1], "json")
    of = {name: [r for r in whole if r["task"] == name and r["kind"] == "measured" and r["comparable"]]
          for name in {r["task"] for r in whole}}  # fmt: skip
    parts = dict(re.findall(r"^(\S+)\n\n(rank.*?)(?=\n\n\S+\n\n|\n\nMeasured)", out, re.M | re.S))
    assert set(parts) == {name for name, rows in of.items() if rows and not rows[0]["variant_of"]}
    for name, text in parts.items():
        lines = text.partition("\n\n")[0].splitlines()[2:]
        methods = [line.split()[1] for line in lines if not line.startswith("        lazy")]
        ranked = [r for r in of[name] if r["rank_first"]] or of[name]  # none has one of one seed, or one order
        best = [r["method"] for r in ranked][:3]
        assert methods == best + ["teen"] * (name == "glyphs-1shot")
        more = sum(r["task"] == name and r["kind"] != "published" for r in whole) - len(lines)
        assert f"{more} more row{'s' * (more > 1)}: ifsl-bench leaderboard {name}" in text
    assert len(call("leaderboard", "--full")[1]) > 2 * len(out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["table", "mini-5shot", "mini-regular-5shot"], ["table", "--full", "glyphs-5shot"], ["methods"], ["tasks"],
        ["compare", "lwof", "imprint", "--task", "glyphs-5shot"], ["data", "list"], ["data", "stats", "clusters"],
        ["table", "--rank", "glyphs-1shot", "mini-sessions"], ["show", "first"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_json_and_csv_of_every_table_command_are_one_document(arguments, clusters, call, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    first = str(next(packaged_results_folder().glob("glyphs-1shot/*.json")))
    arguments = [first if argument == "first" else argument for argument in arguments]
    documents = {}
    for style in RECORD_FORMATTERS:
        status, out, _ = call(*arguments, "--format", style)
        assert not status
        documents[style] = document(out, style)
    assert len(documents["json"]) == len(documents["csv"]) > 1
    assert [list(r) for r in documents["json"]] == [list(r) for r in documents["csv"]]


def test_a_run_shows_the_stored_rows_without_options_and_its_own(tmp_path):
    whole = load_task_results(packaged_tasks()["glyphs-5shot"], tmp_path)
    varied = {row.label for row in whole.rows if "." in row.label or "@" in row.label}
    assert len(varied) > 1
    board = whole.select_default_view(["lr+a.gradient=implicit"])
    assert {row.label for row in whole.rows} - {row.label for row in board.rows} == varied - {"lr+a.gradient=implicit"}
    tuned_ones = sum("@" in label for label in varied)
    assert board.remarks[-1] == (
        f"`ifsl-bench table glyphs-5shot` has {len(varied) - 1} more stored rows "
        f"({tuned_ones} tuned, {len(varied) - 1 - tuned_ones} with other options)"
    )
    assert board.select_default_view([]).labels == whole.labels - varied
    tuned = {row.label for row in whole.select_default_view(["lr@tuned-12"]).rows}
    assert tuned == {label for label in varied if "@" in label} | {"imprint", "protonet"}  # nothing to tune in these
    tuned_4 = row("x@tuned-4", [15.0], n=2000, setting="tuned-4")
    mine = replace(whole, rows=(*whole.rows, tuned_4), comparable_rows=(*whole.rows, tuned_4))
    beside = mine.select_default_view(["x@tuned-4"])
    *_, none_alike, counts = beside.remarks
    assert beside.labels == whole.labels - varied | {"x@tuned-4"}, "those as published are its context"
    assert f"has {len(varied)} more stored rows ({tuned_ones} tuned, " in counts
    assert none_alike == (
        "No stored row was tuned as yours was (tuned-4): those as published are shown beside it, and ranked apart"
    )
    lines = describe_standing(mine.select_setting("tuned-4"), "x@tuned-4")
    assert lines[1].startswith("  against the best other row of those ranked with it (tuned-4), ")


def test_a_row_of_one_seed_stands_where_its_differences_on_that_seed_put_it(tmp_path, monkeypatch):
    """Seeds move all rows: mine beats what it is compared with on its seed, and has less than that row over all."""
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "none")
    best, other_row = (replace(row(label, means, noise=9), results_origin="stored")
                       for label, means in (("best", [18, 20, 22]), ("other", [12, 14, 16])))  # fmt: skip
    mine = row("mine", [13], noise=9)
    board = replace(load_task_results(packaged_tasks()["mini-5shot"], tmp_path), rows=(best, other_row, mine),
                    comparable_rows=(best, other_row, mine), published_rows=())  # fmt: skip
    table = make_task_table(board)
    assert [entry.label for entry in table.rows] == ["best", "mine", "other"]
    assert COMMON_SEEDS_NOTE in table.notes
    assert accuracies(mine).mean() < accuracies(other_row).mean()
    acc, other_acc = accuracies(mine, 1).mean(), accuracies(other_row, 1).mean()
    assert (
        f"other (stored) with {other_acc:.2f} on seed 0: {acc - other_acc:+.2f} ± "
        in describe_standing(board, "mine")[2]
    )
    text = " ".join(describe_standing(board, "other"))
    assert f"mine (yours) with {acc:.2f} on seed 0, where other has {other_acc:.2f}: {other_acc - acc:+.2f} ± " in text
    alike = replace(board, rows=(best, other_row), comparable_rows=(best, other_row))
    assert COMMON_SEEDS_NOTE not in make_task_table(alike).notes


def test_notes_name_rows_once_and_rows_that_nothing_is_ranked_with_share_a_line(tmp_path, monkeypatch, call):
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "none")
    for label in ("x", "y", "z"):
        for result in row(label, [15.0], n=2000).results:
            write_result(tmp_path, result)
    board = load_task_results(packaged_tasks()["mini-5shot"], tmp_path)
    ((line,),) = describe_standings(board, ["x", "y", "z"])
    assert line.startswith("All rows are provisional (1 seed); ranks need three seeds.")
    assert "compare x y --task mini-5shot" in line
    assert len(describe_standings(board, ["x"])[0]) > 1, "one row has its differences"
    mine = row("lr", [15.0], n=2000)
    same = replace(board, rows=(mine, replace(mine, results_origin="stored")))
    monkeypatch.setattr(SeedAggregate, "options_at_edge", ["weight_decay"])
    (note,) = [note for note in table_notes(same) if "Chosen at an end" in note]
    assert note.endswith("lr (yours): weight_decay; lr (stored): weight_decay.")


def test_latex_says_why_nothing_is_bold_where_the_best_row_is_not_shown(tmp_path):
    board = load_task_results(packaged_tasks()["glyphs-5shot"], tmp_path)
    few = make_latex_tables([board.select_labels(["lr", "imprint"])])
    assert r"\textbf" not in few
    tops = {place.row.label for place in board.ranking.ranked_rows if place.may_be_best_row}
    assert f"% None is bold among the measured rows of glyphs-5shot: {', '.join(sorted(tops))} may be the best" in few
    assert "None is bold" not in make_latex_tables([board])


def test_a_task_without_the_rows_that_are_asked_for_is_left_out(call):
    for command in (["table"], ["table", "--rank"], ["leaderboard"]):
        status, out, err = call(*command, "glyphs-5shot", "mini-pack-5shot", "--method", "anil")
        assert (status, "mini-pack" in out) == (0, False), err
        assert "anil" in out
