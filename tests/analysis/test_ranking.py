"""Ranks and differences, and what they rest on."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from scipy import stats

from ifsl_bench.analysis import task_results
from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.analysis.comparison import compare_rows, describe_verdict
from ifsl_bench.analysis.ranking import (
    Ranking,
    RankInterval,
    estimate_difference,
    fit_seed_variance_prior,
    rank_intervals,
)
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.reporting.latex import make_latex_tables
from ifsl_bench.store.schema import write_result
from ifsl_bench.utils.text_format import format_p_value
from tests.store.result_fields import DIGITS, accuracies, document, leaderboard, ranks, row


def test_a_comparison_says_what_its_interval_says():
    """One that leaves 0 out goes with a verdict, at 5%, over what there is to be over."""
    for seeds in (1, 3):
        for noise in range(1, 9):
            a, b = row("a", [15, 15.4, 14.9][:seeds], noise=noise), row("b", [14.9, 15, 14.5][:seeds], noise=20 + noise)
            comparison = compare_rows(a, b)
            gap = comparison.overall_differences["acc"] if seeds == 3 else comparison.episode_differences["acc"]
            ahead, behind = ("a (yours)", "b (yours)") if gap.mean > 0 else ("b (yours)", "a (yours)")
            claim = (f"{ahead} has a significantly higher Acc. than {behind}" if abs(gap.mean) > gap.interval
                    else "Acc. does not tell a (yours) and b (yours) apart")  # fmt: skip
            assert describe_verdict(comparison).startswith(f"{claim} (p {format_p_value(gap.p_value)}")
            assert describe_verdict(comparison).endswith("over episodes and 3 seeds)." if seeds == 3 else
                                           "a claim about methods needs --seeds 3 or more.")  # fmt: skip
    assert describe_verdict(compare_rows(a, a)) == "a (yours) and a (yours) have the same accuracy in every episode."


def test_overall_is_over_episodes_and_seeds_together():
    a, b = row("a", [15, 15.4, 14.9], noise=1), row("b", [14, 15, 14.2], noise=2)
    d = accuracies(a) - accuracies(b)
    over_seeds, over_episodes = d.mean(1).var(ddof=1) / 3, d.mean(0).var(ddof=1) / 400
    degrees = (over_seeds + over_episodes) ** 2 / (over_seeds**2 / 2 + over_episodes**2 / 399)
    overall = compare_rows(a, b).overall_differences["acc"]
    assert overall.mean == pytest.approx(d.mean())
    assert overall.interval == pytest.approx(stats.t.ppf(0.975, degrees) * np.sqrt(over_seeds + over_episodes))
    single = compare_rows(row("a", [15], noise=1), row("b", [14], noise=2)).overall_differences["acc"]
    assert single.models_fixed, "one seed says nothing of others"
    assert single.interval == pytest.approx(stats.t.ppf(0.975, 399) * stats.sem(d[0]))
    more = [a, b, *(row(f"r{i}", [14, 14.5, 14.2], noise=i) for i in range(3, 8))]
    assert compare_rows(a, b, more).overall_differences["acc"] == Ranking(more).estimate_row_difference(a, b), (
        "moderated as ranks are"
    )
    assert compare_rows(a, b, more).overall_differences["acc"].degrees_of_freedom > degrees


def test_rows_are_ranked_as_far_as_they_can_be_told_apart():
    rows = [
        row("behind", [13.0, 13.1, 12.9], noise=3),
        row("best", [15.0, 15.1, 14.9], noise=1),
        row("near", [14.95, 15.0, 14.95], noise=2),
        row("last", [10.5, 10.4, 10.6], noise=4),
    ]
    ranking = Ranking(rows)
    assert ranks(ranking.ranked_rows) == {"best": "1-2", "near": "1-2", "behind": "3", "last": "4"}
    assert [place.row.label for place in ranking.ranked_rows] == ["best", "near", "behind", "last"]
    assert [place.may_be_best_row for place in ranking.ranked_rows] == [True, True, False, False]
    assert [place.difference_to_best is None for place in ranking.ranked_rows] == [True, False, False, False]
    whole = rank_intervals(np.stack([accuracies(entry) for entry in rows]), np.zeros(4, bool))
    assert ranks(ranking.ranked_rows) == {
        entry.label: str(interval) for entry, interval in zip(rows, whole, strict=True)
    }
    assert {place.n_ranked_together for place in ranking.ranked_rows} == {4}


def test_few_seeds_and_options_make_a_row_provisional():
    rows = [
        row("a", [15.0, 15.1, 15.2], noise=1), row("b", [13.0, 13.1, 13.2], noise=2),
        row("one", [15.5], noise=3), row("two", [14.0, 14.1], noise=4),
        row("a.gamma=1", [14.0, 14.1, 14.2], noise=5, method="a"), row("a@tuned-12", [11.0, 11.1, 11.2], noise=6),
        row("file.a", [10.0, 10.1, 10.2], noise=7), row("file.a.gamma=1", [9.0, 9.1, 9.2], noise=8, method="file.a"),
    ]  # fmt: skip
    places = Ranking(rows).ranked_rows
    assert {place.row.label: place.reason_for_provisional_rank for place in places if place.is_provisional} == {
        "one": "1 seed", "two": "2 seeds", "a.gamma=1": "options of its own", "file.a.gamma=1": "options of its own",
    }  # fmt: skip
    assert ranks(place for place in places if not place.is_provisional) == {
        "a": "1", "b": "2", "a@tuned-12": "3", "file.a": "4",
    }  # fmt: skip
    assert not any(place.may_be_best_row for place in places if place.is_provisional)
    (single,) = (place for place in places if place.row.label == "one")
    assert single is places[0]
    assert single.difference_to_best.models_fixed
    d = (accuracies(rows[2]) - accuracies(rows[0], 1)).mean(0)
    assert (single.difference_to_best.mean, single.difference_to_best.interval) == pytest.approx(
        (d.mean(), stats.t.ppf(0.975, 399) * stats.sem(d))
    )


def test_rows_are_compared_on_the_seeds_that_all_or_most_have():
    def of(label: str, seeds: list[int], noise: int) -> SeedAggregate:
        full_row = row(label, [14.0] * (max(seeds) + 1), noise=noise)
        return SeedAggregate(label, "yours", tuple(r for r in full_row.results if r.seed in seeds))

    five, three, four = of("five", [0, 1, 2, 3, 4], 1), of("three", [0, 1, 2], 2), of("four", [0, 1, 2, 4], 3)
    ranking = Ranking([five, three, four])
    assert ranking.seeds == (0, 1, 2)
    assert ranking.estimate_row_difference(five, four).mean == pytest.approx(
        (accuracies(five, 3) - accuracies(four, 3)).mean()
    )
    gaps = compare_rows(five, four, [five, three, four])
    assert gaps.overall_differences["acc"].mean == pytest.approx(gaps.episode_differences["acc"].mean), (
        "on all seeds that these two have"
    )
    assert Ranking([five, four]).seeds == (0, 1, 2, 4)
    late = of("late", [2, 3, 4], 4)
    ranking = Ranking([late, five, three, four])
    assert ranking.seeds == (0, 1, 2)
    assert {
        place.row.label: place.reason_for_provisional_rank for place in ranking.ranked_rows if place.is_provisional
    } == {"late": "it lacks seeds 0, 1"}
    apart = Ranking([of("a", [0, 1, 2], 1), of("b", [3, 4, 5], 2), of("c", [3, 4, 5], 3)])
    assert [row.label for row in apart.family] == ["b", "c"]
    (place,) = (place for place in apart.ranked_rows if place.is_provisional)
    assert place.n_common_seeds == 0
    assert place.difference_to_best.models_fixed, "no seed in common"


def test_rows_that_are_the_same_for_every_seed_are_compared_over_episodes_alone():
    same = {"pretraining": {"key": "k", "sha256": "s"}}
    once = [row(label, [mean], noise=1).results[0] for label, mean in (("a", 15.0), ("b", 14.8))]
    rows = [
        SeedAggregate(r.label, "yours", tuple(msgspec.structs.replace(r, seed=seed, **same) for seed in range(3)))
        for r in once
    ]
    ranking = Ranking([*rows, *(row(f"r{i}", [14, 14.5, 14.2], noise=i) for i in range(3, 8))])
    d = (accuracies(rows[0]) - accuracies(rows[1]))[0]
    assert ranking.estimate_row_difference(*rows).models_fixed
    assert not ranking.estimate_row_difference(rows[0], ranking.rows[-1]).models_fixed
    assert ranking.estimate_row_difference(*rows).interval == pytest.approx(stats.t.ppf(0.975, 399) * stats.sem(d))
    trained = [
        SeedAggregate(
            entry.label, "yours", tuple(msgspec.structs.replace(r, training={"steps": 1}) for r in entry.results)
        )
        for entry in rows
    ]
    foreign = msgspec.structs.replace(rows[0].results[2], pretraining={"key": "k", "sha256": "trained elsewhere"})
    assert [entry.is_seed_independent for entry in (*rows, *trained)] == [True, True, False, False]
    assert not SeedAggregate("a", "yours", (*rows[0].results[:2], foreign)).is_seed_independent
    assert not SeedAggregate("a", "yours", rows[0].results[:1]).is_seed_independent, "one seed tells nothing"


def test_ranks_of_stored_rows_are_their_own(stored_rows, tmp_path, monkeypatch):
    """Rows of a user's change none of them, and none of each other's; nor does what is shown."""
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "stored")
    names = ["s0", "s1", "s2", "s3"]
    for i, label in enumerate(names):
        for result in row(label, [15 - 0.4 * i, 15.1 - 0.4 * i, 15.2 - 0.4 * i], noise=i, n=2000).results:
            write_result(tmp_path / "stored", result)
    task = packaged_tasks()["mini-5shot"]

    def ranks_and_places() -> tuple[dict[str, str], dict[str, tuple]]:
        places = load_task_results(task, stored_rows.root).ranking.ranked_rows
        split = [[p for p in places if p.row.results_origin == origin] for origin in ("stored", "yours")]
        return ranks(split[0]), {
            p.row.label: (str(p.rank_interval), p.n_ranked_together, p.difference_to_best) for p in split[1]
        }

    before, none = ranks_and_places()
    assert not none
    mine = row("mine", [14.0, 14.1, 14.2], noise=7, n=2000)
    stored_rows(mine)
    after, yours = ranks_and_places()
    assert after == before
    assert yours["mine"][1] == 5
    whole = [*load_task_results(task, stored_rows.root).comparable_rows]
    alone = rank_intervals(np.stack([accuracies(entry) for entry in whole]), np.zeros(5, bool))
    assert yours["mine"][0] == str(alone[[entry.label for entry in whole].index("mine")]) == "4"
    stacked = np.stack([accuracies(entry) for entry in whole])
    gap = estimate_difference(
        accuracies(mine), stacked[1], fit_seed_variance_prior(stacked.mean(2), np.zeros(5, bool)), 2
    )
    found_gap = yours["mine"][2]
    assert (found_gap.mean, found_gap.interval) == pytest.approx((gap.mean, gap.interval)), "moderated by itself too"
    stored_rows(*(row(f"m{i}", [20.0, 20.1, 20.2], noise=10 + i, n=2000) for i in range(3)), row("x", [25.0], n=2000))
    again, more = ranks_and_places()
    assert (again, more["mine"]) == (before, yours["mine"])
    whole = load_task_results(task, stored_rows.root)
    for some in (whole.select_labels(["s1", "mine"]), whole.select_default_view([])):
        records = document(leaderboard([some], stored_rows.root, "json", labels=["s1"]))
        for r in records:
            if r["kind"] == "measured" and r["method"] in before:
                place = RankInterval(r["rank_first"], r["rank_last"])
                assert str(place) == before[r["method"]]
    text = leaderboard([whole.select_labels(["s1", "mine"])], stored_rows.root)
    assert "Ranks are among 4 rows on seeds 0, 1, 2, whichever rows are shown." in text
    assert "Provisional" not in text, "of rows that are not shown"


def test_ranks_of_nothing_of_one_and_of_equals():
    assert Ranking([]).ranked_rows == []
    original = row("a", [14.0, 14.2, 14.1])
    assert [(str(p.rank_interval), p.difference_to_best) for p in Ranking([original]).ranked_rows] == [("1", None)]
    twin = SeedAggregate("b", "yours", original.results)
    assert [str(p.rank_interval) for p in Ranking([original, twin]).ranked_rows] == ["1-2", "1-2"]
    assert Ranking([original, twin]).estimate_row_difference(original, twin).interval == 0
    lonely = row("c", [14.0])
    assert [
        (p.rank_interval, p.reason_for_provisional_rank, p.difference_to_best) for p in Ranking([lonely]).ranked_rows
    ] == [(None, "1 seed", None)]


def test_rows_that_stand_apart_are_compared_by_themselves(stored_rows, call):
    """The variance over seeds of the task's other rows is of other episodes."""
    part = {"fingerprint": "part", "partial": True, "n": 200}
    apart = [row("x", [15, 15.4, 14.9], noise=7, **part), row("y", [14, 15, 14.2], noise=8, **part)]
    stored_rows(*apart, *(row(f"r{i}", [14, 14.5, 14.2], n=2000, noise=i) for i in range(5)))
    arguments = ["--task", "mini-5shot", "--results", str(stored_rows.root), "--format", "json"]
    status, out, err = call("compare", "x", "y", *arguments)
    assert not status, err
    assert document(out)[0]["interval_overall"] == pytest.approx(
        compare_rows(*apart).overall_differences["acc"].interval, abs=DIGITS
    )
    _, out, _ = call("compare", "r0", "r1", *arguments)
    rows = load_task_results(packaged_tasks()["mini-5shot"], stored_rows.root)
    moderated = rows.ranking.estimate_row_difference(rows.find_row("r0"), rows.find_row("r1"))
    assert document(out)[0]["interval_overall"] == pytest.approx(moderated.interval, abs=DIGITS)


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
        gap = compare_rows(a, b, rows).overall_differences["acc"]
        assert gap == Ranking(rows, setting=setting).estimate_row_difference(a, b, (0, 1, 2)), (a.label, b.label)
    tuned_gap, paper_gap = (
        Ranking(rows, setting=setting).estimate_row_difference(*tuned[:2]) for setting in ("tuned-12", "paper")
    )
    assert tuned_gap.interval != pytest.approx(paper_gap.interval, rel=0.05), "or this test would tell nothing"
    stored_rows(*rows)
    board = load_task_results(packaged_tasks()["mini-5shot"], stored_rows.root).select_setting("tuned-12")
    line = next(line for line in make_latex_tables([board]).splitlines() if line.startswith("t7, tuned"))
    assert r"\textbf" in line, "the best of the tuned rows may be the best of them"


