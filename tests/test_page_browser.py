"""The page of results in a real browser: headless Chromium, driven by Playwright, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ifsl_bench.board import boards
from ifsl_bench.board.result_file import packaged_root
from ifsl_bench.page.gather import boards_of, gather
from ifsl_bench.page.html import page_html
from ifsl_bench.protocol.task_files import find, packaged
from tests.test_page import HOSTILE, TASK, write_results

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MOST_BYTES, MOST_SECONDS = 3_000_000, 2.0
SIZES = {"desk": (1280, 900), "telephone": (400, 800)}
BOTH = pytest.mark.parametrize(("size", "scheme"), [("desk", "light"), ("telephone", "dark")])


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # as root it needs that
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> Path:
    """The page of made-up results, one with a hostile name, and of a task with published rows alone."""
    root, out = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("page") / "report.html"
    write_results(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boards, "packaged_root", lambda: root / "none")
        tasks = [find(name)[0] for name in (TASK, "tiered-5shot")]
        out.write_text(page_html(gather(boards_of(tasks, root, named=True))), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """The page of everything that is stored."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    page = gather(boards_of(packaged().values(), packaged_root(), named=False))
    out.write_text(page_html(page), encoding="utf-8")
    return out


class Visit:
    """A page that was opened, and all that the browser had to complain of."""

    def __init__(self, browser: Any, path: Path, size: str = "desk", scheme: str = "light", address: str = "") -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
        )
        self.page, self.complaints = self.context.new_page(), []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._requested)
        self.page.goto(path.as_uri() + address)
        self.page.wait_for_selector("html[data-drawn]", timeout=30_000)

    def _requested(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(f"asked the network for {request.url}")

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.context.close()
        assert kind is not None or not self.complaints, self.complaints

    def names(self) -> list[str]:
        """Of the rows that are shown."""
        return [name.strip() for name in self.page.locator("article:visible tbody tr:visible .open").all_inner_texts()]

    def settle(self) -> None:
        """Until what was typed has been taken in."""
        self.page.wait_for_timeout(250)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_all_that_is_stored_is_small_drawn_soon_and_fits_the_screen(chromium, stored, size, scheme, patience):
    assert stored.stat().st_size < MOST_BYTES
    with Visit(chromium, stored, size, scheme) as visit:
        seconds = int(visit.page.evaluate("document.documentElement.dataset.drawn")) / 1000
        assert seconds < patience(MOST_SECONDS)
        assert visit.page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
        assert visit.page.locator("#plots figure:visible").count() == 5
        assert visit.page.locator(".js-plotly-plot:visible").count() >= 3
        background = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(int(part) for part in background[4:-1].split(",")) / 3 > 128
        assert light == (scheme == "light")
        for name in visit.page.locator("[name=task] option").all_inner_texts()[:: 1 if scheme == "dark" else 100]:
            visit.page.select_option("[name=task]", name)
            visit.settle()
            assert visit.page.locator("article:visible").get_attribute("data-task") == name
            assert visit.page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]


@pytest.mark.parametrize("size", SIZES)
def test_sorting_by_a_column_and_back(chromium, made_up, size):
    with Visit(chromium, made_up, size) as visit:
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
        shown = [float(line.split("\t")[3].split()[0]) for line in cells if line.split("\t")[3].strip()]
        assert shown == sorted(shown, reverse=True)
        assert len(shown) == 5, "published rows have none, and come last"


@pytest.mark.parametrize("size", SIZES)
def test_filters_and_search(chromium, made_up, size):
    with Visit(chromium, made_up, size) as visit:
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
        page.select_option("[name=task]", "tiered-5shot")
        visit.settle()
        assert not page.locator("#plots").is_visible()


@BOTH
def test_a_number_is_one_click_from_where_it_comes_from_and_the_address_leads_back(chromium, made_up, size, scheme):
    with Visit(chromium, made_up, size, scheme) as visit:
        page = visit.page
        page.locator("article:visible tbody tr:has(.open:text-is('b')) td:visible").nth(1).click()
        said = page.locator("dialog").inner_text()
        for fact in ("ifsl-bench run --method x --seed 2", "c0ffee", "a CPU", "d200", "mini-5shot/b.seed-1.json"):
            assert fact in said
        box = page.locator("dialog").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= SIZES[size][0]
        address = page.url.partition("#")[2]
        page.keyboard.press("Escape")
        assert not page.locator("dialog").is_visible()
    with Visit(chromium, made_up, size, scheme, f"#{address}") as again:
        assert again.page.locator("dialog h2").inner_text() == "b"


def test_a_link_of_the_table_of_all_tasks_leads_to_that_task(chromium, stored):
    with Visit(chromium, stored) as visit:
        link = visit.page.locator(".overview:visible thead a").last
        name = link.inner_text()
        link.click()
        visit.settle()
        assert visit.page.locator("article:visible").get_attribute("data-task") == name
        assert visit.page.input_value("[name=task]") == name


def test_the_keyboard_reaches_a_row_and_every_pair(chromium, made_up):
    with Visit(chromium, made_up) as visit:
        page = visit.page
        page.locator("article:visible .open").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("dialog h2").inner_text() == "b"
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


@BOTH
def test_a_hostile_name_stays_text_in_tables_plots_and_dialogs(chromium, made_up, size, scheme):
    with Visit(chromium, made_up, size, scheme) as visit:
        page = visit.page
        assert HOSTILE in visit.names()
        ticks = page.locator("#seeds .ytick text").all_text_contents()
        assert any(HOSTILE.startswith(tick.removesuffix("…")) and len(tick) > 10 for tick in ticks)
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
