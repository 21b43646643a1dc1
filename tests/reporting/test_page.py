"""The page of results: its numbers are those of the tables, and names that are not ours stay text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import tomllib
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ifsl_bench.analysis import task_results
from ifsl_bench.analysis.comparison import compare_rows
from ifsl_bench.analysis.ranking import Ranking, holm_rejections
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.protocols.metrics import BALANCE_METRIC_NAMES, EPISODE_METRIC_NAMES, Estimate
from ifsl_bench.protocols.tasks.task_files import load_tasks, packaged_tasks
from ifsl_bench.reporting.columns import TableRow
from ifsl_bench.reporting.leaderboard import make_task_table
from ifsl_bench.reporting.page.data import MIN_CURVE_POINT_DISTANCE, _page_row, collect_page, load_results_with_variants
from ifsl_bench.reporting.page.page import SCRIPT_FILES, escape_script_json, render_page
from ifsl_bench.reporting.table import render_tables
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.store.schema import Result, write_result
from tests.store.result_fields import result as plain
from tests.store.test_calibrated_results import result

KEPT = Path(__file__).parents[2] / "docs" / "leaderboard.html"
ASSETS = resources.files("ifsl_bench.reporting.page") / "assets"
PAIRS = 5.1e-5  # the page's differences have four decimals
TASK = "mini-5shot"
HOSTILE = (
    "<img src=x onerror=hacked=1>&lt;b&gt;</script><script>hacked=2</script><!--<script>"
    '"\'`{{7*7}} %{x} <a href="javascript:hacked=3">x</a>'
)


def fake_result(label: str, seed: int, **changes) -> Result:
    """A result of made-up margins; "gap" and "shift" of these are among the changes."""
    of = {name: changes.pop(name) for name in ("gap", "shift") if name in changes}
    fields = {
        "training": {"validation": {"1000": 50.0 + seed, "500": 40.0 + seed}, "kept_step": 1000},
        "cost": {"parameters": 12, "training_seconds": 3.0 + seed % 2, "evaluation_seconds": 1.0,
                 "episodes_per_second": 250.0 - seed},
        "provenance": {"command": f"ifsl-bench run --method x --seed {seed}", "commit": "c0ffee", "device": "a CPU",
                       "version": "0.1.0", "time": f"2026-01-0{seed + 1}T00:00:00+00:00", "libraries": {"torch": "2"}},
        "setting": "paper",
    }  # fmt: skip
    return msgspec.structs.replace(result(label, seed, n=200, **of), **{**fields, **changes})


def write_results(root: Path, hostile: str = HOSTILE) -> None:
    """Ranked rows, one of a hostile name among them; a row with options, one with one seed, and tuned ones."""
    for seed in range(3):
        write_result(root, fake_result("a", seed, gap=2.4))
        write_result(root, fake_result("b", seed, gap=2.3, shift=0.6))
        write_result(root, fake_result("c", seed, gap=1.2, training={}, setting="every"))
        write_result(root, fake_result("a.x=2", seed, gap=1.8, method="a", options={"x": 2}))
        write_result(
            root, fake_result(hostile, seed, gap=2.1, provenance={"command": f"run {hostile}", "commit": hostile})
        )
        write_result(root, fake_result("a@tuned-12", seed, gap=2.6, setting="tuned-12"))
    write_result(root, fake_result("d", 0, gap=2.0))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    write_results(root)
    return root


@pytest.fixture(scope="module")
def board(results):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_results, "packaged_results_folder", lambda: results / "none")
        return load_task_results(load_tasks(TASK)[0], results)


@pytest.fixture(scope="module")
def text(board):
    return render_page(collect_page([board]))


class Reader(HTMLParser):
    """Tables as a browser would read them, the data of the scripts, and every element's name and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[tuple[dict[str, str | None], list[list[str]]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.article: dict[str, str | None] = {}
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "article":
            self.article = dict(attrs)
        elif tag == "table":
            self.tables.append((self.article, []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][1][-1].append("")
        elif tag == "script":
            self.scripts.append((dict(attrs), ""))
        self.inside = [tag] if tag in ("td", "th", "script") else [] if tag == "tr" else self.inside

    def handle_endtag(self, tag):
        self.article = {} if tag == "article" else self.article
        self.inside = [] if tag in ("td", "th", "tbody", "script") else self.inside

    def handle_data(self, data):
        if self.inside == ["script"]:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self.inside:
            self.tables[-1][1][-1][-1] += data


@pytest.mark.parametrize("setting", ["paper", "tuned-12"])
def test_the_tables_are_those_of_the_command(board, text, setting):
    reader = Reader(text)
    (table,) = [rows for about, rows in reader.tables if about.get("data-setting") == setting]
    printed = make_task_table(board.select_setting(setting), full=True, ranked=True)
    headings = [
        cell.replace("Δ", "Delta").replace("Deltaa", "Delta_a").replace("Deltab", "Delta_b") for cell in table[0]
    ]
    assert set(headings) <= set(printed.headings())
    assert {"rank", "method", "Acc.", "cal. Acc.", "AUSUC", "to the best", "seeds"} <= set(headings)
    at = [printed.headings().index(heading) for heading in headings]
    expected = [[line[i].text for i in at] for line in printed.cells()]
    assert [[cell.strip() for cell in line] for line in table[1:]] == expected
    assert len(expected) == (17 if setting == "paper" else 13), "measured and published rows"
    plain = re.sub(r"\s+", " ", render_tables([printed], "text"))
    assert re.sub(r"\s+", " ", " ".join(line.text for line in printed.cells()[0])).strip() in plain


def data_of(text: str) -> dict:
    ((about, content),) = [script for script in Reader(text).scripts if script[0].get("type") == "application/json"]
    assert about["id"] == "data"
    return json.loads(content)


def test_differences_are_those_of_compare_and_marked_as_ranks_have_them(board, text):
    data = data_of(text)
    (board_data,) = [board for board in data["boards"] if board["setting"] == "paper"]
    rows = data["rows"]
    ranked = {row.label: row for row in board.select_setting("paper").ranking.family}
    assert set(ranked) == {"a", "b", "c", HOSTILE} == {rows[number]["label"] for number in board_data["ranked"]}
    for metric in ("acc", "calibrated_acc"):
        pairs = board_data["pairs"][metric]
        assert len(pairs) == 6
        p = []
        for a, b, mean, interval, value, _, seeds, fixed in pairs:
            labels = rows[a]["label"], rows[b]["label"]
            delta = compare_rows(
                ranked[labels[0]], ranked[labels[1]], board.select_setting("paper").comparable_rows
            ).overall_differences[metric]
            assert (mean, interval) == (pytest.approx(delta.mean, abs=PAIRS), pytest.approx(delta.interval, abs=PAIRS))
            assert value == pytest.approx(delta.p_value, rel=5.1e-3, abs=1e-15)  # three digits
            assert (data["texts"][seeds], fixed) == ("0, 1, 2", 0)
            p += [
                delta.p_value / 2 if delta.mean > 0 else 1 - delta.p_value / 2,
                delta.p_value / 2 if delta.mean < 0 else 1 - delta.p_value / 2,
            ]
        rejections = holm_rejections(np.array(p)).reshape(-1, 2).any(1)
        assert [pair[5] for pair in pairs] == rejections.tolist()
        assert rejections.sum() > 0
        ranks = {place.row.label: place.rank_interval for place in Ranking(list(ranked.values()), metric).ranked_rows}
        for number in board_data["ranked"]:
            label = rows[number]["label"]
            better = sum(p[5] for p in pairs if (p[0] == number and p[2] < 0) or (p[1] == number and p[2] > 0))
            assert ranks[label].best_rank == 1 + better


def test_the_numbers_are_those_that_the_commands_print(call, results, text, monkeypatch):
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: results / "none")
    rows = [row for row in data_of(text)["rows"] if row.get("setting") != "best of 12 trials"]
    status, out, _ = call("table", TASK, "--rank", "--full", "--results", str(results), "--format", "json")
    assert status == 0
    printed = [record | {"source": record["source"].removeprefix("published: ")} for record in json.loads(out)]
    assert sorted((row["label"], row["source"]) for row in rows) == sorted((p["method"], p["source"]) for p in printed)
    for record in printed:
        (row,) = [row for row in rows if (row["label"], row["source"]) == (record["method"], record["source"])]
        for name in (*EPISODE_METRIC_NAMES, *BALANCE_METRIC_NAMES):
            assert row["values"].get(name, [None, None]) == pytest.approx(
                [record[name], record[f"{name}_interval"]], abs=6e-5
            )
        assert len(row.get("seeds", [])) == (record["seeds"] or 0)


