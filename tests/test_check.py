"""Contributed result files: a good one passes, and whatever is wrong with one is named."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from ifsl_bench import api, cli
from ifsl_bench.check import check_file
from ifsl_bench.result import packaged_root
from ifsl_bench.store import Home
from ifsl_bench.task_files import find

STORED = sorted(packaged_root().glob("*/*.seed-*.json"))


@pytest.fixture
def file(tmp_path) -> Path:
    """A good file in its folder."""
    path = tmp_path / "glyphs-5shot" / "lwof.seed-1.json"
    path.parent.mkdir()
    shutil.copy(packaged_root() / "glyphs-5shot" / path.name, path)
    return path


def altered(path: Path, change) -> Path:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


def test_every_stored_result_passes():
    failures = {str(path): check_file(path).failures for path in STORED}
    assert len(failures) >= 36
    assert not any(failures.values()), {path: found for path, found in failures.items() if found}


def test_a_good_file_in_one_line(file):
    found = check_file(file)
    assert found.line.startswith("ok: lwof on glyphs-5shot, seed 1, 2,000 episodes, Acc. 81.52 ± 0.24")
    assert found.unverified == ()


def shorten(value: dict) -> None:
    for name in ("base_joint", "base_alone", "novel_joint", "novel_alone"):
        del value["episodes"][name][-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("digest"), "it is no valid result: Object missing required field `digest`"),
        (lambda v: v.update(extra=1), "unknown field `extra`"),
        (lambda v: v.update(schema=9), "it is no result of schema 1"),
        (lambda v: v["summary"]["acc"].update(mean=99.0), "summary.acc.mean is 99.0, the counts give"),
        (lambda v: v["episodes"]["base_joint"].__setitem__(5, 25), "more joint hits than hits alone"),
        (
            lambda v: v.update(digest="0" * 64),
            "digest: 0000000000000000, the 2,000 episodes of glyphs-5shot have 96eea",
        ),
        (lambda v: v.update(fingerprint="0" * 64), "fingerprint: 0000000000000000, task glyphs-5shot is pinned to 326"),
        (
            lambda v: v.update(task_hash="0" * 16),
            "task_hash: 0000000000000000, today's definition of glyphs-5shot has 04",
        ),
        (lambda v: v.update(task="glyphs-6shot"), "task: unknown task 'glyphs-6shot'; did you mean"),
        (lambda v: v.update(task="glyphs-5shot+ways=5"), "task: 'glyphs-5shot+ways=5' is called 'glyphs-5shot'"),
        (
            lambda v: v.update(task="glyphs-1shot"),
            "folder: it lies with the results of glyphs-5shot, and is of glyphs-1",
        ),
        (lambda v: v.update(task="/etc/glyphs.toml"), "task: '/etc/glyphs.toml' is no task's name"),
        (
            lambda v: v.update(task="../glyphs.toml:glyphs-5shot"),
            "task: '../glyphs.toml:glyphs-5shot' is no task's name",
        ),
        (lambda v: v.update(task="glyphs.toml+ways=3"), "task: 'glyphs.toml+ways=3' is no task's name"),
        (lambda v: v.update(partial=True), "partial: true, data set glyphs with this fingerprint is the whole"),
        (lambda v: v.update(label="mine"), "label: 'mine', method, options and number of episodes make it 'lwof'"),
        (lambda v: v.update(label="mine"), "file name: label and seed make it mine.seed-1.json"),
        (
            lambda v: v.update(options={"normalise": True}),
            "options and number of episodes make it 'lwof.normalise=true'",
        ),
        (lambda v: v.update(options={"normalize": True}), "options: unknown option 'normalize' of method 'lwof'"),
        (lambda v: v.update(train={"steps": 5}), "number of episodes make it 'lwof.steps=5'"),
        (lambda v: v.update(seed=2), "file name: label and seed make it lwof.seed-2.json"),
        (lambda v: v.update(seed=2), "pretraining.key: glyphs-resnet-small-cosine-seed1"),
        (lambda v: v["provenance"].update(commit="abc+changes"), "measured with files changed since commit abc"),
        (lambda v: v["provenance"].pop("command"), "provenance: command missing"),
        (lambda v: v["pretraining"].pop("sha256"), "pretraining: sha256 missing"),
        (
            lambda v: v["episodes"].update(base_queries=26),
            "episodes.base_queries: 26, episodes of glyphs-5shot have 25",
        ),
        (shorten, "make it 'lwof.episodes=1999'"),
    ],
)
def test_each_fault_is_named(file, change, message):
    failures = check_file(altered(file, change)).failures
    assert any(message in failure for failure in failures), failures
    assert all("\n" not in failure for failure in failures)
    assert len(set(failures)) == len(failures)


def test_unreadable_files_and_published_rows_fail(tmp_path, file):
    assert "it cannot be read: No such file" in check_file(tmp_path / "none.json").failures[0]
    cut = tmp_path / "cut.json"
    cut.write_text(file.read_text()[:900])
    assert "not valid JSON" in check_file(cut).failures[0]
    paper = packaged_root() / "published" / "ren2019.json"
    assert check_file(paper).failures == ("it is a table of published rows, not the result of a run",)
    (tmp_path / "published").mkdir()
    assert "among the published rows" in check_file(Path(shutil.copy(file, tmp_path / "published"))).failures[0]


def test_a_copy_elsewhere_passes_and_an_unknown_method_is_said_to_be_unverified(tmp_path, file):
    copy = Path(shutil.copy(file, tmp_path))
    assert check_file(copy).failures == ()
    altered(copy, lambda v: v.update(method="theirs", label="theirs"))
    found = check_file(copy.rename(tmp_path / "theirs.seed-1.json"))
    assert found.failures == ()
    assert found.unverified == ("label and backbone, since method theirs is not installed here",)
    assert "(not verified: label and backbone" in found.line


@pytest.fixture
def measured(clusters, monkeypatch):
    """A home with results on tasks without pinned digests, made by the real run; returns (task files, paths)."""
    monkeypatch.chdir(clusters)
    work = api.workspace(clusters / "home", device="cpu")
    name = "clusters.toml:clusters-5shot"
    api.run("lr", name, episodes=20, work=work)
    api.run("protonet", name, change={"ways": 3, "base-classes": 6}, work=work)
    return Home.locate(clusters / "home"), {p.parent.name: p for p in work.home.results.glob("*/*.json")}


def test_episodes_are_drawn_again_where_no_digest_is_pinned(measured):
    home, paths = measured
    tasks = {t.name: t for n in paths for t in find("clusters.toml:" + n)}
    for path in paths.values():
        altered(path, lambda v: v["provenance"].update(commit="c"))  # whatever the state of this checkout
        found = check_file(path, tasks, home)
        assert (found.failures, found.unverified) == ((), ())
    path = paths["clusters-5shot"]
    label = json.loads(path.read_text())["label"]
    assert label == "lr.episodes=20", "tuned options are not in the label"
    altered(path, lambda v: v.update(digest="0" * 64))
    assert "digest: 0000000000000000, the 20 episodes" in check_file(path, tasks, home).failures[0]
    altered(path, lambda v: v.update(partial=True))
    told = "partial: true, data set clusters with this fingerprint is the whole"
    assert told in check_file(path, tasks, home).failures
    shutil.rmtree(home.data)
    assert check_file(path, tasks, home).unverified == (
        "digest, since data set clusters is not prepared here",
        "partial, since data set clusters is not prepared here",
    )


def test_the_command(measured, file, capsys, monkeypatch):
    home, paths = measured
    path = paths["clusters-5shot"]
    altered(path, lambda v: v["provenance"].update(commit="c"))

    def call(*arguments: str) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", ["ifsl-bench", "check", *arguments, "--home", str(home.cache)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out.splitlines(), captured.err.splitlines()

    status, out, err = call(str(file), str(path), "--task", "clusters.toml")
    assert (status, err) == (0, [])
    assert [line.split(": ")[1] for line in out] == ["ok", "ok"]
    bad = file.with_name("bad.json")
    shutil.copy(file, bad)
    altered(bad, lambda v: v.update(digest="0" * 64))
    status, out, err = call(str(bad), str(file))
    assert status == 2
    assert len(out) == 1
    assert out[0].startswith(f"{file}: ok")
    assert [line.startswith(f"{bad}: ") for line in err] == [True, True, False]
    assert "file name" in err[0]
    assert "digest" in err[1]
    assert err[-1] == "ifsl-bench: 1 of 2 result files fail"
    assert call(str(path))[0] == 2, "a task of one's own is unknown without its file"


def test_what_the_page_for_contributors_says_is_there():
    page = (Path(__file__).parents[1] / "docs" / "contributing.md").read_text(encoding="utf-8")
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert "(docs/contributing.md)" in readme
    named = set(re.findall(r"ifsl-bench ([a-z]+)", page))
    assert named >= {"run", "check", "table"}
    assert named <= set(cli.cli.commands)
