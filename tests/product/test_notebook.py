"""The notebook API: the numbers are those of the commands and of the stored files, and a repr is short."""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest

import ifsl_bench
from ifsl_bench import UserError
from ifsl_bench.store.data_frames import make_data_frame
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.utils.errors import MissingDependencyError
from ifsl_bench.utils.files import Paths

TASK = "glyphs-5shot"
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def pandas():
    return pytest.importorskip("pandas", reason='the extra is not installed: pip install "ifsl_bench[pandas]"')


@pytest.mark.parametrize(
    ("command", "called"),
    [
        (["table", TASK], lambda: ifsl_bench.table(TASK)),
        (["table", TASK, "--method", "lr,lr+a"], lambda: ifsl_bench.table(TASK, methods=["lr", "lr+a"])),
        (["leaderboard", TASK], lambda: ifsl_bench.leaderboard(TASK)),
        (["compare", "lr+a", "lr", "--task", TASK], lambda: ifsl_bench.compare("lr+a", "lr", TASK)),
    ],
    ids=["table", "table of rows", "leaderboard", "compare"],
)
def test_frames_have_the_numbers_of_the_commands(command, called, call, pandas):
    status, out, err = call(*command, "--format", "json")
    assert status == 0, err
    expected, result = json.loads(out), called()
    assert len(result) == len(expected)
    names = list(dict.fromkeys(name for row in expected for name in row))
    assert [{name: row.get(name) for name in names} for row in result] == expected
    frame = result.to_pandas()
    assert list(frame.columns) == names
    for name in names:
        kinds = {type(row.get(name)) for row in expected} - {type(None)}
        assert kinds not in ({int}, {bool}) or frame[name].dtype.kind == ("i" if kinds == {int} else "b"), name
    accuracy = names[4] if command[0] == "compare" else "acc"
    np.testing.assert_array_equal(frame[accuracy].dropna(), [r[accuracy] for r in expected if r[accuracy] is not None])


def unpacked(text):
    """As docs/python.md describes it: a zlib stream in base64, all low bytes first."""
    kind, count, stream = text.split()
    planes = np.frombuffer(zlib.decompress(base64.b64decode(stream)), np.uint8).reshape(int(kind[1]), int(count))
    return sum(plane.astype(int) << 8 * place for place, plane in enumerate(planes))


def test_rows_and_episodes_are_those_of_the_files(pandas):
    row = ifsl_bench.load("lr", TASK)
    files = sorted((packaged_results_folder() / TASK).glob("lr.seed-*.json"))
    assert len(row) == len(files) > 1
    episodes = row.episodes_to_pandas()
    for seed, path in enumerate(files):
        raw = json.loads(path.read_text())
        mine = episodes[episodes["seed"] == seed]
        for name in ("base_joint", "base_alone", "novel_joint", "novel_alone"):
            np.testing.assert_array_equal(mine[name], unpacked(raw["episodes"][name]))
        hits = np.add(*(unpacked(raw["episodes"][name]).astype(int) for name in ("base_joint", "novel_joint")))
        np.testing.assert_allclose(mine["acc"], 2.0 * hits)  # percent of 50 queries
        summary = row.to_pandas().iloc[seed]
        assert (summary["method"], summary["task"], summary["seed"]) == ("lr", TASK, seed)
        assert summary["acc"] == pytest.approx(raw["summary"]["acc"]["mean"], abs=1e-6)  # stored with six decimals
        assert summary["commit"] == raw["provenance"]["commit"]
        result = ifsl_bench.load(path)
        assert result.to_pandas().iloc[0]["acc"] == summary["acc"]
        assert len(result.episodes_to_pandas()) == 2000


def test_a_frame_of_sequences_has_the_triangle_of_the_file(pandas):
    frame = ifsl_bench.load("ncm (stored)", "glyphs-sessions").episodes_to_pandas()
    frame = frame[frame["seed"] == 0]
    raw = json.loads((packaged_results_folder() / "glyphs-sessions" / "ncm.seed-0.json").read_text())["episodes"]
    hits, queries = (unpacked(raw[name]).astype(float).reshape(400, -1) for name in ("hits", "queries"))
    triangle = np.full((400, 11, 11), np.nan)
    for column, (t, g) in enumerate((after, group) for after in range(11) for group in range(after + 1)):
        triangle[:, t, g] = 100 * hits[:, column] / queries[:, g]
    np.testing.assert_allclose(frame[[f"of_{g}" for g in range(11)]].to_numpy().reshape(400, 11, 11), triangle)