def test_points_curves_seeds_and_costs_follow_from_the_results(board, text):
    data = data_of(text)
    (row,) = [row for row in data["rows"] if row["label"] == "a"]
    (measured,) = [row for row in board.rows if row.label == "a"]
    assert row["by_seed"]["acc"] == [round(r.summary["acc"]["mean"], 2) for r in measured.results]
    hits = np.array(
        [[r.episodes.read_column(n).mean() for n in ("base_joint", "novel_joint")] for r in measured.results]
    )
    assert row["point"] == pytest.approx(hits.mean(0) * 4, abs=5.1e-4)  # three decimals
    hits = np.array(
        [[r.episodes.read_column(f"calibrated_{n}").mean() for n in ("base", "novel")] for r in measured.results]
    )
    assert row["calibrated"] == pytest.approx(hits.mean(0) * 4, abs=5.1e-4)  # three decimals
    base, novel = np.array(row["curve"])
    assert (np.diff(base) <= 0).all()
    assert (np.diff(novel) >= 0).all()
    steps = np.hypot(np.diff(base), np.diff(novel))
    assert (
        steps[:-1] >= MIN_CURVE_POINT_DISTANCE - 0.1 * math.sqrt(2)
    ).all()  # one decimal, at either end and in both coordinates
    nearest = np.hypot(base - row["point"][0], novel - row["point"][1]).min()
    assert nearest <= MIN_CURVE_POINT_DISTANCE + steps.max() / 2, "the argmax lies on the curve"
    assert row["validation"] == [[[500, 1000], [40.0 + seed, 50.0 + seed]] for seed in range(3)]
    assert row["cost"] == {"seconds": 4.0, "milliseconds": 4.0, "parameters": 12.0}


