"""The search for options: what is tried, what is chosen from it and for whom, and where it stands in tables."""

from __future__ import annotations

import collections
import copy
import json
import math
import re
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch

from ifsl_bench import Method, Prediction, api
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.backbones.find_recipe import recipes_that_provide
from ifsl_bench.experiments import evaluate_stage, search, stages
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.search import (
    TrialRecord,
    bootstrap_selection,
    candidates_by_round,
    find_best_setting,
    options_at_edge,
)
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.options import default_options
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Choices, Range
from ifsl_bench.protocols.calibration import find_best_bias
from ifsl_bench.protocols.loader import evaluate_method
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.columns import list_table_rows
from ifsl_bench.store.schema import read_result, result_file_name, result_path
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import Reporter
from ifsl_bench.utils.serialization import read_checksummed, write_checksummed
from tests.reporters import Messages


class Scaled(Method):
    """Cosines beside the base logits; a learned offset, a temperature to choose."""

    space: ClassVar = {"temperature": Range(0.01, 100.0, log=True), LEARNING_RATE_OPTION: Range(1e-4, 1e-1, log=True)}

    def __init__(self, base, ways, *, temperature: float = 0.02):
        super().__init__(base, ways)
        self.temperature = temperature
        self.offset = torch.nn.Parameter(torch.zeros(()))

    def forward(self, support, query):
        h, c = (torch.nn.functional.normalize(x, dim=-1) for x in (query.features, support.class_means(self.ways)))
        base = torch.nn.functional.normalize(query.base_logits, dim=-1)
        return Prediction(torch.cat([base, self.temperature * h @ c.mT + self.offset], -1))


def job_of(task, work, seed=0, trials=4, method=Scaled, **options):
    return make_jobs(RunConfig([method], [task], options, {"steps": 20}, trials=trials, seeds=[seed]), work.home)[0]


def searched_in(space, default, trials, accuracy):
    """All rounds of a search, with the accuracies of a function."""
    rounds = []
    while points := search.propose_next_round(space, default, trials, rounds):
        rounds.append([(point, accuracy(point)) for point in points])
    return rounds


def test_the_first_round_fills_the_space_and_is_the_same_for_everybody():
    space = {"a": Range(1e-10, 1.0, log=True), "b": Range(1, 10), "c": Choices(("x", "y")), "d": Range(-1.0, 1.0)}
    points = search.make_evenly_spread_points(space, 64)
    assert points[:2] == [
        {"a": 1e-5, "b": 6, "c": "y", "d": 0.0},
        {"a": 1.51e-09, "b": 9, "c": "x", "d": points[1]["d"]},
    ], "pinned: results of one budget are of the same points"
    assert {type(point["b"]) for point in points} == {int}
    for share in ((np.log10([p["a"] for p in points]) + 10) / 10, (np.array([p["d"] for p in points]) + 1) / 2):
        counts, _ = np.histogram(share, bins=8, range=(0, 1))
        assert counts.min() >= 5, "8 of 64 in each eighth, were they perfectly even"
    assert sum(point["c"] == "x" for point in points) in range(28, 37)


def test_twelve_trials_find_a_peak_that_a_grid_of_half_decades_finds():
    """An accuracy that falls by a point over each decade, as LR's does on letters."""
    space, default = {"decay": Range(1e-14, 1.0, log=True)}, {"decay": 1e-3}
    for best in np.linspace(-13.9, -0.1, 24):
        rounds = searched_in(space, default, 12, lambda point, best=best: -abs(math.log10(point["decay"]) - best))
        assert (len(rounds[0]), len(rounds)) == (6, 4)
        tried = {point["decay"] for pairs in rounds for point, _ in pairs}
        assert len(tried) >= 10, "an end of the range is tried once"
        assert max(accuracy for pairs in rounds for _, accuracy in pairs) > -0.5


