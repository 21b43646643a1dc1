"""Result files: whatever is in one, ``check`` says it in lines, and every table that it lies among is printed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from ifsl_bench.analysis.aggregate import FILE, SeedAggregate
from ifsl_bench.analysis.comparison import compare
from ifsl_bench.analysis.task_results import TaskResults, load_board
from ifsl_bench.backbones.pretrained import pretraining_key
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.plugin.find_method import find_method
from ifsl_bench.protocols.metrics import Counts
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_files import parse as parse_tasks
from ifsl_bench.reporting.detail_tables import comparison_table, facts_of, row_table
from ifsl_bench.reporting.leaderboard import task_table
from ifsl_bench.reporting.notes import standing
from ifsl_bench.reporting.render import FORMATS as STYLES
from ifsl_bench.reporting.render import render
from ifsl_bench.store.schema import Result, file_name, keep_old, parse, path_of, read, write
from ifsl_bench.utils.errors import UserError, is_printable
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.serialization import pack_array, unpack_array
from tests.fuzz.formats import Format
from tests.fuzz.mutation import MOST, change_json, spoiled, spoiled_text
from tests.store.result_fields import counted, leaderboard

EPISODES, WAYS, QUERIES, BASE = 12, 3, 6, 5
TASKS = f"""
[dataset]
name = "fuzzed"
[pretraining]
backbone = "none"
steps = 4
[pretraining.schedule]
rate = 0.05
[evaluation]
episodes = {EPISODES}
validation_episodes = 8
[episode]
ways = {WAYS}
novel_queries = {QUERIES // WAYS}
base_queries = {BASE}
[tasks.fuzzed-1shot]
shots = 1
"""
SOURCE = "0123456789abcdef"
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 1e308, -1e308, 5e-324, 10**18, 2**31, 2**53 + 1, 2**63, -(2**63),
    2**64, 10**30, 10**400, -(10**400), float("nan"), float("inf"), -float("inf"), "", "x", " ", "null", "1", "paper",
    "every", "tuned-2", "tuned-12", "tuned-10000", "tuned-999999", "tuned-1", "imprint", "lwof", "zzz", "attractor",
    "../../x", "/etc/passwd", "a|b", "=1+1", "<script>", "\\input{x}", "%s{}", "\x1b[2J", "\u202eabc", "\ud800",
    "\0", "a\nb", "\u2028", "x" * 5000, "é" * 300, "2026-01-31T12:00:00+00:00", "9999-12-31T23:59:59+00:00", [], [1],
    [[]], [None], ["x"], [1e308], {}, {"a": 1}, {"": ""}, {"\x1b": "\x1b"}, {"\ud800": 1.0}, {"mean": 1.0},
    {"steps": 10**9},
)  # fmt: skip
NAMES = (
    "", "x", "mean", "steps", "rate", "learner", "gradient", "hidden", "normalise", "acc", "harmonic", "kept_step",
    "validation", "solves", "adjoint_indefinite", "adjoint_episodes", "name", "version", "time", "note", "classes",
    "\ud800", "revision", "setting", "edge", "weight_decay", "train.rate", "a, b", "\x1b[2J", "pairs", "\u202e",
    "9" * 5000, "x" * 3000,
)  # fmt: skip
WORDS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "9" * 400, "1" + "0" * 300, "-0", "0.1e", "[" * 400,
    "[" * 5000, '{"a":' * 400, "]", "}", "{", "[", '"', "\\", "\\u001b", "\\ud800", "\\u0000", "\x1b", "\0", "\ufeff",
    "null", "true", "[]", "{}", '""', ",", ":", '"schema"', '"episodes"', '"x":1,', "\udc80", "é", "\u2028",
)  # fmt: skip


@cache
def task() -> Task:
    (definition,) = parse_tasks(TASKS, "fuzzed.toml")
    return definition


def whole(method: str, seed: int, **fields: Any) -> dict[str, Any]:
    """A result as a run writes it, but for the label and backbone of a method that is known."""
    random = np.random.default_rng(seed)
    alone = random.integers(0, [[BASE + 1], [QUERIES + 1]], (2, EPISODES))
    base, novel = random.integers(0, alone + 1)
    counts = Counts(base, alone[0], novel, alone[1], BASE, QUERIES, 2 * alone.prod(0), base, novel)
    classes = random.permuted(np.tile(np.arange(7), (EPISODES, 1)), axis=1)[:, :WAYS]
    key = pretraining_key(task(), "f" * 64, "cosine", seed)
    result = counted(
        method, seed, counts, classes, task=task().name, task_hash=task().hash, digest="d" * 64, fingerprint="f" * 64,
        pretraining={"key": key, "sha256": "a" * 64, "accuracy": {"base/val": 50.0}, "device": "cpu"},
        cost={"parameters": 0, "evaluation_seconds": 0.5},
        provenance={
            "command": "ifsl-bench run", "version": "0.1", "commit": "", "device": "cpu", "python": "3.11.7",
            "libraries": {"torch": "2.0"}, "time": f"2026-01-31T12:00:0{seed % 10}+00:00", "method_source": SOURCE,
            "checkpoint": "", "distribution": {"name": "theirs", "version": "1.0"},
        },
        calibration={
            "bias": 0.0, "validation_episodes": len(task().evaluation.halves[0]), "applied": False,
            "curve": {"bias": [0.0], "base_joint": [int(base.sum())], "novel_joint": [int(novel.sum())]},
        },
    )  # fmt: skip
    return msgspec.to_builtins(result) | fields


@cache
def good() -> Sequence[Result]:
    """The results that every case lies among."""
    return [msgspec.convert(whole(method, seed), Result) for method in ("good", "better") for seed in (0, 1, 2)]


@cache
def results() -> Sequence[bytes]:
    statistic = {"mean": 1.5, "max": 3.0, "total": 18.0, "episodes": 12, "not_finite": 0}
    solves = {"episodes": 80, "unconverged": 1, "adjoint_episodes": 80, "adjoint_indefinite": 3}
    trained = {
        "training": {"validation": {"10": 40.5, "20": 41.0}, "kept_step": 20, "solves": solves},
        "solver": {"solver_steps": statistic, "solver_unconverged": statistic},
    }
    lwof = whole("lwof", 0, options={"normalise": True}, label="lwof.normalise=true", **trained, setting="paper")
    lwof["provenance"]["distribution"] = find_method("lwof")[0].distribution
    values = [
        whole("zzz", 1),
        whole("zzz", 3, **trained, setting="paper", options={"gamma": 0.5}, label="zzz.gamma=0.5"),
        whole("zzz", 2, **trained, setting="paper", train={"rate": 0.1}, label="zzz.train.rate=0.1"),
        whole("yyy", 0, options={"a": 1}, tuned={"a": {"a=1": 50.0, "a=2": 40.0}}, setting="paper", edge=["a"]),
        lwof,
    ]
    return [json.dumps(value, indent=1).encode() for value in [*values, as_packed(values[0]), as_packed(lwof)]]


def as_packed(value: dict[str, Any]) -> dict[str, Any]:
    """The same result with its counts as those of many episodes are."""
    episodes = {k: pack_array(np.array(v)) if isinstance(v, list) and v else v for k, v in value["episodes"].items()}
    return value | {"episodes": episodes}


# -- changes


def _repack(value: dict[str, Any], random: Random) -> None:
    """A packed column with other numbers, another kind or count, or far more bytes than it says."""
    episodes = value["episodes"]
    name = random.choice([key for key, column in episodes.items() if isinstance(column, str)])
    kind, count, data = episodes[name].split(" ")
    if (way := random.random()) < 0.3:
        numbers = unpack_array(episodes[name], 10**6)
        numbers[random.randrange(len(numbers))] = random.choice((0, 1, 5, 255, 256, 2**31, 2**32 - 1))
        episodes[name] = pack_array(numbers[: random.choice((0, 1, len(numbers), len(numbers)))])
    elif way < 0.5:
        kind = random.choice(("u1", "u2", "u3", "u4", "u8", "i8", "f4", "f8", "U1", "u1 u1"))
        episodes[name] = f"{kind} {count} {data}"
    elif way < 0.7:
        count = random.choice(("0", "1", "-1", "2", "999999", "1000001", "9" * 10, "9" * 40, "1e3", ""))
        episodes[name] = f"{kind} {count} {data}"
    else:
        raw = random.choice((b"", b"\0", b"\0" * 12, b"\xff" * 12, b"\0" * 2**27, random.randbytes(12)))
        stream = zlib.compress(raw) + random.choice((b"", b"", b"x"))
        episodes[name] = f"{kind} {count} {base64.b64encode(stream[: random.choice((None, -1, -4))]).decode()}"


def spoiled_result(random: Random, content: bytes) -> bytes:
    """A result with parts changed; now and then its words or its bytes are."""
    way = random.random()
    if way < 0.15:
        return spoiled(random, content)
    if way < 0.35:
        return spoiled_text(random, content, WORDS)
    value = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        with contextlib.suppress(LookupError, TypeError, AttributeError, ArithmeticError, ValueError):  # changed before
            if random.random() < 0.6 and isinstance(value["episodes"]["base_joint"], str):
                _repack(value, random)
            else:
                change_json(value, random, STRANGE, NAMES)
    text = json.dumps(value, ensure_ascii=random.random() < 0.9)
    if random.random() < 0.05 and (names := re.findall(r'"[a-z_]+": ', text)):
        text = text.replace("{", "{" + random.choice(names) + "1, ", random.choice((1, 3)))
    return text.encode("utf-8", "surrogatepass")[:MOST]


# -- reading


def _placed(path: Path, root: Path) -> Path:
    """Moves a file to where a result that says this would lie, if it says it."""
    try:
        place = path_of(root, parse(path))
        if place.parent != root / task().name or len(os.fsencode(place.name)) > 255:
            raise ValueError
    except (UserError, ValueError):
        place = root / task().name / file_name("zzz", 1)
    place.unlink(missing_ok=True)
    return path.rename(place)


def _shown(board: TaskResults, root: Path, ours: Result | None, style: str) -> None:
    """Everything that prints a board, and the result among it."""
    pages = [render([task_table(board, full=True)], style), leaderboard([board], root, style, full=True)]
    if ours is not None:
        pages.append(render([row_table(SeedAggregate(ours.label, FILE, (ours,)))], style))
    for page in pages:
        assert all(map(is_printable, page.split("\n"))), style
        page.encode()
    for row in (*board.rows, *board.others):
        lines = standing(board, row.label) if row in board.rows else []
        assert all(map(is_printable, lines))
    first = board.rows[0]
    for row in (*board.rows, *board.others):
        with contextlib.suppress(UserError):
            render([comparison_table(compare(first, row, board.compared))], "text")


def read_result(path: Path) -> None:
    """Puts a file among good results, and does with it what every command does that reads results.

    Raises:
        UserError: it does not pass ``check``; or the tables refuse it, though it does.
    """
    root, home = path.parent / "results", Paths(path.parent / "home", path.parent / "results")
    folder = root / task().name
    for entry in good():
        if not path_of(root, entry).exists():  # they are left for the next case
            write(root, entry)
    style = list(STYLES)[path.stat().st_size % len(STYLES)]
    place = _placed(path, root)
    try:
        report = check_file(place, {task().name: task()}, home)
        lines = [*report.failures, *report.unverified]
        assert all(map(is_printable, lines))
        assert sum(map(len, lines)) < 40_000
        result = None
        with contextlib.suppress(UserError):
            result = read(place)
            assert all(map(is_printable, facts_of([result]).split("\n")))
        assert result is not None or report.failures, "check accepts what no table reads"
        board = load_board(task(), root)
        labels = {row.label for row in (*board.rows, *board.others)}
        assert labels >= {"good", "better"} or result is not None
        _shown(board, root, result, style)
        if not report.failures:
            assert report.line
            assert result is not None
            mine = SeedAggregate("mine", "file", (result,))
            render([comparison_table(compare(mine, mine))], "text")
        keep_old(root, msgspec.structs.replace(good()[0], label="zzz", seed=1))
        if report.failures:
            raise UserError(report.failures[0])
    finally:
        for file in folder.iterdir():
            if file.name not in {path_of(root, entry).name for entry in good()} or file == place:
                file.unlink()


FORMATS = [Format("result", results, read_result, spoiled_result, 5)]
