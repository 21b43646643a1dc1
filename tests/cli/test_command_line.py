"""The look of the command line: at terminals of several widths, in a pipe, and in its help."""

from __future__ import annotations

import io
import os
import re
import select
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import pytest
from rich.cells import cell_len
from rich.console import Console

from ifsl_bench.analysis import task_results
from ifsl_bench.cli.main import cli
from ifsl_bench.reporting.terminal import print_text
from ifsl_bench.store.result_folder import packaged_results_folder, read_results
from ifsl_bench.utils.text_format import format_numbers

TASK = "glyphs-5shot"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDES, SHOWS = b"\x1b[?25l", b"\x1b[?25h"  # the cursor
INTERVAL = re.compile(r"[+-]?\d+\.\d\d ± \d+\.\d\d")
CAMPAIGN = '[[run]]\nmethods = ["lr", "lr+a"]\ntasks = "glyphs-5shot"\nseeds = 40\n'


class Terminal(io.StringIO):
    """A standard output that is one."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def rows(tmp_path, monkeypatch) -> list[str]:
    """Labels of some stored rows, half of them the user's own: the longest labels, and those with most seeds."""
    files: dict[str, list[Path]] = {}
    for path in sorted((packaged_results_folder() / TASK).glob("*.seed-*.json")):
        files.setdefault(path.name.rpartition(".seed-")[0], []).append(path)
    by_seeds = sorted(files, key=lambda label: (-len(files[label]), label))
    labels = list(dict.fromkeys([*by_seeds[:2], *sorted(files, key=len)[-2:]]))
    for place, label in enumerate(labels):
        folder = tmp_path / ("packaged" if place % 2 else "home/results") / TASK
        folder.mkdir(parents=True, exist_ok=True)
        for path in files[label]:
            shutil.copy(path, folder)
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "packaged")
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CAMPAIGN)
    return labels


@pytest.fixture
def at_terminal(monkeypatch, call):
    """Runs a command line at a terminal of so many columns; returns status and what is seen."""

    def run(columns: int, *arguments: str) -> tuple[int, str]:
        screen = Terminal()
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm-256color")
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            status, _, err = call(*arguments)
        assert "Traceback" not in err
        return status, screen.getvalue()

    return run


def commands(label: str, rival: str) -> list[list[str]]:
    path = next((Path("home/results") / TASK).glob("*.json"))
    return [
        [], ["methods"], ["methods", "lr+a"], ["methods", "lr", "--format", "text"], ["tasks"], ["data", "list"],
        ["table", TASK], ["table", TASK, "--rank"], ["table", TASK, "--full"], ["table", TASK, "--rank", "--full"],
        ["leaderboard", TASK], ["compare", label, rival, "--task", TASK], ["show", label, TASK], ["show", str(path)],
        ["cite", "lr+a", "lda", "cub-5shot", "tiered-1shot"], ["cache"], ["weights", "list"],
        ["status", "c.toml"],
    ]  # fmt: skip


@pytest.mark.parametrize("whole_leaderboard", [False, pytest.param(True, marks=pytest.mark.slow("all stored rows"))])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_broken(whole_leaderboard, rows, at_terminal, call):
    for arguments in [["leaderboard"]] if whole_leaderboard else commands(rows[0], rows[1]):
        whole = set(INTERVAL.findall(call(*arguments)[1]))
        for columns in (80, 120):
            status, output = at_terminal(columns, *arguments)
            text = ESCAPE.sub("", output)
            assert status == 0, arguments
            wide = [line for line in text.splitlines() if cell_len(line) > columns]
            assert not wide, (arguments, wide)
            values = INTERVAL.findall(text)
            assert set(values) <= whole, arguments
            halves = len(re.findall(r"  ± \d+\.\d\d(?!\d)", text))  # in columns of their own, beside a difference
            beside = text.count(" ± ") - text.count("mean ± 95%")
            assert beside == len(values) + halves, "every +- stands beside its number"


def test_what_was_asked_for_in_full_is_shown_in_full(rows, at_terminal):
    _, narrow = at_terminal(80, "table", TASK, "--full")
    assert "No room for" not in narrow
    for heading in ("base joint", "novel alone", "Delta_b"):
        assert re.search(heading.replace(" ", r"\s+"), ESCAPE.sub("", narrow)), heading


def test_the_users_own_rows_stand_out(rows, at_terminal):
    _, output = at_terminal(100, "table", TASK)
    lines = output.splitlines()
    mine = [line for line in lines if ESCAPE.sub("", line).rstrip().endswith("yours")]
    theirs = [line for line in lines if ESCAPE.sub("", line).rstrip().endswith("stored")]
    assert mine
    assert theirs
    assert all("\x1b[1;36m" in line for line in mine)
    assert not any("\x1b" in line for line in theirs)


def test_a_pipe_gets_all_columns_without_colour_whatever_the_width(rows, call, monkeypatch):
    expected = call("table", TASK)[1]
    headings = expected.splitlines()[2]
    assert all(heading in headings for heading in ("Acc.", "Delta_a", "Delta_b", "sd of seeds", "source"))
    assert "\x1b" not in expected
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert call("table", TASK)[1] == expected


def in_terminal(*arguments: str) -> tuple[int, int]:
    """Starts a command in a pseudo-terminal; the child, and what its screen is read from."""
    import fcntl
    import pty
    import struct
    import termios

    child, screen = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have had it ignored, as nohup does
        command = [sys.executable, "-m", "ifsl_bench", *arguments]
        os.execve(sys.executable, command, {**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""})
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 90, 0, 0))
    return child, screen