def test_a_row_of_fewer_seeds_is_ranked_beside_the_others_and_moves_none_of_their_ranks():
    """One contributed row of three seeds among rows of five: they keep their five seeds, and it has a rank."""
    rows = [row(f"r{i}", [15 - i / 2 + s / 4 for s in range(5)], noise=i) for i in range(5)]
    few = row("few", [14.6, 14.8, 15.0], noise=9)
    alone, beside = Ranking(rows), Ranking([*rows, few])
    assert beside.seeds == alone.seeds == (0, 1, 2, 3, 4)
    expected, new_ranks = ranks(alone.ranked_rows), ranks(beside.ranked_rows)
    assert {name: new_ranks[name] for name in expected} == expected
    (place,) = [place for place in beside.ranked_rows if place.row is few]
    assert (place.is_provisional, place.n_ranked_together) == (False, 6)
    together = Ranking([*(replace(entry, results=entry.results[:3]) for entry in rows), few])
    assert ranks(together.ranked_rows)["few"] == new_ranks["few"], "as among all on the three seeds that they share"
    assert Ranking([*rows[:2], few]).seeds == (0, 1, 2), "two of three are not most"


def test_a_row_that_was_trained_with_another_gradient_than_it_names_is_shown_without_a_rank(stored_rows):
    """Its numbers stay where they were, and the others' ranks are as if it were not there."""
    task = packaged_tasks()["mini-5shot"]
    rows = [
        row(label, [mean] * 3, n=2000, noise=i) for i, (label, mean) in enumerate([("a", 16), ("b", 14), ("c", 12)])
    ]

    def with_series(replaced: tuple[int, int, int]) -> list:
        results = [
            msgspec.structs.replace(r, training={"solves": {"adjoint_episodes": 8, "adjoint_diverged": count}})
            for r, count in zip(rows[0].results, replaced, strict=True)
        ]
        stored_rows(SeedAggregate("a", "yours", tuple(results)), *rows[1:])
        board = load_task_results(task, stored_rows.root)
        notes.append(leaderboard([board], stored_rows.root))
        records = document(leaderboard([board], stored_rows.root, "json"))
        return [(r["method"], r["rank_first"]) for r in records if r["kind"] == "measured"]

    notes: list[str] = []
    assert with_series((4, 4, 4)) == [("a", 1), ("b", 2), ("c", 3)], "half of them is not most of them"
    assert "took its place: a (yours) in 12 of 24 episodes" in notes[-1]
    assert with_series((0, 5, 0)) == [("a", None), ("b", 1), ("c", 2)], "one seed of such a kind is in the mean"
    assert "not trained with the gradient that it names, replaced in 5 of 24 episodes: a" in notes[-1].lower()


