"""The loop, with executors that only pretend, held against rules that any order must keep."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from ifsl_bench.experiments.graph import Graph, Node, Wants
from ifsl_bench.experiments.logs import BEGUN, Event, Log, event_now
from ifsl_bench.experiments.loop import TRIES, Loop
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import NullReporter

JOBS = 4


def node_of(key, needs=(), results=(0,), threads=1, accelerator=False, **more) -> Node:
    """A node without a stage."""
    return Node(key, None, needs, Wants(threads, accelerator=accelerator), results, **more)


def graph_of(*nodes: Node, jobs: int = JOBS) -> Graph:
    return Graph((None,) * jobs, {node.key: node for node in nodes})  # type: ignore[arg-type]


def random_graph(chance: random.Random, whole: int) -> Graph:
    """Nodes "0", "1", ... with arrows from earlier ones; some want a machine of ``whole`` threads."""
    nodes: dict[str, Node] = {}
    for index in range(chance.randint(1, 14)):
        needs = tuple(chance.sample(list(nodes), min(len(nodes), chance.choice((0, 0, 1, 2)))))
        threads = chance.choice((1, 1, 1, whole))
        nodes[str(index)] = node_of(str(index), needs, (), threads, accelerator=chance.random() < 0.2)
    results: dict[str, set[int]] = {key: set() for key in nodes}

    def claim(key: str, job: int) -> None:
        results[key].add(job)
        for needed in nodes[key].needs:
            claim(needed, job)

    for job in range(JOBS):
        claim(chance.choice(list(nodes)), job)
    return graph_of(
        *(replace(node, results=tuple(sorted(results[key]))) for key, node in nodes.items() if results[key])
    )


class Pretend:
    """Ends nodes in any order, as a table says, in a thread of its own; checks what it is given."""

    def __init__(self, graph: Graph, chance: random.Random, ends: dict[str, list[str]], size: int, in_order: bool):
        self.graph, self.chance, self.ends, self.size, self.in_order = graph, chance, ends, size, in_order
        self.running: dict[str, tuple[Node, Future]] = {}
        self.done: set[str] = set()
        self.submissions: list[str] = []
        self.begun = threading.Semaphore(0)
        threading.Thread(target=self.end_them, daemon=True).start()

    def fits(self, node: Node) -> bool:
        nodes = [running for running, _ in self.running.values()]
        if node.wants.accelerator and any(running.wants.accelerator for running in nodes):  # there is one
            return False
        return not nodes or sum(n.wants.threads for n in nodes) + node.wants.threads <= self.size

    def submit(self, node: Node) -> Future:
        assert self.done.issuperset(node.needs), "a node waits for what it needs"
        assert node.key not in self.done
        assert node.key not in self.running, "one owner at a time"
        assert self.fits(node)
        self.submissions.append(node.key)
        future: Future = Future()
        self.running[node.key] = node, future
        self.begun.release()
        return future

    def end_them(self) -> None:
        while True:
            self.begun.acquire()
            node, future = self.chance.choice([pair for pair in list(self.running.values()) if not pair[1].done()])
            future.set_result(self.next_end(node))

    def next_end(self, node: Node) -> Event:
        kind = self.ends[node.key].pop(0) if self.ends.get(node.key) else "done"
        return event_now(kind, kind)

    def end(self, node: Node) -> Event:
        _, future = self.running.pop(node.key)
        event = future.result()
        if event.kind == "done":
            self.done.add(node.key)
        return event

    def look(self) -> None: ...


NOWHERE = Paths.locate("/nowhere")  # without logs


def deaf(node: Node, event: Event) -> None: ...


@pytest.mark.parametrize("in_order", [False, True])
def test_any_graph_is_run_to_its_end_whatever_fails(in_order):
    for case in range(300):
        chance = random.Random(case)
        size = chance.choice((1, 2, 4))
        graph = random_graph(chance, size)
        ends = {key: chance.choice(([], [], [], ["failed"], ["lost"], ["lost"] * TRIES, ["lost", "failed"]))
                for key in graph.nodes}  # fmt: skip
        bad = {key for key, how in ends.items() if "failed" in how or len(how) == TRIES}
        workers = Pretend(graph, chance, {key: list(how) for key, how in ends.items()}, size, in_order)
        begun: list[str] = []
        failures = Loop(graph, workers, NOWHERE, lambda n, e: e.kind == BEGUN and begun.append(n.key)).run()  # noqa: B023
        spoilt = {job for key in bad for job in graph.nodes[key].results}
        assert {failure.job for failure in failures} <= spoilt
        for job in range(JOBS):
            mine = {key for key, node in graph.nodes.items() if job in node.results}
            failed = job in {failure.job for failure in failures}
            assert failed == bool(mine & bad), "a job fails if something that it needs does, and only then"
            assert failed or mine <= workers.done
        assert Counter(begun) == Counter(workers.submissions)
        assert all(count <= TRIES for count in Counter(workers.submissions).values())
        for failure in failures:
            assert failure.node is not None
            assert failure.node.key in bad
            assert failure.why in ("failed", f"lost, {TRIES} times")


def test_what_many_wait_for_goes_first_and_one_worker_goes_job_by_job():
    graph = graph_of(*(node_of(key, (), of) for key, of in (("one", (0,)), ("all", (0, 1, 2, 3)), ("two", (1, 2)))))
    orders = {}
    for in_order in (False, True):
        workers = Pretend(graph, random.Random(0), {}, 1, in_order)
        Loop(graph, workers, NOWHERE, deaf).run()
        orders[in_order] = workers.submissions
    assert orders == {False: ["all", "two", "one"], True: ["one", "all", "two"]}


def test_work_for_the_whole_machine_is_not_passed_by_for_ever():
    """It is the second most wanted; while it waits for room, what is wanted less does not take the room."""
    small = [node_of(str(n), (), (3,)) for n in range(20)]
    graph = graph_of(node_of("a", (), (0, 1, 2)), node_of("whole", (), (0, 1), 2), *small)
    workers = Pretend(graph, random.Random(1), {}, 2, False)
    Loop(workers.graph, workers, NOWHERE, deaf).run()
    assert workers.submissions[:2] == ["a", "whole"]


def test_a_node_that_nobody_needs_any_more_is_not_begun():
    bad = node_of("bad")
    workers = Pretend(graph_of(bad, node_of("other"), jobs=1), random.Random(0), {"bad": ["failed"]}, 1, True)
    (failure,) = Loop(workers.graph, workers, NOWHERE, deaf).run()
    assert workers.submissions == ["bad"]
    assert (failure.node, failure.why) == (bad, "failed")


def test_what_takes_long_goes_first_where_equally_many_wait_for_it():
    """Stages of unknown time go before, and ends of jobs before those."""

    def node(key: str, needs: tuple[str, ...] = (), last: bool = False) -> Node:
        seconds = {"a": 1.0, "b": 5.0, "c": 3.0}.get(key[0])
        return node_of(key, needs, last=last, seconds=seconds)

    nodes = [node(key) for key in ("a1", "b1", "c1", "a2", "b2", "c2", "d1")]
    nodes.append(node("end", ("a1",), last=True))
    workers = Pretend(graph_of(*nodes, jobs=1), random.Random(0), {}, 1, False)
    Loop(workers.graph, workers, NOWHERE, deaf).run()
    assert workers.submissions == ["d1", "b1", "b2", "c1", "c2", "a1", "end", "a2"]


class Ended(Pretend):
    """Workers that die when they have come so far, one place an attempt; after the last they end the node."""

    def __init__(self, graph: Graph, places: list[int], home: Paths):
        self.places, self.home = places, home
        super().__init__(graph, random.Random(0), {}, 1, False)

    def next_end(self, node: Node) -> Event:
        if not self.places:
            return super().next_end(node)
        log = Log(self.home, NullReporter())
        with log.of(node.key, "it"), log.stage("training", 1000) as stage:
            stage.advance(self.places.pop(0))
        return event_now("lost", "its worker died")


@pytest.mark.parametrize(
    ("places", "tries"),
    [([100, 200, 300, 400, 500, 600], 7), ([500, 500, 500], 3), ([500, 502, 501], 3), ([100, 400, 400, 400], 4),
     ([300, 100, 200], 3)],
)  # fmt: skip
def test_a_node_whose_worker_dies_goes_on_as_long_as_it_comes_further(places, tries, tmp_path: Path):
    home = Paths.locate(tmp_path)
    workers = Ended(graph_of(node_of("one"), jobs=1), list(places), home)
    failures = Loop(workers.graph, workers, home, deaf).run()
    assert len(workers.submissions) == tries
    assert bool(failures) == (tries == len(places))


def test_seeds_are_trained_at_once_though_features_of_each_want_the_whole_machine():
    """Features take little, training takes long: those of all seeds come first, and no worker waits for another."""
    nodes = [
        node
        for seed in range(4)
        for node in (
            node_of(f"features {seed}", (), (seed,), 2, seconds=2),
            node_of(f"training {seed}", (f"features {seed}",), (seed,), seconds=600),
        )
    ]
    workers = Pretend(graph_of(*nodes), random.Random(0), {}, 2, False)
    Loop(workers.graph, workers, NOWHERE, deaf).run()
    assert workers.submissions[:4] == [f"features {seed}" for seed in range(4)]
