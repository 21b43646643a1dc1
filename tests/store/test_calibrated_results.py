"""Calibration in result files, in rows and in tables; and results where no validation episodes can be drawn."""

from __future__ import annotations

import csv
import io
import json
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ifsl_bench.analysis import task_results
from ifsl_bench.analysis.aggregate import FILE, SeedAggregate
from ifsl_bench.analysis.comparison import compare_rows
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.protocols.calibration import Margins, find_bias
from ifsl_bench.protocols.metrics import BALANCE_METRIC_NAMES, EpisodeHitCounts
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.detail_tables import describe_facts, seed_table
from ifsl_bench.reporting.leaderboard import make_task_table
from ifsl_bench.reporting.table import RECORD_FORMATTERS, render_tables
from ifsl_bench.store.schema import Result, StoredCalibration, StoredOptionChoice, read_result, write_result
from ifsl_bench.utils.errors import CorruptFile
from tests.store.result_fields import altered, counted

STORED = 1.1e-6  # results round to six decimals
TASK = load_tasks("mini-5shot")[0]
QUERIES = 25  # of base classes, and of novel ones, in an episode of the task


def margins(seed: int, episodes: int, gap: float = 2.0, shift: float = 1.0) -> Margins:
    """Base queries above novel ones by ``gap``, and all of them too high by ``shift``."""
    generator = np.random.default_rng(seed)

    def draw(mean: float) -> np.ndarray:
        values = generator.normal(mean + shift, 1, (episodes, QUERIES)).astype(np.float32)
        return np.where(generator.random(values.shape) < 0.1, np.nan, values)

    return Margins(draw(gap / 2), draw(-gap / 2))


def result(label: str = "m", seed: int = 0, n: int = 60, bare: bool = False, applied: bool = False, **of) -> Result:
    """``bare``: without calibration, as where there are no validation episodes."""
    validation, test = margins(seed + 50, len(TASK.evaluation.validation_halves[0]), **of), margins(seed, n, **of)
    calibrated = find_bias(validation).apply_to_episodes(test)
    base, novel = test.joint_hits_with_bias(calibrated.bias_on_novel_logits if applied else 0)
    alone = np.isfinite(test.base_margins).sum(1), np.isfinite(test.novel_margins).sum(1)
    more = {} if bare else {"calibrated_base": calibrated.base_joint, "calibrated_novel": calibrated.novel_joint}
    counts = EpisodeHitCounts(base, alone[0], novel, alone[1], QUERIES, QUERIES, test.doubled_ordered_pairs(), **more)
    of_task = {"task": TASK.name, "task_hash": TASK.hash, "digest": f"d{n}"}
    calibration = None if bare else StoredCalibration.from_calibrated_hits(calibrated, applied)
    return counted(label, seed, counts, np.tile(np.arange(5), (n, 1)), **of_task, calibration=calibration)


def change(field: str, at: int, value: int):
    def apply(document: dict) -> None:
        document["episodes"][field][at] += value

    return apply


