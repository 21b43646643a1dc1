"""Ranks and what they rest on; published rows and other protocols apart; the formats."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from scipy import stats

from ifsl_bench.board import boards
from ifsl_bench.board.asked import row_of
from ifsl_bench.board.boards import load_board, load_variants
from ifsl_bench.board.comparison import compare, p_value, verdict
from ifsl_bench.board.episode_counts import counts_entry
from ifsl_bench.board.latex import paper_tables
from ifsl_bench.board.leaderboard import SHARED, leaderboard, overview, task_table
from ifsl_bench.board.measured import Row
from ifsl_bench.board.notes import notes_of, standing, standings
from ifsl_bench.board.published import published
from ifsl_bench.board.rank_intervals import RankInterval, difference, fit_prior, rank_intervals
from ifsl_bench.board.ranking import Ranking
from ifsl_bench.board.render import PROGRAMS
from ifsl_bench.board.result_file import SCHEMA, Result, summary_entry, write
from ifsl_bench.board.result_folder import packaged_root
from ifsl_bench.board.show import row_table
from ifsl_bench.common.errors import UserError
from ifsl_bench.page.gather import gather
from ifsl_bench.page.html import page_html
from ifsl_bench.protocol.metrics import Counts, summarise
from ifsl_bench.protocol.task_files import find, packaged
from tests.board.result_fields import PLAIN

DIGITS = 5.1e-5  # JSON has four decimals


def result(label: str, seed: int, base: np.ndarray, task: str = "mini-5shot", **changes) -> Result:
    """A result with ``base`` base and ten novel hits in each episode."""
    (found,) = find(task)
    ten = np.full(len(base), 10)
    queries, novel = found.episode.base_queries, found.episode.ways * found.episode.novel_queries
    counts = Counts(base * (queries > 0), base * (queries > 0), ten if queries else base, ten if queries else base,
                    queries, novel, 2 * base * ten if queries else None)  # fmt: skip
    classes = np.tile(np.arange(found.episode.ways), (len(base), 1))
    fields = {
        "schema": SCHEMA, "method": label, "label": label, "task": task,
        "task_hash": found.hash, "digest": f"d{len(base)}", "fingerprint": "f", "seed": seed,
        "episodes": counts_entry(counts, classes), "summary": summary_entry(summarise(counts.per_episode())),
        "pretraining": {"key": f"k{seed}", "sha256": "s"},
    }  # fmt: skip
    return Result(**{**PLAIN, **fields, **changes})


def row(label: str, means: list[float], n: int = 400, noise: int = 0, spread: float = 2.0, **changes) -> Row:
    """A row with about these base hits, by seed; its episodes share their difficulty with other rows."""
    difficulty = np.random.default_rng(1).normal(0, 2, n)
    made = []
    for seed, mean in enumerate(means):
        own = np.random.default_rng([seed, noise]).normal(mean, spread, n)
        made.append(result(label, seed, np.clip(np.round(own + difficulty), 0, 25).astype(int), **changes))
    return Row(label, "yours", tuple(made))


def accuracies(one: Row, seeds: int | None = None) -> np.ndarray:
    """Percent of right queries, [seeds, n], counted anew."""
    hits = [r.episodes.column("base_joint") + r.episodes.column("novel_joint") for r in one.results[:seeds]]
    return np.array(hits) * 2.0


def test_a_comparison_says_what_its_interval_says():
    """One that leaves 0 out goes with a verdict, at 5%, over what there is to be over."""
    for seeds in (1, 3):
        for noise in range(1, 9):
            a, b = row("a", [15, 15.4, 14.9][:seeds], noise=noise), row("b", [14.9, 15, 14.5][:seeds], noise=20 + noise)
            found = compare(a, b)
            gap = found.overall["acc"] if seeds == 3 else found.episodes["acc"]
            ahead, behind = ("a (yours)", "b (yours)") if gap.mean > 0 else ("b (yours)", "a (yours)")
            said = (f"{ahead} has a significantly higher Acc. than {behind}" if abs(gap.mean) > gap.interval
                    else "Acc. does not tell a (yours) and b (yours) apart")  # fmt: skip
            assert verdict(found).startswith(f"{said} (p {p_value(gap.p)}")
            assert verdict(found).endswith("over episodes and 3 seeds)." if seeds == 3 else
                                           "a claim about methods needs --seeds 3 or more.")  # fmt: skip
    assert verdict(compare(a, a)) == "a (yours) and a (yours) have the same accuracy in every episode."


def test_a_row_asked_for_by_its_file_is_told_by_its_label(tmp_path, monkeypatch):
    monkeypatch.setattr(boards, "packaged_root", lambda: tmp_path / "none")
    for one in row("Mine.x=2", [15.0]).results:
        write(tmp_path, one)
    board = load_board(packaged()["mini-5shot"], tmp_path)
    with pytest.raises(UserError, match=r"my\.py:Mine is a method; its rows on mini-5shot are called Mine\.x=2"):
        row_of(board, "my.py:Mine")
    with pytest.raises(UserError, match=r"unknown row 'my\.py:Other'"):
        row_of(board, "my.py:Other")


def test_overall_is_over_episodes_and_seeds_together():
    a, b = row("a", [15, 15.4, 14.9], noise=1), row("b", [14, 15, 14.2], noise=2)
    d = accuracies(a) - accuracies(b)
    over_seeds, over_episodes = d.mean(1).var(ddof=1) / 3, d.mean(0).var(ddof=1) / 400
    degrees = (over_seeds + over_episodes) ** 2 / (over_seeds**2 / 2 + over_episodes**2 / 399)
    overall = compare(a, b).overall["acc"]
    assert overall.mean == pytest.approx(d.mean())
    assert overall.interval == pytest.approx(stats.t.ppf(0.975, degrees) * np.sqrt(over_seeds + over_episodes))
    single = compare(row("a", [15], noise=1), row("b", [14], noise=2)).overall["acc"]
    assert single.models_fixed, "one seed says nothing of others"
    assert single.interval == pytest.approx(stats.t.ppf(0.975, 399) * stats.sem(d[0]))
    more = [a, b, *(row(f"r{i}", [14, 14.5, 14.2], noise=i) for i in range(3, 8))]
    assert compare(a, b, more).overall["acc"] == Ranking(more).difference(a, b), "moderated as ranks are"
    assert compare(a, b, more).overall["acc"].degrees > degrees


def ranks(places) -> dict[str, str]:
    return {place.row.label: str(place.ranks) for place in places}


def test_rows_are_ranked_as_far_as_they_can_be_told_apart():
    rows = [
        row("behind", [13.0, 13.1, 12.9], noise=3),
        row("best", [15.0, 15.1, 14.9], noise=1),
        row("near", [14.95, 15.0, 14.95], noise=2),
        row("last", [10.5, 10.4, 10.6], noise=4),
    ]
    found = Ranking(rows)
    assert ranks(found.places) == {"best": "1-2", "near": "1-2", "behind": "3", "last": "4"}
    assert [place.row.label for place in found.places] == ["best", "near", "behind", "last"]
    assert [place.top for place in found.places] == [True, True, False, False]
    assert [place.gap is None for place in found.places] == [True, False, False, False]
    whole = rank_intervals(np.stack([accuracies(one) for one in rows]), np.zeros(4, bool))
    assert ranks(found.places) == {one.label: str(interval) for one, interval in zip(rows, whole, strict=True)}
    assert {place.among for place in found.places} == {4}


def test_few_seeds_and_options_make_a_row_provisional():
    rows = [
        row("a", [15.0, 15.1, 15.2], noise=1), row("b", [13.0, 13.1, 13.2], noise=2),
        row("one", [15.5], noise=3), row("two", [14.0, 14.1], noise=4),
        row("a.gamma=1", [14.0, 14.1, 14.2], noise=5, method="a"), row("a@tuned-12", [11.0, 11.1, 11.2], noise=6),
        row("file.a", [10.0, 10.1, 10.2], noise=7), row("file.a.gamma=1", [9.0, 9.1, 9.2], noise=8, method="file.a"),
    ]  # fmt: skip
    found = Ranking(rows).places
    assert {place.row.label: place.reason for place in found if place.provisional} == {
        "one": "1 seed", "two": "2 seeds", "a.gamma=1": "options of its own", "file.a.gamma=1": "options of its own",
    }  # fmt: skip
    assert ranks(place for place in found if not place.provisional) == {
        "a": "1", "b": "2", "a@tuned-12": "3", "file.a": "4",
    }  # fmt: skip
    assert not any(place.top for place in found if place.provisional)
    (one,) = (place for place in found if place.row.label == "one")
    assert one is found[0]
    assert one.gap.models_fixed
    d = (accuracies(rows[2]) - accuracies(rows[0], 1)).mean(0)
    assert (one.gap.mean, one.gap.interval) == pytest.approx((d.mean(), stats.t.ppf(0.975, 399) * stats.sem(d)))


def test_rows_are_compared_on_the_seeds_that_all_or_most_have():
    def of(label: str, seeds: list[int], noise: int) -> Row:
        made = row(label, [14.0] * (max(seeds) + 1), noise=noise)
        return Row(label, "yours", tuple(r for r in made.results if r.seed in seeds))

    five, three, four = of("five", [0, 1, 2, 3, 4], 1), of("three", [0, 1, 2], 2), of("four", [0, 1, 2, 4], 3)
    found = Ranking([five, three, four])
    assert found.seeds == (0, 1, 2)
    assert found.difference(five, four).mean == pytest.approx((accuracies(five, 3) - accuracies(four, 3)).mean())
    found = compare(five, four, [five, three, four])
    assert found.overall["acc"].mean == pytest.approx(found.episodes["acc"].mean), "on all seeds that these two have"
    assert Ranking([five, four]).seeds == (0, 1, 2, 4)
    late = of("late", [2, 3, 4], 4)
    found = Ranking([late, five, three, four])
    assert found.seeds == (0, 1, 2)
    assert {place.row.label: place.reason for place in found.places if place.provisional} == {
        "late": "it lacks seeds 0, 1"
    }
    apart = Ranking([of("a", [0, 1, 2], 1), of("b", [3, 4, 5], 2), of("c", [3, 4, 5], 3)])
    assert [row.label for row in apart.family] == ["b", "c"]
    (place,) = (place for place in apart.places if place.provisional)
    assert place.common_seeds == 0
    assert place.gap.models_fixed, "no seed in common"


def test_rows_that_are_the_same_for_every_seed_are_compared_over_episodes_alone():
    same = {"pretraining": {"key": "k", "sha256": "s"}}
    once = [row(label, [mean], noise=1).results[0] for label, mean in (("a", 15.0), ("b", 14.8))]
    rows = [
        Row(r.label, "yours", tuple(msgspec.structs.replace(r, seed=seed, **same) for seed in range(3))) for r in once
    ]
    found = Ranking([*rows, *(row(f"r{i}", [14, 14.5, 14.2], noise=i) for i in range(3, 8))])
    d = (accuracies(rows[0]) - accuracies(rows[1]))[0]
    assert found.difference(*rows).models_fixed
    assert not found.difference(rows[0], found.rows[-1]).models_fixed
    assert found.difference(*rows).interval == pytest.approx(stats.t.ppf(0.975, 399) * stats.sem(d))
    trained = [
        Row(one.label, "yours", tuple(msgspec.structs.replace(r, training={"steps": 1}) for r in one.results))
        for one in rows
    ]
    other = msgspec.structs.replace(rows[0].results[2], pretraining={"key": "k", "sha256": "trained elsewhere"})
    assert [one.fixed for one in (*rows, *trained)] == [True, True, False, False]
    assert not Row("a", "yours", (*rows[0].results[:2], other)).fixed
    assert not Row("a", "yours", rows[0].results[:1]).fixed, "one seed tells nothing"


def test_ranks_of_stored_rows_are_their_own(stored_rows, tmp_path, monkeypatch):
    """Rows of a user's change none of them, and none of each other's; nor does what is shown."""
    monkeypatch.setattr(boards, "packaged_root", lambda: tmp_path / "stored")
    names = ["s0", "s1", "s2", "s3"]
    for i, label in enumerate(names):
        for one in row(label, [15 - 0.4 * i, 15.1 - 0.4 * i, 15.2 - 0.4 * i], noise=i, n=2000).results:
            write(tmp_path / "stored", one)
    task = packaged()["mini-5shot"]

    def found() -> tuple[dict[str, str], dict[str, tuple]]:
        places = load_board(task, stored_rows.root).ranking.places
        split = [[p for p in places if p.row.origin == origin] for origin in ("stored", "yours")]
        return ranks(split[0]), {p.row.label: (str(p.ranks), p.among, p.gap) for p in split[1]}

    before, none = found()
    assert not none
    mine = row("mine", [14.0, 14.1, 14.2], noise=7, n=2000)
    stored_rows(mine)
    after, yours = found()
    assert after == before
    assert yours["mine"][1] == 5
    whole = [*load_board(task, stored_rows.root).compared]
    alone = rank_intervals(np.stack([accuracies(one) for one in whole]), np.zeros(5, bool))
    assert yours["mine"][0] == str(alone[[one.label for one in whole].index("mine")]) == "4"
    stacked = np.stack([accuracies(one) for one in whole])
    gap = difference(accuracies(mine), stacked[1], fit_prior(stacked.mean(2), np.zeros(5, bool)), 2)
    found_gap = yours["mine"][2]
    assert (found_gap.mean, found_gap.interval) == pytest.approx((gap.mean, gap.interval)), "moderated by itself too"
    stored_rows(*(row(f"m{i}", [20.0, 20.1, 20.2], noise=10 + i, n=2000) for i in range(3)), row("x", [25.0], n=2000))
    again, more = found()
    assert (again, more["mine"]) == (before, yours["mine"])
    whole = load_board(task, stored_rows.root)
    for some in (whole.only(["s1", "mine"]), whole.usual([])):
        shown = document(leaderboard([some], stored_rows.root, "json", labels=["s1"]))
        for r in shown:
            if r["kind"] == "measured" and r["method"] in before:
                place = RankInterval(r["rank_first"], r["rank_last"])
                assert str(place) == before[r["method"]]
    text = leaderboard([whole.only(["s1", "mine"])], stored_rows.root)
    assert "Ranks are among 4 rows on seeds 0, 1, 2, whichever rows are shown." in text
    assert "Provisional" not in text, "of rows that are not shown"


def test_ranks_of_nothing_of_one_and_of_equals():
    assert Ranking([]).places == []
    one = row("a", [14.0, 14.2, 14.1])
    assert [(str(p.ranks), p.gap) for p in Ranking([one]).places] == [("1", None)]
    twin = Row("b", "yours", one.results)
    assert [str(p.ranks) for p in Ranking([one, twin]).places] == ["1-2", "1-2"]
    assert Ranking([one, twin]).difference(one, twin).interval == 0
    lonely = row("c", [14.0])
    assert [(p.ranks, p.reason, p.gap) for p in Ranking([lonely]).places] == [(None, "1 seed", None)]


@pytest.fixture
def stored_rows(tmp_path, monkeypatch):
    """A results folder and no packaged results."""
    monkeypatch.setattr(boards, "packaged_root", lambda: tmp_path / "none")
    root = tmp_path / "results"

    def store(*rows: Row) -> None:
        for one in rows:
            for measured in one.results:
                write(root, measured)

    store.root = root
    return store


def document(text: str, style: str = "json") -> list[dict]:
    """What a program reads."""
    return json.loads(text) if style == "json" else list(csv.DictReader(io.StringIO(text)))


def test_one_view_of_measured_and_published_rows(stored_rows):
    stored_rows(
        row("mine", [15.0, 15.1, 15.3], noise=1, n=2000), row("other", [15.0, 15.0, 15.2], noise=2, n=2000),
        row("worse", [12.0, 12.1, 12.0], noise=3, n=2000), row("one", [11.0], noise=4, n=2000),
        row("few.episodes=50", [20.0], n=50),
    )  # fmt: skip
    task = packaged()["mini-5shot"]
    board = load_board(task, stored_rows.root)
    rows = document(leaderboard([board], stored_rows.root, "json"))
    measured = [r for r in rows if r["kind"] == "measured"]
    assert {r["method"]: (r["rank_first"], r["rank_last"], r["provisional"]) for r in measured} == {
        "mine": (1, 2, False), "other": (1, 2, False), "worse": (3, 3, False), "one": (None, None, True),
        "few.episodes=50": (None, None, None),
    }  # fmt: skip
    assert {r["method"]: r["comparable"] for r in measured if not r["comparable"]} == {"few.episodes=50": False}
    assert [r["common_seeds"] for r in measured if r["method"] in ("mine", "worse", "one")] == [3, 3, 1]
    papers = [r for r in rows if r["kind"] == "published"]
    assert {(r["method"], r["acc"]) for r in papers} == {(p.label, p.values["acc"]) for p in published("mini-5shot")}
    assert all(
        r["rank_first"] is None and r["provisional"] is None and r["to_best"] is None and r["acc_interval"] is None
        for r in papers
    )
    assert [r["source"] for r in papers if not r["comparable"]] == ["published: gidaris2018"], "another protocol"
    by_csv = document(leaderboard([board], stored_rows.root, "csv"), "csv")
    assert [{k: "" if v is None else str(v) for k, v in r.items()} for r in rows] == by_csv

    text = leaderboard([board], stored_rows.root, "text")
    lines = [line.split() for line in text.splitlines()]
    shown = [float(re.search(r"\d\d\.\d\d", " ".join(words))[0]) for words in lines
                  if words and words[-1] in ("yours", "ren2019", "yoon2020")]  # fmt: skip
    assert len(shown) == 4 + 10
    assert shown == sorted(shown, reverse=True)
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
    made = {"a": row("a", [15.0, 15.3, 15.1], noise=1), "b": row("b", [12.0, 12.1, 12.3], noise=2)}
    stored_rows(*made.values())
    acc = {name: np.array([r.counts().per_episode()["acc"] for r in one.results]) for name, one in made.items()}
    shown = [load_board(packaged()["mini-5shot"], stored_rows.root)]
    text = leaderboard(shown, stored_rows.root).splitlines()
    found = {r["method"]: r for r in document(leaderboard(shown, stored_rows.root, "json")) if r["kind"] == "measured"}
    for name, values in acc.items():
        mean, interval, spread = values.mean(), 1.96 * stats.sem(values.mean(0)), values.mean(1).std(ddof=1)
        gap = (values - acc["a"]).mean()
        numbers = [found[name][field] for field in ("acc", "acc_interval", "sd_of_seeds")]
        assert numbers == pytest.approx([mean, interval, spread], abs=DIGITS)
        assert found[name]["to_best"] == (None if name == "a" else pytest.approx(gap, abs=DIGITS))
        (line,) = [line for line in text if f" {name} " in line and line.endswith("yours")]
        assert f"{mean:.2f} ± {interval:.2f}" in line
        assert f"{spread:.2f}" in line
        assert (f"{gap:+.2f} ± {found[name]['to_best_interval']:.2f}" in line) if name == "b" else "+" not in line


def test_variants_are_shown_apart(stored_rows):
    stored_rows(
        row("m", [15.0, 15.1, 15.2], noise=1), row("m", [20.0, 20.1, 20.2], noise=2, task="mini-5shot+ways=10"),
        row("m", [19.0, 19.1, 19.2], noise=3, task="mini-held-out-5shot"),
    )  # fmt: skip
    (stored_rows.root / "mini-5shot+ways=11").mkdir()
    (stored_rows.root / "mini-5shot+nonsense").mkdir()
    (stored_rows.root / "mini-5shot+shots=5").mkdir()
    task = packaged()["mini-5shot"]
    assert [b.name for b in load_variants(task, stored_rows.root)] == ["mini-held-out-5shot", "mini-5shot+ways=10"]
    rows = document(leaderboard([load_board(task, stored_rows.root)], stored_rows.root, "json"))
    measured = {(r["task"], r["variant_of"]): r["rank_last"] for r in rows if r["kind"] == "measured"}
    assert measured == {
        ("mini-5shot", None): 1, ("mini-5shot+ways=10", "mini-5shot"): 1, ("mini-held-out-5shot", "mini-5shot"): 1,
    }  # fmt: skip
    assert {r["task"] for r in rows if r["kind"] == "published"} == {"mini-5shot"}
    text = leaderboard([load_board(task, stored_rows.root)], stored_rows.root)
    titles = [line for line in text.splitlines() if line.startswith("mini-")]
    assert titles == [
        "mini-5shot",
        "mini-held-out-5shot, a variant of mini-5shot: not comparable with it",
        "mini-5shot+ways=10, a variant of mini-5shot: not comparable with it",
    ]
    both = [load_board(find(name)[0], stored_rows.root) for name in ("mini-5shot", "mini-5shot+ways=10")]
    assert leaderboard(both, stored_rows.root).count("mini-5shot+ways=10, a variant") == 1


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
    pair = [load_board(packaged()[name], stored_rows.root) for name in ("mini-5shot", "mini-1shot")]
    latex = paper_tables(pair, full)
    width = 4 if full else 2
    assert f"\\begin{{tabular}}{{c|{'c' * width}|{'c' * width}}}" in latex
    assert f"\\multicolumn{{{width}}}{{c|}}{{1-shot}} & \\multicolumn{{{width}}}{{c}}{{5-shot}}" in latex
    assert latex.count("Acc. $\\uparrow$") == 2
    assert "\\caption{mini-ImageNet 64+5}" in latex
    rows = table_rows(latex)
    assert {len(cells) for cells in rows} == {1 + 2 * width}
    found = {cells[0]: cells[1:] for cells in rows}
    five = width  # the first column of 5-shot
    bold = [{label for label in ("a\\_b", "c", "d", "e") if "textbf" in found[label][five + i]} for i in (0, 1)]
    assert bold[0] == {"a\\_b", "c"}, "each may be the best; e is, but has one seed"
    assert bold[1] == {"a\\_b", "c", "d"}, "by the column's own metric, which is 0 for all"
    assert found["c"][:width] == [""] * width, "not measured on 1-shot"
    assert found["d"][five].startswith("39.8")
    # The bold numbers of the paper's ablation tables.
    assert found["LR+A"][:2] == ["\\textbf{55.31} $\\pm$ 0.32", "\\textbf{$-$11.72}"]
    assert found["MLP+A"][five : five + 2] == ["\\textbf{63.04} $\\pm$ 0.30", "\\textbf{$-$10.66}"]
    assert found["ProtoNet"][five].startswith("57.05 $\\pm$ 0.10")
    if full:
        assert found["MLP+S"][:4] == ["54.46 $\\pm$ 0.31", "$-$11.74", "$-$12.73", "$-$10.74"]
    assert "\n% Provisional, without a rank. 1 seed: e (yours).\n" in latex
    outside = re.sub(r"(?m)^%.*$", "", latex)
    assert "±" not in outside
    assert outside.count("{") == outside.count("}")
    assert re.findall(r"\\(begin|end)\{(\w+)\}", outside) == [
        ("begin", "table"), ("begin", "center"), ("begin", "tabular"),
        ("end", "tabular"), ("end", "center"), ("end", "table"),
    ]  # fmt: skip


def test_latex_of_regular_tasks_and_of_several_data_sets(stored_rows):
    stored_rows(row("a", [15.0, 15.1], task="mini-regular-5shot"))
    names = ("mini-regular-1shot", "tiered-5shot", "mini-regular-5shot")
    latex = paper_tables([load_board(packaged()[name], stored_rows.root) for name in names])
    assert latex.count("\\begin{table}") == 2
    regular = latex.split("\\end{table}")[0]
    assert "Model & 1-shot & 5-shot \\\\" in regular
    found = {cells[0]: cells[1:] for cells in table_rows(regular)}
    assert found["MLP+A"] == ["\\textbf{55.75} $\\pm$ 0.51", "70.14 $\\pm$ 0.44"]
    assert found["LwoF"] == ["55.45 $\\pm$ 0.89", "\\textbf{70.92} $\\pm$ 0.35"]
    assert found["matchingnets"] == ["43.60", "55.30"]
    assert found["a"][0] == ""


@pytest.mark.parametrize("name", ["mini-5shot", "tiny-5shot"])
def test_rows_on_partial_data_stand_apart(stored_rows, name):
    """However good they are and whatever else is stored: neither task is pinned, and one has published rows."""
    data = {"fingerprint": "part", "partial": True, "task": name}
    stored_rows(row("aaa", [20.0, 20.1], n=2000, **data))
    alone = load_board(packaged()[name], stored_rows.root)
    assert ([r.label for r in alone.rows], [r.label for r in alone.others]) == ([], ["aaa"])
    stored_rows(row("b", [15.0] * 3, n=2000, noise=1, task=name), row("c", [12.0] * 3, n=2000, noise=2, task=name))
    board = load_board(packaged()[name], stored_rows.root)
    assert ([r.label for r in board.rows], [r.label for r in board.others]) == (["b", "c"], ["aaa"])
    for one in (alone, board):
        found = {
            r["method"]: r for r in document(leaderboard([one], stored_rows.root, "json")) if r["kind"] == "measured"
        }
        assert (found["aaa"]["rank_first"], found["aaa"]["comparable"], found["aaa"]["partial_data"]) == (
            None,
            False,
            True,
        )
        text = leaderboard([one], stored_rows.root)
        assert re.search(r"^ +aaa .* yours, not comparable$", text, re.M)
        assert re.search(r"^aaa \(yours\) is not comparable with .*: the data set .* is marked partial\.$", text, re.M)
        latex = re.sub(r"(?m)^%.*$", "", leaderboard([one], stored_rows.root, "latex"))
        apart = latex.split("\\textit{Measured, not comparable}")[1]
        assert re.search(r"aaa, partial data & 59\.\d\d", apart)
        assert "textbf" not in apart
        assert "marked partial" not in latex.split("\\toprule")[0], "the other rows are not on a part"
    assert {k: (v["rank_first"], v["partial_data"]) for k, v in found.items()} == {
        "b": (1, False), "c": (2, False), "aaa": (None, True),
    }  # fmt: skip


def test_a_row_whose_training_met_saddles_says_so(stored_rows):
    task = packaged()["mini-5shot"]

    def trained(one: Row, *solves: dict[str, int]) -> Row:
        made = [msgspec.structs.replace(r, training={"solves": s}) for r, s in zip(one.results, solves, strict=True)]
        return Row(one.label, one.origin, tuple(made))

    counts = [{"adjoint_episodes": 8000, "adjoint_indefinite": count} for count in (0, 3)]
    met = trained(row("a", [15.0, 15.1], n=2000, task=task.name), *counts)
    none = trained(row("b", [14.0], n=2000, task=task.name), {"adjoint_episodes": 9, "adjoint_indefinite": 0})
    stored_rows(met, none, row("c", [12.0], n=2000, task=task.name))
    board = load_board(task, stored_rows.root)
    said = "stopped at a saddle, where the gradient is no minimum's: a (yours) in 3 of 16,000 episodes of meta-training"
    page, latex = page_html(gather([board])), paper_tables([board])
    texts = leaderboard([board], stored_rows.root), overview([board])[0][0].notes[-1], latex, page.replace("&#39;", "'")
    for text in texts:
        assert text.count(said) == 1
        assert text.count("at a saddle") == 1
    assert any("a (yours) in 3 of 16,000" in note for note in compare(*board.rows[:2]).notes)
    assert "a in 3 of 16,000" in row_table(board.row("a")).notes[-1]


def test_a_row_that_was_trained_with_another_gradient_than_it_names_is_shown_without_a_rank(stored_rows):
    """Its numbers stay where they were, and the others' ranks are as if it were not there."""
    task = packaged()["mini-5shot"]
    rows = [
        row(label, [mean] * 3, n=2000, noise=i) for i, (label, mean) in enumerate([("a", 16), ("b", 14), ("c", 12)])
    ]

    def with_series(replaced: tuple[int, int, int]) -> list:
        made = [
            msgspec.structs.replace(r, training={"solves": {"adjoint_episodes": 8, "adjoint_diverged": count}})
            for r, count in zip(rows[0].results, replaced, strict=True)
        ]
        stored_rows(Row("a", "yours", tuple(made)), *rows[1:])
        board = load_board(task, stored_rows.root)
        notes.append(leaderboard([board], stored_rows.root))
        found = document(leaderboard([board], stored_rows.root, "json"))
        return [(r["method"], r["rank_first"]) for r in found if r["kind"] == "measured"]

    notes: list[str] = []
    assert with_series((4, 4, 4)) == [("a", 1), ("b", 2), ("c", 3)], "half of them is not most of them"
    assert "took its place: a (yours) in 12 of 24 episodes" in notes[-1]
    assert with_series((0, 5, 0)) == [("a", None), ("b", 1), ("c", 2)], "one seed of such a kind is in the mean"
    assert "not trained with the gradient that it names, replaced in 5 of 24 episodes: a" in notes[-1].lower()


