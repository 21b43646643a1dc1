"""``ifsl-bench plot KIND ...``: figures for papers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.cli.options import (
    Group,
    device_option,
    folders_of,
    home_option,
    names,
    quiet_option,
    reporter_for,
    results_option,
    verbose_option,
)
from ifsl_bench.cli.options import pairs as pairs_of
from ifsl_bench.common.errors import UserError, unknown
from ifsl_bench.protocol.limits import MOST_SEEDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ifsl_bench.board.boards import Board
    from ifsl_bench.common.files import Home
    from ifsl_bench.episodic.prepared import Workspace
    from ifsl_bench.protocol.task import Task
    from ifsl_bench.running.job import Job
    from ifsl_bench.running.ranges import Ready


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
index_option = click.option("--index", type=int, default=0, show_default=True, help="Which test episode.")


@dataclass(frozen=True)
class OfResults:
    """What is asked of a figure that is made from results."""

    out: Path
    labels: tuple[str, ...]
    setting: str | None
    wide: bool
    folders: Home

    def board(self, name: str) -> Board:
        """The rows of a task that are to be drawn."""
        from ifsl_bench.board.boards import load_board
        from ifsl_bench.figures.rows import shown

        return shown(load_board(self.task(name), self.folders.results), self.labels, self.setting)

    def task(self, name: str) -> Task:
        """The one task of that name.

        Raises:
            UserError: no such task, or a file that defines several.
        """
        from ifsl_bench.protocol.task_files import find

        (found, *more) = find(name, home=self.folders)
        if more:
            raise UserError(f"{name} defines several tasks; choose one as {name}:NAME")
        return found


def of_results(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of figures that are made from results, gathered into one argument ``asked``."""

    @functools.wraps(command)
    def with_asked(**given: Any) -> Any:
        folders = folders_of(given.pop("home"), given.pop("results_dir"))
        said = {name: given.pop(name) for name in ("out", "labels", "setting", "wide")}
        return command(asked=OfResults(**said, folders=folders), **given)

    labels = click.option("--method", "labels", multiple=True, callback=names, metavar="LABEL",
                          help="Only rows with these labels, comma-separated or repeated [methods without options of "
                          "their own].")  # fmt: skip
    setting = click.option("--setting", metavar="NAME", help="Methods as published (paper), or tuned ones (tuned-12).")
    found: Callable[..., Any] = with_asked
    for option in reversed((out_option, labels, setting, wide_option, home_option, results_option)):
        found = option(found)
    return found


@dataclass(frozen=True)
class OfModels:
    """What is asked of a figure that is made with trained models."""

    out: Path
    methods: tuple[str, ...]
    options: dict[str, str]
    train: bool
    wide: bool
    work: Workspace

    def jobs(self, task: str, index: int) -> list[Job]:
        """Of the methods on a task; raises :class:`UserError` for an unknown name or option, or an episode beyond."""
        from ifsl_bench.figures.models import check_index, jobs_of

        jobs = jobs_of(self.methods, task, self.work.home, [0], self.options)
        check_index(jobs[0].task, index)
        return jobs

    def opened(self, jobs: Sequence[Job]) -> Iterator[tuple[str, Ready]]:
        """Their labels and models, one after the other.

        Raises:
            UserError: before any, where one is not trained and is not to be.
        """
        from ifsl_bench.figures.models import check_trained, open_model

        if not self.train:
            check_trained(jobs, self.work.home)
        yield from ((job.label, open_model(job, self.work)) for job in jobs)


