"""The contact sheet of one episode: support above, queries below with what methods call them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.pools import Dataset
from ifsl_bench.figures.models import Episode
from ifsl_bench.figures.style import COLUMN, DARK, PAGE, dots, styled, text_of
from ifsl_bench.figures.texts import fitting, width_of, wrapped
from ifsl_bench.protocol.task import Task

CELL, IMAGE, SUPPORT = 0.64, 0.36, 0.22  # inches: of a query with its texts, its image, a support image
LINE, GAP, LABEL = 0.115, 0.08, 0.16  # a line of text, what is between parts, a heading
MOST_BESIDE = 10  # support images of a class beside each other
RIGHT, WRONG = "\N{CHECK MARK}", "\N{BALLOT X}"
FALSE = "#D55E00"  # the colour of wrong answers
TALLEST = 9.0  # inches: what a page has room for


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

    Below a query stand its class and the answer of each method: a tick where its joint prediction is right, in another
    colour a cross and the predicted class where it is wrong. A query that no method gets right has a frame of that
    colour. Novel classes are N1, N2 and so on, with their names beside their support.

    Args:
        answers: of the same episode, one a method.
    """
    episode, width = answers[0].episode, PAGE if wide else COLUMN
    names = _Names(episode)
    novel, base = (dataset.pool(task.pool("test", part)) for part in ("novel", "base"))
    ways, shots = len(episode.classes), episode.drawn.support.shape[1] // len(episode.classes)
    per_line = min(shots, MOST_BESIDE, max(1, int((width - 0.1) / (SUPPORT + 0.02))))
    block = max(per_line * (SUPPORT + 0.02) + 0.05, 1.3)
    blocks = max(1, min(ways, int(width / block)))
    block, deep = width / blocks, math.ceil(shots / per_line) * (SUPPORT + 0.02) + LINE + 0.05
    cells = max(1, int(width / CELL))
    cell, order = width / cells, _order(episode)
    parts = [
        [[_Query(answers, names, int(i), cell) for i in part[at : at + cells]] for at in range(0, len(part), cells)]
        for part in order
    ]
    top = LABEL * (1 + math.ceil(len(answers) / _beside(answers, width)))
    of_parts = [LABEL + GAP / 2 + sum(map(_height, part)) for part in parts if part]
    height = top + LABEL + math.ceil(ways / blocks) * deep + sum(of_parts)
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    sheet = _Sheet(axes, novel.images, base.images)
    y = _legend(axes, answers, width, f"{task.name}, test episode {int(episode.drawn.index[0])}")
    y = sheet.heading(y, f"support: {ways} ways, {shots} shot{'s' * (shots > 1)}")
    for way in range(ways):
        x, below = way % blocks * block + 0.05, y + way // blocks * deep
        said = fitting(f"N{way + 1}  {names.novel[way]}", block - 0.08)
        axes.text(x, below + LINE / 2, said, va="center")
        for shot in range(shots):
            image = int(episode.drawn.support[0, way * shots + shot])
            place = x + shot % per_line * (SUPPORT + 0.02), below + LINE + shot // per_line * (SUPPORT + 0.02)
            sheet.image(novel.images[image], *place, SUPPORT)
    y += math.ceil(ways / blocks) * deep
    for part, title in zip(parts, ("queries of novel classes", "queries of base classes"), strict=True):
        y = sheet.heading(y + GAP / 2, title) if part else y
        for row in part:
            for i, query in enumerate(row):
                query.draw(sheet, i * cell, y)
            y += _height(row)
    said = f"{height:.0f} inches tall, more than a page has room for: --wide makes it lower, and so do fewer methods"
    return figure, [said] if height > TALLEST and not wide else []


class _Names:
    """What classes are called under a query: N1 for the first novel class, base classes by their short names."""

    def __init__(self, episode: Episode) -> None:
        self.base = [text_of(name) for name in episode.base_classes]
        self.novel = [text_of(name) for name in episode.classes]

    def __getitem__(self, label: int) -> str:
        known = len(self.base)
        return self.base[label] if label < known else f"N{label - known + 1}"


