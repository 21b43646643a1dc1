"""The meta-training loop."""

from __future__ import annotations

import io
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ifsl_bench import api
from ifsl_bench.experiments import stages
from ifsl_bench.experiments import stages as preparation
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.meta_training import AdamOptimiser
from ifsl_bench.experiments.reproduce import run_without_storing
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.find_method import MethodRef
from ifsl_bench.plugin.method import Method, Prediction, Support
from ifsl_bench.plugin.options import remake_method_for_ways
from ifsl_bench.protocols.sampling.episodes import make_training_sampler
from ifsl_bench.protocols.tasks.task import EpisodeSpec, MetaTraining, Schedule
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.protocols.tasks.variants import TrainingChanges
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import LogReporter


class Scale(Method):
    """Cosine logits with a learned temperature and a learned offset of the novel classes."""

    noise = 0.0

    def __init__(self, base, ways, *, start: float = 1.0, offset: float = 0.0):
        super().__init__(base, ways)
        self.tau = nn.Parameter(torch.tensor(start))
        self.offset = nn.Parameter(torch.tensor(offset))

    def forward(self, support, query):
        weights = torch.cat([self.base.weight.expand(len(query.features), -1, -1), support.class_means(self.ways)], 1)
        h = F.dropout(F.normalize(query.features, dim=-1), self.noise, self.training)
        novel = torch.arange(weights.shape[1]) >= len(self.base.weight)
        return Prediction(self.tau * h @ F.normalize(weights, dim=-1).mT + self.offset * novel)


class NoisyScale(Scale):
    """The same with dropout, which must resume as well."""

    noise = 0.5


def job(clusters, method=Scale, task="clusters-5shot", train=None, options=None, seed=0):
    loaded_task = load_tasks(f"{clusters / 'clusters.toml'}:{task}")[0]
    return Job(
        MethodRef("scale", method), options or {}, loaded_task, TrainingChanges.parse_values(train or {}), seed, 60
    )


def work(clusters, reporter=None, home="home"):
    return api.workspace(clusters / home, reporter=reporter, device="cpu")


def train(clusters, job, reporter=None):
    place = work(clusters, reporter)
    preparation.DataStage(job.task, job.required_sides).compute(place)
    stage = stages.MetaTrainStage(job)
    return *stage.compute(place), stages.make_pretrain_stage(stage.job).open_task(place)


@pytest.mark.parametrize("task", ["clusters-5shot", "clusters-shared-5shot"])
def test_one_step_is_adam_on_the_mean_cross_entropy_of_the_joint_logits(clusters, task):
    training_job = job(clusters, train={"steps": "1", "episodes_per_step": "3"}, task=task)
    method, _, _, bench = train(clusters, training_job)
    batch = bench.loader("train").load_batch(0, 3)
    fresh = Scale(bench.base_classifier, 5)
    logits = fresh(batch.support, batch.query).logits.clone()
    if task == "clusters-shared-5shot":
        assert batch.support.hidden.sum(1).tolist() == [5, 5, 5]
        for e in range(3):
            logits[e, :, :8][:, batch.support.hidden[e]] = -1e30
    loss = F.cross_entropy(logits.flatten(0, 1), batch.query_labels.flatten())
    (gradient,) = torch.autograd.grad(loss, fresh.tau)
    assert method.tau.item() == pytest.approx(1.0 - 1e-3 * torch.sign(gradient).item(), abs=1e-6)


@pytest.mark.parametrize("name", ["lwof", "cec"])
def test_training_on_sequences_has_the_loss_after_each_session(clusters, name):
    """These two answer after t sessions as in one episode of all classes so far: its losses, and one step on their
    mean."""
    kind, sessions, ways, shots = registry.get_method(name), 2, 4, 5
    training = {"steps": "1", "episodes_per_step": "3", "sessions": str(sessions)}
    training_job = job(clusters, kind, "clusters-5shot+ways=4", training)
    training_job = replace(training_job, method_ref=MethodRef(name, kind))
    method, _, _, bench = train(clusters, training_job)
    batch = bench.loader("train").with_sampler(bench.training_sampler(sessions)).load_batch(0, 3)
    support, query, classes = batch.support, batch.query, batch.support.hidden.shape[1]
    assert support.labels.shape == (3, sessions * ways * shots)
    fresh, losses = stages.make_untrained_method(training_job, bench.work).train(), []
    for t in (1, 2):
        rows = slice(0, t * ways * shots)
        features, labels, logits = (x[:, rows] for x in (support.features, support.labels, support.base_logits))
        so_far = Support(features, labels, support.hidden, logits)
        of_all, parameters = remake_method_for_ways(fresh, t * ways), dict(fresh.named_parameters())
        answer = torch.func.functional_call(of_all, parameters, (so_far, query)).logits
        met = batch.query_labels < classes + t * ways
        losses += [F.cross_entropy(answer[e, met[e]], batch.query_labels[e, met[e]]) for e in range(3)]
    torch.stack(losses).mean().backward()
    for key, mine in fresh.named_parameters():
        large = mine.grad.abs() > 1e-4 * mine.grad.abs().max()  # whose first step of Adam is the rate, in its direction
        step = (dict(method.named_parameters())[key] - mine).detach()
        assert torch.allclose(step[large], -1e-3 * mine.grad.sign()[large], rtol=0, atol=2e-5), key


