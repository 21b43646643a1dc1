"""The origin of a row's numbers: each result's file, command, commit, device and data. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ifsl_bench.analysis.aggregate import PARTIAL, SeedAggregate
from ifsl_bench.store.schema import Result, path_of
from ifsl_bench.utils.errors import one_line


@dataclass(frozen=True)
class Origin:
    """The origin of a row's numbers."""

    shared: dict[str, str]  # facts that are the same for all of its seeds
    seeds: list[dict[str, str]]  # the other facts of each seed; the same names for all


def origin_of(row: SeedAggregate) -> Origin:
    """Gathers all that a reader needs to find a row's results, and to make them again."""
    facts = [_facts(result) for result in row.results]
    names = list(dict.fromkeys(name for of_seed in facts for name in of_seed))
    same = [name for name in names if len({of_seed.get(name, "") for of_seed in facts}) == 1 and name != "seed"]
    shared = {name: facts[0][name] for name in same}
    return Origin(shared, [{name: of_seed.get(name, "") for name in names if name not in same} for of_seed in facts])


def _facts(result: Result) -> dict[str, str]:
    provenance, backbone = result.provenance, result.pretraining
    libraries = provenance.get("libraries") or {}
    facts: dict[str, Any] = {
        "seed": result.seed,
        "file": path_of(Path(), result).as_posix(),
        "Acc.": f"{result.summary['acc']['mean']:.2f}",
        "command": provenance.get("command"),
        "again": shlex.join(["ifsl-bench", "reproduce", result.label, result.task]),
        "commit": provenance.get("commit"),
        "version": provenance.get("version"),
        "device": provenance.get("device"),
        "Python": provenance.get("python"),
        "libraries": ", ".join(f"{k} {v}" for k, v in libraries.items()) if isinstance(libraries, Mapping) else "",
        "time": provenance.get("time"),
        "options": _pairs(result.options),
        "training": _pairs(result.train),
        "chosen": "; ".join(map(_chosen, result.tuned.values())),
        "chosen at an end of what was tried": ", ".join(result.edge),
        "episodes": f"{len(result.episodes):,}",
        "digest of the episodes": result.digest,
        "hash of the task": result.task_hash,
        "fingerprint of the data": result.fingerprint,
        "of the novel classes' data": result.novel_fingerprint,
        "data": PARTIAL if result.partial else "",
        "backbone": backbone.get("key"),
        "SHA-256 of its weights": f"{sha256[:16]}..." if (sha256 := str(backbone.get("sha256") or "")) else "",
        "code of the method": provenance.get("method_source"),
        "seconds": _pairs({k.removesuffix("_seconds"): v for k, v in result.cost.items() if k.endswith("_seconds")}),
    }
    return {name: one_line(str(value)) for name, value in facts.items() if value not in (None, "", {})}


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _chosen(tried: Mapping[str, float]) -> str:
    """The best of what was tried on validation episodes."""
    if not tried:
        return ""
    best = max(tried, key=lambda name: tried[name])
    return f"{best} ({tried[best]:.2f}% on validation episodes, the best of {len(tried)})"
