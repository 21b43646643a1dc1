"""``ifsl-bench cache``: what it lists, what it removes, and what it leaves alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ifsl_bench.campaigns import api
from ifsl_bench.common.files import Home, sha256_file
from ifsl_bench.common.locks import locked
from ifsl_bench.common.owners import partial_of
from ifsl_bench.kernels.store import sources_folder
from ifsl_bench.running import pruning
from ifsl_bench.running.cache import listed
from tests.fuzz.small import Told, run

MADE = {"data", "pretrained", "features", "trained", "trials", "probes"}


def days_pass(home: Path, days: float = 2) -> None:
    """As if nothing there had been used for days."""
    then = time.time() - days * 86400
    for path in (*home.rglob("*"), home):
        os.utime(path, (then, then), follow_symlinks=False)


def job(root: Path, method: str = "lwof", tune: int = 0):
    """A run on the small images, of 8 steps."""
    work = api.workspace(root / "home", device="cpu", reporter=Told())
    train = {"steps": 8} if method == "lwof" else None
    return api.run(method, f"{root / 'tiny.toml'}:tiny-images-1shot", train=train, tune=tune, work=work)


@pytest.fixture(scope="module")
def made(made_once):
    """A home after a tuned run: two settings of lwof, with their models, trials and features."""

    def fill(root: Path) -> None:
        run(root)
        days_pass(root / "home")

    return made_once("cached", fill)


@pytest.fixture
def root(made, tmp_path):
    """A copy of it, to prune; its task file has another path, which no name depends on."""
    shutil.copytree(made, tmp_path / "here", symlinks=True)
    return tmp_path / "here"


@pytest.fixture
def prune(call, root):
    def prune(*arguments: str) -> tuple[int, str, str]:
        return call("cache", "prune", "--home", str(root / "home"), *arguments)

    return prune


def paths(root: Path) -> set[str]:
    """All items of the home."""
    home = Home.locate(root / "home")
    return {item.path.relative_to(home.cache).as_posix() for item in listed(home)}


def kinds(root: Path) -> set[str]:
    return {item.kind for item in listed(Home.locate(root / "home"))}


def test_the_list_has_every_byte_once_by_task_and_method(call, root):
    home = root / "home"
    (home / "pretrained" / ".x.lock").touch()
    status, out, _ = call("cache", "--home", str(home), "--format", "json")
    assert status == 0
    (table,) = json.loads(out)["tables"] if isinstance(json.loads(out), dict) else [json.loads(out)]
    rows = table["rows"] if isinstance(table, dict) and "rows" in table else table
    text = json.dumps(rows)
    for word in (*MADE, "tiny-images-1shot", "lwof", "tiny-images-resnet-small-cosine"):
        assert word in text
    items = listed(Home.locate(home))
    inside = [path for path in home.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    results = [path for path in inside if home / "results" in path.parents]
    assert sum(item.bytes for item in items) == sum(path.stat().st_size for path in inside if path not in results)
    assert len({item.path for item in items}) == len(items)


def test_what_is_used_says_so_without_access_times(root):
    home = Home.locate(root / "home")
    before = {item.path: item.used for item in listed(home)}
    assert max(before.values()) < time.time() - 86400
    shutil.rmtree(home.results)
    run(root)
    after = {
        item.path: item.used for item in listed(home) if item.kind in ("data", "pretrained", "features", "trained")
    }
    assert after
    unused = [path.parent.name for path, used in after.items() if used < time.time() - 3600]
    assert unused == ["trained"], "the model of the setting that was not chosen: its trial says enough"


def test_what_a_stored_result_needs_stays_and_is_enough_for_it(prune, root):
    whole = paths(root)
    status, out, err = prune("--yes")
    assert (status, err) == (0, "")
    assert "made again in seconds" in out
    left = paths(root)
    assert whole - left == {path for path in whole if path.startswith(("probes/", "logs/episodes/", "logs/trial/"))}
    shutil.rmtree(root / "home" / "results")
    before = {path: sha256_file(path) for path in (root / "home").glob("*/*/*.safetensors")}
    run(root)
    assert before == {path: sha256_file(path) for path in (root / "home").glob("*/*/*.safetensors")}, "made again"


def test_without_results_all_goes_but_data_that_only_their_user_can_make(prune, root):
    shutil.rmtree(root / "home" / "results")
    status, out, _ = prune("--dry-run")
    assert status == 0
    assert "made from your own" in out
    assert {"pretrained", "trained"} <= kinds(root)
    status, out, _ = prune("--yes")
    assert status == 0
    assert paths(root) == {"data/tiny-images"} | {path for path in paths(root) if path.startswith("digests/")}
    assert not list((root / "home").rglob(".removed-*"))
    assert run(root), "and all can be made again"


def test_a_campaign_keeps_what_its_jobs_will_use(prune, root):
    shutil.rmtree(root / "home" / "results")
    trials = {path for path in paths(root) if path.startswith("trials/")}
    assert len(trials) == 2
    campaign = root / "campaign.toml"
    text = '[[run]]\nmethods = ["lwof"]\ntasks = ["tiny.toml"]\ntrain = { steps = 8 }\n'
    campaign.write_text(text + "tune = 2\n")
    before = paths(root)
    assert prune("--yes", "--campaign", str(campaign))[0] == 0
    gone = before - paths(root)
    assert gone == {path for path in before if path.startswith(("probes/", "logs/episodes/"))}
    campaign.write_text(text)  # as published: one of the two models, and no trial
    days_pass(root / "home")
    assert prune("--yes", "--campaign", str(campaign))[0] == 0
    left = paths(root)
    assert len([path for path in left if path.startswith("trained/")]) == 1
    assert not trials & left
    assert {"data", "pretrained", "features", "trained"} <= kinds(root)


def test_results_elsewhere_count_where_they_were_stored_or_are_named(prune, root, tmp_path, call):
    home, elsewhere = root / "home", tmp_path / "elsewhere"
    (home / "results").rename(elsewhere)
    days_pass(home)
    assert "pretrained" in prune("--dry-run")[1].split("goes because")[1]
    assert "pretrained" not in prune("--dry-run", "--results", str(elsewhere))[1].split("goes because")[1]
    work = api.workspace(home, elsewhere, device="cpu", reporter=Told())
    api.run("lwof", f"{root / 'tiny.toml'}:tiny-images-1shot", train={"steps": 8}, tune=2, rerun=True, work=work)
    days_pass(home)
    assert "pretrained" not in prune("--dry-run")[1].split("goes because")[1], "the home knows where they went"
    shutil.rmtree(elsewhere)
    status, out, err = prune("--dry-run")
    assert status == 0
    assert f"results were stored in {elsewhere}, which is not there now" in err
    assert "pretrained" in out.split("goes because")[1]


def test_a_result_that_cannot_be_read_stops_the_removal(prune, root):
    (path,) = (root / "home" / "results").glob("*/*.json")
    path.write_text(path.read_text()[:-100])
    before = paths(root)
    status, _, err = prune("--yes")
    assert status == 2
    assert "what it needs is not known: repair it, or move it elsewhere" in err
    assert err.count("\n") == 1
    assert paths(root) == before


def test_nobody_is_asked_where_nobody_is(prune, root):
    before = paths(root)
    status, out, err = prune()
    assert status == 2
    assert "probes" in out
    assert "--yes removes what is listed" in err
    assert paths(root) == before


def test_what_is_locked_or_was_used_lately_stays_with_what_it_was_made_from(prune, root):
    home = Home.locate(root / "home")
    shutil.rmtree(home.results)
    model, other = sorted(home.trained.glob("[!.]*"))
    with locked(model):
        status, out, _ = prune("--dry-run")
    assert status == 0
    stays, goes = out.split("goes because")
    for kind in ("pretrained", "features", "trained"):
        assert f"\n{kind}" in stays
        assert f"\n{kind}" not in goes
    assert "a process holds its lock" in stays
    assert prune("--dry-run")[1].split("goes because")[1].count("\ntrained") == 1
    os.utime(other / "checkpoint.json")
    assert "\ntrained" not in prune("--dry-run")[1].split("goes because")[1]


def test_what_is_used_between_the_question_and_the_removal_stays(root, monkeypatch):
    home = Home.locate(root / "home")
    shutil.rmtree(home.results)
    found = pruning.verdicts(home, [], [], lambda text: None)
    model, *_ = sorted(home.trained.glob("[!.]*"))
    os.utime(model / "checkpoint.json")
    said = []
    pruning.prune(found, said.append)
    assert said == [f"{model} is in use by now, and stays"]
    assert [path.name for path in home.trained.iterdir() if not path.name.startswith(".")] == [model.name]


@pytest.mark.slow("two runs from data to result, one of them disturbed all the while")
def test_a_run_beside_a_prune_that_takes_everything_ends_with_the_same_result(root, monkeypatch):
    """Again and again, whatever is there is removed, used or not, while a run goes from nothing to its result."""
    wanted, home = run(root), Home.locate(root / "home")
    shutil.rmtree(home.results)
    monkeypatch.setattr(pruning, "RECENT", -1e9)
    monkeypatch.setattr(pruning, "is_locked", lambda path: False)
    ended, removed = threading.Event(), []

    def take() -> None:
        while not ended.is_set():
            try:
                found = pruning.verdicts(home, [], [], lambda text: None)
            except OSError:
                continue
            going = [one for one in found if one.item.kind in ("trained", "features", "trials", "probes")]
            removed.append(pruning.prune(going, lambda text: None))

    taker = threading.Thread(target=take)
    taker.start()
    try:
        found = run(root)
    finally:
        ended.set()
        taker.join()
    assert found == wanted
    assert sum(removed) > 0


def test_what_is_not_ours_and_what_is_being_written_stays(prune, root):
    home = root / "home"
    (home / "notes.txt").write_text("mine")
    (home / "trained" / ".removed-x@node7.0123abcd-4711-89abcdef").mkdir()
    mine = partial_of(home / "features" / "tiny" / "novel-test")
    mine.mkdir(parents=True)
    process = subprocess.run([sys.executable, "-c", f"""
