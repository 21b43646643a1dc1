"""The page of results in a real browser: headless Chromium, driven by Playwright, without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ifsl_bench.analysis import task_results
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.page.data import collect_page, load_results_with_variants
from ifsl_bench.reporting.page.page import render_page
from ifsl_bench.store.published import read_published_rows
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.store.schema import read_result, write_result
from tests.reporting.test_page import HOSTILE, KEPT, TASK, fake_result, write_results

OTHER = "mini-1shot"
MOST_BYTES, MOST_SECONDS = 3_000_000, 2.0
SIZES = {"desk": (1280, 900), "telephone": (400, 800)}

pytestmark = pytest.mark.slow("a browser beside the tests")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> Path:
    """The page of two tasks with made-up results, a hostile name among them, and of one with published rows alone."""
    root, out = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("page") / "report.html"
    write_results(root)
    (other_task,) = load_tasks(OTHER)
    for seed in range(3):
        write_result(root, fake_result("a", seed, task=OTHER, task_hash=other_task.hash))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_results, "packaged_results_folder", lambda: root / "none")
        tasks = [load_tasks(name)[0] for name in (TASK, OTHER, "tiered-5shot")]
        out.write_text(render_page(collect_page(load_results_with_variants(tasks, root, named=True))), encoding="utf-8")
    return out


class Visit:
    """A page that was opened, and all that the browser had to complain of."""

    def __init__(self, browser: Any, path: Path, size: str = "desk", scheme: str = "light") -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
        )
        self.page, self.complaints = self.context.new_page(), []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._requested)
        self.tools = self.context.new_cdp_session(self.page)
        self.tools.send("Performance.enable")
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn]", timeout=30_000)

    def _requested(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(f"asked the network for {request.url}")

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: Any) -> None:
        self.context.close()

    def start(self, task: str = TASK) -> Visit:
        """The page as it is when it is opened; order and chips aside."""
        self.page.evaluate("task => { location.hash = `#task=${task}&setting=paper&at=${Math.random()}` }", task)
        self.settle()
        return self

    def names(self) -> list[str]:
        """Names of the rows shown."""
        return [name.strip() for name in self.page.locator("article:visible tbody tr:visible .open").all_inner_texts()]

    def seconds(self) -> float:
        """Seconds of the processor that the page's main thread has taken, whatever else runs."""
        metrics = self.tools.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "ThreadTime")

    def settle(self) -> None:
        """Until what was typed has been taken in."""
        self.page.wait_for_timeout(250)


@pytest.fixture(scope="module", params=[("desk", "light"), ("telephone", "dark")], ids=lambda param: param[0])
def opened(request, chromium, made_up) -> Iterator[Visit]:
    with Visit(chromium, made_up, *request.param) as visit:
        yield visit


@pytest.fixture
def visit(opened) -> Iterator[Visit]:
    opened.complaints.clear()
    yield opened.start()
    assert not opened.complaints


def fits(visit: Visit) -> None:
    """Nothing is wider than the screen but what scrolls by itself."""
    assert visit.page.evaluate("document.documentElement.scrollWidth") == visit.page.viewport_size["width"]


def no_button_sends_a_plot_anywhere(visit: Visit) -> None:
    bars = visit.page.evaluate(
        "[...document.querySelectorAll('.modebar')].map(bar =>"
        " [...bar.querySelectorAll('.modebar-btn')].map(button => button.dataset.title))"
    )
    assert len(bars) == 4
    zoom = ["Zoom", "Pan"]
    for bar in bars:
        assert bar == ["Download plot as a PNG", *zoom, "Autoscale", "Reset axes"]


@pytest.mark.parametrize(("size", "scheme"), [("desk", "dark"), ("telephone", "light")])
def test_it_is_drawn_at_once_by_day_and_by_night(chromium, made_up, size, scheme):
    with Visit(chromium, made_up, size, scheme) as visit:
        assert visit.seconds() < MOST_SECONDS
        fits(visit)
        assert visit.page.locator("figure:visible").count() == 5
        assert visit.page.locator(".js-plotly-plot:visible").count() == 4
        background = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(int(part) for part in background[4:-1].split(",")) / 3 > 128
        assert light == (scheme == "light")
        no_button_sends_a_plot_anywhere(visit)
        assert not visit.complaints


