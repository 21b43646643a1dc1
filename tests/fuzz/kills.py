"""Kills and interrupts at random moments of a small run, from its data to its result: the counts stay the same.

A case is a recipe: a few runs in a home that is empty at first, each disturbed by SIGKILL, SIGTERM or SIGINT: after a
time, before or after one of the calls that write, or before or after one of those that write the result. Then one runs
to its end.
"""

from __future__ import annotations

import atexit
import json
import shutil
import signal
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from ifsl_bench.utils.files import PARTIAL, REMOVED
from tests.fuzz.harness import Format
from tests.small_run import Disturbance, fork, result, undisturbed

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
AIMS = {"time": "time", "write": "", "result": "/results/"}  # and what the path of a written file holds


class Undisturbed:
    """A run that nothing disturbed, in ``root``: what all must end with, how long it took and how often it wrote."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        self.root = root
        self.wanted, self.seconds, events = undisturbed(root)
        self.events = {"write": len(events), "result": sum(AIMS["result"] in path for path in events)}
        assert self.events["result"] >= 4, "a result is opened, flushed and renamed"

    def disturbance(self, name: str, aim: str, part: float) -> Disturbance:
        """A signal after a part of the time, or of the events aimed at."""
        at = part * self.seconds if aim == "time" else 1 + int(part * self.events[aim])
        return Disturbance(signal.Signals[name], AIMS[aim], at)


@cache
def plain() -> Undisturbed:
    """One run, kept until this process ends."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-kills-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Undisturbed(root)


def one_round(whole: Undisturbed, root: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Raises AssertionError where something ends otherwise than it may.

    Args:
        root: an empty folder.
        runs: of each "signal", "aim", "part" (0 to 1) and "rerun".
    """
    for run in runs:
        how = whole.disturbance(run["signal"], run["aim"], run["part"])
        status = fork(root, how, rerun=run["rerun"])
        allowed = {0, -how.signal, 130} if how.signal == signal.SIGINT else {0, -how.signal}
        assert status in allowed, f"{how}: status {status}: {(root / 'stderr').read_text()}"
        assert result(root) in (None, whole.wanted), f"{how}: a result with other counts"
    status = fork(root, None)
    assert status == 0, f"after the signals: {(root / 'stderr').read_text()}"
    assert result(root) == whole.wanted, "other counts"
    unfinished = [path for path in root.rglob("*") if path.is_dir() and path.name.startswith((PARTIAL, REMOVED))]
    assert not [*unfinished, *root.rglob("*.corrupt-*")]


# -- the format


def planned(chance: Random, content: bytes) -> bytes:
    """A recipe of one to three disturbed runs."""
    runs = [
        {"signal": chance.choice(SIGNALS).name, "aim": chance.choice(list(AIMS)), "part": chance.random(),
         "rerun": chance.random() < 0.2}
        for _ in range(chance.choice((1, 2, 3)))
    ]  # fmt: skip
    return json.dumps(runs).encode()


def read(path: Path) -> None:
    root = path.parent / "run"
    root.mkdir()
    try:
        one_round(plain(), root, json.loads(path.read_bytes()))
    finally:
        shutil.rmtree(root, ignore_errors=True)


FORMAT = Format("kills", lambda: [b"[]"], read, planned, share=1, prepare=plain, seconds=240)
