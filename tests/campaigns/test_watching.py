"""What a person sees of many workers."""

from __future__ import annotations

import datetime
import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from ifsl_bench.campaigns import watching
from ifsl_bench.campaigns.watching import Live
from ifsl_bench.common.progress import LogReporter, Mute, RichReporter
from ifsl_bench.scheduler.graph import Graph, Node, Wants
from ifsl_bench.scheduler.logs import Event
from ifsl_bench.scheduler.work import Outcome


@dataclass(frozen=True)
class Dig:
    """A stage that has a name only."""

    name: str
    kind = "dig"

    def __str__(self) -> str:
        return f"digging {self.name}"


def graph_of_digs(count: int) -> Graph:
    nodes = [Node(f"dig/{n}", Dig(f"hole number {n}" * 3), (), Wants(), (n,), last=True) for n in range(count)]  # type: ignore[arg-type]
    return Graph((None,) * count, {node.key: node for node in nodes})  # type: ignore[arg-type]


def event(kind: str, text: str = "", done: int = 0, total: int = 0, figures: dict[str, float] | None = None) -> Event:
    return Event(datetime.datetime.now(datetime.UTC), kind, text, done, total, figures or {})


def begin(watch: Live, graph: Graph, running: int) -> list[Node]:
    watch.planned(graph)
    nodes = list(graph.nodes.values())[:running]
    for node in nodes:
        watch.begun(node)
        watch.heard(node, event("stage", str(node), 0, 200))
        watch.heard(node, event("advance", str(node), 50, 200, {"loss": 0.51234, "accuracy": 0.25}))
    return nodes


@pytest.mark.parametrize("width", [200, 40, 10])
def test_the_display_is_one_line_in_any_terminal(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    reporter = RichReporter()
    reporter.console = console
    live = Live(reporter, 30)
    begin(live, graph_of_digs(60), 30)
    with console.capture() as captured:
        console.print(live)
    (line,) = captured.get().rstrip("\n").split("\n")
    assert len(line) <= width
    assert line.startswith("0 of 60 jobs done"[: width - 1])


def test_lines_have_the_last_loss_and_each_warning_once():
    out = io.StringIO()
    watch = Live(LogReporter(out), 2, lines=True)
    first, second = begin(watch, graph_of_digs(3), 2)
    for node in (first, second):
        watch.heard(node, event("warn", "the disk is slow"))
        watch.heard(node, event("say", f"a word of {node.key}"))
    watch.heard(first, event("end", str(first), 200, 200, {"loss": 0.1}))
    watch.ended(first, Outcome(first.key, "done", seconds=4.0), False)
    watch.ended(second, Outcome(second.key, "lost", "its worker died"), True)
    watch.begun(second)
    watch.ended(second, Outcome(second.key, "failed", "no ground"), False)
    said = out.getvalue()
    assert "200/200  loss 0.1\n" in said
    assert said.count("warning: the disk is slow") == 1
    assert "a word of dig/0\n" in said
    assert "a word of dig/1\n" in said
    assert "1 of 3 jobs done, about " in said
    assert "its worker died; it is run again, from its last checkpoint\n" in said
    assert f"\n{second} failed: no ground\n" in said


def test_the_time_left_is_that_of_what_is_like_it(monkeypatch):
    now = 100.0
    monkeypatch.setattr(watching.time, "monotonic", lambda: now)
    graph = graph_of_digs(9)
    nodes = list(graph.nodes.values())
    seen = Live(Mute(), 2)
    seen.planned(graph)
    seen.begun(nodes[0])
    assert seen.seconds() is None, "nobody knows yet"
    seen.heard(nodes[0], event("stage", "dig", 20, 120))  # resumed
    now = 110.0
    seen.heard(nodes[0], event("advance", "dig", 45, 120))
    assert seen._seconds_of(nodes[0].key, nodes[0]) == pytest.approx(10 / 25 * 75)
    seen.ended(nodes[0], Outcome(nodes[0].key, "done", seconds=40.0), False)
    assert seen.seconds() == pytest.approx(8 * 40 / 2)
    seen.ended(nodes[1], Outcome(nodes[1].key, "failed"), False)
    assert seen.seconds() == pytest.approx(7 * 40 / 2)
    assert str(seen) == "1 of 9 jobs done, 1 failed, about 2.3 min left"
