"""Options that several commands share, and how they are read."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.cli.completion import complete_methods, complete_options, complete_rows, complete_tasks
from ifsl_bench.protocols.tasks.task_limits import LARGEST_SEED, MOST_SEEDS
from ifsl_bench.utils.errors import UserError, unknown_name_error

if TYPE_CHECKING:
    from ifsl_bench.experiments.run_config import RunConfig
    from ifsl_bench.protocols.tasks.task import Task
    from ifsl_bench.utils.files import Paths
    from ifsl_bench.utils.progress import Reporter


class SuggestingGroup(click.Group):
    """Suggests the nearest command for an unknown one; alone, prints its help."""

    command_noun = "command"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in (names := self.list_commands(ctx)):
            see = f"{ctx.command_path} --help" if self.command_noun == "command" else ""
            raise unknown_name_error(self.command_noun, args[0], names, see=see)
        return super().resolve_command(ctx, args)


def format_examples(*lines: str) -> str:
    """Return the examples at the end of a command's help, on lines that click does not refill.

    Args:
        lines: the examples, each without ``ifsl-bench``.
    """
    commands = (f"ifsl-bench {line}" for line in lines)
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def parse_names(_: click.Context, __: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    """Split repeated options and comma-separated lists alike into names.

    Args:
        values: of the option, each a name or a comma-separated list.
    """
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


def parse_name_values(_: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Return the values of an option that takes NAME=VALUE, by name.

    Args:
        parameter: the option, for errors.
        values: of the option, each NAME=VALUE.

    Raises:
        UserError: a value without a name or ``=``, or a name that is given twice.
    """
    pairs = {}
    for value in values:
        key, separator, text = value.partition("=")
        if not separator or not key.strip():
            raise UserError(f"{parameter.opts[0]} takes NAME=VALUE, not {value!r}")
        if key.strip() in pairs:
            raise UserError(f"{parameter.opts[0]} {key.strip()} is given twice")
        pairs[key.strip()] = text.strip()
    return pairs


def parse_output_format(_: click.Context, __: click.Parameter, value: str) -> str:
    """Return the name of an output format if there is such a format.

    Args:
        value: the name as typed.

    Raises:
        UserError: there is no such format.
    """
    from ifsl_bench.reporting.table import OUTPUT_FORMATS

    if value not in OUTPUT_FORMATS:
        raise unknown_name_error("format", value, OUTPUT_FORMATS)
    return value


label_option = click.option(
    "--method",
    "labels",
    multiple=True,
    callback=parse_names,
    metavar="LABEL",
    shell_complete=complete_rows,
    help="Only rows with these labels, comma-separated or repeated.",
)
recipe_option = click.option(
    "--recipe",
    "recipes",
    multiple=True,
    callback=parse_names,
    metavar="NAME",
    help="Rows on backbones of these recipes, comma-separated or repeated, or of all [the task's own].",
)
home_option = click.option("--home", metavar="DIR", help="Folder of caches [IFSL_BENCH_HOME, or the platform's].")
results_option = click.option(
    "--results", "results_dir", metavar="DIR", help="Folder of results [the platform's, or results below the home]."
)
style_option = click.option(
    "--format", "style", default="text", callback=parse_output_format, help="text, markdown, latex, csv or json."
)


class IntegerRange(click.ParamType):
    """A whole number within a range; helps show it as N, and give a range in words where that is informative."""

    name = "n"

    def __init__(self, minimum: int | None = None, maximum: int | None = None) -> None:
        self.range = click.IntRange(minimum, maximum)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            whole = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return self.range.convert(whole, param, ctx)