def rival(**fields):
    """A choice between two settings, of which the second was tried on test episodes."""
    choice = {"validation_episodes": 3, "chosen": 0, "winners": [0] * 100, "hits": {}, "rivals": [1]}
    return choice | {"test_episodes": 20, "test_hits": {}} | fields


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (change("pairs", 3, 1000), "episodes.pairs has an episode with less than 0, or more than its hits alone"),
        (change("pairs", 3, -300), "episodes.pairs has fewer than the joint hits of an episode make"),
        (change("calibrated_novel", 0, 20), "episodes.calibrated_novel has an episode with less than 0, or more"),
        (change("pairs", 0, 1), "summary.ausuc.mean is"),
        (lambda v: v["episodes"].pop("calibrated_novel"), "calibrated_novel are not both there"),
        (lambda v: v["episodes"].pop("pairs"), "episodes.pairs is missing"),
        (lambda v: v.update(calibration=None), "calibration and episodes.calibrated_base are not both there"),
        (lambda v: v["calibration"].update(applied=True), "applied, and yet joint hits and calibrated ones differ"),
        (lambda v: v["calibration"].update(bias=-5), "calibration has base hits that rise, or novel hits that fall"),
        (lambda v: v["calibration"]["curve"]["bias"].pop(), "a curve whose parts differ in length"),
        (lambda v: v["calibration"]["curve"]["bias"].reverse(), "a curve whose biases do not ascend"),
        (lambda v: v["calibration"]["curve"]["novel_joint"].__setitem__(40, 0), "or novel hits that fall"),
        (lambda v: v["calibration"]["curve"]["base_joint"].__setitem__(0, 10**6), "more hits than there are alone"),
        (lambda v: v["calibration"]["resampled_base"].pop(), "calibration has other than 100 resamples"),
        (lambda v: v.update(choice={"validation_episodes": 3, "chosen": 0, "winners": [0], "hits": {}}),
         "Expected `array` of length >= 100"),
        (lambda v: v.update(choice={"validation_episodes": 3, "chosen": 0, "winners": [0] * 100, "hits": {}}),
         "choice has a place that none of 0 settings has"),
        (lambda v: v.update(tuned={"a": {"a=1": 1.0, "a=2": 1.0}}, choice=rival(test_episodes=61)),
         "choice has 61 test episodes, the result 60"),
        (lambda v: v.update(tuned={"a": {"a=1": 1.0, "a=2": 1.0}}, choice=rival(test_hits={"novel_alone": [7, 7]})),
         "choice has 7 test hits novel_alone of the chosen setting, its counts give"),
        (lambda v: v.update(tuned={"a": {"a=1": 1.0, "a=2": 1.0}}, choice=rival(rivals=[2])),
         "choice has a place that none of 2 settings has"),
        (lambda v: v.update(tuned={"a": {"a=1": 1.0, "a=2": 1.0}}, choice=rival(test_hits={"novel_alone": [7]})),
         "choice has hits of something else, or of other than 2 settings"),
        (lambda v: v["episodes"].update(base_queries=0, base_joint=[0] * 60, base_alone=[0] * 60,
                                        novel_joint=v["episodes"]["novel_alone"]),
         "episodes.pairs is there though the episodes have no base classes"),
    ],
)  # fmt: skip
def test_calibration_that_no_episodes_can_have_is_refused(tmp_path, fault, message):
    path = altered(write_result(tmp_path, result()), fault)
    with pytest.raises(CorruptFile) as error:
        read_result(path)
    assert message in str(error.value)


def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *results: Result):
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "none")
    for record in results:
        write_result(tmp_path / "results", record)
    return load_task_results(TASK, tmp_path / "results")


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_tables_show_calibration_where_a_row_has_it(tmp_path, monkeypatch, full, ranked):
    table_of = partial(make_task_table, ranked=ranked)
    bare = board(tmp_path, monkeypatch, result("bare", bare=True))
    headings = table_of(bare, full).headings()
    assert "cal. Acc." not in headings
    assert ("AUSUC" in headings) == ("harmonic" in headings) == full
    table = table_of(board(tmp_path, monkeypatch, result("new")), full)
    assert [note for note in table.notes if note.startswith("cal.: with one bias on all novel logits")]
    assert not [note for note in table_of(bare, full).notes if note.startswith("cal.")]
    new_headings = set(table.headings()) - set(headings)
    assert new_headings == ({"cal. Acc.", "cal. Delta"} if full else {"cal. Acc."})
    at = table.headings().index("cal. Acc.")
    assert full or table.headings()[at - 1] == "Acc."
    cells = {cells[table.headings().index("method")].text: cells[at].text for cells in table.cells()}
    new, resampled = result("new"), result("new").calibration
    hits = np.add(resampled.resampled_base, resampled.resampled_novel) / (60 * 2 * QUERIES)
    per_episode = new.to_hit_counts().metrics_by_unit()["calibrated_acc"]
    wide = 1.96 * np.sqrt(per_episode.var(ddof=1) / 60 + (100 * hits).var(ddof=1))
    assert wide > 1.005 * new.summary["calibrated_acc"]["interval"], "the stored one holds the bias fixed"
    assert cells["new"] == f"{per_episode.mean():.2f} ± {wide:.2f}"
    assert cells["bare"] == ""
    for style in RECORD_FORMATTERS:
        load = json.loads if style == "json" else lambda text: list(csv.DictReader(io.StringIO(text)))
        rows = {row["method"]: row for row in load(render_tables([table], style)) if row["source"] == "yours"}
        for name in BALANCE_METRIC_NAMES:
            # Documents have four decimals.
            assert float(rows["new"][name]) == pytest.approx(result("new").summary[name]["mean"], abs=5.1e-5)
            assert (rows["bare"][name] in (None, "")) == name.startswith("calibrated")


