"""Fixtures: small data sets of the real kinds, in caches of their own."""

from __future__ import annotations

import os
import sys

# Two busy threads for each of many small tests only get in each other's way. NumPy's libraries read this when they are
# loaded; workers and commands that tests start inherit it. Benchmarks have every core, as users have.
if "--benchmark-enable" not in sys.argv:
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"  # an empty one says nothing
# Every test has a home of its own, and they shall not all compile.
os.environ.setdefault("NUMBA_CACHE_DIR", os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "kernels"))

import functools
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from filelock import FileLock

if TYPE_CHECKING:
    from ifsl_bench.analysis.task_results import TaskResults
    from ifsl_bench.data.writer import DatasetWriter
    from ifsl_bench.experiments.workspace import Workspace
    from ifsl_bench.protocols.tasks.task import Task
    from tests.reporters import Messages

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))

ORACLE = Path(__file__).parent / "oracle"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]  # for root, and for containers
COMPILING = tuple(
    f"tests/{name}"
    for name in (
        "benchmarks/test_solve", "solvers/", "methods/", "plugin/test_contract", "plugin/test_identity",
        "product/test_example_method", "product/test_pretend", "protocols/test_variants", "experiments/test_calibrate",
        "store/test_check.py", "experiments/test_many_episodes", "store/test_reproduce", "experiments/test_stages",
        "experiments/test_sessions", "experiments/test_threads", "experiments/test_training", "experiments/test_tuning",
    )
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda", action="store_true", help="let tests see CUDA devices; for product/test_cuda.py")


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, whatever the machine has: their numbers are its, and some of them fork."""
    if not config.getoption("--cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)  # before -m leaves any out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mark ``slow`` says why."""
    for item in items:
        for mark in item.iter_markers("slow"):
            if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs:
                raise pytest.UsageError(f'{item.nodeid}: say why it is slow: @pytest.mark.slow("why")')
    # Workers begin with stretches of this list. Those that compile kernels are one stretch: a worker beside it that
    # needed the same ones would compile them too. Slow ones come early, or a worker would wait for the last of them.
    items.sort(key=lambda item: (not item.nodeid.startswith(COMPILING), not [*item.iter_markers("slow")]))


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def _private_home(_homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own folders. pytest would look through all folders to number a new one."""
    monkeypatch.setenv("IFSL_BENCH_HOME", str(_homes / uuid.uuid4().hex))


@pytest.fixture(autouse=True, scope="session")
def _packaged_results_are_read_once() -> Iterator[None]:
    """Hundreds of tests ask for the rows of a few tasks; nothing changes those that come with the package."""
    from ifsl_bench.analysis import task_results
    from ifsl_bench.store import published

    load_board, packaged_root = task_results.load_task_results, task_results.packaged_results_folder
    published_root = published.packaged_results_folder
    nothing_else = functools.lru_cache(maxsize=12)(lambda task: load_board(task, Path("no results")))

    def load_once(task: Task, results: Path) -> TaskResults:
        packaged = (
            task_results.packaged_results_folder is packaged_root
            and published.packaged_results_folder is published_root
        )
        alone = packaged and not results.exists()
        return nothing_else(task) if alone else load_board(task, results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_results, "load_task_results", load_once)
        yield


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process; returns (status, standard output, standard error)."""
    from ifsl_bench.cli import main as cli

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ifsl-bench", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def messages() -> Messages:
    """A reporter that keeps what it is told."""
    from tests.reporters import Messages

    return Messages()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser; tests that ask for it are skipped where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def learn2learn() -> ModuleType:
    """The real package; tests that ask for it are skipped where it is not installed."""
    from ifsl_bench.plugin.learn2learn import INSTALL_COMMAND, load_learn2learn
    from ifsl_bench.plugin.registry import is_installed

    if not is_installed("learn2learn"):
        pytest.skip(f"learn2learn is not installed: {INSTALL_COMMAND}")
    return load_learn2learn()


@pytest.fixture
def oracle():
    """Opens a file of numbers computed by the authors' code as float64 tensors."""

    def open_file(name: str) -> dict[str, torch.Tensor]:
        with np.load(ORACLE / f"{name}.npz") as file:
            return {key: torch.from_numpy(np.array(file[key])) for key in file.files}

    return open_file


def _write_features(folder: Path, *, width: int = 16, seed: int = 0, classes: dict[str, int] | None = None) -> Path:
    """Six .npz files of clustered random features, which any method can tell apart a little."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    counts = classes or {"base": 8, "novel/train": 9, "novel/val": 7, "novel/test": 7}
    offset = {"base": 0, "novel/train": 100, "novel/val": 200, "novel/test": 300}
    centres = {side: generator.normal(size=(n, width)) for side, n in counts.items()}
    for pool in ("base/train", "base/val", "base/test", "novel/train", "novel/val", "novel/test"):
        side = "base" if pool.startswith("base") else pool
        labels = np.repeat(np.arange(counts[side]), 24 if pool == "base/train" else 14)
        generator.shuffle(labels)
        features = centres[side][labels] + generator.normal(size=(len(labels), width))
        np.savez(
            folder / f"{pool.replace('/', '-')}.npz", features=features.astype(np.float32), labels=labels + offset[side]
        )
    return folder


FEATURE_TASKS = """
[dataset]
name = "clusters"

[pretraining]
backbone = "none"
steps = 60
batch = 32
[pretraining.schedule]
rate = 0.05

[meta_training]
steps = 40
validate_every = 10
[meta_training.schedule]
rate = 1e-3
drops = [20]

[evaluation]
episodes = 60
validation_episodes = 20

[tasks.clusters-1shot]
shots = 1
[tasks.clusters-5shot]
shots = 5
[tasks.clusters-shared-5shot]
shots = 5
protocol = "shared"
"""


@pytest.fixture
def write_features() -> Callable[..., Path]:
    """Writes other features of the same form."""
    return _write_features


@pytest.fixture
def features_folder(tmp_path: Path) -> Path:
    return _write_features(tmp_path / "features")


@pytest.fixture(scope="session")
def clusters_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the data set ``clusters`` prepared; copied by :func:`clusters`."""
    from ifsl_bench.data.preparing.prepare import prepare_dataset
    from ifsl_bench.utils.files import Paths
    from ifsl_bench.utils.progress import Reporter

    root = tmp_path_factory.mktemp("clusters")
    _write_features(root / "features")
    prepare_dataset(Paths.locate(root / "home"), "clusters", root / "features", False, Reporter())
    (root / "clusters.toml").write_text(FEATURE_TASKS)
    return root


@pytest.fixture
def clusters(clusters_source: Path, tmp_path: Path) -> Path:
    """A folder with ``home`` (frozen features prepared) and ``clusters.toml`` (three tasks on them), to play with."""
    target = tmp_path / "clusters"
    shutil.copytree(clusters_source, target)
    return target


@pytest.fixture
def here(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with its home in the environment and as the current folder."""
    monkeypatch.setenv("IFSL_BENCH_HOME", str(clusters / "home"))
    monkeypatch.chdir(clusters)
    return clusters


@pytest.fixture
def task(clusters: Path) -> str:
    """A task on the frozen features."""
    return f"{clusters / 'clusters.toml'}:clusters-5shot"


@pytest.fixture
def work(clusters: Path) -> Workspace:
    """A workspace in their home."""
    from ifsl_bench.experiments.workspace import workspace

    return workspace(clusters / "home", device="cpu")


@pytest.fixture
def minimal_task() -> str:
    """The shortest task file, with the task ``d-1shot`` at its end."""
    return """
[dataset]
name = "d"
[pretraining]
backbone = "none"
steps = 1
[pretraining.schedule]
rate = 0.1
[tasks.d-1shot]
shots = 1
"""


GLYPH_TASKS = """
[dataset]
name = "glyphs"
mean = [0.5]
std = [0.25]

[pretraining]
backbone = "resnet-small"
steps = {steps}
batch = 64
crop_padding = 2
[pretraining.schedule]
rate = 0.05
shape = "cosine"
warmup = 2

[meta_training]
steps = 40
validate_every = 10
[meta_training.schedule]
rate = 1e-3

[evaluation]
episodes = 40
validation_episodes = 10

[tasks.few-1shot]
shots = 1
[tasks.few-shared-5shot]
shots = 5
protocol = "shared"
"""


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[str, Callable[[Path], None]], Path]:
    """Makes a folder that all workers share: the first that asks for it fills it, the others wait."""
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        folder, half = shared / name, shared / f"{name}.partial"
        with FileLock(shared / f"{name}.lock"):
            if not folder.exists():
                shutil.rmtree(half, ignore_errors=True)
                half.mkdir()
                fill(half)
                half.rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def glyphs_source(made_once: Callable[..., Path]) -> Path:
    """A home with the real glyphs, rendered once for all tests."""
    from ifsl_bench.data.preparing.prepare import prepare_dataset
    from ifsl_bench.utils.files import Paths
    from ifsl_bench.utils.progress import Reporter

    def fill(root: Path) -> None:
        prepare_dataset(Paths.locate(root / "home"), "glyphs", None, False, Reporter())
        (root / "few.toml").write_text(GLYPH_TASKS.format(steps=6))

    return made_once("glyphs", fill)


def _link_data(source: str, target: str) -> None:
    """Images are shared by hard link, since nothing writes to them; the rest is copied, for tests to damage."""
    (os.link if ".images.npy" in source else shutil.copy2)(source, target)


def _copy_home(source: Path, target: Path) -> Path:
    shutil.copytree(source / "home", target / "glyph-home", copy_function=_link_data)
    shutil.copy2(source / "few.toml", target / "few.toml")
    return target / "glyph-home"


@pytest.fixture
def glyph_home(glyphs_source: Path, tmp_path: Path) -> Path:
    """A home of its own with the glyphs in it, and ``few.toml`` beside it: short tasks on them."""
    return _copy_home(glyphs_source, tmp_path)


@pytest.fixture(scope="session")
def glyph_features_source(glyphs_source: Path, made_once: Callable[..., Path]) -> Path:
    """The same with a pretraining of six steps and the features under it."""
    from ifsl_bench.api import workspace
    from ifsl_bench.experiments.workspace import PreparedTask
    from ifsl_bench.protocols.tasks.task_files import load_tasks

    def fill(root: Path) -> None:
        home = _copy_home(glyphs_source, root).rename(root / "home")
        bench = PreparedTask(
            load_tasks(f"{root / 'few.toml'}:few-1shot")[0], "linear", 0, workspace(home, device="cpu")
        )
        for pool in ("base/val", "base/test", "novel/test"):
            bench.feature_pool(pool)

    return made_once("glyph-features", fill)


@pytest.fixture
def glyph_features_home(glyph_features_source: Path, tmp_path: Path) -> Path:
    """A home with glyphs, a short pretraining (linear head, seed 0) and some features."""
    return _copy_home(glyph_features_source, tmp_path)


HUE_POOLS = {"base/train": (5, 8), "base/val": (5, 4), "base/test": (5, 4), "novel/train": (4, 8), "novel/val": (4, 8),
         "novel/test": (4, 8)}  # fmt: skip
HUE_TASKS = """
[dataset]
name = "hues"
mean = [0.5, 0.5, 0.5]
std = [0.2, 0.2, 0.2]
[pretraining]
backbone = "resnet-small"
steps = 2
batch = 8
[pretraining.schedule]
rate = 0.05
[evaluation]
episodes = 12
validation_episodes = 6
[episode]
ways = 3
novel_queries = 3
base_queries = 3
[tasks.hues-1shot]
shots = 1
"""


@pytest.fixture
def hues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with small colour images in its home and a task on them."""
    from ifsl_bench.data.writer import build_dataset
    from ifsl_bench.utils.files import Paths

    home, random = Paths.locate(tmp_path / "home"), np.random.default_rng(0)

    def fill(writer: DatasetWriter) -> None:
        for name, (classes, each) in HUE_POOLS.items():
            side = name if name.startswith("novel") else "base"
            hue = np.random.default_rng(sum(side.encode())).integers(30, 226, (classes, 1, 1, 3)).repeat(each, 0)
            labels, names = np.repeat(np.arange(classes), each), tuple(f"{side} {i}" for i in range(classes))
            with writer.write_pool(name, labels, names, (20, 20, 3)) as images:
                images[:] = np.clip(hue + random.integers(-20, 20, (classes * each, 20, 20, 3)), 0, 255)

    home.data.mkdir(parents=True)
    build_dataset(home.data / "hues", "hues", "made of noise", fill, {})
    (tmp_path / "hues.toml").write_text(HUE_TASKS)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stored_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A results folder, and no packaged results."""
    from ifsl_bench.analysis import task_results
    from ifsl_bench.store.schema import write_result

    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "none")
    root = tmp_path / "results"

    def store(*rows: Any) -> None:
        for row in rows:
            for measured in row.results:
                write_result(root, measured)

    store.root = root  # type: ignore[attr-defined]
    return store
