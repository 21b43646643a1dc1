"""What the commands of ``ifsl-bench plot`` share: options, and the rows or models that they draw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.cli.options import (
    device_option,
    folders_of,
    home_option,
    names,
    pairs,
    quiet_option,
    reporter_for,
    results_option,
    verbose_option,
)
from ifsl_bench.common.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ifsl_bench.board.boards import Board
    from ifsl_bench.common.files import Home
    from ifsl_bench.episodic.prepared import Workspace
    from ifsl_bench.protocol.task import Task
    from ifsl_bench.running.job import Job
    from ifsl_bench.running.ranges import Ready


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
        options = click.option("--set", "options", multiple=True, callback=pairs, metavar="NAME=VALUE",
                               help="An option of the methods.")  # fmt: skip
        train = click.option("--train", is_flag=True, help="Train what is not trained yet, as 'run' does.")
        found: Callable[..., Any] = with_asked
        for option in reversed((out_option, methods, options, train, wide_option, device_option, home_option,
                                quiet_option, verbose_option)):  # fmt: skip
            found = option(found)
        return found

    return decorated


def numbers(_: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
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
