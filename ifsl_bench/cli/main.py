"""The command line: parses, calls one function of the library for each command, and prints.

Nothing heavy is imported before a command needs it; ``--help`` and ``tasks`` come without torch.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import io
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import click

from ifsl_bench._version import __version__
from ifsl_bench.cli.options import SuggestingGroup, format_examples
from ifsl_bench.utils.errors import UserError, format_error, is_out_of_memory
from ifsl_bench.utils.progress import ConsumerDisconnected

# The commands by what they are for, each with its module, which is imported when it is called for.
COMMAND_MODULES_BY_SECTION = {
    "Run": {
        "run": "running",
        "plan": "campaigns",
        "status": "campaigns",
        "reproduce": "results",
        "pretrain": "pretraining",
    },
    "Results": {
        "leaderboard": "results",
        "table": "results",
        "report": "report",
        "plot": "plot",
        "compare": "results",
        "variance": "results",
        "grid": "results",
        "show": "results",
        "results": "own_results",
        "check": "results",
    },
    "What there is": {"methods": "methods", "recipes": "recipes", "tasks": "tasks", "data": "data", "cite": "methods"},
    "Folders": {"cache": "cache", "weights": "weights"},
}
MODULE_OF_COMMAND = {
    name: module for commands in COMMAND_MODULES_BY_SECTION.values() for name, module in commands.items()
}


class CommandGroup(SuggestingGroup):
    """The commands by what they are for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULE_OF_COMMAND)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in MODULE_OF_COMMAND and cmd_name not in self.commands:
            self.add_command(getattr(import_module(f"ifsl_bench.cli.{MODULE_OF_COMMAND[cmd_name]}"), cmd_name))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in COMMAND_MODULES_BY_SECTION.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(80)) for name, command in commands if command])


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=format_examples("leaderboard glyphs-5shot", "run --method lr,lr+a --task glyphs-5shot", "COMMAND --help"),
)
@click.version_option(__version__, prog_name="ifsl-bench")
@click.option("--traceback", is_flag=True, help="Where an error comes from, call by call.")
def cli(traceback: bool) -> None:
    """A benchmark suite for incremental few-shot learning."""


def _interruption_message(arguments: Sequence[str], how: str = "interrupted") -> str:
    """Return what a person who has stopped a run should know."""
    if "--retrain" in arguments:  # models it has just trained cannot be told from those it was meant to replace
        return f"ifsl-bench: {how}; with --retrain the same command trains everything again"
    return f"ifsl-bench: {how}; the same command goes on from where it stopped"


def _run_with_error_lines(call: Callable[[], Any]) -> int:
    """Run the program; every mistake of the user's is one line and status 2."""
    try:
        status = call()
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "ifsl-bench")
        click.echo(f"ifsl-bench: {error.format_message()} ({command} --help lists what there is)", err=True)
        return 2
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo(_interruption_message(sys.argv[1:]), err=True)
        return 130
    except (BrokenPipeError, ConsumerDisconnected):
        sys.stderr.close()
        return 141
    except (UserError, MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        if "--traceback" in sys.argv[1:]:
            traceback.print_exception(error)
        refused = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        elsewhere = refused and getattr(error, "filename", None) is not None
        then = " (another home folder: --home or IFSL_BENCH_HOME)" if elsewhere else ""
        click.echo(f"ifsl-bench: {format_error(error)}{then}", err=True)
        return 2
    except ValueError:
        if not any(getattr(stream, "closed", False) for stream in (sys.stdout, sys.stderr)):
            raise
        with contextlib.suppress(OSError):
            os.write(2, b"ifsl-bench: the output was closed, perhaps by a method; what has been computed is stored\n")
        return 2
    return status if isinstance(status, int) else 0


def entry() -> None:
    """Run `main` as a process, and end it.

    The interpreter would go on to take PyTorch's libraries down one by one, for which their pages are read from the
    disk first: a tenth of a second of each command, and 100 MB of its peak.
    """
    if sys.stderr is not None:
        faulthandler.enable()  # the line of a method whose library takes the process down
    ended: list[int] = []
    for name in ("SIGTERM", "SIGHUP"):  # Windows lacks the second
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit_on_signal)
    atexit.register(_exit_with_status, ended)  # the first that is registered, and so the last that is called
    try:
        main()
    except SystemExit as stop:
        if isinstance(stop.code, int):
            ended.append(stop.code)
        raise


def _exit_on_signal(number: int, _: object) -> None:
    """End the process on a signal, with the terminal's cursor shown again."""
    signal.signal(number, signal.SIG_DFL)  # a second signal ends it, whatever happens here
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # not into a pipe without a reader
            cursor = "\x1b[?25h\n" if os.isatty(2) else ""
            os.write(2, f"{cursor}{_interruption_message(sys.argv[1:], 'ended')}\n".encode())
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container, which no signal ends by itself


def _exit_with_status(ended: list[int]) -> None:
    """End the process with its status, if it has ended by itself."""
    if not ended:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # what cannot be written any more: Python reports it
        return
    os._exit(ended[0])


def main() -> None:
    """Run the command line; ends in `SystemExit`."""
    for stream in (sys.stdout, sys.stderr):  # what their encoding cannot print becomes an escape
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Threads that spin while they wait slow everything down where another program wants the cores.
    # Read when torch is imported, so it must be set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where it may not write, and does without
    sys.exit(_run_with_error_lines(lambda: cli(prog_name="ifsl-bench", standalone_mode=False)))
