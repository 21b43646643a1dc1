"""``ifsl-bench reproduce`` and ``run --retrain``."""

from __future__ import annotations

import msgspec
import pytest

from ifsl_bench import api
from ifsl_bench.analysis import task_results
from ifsl_bench.experiments import reproduce
from ifsl_bench.protocols.metrics import summarise_by_metric
from ifsl_bench.store import schema as result_file
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_value
from tests.plugin.test_identity import STRANGE

ELSEWHERE = {"device": "a processor far away"}


def strange(scale: float) -> str:
    """A meta-trained method in a file."""
    return STRANGE.format(imports="", within="pass", scale=scale)


def counted(result: result_file.Result, **columns) -> result_file.Result:
    """The same with other counts, and the summary that follows from them."""
    changed = msgspec.structs.replace(result, episodes=msgspec.structs.replace(result.episodes, **columns))
    summary = result_file.round_summary(summarise_by_metric(changed.to_hit_counts().metrics_by_unit()))
    return msgspec.structs.replace(changed, summary=summary, images=None)  # which are of other counts


@pytest.fixture
def stored(clusters, tmp_path, task, work):
    """A meta-trained method in a file, and its stored result."""
    (tmp_path / "strange.py").write_text(strange(1.0))
    api.run(str(tmp_path / "strange.py"), task, work=work)
    return clusters / "home" / "results" / "clusters-5shot" / "Strange.seed-0.json"


def again(call, path, tmp_path, clusters, *more):
    method, task = tmp_path / "strange.py", clusters / "clusters.toml"
    return call("reproduce", str(path), "--method", str(method), "--task", str(task), "--device", "cpu", *more)


