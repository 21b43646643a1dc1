"""The page as one HTML file that needs nothing else. Imports no torch."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import Any

from markupsafe import Markup, escape

from ifsl_bench._version import __version__
from ifsl_bench.analysis.aggregate import COMPUTED_ORIGIN, EVERY, PAPER
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.variants import split_task_name
from ifsl_bench.reporting.columns import TableRow
from ifsl_bench.reporting.leaderboard import RANK_NOTE_TEMPLATE
from ifsl_bench.reporting.page.data import Page, PageRow, RowPair, TaskSection
from ifsl_bench.reporting.table import Cell, Table

SCRIPT_FILES = ("page.js", "details.js", "pairs.js", "sessions.js", "plots.js")  # in this order, after Plotly
PROTOCOL_MENU_TEXTS = {"episodes": "in one group", "sessions": "in sessions"}  # how novel classes come
PHOTOGRAPH_DATASETS = ("tiny-features", "tiny-pack", "mini-imagenet-held-out", "mini-imagenet-sessions")
IMAGE_KIND_OF_DATASET = {**dict.fromkeys(PHOTOGRAPH_DATASETS, "photographs"), "glyphs": "letters"}
# The columns that are shown before more are asked for, in this order; the others come last.
ALWAYS_SHOWN_HEADINGS = (
    "rank",
    "method",
    "Acc.",
    "Avg.",
    "cal. Acc.",
    "gain",
    "to the best",
    "base",
    "novel",
    "Delta",
    "Delta_a",
    "Delta_b",
    "seeds",
    "source",
)
# Of these, what a narrow screen is not shown until it asks for more.
WIDE_SCREEN_HEADINGS = ("base", "novel", "Delta_a", "Delta_b", "seeds", "source")


def render_page(page: Page) -> str:
    """Return the page: the same bytes for the same results, whenever and wherever it is made."""
    import jinja2

    loader = jinja2.FunctionLoader(_read_asset)
    environment = jinja2.Environment(
        autoescape=True, loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    scripts = [_read_asset("plotly-basic.min.js"), *map(_read_asset, SCRIPT_FILES)]
    rule = RANK_NOTE_TEMPLATE.format("Acc. or Avg.", "episodes or orders")
    return environment.get_template("report.html.j2").render(
        sections=page.sections,
        rows=page.rows,
        overviews=[
            (name, protocol, *overview)
            for name in list_settings(page)
            for protocol in PROTOCOL_MENU_TEXTS
            if len((overview := _overview_table(page, name, protocol))[0]) > 1
        ],
        protocols=PROTOCOL_MENU_TEXTS,
        protocol_of=_protocol_name,
        grids=page.grids,
        settings={name: _describe_setting(name) for name in list_settings(page)},
        version=__version__,
        counts=_count_rows_by_task(page),
        rule=rule.partition(": ")[2].replace("(--setting)", "(Setting, above)"),
        style=_read_asset("style.css"),
        data=escape_script_json(_script_data(page)),
        scripts=scripts,
        policy=_content_security_policy(scripts),
        classes_of=_css_classes,
        columns_of=_column_order,
        flags_of=_filter_flags,
        breakable=lambda name: Markup(re.sub(r"([.=@])", r"\1<wbr>", str(escape(name)))),  # for narrow columns
        note_markup=_note_markup,
        symbols=_read_asset("marks.svg"),
    )


def escape_script_json(value: Any) -> str:
    """Return JSON that may stand in a ``<script>`` element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def list_settings(page: Page) -> list[str]:
    """Return the settings that some task has, methods as published first."""
    return list(dict.fromkeys(sorted((section.setting for section in page.sections), key=lambda s: (s != PAPER, s))))


def _describe_setting(setting: str) -> str:
    """Return a setting in words."""
    trials = setting.removeprefix("tuned-")
    return {PAPER: "as published", EVERY: "the same in all"}.get(
        setting, f"best of {trials} trials" if trials.isdigit() else setting
    )


def _protocol_name(task: Task) -> str:
    return protocol_of_task(task).name


def _menu_texts(page: Page) -> dict[str, tuple[str, str]]:
    """Return the texts of menus for each task: its data set; and its shots, with all else that its neighbours lack."""
    alike: dict[tuple[str, str], dict[str, Task]] = {}
    for section in page.sections:
        alike.setdefault((_protocol_name(section.task), section.task.dataset.name), {})[section.task.name] = (
            section.task
        )
    measured = {row.task for row in page.rows if row.origin}
    texts = {}
    for (_, data), tasks in alike.items():
        about = IMAGE_KIND_OF_DATASET.get(data, "" if measured & tasks.keys() else "published")
        words = {name: (task.title or name).replace(",", " ,").split() for name, task in tasks.items()}
        same = len([*takewhile(lambda here: len({*here}) == 1, zip(*words.values(), strict=False))])
        for name, text in words.items():
            own = " ".join(text[same:]).replace(" ,", ",").lstrip(", ")
            texts[name] = (f"{data} ({about})" if about else data, own or name)
    return texts


@cache
def _read_asset(name: str) -> str:
    return resources.files("ifsl_bench.reporting.page").joinpath("assets", name).read_text(encoding="utf-8")


