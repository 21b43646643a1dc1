"""The formats, and what a format is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutation import spoiled

MODULES = ("archives", "images", "arrays", "tensors", "texts", "results")  # of this package; each has a list FORMATS


@dataclass(frozen=True)
class Format:
    """A format of files, and how it is attacked.

    Attributes:
        name: what ``--only`` calls it.
        seeds: makes valid files.
        read: reads a file as the program does; the file may be changed or removed by it. Returns what happened, where
            there are several good ends to tell apart.
        spoil: makes a hostile file of a valid one; by default any bytes are changed.
        share: how many cases it has in a round of all formats; a slow one has few.
        prepare: makes what reading needs, once, in the process that all cases are forks of.
        seconds: that a case may take.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[Path], object]
    spoil: Callable[[Random, bytes], bytes] = spoiled
    share: float = 10
    prepare: Callable[[], object] = tuple
    seconds: float = 10


RUNS = ("cache", "kills")  # of this package: whole runs, whose cases are recipes in JSON and not files


def formats(modules: Sequence[str] = MODULES + RUNS) -> dict[str, Format]:
    """All formats by name."""
    forms = [form for module in modules for form in importlib.import_module(f"tests.fuzz.{module}").FORMATS]
    return {form.name: form for form in forms}


def case(form: Format, seeds: Sequence[bytes], seed: int, number: int) -> bytes:
    """Case ``number`` of a format; always the same bytes for the same four."""
    random = Random(f"{form.name}/{seed}/{number}")
    return form.spoil(random, random.choice(seeds))