def test_all_that_is_stored_is_small_and_drawn_soon(chromium):
    """The kept page is the one of the stored results, by another test."""
    out = KEPT
    if not out.exists():
        pytest.skip("none is kept")
    assert out.stat().st_size < MOST_BYTES
    for size, scheme in (("desk", "light"), ("telephone", "dark")):
        with Visit(chromium, out, size, scheme) as visit:
            assert visit.seconds() < MOST_SECONDS
            assert visit.page.locator("article:visible").get_attribute("data-task") == "mini-pack-1shot"
            for name in sorted(visit.page.evaluate("DATA.boards.map(board => board.task)")):
                visit.start(name)
                assert visit.page.locator("article:visible").get_attribute("data-task") == name
                fits(visit)
            assert not visit.complaints


def test_sorting_by_a_column_and_back(visit):
    ranked = visit.names()
    assert ranked[0] == "b"
    by_name = visit.page.locator("article:visible th:has-text('method')")
    by_name.locator("button").click()
    assert by_name.get_attribute("aria-sort") == "ascending"
    names = visit.names()
    assert names == sorted(names, key=str.lower) != ranked
    by_name.locator("button").click()
    assert visit.names() == sorted(names, key=str.lower, reverse=True)
    visit.page.locator("article:visible th:has-text('cal. Acc.') button").click()
    cells = visit.page.locator("article:visible tbody tr:visible").all_inner_texts()
    accuracies = [float(line.split("\t")[3].split()[0]) for line in cells if line.split("\t")[3].strip()]
    assert accuracies == sorted(accuracies, reverse=True)
    assert len(accuracies) == 5, "published rows have none, and come last"


def test_filters_and_search(visit):
    page = visit.page
    assert len(visit.names()) == 5 + 11
    for name, count in (("published", 5), ("options", 6), ("provisional", 4)):
        page.locator(f"[name={name}]").click()
        visit.settle()
        assert len(visit.names()) == count
    assert page.locator("#count").inner_text() == "4 of 17 rows"
    page.fill("[name=search]", "IMG onerror")
    visit.settle()
    assert visit.names() == [HOSTILE]
    page.fill("[name=search]", "no such row")
    visit.settle()
    assert visit.names() == []
    page.locator("article:visible .reset").click()
    assert len(visit.names()) == 17
    page.select_option("[name=setting]", "tuned-12")
    visit.settle()
    assert {"a@tuned-12", "c"} < set(visit.names())
    assert len(visit.names()) == 2 + 11
    assert not page.locator("th:visible:has-text('AUSUC')").count()
    page.locator("[name=more]").click()
    visit.settle()
    assert page.locator("th:visible:has-text('AUSUC')").count() == 1
    for menu, value, task, setting in (
        ("data", "tiered-imagenet", "tiered-5shot", "paper"),
        ("data", "mini-imagenet", TASK, "tuned-12"),
        ("task", OTHER, OTHER, "paper"),
        ("task", TASK, TASK, "tuned-12"),
    ):
        page.select_option(f"[name={menu}]", value)
        visit.settle()
        assert page.input_value("[name=task]") == page.locator("article:visible").get_attribute("data-task") == task
        assert page.input_value("[name=setting]") == setting
        assert page.locator("[name=setting]").is_visible() == (task == TASK), "a menu where there is a choice"
        assert page.locator("#curves").is_visible() == page.locator("#plots").is_visible() == ("tiered" not in task)
    page.select_option("[name=setting]", "paper")
    visit.settle()


def test_a_number_is_one_click_from_where_it_comes_from_and_the_address_leads_back(visit):
    page = visit.page
    page.locator("article:visible tbody tr:has(.open span:text-is('b')) td:visible").nth(1).click()
    text = page.locator("dialog").inner_text()
    for fact in ("ifsl-bench run --method x --seed 2", "c0ffee", "a CPU", "d200", "mini-5shot/b.seed-1.json"):
        assert fact in text
    page.locator("dialog button:has-text('copy')").first.click()
    page.locator("dialog button", has_text=re.compile("^(copied|selected; copy it)$")).wait_for()
    box = page.locator("dialog").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]
    address = page.evaluate("location.hash.slice(1)")
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    page.wait_for_function("address => location.hash.slice(1) !== address", arg=address)  # closing is told later
    page.evaluate("address => { history.replaceState(null, '', '#' + address) }", address)
    page.reload()
    page.wait_for_selector("html[data-drawn]")
    assert page.locator("dialog h2").inner_text() == "b"
    page.keyboard.press("Escape")