def of_models(*usual: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of figures that are made with trained models, gathered into one argument ``asked``.

    Args:
        usual: the methods where the user names none; none where one has to be named.
    """

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_asked(**given: Any) -> Any:
            from ifsl_bench.backbone.device import keep_freed_memory
            from ifsl_bench.campaigns import api

            keep_freed_memory()
            reporter = reporter_for(given.pop("quiet"), given.pop("verbose"))
            work = api.workspace(given.pop("home"), None, given.pop("device"), reporter)
            said = {name: given.pop(name) for name in ("out", "methods", "options", "train", "wide")}
            said["methods"] = said["methods"] or usual
            return command(asked=OfModels(**said, work=work), **given)

        methods = click.option("--method", "methods", multiple=True, callback=names, required=not usual,
                               show_default=", ".join(usual) or None,
                               help="Methods, comma-separated or repeated.")  # fmt: skip
        options = click.option("--set", "options", multiple=True, callback=pairs_of, metavar="NAME=VALUE",
                               help="An option of the methods.")  # fmt: skip
        train = click.option("--train", is_flag=True, help="Train what is not trained yet, as 'run' does.")
        found: Callable[..., Any] = with_asked
        for option in reversed((out_option, methods, options, train, wide_option, device_option, home_option,
                                quiet_option, verbose_option)):  # fmt: skip
            found = option(found)
        return found

    return decorated


def _numbers(_: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Whole numbers from 1, comma-separated."""
    words = [word.strip() for word in value.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and int(word[:9]) > 0 for word in words):
        raise UserError(f"--{parameter.name} takes whole numbers from 1, as in 5,20, not {value!r}")
    return tuple(sorted({int(word) for word in words}))


def written(drawing: tuple[Figure, Sequence[str]], out: Path) -> None:
    """Writes a figure, and says so, and what else there is to say."""
    from ifsl_bench.figures.style import save

    figure, notes = drawing
    save(figure, out)
    click.echo(f"wrote {out}")
    for note in notes:
        click.echo(note)


@plot.command()
@click.argument("task")
@of_results
def tradeoff(task: str, asked: OfResults) -> None:
    """Base against novel accuracy, with bias curves.

    A row is the curve that a bias on all novel logits traces, its argmax a point; grey lines join equal Acc.

    \b
    ifsl-bench plot tradeoff glyphs-5shot --out tradeoff.pdf
    ifsl-bench plot tradeoff glyphs-5shot --method lr,lr+s,lr+a --wide --out x.svg
    """
    from ifsl_bench.figures.tradeoff import draw

    written(draw(asked.board(task), asked.wide), asked.out)


@plot.command()
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@of_results
def ranks(tasks: tuple[str, ...], asked: OfResults) -> None:
    """The ranks that each method can have.

    \b
    ifsl-bench plot ranks glyphs-5shot --out ranks.pdf
    ifsl-bench plot ranks glyphs-1shot glyphs-5shot --wide --out ranks.pdf
    """
    from ifsl_bench.figures.ranks import draw

    written(draw([asked.board(task) for task in tasks], asked.wide), asked.out)


@plot.command()
@click.argument("task")
@of_results
def pairs(task: str, asked: OfResults) -> None:
    """Paired differences of all methods, a heat map.

    What is not significant is hatched. Numbers stand in the cells where there is room: with --wide, or few --method.

    \b
    ifsl-bench plot pairs glyphs-5shot --wide --out pairs.pdf
    ifsl-bench plot pairs glyphs-5shot --method lr,lr+s,lr+a,mlp,mlp+s,mlp+a --out pairs.pdf
    """
    from ifsl_bench.figures.pairs import draw

    written(draw(asked.board(task), asked.wide), asked.out)


@plot.command()
@click.argument("task")
@of_results
def seeds(task: str, asked: OfResults) -> None:
    """The accuracy of every training seed.

    \b
    ifsl-bench plot seeds glyphs-5shot --out seeds.pdf
    ifsl-bench plot seeds glyphs-5shot --method lr,lr+s,lr+a --out seeds.svg
    """
    from ifsl_bench.figures.seeds import draw

    written(draw(asked.board(task), asked.wide), asked.out)


@plot.command()
@click.argument("task")
@of_results
def validation(task: str, asked: OfResults) -> None:
    """Validation accuracy while meta-training.

    \b
    ifsl-bench plot validation glyphs-5shot --out validation.pdf
    ifsl-bench plot validation glyphs-5shot --method lr+s,lr+a --out validation.pdf
    """
    from ifsl_bench.figures.validation import draw

    written(draw(asked.board(task), asked.wide), asked.out)


@plot.command("base-classes")
@click.argument("task")
@of_results
def base_classes(task: str, asked: OfResults) -> None:
    """Accuracy by the number of base classes.

    From results of TASK and of TASK+base-classes=N, which ``run --base-classes N`` makes.

    \b
    ifsl-bench run --method imprint,lr --task glyphs-5shot --base-classes 50
    ifsl-bench plot base-classes glyphs-5shot --method imprint,lr --out classes.pdf
    """
    from ifsl_bench.figures.base_classes import boards_of, draw

    boards = boards_of(asked.task(task), asked.folders)
    written(draw(boards, asked.labels, asked.setting, asked.wide), asked.out)


@plot.command("inner-steps")
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@click.option("--steps", default="1,2,5,10,20,50,100,200,500", show_default=True, callback=_numbers, metavar="N,...",
              help="After which gradient steps to stop.")  # fmt: skip
@click.option("--unrolled", default="20", show_default=True, callback=_numbers, metavar="N,...",
              help="Steps that T-BPTT is trained with; a line each.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(1, MOST_SEEDS), default=1, show_default=True,
              help="How many training seeds to average over.")  # fmt: skip
@click.option("--episodes", type=int, help="Only the first so many test episodes [500].")
@of_models("lr+a")
def inner_steps(
    tasks: tuple[str, ...], steps: tuple[int, ...], unrolled: tuple[int, ...], seeds: int, episodes: int | None,
    asked: OfModels,
) -> None:  # fmt: skip
    """Accuracy by inner steps, of RBP and T-BPTT.

    Models that were trained with either are evaluated after so many gradient steps of the inner problem, and converged.

    \b
    ifsl-bench plot inner-steps glyphs-5shot --train --out steps.pdf
    ifsl-bench plot inner-steps glyphs-1shot glyphs-5shot --wide --seeds 3 --unrolled 5,20 --out steps.pdf
    """
    from ifsl_bench.figures.inner_steps import courses, draw

    found = {
        task: courses(asked.methods, task, asked.work, steps=steps, unrolled=unrolled, seeds=range(seeds),
                      episodes=episodes, options=asked.options, train=asked.train)
        for task in tasks
    }  # fmt: skip
    written(draw(found, asked.wide), asked.out)


@plot.command("episode-pca")
@click.argument("task")
@index_option
@of_models("lr+a")
def episode_pca(task: str, index: int, asked: OfModels) -> None:
    """An episode before and after the fast weights.

    In the plane of its first two principal components, with the regions where the method answers with each class.

    \b
    ifsl-bench plot episode-pca glyphs-5shot --train --out pca.pdf
    ifsl-bench plot episode-pca glyphs-5shot --index 3 --method lr+a,imprint --out pca.pdf
    """
    from ifsl_bench.figures.episode_pca import draw, plane_of

    planes = [plane_of(ready, index, label) for label, ready in asked.opened(asked.jobs(task, index))]
    written(draw(planes, asked.wide), asked.out)


@plot.command()
@click.argument("task")
@index_option
@of_models("lr+a")
def attractors(task: str, index: int, asked: OfModels) -> None:
    """Base weights and the attractors they produce.

    \b
    ifsl-bench plot attractors glyphs-5shot --train --out attractors.pdf
    ifsl-bench plot attractors glyphs-5shot --method lr+a,lr+s --index 3 --wide --out attractors.pdf
    """
    from ifsl_bench.figures.attractors import draw, weights_of

    found = [weights_of(ready, index, label) for label, ready in asked.opened(asked.jobs(task, index))]
    written(draw(found, asked.wide), asked.out)


@plot.command()
@click.argument("task")
@index_option
@of_models()
def episode(task: str, index: int, asked: OfModels) -> None:
    """The contact sheet of an episode.

    Support images above, queries below, with what the methods call them: a tick is right, a cross wrong.

    \b
    ifsl-bench plot episode glyphs-5shot --method imprint --out episode.pdf
    ifsl-bench plot episode glyphs-5shot --index 3 --method lr+a,imprint --wide --out episode.pdf
    """
    from ifsl_bench.figures.episode_sheet import Answered, check_images, draw
    from ifsl_bench.figures.models import dataset_of, episode_of

    jobs = asked.jobs(task, index)
    dataset = dataset_of(jobs[0], asked.work)
    check_images(dataset, jobs[0].task)
    answers = [Answered(label, episode_of(ready, index)) for label, ready in asked.opened(jobs)]
    written(draw(answers, dataset, jobs[0].task, asked.wide), asked.out)
