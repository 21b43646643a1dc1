"""One pretraining in several processes, for real: torchrun, gloo, and what one of them is told when another dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ifsl_bench.backbones.trainer import Trainer
from ifsl_bench.data.preparing.prepare import ensure
from ifsl_bench.data.writer import build
from ifsl_bench.protocols.tasks.task_files import find
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter

pytestmark = pytest.mark.skipif(
    os.name != "posix" or not torch.distributed.is_available(), reason="torchrun and signals of POSIX"
)
# Of a change of weights: 6e-8, which twenty steps in single precision amplify some thousand times where a ReLU changes
# sides; how much, differs by processor. An image that counted twice among 64 would be a hundredth.
ROUNDED = 1e-3
WORKER = Path(__file__).parent / "pretraining_worker.py"
STEPS = 20
TASK = """
[dataset]
name = "dots"
[pretraining]
backbone = "{backbone}"
steps = 20
batch = 7
crop_padding = 2
flip = true
# The first step is large and the others small: then rounding, which differs in its order, is not blown up by training.
[pretraining.schedule]
rate = 0.1
drops = [1, 2]
[tasks.dots-1shot]
shots = 1
"""


@pytest.fixture
def dots(tmp_path):
    """A folder with a home, which has 40 base images of noise in it, and a task on them."""

    def fill(writer):
        generator = np.random.default_rng(0)
        for side, names in (("base", "abcd"), ("novel", "vwxyz")):
            for part in ("train", "val", "test"):
                classes = tuple(f"{name}{part if side == 'novel' else ''}" for name in names)
                labels = np.repeat(np.arange(len(classes)), [16, 12, 8, 4] if side == "base" else 10)
                with writer.pool(f"{side}/{part}", labels, classes, (16, 16, 1)) as images:
                    images[:] = generator.integers(0, 256, images.shape)

    build(Paths.locate(tmp_path / "home").data / "dots", "dots", "1", fill, {})
    for name, backbone in (("dots", "resnet18-gn"), ("norms", "resnet-small")):
        (tmp_path / f"{name}.toml").write_text(TASK.format(backbone=backbone))
    return tmp_path


def exact(folder: Path, home: str) -> Path:
    """The file of the trained tensors before they were rounded."""
    return folder / f"{home}.exact"


def start(folder: Path, home: str, processes: int, task: str = "dots", restarts: int = 0, **environment: str):
    options = ["--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    torchrun = ["-m", "torch.distributed.run", *options] if processes > 1 else []
    if not (folder / home).exists():
        shutil.copytree(folder / "home", folder / home)
    command = ["pretrain", "--task", str(folder / f"{task}.toml"), "--device", "cpu", "--home", str(folder / home)]
    settings = {"OMP_NUM_THREADS": "1", "EXACT": str(exact(folder, home))}
    return subprocess.Popen(
        [sys.executable, *torchrun, str(WORKER), *command], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | settings | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def done(process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def state(folder: Path, home: str):
    (directory,) = (path for path in Paths.locate(folder / home).pretrained.iterdir() if path.is_dir())
    return CheckpointFolder(directory).load()


def changes(folder: Path, home: str, task: str = "dots") -> dict[str, torch.Tensor]:
    """The change of each tensor by training, before it was rounded."""
    definition = find(str(folder / f"{task}.toml"))[0]
    dataset = ensure(Paths.locate(folder / home), definition.dataset, Reporter())
    initial = Trainer(folder / "x", definition, dataset, "linear", 0, torch.device("cpu"))._tensors()
    trained = torch.load(exact(folder, home), weights_only=True)
    return {key: trained[key] - initial[key] for key in state(folder, home).tensors}


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[key] - b[key]).norm() / b[key].norm()) for key in b)


def error_lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("ifsl-bench: ")]


@pytest.mark.slow("six commands, most of them of two processes")
def test_two_processes_train_what_one_does_also_when_killed_and_resumed_as_another_number(dots):
    """Batches that two processes cannot halve, five an epoch; killed in the second epoch or the third, and begun
    again from its start; of two processes one is killed once more, and torchrun itself begins them again."""
    commands = {"one": start(dots, "one", 1), "two": start(dots, "two", 2)}
    for home, command in commands.items():
        status, out, err = done(command)
        assert status == 0, err
        assert out.count("weights: ") == 1, "the first process speaks for both"
        assert err.count("linear head, seed 0: done") == 1
        assert state(dots, home).info["processes"] == [1 if home == "one" else 2]
    whole = changes(dots, "one")
    assert furthest(changes(dots, "two"), whole) < ROUNDED

    killed = start(dots, "two-one", 2, KILL="1:7"), start(dots, "one-two", 1, KILL="0:12")
    for command in killed:
        status, out, err = done(command)
        assert status != 0
        assert out == ""
        lines = error_lines(err)  # torchrun may end the other process before it has noticed
        assert all("another of the 2 processes ended; the same command goes on" in line for line in lines), err
        assert len(lines) <= 1
    assert [state(dots, home).info["epoch"] for home in ("two-one", "one-two")] == [1, 2]
    for home, processes in (("two-one", 1), ("one-two", 2)):
        status, _, err = done(start(dots, home, processes, restarts=1, KILL="1:17"))
        assert status == 0, err
        for step in [5] if processes == 1 else [10, 15]:
            assert f"(resumed at {step} of {STEPS})" in err
        assert state(dots, home).info["processes"] == [3 - processes, processes]
        assert furthest(changes(dots, home), whole) < ROUNDED


@pytest.mark.slow("starts torchrun")
def test_what_goes_wrong_in_all_processes_is_told_once(dots):
    status, out, err = done(start(dots, "wrong", 2, task="norms"))
    assert status != 0
    assert out == ""
    (line,) = error_lines(err)
    assert "the backbone has batch norm, which 2 processes cannot share on the CPU; " in line


@pytest.mark.slow("starts torchrun")
def test_ctrl_c_ends_all_processes_and_says_how_to_go_on(dots):
    command = start(dots, "stopped", 2)
    checkpoints = Paths.locate(dots / "stopped").pretrained
    while not any(checkpoints.glob("*/checkpoint.json")):
        assert command.poll() is None
        time.sleep(0.01)
    command.send_signal(signal.SIGINT)
    status, out, err = done(command)
    assert status != 0
    assert out == ""
    assert len(error_lines(err)) == 1, err
    assert "the same command goes on from where it stopped" in error_lines(err)[0]
