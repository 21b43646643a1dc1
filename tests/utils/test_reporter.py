"""Messages to a person, and by which way."""

from __future__ import annotations

import io
import re
import warnings
from types import SimpleNamespace

import pytest
from rich.console import Console

from ifsl_bench.utils.progress import LogReporter, Reporter, RichReporter


def test_by_default_nothing_else_is_said(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Reporter().say("a remark")
        with Reporter().report_stage("a stage", 1) as stage:
            stage.advance(loss=1.0)
    with pytest.warns(UserWarning, match="^look out$") as record:
        Reporter().warn("look out")
    assert record[0].filename == __file__, "the caller's line"
    assert capsys.readouterr() == ("", "")


def test_the_time_left_is_by_the_pace_after_the_first_step(monkeypatch):
    """The first step takes 25 seconds, for it compiles, and each later one takes one."""
    times = iter([100.0, 125.0, 126.0, 145.0, 145.0])
    monkeypatch.setattr("ifsl_bench.utils.progress.time", SimpleNamespace(monotonic=lambda: next(times)))
    out = io.StringIO()
    with LogReporter(out).report_stage("training", 500, 100) as stage:
        stage.advance(1)
        stage.advance(1)
        stage.advance(19)
    assert out.getvalue().splitlines() == [
        "training (resumed at 100 of 500) ...",
        "  training: 101/500",
        "  training: 121/500, 379 s left",
        "training: done in 45.0 s",
    ]


def test_a_terminal_has_a_line_for_a_stage_that_is_resumed():
    out, reporter = io.StringIO(), RichReporter()
    reporter.console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with reporter.report_stage("training", 5000, 1200) as stage:
        stage.advance(3800)
    with reporter.report_stage("evaluating", 10):
        pass
    assert "training: resumed at 1,200 of 5,000" in out.getvalue().splitlines()[0]
    assert out.getvalue().count("resumed") == 1


@pytest.mark.parametrize("rich", [False, True])
def test_the_title_of_a_stage_steers_no_terminal(rich, capsys):
    reporter = RichReporter() if rich else LogReporter()
    with reporter.report_stage("importing \x1b[2Ja.zip[/red]", 1) as stage:
        stage.advance(1)
    output = capsys.readouterr().err
    assert "\x1b[2J" not in output
    assert "importing \\x1b[2Ja.zip[/red]" in output


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_fits_the_terminal_and_cuts_no_word(width):
    title = "meta-training lr+a on glyphs-5shot+base-classes=20, seed 0"
    out, reporter = io.StringIO(), RichReporter()
    reporter.console = Console(file=out, force_terminal=True, width=width, color_system=None)
    with reporter.report_stage(title, 8000) as stage:
        stage.advance(8000, loss=0.2345, accuracy=93.75)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    assert any(title in line for line in lines)
    assert any("━ 8000/8000" in line and "loss 0.2345  accuracy 93.75%" in line for line in lines)
