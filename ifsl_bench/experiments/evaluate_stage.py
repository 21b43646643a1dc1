"""The last stage of a job: its method is opened, checked against the contract, calibrated and evaluated."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ifsl_bench._version import __version__
from ifsl_bench.backbones.contract import required_libraries
from ifsl_bench.backbones.device import DeviceChoice, describe_device
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.stages import (
    MetaTrainStage,
    Stage,
    copy_for_evaluation,
    make_pretrain_stage,
    make_untrained_method,
    meta_training_key,
    report_chosen_device,
)
from ifsl_bench.experiments.trained_models import TrainingRecord, load_trained
from ifsl_bench.experiments.workspace import PreparedTask, Workspace
from ifsl_bench.plugin.adapting import Adapting
from ifsl_bench.plugin.adapting_contract import check_adapting_method_on_probe
from ifsl_bench.plugin.episode_contract import ContractProbe, check_answer_is_repeated, check_answers, describe_ties
from ifsl_bench.plugin.method import Method
from ifsl_bench.protocols.calibration import ValidationBias
from ifsl_bench.protocols.episode_loader import EpisodeLoader
from ifsl_bench.protocols.image_counts import ImageHits, ImageTally
from ifsl_bench.protocols.loader import EvaluationResult, Loader, evaluate_method
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.tasks.task import Side
from ifsl_bench.store.schema import SCHEMA_VERSION, Result, StoredCalibration, StoredImageHits, round_summary
from ifsl_bench.utils.errors import UserError, escape_controls
from ifsl_bench.utils.files import Paths, sha256_json
from ifsl_bench.utils.progress import Reporter

RECORDED_LIBRARIES = ("torch", "torchvision", "numpy")
N_EPISODES_CHECKED = 8  # test episodes that the contract is checked on in every run


@dataclass(frozen=True)
class EvaluationContext:
    """A job's method and data, opened where it is evaluated.

    Attributes:
        job: with the options that were chosen.
        option_choice_record: the fields of a result about the choice of options.
        method: on the device of the evaluation.
        training_record: its meta-training, if there was one.
        trained_model_folder: of the meta-training under ``trained``; "" without one.
        prepared_task: the task's data, features and episodes.
        device_choice: the device, and why it was chosen.
    """

    job: Job
    option_choice_record: dict[str, Any]
    method: Method
    training_record: TrainingRecord | None
    trained_model_folder: str
    prepared_task: PreparedTask
    device_choice: DeviceChoice

    def loader(self, side: Side) -> Loader:
        """Return the loader of one side's episodes or sequences, on the device of the evaluation."""
        return self.prepared_task.loader(side, device=self.device_choice.device)

    def make_episode_loader(self) -> EpisodeLoader:
        """Return the loader of test episodes; raises :class:`UserError` where the task is in sessions."""
        return self.prepared_task.episode_loader("test", self.device_choice.device)

    def make_contract_probe(self, count: int) -> ContractProbe:
        """Return the method with its first test episodes; of sequences, with the first sessions of these.

        Args:
            count: how many, where there are as many.
        """
        first = self.loader("test").load_first_episodes(min(count, self.job.n_episodes))
        return ContractProbe(
            self.job.method_name, self.method.eval(), first.support, first.query, first.masked_base_classes
        )

    def check_contract(self) -> tuple[ContractProbe, Tensor]:
        """Check the method on its first test episodes, and return some of them with the answers.

        Raises:
            UserError: it breaks the contract.
        """
        if isinstance(self.method, Adapting):
            probe = self.make_contract_probe(2)
            return probe.select_episode(0), check_adapting_method_on_probe(probe)
        probe = self.make_contract_probe(N_EPISODES_CHECKED).with_search_flag()
        answers, count = check_answers(probe), min(N_EPISODES_CHECKED, self.job.n_episodes)
        protocol_of_task(self.job.task).check_protocol_contract(
            self.job.method_name, self.method, self.loader("test"), count
        )
        return probe, answers

    def find_bias(self, reporter: Reporter) -> ValidationBias | None:
        """Find the bias that calibrates the method, on the validation episodes that options are chosen on.

        None where the protocol does without, and, with a warning, where the data have too few validation classes.
        """
        task = self.job.task
        protocol = protocol_of_task(task)
        if not protocol.has_calibration(task, self.job.method):
            return None
        try:
            self.prepared_task.sampler("val")
        except UserError as error:
            reporter.warn(f"{self.job}: no calibrated Acc., since validation episodes cannot be drawn: {error}")
            return None
        loader, episodes, title = self.loader("val"), task.evaluation.validation_halves[0], f"calibrating {self.job}"
        called = "validation accuracy"
        margins = evaluate_method(
            self.method, self.job.method_name, loader, episodes, reporter, title, called=called
        ).margins
        return protocol.find_bias(margins) if margins else None

    def evaluate(
        self, episodes: range, bias: ValidationBias | None, reporter: Reporter, title: str, loader: Loader | None = None
    ) -> EvaluationResult:
        """Evaluate some of the job's test episodes; margins are not kept, so that memory is for the counts alone.

        Args:
            episodes: which of the test stream.
            bias: on the novel logits, to count hits with it too.
            reporter: receives the progress.
            title: of the progress.
            loader: of the test episodes; a new one by default.
        """
        return evaluate_method(
            self.method,
            self.job.method_name,
            loader or self.loader("test"),
            episodes,
            reporter,
            title,
            whole=self.job.n_episodes,
            bias=bias,
            keep_margins=False,
        )


