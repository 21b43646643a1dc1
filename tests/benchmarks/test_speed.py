"""Speed of the harness: ``pytest tests/benchmarks --benchmark-enable -n 0``. Ratios are to a peer in the same run."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from ifsl_bench.backbones.features import FeaturePool
from ifsl_bench.data.sets.glyphs import dataset as glyphs
from ifsl_bench.experiments.meta_training import MetaTrainer
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.find_method import find_method
from ifsl_bench.plugin.method import Base
from ifsl_bench.plugin.options import make_method
from ifsl_bench.protocols.episode_loader import EpisodeLoader
from ifsl_bench.protocols.loader import evaluate_method
from ifsl_bench.protocols.sampling.episodes import EpisodeSampler
from ifsl_bench.protocols.sampling.sequences import SequencePoolStarts, SequenceSampler
from ifsl_bench.protocols.sequence_loader import SequenceLoader
from ifsl_bench.protocols.tasks.task import EpisodeSpec, MetaTraining, Schedule, SessionSpec
from ifsl_bench.protocols.tasks.variants import TrainingChanges
from ifsl_bench.utils.progress import Reporter

D = 512


def seconds(call, repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def note(benchmark, **figures: float) -> None:
    benchmark.extra_info.update({key: round(value, 2) for key, value in figures.items()})


def make_base(classes: int) -> Base:
    torch.manual_seed(0)
    return Base(torch.randn(classes, D), torch.zeros(classes), torch.randn(classes, D), 10.0)


def make_pool(name: str, classes: int, each: int, base: Base) -> FeaturePool:
    """Random features around a mean of each class."""
    features = (torch.randn(classes, 1, D) + torch.randn(classes, each, D)).flatten(0, 1)
    return FeaturePool(name, features, features @ base.weight.T, np.arange(classes + 1) * each, 1)


def make_loader(classes: int, novel_classes: int, shots: int, hide: bool = False) -> tuple[EpisodeLoader, Base]:
    """Episodes in the shapes of the paper's data sets."""
    base = make_base(classes)
    novel = make_pool("novel", novel_classes, 100, base)
    queries = novel if hide else make_pool("base", classes, 100, base)
    sampler = EpisodeSampler(("speed", "test", 0), EpisodeSpec(), shots, novel.class_starts, queries.class_starts, hide)
    return EpisodeLoader(sampler, novel, queries), base


def test_sampler_on_one_core(benchmark):
    """Goal 20,000 episodes (indices) a second; the peer draws one episode at a time with NumPy."""
    torch.set_num_threads(1)
    novel, base = np.arange(161) * 1200, np.arange(201) * 128
    sampler = EpisodeSampler(("speed", "test", 0), EpisodeSpec(), 5, novel, base)
    benchmark(sampler.sample, 0, 2000)
    generator = np.random.default_rng(0)

    def one_by_one(count: int = 200) -> None:
        for _ in range(count):
            for c in generator.choice(160, 5, replace=False):
                novel[c] + generator.choice(1200, 10, replace=False)
            generator.choice(base[-1], 25, replace=False)
            generator.permutation(50)

    if benchmark.stats:
        rate = 2000 / benchmark.stats["mean"]
        note(benchmark, episodes_per_second=rate, ratio_to_one_by_one=rate * seconds(one_by_one) / 200)


@pytest.mark.parametrize("name", ["protonet", "imprint"])
def test_evaluation(benchmark, name):
    """Goal: 2,000 episodes in 2 s at D 512, K 200; the peer evaluates one episode at a time."""
    loader, base = make_loader(200, 160, 5)
    method = registry.get_method(name)(base, 5)
    episodes = range(100 if benchmark.disabled else 2000)
    benchmark.pedantic(evaluate_method, (method, name, loader, episodes), rounds=3, warmup_rounds=1)

    @torch.no_grad()
    def one_by_one(count: int = 100) -> None:
        for i in range(count):
            batch = loader.load_batch(i, 1)
            method(batch.support, batch.query).logits.argmax(-1)

    if benchmark.stats:
        mean = benchmark.stats["mean"]
        note(benchmark, seconds_for_2000=mean, ratio_to_one_by_one=seconds(one_by_one) / 100 / (mean / 2000))


