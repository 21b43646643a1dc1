"""Tables of tasks in sessions: published rows apart, each session's accuracy, the lazy row."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from scipy.integrate import trapezoid

from ifsl_bench.analysis.comparison import compare_rows, describe_verdict
from ifsl_bench.analysis.task_results import load_results_by_name, load_task_results
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.reporting.comparison_tables import comparison_table
from ifsl_bench.reporting.detail_tables import seed_table
from ifsl_bench.reporting.latex import make_latex_tables
from ifsl_bench.reporting.leaderboard import make_short_task_tables, make_task_tables
from ifsl_bench.reporting.notes import table_notes
from ifsl_bench.reporting.table import render_tables
from ifsl_bench.reporting.terminal import print_tables
from ifsl_bench.store.published import ONE_ORDER_NOTE, SOURCE_KINDS, read_published_rows
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.utils.files import Paths

LIST = Path(__file__).parents[3] / "shared" / "fscil" / "published.json"
TASKS = {"mini-imagenet": "mini-sessions", "cifar100": "cifar100-sessions", "cub200": "cub-sessions"}


def task_of(name: str, count: int, ways: int) -> Task:
    """A task of that name, whose data need not be there."""
    plain = packaged_tasks()["tiny-features-sessions"]
    sessions = msgspec.structs.replace(plain.sessions, count=count, ways=ways)
    return msgspec.structs.replace(plain, name=name, sessions=sessions)


@pytest.mark.skipif(not LIST.exists(), reason="needs the published rows in ../shared/fscil")
def test_published_rows_are_those_of_the_list():
    """Accuracies, kind, base and novel accuracy of each; average and PD as the list has them, to its rounding."""
    listed = {(entry["data"], entry["method"], *entry["sessions"]): entry for entry in json.loads(LIST.read_text())}
    rows = [(data, row) for data, name in TASKS.items() for row in read_published_rows(f"{name}-published")]
    kinds = {"paper": "paper", "readme": "authors readme", "log": "authors log", "cited": "cited by another paper",
             "rerun": "rerun by another paper"}  # fmt: skip
    assert set(kinds) == set(SOURCE_KINDS)
    assert len({id(listed[data, row.label, *row.sequence.after]) for data, row in rows}) == len(rows) == 107
    for data, row in rows:
        entry = listed[data, row.label, *row.sequence.after]
        assert kinds[row.sequence.kind] == entry["kind"]
        assert row.values["acc"] == pytest.approx(entry["average"], abs=0.0101)
        assert row.values["pd"] == pytest.approx(entry["pd"], abs=0.0101)
        assert row.sequence.novel == entry.get("novel", [])
        assert row.sequence.seeds == entry.get("seeds")
        assert (row.sequence.novel_seen == "may") == entry.get("contaminated_pretraining", False)
        assert (" runs" in row.note) == (" runs" in entry["source"] + entry.get("note", "")), "means of several"


def test_a_published_row_has_its_gain_over_its_own_lazy_row():
    (row,) = (row for row in read_published_rows("mini-sessions-published") if row.label == "CEC")
    lazy = [row.values["first"] * 60 / (60 + 5 * t) for t in range(9)]
    assert row.values["gain"] == pytest.approx(np.mean(row.sequence.after) - np.mean(lazy))
    assert row.values["gain"] == pytest.approx(2.3, abs=0.05)


@pytest.mark.parametrize("style", ["text", "json"])
def test_published_rows_stand_in_a_block_of_their_own(style, tmp_path):
    board = load_task_results(task_of("mini-sessions", 8, 5), tmp_path)
    text = render_tables(make_task_tables(board, full=True), style)
    assert all(row.protocol == ONE_ORDER_NOTE for row in board.published_rows)
    if style == "json":
        records = {record["method"]: record for record in json.loads(text)}
        assert len(records) == len(board.published_rows) == 50
        fact = records["FACT (released log)"]
        assert (fact["published_as"], fact["chosen_on_test"], fact["knows_classes"]) == ("log", True, True)
        assert [fact[f"a_{t}"] for t in (0, 8)] == [76.6, 50.22]
        assert records["Joint-CNN"]["keeps_images"] == "all"
        assert records["BiMC"]["novel_seen"] == "may"
        flags = ("chosen_on_test", "keeps_images", "knows_classes", "novel_seen")
        assert [records["SPPR"][flag] for flag in flags] == [None] * 4, "its README says nothing of these"
        assert not any("rank_first" in record for record in records.values())
    else:
        assert text.startswith("mini-sessions: published numbers\n")
        assert "They are of one order of the classes and one support set." in text
        assert "EEIL*, Ft-CNN, iCaRL*, Joint-CNN, NCM* (LUCIR), TOPIC (AL-MML) (tao2020): means of 10 runs." in text
        assert [line.split("  ")[0] for line in text.splitlines() if line.startswith("FACT")][:3] == [
            "FACT", "FACT (released log)", "FACT (rerun by M2SD)"
        ]  # fmt: skip


def stored_counts(label: str) -> tuple[np.ndarray, np.ndarray]:
    """Hits [seeds, n, columns] and queries [n, T + 1] of a stored row on tiny-features-sessions."""
    results = load_results_by_name("tiny-features-sessions", Paths.locate()).find_row(label).results
    counts = [result.to_hit_counts() for result in results]
    return np.stack([c.hits for c in counts]).astype(float), counts[0].queries.astype(float)


def test_full_tables_have_the_accuracy_after_each_session(call):
    _, out, _ = call("table", "tiny-features-sessions", "--method", "teen", "--full", "--format", "json")
    teen, lazy = json.loads(out)
    hits, queries = stored_counts("teen")
    rows, _ = np.tril_indices(10)
    for t in range(10):
        acc = 100 * hits[..., rows == t].sum(-1).mean(0) / queries[:, : t + 1].sum(1)
        orders = acc.reshape(100, 4).mean(1)
        assert teen[f"a_{t}"] == pytest.approx(orders.mean(), abs=1e-4)
        assert teen[f"a_{t}_interval"] == pytest.approx(stats.t.ppf(0.975, 99) * stats.sem(orders), abs=1e-4)
        of_lazy = 100 * hits[..., 0].mean(0) / queries[:, : t + 1].sum(1)
        assert lazy[f"a_{t}"] == pytest.approx(of_lazy.mean(), abs=1e-4)
    assert (lazy["method"], lazy["source"]) == ("lazy", "computed")
    assert teen["gain"] == pytest.approx(teen["acc"] - lazy["acc"], abs=1e-4)
    assert (lazy["novel_as_base"], lazy["base_as_novel"], lazy["state_bytes_per_class"]) == (100, 0, 0)
    _, text, _ = call("table", "tiny-features-sessions", "--method", "teen", "--full")
    assert [word for word in text.splitlines()[2].split() if word.startswith("A_")] == [f"A_{t}" for t in range(10)]
    _, text, _ = call("table", "tiny-features-sessions", "--method", "teen")
    assert [word for word in text.splitlines()[2].split() if word.startswith("A_")] == ["A_0", "A_T"]


@pytest.mark.parametrize("style", ["text", "markdown"])
def test_harmonic_mean_stands_beside_base_and_novel_accuracy_and_gacc_beside_the_average(call, style):
    _, out, _ = call("table", "tiny-features-sessions", "--method", "teen", "--format", style)
    heads, teen = ([cell.strip() for cell in re.split(r"\||  +", line) if cell.strip()] for line in out.splitlines()
                   if line.strip("| ").startswith(("method ", "teen ")))  # fmt: skip
    shown = [float(teen[heads.index(name)].split()[0]) for name in ("base", "novel", "harmonic", "gAcc")]
    assert heads[(at := heads.index("base")) : at + 3] == ["base", "novel", "harmonic"]
    assert heads[1:4] == ["Avg.", "cal. Acc.", "gAcc"], "the average is mostly of base queries"
    hits, queries = stored_counts("teen")
    rows, columns = np.tril_indices(10)
    acc = np.full((10, 10), np.nan)
    acc[rows, columns] = 100 * (hits.mean(0) / queries[:, columns]).mean(0)
    base, novel = acc[9, 0], (100 * hits[..., 46:].sum(-1).mean(0) / queries[:, 1:].sum(1)).mean()
    weights = np.linspace(0, 95 / 5, 100_001)
    sessions = [(weights * acc[t, 0] + acc[t, 1 : t + 1].sum()) / (weights + t) for t in range(1, 10)]
    gacc = (acc[0, 0] + sum(trapezoid(values, weights) / weights[-1] for values in sessions)) / 10
    assert shown == pytest.approx([base, novel, 2 * base * novel / (base + novel), gacc], abs=0.0051)


def test_terminals_leave_out_other_columns_first():
    table = make_task_tables(load_results_by_name("tiny-features-sessions", Paths.locate()))[0]
    heads = {}
    for width in (80, 120):
        screen = io.StringIO()
        print_tables([table], Console(file=screen, width=width))
        heads[width] = screen.getvalue().splitlines()[2].split()
    assert heads[80] == ["method", "Avg.", "gAcc", "harmonic", "seeds", "source"]
    assert heads[120] == ["method", "Avg.", "cal.", "Acc.", "gAcc", "base", "novel", "harmonic", "seeds", "source"]


@pytest.mark.parametrize("command", [["table"], ["table", "--rank"]], ids="-".join)
def test_each_a_0_has_its_lazy_row_which_has_no_rank(command, call):
    _, out, _ = call(*command, "tiny-features-sessions", "--format", "json")
    rows = {row["method"]: row for row in json.loads(out)}
    named = ("anil", "imprint", "protonet", "lda", "lwof", "castle", "acastle", "cec")
    assert {name for name in rows if name.startswith("lazy")} == {f"lazy ({method})" for method in named}
    for name, of in (("lazy (anil)", ["anil", "lr", "lr+a", "lr+s"]), ("lazy (imprint)", ["imprint", "ncm", "teen"])):
        assert {rows[label]["first"] for label in of} == {rows[name]["first"]}
        assert rows[name].get("rank_first") is None
    _, text, _ = call(*command, "tiny-features-sessions")
    assert "lazy (imprint): the A_0 of imprint, ncm, teen." in text


@pytest.mark.parametrize("command", [("methods",), ("run", "--task", "tiny-features-sessions", "--method")])
def test_asking_for_the_lazy_model_as_a_method_says_where_its_row_is(command, call):
    status, _, err = call(*command, "lazy")
    assert (status, err.count("\n")) == (2, 1)
    _, out, _ = call(*re.search("'ifsl-bench (.*)'", err)[1].split())
    assert re.search(r"^lazy ", out, re.MULTILINE)


def test_latex_has_a_column_for_each_session(call):
    _, out, _ = call("table", "tiny-features-sessions", "--format", "latex")
    lines = [line for line in out.splitlines() if not line.startswith("%")]
    (head,) = (at for at, line in enumerate(lines) if r"\multicolumn{10}{c}{Acc. after each session" in line)
    assert [cell.strip() for cell in lines[head + 1].split("&")[1:11]] == list("0123456789")
    widths = {line.count("&") for line in lines if line.endswith(r"\\")}
    assert widths == {13, 4}, "Model, A_0 to A_9, average, PD and gain; and the line of headings"
    (teen,) = (line for line in lines if line.startswith("TEEN & "))
    _, record, _ = call("table", "tiny-features-sessions", "--method", "teen", "--format", "json")
    row = json.loads(record)[0]
    numbers = [float(cell.split("$")[0].strip(" \\")) for cell in teen.split("&")[1:]]
    names = [*(f"a_{t}" for t in range(10)), "acc", "pd", "gain"]
    assert numbers == pytest.approx([row[name] for name in names], abs=0.005)


@pytest.mark.slow("rows of several tasks are ranked")
def test_latex_in_full_has_more_columns_and_explains_those_there(call):
    command = ("table", "tiny-features-sessions", "--method", "teen", "--format")
    plain, full = (call(*command, "latex", *more)[1].splitlines() for more in ([], ["--full"]))
    row = json.loads(call(*command, "json")[1])[0]
    explained = [re.findall(r"(?:^%|;) ([\w/.]+)[^;]*:", next(line for line in lines if line.startswith("% Avg.")))
                 for lines in (plain, full)]  # fmt: skip
    assert explained == [["Avg.", "PD", "lazy", "gain"],
                         ["Avg.", "PD", "base", "gAcc", "lazy", "gain", "bytes/class"]]  # fmt: skip
    heads = next(line for line in full if "multirow" in line and "Avg." in line)
    names = re.findall(r"\{\*\}\{([\w. /]+?)(?: \$\\[a-z]+\$)?\}", heads)
    assert names == [
        "Model", "Avg.", "gAcc", "PD", "gain", "base", "novel", "harmonic", "cal. Acc.", "bytes/class"
    ]  # fmt: skip
    teen, whole = (next(line for line in lines if line.startswith("TEEN & ")) for lines in (plain, full))
    numbers = [float(re.search(r"-?[\d,.]+", cell).group().replace(",", "")) for cell in whole.split(" & ")[12:]]
    fields = ("gacc", "pd", "gain", "base", "novel", "harmonic", "calibrated_acc", "state_bytes_per_class")
    assert whole.startswith(teen.split(" & ")[0])
    assert teen.split(" & ")[1:12] == whole.split(" & ")[1:12]
    assert numbers == pytest.approx([row[name] for name in fields], abs=0.0051)
    assert {line.count("&") for line in full if line.endswith(r"\\")} == {19, 10}


@pytest.mark.slow("rows of several tasks are ranked")
def test_latex_and_compare_say_which_rows_keep_images(call):
    _, out, _ = call("table", "glyphs-sessions", "--format", "latex")
    rows = [line for line in out.splitlines() if line.endswith(r"\\")]
    assert any(line.startswith("Upper bound, keeps all images & ") for line in rows)
    stored = json.loads(call("table", "glyphs-sessions", "--format", "json")[1])
    kept = sum("memory=supports" in row["method"] for row in stored)
    assert kept
    assert sum("keeps" in line for line in rows) == 1 + kept
    task = ("--task", "glyphs-sessions")
    _, out, _ = call("compare", "ncm", "upper-bound", *task)
    assert out.count("\nNote: upper-bound (stored) keeps all images of earlier sessions.\n") == 1
    assert "keeps" not in call("compare", "ncm", "teen", *task)[1]


def test_latex_marks_what_sets_published_rows_apart(tmp_path):
    text = make_latex_tables([load_task_results(task_of("cub-sessions-published", 10, 10), tmp_path)])
    (line,) = (line for line in text.splitlines() if line.startswith("NC-FSCIL"))
    assert line.startswith("NC-FSCIL (released log)$^{t,c,p}$ & 80.45 & 75.98 & ")
    assert r"\textit{Published: Yang et al. 2023}" in text
    assert "c: the number of classes is known beforehand" in text


def test_show_has_every_metric_after_each_session_plain_and_with_the_bias(call):
    _, out, _ = call("show", "lr", "tiny-features-sessions", "--format", "json")
    records = [record for record in json.loads(out) if record["session"] is not None]
    plain, biased = records[:10], records[10:]
    counts = (
        load_results_by_name("tiny-features-sessions", Paths.locate()).find_row("lr").results[0].to_hit_counts()
    )  # as of all its seeds
    for rows, hits, as_base, prefix in (
        (plain, counts.hits, counts.novel_as_base, ""),
        (biased, counts.calibrated_hits, counts.calibrated_novel_as_base, "calibrated_"),
    ):
        queries = counts.queries.astype(float)
        last = rows[9]
        assert last["session"] == 9
        assert last[f"{prefix}base"] == pytest.approx((100 * hits[:, 45] / queries[:, 0]).mean(), abs=1e-3)
        novel = 100 * hits[:, 46:].sum(1) / queries[:, 1:].sum(1)
        assert last[f"{prefix}novel"] == pytest.approx(novel.mean(), abs=1e-3)
        assert last[f"{prefix}learned"] == pytest.approx((100 * hits[:, 54] / queries[:, 9]).mean(), abs=1e-3)
        share = (100 * as_base[:, 8] / queries[:, 1:].sum(1)).mean()
        assert last[f"{prefix}novel_as_base"] == pytest.approx(share, abs=1e-3)
        assert rows[0][f"{prefix}novel"] is None
    _, text, _ = call("show", "lr", "tiny-features-sessions")
    assert "lr, after each session, with one bias on all novel logits" in text
    assert "after each session" not in call("show", "lr", "glyphs-5shot")[1]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("tiny-features-sessions", "novel/val and base/val"),
        ("mini-sessions", "base/val, with hidden base classes in place of novel ones"),
        ("glyphs-5shot+base-classes=20", "novel/val and base/val"),
    ],
)
def test_a_row_and_a_result_say_what_was_chosen_on(call, task, said):
    file = packaged_results_folder() / task / "lr.seed-0.json"
    for arguments in (("lr", task), (str(file),)):
        status, text, err = call("show", *arguments)
        assert status == 0, err
        assert re.search(r"^validated on +(.+)$", text, re.M)[1] == said


def test_tables_and_comparisons_say_what_their_intervals_hold_fixed(call):
    """The options that grids chose; models in a table."""
    options, task = "the chosen options of", ("--task", "tiny-features-sessions")
    assert f"the base and novel classes and {options} lr." in call("compare", "lr", "teen", *task)[1]
    assert "every interval holds fixed the base and novel classes." in call("compare", "ncm", "teen", *task)[1]
    _, out, _ = call("table", "tiny-features-sessions")
    fixed = re.search(
        f"Intervals hold fixed the trained models, the test images, the base and novel classes and {options} (.*)\\.",
        out,
    )
    assert {"lda", "lr"} <= {*fixed[1].split(", ")} <= {"lda", "lr", "lr.memory=supports", "mlp", "subspace"}
    assert options not in call("table", "tiny-features-sessions", "--method", "ncm,teen")[1]


@pytest.mark.slow("all stored rows in sessions are read")
def test_what_is_said_of_sessions_names_orders_and_sequences(call):
    task = "tiny-features-sessions"
    for command, said in (
        (("compare", "ncm", "teen", "--task", task), "no interval over classes: 100 orders with 45 novel classes"),
        (("table", task, "--format", "latex"), "confidence for all rows at once, over orders and training seeds."),
        (("leaderboard", task), "Differences vary over orders and over training seeds"),
    ):
        status, out, err = call(*command)
        assert status == 0, err
        text = " ".join(out.split())
        assert said in text
        assert not re.search("episodes(?! of meta-training)", text)


@pytest.mark.parametrize(
    ("tasks", "over"),
    [
        (["tiny-features-sessions"], "over orders,"),
        (["tiny-features-5shot", "tiny-features-sessions"], "over episodes or orders,"),
    ],
)
def test_the_overview_says_what_intervals_are_over(tasks, over):
    assert over in make_short_task_tables([load_results_by_name(task, Paths.locate()) for task in tasks])[1]


def test_rows_are_compared_with_lazy_ones_as_tables_call_them(call):
    """A row's own lazy model and that of another one; their averages stand in the table."""
    table = json.loads(call("table", "tiny-features-sessions", "--format", "json")[1])
    average = {row["method"]: row["acc"] for row in table}
    name = "lazy (anil)"  # it has the A_0 of lr+a
    for a, b, difference in (
        ("lr+a", "lazy", average["lr+a"] - average[name]),
        ("ncm", name, average["ncm"] - average[name]),
        (name, "ncm", average[name] - average["ncm"]),
    ):
        status, out, err = call("compare", a, b, "--task", "tiny-features-sessions", "--format", "json")
        assert status == 0, err
        record = json.loads(out)[0]
        assert record["difference"] == pytest.approx(difference, abs=2e-4)
        assert {record["a"], record["b"]} & {"lazy", name}
    status, _, err = call("compare", "ncm", "lazy (nothing)", "--task", "tiny-features-sessions")
    assert status == 2
    assert "unknown row 'nothing'" in err
    assert "unknown row 'lazy'" in call("compare", "lr", "lazy", "--task", "glyphs-5shot")[2]