from pathlib import Path
from ifsl_bench.common.owners import partial_of
print(partial_of(Path({str(home / "results" / "tiny-images-1shot" / "x.json")!r})))"""],
        capture_output=True, text=True, check=True)  # fmt: skip
    left = Path(process.stdout.strip())
    left.touch()
    _, out, _ = prune("--yes", "--dry-run")
    assert "not made by ifsl-bench" in out
    assert prune("--yes")[0] == 0
    assert (home / "notes.txt").exists()
    assert mine.exists(), "this process lives"
    assert (home / "trained" / ".removed-x@node7.0123abcd-4711-89abcdef").exists(), "of another machine, and new"
    assert not left.exists(), "its process has ended"


def test_compiled_code_of_other_versions_and_what_was_set_aside_goes(prune, root):
    home = root / "home"
    for name in ("0123456789abcdef", sources_folder()):
        (home / "compiled" / name).mkdir(parents=True)
        (home / "compiled" / name / "checksums.json").write_text("{}")
    aside = home / "trained" / "x-seed0-0123.replaced-0"
    aside.mkdir()
    (aside / "checkpoint.json").write_text("{}")
    log = home / "logs" / "pretraining" / "gone-seed0-0123.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("done")
    (model,) = {path.name for path in (home / "pretrained").iterdir() if not path.name.startswith(".")}
    kept = log.with_name(f"{model}.log")
    kept.write_text("done")
    days_pass(home)
    assert prune("--yes")[0] == 0
    assert [path.name for path in (home / "compiled").iterdir() if not path.name.startswith(".")] == [sources_folder()]
    assert not aside.exists()
    assert not log.exists()
    assert kept.exists()


def test_keys_of_a_cluster_go_after_a_month(prune, root):
    """Jobs of a long campaign that wait in a queue read them when they start."""
    keys = root / "home" / "keys"
    keys.mkdir()
    for name in ("new.pem", "old.pem"):
        (keys / name).write_text("-----BEGIN CERTIFICATE-----\n")
    days_pass(root / "home", 29)
    then = time.time() - 31 * 86400
    os.utime(keys / "old.pem", (then, then))
    assert prune("--yes")[0] == 0
    assert [path.name for path in keys.iterdir() if not path.name.startswith(".")] == ["new.pem"]


def test_an_empty_home_lists_and_removes_nothing(call, tmp_path):
    assert call("cache", "--home", str(tmp_path / "none"))[0] == 0
    assert call("cache", "prune", "--home", str(tmp_path / "none"))[1] == "nothing to remove\n"
    status, _, err = call("cache", "prune", "--home", str(tmp_path / "none"), "--results", str(tmp_path / "no"))
    assert (status, err) == (2, f"ifsl-bench: there is no folder of results {tmp_path / 'no'}\n")


def test_data_list_counts_features(call, root):
    status, out, _ = call("data", "list", "--home", str(root / "home"), "--format", "json")
    assert status == 0
    size = sum(path.stat().st_size for path in (root / "home" / "features").rglob("features.npy"))
    assert f"{size / 1e6:.1f} MB" in out


def test_results_in_a_folder_below_the_home_count_and_a_damaged_note_of_one_stops_the_removal(prune, root):
    home = root / "home"
    shutil.rmtree(home / "results")
    work = api.workspace(home, home / "results" / "of-july", device="cpu", reporter=Told())
    api.run("lwof", f"{root / 'tiny.toml'}:tiny-images-1shot", train={"steps": 8}, tune=2, work=work)
    days_pass(home)
    assert "pretrained" not in prune("--dry-run")[1].partition("goes because")[2]
    (note,) = (home / "stored").glob("*.json")
    note.write_text(note.read_text()[:-20])
    before = paths(root)
    status, _, err = prune("--yes")
    assert (status, err.count("\n")) == (2, 1)
    assert f"{note} is damaged, which said where results are stored that need this home" in err
    assert paths(root) == before


def test_results_of_a_folder_from_elsewhere_count_once_a_run_finds_them_stored(prune, call, root, tmp_path):
    home = root / "home"
    shutil.move(home / "results", tmp_path / "copied")
    run = ["run", "--method", "lwof", "--task", f"{root / 'tiny.toml'}:tiny-images-1shot", "--train", "steps=8",
           "--tune", "2", "--home", str(home), "--results", str(tmp_path / "copied"), "--device", "cpu"]  # fmt: skip
    assert "stored" in call(*run, "--dry-run")[1]
    days_pass(home)
    assert "pretrained" in prune("--dry-run")[1].partition("goes because")[2], "a plan notes nothing"
    assert "done already" in call(*run, "-v")[2]
    days_pass(home)
    assert "pretrained" not in prune("--dry-run")[1].partition("goes because")[2]


def test_no_file_that_a_result_names_as_its_method_or_task_is_opened(prune, root, tmp_path):
    """To find out what a search has tried, the job is made anew: by names alone."""
    (path,) = (root / "home" / "results").glob("*/*.json")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    good = json.loads(path.read_text())
    for change in ({"method": f"{tmp_path}/evil.py:Evil"}, {"method": f"{tmp_path}/evil.py"},
                   {"provenance": good["provenance"] | {"distribution": {"name": f"{tmp_path}/evil.py"}}},
                   {"task": f"{tmp_path}/evil.py"}, {"task": f"{tmp_path}/evil.toml:x"}):  # fmt: skip
        path.write_text(json.dumps(good | change))
        assert prune("--dry-run")[0] == 0, change
    assert not (tmp_path / "ran").exists()