def test_rows_on_partial_data_rank_where_the_task_is_of_a_part(stored_rows):
    task = packaged()["tiny-pack-5shot"]
    data = {"fingerprint": task.dataset.fingerprint, "partial": True, "task": task.name}
    stored_rows(row("a", [15.0] * 3, n=2000, noise=1, **data), row("b", [12.0] * 3, n=2000, noise=2, **data))
    board = load_board(task, stored_rows.root)
    found = document(leaderboard([board], stored_rows.root, "json"))
    assert [(r["method"], r["rank_first"], r["comparable"], r["partial_data"]) for r in found] == [
        ("a", 1, True, True), ("b", 2, True, True),
    ]  # fmt: skip
    text = leaderboard([board], stored_rows.root)
    assert "The data set was made from less than its source should hold, and is marked partial." in text
    latex = leaderboard([board], stored_rows.root, "latex")
    assert "\\caption{Tiny-ImageNet pack 95+5, 5 shots; data set marked partial}" in latex
    assert "not comparable" not in latex


def test_rows_that_stand_apart_are_compared_by_themselves(stored_rows, call):
    """What the task's other rows say of the variance over seeds is of other episodes."""
    part = {"fingerprint": "part", "partial": True, "n": 200}
    apart = [row("x", [15, 15.4, 14.9], noise=7, **part), row("y", [14, 15, 14.2], noise=8, **part)]
    stored_rows(*apart, *(row(f"r{i}", [14, 14.5, 14.2], n=2000, noise=i) for i in range(5)))
    arguments = ["--task", "mini-5shot", "--results", str(stored_rows.root), "--format", "json"]
    status, out, err = call("compare", "x", "y", *arguments)
    assert not status, err
    assert document(out)[0]["interval_overall"] == pytest.approx(compare(*apart).overall["acc"].interval, abs=DIGITS)
    _, out, _ = call("compare", "r0", "r1", *arguments)
    rows = load_board(packaged()["mini-5shot"], stored_rows.root)
    moderated = rows.ranking.difference(rows.row("r0"), rows.row("r1"))
    assert document(out)[0]["interval_overall"] == pytest.approx(moderated.interval, abs=DIGITS)


