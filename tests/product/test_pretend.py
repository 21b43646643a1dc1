"""Everything on a pretend accelerator: the numbers are the CPU's, nothing strays, and waits keep to a budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paper_shapes import Episodes
from pretend import DEVICE, Refused, accelerator

from ifsl_bench import api
from ifsl_bench.backbones.device import PrecisionChoice, choose_device, copy_tensors_to_numpy
from ifsl_bench.backbones.features import compute_features
from ifsl_bench.backbones.trainer import pretrain
from ifsl_bench.data.dataset_views import with_fewer_base_classes
from ifsl_bench.data.pools import Pool
from ifsl_bench.data.preparing.prepare import open_or_build
from ifsl_bench.experiments.evaluate_stage import EvaluationStage
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.stages import MetaTrainStage
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.episode_contract import do_logits_differ, is_prediction_of_search
from ifsl_bench.plugin.method import DEFAULT_GPU_MIN_EPISODES, Base, Method, Query, Support, masked_logits
from ifsl_bench.plugin.options import add_example_extras, declared_options
from ifsl_bench.protocols.loader import choose_block_size, evaluate_method
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.solvers import numba_code_cache
from ifsl_bench.store import schema as result_file
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter
from tests.methods.test_methods_contract import METHODS

CPU = torch.device("cpu")
E, N, SHOTS, Q, D, K = 8, 5, 3, 8, 24, 9

# Launches and waits of a method, at most, at the shapes of the attractor paper (D 512, K 200, 5 x 5 shots, 25 + 25
# queries): of evaluating 64 episodes at once, and of a step of meta-training on 16 (`implicit`: exact gradients).
# A tenth more than was counted on four times as many, for other rounding.
EVALUATION = {
    "protonet": (25, 0),
    "imprint": (35, 0),
    "lwof": (40, 0),
    "lr": (1600, 12),
    "lr+a": (1500, 12),
    "mlp+a": (10_000, 40),
}
TRAINING = {"lwof": (150, 0), "lr+a": (1500, 12), "lr+a implicit": (1500, 12), "mlp+a": (10_000, 40)}
# Of evaluating a block of sequences, from indices to counts: methods that are answered in one pass, solves session by
# session, and one that is asked anew in each session.
SEQUENCES = {
    "ncm": (400, 12),
    "lda": (400, 12),
    "ridge": (6300, 50),
    "cec": (2300, 14),
}
# Counts that may differ with sums in another order: a query on a boundary may go either way, and more of them where a
# solve is inexact.
ON_A_BOUNDARY = 0.02
# Of a step of pretraining the small network: copies to the device, waits and launches.
PRETRAINING = (2, 1.2, 200)


def variants() -> list[tuple[str, dict]]:
    """Every registered method as it is by default, and with the options of each of its shorthands."""
    methods: list[tuple[str, dict]] = []
    for name in METHODS:
        plugin = registry.load_plugin(registry.METHOD_GROUP, name)
        methods.append((name, {}))
        if plugin.loaded_object is not None:
            usual = {key: option.default for key, option in declared_options(plugin.loaded_object).items()}
            meant = [dict(options) for options in plugin.loaded_object.shorthands.values()]
            methods += [(name, options) for options in meant if usual | options != usual]
    return methods


def seeded_method(name: str, options: dict, base: Base) -> Method:
    plugin = registry.load_plugin(registry.METHOD_GROUP, name)
    if plugin.missing_module:
        pytest.skip(plugin.load_problem)
    torch.manual_seed(0)
    made_up = add_example_extras(base.to("cpu"), plugin.loaded_object).to(base.weight.device)
    return plugin.loaded_object(made_up, N, **options)


def on(x, device):
    """A base classifier, support or query on a device."""
    if isinstance(x, Base):
        return x.to(device)
    return type(x)(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(x).items()})


def episodes() -> tuple[Base, Support, Query]:
    """Three of nine base classes are hidden in each."""
    g = torch.Generator().manual_seed(1)
    weight, prototypes = torch.randn(2, K, D, generator=g)
    within = torch.randn(3 * D, D, generator=torch.Generator().manual_seed(2))
    statistics = torch.full((K,), 100.0), within.T @ within / len(within)
    images = prototypes.repeat_interleave(3, 0) + within[: 3 * K], torch.arange(K).repeat_interleave(3)
    base = Base(weight, 0.1 * torch.randn(K, generator=g), prototypes, 9.0, *statistics, lambda: images)
    x, q = torch.randn(E, N * SHOTS, D, generator=g), torch.randn(E, Q, D, generator=g)
    hidden = torch.zeros(E, K, dtype=torch.bool).scatter_(1, torch.rand(E, K, generator=g).argsort(1)[:, :3], True)
    labels = torch.arange(N).repeat_interleave(SHOTS).expand(E, -1)
    support = Support(x, labels, hidden, F.linear(x, base.weight, base.bias))
    return base, support, Query(q, F.linear(q, base.weight, base.bias))


def check_answers_and_gradients(name: str, options: dict, other: torch.device) -> None:
    """Holds what a method gives on another device against what it gives on the CPU."""
    base, support, query = episodes()
    ours = seeded_method(name, options, base)
    theirs = seeded_method(name, options, on(base, other)).to(other)
    theirs.load_state_dict(ours.state_dict())
    answers, gradients = [], []
    with numba_code_cache.use_batched_solvers():  # the CPU by kernels may find another minimum
        for method, device in ((ours, CPU), (theirs, other)):
            with torch.no_grad():
                prediction = method.eval()(on(support, device), on(query, device))
            answers.append(masked_logits(prediction, support.hidden.to(device)).cpu())
            assert prediction.logits.device == device
            if parameters := [p for p in method.parameters() if p.requires_grad]:
                torch.manual_seed(0)  # of dropout
                logits = method.train()(on(support, device), on(query, device)).logits
                F.cross_entropy(logits[:, 0], torch.full((E,), K, device=device)).backward()
                gradients.append(torch.cat([p.grad.flatten().cpu() for p in parameters]))
    assert not do_logits_differ(answers[1], answers[0], is_prediction_of_search(prediction))
    if gradients:
        # without a search: float32 sums forward and backward, in another order
        close = F.cosine_similarity(*gradients, dim=0)  # of a minimum that is not convex, found by another rounding
        assert close > 0.98 if is_prediction_of_search(prediction) else torch.allclose(*gradients, rtol=1e-3, atol=1e-5)


def check_batches(batch, same) -> None:
    """Holds a batch on another device against the CPU's."""
    for part in ("support", "query"):
        for key, value in vars(getattr(same, part)).items():
            torch.testing.assert_close(getattr(getattr(batch, part), key).cpu(), value)
    assert torch.equal(batch.query_labels.cpu(), same.query_labels)
    assert torch.equal(batch.query_is_novel.cpu(), same.query_is_novel)