def test_tables_say_where_validation_hides_base_classes():
    board = load_results_by_name("tiny-features-sessions", Paths.locate())
    listed = msgspec.structs.replace(board.task, sessions=msgspec.structs.replace(board.task.sessions, listed=True))
    note = "Validation sequences have hidden base classes in place of novel ones."
    assert [note in table_notes(of_task) for of_task in (board, replace(board, task=listed))] == [False, True]


def test_the_overview_has_averages_of_sessions(call):
    lines = render_tables(
        make_short_task_tables([load_results_by_name("tiny-features-sessions", Paths.locate())])[0], "text"
    ).splitlines()
    assert lines[0] == "tiny-features-sessions"
    assert lines[2].split() == [
        "rank", "method", "Avg.", "cal.", "Acc.", "gAcc", "gain", "base", "novel", "harmonic", "seeds", "source"
    ]  # fmt: skip
    names = [re.split("  +", line.strip()) for line in lines[4:9]]
    assert [cells[0] for cells in names[3:]] == ["lazy (anil)", "lazy (imprint)"], "those of the rows above"
    assert [cells[1] for cells in names[:3]] == ["mlp", "imprint", "ncm"]
    every = json.loads(call("table", "tiny-features-sessions", "--format", "json")[1])
    assert lines[10].startswith(f"{sum(row['source'] != 'published' for row in every) - 5} more rows: ")


