"""The searches behind the stored results: choices are inside what was tried, or marked, and tuning costs nothing."""

from __future__ import annotations

import re

import pytest

from ifsl_bench.analysis.comparison import compare_rows
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.notes import table_notes
from ifsl_bench.store.result_folder import packaged_results_folder

LIMITS = {("lda", "shrinkage"): 1.0}  # values that nothing lies beyond
HALF = 0.5  # points
TASKS = [f"{data}-{shots}shot" for data in ("glyphs", "tiny-features", "mini-pack") for shots in (1, 5)]


def board_of(name, folder):
    (task,) = load_tasks(name)
    return load_task_results(task, folder)


def ends(result):
    """The options whose chosen number is the smallest or the largest that was tried, from the file alone."""
    options = set()
    for tried in result.tuned.values():
        sound = {name: accuracy for name, accuracy in tried.items() if name not in result.passed_over}
        chosen = max(sound, key=sound.get)
        for part in chosen.split(", "):
            option, _, value = part.partition("=")
            values = [dict(pair.split("=") for pair in name.split(", "))[option] for name in tried]
            if value[0].isdigit() and float(value) in (min(map(float, values)), max(map(float, values))):
                options |= {option} if LIMITS.get((result.method, option)) != float(value) else set()
    return options


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in packaged_results_folder().glob("*/lr.seed-0.json"))
)
def test_a_stored_choice_is_inside_what_was_tried_or_marked_below_the_table(name, tmp_path):
    board = board_of(name, tmp_path)
    notes = table_notes(board)
    marked = {
        (label, name)
        for note in notes
        if note.startswith("Chosen at an end")
        for label, names in re.findall(r"(\S+): ([^;]+)[;.]", note.partition("beyond. ")[2])
        for name in names.split(", ")
    }
    for row in board.rows:
        names = sorted(set().union(*(ends(result) for result in row.results)))
        assert set(names) <= {name for label, name in marked if label == row.label}, row.label
        assert all(bool(result.tuned) == bool(result.rounds) for result in row.results), row.label


@pytest.mark.slow("all stored searches are compared")
def test_tuned_is_nowhere_significantly_worse_than_untuned(tmp_path):
    """Over episodes and seeds; Bonferroni over all of them."""
    gaps = {}
    for name in TASKS:
        board = board_of(name, tmp_path)
        for row in board.rows:
            if row.ranking_setting == "tuned-12":
                untuned = board.find_row(row.label.replace("@tuned-12", ""))
                gaps[f"{row.label} on {name}"] = compare_rows(row, untuned, board.comparable_rows).overall_differences[
                    "acc"
                ]
    assert gaps
    worse = {label for label, gap in gaps.items() if gap.mean < 0 and gap.p_value < 0.05 / len(gaps)}
    assert not worse
    assert all(gap.mean + gap.interval > -HALF for gap in gaps.values()), "and nowhere by half a point"