def compared(folder: Path, count: int) -> Iterator[result_file.Result]:
    """Yields so many results of the home, each held against that in the folder ``other``, which the CPU made."""
    files = sorted((folder / "home" / "results").rglob("*.seed-0.json"))
    assert len(files) == count
    for path in files:
        ours = result_file.read_result(path)
        theirs = result_file.read_result(folder / "other" / path.relative_to(folder / "home" / "results"))
        for key in ("base_joint", "base_alone", "novel_joint", "novel_alone"):
            a, b = np.array(getattr(ours.episodes, key)), np.array(getattr(theirs.episodes, key))
            assert (a != b).mean() <= 0.05, (path.name, key)
        yield ours


# The device itself


def test_refuses_what_an_accelerator_refuses():
    with accelerator():
        x, stray = torch.ones(3, 4).to(DEVICE), torch.ones(3, 4)
        with pytest.raises(Refused, match=r"aten.add.Tensor: a CPU tensor of shape \[3, 4\]"):
            x + stray
        with pytest.raises(Refused, match=r"aten\.cat"):
            torch.cat([x, stray])
        with pytest.raises(Refused, match=r"aten\.index\.Tensor"):
            x[torch.tensor([0, 1])]
        with pytest.raises(Refused, match=r"aten\.add_"):
            stray.add_(x)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        with pytest.raises(TypeError, match="asarray"):
            np.asarray(x)
        assert (x + torch.tensor(1.0)).tolist() == [[2.0] * 4] * 3, "a number from the CPU is let through"
        assert torch.rand(3, device=DEVICE, generator=torch.Generator(DEVICE)).device == DEVICE
    with pytest.raises(Refused, match="within accelerator"):
        x + 1


