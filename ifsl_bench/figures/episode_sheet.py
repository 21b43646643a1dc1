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

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.pools import Dataset
from ifsl_bench.figures.models import Episode
from ifsl_bench.figures.style import COLUMN, DARK, PAGE, dots, styled, text_of
from ifsl_bench.figures.texts import width_of, wrapped
from ifsl_bench.protocol.task import Task

TEXT, TITLE = 6.0, 8.0  # points: a sheet has more text than other figures, and the same columns
CELL, IMAGE = 0.65, 0.35  # inches: of a query with its texts, its image
NARROW, ROOMY, BETWEEN = 0.19, 0.24, 0.015  # a support image in one column, in two, between two of them
LINE, GAP, LABEL, EDGE = 0.094, 0.06, 0.15, 0.04  # a line of text, what is between parts, a heading, the margin
CAPITAL = 0.73 * TEXT / 72  # the height of a letter
BLOCK = 1.05  # of a class's support, at least: for its name
MARK = 0.08  # of a method's mark before what it says
MOST_LINES = 3  # of a name
MOST_BESIDE = 10  # support images of a class beside each other
RIGHT, WRONG = "\N{CHECK MARK}", "\N{BALLOT X}"
BLUE, ORANGE = "#0072B2", "#BF4C00"  # of what is right and wrong, told apart with colour vision deficiencies
FRAMES: dict[str, dict[str, Any]] = {  # around an image
    "right": {"edgecolor": "#A0A0A0", "linewidth": 0.4},  # an image may be as white as paper
    "some": {"edgecolor": ORANGE, "linewidth": 1.2, "linestyle": (0, (1.6, 0.8))},
    "all": {"edgecolor": ORANGE, "linewidth": 1.4},
}


@dataclass(frozen=True)
class Answered:
    """An episode with the answer of a method, and what the method is called."""

    label: str
    episode: Episode


def check_images(dataset: Dataset, task: Task) -> None:
    """Raises :class:`UserError` where a task has features and no images to show."""
    if not dataset.pictures:
        raise UserError(f"task {task.name} has features and no images, so there is no contact sheet of an episode")


@styled
def draw(answers: Sequence[Answered], dataset: Dataset, task: Task, wide: bool = False) -> tuple[Figure, list[str]]:
    """Draws the support images by class, then the queries, novel ones first, each by class.

    Beside a query stand the methods, each with a tick where its joint prediction is right, and a cross where it is
    wrong; below, its class, and the wrong predictions with the methods that make them. A query that every method gets
    wrong has a frame, one that some get wrong a dashed one. Novel classes are N1, N2 and so on, with their names above
    their support.

    Args:
        answers: of the same episode, one a method.
    """
    episode, width = answers[0].episode, PAGE if wide else COLUMN
    names, parts = _Names(episode), _order(episode)
    across = _across(max(map(len, parts)), width)
    cell_width = min((width - EDGE) / across, 2 * CELL)
    tables = [_rows([_Cell.of(int(query), answers, names, cell_width) for query in part], across) for part in parts]
    support = _Support.of(episode, names, width, ROOMY if wide else NARROW)
    heads = LABEL * (2 + math.ceil(len(answers) / _beside(answers, width)))
    height = heads + LABEL + support.height
    height += sum(GAP / 2 + LABEL + sum(_high(row, len(answers)) for row in rows) for rows in tables if rows)
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    novel, base = (dataset.pool(task.pool("test", part)).images for part in ("novel", "base"))
    sheet = _Sheet(axes, novel, base)
    y = _legend(axes, answers, width, f"{task.name}, test episode {int(episode.drawn.index[0])}")
    y = _key(sheet, y, len(answers))
    y = support.draw(sheet, y, episode)
    for rows, title in zip(tables, ("queries of novel classes", "queries of base classes"), strict=True):
        y = sheet.heading(y + GAP / 2, title) if rows else y
        for row in rows:
            for i, cell in enumerate(row):
                cell.draw(sheet, EDGE + i * cell_width, y, answers)
            y += _high(row, len(answers))
    return figure, []


class _Names:
    """Names of classes under a query: N1 for the first novel class, short names for base classes."""

    def __init__(self, episode: Episode) -> None:
        self.base = [text_of(name) for name in episode.base_classes]
        self.novel = [text_of(name) for name in episode.classes]

    def __getitem__(self, label: int) -> str:
        base_count = len(self.base)
        return self.base[label] if label < base_count else f"N{label - base_count + 1}"


