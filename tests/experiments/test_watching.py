"""A person's view of many workers."""

from __future__ import annotations

import datetime
import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from ifsl_bench.experiments import watching
from ifsl_bench.experiments.graph import Graph, Node, Wants
from ifsl_bench.experiments.logs import Event, event_now
from ifsl_bench.experiments.watching import Watch
from ifsl_bench.utils.progress import LogReporter, NullReporter, RichReporter


@dataclass(frozen=True)
class Dig:
    """A stage that has a name only."""

    name: str
    kind = "dig"

    def __str__(self) -> str:
        return f"digging {self.name}"


def graph_of_digs(count: int) -> Graph:
    nodes = [Node(f"dig/{n}", Dig(f"hole number {n}" * 3), (), Wants(), (n,), last=True, seconds=40.0)  # type: ignore[arg-type]
             for n in range(count)]  # fmt: skip
    return Graph((None,) * count, {node.key: node for node in nodes})  # type: ignore[arg-type]


def event(kind: str, text: str = "", done: int = 0, total: int = 0, figures: dict[str, float] | None = None) -> Event:
    return Event(datetime.datetime.now(datetime.UTC), kind, text, done, total, figures or {})


def begin(watch: Watch, graph: Graph, running: int) -> list[Node]:
    watch.begin(graph, 2)
    nodes = list(graph.nodes.values())[:running]
    for node in nodes:
        watch.hear(node, event_now("begun"))
        watch.hear(node, event("stage", str(node), 0, 200))
        watch.hear(node, event("advance", str(node), 50, 200, {"loss": 0.51234, "accuracy": 0.25}))
    return nodes


@pytest.mark.parametrize("width", [200, 40, 10])
def test_the_display_is_one_line_in_any_terminal(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    reporter = RichReporter()
    reporter.console = console
    watch = Watch(reporter)
    begin(watch, graph_of_digs(60), 30)
    with console.capture() as captured:
        console.print(watch)
    (line,) = captured.get().rstrip("\n").split("\n")
    assert len(line) <= width
    assert line.startswith("0 of 60 jobs done"[: width - 1])


def test_lines_have_the_last_loss_and_each_warning_once():
    out = io.StringIO()
    watch = Watch(LogReporter(out), lines=True)
    first, second = begin(watch, graph_of_digs(3), 2)
    for node in (first, second):
        watch.hear(node, event("warn", "the disk is slow"))
        watch.hear(node, event("say", f"a word of {node.key}"))
    watch.hear(first, event("end", str(first), 200, 200, {"loss": 0.1}))
    watch.hear(first, event_now("done", seconds=4.0))
    watch.hear(second, event_now("lost", "its worker died"))
    watch.hear(second, event_now("begun"))
    watch.hear(second, event_now("failed", "no ground"))
    text = out.getvalue()
    assert "200/200  loss 0.1\n" in text
    assert text.count("warning: the disk is slow") == 1
    assert "a word of dig/0\n" in text
    assert "a word of dig/1\n" in text
    assert "1 of 3 jobs done, about " in text
    assert "its worker died; it is run again, from its last checkpoint\n" in text
    assert f"\n{second} failed: no ground\n" in text


def test_the_time_left_is_by_a_stages_pace_and_of_the_others_what_is_planned(monkeypatch):
    now = 100.0
    monkeypatch.setattr(watching.time, "monotonic", lambda: now)
    graph = graph_of_digs(9)
    nodes = list(graph.nodes.values())
    watch = Watch(NullReporter())
    watch.begin(graph, 2)
    watch.hear(nodes[0], event("begun"))
    assert watch.seconds() == pytest.approx(9 * 40 / 2)
    watch.hear(nodes[0], event("stage", "dig", 20, 120))  # resumed
    now = 110.0
    watch.hear(nodes[0], event("advance", "dig", 45, 120))
    assert watch._seconds_of(nodes[0].key, nodes[0]) == pytest.approx(10 / 25 * 75)
    watch.hear(nodes[0], event_now("done", seconds=14.0))
    assert watch.seconds() == pytest.approx(8 * 40 / 2)
    watch.hear(nodes[1], event_now("failed"))
    assert watch.seconds() == pytest.approx(7 * 40 / 2)
    assert str(watch) == "1 of 9 jobs done, 1 failed, about 2.3 min left"