def test_counts_launches_waits_and_bytes():
    with accelerator() as counts:
        x = torch.arange(12.0).view(3, 4).to(DEVICE, non_blocking=True)
        assert (counts.total, counts.bytes_up) == ((0, 0), 48)
        y = x.T[1:].unsqueeze(0).expand(2, -1, -1)
        assert counts.total == (0, 0), "views"
        z = (y * 2).relu_()
        assert counts.total == (2, 0)
        waiting = {
            "item": z.sum().item,
            "nonzero": z.nonzero,
            "mask": lambda: z[z > 1],
            "unique": z.unique,
            "equal": lambda: torch.equal(z, z),
            "tolist": z.tolist,
            "cpu": z.cpu,
            "copy": lambda: torch.empty(2, 3, 3).copy_(z),
            "upload": lambda: torch.tensor([1.0, 2.0], device=DEVICE),
        }
        for name, call in waiting.items():
            counts.clear()
            call()
            assert counts.waits.total() == 1, name
            assert all(" at tests/product/test_pretend.py:" in place for place in counts.waits)
        counts.clear()
        z.cpu()
        assert counts.bytes_down == 2 * 3 * 3 * 4


def test_the_device_option_knows_it_while_it_is_there():
    with accelerator():
        assert choose_device("auto") == choose_device("meta") == DEVICE
        with pytest.raises(UserError, match="only 1 such"):
            choose_device("meta:1")
    assert choose_device("auto") == CPU or torch.cuda.is_available()
    with pytest.raises(UserError, match="not supported"):
        choose_device("meta")


def test_many_tensors_come_to_the_host_in_one_wait():
    tensors = [torch.rand(3, 5), torch.arange(4), torch.rand(3, 2) > 0.5, torch.rand(7).double(), torch.rand(0, 3)]
    with accelerator() as counts:
        moved = [x.to(DEVICE) for x in tensors]
        counts.clear()
        arrays = copy_tensors_to_numpy(moved)
        assert counts.waits.total() == 1
    for a, b in zip(tensors, arrays, strict=True):
        assert (a.numpy() == b).all()
        assert (a.numpy().dtype, a.shape) == (b.dtype, b.shape)


# Methods


def fits_networks(name: str) -> tuple:
    return (pytest.mark.slow("networks are fitted"),) if name in ("attractor", "upper-bound") else ()


@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(*variant, marks=fits_networks(variant[0])) for variant in variants()]
)
def test_every_method_gives_the_same_answers_and_gradients(name, options):
    with accelerator() as counts:
        check_answers_and_gradients(name, options, DEVICE)
        assert counts.launches


def _paper(name: str, count: int) -> tuple[Method, Episodes]:
    drawn, spelled = Episodes(count, 5), {"lr+a": "attractor", "mlp+a": "attractor", "lr": "ridge"}
    label, *more = name.split()
    options = {"learner": label[:-2]} if label.endswith("+a") else {}
    options |= {"gradient": more[0]} if more else {}
    return seeded_method(spelled.get(label, label), options, on(drawn.base(), DEVICE)).to(DEVICE), drawn


@pytest.mark.parametrize("name", EVALUATION)
def test_an_evaluation_keeps_to_its_budget(name):
    with accelerator() as counts, torch.no_grad():
        method, drawn = _paper(name, 64)
        support, query = on(drawn.support(), DEVICE), on(drawn.queries(), DEVICE)
        counts.clear()
        method.eval()(support, query)
        launches, waits = EVALUATION[name]
        assert counts.launches.total() <= launches
        assert counts.waits.total() <= waits, counts.waits