def test_lists_and_results_count_sequences(call):
    line = next(line for line in call("tasks")[1].splitlines() if line.startswith("glyphs-sessions "))
    assert "400 sequences" in line
    shown = call("show", str(packaged_results_folder() / "glyphs-sessions" / "ncm.seed-0.json"))[1]
    assert re.search(r"^sequences +400$", shown, re.MULTILINE)


def test_of_one_order_nothing_is_ranked_and_nothing_significant_whatever_the_seeds(tmp_path):
    """Its seeds are equal where nothing is trained, which says nothing of other orders."""
    board = load_task_results(packaged_tasks()["mini-sessions-published"], tmp_path)
    assert {len(row.seeds) for row in board.rows} == {1, 3}
    assert {(place.rank_interval, place.reason_for_provisional_rank) for place in board.ranked_rows} == {
        (None, "one order")
    }
    assert "Measured: one order of the novel classes, so there are no intervals" in table_notes(board)[0]
    ncm, teen = board.find_row("ncm"), board.find_row("teen")
    comparison = compare_rows(ncm, teen, board.comparable_rows)
    gap = comparison.overall_differences["acc"]
    assert gap.mean > 0
    assert np.isnan([gap.interval, gap.p_value]).all()
    assert "nothing says how much others would differ" in describe_verdict(comparison)
    assert "nan" not in render_tables([comparison_table(comparison)], "text").lower()
    shown = render_tables([seed_table(ncm)], "text")
    assert "In percent; of one order, so there are no intervals." in shown
    assert not re.search("nan|95%", shown)
    assert "NaN" not in render_tables([comparison_table(comparison)], "json")