def test_rows_average_over_seeds_and_have_what_all_their_seeds_have():
    results = tuple(result(seed=seed, gap=1 + seed) for seed in range(3))
    row = SeedAggregate("m", "yours", results)
    summary = row.summarise_metrics()
    for name in ("ausuc", "calibrated_acc", "calibrated_delta", "harmonic"):  # the mean of each seed's own
        assert summary[name].mean == pytest.approx(np.mean([r.summary[name]["mean"] for r in results]), abs=STORED)
    own = [(r.summary["base_joint"]["mean"], r.summary["novel_joint"]["mean"]) for r in results]
    expected = np.mean([2 * b * n / (b + n) for b, n in own])
    assert summary["harmonic"].mean == pytest.approx(expected, abs=STORED)
    mixed = SeedAggregate("m", "yours", (*results[:2], result(seed=2, bare=True)))
    assert set(BALANCE_METRIC_NAMES) & set(mixed.metric_names) == {"harmonic", "ausuc"}


def test_what_two_rows_choose_alike_is_no_part_of_their_difference():
    """Two rows whose biases move together differ by what is left; the same hits in another order do not pair."""
    rows = [SeedAggregate(label, "yours", tuple(result(label, s, shift=shift) for s in range(3)))
            for label, shift in (("a", 1.0), ("b", 3.0))]  # fmt: skip
    first, second = (row.metric_by_resample("calibrated_acc") for row in rows)
    assert first == pytest.approx(second, abs=1e-6), "b is a with a constant on the novel logits, up to rounding"
    assert first.std() > 0.05
    comparison = compare_rows(*rows, rows)
    d = rows[0].metrics_by_episode()["calibrated_acc"] - rows[1].metrics_by_episode()["calibrated_acc"]
    assert comparison.episode_differences["calibrated_acc"].interval == pytest.approx(
        1.96 * d.std(ddof=1) / np.sqrt(60), abs=0.01
    )
    noisy = [msgspec.structs.replace(r, calibration=msgspec.structs.replace(
        r.calibration, resampled_base=r.calibration.resampled_base[::-1],
        resampled_novel=r.calibration.resampled_novel[::-1])) for r in rows[1].results]  # fmt: skip
    spread = (first - second[::-1]).var(ddof=1)
    apart = compare_rows(rows[0], SeedAggregate("b", "yours", tuple(noisy)), rows)
    expected = np.sqrt(d.var(ddof=1) / 60 + spread)
    assert apart.episode_differences["calibrated_acc"].interval == pytest.approx(1.96 * expected)
    overall = [of.overall_differences["calibrated_acc"].standard_error ** 2 for of in (comparison, apart)]
    assert overall[1] - overall[0] == pytest.approx(spread, rel=1e-6)
    assert apart.overall_differences["acc"] == comparison.overall_differences["acc"], "no bias is in it"