@pytest.mark.parametrize("name", TRAINING)
def test_a_step_of_meta_training_keeps_to_its_budget(name):
    with accelerator() as counts:
        method, drawn = _paper(name, 16)
        support, query, target = on(drawn.support(), DEVICE), on(drawn.queries(), DEVICE), drawn.target.to(DEVICE)
        optimiser = torch.optim.Adam(method.parameters(), 1e-3, fused=True)
        counts.clear()
        F.cross_entropy(method.train()(support, query).logits.flatten(0, 1), target.flatten()).backward()
        optimiser.step()
        launches, waits = TRAINING[name]
        assert counts.launches.total() <= launches
        assert counts.waits.total() <= waits, counts.waits


# From features to a result


def _prepared(folder, task, device="meta"):
    work = api.workspace(folder / "home", device=device)
    return work.open_task(load_tasks(f"{folder / 'clusters.toml'}:{task}")[0], "linear", 0)


@pytest.mark.parametrize("task", ["clusters-5shot", "clusters-shared-5shot"])
@pytest.mark.parametrize("side", ["train", "test"])
def test_the_loader_gives_the_same_batches_and_never_waits(here, task, side):
    with accelerator() as counts:
        prepared = _prepared(here, task)
        ours, theirs = prepared.loader(side), prepared.loader(side, device=DEVICE)
        counts.clear()
        batch = theirs.load_batch(5, 9)
        assert 0 < counts.launches.total() <= 350
        assert not counts.waits
        check_batches(batch, ours.load_batch(5, 9))


