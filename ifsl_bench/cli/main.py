"""The command line: parses, calls one function of the library for each command, and prints.

Nothing heavy is imported before a command needs it; ``--help`` and ``tasks`` come without torch.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from ifsl_bench._version import __version__
from ifsl_bench.cli.cache import cache
from ifsl_bench.cli.campaigns import plan, status
from ifsl_bench.cli.data import data
from ifsl_bench.cli.options import Group, style_option
from ifsl_bench.cli.plot import plot
from ifsl_bench.cli.pretraining import pretrain
from ifsl_bench.cli.results import check, compare, reproduce, show, table
from ifsl_bench.cli.running import run
from ifsl_bench.cli.tasks import tasks
from ifsl_bench.cli.weights import weights
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.progress import Unheard


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ifsl-bench")
def cli() -> None:
    """A benchmark suite for incremental few-shot learning."""


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
    except (BrokenPipeError, Unheard):
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


COMMANDS = (plan, status, run, pretrain, table, compare, show, plot, check, reproduce, data, tasks, cache, weights)
for command in COMMANDS:
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
