"""Seconds that compiling the solvers takes, by function, in one command on a home without compiled solvers.

    python tests/benchmarks/compiling.py --method paper --task glyphs-1shot,glyphs-5shot --train steps=20 --home HOME

All arguments are those of ``ifsl-bench run``. HOME should have the data, backbones and features; its folder `compiled`
has to be removed first. Nothing is loaded, so what is printed is all that the command ever compiles.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from typing import Any

from numba.core import event

from ifsl_bench.cli.main import cli


class Clock(event.Listener):
    """Adds up by function, of compilations that no other one is waiting for."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.begun: list[float] = []

    def on_start(self, event: Any) -> None:
        self.begun.append(time.perf_counter())

    def on_end(self, event: Any) -> None:
        seconds, function = time.perf_counter() - self.begun.pop(), event.data["dispatcher"].py_func
        if not self.begun and function.__module__.startswith("ifsl_bench."):
            self.seconds[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"] += seconds


def main() -> None:
    clock = Clock()
    event.register("numba:compile", clock)
    with tempfile.TemporaryDirectory() as results:
        cli(["run", *sys.argv[1:], "--results", results, "--retrain", "-q"], standalone_mode=False)
    for name, seconds in clock.seconds.most_common():
        print(f"{seconds:6.2f} s  {name}")
    print(f"{clock.seconds.total():6.2f} s  in all")


if __name__ == "__main__":
    main()