def test_evaluation_waits_once_a_batch_and_counts_the_same_in_batches_of_any_size(here):
    results, name = [], "lwof"
    for memory in (1 << 19, 1 << 30):
        with accelerator(memory) as counts:
            prepared = _prepared(here, "clusters-5shot")
            loader = prepared.loader("test", device=DEVICE)
            method = seeded_method(name, {}, prepared.base_classifier.to(DEVICE)).to(DEVICE)
            counts.clear()
            results.append(evaluate_method(method, name, loader, range(60)).counts)
            size = choose_block_size(loader, method)
            assert 1 <= size < 8 if memory == 1 << 19 else size > 60
            assert counts.waits.total() == -(-60 // size)
    loader = prepared.loader("test")
    results.append(evaluate_method(seeded_method(name, {}, prepared.base_classifier), name, loader, range(60)).counts)
    for result in results[1:]:
        for key in ("base_joint", "base_alone", "novel_joint", "novel_alone", "pairs"):
            assert (getattr(result, key) == getattr(results[0], key)).all()


def add_sessions(folder):
    """Adds the task ``in-sessions`` to the task file: 24 sequences of three sessions."""
    sessions = "{ count = 3, ways = 2, orders = 12, supports = 2, queries = 9 }"
    with (folder / "clusters.toml").open("a") as file:
        file.write(f"[tasks.in-sessions]\nshots = 2\nsessions = {sessions}\n")


def evaluate_sequences(prepared, name, device, launched=None):
    """The counts of all sequences in one block, with margins.

    Args:
        launched: what has been launched so far; cleared before the evaluation.
    """
    torch.manual_seed(0)
    loader, plugin = prepared.loader("test", device=device), registry.load_plugin(registry.METHOD_GROUP, name)
    drawn = plugin.loaded_object(prepared.base_classifier, 2)  # each device draws parameters of its own
    method = plugin.loaded_object(prepared.base_classifier.to(device), 2).to(device)
    method.load_state_dict(drawn.state_dict())
    if launched is not None:
        launched.clear()
    return evaluate_method(method, name, loader, range(24)).counts


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_keep_to_their_budget_and_count_the_same(here, name):
    add_sessions(here)
    results = []
    for device in (DEVICE, CPU):
        with accelerator() as counts, numba_code_cache.use_batched_solvers():
            results.append(evaluate_sequences(_prepared(here, "in-sessions"), name, device, counts).count_arrays())
            if device == DEVICE:
                launches, waits = SEQUENCES[name]
                assert counts.launches.total() <= launches, counts.launches.total()
                assert counts.waits.total() <= waits, counts.waits
    for column, values in results[0].items():
        differing = (values != results[1][column]).mean()
        assert differing <= ON_A_BOUNDARY, (column, differing)


def test_nan_is_found_on_the_device_too(here):
    with accelerator():
        prepared = _prepared(here, "clusters-5shot")
        method = seeded_method("lwof", {}, prepared.base_classifier.to(DEVICE)).to(DEVICE)
        with torch.no_grad():
            method.phi_mean.fill_(torch.nan)
        with pytest.raises(UserError, match="NaN or infinite logits in 60 of 60"):
            evaluate_method(method, "lwof", prepared.loader("test", device=DEVICE), range(60))


def _other_home(folder, name):
    """A home with the same data and nothing else."""
    (folder / name).mkdir()
    (folder / name / "data").symlink_to(folder / "home" / "data")
    return folder / name


def _job(folder, name, train=None, task="clusters-5shot"):
    home = Paths.locate(folder / "home")
    (job,) = make_jobs(RunConfig([name], [f"{folder / 'clusters.toml'}:{task}"], {}, train or {}), home)
    return job


@pytest.mark.slow("methods are trained")
@pytest.mark.parametrize("name", ["lwof", "lr+a"])
def test_meta_training_gives_the_same_parameters(here, name):
    parameters, job = [], _job(here, name, {"steps": 10 if name == "lwof" else 3, "episodes_per_step": 8})
    for device, home in (("cpu", "one"), ("meta", "two")):
        with accelerator() as counts:
            work = api.workspace(_other_home(here, home), device=device)
            _ = work.open_task(job.task, job.method.head, 0).base_classifier
            counts.clear()
            model = MetaTrainStage(job).compute(work)
            assert bool(counts.launches) == (device == "meta")
            parameters.append({k: v.detach().cpu() for k, v in model.method.named_parameters()})
            assert model.training_record.device_description == f"{device}: --device {device}"
            if name == "lwof" and device == "meta":
                steps = {k: v for k, v in counts.waits.items() if "meta_training.py" in k or "loader" in k}
                assert sum(steps.values()) <= 2 * 2 + 6, steps
    for key, value in parameters[0].items():
        # float32 rounding that a few steps of training amplify
        torch.testing.assert_close(parameters[1][key], value, rtol=1e-3, atol=1e-5)


def test_auto_trains_on_few_episodes_without_the_accelerator_and_evaluates_on_it(here):
    with accelerator() as counts:
        work = api.workspace(here / "home")
        assert (work.device, work.device_is_forced) == (DEVICE, False)
        job = _job(here, "lwof", {"steps": 4})
        _ = work.open_task(job.task, job.method.head, 0).base_classifier  # pretraining is on the accelerator
        counts.clear()
        model = MetaTrainStage(job).compute(work)
        assert counts.total == (0, 0), counts
        assert (
            model.training_record.device_description == f"cpu: 1 episode a step, fewer than {DEFAULT_GPU_MIN_EPISODES}"
        )
        evaluated = EvaluationStage(job).compute(work)
        assert counts.launches
        assert evaluated.places["evaluation"] == "meta: many episodes at once"


@pytest.mark.parametrize(
    ("name", "given", "few"),
    [
        ("lr+a", {}, DEFAULT_GPU_MIN_EPISODES),
        ("mlp+a", {}, 2 * DEFAULT_GPU_MIN_EPISODES),
        ("mlp+a", {"gradient": "implicit"}, None),
        ("lwof", {}, DEFAULT_GPU_MIN_EPISODES),
    ],
)
def test_from_how_many_episodes_a_step_is_an_accelerators_goes_by_the_method(here, name, given, few):
    with accelerator():
        work = api.workspace(here / "home")
        for episodes in (1, DEFAULT_GPU_MIN_EPISODES, 2 * DEFAULT_GPU_MIN_EPISODES, 4096):
            job = _job(here, name, {"steps": 4, "episodes_per_step": episodes})
            place = MetaTrainStage(replace(job, set_options={**job.set_options, **given})).choose_device(work)
            assert place.device == (CPU if few is None or episodes < few else DEVICE)
            assert (
                f"fewer than {few}" if episodes < (few or 0) else "this method's" if few is None else "at least"
            ) in place.reason


@pytest.mark.slow("a whole run")
def test_a_whole_run_gives_the_counts_of_the_cpu_and_says_where_it_was_made(call, here):
    command = ["run", "--method", "lwof,imprint", "--task", "clusters.toml:clusters-5shot", "--train", "steps=8"]
    with accelerator() as counts:
        counts.clear()
        status, _, err = call(*command, "-v")
        assert status == 0, err
        assert counts.launches
    few = f"cpu: 1 episode a step, fewer than {DEFAULT_GPU_MIN_EPISODES}"
    assert f"meta-training lwof.train.steps=8 on clusters-5shot, seed 0: 8 steps, on {few}" in err
    _other_home(here, "cpu-home")
    status, _, err = call(*command, "--device", "cpu", "--results", "other", "--home", str(here / "cpu-home"))
    assert status == 0, err
    for ours in compared(here, 2):
        assert ours.places["evaluation"].startswith("meta: ")
        assert ours.provenance["device"] == "a pretend accelerator"
        if ours.training:
            assert ours.places["meta-training"] == few


# From images to features


def pretrained_on(device: torch.device, glyph_home: Path, rate: float) -> tuple[list[torch.Tensor], np.ndarray]:
    """Weights and features on eight classes of a short pretraining at this rate, in a home of its own."""
    task = load_tasks(f"{glyph_home.parent / 'few.toml'}:few-1shot")[0]
    schedule = msgspec.structs.replace(task.pretraining.schedule, rate=rate)
    spec = msgspec.structs.replace(task.pretraining, steps=4, schedule=schedule)
    task = msgspec.structs.replace(task, pretraining=spec)
    dataset = with_fewer_base_classes(open_or_build(Paths.locate(glyph_home), task.dataset, Reporter()), 8)
    home = Paths.locate(glyph_home.parent / device.type)
    trained = pretrain(home, task, dataset, "linear", 0, device, Reporter())
    bank = compute_features(home, task, dataset, trained, "base/val", device, Reporter())
    return [value.cpu() for value in trained.network.state_dict().values()], np.array(bank)


@pytest.mark.slow("a network is trained twice")
def test_pretraining_and_features_are_those_of_the_cpu(glyph_home, monkeypatch):
    """In single precision on both: a processor may have bf16, which rounds otherwise."""
    monkeypatch.setattr(
        "ifsl_bench.backbones.trainer.choose_precision", lambda device: PrecisionChoice(False, "float32")
    )
    with accelerator() as counts:
        ours, bank = pretrained_on(CPU, glyph_home, 0.05)
        assert not counts.launches
        theirs, other_bank = pretrained_on(DEVICE, glyph_home, 0.05)
        assert counts.launches
    for a, b in zip(ours, theirs, strict=True):
        # float32 rounding that a few steps of pretraining amplify
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(bank, other_bank, rtol=1e-3, atol=1e-3)


def pretraining(backbone: str, batch: int, steps: int, folder: Path) -> None:
    """So many steps of pretraining from the first, on random images."""
    g = np.random.default_rng(0)
    images = g.integers(0, 256, (steps * batch, 84, 84, 3), dtype=np.uint8)
    pool = Pool("base/train", images, g.integers(0, 64, len(images)), (), np.array([0, len(images)]))
    described = {"classes": list(range(64)), "shape": list(images.shape)}
    dataset = SimpleNamespace(
        shape=(84, 84, 3), fingerprint="0", manifest={"pools": {"base/train": described}}, has_pool=lambda name: False,
        check_image_checksum=lambda name: None, pool=lambda name: pool,
    )  # fmt: skip
    task = load_tasks("mini-5shot")[0]
    spec = msgspec.structs.replace(task.pretraining, backbone=backbone, batch=batch, steps=steps)
    task = msgspec.structs.replace(task, pretraining=spec)
    pretrain(Paths.locate(folder), task, dataset, "linear", 0, DEVICE, Reporter())


@pytest.mark.slow("a network is trained")
def test_a_step_of_pretraining_keeps_to_its_budget(tmp_path):
    totals = []
    for steps in (4, 24):
        with accelerator() as counts:
            pretraining("resnet-small", 4, steps, tmp_path / str(steps))
            totals.append((counts.uploads.total(), counts.waits.total(), counts.launches.total()))
    for few, many, most in zip(*totals, PRETRAINING, strict=True):
        assert (many - few) / 20 <= most
