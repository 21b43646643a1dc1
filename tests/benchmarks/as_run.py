"""The rates a user gets: whole commands on the glyph tasks, with trained parameters and real features.

    python tests/benchmarks/as_run.py HOME [--markdown] [--steps 8000] [--only evaluate]

Every row is an `ifsl-bench run` in a process of its own, with the settings that the command makes. The figure is read
from the result file that it wrote: episodes evaluated a second, or steps of meta-training a second with validations.
Data, backbone, features, compiled solvers and the models that are evaluated are made in HOME first where it lacks them.
"whole command" is the wall time of all of it, with the start of Python, the contract's checks and the table;
"compiling" is the same on a home without compiled solvers, for one row of each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

EVALUATED = ("imprint", "lr", "lr+s", "lr+a", "mlp", "mlp+s", "mlp+a")
COMPILED = (("lr+a", "glyphs-5shot"), ("mlp+a", "glyphs-5shot"))
TRAINED = ("rbp", "implicit", "t-bptt")


def run(home: Path, results: Path, method: str, task: str, *more: str) -> dict[str, float]:
    """The costs that `ifsl-bench run` stored, and the seconds that it took."""
    command = [sys.executable, "-m", "ifsl_bench", "run", "--method", method, "--task", task, *more, "--rerun", "-q"]
    shutil.rmtree(results, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run([*command, "--home", str(home), "--results", str(results)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    (file,) = results.rglob("*.json")
    cost: dict[str, float] = json.loads(file.read_text())["cost"]
    return {**cost, "whole": seconds}


def evaluations(home: Path, results: Path) -> Iterator[list[object]]:
    for task in ("glyphs-5shot", "glyphs-1shot"):
        for method in EVALUATED:
            options = ("--set", "weight_decay=0.01") if method in ("lr", "mlp") else ()
            run(home, results, method, task, *options)  # trained and compiled, where it was not
            cost = run(home, results, method, task, *options)
            rate, whole = f"{cost['episodes_per_second']:,.0f} episodes/s", f"{cost['whole']:.1f} s"
            again = f"{compiling(home, results, method, task):.1f} s" if (method, task) in COMPILED else None
            yield [f"{method}, {task}", rate, whole, again]


def compiling(home: Path, results: Path, method: str, task: str) -> float:
    """Seconds of a command that has to compile its solvers."""
    code, aside = home / "compiled", home / "compiled-aside"
    code.rename(aside)
    try:
        return run(home, results, method, task)["whole"]
    finally:
        shutil.rmtree(code, ignore_errors=True)
        aside.rename(code)


def trainings(home: Path, results: Path, steps: int) -> Iterator[list[object]]:
    for method in ("lr+a", "mlp+a"):
        for gradient in TRAINED:
            options = ("--set", f"gradient={gradient}")
            run(home, results, method, "glyphs-5shot", *options, "--train", "steps=20")  # compiled
            whole = (*options, "--train", f"steps={steps}", "--retrain")
            seconds = run(home, results, method, "glyphs-5shot", *whole)["training_seconds"]
            yield [f"{method}, {gradient}, {steps:,} steps", f"{steps / seconds:,.0f} steps/s", f"{seconds:.1f} s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--only", choices=("evaluate", "train"))
    arguments = parser.parse_args()
    style = "github" if arguments.markdown else "simple"
    print(f"{os.cpu_count()} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}\n")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        if arguments.only != "train":
            rows = evaluations(arguments.home, results)
            heads = ["evaluating 2,000 episodes", "rate", "whole command", "compiling"]
            print(tabulate(rows, heads, style), flush=True)
        if arguments.only != "evaluate":
            rows = trainings(arguments.home, results, arguments.steps)
            heads = ["meta-training on glyphs-5shot, 1 episode a step", "rate", "training time"]
            print(tabulate(rows, heads, style), flush=True)


if __name__ == "__main__":
    main()
