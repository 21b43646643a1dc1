"""``ifsl-bench results``: one's own results are listed by what one asks for, and removed where one says so."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.utils.files import Paths


@pytest.fixture
def folder():
    """Three rows of the user's: one of two seeds, measured today, and two of a month ago."""
    root, now = Paths.locate().results, datetime.now(UTC)
    for task, label, seeds, age in (("glyphs-5shot", "lr", 2, 0), ("glyphs-5shot", "imprint", 1, 30),
                                    ("glyphs-1shot", "lr", 1, 30)):  # fmt: skip
        (root / task).mkdir(parents=True, exist_ok=True)
        for seed in range(seeds):
            raw = json.loads((packaged_results_folder() / task / f"{label}.seed-{seed}.json").read_text())
            raw["provenance"]["time"] = (now - timedelta(days=age)).isoformat()
            (root / task / f"{label}.seed-{seed}.json").write_text(json.dumps(raw))
    return root


def listed(call, *arguments):
    status, out, err = call("results", "list", *arguments, "--format", "json")
    assert status == 0, err
    return [(row["task"], row["method"], row["seeds"]) for row in json.loads(out)]


def test_results_are_listed_by_task_row_and_time(folder, call):
    new, old, one_shot = ("glyphs-5shot", "lr", "0, 1"), ("glyphs-5shot", "imprint", "0"), ("glyphs-1shot", "lr", "0")
    assert listed(call) == [one_shot, old, new]
    assert listed(call, "glyphs-5shot") == [old, new]
    assert listed(call, "--method", "lr") == [one_shot, new]
    assert listed(call, "--since", "7") == [new]
    today = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
    assert listed(call, "glyphs-5shot", "--method", "lr", "--since", today) == [new]
    means = [json.loads((folder / "glyphs-5shot" / f"lr.seed-{seed}.json").read_text())["summary"]["acc"]["mean"]
             for seed in (0, 1)]  # fmt: skip
    assert f"{sum(means) / 2:.2f}" in call("results", "list", "--since", "7")[1]
    for arguments, message in (
        (("--since", "tomorrow"), "--since takes a number of days or a date"),
        (("glyphs-9shot",), "unknown task 'glyphs-9shot'"),
        (("--method", "lrr"), "did you mean 'lr'"),
        (("--since", "0"), "there are no such results"),
    ):
        status, out, err = call("results", "list", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_what_is_removed_is_listed_asked_for_and_nothing_else(folder, call):
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.json")}
    status, out, err = call("results", "remove", "lr", "glyphs-5shot")
    assert (status, err) == (
        2,
        "ifsl-bench: there is no terminal to ask for confirmation: add --yes to remove what is listed\n",
    )
    assert out.count("to be removed: ") == 2
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.json")} == files
    assert call("results", "remove", "lr", "glyphs-5shot", "--seed", "5", "--yes")[2].count("none of seed 5") == 1
    assert call("results", "remove", "lr", "glyphs-5shot", "--seed", "1", "--yes")[0] == 0
    assert call("results", "remove", "lr", "glyphs-1shot", "--yes")[0] == 0
    remaining_files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.json")}
    assert remaining_files == files - {"glyphs-5shot/lr.seed-1.json", "glyphs-1shot/lr.seed-0.json"}
    assert not (folder / "glyphs-1shot").exists()
    assert "unknown row 'lwof'" in call("results", "remove", "lwof", "glyphs-5shot", "--yes")[2]
    package_root = packaged_results_folder()
    assert "come with the package" in call("results", "remove", "lr", "glyphs-5shot", "--results", str(package_root))[2]


def test_a_damaged_file_is_told_and_a_cache_says_who_removes_results(folder, call):
    (folder / "glyphs-5shot" / "lr.seed-0.json").write_text("{")
    status, _, err = call("results", "list")
    assert status == 0
    assert err.startswith("warning: left out: ")
    assert "`ifsl-bench results` lists and removes" in call("cache")[1]


def test_a_comparison_at_80_columns_has_a_line_for_each_metric(call):
    from io import StringIO

    from rich.console import Console

    from ifsl_bench.analysis.comparison import compare_rows
    from ifsl_bench.analysis.task_results import find_rows_to_compare
    from ifsl_bench.reporting.comparison_tables import comparison_table
    from ifsl_bench.reporting.terminal import print_tables

    table = comparison_table(compare_rows(*find_rows_to_compare("lr+a", "lr", "glyphs-5shot", Paths.locate())))
    for width, has_seeds in ((80, False), (140, True)):
        out = StringIO()
        print_tables([table], Console(file=out, width=width))
        lines = out.getvalue().splitlines()
        rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
        assert lines[rule + len(table.rows) + 1] == "", "a line for each"
        assert ("each seed" in lines[rule - 1]) == has_seeds
        assert any("No room for:" in line and "each seed" in line for line in lines) != has_seeds


@pytest.mark.parametrize("style", ["text", "json", "csv"])
def test_compare_says_which_of_two_rows_of_a_label_it_takes(style, call, tmp_path):
    (tmp_path / "mine" / "glyphs-5shot").mkdir(parents=True)
    for seed in range(2):
        shutil.copy(
            packaged_results_folder() / "glyphs-5shot" / f"imprint.seed-{seed}.json", tmp_path / "mine" / "glyphs-5shot"
        )
    words = ("--task", "glyphs-5shot", "--results", str(tmp_path / "mine"), "--format", style)
    note = "'imprint (yours)' is compared; there is also 'imprint (stored)', with seeds 0 to 4"
    status, out, err = call("compare", "imprint", "lr", *words)
    assert status == 0
    assert note in (out if style == "text" else err)
    _, out, err = call("compare", "imprint (stored)", "lr", *words)
    assert "there is also" not in out + err, "a row that is named in full"
