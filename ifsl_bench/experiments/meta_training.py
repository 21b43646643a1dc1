"""Stage 2: the one meta-training loop, for every method that has parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adam import adam

from ifsl_bench.experiments.trained_models import (
    DivergedError,
    SolveCounts,
    TrainingRecord,
    check_training_state,
    training_threads,
)
from ifsl_bench.plugin.method import (
    Method,
    NonFiniteLogitsError,
    Prediction,
    Query,
    SessionOutput,
    State,
    Support,
    call_method,
    check_prediction,
    check_shapes,
    masked_logits,
    name_method_in_errors,
)
from ifsl_bench.protocols.episode_loader import EpisodeLoader, predict_batch
from ifsl_bench.protocols.loader import Batch
from ifsl_bench.protocols.sampling.draws import derive_seed
from ifsl_bench.protocols.tasks.task import MetaTraining
from ifsl_bench.protocols.tasks.variants import TrainingChanges
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import quarantine_path
from ifsl_bench.utils.progress import LEARNING_RATE, ProgressTask, Reporter
from ifsl_bench.utils.threads import limit_threads_in_block, max_busy_threads

EPISODES_DRAWN_AT_ONCE = 64  # episodes whose features are gathered at once


class AdamOptimiser:
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
        """Move the parameters that have gradients; the others stay.

        Args:
            rate: the learning rate.
        """
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


@dataclass
class MetaTrainer:
    """The meta-training of a method, in place: from the cache, from where an earlier run stopped, or from the start.

    Step t uses episodes ``t * episodes_per_step`` onwards of the loader's stream. The state is saved at every
    validation. One that is damaged, or is another's, is set aside with a warning.

    Attributes:
        checkpoint_folder: of the states.
        measure_validation_accuracy: accuracy in percent on the validation episodes.
        recorded_facts: method, options, data and device, recorded with the model.
    """

    checkpoint_folder: Path
    method: Method
    name_in_errors: str
    loader: EpisodeLoader
    measure_validation_accuracy: Callable[[Method], float]
    meta_training_spec: MetaTraining
    training_changes: TrainingChanges
    seed: int
    recorded_facts: Mapping[str, Any]
    reporter: Reporter

    def __post_init__(self) -> None:
        self.store = CheckpointFolder(self.checkpoint_folder)
        self.parameters = dict(self.method.named_parameters())
        self.device = next(iter(self.parameters.values())).device
        self.best = self._copy_parameters()
        self.optimiser = AdamOptimiser(self.parameters)
        self.info: dict[str, Any] = {
            "place": "",
            **self.recorded_facts,
            "finished": False,
            "step": 0,
            "history": {},
            "best": None,
            "seconds": 0.0,
            "solves": {},
            "rng": "episodes and dropout are drawn from (purpose, seed, step)",
        }

    def run(self) -> TrainingRecord:
        """Train to the end.

        Raises:
            Diverged: the loss becomes infinite or NaN.
        """
        self._resume_training()
        start, spent = time.perf_counter(), self.info["seconds"]
        if not self.info["finished"]:
            title = f"meta-training {self.name_in_errors}, seed {self.seed}"
            with self.reporter.report_stage(title, self.meta_training_spec.steps, self.info["step"]) as stage:
                while self.info["step"] < self.meta_training_spec.steps:
                    accuracy = self._train_to_next_validation(stage)
                    self.info["seconds"] = spent + time.perf_counter() - start
                    self._record_validation(accuracy)
            if idle := [key for key in self.parameters if key not in self.optimiser.state]:
                them, used = ("it", "is it") if len(idle) == 1 else ("them", "are they")
                self.reporter.warn(
                    f"{self.name_in_errors}: no step has a gradient for {', '.join(idle)}, so training leaves {them} "
                    f"unchanged; {used} used in forward?"
                )
        return self._finish_training()

    def _resume_training(self) -> None:
        """Go on from the state on disk, if that is whole and of the same training."""
        try:
            here, there = self.info["place"], self._restore_state()
        except CorruptFile as error:
            aside = quarantine_path(self.checkpoint_folder)
            self.reporter.warn(f"{error}; meta-training starts anew, the old files are in {aside}")
            return
        if there is not None:
            self.info = there
            if not there["finished"] and here not in there["place"]:
                there["place"] += f"; from step {there['step']} on {here}"

    def _restore_state(self) -> dict[str, Any] | None:
        """Take the state on disk, and return its facts; None where there is none.

        Raises:
            CorruptFile: it is damaged, or another training's.
        """
        if (state := self.store.load()) is None:
            return None
        check_training_state(self.store.metadata_file, state.metadata)
        for key in ("task", "seed", "pretraining"):
            if state.metadata.get(key) != self.recorded_facts.get(key):
                raise CorruptFile(f"{self.checkpoint_folder} is another training: {key} is {state.metadata.get(key)}")
        if state.metadata.get("pretraining_sha256") != self.recorded_facts.get("pretraining_sha256"):
            raise CorruptFile(
                f"{self.checkpoint_folder} was trained on the features of other weights: the backbone was trained again"
            )
        self._load_tensors(state.tensors)
        return state.metadata

    def _load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors of a state; raise :class:`CorruptFile` where they do not belong to these parameters."""
        for key, value in self.parameters.items():
            for part in ("last", "best", "adam.exp_avg", "adam.exp_avg_sq"):
                tensor = tensors.get(name := f"{part}.{key}")
                missing = tensor is None and not part.startswith("adam")  # one without a gradient has no moments
                if missing or (tensor is not None and tensor.shape != value.shape):
                    raise CorruptFile(
                        f"{self.checkpoint_folder} does not fit the method: {name} is missing or has another shape"
                    )
        with torch.no_grad():
            for key, value in self.parameters.items():
                value.copy_(tensors[f"last.{key}"])
                self.best[key] = tensors[f"best.{key}"].to(value.device)
                names = {part: f"adam.{part}.{key}" for part in ("step", "exp_avg", "exp_avg_sq")}
                moments = {part: tensors[name].to(value.device) for part, name in names.items() if name in tensors}
                if moments:
                    self.optimiser.state[key] = moments

    def _train_to_next_validation(self, stage: ProgressTask) -> float:
        """Take the steps up to the next validation; return its accuracy."""
        first = self.info["step"]
        last = min(first + self.meta_training_spec.validate_every, self.meta_training_spec.steps)
        solves = SolveCounts(dict(self.info["solves"]))
        few = (
            training_threads(self.training_changes.episodes_per_step)
            if self.device.type == "cpu"
            else max_busy_threads()
        )
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(derive_seed("meta-training noise", self.seed, first))
            with limit_threads_in_block(few):
                for step, batch in self._iterate_batches(first, last):
                    loss = self._train_step(step, batch, solves, read=step % 10 == 9 or step == last - 1)
                    rate = self.meta_training_spec.schedule.rate_at(step, self.meta_training_spec.steps)
                    stage.advance(1, **({"loss": loss, LEARNING_RATE: rate} if loss is not None else {}))
        accuracy = self.measure_validation_accuracy(self.method)
        stage.advance(0, **{"validation accuracy": accuracy})
        self.info |= {"step": last, "solves": solves.total_counts(), "finished": last == self.meta_training_spec.steps}
        return accuracy

    def _iterate_batches(self, first: int, last: int) -> Iterator[tuple[int, Batch]]:
        """Yield the episodes of steps ``first`` to ``last - 1``; several steps' episodes are gathered together."""
        per_step = self.training_changes.episodes_per_step
        group = max(1, EPISODES_DRAWN_AT_ONCE // per_step)
        self.method.train()
        for begin in range(first, last, group):
            end = min(begin + group, last)
            block = self.loader.load_batch(begin * per_step, (end - begin) * per_step)
            for step in range(begin, end):
                yield step, block.select_episode_range((step - begin) * per_step, (step - begin + 1) * per_step)

    def _train_step(self, step: int, batch: Batch, solves: SolveCounts, read: bool) -> float | None:
        """Take one step and count the failures of its solves; return the loss if it is to be read."""
        numbers = read or batch.query_labels.device.type == "cpu"
        try:
            if self.training_changes.sessions == 1:
                answers = [(predict_batch(self.method, self.name_in_errors, batch, numbers), batch.query_labels)]
            else:
                answers = list(
                    predict_by_session(self.method, self.name_in_errors, batch, self.training_changes.sessions, numbers)
                )
        except UserError as error:
            if isinstance(error, NonFiniteLogitsError) or not all(
                bool(p.isfinite().all()) for p in self.method.parameters()
            ):
                raise self._make_diverged_error(str(error), step) from error
            raise
        losses = [
            F.cross_entropy(masked_logits(prediction, batch.masked_base_classes).flatten(0, 1), labels.flatten())
            for prediction, labels in answers
        ]
        loss = torch.stack(losses).mean() if len(losses) > 1 else losses[0]
        if not loss.requires_grad:
            raise UserError(
                f"method {self.name_in_errors!r} has parameters, but its logits in training do not depend on them"
            )
        for parameter in self.method.parameters():
            parameter.grad = None
        with name_method_in_errors(self.name_in_errors, self.method):
            loss.backward()
        for prediction, _ in answers:
            solves.add_prediction(prediction)
        self.optimiser.step(self.meta_training_spec.schedule.rate_at(step, self.meta_training_spec.steps))
        value = loss.item() if read else None
        if value is not None and not np.isfinite(value):
            raise self._make_diverged_error(f"the loss is {value}", step)
        return value

    def _make_diverged_error(self, what: str, step: int) -> DivergedError:
        advice = f"a lower learning rate (now {self.meta_training_spec.schedule.rate}) or another option may help"
        if step == 0:
            advice = "nothing was learned before: it is the method itself, or an option"
        at = f"at step {step + 1} of {self.meta_training_spec.steps}"
        return DivergedError(f"meta-training of {self.name_in_errors!r} diverged: {what} {at}; {advice}")

    def _record_validation(self, accuracy: float) -> None:
        """Store the state of a validation, and the parameters if they are the best so far."""
        info = self.info
        info["history"] = {**info["history"], str(info["step"]): accuracy}
        if info["best"] is None or accuracy > info["history"][str(info["best"])]:
            info["best"], self.best = info["step"], self._copy_parameters()
        self._save_state()

    def _save_state(self) -> None:
        """Store the state on disk."""
        tensors: dict[str, Tensor] = {f"last.{key}": value for key, value in self.parameters.items()}
        tensors |= {f"best.{key}": value for key, value in self.best.items()}
        if not self.info["finished"]:
            for key, state in self.optimiser.state.items():
                tensors |= {f"adam.{part}.{key}": tensor for part, tensor in state.items()}
        self.store.write_tensors(tensors, self.info)

    def _finish_training(self) -> TrainingRecord:
        step = self.meta_training_spec.steps
        if self.training_changes.select == "best":
            step = self.info["best"]
            with torch.no_grad():
                for key, value in self.parameters.items():
                    value.copy_(self.best[key])
        self.method.eval()
        history = {int(step): accuracy for step, accuracy in self.info["history"].items()}
        return TrainingRecord(history, step, self.info["seconds"], self.info["solves"], str(self.info["place"]))

    def _copy_parameters(self) -> dict[str, Tensor]:
        return {key: value.detach().clone() for key, value in self.parameters.items()}


def predict_by_session(
    method: Method, name: str, batch: Batch, sessions: int, numbers: bool = True
) -> Iterator[tuple[Prediction, Tensor]]:
    """Learn the novel classes of episodes in a number of sessions, one after the other.

    Args:
        method: that learns and answers.
        name: of the method, for errors.
        batch: E episodes of ``sessions`` times the method's ways.
        sessions: their number.
        numbers: whether the logits are checked too, as of :func:`~ifsl_bench.protocols.episode_loader.predict_batch`.

    Yields:
        After session t: the answers to the queries of the classes met so far, and their labels [E, Q_t].
    """
    support, query = batch.support, batch.query
    state: State = None
    (episodes, classes), rows = support.hidden.shape, support.features.shape[1] // sessions
    for t in range(1, sessions + 1):
        at, met = (
            slice((t - 1) * rows, t * rows),
            batch.query_labels < classes + t * method.ways,
        )  # [E, Q], equally many each
        group = support.labels[:, at] - (t - 1) * method.ways
        session = Support(support.features[:, at], group, support.hidden, support.base_logits[:, at])
        queries = Query(*(part[met].unflatten(0, (episodes, -1)) for part in (query.features, query.base_logits)))
        with name_method_in_errors(name, method, session, queries, method.base):
            learned = call_method(SessionOutput, method.learn, session, state)
            state, answer = learned.state, call_method(Prediction, method.answer, learned.state, queries)
        prediction = Prediction(answer.logits, {**learned.statistics, **answer.statistics}, learned.adjoint)
        count, novel = queries.features.shape[1], t * method.ways
        if numbers:
            check_prediction(name, prediction, batch.masked_base_classes, count, novel)
        else:
            check_shapes(name, prediction, episodes, count, classes + novel)
        yield prediction, batch.query_labels[met].unflatten(0, (episodes, -1))