@pytest.mark.parametrize(
    ("novel", "base", "most"), [(9, 40, 4), (9, 21, 3), (7, 40, 3)], ids=["classes", "images", "both"]
)
def test_training_on_more_sessions_than_there_is_data_for_names_the_most(clusters, novel, base, most):
    """Sessions of 2 classes, with 10 base queries each from every second image of 3 base classes."""
    (task,) = load_tasks(f"{clusters / 'clusters.toml'}:clusters-5shot")
    task = msgspec.structs.replace(task, episode=EpisodeSpec(ways=2, novel_queries=2, base_queries=10))
    sizes = {"novel/train": [9] * novel, "base/val": [base] * 3}

    def starts(pool: str) -> np.ndarray:
        return np.cumsum([0, *sizes[pool]])

    drawn = make_training_sampler(task, most, 0, starts).sample(0, 4)
    assert drawn.classes.shape == (4, 2 * most)
    assert (~drawn.query_is_novel).sum(1).tolist() == [10 * most] * 4
    with pytest.raises(UserError, match=f"^--train sessions={most + 1} needs .*; sessions={most} is the most$"):
        make_training_sampler(task, most + 1, 0, starts)
    with pytest.raises(UserError, match=f"; sessions={most} is the most$"):
        make_training_sampler(task, 10_000, 0, starts)


def test_training_on_too_many_sessions_is_refused_before_anything_is_computed(clusters, call):
    status, out, err = call(
        "run", "--method", "lwof", "--task", f"{clusters / 'clusters.toml'}:clusters-5shot", "--train", "sessions=2",
        "--home", str(clusters / "home"), "--device", "cpu",
    )  # fmt: skip
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.endswith("needs 10 novel classes of novel/train and 50 base queries of base/val, more than "
                        "clusters-5shot has; sessions=1 is the most\n")  # fmt: skip
    assert not (clusters / "home" / "pretrained").exists()


def test_training_raises_validation_accuracy_and_keeps_the_best(clusters):
    training_job = job(clusters, train={"steps": "400", "select": "best"}, options={"offset": -3.0})
    training_job.method.schedule = MetaTraining(steps=400, schedule=Schedule(rate=0.05), validate_every=100)
    try:
        method, trained, _, bench = train(clusters, training_job)
    finally:
        del training_job.method.schedule
    assert sorted(trained.history_by_step) == [100, 200, 300, 400]
    assert trained.history_by_step[trained.kept_step] == max(trained.history_by_step.values())

    def accuracy(model):
        return stages.MetaTrainStage(training_job).measure_validation_accuracy(bench.work, model)

    assert accuracy(method) == pytest.approx(trained.history_by_step[trained.kept_step])
    assert accuracy(method) > accuracy(Scale(bench.base_classifier, 5, offset=-3.0)) + 10


def test_select_last_shares_the_training_with_best(clusters):
    better_early = {"offset": 0.0, "start": 30.0}
    best, best_training, folder, _ = train(clusters, job(clusters, train={"select": "best"}, options=better_early))
    log = io.StringIO()
    last, last_training, other_folder, _ = train(
        clusters, job(clusters, train={"select": "last"}, options=better_early), LogReporter(log)
    )
    assert folder == other_folder
    assert "meta-training" not in log.getvalue(), "nothing is trained twice"
    assert last_training.kept_step == 40
    assert best_training.history_by_step == last_training.history_by_step
    assert (best.tau.item() == last.tau.item()) == (best_training.kept_step == 40)


def test_training_makes_no_optimiser_of_pytorchs(clusters, monkeypatch):
    """Making one has PyTorch import its compilers: 200 MB, and a second or more."""

    def optimiser(*arguments, **options):
        raise AssertionError("an optimiser object")

    first, *_ = train(clusters, job(clusters))  # on a base classifier, whose training does make one
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", optimiser)
    again, *_ = train(clusters, job(clusters))
    more, *_ = train(clusters, job(clusters, train={"steps": "3"}))
    assert again.tau.item() == first.tau.item() != more.tau.item()


def interrupted(monkeypatch, *numbers: int) -> list:
    """Has validations of these numbers, counted from 1, end as by Ctrl-C; returns a list that has an item for each."""
    calls, validate = [], stages.MetaTrainStage.measure_validation_accuracy

    def counted(*arguments):
        calls.append(arguments)
        if len(calls) in numbers:
            raise KeyboardInterrupt
        return validate(*arguments)

    monkeypatch.setattr(stages.MetaTrainStage, "measure_validation_accuracy", counted)
    return calls


