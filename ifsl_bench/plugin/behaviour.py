"""What a method computes, as some hundred numbers, and where two methods differ. Imports no torch.

:mod:`ifsl_bench.plugin.probe` measures them. Results and trained models keep them, so that they can be told apart by
what their code did and not by how it was written.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ifsl_bench.common.errors import is_printable

# A machine's tolerances come of three small changes. Others of the same size gave ones up to 6 times as wide, but for
# the logits of searches in single precision, of which ``elsewhere`` lets some be further off.
WIDER = 10.0
VERSION = 1  # of the episodes of a probe and of what it looks at; probes of other versions say nothing of each other


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers, and how far another run of the same method may be from them.

    Attributes:
        values: 9 digits each.
        within: one tolerance for each run of ``len(values) / len(within)`` values, one episode's or one parameter's.
        elsewhere: so many of these runs may be further off: a search may end in another minimum now and then.
    """

    values: list[float]
    within: list[float]
    elsewhere: int = 0


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a method computes.

    Attributes:
        version: :data:`VERSION` when it was made.
        declared: what the class says of itself that no episode shows: its schedule, its head.
        numbers: by what they are, in words, in the order in which they are compared.
    """

    version: int
    declared: dict[str, Any]
    numbers: dict[str, Numbers]


def comparable(a: Probe | None, b: Probe | None) -> bool:
    """Whether there are two probes, of one version."""
    return a is not None and b is not None and a.version == b.version


def bounded(theirs: Probe, own: Probe) -> Probe:
    """A probe from another machine, with tolerances that one's own code could have: the file could say any.

    None is wider than ``WIDER`` times the widest that ``own`` has of the same numbers, and no more runs are elsewhere.
    """
    numbers = dict(theirs.numbers)
    for name in theirs.numbers.keys() & own.numbers.keys():
        most, found = WIDER * max(own.numbers[name].within), theirs.numbers[name]
        within = [min(one, most) for one in found.within]
        numbers[name] = Numbers(found.values, within, min(found.elsewhere, own.numbers[name].elsewhere))
    return msgspec.structs.replace(theirs, numbers=numbers)


def differs(a: Probe, b: Probe) -> str:
    """In what two methods differ, in a phrase ("logits of 5-shot joint episodes, float64: by 0.03"); "" where in none.

    Raises:
        ValueError: the probes are of different versions.
    """
    if a.version != b.version:
        raise ValueError(f"probes of version {a.version} and {b.version} cannot be compared")
    for name in sorted(a.declared.keys() | b.declared.keys()):
        if a.declared.get(name) != b.declared.get(name):
            return f"the {name}"
    if others := [name for name in (*a.numbers, *b.numbers) if (name in a.numbers) != (name in b.numbers)]:
        return f"there is {'no' if others[0] in a.numbers else 'now'} {others[0]}"
    for name, numbers in a.numbers.items():
        if (apart := _apart(numbers, b.numbers[name])) > 0:
            return f"{name}: by {apart:.2g}"
    return ""


def _apart(a: Numbers, b: Numbers) -> float:
    """The largest difference that is beyond the tolerance; 0 where there is none, or no more than there may be."""
    if (len(a.values), len(a.within)) != (len(b.values), len(b.within)):
        return math.inf
    each, beyond = len(a.values) // len(a.within), []
    for i, pair in enumerate(zip(a.within, b.within, strict=True)):
        at = slice(i * each, (i + 1) * each)
        apart = max(abs(one - other) for one, other in zip(a.values[at], b.values[at], strict=True))
        beyond += [apart] if apart > max(pair) else []
    return max(beyond) if len(beyond) > max(a.elsewhere, b.elsewhere) else 0.0


def malformed(probe: Probe) -> str:
    """Why this is no probe; "" where it may be one. Numbers in JSON files are finite already."""
    for name, numbers in probe.numbers.items():
        if not is_printable(name):
            return f"{name!r} is not printable text"
        each, rest = divmod(len(numbers.values), len(numbers.within) or 1)
        if not numbers.within or not each or rest or min(numbers.within) < 0:
            return f"{name}: {len(numbers.values)} values with {len(numbers.within)} tolerances"
        if not 0 <= numbers.elsewhere <= len(numbers.within) // 4:
            return (
                f"{name}: {numbers.elsewhere} of {len(numbers.within)} runs elsewhere, where at most a quarter may be"
            )
    return ""