def test_the_same_job_in_an_empty_home_gives_the_same_counts(call, stored, tmp_path, clusters, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    before = {path: path.read_bytes() for path in (clusters / "home").rglob("*") if path.is_file()}
    status, out, err = again(call, stored, tmp_path, clusters)
    assert (status, "identical, all counts of 60 episodes" in out) == (0, True), (out, err)
    assert {p: p.read_bytes() for p in (clusters / "home").rglob("*") if p.is_file()} == before


def test_other_code_and_other_counts_are_said_with_status_1(call, stored, tmp_path, clusters):
    home = ("--home", str(clusters / "home"))
    (tmp_path / "strange.py").write_text(strange(0.2))
    status, out, _ = again(call, stored, tmp_path, clusters, *home)
    assert status == 1
    assert "differs, Acc." in out
    assert "of 60 episodes (other code of the method)" in out
    (tmp_path / "strange.py").write_text(strange(1.0))
    assert again(call, stored, tmp_path, clusters, *home)[0] == 0
    # Counts that somebody has changed by one query in one episode.
    result = result_file.read_result(stored)
    hits = list(result.episodes.novel_joint)
    hits[3] -= 1
    changed = counted(result, novel_joint=hits, calibrated_base=[], calibrated_novel=[])
    changed = msgspec.structs.replace(changed, calibration=None)
    result_file.write_result(tmp_path / "other", changed)
    (path,) = (tmp_path / "other").rglob("*.json")
    status, out, _ = again(call, path, tmp_path, clusters, *home)
    assert status == 1
    assert "other counts in 1 of 60 episodes" in out
    assert again(call, path, tmp_path, clusters, *home, "--within", "0.5")[0] == 0
    result_file.write_result(tmp_path / "far", msgspec.structs.replace(changed, provenance=ELSEWHERE))
    (path,) = (tmp_path / "far").rglob("*.json")
    status, out, _ = again(call, path, tmp_path, clusters, *home)
    assert status == 0
    assert "differs as on another processor, Acc. " in out


@pytest.mark.parametrize(("points", "status"), [(0.5, 0), (1.5, 1)])
def test_another_processor_may_move_the_accuracy_by_a_point(call, clusters, work, monkeypatch, points, status):
    home, task = clusters / "home", clusters / "clusters.toml"
    result = api.run("imprint", f"{task}:clusters-5shot", work=work)
    queries = result.episodes.base_queries + result.episodes.novel_queries
    hits = result.episodes.read_column("novel_joint")
    hits[: round(points / 100 * queries * len(hits))] -= 1
    plain = msgspec.structs.replace(result, calibration=None, provenance=result.provenance | ELSEWHERE)
    changed = counted(plain, novel_joint=hits.tolist(), calibrated_base=[], calibrated_novel=[])
    path = result_file.write_result(work.home.results, changed)
    monkeypatch.setattr(reproduce, "run_without_storing", lambda job, work: result)  # as it has been once
    arguments = "reproduce", str(path), "--task", str(task), "--device", "cpu", "--home", str(home)
    ended, out, _ = call(*arguments)
    assert ended == status, out
    assert ("differs as on another processor, Acc. " in out) == (status == 0)
    assert f"\n  stored on a processor far away, now on {result.provenance['device']}\n" in out
    assert call(*arguments, "--within", "2")[0] == 0


@pytest.mark.slow("whole runs")
def test_counts_of_sequences_are_called_that(call, work):
    result = api.run("imprint", "tiny-features-sessions", episodes=3, work=work)
    path = result_file.result_path(work.home.results, result)
    status, out, err = call("reproduce", str(path), "--device", "cpu", "--home", str(work.home.cache))
    assert (status, "identical, all counts of 3 sequences (Acc." in out) == (0, True), (out, err)


def test_another_choice_with_the_same_counts_is_said_with_status_1(call, clusters, work, monkeypatch):
    """The stored row is edited, as if it had come of another search; the counts stay those of the run."""
    home, task = clusters / "home", clusters / "clusters.toml"
    result = api.run("lr", f"{task}:clusters-5shot", tune=3, work=work)
    path = result_file.result_path(work.home.results, result)

    def again(*more):
        return call("reproduce", str(path), "--task", str(task), "--device", "cpu", "--home", str(home), *more)[:2]

    status, out = again()
    assert (status, "identical, all counts of 60 episodes" in out) == (0, True), out
    monkeypatch.setattr(reproduce, "run_without_storing", lambda job, work: result)  # as it has been once
    best = result.options["weight_decay"]
    ((names, tried),) = result.tuned.items()
    fewer = dict(list(tried.items())[1:])
    for change, text, near in (
        (
            {"options": result.options | {"weight_decay": 0.5}},
            f"options.weight_decay is {format_value(best)} where 0.5 is",
            1,
        ),
        ({"train": {"rate": 0.25}, "tuned": {names + ", train.rate": tried}}, "train.rate is the default where 0", 1),
        ({"tuned": {names: fewer}, "rounds": [2], "choice": None}, "other settings are tried, 3 where 2 are stored", 0),
        ({"passed_over": ["weight_decay=0.5"]}, "passed_over is empty where weight_decay=0.5 is stored", 0),
        ({"edge": [] if result.edge else [names]}, "edge is ", 0),
    ):
        result_file.write_result(work.home.results, msgspec.structs.replace(result, **change))
        status, out = again()
        assert (status, "(+0.00 points), other counts in 0 of 60" in out, text in out) == (1, True, True), (text, out)
        assert again("--within", "1")[0] == near, text


@pytest.mark.parametrize("within", ["-1", "nan", "inf", "101"])
def test_a_tolerance_that_is_none_is_refused_in_one_line(call, within):
    status, _, err = call("reproduce", "nothing.json", "--within", within)
    assert (status, err) == (2, f"ifsl-bench: --within takes percentage points, 0 to 100, not {within}\n")


def test_a_result_whose_method_is_not_here_is_the_users_mistake(call, stored, clusters):
    status, _, err = call("reproduce", str(stored), "--home", str(clusters / "home"))
    assert status == 2
    assert "Strange on clusters-5shot cannot be run again here" in err
    assert err.endswith("; of a method in a file say --method FILE.py:CLASS\n")
    assert call("reproduce", "nothing.json")[0] == 2
    shown = call("show", str(stored), "--home", str(clusters / "home"))[1]
    assert f"ifsl-bench reproduce {stored} --method FILE.py:Strange\n" in shown


@pytest.mark.slow("whole runs")
def test_a_row_is_named_by_its_label_and_task(call, clusters, monkeypatch, task, work):
    """All its seeds; of a file with tasks of the user's own."""
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    api.run(["imprint"], [task], seeds=2, work=work)
    own = ("--task", str(clusters / "clusters.toml"))
    status, out, err = call("reproduce", "imprint", task, *own, "-q")
    assert (status, err) == (0, "")
    assert [line.partition(": ")[2][:44] for line in out.splitlines()] == [
        f"imprint on clusters-5shot, seed {seed}: identical" for seed in (0, 1)
    ]
    status, out, _ = call("reproduce", "imprint", task, *own, "-q", "--seed", "1")
    assert (status, out.count("\n"), "imprint on clusters-5shot, seed 1: identical" in out) == (0, 1, True)
    for arguments, words in (
        (("imprint", task, *own, "--seed", "7"), "imprint on "),
        (("x.json", "--seed", "0"), "a result file is of one seed"),
        (("imprit", task), "did you mean 'imprint'"),
        (("imprint",), "takes a result file, or a row"),
    ):
        status, out, err = call("reproduce", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_retrain_trains_again_and_keeps_the_old_model(task, work):
    trained, few = work.home.trained_models, {"train": {"steps": 4}, "work": work}
    first = api.run("lwof", task, **few)
    (folder,) = (path for path in trained.iterdir() if path.is_dir())
    checkpoint = (folder / "checkpoint.json").read_bytes()
    api.run("lwof", task, rerun=True, **few)
    assert (folder / "checkpoint.json").read_bytes() == checkpoint
    second = api.run("lwof", task, retrain=True, **few)
    assert second.episodes == first.episodes
    old_folder = trained / f"{folder.name}.replaced-0"
    assert (old_folder / "checkpoint.json").read_bytes() == checkpoint
    assert (folder / "checkpoint.json").read_bytes() != checkpoint


def test_a_result_names_no_file_to_run(stored, work, tmp_path, monkeypatch):
    """Only who types the command does."""
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("method", "strange.py:Strange"), ("task", "clusters.toml"), ("task", "clusters-5shot+a.toml"),
        ("task", "clusters+/../clusters.toml"),
    ):  # fmt: skip
        result = msgspec.structs.replace(result_file.read_result(stored), **{name: value})
        given = (None, "strange.py") if name == "task" else ("clusters.toml", None)
        with pytest.raises(UserError, match="where you trust"):
            reproduce.job_from_result(result, work.home, *given)


def test_the_command_to_run_a_row_again_names_the_row_that_is_shown(call, clusters, tmp_path, monkeypatch, task):
    """A label that the package has too is yours to `show`, and the stored one to `reproduce`."""
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    api.run("imprint", task, work=api.workspace(clusters / "home", tmp_path / "package", device="cpu"))
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "package")
    assert "ifsl-bench reproduce imprint clusters-5shot" in call("show", "imprint", task)[1]
    api.run("imprint", task, work=api.workspace(clusters / "home", device="cpu"))
    assert "ifsl-bench reproduce 'imprint (yours)' clusters-5shot" in call("show", "imprint", task)[1]
    assert "ifsl-bench reproduce 'imprint (stored)' clusters-5shot" in call("show", "imprint (stored)", task)[1]
