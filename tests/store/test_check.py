"""Contributed result files: a good one passes, and whatever is wrong with one is named."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import msgspec
import pytest

from ifsl_bench import api
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.protocols.metrics import EPISODE_COUNT_NAMES, OPTIONAL_EPISODE_COUNT_NAMES, summarise_by_metric
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.table import OUTPUT_FORMATS, TABLE_FORMATTERS
from ifsl_bench.store import check
from ifsl_bench.store.result_folder import find_results_of_other_episodes, packaged_results_folder, read_results
from ifsl_bench.store.schema import Result, parse_result, result_file_name, round_summary, write_result
from ifsl_bench.utils.errors import is_printable
from ifsl_bench.utils.files import Paths
from tests.store.result_fields import altered, listed

COMMIT = "0123456789abcdef" * 2 + "01234567"
STORED = sorted(packaged_results_folder().glob("*/*.seed-*.json"))


@pytest.fixture
def file(tmp_path) -> Path:
    """A good file in its folder."""
    path = tmp_path / "glyphs-5shot" / "lwof.seed-1.json"
    path.parent.mkdir()
    write_result(tmp_path, listed(parse_result(packaged_results_folder() / "glyphs-5shot" / path.name)))
    return path


@pytest.mark.slow("checks all results")
def test_every_stored_result_passes():
    failures = {str(path): check_file(path).failures for path in STORED}
    assert len(failures) >= 36
    assert not any(failures.values()), {path: errors for path, errors in failures.items() if errors}


def test_a_good_file_in_one_line(file):
    report, acc = check_file(file), json.loads(file.read_text())["summary"]["acc"]
    line = f"ok: lwof on glyphs-5shot, seed 1, 2,000 episodes, Acc. {acc['mean']:.2f} ± {acc['interval']:.2f}"
    assert report.summary_line.startswith(line)
    # An environment without the data cannot draw their classes again; one of another version cannot speak for that.
    assert {text.partition(",")[0] for text in report.unverified_notes} <= {"classes", "distribution"}


CLEAR = "\x1b[2J"  # clears a terminal
BAD = (CLEAR, "a\nb", "\u202eabc", "\u2066x", "\x9b1m", "\u200bx", "\ufeff", "\x00")
SECTIONS = ("provenance", "pretraining", "cost", "solver", "tuned", "training", "options", "train", "summary")
TUNED = {"c": {"3": 1.0}}


def shorten(value: dict) -> None:
    """Takes the last episode out."""
    for name in ("base_joint", "base_alone", "novel_joint", "novel_alone", "pairs"):
        del value["episodes"][name][-1]
    del value["episodes"]["classes"][-5:]
    value["episodes"] |= {"calibrated_base": [], "calibrated_novel": []}
    value["calibration"] = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("digest"), "it is not a valid result: Object missing required field `digest`"),
        (lambda v: v.update(schema=9), "it is no result of schema 1"),
        (lambda v: v["episodes"]["base_joint"].__setitem__(5, 25), "more joint hits than hits alone"),
        (lambda v: v.update(digest="0" * 64), "digest: 0000000000000000, the 2,000 episodes of glyphs-5shot have"),
        (lambda v: v.update(fingerprint="0" * 64), "fingerprint: 0000000000000000, task glyphs-5shot is pinned to 326"),
        (lambda v: v.update(task_hash="0" * 16), "task_hash: 0000000000000000, today's definition of glyphs-5shot"),
        (lambda v: v.update(task="glyphs-6shot"), "task: unknown task 'glyphs-6shot'; did you mean"),
        (lambda v: v.update(task="glyphs-5shot+ways=5"), "task: 'glyphs-5shot+ways=5' is called 'glyphs-5shot'"),
        (lambda v: v.update(task="glyphs-1shot"), "folder: it lies with the results of glyphs-5shot, and is of"),
        (lambda v: v.update(task="/etc/glyphs.toml"), "task: '/etc/glyphs.toml' is no task's name"),
        (lambda v: v.update(partial=True), "partial: true, data set glyphs with this fingerprint is the whole"),
        (lambda v: v.update(label="mine"), "label: 'mine', method, options and number of episodes make it 'lwof'"),
        (lambda v: v.update(label="mine"), "file name: label and seed make it mine.seed-1.json"),
        (lambda v: v.update(options={"normalise": True}), "number of episodes make it 'lwof.normalise=true'"),
        (lambda v: v.update(options={"normalize": True}), "options: unknown option 'normalize' of method 'lwof'"),
        (lambda v: v.update(seed=2), "pretraining.key: 'glyphs-resnet-small-cosine-seed1"),
        (lambda v: v["provenance"].update(commit="abc+changes"), "measured with files changed since commit abc"),
        (lambda v: v["episodes"].update(base_queries=26), "episodes.base_queries is 26, episodes of the task have 25"),
        (shorten, "make it 'lwof.episodes=1999'"),
        (lambda v: v["cost"].update(parameters=-1e300), "cost[...]: Expected `float` >= 0.0"),
        (lambda v: v.update(tuned={"normalise": {}}), "tuned: normalise is no option that method lwof tunes"),
        (lambda v: v["pretraining"].update(processes=[2, 0]), "pretraining.processes[1]: Expected `int` >= 1"),
        (lambda v: v["pretraining"].update(sha256="x"), "pretraining.sha256: Expected 64 hexadecimal digits"),
        (lambda v: v["pretraining"].update(key="a\nok: b"), "pretraining.key: 'a\\nok: b', task, data and seed make"),
        (lambda v: v.update(novel_fingerprint="f"), "novel_fingerprint: Expected 64 hexadecimal digits or none"),
        (lambda v: v.update(novel_fingerprint="f" * 64), "novel_fingerprint: 'ffffffffffffffff', the novel"),
        (lambda v: v.update(seed=-1), "Expected `int` >= 0 - at `$.seed`"),
        (lambda v: v["summary"]["acc"].update(p=0.5), "summary.acc.p does not follow from the counts"),
        (lambda v: v.update(label="a\x1b[31m"), "it is not a valid result: label 'a\\x1b[31m' is not printable text"),
        (lambda v: v["provenance"].update(commit="main"), "provenance.commit: Expected a commit of Git"),
        (lambda v: v["provenance"].update(command={"a": 1}), "provenance.command: Expected `str`, got `object`"),
        (lambda v: v["provenance"].update(method_source="zzz"), "provenance.method_source: Expected 16 hexadecimal"),
        (lambda v: v["provenance"].update(version="99.9"), "provenance.version: '99.9' is newer than"),
        (lambda v: v["provenance"].update(time="tomorrow"), "provenance.time: 'tomorrow' is no time"),
        (lambda v: v["provenance"].update(time="2026-01-01T00:00:00+02:00"), "Expected a time such as"),
        (lambda v: v["provenance"].update(time="9999-01-01T00:00:00+00:00"), "is in the future"),
        (
            lambda v: v["provenance"]["libraries"].update(torch=CLEAR),
            f"provenance.libraries.torch: {CLEAR!r} can",
        ),
        (lambda v: v["pretraining"].update(device=CLEAR), f"pretraining.device: {CLEAR!r} cannot be printed"),
        (lambda v: v["training"].update(solves={"a": [[{"b": [1, CLEAR]}]]}), f"training.solves.a.b: {CLEAR!r} cannot"),
        (lambda v: v["options"].update(weight_decay=CLEAR), f"options.weight_decay: {CLEAR!r} cannot be printed"),
        (lambda v: v.update(setting=CLEAR), f"setting: {CLEAR!r} cannot be printed"),
        (lambda v: v.update(edge=["x", CLEAR]), f"edge: {CLEAR!r} cannot be printed"),
        (lambda v: v["provenance"].update(note="x"), "provenance: Object contains unknown field `note`"),
        (lambda v: v["provenance"]["libraries"].update({"a b": "1"}), "provenance.libraries: Expected the name of a"),
        (
            lambda v: v["provenance"].update(distribution={"url": "y"}),
            "provenance.distribution: Object contains",
        ),
        (lambda v: v["pretraining"].update(note="x"), "pretraining: Object contains unknown field `note`"),
        (
            lambda v: v["pretraining"]["accuracy"].update({"novel/test": 1.0}),
            "pretraining.accuracy: Invalid enum",
        ),
        (lambda v: v["cost"].update(dollars=1.0), "cost: Invalid enum value 'dollars'"),
        (lambda v: v.update(solver={"solver_steps": {"least": 1.0}}), "solver[...]: Invalid enum value 'least'"),
        (lambda v: v["training"].update(note="x"), "training: Object contains unknown field `note`"),
        (lambda v: v["training"].update(solves={"good": 1}), "training.solves: Invalid enum value 'good'"),
    ],
)
def test_each_fault_is_named(file, change, message):
    failures = check_file(altered(file, change)).failures
    assert any(message in failure for failure in failures), failures
    assert all(is_printable(failure) for failure in failures)
    assert len(set(failures)) == len(failures)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_name_that_cannot_be_printed_is_refused_in_every_section(file, section):
    value = {"mean": 1.0} if section in ("solver", "tuned", "summary") else 1.0
    altered(file, lambda v: v[section].update(dict.fromkeys(BAD, value)))
    failures = check_file(file).failures
    for text in BAD:
        assert f"{section}: the name {text!r} cannot be printed as it is" in failures
    assert all(is_printable(failure) for failure in failures)


def test_what_people_write_can_be_printed(file):
    device = "Grüße 日本語 a\u3000b 👩\u200d🔬 ±"
    assert check_file(altered(file, lambda v: v["pretraining"].update(device=device))).failures == ()


def test_of_a_file_with_a_thousand_faults_few_short_lines_are_printed(file):
    altered(file, lambda v: v["cost"].update({"\n" * 10_000 + str(i): 1.0 for i in range(1000)}))
    failures = check_file(file).failures
    assert len(failures) == check.MAX_FAULTS + 1
    assert failures[-1] == "and 951 more"
    assert max(map(len, failures)) <= check.MAX_FAULT_LENGTH + 3


def test_a_clock_may_be_a_day_ahead(file):
    for hours, future in ((20, False), (30, True)):
        then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
        altered(file, lambda v, then=then: v["provenance"].update(time=then.isoformat(timespec="seconds")))
        assert ["is in the future" in failure for failure in check_file(file).failures] == [True] * future


def test_a_copy_elsewhere_passes_and_a_release_has_no_commit(tmp_path, file):
    altered(file, lambda v: v["provenance"].update(commit=""))
    assert check_file(Path(shutil.copy(file, tmp_path))).failures == ()


def test_a_link_lies_where_it_is_as_for_tables(file, tmp_path, monkeypatch):
    """The check agrees with the tables on which place is a file's own."""
    results = tmp_path / "results"
    for folder in ("glyphs-5shot", "glyphs-1shot"):
        (results / folder).mkdir(parents=True)
        (results / folder / file.name).symlink_to(file)
    right, wrong = (results / folder / file.name for folder in ("glyphs-5shot", "glyphs-1shot"))
    assert check_file(right).failures == ()
    failures = ("folder: it lies with the results of glyphs-1shot, and is of glyphs-5shot",)
    assert check_file(wrong).failures == failures
    monkeypatch.chdir(wrong.parent)
    assert check_file(Path(file.name)).failures == failures
    stored_results, remarks = read_results(results)
    assert [(r.task, r.label) for r in stored_results] == [("glyphs-5shot", "lwof")]
    assert [str(wrong) in remark for remark in remarks] == [True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "zzz"}, ""),
        ({"label": "zzz+s.b=x.a=1", "options": {"a": 1, "b": "x", "c": 3}, "tuned": TUNED, "setting": "paper"}, ""),
        ({"label": "zzz.train.steps=5", "train": {"steps": 5}}, ""),
        ({"label": "lr+a"}, "label: 'lr+a' is method attractor, the file is of method zzz"),
        ({"label": "lwof"}, "label: 'lwof' is method lwof, the file is of method zzz"),
        ({"method": "lr+a", "label": "lr+a"}, "label: 'lr+a' is method attractor, the file is of method lr+a"),
        ({"label": "a/b"}, "label: 'a/b' is no name of a method"),
        ({"method": "../../x", "label": "x"}, "method: '../../x' is no name of a method"),
        (
            {"label": "zzz", "pretraining": {"key": "x", "sha256": "0" * 64, "accuracy": {"base/val": 1}}},
            "pretraining.key: 'x', task, data and seed make it 'glyphs-resnet-small-linear-seed1-",
        ),
    ],
)
def test_what_can_be_told_without_the_method(file, changes, message):
    altered(file, lambda v: v.update({"method": "zzz", **changes}))
    report = check_file(file.rename(file.with_name(result_file_name(changes["label"], 1))))
    assert [failure[: len(message)] for failure in report.failures] == [message] * bool(message)
    assert any(text.startswith("label, options and backbone, since method") for text in report.unverified_notes)
    if not message:
        assert "label, options and backbone, since method zzz" in report.summary_line.partition("(not verified: ")[2]


