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

from ifsl_bench.backbone.trainer import Trainer
from ifsl_bench.common.checkpoint import CheckpointFolder
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.preparing.prepare import ensure
from ifsl_bench.data.writer import build
from ifsl_bench.protocol.task_files import find

pytestmark = pytest.mark.skipif(
    os.name != "posix" or not torch.distributed.is_available(), reason="torchrun and signals of POSIX"
)
WORKER = Path(__file__).parent / "pretraining_worker.py"
STEPS = 20  # five an epoch
TASK = """
[dataset]
name = "dots"
[pretraining]
backbone = "{backbone}"
steps = 20
batch = {batch}
crop_padding = 2
flip = true
[pretraining.schedule]
rate = 0.04
warmup = 4
shape = "cosine"
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

    build(Home.locate(tmp_path / "home").data / "dots", "dots", "1", fill, {})
    for name, backbone, batch in (("dots", "resnet18-gn", 8), ("norms", "resnet-small", 8), ("odd", "resnet18-gn", 7)):
        (tmp_path / f"{name}.toml").write_text(TASK.format(backbone=backbone, batch=batch))
    return tmp_path


def start(folder: Path, home: str, processes: int, *more: str, task: str = "dots", **environment: str):
    one = [sys.executable, str(WORKER)]
    many = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(WORKER)]
    if not (folder / home).exists():
        shutil.copytree(folder / "home", folder / home)
    command = ["pretrain", "--task", str(folder / f"{task}.toml"), "--device", "cpu", "--home", str(folder / home)]
    return subprocess.Popen(
        [*(one if processes == 1 else many), *(more or command)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"} | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def done(process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def state(folder: Path, home: str):
    (made,) = Home.locate(folder / home).pretrained.iterdir() if False else [
        path for path in Home.locate(folder / home).pretrained.iterdir() if path.is_dir()
    ]
    return CheckpointFolder(made).load()


def changes(folder: Path, home: str) -> dict[str, torch.Tensor]:
    """What training has added to each tensor."""
    task = find(str(folder / "dots.toml"))[0]
    where = Home.locate(folder / home)
    dataset = ensure(where, task.dataset, Reporter())
    initial = Trainer(folder / "x", task, dataset, "linear", 0, torch.device("cpu"))._tensors()
    return {key: value - initial[key] for key, value in state(folder, home).tensors.items()}


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[key] - b[key]).norm() / b[key].norm()) for key in b)

def test_x(dots):
    for home, n in (("one",1),("two",2)):
        t=time.time()
        print(done(start(dots, home, n)), time.time()-t)
    print(furthest(changes(dots,"two"), changes(dots,"one")))
    print(state(dots,"two").info)
    a,b=changes(dots,"two"), changes(dots,"one")
    for k in sorted(b, key=lambda k:-float((a[k]-b[k]).norm()/b[k].norm()))[:8]: print(k, float((a[k]-b[k]).norm()/b[k].norm()), float(b[k].norm()))