def test_a_provisional_row_stands_where_its_difference_to_the_best_puts_it(stored_rows):
    """On a seed that was good for all, a row that is worse than the best has a higher mean than it."""
    best = row("best", [17.0, 13.0, 13.0], noise=1)
    lucky = row("lucky", [16.0], noise=1)
    places = Ranking([lucky, best, row("other", [12.0, 11.0, 11.0], noise=2)]).ranked_rows
    assert lucky.summarise_metrics()["acc"].mean > best.summarise_metrics()["acc"].mean
    assert [place.row.label for place in places] == ["best", "lucky", "other"]
    assert places[1].difference_to_best.mean < 0
    stored_rows(best, lucky)
    text = leaderboard([load_task_results(packaged_tasks()["mini-5shot"], stored_rows.root)], stored_rows.root)
    assert text.index(" best ") < text.index(" lucky "), "readers see it there too"


def test_a_comparison_says_whose_rows_it_is_of():
    rival = row("b", [14.0] * 3, noise=2)
    stored_row, mine = replace(row("a", [15.0] * 3, noise=1), results_origin="stored"), row("a", [15.0], noise=1)
    everything = [stored_row, mine, rival]
    comparison = compare_rows(mine, rival, everything, [stored_row, mine])
    assert (comparison.label_a, comparison.label_b) == ("a (yours)", "b (yours)")
    other = "'a (yours)' is compared; there is also 'a (stored)', with seeds 0, 1, 2"
    assert comparison.same_label_notes == (other,)
    assert "a (yours)" in describe_verdict(comparison)
    namesakes = compare_rows(mine, stored_row, everything, [stored_row, mine])
    assert (namesakes.label_a, namesakes.label_b) == ("a (yours)", "a (stored)")
    assert not namesakes.same_label_notes
    same = compare_rows(mine, mine, everything, [stored_row, mine])
    assert same.same_label_notes == (other,), "once"
    assert any(note.startswith("a (yours) has seed 0, a (stored) has seeds 0, 1, 2") for note in namesakes.notes)
    assert compare_rows(stored_row, rival, [stored_row, rival]).label_a == "a (stored)"