def test_stored_rows_say_which_data_are_meant(stored_rows, tmp_path, monkeypatch):
    """A user's rows on other data push nobody out, those on the same data are ranked, newer as they are."""
    monkeypatch.setattr(boards, "packaged_root", lambda: tmp_path / "stored")
    for one in row("s", [14.0], n=2000).results:
        write(tmp_path / "stored", one)
    stored_rows(row("aaa", [20.0], n=2000, fingerprint="other"),
                row("s", [15.0], n=2000, noise=1, provenance={"time": "2026"}),
                row("t", [15.0], n=2000, noise=2, provenance={"time": "2026"}))  # fmt: skip
    board = load_board(packaged()["mini-5shot"], stored_rows.root)
    assert {(r.label, r.origin) for r in board.rows} == {("s", "stored"), ("s", "yours"), ("t", "yours")}
    assert [r.label for r in board.others] == ["aaa"]
    assert board.row("s").origin == "yours"
    stored_rows(row("s", [15.0], n=2000, noise=1, fingerprint="other"))
    board = load_board(packaged()["mini-5shot"], stored_rows.root)
    assert board.row("s") in board.others, "yours, even where it stands apart: it is never taken for the stored one"
    said = leaderboard([board], stored_rows.root)
    assert re.search(r"(aaa \(yours\), s|s \(yours\), aaa) \(yours\) are not comparable with .*: the data differ", said)