def test_a_link_of_the_table_of_all_tasks_leads_to_that_task(visit):
    visit.page.locator(".overview:visible thead a", has_text=OTHER).click()
    visit.settle()
    assert visit.page.locator("article:visible").get_attribute("data-task") == OTHER
    assert visit.page.input_value("[name=task]") == OTHER


def test_it_opens_on_a_task_with_rows_of_ones_own(chromium, tmp_path, monkeypatch):
    stored_root, mine, out = tmp_path / "stored", tmp_path / "mine", tmp_path / "report.html"
    write_results(stored_root)
    ((first,), (second,)) = load_tasks(TASK), load_tasks(OTHER)
    write_result(mine, fake_result("mine", 0, task=OTHER, task_hash=second.hash))
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: stored_root)
    out.write_text(
        render_page(collect_page(load_results_with_variants([first, second], mine, named=True))), encoding="utf-8"
    )
    with Visit(chromium, out) as visit:
        assert visit.page.locator("article:visible").get_attribute("data-task") == OTHER


def test_the_keyboard_reaches_a_row_every_pair_all_tasks_and_the_chips(visit):
    page, first = visit.page, visit.names()[0]
    page.locator("article:visible tbody tr:visible .open").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog h2").inner_text() == first
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "open", "back to where one was"
    assert page.locator("#pairs tbody button").count() == 4 * 4
    assert page.locator("#pairs tbody button[tabindex='0']").count() == 1
    page.locator("#pairs tbody button[tabindex='0']").focus()
    labels = []
    for way in ("ArrowRight", "ArrowLeft", "ArrowRight", "ArrowLeft"):
        for key in (way, way, way, "ArrowDown"):
            labels.append(page.evaluate("document.activeElement.ariaLabel"))
            page.keyboard.press(key)
    assert len(set(labels)) == 16
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "ifsl-bench compare" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    number = page.locator(".overview:visible td button").first
    number.focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog h2").inner_text() == page.locator(".overview:visible tbody th").first.inner_text()
    page.keyboard.press("Escape")
    page.locator("#chips button").focus()
    for label in ("none", "all"):
        assert page.evaluate("document.activeElement.textContent") == label
        page.keyboard.press("Enter")
        plots = page.locator(".canvas > p").all_inner_texts()
        assert set(plots) == ({"No rows are switched on."} if label == "none" else set())


def test_a_hostile_name_stays_text_in_tables_plots_and_dialogs(visit):
    page = visit.page
    assert HOSTILE in visit.names()
    ticks = page.locator("#seeds .ytick text").all_text_contents()
    ends = [(tick, *tick.partition("…")) for tick in ticks]
    assert any(HOSTILE.startswith(head) and HOSTILE.endswith(tail) and len(tick) > 10 for tick, head, _, tail in ends)
    number = page.evaluate("name => DATA.rows.findIndex(row => row.label === name)", HOSTILE)
    for plot in ("tradeoff", "seeds", "validation", "cost"):
        trace = page.evaluate(
            "([id, n]) => document.querySelector(`#${id} .canvas`).data.findLastIndex(trace => trace.meta === n)",
            [plot, number],
        )
        assert trace >= 0
        page.locator(f"#{plot} .canvas").scroll_into_view_if_needed()
        page.evaluate(
            "([id, trace]) => Plotly.Fx.hover(document.querySelector(`#${id} .canvas`),"
            " [{curveNumber: trace, pointNumber: 0}])",
            [plot, trace],
        )
        visit.settle()
        hover = page.locator(f"#{plot} .hovertext").first.text_content()
        assert HOSTILE in hover, f"{plot} shows {hover!r}"
    page.locator("#pairs tbody tr", has_text="<img").locator("button").first.click()
    assert HOSTILE in page.locator("dialog h2").inner_text()
    page.locator("dialog p button", has_text="<img").click()
    assert f"run {HOSTILE}" in page.locator("dialog").inner_text()
    assert page.evaluate("typeof hacked") == "undefined"
    assert not page.locator("img").count()
    assert not page.locator("a[href^=javascript]").count()


