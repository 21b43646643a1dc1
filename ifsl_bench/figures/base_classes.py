"""Accuracy against the number of base classes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ifsl_bench.board.boards import Board, load_board, load_variants
from ifsl_bench.board.measured import Row
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home
from ifsl_bench.data.preparing.outline import outline_of
from ifsl_bench.figures.rows import by_accuracy, shown
from ifsl_bench.figures.style import drawn, grid, handle, legend_below, legend_height, new_figure, styled
from ifsl_bench.protocol.task import Task
from ifsl_bench.protocol.variants import split


def boards_of(task: Task, home: Home) -> dict[int, Board]:
    """Number of base classes -> what is stored of the task with so many, and of the task itself with all of them.

    Raises:
        UserError: nothing is stored of the task with fewer, or nobody knows how many it has.
    """
    few = {
        change["base-classes"]: board
        for board in load_variants(task, home.results)
        if board.rows and set(change := split(board.name)[1].said()) == {"base-classes"}
    }
    found = {int(count): board for count, board in few.items()}
    if not found:
        raise UserError(f"no results of {task.name} with fewer base classes are stored; make some, for example with "
                        f"ifsl-bench run --method imprint --task {task.name} --base-classes 20")  # fmt: skip
    whole = load_board(task, home.results)
    if whole.rows:
        if not (every := outline_of(task, home).base_classes):
            raise UserError(f"the number of base classes of {task.name} is unknown until data set "
                            f"{task.dataset.name} is prepared: ifsl-bench data list")  # fmt: skip
        found[every] = whole
    return dict(sorted(found.items()))


@styled
def draw(
    boards: dict[int, Board], labels: Sequence[str] = (), setting: str | None = None, wide: bool = False
) -> tuple[Figure, list[str]]:
    """A row of each board becomes a line, with the 95% interval over episodes that its table has.

    Follows the figure "Results on tiered-ImageNet with {50, 100, 150, 200} base classes" of Ren et al. (2019), with
    intervals and any rows. Joint accuracy falls with every class that is added to the softmax, and rises with what a
    backbone learns from more of them; each number has its own backbone. Rows stored for one number alone are left out.

    Raises:
        UserError: no row is stored for two numbers of base classes.
    """
    chosen = {count: by_accuracy(shown(board, _there(board, labels), setting)) for count, board in boards.items()
              if not labels or _there(board, labels)}  # fmt: skip
    rows: dict[str, dict[int, Row]] = {}
    for count in sorted(chosen, reverse=True):  # the legend has the order of the most classes
        for row in reversed(chosen[count]):  # of two rows with one label the better
            rows.setdefault(row.label, {})[count] = row
    order = [row.label for count in sorted(chosen, reverse=True) for row in chosen[count]]
    names = [label for label in dict.fromkeys(order) if len(rows[label]) > 1]
    if not names:
        raise UserError("no row of these is stored for two numbers of base classes; those that there are: "
                        f"{', '.join(map(str, boards))}")  # fmt: skip
    figure = new_figure(2.0 + legend_height(names, wide), wide)
    axes = figure.add_subplot(xlabel="base classes", ylabel="Acc. (%)")
    for name in names:
        counts = sorted(rows[name])
        values = [rows[name][count].summary()["acc"] for count in counts]
        axes.errorbar(counts, [v.mean for v in values], [v.interval for v in values], **drawn(name), elinewidth=0.8,
                      capsize=1.5, label=name, gid=name)  # fmt: skip
    axes.set_xticks(sorted(boards))
    grid(axes, "y")
    legend_below(figure, [handle(name) for name in names], names, wide)
    if single := [label for label in rows if len(rows[label]) < 2]:
        return figure, [f"stored for only one number of base classes: {', '.join(single)}"]
    return figure, []


def _there(board: Board, labels: Sequence[str]) -> list[str]:
    known = {row.label.lower() for row in board.rows}
    return [label for label in labels if label.lower() in known]
