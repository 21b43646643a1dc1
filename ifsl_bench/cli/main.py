"""The command line: parses, calls one function of the library for each command, and prints.

Nothing heavy is imported before a command needs it; ``--help`` and ``tasks`` come without torch.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench._version import __version__
from ifsl_bench.cli.data import data
from ifsl_bench.cli.options import (
    Group,
    change_options,
    device_option,
    folders_of,
    home_option,
    names,
    pairs,
    quiet_option,
    reporter_for,
    results_option,
    style_option,
    verbose_option,
)
from ifsl_bench.cli.pretraining import pretrain
from ifsl_bench.cli.results import check, compare, reproduce, show, table
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.torchrun import check_alone
from ifsl_bench.protocol.limits import LARGEST_SEED, MOST_SEEDS

if TYPE_CHECKING:
    from ifsl_bench.protocol.variants import Change


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ifsl-bench")
def cli() -> None:
    """A benchmark suite for incremental few-shot learning."""


@cli.command()
@click.option("--method", "methods", multiple=True, callback=names, help="Methods, comma-separated or repeated.")
@click.option("--task", "tasks", multiple=True, callback=names, help="Tasks, or TOML files of your own.")
@click.option("--set", "options", multiple=True, callback=pairs, metavar="NAME=VALUE", help="An option of the method.")
@click.option("--train", multiple=True, callback=pairs, metavar="NAME=VALUE",
              help="episodes_per_step, select=last|best, views, rate, steps.")  # fmt: skip
@click.option("--tune", "trials", type=int, default=0, metavar="N",
              help="Choose among N settings of each method on validation episodes.")  # fmt: skip
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, LARGEST_SEED),
    help="Of training; the first of --seeds.",
)
@click.option(
    "--seeds", default=1, show_default=True, type=click.IntRange(1, MOST_SEEDS), help="How many training seeds."
)
@click.option("--episodes", type=int, help="Only the first so many test episodes.")
@change_options
@click.option("--checkpoint", metavar="DIR", help="Evaluate this meta-trained model; nothing is trained or stored.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, what is cached, and a rough time.")
@click.option("--calibrate", is_flag=True,
              help="Add the bias to the novel logits that is best on validation episodes; a row NAME+cal.")  # fmt: skip
@click.option("--rerun", is_flag=True, help="Evaluate again even if the result is stored.")
@click.option("--retrain", is_flag=True, help="Train again too; the old model is kept under another name.")
@click.option("--full", is_flag=True, help="Tables with the joint and alone accuracies too.")
@device_option
@home_option
@results_option
@style_option
@quiet_option
@verbose_option
def run(
    methods: list[str],
    tasks: list[str],
    options: dict[str, str],
    train: dict[str, str],
    trials: int,
    seed: int,
    seeds: int,
    episodes: int | None,
    change: Change,
    checkpoint: str | None,
    dry_run: bool,
    calibrate: bool,
    rerun: bool,
    retrain: bool,
    full: bool,
    device: str,
    home: str | None,
    results_dir: str | None,
    style: str,
    quiet: bool,
    verbose: bool,
) -> None:
    """Train and evaluate methods on tasks, and show them among the stored rows."""
    check_alone("ifsl-bench run")
    if not tasks or (not methods and not checkpoint):
        raise UserError("say what to run, e.g.: ifsl-bench run --method imprint --task glyphs-5shot")
    from ifsl_bench.protocol.task_files import find

    # A wrong name is told before torch is imported.
    found = [task for name in tasks for task in find(name, change, folders_of(home))]
    from ifsl_bench.backbone.device import keep_freed_memory
    from ifsl_bench.board.boards import load_board
    from ifsl_bench.board.leaderboard import task_table
    from ifsl_bench.board.measured import EVERY, PAPER
    from ifsl_bench.board.notes import standing
    from ifsl_bench.board.render import PROGRAMS, render
    from ifsl_bench.board.show import result_table
    from ifsl_bench.board.table import plain_table
    from ifsl_bench.protocol.training import Training
    from ifsl_bench.running import api, job

    keep_freed_memory()
    reporter = reporter_for(quiet, verbose)
    work = api.workspace(home, results_dir, device, reporter)
    command = _typed(sys.argv[1:])
    if checkpoint:
        if (
            len(tasks) != 1
            or methods
            or options
            or trials
            or calibrate
            or seed
            or seeds != 1
            or train.keys() - {"select"}
        ):
            raise UserError("--checkpoint takes one --task, and method, options and seed from the model itself "
                            "(of --train it takes select=best)")  # fmt: skip
        if dry_run or rerun or retrain:
            raise UserError(
                "--checkpoint evaluates a model and stores nothing: leave out --dry-run, --rerun, --retrain"
            )
        result = api.evaluate_checkpoint(Path(checkpoint), tasks[0], select=train.get("select"), episodes=episodes,
                                         change=change.said(), work=work, command=command)  # fmt: skip
        title = f"{result.label} on {result.task}, seed {result.seed}"
        click.echo(render([result_table(result, title)], style))
        return
    training = Training.parse(train)
    which = range(seed, seed + seeds), episodes, change, work.home, trials, calibrate
    jobs = job.make_jobs(methods, tasks, options, training, *which)
    for label in dict.fromkeys(one.label for one in jobs if trials and not one.trials):
        reporter.say(f"{label}: nothing to choose, so --tune changes nothing")
    if dry_run:
        click.echo(render([plain_table(api.dry_run(jobs, work, rerun, retrain))], style))
        return
    made = api.run_jobs(jobs, work, rerun=rerun, retrain=retrain, command=command)
    boards = [load_board(task, work.home.results) for task in dict.fromkeys(found)]
    if style in PROGRAMS:
        click.echo(render([task_table(board, full) for board in boards], style))
        return
    for whole in boards:
        labels = dict.fromkeys(r.label for r in made if r.task == whole.name)
        board = whole.usual(labels)
        click.echo("\n" + render([task_table(board, full)], style))
        for label in labels:
            row = board.row(label)
            setting = row.setting if row and row.setting != EVERY else PAPER
            click.echo("\n" + "\n".join(standing(board.in_setting(setting), label)))


def _typed(arguments: list[str]) -> str:
    """The command as results record it: without the folders of this machine."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        folder = word.partition("=")[0] in ("--home", "--results")
        if not skip and not folder:
            kept.append(word)
        skip = folder and "=" not in word
    return shlex.join(["ifsl-bench", *kept])