@pytest.fixture(scope="module")
def in_sessions(tmp_path_factory) -> Path:
    """The page of stored rows in sessions, of published ones, and of tasks in episodes."""
    root = tmp_path_factory.mktemp("sessions")
    names = "tiny-features-sessions", "mini-sessions-published", "tiny-features-5shot", "tiny-features-1shot", TASK
    tasks = [load_tasks(name)[0] for name in names]
    (root / "report.html").write_text(
        render_page(collect_page(load_results_with_variants(tasks, root, named=True))), encoding="utf-8"
    )
    return root / "report.html"


def test_one_way_leads_to_both_protocols(chromium, in_sessions):
    """Protocol, data set and shots by keyboard; the address keeps what is shown, and filters hold on the way."""
    ways = [
        ("episodes", None, "tiny-features-5shot"),
        ("data", "mini-imagenet", "mini-5shot"),
        ("data", "tiny-features", "tiny-features-5shot"),
        ("task", "tiny-features-1shot", "tiny-features-1shot"),
        ("sessions", None, "tiny-features-sessions"),
        ("data", "mini-imagenet-sessions", "mini-sessions-published"),
        ("data", "tiny-features", "tiny-features-sessions"),
        ("episodes", None, "tiny-features-5shot"),
    ]
    with Visit(chromium, in_sessions) as visit:
        page = visit.page
        visit.start("mini-sessions-published")
        page.fill("[name=search]", "lr")
        for menu, value, task in ways:
            if value is None:
                page.locator("[name=protocol]:checked").focus()
                page.keyboard.press("ArrowLeft" if menu == "episodes" else "ArrowRight")
            else:
                page.locator(f"[name={menu}]").select_option(value)
            visit.settle()
            article = page.locator("article:visible")
            assert article.get_attribute("data-task") == page.input_value("[name=task]") == task
            assert page.evaluate("new URLSearchParams(location.hash.slice(1)).get('task')") == task
            assert page.input_value("[name=search]") == "lr"
            protocol = "sessions" if "sessions" in task else "episodes"
            assert page.locator("[name=protocol]:checked").input_value() == protocol
            assert page.locator("#curves + #board").count() == (protocol == "sessions"), "they open on their curves"
            heading = article.locator("th", has_text=re.compile("^(Acc|Avg)"))
            assert heading.inner_text() == ("Avg." if protocol == "sessions" else "Acc.")
            order = heading.get_attribute("aria-sort")
            heading.locator("button").focus()
            page.keyboard.press("Enter")
            assert heading.get_attribute("aria-sort") not in (order, None)
            offered = [text.split(" ")[0] for text in page.locator("[name=data] option").all_inner_texts()]
            mini = ["mini-imagenet", "mini-imagenet-held-out"] if protocol == "episodes" else ["mini-imagenet-sessions"]
            assert sorted(offered) == [*mini, "tiny-features"]
        assert page.locator("[name=task] option").all_inner_texts() == ["5 shots", "1 shot"]
        page.get_by_text("Skip to the table").focus()
        page.keyboard.press("Enter")
        visit.settle()
        assert page.locator("article:visible").get_attribute("data-task") == ways[-1][-1], "it leads to no other table"
        assert not visit.complaints


