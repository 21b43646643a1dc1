"""Tables before they are text, and the five formats of one."""

from __future__ import annotations

import json
import re

import pytest

from ifsl_bench.protocols.episode_protocol import EPISODES_PROTOCOL, METRIC_COLUMNS
from ifsl_bench.protocols.metrics import BALANCE_METRIC_NAMES, EPISODE_METRIC_NAMES, Estimate
from ifsl_bench.protocols.protocol import MetricColumn
from ifsl_bench.protocols.registry import all_metric_names, registered_protocols, title_by_metric
from ifsl_bench.protocols.session_protocol import SESSIONS_PROTOCOL
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.reporting.columns import TableRow, format_plus_minus, paper_columns, task_columns
from ifsl_bench.reporting.table import OUTPUT_FORMATS, RECORD_FORMATTERS, Column, Table, render_tables, table_from_dicts

NAME: Column[tuple] = Column("name", lambda row: row[0], lambda row: {"name": row[0]}, lambda row: row[1] > 1)
VALUE: Column[tuple] = Column("value", lambda row: f"{row[1]:.1f} ± 1", lambda row: {"value": row[1]})
FOR_PROGRAMS: Column[tuple] = Column(make_record_fields=lambda row: {"seeds": [1, 2]} if row[1] > 1 else {})
FOR_READERS: Column[tuple] = Column("said", lambda row: "yes")
TABLE = Table([NAME, VALUE, FOR_PROGRAMS, FOR_READERS], [("a", 1.25), ("b", 0.5)], "title", ["note"])

EXPECTED = {
    "text": "title\n\n"
            "name    value    said\n"
            "------  -------  ------\n"
            "a       1.2 ± 1  yes\n"
            "b       0.5 ± 1  yes\n\n"
            "note",
    "markdown": "title\n\n"
                "| name   | value   | said   |\n"
                "|--------|---------|--------|\n"
                "| **a**  | 1.2 ± 1 | yes    |\n"
                "| b      | 0.5 ± 1 | yes    |\n\n"
                "note",
    "latex": "% title\n\n"
             "% needs booktabs\n"
             "\\begin{tabular}{lll}\n\\toprule\n"
             "name & value & said \\\\\n\\midrule\n"
             "a & 1.2 $\\pm$ 1 & yes \\\\\n"
             "b & 0.5 $\\pm$ 1 & yes \\\\\n"
             "\\bottomrule\n\\end{tabular}\n\n"
             "% note",
    "csv": "name,value,seeds\na,1.25,1 2\nb,0.5,",
    "json": json.dumps([{"name": "a", "value": 1.25, "seeds": [1, 2]}, {"name": "b", "value": 0.5, "seeds": None}],
                       indent=1),
}  # fmt: skip


@pytest.mark.parametrize("style", OUTPUT_FORMATS)
def test_one_table_in_each_format(style):
    assert render_tables([TABLE], style) == EXPECTED[style]


@pytest.mark.parametrize("style", OUTPUT_FORMATS)
def test_several_tables_are_pages_for_readers_and_one_document_for_programs(style):
    second_table = Table([FOR_PROGRAMS, NAME], [("c", 2.0)])
    text = render_tables([TABLE, second_table], style, closing="the end")
    if style == "json":
        assert json.loads(text) == [*json.loads(EXPECTED["json"]), {"name": "c", "value": None, "seeds": [1, 2]}]
    elif style == "csv":
        assert text == EXPECTED["csv"] + "\nc,,1 2"
    else:
        first, last = text.split(EXPECTED[style])[1].strip("\n").rsplit("\n\n", 1)
        assert first == render_tables([second_table], style)
        assert last == ("% the end" if style == "latex" else "the end")


