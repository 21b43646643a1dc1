"""The style of every figure, the rows and names that they share, and how a figure becomes a file.

Widths are those of a two-column paper, in which figures are included as they are. No text is smaller than
:data:`MIN_FONT_SIZE_POINTS`. In PDF and SVG text is text. A user's settings of Matplotlib are
not read, no display is needed, and no state of pyplot is touched. The same input gives the same bytes with one version
of Matplotlib: files hold no date.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ifsl_bench.analysis.aggregate import EVERY, STORED, SeedAggregate, unique_row_names
from ifsl_bench.analysis.task_results import TaskResults, make_no_results_error, select_labels, select_setting
from ifsl_bench.reporting.plot_styles import PlotStyle, distinct_styles, style_of_label, with_distinct_markers
from ifsl_bench.utils.errors import UserError, escape_controls
from ifsl_bench.utils.files import check_output_path, write_bytes

COLUMN, PAGE = 3.3, 6.8  # inches: one column, and two with what is between them
MIN_FONT_SIZE_POINTS = 7.0  # points
MAX_ROWS_DRAWN = 9  # of lines or panels that a reader can tell apart in one figure, as in the paper
FAINT, DARK = "#B0B0B0", "#404040"  # guides, and their texts
# Metadata that would say when or by which version a file was made.
SAVE_ARGUMENTS_BY_FORMAT: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}
MATPLOTLIB_RC_PARAMS: Any = {  # Matplotlib's names
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with Matplotlib
    "font.size": MIN_FONT_SIZE_POINTS,
    "axes.titlesize": 8,
    "axes.labelsize": MIN_FONT_SIZE_POINTS,
    "xtick.labelsize": MIN_FONT_SIZE_POINTS,
    "ytick.labelsize": MIN_FONT_SIZE_POINTS,
    "legend.fontsize": MIN_FONT_SIZE_POINTS,
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
    "text.parse_math": False,  # a method's name is text of unknown origin
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "ifsl_bench",
}

LegendMark = tuple[Any, str]  # what stands in a legend, and what it means


# Our settings alone, for a `with` block or for the function that it decorates.
with_figure_style = functools.partial(matplotlib.style.context, MATPLOTLIB_RC_PARAMS, after_reset=True)


def make_figure(height: float, wide: bool = False) -> Figure:
    """Return an empty figure of one column's width, or of two.

    Args:
        height: in inches.
        wide: two columns wide.
    """
    return Figure(figsize=(PAGE if wide else COLUMN, height), layout="constrained")


def make_panels(count: int, across: int, each: float, wide: bool, more: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Return a figure of several panels, and its panels.

    Args:
        count: how many panels.
        across: how many next to each other.
        each: inches that each is high.
        wide: two columns wide.
        more: inches for all panels together.
    """
    down = -(-count // across)
    figure = make_figure(down * each + more, wide)
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def figure_format(path: Path) -> str:
    """Return the format that a file's name asks for.

    Raises:
        UserError: none of :data:`SAVE_ARGUMENTS_BY_FORMAT`; or a folder that is not there or cannot be written, before
            anything is drawn.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in SAVE_ARGUMENTS_BY_FORMAT:
        ending = f"{path.suffix!r}" if path.suffix else "a name without any"
        raise UserError(f"--out takes a file that ends in .pdf, .svg or .png, not {ending}")
    check_output_path(path)
    return suffix


@with_figure_style()
def render_figure(figure: Figure, kind: str) -> bytes:
    """Return a figure as the content of a file.

    Args:
        figure: a figure of :func:`make_figure` or :func:`make_panels`.
        kind: one of :data:`SAVE_ARGUMENTS_BY_FORMAT`.
    """
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names are of any script; an empty box stands in
        figure.savefig(out, format=kind, metadata=SAVE_ARGUMENTS_BY_FORMAT[kind])
    return out.getvalue()


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all; raise as :func:`figure_format`, and where the file cannot be written.

    Args:
        figure: a figure of :func:`make_figure` or :func:`make_panels`.
        path: the file.
    """
    content = render_figure(figure, figure_format(path))
    write_bytes(path, content, "--out")


def strip_markup(label: str) -> str:
    """Return a label of unknown origin as text. Matplotlib would leave one out that begins with _."""
    label = escape_controls(label)
    return f" {label}" if label.startswith("_") else label


def line_style(label: str) -> dict[str, Any]:
    """Return the look of a method's line, with its marker."""
    return _make_line_style(style_of_label(label)) | {"markeredgewidth": 0}


def marker_style(label: str) -> dict[str, Any]:
    """Return the look of a method's points without a line."""
    return line_style(label) | {"linestyle": "none"}


def marker_without_line(
    marker: str, size: float, color: str, edge: str | None = None, edge_width: float = 0.0
) -> dict[str, Any]:
    """Return the style of points without a line.

    Args:
        marker: Matplotlib's name of it.
        size: in points.
        color: of the symbol.
        edge: its edge's colour; by default the symbol's.
        edge_width: in points.
    """
    return {
        "marker": marker,
        "linestyle": "none",
        "markersize": size,
        "color": color,
        "markeredgecolor": edge or color,
        "markeredgewidth": edge_width,
    }


def line_styles(labels: Sequence[str], is_second: Sequence[bool] = ()) -> list[dict[str, Any]]:
    """Return the looks of rows in one figure, from :func:`ifsl_bench.reporting.plot_styles.distinct_styles`.

    Further rows of a method have a thin line, and marks that are half white.

    Args:
        labels: of the rows.
        is_second: which rows have the label of another one, which comes first.
    """
    half = {"fillstyle": "left", "markerfacecoloralt": "white", "markeredgewidth": 0.6, "linewidth": 0.7}
    return [
        _make_line_style(look) | (half if look.is_further_row else {"markeredgewidth": 0})
        for look in distinct_styles(labels, is_second)
    ]


def marker_styles(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the looks of rows in a figure without lines: as far as there are markers, no two have the same one.

    Args:
        labels: of the rows.
    """
    styles = with_distinct_markers(distinct_styles(labels))
    return [_make_line_style(style) | {"markeredgewidth": 0, "linestyle": "none"} for style in styles]


def _make_line_style(look: PlotStyle) -> dict[str, Any]:
    return {"color": look.colour, "marker": look.marker, "linestyle": look.dash}


def draw_legend_below(
    figure: Figure, handles: Iterable[Any], labels: Sequence[str], marks: Sequence[LegendMark] = ()
) -> None:
    """Add a legend under everything, in as many columns as fit; and below it another, with the meaning of marks.

    The figure grows by as much as these are high.

    Args:
        figure: a figure of :func:`make_figure` or :func:`make_panels`.
        handles: of methods or classes, each of which has a look; none for the marks alone.
        labels: of the handles.
        marks: what other things in the figure stand for, whatever their method or class.
    """
    texts = [strip_markup(label) for label in labels]
    width, height = figure.get_size_inches()
    entry = 0.42 + 0.06 * max(map(len, labels), default=0)  # inches of an entry; a letter takes a little less
    columns = min(max(1, int(width / entry)), max(1, len(labels)))
    lines = math.ceil(len(labels) / columns)
    line = 0.124 if marks else 0.135  # inches
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
    share = (whole + below) / height
    figure.set_layout_engine("constrained", rect=(0, share, 1, 1 - share))
    if labels:
        figure.legend(
            list(handles),
            texts,
            loc="lower center",
            bbox_to_anchor=(0.5, below / height),
            ncols=columns,
            borderaxespad=0,
        )
    symbols, meanings = zip(*marks, strict=True)
    figure.legend(symbols, meanings, loc="lower center", borderaxespad=0, ncols=mark_columns)


def _mark_columns(marks: Sequence[LegendMark], width: float) -> int:
    """Return how many marks fit next to each other in ``width`` inches, each column as wide as its longest text."""

    def needed(columns: int) -> float:
        each, more = divmod(len(marks), columns)  # Matplotlib fills the first columns first
        ends = [each * i + min(i, more) for i in range(columns + 1)]
        return sum(0.34 + 0.057 * max(len(meaning) for _, meaning in marks[a:b]) for a, b in itertools.pairwise(ends))

    return max((n for n in range(1, len(marks) + 1) if needed(n) <= width), default=1)


def estimate_text_height(rows: int, each: float = 0.165, more: float = 0.5) -> float:
    """Return the height of lines of text, in inches.

    Args:
        rows: how many lines.
        each: inches of a line.
        more: inches of what is around them.
    """
    return more + each * rows


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Name the rows of a panel at its left, one a line, over an upright grid.

    Args:
        axes: of the panel.
        labels: the names.
    """
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=DARK)
    axes.spines["left"].set_visible(False)
    draw_grid(axes)


def draw_grid(axes: Axes, which: Literal["x", "y"] = "x") -> None:
    """Draw faint lines behind everything.

    Args:
        axes: of the panel.
        which: the axis that they start from.
    """
    axes.grid(axis=which, color="#E4E4E4", linewidth=0.5)
    axes.set_axisbelow(True)


def select_rows_to_draw(
    task_results: TaskResults, labels: Sequence[str] = (), setting: str | None = None, papers: bool = False
) -> TaskResults:
    """Return the results with the rows to be drawn: rows with these labels, or a setting's without own options.

    Args:
        task_results: the results of the task.
        labels: of the only rows to draw.
        setting: "paper" by default, for methods as published; "tuned-12" for the best of 12 trials.
        papers: whether published rows are drawn too, and will do alone.

    Raises:
        UserError: nothing is stored for the task, or no such row or setting.
    """
    named = labels and task_results.other_recipe_rows
    if task_results.hidden_rows and not (task_results.rows or named):
        raise make_no_results_error(task_results)
    if not task_results.rows and not (papers and task_results.published_rows) and not named:
        first, more = task_results.remarks_on_left_out_rows[:1], len(task_results.remarks_on_left_out_rows) - 1
        left_out = f" ({first[0]}{f', and {more} more' if more > 0 else ''})" if first else ""
        raise UserError(
            f"no comparable result is stored for task {task_results.task_name}{left_out}; make one, as with "
            f"ifsl-bench run --method imprint --task {task_results.task_name}"
        )
    if labels:
        (view,) = select_labels(
            [task_results], labels, f"of task {task_results.task_name}", f"ifsl-bench table {task_results.task_name}"
        )
        (view,) = select_setting([view], setting) if setting else [view]
    else:
        (view,) = select_setting([task_results], setting)
        view = replace(view, rows=tuple(row for row in view.rows if not row.has_changed_options) or view.rows)
    if not view.rows and not (papers and view.published_rows):
        raise UserError(
            f"{task_results.task_name}: none of these rows is of setting {view.ranking_setting}; there are: "
            f"{', '.join(sorted({row.ranking_setting for row in task_results.rows} - {EVERY}))}"
        )
    return view


def sort_rows_by_accuracy(task_results: TaskResults) -> list[SeedAggregate]:
    """Return the rows of a task, the best first, in the order of ``table --rank``."""
    return [place.row for place in task_results.ranked_rows]


def limit_rows(
    task_results: TaskResults, is_drawn: Callable[[SeedAggregate], bool] = lambda row: True
) -> tuple[TaskResults, list[str]]:
    """Return the results with as many rows as can be told apart in one figure, and a note on the others.

    The user's own rows come first, then the best of the stored ones, without those whose label a row of the user's has.

    Args:
        task_results: the results of a task.
        is_drawn: whether the figure has a place for a row; others are not counted, nor noted.
    """
    rows = [row for row in sort_rows_by_accuracy(task_results) if is_drawn(row)]
    own = [row for row in rows if row.results_origin != STORED]
    own_labels = {row.label for row in own}
    stored = [row for row in rows if row.results_origin == STORED and row.label not in own_labels]
    chosen = [*own, *stored][:MAX_ROWS_DRAWN]
    left_out = [name for name, row in zip(unique_row_names(rows), rows, strict=True) if row not in chosen]
    notes = [f"left out, so that rows can be told apart: {', '.join(left_out)} (--method names the rows to draw)"]
    return replace(
        task_results, rows=tuple(row for row in task_results.rows if row in chosen)
    ), notes if left_out else []


def names_and_styles(rows: Sequence[SeedAggregate]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return names and looks of rows; a user's own row has another look than the stored one of the same label."""
    stored = {row.label for row in rows if row.results_origin == STORED}
    second = [row.label in stored and row.results_origin != STORED for row in rows]
    return unique_row_names(rows), line_styles([row.label for row in rows], second)


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without shared words at their beginning and numbers in brackets at their end.

    Names stay different from each other. One word that only some share is kept: the cucumber is no "sea cucumber".

    ``["GREEK LETTER XI (U+039E)", "GREEK LETTER MU (U+03BC)"]`` become ``["XI", "MU"]``.
    """
    words = [escape_controls(name).split() or [escape_controls(name)] for name in names]
    beginnings = Counter(tuple(w[:n]) for w in words for n in range(1, len(w)))
    beginnings = Counter({start: n for start, n in beginnings.items() if len(start) > 1 or n == len(names)})
    candidates = [
        _list_shortened_forms(w, beginnings) for w in words
    ]  # what each name may be called, the shortest first
    while True:
        often = Counter(forms[0] for forms in candidates)
        again = [forms for forms in candidates if often[forms[0]] > 1 and len(forms) > 1]
        if not again:
            return [forms[0] for forms in candidates]
        for forms in again:
            del forms[0]


def _list_shortened_forms(words: list[str], beginnings: Mapping[tuple[str, ...], int]) -> list[str]:
    plain = words[:-1] if len(words) > 1 and re.fullmatch(r"\(.*\)", words[-1]) else words
    shared = max((n for n in range(1, len(plain)) if beginnings[tuple(plain[:n])] > 1), default=0)
    suffixes = [" ".join(form[start:]) for form in (plain, words) for start in range(shared, -1, -1)]
    return sorted(dict.fromkeys(suffixes), key=len)
