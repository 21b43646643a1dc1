"""Result files, rows of several seeds, comparisons and tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats

from ifsl_bench.analysis import task_results
from ifsl_bench.analysis.aggregate import SeedAggregate, aggregate_seeds
from ifsl_bench.analysis.comparison import compare_rows, estimate_class_intervals
from ifsl_bench.protocols.episode_protocol import EPISODES_PROTOCOL as JOINT
from ifsl_bench.protocols.metrics import EPISODE_METRIC_NAMES, EpisodeHitCounts
from ifsl_bench.protocols.registry import protocol_of_task, title_by_metric
from ifsl_bench.protocols.tasks.task_files import load_tasks, packaged_tasks
from ifsl_bench.reporting.leaderboard import make_task_table
from ifsl_bench.reporting.notes import describe_standing
from ifsl_bench.reporting.table import render_tables
from ifsl_bench.store.published import read_published_rows
from ifsl_bench.store.result_folder import packaged_results_folder, read_results
from ifsl_bench.store.schema import Result, read_result, write_result
from ifsl_bench.utils.errors import CorruptFile, UserError
from tests.store.result_fields import altered, counted

STORED = 1.1e-6  # results round to six decimals, and a difference of two numbers is off by so much


def make(label="m", seed=0, n=50, base=0.8, novel=0.6, noise=0, classes=None, **changes) -> Result:
    generator = np.random.default_rng([seed, noise, 7])
    alone = generator.binomial(25, base, n), generator.binomial(25, novel, n)
    joint = [generator.binomial(a, 0.9) for a in alone]
    counts = EpisodeHitCounts(joint[0], alone[0], joint[1], alone[1], 25, 25, 2 * joint[0] * joint[1])
    return counted(label, seed, counts, some_classes(n) if classes is None else classes, **changes)


def test_labels_cannot_leave_their_folder(tmp_path):
    path = write_result(tmp_path, make("x.name=../../y"))
    assert path.parent == tmp_path / "toy"
    assert read_results(tmp_path)[0][0].label == "x.name=../../y"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["summary"]["acc"].update(mean=99.0), "summary.acc.mean is 99.0, the counts give"),
        (lambda v: v["summary"].pop("delta"), "summary.delta.mean is nan"),
        (lambda v: v["episodes"]["base_joint"].__setitem__(0, 26), "outside 0..25"),
        (lambda v: v["episodes"]["base_joint"].pop(), "entries"),
        (lambda v: v.update(extra=1), "unknown field `extra`"),
        (lambda v: v["episodes"]["classes"].pop(), "has 249 entries, not equally many for each of 50 episodes"),
        (lambda v: v["episodes"]["classes"].__setitem__(7, -1), "has classes below 0"),
        (lambda v: v["episodes"]["classes"].__setitem__(7, v["episodes"]["classes"][8]), "with a class twice"),
        (lambda v: v["episodes"]["classes"].__setitem__(7, 10**30), "beyond all bounds"),
        (lambda v: v["episodes"]["classes"].__setitem__(7, 1.5), "Expected `int`"),
    ],
)
def test_tampering_is_refused(tmp_path, change, message):
    path = altered(write_result(tmp_path, make()), change)
    with pytest.raises(CorruptFile) as error:
        read_result(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_rows_average_each_episode_over_seeds():
    results = [make(seed=s) for s in (2, 0, 1)]
    (row,), remarks = aggregate_seeds(results, "yours")
    assert not remarks
    assert row.seeds == (0, 1, 2)
    values = np.mean([r.to_hit_counts().metrics_by_unit()["acc"] for r in results], 0)
    assert row.summarise_metrics()["acc"].mean == pytest.approx(values.mean())
    assert row.summarise_metrics()["acc"].interval == pytest.approx(1.96 * stats.sem(values))
    assert row.sd_of_seeds() == pytest.approx(np.std([r.summary["acc"]["mean"] for r in results], ddof=1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": "x"}, "the episodes differ"),
        ({"options": {"a": 1}}, "options or training differ"),
        ({"train": {"steps": 1}}, "options or training differ"),
        ({"provenance": {"method_source": "x", "time": "2020"}}, "the method's code differs"),
    ],
)
def test_seeds_that_do_not_belong_together_do_not_mix(changes, reason):
    newest = make(seed=0, provenance={"time": "2026"})
    (row,), remarks = aggregate_seeds([make(seed=1, **changes), newest], "yours")
    assert row.results == (newest,)
    assert len(remarks) == 1
    assert reason in remarks[0]


def test_comparison_is_paired_over_episodes_and_over_seeds():
    a = SeedAggregate("a", "yours", tuple(make("a", s, noise=1) for s in range(3)))
    b = SeedAggregate("b", "yours", tuple(make("b", s, base=0.7, noise=2) for s in range(3)))
    gaps = compare_rows(a, b)
    for name in EPISODE_METRIC_NAMES:
        first, second = a.metrics_by_episode()[name], b.metrics_by_episode()[name]
        assert gaps.episode_differences[name].mean == pytest.approx((first - second).mean())
        # The rounding of t, times its square.
        assert gaps.episode_differences[name].p_value == pytest.approx(
            stats.ttest_rel(first, second).pvalue, rel=1e-6, abs=1e-12
        )
        means = [x.summary[name]["mean"] - y.summary[name]["mean"] for x, y in zip(a.results, b.results, strict=True)]
        low, high = stats.t.interval(0.95, 2, np.mean(means), stats.sem(means))
        assert gaps.mean_seed_differences[name].mean == pytest.approx(np.mean(means), abs=STORED)
        assert gaps.mean_seed_differences[name].interval == pytest.approx(
            (high - low) / 2, abs=10 * STORED
        )  # times t, 4.3
    assert gaps.notes == ()


def some_classes(n: int, count: int = 12, ways: int = 5) -> np.ndarray:
    return np.random.default_rng(n).random((n, count)).argsort(1)[:, :ways]


def test_compare_shows_what_it_knows_of_classes(tmp_path, call):
    kinds = {"few": some_classes(50, 60), "new": some_classes(50)}
    for kind, drawn in kinds.items():
        paths = [str(write_result(tmp_path / kind, make(name, noise=i, classes=drawn))) for i, name in enumerate("ab")]
        status, text, _ = call("compare", *paths)
        assert not status
        rows = json.loads(call("compare", *paths, "--format", "json")[1])
        assert ("over classes" in text.split("\n\n")[1]) == (kind == "new")
        assert (rows[0]["interval_of_classes"] is not None) == (kind == "new")
        assert text.count("no interval over classes") == (kind != "new")
        if kind == "few":
            assert re.search(r"50 episodes with \d+ novel classes do not tell the classes apart", text)
    a, b = (read_result(path) for path in map(Path, paths))
    d = a.to_hit_counts().metrics_by_unit()["acc"] - b.to_hit_counts().metrics_by_unit()["acc"]
    estimate = estimate_class_intervals(d[:, None], kinds["new"])
    assert (rows[0]["classes"], rows[0]["sd_of_classes"]) == (
        12,
        pytest.approx(estimate.class_effect_sds[0], abs=STORED),
    )
    assert rows[0]["interval_of_classes"] == pytest.approx(estimate.interval_half_widths[0], abs=STORED)
    assert re.search(rf"(?m)^Acc\. .*± {estimate.interval_half_widths[0]:.2f}\s*$", text)
    zero = [row["metric"] for row in rows if row["sd_of_classes"] == 0]
    assert zero
    headings = re.search(r"estimated below 0, and counts as 0, for (.*)\.", text)[1].split(", ")
    assert headings == [title_by_metric()[name] for name in zero]
    again = str(write_result(tmp_path / "again", make("a", noise=7, classes=some_classes(50))))
    assert f"A = {paths[0]}, B = {again}" in call("compare", paths[0], again)[1].replace("\n", " "), "both are called a"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": "x"}, "the episodes differ"),
        ({"fingerprint": "x"}, "the data differ"),
        ({"task_hash": "x"}, "the task's definition differs"),
        ({"task": "x"}, "the tasks differ"),
    ],
)
def test_comparison_refuses_with_the_reason(changes, reason):
    with pytest.raises(UserError, match=reason):
        compare_rows(SeedAggregate("a", "yours", (make("a"),)), SeedAggregate("b", "yours", (make("b", **changes),)))


def test_comparison_notes_unequal_seeds_and_separate_backbones():
    a = SeedAggregate("a", "yours", tuple(make("a", s) for s in range(2)))
    b = SeedAggregate("b", "stored", (make("b", 1, noise=3, pretraining={"key": "k1", "sha256": "other"}),))
    comparison = compare_rows(a, b)
    assert comparison.seeds == (1,)
    assert comparison.episode_differences["acc"].mean == pytest.approx(
        comparison.seed_differences["acc"][0], abs=STORED
    )
    assert any("only those in common" in note for note in comparison.notes)
    assert "seed 1: the two start from backbones that were trained separately (another machine?)" in comparison.notes


def test_comparison_says_which_seeds_have_base_classifiers_of_their_own_on_features_of_one_backbone():
    a, b = (
        SeedAggregate(
            name,
            "yours",
            tuple(make(name, s, pretraining={"key": "k", "sha256": name, "features": "f"}) for s in range(3)),
        )
        for name in ("a", "b")
    )
    separate = "seeds 0, 1, 2: the two start from base classifiers that were trained separately (another machine?)"
    assert [note for note in compare_rows(a, b).notes if "separately" in note] == [separate]


def board(tmp_path, monkeypatch, *results, task="mini-5shot"):
    """The board of a packaged task with these results in the user's folder and none in the package."""
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "none")
    definition = packaged_tasks()[task]
    for result in results:
        changes = {"task": task} | ({"task_hash": definition.hash} if result.task_hash == "h" else {})
        write_result(tmp_path / "r", msgspec.structs.replace(result, **changes))
    return task_results.load_task_results(definition, tmp_path / "r")


