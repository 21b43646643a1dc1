"""Looks of methods in every figure and on the page: one colour, marker and dash, whatever else is drawn.

The colours are those of Okabe and Ito (2008, "Color Universal Design"), told apart with each of the usual colour
vision deficiencies, with grey for their black, which a dark page would hide, and without their yellow, which a white
one would. Neighbours differ in marker and dash too, which serve who prints without colour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from ifsl_bench.plugin.display_names import display_names_by_row

METHOD_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6E6E6E")
MATPLOTLIB_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # Matplotlib's names
MATPLOTLIB_DASHES = ("solid", "dashed", "dotted", "dashdot")  # Matplotlib's names


@dataclass(frozen=True)
class PlotStyle:
    """The look of a method: a colour as ``#rrggbb``, and the names of a marker and a dash as Matplotlib has them."""

    colour: str
    marker: str
    dash: str
    # whether this is of a further row of the method in one figure, whose marks are drawn otherwise
    is_further_row: bool = False


def style_of_label(label: str) -> PlotStyle:
    """Return the look of a row by its label; options, tuning and calibration do not change it.

    Methods of the package have theirs by their place in methods/papers.bib. Another method gets the look that its
    name's hash chooses among the pairs that those do not have: the same in every figure, though two such methods may
    share one.
    """
    method, ours = method_name_of_label(label), list(display_names_by_row())  # each its own pair of colour and marker
    if method in ours:
        index = ours.index(method)
    else:
        free = len(METHOD_COLOURS) * len(MATPLOTLIB_MARKERS) - len(ours)
        index = len(ours) + int.from_bytes(sha256(method.encode()).digest()[:4]) % free
    turn, colour = divmod(index, len(METHOD_COLOURS))
    return PlotStyle(
        METHOD_COLOURS[colour],
        MATPLOTLIB_MARKERS[(colour + turn) % len(MATPLOTLIB_MARKERS)],
        MATPLOTLIB_DASHES[(colour + turn) % len(MATPLOTLIB_DASHES)],
    )


def distinct_styles(labels: Sequence[str], is_second: Sequence[bool] = ()) -> list[PlotStyle]:
    """Return the looks of rows that stand in one figure, no two of one method alike.

    One row of each method has the method's own: the plain one, if it is there. Each of the others has its colour, and
    another marker and dash.

    Args:
        labels: of the rows.
        is_second: which rows have the label of another one, which comes first; by default none.
    """
    plain = [
        not (is_second and is_second[i]) and label == method_name_of_label(label) for i, label in enumerate(labels)
    ]
    looks, seen = [style_of_label(label) for label in labels], dict.fromkeys(map(method_name_of_label, labels), 0)
    for i in sorted(range(len(labels)), key=lambda i: (not plain[i], bool(is_second and is_second[i]))):
        if n := seen[method_name_of_label(labels[i])]:
            marker, dash = MATPLOTLIB_MARKERS.index(looks[i].marker) + n, MATPLOTLIB_DASHES.index(looks[i].dash) + n
            looks[i] = replace(
                looks[i],
                marker=MATPLOTLIB_MARKERS[marker % len(MATPLOTLIB_MARKERS)],
                dash=MATPLOTLIB_DASHES[dash % len(MATPLOTLIB_DASHES)],
                is_further_row=True,
            )
        seen[method_name_of_label(labels[i])] = n + 1
    return looks


def with_distinct_markers(styles: Sequence[PlotStyle]) -> list[PlotStyle]:
    """Return the styles with no marker twice, as far as there are markers, for figures without lines.

    Args:
        styles: of the rows of a figure; a row whose marker an earlier one has gets the first that none has.
    """
    free = [marker for marker in MATPLOTLIB_MARKERS if marker not in {style.marker for style in styles}]
    used: set[str] = set()
    distinct = []
    for style in styles:
        if style.marker in used and free:
            style = replace(style, marker=free.pop(0))
        used.add(style.marker)
        distinct.append(style)
    return distinct


def method_name_of_label(label: str) -> str:
    """Return the method's part of a row's label, without options, tuning and calibration."""
    return re.split(r"[.@ ]|\+cal\b", label, maxsplit=1)[0]