def test_unreadable_files_and_published_rows_fail(tmp_path, file):
    assert "it cannot be read: No such file" in check_file(tmp_path / "none.json").failures[0]
    cut = tmp_path / "cut.json"
    cut.write_text(file.read_text()[:900])
    assert "not valid JSON" in check_file(cut).failures[0]
    paper = packaged_results_folder() / "published" / "ren2019.json"
    assert check_file(paper).failures == ("it is a table of published rows, not the result of a run",)
    (tmp_path / "published").mkdir()
    assert "among the published rows" in check_file(Path(shutil.copy(file, tmp_path / "published"))).failures[0]


@pytest.fixture
def measured(clusters, monkeypatch, work):
    """A home with results on tasks without pinned digests, made by the real run; returns (task files, paths)."""
    monkeypatch.chdir(clusters)
    name = "clusters.toml:clusters-5shot"
    api.run("lr", name, episodes=20, work=work)
    api.run("protonet", name, change={"ways": 3, "base-classes": 6}, work=work)
    return Paths.locate(clusters / "home"), {p.parent.name: p for p in work.home.results.glob("*/*.json")}


def test_episodes_are_drawn_again_where_no_digest_is_pinned(measured):
    home, paths = measured
    tasks = {t.name: t for n in paths for t in load_tasks("clusters.toml:" + n)}
    for path in paths.values():
        altered(path, lambda v: v["provenance"].update(commit=COMMIT))  # whatever the state of this checkout
        report = check_file(path, tasks, home)
        assert (report.failures, report.unverified_notes) == ((), ())
    path = paths["clusters-5shot"]
    misplaced = shutil.copy(path, next(other.parent for other in paths.values() if other != path))
    assert [f.partition(":")[0] for f in check_file(Path(misplaced), tasks, home).failures] == ["folder"]
    assert json.loads(path.read_text())["label"] == "lr.episodes=20", "tuned options are not in the label"
    good = json.loads(path.read_text())["episodes"]["classes"]
    assert len(good) == 20 * 5
    for classes, message in (
        (good[5:10] + good[:5] + good[10:], "episodes.classes: others than those of the 20 episodes of clusters-5shot"),
        ([label for i, label in enumerate(good) if i % 5], "episodes.classes has 80 entries, 20 episodes have 100"),
    ):
        altered(path, lambda v, classes=classes: v["episodes"].update(classes=classes))
        assert check_file(path, tasks, home).failures == (message,)
    altered(path, lambda v: v["episodes"].update(classes=good))
    altered(path, lambda v: v.update(digest="0" * 64))
    assert "digest: 0000000000000000, the 20 episodes" in check_file(path, tasks, home).failures[0]
    altered(path, lambda v: v.update(partial=True))
    message = "partial: true, data set clusters with this fingerprint is the whole"
    assert message in check_file(path, tasks, home).failures
    shutil.rmtree(home.data)
    assert check_file(path, tasks, home).unverified_notes == tuple(
        f"{what}, since data set clusters is not prepared here" for what in ("digest", "classes", "partial")
    )