@pytest.fixture
def one_seed_of_mine():
    """The user's own lr, as the tutorial's command stores it: one seed, beside the five stored ones."""
    folder = Paths.locate().results / TASK
    folder.mkdir(parents=True)
    shutil.copy(packaged_results_folder() / TASK / "lr.seed-0.json", folder)


def test_a_comparison_says_whose_rows_it_took_and_has_the_same_columns_with_one_seed(one_seed_of_mine, call, pandas):
    # mlp+a has no hits of single images there: nothing but other trainings would make the interval an overall one
    stored_comparison, own_comparison = (ifsl_bench.compare("mlp+a", b, TASK) for b in ("lr (stored)", "lr"))
    assert repr(stored_comparison).startswith("A = mlp+a (stored), B = lr (stored), task")
    assert repr(own_comparison).startswith("A = mlp+a (stored), B = lr (yours), task")
    assert call("compare", "mlp+a", "lr", "--task", TASK)[1].startswith("A = mlp+a (stored), B = lr (yours), task")
    five_seeds, one_seed = stored_comparison.to_pandas(), own_comparison.to_pandas()
    assert list(one_seed.columns) == list(five_seeds.columns)
    assert set(one_seed["b"]) == {"lr (yours)"}
    for name in ("interval_overall", "p_overall"):
        assert one_seed[name].isna().all(), "one seed says nothing of other trainings"
        assert five_seeds[name].notna().all()
        assert one_seed[name].dtype == five_seeds[name].dtype == float


def test_columns_of_frames_do_not_depend_on_what_the_results_have(pandas, tmp_path):
    printed_only = "tiered-5shot"
    for frame in (ifsl_bench.table, ifsl_bench.leaderboard):
        assert set(frame(TASK).to_pandas()) == set(frame(printed_only, TASK).to_pandas())
    raw = json.loads((packaged_results_folder() / TASK / "lr.seed-0.json").read_text())
    raw |= {"calibration": None, "choice": None, "images": None}
    for part, names in (("summary", ("acc", "delta")), ("episodes", ("base", "novel"))):
        for name in names:
            del raw[part][f"calibrated_{name}"]
    (tmp_path / "lr.seed-0.json").write_text(json.dumps(raw))  # as from a task without validation episodes
    whole, plain = ifsl_bench.load("lr", TASK), ifsl_bench.load(tmp_path / "lr.seed-0.json")
    none = whole[:0]
    for name, *frames in (
        ("calibrated_acc", whole.to_pandas(), plain.to_pandas(), none.to_pandas()),
        ("calibrated_base", whole.episodes_to_pandas(), plain.episodes_to_pandas(), none.episodes_to_pandas()),
    ):
        assert all(list(frame.columns) == list(frames[0].columns) for frame in frames)
        assert frames[0][name].notna().all()
        assert frames[1][name].isna().all()


def test_what_a_row_lacks_changes_no_type(pandas):
    frame = make_data_frame([{"a": True, "b": 1, "c": 1 << 70}, {"a": None, "b": None, "c": None}])
    assert [str(kind) for kind in frame.dtypes] == ["boolean", "Int64", "object"]
    assert (frame["a"][0], frame["b"][0], frame["c"][0]) == (True, 1, 1 << 70)
    assert frame.isna().iloc[1].all()


def test_html_keeps_intervals_on_one_line_marks_own_rows_and_shows_results_as_a_table(one_seed_of_mine):
    markup = ifsl_bench.table(TASK)._repr_html_()
    rows = re.findall(r'<tr( style="font-weight: bold")?>(<td.*?)</tr>', markup)
    assert len(rows) == len(ifsl_bench.table(TASK))
    for bold, row in rows:
        assert row.count("<td") == row.count('<td style="white-space: nowrap">')
        assert bool(bold) == ("yours" in row)
    results = ifsl_bench.load("lr (stored)", TASK)
    table = results._repr_html_()
    assert table.count("<tr>") == 1 + len(results)
    for result in results:
        assert f"{result.summary['acc']['mean']:.2f} ± {result.summary['acc']['interval']:.2f}" in table
    assert "no results" in results[:0]._repr_html_()


def test_a_result_that_somebody_changes_is_as_it_was_when_it_is_loaded_again(tmp_path):
    # A folder of results that exists: rows of the package alone are read once in a process of tests.
    for load in (lambda: ifsl_bench.load("lr", TASK, results=tmp_path)[0], lambda: ifsl_bench.load_all(TASK)[0]):
        result, mean = load(), load().summary["acc"]["mean"]
        result.summary["acc"]["mean"] = 0.0
        result.provenance.clear()
        again = load()
        assert again.summary["acc"]["mean"] == mean > 0
        assert again.provenance
    again = ifsl_bench.load_all(
        TASK, results=packaged_results_folder().parent / "tests" / ".." / packaged_results_folder().name
    )
    assert len(again) == len(ifsl_bench.load_all(TASK)), "one folder by another name"


