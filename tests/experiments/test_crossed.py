"""Base classes of one data set, novel classes of another: the same as both put together by hand, and kept apart."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ifsl_bench import api
from ifsl_bench.backbones.pretrained import make_pretraining_key
from ifsl_bench.data.dataset_views import make_cross_domain
from ifsl_bench.data.pools import POOL_NAMES, Dataset, open_dataset
from ifsl_bench.data.writer import DatasetWriter, build_dataset
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.protocols.tasks.variants import TaskChanges, make_task_changes, split_task_name
from ifsl_bench.store.result_folder import reason_not_to_pair
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from tests import small_run as small
from tests.reporters import Messages

TASKS = (
    small.TASKS.replace("tiny-images", "alpha")
    + """
[tasks.alpha-shared-1shot]
shots = 1
protocol = "shared"
[tasks.alpha-sessions]
shots = 1
sessions = { count = 2, ways = 2, orders = 3, supports = 2, queries = 4 }
"""
)
CLASSES = {"base": ("cat", "dog", "elk", "fox", "gnu"), "novel/train": ("hen", "ibis", "jay", "kite"),
           "novel/val": ("lark", "mole", "newt"), "novel/test": ("owl", "pig", "quail", "ram")}  # fmt: skip
IMAGES = {pool: 9 + i for i, pool in enumerate(POOL_NAMES)}


def pixels(name: str, pool: str, classes: int, size: int) -> np.ndarray:
    """A pool's images, uint8 [classes * n, size, size, 1], noise around a shade per class."""
    random = np.random.default_rng([len(name), sum(name.encode()), POOL_NAMES.index(pool)])
    shades = random.integers(60, 196, (classes, 1, 1, 1)).repeat(IMAGES[pool], 0)
    return np.clip(shades + random.integers(-50, 50, (len(shades), size, size, 1)), 0, 255).astype(np.uint8)