def test_the_command(measured, file, call):
    home, paths = measured
    path = paths["clusters-5shot"]
    altered(path, lambda v: v["provenance"].update(commit=COMMIT))

    def check(*arguments: str) -> tuple[int, list[str], list[str]]:
        status, out, err = call("check", *arguments, "--home", str(home.cache))
        return status, out.splitlines(), err.splitlines()

    status, out, err = check(str(file), str(path), "--task", "clusters.toml")
    assert (status, err) == (0, [])
    assert [line.split(": ")[1] for line in out] == ["ok", "ok"]
    bad = file.with_name("bad.json")
    shutil.copy(file, bad)
    altered(bad, lambda v: v.update(digest="0" * 64))
    status, out, err = check(str(bad), str(file))
    assert status == 2
    assert len(out) == 1
    assert out[0].startswith(f"{file}: ok")
    assert [line.startswith(f"{bad}: ") for line in err] == [True, True, False]
    assert "file name" in err[0]
    assert "digest" in err[1]
    assert err[-1] == "ifsl-bench: 1 of 2 result files failed the checks"
    assert check(str(path))[0] == 2, "a task of one's own is unknown without its file"


def cut(result: Result, n: int) -> Result:
    """The result with its first n episodes alone, its summary made for these and its digest kept."""
    entry = listed(result).episodes
    ways = len(entry.classes) // len(entry.base_joint)
    parts = {name: getattr(entry, name)[:n] for name in (*EPISODE_COUNT_NAMES, *OPTIONAL_EPISODE_COUNT_NAMES)}
    parts |= {"calibrated_base": [], "calibrated_novel": [], "classes": entry.classes[: n * ways]}
    shorter = msgspec.structs.replace(
        result, episodes=msgspec.structs.replace(entry, **parts), calibration=None, images=None
    )
    return msgspec.structs.replace(
        shorter, summary=round_summary(summarise_by_metric(shorter.to_hit_counts().metrics_by_unit()))
    )