def test_latex_keeps_variants_apart_and_says_so(stored_rows):
    names = ("mini-5shot", "mini-5shot+shots=1", "mini-5shot+shots=3", "mini-1shot+shots=3", "mini-5shot+ways=10",
             "mini-held-out-1shot", "mini-held-out-5shot", "mini-1shot")  # fmt: skip
    stored_rows(*(row("m", [15.0], noise=i, task=name) for i, name in enumerate(names)))
    board = [load_board(packaged()[name], stored_rows.root) for name in ("mini-1shot", "mini-5shot")]
    tables = leaderboard(board, stored_rows.root, "latex").split("\\end{table}")[:-1]
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


def test_without_a_task_the_command_shows_the_best_rows_of_each_and_those_of_the_user(call, tmp_path):
    (tmp_path / "glyphs-1shot").mkdir()
    for path in packaged_root().glob("glyphs-1shot/teen.seed-*.json"):
        shutil.copy(path, tmp_path / "glyphs-1shot")
    status, out, _ = call("leaderboard", "--results", str(tmp_path))
    assert not status
    whole = document(call("leaderboard", "--results", str(tmp_path), "--format", "json")[1], "json")
    of = {name: [r for r in whole if r["task"] == name and r["kind"] == "measured" and r["comparable"]]
          for name in {r["task"] for r in whole}}  # fmt: skip
    parts = dict(re.findall(r"^(\S+)\n\n(rank.*?)(?=\n\n\S+\n\n|\n\nMeasured)", out, re.M | re.S))
    assert set(parts) == {name for name, rows in of.items() if rows and not rows[0]["variant_of"]}
    for name, text in parts.items():
        shown = [line.split()[1] for line in text.partition("\n\n")[0].splitlines()[2:]]
        best = [r["method"] for r in of[name] if r["rank_first"] or name.startswith("tiny-pack")][:3]
        assert shown == best + ["teen"] * (name == "glyphs-1shot")
        more = sum(r["task"] == name for r in whole) - len(shown)
        assert f"{more} more row{'s' * (more > 1)}: ifsl-bench leaderboard {name}" in text
    assert len(call("leaderboard", "--full")[1]) > 2 * len(out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["table", "mini-5shot", "mini-regular-5shot"], ["table", "--full", "glyphs-5shot"], ["methods"], ["tasks"],
        ["compare", "lwof", "imprint", "--task", "glyphs-5shot"], ["data", "list"], ["table", "--rank"], ["table"],
        ["data", "stats", "clusters"], ["show", "first"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_json_and_csv_of_every_table_command_are_one_document(arguments, clusters, call, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    first = str(next(packaged_root().glob("glyphs-1shot/*.json")))
    arguments = [first if argument == "first" else argument for argument in arguments]
    found = {}
    for style in PROGRAMS:
        status, out, _ = call(*arguments, "--format", style)
        assert not status
        found[style] = document(out, style)
    assert len(found["json"]) == len(found["csv"]) > 1
    assert [list(r) for r in found["json"]] == [list(r) for r in found["csv"]]


def test_a_run_shows_the_stored_rows_without_options_and_its_own(tmp_path):
    whole = load_board(packaged()["glyphs-5shot"], tmp_path)
    varied = {row.label for row in whole.rows if "." in row.label or "@" in row.label}
    assert len(varied) > 1
    board = whole.usual(["lr+a.gradient=implicit"])
    assert {row.label for row in whole.rows} - {row.label for row in board.rows} == varied - {"lr+a.gradient=implicit"}
    tuned_ones = sum("@" in label for label in varied)
    assert board.remarks[-1] == (
        f"`ifsl-bench table glyphs-5shot` has {len(varied) - 1} more stored rows "
        f"({tuned_ones} tuned, {len(varied) - 1 - tuned_ones} with other options)"
    )
    assert board.usual([]).labels == whole.labels - varied
    tuned = {row.label for row in whole.usual(["lr@tuned-12"]).rows}
    assert tuned == {label for label in varied if "@" in label} | {"imprint", "protonet"}  # nothing to tune in these
    tuned_4 = row("x@tuned-4", [15.0], n=2000, setting="tuned-4")
    mine = replace(whole, rows=(*whole.rows, tuned_4), compared=(*whole.rows, tuned_4))
    beside = mine.usual(["x@tuned-4"])
    *_, none_alike, counts = beside.remarks
    assert beside.labels == whole.labels - varied | {"x@tuned-4"}, "those as published are its context"
    assert f"has {len(varied)} more stored rows ({tuned_ones} tuned, " in counts
    assert none_alike == (
        "No stored row was tuned as yours was (tuned-4): those as published are shown beside it, and ranked apart"
    )
    said = standing(mine.in_setting("tuned-4"), "x@tuned-4")
    assert said[1].startswith("  against the best other row of those ranked with it (tuned-4), ")


def test_a_row_of_one_seed_stands_where_its_differences_on_that_seed_put_it(tmp_path, monkeypatch):
    """Seeds move all rows: mine beats what it is compared with on its seed, and has less than that row over all."""
    monkeypatch.setattr(boards, "packaged_root", lambda: tmp_path / "none")
    best, other = (replace(row(label, means, noise=9), origin="stored")
                   for label, means in (("best", [18, 20, 22]), ("other", [12, 14, 16])))  # fmt: skip
    mine = row("mine", [13], noise=9)
    made = replace(load_board(packaged()["mini-5shot"], tmp_path), rows=(best, other, mine),
                   compared=(best, other, mine), papers=())  # fmt: skip
    table = task_table(made)
    assert [entry.label for entry in table.rows] == ["best", "mine", "other"]
    assert SHARED in table.notes
    assert accuracies(mine).mean() < accuracies(other).mean()
    here, there = accuracies(mine, 1).mean(), accuracies(other, 1).mean()
    assert f"other (stored) with {there:.2f} on seed 0: {here - there:+.2f} ± " in standing(made, "mine")[2]
    said = " ".join(standing(made, "other"))
    assert f"mine (yours) with {here:.2f} on seed 0, where other has {there:.2f}: {there - here:+.2f} ± " in said
    alike = replace(made, rows=(best, other), compared=(best, other))
    assert SHARED not in task_table(alike).notes


def test_tuned_rows_are_compared_with_what_tuned_rows_say_of_seeds(stored_rows, call):
    """The variance over seeds of methods as published is another one; and theirs without a setting are in each."""
    quiet = [row(f"r{i}", [14, 14.01, 14.02], noise=i, setting="paper") for i in range(3, 8)]
    tuned = [row(f"t{i}@tuned-12", [14, 15.5, 13 + i / 9], noise=i, setting="tuned-12") for i in range(3, 8)]
    rows = [*quiet, *tuned, row("plain", [13, 13.1, 13.2], noise=9, setting="every")]
    for a, b, setting in (
        (tuned[0], tuned[1], "tuned-12"),
        (tuned[0], rows[-1], "tuned-12"),
        (quiet[0], quiet[1], "paper"),
        (quiet[0], rows[-1], "paper"),
        (quiet[0], tuned[1], "paper"),
    ):
        found = compare(a, b, rows).overall["acc"]
        assert found == Ranking(rows, setting=setting).difference(a, b, (0, 1, 2)), (a.label, b.label)
    one, other = (Ranking(rows, setting=setting).difference(*tuned[:2]) for setting in ("tuned-12", "paper"))
    assert one.interval != pytest.approx(other.interval, rel=0.05), "or this test would tell nothing"
    stored_rows(*rows)
    board = load_board(packaged()["mini-5shot"], stored_rows.root).in_setting("tuned-12")
    line = next(line for line in paper_tables([board]).splitlines() if line.startswith("t7, tuned"))
    assert r"\textbf" in line, "the best of the tuned rows may be the best of them"


def test_a_row_of_fewer_seeds_is_ranked_beside_the_others_and_moves_none_of_their_ranks():
    """One contributed row of three seeds among rows of five: they keep their five seeds, and it has a rank."""
    rows = [row(f"r{i}", [15 - i / 2 + s / 4 for s in range(5)], noise=i) for i in range(5)]
    few = row("few", [14.6, 14.8, 15.0], noise=9)
    alone, beside = Ranking(rows), Ranking([*rows, few])
    assert beside.seeds == alone.seeds == (0, 1, 2, 3, 4)
    expected, found = ranks(alone.places), ranks(beside.places)
    assert {name: found[name] for name in expected} == expected
    (place,) = [place for place in beside.places if place.row is few]
    assert (place.provisional, place.among) == (False, 6)
    together = Ranking([*(replace(one, results=one.results[:3]) for one in rows), few])
    assert ranks(together.places)["few"] == found["few"], "as among all on the three seeds that they share"
    assert Ranking([*rows[:2], few]).seeds == (0, 1, 2), "two of three are not most"


def test_notes_name_rows_once_and_rows_that_nothing_is_ranked_with_share_a_line(tmp_path, monkeypatch, call):
    monkeypatch.setattr(boards, "packaged_root", lambda: tmp_path / "none")
    for label in ("x", "y", "z"):
        for one in row(label, [15.0], n=2000).results:
            write(tmp_path, one)
    board = load_board(packaged()["mini-5shot"], tmp_path)
    ((line,),) = standings(board, ["x", "y", "z"])
    assert line.startswith("All rows are provisional (1 seed); ranks need three seeds.")
    assert "compare x y --task mini-5shot" in line
    assert len(standings(board, ["x"])[0]) > 1, "one row has its differences"
    mine = row("lr", [15.0], n=2000)
    same = replace(board, rows=(mine, replace(mine, origin="stored")))
    monkeypatch.setattr(Row, "edge", ["weight_decay"])
    (note,) = [note for note in notes_of(same) if "Chosen at an end" in note]
    assert note.endswith("lr (yours): weight_decay; lr (stored): weight_decay.")
