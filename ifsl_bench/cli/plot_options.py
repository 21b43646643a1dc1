"""Options that the commands of ``ifsl-bench plot`` share, and the writing of figures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.cli.completion import complete_methods, complete_options, complete_rows
from ifsl_bench.cli.options import (
    Whole,
    device_option,
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
    from ifsl_bench.figures.plot import Drawing


def _checked(_: click.Context, __: click.Parameter, value: str) -> Path:
    from ifsl_bench.figures.style import format_of

    path = Path(value).expanduser()
    format_of(path)  # a wrong name is told before anything is computed
    return path


out_option = click.option("--out", required=True, callback=_checked, metavar="FILE", help="x.pdf, x.svg or x.png.")
wide_option = click.option("--wide", is_flag=True, help="Two columns wide.")
index_option = click.option("--index", type=Whole(), default=0, help="Which test episode [0].")


def of_results(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of figures that are made from results, by the names of their function's arguments; and ``out``."""

    @functools.wraps(command)
    def with_asked(**given: Any) -> Any:
        return command(results=given.pop("results_dir"), **given)

    labels = click.option("--method", "methods", multiple=True, callback=names, metavar="LABEL",
                          shell_complete=complete_rows,
                          help="Only rows with these labels, comma-separated or repeated [methods without options of "
                          "their own].")  # fmt: skip
    setting = click.option("--setting", metavar="NAME", help="Methods as published (paper), or tuned ones (tuned-12).")
    decorated: Callable[..., Any] = with_asked
    for option in reversed((out_option, labels, setting, wide_option, home_option, results_option)):
        decorated = option(decorated)
    return decorated


def of_models(*usual: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of figures that are made with trained models, like :func:`of_results`.

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
            given["methods"] = given["methods"] or usual
            return command(work=work, **given)

        default = f" [{','.join(usual)}]" if usual else ""
        methods = click.option("--method", "methods", multiple=True, callback=names, required=not usual,
                               shell_complete=complete_methods,
                               help=f"Methods, comma-separated or repeated{default}.")  # fmt: skip
        options = click.option("--set", "options", multiple=True, callback=pairs, metavar="NAME=VALUE",
                               shell_complete=complete_options,
                               help="An option of the methods.")  # fmt: skip
        train = click.option("--train", is_flag=True, help="Train what is not trained yet, as 'run' does.")
        decorated_command: Callable[..., Any] = with_asked
        for option in reversed((out_option, methods, options, train, wide_option, device_option, home_option,
                                quiet_option, verbose_option)):  # fmt: skip
            decorated_command = option(decorated_command)
        return decorated_command

    return decorated


def numbers(_: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Whole numbers from 1, comma-separated."""
    words = [word.strip() for word in value.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and int(word[:9]) > 0 for word in words):
        raise UserError(f"--{parameter.name} takes whole numbers from 1, as in 5,20, not {value!r}")
    return tuple(sorted({int(word) for word in words}))


def written(drawing: Drawing, out: Path) -> None:
    """Writes a figure, and says so, and what else there is to say."""
    drawing.save(out)
    click.echo(f"wrote {out}")
    for note in drawing.notes:
        click.echo(note)