@pytest.mark.parametrize("size", SIZES)
def test_sessions_are_curves_and_tables(size, chromium, in_sessions, call):
    """Curves are those of the table for programs; lazy models are dotted, published rows dashed and without ranks."""
    records = json.loads(call("table", "tiny-features-sessions", "--format", "json")[1])
    # Rows with options of their own are not switched on.
    table = {r["method"]: [r[f"a_{t}"] for t in range(10)] for r in records if "=" not in r["method"]}
    lines = (
        "[...document.querySelectorAll('#sessions .canvas')[0].data].filter(line => line.fill !== 'toself')"
        ".map(line => [line.hovertext[0].split('<br>')[0], line.y, line.line.dash])"
    )
    visible = "[...document.querySelectorAll('figure')].filter(f => f.offsetParent).map(f => f.id)"
    with Visit(chromium, in_sessions, size) as visit:
        visit.start("tiny-features-sessions")
        curves = {name: (y, dash) for name, y, dash in visit.page.evaluate(lines)}
        assert set(curves) == set(table)
        for name, (y, dash) in curves.items():
            assert y == pytest.approx(table[name], abs=0.0051), name
            assert dash == "dot" or not name.startswith("lazy")
        assert visit.page.evaluate(visible) == [
            "sessions", "forgetting", "variance", "seeds", "validation", "cost", "pairs"
        ]  # fmt: skip
        fits(visit)
        usual = visit.page.locator("article:visible thead th:visible").all_inner_texts()
        assert {"Avg.", "gain"} <= set(usual)
        visit.page.get_by_role("checkbox", name="more columns").check()
        visit.settle()
        heads = ["".join(h.split()) for h in visit.page.locator("article:visible thead th:visible").all_inner_texts()]
        assert [head for head in heads if head.startswith("A")] == ["Avg.", *(f"A{t}" for t in range(10))]
        visit.page.locator("#chips label", has_text=re.compile("^lr$")).click()
        assert {name for name, *_ in visit.page.evaluate(lines)} == set(table) - {"lr"}
        visit.start("mini-sessions-published")
        labels = {row.label for row in read_published_rows("mini-sessions-published")}
        curves = {name: (y, dash) for name, y, dash in visit.page.evaluate(lines) if name in labels}
        assert len(curves) == 50
        assert curves["CEC"] == ([72.0, 66.83, 62.97, 59.43, 56.7, 53.73, 51.19, 49.24, 47.63], "dash")
        fact = visit.page.locator("article:visible tr", has_text="FACT (released log)").text_content()
        assert "published: zhou2022 (t, c)" in fact
        visit.start("tiny-features-5shot")
        assert visit.page.evaluate(visible) == ["tradeoff", "seeds", "validation", "cost", "pairs"]
        assert not visit.complaints


@pytest.mark.parametrize(("size", "scheme"), [("desk", "dark"), ("telephone", "light")], ids=SIZES)
def test_what_is_forgotten_and_what_a_number_depends_on_stand_beside_the_curves(
    size, scheme, chromium, in_sessions, call
):
    """The triangle of the row that is picked, from its counts; bars of variance are those of ``variance``."""
    splits = json.loads(call("variance", "tiny-features-sessions", "--format", "json")[1])
    splits = {split["method"]: split for split in splits if split.get("method") and "=" not in split["method"]}
    results = [
        read_result(path) for path in sorted(packaged_results_folder().glob("tiny-features-sessions/lr.seed-*.json"))
    ]
    hits, queries = (
        np.sum([getattr(result.to_hit_counts(), name).astype(int).sum(0) for result in results], 0)
        for name in ("hits", "queries")
    )
    expected, at = [], 0
    for t in range(10):
        expected.append(100 * hits[at : at + t + 1] / queries[: t + 1])
        at += t + 1
    bars = (
        "[...document.querySelector('#variance .canvas').data].map(b => [b.meta, b.name, b.x[0]])"
        ".map(([row, part, share]) => [DATA.rows[row].name, part, share])"
    )
    with Visit(chromium, in_sessions, size, scheme) as visit:
        visit.start("tiny-features-sessions")
        fits(visit)
        figure = visit.page.locator("#forgetting")
        assert figure.evaluate("f => f.querySelector('.scroll').scrollWidth <= f.clientWidth"), "all of it is seen"
        figure.locator("select").select_option(label="lr")
        visit.settle()
        lines = figure.locator("tbody tr").all()
        cells = [[float(text) for text in line.locator("td").all_inner_texts()] for line in lines]
        for line, numbers in zip(cells, expected, strict=True):
            assert line == pytest.approx(numbers, abs=0.051 if size == "desk" else 0.551)
        shares = {(name, part): share for name, part, share in visit.page.evaluate(bars)}
        assert {name for name, _ in shares} == set(splits)
        variances = {(name, part): splits[name][f"sd_{part.replace(' ', '_')}"] ** 2 for name, part in shares}
        for (name, part), share in shares.items():
            total = sum(variance for (row, _), variance in variances.items() if row == name)
            # Deviations of four digits are off by 5e-5, which twice of each of the two adds to the share.
            tolerance = 0.05 + 400 * 5e-5 / total**0.5
            assert share == pytest.approx(100 * variances[name, part] / total, abs=tolerance)
        visit.page.locator("#chips label", has_text=re.compile("^lr$")).click()
        options = figure.locator("option").all_inner_texts()
        assert "lr" not in options
        assert figure.locator("option:checked").inner_text() == options[0], "another row takes its place"
        visit.page.locator("#chips button", has_text="none").click()
        assert "No rows are switched on." in figure.inner_text()
        assert not visit.complaints