def test_html_escapes_what_is_somebody_elses(tmp_path):
    raw = json.loads((packaged_results_folder() / TASK / "imprint.seed-0.json").read_text())
    raw |= {"label": HOSTILE, "method": HOSTILE}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(raw))
    result = ifsl_bench.load(path)
    frame = ifsl_bench.compare(path, packaged_results_folder() / TASK / "imprint.seed-0.json")
    for markup in (result._repr_html_(), ifsl_bench.Results([result])._repr_html_(), frame._repr_html_()):
        assert "<script" not in markup
        assert "&lt;script" in markup


@pytest.mark.parametrize(
    ("called", "said"),
    [
        (lambda: ifsl_bench.table("glyphs-9shot"), "unknown task 'glyphs-9shot'"),
        (lambda: ifsl_bench.table(TASK, methods="lrr"), "unknown row 'lrr'"),
        (lambda: ifsl_bench.leaderboard(TASK, setting="tuned-7"), "unknown setting 'tuned-7'"),
        (lambda: ifsl_bench.compare("a.json", "b.json"), "there is no result file a.json"),
        (lambda: ifsl_bench.load_all("glyphs-9shot"), "unknown task 'glyphs-9shot'"),
        (lambda: ifsl_bench.load("lr"), "there is no result file lr; a row is loaded by its label and task"),
        (lambda: ifsl_bench.run(["imprint"], [TASK], seeds=[0, 1]), "seeds is how many training seeds"),
    ],
)
def test_mistakes_are_one_line(called, said):
    with pytest.raises(UserError, match=said) as error:
        called()
    assert "\n" not in str(error.value)


def test_without_pandas_the_command_that_installs_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for item in (ifsl_bench.table(TASK), ifsl_bench.load_all(TASK), ifsl_bench.load("lr", TASK)[0]):
        with pytest.raises(
            MissingDependencyError, match=r'pandas is not installed\): pip install "ifsl_bench\[pandas\]"'
        ):
            item.to_pandas()


def test_lists_and_seeds_give_results_in_the_order_of_the_command(here, capsys):
    task = f"{here / 'clusters.toml'}:clusters-5shot"
    work = ifsl_bench.workspace(here / "home", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = ifsl_bench.run(["imprint", "protonet"], [task], seeds=2, episodes=20, work=work, progress=True)
        alone = ifsl_bench.run("imprint", task, seed=1, episodes=20, work=work)
    assert [(result.label.split(".")[0], result.seed) for result in results] == [
        ("imprint", 0), ("protonet", 0), ("imprint", 1), ("protonet", 1),
    ]  # fmt: skip
    assert alone.episodes == results[2].episodes
    assert "imprint" in capsys.readouterr().err, "progress"
    assert Path(work.home.results).is_dir()
    globbed = ifsl_bench.run("proto*", task, seeds=1, episodes=20, work=work)
    assert [result.method for result in globbed] == ["protonet"]


def test_a_job_that_fails_is_said_and_the_others_are_stored(here):
    work = ifsl_bench.workspace(here / "home", device="cpu")
    broken = here / "broken.py"
    broken.write_text("from ifsl_bench import Method\n\nclass Broken(Method):\n    def forward(self, support, query):\n"
                      "        raise ValueError('no luck')\n")  # fmt: skip
    task = f"{here / 'clusters.toml'}:clusters-5shot"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match=r"1 of 2 jobs failed, the others are stored: .*no luck"):
            ifsl_bench.run([f"{broken}:Broken", "imprint"], task, episodes=20, work=work)
    assert list(work.home.results.rglob("imprint*.json"))


def test_run_takes_the_folders_of_the_command(tmp_path):
    with pytest.raises(UserError, match="work has folders of its own"):
        ifsl_bench.run("imprint", "glyphs-5shot", home=tmp_path, work=ifsl_bench.workspace(tmp_path))
    with pytest.raises(UserError, match=r"a method is a name, path/to/file\.py:Class or a subclass"):
        ifsl_bench.run([5], "glyphs-5shot", home=tmp_path)


def test_a_pandas_that_cannot_be_imported_is_not_called_missing(monkeypatch, tmp_path):
    """As one whose compiled modules are of another NumPy."""
    (tmp_path / "pandas.py").write_text("raise ValueError('numpy.dtype size changed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    with pytest.raises(
        MissingDependencyError, match=r"is installed but cannot be imported \(ValueError: numpy.dtype size changed\)"
    ):
        ifsl_bench.table(TASK).to_pandas()
