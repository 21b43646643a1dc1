"""The last stage of a job: its evaluation, which makes the result."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ifsl_bench._version import __version__
from ifsl_bench.backbones.contract import libraries_of
from ifsl_bench.data.preparing.metadata import Outline
from ifsl_bench.experiments.evaluation import joined
from ifsl_bench.experiments.evaluation_context import EvaluationStage, Part, Ready, in_ranges
from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.rates import Amount
from ifsl_bench.experiments.stages import CheckEpisodes, PrepareData, Stage
from ifsl_bench.experiments.training_stage import data_stage_of, evaluation_amount, say_place
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.plugin.episode_contract import check_answers, check_repeated
from ifsl_bench.protocols.metrics import Counts, summarise
from ifsl_bench.store.schema import SCHEMA, Calibration, Result, SessionResult, counts_entry, summary_entry
from ifsl_bench.utils.errors import one_line

LIBRARIES = ("torch", "torchvision", "numpy")
DRAWN = 1e-5  # seconds, roughly, in which an episode is drawn for the digest


@dataclass(frozen=True)
class Evaluate(EvaluationStage):
    """The result, of the best of its candidates; :mod:`ifsl_bench.experiments.stored_results` keeps it.

    Few episodes are evaluated here, many in ranges before.
    """

    kind = "evaluation"
    command: str = ""  # what the user typed, recorded with the result

    def told(self, seeds: str) -> str:
        return f"evaluating {self.job.told(seeds)}: {self.job.task.kind.counted(self.job.episodes)}"

    def inputs(self) -> Sequence[Stage]:
        if not in_ranges(self.job):
            return self.needed()
        from ifsl_bench.experiments.ranges import ranges_of

        return ranges_of(self.job, self.model)

    def amount(self, data: Outline, work: Workspace) -> Amount:
        if in_ranges(self.job):
            return Amount("drawing", f"{self.job.task.name}/cpu", self.job.episodes, DRAWN)
        more = len(self.job.task.evaluation.halves[0]) if self.job.task.kind.has_base else 0  # for calibration
        return evaluation_amount(self.job, self.job.episodes + more, work)

    def compute(self, work: Workspace) -> Result:
        ready = self.ready(work, work.reporter)
        say_place(work, self, ready.place)
        why, parts = self._in_ranges(work) if in_ranges(self.job) else self._at_once(ready, work)
        if why:
            work.reporter.warn(f"{self.job}: {why}")
        return self._result(ready, parts, work)

    def _at_once(self, ready: Ready, work: Workspace) -> tuple[str, list[Part]]:
        asked = ready.asked()
        answers = check_answers(asked)
        ready.check_sessions()
        bias, why = ready.bias(work.reporter)
        part = ready.part(range(self.job.episodes), bias, work.reporter, f"evaluating {self.job}")
        check_repeated(asked, answers)  # all that lies between must have left no trace
        return why, [part]

    def _in_ranges(self, work: Workspace) -> tuple[str, list[Part]]:
        from ifsl_bench.experiments.ranges import Calibrate, ranges_of

        _, why = Calibrate(self.job, self.model).compute(work)
        return why, [part.compute(work) for part in ranges_of(self.job, self.model)]

    def _result(self, ready: Ready, parts: Sequence[Part], work: Workspace) -> Result:
        job, prepared, trained = ready.job, ready.prepared, ready.trained
        evaluated, seconds = joined([part.evaluated for part in parts]), sum(part.seconds for part in parts)
        for remark in (*evaluated.remarks(), *(trained.remarks() if trained else ())):
            work.reporter.warn(f"{self.job}: {remark}")
        counts, calibrated, choice = evaluated.counts, evaluated.calibrated, ready.choice
        if not isinstance(counts, Counts):
            counts = counts.calibrated() if self.job.calibrated else counts
        else:
            if self.job.searched and self.model is None:
                from ifsl_bench.experiments.searching import counted_on_test

                choice = counted_on_test(self.job, choice, counts, work)
            if calibrated and self.job.calibrated:
                counts = replace(counts, base_joint=calibrated.base_joint, novel_joint=calibrated.novel_joint)
        sampler, backbone = prepared.sampler("test", ready.place.device), prepared.pretrained
        libraries = *job.method.requires, *libraries_of(job.task.pretraining)
        device = " and ".join(dict.fromkeys(part.device for part in parts))
        kind: Any = SessionResult if job.task.sessions else Result
        result: Result = kind(
            schema=SCHEMA,
            method=job.name,
            label=self.job.label,
            **choice,
            setting=self.job.setting,
            train=job.training.changes(),
            task=job.task.name,
            task_hash=job.task.hash,
            digest=sampler.digest(job.episodes),
            fingerprint=prepared.dataset.fingerprint,
            seed=job.seed,
            episodes=counts_entry(counts, sampler.class_draws(job.episodes), job.supports_kept, job.method.every_image),
            summary=summary_entry(summarise(counts.per_episode(), counts.quantile)),
            solver=evaluated.described(),
            pretraining=backbone.entry(),
            training=trained.entry() if trained else {},
            cost={
                "parameters": sum(p.numel() for p in ready.method.parameters()),
                "pretraining_seconds": round(backbone.info["seconds"], 3),
                "training_seconds": round(trained.seconds, 3) if trained else 0.0,
                "evaluation_seconds": round(seconds, 3),
                "episodes_per_second": round(job.episodes / seconds, 1),
            },
            provenance={
                **provenance(self.command, device, libraries),
                **job.identity,
                "checkpoint": ready.folder,
            },
            novel_fingerprint=prepared.dataset.novel_fingerprint,
            partial=prepared.dataset.partial,
            calibration=Calibration.of(calibrated, self.job.calibrated) if calibrated else None,
            transductive=job.method.transductive,
            places={
                "pretraining": backbone.info["device"],
                **prepared.features_places(),
                **({"meta-training": trained.place} if trained and trained.place else {}),
                "evaluation": " and ".join(dict.fromkeys(part.place for part in parts)),
            },
        )
        return result


def provenance(command: str, device: str, requires: Iterable[str]) -> dict[str, object]:
    """Command, version, commit, device, library versions and time (UTC).

    Args:
        requires: further libraries that the number depends on; one that is no distribution of that name is left out.
    """
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    for name in requires:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    return {
        "command": one_line(command),  # a name of a file that is no text could not be written
        "version": __version__,
        "commit": commit(),
        "device": device,
        "python": platform.python_version(),
        "libraries": libraries,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The commit of the checkout this package runs from, with "+changes" where its files differ; "" outside one.

    Stored results are left out: they differ after a run that replaces one.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        head = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/results/*/*.json")
        return head + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def stages_of(job: Job) -> list[Stage]:
    """The stages of a job, each after those it waits for: its data first, what gives the result last.

    The checks of its episodes are part of the first.
    """
    stages: list[Stage] = [data_stage_of(job)]
    trials: set[str] = set()

    def add(stage: Stage) -> None:
        for needed in stage.inputs():
            # Candidates may be thousands: they are told apart by what they are called.
            if needed.kind == "trial":
                if str(needed) in trials:
                    continue
                trials.add(str(needed))
            elif isinstance(needed, (PrepareData, CheckEpisodes)) or needed in stages:
                continue
            add(needed)
        stages.append(stage)

    add(Evaluate(job))
    return stages
