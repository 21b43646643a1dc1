"""One campaign four ways: by one process, by two, by Dask's LocalCluster, by Slurm. The counts must be the same.

    python tests/benchmarks/campaign_times.py SCRATCH [--markdown] [--steps 500] [--only one,two] [--stages 200]

Five rows on two glyph tasks, one seed, pretraining and meta-training of so many steps. Each way has a home of its own
below SCRATCH, with the glyphs and the compiled solvers in it and nothing else; they are made first where SCRATCH lacks
them. "wall" is the whole command; "stages" is how many it ran and the sum of their seconds, as their logs have it.

"a stage more" is what handing one out costs: so many stages that do next to nothing are handed to the same workers
after they have started, and the seconds between the first and the last to end are divided by their number. What the
stage itself takes in one process is in the first row.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from tabulate import tabulate

METHODS = "protonet,imprint,lwof,lr+s,lr+a"
TASKS = "glyphs-1shot,glyphs-5shot"
WAYS = {
    "one": ("--jobs 1", "", ""),
    "two": ("--jobs 2", "", ""),
    "local": ("LocalCluster, 2 workers", "LocalCluster", "n_workers = 2"),
    "slurm": ("Slurm, 2 jobs", "SLURMCluster", 'n_workers = 2\ncores = 1\nmemory = "4GB"\ninterface = "lo"'),
}


def run(home: Path, *arguments: str) -> float:
    """The seconds that `ifsl-bench run` took."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "ifsl_bench", "run", "--home", str(home), *arguments, "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def prepared(scratch: Path) -> Path:
    """A home with the data and the compiled solvers."""
    home = scratch / "prepared"
    if not (home / "ready").exists():
        whole = scratch / "whole"
        run(whole, "--method", METHODS, "--task", TASKS, "--train", "steps=2", "--pretraining-steps", "2")
        for name in ("data", "compiled"):
            shutil.copytree(whole / name, home / name, dirs_exist_ok=True)
        (home / "ready").touch()
    return home


def cluster_file(way: str, scratch: Path) -> Path | None:
    _, kind, arguments = WAYS[way]
    if not kind:
        return None
    path = scratch / f"{way}.toml"
    path.write_text(f'class = "{kind}"\n[arguments]\n{arguments}\n')
    return path


def how(way: str, scratch: Path) -> list[str]:
    file = cluster_file(way, scratch)
    return ["--cluster", str(file)] if file else ["--jobs", "1" if way == "one" else "2"]


def counts(home: Path) -> dict[str, Any]:
    files = sorted((home / "results").rglob("*.json"))
    return {file.stem + file.parent.name: json.loads(file.read_text())["episodes"] for file in files}


def stages(home: Path) -> list[float]:
    """Seconds of the stages that ran, from their logs."""
    found = []
    for log in (home / "logs").rglob("*.log"):
        events = [json.loads(line) for line in log.read_text().splitlines() if line]
        found += [event["seconds"] for event in events if event["kind"] == "done"]
    return found


def a_stage_more(way: str, scratch: Path, home: Path, count: int) -> float:
    """Seconds between the ends of two stages that do next to nothing."""
    from ifsl_bench.campaigns.api import workspace
    from ifsl_bench.common import processor
    from ifsl_bench.jobs.job import make_jobs
    from ifsl_bench.jobs.preparation import CheckEpisodes
    from ifsl_bench.jobs.request import Request
    from ifsl_bench.protocol.task_files import find
    from ifsl_bench.scheduler.dask_workers import cluster_workers
    from ifsl_bench.scheduler.executors import Executor, Here
    from ifsl_bench.scheduler.graph import Graph, Node, Wants
    from ifsl_bench.scheduler.local_workers import LocalWorkers
    from ifsl_bench.scheduler.loop import Watch, schedule
    from ifsl_bench.scheduler.work import Outcome, Setting

    work = workspace(home, device="cpu")
    jobs = make_jobs(Request(["imprint"], TASKS.split(",")[:1]))
    stage = CheckEpisodes(find(TASKS.split(",")[0])[0], "val")
    nodes = {f"nothing/{i}": Node(f"nothing/{i}", stage, (), Wants(), (0,)) for i in range(count)}
    ends: list[float] = []

    class Ends(Watch):
        def ended(self, node: Node, outcome: Outcome, again: bool) -> None:
            assert outcome.how == "done", outcome
            ends.append(time.perf_counter())

    workers: Executor
    if file := cluster_file(way, scratch):
        workers, _ = cluster_workers(str(file), jobs, work, "cpu")
    elif way == "two":
        workers = LocalWorkers(Setting(work.home, "cpu", processor.cores(), uuid.uuid4().hex), 2)
    else:
        workers = Here(work)
    try:
        schedule(Graph(tuple(jobs), nodes), workers, work.home, Ends(work.reporter))
    finally:
        workers.close()
    later = ends[len(ends) // 4 :]  # both workers have opened what there is to open
    return (later[-1] - later[0]) / (len(later) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--stages", type=int, default=200)
    given = parser.parse_args()
    source = prepared(given.scratch)
    rows, found = [], {}
    for way in given.only.split(","):
        home = given.scratch / way
        with suppress(FileNotFoundError):
            shutil.rmtree(home)
        shutil.copytree(source, home)
        steps = ["--train", f"steps={given.steps}", "--pretraining-steps", str(given.steps)]
        wall = run(home, "--method", METHODS, "--task", TASKS, *steps, *how(way, given.scratch))
        found[way], ran = counts(home), stages(home)
        more = a_stage_more(way, given.scratch, home, given.stages)
        rows.append([WAYS[way][0], f"{wall:.1f} s", f"{len(ran)}, {sum(ran):.1f} s", f"{1000 * more:.1f} ms"])
        print(rows[-1], file=sys.stderr, flush=True)
    headers = ["by", "wall", "stages, and their sum", "a stage more"]
    print(tabulate(rows, headers, tablefmt="pipe" if given.markdown else "simple"))
    first, *others = found.values()
    same = all(other == first for other in others)
    print(f"\n{len(first)} results; counts are {'the same' if same else 'NOT THE SAME'} in all {len(found)}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
