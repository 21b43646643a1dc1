"""``ifsl-bench plot KIND ...``: figures for papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.cli.options import Group, folders_of, home_option, names, results_option
from ifsl_bench.common.errors import UserError, unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ifsl_bench.board.boards import Board
    from ifsl_bench.common.files import Home
    from ifsl_bench.protocol.task import Task


class Kinds(Group):
    """Suggests the nearest kind for an unknown one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise unknown("kind of figure", args[0], self.commands)
        return super().resolve_command(ctx, args)


@click.group(cls=Kinds)
def plot() -> None:
    """Draw a figure for a paper, as PDF, SVG or PNG.

    Figures are one column of a two-column paper wide (3.3 inches), or two with --wide (6.8 inches), with text of 7
    points and more: include them as they are. A method has the same colour and marker in all of them.
    """


def _checked(_: click.Context, __: click.Parameter, value: str) -> Path:
    from ifsl_bench.figures.style import format_of

    path = Path(value).expanduser()
    format_of(path)  # a wrong name is told before anything is computed
    return path


out_option = click.option("--out", required=True, callback=_checked, metavar="FILE", help="x.pdf, x.svg or x.png.")
wide_option = click.option("--wide", is_flag=True, help="Two columns wide.")
labels_option = click.option("--method", "labels", multiple=True, callback=names, metavar="LABEL",
                             help="Only rows with these labels, comma-separated or repeated [methods without options "
                             "of their own].")  # fmt: skip
setting_option = click.option("--setting", metavar="NAME", help="Methods as published (paper), or tuned ones "
                              "(tuned-12).")  # fmt: skip


def of_results(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of figures that are made from results."""
    for option in reversed((out_option, labels_option, setting_option, wide_option, home_option, results_option)):
        command = option(command)
    return command


def written(drawing: tuple[Figure, Sequence[str]], out: Path) -> None:
    """Writes a figure, and says so, and what else there is to say."""
    from ifsl_bench.figures.style import save

    figure, notes = drawing
    save(figure, out)
    click.echo(f"wrote {out}")
    for note in notes:
        click.echo(note)


def the_task(name: str, home: Home) -> Task:
    """The one task of that name.

    Raises:
        UserError: no such task, or a file that defines several.
    """
    from ifsl_bench.protocol.task_files import find

    (found, *more) = find(name, home=home)
    if more:
        raise UserError(f"{name} defines several tasks; choose one as {name}:NAME")
    return found


def the_board(task: str, labels: Sequence[str], setting: str | None, home: Home) -> Board:
    """The rows of a task that are to be drawn."""
    from ifsl_bench.board.boards import load_board
    from ifsl_bench.figures.rows import shown

    return shown(load_board(the_task(task, home), home.results), labels, setting)


@plot.command()
@click.argument("task")
@of_results
def tradeoff(
    task: str, out: Path, labels: tuple[str, ...], setting: str | None, wide: bool, home: str | None,
    results_dir: str | None,
) -> None:  # fmt: skip
    """Base against novel accuracy, with the curves that a bias on novel logits traces, and lines of equal Acc.

    \b
    ifsl-bench plot tradeoff glyphs-5shot --out tradeoff.pdf
    ifsl-bench plot tradeoff glyphs-5shot --method lr,lr+s,lr+a --wide --out tradeoff.svg
    """
    from ifsl_bench.figures.tradeoff import draw

    written(draw(the_board(task, labels, setting, folders_of(home, results_dir)), wide), out)


@plot.command()
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@of_results
def ranks(
    tasks: tuple[str, ...], out: Path, labels: tuple[str, ...], setting: str | None, wide: bool, home: str | None,
    results_dir: str | None,
) -> None:  # fmt: skip
    """The ranks that each method can have, a panel a task.

    \b
    ifsl-bench plot ranks glyphs-5shot --out ranks.pdf
    ifsl-bench plot ranks glyphs-1shot glyphs-5shot --wide --out ranks.pdf
    """
    from ifsl_bench.figures.ranks import draw

    folders = folders_of(home, results_dir)
    written(draw([the_board(task, labels, setting, folders) for task in tasks], wide), out)


@plot.command()
@click.argument("task")
@of_results
def pairs(
    task: str, out: Path, labels: tuple[str, ...], setting: str | None, wide: bool, home: str | None,
    results_dir: str | None,
) -> None:  # fmt: skip
    """Paired differences between every two methods as a heat map; what is not significant is hatched.

    \b
    ifsl-bench plot pairs glyphs-5shot --wide --out pairs.pdf
    """
    from ifsl_bench.figures.pairs import draw

    written(draw(the_board(task, labels, setting, folders_of(home, results_dir)), wide), out)


@plot.command()
@click.argument("task")
@of_results
def seeds(
    task: str, out: Path, labels: tuple[str, ...], setting: str | None, wide: bool, home: str | None,
    results_dir: str | None,
) -> None:  # fmt: skip
    """The accuracy of every training seed as a dot.

    \b
    ifsl-bench plot seeds glyphs-5shot --out seeds.pdf
    """
    from ifsl_bench.figures.seeds import draw

    written(draw(the_board(task, labels, setting, folders_of(home, results_dir)), wide), out)


@plot.command()
@click.argument("task")
@of_results
def validation(
    task: str, out: Path, labels: tuple[str, ...], setting: str | None, wide: bool, home: str | None,
    results_dir: str | None,
) -> None:  # fmt: skip
    """Validation accuracy in the course of meta-training.

    \b
    ifsl-bench plot validation glyphs-5shot --out validation.pdf
    """
    from ifsl_bench.figures.validation import draw

    written(draw(the_board(task, labels, setting, folders_of(home, results_dir)), wide), out)


@plot.command("base-classes")
@click.argument("task")
@of_results
def base_classes(
    task: str, out: Path, labels: tuple[str, ...], setting: str | None, wide: bool, home: str | None,
    results_dir: str | None,
) -> None:  # fmt: skip
    """Accuracy against the number of base classes, from results of TASK and of TASK+base-classes=N.

    \b
    ifsl-bench run --method imprint,lr --task glyphs-5shot --base-classes 50
    ifsl-bench plot base-classes glyphs-5shot --method imprint,lr --out base-classes.pdf
    """
    from ifsl_bench.figures.base_classes import boards_of, draw

    folders = folders_of(home, results_dir)
    written(draw(boards_of(the_task(task, folders), folders), labels, setting, wide), out)
