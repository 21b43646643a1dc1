"""Kills and interrupts at random moments of a small run, from its data to its result: the counts stay the same.

``python -m tests.fuzz.kills --rounds 200 --seed 0``. A round starts with an empty home. A few runs are disturbed: by
SIGKILL, SIGTERM or SIGINT after a random time; before or after a random one of the calls that write; or before or after
one of those that write the result. Then one runs to its end. The runs are forks of this process, which has imported
everything already.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ifsl_bench.cli.main import _guarded
from ifsl_bench.common import files
from ifsl_bench.common.files import PARTIAL, Home
from ifsl_bench.running import api
from tests.fuzz.cache import TASKS, Told, make_data

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PATIENCE = 120.0  # seconds after which a run counts as hanging


@dataclass(frozen=True)
class Disturbance:
    """A signal, and when it comes.

    Attributes:
        aim: "time", "write" or "result".
        at: seconds, or the number of the event among those aimed at.
    """

    signal: signal.Signals
    aim: str
    at: float

    def __str__(self) -> str:
        return f"{self.signal.name} at {self.aim} {self.at:.3g}"


def work_once(root: Path, rerun: bool) -> None:
    """From nothing, or from what there is, to the result."""
    home = Home.locate(root / "home")
    if not (home.data / "tiny-images" / "manifest.json").exists():
        make_data(home)
    work = api.workspace(home.cache, device="cpu", reporter=Told())
    api.run("lwof", f"{root / 'tiny.toml'}:tiny-images-1shot", train={"steps": 8}, tune=2, rerun=rerun, work=work)


def watch(event: Callable[[str], None]) -> None:
    """Calls ``event`` with a path before and after each call of this process that makes, writes or renames a file."""

    def watched(call: Callable[..., Any], which: int) -> Callable[..., Any]:
        def instead(*arguments: Any, **more: Any) -> Any:
            path = arguments[which]
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            event(str(path))
            value = call(*arguments, **more)
            event(str(path))
            return value

        return instead

    for name, which in (("replace", 1), ("fsync", 0), ("unlink", 0), ("mkdir", 0)):
        setattr(os, name, watched(getattr(os, name), which))
    vars(files)["open"] = watched(builtins.open, 0)


def fork(root: Path, how: Disturbance | None, rerun: bool = False, seen: Path | None = None) -> int:
    """Runs once in a process of its own; returns its status, negative for a signal.

    Args:
        seen: where to write the paths of all events.
    """
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr = open(root / "stderr", "w")  # noqa: SIM115 (the process ends with it)
        count, paths = 0, list[str]()

        def event(path: str) -> None:
            nonlocal count
            paths.append(path)
            if how is not None and (how.aim == "write" or (how.aim == "result" and f"{os.sep}results{os.sep}" in path)):
                count += 1
                if count == how.at:
                    os.kill(os.getpid(), how.signal)

        if how is None or how.aim != "time":
            watch(event)
        status = 70
        try:
            status = _guarded(lambda: work_once(root, rerun))
            if seen is not None:
                seen.write_text("\n".join(paths))
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        sys.stderr.flush()
        os._exit(status)
    if how is not None and how.aim == "time":
        time.sleep(how.at)
        os.kill(child, how.signal)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"hung for {PATIENCE:.0f} s")


def counts(root: Path) -> dict[str, Any] | None:
    """What the result says; None where there is none yet. Raises where it is half-written."""
    found = list((root / "home" / "results").glob("*/*.json"))
    if not found:
        return None
    (path,) = found
    value = json.loads(path.read_text())
    kept = {key: value[key] for key in ("episodes", "calibration", "summary", "training", "tuned")}
    return kept | {"sha256": value["pretraining"]["sha256"]}


class Harness:
    """An undisturbed run in ``root / "plain"``, and rounds of disturbed ones that must end with the same."""

    def __init__(self, root: Path) -> None:
        self.root, self.aims = root, Counter[str]()
        work_once(self._home("first"), rerun=False)  # here, so that its imports need not be repeated in every fork
        plain = self._home("plain")
        start = time.monotonic()
        status = fork(plain, None, seen=plain / "seen")
        assert status == 0, (plain / "stderr").read_text()
        self.seconds, events = time.monotonic() - start, (plain / "seen").read_text().split("\n")
        self.events = {"write": len(events), "result": sum(f"{os.sep}results{os.sep}" in path for path in events)}
        wanted = counts(plain)
        assert wanted is not None
        assert self.events["result"] >= 4, "a result is opened, flushed and renamed"
        self.wanted = wanted

    def _home(self, name: str) -> Path:
        root = self.root / name
        root.mkdir()
        (root / "tiny.toml").write_text(TASKS)
        return root

    def plan(self, chance: random.Random) -> list[Disturbance]:
        """What disturbs the runs of a round."""
        found = []
        for _ in range(chance.choice((1, 2, 3))):
            aim = chance.choice(("time", "write", "result"))
            at = chance.uniform(0, self.seconds) if aim == "time" else chance.randint(1, self.events[aim])
            found.append(Disturbance(chance.choice(SIGNALS), aim, at))
        return found

    def round(self, number: int, seed: int) -> None:
        """Raises AssertionError where a round ends otherwise than the undisturbed run."""
        chance = random.Random(f"{seed}/{number}")
        root, plan = self._home(f"round-{number}"), self.plan(chance)
        said = f"round {number} of seed {seed}: {', '.join(map(str, plan))}"
        for how in plan:
            status = fork(root, how, rerun=chance.random() < 0.2)
            allowed = {0, -how.signal, 130} if how.signal == signal.SIGINT else {0, -how.signal}
            assert status in allowed, f"{said}: status {status}: {(root / 'stderr').read_text()}"
            self.aims[f"{how.signal.name} at a {how.aim}: {'too late' if status == 0 else 'hit'}"] += 1
            assert counts(root) in (None, self.wanted), f"{said}: a result with other counts"
        status = fork(root, None)
        assert status == 0, f"{said}: then {(root / 'stderr').read_text()}"
        assert counts(root) == self.wanted, f"{said}: other counts"
        left = [path for path in root.rglob("*") if path.name.startswith(PARTIAL) or ".corrupt-" in path.name]
        assert not [path for path in left if path.is_dir() or ".corrupt-" in path.name], f"{said}: {left} are left"
        shutil.rmtree(root)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        harness = Harness(Path(folder))
        for number in range(given.first, given.first + given.rounds):
            try:
                harness.round(number, given.seed)
            except AssertionError as error:
                failed += 1
                print(error, flush=True)
    for what, times in sorted(harness.aims.items()):
        print(f"{what}: {times}")
    print(f"{given.rounds} rounds, {sum(harness.aims.values())} signals, {failed} rounds ended wrongly")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