def make(home: Paths, name: str, size: int = 16, sources: Mapping[str, str] | None = None, few: int | None = None,
         prefix: str = "", without: str = "") -> Dataset:  # fmt: skip
    """A data set; ``sources`` says whose images a pool has, ``few`` that novel pools have so many classes."""

    def fill(writer: DatasetWriter) -> None:
        for pool in POOL_NAMES:
            if pool == without:
                continue
            side = pool if pool in CLASSES else "base"
            names = CLASSES[side][: few if pool in ("novel/val", "novel/test") else None]
            source = (sources or {}).get(pool, name)
            if source == "beta" != name:
                names = tuple(prefix + class_name for class_name in names)
            labels = np.repeat(np.arange(len(names)), IMAGES[pool])
            with writer.write_pool(pool, labels, names, (size, size, 1)) as images:
                images[:] = pixels(source, pool, len(names), size)

    home.data.mkdir(parents=True, exist_ok=True)
    return build_dataset(home.data / name, name, "made of noise", fill, {})


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A home with ``alpha``, ``beta`` (whose classes have the same names) and both, put together by hand."""
    path = tmp_path_factory.mktemp("crossed")
    home = Paths.locate(path / "home")
    for name in ("alpha", "beta"):
        make(home, name)
    sources = dict.fromkeys(POOL_NAMES, "alpha") | {"novel/val": "beta", "novel/test": "beta"}
    make(home, "both", sources=sources, prefix="beta:")
    (path / "tasks.toml").write_text(TASKS)
    return path


@pytest.fixture
def work(root) -> Workspace:
    return api.workspace(root / "home", device="cpu")


def task_of(root: Path, name: str) -> Task:
    (task,) = load_tasks(f"{root / 'tasks.toml'}:{name}")
    return task


def by_hand(task: Task) -> Task:
    """The same task, by name and numbers, on the data set that was put together."""
    dataset = msgspec.structs.replace(task.dataset, name="both")
    return msgspec.structs.replace(task, dataset=dataset, novel_from=None)


def same(a: Result, b: Result) -> bool:
    """Tells if two results agree in every count of all episodes. A bool: a list of differences takes minutes."""
    return bool(a.episodes == b.episodes) and a.calibration == b.calibration


@pytest.mark.slow("three whole runs")
@pytest.mark.parametrize("name", ["alpha-1shot", "alpha-shared-1shot", "alpha-sessions"])
def test_every_count_is_that_of_the_data_set_put_together_by_hand(name, root, work):
    """Pretraining, features, meta-training with its validation, calibration, and the test episodes, or sequences."""
    tasks, change = [f"{root / 'tasks.toml'}:{name}"], TaskChanges(novel_from="beta")
    (job,) = make_jobs(RunConfig(["lwof"], tasks, {}, {"steps": 4}, calibrate=True, change=change), work.home)
    assert job.task.name == f"{name}+novel-from=beta"
    result = api.run_job(job, work)
    expected = api.run_job(replace(job, task=by_hand(job.task)), work)
    assert same(result, expected)
    assert result.training.get("validation") == expected.training.get("validation")
    assert result.pretraining["sha256"] == expected.pretraining["sha256"]  # base/train is the same
    plain = api.run_job(replace(job, task=task_of(root, name)), work)
    assert plain.pretraining["key"] == result.pretraining["key"] != expected.pretraining["key"]
    assert not same(plain, result)
    assert (plain.novel_fingerprint, plain.fingerprint) == ("", result.fingerprint)
    assert result.novel_fingerprint == open_dataset(work.home.data / "beta").fingerprint


def test_names_hashes_and_pretrainings():
    name = "glyphs-5shot+ways=10+novel-from=tiny-pack"
    assert split_task_name(name) == ("glyphs-5shot", TaskChanges(ways=10, novel_from="tiny-pack"))
    (task,) = load_tasks("glyphs-5shot+novel-from=tiny-pack+ways=10")
    assert (task.name, task.variant_of, task.digest) == (name, "glyphs-5shot", None)
    (plain,), (wide,) = load_tasks("glyphs-5shot"), load_tasks("glyphs-5shot+ways=10")
    assert len({task.hash, plain.hash, wide.hash}) == 3
    assert "novel_from" not in plain.definition()
    assert make_pretraining_key(task, "f", "linear", 0) == make_pretraining_key(plain, "f", "linear", 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("glyphs-5shot+novel-from=glyphs", "is on data set 'glyphs' already; novel-from takes another data set"),
        ("mini-sessions+novel-from=cub", "are those of a published list"),
        ("glyphs-5shot+novel-from=", "novel-from takes the name of a data set"),
        ("glyphs-5shot+novel-from", "novel-from takes the name of a data set"),
        ("glyphs-5shot+novel-from=A b", "novel-from must be the name of a data set, not 'A b'"),
        ("glyphs-5shot+novel-from=cub+novel-from=tiny", "novel-from is there twice"),
    ],
)
def test_mistakes_in_names(name, said):
    with pytest.raises(UserError, match=said):
        load_tasks(name)
    with pytest.raises(UserError, match="must be the name of a data set, not 7"):
        make_task_changes({"novel-from": 7})


@pytest.fixture
def refused(root, call, tmp_path, monkeypatch):
    """Says a command's one line of refusal, on the data of the module's home and those made here."""
    home = Paths.locate(tmp_path / "home")
    shutil.copytree(root / "home" / "data", home.data)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(home.cache))
    monkeypatch.chdir(root)

    def run(novel: str, *more: str) -> str:
        line = ""
        for how in ((), ("--dry-run",)):
            task = ("--task", "tasks.toml:alpha-1shot", "--novel-from", novel)
            status, out, err = call("run", "--method", "imprint", *task, "--device", "cpu", "-q", *how, *more)
            assert status == 2
            if not how:  # a dry run may say it below a plan
                assert (out, err.count("\n")) == ("", 1), (out, err)
                line = err
        assert not home.pretrained.exists()
        return line

    run.home = home
    return run


def test_what_does_not_go_together_is_refused_in_one_line_before_anything_is_trained(refused):
    home = refused.home
    make(home, "large", size=20)
    make(home, "few", few=2)
    make(home, "lacking", without="novel/val")
    assert "20x20x1 beside 16x16x1; both need images of one size" in refused("large")
    assert "need 3 novel classes, novel/test of few has 2" in refused("few")
    assert "cannot come from data set 'lacking': it has no pool novel/val" in refused("lacking")
    assert "is on data set 'alpha' already; novel-from takes another data set" in refused("alpha")
    assert re.search("unknown data set 'cup'.* did you mean 'cub'", refused("cup"))
    cub = refused("cub")
    assert "data set 'cub' is not prepared in" in cub
    assert "ifsl-bench data prepare cub --from PATH" in cub


def test_a_plan_knows_sizes_before_data_are_made(call):
    """Neither is prepared; of both it is known what they will be."""
    status, out, err = call("plan", "--method", "imprint", "--task", "tiny-5shot", "--novel-from", "cub")
    assert (status, out) == (2, "")
    assert "84x84x3 beside 64x64x3" in err
    status, out, err = call("plan", "--method", "imprint", "--task", "tiny-5shot", "--novel-from", "cub-64")
    assert status == 0, err
    assert "1 data, 1 pretraining, 5 features, 1 evaluation" in out


def test_a_stored_result_is_used_until_the_novel_data_change_and_never_compared_with_others(tmp_path):
    home = Paths.locate(tmp_path / "home")
    for name in ("alpha", "beta"):
        make(home, name)
    (tmp_path / "tasks.toml").write_text(TASKS)
    task, work = f"{tmp_path / 'tasks.toml'}:alpha-1shot", api.workspace(home.cache, device="cpu", reporter=Messages())
    first = api.run("lwof", task, train={"steps": 4}, change={"novel-from": "beta"}, work=work)
    again = api.run("lwof", task, train={"steps": 4}, change={"novel-from": "beta"}, work=work)
    assert again.provenance["time"] == first.provenance["time"]
    (file,) = (home.results / "alpha-1shot+novel-from=beta").glob("lwof*.json")
    (crossed_task,) = load_tasks(f"{task}+novel-from=beta")
    report = check_file(file, {crossed_task.name: crossed_task}, home)
    assert [failure for failure in report.failures if "files changed since commit" not in failure] == []
    make(home, "beta", sources={"novel/val": "gamma", "novel/test": "gamma"})
    work = api.workspace(home.cache, device="cpu", reporter=Messages())  # the other has the old data open
    changed_result = api.run("lwof", task, train={"steps": 4}, change={"novel-from": "beta"}, work=work)
    assert any("out of date (changed: novel classes' data)" in line for line in work.reporter.said)
    assert changed_result.novel_fingerprint != first.novel_fingerprint
    assert not same(changed_result, first)
    assert changed_result.provenance["checkpoint"] != first.provenance["checkpoint"]  # validated on other images
    assert "the data of novel classes differ" in reason_not_to_pair(first, changed_result)


def test_grey_novel_classes_beside_coloured_base_classes_get_three_equal_channels(hues):
    home = Paths.locate(hues / "home")
    grey, colour = make(home, "beta", size=20), open_dataset(home.data / "hues")
    dataset = make_cross_domain(colour, grey)
    for name in ("novel/val", "novel/test"):
        pool, plain = dataset.pool(name), grey.pool(name)
        assert pool.images.shape == (*plain.images.shape[:3], 3)
        assert tuple(dataset.manifest["pools"][name]["shape"]) == pool.images.shape
        rows = np.array([3, 0, 5])
        for channel in range(3):
            np.testing.assert_array_equal(pool.images[rows][..., channel], plain.images[rows][..., 0])
    np.testing.assert_array_equal(dataset.pool("base/train").images, colour.pool("base/train").images)
    with pytest.raises(UserError, match="20x20x3 beside 20x20x1"):
        make_cross_domain(grey, colour)