@cli.command()
@click.option("--check", "checked", metavar="NAME", help="Hold this method against the contract, on made-up episodes.")
@style_option
def methods(checked: str | None, style: str) -> None:
    """List the methods, with their options and where they come from; or check one (a name, or FILE.py:CLASS)."""
    from ifsl_bench.board.render import render
    from ifsl_bench.board.table import plain_table
    from ifsl_bench.plugin import registry
    from ifsl_bench.plugin.options import options_of
    from ifsl_bench.plugin.settings import short

    if checked is not None:
        from ifsl_bench.plugin.contract import check_contract
        from ifsl_bench.plugin.find_method import find_method

        chosen, meant = find_method(checked)
        found = list(check_contract(chosen.name, chosen.method, meant))
        rules = [{"rule": rule, "found": broken or "ok"} for rule, broken in found]
        click.echo(render([plain_table(rules)], style))
        if failed := [rule for rule, broken in found if broken]:
            raise UserError(f"method {chosen.name!r} breaks {len(failed)} of {len(found)} rules")
        return
    rows = []
    for name in registry.names(registry.METHODS):
        plugin = registry.load(registry.METHODS, name)
        row = {
            "method": name,
            "shorthands": "",
            "package": plugin.package,
            "head": "",
            "options": "",
            "what": plugin.problem,
        }
        if not plugin.problem:
            try:
                kind = registry.method(name)
            except UserError as error:
                row["what"] = f"broken: {error}"
            else:
                shown = [f"{o.name}={short(o.default)} ({o.spelled})" for o in options_of(kind).values()]
                row |= {"shorthands": ", ".join(kind.shorthands), "head": kind.head, "options": ", ".join(shown)}
                row["what"] = (kind.__doc__ or "").strip().split("\n")[0]
        rows.append(row)
    click.echo(render([plain_table(rows)], style))


@cli.command()
@home_option
@style_option
def tasks(home: str | None, style: str) -> None:
    """List the tasks, and whether their data are there."""
    from ifsl_bench.board.render import render
    from ifsl_bench.board.table import plain_table
    from ifsl_bench.data.preparing import catalogue as data_commands

    click.echo(render([plain_table(data_commands.task_listing(folders_of(home)))], style))


def _guarded(call: Callable[[], Any]) -> int:
    """Runs the program; every mistake of the user's is one line and status 2."""
    try:
        status = call()
    except UserError as error:
        click.echo(f"ifsl-bench: {error}", err=True)
        return 2
    except click.exceptions.Abort:
        click.echo("ifsl-bench: interrupted; the same command goes on from where it stopped", err=True)
        return 130
    except click.ClickException as error:
        click.echo(f"ifsl-bench: {error.format_message()} (ifsl-bench --help lists what there is)", err=True)
        return 2
    except KeyboardInterrupt:
        click.echo("ifsl-bench: interrupted; the same command goes on from where it stopped", err=True)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except MemoryError:
        click.echo("ifsl-bench: not enough memory", err=True)
        return 2
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        click.echo(f"ifsl-bench: the system refused{where}: {error.strerror or error}", err=True)
        return 2
    return status if isinstance(status, int) else 0


for command in (pretrain, table, compare, show, check, reproduce, data):
    cli.add_command(command)


def _standard_streams() -> None:
    """Streams that a shell has closed become /dev/null, others print whatever their encoding cannot as an escape.

    Otherwise the next file opened would take a closed one's place, and get what libraries print.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(number, mode, closefd=False), encoding="utf-8"))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """The entry point of ``ifsl-bench``."""
    _standard_streams()
    # Threads that spin while they wait slow everything down where another program wants the cores.
    # Read when torch is imported, so it must be set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(_guarded(lambda: cli(standalone_mode=False)))
