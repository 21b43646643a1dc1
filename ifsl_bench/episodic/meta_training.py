"""Stage 2: the one meta-training loop, for every method that has parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adam import adam

from ifsl_bench.common.checkpoint import CheckpointFolder, State
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import set_aside
from ifsl_bench.common.processor import cores, share, threads
from ifsl_bench.common.progress import RATE, Reporter
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.episodic.evaluation import predict
from ifsl_bench.episodic.loader import EpisodeLoader
from ifsl_bench.episodic.trained import Solves, Trained, check_progress
from ifsl_bench.plugin.method import Method, NonFinite, masked_logits
from ifsl_bench.protocol.task import MetaTraining
from ifsl_bench.protocol.training import Training

BLOCK = 64  # episodes whose features are gathered at once
SHARED_FROM = 8  # episodes a step from which several threads pay


class Adam:
    """Adam (Kingma and Ba, ICLR 2015) with PyTorch's defaults and its fused kernel.

    Making a ``torch.optim.Adam`` imports PyTorch's compilers, which takes a second or two, and where a step takes a
    millisecond or two, the preparations of its own step are a tenth of that.

    Attributes:
        state: of each parameter that has had a gradient: its steps, and the running means of gradients and of squares.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.state: dict[str, dict[str, Tensor]] = {}

    def step(self, rate: float) -> None:
        """Moves the parameters that have gradients; the others stay."""
        learned = {key: p for key, p in self.parameters.items() if p.grad is not None}
        for key, p in learned.items():
            if key not in self.state:
                begun = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[key] = {"step": begun, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        states = [self.state[key] for key in learned]
        means, squares, steps = ([state[part] for state in states] for part in ("exp_avg", "exp_avg_sq", "step"))
        with torch.no_grad():
            adam(
                list(learned.values()), [p.grad for p in learned.values() if p.grad is not None], means, squares, [],
                steps, fused=True, amsgrad=False, beta1=0.9, beta2=0.999, lr=rate, weight_decay=0.0, eps=1e-8,
                maximize=False,
            )  # fmt: skip


class Diverged(UserError):
    """A meta-training whose loss became infinite or NaN."""


def meta_train(
    folder: Path,
    method: Method,
    name: str,
    loader: EpisodeLoader,
    validate: Callable[[Method], float],
    spec: MetaTraining,
    training: Training,
    seed: int,
    facts: Mapping[str, Any],
    reporter: Reporter,
) -> Trained:
    """Trains the method in place, from the cache, from where an earlier run stopped, or from the start.

    Step t uses episodes ``t * episodes_per_step`` onwards of the loader's stream. The state is saved at every
    validation, unless another process that trains the same has saved one that is further; where it has finished, this
    one takes what it has. A state that is damaged, or is another's, is set aside with a warning.

    Args:
        folder: where the states are kept.
        validate: accuracy in percent on the validation episodes.
        facts: what made this model, recorded with it.

    Raises:
        Diverged: the loss became infinite or NaN.
    """
    store = CheckpointFolder(folder)
    parameters = dict(method.named_parameters())
    device = next(iter(parameters.values())).device
    best = {key: value.detach().clone() for key, value in parameters.items()}
    info: dict[str, Any] = {
        "place": "",
        **facts,
        "finished": False,
        "step": 0,
        "history": {},
        "best": None,
        "seconds": 0.0,
        "solves": {},
        "rng": "episodes and dropout are drawn from (purpose, seed, step)",
    }

    optimiser = Adam(parameters)

    def restore() -> dict[str, Any] | None:
        """Goes on from the state on disk, and returns what it says of itself; None where there is none."""
        if (state := store.load()) is None:
            return None
        check_progress(store.json, state.info)
        for key in ("task", "seed", "pretraining"):
            if state.info.get(key) != facts.get(key):
                raise CorruptFile(f"{folder} is another training: {key} is {state.info.get(key)}")
        if state.info.get("pretraining_sha256") != facts.get("pretraining_sha256"):
            raise CorruptFile(f"{folder} was trained on the features of other weights: the backbone was trained again")
        _check_tensors(folder, state, parameters)
        _restore(state.tensors, parameters, best, optimiser)
        return state.info

    try:
        if (restored := restore()) is not None:
            here, info = info["place"], restored
            if not info["finished"] and here not in info["place"]:
                info["place"] += f"; from step {info['step']} on {here}"
    except CorruptFile as error:
        aside = set_aside(folder)
        reporter.warn(f"{error}; meta-training starts anew, the old files are in {aside}")

    start, spent = time.perf_counter(), info["seconds"]
    few = training_threads(training.episodes_per_step) if device.type == "cpu" else share()
    if not info["finished"]:
        with reporter.stage(f"meta-training {name}, seed {seed}", spec.steps, info["step"]) as stage:
            while (first := info["step"]) < spec.steps:
                last = min(first + spec.validate_every, spec.steps)
                solves = Solves(dict(info["solves"]))
                devices = [device] if device.type == "cuda" else []
                with torch.random.fork_rng(devices=devices):
                    torch.manual_seed(seed_of("meta-training noise", seed, first))
                    with threads(few):
                        for step, loss in _steps(method, name, loader, optimiser, spec, training, first, last, solves):
                            rate = spec.schedule.at(step, spec.steps)
                            stage.advance(1, **({"loss": loss, RATE: rate} if loss is not None else {}))
                accuracy = validate(method)
                stage.advance(0, **{"validation accuracy": accuracy})
                info["step"], info["solves"] = last, solves.whole()
                info["history"] = {**info["history"], str(last): accuracy}
                if info["best"] is None or accuracy > info["history"][str(info["best"])]:
                    info["best"] = last
                    best = {key: value.detach().clone() for key, value in parameters.items()}
                info["seconds"] = spent + time.perf_counter() - start
                info["finished"] = last == spec.steps
                _save(store, info, parameters, best, optimiser)
        if idle := [key for key in parameters if key not in optimiser.state]:
            reporter.warn(f"{name}: no step has a gradient for {', '.join(idle)}, which stay as they began; is the "
                          "parameter used in forward?")  # fmt: skip
    if training.select == "best":
        with torch.no_grad():
            for key, value in parameters.items():
                value.copy_(best[key])
    method.eval()
    kept = info["best"] if training.select == "best" else spec.steps
    history = {int(k): v for k, v in info["history"].items()}
    return Trained(history, kept, info["seconds"], info["solves"], str(info["place"]))


def training_threads(episodes: int) -> int:
    """Threads of a step on the host's processor: one where it is small, as threads would wait for each other longer
    than they compute."""
    return 1 if episodes < SHARED_FROM else cores()


def _steps(
    method: Method,
    name: str,
    loader: EpisodeLoader,
    optimiser: Adam,
    spec: MetaTraining,
    training: Training,
    first: int,
    last: int,
    solves: Solves,
) -> Any:
    """Runs steps ``first`` to ``last - 1`` and counts how their solves go.

    Yields (step, loss), the loss every tenth time and None between.
    """
    per_step = training.episodes_per_step
    group = max(1, BLOCK // per_step)  # steps whose episodes are gathered together
    method.train()
    for begin in range(first, last, group):
        end = min(begin + group, last)
        block = loader.batch(begin * per_step, (end - begin) * per_step)
        for step in range(begin, end):
            batch = block.part((step - begin) * per_step, (step - begin + 1) * per_step)
            read = step % 10 == 9 or step == last - 1
            try:
                prediction = predict(method, name, batch, numbers=read or batch.labels.device.type == "cpu")
            except UserError as error:
                if isinstance(error, NonFinite) or not all(bool(p.isfinite().all()) for p in method.parameters()):
                    raise _diverged(name, str(error), step, spec) from error
                raise
            logits = masked_logits(prediction, batch.masked)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            if not loss.requires_grad:
                raise UserError(f"method {name!r} has parameters, but its logits in training do not depend on them")
            for parameter in method.parameters():
                parameter.grad = None
            loss.backward()
            solves.add(prediction)
            optimiser.step(spec.schedule.at(step, spec.steps))
            value = None
            if read:
                value = loss.item()
                if not np.isfinite(value):
                    raise _diverged(name, f"the loss is {value}", step, spec)
            yield step, value


def _diverged(name: str, what: str, step: int, spec: MetaTraining) -> Diverged:
    return Diverged(
        f"meta-training of {name!r} diverged: {what} at step {step + 1} of {spec.steps}; "
        f"a lower learning rate (now {spec.schedule.rate}) or another option may help"
    )


def _save(
    store: CheckpointFolder,
    info: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    optimiser: Adam,
) -> None:
    tensors = {f"last.{key}": value for key, value in parameters.items()}
    tensors |= {f"best.{key}": value for key, value in best.items()}
    if not info["finished"]:
        for key, state in optimiser.state.items():
            tensors |= {f"adam.{part}.{key}": tensor for part, tensor in state.items()}
    store.save(tensors, info)


def _check_tensors(folder: Path, state: State, parameters: Mapping[str, Tensor]) -> None:
    """Raises :class:`CorruptFile` where the tensors of a state are not those of these parameters."""
    for key, value in parameters.items():
        needed = (f"last.{key}", f"best.{key}")
        moments = [name for part in ("exp_avg", "exp_avg_sq") if (name := f"adam.{part}.{key}") in state.tensors]
        for name in (*needed, *moments):
            if name not in state.tensors or state.tensors[name].shape != value.shape:
                raise CorruptFile(f"{folder} does not fit the method: {name} is missing or has another shape")


def _restore(
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    best: dict[str, Tensor],
    optimiser: Adam,
) -> None:
    with torch.no_grad():
        for key, value in parameters.items():
            value.copy_(tensors[f"last.{key}"])
            best[key] = tensors[f"best.{key}"].to(value.device)
            moments = {
                part: tensors[f"adam.{part}.{key}"]
                for part in ("step", "exp_avg", "exp_avg_sq")
                if f"adam.{part}.{key}" in tensors
            }
            if moments:
                optimiser.state[key] = {part: tensor.to(value.device) for part, tensor in moments.items()}
