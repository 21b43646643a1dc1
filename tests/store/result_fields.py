"""Results for tests of others: fields that few tests are about, and made-up rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from ifsl_bench.analysis.aggregate import SeedAggregate
from ifsl_bench.protocols.episode_protocol import EpisodeCounts
from ifsl_bench.protocols.metrics import EpisodeHitCounts, summarise_by_metric
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.latex import make_latex_tables
from ifsl_bench.reporting.leaderboard import add_variants, make_leaderboard_tables
from ifsl_bench.reporting.table import render_tables
from ifsl_bench.store.schema import SCHEMA_VERSION, Result, round_summary

DIGITS = 5.1e-5  # JSON has four decimals
PLAIN = {
    "options": {}, "tuned": {}, "train": {}, "solver": {}, "training": {}, "cost": {}, "provenance": {},
    "novel_fingerprint": "", "partial": False, "setting": "every", "passed_over": [], "edge": [], "calibration": None,
    "transductive": False, "places": {},
}  # fmt: skip


def altered(path: Path, change: Callable[[dict], object]) -> Path:
    """Changes what a result file says."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


def listed(result: Result) -> Result:
    """The same result with its counts as lists of numbers, for a test to change."""
    columns = {name: result.episodes.read_column(name).tolist() for name in EpisodeCounts.COLUMNS}
    return msgspec.structs.replace(result, episodes=msgspec.structs.replace(result.episodes, **columns))


def counted(label: str, seed: int, counts: EpisodeHitCounts, classes: np.ndarray, **changes) -> Result:
    """A result with these counts, of task "toy" unless ``changes`` say otherwise."""
    fields = {
        "schema": SCHEMA_VERSION, "method": label, "label": label, "task": "toy", "task_hash": "h", "digest": "d",
        "fingerprint": "f", "seed": seed, "episodes": EpisodeCounts.from_hit_counts(counts, classes),
        "summary": round_summary(summarise_by_metric(counts.metrics_by_unit())),
        "pretraining": {"key": f"k{seed}", "sha256": "s"},
    }  # fmt: skip
    return Result(**{**PLAIN, **fields, **changes})


def result(label: str, seed: int, base: np.ndarray, task: str = "mini-5shot", **changes) -> Result:
    """A result with ``base`` base and ten novel hits in each episode."""
    (loaded_task,) = load_tasks(task)
    ten = np.full(len(base), 10)
    queries, novel = loaded_task.episode.base_queries, loaded_task.episode.ways * loaded_task.episode.novel_queries
    counts = EpisodeHitCounts(base * (queries > 0), base * (queries > 0), ten if queries else base,
                    ten if queries else base,
                    queries, novel, 2 * base * ten if queries else None)  # fmt: skip
    classes = np.tile(np.arange(loaded_task.episode.ways), (len(base), 1))
    of_task = {"task": task, "task_hash": loaded_task.hash, "digest": f"d{len(base)}"}
    return counted(label, seed, counts, classes, **{**of_task, **changes})


def row(label: str, means: list[float], n: int = 400, noise: int = 0, spread: float = 2.0, **changes) -> SeedAggregate:
    """A row with about these base hits, by seed; its episodes share their difficulty with other rows."""
    difficulty = np.random.default_rng(1).normal(0, 2, n)
    results = []
    for seed, mean in enumerate(means):
        own = np.random.default_rng([seed, noise]).normal(mean, spread, n)
        results.append(result(label, seed, np.clip(np.round(own + difficulty), 0, 25).astype(int), **changes))
    return SeedAggregate(label, "yours", tuple(results))


def accuracies(board_row: SeedAggregate, seeds: int | None = None) -> np.ndarray:
    """Percent of right queries, [seeds, n], counted anew."""
    hits = [
        r.episodes.read_column("base_joint") + r.episodes.read_column("novel_joint") for r in board_row.results[:seeds]
    ]
    return np.array(hits) * 2.0


def ranks(places) -> dict[str, str]:
    return {place.row.label: str(place.rank_interval) for place in places}


def document(text: str, style: str = "json") -> list[dict]:
    """Parses JSON or CSV."""
    return json.loads(text) if style == "json" else list(csv.DictReader(io.StringIO(text)))


def leaderboard(boards, results, style="text", full=False, labels=()) -> str:
    """What ``ifsl-bench leaderboard`` prints of these boards in a pipe; variants are looked for in ``results``."""
    if style == "latex":
        return make_latex_tables(add_variants(boards, results, labels), full, rank=True)
    tables, closing = make_leaderboard_tables(boards, results, full, labels)
    return render_tables(tables, style, closing)
