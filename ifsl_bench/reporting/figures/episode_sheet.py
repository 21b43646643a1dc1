"""The contact sheet of one episode: support above, queries below with what methods call them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ifsl_bench.data.pools import Dataset
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.reporting.figures.models import Episode
from ifsl_bench.reporting.figures.style import COLUMN, DARK, PAGE, marker_style, plain_text, styled, width_of, wrapped
from ifsl_bench.utils.errors import UserError

TEXT, TITLE = 6.0, 8.0  # points: a sheet has more text than other figures, and the same columns
CELL, IMAGE = 0.65, 0.35  # inches: of a query with its texts, its image
NARROW, ROOMY, BETWEEN = 0.19, 0.24, 0.015  # a support image in one column, in two, between two of them
LINE, GAP, LABEL, EDGE = 0.094, 0.06, 0.15, 0.04  # a line of text, what is between parts, a heading, the margin
CAPITAL = 0.73 * TEXT / 72  # the height of a letter
BLOCK = 1.05  # of a class's support, at least: for its name
MARK = 0.08  # of a method's mark before its answer
MOST_LINES = 3  # of a name
MOST_ACROSS = 10  # support images of a class next to each other
RIGHT, WRONG = "\N{CHECK MARK}", "\N{BALLOT X}"
BLUE, ORANGE = "#0072B2", "#BF4C00"  # of what is right and wrong, told apart with colour vision deficiencies
FRAMES: dict[str, dict[str, Any]] = {  # around an image
    "right": {"edgecolor": "#A0A0A0", "linewidth": 0.4},  # an image may be as white as paper
    "some": {"edgecolor": ORANGE, "linewidth": 1.2, "linestyle": (0, (1.6, 0.8))},
    "all": {"edgecolor": ORANGE, "linewidth": 1.4},
}


def check_images(dataset: Dataset, task: Task) -> None:
    """Raise :class:`UserError` where a task has features and no images to show.

    Args:
        dataset: the data set of the task.
        task: the task.
    """
    if not dataset.pictures:
        raise UserError(f"task {task.name} has features and no images, so there is no contact sheet of an episode")


@styled()
def draw(answers: Sequence[Episode], dataset: Dataset, task: Task, wide: bool = False) -> tuple[Figure, list[str]]:
    """Draw the support images by class, then the queries, novel ones first, each by class.

    Next to a query stand the methods with a tick or a cross; below, its class, and what methods predict instead. A
    query that every method gets wrong has a frame, one that some get wrong a dashed one.

    Args:
        answers: of the same episode, one a method.
        dataset: the data set of the task.
        task: the task.
        wide: two columns of a paper wide.
    """
    episode, width = answers[0], PAGE if wide else COLUMN
    figure = Figure(figsize=(width, PAGE))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    novel, base = (dataset.pool(task.pool("test", part)).images for part in ("novel", "base"))
    names = [*map(plain_text, episode.base_classes), *(f"N{way + 1}" for way in range(len(episode.classes)))]
    sheet = _Sheet(axes, novel, base, names)
    y = _legend(axes, answers, width, f"{task.name}, test episode {int(episode.drawn.index[0])}")
    y = _key(sheet, y, len(answers))
    y = _support(sheet, y, episode, width, ROOMY if wide else NARROW)
    order = np.argsort(episode.labels.numpy(), kind="stable")
    is_novel = episode.drawn.query_novel[0].cpu().numpy()[order]
    parts = order[is_novel], order[~is_novel]
    most = max(map(len, parts))
    across = math.ceil(most / math.ceil(most / int((width - EDGE) / CELL)))  # evenly: the last line is not empty
    cell_width = min((width - EDGE) / across, 2 * CELL)
    for part, title in zip(parts, ("queries of novel classes", "queries of base classes"), strict=True):
        y = sheet.heading(y + GAP / 2, title) if len(part) else y
        for start in range(0, len(part), across):
            row = enumerate(part[start : start + across].tolist())
            y = GAP + max(_query(sheet, EDGE + i * cell_width, y, query, answers, cell_width) for i, query in row)
    figure.set_figheight(y)
    axes.set(xlim=(0, width), ylim=(y, 0))  # inches
    return figure, []


@dataclass(frozen=True)
class _Sheet:
    """Axes in inches; the images of both parts; names under a query, N1 for the first novel class."""

    axes: Axes
    novel: np.ndarray
    base: np.ndarray
    names: Sequence[str]

    def image(self, image: np.ndarray, x: float, y: float, size: float, frame: str = "right") -> None:
        grey = image.shape[-1] == 1
        self.axes.imshow(
            image[..., 0] if grey else image,
            cmap="gray",
            vmin=0,
            vmax=255,
            aspect="auto",
            extent=(x, x + size, y + size, y),
            interpolation="nearest",
        )
        self.frame(x, y, size, frame)

    def frame(self, x: float, y: float, size: float, kind: str, gid: str | None = None) -> None:
        self.axes.add_patch(Rectangle((x, y), size, size, fill=False, **FRAMES[kind], gid=gid))

    def text(self, x: float, y: float, words: str, **more: Any) -> None:
        """Write one line or more, the first one around ``y``; Matplotlib's baseline is the last line's."""
        self.axes.text(
            x,
            y + CAPITAL / 2 + LINE * words.count("\n"),
            words,
            va="baseline",
            fontsize=TEXT,
            linespacing=72 * LINE / TEXT,
            **more,
        )

    def heading(self, y: float, text: str) -> float:
        self.text(EDGE, y + LABEL / 2, text, color=DARK, style="italic")
        return y + LABEL

    def name(self, x: float, y: float, label: int, width: float, **more: Any) -> float:
        """Write the name of a class; return its height."""
        words = wrapped(self.names[label], width, TEXT, MOST_LINES)
        self.text(x, y, words, **more)
        return LINE * (words.count("\n") + 1)


def _query(sheet: _Sheet, x: float, y: float, query: int, answers: Sequence[Episode], width: float) -> float:
    """Draw a query and the answers to it; return the height below it."""
    episode = answers[0]
    by_label: dict[int, list[str]] = {}  # what methods say instead of its class, and which
    for answer in answers:
        if not answer.right[query]:
            by_label.setdefault(int(answer.predicted[query]), []).append(answer.label)
    wrong = sum(map(len, by_label.values()))
    pool = sheet.novel if bool(episode.drawn.query_novel[0, query]) else sheet.base
    frame = "right" if not wrong else "all" if wrong == len(answers) else "some"
    sheet.image(pool[int(episode.drawn.query[0, query])], x, y, IMAGE, frame)
    for i, answer in enumerate(answers):
        right, middle = bool(answer.right[query]), y + LINE * (i + 0.5)
        sheet.axes.plot(x + IMAGE + 0.07, middle, **_small(answer.label))
        sheet.text(
            x + IMAGE + 0.12,
            middle,
            RIGHT if right else WRONG,
            color=BLUE if right else ORANGE,
            gid=f"query {query}, method {i}",
        )
    y += max(IMAGE, LINE * len(answers))
    inset = LINE / 2 + 0.02
    y += sheet.name(x, y + inset, int(episode.labels[query]), width - EDGE, color=DARK)
    for label, methods in by_label.items():
        for i, method in enumerate(methods):
            sheet.axes.plot(x + MARK * (i + 0.4), y + inset, **_small(method))
        marks = MARK * len(methods)
        y += sheet.name(x + marks, y + inset, label, width - EDGE - marks, color=ORANGE, gid=f"said of query {query}")
    return y


def _support(sheet: _Sheet, y: float, episode: Episode, width: float, size: float) -> float:
    """Draw the support images, a block for each class, next to and below each other; return the height below."""
    ways = len(episode.classes)
    shots, each = episode.drawn.support.shape[1] // ways, size + BETWEEN
    across = min(shots, MOST_ACROSS, max(1, int((width - 2 * EDGE) / each)))
    blocks = max(1, min(ways, int((width - EDGE) / max(across * each + EDGE, BLOCK))))
    block = (width - EDGE) / blocks
    titles = [wrapped(f"N{way + 1} {plain_text(name)}", block - EDGE, TEXT) for way, name in enumerate(episode.classes)]
    head = LINE * max(title.count("\n") + 1 for title in titles) + 0.01  # of the longest, so that images stand in lines
    deep = head + math.ceil(shots / across) * each + 0.04
    y = sheet.heading(y, f"support: {ways} ways, {shots} {'shot' if shots == 1 else 'shots'}")
    for way, title in enumerate(titles):
        x, top = EDGE + way % blocks * block, y + way // blocks * deep
        sheet.text(x, top + LINE / 2, title)
        for shot in range(shots):
            row, column = divmod(shot, across)
            image = sheet.novel[int(episode.drawn.support[0, way * shots + shot])]
            sheet.image(image, x + column * each, top + head + row * each, size)
    return y + math.ceil(ways / blocks) * deep


def _small(label: str) -> dict[str, Any]:
    """Return the look of a method's mark next to a text."""
    return marker_style(label) | {"markersize": 3}