def test_every_row_says_where_it_comes_from(text):
    data = data_of(text)
    (row,) = [row for row in data["rows"] if row["label"] == "a"]
    texts = data["texts"]
    shared, seeds = ([(texts[k], texts[v]) for k, v in part] for part in (row["origin"][0], row["origin"][1][1]))
    shared, second = dict(shared), dict(seeds)
    assert shared["commit"] == "c0ffee"
    assert shared["device"] == "a CPU"
    assert shared["digest of the episodes"] == "d200"
    assert second["command"] == "ifsl-bench run --method x --seed 1"
    assert second["file"] == "mini-5shot/a.seed-1.json"
    published = [row for row in data["rows"] if "origin" not in row]
    assert len(published) == 11
    assert any("Attention Attractor Networks" in data["citations"][row["cited"]][0] for row in published)


def test_a_hostile_name_is_text_in_html_and_in_scripts(text):
    reader = Reader(text)
    names = [line[1].strip() for about, rows in reader.tables if about for line in rows]
    assert names.count(HOSTILE) == 1
    assert not [about for tag, about in reader.elements if tag == "img" or "onerror" in about]
    assert all(not (about.get("href") or "").startswith("javascript") for _, about in reader.elements)
    assert "{{7*7}}" in text
    (data,) = [content for about, content in reader.scripts if about.get("type") == "application/json"]
    assert not set("<>&") & set(data)
    assert HOSTILE in [row["label"] for row in json.loads(data)["rows"]]
    assert len(reader.scripts) == 1 + 1 + len(SCRIPT_FILES), "the data, Plotly and ours: no script of anybody else's"


@pytest.mark.parametrize("value", ["</script><!--<script&lt;", "a\u2028b\u2029c", "ü≤"])
def test_json_in_a_script_ends_nothing_and_is_the_same(value):
    script = escape_script_json({value: [value]})
    assert json.loads(script) == {value: [value]}
    assert not set("<>&\u2028\u2029") & set(script)


def test_only_the_scripts_that_are_meant_may_run_and_nothing_is_fetched(text):
    reader = Reader(text)
    (policy,) = [about["content"] for tag, about in reader.elements if about.get("http-equiv")]
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    assert rules["default-src"] == "'none'"
    ours = [content for about, content in reader.scripts if "type" not in about]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in ours]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    for tag, about in reader.elements:
        for name in ("src", "href", "action", "data"):
            assert (about.get(name) or "#").startswith("#"), (tag, about)
        assert not [name for name in about if name.startswith("on")]