def test_rows_on_other_episodes_stand_apart_and_older_definitions_are_left_out(tmp_path, monkeypatch):
    """However good the odd ones are, the comparable rows are the ones that are ranked."""
    task_board = board(
        tmp_path, monkeypatch,
        make("a", n=2000, digest="whole"),
        make("few.episodes=50", base=0.99, novel=0.99, digest="first 50"),
        make("old", base=0.99, novel=0.99, task_hash="older"),
    )  # fmt: skip
    assert [row.label for row in task_board.rows] == ["a"]
    assert [row.label for row in task_board.incomparable_rows] == ["few.episodes=50"]
    text = render_tables([make_task_table(task_board)])
    assert text.index("few.episodes=50") > text.index("protonet")
    assert "few.episodes=50 (yours) is not comparable with the rows above: the episodes differ" in text
    assert "old, seed 0 (yours) belongs to another definition of the task" in text
    assert describe_standing(task_board, "few.episodes=50") == [
        "few.episodes=50 is not comparable with the stored rows."
    ]


def test_standing_ranks_and_compares(tmp_path, monkeypatch):
    """Differences have an interval over what there is, and say what that is."""
    bases = {"a": 0.9, "b": 0.3, "c": 0.6, "d": 0.65}
    rows = [make(label, seed, base=base, noise=i, n=400) for i, (label, base) in enumerate(bases.items())
            for seed in range(3)]  # fmt: skip
    task_board = board(tmp_path, monkeypatch, *rows)
    lines = describe_standing(task_board, "c")
    assert lines[0] == "c: rank 3 of 4"
    assert len(lines) == 3
    for line, label, title in zip(lines[1:], "ad", ("best other row", "nearest row"), strict=True):
        mine, rival = (
            [r.to_hit_counts().metrics_by_unit()["acc"] for r in rows if r.label == name] for name in ("c", label)
        )
        d = np.subtract(mine, rival)
        gap = task_board.ranking.estimate_row_difference(task_board.find_row("c"), task_board.find_row(label))
        assert gap.mean == pytest.approx(d.mean())
        p = 2 * stats.t.sf(abs(d.mean()) / gap.standard_error, gap.degrees_of_freedom)
        p_text = "< 1e-15" if p < 1e-15 else f"= {p:.2g}"
        assert line == (
            f"  against the {title}, {label} (yours) with {np.mean(rival):.2f} on seeds 0, 1, 2: {d.mean():+.2f} ± "
            f"{gap.interval:.2f} points, p {p_text}, over episodes and seeds"
        )
    assert describe_standing(task_board, "a")[1].startswith(
        "  against the best other row, the nearest, d (yours) with "
    )