def _entry(answer: Episode) -> str:
    right = answer.right
    return f"{plain_text(answer.label)}: {int(right.sum())} of {len(right)} right"


def _legend(axes: Axes, answers: Sequence[Episode], width: float, title: str) -> float:
    axes.text(EDGE, LABEL / 2, title, va="center", fontsize=TITLE)
    across = max(1, int(width / (max(width_of(_entry(answer)) for answer in answers) + 0.3)))
    for i, answer in enumerate(answers):
        x, y = i % across * width / across + 0.1, LABEL * (1 + i // across) + LABEL / 2
        axes.plot(x, y, **marker_style(answer.label), clip_on=False)
        axes.text(x + 0.1, y, _entry(answer), va="center")
    return LABEL * (1 + math.ceil(len(answers) / across))


def _key(sheet: _Sheet, y: float, methods: int) -> float:
    """Draw the key of frames and orange names; return the height below it."""
    x, middle, size = EDGE, y + LABEL / 2, 0.1
    entries = [("all", "wrong by all" if methods > 1 else "wrong")] + [("some", "wrong by some")] * (methods > 1)
    for kind, meaning in entries:
        sheet.frame(x, middle - size / 2, size, kind, gid=f"key: {meaning}")
        sheet.text(x + size + 0.05, middle, meaning)
        x += size + 0.2 + width_of(meaning, TEXT)
    sheet.text(x, middle, "orange", color=ORANGE)
    sheet.text(x + width_of("orange ", TEXT) + 0.03, middle, "the class predicted instead")
    return y + LABEL
