"""A small run of every stage: its data, its task, what it ends with, and in a process of its own that can be killed."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ifsl_bench import api
from ifsl_bench.cli.main import _run_with_error_lines
from ifsl_bench.data.writer import DatasetWriter, build_dataset
from ifsl_bench.utils import files
from ifsl_bench.utils.files import Paths, strip_tag
from ifsl_bench.utils.progress import Reporter
from tests.reporters import Messages

TASKS = """
[dataset]
name = "tiny-images"
mean = [0.5]
std = [0.25]
[pretraining]
backbone = "resnet-small"
steps = 4
batch = 16
[pretraining.schedule]
rate = 0.05
[meta_training]
steps = 8
validate_every = 2
[meta_training.schedule]
rate = 1e-2
[evaluation]
episodes = 12
validation_episodes = 8
[episode]
ways = 3
novel_queries = 4
base_queries = 4
[tasks.tiny-images-1shot]
shots = 1
"""
PATIENCE = 60.0  # seconds after which a run counts as hanging


def make_data(home: Paths) -> None:
    """Six pools of noisy images, 16 x 16, that a network tells apart a little; goes on where another call stopped."""
    sides = {"base": 5, "novel/train": 6, "novel/val": 5, "novel/test": 5}
    centres = {
        side: np.random.default_rng(i).integers(60, 196, (classes, 16, 16, 1))
        for i, (side, classes) in enumerate(sides.items())
    }

    def fill(writer: DatasetWriter) -> None:
        for i, pool in enumerate(("base/train", "base/val", "base/test", "novel/train", "novel/val", "novel/test")):
            side = pool if pool in sides else "base"
            labels = np.repeat(np.arange(sides[side]), 10)
            names = tuple(f"{side}-{label}" for label in range(sides[side]))
            if writer.has_complete_pool(pool):
                continue
            with writer.write_pool(pool, labels, names, (16, 16, 1)) as images:
                noise = np.random.default_rng(10 + i).integers(-60, 60, images.shape)
                images[:] = np.clip(centres[side][labels] + noise, 0, 255).astype(np.uint8)

    home.data.mkdir(parents=True, exist_ok=True)
    build_dataset(home.data / "tiny-images", "tiny-images", "made of noise", fill, {}, ("noise 10",))


def run(root: Path, reporter: Reporter | None = None, rerun: bool = False) -> dict[str, Any]:
    """From what there is in ``root/home``, or from nothing, to a result; returns what it says."""
    home = Paths.locate(root / "home")
    if not (home.data / "tiny-images").exists():
        make_data(home)
    file = root / "tiny.toml"
    file.write_text(TASKS)
    work = api.workspace(home.cache, device="cpu", reporter=reporter or Messages())
    task = f"{file}:tiny-images-1shot"
    assert api.run("lwof", task, train={"steps": 8}, tune=2, rerun=rerun, work=work).label
    outcome = result(root)
    assert outcome is not None
    return outcome


def result(root: Path) -> dict[str, Any] | None:
    """The result every run must have: the counts, the training and what was chosen; None where there is none yet.
    Raises where one is half-written."""
    paths = list((root / "home" / "results").glob("*/*.json"))
    if not paths:
        return None
    (path,) = paths
    value = json.loads(path.read_text())
    outcome = {key: value[key] for key in ("episodes", "calibration", "options", "summary", "tuned")}
    outcome["training"] = {k: v for k, v in value["training"].items() if k != "seconds"}
    return outcome | {"sha256": value["pretraining"]["sha256"]}


# -- in a process of its own


@dataclass(frozen=True)
class Disturbance:
    """A signal, and when it comes.

    Attributes:
        aim: "time", or what the path of a written file holds; "" for any.
        at: seconds, or the number of the event among those aimed at, from 1.
    """

    signal: signal.Signals
    aim: str
    at: float

    def __str__(self) -> str:
        return f"{self.signal.name} at {self.aim or 'any write'} {self.at:.3g}"


def _watch(event: Callable[[str], None]) -> None:
    """Calls ``event`` with a path before and after each call of this process that makes, writes or renames a file."""

    def watched(call: Callable[..., Any], which: int) -> Callable[..., Any]:
        def instead(*arguments: Any, **more: Any) -> Any:
            path = arguments[which]
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            event(strip_tag(str(path)))
            value = call(*arguments, **more)
            event(strip_tag(str(path)))
            return value

        return instead

    def opened(path: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        return (builtins.open if set(mode) <= {"r", "b"} else writing)(path, mode, *arguments, **more)

    writing = watched(builtins.open, 0)
    for name, which in (("replace", 1), ("rename", 1), ("fsync", 0), ("unlink", 0), ("mkdir", 0)):
        setattr(os, name, watched(getattr(os, name), which))
    vars(files)["open"] = opened


def fork(root: Path, how: Disturbance | None, rerun: bool = False, seen: Path | None = None) -> int:
    """Runs once in a process of its own; returns its status, negative for a signal.

    Args:
        seen: where to write the paths of all events.
    """
    child = os.fork()
    if child == 0:
        _in_child(root, how, rerun, seen)
    try:
        if how is not None and how.aim == "time":
            time.sleep(how.at)
            os.kill(child, how.signal)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                child = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    raise AssertionError(f"hung for {PATIENCE:.0f} s")


def _in_child(root: Path, how: Disturbance | None, rerun: bool, seen: Path | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = open(root / "stderr", "w")  # noqa: SIM115 (the process ends with it)
    count, paths = 0, list[str]()

    def event(path: str) -> None:
        nonlocal count
        paths.append(path)
        if how is not None and how.aim in path:
            count += 1
            if count == how.at:
                os.kill(os.getpid(), how.signal)

    status = 70
    try:
        if how is None or how.aim != "time":
            _watch(event)
        status = _run_with_error_lines(lambda: run(root, rerun=rerun))
        if seen is not None:
            seen.write_text("\n".join(paths))
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    sys.stderr.flush()
    os._exit(status)


def undisturbed(root: Path) -> tuple[dict[str, Any], float, list[str]]:
    """A first run in ``root``, which is empty: what it ends with, its seconds, and the paths of its events."""
    run_here = root / "first"
    run_here.mkdir()
    run(run_here)  # so that its imports need not be repeated in every fork
    shutil.rmtree(run_here)
    plain = root / "plain"
    plain.mkdir()
    start = time.monotonic()
    status = fork(plain, None, seen=plain / "seen")
    seconds = time.monotonic() - start
    assert status == 0, (plain / "stderr").read_text()
    outcome = result(plain)
    assert outcome is not None
    return outcome, seconds, (plain / "seen").read_text().split("\n")