@pytest.mark.slow("whole runs and a page")
def test_of_one_order_with_several_support_sets_nothing_is_ranked(call, here):
    sessions = "{ count = 2, ways = 2, orders = 1, supports = 4, queries = 9 }"
    with (here / "clusters.toml").open("a", encoding="utf-8") as file:
        file.write(f"[tasks.of-one-order]\nshots = 2\nsessions = {sessions}\n")
    task = "clusters.toml:of-one-order"
    assert call("run", "--method", "ncm,protonet", "--task", task, "--seeds", "2", "-q")[0] == 0
    rows = json.loads(call("table", task, "--rank", "--format", "json")[1])
    assert {(row["rank_first"], row["acc_interval"]) for row in rows} == {(None, None)}
    assert "Measured: one order of the novel classes, so there are no intervals" in call("table", task)[1]
    assert call("report", task, "--out", "page.html")[0] == 0


def test_compare_says_what_was_chosen_and_where_less_is_better(call):
    grid = "chosen in validation: lr (stored) from 25 settings, for each seed; "
    lower = "lower is better in PD, novel as base and base as novel."
    _, in_episodes, _ = call("compare", "lr", "mlp+a", "--task", "glyphs-5shot")
    _, with_tuned, _ = call("compare", "lr", "lr@tuned-12", "--task", "glyphs-5shot")
    _, in_sessions, _ = call("compare", "teen", "ncm", "--task", "tiny-features-sessions")
    assert f"{grid}nothing for mlp+a (stored)." in in_episodes
    assert f"{grid}lr@tuned-12 (stored) from 12 settings, with one seed." in with_tuned
    assert "chosen in validation" not in in_sessions
    assert (lower in in_episodes, lower in in_sessions) == (False, True)


def test_empty_parts_of_the_variance_have_a_reason(call):
    for task, tables in (("tiny-features-sessions", 2), ("glyphs-sessions", 0)):
        _, out, _ = call("variance", task, "--method", "ncm,teen")
        assert out.count("\nEmpty: not known, or nothing varies over seeds.") == tables


@pytest.mark.slow("rows of several tasks are ranked")
def test_ranks_are_by_the_average_and_latex_warns_of_published_rows(call):
    assert "Rank: the places by Avg. that a row can have" in call("leaderboard", "tiny-features-sessions")[1]
    _, latex, _ = call("table", "mini-sessions", "--rank", "--format", "latex")
    assert "% Published rows use other backbones than measured ones, or do not say which" in latex
    assert "% rank: the places by Avg. that a row can have" in latex
    assert "Fewer than two training seeds" not in latex, "of a column that it lacks"