@dataclass(frozen=True)
class _Sheet:
    axes: Axes
    novel: np.ndarray
    base: np.ndarray

    def image(self, image: np.ndarray, x: float, y: float, size: float, frame: str = "right") -> None:
        grey = image.shape[-1] == 1
        self.axes.imshow(image[..., 0] if grey else image, cmap="gray", vmin=0, vmax=255, aspect="auto",
                         extent=(x, x + size, y + size, y), interpolation="nearest")  # fmt: skip
        self.frame(x, y, size, frame)

    def frame(self, x: float, y: float, size: float, kind: str, gid: str | None = None) -> None:
        self.axes.add_patch(Rectangle((x, y), size, size, fill=False, **FRAMES[kind], gid=gid))

    def text(self, x: float, y: float, words: str, **more: Any) -> None:
        """Writes one line or more, the first one around ``y``; Matplotlib's baseline is that of the last."""
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


@dataclass(frozen=True)
class _Cell:
    """A query, and what is said of it.

    Attributes:
        name: its class, in lines.
        wrong: what methods say instead, in lines, each with the numbers of these methods.
    """

    query: int
    name: str
    wrong: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, query: int, answers: Sequence[Answered], names: _Names, width: float) -> _Cell:
        by_label: dict[int, list[int]] = {}
        for i, answer in enumerate(answers):
            if not answer.episode.right[query]:
                by_label.setdefault(int(answer.episode.predicted[query]), []).append(i)
        name = wrapped(names[int(answers[0].episode.labels[query])], width - EDGE, TEXT, MOST_LINES)
        wrong = tuple(
            (wrapped(names[label], width - EDGE - MARK * len(by), TEXT, MOST_LINES), tuple(by))
            for label, by in by_label.items()
        )
        return cls(query, name, wrong)

    @property
    def lines(self) -> int:
        return sum(text.count("\n") + 1 for text in (self.name, *(text for text, _ in self.wrong)))

    def draw(self, sheet: _Sheet, x: float, y: float, answers: Sequence[Answered]) -> None:
        drawn = answers[0].episode.drawn
        pool = sheet.novel if bool(drawn.query_novel[0, self.query]) else sheet.base
        wrong = sum(len(by) for _, by in self.wrong)
        frame = "right" if not wrong else "all" if wrong == len(answers) else "some"
        sheet.image(pool[int(drawn.query[0, self.query])], x, y, IMAGE, frame)
        for i, answer in enumerate(answers):
            self._verdict(sheet, x + IMAGE, y + LINE * (i + 0.5), i, answer)
        y += max(IMAGE, LINE * len(answers)) + LINE / 2 + 0.02
        sheet.text(x, y, self.name, color=DARK)
        y += LINE * (self.name.count("\n") + 1)
        for text, by in self.wrong:
            for i, method in enumerate(by):
                sheet.axes.plot(x + MARK * (i + 0.4), y, **_small(answers[method].label))
            sheet.text(x + MARK * len(by), y, text, color=ORANGE, gid=f"said of query {self.query}")
            y += LINE * (text.count("\n") + 1)

    def _verdict(self, sheet: _Sheet, x: float, y: float, number: int, answer: Answered) -> None:
        right = bool(answer.episode.right[self.query])
        sheet.axes.plot(x + 0.07, y, **_small(answer.label))
        sheet.text(x + 0.12, y, RIGHT if right else WRONG, color=BLUE if right else ORANGE,
                   gid=f"query {self.query}, method {number}")  # fmt: skip