def test_later_rounds_change_one_option_of_the_best_in_turn():
    space = {"a": Range(0.0, 1.0), "b": Range(0.0, 1.0), "c": Choices(("x", "y", "z"))}
    default = {"a": 0.5, "b": 0.5, "c": "x"}
    rounds = searched_in(space, default, 20, lambda p: -((p["a"] - 0.3) ** 2) - (p["b"] - 0.9) ** 2 + (p["c"] == "z"))
    assert [len(pairs) for pairs in rounds] == [10, 2, 2, 2, 2, 2]
    tried = [pair for pairs in rounds[:1] for pair in pairs]
    for key, pairs in zip("abcab", rounds[1:], strict=True):
        best = max(tried, key=lambda pair: pair[1])[0]
        assert [{name for name in space if point[name] != best[name]} for point, _ in pairs] == [{key}] * 2
        tried += pairs
    above = [rounds[i][1][0]["a"] - 0.208 for i in (1, 4)]
    assert above == pytest.approx([0.5 * 10 ** (-1 / 3), 0.25 * 10 ** (-1 / 3)], abs=1e-3), "values have three digits"


@pytest.mark.parametrize("trials", [2, 3, 4, 5, 12, 100])
def test_a_search_makes_no_more_trials_than_asked_for_and_none_twice(trials):
    space, default = {"a": Range(0.0, 1.0), "b": Choices((True, False))}, {"a": 0.0, "b": True}
    rounds = searched_in(space, default, trials, lambda point: -point["a"])  # the best is the default, at an end
    points = [point for pairs in rounds for point, _ in pairs]
    assert points[0] == default
    assert len(points) <= trials
    assert all(point not in points[:i] for i, point in enumerate(points))
    assert len(points) >= trials - 16


def test_what_is_offered_first_or_last_is_an_edge_unless_the_option_ends_there():
    lda, lr = (registry.load_plugin(registry.METHOD_GROUP, name).loaded_object for name in ("lda", "ridge"))

    def edges(method, value, *alternatives, key="shrinkage", **options):
        return options_at_edge(method, options, {key: value}, [{key: choice} for choice in (value, *alternatives)])

    assert edges(lr, 1e-9, 1e-3, 1e-1, key="weight_decay") == ["weight_decay"]
    assert edges(lr, 1e-3, 1e-9, 1e-1, key="weight_decay") == []
    assert edges(lda, 0.9, 0.1, 0.3) == ["shrinkage"]
    assert edges(lda, 1.0, 0.1, 0.3) == [], "no shrinkage is larger"
    assert edges(lda, 1.0, 0.1, 0.3, form="fecam") == ["shrinkage"], "but in this form"
    assert edges(lda, "slda", "fecam", key="form") == []
    assert edges(lr, 0.1, None, "auto", 0.2, key="weight_decay") == ["weight_decay"], "among numbers"
    assert edges(lr, 0.1, 0.01, key="train.rate") == ["train.rate"]


def test_every_method_that_has_something_to_choose_declares_where():
    task = load_tasks("glyphs-5shot")[0]
    for name in registry.registered_entry_points(registry.METHOD_GROUP):
        kind = registry.load_plugin(registry.METHOD_GROUP, name).loaded_object
        if kind is None:
            continue
        recipes = recipes_that_provide(kind.needs)[:1] if kind.needs else []
        (job,) = make_jobs(RunConfig([name], ["glyphs-5shot"], recipes=recipes))
        assert kind.space or not (job.is_meta_trained or kind.grid), name
        values = {**default_options(kind, task), LEARNING_RATE_OPTION: job.meta_training_schedule.schedule.rate}
        for key, range_ in kind.space.items():
            assert isinstance(range_, Choices) or range_.low <= values[key] <= range_.high, (name, key)
            assert isinstance(range_, Choices) or 0.02 < range_.share_of_value(values[key]) < 0.98, (name, key)


def first_round(job):
    return [(candidate.option_values, candidate.job) for candidate in candidates_by_round(job)[0]]


def all_of(job, home):
    """Each candidate of a search that was made."""
    rounds = candidates_by_round(job, search.make_trial_accuracy_lookup(home))
    return [(candidate.option_values, candidate.job) for candidates in rounds for candidate in candidates]


