"""Threads belong to the stage: how many the process happens to use changes no digit."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg.cython_blas  # noqa: F401  # the BLAS that kernels call: limits hold for what is loaded
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from ifsl_bench import api
from ifsl_bench.backbones.trainer import PretrainingTrainer
from ifsl_bench.experiments import workspace as prepared
from ifsl_bench.experiments.backends import run_pickled_item
from ifsl_bench.experiments.evaluate_stage import EvaluationStage
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.runner import divide_into_work_items
from ifsl_bench.protocols import loader as evaluation
from ifsl_bench.solvers import numba_episodes
from ifsl_bench.utils import threads as processor
from ifsl_bench.utils.progress import Reporter
from tests.experiments.test_local import counts

SEES = """
import torch
from torch import nn
from ifsl_bench import Method, Prediction
from ifsl_bench.utils.threads import kernel_thread_count

class Sees(Method):
    \"\"\"Imprinting, which answers how many threads it was asked on.\"\"\"

    def __init__(self, base, ways):
        super().__init__(base, ways)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, support, query):
        novel = self.scale * query.features @ support.class_means(self.ways).mT
        seen = torch.full((len(novel),), float(10 * kernel_thread_count() + torch.get_num_threads()))
        if self.training and novel.shape[:2] == (1, 50):  # a step, not a probe
            with open("seen", "a") as file:
                file.write(f"{seen[0]:.0f} ")
        return Prediction(torch.cat([query.base_logits, novel], -1), {"threads": seen})
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_num_threads(), processor.whole_machine_threads(), processor.max_busy_threads()
    yield
    processor.set_thread_counts(*before[1:])
    torch.set_num_threads(before[0])


def run(home: Path, methods: list[str], task: str, ambient: int, cores: int, share: int) -> None:
    """All items, one after the other, each in a process that uses ``ambient`` threads when it begins."""
    processor.set_thread_counts(cores, share)
    work = api.workspace(home, device="cpu")
    jobs = make_jobs(RunConfig(methods, [task], {}, {"steps": "20"}))
    packed_work = pickle.dumps((work, str(home)))
    for item in itertools.chain(*divide_into_work_items(dict(enumerate(jobs)), work)):
        torch.set_num_threads(ambient)
        outcome = run_pickled_item(pickle.dumps(item), packed_work, cores, share)
        assert outcome.outcome_kind == "done", outcome.failure_message


def weights(home: Path) -> dict[str, str]:
    """Checksums of pretrainings."""
    return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in home.glob("pretrained/*/*.safetensors")}  # fmt: skip


@pytest.mark.slow("runs in threads")
def test_the_same_bits_whatever_the_process_was_doing(here, monkeypatch):
    thread_counts: dict[str, set[int]] = {"steps": set(), "features": set()}
    step, compute = PretrainingTrainer._train_step, prepared.compute_features

    def spied_step(*args):
        thread_counts["steps"].add(torch.get_num_threads())
        return step(*args)

    def spied_compute(*args):
        thread_counts["features"].add(torch.get_num_threads())
        return compute(*args)

    monkeypatch.setattr(PretrainingTrainer, "_train_step", spied_step)
    monkeypatch.setattr(prepared, "compute_features", spied_compute)
    for name, ambient, share in (("one", 1, 2), ("two", 4, 1)):
        shutil.copytree(here / "home", here / name)
        run(here / name, ["imprint"], "clusters.toml:clusters-5shot", ambient, cores=3, share=share)
    assert weights(here / "one") == weights(here / "two")
    assert len(weights(here / "one")) == 1
    assert counts(here / "one" / "results") == counts(here / "two" / "results")
    assert thread_counts == {"steps": {3}, "features": {3}}


@pytest.mark.slow("a method is trained and evaluated")
def test_a_step_on_few_episodes_and_a_block_of_an_evaluation_have_one_thread(here, monkeypatch):
    (here / "sees.py").write_text(SEES)
    for cores, share, threads in ((4, 1, 11), (4, 4, 41)):
        home = here / f"home-{cores}-{share}"
        shutil.copytree(here / "home", home)
        run(home, ["sees.py:Sees"], "clusters.toml:clusters-5shot", ambient=3, cores=cores, share=share)
        (path,) = (home / "results").glob("*/*.json")
        threads_seen = json.loads(path.read_text())["solver"]["threads"]
        assert threads_seen["mean"] == threads_seen["max"] == threads
        assert set((here / "seen").read_text().split()) == {"11"}


