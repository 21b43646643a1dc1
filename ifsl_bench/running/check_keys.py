"""The names and texts in a result file: those that a run writes, and that can be printed. Imports no torch."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ifsl_bench.board.result_file import Result
from ifsl_bench.common.errors import is_printable

# What the parts of a result that have no type of their own may hold.
PROVENANCE = (
    "command",
    "version",
    "commit",
    "device",
    "python",
    "libraries",
    "time",
    "method_source",
    "revision",
    "distribution",
    "checkpoint",
)
FROM_ELSEWHERE = ("backbone", "weights", "features", "pretrained_on", "seen")  # of frozen backbones
PRETRAINING = ("key", "sha256", "accuracy", "precision", "device", "processes", "rounded", *FROM_ELSEWHERE)
HELD_OUT = ("base/val", "base/test")
TRAINING = ("validation", "kept_step", "solves")
SOLVES = (
    "episodes",
    "unconverged",
    "adjoint_episodes",
    "adjoint_diverged",
    "adjoint_failed",
    "adjoint_indefinite",
)
COST = ("parameters", "pretraining_seconds", "training_seconds", "evaluation_seconds", "episodes_per_second")
STATISTIC = ("mean", "max", "total", "episodes", "not_finite")

STEP = re.compile(r"[1-9][0-9]{0,17}")
PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


def unprintable(raw: Mapping[str, Any]) -> Iterator[str]:
    """Each text that no terminal may be sent, a line each; names and values alike, at any depth."""
    rest: list[tuple[str, Any]] = [("", raw)]
    while rest:
        where, value = rest.pop()
        if isinstance(value, str) and not is_printable(value):
            yield f"{where}: {reprlib.repr(value)} cannot be printed as it is"
        elif isinstance(value, dict):
            for name in value:
                if not is_printable(name):
                    yield f"{where or 'the file'}: the name {reprlib.repr(name)} cannot be printed as it is"
            rest += [(f"{where}.{name}" if where else name, part) for name, part in value.items()]
        elif isinstance(value, list):
            rest += [(where, part) for part in value if isinstance(part, (str, dict, list))]


def unknown_keys(result: Result) -> Iterator[str]:
    """Each name that no run writes, a line each, where the name of a field does not follow from the schema."""
    yield from _others("provenance", result.provenance, PROVENANCE)
    yield from _others("provenance.libraries", result.provenance.get("libraries"), PACKAGE)
    yield from _others("provenance.distribution", result.provenance.get("distribution"), ("name", "version"))
    yield from _others("pretraining", result.pretraining, PRETRAINING)
    yield from _others("pretraining.accuracy", result.pretraining.get("accuracy"), HELD_OUT)
    yield from _others("training", result.training, TRAINING)
    yield from _others("training.validation", result.training.get("validation"), STEP)
    yield from _others("training.solves", result.training.get("solves"), SOLVES)
    yield from _others("cost", result.cost, COST)
    for name, numbers in result.solver.items():
        yield from _others(f"solver.{name}", numbers, STATISTIC)


def _others(where: str, found: Any, known: Iterable[str] | re.Pattern[str]) -> Iterator[str]:
    """The names that are not known; what is not an object has none, and is told of by what looks at its value."""
    for name in found if isinstance(found, dict) else ():
        if not (known.fullmatch(name) if isinstance(known, re.Pattern) else name in known):
            yield f"{where}: {reprlib.repr(name)} is nothing that a run writes there"