@pytest.mark.parametrize("tried_on_test", [False, True])
@pytest.mark.parametrize("applied", [False, True])
def test_the_interval_of_a_tuned_row_holds_how_far_resamples_choose_otherwise(tmp_path, applied, tried_on_test):
    plain = result(applied=applied)
    names = ("base_joint", "base_alone", "novel_joint", "novel_alone", "pairs", "calibrated_base", "calibrated_novel")
    hits = {name: [6000 + 100 * place, 6300 + 40 * place, 6150] for place, name in enumerate(names)}
    winners = np.random.default_rng(0).integers(0, 3, 100)
    choice = {"validation_episodes": 300, "chosen": 1, "winners": winners.tolist(), "hits": hits}
    if tried_on_test:  # the last setting is a rival, so that its hits on test episodes count, and not its others
        first = {name: int(values[:40].sum()) for name, values in plain.to_hit_counts().count_arrays().items()}
        choice |= {"rivals": [2], "test_episodes": 40, "test_hits": {name: [n, n - 30] for name, n in first.items()}}
    record = msgspec.structs.replace(
        plain, tuned={"a": {f"a={i}": 1.0 for i in range(3)}}, choice=StoredOptionChoice(**choice)
    )
    assert read_result(write_result(tmp_path, record)) == record
    summary, counts = (
        SeedAggregate("m", "yours", (record,)).summarise_metrics(),
        record.to_hit_counts().metrics_by_unit(),
    )

    def more(name: str) -> np.ndarray:
        gains = [(hits[name][place] - hits[name][1]) / 300 for place in range(3)]  # of an episode
        return np.array([*gains[:2], -30 / 40] if tried_on_test else gains)[winners]

    bias = [np.array(each) / 60 for each in (record.calibration.resampled_base, record.calibration.resampled_novel)]
    calibrated = bias[0] + more("calibrated_base") + bias[1] + more("calibrated_novel")
    joint = calibrated if applied else more("base_joint") + more("novel_joint")
    expected = {
        "acc": joint / (2 * QUERIES),
        "calibrated_acc": calibrated / (2 * QUERIES),
        "novel_alone": more("novel_alone") / QUERIES,
        "ausuc": more("pairs") / (2 * QUERIES**2),
    }
    for name, values in expected.items():
        wide = 1.96 * np.sqrt(counts[name].var(ddof=1) / 60 + (100 * values).var(ddof=1))
        # Resampled counts are rounded to whole hits, of 1,500 in all base queries of 60 episodes.
        assert summary[name].interval == pytest.approx(wide, rel=1e-3), name


def test_rows_from_before_say_that_their_intervals_hold_choices_fixed(tmp_path, monkeypatch):
    def from_before(record: Result) -> Result:
        calibration = msgspec.structs.replace(record.calibration, resampled_base=[], resampled_novel=[])
        return msgspec.structs.replace(record, calibration=calibration)

    whole_board = board(tmp_path, monkeypatch, from_before(result("before")), result("new"))
    before, new = (whole_board.find_row(label) for label in ("before", "new"))
    assert before.summarise_metrics()["calibrated_acc"].interval == pytest.approx(
        from_before(result("before")).summary["calibrated_acc"]["interval"], abs=STORED
    )
    remark = (
        "he intervals of before do not include the choice of a bias or options: their results were written before it "
        "was recorded"
    )
    assert f"T{remark}." in make_task_table(whole_board).notes
    assert f"t{remark}" in compare_rows(before, new).notes
    assert not [note for note in compare_rows(new, new).notes if remark in note]


def test_a_shown_result_says_its_bias(tmp_path):
    record = result(applied=True)
    assert [
        name for name in seed_table(SeedAggregate("new", FILE, (record,))).rows if name in BALANCE_METRIC_NAMES
    ] == list(BALANCE_METRIC_NAMES)
    hits = np.add(record.calibration.resampled_base, record.calibration.resampled_novel) / (60 * 2 * QUERIES)
    fact = (
        f"bias {record.calibration.bias:g} on the novel logits, found on 300 validation episodes, others of which move"
    )
    moved = f"cal. Acc. by {100 * hits.std(ddof=1):.2f} (standard deviation); part of the row"
    assert f"{fact} {moved}" in describe_facts([record])
    bare = result(bare=True)
    assert [name for name in seed_table(SeedAggregate("bare", FILE, (bare,))).rows if name in BALANCE_METRIC_NAMES] == [
        "harmonic",
        "ausuc",
    ]
    assert "calibration" not in describe_facts([bare])
    assert describe_facts([msgspec.structs.replace(record, calibration=None)]) != describe_facts([record])
