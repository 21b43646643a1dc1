"""The form of result files, whatever the task: names, types and ranges of values. Imports no torch."""

from __future__ import annotations

import contextlib
import datetime
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ifsl_bench._version import __version__
from ifsl_bench.protocols.tasks.contamination import SEEN
from ifsl_bench.protocols.tasks.task_limits import MOST_TRIALS
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import UserError, is_printable

AHEAD = datetime.timedelta(days=1)  # of a clock that is wrong, or set to local time

SETTING = r"^(paper|every|tuned-([2-9]|[1-9][0-9]{1,5}))\Z"
HEX16, HEX64, ANY_HEX64 = r"^[0-9a-f]{16}\Z", r"^[0-9a-f]{64}\Z", r"^([0-9a-f]{64})?\Z"
COMMIT = r"^([0-9a-f]{40}|.*\+changes)?\Z"
TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\+00:00\Z"  # so that times sort as texts
PACKAGE, STEP = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?\Z", r"^[1-9][0-9]{0,17}\Z"
WORDS = {
    SETTING: "'paper', 'every' or 'tuned-N' with N from 2",
    HEX16: "16 hexadecimal digits",
    HEX64: "64 hexadecimal digits",
    ANY_HEX64: "64 hexadecimal digits or none",
    COMMIT: "a commit of Git",
    TIME: "a time such as 2026-01-31T12:00:00+00:00",
    PACKAGE: "the name of a package",
    STEP: "the number of a step",
}
Text = Annotated[str, Meta(min_length=1)]
Hex16 = Annotated[str, Meta(pattern=HEX16)]
Hex64 = Annotated[str, Meta(pattern=HEX64)]
Time = Annotated[str, Meta(pattern=TIME)]
Package = Annotated[str, Meta(pattern=PACKAGE)]
Step = Annotated[str, Meta(pattern=STEP)]
Percent = Annotated[float, Meta(ge=0, le=100)]
Cost = Literal["parameters", "pretraining_seconds", "training_seconds", "evaluation_seconds", "episodes_per_second"]
Statistic = Literal["mean", "max", "total", "episodes", "not_finite"]
Solve = Literal[
    "episodes", "unconverged", "adjoint_episodes", "adjoint_diverged", "adjoint_failed", "adjoint_indefinite"
]
Processes = Annotated[int, Meta(gt=0, lt=1 << 31)]


class _Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class Distribution(_Part):
    name: str = ""
    version: str = ""


class Provenance(_Part):
    """The origin of a result; a release has no commit, and a method that nobody registers no distribution."""

    command: Text
    version: Text
    commit: Annotated[str, Meta(pattern=COMMIT)]
    device: Text
    python: Text
    libraries: Annotated[dict[Package, str], Meta(min_length=1)]
    time: Time
    method_source: Hex16
    distribution: Distribution
    checkpoint: str
    revision: int = 0


class Pretraining(_Part):
    """The backbone; from ``backbone`` on what is known of frozen ones from elsewhere."""

    key: Text
    sha256: Hex64
    accuracy: Annotated[dict[Literal["base/val", "base/test"], Percent], Meta(min_length=1)]
    precision: str = ""
    device: str = ""
    processes: Annotated[tuple[Processes, ...], Meta(min_length=1)] = (1,)
    rounded: Literal["float16"] = "float16"
    backbone: str = ""
    weights: Annotated[str, Meta(pattern=ANY_HEX64)] = ""
    features: Any = None
    pretrained_on: list[str] = []
    seen: Literal[tuple(SEEN)] = "no"  # type: ignore[valid-type]
    centre: Literal["mean", "none"] = "none"


class Training(_Part):
    validation: dict[Step, Percent] = {}
    kept_step: int = 0
    solves: dict[Solve, int] = {}


class Form(msgspec.Struct, kw_only=True):
    """Fields of :class:`ifsl_bench.store.schema.Result` as runs write them."""

    task_hash: Hex16
    digest: Hex64
    fingerprint: Hex64
    novel_fingerprint: Annotated[str, Meta(pattern=ANY_HEX64)]
    setting: Annotated[str, Meta(pattern=SETTING)]
    tuned: dict[str, dict[str, Percent]]
    solver: dict[str, dict[Statistic, float]]
    cost: dict[Cost, Annotated[float, Meta(ge=0)]]
    training: Training
    pretraining: Pretraining
    provenance: Provenance


class Unverified(Exception):
    """Something that cannot be looked at here; says what is missing."""


@contextlib.contextmanager
def verifying(what: str) -> Iterator[None]:
    """Inside, whatever keeps a check from looking at ``what`` becomes :class:`Unverified`, with the reason."""
    try:
        yield
    except (UserError, Unverified) as error:
        raise Unverified(f"{what}, since {error}") from error


def odd_values(result: Result) -> Iterator[str]:
    """Yields a line for each value that no run writes; of each field of :class:`Form` the first."""
    for field in msgspec.structs.fields(Form):
        try:
            msgspec.convert(getattr(result, field.name), field.type, strict=True)
        except (msgspec.ValidationError, UnicodeError) as error:  # the latter for names with half a character
            expected, _, at = str(error).partition(" - at `")  # "$.place", or "key` in `$.place"
            for pattern, words in WORDS.items():
                expected = expected.replace(f"`str` matching regex {pattern!r}", words)
            yield f"{field.name}{at.rpartition('$')[2].strip('`')}: {expected}"
    if result.trials > MOST_TRIALS:
        yield f"setting: {result.setting!r}, a run tries at most {MOST_TRIALS:,}"
    values = {value for tried in result.tuned.values() for value in tried}
    if strange := [*(set(result.passed_over) - values), *(set(result.edge) - result.chosen)]:
        yield f"passed_over, edge: {strange[0]!r} is nothing that was tuned"
    if result.rounds and (sum(result.rounds) != sum(map(len, result.tuned.values())) or min(result.rounds) < 1):
        yield f"rounds: {result.rounds}, and {sum(map(len, result.tuned.values()))} settings were tried"
    commit, version, time = (str(result.provenance.get(key, "")) for key in ("commit", "version", "time"))
    if "+changes" in commit:
        yield f"provenance: measured with files changed since commit {commit[:12]}; run it again"
    yield from _version(version)
    yield from _time(time)


def _version(value: str) -> Iterator[str]:
    """A version that is newer than this one may have measured what this one cannot check."""
    numbers, own = (re.match(r"(?:\d{1,9}\.)*\d{1,9}", version) for version in (value, __version__))
    if numbers is None or own is None:
        yield f"provenance.version: {reprlib.repr(value)} is no version"
    elif [int(part) for part in numbers[0].split(".")] > [int(part) for part in own[0].split(".")]:
        yield f"provenance.version: {reprlib.repr(value)} is newer than the one that checks, {__version__}"


def _time(value: str) -> Iterator[str]:
    try:
        ahead = datetime.datetime.fromisoformat(value) - datetime.datetime.now(datetime.UTC)
    except (ValueError, TypeError):  # the latter for a time of no zone
        yield f"provenance.time: {reprlib.repr(value)} is no time as a run writes it, such as 2026-01-31T12:00:00+00:00"
        return
    if ahead > AHEAD:
        yield f"provenance.time: {value} is in the future"


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