@dataclass(frozen=True)
class _Sheet:
    axes: Axes
    novel: np.ndarray
    base: np.ndarray

    def image(self, image: np.ndarray, x: float, y: float, size: float, frame: str = "") -> None:
        grey = image.shape[-1] == 1
        self.axes.imshow(image[..., 0] if grey else image, cmap="gray", vmin=0, vmax=255, aspect="auto",
                         extent=(x, x + size, y + size, y), interpolation="nearest")  # fmt: skip
        # An image may be as white as paper.
        self.axes.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor=frame or "#A0A0A0",
                                      linewidth=1.4 if frame else 0.4))  # fmt: skip

    def heading(self, y: float, text: str) -> float:
        self.axes.text(0.05, y + LABEL / 2, text, va="center", color=DARK, style="italic")
        return y + LABEL


def _order(episode: Episode) -> tuple[np.ndarray, np.ndarray]:
    """Queries of novel and of base classes, by label."""
    order = np.argsort(episode.labels.numpy(), kind="stable")
    novel = episode.drawn.query_novel[0].cpu().numpy()[order]
    return order[novel], order[~novel]


def _beside(answers: Sequence[Answered], width: float) -> int:
    """How many entries of the legend fit beside each other."""
    widest = max(width_of(_entry(one)) for one in answers) + 0.3
    return max(1, int(width / widest))


def _entry(one: Answered) -> str:
    right = one.episode.right
    return f"{text_of(one.label)}: {int(right.sum())} of {len(right)} right"


def _legend(axes: Axes, answers: Sequence[Answered], width: float, title: str) -> float:
    axes.text(0.05, LABEL / 2, title, va="center", fontsize=8)
    beside = _beside(answers, width)
    for i, one in enumerate(answers):
        x, y = i % beside * width / beside + 0.1, LABEL * (1 + i // beside) + LABEL / 2
        axes.plot(x, y, **dots(one.label), clip_on=False)
        axes.text(x + 0.1, y, _entry(one), va="center")
    return LABEL * (1 + math.ceil(len(answers) / beside))


class _Query:
    """A query with its class and the answers, in lines that fit its cell."""

    def __init__(self, answers: Sequence[Answered], names: _Names, query: int, width: float) -> None:
        self.answers, self.query, self.width = answers, query, width
        self.name = wrapped(names[int(answers[0].episode.labels[query])], width - 0.03)
        self.said = []
        for one in answers:
            right = bool(one.episode.right[query])
            text = RIGHT if right else f"{WRONG}\N{NO-BREAK SPACE}{names[int(one.episode.predicted[query])]}"
            self.said.append((right, wrapped(text, width - 0.12)))

    @property
    def lines(self) -> int:
        return len(self.name) + sum(len(said) for _, said in self.said)

    def draw(self, sheet: _Sheet, x: float, y: float) -> None:
        drawn = self.answers[0].episode.drawn
        novel, row = bool(drawn.query_novel[0, self.query]), int(drawn.query[0, self.query])
        frame = "" if any(right for right, _ in self.said) else FALSE
        sheet.image((sheet.novel if novel else sheet.base)[row], x + (self.width - IMAGE) / 2, y, IMAGE, frame)
        y += IMAGE + LINE / 2 + 0.02
        for line in self.name:
            sheet.axes.text(x + self.width / 2, y, line, ha="center", va="center", color=DARK)
            y += LINE
        for i, (one, (right, said)) in enumerate(zip(self.answers, self.said, strict=True)):
            widest = max(map(width_of, said))
            start = x + max(0.05, (self.width - widest - 0.08) / 2)
            sheet.axes.plot(start, y, **dots(one.label) | {"markersize": 3})
            for n, line in enumerate(said):
                gid = f"query {self.query}, method {i}" if n == 0 else None
                colour = "black" if right else FALSE
                sheet.axes.text(start + 0.06, y, line, va="center", color=colour, weight="normal", gid=gid)
                y += LINE


def _height(row: Sequence[_Query]) -> float:
    """Of a line of queries, in inches."""
    return IMAGE + 0.02 + LINE * max(query.lines for query in row) + GAP
