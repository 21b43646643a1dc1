"""The style of every figure, and how it becomes a file: sizes, fonts, formats.

Widths are those of a two-column paper, to be included as they are (``\\includegraphics{x.pdf}``). No text is smaller
than :data:`SMALLEST`, but on contact sheets of episodes. In PDF and SVG text is text. Nobody's settings of Matplotlib
are read, no display is needed, and no state of pyplot is touched. The same input gives the same bytes with one version
of Matplotlib: files hold no date.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ifsl_bench.reporting.plot_styles import PlotStyle, look_of, looks_of
from ifsl_bench.utils.errors import UserError, one_line
from ifsl_bench.utils.files import check_out, write_bytes

COLUMN, PAGE = 3.3, 6.8  # inches: one column, and two with what is between them
SMALLEST = 7.0  # points
FAINT, DARK = "#B0B0B0", "#404040"  # guides, and what is said of them
# Metadata that would say when or by which version a file was made.
FORMATS: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}
RULES: Any = {  # Matplotlib's names
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with Matplotlib
    "font.size": SMALLEST,
    "axes.titlesize": 8,
    "axes.labelsize": SMALLEST,
    "xtick.labelsize": SMALLEST,
    "ytick.labelsize": SMALLEST,
    "legend.fontsize": SMALLEST,
    "legend.frameon": False,
    "legend.handlelength": 2.0,
    "legend.columnspacing": 1.0,
    "legend.handletextpad": 0.4,
    "legend.labelspacing": 0.25,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.1,
    "lines.markersize": 4,
    "hatch.linewidth": 0.4,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
    "text.parse_math": False,  # a method's name is somebody else's text
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "ifsl_bench",
}

Mark = tuple[Any, str]  # what stands in a legend, and what it means


# Our settings, and nobody else's, for a `with` block or for the function that it decorates.
styled = functools.partial(matplotlib.style.context, RULES, after_reset=True)


def new_figure(height: float, wide: bool = False) -> Figure:
    """An empty figure of one column's width, or of two; ``height`` in inches."""
    return Figure(figsize=(PAGE if wide else COLUMN, height), layout="constrained")


def new_panels(count: int, across: int, each: float, wide: bool, more: float = 0.0) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, ``across`` beside each other: ``each`` inches high, and ``more`` for all together."""
    down = -(-count // across)
    figure = new_figure(down * each + more, wide)
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def format_of(path: Path) -> str:
    """The format that a file's name asks for.

    Raises:
        UserError: another one than those of :data:`FORMATS`; or a folder that is not there or cannot be written, before
            anything is drawn.
    """
    if (suffix := path.suffix.lower().removeprefix(".")) not in FORMATS:
        ending = f"{path.suffix!r}" if path.suffix else "a name without any"
        raise UserError(f"--out takes a file that ends in .pdf, .svg or .png, not {ending}")
    check_out(path)
    return suffix


@styled()
def as_bytes(figure: Figure, kind: str) -> bytes:
    """A figure as a file of a format, one of :data:`FORMATS`."""
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names are of any script; an empty box stands in
        figure.savefig(out, format=kind, metadata=FORMATS[kind])
    return out.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes a figure, whole or not at all; raises as :func:`format_of`, and where the file cannot be written."""
    content = as_bytes(figure, format_of(path))
    write_bytes(path, content, "--out")


def text_of(label: str) -> str:
    """A label that may come from a file of a stranger's, as text. Matplotlib would leave one out that begins with _."""
    label = one_line(label)
    return f" {label}" if label.startswith("_") else label


def drawn(label: str) -> dict[str, Any]:
    """The look of a method's line, with its marker."""
    return _line(look_of(label)) | {"markeredgewidth": 0}


def dots(label: str) -> dict[str, Any]:
    """The look of a method's points without a line."""
    return drawn(label) | {"linestyle": "none"}


def drawn_beside(labels: Sequence[str], second: Sequence[bool] = ()) -> list[dict[str, Any]]:
    """The looks of rows that are drawn beside each other: those of :func:`ifsl_bench.reporting.plot_styles.looks_of`.

    Further rows of a method have a thin line, and marks that are half white.
    """
    half = {"fillstyle": "left", "markerfacecoloralt": "white", "markeredgewidth": 0.6, "linewidth": 0.7}
    return [_line(look) | (half if look.further else {"markeredgewidth": 0}) for look in looks_of(labels, second)]


def _line(look: PlotStyle) -> dict[str, Any]:
    return {"color": look.colour, "marker": look.marker, "linestyle": look.dash}


def legend_below(figure: Figure, handles: Iterable[Any], labels: Sequence[str], marks: Sequence[Mark] = ()) -> None:
    """Adds a legend under everything, in as many columns as fit; and below it another, with the meaning of marks. The
    figure grows by as much as these are high.

    Args:
        handles, labels: methods or classes, each of which has a look; none for the marks alone.
        marks: what other things in the figure stand for, whatever their method or class.
    """
    texts, (width, height) = [text_of(label) for label in labels], figure.get_size_inches()
    entry = 0.42 + 0.06 * max(map(len, labels), default=0)  # inches of an entry; a letter takes a little less
    columns = min(max(1, int(width / entry)), max(1, len(labels)))
    lines, line = math.ceil(len(labels) / columns), 0.124 if marks else 0.135
    whole = 0.05 + line * lines if labels else 0.0
    if not marks:
        figure.set_figheight(height + whole)
        figure.legend(list(handles), texts, loc="outside lower center", ncols=columns)
        return
    # Matplotlib makes room for one legend at an edge.
    mark_columns = _mark_columns(marks, width)
    below = 0.05 + line * math.ceil(len(marks) / mark_columns)
    height += whole + below
    figure.set_figheight(height)
    figure.set_layout_engine("constrained", rect=(0, (share := (whole + below) / height), 1, 1 - share))
    if labels:
        figure.legend(list(handles), texts, loc="lower center", bbox_to_anchor=(0.5, below / height), ncols=columns,
                      borderaxespad=0)  # fmt: skip
    symbols, meanings = zip(*marks, strict=True)
    figure.legend(symbols, meanings, loc="lower center", borderaxespad=0, ncols=mark_columns)


def _mark_columns(marks: Sequence[Mark], width: float) -> int:
    """The number of marks that fit beside each other in so many inches, each column as wide as its longest text."""

    def needed(columns: int) -> float:
        each, more = divmod(len(marks), columns)  # Matplotlib fills the first columns first
        ends = [each * i + min(i, more) for i in range(columns + 1)]
        return sum(0.34 + 0.057 * max(len(meaning) for _, meaning in marks[a:b]) for a, b in itertools.pairwise(ends))

    return max((n for n in range(1, len(marks) + 1) if needed(n) <= width), default=1)


def heights(rows: int, each: float = 0.165, more: float = 0.5) -> float:
    """Inches for so many lines of text, a row each, and ``more`` for what is around them."""
    return more + each * rows


def lines_of_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Names the rows of a panel at its left, one a line, over an upright grid."""
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=DARK)
    axes.spines["left"].set_visible(False)
    grid(axes)


def grid(axes: Axes, which: Literal["x", "y"] = "x") -> None:
    """Draws faint lines behind everything."""
    axes.grid(axis=which, color="#E4E4E4", linewidth=0.5)
    axes.set_axisbelow(True)
