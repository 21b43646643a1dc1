"""Calibration in a run: ``--calibrate``, the numbers beside every row, and where there are none."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from scipy import stats

from ifsl_bench import api
from ifsl_bench.analysis.aggregate import NovelBiasAggregate, SeedAggregate, describe_fixed_factors
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.search import candidates_by_round
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.options import make_method
from ifsl_bench.protocols.calibration import Margins, ValidationBias, find_best_bias, find_bias
from ifsl_bench.protocols.loader import evaluate_method
from ifsl_bench.protocols.metrics import BALANCE_METRIC_NAMES
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.detail_tables import describe_facts, seed_table, session_tables
from ifsl_bench.store.schema import find_first_contradiction, read_result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import LogReporter
from tests.store.result_fields import altered


@pytest.fixture
def task(clusters):
    return f"{clusters / 'clusters.toml'}:clusters-1shot"


def test_the_bias_is_that_of_the_first_half_of_the_validation_episodes(task, work):
    result = api.run("protonet", task, work=work)
    (definition,) = load_tasks(task)
    prepared = work.open_task(definition, "linear", 0)
    method = make_method(registry.get_method("protonet"), prepared.base_classifier, 5, {})
    half = evaluate_method(method, "protonet", prepared.loader("val"), range(10)).margins
    assert result.calibration.validation_episodes == 10
    assert result.calibration.bias == find_best_bias(half)
    assert result.calibration.bias != find_best_bias(
        evaluate_method(method, "", prepared.loader("val"), range(20)).margins
    )
    test = evaluate_method(method, "protonet", prepared.loader("test"), range(60))
    base, novel = test.margins.joint_hits_with_bias(result.calibration.bias)
    assert result.episodes.calibrated_base == base.tolist()
    assert result.episodes.calibrated_novel == novel.tolist()
    assert result.episodes.pairs == test.counts.pairs.tolist()
    assert not result.calibration.applied
    assert set(BALANCE_METRIC_NAMES) < result.summary.keys()
    for resample, drawn in enumerate(np.random.RandomState(0).randint(10, size=(100, 10))):
        bias = find_best_bias(Margins(half.base_margins[drawn], half.novel_margins[drawn]))
        assert result.calibration.resampled_base[resample] == (test.margins.base_margins >= bias).sum()
        assert result.calibration.resampled_novel[resample] == (test.margins.novel_margins < bias).sum()


@pytest.mark.slow("whole runs in sessions")
def test_in_sessions_intervals_hold_how_far_other_validation_sequences_move_the_bias(work):
    """Hits of resamples are those of a run with their bias; their spread widens what the bias moves, and no more."""
    of = {"work": work, "episodes": 12}
    plain, applied = (
        api.run("teen", "tiny-features-sessions", calibrate=calibrate, **of) for calibrate in (False, True)
    )
    calibration = plain.calibration
    (definition,) = load_tasks("tiny-features-sessions")
    prepared = work.open_task(definition, "linear", 0)
    method = make_method(registry.get_method("teen"), prepared.base_classifier, 5, {})
    margins = evaluate_method(method, "teen", prepared.loader("val"), range(50)).margins
    biases = find_bias(margins, sequences=True).best_bias_by_resample
    base, novel = (np.reshape(hits, (100, 9)) for hits in (calibration.resampled_base, calibration.resampled_novel))
    rows, groups = np.tril_indices(10)
    for resample in (0, 99):
        bias = ValidationBias(biases[resample], 50, np.empty(0), np.empty(0))
        counts = evaluate_method(method, "teen", prepared.loader("test"), range(12), bias=bias).counts
        hits = counts.calibrated_hits.astype(int).sum(0)
        assert [hits[(rows == t) & (groups == 0)].sum() for t in range(1, 10)] == base[resample].tolist()
        assert [hits[(rows == t) & (groups > 0)].sum() for t in range(1, 10)] == novel[resample].tolist()
    queries = plain.to_hit_counts().queries.astype(int).cumsum(1).sum(0)
    accuracy = (100 * (base + novel) / queries[1:]).sum(1) / 10  # beside A_0, which no bias moves
    orders = plain.to_hit_counts().use_calibrated_counts().metric_by_sequence("acc").reshape(3, 4).mean(1)
    wide = stats.t.ppf(0.975, 2) * np.sqrt(orders.var(ddof=1) / 3 + accuracy.var(ddof=1))
    both_rows = [SeedAggregate("teen", "yours", (result,)) for result in (plain, applied)]
    summaries = [row.summarise_metrics() for row in both_rows]
    assert summaries[0]["calibrated_acc"].interval == pytest.approx(wide)
    assert summaries[1]["acc"].interval == pytest.approx(wide)
    for name in ("acc", "novel"):
        alone = stats.t.ppf(0.975, 2) * stats.sem(plain.to_hit_counts().metric_by_unit(name))
        assert summaries[0][name].interval == pytest.approx(alone), "without a bias"
    assert summaries[1]["base"].interval > stats.t.ppf(0.975, 2) * stats.sem(
        applied.to_hit_counts().metric_by_unit("base")
    )
    biased = NovelBiasAggregate("teen", "yours", (plain,))
    of_classes = {
        "acc": (base + novel, queries[1:]),
        "base": (base, np.full(9, queries[0])),
        "novel": (novel, queries[1:] - queries[0]),
    }
    for name, (hits, of) in of_classes.items():
        after = (
            plain.to_hit_counts().use_calibrated_counts().metric_after_sessions(name).reshape(3, 4, 10).mean(1)[:, 1:]
        )
        moved = (100 * hits / of).var(0, ddof=1)
        wide = stats.t.ppf(0.975, 2) * np.sqrt(after.var(0, ddof=1) / 3 + moved)
        for row in (biased, both_rows[1]):
            assert [value.interval for value in row.metric_after_sessions(name)[1:]] == pytest.approx(wide), name
    for name in ("base", "novel", "harmonic"):
        assert both_rows[1].metric_after_sessions(name)[-1].interval == pytest.approx(summaries[1][name].interval)
    first = biased.metric_after_sessions("acc")[0].interval, biased.metric_after_sessions("base")[0].interval
    assert first == pytest.approx((0, 0)), "all orders have the same base queries, and no bias moves A_0"
    fixed = "Those of just learned, novel as base and base as novel hold the bias on novel logits fixed, too."
    assert [fixed in table.notes for table in session_tables(both_rows[0])] == [False, True]
    assert [fixed in seed_table(row).notes for row in both_rows] == [False, True]
    assert not any("bias" in describe_fixed_factors([row]) for row in both_rows)
    moved = f"others of which move cal. Acc. by {accuracy.std(ddof=1):.2f} (standard deviation)"
    assert f"found on 50 validation sequences, {moved}" in describe_facts([plain])
    from_before = msgspec.structs.replace(calibration, resampled_base=[], resampled_novel=[])
    before = SeedAggregate("teen", "yours", (msgspec.structs.replace(plain, calibration=from_before),))
    assert describe_fixed_factors([before]) == "the base and novel classes and the bias on novel logits"
    assert session_tables(before)[1].notes == ["Intervals hold the bias on novel logits fixed, too."]
    for field, hits, fault in (
        ("resampled_base", [1] * 100, "has other than 100 resamples of 9 sessions"),
        ("resampled_novel", [10**7] * 900, "has more novel hits than there are novel queries"),
    ):
        odd = msgspec.structs.replace(calibration, **{field: hits})
        assert find_first_contradiction(msgspec.structs.replace(plain, calibration=odd)) == f"calibration {fault}"


@pytest.mark.slow("whole runs")
@pytest.mark.parametrize("method", ["lwof", "lr"])
def test_a_calibrated_row_differs_from_the_other_by_the_bias_and_is_of_the_same_model(method, task, work):
    about = {"train": {"steps": 10}, "work": work}
    plain, calibrated = (api.run(method, task, calibrate=calibrate, **about) for calibrate in (False, True))
    steps = ".train.steps=10" if method == "lwof" else ""
    assert (plain.label, calibrated.label) == (f"{method}{steps}", f"{method}+cal{steps}")
    assert calibrated.provenance["checkpoint"] == plain.provenance["checkpoint"]
    assert len(list(work.home.trained_models.glob("*/"))) == (method == "lwof")
    assert calibrated.options == plain.options
    assert (calibrated.calibration.applied, plain.calibration.applied) == (True, False)
    assert calibrated.calibration.bias == plain.calibration.bias
    a, b = plain.episodes, calibrated.episodes
    assert (b.base_joint, b.novel_joint) == (a.calibrated_base, a.calibrated_novel)
    for name in ("base_alone", "novel_alone", "pairs", "calibrated_base", "calibrated_novel", "classes"):
        assert getattr(b, name) == getattr(a, name)
    assert calibrated.summary["acc"] == plain.summary["calibrated_acc"] == calibrated.summary["calibrated_acc"]
    assert calibrated.summary["delta"] == plain.summary["calibrated_delta"]
    assert calibrated.summary["ausuc"] == plain.summary["ausuc"]
    files = sorted((work.home.results / "clusters-1shot").glob("*.json"))
    assert [read_result(path) for path in files] == [calibrated, plain]
    again = api.run(method, task, calibrate=True, **about)
    assert again.provenance["time"] == calibrated.provenance["time"], "stored already"


def test_options_follow_the_mark_in_a_label(task, work):
    (job,) = make_jobs(RunConfig(["lr+a"], [task], {"gamma": "0.5"}, episodes=30, calibrate=True), work.home)
    assert job.label == "lr+a+cal.gamma=0.5.episodes=30"
    assert [candidate.job.label for candidate in candidates_by_round(job)[0]] == ["lr+a.gamma=0.5.episodes=30"]
    (tuned,) = make_jobs(RunConfig(["lr"], [task], trials=3, calibrate=True), work.home)
    assert tuned.label == "lr+cal@tuned-3"
    assert not any(candidate.job.is_calibrated for candidate in candidates_by_round(tuned)[0]), (
        "its trials are those of the other row"
    )


def test_regular_tasks_stay_as_they_are_and_cannot_be_calibrated(clusters, task, work, call):
    with (clusters / "clusters.toml").open("a") as file:
        file.write('\n[variants.regular]\nof = "clusters-1shot"\nregular = true\n')
    regular = f"{clusters / 'clusters.toml'}:regular"
    result = api.run("protonet", regular, work=work)
    assert result.summary.keys() == {"acc"}
    assert result.calibration is None
    assert result.episodes.pairs == result.episodes.calibrated_base == []
    status, _, err = call("run", "--method", "protonet", "--task", regular, "--calibrate", "--home",
                          str(clusters / "home"))  # fmt: skip
    assert status == 2
    assert err.splitlines()[-1] == (
        "ifsl-bench: --calibrate: task regular has no base classes, so there is no bias to find"
    )


def test_few_validation_classes_cost_a_row_its_calibrated_numbers_alone(write_features, tmp_path, clusters, capfd):
    from ifsl_bench.data.preparing.prepare import prepare_dataset

    work = api.workspace(tmp_path / "home", device="cpu", reporter=LogReporter())
    classes = {"base": 8, "novel/train": 9, "novel/val": 4, "novel/test": 7}
    folder = write_features(tmp_path / "few", classes=classes)
    prepare_dataset(work.home, "clusters", folder, False, work.reporter, allow_partial=True)
    task = f"{clusters / 'clusters.toml'}:clusters-1shot"
    result = api.run("imprint", task, work=work)
    assert "no calibrated Acc., since validation episodes cannot be drawn" in capfd.readouterr().err
    assert result.calibration is None
    assert set(BALANCE_METRIC_NAMES) & result.summary.keys() == {"harmonic", "ausuc"}
    assert check_file(next((work.home.results / "clusters-1shot").iterdir()), {"clusters-1shot": load_tasks(task)[0]},
                      work.home).failures[1:] == ()  # fmt: skip
    with pytest.raises(UserError, match="novel/val"):
        api.run("imprint", task, calibrate=True, work=work)


@pytest.mark.parametrize("installed", [True, False])
def test_check_knows_calibrated_rows(task, work, installed, monkeypatch):
    api.run("imprint", task, calibrate=True, work=work)
    file = work.home.results / "clusters-1shot" / "imprint+cal.seed-0.json"
    good = file.read_text()
    if not installed:
        monkeypatch.setattr(registry, "registered_entry_points", lambda group: {})
    for change, message in (
        (lambda v: None, ""),
        (lambda v: v.update(label="imprint"), "label: 'imprint'"),
        (lambda v: v["calibration"].update(applied=False), "calibration has base hits that rise, or novel hits"),
    ):
        file.write_text(good)
        report = check_file(altered(file, change), {"clusters-1shot": load_tasks(task)[0]}, work.home)
        ours = [line for line in report.failures if line.startswith(("label", "calibration", "summary", "episodes"))]
        assert [message in line for line in ours[:1]] == [True] * bool(message), report.failures