def test_rows_that_lack_what_others_have_are_listed_with_gaps():
    rows = [{"a": 1, "b": None}, {"a": "x", "c": 2}]
    table = table_from_dicts(rows, "which")
    assert table.headings() == ["a", "b", "c"]
    assert [[cell.text for cell in row] for row in table.cells()] == [["1", "", ""], ["x", "", "2"]]
    assert table.records() == [
        {"table": "which", "a": 1, "b": None, "c": None}, {"table": "which", "a": "x", "b": None, "c": 2},
    ]  # fmt: skip


def test_no_rows_at_all():
    assert [render_tables([table_from_dicts([])], style) for style in RECORD_FORMATTERS] == ["", "[]"]


def test_every_metric_has_a_heading():
    assert (
        title_by_metric().keys()
        == {*EPISODE_METRIC_NAMES, *BALANCE_METRIC_NAMES, *SESSIONS_PROTOCOL.metrics}
        == {*all_metric_names()}
    )
    for protocol in registered_protocols():
        assert {*protocol.metrics, *protocol.optional_metrics} <= {column.name for column in protocol.metric_columns}
    assert format_plus_minus(Estimate(1.5, float("nan")), "+") == "+1.50"


def test_one_entry_makes_a_metric_a_column_of_text_and_of_papers(monkeypatch):
    task = packaged_tasks()["glyphs-5shot"]

    def headings() -> tuple[list[str], list[str]]:
        columns = paper_columns(task, row_metrics=["ausuc"])
        return Table(task_columns(task, row_metrics=["ausuc"]), []).headings(), [c.latex_heading for c in columns]

    before = headings()
    area = MetricColumn("ausuc", "area", "$A$", is_in_short_tables=True, is_in_short_latex_tables=True)
    monkeypatch.setattr(
        EPISODES_PROTOCOL, "metric_columns", (area, *(column for column in METRIC_COLUMNS if column.name != "ausuc"))
    )
    after = headings()
    assert [set(b) - set(a) for a, b in zip(before, after, strict=True)] == [{"area"}, {"$A$"}]
    assert {"ausuc", "ausuc_interval"} <= Table(task_columns(task), [fake_row(task)]).records()[0].keys()


def fake_row(task):
    return TableRow(task, True, "x", {"acc": Estimate(50.0, 1.0)}, "stored")


def test_latex_has_minus_signs_and_leaves_names_and_ranks_as_they_are():
    rows = [("Delta", "-1.50 ± 0.20", "2-7"), ("my-Delta.a=1,-2", "+0.30", "-"), ("[red]x", "-0.10  +0.20", "*")]
    columns = [Column(heading, lambda row, i=i: row[i]) for i, heading in enumerate(["metric", "Delta_a", "rank"])]
    text = render_tables([Table(columns, rows)], "latex")
    assert "$\\Delta_a$" in text
    assert "$\\Delta$" in text
    assert "$-$1.50 $\\pm$ 0.20" in text
    assert "$-$0.10  +0.20" in text
    assert "2-7" in text
    assert "my-Delta.a=1,-2" in text
    assert "\n{}[red]x" in text


def test_latex_prints_every_sign_as_it_is_in_its_usual_fonts():
    row = ("Delta (printed)", "-19.55 ± 0.26 (-20.21)", "< 1e-15", "p > 0.5", "0.24 (0.20-0.30)", "a|b")
    columns = [Column(f"{i}", lambda row, i=i: row[i]) for i in range(len(row))]
    *_, line = (line for line in render_tables([Table(columns, [row])], "latex").splitlines() if " & " in line)
    assert line.removesuffix(r" \\").split(" & ") == [
        r"$\Delta$ (printed)", r"$-$19.55 $\pm$ 0.26 ($-$20.21)", r"\textless{} 1e-15", r"p \textgreater{} 0.5",
        "0.24 (0.20-0.30)", r"a\textbar{}b",
    ]  # fmt: skip
    outside_math = re.sub(r"\$[^$]*\$", "", line)
    assert not set("<>|") & set(outside_math), "OT1 prints these as other characters"