def test_the_default_comes_first_and_shares_its_training_with_the_method_as_published(task, work):
    job = job_of(task, work, trials=8)
    (point, default), *pairs = first_round(job)
    assert point == {"temperature": 0.02, LEARNING_RATE_OPTION: 1e-3}
    assert len(pairs) == 3
    plain = job_of(task, work, trials=0)
    assert plain.setting == "paper"
    assert stages.MetaTrainStage(default).key(work.home) == stages.MetaTrainStage(plain).key(work.home)
    assert [trial_job.method_options["temperature"] for _, trial_job in pairs] == [
        point["temperature"] for point, _ in pairs
    ]
    assert [trial_job.meta_training_schedule.schedule.rate for _, trial_job in pairs] == [
        point[LEARNING_RATE_OPTION] for point, _ in pairs
    ]


@pytest.mark.slow("a search trains methods")
def test_one_seed_chooses_for_all_and_the_choice_is_that_of_the_first_half(task, work):
    first, second = (api.run_job(job_of(task, work, seed), work) for seed in (0, 1))
    assert first.label == "Scaled@tuned-4.train.steps=20"
    assert (first.setting, first.n_trials, first.chosen_option_names) == (
        "tuned-4",
        4,
        {"temperature", LEARNING_RATE_OPTION},
    )
    (tried,) = first.tuned.values()
    assert second.tuned == first.tuned
    assert second.options == first.options
    assert first.rounds == [2, 2]
    best = max(tried, key=tried.get)
    assert f"temperature={first.options['temperature']:g}" in best
    job = job_of(task, work)
    for spelled, (point, trial_job) in zip(tried, all_of(job, work.home), strict=True):
        method = stages.MetaTrainStage(trial_job).compute(work).method.eval()
        loader, hits = stages.make_pretrain_stage(trial_job).open_task(work).loader("val"), 0
        episodes = job.task.evaluation.validation_halves[0]
        assert (episodes, job.task.evaluation.validation_halves[1]) == (range(10), range(10, 20))
        for i in episodes:  # one at a time
            batch = loader.load_batch(i, 1)
            with torch.no_grad():
                hits += int((method(batch.support, batch.query).logits.argmax(-1) == batch.query_labels).sum())
        assert tried[spelled] == pytest.approx(100 * hits / (len(episodes) * batch.query_labels.shape[1])), point
    _holds_against_a_plain_loop(first, job, work)
    board = load_task_results(job.task, work.home.results)
    (row,) = (row for row in board.rows if row.label == first.label)
    assert (row.seeds, row.n_trials) == ((0, 1), 4)
    assert {place.row.label: place.reason_for_provisional_rank for place in board.ranking.ranked_rows}[
        row.label
    ].endswith("--setting tuned-4")
    assert list_table_rows(board)[0].measured_row is row


def _holds_against_a_plain_loop(result, job, work):
    """Checks the choices by other draws of validation episodes, and what a row makes of it."""
    of_setting, calibrated = [], []
    for _, trial_job in all_of(job, work.home):
        method = stages.MetaTrainStage(trial_job).compute(work).method.eval()
        loader = stages.make_pretrain_stage(trial_job).open_task(work).loader("val")
        evaluation = evaluate_method(method, "", loader, range(10))
        of_setting.append(evaluation.counts.base_joint + evaluation.counts.novel_joint)
        bias = find_best_bias(evaluation.margins)
        calibrated.append(
            int((evaluation.margins.base_margins >= bias).sum() + (evaluation.margins.novel_margins < bias).sum())
        )
    assert result.choice.chosen == np.argmax([hits.sum() for hits in of_setting])
    for winner, drawn in zip(result.choice.winners, np.random.RandomState(0).randint(10, size=(100, 10)), strict=True):
        assert winner == np.argmax([hits[drawn].sum() for hits in of_setting])
    hits = result.choice.hits
    assert np.add(hits["base_joint"], hits["novel_joint"]).tolist() == [each.sum() for each in of_setting]
    assert np.add(hits["calibrated_base"], hits["calibrated_novel"]).tolist() == calibrated
    _rivals_hold_against_a_plain_loop(result, job, work)
    assert read_result(result_path(work.home.results, result)) == result