@dataclass(frozen=True)
class _Support:
    """The layout of support images: a block for each class, side by side and below each other."""

    titles: tuple[str, ...]
    ways: int
    shots: int
    size: float
    beside: int
    blocks: int
    width: float

    @classmethod
    def of(cls, episode: Episode, names: _Names, width: float, size: float) -> _Support:
        ways = len(episode.classes)
        shots, each = episode.drawn.support.shape[1] // ways, size + BETWEEN
        beside = min(shots, MOST_BESIDE, max(1, int((width - 2 * EDGE) / each)))
        blocks = max(1, min(ways, int((width - EDGE) / max(beside * each + EDGE, BLOCK))))
        block = (width - EDGE) / blocks
        titles = (wrapped(f"N{way + 1} {name}", block - EDGE, TEXT) for way, name in enumerate(names.novel))
        return cls(tuple(titles), ways, shots, size, beside, blocks, block)

    @property
    def head(self) -> float:
        """Inches of a name: of the longest, so that images stand in lines."""
        return LINE * max(title.count("\n") + 1 for title in self.titles) + 0.01

    @property
    def deep(self) -> float:
        """Inches of a block with its name."""
        return self.head + math.ceil(self.shots / self.beside) * (self.size + BETWEEN) + 0.04

    @property
    def height(self) -> float:
        return math.ceil(self.ways / self.blocks) * self.deep

    def draw(self, sheet: _Sheet, y: float, episode: Episode) -> float:
        y = sheet.heading(y, f"support: {self.ways} ways, {self.shots} shot{'s' * (self.shots > 1)}")
        for way in range(self.ways):
            x, top = EDGE + way % self.blocks * self.width, y + way // self.blocks * self.deep
            sheet.text(x, top + LINE / 2, self.titles[way])
            for shot in range(self.shots):
                image = sheet.novel[int(episode.drawn.support[0, way * self.shots + shot])]
                row, column = divmod(shot, self.beside)
                each = self.size + BETWEEN
                sheet.image(image, x + column * each, top + self.head + row * each, self.size)
        return y + self.height


def _small(label: str) -> dict[str, Any]:
    """The look of a method's mark beside a text."""
    return dots(label) | {"markersize": 3}


def _across(most: int, width: float) -> int:
    """The number of queries in a line, spread evenly over the lines so that the last one is not empty."""
    lines = math.ceil(most / int((width - EDGE) / CELL))
    return math.ceil(most / lines)


def _rows(cells: Sequence[_Cell], across: int) -> list[Sequence[_Cell]]:
    return [cells[i : i + across] for i in range(0, len(cells), across)]


def _high(row: Sequence[_Cell], methods: int) -> float:
    """Inches of a line of queries: as much as the most that is said of one takes."""
    return max(IMAGE, LINE * methods) + LINE * max(cell.lines for cell in row) + GAP


def _order(episode: Episode) -> tuple[np.ndarray, np.ndarray]:
    """Queries of novel and of base classes, by label."""
    order = np.argsort(episode.labels.numpy(), kind="stable")
    novel = episode.drawn.query_novel[0].cpu().numpy()[order]
    return order[novel], order[~novel]


def _beside(answers: Sequence[Answered], width: float) -> int:
    """The number of legend entries that fit beside each other."""
    widest = max(width_of(_entry(answer)) for answer in answers) + 0.3
    return max(1, int(width / widest))


def _entry(answer: Answered) -> str:
    right = answer.episode.right
    return f"{text_of(answer.label)}: {int(right.sum())} of {len(right)} right"


def _legend(axes: Axes, answers: Sequence[Answered], width: float, title: str) -> float:
    axes.text(EDGE, LABEL / 2, title, va="center", fontsize=TITLE)
    beside = _beside(answers, width)
    for i, answer in enumerate(answers):
        x, y = i % beside * width / beside + 0.1, LABEL * (1 + i // beside) + LABEL / 2
        axes.plot(x, y, **dots(answer.label), clip_on=False)
        axes.text(x + 0.1, y, _entry(answer), va="center")
    return LABEL * (1 + math.ceil(len(answers) / beside))


def _key(sheet: _Sheet, y: float, methods: int) -> float:
    """Draws the key of frames and orange names; returns the height below it."""
    x, middle, size = EDGE, y + LABEL / 2, 0.1
    entries = [("all", "wrong by all" if methods > 1 else "wrong")] + [("some", "wrong by some")] * (methods > 1)
    for kind, meaning in entries:
        sheet.frame(x, middle - size / 2, size, kind, gid=f"key: {meaning}")
        sheet.text(x + size + 0.05, middle, meaning)
        x += size + 0.2 + width_of(meaning, TEXT)
    sheet.text(x, middle, "orange", color=ORANGE)
    sheet.text(x + width_of("orange ", TEXT) + 0.03, middle, "the class predicted instead")
    return y + LABEL