def test_published_rows_are_consistent_or_flagged():
    """Delta is the mean of its parts wherever the paper prints all three, or a note says that it is not."""
    flagged = 0
    for task in ("mini-1shot", "mini-5shot", "tiered-1shot", "tiered-5shot"):
        rows = read_published_rows(task)
        assert {"protonet", "imprint", "lwof", "lr", "lr+s", "lr+a", "mlp", "mlp+s", "mlp+a", "xtarnet"} <= {
            r.label for r in rows
        }
        for row in rows:
            if "delta_a" in row.values:
                gap = abs(row.values["delta"] - (row.values["delta_a"] + row.values["delta_b"]) / 2)
                assert gap < 0.0101 or row.note, (task, row)
                flagged += bool(row.note)
    assert flagged == 4


@pytest.mark.slow("every stored result is read")
def test_every_stored_result_is_of_todays_task_and_adds_up():
    """Task hash, digest, fingerprint and summary of every file that comes with the package."""
    results, remarks = read_results(packaged_results_folder())  # reading recomputes the summary
    assert not remarks
    digests: dict[str, str] = {}
    fingerprints: dict[str, str] = {}
    for result in results:
        (task,) = load_tasks(result.task)
        where = f"{result.task}/{result.label}.seed-{result.seed}"
        assert result.task_hash == task.hash, where
        pinned = task.dataset.fingerprint  # of photographs, which decoders may read a little differently, none is
        assert result.fingerprint == fingerprints.setdefault(task.dataset.name, pinned or result.fingerprint), where
        if len(result.episodes) == task.evaluation.episodes:
            # Of a changed task no digest is pinned, but all rows have one.
            assert result.digest == digests.setdefault(result.task, task.digest or result.digest), where
        assert "+changes" not in result.provenance["commit"], where
        assert result.provenance["commit"], where
    have = {(r.task, r.label, r.seed) for r in results}
    glyphs = [
        name for name, task in packaged_tasks().items() if name.startswith("glyphs") and protocol_of_task(task) is JOINT
    ]
    for name in ("protonet", "imprint", "lwof"):
        assert {(task, name, seed) for task in glyphs for seed in range(3)} <= have