def _rivals_hold_against_a_plain_loop(result, job, work):
    """Checks the test hits of the settings that other draws would choose, each with the bias of its own."""
    choice, jobs = result.choice, [trial_job for _, trial_job in all_of(job, work.home)]
    wins = collections.Counter(choice.winners)
    rivals = [place for place in range(len(jobs)) if place != choice.chosen and wins[place] >= 2]
    assert choice.rivals == sorted(rivals, key=lambda place: -wins[place])[:6]
    for i, place in enumerate(choice.rivals, 1):
        method = stages.MetaTrainStage(jobs[place]).compute(work).method.eval()
        loader = stages.make_pretrain_stage(jobs[place]).open_task(work).loader
        val = evaluate_method(method, "", loader("val"), range(10))
        test = evaluate_method(method, "", loader("test"), range(len(result.to_hit_counts())))
        bias = find_best_bias(val.margins)
        assert choice.test_hits["base_joint"][i] == test.counts.base_joint.sum()
        assert choice.test_hits["calibrated_base"][i] == (test.margins.base_margins >= bias).sum()
        assert choice.test_hits["calibrated_novel"][i] == (test.margins.novel_margins < bias).sum()
    if choice.rivals:
        assert choice.test_episodes == len(result.to_hit_counts())
        assert choice.test_hits["novel_alone"][0] == result.to_hit_counts().novel_alone.sum()


def test_resamples_choose_among_sound_settings_alone():
    rng = np.random.default_rng(0)
    hits = {name: {"base_joint": rng.integers(0, 9, 40).tolist(), "novel_joint": rng.integers(0, 9, 40).tolist()}
            for name in "abcd"}  # fmt: skip
    failed = {
        "b": TrialRecord(99.0, 40, 3, hits={key: [9] * 40 for key in hits["b"]}),
        "e": TrialRecord(0.0, 40, diverged="far"),
    }
    right = {name: np.add(of["base_joint"], of["novel_joint"]) for name, of in hits.items()}
    tried = {name: TrialRecord(float(right[name].mean()), 40, hits=of) for name, of in hits.items()} | failed
    best = max("acd", key=lambda name: right[name].sum())
    choice = bootstrap_selection(tried, best)
    again = [max("acd", key=lambda name: right[name][drawn].sum())
             for drawn in np.random.RandomState(0).randint(40, size=(100, 40))]  # fmt: skip
    assert set(again) == {"a", "c", "d"}
    assert [list(tried)[place] for place in choice["winners"]] == again
    assert list(tried)[choice["chosen"]] == best
    assert choice["hits"]["base_joint"] == [sum(trial.hits.get("base_joint", [])) for trial in tried.values()]


def test_a_search_goes_on_where_it_was_interrupted(task, work, monkeypatch):
    runs, evaluate = [], search.evaluate_method

    def counted(method, name, loader, episodes, *more, **how):
        if more:
            runs.append(more[1])
            if len(runs) == 3:
                raise KeyboardInterrupt
        return evaluate(method, name, loader, episodes, *more, **how)

    for module in (search, evaluate_stage):
        monkeypatch.setattr(module, "evaluate_method", counted)
    with pytest.raises(KeyboardInterrupt):
        api.run_job(job_of(task, work), work)
    api.run_job(job_of(task, work), work)
    assert len(runs) == 3 + 2 + 2, "two trials that were done are kept; test episodes, and those that calibrate, follow"
    assert runs[2] == runs[3]
    assert [title.split()[0] for title in runs[-2:]] == ["calibrating", "evaluating"]


@pytest.mark.slow("a search trains methods")
def test_a_setting_that_diverges_is_passed_over(task, work):
    class Fragile(Scaled):
        """Its logits overflow once the parameter has gone far."""

        space: ClassVar = {LEARNING_RATE_OPTION: Range(1e-4, 1e6, log=True)}

        def forward(self, support, query):
            return Prediction(super().forward(support, query).logits * self.offset.square().exp())

    with pytest.warns(UserWarning, match=r"train.rate=\d.* is passed over: meta-training of 'Fragile.*' diverged"):
        result = api.run_job(job_of(task, work, trials=3, method=Fragile), work)
    (tried,) = result.tuned.values()
    assert result.passed_over
    assert all(tried[setting] == 0 for setting in result.passed_over)


