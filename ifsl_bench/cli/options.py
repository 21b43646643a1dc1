"""Options that several commands share, and how they are read."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.common.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.common.files import Home
    from ifsl_bench.common.progress import Reporter


class Group(click.Group):
    """Suggests the nearest command for an unknown one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            from ifsl_bench.common.errors import unknown

            raise unknown("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


def names(_: click.Context, __: click.Parameter, values: Sequence[str]) -> list[str]:
    """Repeated options and comma-separated lists alike."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def pairs(_: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, separator, text = value.partition("=")
        if not separator or not key.strip():
            raise UserError(f"--{parameter.name} takes name=value, not {value!r}")
        pairs[key.strip()] = text.strip()
    return pairs


def check_format(_: click.Context, __: click.Parameter, value: str) -> str:
    from ifsl_bench.board.render import FORMATS
    from ifsl_bench.common.errors import unknown

    if value not in FORMATS:
        raise unknown("format", value, FORMATS)
    return value


home_option = click.option("--home", metavar="DIR", help="Folder of caches [IFSL_BENCH_HOME, or the platform's].")
results_option = click.option(
    "--results", "results_dir", metavar="DIR", help="Folder of results [the platform's, or results below the home]."
)
style_option = click.option(
    "--format", "style", default="text", callback=check_format, help="text, markdown, latex, csv or json."
)


def change_options(command: Any) -> Any:
    """The options that change tasks, gathered into one argument ``change``."""
    helps = {
        "base-classes": "So many of the base classes; the backbone is trained on these.",
        "ways": "Novel classes of an episode.",
        "shots": "Support images of each novel class.",
        "queries": "Query images of each novel class; those of base classes change in proportion.",
        "pretraining-steps": "Steps of the backbone's pretraining; a few try out a whole run.",
    }

    @functools.wraps(command)
    def with_change(**given: Any) -> Any:
        from ifsl_bench.protocol.variants import make_change

        change = make_change({key: given.pop(key.replace("-", "_")) for key in helps})
        return command(change=change, **given)

    for key, text in reversed(helps.items()):
        with_change = click.option(f"--{key}", type=int, metavar="N", help=text)(with_change)
    return with_change


quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress, only results and warnings.")
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Plain progress lines with more detail.")
device_option = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")


def folders_of(home: str | None, results_dir: str | None = None) -> Home:
    from ifsl_bench.common.files import Home

    return Home.locate(home, results_dir)


def reporter_for(quiet: bool, verbose: bool = False) -> Reporter:
    from ifsl_bench.common.progress import LogReporter, RichReporter

    if quiet:
        return LogReporter(verbose=False)
    if verbose or not sys.stderr.isatty():
        return LogReporter(every=2.0 if verbose else 10.0)
    return RichReporter()