def _content_security_policy(scripts: Sequence[str]) -> str:
    """Return the content security policy: our scripts, by their hashes, and nothing from anywhere else."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def _count_rows_by_task(page: Page) -> dict[str, int]:
    measured = [row for row in page.rows if row.origin]
    return {
        "results": sum(len(row.seeds) for row in measured),
        "rows": len(measured),
        "tasks": len({row.task for row in measured}),
        "published": sum(not (row.origin or row.source == COMPUTED_ORIGIN) for row in page.rows),
    }


def _note_markup(note: str) -> Markup:
    """Return a note, with what stands in backticks as code."""
    parts = [escape(part) for part in note.split("`")]
    if len(parts) % 2 == 0:  # a name has one
        return escape(note)
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def _column_order(table: Table[TableRow]) -> list[int]:
    """Return the places of a table's columns in the order of the page, without those that are empty."""
    headings, cells = table.headings(), table.cells()
    filled = [i for i in range(len(headings)) if any(line[i].text for line in cells)]
    return sorted(filled, key=lambda i: (*ALWAYS_SHOWN_HEADINGS, headings[i]).index(headings[i]))


def _css_classes(heading: str, cell: Cell | None = None) -> Markup:
    """Return the attribute with the CSS classes of a column's heading or cell.

    "more" where readers ask for it, "wide" on wide screens alone. Most columns are numbers: their headings have "n",
    and cells of the others "t".
    """
    text = heading in ("method", "source")
    kinds = {
        "more": heading not in ALWAYS_SHOWN_HEADINGS,
        "wide": heading in WIDE_SCREEN_HEADINGS,
        "n": not (text or cell),
        "t": text and cell is not None,
        "best": cell is not None and cell.is_bold,
    }
    names = " ".join(kind for kind, holds in kinds.items() if holds)
    return Markup(f' class="{names}"' if " " in names else f" class={names}" if names else "")


def _filter_flags(entry: TableRow) -> str:
    """Return the flags that a row is filtered by."""
    row, place = entry.measured_row, entry.ranked_row
    flags = {
        "published": entry.row_kind == "published",
        "options": row is not None and row.has_changed_options,
        "provisional": row is not None and (place is None or place.is_provisional),
    }
    return " ".join(name for name, holds in flags.items() if holds)


def _overview_table(
    page: Page, setting: str, protocol: str
) -> tuple[list[str], list[tuple[PageRow, list[tuple[int, str, str]]]]]:
    """Return the tasks with ranked rows, and for each method its row's number, accuracy and ranks on each of them.

    A method that has no row with a rank on a task has number -1 there. Methods are in the order of the first task.
    Tasks whose protocols are changed are left out where there are others: few methods were measured on them.
    """
    sections = [
        b for b in page.sections if (b.setting, _protocol_name(b.task)) == (setting, protocol) and _ranked_table_rows(b)
    ]
    sections = [
        section for section in sections if not split_task_name(section.task.name)[1].changes_by_key()
    ] or sections
    cells_by_row: dict[tuple[str, str], dict[str, tuple[int, str, str]]] = {}
    for section in sections:
        for number, (entry, ranks) in _ranked_table_rows(section).items():
            cell = number, f"{entry.metric_estimates['acc'].mean:.2f}", ranks
            row = page.rows[number]
            cells_by_row.setdefault((row.label, row.source), {}).setdefault(section.task.name, cell)
    tasks = [section.task.name for section in sections]
    lines = [
        # A name says where a row is from on the tasks where another one shares its label.
        (
            max((page.rows[cell[0]] for cell in cells.values()), key=lambda row: len(row.name)),
            [cells.get(task, (-1, "", "")) for task in tasks],
        )
        for cells in cells_by_row.values()
    ]
    return tasks, lines


def _ranked_table_rows(section: TaskSection) -> dict[int, tuple[TableRow, str]]:
    """Return the rows with ranks by their number, in the table's order."""
    both = zip(section.row_numbers, section.table.rows, strict=True)
    return {
        number: (entry, str(entry.ranked_row.rank_interval))
        for number, entry in both
        if entry.ranked_row and entry.ranked_row.rank_interval
    }


def _script_data(page: Page) -> dict[str, Any]:
    """Return the data of the scripts. Texts that many results share, as commands and digests are, stand there once."""
    texts: dict[str, int] = {}

    def pooled(facts: Mapping[str, str]) -> list[tuple[int, int]]:
        return [(texts.setdefault(k, len(texts)), texts.setdefault(v, len(texts))) for k, v in facts.items()]

    def compact(pair: RowPair) -> list[float]:
        seeds = texts.setdefault(", ".join(map(str, pair.seeds)), len(texts))
        fixed = pair.models_fixed + 2 * (not pair.images_fixed)
        return [pair.a, pair.b, pair.mean, pair.interval, pair.p_value, int(pair.is_significant), seeds, fixed]

    rows = []
    for row in page.rows:
        entry = asdict(row) | {"setting": _describe_setting(row.setting)}
        if row.origin:
            entry["origin"] = [pooled(row.origin.shared_facts), [pooled(seed) for seed in row.origin.facts_by_seed]]
        rows.append({name: value for name, value in entry.items() if value not in (None, "", [], {})})
    choices = _menu_texts(page)
    sections = [
        {
            "protocol": _protocol_name(section.task),
            "data": section.task.dataset.name,
            "shots": section.task.shots,
            "task": section.task.name,
            "choices": choices[section.task.name],
            "setting": section.setting,
            "said": _describe_setting(section.setting),
            "rows": section.row_numbers,
            "queries": section.query_counts,
            "ranked": list(_ranked_table_rows(section)),
            "pairs": {name: [compact(pair) for pair in pairs] for name, pairs in section.row_pairs.items()},
        }
        for section in page.sections
    ]
    citations = [[citation.text, citation.bibtex] for citation in page.citations]
    return {"rows": rows, "boards": sections, "citations": citations, "texts": list(texts)}