def test_the_best_sound_setting_is_chosen():
    tried = {
        "a": TrialRecord(50.0, 1000, 1),
        "b": TrialRecord(60.0, 1000, 2),
        "c": TrialRecord(55.0, 1000),
        "d": TrialRecord(55.0, 1000),
    }
    with pytest.warns(UserWarning, match="x: b is passed over: inner solves fail in 2 of 1000 validation episodes"):
        assert find_best_setting("x", tried, Reporter()) == "c", "the first of equally good ones"
    with pytest.raises(UserError, match="none of 1 settings works"), pytest.warns(UserWarning, match="passed over"):
        find_best_setting("x", {"b": tried["b"]}, Reporter())


def test_what_has_nothing_to_choose_is_the_same_in_every_setting(task, work):
    (tuned,) = make_jobs(RunConfig(["imprint"], [task], trials=12), work.home)
    (plain,) = make_jobs(RunConfig(["imprint"], [task]), work.home)
    assert tuned == plain
    assert plain.setting == "every"
    for bad in (1, -1, 2.0):
        with pytest.raises(UserError, match=f"2 to 10,000, not {bad}"):
            make_jobs(RunConfig(["imprint"], [task], trials=bad), work.home)


def test_a_tuned_baseline_keeps_its_grid_as_published_and_searches_wider_with_a_budget(task, work):
    (paper,) = make_jobs(RunConfig(["lr"], [task]), work.home)
    (tuned,) = make_jobs(RunConfig(["lr"], [task], trials=12), work.home)
    assert (paper.setting, paper.label) == ("paper", "lr")
    assert (tuned.setting, tuned.label) == ("tuned-12", "lr@tuned-12")
    grid = [point["weight_decay"] for point, _ in first_round(paper)]
    assert (len(grid), min(grid), max(grid)) == (25, 1e-13, 1e-1)
    assert min(point["weight_decay"] for point, _ in first_round(tuned)) < 1e-10
    result = api.run_job(paper, work)
    assert set(next(iter(result.tuned.values()))) == {f"weight_decay={value:.15g}" for value in grid}
    assert (result.edge == ["weight_decay"]) == (result.options["weight_decay"] in (1e-13, 1e-1))
    assert result.rounds == [25]
    (in_sessions,) = make_jobs(RunConfig(["lr"], ["glyphs-sessions"]), work.home)
    larger = [point["weight_decay"] for point, _ in first_round(in_sessions)]
    assert larger == [*grid, 0.316, 1.0, 3.16, 10.0]


COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def searched(clusters_source, tmp_path_factory):
    """Good results by label, tuned and as published, as a run writes them: (home, values, tasks)."""
    root = tmp_path_factory.mktemp("searched") / "clusters"
    shutil.copytree(clusters_source, root)
    work, task, values = api.workspace(root / "home", device="cpu"), f"{root / 'clusters.toml'}:clusters-5shot", {}
    runs = [("lr", 3, {}), ("lr", 0, {}), ("lr", 3, {"weight_decay": 0.01}), ("lwof", 3, {}), ("imprint", 0, {})]
    for name, tune, options in runs:
        train = {"steps": 20} if name == "lwof" else {}
        result = api.run(name, task, options=options, train=train, tune=tune, seed=1, work=work)
        value = json.loads((work.home.results / result.task / f"{result.label}.seed-1.json").read_text())
        value["provenance"] |= {"command": "ifsl-bench run", "commit": COMMIT}  # whatever the state of this checkout
        values[result.label] = value
    return work.home, values, {listed_task.name: listed_task for listed_task in load_tasks(str(root / "clusters.toml"))}


def checked(searched, folder, label, change=lambda value: None):
    """Checks a good result after a change."""
    home, values, tasks = searched
    value = copy.deepcopy(values[label])
    change(value)
    path = folder / result_file_name(value["label"], value["seed"])
    path.write_text(json.dumps(value))
    return check_file(path, tasks, home)