def test_plotly_is_the_file_of_the_package_that_is_named():
    about = tomllib.loads((ASSETS / "plotly.toml").read_text())
    content = (ASSETS / about["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == about["sha256"]
    assert f"v{about['version']}\n" in content[:200].decode()
    assert "MIT License" in (ASSETS / "plotly-license.txt").read_text()


def test_the_command(call, results, tmp_path):
    out = tmp_path / "page.html"
    status, output, _ = call("report", TASK, "--results", str(results), "--out", str(out))
    assert status == 0
    assert str(out) in output
    assert f'data-task="{TASK}"' in out.read_text()
    status, _, error = call("report", TASK, "--out", str(tmp_path))
    assert (status, error.count("\n")) == (2, 1)
    assert "is a folder" in error
    status, _, error = call("report", TASK, "--results", str(results), "--out", str(tmp_path / "no" / "page.html"))
    assert (status, error) == (0, "")
    assert (tmp_path / "no" / "page.html").read_text() == out.read_text()
    status, _, error = call("report", TASK, "--results", str(results), "--out", str(out / "page.html"))
    assert (status, error.count("\n"), f"cannot write {out}" in error, "--out" in error) == (2, 1, True, True)
    (tmp_path / "none").mkdir()
    for folder, message in (("none", "no results of task 'cub-1shot'"), ("nowhere", "there is no folder ")):
        status, _, error = call("report", "cub-1shot", "--results", str(tmp_path / folder))
        assert (status, error.count("\n")) == (2, 1)
        assert message in error


@pytest.mark.parametrize("task", ["mini-regular-5shot", "tiny-pack-5shot"])
def test_results_without_base_classes_or_calibration_have_gaps(task, tmp_path, monkeypatch):
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "none")
    for seed in range(3):
        write_result(tmp_path, plain("old", seed, np.arange(100) % 9 + seed, task))
        write_result(tmp_path, plain("older", seed, np.arange(100) % 7 + seed, task))
    page = collect_page([load_task_results(load_tasks(task)[0], tmp_path)])
    row = next(row for row in page.rows if row.origin)
    assert (row.curve, row.calibrated, row.validation, row.cost) == (None, None, [], {})
    assert (row.point is None) == task.startswith("mini-regular")
    assert page.sections[0].row_pairs.keys() == {"acc"}
    data = data_of(render_page(page))
    assert [data["rows"][number]["label"] for number in data["boards"][0]["ranked"]] == ["old", "older"]


def test_no_file_that_results_name_as_their_method_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for name in (f"{tmp_path}/evil.py:Evil", "evil:Evil"):
        write_result(tmp_path / "results", fake_result(name, 0, method=name))
    monkeypatch.syspath_prepend(tmp_path)
    assert render_page(collect_page([load_task_results(load_tasks(TASK)[0], tmp_path / "results")]))
    assert not (tmp_path / "ran").exists()


def test_installed_methods_and_papers_are_cited(text, tmp_path, monkeypatch):
    pytest.importorskip("ifsl_bench.plugin.bibliography")
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path)
    write_result(tmp_path / "results", fake_result("lr+a.gamma=1e-05", 0, method="attractor", options={"gamma": 1e-5}))
    data = data_of(render_page(collect_page([load_task_results(load_tasks(TASK)[0], tmp_path / "results")])))
    cited = {row["label"]: data["citations"][row["cited"]] for row in data["rows"]}
    assert "@inproceedings{ren2019" in cited["lr+a.gamma=1e-05"][1]
    assert "@inproceedings{ren2019" in cited["mlp"][1], "a published row"
    assert data_of(text)["citations"][0][1] == "", "of a method that nobody knows"


@pytest.mark.slow("the whole page is built from all stored results")
def test_the_page_that_is_kept_is_the_one_of_the_stored_results():
    if not KEPT.exists():
        pytest.skip("none is kept")
    made_now = render_page(
        collect_page(load_results_with_variants(packaged_tasks().values(), packaged_results_folder(), named=False))
    )
    assert KEPT.read_text(encoding="utf-8") == made_now, (
        "ifsl-bench report --results results --out docs/leaderboard.html"
    )


def test_a_published_row_cites_its_method_beside_the_paper_that_prints_it(board):
    page = collect_page([board])
    (row,) = [row for row in page.rows if row.label == "protonet" and row.source == "ren2019"]
    assert "ren2019" in page.citations[row.cited].bibtex
    assert "snell2017" in page.citations[row.cited_method].bibtex
    assert next(row for row in page.rows if row.label == "lr+a").cited_method is None, "the same paper"


def test_a_seed_without_validation_keeps_its_place(tmp_path, monkeypatch):
    """Scripts name the seed of a curve by its place; and what has cost is known of the other seeds."""
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "none")
    for seed in range(3):
        write_result(tmp_path, fake_result("a", seed, **({"training": {}, "cost": {}} if seed == 1 else {})))
    (row,) = (row for row in collect_page([load_task_results(load_tasks(TASK)[0], tmp_path)]).rows if row.origin)
    assert row.seeds == [0, 1, 2]
    assert [bool(steps) for steps, _ in row.validation] == [True, False, True]
    assert row.cost["seconds"] == 4.0


def test_a_number_is_rounded_once():
    """0.37496 is 0.37 in a table; of 0.375, which four digits make of it, a browser makes 0.38; or 1.3 of 1.24996."""
    (task,) = load_tasks(TASK)
    for numbers in ((60.37496, 0.37496), (12.49996, 1.24996)):
        entry = TableRow(task, True, "x", {"acc": Estimate(*numbers)}, "stored")
        assert _page_row(entry, False, {}, {}).values["acc"] == numbers