class SeedCount(IntegerRange):
    """A number of seeds; for a list, the error explains what to write instead."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.strip().lstrip("-").isdigit():
            raise UserError(
                f"--seeds takes how many training seeds to run, not {value!r}: --seeds 3 runs seeds 0, 1 and 2, "
                "--seed 5 --seeds 3 seeds 5 to 7; a campaign file can list them (seeds = [0, 2, 7])"
            )
        return super().convert(value, param, ctx)


def _parse_campaign(context: click.Context, _: click.Parameter, values: Sequence[str]) -> str | None:
    """Return the one campaign that is named; for methods and tasks without their options, the error names these."""
    if len(values) > 1 or (values and not values[0].endswith(".toml") and _is_method(values[0])):
        method = values[0] if _is_method(values[0]) or len(values) > 1 else "NAME"
        task = values[1] if len(values) > 1 else "TASK"
        raise UserError(
            f"methods and tasks are options: ifsl-bench {context.info_name} --method {method} --task {task}"
        )
    return values[0] if values else None


def _is_method(name: str) -> bool:
    from ifsl_bench.plugin.display_names import display_names_by_row
    from ifsl_bench.plugin.registry import METHOD_GROUP
    from ifsl_bench.plugin.registry import registered_entry_points as registered

    return name in display_names_by_row() or name in registered(METHOD_GROUP)


TASK_CHANGE_OPTIONS = {  # of tasks: option -> what it takes, and its help
    "base-classes": ("N", "Use only N of the base classes; the backbone is trained on them."),
    "base-order": ("N", "Draw base and novel classes of a published list of sessions anew, by the number N."),
    "ways": ("N", "Novel classes of an episode."),
    "shots": ("N", "Support images of each novel class."),
    "queries": ("N", "Query images of each novel class; in episodes those of base classes change in proportion."),
    "pretraining-steps": ("N", "Steps of the backbone's pretraining; use a few to rehearse a run."),
    "sessions": ("N", "Sessions after the base session; a task in episodes becomes one in sessions."),
    "orders": (
        "N",
        "Orders of the novel classes in sessions, with one support set each: a few where each takes minutes.",
    ),
    "novel-from": ("DATASET", "Take the novel classes of validation and testing from another data set."),
    "backbone": ("NAME", "Another backbone, such as timm:MODEL.TAG."),
    "weights": ("FILE", "Weights for the backbone, which is not pretrained here then; a copy stays in the home."),
    "pretrained-on": (
        "NAME",
        "What these weights have seen: base (the task's base/train alone), imagenet-1k, ... [unknown].",
    ),
    "centre": ("mean|none", "Subtract the mean of base/train from the features of such a backbone, or nothing [mean]."),
}


def add_config_options(*more_options: Any) -> Callable[[Any], Any]:
    """Add the options of what to run, and ``more_options`` of how, to a command.

    The command gets them as the arguments ``campaign`` and ``config``, a
    :class:`ifsl_bench.experiments.run_config.RunConfig`; options that are no fields of that stay arguments.
    """
    options = [
        click.argument("campaign", nargs=-1, metavar="[CAMPAIGN]", callback=_parse_campaign),
        click.option(
            "--method",
            "methods",
            multiple=True,
            callback=parse_names,
            shell_complete=complete_methods,
            help="Methods, comma-separated or repeated; globs, or the sets paper and all.",
        ),
        click.option(
            "--task",
            "tasks",
            multiple=True,
            callback=parse_names,
            shell_complete=complete_tasks,
            help="Tasks, or TOML files of your own; globs, or the sets paper and all.",
        ),
        click.option(
            "--set",
            "options",
            multiple=True,
            callback=parse_name_values,
            metavar="NAME=VALUE",
            shell_complete=complete_options,
            help="An option of the method.",
        ),
        click.option(
            "--train",
            multiple=True,
            callback=parse_name_values,
            metavar="NAME=VALUE",
            help="Of meta-training: steps, rate, episodes_per_step, views, sessions; select=last|best.",
        ),
        click.option(
            "--tune",
            "trials",
            type=IntegerRange(),
            help="Choose among N settings of each method on validation episodes.",
        ),
        click.option(
            "--seed", type=IntegerRange(0, LARGEST_SEED), help="The training seed; with --seeds, the first one [0]."
        ),
        click.option("--seeds", type=SeedCount(1, MOST_SEEDS), help="How many training seeds [1]."),
        click.option(
            "--recipe",
            "recipes",
            multiple=True,
            callback=parse_names,
            metavar="NAME",
            help="Recipes of the backbone, or files, with options as closer.beta=1; comma-separated or repeated [ce].",
        ),
        click.option(
            "--episodes", type=IntegerRange(), help="Number of test episodes; fewer or more than the task's own."
        ),
        click.option(
            "--calibrate",
            is_flag=True,
            help="Add to novel logits the bias that is best on validation episodes; makes a row NAME+cal.",
        ),
        *(
            click.option(f"--{key}", type=int if metavar == "N" else str, metavar=metavar, help=text)
            for key, (metavar, text) in TASK_CHANGE_OPTIONS.items()
        ),
        *more_options,
    ]

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def with_config(**arguments: Any) -> Any:
            from ifsl_bench.experiments.run_config import RunConfig
            from ifsl_bench.protocols.tasks.variants import make_task_changes

            changes = {key: arguments.pop(key.replace("-", "_")) for key in TASK_CHANGE_OPTIONS}
            if changes["weights"] is not None:
                from ifsl_bench.backbones.frozen import copy_weights_to_home

                file = Path(changes["weights"]).expanduser()
                changes["weights"] = copy_weights_to_home(locate_folders(arguments["home"]), file)
            names = [field.name for field in dataclasses.fields(RunConfig) if field.name in arguments]
            config = RunConfig(**{name: arguments.pop(name) for name in names}, change=make_task_changes(changes))
            return command(config=config, **arguments)

        for option in reversed(options):
            with_config = option(with_config)
        return with_config

    return decorate


def find_configs(campaign: str | None, config: RunConfig) -> tuple[list[RunConfig], list[Task], list[str]]:
    """Find the configs of a command.

    Args:
        campaign: a file, or the name of one; its methods and tasks are those that the command line chooses.
        config: of the command line.

    Returns:
        The configs, their tasks, and the methods that the command line chooses of a file's.
    """
    from ifsl_bench.experiments.run_config import find_tasks

    if campaign is None:
        return *find_tasks([config]), []
    from ifsl_bench.experiments.campaign_file import load_configs, resolve_names

    configs = load_configs(campaign, config)
    chosen = resolve_names(config.tasks, "--task", ".toml")
    return *find_tasks(configs, chosen), resolve_names(config.methods, "--method", ".py")


data_option = click.option(
    "--data",
    multiple=True,
    callback=parse_name_values,
    metavar="NAME=PATH",
    help="Files to make a data set from, if it is not prepared yet.",
)
log_option = click.option("--log", metavar="KIND", help="Losses and accuracies of trainings: csv or tensorboard.")
log_dir_option = click.option("--log-dir", metavar="DIR", help="Where the logs go [logs/KIND in the home folder].")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress, only results and warnings.")
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Plain progress lines with more detail.")
device_option = click.option("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto].")


def locate_folders(home: str | None, results_dir: str | None = None) -> Paths:
    """Return the folders of a command; see :meth:`ifsl_bench.utils.files.Paths.locate` for the defaults.

    Args:
        home: value of ``--home``, or None.
        results_dir: value of ``--results``, or None.
    """
    from ifsl_bench.utils.files import Paths

    return Paths.locate(home, results_dir)


def locate_folders_to_read(home: str | None, results_dir: str | None) -> Paths:
    """Return the folders of a command that reads results.

    Args:
        home: value of ``--home``, or None.
        results_dir: value of ``--results``, or None.

    Raises:
        UserError: the folder of results that is named does not exist.
    """
    folders = locate_folders(home, results_dir)
    if results_dir and not folders.results.is_dir():
        raise UserError(f"--results: there is no folder {folders.results}")
    return folders


def add_folders_options(command: Any) -> Any:
    """Gather ``--home`` and ``--results`` into the argument ``folders``, see :func:`locate_folders_to_read`."""

    @functools.wraps(command)
    def with_folders(home: str | None, results_dir: str | None, **arguments: Any) -> Any:
        return command(folders=locate_folders_to_read(home, results_dir), **arguments)

    return home_option(results_option(with_folders))


def confirm_removal(question: str, is_confirmed: bool, alternative: str = "") -> bool:
    """Ask whether the listed items shall be removed.

    Args:
        question: to print.
        is_confirmed: whether the command line has agreed already.
        alternative: an alternative to ``--yes``, for the error where there is no terminal.

    Raises:
        UserError: there is no terminal to ask for confirmation.
    """
    if is_confirmed:
        return True
    if not sys.stdin.isatty():
        raise UserError(
            f"there is no terminal to ask for confirmation: add --yes to remove what is listed{alternative}"
        )
    return click.confirm(question, default=False, err=True)


def make_reporter(quiet: bool, verbose: bool = False) -> Reporter:
    """Return the reporter of a command: a live display in a terminal, else lines of a log.

    Args:
        quiet: whether only warnings are printed.
        verbose: whether lines are printed in a terminal too, and more often.
    """
    from ifsl_bench.utils.progress import LogReporter, RichReporter

    if quiet:
        return LogReporter(verbose=False)
    if verbose or not sys.stderr.isatty():
        return LogReporter(every=2.0 if verbose else 10.0)
    return RichReporter()