@pytest.mark.slow("a search trains methods")
def test_a_search_that_was_made_is_found_good(searched, tmp_path):
    assert searched[1].keys() == {"lr@tuned-3", "lr", "lr.weight_decay=0.01", "lwof@tuned-3.train.steps=20", "imprint"}
    for label in searched[1]:
        report = checked(searched, tmp_path, label)
        assert (report.failures, report.unverified_notes) == ((), ()), label


def tried(value):
    """The one search's settings and accuracies."""
    (accuracies,) = value["tuned"].values()
    return accuracies


def set_tried(value, accuracies):
    value["tuned"] = {"weight_decay": accuracies}


def pass_over_best(value):
    value["passed_over"] = [max(tried(value), key=tried(value).get)]


def spread(value):
    """Accuracies of which no two are equal."""
    for i, key in enumerate(tried(value)):
        tried(value)[key] = 50.0 - abs(i - 1)  # the second one, between the others, is the best
    value["options"]["weight_decay"] = float(list(tried(value))[1].partition("=")[2])
    value["edge"] = []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spread, ""),
        (lambda v: v.update(setting="paper", label="lr"), "is none of the settings to try"),
        (lambda v: v["options"].update(weight_decay=0.5), "options.weight_decay: 0.5, the best of those tried"),
        (lambda v: (spread(v), pass_over_best(v)), "options.weight_decay: "),
        (lambda v: v.update(passed_over=list(tried(v))), "passed_over: all that was tried"),
        (lambda v: set_tried(v, dict(list(tried(v).items())[:1])), "was not tried; 'tuned-3' has rounds of 3"),
        (lambda v: set_tried(v, {f"weight_decay={x}": 50.0 for x in (0.1, 0.2, 0.3)}), "weight_decay=0.1 is none of"),
        (lambda v: set_tried(v, tried(v) | {"weight_decay=0.3": 99.0}), "tuned: 4 settings were tried, 'tuned-3'"),
        (lambda v: v.update(setting="tuned-99999"), "setting: 'tuned-99999', a run tries at most 10,000"),
        (lambda v: v.update(tuned={}), "setting: 'tuned-3', and nothing was tuned"),
        (lambda v: v.update(edge=[] if v["edge"] else ["weight_decay"]), "edge: "),
        (lambda v: v.update(train={"steps": 5}), "train: steps, and method ridge with these options trains nothing"),
        (lambda v: v.update(transductive=True), "transductive: true, method ridge says otherwise"),
        (lambda v: v["provenance"].update(revision=1), "provenance: method ridge as it is installed here has"),
        (lambda v: v.update(calibration=None), "calibration: missing; task clusters-5shot has base classes"),
        (lambda v: v["provenance"].update(distribution={}), "distribution: name and version missing; method"),
        (lambda v: v["provenance"]["distribution"].update(name="torch"), "method: 'ridge' of package torch"),
        (lambda v: v["provenance"]["distribution"].update(version=3), "provenance.distribution"),
    ],
)  # fmt: skip
def test_a_search_that_was_not_made_is_found_out(searched, tmp_path, change, message):
    failures = checked(searched, tmp_path, "lr@tuned-3", change).failures
    assert any(message in failure for failure in failures) if message else not failures, failures


def test_a_package_is_one_however_its_name_is_spelled(searched, tmp_path):
    spelled = {"name": "ifsl-bench", "version": "0"}
    report = checked(searched, tmp_path, "imprint", lambda v: v["provenance"].update(distribution=spelled))
    assert not [line for line in report.failures if "method" in line]


