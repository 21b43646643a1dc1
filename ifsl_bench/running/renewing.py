"""What ``--retrain`` does before a stage runs: models and trials that are there get other names; none is deleted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from ifsl_bench.common.files import Home, set_aside
from ifsl_bench.common.locks import locked
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.running.preparation import Stage
from ifsl_bench.running.searching import LaterTrial, TrainChosen, kept_accuracies
from ifsl_bench.running.stages import MetaTrain, Trial


def is_trained(stage: Stage) -> bool:
    """Whether a stage trains a method, or tries one that was."""
    return isinstance(stage, (MetaTrain, Trial, LaterTrial, TrainChosen))


def put_aside(stage: Stage, work: Workspace, renewed: set[Path]) -> None:
    """Renames what a stage has made, but for what ``renewed`` names already: what jobs share is trained anew once."""
    for made in _makes(stage, work.home):
        path = made.file(work.home) if isinstance(made, Trial) else made.folder(work.home)
        with locked(path, work.reporter.warn):
            if path not in renewed and path.exists():
                work.reporter.say(f"{made}: what was there is kept as {set_aside(path, 'replaced')}")
        renewed.add(path)


def _makes(stage: Stage, home: Home) -> list[MetaTrain | Trial]:
    if isinstance(stage, LaterTrial):
        trial = stage.trial(home)
        return _makes(trial, home) if trial else []
    if isinstance(stage, Trial):
        return [stage, MetaTrain(stage.job)]
    if isinstance(stage, TrainChosen):  # one of these
        rounds = stage.job.rounds(kept_accuracies(home))
        return [MetaTrain(replace(one.job, seed=stage.job.seed)) for one in itertools.chain.from_iterable(rounds)]
    return [stage] if isinstance(stage, MetaTrain) else []
