"""Times that are foretold."""

from __future__ import annotations

import json

import pytest

from ifsl_bench.data.preparing.metadata import metadata_of
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.rates import ACCELERATED, COARSE, Amount, Rates, roughly, seconds_together
from ifsl_bench.experiments.request import Request
from ifsl_bench.experiments.training_stage import MetaTrain, _stored_times, evaluation_amount
from ifsl_bench.experiments.workspace import workspace
from ifsl_bench.store.result_folder import packaged_root
from ifsl_bench.utils.files import Paths


@pytest.fixture
def home(tmp_path):
    return Paths.locate(tmp_path)


def test_a_rate_is_ones_own_or_that_of_the_likest_or_the_tables(home):
    mine, sister, stranger = (Amount("answering episodes", f"{name}/cpu", 200) for name in ("lr/a", "lr/b", "mlp/a"))
    rates = Rates(home)
    assert rates.seconds(mine) == 200 * COARSE["answering episodes"]
    assert rates.seconds(Amount("features", "net/cuda", 1e6)) == 1e6 * COARSE["features"] * ACCELERATED
    assert not rates.knows(mine)
    rates.learn(mine, 4.0)
    stored_rates = Rates(home)
    assert stored_rates.seconds(mine) == pytest.approx(4.0)
    assert stored_rates.seconds(sister) == pytest.approx(4.0), "another task's is better than none"
    assert stored_rates.knows(sister)
    assert stored_rates.seconds(stranger) == 200 * COARSE["answering episodes"]
    stored_rates.learn(mine, 1.0)
    assert Rates(home).seconds(mine) == pytest.approx(2.0), "the geometric mean"


def test_a_method_that_has_met_episodes_says_nothing_of_sequences(tmp_path):
    work, rates = workspace(tmp_path), Rates(Paths.locate(tmp_path))
    jobs = make_jobs(Request(["lr"], ["tiny-features-5shot", "tiny-features-sessions"]), work.home)
    episodes, sequences = (evaluation_amount(job, 400, work) for job in jobs)
    as_stored = rates.seconds(sequences)
    rates.learn(episodes, 0.1)
    assert (rates.knows(episodes), rates.knows(sequences)) == (True, False)
    assert rates.seconds(sequences) == as_stored
    rates.learn(sequences, 8.0)
    assert rates.seconds(episodes) == pytest.approx(0.1)


def test_the_first_times_are_those_of_the_stored_row_if_there_is_one(tmp_path):
    work, rates = workspace(tmp_path), Rates(Paths.locate(tmp_path))

    def jobs(methods, tasks, **more):
        return make_jobs(Request(methods, tasks, **{"train": {"steps": 4000}, **more}), work.home)

    def training(job):
        return rates.seconds(MetaTrain(job).amount(metadata_of(job.task, work.home, lacking=True), work))

    def stored(task, label):
        return json.loads((packaged_root() / task / f"{label}.seed-0.json").read_bytes())["cost"]

    rows = [(job, 2, stored("mini-sessions", job.row.name))
            for job in jobs(["cec", "acastle", "ncm"], ["mini-sessions", "mini-sessions+base-order=2"])]  # fmt: skip
    (with_supports,) = jobs(["lr+a"], ["glyphs-sessions"], train={}, options={"memory": "supports"})
    (with_weight,) = jobs(["lr+a"], ["glyphs-5shot"], options={"gamma": 0.5})
    rows += [(with_supports, 1, stored("glyphs-sessions", "lr+a.memory=supports")),
             (with_weight, 2, stored("glyphs-5shot", "lr+a"))]  # fmt: skip
    for job, share, cost in rows:
        evaluation = evaluation_amount(job, job.task.evaluation.episodes, work)
        assert rates.seconds(evaluation) == pytest.approx(cost["evaluation_seconds"])
        assert training(job) == pytest.approx(cost["training_seconds"] / share), "all have 8,000 steps"
    changed, unknown = jobs(["lr+a"], ["glyphs-5shot+sessions=2", "tiered-5shot"])
    assert rates.seconds(evaluation_amount(changed, 100, work)) == 100 * COARSE["answering sequences"]
    assert training(unknown) == 4000 * COARSE["meta-training"]


def test_a_stored_row_that_cannot_be_read_costs_no_run(tmp_path, monkeypatch):
    (job,) = make_jobs(Request(["ncm"], ["mini-sessions"]), workspace(tmp_path).home)
    monkeypatch.setattr("ifsl_bench.experiments.training_stage.packaged_root", lambda: tmp_path)
    (tmp_path / "mini-sessions").mkdir()
    for content in ("{", '{"cost": 1}'):
        (tmp_path / "mini-sessions" / "ncm.seed-0.json").write_text(content)
        _stored_times.cache_clear()
        assert evaluation_amount(job, 400, workspace(tmp_path)).coarse is None
    _stored_times.cache_clear()


def test_a_rows_own_guess_is_of_no_accelerator(home):
    assert Rates(home).seconds(Amount("answering episodes", "lr/a/cuda", 10, 2.0)) == 20


def test_what_nobody_knows_has_no_time_and_what_is_done_takes_none(home):
    rates = Rates(home)
    assert rates.seconds(None) is None
    assert rates.seconds(Amount("data", "mine/cpu", 1.0)) is None
    assert rates.seconds(Amount("data", "glyphs/cpu", 1.0, 7.0)) == 7.0
    assert rates.seconds(Amount("pretraining", "net/cpu", 0.0)) == 0.0
    rates.learn(Amount("features", "net/cpu", 0.0), 1.0)
    assert not rates.path.exists()


@pytest.mark.parametrize("content", ["", "[]", '{"features": 1}', '{"features": {"a": -1.0}}', "\x00"])
def test_a_damaged_file_says_nothing(home, content):
    rates = Rates(home)
    rates.path.parent.mkdir(parents=True)
    rates.path.write_text(content)
    assert Rates(home).measured == {}
    rates.learn(Amount("answering episodes", "lr/a/cpu", 2.0), 1.0)
    assert Rates(home).measured == {"answering episodes": {"lr/a/cpu": 0.5}}


def test_the_time_of_several_workers():
    whole, small = (3.0, 2), (2.0, 1)
    assert seconds_together([whole, small, small], 1, 2) == 7
    assert seconds_together([whole, small, small], 2, 2) == 3 + 2
    assert seconds_together([(9.0, 1), small, small], 2, 4) == 9


def test_times_are_said_roughly():
    texts = [roughly(seconds) for seconds in (None, 3.2, 119, 148, 3000, 7200, 90000, 400000)]
    assert texts == ["unknown", "about 3 s", "about 120 s", "about 2.5 min", "about 50 min", "about 2.0 h",
                     "about 25 h", "about 4.6 days"]  # fmt: skip