@pytest.mark.parametrize("name", ["ncm", "imprint", "teen", "protonet", "lr", "lr+a"])
def test_sequences(benchmark, name):
    """Goals on two cores at the shape of tiny-features-sessions: 300 a second and 3 times the peer; 100 for LR.

    The peer computes all logits of a sequence in NumPy, and an argmax after each session, on as many threads.
    """
    classes, sessions, ways, shots, count = 95, 9, 5, 5, 4 if benchmark.disabled else 400
    base = make_base(classes)
    novel, queries = make_pool("novel", sessions * ways, 225, base), make_pool("base", classes, 36, base)
    shape = SessionSpec(count=sessions, ways=ways)
    sampler = SequenceSampler(
        ("speed", "test", 0), shape, shots, SequencePoolStarts(novel.class_starts, queries.class_starts)
    )
    chosen, options, *_ = find_method(name)
    loader, method = SequenceLoader(sampler, novel, queries), make_method(chosen.method, base, ways, options)
    benchmark.pedantic(evaluate_method, (method, name, loader, range(count)), rounds=3, warmup_rounds=1)

    def loop(count: int = 40) -> None:
        drawn = sampler.sample(0, count)
        prototypes, images, of_base = (x.numpy() for x in (base.prototypes, novel.features, queries.features))
        labels = np.concatenate([sampler.base_labels.numpy(), classes + np.arange(sessions * ways).repeat(36)])
        for support, query in zip(drawn.support.numpy(), drawn.query.numpy(), strict=True):
            means = np.concatenate([prototypes, images[support].mean(1)])
            x = np.concatenate([of_base, images[query.ravel()]])
            logits = unit_rows(x) @ unit_rows(means).T
            for t in range(1, sessions + 1):
                met = classes + t * ways
                rows = len(of_base) + t * ways * 36
                (logits[:rows, :met].argmax(1) == labels[:rows]).sum()

    if benchmark.stats:
        rate = count / benchmark.stats["min"]
        note(benchmark, sequences_per_second=rate, ratio_to_numpy_loop=rate * seconds(loop) / 40)


def unit_rows(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_lwof_meta_training(benchmark, tmp_path):
    """Goal 150 steps a second at D 512, K 64, one episode a step; the peer is the bare forward-backward-Adam step."""
    loader, base = make_loader(64, 64, 5, hide=True)
    kind = registry.get_method("lwof")
    steps = 20 if benchmark.disabled else 300
    plan = MetaTraining(steps=steps, schedule=Schedule(rate=1e-3), validate_every=steps)
    rounds = iter(range(100))

    def train() -> None:
        folder, method = tmp_path / str(next(rounds)), kind(base, 5)
        MetaTrainer(folder, method, "lwof", loader, lambda _: 0.0, plan, TrainingChanges(), 0, {}, Reporter()).run()

    benchmark.pedantic(train, rounds=3, warmup_rounds=1)
    method = kind(base, 5)
    optimiser = torch.optim.Adam(method.parameters(), fused=True)
    batch = loader.load_batch(0, 1)

    def bare(count: int = 100) -> None:
        for _ in range(count):
            logits = method(batch.support, batch.query).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.query_labels.flatten()).backward()
            optimiser.step()
            optimiser.zero_grad()

    if benchmark.stats:
        rate = steps / benchmark.stats["mean"]
        note(benchmark, steps_per_second=rate, ratio_to_bare_step=rate * seconds(bare) / 100)


def test_rendering(benchmark):
    """Goal: about 35,000 images in under a minute on two cores."""
    letter, indices = glyphs.read_all_letters()[0], np.arange(100)
    benchmark(glyphs.render_images, letter, indices)
    if benchmark.stats:
        note(benchmark, images_per_second_on_one_core=len(indices) / benchmark.stats["mean"])


@pytest.mark.parametrize("command", ["--help", "tasks"])
def test_start_up(benchmark, command):
    """Goal 0.5 s; the peer is an empty Python process."""

    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    benchmark.pedantic(run, ("-m", "ifsl_bench", command), rounds=5, warmup_rounds=1)
    if benchmark.stats:
        mean = benchmark.stats["mean"]
        note(benchmark, seconds=mean, ratio_to_empty_process=mean / seconds(lambda: run("-c", "")))


def peak_megabytes(*arguments: str) -> float:
    """Runs the command line in a process of its own; the largest resident memory it had."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "ifsl_bench", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss / 1024


@pytest.mark.slow("a benchmark of a whole command, which needs a trained model")
@pytest.mark.skipif(not hasattr(os, "wait4"), reason="memory of a child process is known on POSIX only")
def test_cached_run(benchmark, glyph_features_home):
    """Goal 10 s and 1.5 GB: a run of which everything but the evaluation is cached."""
    task = f"{glyph_features_home.parent / 'few.toml'}:few-1shot"
    arguments = ("run", "--method", "protonet", "--task", task, "--home", str(glyph_features_home), "--rerun", "-q")
    peaks: list[float] = []
    benchmark.pedantic(lambda: peaks.append(peak_megabytes(*arguments)), rounds=3, warmup_rounds=1)
    if benchmark.stats:
        note(benchmark, seconds=benchmark.stats["mean"], peak_megabytes=max(peaks))


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="memory of a child process is known on POSIX only")
def test_run_from_nothing(benchmark, tmp_path):
    """Goal 20 seconds and 1.5 GB: the README's command in an empty home."""
    if benchmark.disabled:
        pytest.skip("takes minutes; runs with --benchmark-enable")
    arguments = ("run", "--method", "imprint", "--task", "glyphs-5shot", "--home", str(tmp_path / "home"), "-q")
    peaks: list[float] = []
    benchmark.pedantic(lambda: peaks.append(peak_megabytes(*arguments)), rounds=1)
    note(benchmark, seconds=benchmark.stats["mean"], peak_megabytes=max(peaks))
