"""What ``--retrain`` does before a stage runs: models and trials that are there get other names; none is deleted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ifsl_bench.common.files import set_aside
from ifsl_bench.common.locks import locked
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.running.preparation import Stage
from ifsl_bench.running.stages import MetaTrain, TrainChosen, Trial


def is_trained(stage: Stage) -> bool:
    """Whether a stage trains a method, or tries one that was."""
    return isinstance(stage, (MetaTrain, Trial, TrainChosen))


def put_aside(stage: Stage, work: Workspace, renewed: set[Path]) -> None:
    """Renames what a stage has made, but for what ``renewed`` names already: what jobs share is trained anew once."""
    for made in _makes(stage):
        path = made.file(work.home) if isinstance(made, Trial) else made.folder(work.home)
        with locked(path, work.reporter.warn):
            if path not in renewed and path.exists():
                work.reporter.say(f"{made}: what was there is kept as {set_aside(path, 'replaced')}")
        renewed.add(path)


def _makes(stage: Stage) -> list[MetaTrain | Trial]:
    if isinstance(stage, Trial):
        return [stage, MetaTrain(stage.job)]
    if isinstance(stage, TrainChosen):  # one of these
        return [MetaTrain(replace(one, seed=stage.job.seed)) for _, one in stage.job.candidates()]
    return [stage] if isinstance(stage, MetaTrain) else []