def test_another_version_of_the_method_leaves_what_it_may_have_changed_unverified(searched, tmp_path):
    def change(value):
        value["provenance"]["distribution"]["version"] = "99.0"
        value["provenance"]["revision"] = 9

    report = checked(searched, tmp_path, "lr", lambda v: v["provenance"]["distribution"].update(version="99.0"))
    assert (report.failures, report.unverified_notes) == ((), ()), "of the same revision"
    report = checked(
        searched, tmp_path, "lr",
        lambda v: (v["provenance"]["distribution"].update(version="99.0"), v.update(transductive=True)),
    )  # fmt: skip
    assert report.failures == (), "another version may search otherwise"
    assert [text.partition(",")[0] for text in report.unverified_notes] == ["choice of options"]
    report = checked(searched, tmp_path, "lr", change)
    assert (report.failures, len(report.unverified_notes)) == ((), 1)
    assert re.fullmatch(r"distribution, since the method is of \S+ 99\.0, installed is \S+", report.unverified_notes[0])
    report = checked(searched, tmp_path, "lr", lambda v: (change(v), v.update(transductive=True)))
    assert report.failures == ()
    assert [text.partition(",")[0] for text in report.unverified_notes] == ["distribution", "choice of options"]


def test_without_the_method_the_numbers_of_a_search_are_held_against_each_other(searched, tmp_path, monkeypatch):
    def stranger(value):
        value |= {"method": "zzz", "label": value["label"].replace(value["label"].split("@")[0], "zzz")}
        value["provenance"]["distribution"] = {"name": "zzz", "version": "1"}

    for label in ("lr@tuned-3", "lwof@tuned-3.train.steps=20", "lr", "imprint"):
        assert checked(searched, tmp_path, label, stranger).failures == (), label
    failures = checked(searched, tmp_path, "lr@tuned-3", lambda v: (stranger(v), v.update(tuned={}))).failures
    assert "rounds: [3], and 0 settings were tried" in failures


OWN = """
import torch
from ifsl_bench import Method, Prediction, Range

class Own(Method):
    space = {"temperature": Range(0.01, 100.0, log=True)}

    def __init__(self, base, ways, *, temperature: float = 0.02):
        super().__init__(base, ways)
        self.temperature = temperature
        LEARNED

    def forward(self, support, query):
        h, c = (torch.nn.functional.normalize(x, dim=-1) for x in (query.features, support.class_means(self.ways)))
        scale = self.temperature + getattr(self, "offset", 0.0)
        return Prediction(torch.cat([query.base_logits, scale * h @ c.mT], -1))
"""


@pytest.mark.parametrize("learned", ["pass", "self.offset = torch.nn.Parameter(torch.zeros(()))"])
def test_a_trial_is_of_one_method_and_one_backbone(task, work, tmp_path, learned, monkeypatch):
    """With other code, or another backbone, the trial is made anew."""
    file = tmp_path / "own.py"

    def trials(text):
        file.write_text(text.replace("LEARNED", learned))
        job = job_of(task, work, trials=2, method=f"{file}:Own")
        return job, [search.TrialStage(trial_job) for _, trial_job in first_round(job)]

    job, original_trials = trials(OWN)
    api.run_job(job, work)
    assert all(trial.is_cached(work.home) for trial in original_trials)
    monkeypatch.setattr(stages.PretrainStage, "weights_checksum", lambda self, home: "0" * 64)
    assert not any(trial.is_cached(work.home) for trial in original_trials)
    monkeypatch.undo()
    _, changed = trials(OWN.replace("return Prediction", "scale = -scale\n        return Prediction"))
    assert not any(trial.is_cached(work.home) for trial in changed)
    _, commented = trials(OWN + "# a remark")
    assert all(trial.is_cached(work.home) for trial in commented)


@pytest.mark.parametrize(
    "change", [{"accuracy": 101.0}, {"accuracy": "high"}, {"episodes": 0}, {"unconverged": -1}, {"diverged": 1}]
)
def test_an_impossible_trial_is_tried_again(tmp_path, change):
    path, tried = tmp_path / "trial.json", TrialRecord(50.0, 10, hits={"base_joint": [3] * 10})
    search.write_trial(path, tried, "abc", "a job", {})
    assert search.read_trial(path, "abc", lambda _: True) == tried
    assert search.read_trial(path, "other weights", lambda _: True) is None
    write_checksummed(path, {**read_checksummed(path), **change})
    reporter = Messages()
    assert search.read_trial(path, "abc", lambda _: True) is None
    assert path.exists()
    assert search.read_trial(path, "abc", lambda _: True, reporter) is None
    assert not path.exists()
    assert "trial.json is damaged" in reporter.warned[0]
