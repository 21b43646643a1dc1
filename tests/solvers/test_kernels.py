"""The compiled kernels' own parts, and where their machine code is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import njit

from ifsl_bench import solvers
from ifsl_bench.backbones.features import FeaturePool
from ifsl_bench.plugin.method import NonFiniteLogitsError, Prediction, Query, Support
from ifsl_bench.protocols.episode_loader import EpisodeLoader, count_episode_hits
from ifsl_bench.protocols.loader import Batch
from ifsl_bench.protocols.sampling.episodes import EpisodeSampler
from ifsl_bench.protocols.tasks.task import EpisodeSpec
from ifsl_bench.solvers import (
    DualNewton,
    GradientDescent,
    RegressionArgs,
    SoftmaxRegression,
    Unroll,
    minimise,
    numba_code_cache,
    numba_linear,
    numba_regression,
    numba_softmax,
)
from ifsl_bench.solvers.numba_compiling import inline_jit
from tests.tolerances import rounding


def test_exponentials_and_tangents_are_numpys():
    x = np.concatenate([np.linspace(-720, 709, 20001), np.linspace(-1e-3, 1e-3, 2001)])
    out = np.array([numba_softmax.fast_exponential(number) for number in x])
    inside = x >= -708
    # A unit in the last place is up to 2.2e-16 of a number; ours is within two, and so is NumPy's, on any processor.
    np.testing.assert_allclose(out[inside], np.exp(x[inside]), rtol=1e-15)
    assert (out[~inside] < 1e-307).all()
    numba_softmax.write_tanh(x, out)
    np.testing.assert_allclose(out, np.tanh(x), rtol=0, atol=5e-16)  # likewise, of numbers up to 1
    nothing, most, least = (numba_softmax.fast_exponential(odd) for odd in (np.nan, np.inf, -np.inf))
    assert np.isnan(nothing)
    assert most > 1e307
    assert least < 1e-307


@inline_jit
def _apply(data, d, d_image, out):
    np.dot(data[0], d_image, out)


@inline_jit
def _metric(data, d, out):
    np.dot(data[1], d, out)


def system(low, seed=0, size=12):
    """A M with M positive definite and A symmetric, its eigenvalues from `low` to 3."""
    rng = np.random.default_rng(seed)
    turn, second_turn = (np.linalg.qr(rng.normal(size=(size, size)))[0] for _ in range(2))
    a = turn @ np.diag(np.linspace(low, 3, size)) @ turn.T
    m = second_turn @ np.diag(np.linspace(0.5, 2, size)) @ second_turn.T
    return np.ascontiguousarray(a), np.ascontiguousarray(m), rng.normal(size=size)


SOLVED = 1e-13 * 1e4  # the residual asked for, a condition of 120, and entries a hundredth of the largest


@pytest.mark.slow("a kernel is compiled")
@pytest.mark.parametrize("low", [0.1, -2.0])
def test_krylov_methods_solve_what_numpy_solves(low):
    a, m, b = system(low)
    exact = np.linalg.solve(a @ m, b)
    x, x_image, room = np.empty_like(b), np.empty_like(b), np.empty((3, len(b)))
    _, steps, indefinite = numba_linear.make_krylov_methods(_apply, _metric)[0](
        (a, m), b.copy(), m @ b, 1e-13, 100, True, x, x_image, room
    )
    assert indefinite == (low < 0)
    if low > 0:
        assert steps <= 20
        np.testing.assert_allclose(x, exact, rtol=SOLVED)
        np.testing.assert_allclose(x_image, m @ x, rtol=SOLVED)
    else:
        d = room[0]
        assert d @ m @ a @ m @ d < 0, "the direction along which it curves downwards"
    numba_linear.make_krylov_methods(_apply, _metric)[1]((a, m), b.copy(), m @ b, 1e-13, 100, x)
    np.testing.assert_allclose(x, exact, rtol=SOLVED)


def regression(episodes):
    g = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(episodes, 10, 16, generator=g)
    labels = (torch.arange(10) % 5).expand(episodes, -1)
    return RegressionArgs(x, labels, torch.zeros(episodes, 10), torch.zeros(5, 17), torch.full((17,), 0.01))


def test_answers_do_not_depend_on_the_threads_or_on_the_neighbours():
    args = regression(37)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(DualNewton().run(SoftmaxRegression(), None, args))
    finally:
        torch.set_num_threads(before)
    part = DualNewton().run(SoftmaxRegression(), None, args.select_episodes(slice(30, 31)))
    for result in results:
        assert torch.equal(result.unknowns, results[0].unknowns)
        assert torch.equal(result.steps, results[0].steps)
    assert torch.equal(part.unknowns, results[0].v[30:31])


def test_numbers_of_either_precision_are_solved_by_one_code():
    """And those of double precision keep their digits."""
    single = regression(4)
    centres = 0.1 + 0.0 * single.centres
    single = single._replace(centres=centres)
    double = RegressionArgs(*(leaf.double() if leaf.is_floating_point() else leaf for leaf in single))
    fine = double._replace(features=double.features + 1e-12)
    results = [DualNewton().run(SoftmaxRegression(), None, args).unknowns for args in (single, double, fine)]
    assert len(numba_regression.solve.overloads) == 1
    assert [v.dtype for v in results] == [torch.float32, torch.float64, torch.float64]
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-6, atol=1e-7)  # the answer in float32
    assert 1e-14 < (results[2] - results[1]).abs().max() < 1e-9  # inputs that differ by 1e-12, which float32 would lose


def kernel_in(folder: Path):
    """Returns a new kernel whose machine code is kept in a folder."""

    def double(x):
        return 2 * x

    kernel = njit(double)
    kernel._cache = numba_code_cache.KernelCache(folder, "tests.double")
    return kernel


def loads(folder: Path, value=3) -> bool:
    """Returns whether the kernel is loaded, rather than compiled; what it computes is right in any case."""
    kernel = kernel_in(folder)
    assert kernel(value) == 2 * value
    return bool(kernel.stats.cache_hits)


def test_machine_code_is_used_where_its_checksum_holds(tmp_path):
    assert not loads(tmp_path)
    assert loads(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :] for at in (0, 40, len(whole) // 2, -9)]
    for content in (*flipped, whole[: len(whole) // 2], b""):
        path.write_bytes(content)
        assert not loads(tmp_path)
        assert loads(tmp_path), "the damaged file was replaced"


def test_a_file_has_code_for_one_processor_and_one_kind_of_arguments(tmp_path):
    loads(tmp_path, 3)
    loads(tmp_path, 3.0)
    assert len([*tmp_path.iterdir()]) == 2, "numba's index of one process would name the code of another"
    cache = numba_code_cache.KernelCache(tmp_path, "tests.double")
    mine, other = (SimpleNamespace(magic_tuple=lambda name=name: ("x86_64", name, "")) for name in ("zen4", "haswell"))
    third = numba_code_cache.KernelCache(tmp_path, "tests.triple")
    assert cache._code_path((), mine) != cache._code_path((), other) != third._code_path((), mine)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_what_is_no_file_is_not_opened(tmp_path):
    loads(tmp_path)
    (path,) = tmp_path.iterdir()
    for make in (lambda: path.mkdir(), lambda: os.mkfifo(path), lambda: path.symlink_to(path.name)):
        path.unlink()
        make()
        assert not loads(tmp_path)
        if path.is_dir():
            path.rmdir()
            path.touch()


def test_what_cannot_be_stored_stops_no_solve(tmp_path, monkeypatch):
    def refuse(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba_code_cache, "write_bytes", refuse)
    assert not loads(tmp_path)
    assert not loads(tmp_path / "missing")


@pytest.mark.slow("starts processes")
def test_processes_that_compile_at_once_and_one_that_is_killed(tmp_path):
    program = "\n".join([
        "import ast, sys; sys.path.insert(0, 'tests/solvers')",
        "import pathlib, test_kernels as t",
        f"print([t.loads(pathlib.Path({str(tmp_path)!r}), ast.literal_eval(value)) for value in sys.argv[1:]])",
    ])  # fmt: skip
    start = {"cwd": Path(__file__).parents[2]}
    many = [subprocess.Popen([sys.executable, "-c", program, value], **start) for value in ("3", "3", "3.0", "5.0")]
    many[1].kill()
    assert [process.wait() for process in many] == [0, -9, 0, 0]
    assert subprocess.check_output([sys.executable, "-c", program, "7", "7.0"], **start, text=True) == "[True, True]\n"


def test_code_is_kept_in_the_home(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path))
    monkeypatch.setattr(numba_code_cache, "_cache_folder", None)
    assert numba_code_cache.make_code_folder() == tmp_path / "compiled" / numba_code_cache.code_folder_name()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert numba_code_cache.make_code_folder() == tmp_path / "chosen" / numba_code_cache.code_folder_name()


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert numba_code_cache.make_code_folder() is None


def compile_one(module):
    """Compiles a function of that module, for what is not known yet."""

    def double(x):
        return 2 * x

    double.__module__ = module
    assert njit(double)(1) == 2


def test_a_compilation_is_announced_once_and_others_functions_are_not(monkeypatch):
    messages = []
    monkeypatch.setattr(numba_code_cache, "_report", messages.append)
    monkeypatch.setattr(numba_code_cache, "_compilation_is_announced", False)
    compile_one("plugin")
    assert messages == []
    compile_one("ifsl_bench.solvers.numba_network")
    compile_one("ifsl_bench.solvers.numba_network")
    assert len(messages) == 1
    assert "compiling" in messages[0]
    assert "once" in messages[0]
    monkeypatch.setattr(numba_code_cache, "_compilation_is_announced", False)
    numba_code_cache.announce_compilation(False)
    assert "in every process" in messages[1]


@pytest.mark.slow("commands run in processes of their own")
def test_nothing_that_solves_nothing_imports_numba(here, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    code = "\n".join([
        "import sys, ifsl_bench.api, ifsl_bench.cli.main as cli",
        "from ifsl_bench.methods import attractor, imprint, ridge",
        "sys.argv = 'ifsl-bench run --method lr+a --task clusters.toml:clusters-5shot --dry-run'.split()",
        "try: cli.main()",
        "except SystemExit as stop: assert not stop.code, stop.code",
        "assert 'numba' not in sys.modules",
    ])  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not (here / "home" / "compiled").exists()


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(numba_code_cache, "_cache_folder", None)
    monkeypatch.setenv("IFSL_BENCH_HOME", "~nosuchuser/home")
    assert numba_code_cache.make_code_folder() is None


@pytest.mark.slow("starts a process that solves")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_threads_of_its_own():
    program = "\n".join([
        "import os, sys; sys.path.insert(0, 'tests/solvers')",
        "import torch, test_kernels as t",
        "torch.set_num_threads(2)",
        "solve = lambda: t.DualNewton().run(t.SoftmaxRegression(), None, t.regression(37)).v",
        "first = solve()",
        "child = os.fork()",
        "if child == 0:",
        "    os._exit(0 if torch.equal(solve(), first) else 3)",
        "assert os.waitpid(child, 0)[1] == 0",
    ])  # fmt: skip
    group = {"start_new_session": True, "cwd": Path(__file__).parents[2]}
    process = subprocess.Popen([sys.executable, "-c", program], **group)
    try:
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)


def test_labels_and_shapes_that_fit_no_memory_are_refused():
    args = regression(2)
    for wrong in (
        args._replace(labels=args.labels + 1), args._replace(labels=args.labels - 1),
        args._replace(base_logsumexp=args.base_logsumexp[:, 1:]), args._replace(precisions=args.precisions[1:]),
        args._replace(labels=args.labels[:1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="support"):
            DualNewton().run(SoftmaxRegression(), None, wrong)


def unrolled(centres):
    args = regression(3)
    args = args._replace(
        features=args.features.double() / 5, base_logsumexp=args.base_logsumexp.double(), centres=centres
    )
    args = args._replace(precisions=args.precisions.double())
    return minimise(SoftmaxRegression(), GradientDescent(0.1, 5), torch.zeros(3, 5, 17).double(), args, Unroll()).value


UNROLLED = rounding(torch.float64, 7 * 10 * 17)  # steps of sums over rows and features


def test_unrolled_steps_bear_torch_func_and_refuse_a_second_derivative():
    centres = torch.randn(5, 17, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    (first,) = torch.autograd.grad(unrolled(centres).square().sum(), centres, create_graph=True)
    by_func = torch.func.grad(lambda c: unrolled(c).square().sum())  # in torch
    torch.testing.assert_close(by_func(centres.detach()), first.detach(), rtol=UNROLLED, atol=UNROLLED)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_the_kernels_can_be_switched_off_for_a_while():
    with numba_code_cache.use_batched_solvers():
        assert not numba_code_cache.kernels_enabled(torch.zeros(1))
    assert numba_code_cache.kernels_enabled(torch.zeros(1))
    assert not numba_code_cache.kernels_enabled(torch.zeros(1, device="meta"))


@pytest.mark.slow("starts a process that imports torch")
def test_the_kernels_can_be_switched_off_for_a_process():
    program = "\n".join([
        "import torch",
        "from ifsl_bench.solvers.numba_code_cache import kernels_enabled",
        "assert not kernels_enabled(torch.zeros(1))",
    ])  # fmt: skip
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "IFSL_BENCH_KERNELS": "0"})


def _answers(episodes=9, queries=12, classes=7, ways=3, base=6, dtype=torch.float32, seed=0):
    """An answer with many ties, and with hidden classes, some of whose logits are -inf; and the batch it is to."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (episodes, queries, classes + ways), generator=g).to(dtype)
    novel = torch.arange(queries).expand(episodes, -1) >= base
    novel = novel.gather(1, torch.rand(episodes, queries, generator=g).argsort(1))
    labels = torch.where(
        novel,
        classes + torch.randint(0, ways, novel.shape, generator=g),
        torch.randint(0, classes, novel.shape, generator=g),
    )
    hidden = torch.rand(episodes, classes, generator=g) < 0.3
    logits[::2, :, :classes].masked_fill_(hidden[::2].unsqueeze(1), -torch.inf)
    support = Support(torch.zeros(episodes, 1, 1), torch.zeros(episodes, 1).long(), hidden, torch.zeros(episodes, 1, 1))
    return Prediction(logits), Batch(support, Query(logits, logits), labels, novel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("base", [0, 6])
def test_hits_of_the_kernel_are_those_of_numpy(dtype, base):
    prediction, batch = _answers(base=base, dtype=dtype)
    result = count_episode_hits("x", prediction, batch, base)
    classes = batch.support.hidden.shape[1]
    for e in range(len(batch)):
        logits = prediction.logits[e].numpy().copy()
        logits[:, :classes][:, batch.support.hidden[e].numpy()] = -np.inf
        margins, right = {False: [], True: []}, dict.fromkeys(result.counts, 0)
        for row, label, novel in zip(
            logits, batch.query_labels[e].tolist(), batch.query_is_novel[e].tolist(), strict=True
        ):
            side, part = ("novel", classes + row[classes:].argmax()) if novel else ("base", row[:classes].argmax())
            right[f"{side}_joint"] += row.argmax() == label
            right[f"{side}_alone"] += part == label
            none = row[classes:].max() == -np.inf
            margin = np.inf if none else np.float32(row[:classes].max() - row[classes:].max())
            margins[novel].append(margin if part == label else np.nan)
        assert {name: values[e] for name, values in result.counts.items()} == right
        if base:
            np.testing.assert_array_equal(result.margins.base_margins[e], margins[False])
            np.testing.assert_array_equal(result.margins.novel_margins[e], margins[True])
            assert result.doubled_ordered_pairs[e] == sum(
                int(b > n) + int(b >= n) for b in margins[False] for n in margins[True]
            )
    with numba_code_cache.use_batched_solvers():
        torch_result = count_episode_hits("x", prediction, batch, base)
    for ours, theirs in zip(result.counts.values(), torch_result.counts.values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("bias", [-1.0, 1.0, 0.5])
def test_hits_with_a_bias_are_those_of_logits_with_it(bias):
    """And AUSUC, which is a sweep over all biases, does not change."""
    (prediction, batch), classes = _answers(), 7
    plain = count_episode_hits("x", prediction, batch, 6)
    prediction.logits[..., classes:] += bias
    biased = count_episode_hits("x", prediction, batch, 6)
    for side, right in zip(("base_joint", "novel_joint"), plain.margins.joint_hits_with_bias(bias), strict=True):
        np.testing.assert_array_equal(right, biased.counts[side])
    assert not np.array_equal(plain.counts["novel_joint"], biased.counts["novel_joint"])
    np.testing.assert_array_equal(plain.doubled_ordered_pairs, biased.doubled_ordered_pairs)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_kernel_that_counts_sees_numbers_that_are_none(value):
    for place in ((3, 0, 0), (3, 11, 9)):
        prediction, batch = _answers()
        prediction.logits[place] = value
        with pytest.raises(NonFiniteLogitsError, match="in 1 of 9 episodes"):
            count_episode_hits("x", prediction, batch, 6)


def _bank(rows, seed, width=5):
    logits = np.random.default_rng(seed + 1).normal(size=(rows, 3)).astype(np.float32)
    features = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return FeaturePool(f"pool {seed}", *map(torch.from_numpy, (features, logits)), np.arange(0, rows + 1, 10), 1)


@pytest.mark.parametrize("shared", [False, True])
def test_kernels_gather_what_indices_say(shared):
    novel, base = _bank(60, 0), _bank(50, 5)
    base = novel if shared else base
    spec = EpisodeSpec(ways=3, novel_queries=2, base_queries=4)
    loader = EpisodeLoader(
        EpisodeSampler(("x", "test", 0), spec, 2, novel.class_starts, base.class_starts), novel, base
    )
    assert numba_code_cache.kernels_loaded(novel.features)
    batch, drawn = loader.load_batch(5, 70), loader.sampler.sample(5, 70)
    for bank, support, query in (
        ("features", batch.support.features, batch.query.features),
        ("base_logits", batch.support.base_logits, batch.query.base_logits),
    ):
        ours, theirs = (getattr(pool, bank).numpy() for pool in (novel, base))
        np.testing.assert_array_equal(support, ours[drawn.support.numpy()])
        for e, q in np.ndindex(*drawn.query.shape):
            pool = ours if drawn.query_is_novel[e, q] else theirs
            np.testing.assert_array_equal(query[e, q], pool[drawn.query[e, q]])
    loader.novel = _bank(20, 0)
    with pytest.raises(IndexError, match="beyond the pools"):
        loader.load_batch(5, 70)


def test_former_names_warn():
    with pytest.deprecated_call(match="to_prior"):
        from ifsl_bench.solvers import fold
    with pytest.deprecated_call(match="AttractorMLP"):
        assert solvers.Memory is solvers.AttractorMLP
    with pytest.deprecated_call(match="groups"):
        assert solvers.learner_of("lr", 5, 3).parts[0].size == 4
        assert issubclass(solvers.Regression, solvers.RegressionArgs)
        assert solvers.LinearLearner(5, 3).start()[0].shape == (5, 4)
    assert fold is solvers.to_prior