@pytest.mark.slow("kernels are run in a process of their own")
def test_blas_under_a_kernel_has_one_thread(here, monkeypatch):
    """An episode has one thread, and BLAS would bring as many as there are cores, for each caller."""

    def blas_threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["internal_api"] == "openblas"}

    seen, check = set(), numba_episodes.check_cancelled  # which comes before each piece of episodes
    monkeypatch.setattr(numba_episodes, "check_cancelled", lambda stop: seen.update(blas_threads()) or check(stop))
    with threadpool_limits(3, "blas"):
        run(here / "home", ["lr"], "clusters.toml:clusters-5shot", ambient=3, cores=4, share=2)
        assert blas_threads() == {3}
    assert seen == {1}


@pytest.fixture
def pools(monkeypatch) -> list[int]:
    """Blocks are of five episodes; how many threads each pool has that takes them."""
    sizes, pool = [], evaluation.ThreadPoolExecutor
    monkeypatch.setattr(evaluation, "POSSIBLE_BLOCK_SIZES", (5,))
    monkeypatch.setattr(evaluation, "ThreadPoolExecutor", lambda n, *more: sizes.append(n) or pool(n, *more))
    return sizes


@pytest.mark.parametrize("name", ["lwof", "lr+a"])
def test_blocks_that_threads_take_at_once_find_what_one_thread_finds(here, pools, name):
    (job,) = make_jobs(RunConfig([name], ["clusters.toml:clusters-5shot"], {}, {"steps": "2"}))
    answers = []
    for share in (1, 3):
        processor.set_thread_counts(3, share)
        work = api.workspace(here / "home", device="cpu")
        answers.append(EvaluationStage(job).open(work).evaluate(range(60), None, Reporter(), ""))
    assert set(pools) == {3}
    for name, values in answers[0].counts.count_arrays().items():  # the pairs compare all margins
        np.testing.assert_array_equal(values, answers[1].counts.count_arrays()[name])


DRAWS = """
import torch
from ifsl_bench import Method, Prediction

class Draws(Method):
    parallel_copies = {}

    def forward(self, support, query):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            noise = torch.randn(self.ways)
        novel = query.features @ support.class_means(self.ways).mT
        return Prediction(torch.cat([query.base_logits, novel + noise], -1))
"""


@pytest.mark.parametrize(("declared", "lock", "several"), [(False, False, []), (True, False, [3]), (True, True, [])])
def test_only_a_method_that_declares_it_and_can_be_copied_is_asked_by_several_threads(
    here, pools, declared, lock, several
):
    (here / "draws.py").write_text(DRAWS.format(declared))
    processor.set_thread_counts(3, 3)
    (job,) = make_jobs(RunConfig(["draws.py:Draws"], ["clusters.toml:clusters-5shot"]))
    context = EvaluationStage(job).open(api.workspace(here / "home", device="cpu"))
    if lock:
        context.method.lock = threading.Lock()
    context.evaluate(range(60), None, Reporter(), "")
    assert pools == several


def test_ctrl_c_does_not_wait_for_the_blocks_that_threads_have_begun(here, monkeypatch):
    monkeypatch.setattr(evaluation, "POSSIBLE_BLOCK_SIZES", (25,))
    processor.set_thread_counts(2, 2)
    (job,) = make_jobs(RunConfig(["lr"], ["clusters.toml:clusters-5shot"]))
    context = EvaluationStage(job).open(api.workspace(here / "home", device="cpu"))
    context.evaluate(range(25), None, Reporter(), "")  # compiles
    check, begun = numba_episodes.check_cancelled, threading.Event()

    def slow(stop):
        begun.set()
        time.sleep(0.2)
        check(stop)

    monkeypatch.setattr(numba_episodes, "check_cancelled", slow)
    monkeypatch.setattr(numba_episodes, "FIRST_CHUNK_EPISODES", 1)  # a block takes 25 times 0.2 s and more
    pressed: list[float] = []

    def press() -> None:
        begun.wait(30)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    try:
        threading.Thread(target=press).start()
        with pytest.raises(KeyboardInterrupt):
            context.evaluate(range(60), None, Reporter(), "")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - pressed[0] < 4
