"""``ifsl-bench cache``: what it lists, what it removes, and what it leaves alone."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import threading
import time
import weakref
from pathlib import Path

import pytest

from ifsl_bench import api
from ifsl_bench.experiments import workspace as prepared
from ifsl_bench.solvers.numba_code_cache import code_folder_name
from ifsl_bench.store import cache
from ifsl_bench.store.cache import divide_into_removable_and_kept, list_items
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths, unique_name
from ifsl_bench.utils.locks import hold_lock
from tests.reporters import Messages
from tests.small_run import TASKS, run

MADE = {"data", "pretrained", "features", "trained", "trials"}


def days_pass(home: Path, days: float = 2) -> None:
    """As if nothing there had been used for days."""
    then = time.time() - days * 86400
    for path in (*home.rglob("*"), home):
        os.utime(path, (then, then), follow_symlinks=False)


@pytest.fixture(scope="module")
def made(made_once):
    """A home after a tuned run of lwof, with the models and trials of two settings, and features."""

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
    home = Paths.locate(root / "home")
    return {item.path.relative_to(home.cache).as_posix() for item in list_items(home)}


def rows(out: str) -> set[str]:
    """The kinds in a printed table, without its head and sum."""
    return {line.split()[0] for line in out.splitlines() if re.search(r" [kM]B +[0-9]{4}-", line)}


def kinds(root: Path) -> set[str]:
    return {item.cache_kind for item in list_items(Paths.locate(root / "home"))}


def test_the_list_has_every_byte_once_by_task_and_method(call, root):
    home = root / "home"
    (home / "pretrained" / ".x.lock").touch()
    status, out, _ = call("cache", "--home", str(home), "--format", "json")
    assert status == 0
    for word in (*MADE, "tiny-images-1shot", "lwof", "tiny-images-resnet-small-cosine"):
        assert word in out
    items = list_items(Paths.locate(home))
    inside = [path for path in home.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    results = [path for path in inside if home / "results" in path.parents]
    assert sum(item.n_bytes for item in items) == sum(path.stat().st_size for path in inside if path not in results)
    assert len({item.path for item in items}) == len(items)


def test_what_is_used_says_so_without_access_times(root):
    home = Paths.locate(root / "home")
    before = {item.path: item.last_used for item in list_items(home)}
    assert max(before.values()) < time.time() - 86400
    shutil.rmtree(home.results)
    run(root)
    after = {item.path: item.last_used for item in list_items(home) if item.cache_kind in MADE - {"trials"}}
    assert after
    unused = {path for path, used in after.items() if used < time.time() - 3600}
    spared = {path for path in after if path.parent == home.trained_models or path.name == "novel-train"}
    assert unused <= spared, "the model of another setting, and features that only training needs, may be spared"


EVERYTHING = ("data", "pretrained", "features", "trained", "trials", "logs")


def test_all_kinds_go_but_data_that_only_their_user_can_make(prune, root):
    status, out, _ = prune(*EVERYTHING, "--dry-run")
    assert status == 0
    assert "stay: made from files of yours: ifsl-bench data remove" in out
    assert {"pretrained", "trained"} <= kinds(root)
    assert prune(*EVERYTHING, "--yes")[0] == 0
    assert paths(root) == {"data/tiny-images"} | {path for path in paths(root) if path.startswith("digests/")}
    assert not list((root / "home").rglob(".removed-*"))
    status, out, err = prune("data", "--yes", "--format", "json")
    assert (status, json.loads(out)[-1]["count"], err.startswith("nothing to remove")) == (0, "0", True)
    (root / "home" / "trained").mkdir(exist_ok=True)
    (root / "home" / "trained" / ".partial-x").touch()
    os.utime(root / "home" / "trained" / ".partial-x", (0, 0))
    status, out, err = prune("--yes", "--format", "json")
    assert (status, len(json.loads(out)) > 0, err.startswith("removed")) == (0, True, True)
    shutil.rmtree(root / "home" / "results")
    assert run(root), "and all can be made again"


def test_only_the_named_kinds_go(prune, root):
    before = paths(root)
    assert rows(prune("features", "--dry-run")[1]) == {"features"}
    assert prune("trained", "--yes")[0] == 0
    assert before - paths(root) == {path for path in before if path.startswith("trained/")}
    status, _, err = prune("imagen", "--yes")
    assert status == 2
    assert err == f"ifsl-bench: nothing in {root / 'home'} is called 'imagen'; 'ifsl-bench cache' lists what is there\n"


def test_nobody_is_asked_where_nobody_is(prune, root):
    before = paths(root)
    status, out, err = prune("trials")
    assert status == 2
    assert "trials" in out
    assert "add --yes to remove what is listed" in err
    assert paths(root) == before


def test_what_is_locked_or_was_used_lately_stays_with_what_runs_start_from(prune, root):
    home = Paths.locate(root / "home")
    model, other_model = sorted(home.trained_models.glob("[!.]*"))
    everything, starting = (*EVERYTHING, "--dry-run"), {"pretrained", "features", "trained"}
    with hold_lock(model):
        status, out, _ = prune(*everything)
    assert status == 0
    assert not starting & rows(out), "models of one task and method stay together"
    assert "stay: a process holds its lock" in out
    assert "stay: perhaps needed by a process that runs" in out
    assert starting <= rows(prune(*everything)[1])
    os.utime(other_model / "checkpoint.json")
    assert not starting & rows(prune(*everything)[1])


def test_what_is_used_between_the_question_and_the_removal_stays(root):
    home = Paths.locate(root / "home")
    going, _ = divide_into_removable_and_kept(home, ["trained"])
    model, *_ = sorted(home.trained_models.glob("[!.]*"))
    os.utime(model / "checkpoint.json")
    messages = []
    cache.remove_items(going, messages.append)
    assert messages == [f"{model} is in use by now, and stays"]
    assert [path.name for path in home.trained_models.iterdir() if not path.name.startswith(".")] == [model.name]


@pytest.mark.slow("two runs from data to result, one of them disturbed all the while")
def test_a_run_beside_a_prune_that_takes_everything_ends_with_the_same_result(root, monkeypatch):
    """Again and again, whatever is there is removed, used or not, while a run goes from nothing to its result."""
    expected, home = run(root), Paths.locate(root / "home")
    shutil.rmtree(home.results)
    monkeypatch.setattr(cache, "RECENT_SECONDS", -1e9)
    monkeypatch.setattr(cache, "is_locked", lambda path: False)
    ended, removed = threading.Event(), []

    def take() -> None:
        while not ended.is_set():
            try:
                going = divide_into_removable_and_kept(home, ["trained", "features", "trials"])[0]
            except (OSError, UserError):  # the latter where nothing of these kinds is there
                continue
            removed.append(cache.remove_items(going, lambda text: None))

    taker = threading.Thread(target=take)
    taker.start()
    try:
        result = run(root)
    finally:
        ended.set()
        taker.join()
    assert result == expected
    assert sum(removed) > 0


def test_what_is_not_ours_and_what_is_being_written_stays(prune, root):
    home = root / "home"
    (home / "notes.txt").write_text("mine")
    half = home / "results" / "tiny-images-1shot" / unique_name(".partial-x.json")
    half.touch()
    building = home / "features" / "tiny" / ".partial-novel-test"
    building.mkdir(parents=True)
    _, out, _ = prune("unknown", "--dry-run")
    assert "not made by this version of ifsl-bench" in out
    assert prune("--yes")[0] == 0
    assert half.exists(), "just written"
    days_pass(home)
    with hold_lock(building.with_name("novel-test")):
        assert prune("features", "unfinished", "--yes")[0] == 0
    assert (home / "notes.txt").exists()
    assert building.exists(), "locked"
    assert not half.exists()
    days_pass(home)
    assert prune("--yes")[0] == 0
    assert not building.exists()


def test_compiled_code_of_other_versions_and_what_was_set_aside_goes(prune, root):
    home, whole = root / "home", paths(root)
    for name in ("0123456789abcdef", code_folder_name()):
        (home / "compiled" / name).mkdir(parents=True)
        (home / "compiled" / name / "checksums.json").write_text("{}")
    aside = home / "trained" / "x-seed0-0123.replaced-0"
    aside.mkdir()
    (aside / "checkpoint.json").write_text("{}")
    days_pass(home)
    status, out, err = prune("--yes")
    assert (status, err) == (0, "")
    assert "set aside" in out
    assert [path.name for path in (home / "compiled").iterdir() if not path.name.startswith(".")] == [
        code_folder_name()
    ]
    assert not aside.exists()
    assert {path for path in paths(root) if not path.startswith("compiled/")} == whole, "where nothing is chosen"
    assert prune("--dry-run")[1].startswith("nothing to remove")


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


def test_what_a_run_had_open_is_freed_with_it(root, monkeypatch):
    """By itself, not when Python next looks for circles: after a hundred runs that would be a hundred networks."""
    (root / "tiny.toml").write_text(TASKS)
    shutil.rmtree(root / "home" / "results")
    references = []

    class Seen(prepared.PreparedTask):
        def __init__(self, *of):
            super().__init__(*of)
            references.append(weakref.ref(self))

    monkeypatch.setattr(prepared, "PreparedTask", Seen)
    work = api.workspace(root / "home", device="cpu", reporter=Messages())
    gc.collect()
    gc.disable()
    try:
        api.run("lwof", f"{root / 'tiny.toml'}:tiny-images-1shot", train={"steps": 8}, tune=2, work=work)
        (reference,) = references
        del work
        assert reference() is None
    finally:
        gc.enable()