def test_check_and_tables_agree_on_which_episodes_fit(file, call):
    write_result(file.parents[1], msgspec.structs.replace(cut(parse_result(file), 3), choice=None))
    (task,) = load_tasks("glyphs-5shot")
    (reason,) = find_results_of_other_episodes(task, [parse_result(file)]).values()
    assert reason == "it has 3 episodes, those of its digest 96eea890d608 are 2,000"
    assert reason in check_file(file).failures
    status, out, err = call("compare", str(file), str(packaged_results_folder() / "glyphs-5shot" / file.name))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "cannot be compared: both say that their episodes are those of digest" in err
    for style in OUTPUT_FORMATS:
        status, out, err = call("table", "glyphs-5shot", "--results", str(file.parents[1]), "--format", style)
        text = out + err
        assert status == 0
        assert "over 3 episodes" not in text
        if style in TABLE_FORMATTERS:
            assert text.count(f"left out: lwof, seed 1 (yours): {reason}") == 1
        else:
            assert f"warning: left out: lwof, seed 1 (yours): {reason}" in text, "programs get no notes"


def test_episodes_that_nobody_can_run_are_not_drawn_again(file, monkeypatch):
    monkeypatch.setattr(
        check, "_make_sampler_of_result", lambda *_: pytest.fail("more than a million episodes would be drawn")
    )
    altered(file, lambda v: v["episodes"].update({k: v["episodes"][k] * 500 + [0] for k in EPISODE_COUNT_NAMES}))
    assert "it has 1,000,001 episodes; this task allows at most 1,000,000" in check_file(file).failures