def read_screen(screen: int, until: Callable[[bytes], bool] = lambda text: False) -> bytes:
    text, end = b"", time.monotonic() + 60
    while not until(text):
        assert select.select([screen], [], [], max(0.0, end - time.monotonic()))[0], f"nothing more came after {text!r}"
        try:
            part = os.read(screen, 1 << 16)
        except OSError:  # the end, as Linux says it
            break
        if not part:
            break
        text += part
    return text


@pytest.mark.slow("runs in terminals are ended by signals")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a pseudo-terminal")
def test_who_ends_a_run_gets_the_cursor_back(here):
    words = "--method", "lwof", "--task", "clusters.toml:clusters-1shot", "--train", "steps=1000000", "--device", "cpu"
    child, screen = in_terminal("run", *words, "--home", "home")
    try:
        before = read_screen(screen, lambda text: b"meta-training" in text and text.rfind(HIDES) > text.rfind(SHOWS))
        os.kill(child, signal.SIGHUP)
        after = read_screen(screen)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # a zombie, unless a step above went wrong
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(screen)
    assert ended == -signal.SIGHUP, "by the signal, as its parent expects"
    assert (before + after).rindex(SHOWS) > (before + after).rindex(HIDES)
    assert "ended; the same command goes on from where it stopped" in ESCAPE.sub("", after.decode())
    assert b"Traceback" not in after


# -- folding

TEXT = "lr+a.gamma=0.001.gradient=t-bptt: +2.61 ± 0.26 points, p < 1e-15, in 3.3 h of 1,234.56 MB (95% of 12 methods)"


def folded(text: str, width: int) -> list[str]:
    """The lines of a paragraph at a terminal."""
    screen = io.StringIO()
    print_text(text, Console(file=screen, width=width))
    return screen.getvalue().splitlines()


def test_folding_keeps_words_and_numbers():
    for width in range(24, 60):
        lines = folded(TEXT, width)
        assert max(map(cell_len, lines)) <= width
        assert "".join(lines).replace(" ", "") == TEXT.replace(" ", ""), "nothing is lost"
        for whole in ("+2.61 ± 0.26", "< 1e-15", "0.001", "3.3 h", "1,234.56 MB"):
            assert any(whole in line for line in lines), (whole, width)


def test_folding_counts_the_columns_of_wide_letters():
    assert max(map(cell_len, folded("学習の方法 " * 6, 20))) <= 20
    assert folded("", 20) == [""]
    assert folded("name    " + "x" * 20, 20) == ["name    " + "x" * 12, " " * 8 + "x" * 8], "beside its name"
    assert folded("name    one " + "x" * 20, 20) == ["name    one", " " * 8 + "x" * 12, " " * 8 + "x" * 8]
    assert folded("  two  words", 40)[0].startswith("  two")


def test_numbers_in_words():
    assert format_numbers(range(1000)) == "0 to 999"
    assert format_numbers([3, 0, 1, 2, 7, 7]) == "0 to 3, 7"
    assert format_numbers([0, 1, 2]) == "0, 1, 2"
    assert format_numbers([]) == ""


# -- help


def every(command: click.Command, name: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    pairs = [(name, command)]
    for sub, child in children(command).items():
        pairs += every(child, (*name, sub))
    return pairs


def children(command: click.Command) -> dict[str, click.Command]:
    """The commands of a group, which it may import for this."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    return {name: command.get_command(context, name) for name in command.list_commands(context)}


COMMANDS = every(cli)


def parse_command(line: str) -> None:
    """Read a command line without running it; raises for what it does not take."""
    program, *words = shlex.split(re.split(r" [|>]", line)[0])
    assert program == "ifsl-bench"
    context, subcommand = click.Context(cli, info_name="ifsl-bench"), cli
    while words and words[0] in children(subcommand):
        subcommand = children(subcommand)[words.pop(0)]
    assert subcommand is not cli
    if words:
        subcommand.make_context("x", words, parent=context)


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[" ".join(name) or "alone" for name, _ in COMMANDS])
def test_every_help_ends_with_examples_that_are_commands(name, command, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = call(*name, "--help")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "..." not in (command.get_short_help_str(80)), "the first line is whole in the list of commands"
    examples = [line.strip() for line in out.partition("Examples:\n")[2].splitlines() if line.strip()]
    assert 2 <= len(examples) <= 3
    for line in examples:
        if "COMMAND" not in line.split():
            parse_command(line)


def test_alone_it_prints_its_help(call):
    status, out, err = call()
    assert status == 0
    assert err == ""
    assert out == call("--help")[1]
    assert {name: child.name for name, child in children(cli).items()} == {name: name for name in children(cli)}
    for name in children(cli):
        assert f"\n  {name}  " in out
    assert call("data")[1] == call("data", "--help")[1]


# -- logs and figures


def test_a_run_logs_loss_and_accuracy(here, call):
    status, _, err = call("run", "--method", "lwof", "--task", "clusters.toml:clusters-5shot", "--train", "steps=20",
                          "--device", "cpu", "-v")  # fmt: skip
    assert status == 0
    (trained,) = (line for line in err.splitlines() if re.match(r"meta-training .*: done", line))
    assert re.search(r"  loss \d+\.\d+  validation accuracy \d+\.\d\d%$", trained)
    (evaluated,) = (line for line in err.splitlines() if re.match(r"evaluating .*: done", line))
    (result,) = read_results(Path("home/results"), ["clusters-5shot"])[0]
    assert evaluated.endswith(f"accuracy {result.summary['acc']['mean']:.2f}%")
    pretrained = [line for line in err.splitlines() if line.startswith("pretraining") and ": done" in line]
    assert pretrained
    assert all(re.search(r"accuracy \d+\.\d\d%$", line) for line in pretrained)
