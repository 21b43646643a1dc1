"""Curves of trainings, as TensorBoard logs and CSV files: what was told, at its step, once."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from ifsl_bench.experiments.training_curves import CSV_COLUMNS, CurveLogs, CurveReporter, make_curve_logs
from ifsl_bench.store import schema as result_file
from ifsl_bench.utils.errors import MissingDependencyError, UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import LEARNING_RATE, Reporter

pytest.importorskip("tensorboard", reason='the extra is not installed: pip install "ifsl_bench[tensorboard]"')


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """A folder's curves in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def columns(file: Path) -> dict[str, list[tuple[int, float]]]:
    """A CSV file's curves, in the same form."""
    with file.open(newline="") as text:
        lines = list(csv.DictReader(text))
    assert all(tuple(line) == CSV_COLUMNS for line in lines)
    curves = {
        name: [(int(line["step"]), float(line[name])) for line in lines if line[name]] for name in CSV_COLUMNS[1:]
    }
    return {name: values for name, values in curves.items() if values}


READ = {"tensorboard": scalars, "csv": columns}
WORKERS = pytest.param("csv", ("--jobs", "2"), marks=pytest.mark.slow("two processes are started"))


@pytest.mark.slow("whole runs")
@pytest.mark.parametrize(("kind", "jobs"), [("tensorboard", ()), ("csv", ()), WORKERS])
def test_a_run_writes_the_curves_of_each_training(call, here, kind, jobs):
    scalars = READ[kind]
    task = "clusters.toml:clusters-5shot"
    arguments = ("--method", "lwof,imprint", "--task", task, "--train", "steps=40", "--episodes", "20", "-q")
    status, _, err = call("run", *arguments, "--log", kind, "--log-dir", "curves", *jobs)
    assert status == 0, err
    (trained,) = (here / "curves" / "meta-training").iterdir()
    curves = scalars(trained)
    assert {"loss", "learning rate", "validation accuracy"} <= curves.keys()
    steps = [step for step, _ in curves["loss"]]
    assert steps == sorted(set(steps))
    assert {10, 20, 30, 40} <= set(steps)
    (path,) = (here / "home" / "results").rglob("lwof*.json")
    history = result_file.read_result(path).training["validation"]
    accuracy = {str(step): value for step, value in curves["validation accuracy"]}
    assert accuracy.keys() == history.keys()
    np.testing.assert_allclose(list(accuracy.values()), list(history.values()), rtol=1e-6)  # logs keep single precision
    pretrainings = list((here / "curves" / "pretraining").iterdir())
    assert len(pretrainings) == 1, "both methods have the same head"
    assert {"loss", "accuracy", "learning rate"} <= scalars(pretrainings[0]).keys()
    assert not (here / "curves" / "evaluation").exists()


@pytest.mark.parametrize("kind", READ)
def test_a_training_that_goes_on_from_a_checkpoint_has_each_step_once(tmp_path, kind):
    for first, last in ((0, 30), (20, 40)):  # killed at 30, and the checkpoint was at 20
        with CurveReporter(CurveLogs(kind, tmp_path), "x", Reporter()).report_stage("training", 40, first) as stage:
            for step in range(first + 1, last + 1):
                stage.advance(1, loss=float(step + 100 * first))
        if kind == "csv" and last == 30:  # in the middle of a line
            with (tmp_path / "x.csv").open("a") as file:
                file.write("1")
    (log,) = tmp_path.iterdir()
    expected = [*((s, float(s)) for s in range(1, 21)), *((s, float(s + 2000)) for s in range(21, 41))]
    assert READ[kind](log)["loss"] == expected


def test_what_a_killed_training_has_told_is_in_its_csv_file(tmp_path):
    """Each line is on the disk once it is told, and what is told of a step later joins its line."""
    with CurveReporter(CurveLogs("csv", tmp_path), "x", Reporter()).report_stage("training", 40) as stage:
        stage.advance(9)
        stage.advance(1, loss=0.123456789, **{LEARNING_RATE: 1e-3})
        stage.advance(0, **{"validation accuracy": 76.5})
        stage.advance(10, loss=0.5, accuracy=50.0)
        text = (tmp_path / "x.csv").read_text()
    expected = "step,loss,accuracy,learning rate,validation accuracy\n10,0.123456789,,0.001,76.5\n20,0.5,50,,\n"
    assert text == expected


def test_the_command_and_a_run_write_the_curves_of_a_pretraining_to_one_folder(call, here):
    task = "clusters.toml:clusters-5shot"
    logged = ("--task", task, "-q", "--log", "tensorboard", "--log-dir")
    shutil.copytree(here / "home" / "data", here / "apart" / "data")
    status, _, err = call("pretrain", "--head", "cosine", *logged, "command", "--home", "apart")
    assert status == 0, err
    status, _, err = call("run", "--method", "imprint", "--episodes", "20", *logged, "run")
    assert status == 0, err
    by_command, by_run = (
        {f.name: scalars(f) for f in (here / x / "pretraining").iterdir()} for x in ("command", "run")
    )
    assert len(by_run) == 1
    assert by_command == by_run


def test_what_is_asked_for_wrongly_is_one_line(tmp_path, monkeypatch):
    home = Paths.locate(tmp_path)
    assert make_curve_logs(None, None, home) is None
    assert make_curve_logs("tensorboard", None, home) == CurveLogs("tensorboard", home.logs / "tensorboard")
    with pytest.raises(UserError, match="unknown kind of log 'wandb'"):
        make_curve_logs("wandb", None, home)
    with pytest.raises(UserError, match="add --log csv or --log tensorboard"):
        make_curve_logs(None, "x", home)
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    monkeypatch.setattr("ifsl_bench.experiments.training_curves.find_spec", lambda name: None)
    with pytest.raises(
        MissingDependencyError, match=r'tensorboard is not installed\): pip install "ifsl_bench\[tensorboard\]"'
    ):
        make_curve_logs("tensorboard", None, home)
    assert make_curve_logs("csv", tmp_path / "x", home) == CurveLogs("csv", tmp_path / "x"), "it needs no package"
