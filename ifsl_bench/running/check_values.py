"""What the values of a result file look like when a run has written them, whatever its task. Imports no torch."""

from __future__ import annotations

import datetime
import re
import reprlib
from collections.abc import Iterator
from typing import Any

from ifsl_bench._version import __version__
from ifsl_bench.board.result_file import Result
from ifsl_bench.protocol.contamination import SEEN
from ifsl_bench.protocol.limits import MOST_TRIALS

TEXTS = ("command", "version", "time", "device", "python", "method_source")
PROVENANCE = (*TEXTS, "libraries")
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"  # tables take the newest result by the order of these texts
AHEAD = datetime.timedelta(days=1)  # of a clock that is wrong, or set to local time


class Unverified(Exception):
    """Something that cannot be looked at here; says what is missing."""


def odd_values(result: Result) -> Iterator[str]:
    """What no run has written, a line each."""
    if result.seed < 0:
        yield f"seed: {result.seed} is negative"
    for name, digits in (("task_hash", 16), ("digest", 64), ("fingerprint", 64)):
        yield from _hex(name, getattr(result, name), digits)
    for option, tried in result.tuned.items():
        yield from _percent(f"tuned.{option}", tried)
    if not re.fullmatch(r"paper|every|tuned-([2-9]|[1-9]\d{1,5})", result.setting):
        yield f"setting: {result.setting!r}, where 'paper', 'every' or 'tuned-N' from 2 was expected"
    if result.trials > MOST_TRIALS:
        yield f"setting: {result.setting!r}, a run tries at most {MOST_TRIALS:,}"
    values = {value for tried in result.tuned.values() for value in tried}
    if strange := [*(set(result.passed_over) - values), *(set(result.edge) - result.chosen)]:
        yield f"passed_over, edge: {strange[0]!r} is nothing that was tuned"
    if result.rounds and (sum(result.rounds) != sum(map(len, result.tuned.values())) or min(result.rounds) < 1):
        yield f"rounds: {result.rounds}, and {sum(map(len, result.tuned.values()))} settings were tried"
    for name, cost in result.cost.items():
        if cost < 0:
            yield f"cost.{name}: {cost:g} is negative"
    yield from _pretraining(result.pretraining)
    yield from _provenance(result.provenance)


def _hex(name: str, value: Any, digits: int) -> Iterator[str]:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        yield f"{name}: {reprlib.repr(value)} is not {digits} hexadecimal digits"


def _percent(name: str, values: Any) -> Iterator[str]:
    """Whether these are accuracies by name."""
    if not isinstance(values, dict):
        yield f"{name}: {reprlib.repr(values)}, where accuracies by name were expected"
        return
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
            yield f"{name}: {key} is {reprlib.repr(value)}, no accuracy in percent"


def _pretraining(found: dict[str, Any]) -> Iterator[str]:
    if missing := [key for key in ("key", "sha256", "accuracy") if not found.get(key)]:
        yield f"pretraining: {', '.join(missing)} missing"
    if found.get("sha256"):
        yield from _hex("pretraining.sha256", found["sha256"], 64)
    if found.get("accuracy"):
        yield from _percent("pretraining.accuracy", found["accuracy"])
    if found.get("rounded", "float16") != "float16":
        yield f"pretraining.rounded: {reprlib.repr(found['rounded'])}, where float16 was expected"
    if found.get("weights"):
        yield from _hex("pretraining.weights", found["weights"], 64)
    if "seen" in found and found["seen"] not in SEEN:
        yield f"pretraining.seen: {reprlib.repr(found['seen'])}, where one of {', '.join(SEEN)} was expected"
    corpora = found.get("pretrained_on", [])
    if not isinstance(corpora, list) or not all(isinstance(name, str) for name in corpora):
        yield f"pretraining.pretrained_on: {reprlib.repr(corpora)}, where names were expected"
    counts = found.get("processes", [1])
    if not isinstance(counts, list) or not counts or not all(type(n) is int and 0 < n < 1 << 31 for n in counts):
        yield f"pretraining.processes: {reprlib.repr(counts)}, where numbers of processes were expected"


def _provenance(found: dict[str, Any]) -> Iterator[str]:
    missing = [key for key in PROVENANCE if not found.get(key)]
    missing += [key for key in ("commit", "distribution", "checkpoint") if key not in found]
    if missing:
        yield f"provenance: {', '.join(missing)} missing; a result comes from 'ifsl-bench run', not from a hand"
    for key in ("checkpoint", *TEXTS):
        if not isinstance(found.get(key, ""), str):
            yield f"provenance.{key}: {reprlib.repr(found[key])} is no text"
    for key in ("libraries", "distribution"):
        versions = found.get(key, {})
        if not isinstance(versions, dict) or not all(isinstance(value, str) for value in versions.values()):
            yield f"provenance.{key}: {reprlib.repr(versions)}, where texts by name were expected"
    commit = found.get("commit", "")
    if "+changes" in str(commit):
        yield f"provenance: measured with files changed since commit {str(commit)[:12]}; run it again"
    elif commit != "":  # of a release there is none
        yield from _hex("provenance.commit", commit, 40)
    if source := found.get("method_source"):
        yield from _hex("provenance.method_source", source, 16)
    if type(found.get("revision", 0)) is not int:
        yield f"provenance.revision: {reprlib.repr(found['revision'])} is no whole number"
    yield from _version(found.get("version"))
    yield from _time(found.get("time"))


def _version(value: Any) -> Iterator[str]:
    """A version that is newer than this one may have measured what this one cannot check."""
    if not value or not isinstance(value, str):
        return
    numbers, own = (re.match(r"(?:\d{1,9}\.)*\d{1,9}", version) for version in (value, __version__))
    if numbers is None or own is None:
        yield f"provenance.version: {reprlib.repr(value)} is no version"
    elif [int(part) for part in numbers[0].split(".")] > [int(part) for part in own[0].split(".")]:
        yield f"provenance.version: {reprlib.repr(value)} is newer than the one that checks, {__version__}"


def _time(value: Any) -> Iterator[str]:
    if not value or not isinstance(value, str):
        return
    try:
        if not re.fullmatch(TIME, value, re.ASCII):
            raise ValueError
        when = datetime.datetime.fromisoformat(value)
    except ValueError:
        yield f"provenance.time: {reprlib.repr(value)} is no time as a run writes it, such as 2026-01-31T12:00:00+00:00"
        return
    if when > datetime.datetime.now(datetime.UTC) + AHEAD:
        yield f"provenance.time: {value} is in the future"
