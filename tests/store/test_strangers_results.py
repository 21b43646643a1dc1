"""Result files from people one does not know: what may stand in them, how large they may be, what a run does then."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ifsl_bench.experiments import api
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.protocols.tasks.metric_sets import COUNTS
from ifsl_bench.protocols.tasks.task_files import find, packaged
from ifsl_bench.protocols.tasks.task_files import parse as parse_tasks
from ifsl_bench.reporting import claims
from ifsl_bench.reporting.page.gather import boards_with_variants
from ifsl_bench.store import check
from ifsl_bench.store.consistency import unfit
from ifsl_bench.store.result_folder import packaged_root, stored
from ifsl_bench.store.schema import parse, read, write
from ifsl_bench.utils.errors import CorruptFile, UserError, is_printable
from ifsl_bench.utils.limits import RESULT_FILE
from tests.store.result_fields import altered, listed
from tests.store.test_hostile_results import cut

NAME = "glyphs-5shot/lr.seed-1.json"  # it has options, what was tuned, a solver
BAD = ("\x1b[2J", "a\nb", "\u202eabc", "\u2066x", "\x9b1m", "\u200bx", "\ufeff", "\x00")


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / NAME
    path.parent.mkdir()
    write(tmp_path, listed(parse(packaged_root() / NAME)))
    return path


SECTIONS = ("provenance", "pretraining", "cost", "solver", "tuned", "training", "options", "train", "summary")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_name_that_cannot_be_printed_is_refused_in_every_section(file, section):
    value: dict[str, Any] = {"solver": {"mean": 1.0}, "tuned": {"x": 1.0}, "summary": {"mean": 1.0}}
    altered(file, lambda v: v[section].update({text: value.get(section, 1.0) for text in BAD}))
    failures = check_file(file).failures
    for text in BAD:
        assert f"{section}: the name {text!r} cannot be printed as it is" in failures
    assert all(is_printable(failure) for failure in failures)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda v, text: v["provenance"]["libraries"].update(torch=text), "provenance.libraries.torch"),
        (lambda v, text: v["pretraining"].update(device=text), "pretraining.device"),
        (lambda v, text: v["training"].update(solves={"a": [[{"b": [1, text]}]]}), "training.solves.a.b"),
        (lambda v, text: v["options"].update(weight_decay=text), "options.weight_decay"),
        (lambda v, text: v.update(setting=text), "setting"),
        (lambda v, text: v.update(edge=["x", text]), "edge"),
    ],
)
def test_a_value_that_cannot_be_printed_is_refused_at_any_depth(file, change, where):
    for text in ("\x1b[2J", "\u202eabc"):
        altered(file, lambda v, text=text: change(v, text))
        failures = check_file(file).failures
        assert f"{where}: {text!r} cannot be printed as it is" in failures
        assert all(is_printable(failure) for failure in failures)


def test_what_people_write_can_be_printed(file):
    device = "Grüße 日本語 a\u3000b 👩\u200d🔬 ±"
    assert check_file(altered(file, lambda v: v["pretraining"].update(device=device))).failures == ()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda v: v["provenance"].update(note="x"), "provenance: Object contains unknown field `note`"),
        (lambda v: v["provenance"]["libraries"].update({"a b": "1"}), "provenance.libraries: Expected the name of a"),
        (
            lambda v: v["provenance"].update(distribution={"name": "x", "url": "y"}),
            "provenance.distribution: Object contains unknown field `url`",
        ),
        (lambda v: v["pretraining"].update(note="x"), "pretraining: Object contains unknown field `note`"),
        (
            lambda v: v["pretraining"]["accuracy"].update({"novel/test": 1.0}),
            "pretraining.accuracy: Invalid enum value 'novel/test'",
        ),
        (lambda v: v["cost"].update(dollars=1.0), "cost: Invalid enum value 'dollars'"),
        (lambda v: v["solver"]["solver_steps"].update(least=1.0), "solver[...]: Invalid enum value 'least'"),
        (lambda v: v["training"].update(note="x"), "training: Object contains unknown field `note`"),
        (lambda v: v["training"].update(validation={"x": 1.0}), "training.validation: Expected the number of a step"),
        (lambda v: v["training"].update(solves={"good": 1}), "training.solves: Invalid enum value 'good'"),
    ],
)
def test_a_name_that_no_run_writes_is_refused(file, change, told):
    failures = check_file(altered(file, change)).failures
    assert any(failure.startswith(told) for failure in failures), failures


def test_a_file_with_a_thousand_faults_is_told_of_in_few_short_lines(file):
    altered(file, lambda v: v["cost"].update({"\n" * 10_000 + str(i): 1.0 for i in range(1000)}))
    failures = check_file(file).failures
    assert len(failures) == check.MOST_LINES + 1
    assert failures[-1] == "and 951 more"
    assert max(map(len, failures)) <= check.MOST_LETTERS + 3


# -- one definition of what must match


def test_check_and_tables_agree_on_which_episodes_fit(file):
    whole = parse(file)
    write(file.parents[1], cut(whole, 3))
    (task,) = find("glyphs-5shot")
    (reason,) = unfit(task, [parse(file)]).values()
    assert reason == "it has 3 episodes, those of its digest 96eea890d608 are 2,000"
    assert reason in check_file(file).failures


def test_a_bias_from_other_validation_episodes_does_not_fit(file):
    (task,) = find("glyphs-5shot")
    altered(file, lambda v: v["calibration"].update(validation_episodes=3))
    failure = f"calibration.validation_episodes is 3, the task has {len(task.evaluation.halves[0])} for it"
    assert list(unfit(task, [parse(file)]).values()) == [failure]
    assert failure in check_file(file).failures


def test_episodes_that_nobody_can_run_are_not_drawn_again(file, monkeypatch):
    monkeypatch.setattr(check, "_sampler", lambda *_: pytest.fail("more than a million episodes would be drawn"))
    altered(file, lambda v: v["episodes"].update({k: v["episodes"][k] * 500 + [0] for k in COUNTS}))
    assert "it has 1,000,001 episodes; this task allows at most 1,000,000" in check_file(file).failures


# -- size

HOSTILE = {
    "a number of 5,000 digits": (b'{"schema": ' + b"9" * 5000 + b"}", "is not valid JSON ("),
    "not a number": (b'{"schema": NaN}', "is not valid JSON ("),
    "beyond all bounds": (b'{"schema": 1e999}', "is not valid JSON (Number out of range"),
    "half a character": (b'{"schema": "\\ud800"}', "is not valid JSON ("),
    "nested too deep for the parser": (b'{"schema": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is not valid JSON"),
    "a byte order mark": (b'\xef\xbb\xbf{"schema": 1}', "is not valid JSON ("),
    "UTF-16": ('{"schema": 1}'.encode("utf-16"), "is not valid JSON ("),
    "a list": (b"[1]", "holds list where a JSON object was expected"),
    "no schema but 10 MB": (b'{"schema": "' + b"x" * 10_000_000 + b'"}', "is no result of schema 1 (it says 'xxx"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_parser_should_see_is_one_line_for_check_and_for_tables(file, call, name):
    content, message = HOSTILE[name]
    file.write_bytes(content)
    status, out, err = call("check", str(file))
    assert (status, out, err.count("\n")) == (2, "", 2)
    assert message in err
    assert len(err) < 1000
    status, out, err = call("table", "glyphs-5shot", "--results", str(file.parents[1]))
    assert status == 0
    (line,) = [line for line in (out + err).splitlines() if line.startswith("left out: ")]
    assert message in line
    assert len(line) < 1000


def test_a_file_beyond_the_limit_is_not_read(file, call):
    with open(file, "r+b") as opened:
        opened.truncate(RESULT_FILE.most + 1)
    os.truncate(file, 10**12)  # a hole: no disk has so much
    assert check_file(file).failures == (
        "it has more than 33,554,432 bytes; a result of 2,000 episodes has 20,000, is it the right file?",
    )
    with pytest.raises(CorruptFile, match="has more than 33,554,432 bytes"):
        read(file)
    _, remarks = stored(file.parents[1])
    assert len(remarks) == 1


def test_each_stored_result_is_far_below_the_limits():
    contents = [path.read_bytes() for path in packaged_root().glob("*/*.seed-*.json")]
    assert max(map(len, contents)) < RESULT_FILE.most / 100


def test_a_task_whose_results_could_not_be_read_is_refused(minimal_task):
    text = minimal_task + "\n[episode]\nways = 1000\n[evaluation]\nepisodes = 100000\n"
    with pytest.raises(UserError, match=r"evaluation\.episodes is 100,000; of 1,000 classes a result file"):
        parse_tasks(text, "x.toml")
    parse_tasks(text.replace("1000\n", "5\n"), "x.toml")


# -- from the command to the row, with a damaged file among those that are stored

DAMAGE = {
    "cut episode lists": lambda path: write(path.parents[1], cut(parse(path), 3)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:900]),
    "a folder": lambda path: path.unlink() or path.mkdir(),
}


@pytest.fixture(scope="module")
def measured(clusters_source, tmp_path_factory) -> Path:
    """A home with results of two methods, three seeds each."""
    root = tmp_path_factory.mktemp("strangers") / "clusters"
    shutil.copytree(clusters_source, root)
    work = api.workspace(root / "home", device="cpu")
    for method in ("imprint", "protonet"):
        for seed in range(3):
            api.run(method, f"{root / 'clusters.toml'}:clusters-5shot", seed=seed, work=work)
    return root


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_run_among_damaged_results_stores_its_own_and_leaves_them_out(measured, tmp_path, call, name):
    root = tmp_path / "clusters"
    shutil.copytree(measured, root)
    home, task = root / "home", f"{root / 'clusters.toml'}:clusters-5shot"
    damaged = home / "results" / "clusters-5shot" / "protonet.seed-1.json"
    mine = home / "results" / "clusters-5shot" / "imprint.seed-2.json"
    original = read(damaged)
    DAMAGE[name](damaged)
    mine.unlink()
    status, out, err = call("run", "--method", "imprint", "--seed", "2", "--task", task, "--home", str(home))
    assert status == 0, err
    assert read(mine).label == "imprint"
    messages = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert len(messages) == 1, out
    assert "protonet" in messages[0]
    for command in (("table", task), ("compare", "imprint", "protonet", "--task", task)):
        status, out, err = call(*command, "--home", str(home))
        assert status == 0, err
        lines = [line for line in (out + err).splitlines() if line.startswith("left out: ")]
        assert len(lines) == (command[0] == "table")
        assert "Traceback" not in err
    status, out, err = call("show", str(damaged))
    assert (status, err.count("\n")) in ((0, 0), (2, 1)), "what is cut says nothing wrong of itself"
    status, out, err = call("check", str(damaged), "--task", task, "--home", str(home))
    assert status == 2
    status, _, err = call("run", "--method", "protonet", "--seed", "1", "--task", task, "--home", str(home))
    assert status == 0, err
    assert read(damaged).episodes == original.episodes, "the run of what is damaged makes it again"
    assert damaged.with_name(f"{damaged.name}.old-0").exists(), "and keeps what was there"


def test_lists_of_all_tasks_name_what_is_left_out_of_tasks_with_no_other_row(file, call, tmp_path):
    """Also of a task that has no measured row, and so no table."""
    shutil.copytree(file.parent, tmp_path / "mini-1shot")
    altered(file, lambda v: v["summary"]["acc"].update(mean=99.0))
    paths = file, tmp_path / "mini-1shot" / file.name
    for command in (("leaderboard",), ("table",), ("table", "--format", "csv")):
        status, out, err = call(*command, "--results", str(tmp_path))
        assert status == 0, err
        for path in paths:
            assert sum(f"left out: {path}" in line for line in (out + err).splitlines()) == 1, (command, path)
    lines = [
        line for board in boards_with_variants(packaged().values(), tmp_path, named=False) for line in board.left_out
    ]
    assert [sum(str(path) in line for line in lines) for path in paths] == [1, 1]


UNDRAWABLE = (
    ({"validation": [50.0]}, "training: Expected `object`, got `array` - at `$.validation`"),
    ({"validation": {"x": 50.0}}, "training: Expected `str` matching regex '^[0-9]{1,18}$'"),
    ({"validation": {"500": "x"}}, "training: Expected `float`, got `str` - at `$.validation[...]`"),
    ({"validation": {"500": 1e300}}, "training: Expected `float` <= 100.0 - at `$.validation[...]`"),
    ({"kept_step": None}, "training: Expected `int`, got `null` - at `$.kept_step`"),
)


def test_a_course_of_training_that_nobody_can_draw_is_left_out_everywhere(file, call, tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "judged", list)  # the page's claims are of the stored rows, and take long
    for number, (change, message) in enumerate(UNDRAWABLE):
        path = file.with_name(file.name.replace("seed-1", f"seed-{number + 10}"))
        shutil.copy(file, path)
        altered(path, lambda v, change=change: v["training"].update(change))
        assert any(message in failure for failure in check_file(path).failures)
    file.unlink()
    for command in (("table",), ("plot", "validation", "--out", str(tmp_path / "f.png")),
                    ("report", "--out", str(tmp_path / "p.html"))):  # fmt: skip
        status, out, err = call(*command, file.parent.name, "--results", str(tmp_path))
        assert [message for _, message in UNDRAWABLE if message not in out + err] == [], command
        assert "Traceback" not in err
        assert status in (0, 2), err
