"""How a method looks in every figure and on the page: one colour, marker and dash, whatever else is drawn beside it.

The colours are those of Okabe and Ito (2008, "Color Universal Design"), told apart with each of the usual colour
vision deficiencies, with grey for their black, which a dark page would hide, and without their yellow, which a white
one would. More methods than colours are told apart by marker and dash, which also serve who prints without colour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256

from ifsl_bench.plugin.rows import rows

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#808080")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # Matplotlib's names
DASHES = ("solid", "dashed", "dotted", "dashdot")  # Matplotlib's names


@dataclass(frozen=True)
class Look:
    """Of a method: a colour as ``#rrggbb``, and the names of a marker and a dash as Matplotlib has them."""

    colour: str
    marker: str
    dash: str


def look_of(label: str) -> Look:
    """The look of a row by its label; options, tuning and calibration do not change it.

    Methods of the package have theirs by their place in methods/rows.toml. Another method gets the look that its
    name's hash chooses among the pairs that those do not have: the same in every figure, though two such methods may
    share one.
    """
    method, ours = method_of(label), list(rows())  # each its own pair of colour and marker
    if method in ours:
        index = ours.index(method)
    else:
        free = len(COLOURS) * len(MARKERS) - len(ours)
        index = len(ours) + int.from_bytes(sha256(method.encode()).digest()[:4]) % free
    turn = index // len(COLOURS)
    return Look(COLOURS[index % len(COLOURS)], MARKERS[turn % len(MARKERS)], DASHES[turn % len(DASHES)])


def method_of(label: str) -> str:
    """The method's part of a row's label, without options, tuning and calibration."""
    return re.split(r"[.@ ]|\+cal\b", label, maxsplit=1)[0]