@dataclass(frozen=True)
class EvaluationStage(Stage):
    """The result of a job, of the best of its candidates; the runner stores it."""

    stage_name = "evaluation"
    device_rule_name = "evaluation"
    job: Job
    meta_train_stage: Path | None = None  # the folder of a stored model to evaluate, in place of the job's own
    command_line: str = ""  # the command line, recorded with the result

    def __str__(self) -> str:
        return f"evaluating {self.job}: {protocol_of_task(self.job.task).format_count(self.job.n_episodes)}"

    def key(self, home: Paths) -> str:
        """Name all that is evaluated for one result."""
        job = self.job
        how = [job.setting, job.training_changes.select, job.is_calibrated, str(self.meta_train_stage or "")]
        return f"{meta_training_key(job, home)}-{sha256_json(how)[:12]}-{job.n_episodes}"

    def open(self, work: Workspace) -> EvaluationContext:
        """Open the method and its data; the method is trained if need be."""
        job, choice = self.job, {"options": self.job.method_options, "tuned": {}, "passed_over": [], "edge": []}
        if self.meta_train_stage is None and job.searched_names:
            from ifsl_bench.experiments.search import choose_setting_with_record

            job, choice = choose_setting_with_record(job, work, work.reporter)
        if self.meta_train_stage is None:
            method, trained, folder = MetaTrainStage(job).compute(work)
        else:
            method, trained, folder = load_trained(
                self.meta_train_stage, make_untrained_method(job, work), job.method_name, job.training_changes.select
            )
        prepared, method = make_pretrain_stage(job).open_task(work), copy_for_evaluation(job, work, method)
        return EvaluationContext(job, choice, method, trained, folder, prepared, self.choose_device(work))

    def compute(self, work: Workspace) -> Result:
        context = self.open(work)
        report_chosen_device(work, self, context.device_choice)
        first, answers = context.check_contract()
        bias = context.find_bias(work.reporter)
        start, loader = time.perf_counter(), context.loader("test")
        loader.image_tally = ImageTally()
        evaluated = context.evaluate(range(self.job.n_episodes), bias, work.reporter, f"evaluating {self.job}", loader)
        seconds = time.perf_counter() - start
        check_answer_is_repeated(first, answers)  # all that lies between must have left no trace
        remarks = (
            *evaluated.convergence_remarks(),
            *(context.training_record.training_remarks() if context.training_record else ()),
            describe_ties(answers),
        )
        for remark in filter(None, remarks):
            work.reporter.warn(f"{self.job}: {remark}")
        return self._make_result(context, evaluated, loader.collect_image_hits(self.job.is_calibrated), seconds, work)

    def _make_result(
        self,
        context: EvaluationContext,
        evaluated: EvaluationResult,
        images: ImageHits | None,
        seconds: float,
        work: Workspace,
    ) -> Result:
        job, prepared, trained = context.job, context.prepared_task, context.training_record
        counts, calibrated, choice = evaluated.counts, evaluated.calibrated_hits, context.option_choice_record
        if self.job.searched_names and self.meta_train_stage is None:
            from ifsl_bench.experiments.search import add_test_hits_of_rivals

            choice = add_test_hits_of_rivals(self.job, choice, counts, work)
        if calibrated and self.job.is_calibrated:
            counts = counts.use_calibrated_counts()
        sampler, backbone = prepared.sampler("test", context.device_choice.device), prepared.pretrained_backbone
        libraries = *job.method.requires, *required_libraries(job.task.pretraining)
        device = describe_device(context.device_choice.device)
        drawn = sampler.describe_novel_class_draws(job.n_episodes)
        return Result(
            schema=SCHEMA_VERSION,
            method=job.method_name,
            label=self.job.label,
            **choice,
            setting=self.job.setting,
            train=job.training_changes.non_default_values(),
            task=job.task.name,
            task_hash=job.task.hash,
            digest=sampler.digest(job.n_episodes),
            fingerprint=prepared.dataset.fingerprint,
            seed=job.seed,
            episodes=protocol_of_task(job.task).to_stored_counts(
                counts, drawn, job.keeps_supports_of_sessions, job.method.uses_all_images
            ),
            summary=round_summary(counts.summarise_metrics()),
            solver=evaluated.describe_statistics(),
            pretraining=backbone.result_entry(),
            training=trained.to_result_entry() if trained else {},
            cost={
                "parameters": sum(p.numel() for p in context.method.parameters()),
                "pretraining_seconds": round(backbone.training_record["seconds"], 3),
                "training_seconds": round(trained.seconds, 3) if trained else 0.0,
                "evaluation_seconds": round(seconds, 3),
                "episodes_per_second": round(job.n_episodes / seconds, 1),
            },
            provenance={
                **collect_provenance(self.command_line, device, libraries),
                **job.method_code_identity,
                "checkpoint": context.trained_model_folder,
            },
            novel_fingerprint=prepared.dataset.novel_fingerprint,
            partial=prepared.dataset.is_partial,
            calibration=StoredCalibration.from_calibrated_hits(calibrated, self.job.is_calibrated)
            if calibrated
            else None,
            images=StoredImageHits.from_image_hits(images) if images else None,
            transductive=job.method.transductive,
            flags=job.method.flags(job.method_options),
            places={
                "pretraining": backbone.training_record["device"],
                **prepared.feature_devices(),
                **({"meta-training": trained.device_description} if trained and trained.device_description else {}),
                "evaluation": str(context.device_choice),
            },
        )


def collect_provenance(command: str, device: str, requires: Iterable[str]) -> dict[str, object]:
    """Return command, version, commit, device, library versions and time (UTC).

    Args:
        command: as the user typed it.
        device: that the result was computed on.
        requires: further libraries that the number depends on; one that is no distribution of that name is left out.
    """
    libraries = {name: importlib.metadata.version(name) for name in RECORDED_LIBRARIES}
    for name in requires:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    return {
        "command": escape_controls(command),  # a name of a file that is no text could not be written
        "version": __version__,
        "commit": read_git_commit(),
        "device": device,
        "python": platform.python_version(),
        "libraries": libraries,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def read_git_commit() -> str:
    """Return the commit of the checkout this package runs from, with "+changes" where its files differ; "" outside one.

    Stored results are left out: they differ after a run that replaces one.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        head = _git_output(root, "rev-parse", "HEAD")
        changes = _git_output(root, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/results/*/*.json")
        return head + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git_output(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