@pytest.mark.slow("methods are trained twice")
def test_interrupted_training_ends_with_the_same_parameters(clusters, monkeypatch):
    training_job = job(clusters, NoisyScale, train={"select": "last"})
    whole, plain, _, _ = train(clusters, training_job)
    calls = interrupted(monkeypatch, 2, 5)
    (clusters / "home" / "trained").rename(clusters / "home" / "elsewhere")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(clusters, training_job)
    broken, resumed, _, _ = train(clusters, training_job)
    assert len(calls) == 6
    assert whole.tau.item() != 1.0
    assert torch.equal(whole.tau, broken.tau)
    assert torch.equal(whole.offset, broken.offset)
    assert plain.history_by_step == resumed.history_by_step


@pytest.mark.slow("a method is trained twice")
def test_how_the_solves_went_is_counted_across_an_interruption_and_said(clusters, monkeypatch):
    task = load_tasks(f"{clusters / 'clusters.toml'}:clusters-5shot")[0]
    # A step size at which every Neumann series grows; the counts do not depend on where training stopped.
    options = {"learner": "lr", "rate": 1e3, "steps": 5}
    lr_job = Job(
        MethodRef("attractor", registry.get_method("attractor")),
        options,
        task,
        TrainingChanges(episodes_per_step=2),
        0,
        60,
    )
    interrupted(monkeypatch, 3)
    log = io.StringIO()
    place = work(clusters, LogReporter(log))
    with pytest.raises(KeyboardInterrupt):
        run_without_storing(lr_job, place)
    result = run_without_storing(lr_job, place)
    assert result.training["solves"] == {
        "episodes": 80, "unconverged": 0, "adjoint_episodes": 80, "adjoint_diverged": 80, "adjoint_failed": 0,
        "adjoint_indefinite": 0,
    }  # fmt: skip
    assert "seed 0: in 80 of 80 episodes of meta-training the Neumann series grew" in log.getvalue()
    options = {"learner": "lr", "gradient": "implicit"}
    exact = Job(MethodRef("attractor", registry.get_method("attractor")), options, task, TrainingChanges(), 0, 60)
    solves = run_without_storing(exact, place).training["solves"]
    assert (solves["adjoint_episodes"], solves["adjoint_diverged"], solves["adjoint_failed"]) == (40, 0, 0)


@pytest.mark.slow("methods are trained")
@pytest.mark.parametrize(("late", "said"), [
    (False, "step 1 of 40; nothing was learned before"), (True, "step 2 of 40; a lower learning rate"),
])  # fmt: skip
def test_divergence_is_said(clusters, late, said):
    class Broken(Scale):
        """Infinite loss, at once or when something was learned."""

        def forward(self, support, query):
            logits = super().forward(support, query).logits
            return Prediction(logits if late and self.tau.item() == 1 else logits * torch.inf)

    with pytest.raises(UserError, match=rf"diverged: method .scale. returned NaN or infinite logits .* at {said}"):
        train(clusters, job(clusters, Broken))


def test_schedule_of_the_method_wins_and_steps_stretch_it():
    lwof = registry.get_method("lwof")
    plan = TrainingChanges().apply_to(lwof.schedule)
    assert [plan.schedule.rate_at(s, plan.steps) for s in (5999, 6000, 8000)] == pytest.approx([1e-3, 1e-4, 1e-5])
    assert plan.steps == 10_000
    short = TrainingChanges(steps=100).apply_to(lwof.schedule)
    assert (short.steps, short.schedule.drops, short.validate_every) == (100, (60, 80), 10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"view": "2"}, "unknown training option 'view'; did you mean 'views'"),
        ({"views": "0"}, "at least 1"),
        ({"views": "two"}, "views takes a whole number, not 'two'"),
        ({"views": 10**12}, "views and sessions must be at most 10,000"),
        ({"steps": 10**12}, "steps at most 1,000,000,000"),
        ({"select": "worst"}, "select takes last or best, not 'worst'"),
        ({"steps": 0}, "steps must be at least 1; leave it out"),
    ],
)
def test_training_options_are_checked(given, message):
    with pytest.raises(UserError, match=message):
        TrainingChanges.parse_values(given)


def test_adam_is_pytorchs():
    """To the last digit, with a parameter that has no gradient in the first steps and with a rate that changes."""
    generator = torch.Generator().manual_seed(0)
    ours = {key: torch.randn(5, 3, generator=generator).requires_grad_() for key in "abc"}
    theirs = {key: value.detach().clone().requires_grad_() for key, value in ours.items()}
    adam, reference = AdamOptimiser(ours), torch.optim.Adam(theirs.values(), fused=True)
    for step in range(30):
        for key in ours:
            gradient = torch.randn(5, 3, generator=generator)
            for parameters in (ours, theirs):
                parameters[key].grad = None if key == "c" and step < 5 else gradient.clone()
        reference.param_groups[0]["lr"] = rate = 1e-2 if step < 20 else 1e-3
        adam.step(rate)
        reference.step()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key])
        assert all(torch.equal(adam.state[key][part], tensor) for part, tensor in reference.state[theirs[key]].items())
