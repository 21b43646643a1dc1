"""Texts from unknown people are never more than texts: no commands of a terminal, links, formulas or markup."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt

from ifsl_bench.reporting.detail_tables import describe_facts
from ifsl_bench.reporting.table import OUTPUT_FORMATS, Column, Table, escape_latex, format_prose, render_tables
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.store.schema import parse_result

STEERING = "\x1b]0;owned\x07\x1b[2J\x9b1m\r\u202eabc\u2066\u2028\x7f\U000e0041"
FORBIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0041]"
)


@pytest.fixture
def loud(tmp_path) -> Path:
    """A result that has every text it may have full of what steers a terminal."""
    path = tmp_path / "glyphs-5shot" / "lwof.seed-1.json"
    path.parent.mkdir()
    value = json.loads((packaged_results_folder() / "glyphs-5shot/lwof.seed-1.json").read_text())
    value["provenance"] |= {"note": STEERING, STEERING: "<script>x</script>", "deep": {STEERING: [STEERING]}}
    value["pretraining"] |= {"key": STEERING, "accuracy": STEERING}
    value["cost"][STEERING] = 1.0
    value["solver"][STEERING] = {STEERING: 1.0}
    value["tuned"][STEERING] = {STEERING: 50.0}
    value["training"][STEERING] = STEERING
    value["setting"] = STEERING
    value["edge"] = [STEERING, "a | b ` <script>"]
    path.write_text(json.dumps(value))
    path.with_name("x\a\x1b]0;evil.seed-0.json").write_text("{}")
    return path


@pytest.mark.parametrize("style", OUTPUT_FORMATS)
def test_show_and_tables_write_out_what_would_steer_the_terminal(loud, call, style):
    for command in (
        ("show", loud),
        ("table", "glyphs-5shot", "--results", loud.parents[1]),
        ("table", "glyphs-5shot", "--results", loud.parents[1], "--rank", "--full"),
    ):
        status, out, err = call(*map(str, command), "--format", style)
        text = out + err
        assert status == 0
        assert not FORBIDDEN.search(text)
        text.encode()
        if style == "markdown":
            assert "<script>" not in text
            grid = [line for line in text.splitlines() if line.startswith("|")]
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in grid}) <= 1 or command[0] == "show"
        if command[0] == "show" and style in ("text", "markdown"):
            note = r"\x1b]0;owned\x07\x1b[2J\x9b1m\r\u202eabc\u2066\u2028\x7f\U000e0041"
            note = re.sub(r"[][\\]", r"\\\g<0>", note) if style == "markdown" else note  # the same text when rendered
            assert re.search(rf"^note +{re.escape(note)}$", text, re.M)
        elif command[0] == "table":
            assert "left out: " in text


def page(style: str, *texts: str, note: str = "") -> str:
    """A table of texts, a row each, beside a negative number."""
    name: Column[str] = Column("name", lambda text: text, lambda text: {"name": text, "all": [text, "b"]})
    value: Column[str] = Column("value", lambda _: "-1.50", lambda _: {"value": -1.5, "seeds": [-1.25, 2.0]})
    return render_tables([Table([name, value], texts, note, [note])], style)


def test_cells_of_markdown_are_text_alone():
    text = "a | b\n`c` <script>d</script> \\| [e](x) &lt;"
    row = page("markdown", text).splitlines()[4 - 2]
    assert row.startswith(r"| a \| b\\n\`c\` &lt;script&gt;d&lt;/script&gt; \\\| \[e\](x) &amp;lt; ")
    assert page("markdown", "p < 1e-15").count("p < 1e-15") == 1, "no HTML, and easier to read"
    assert "<b>" not in page("markdown", "x", note="said <b> here")
    noted = page("markdown", "x", note="![](http://e.x) \\[f](g) `table [TASK]`")
    assert r"!\[\](http://e.x) \\\[f\](g) `table [TASK]`" in noted, "no image and no link, and code as it is"


@pytest.mark.parametrize("seed", range(5))
def test_notes_in_markdown_have_no_link_and_no_image_whatever_their_backticks(seed):
    """By a parser of Markdown, of texts made of what steers it."""
    draw = random.Random(seed)
    parts = ["`", "``", "`` ", "[x](http://e.x)", "![x](http://e.x)", "\\", "[", "](http://e.x)", " ", "a",
             "`[a]`", "```"]  # fmt: skip
    for _ in range(500):
        note = "x" + "".join(draw.choices(parts, k=draw.randrange(1, 12)))
        kinds = {child.type for token in MarkdownIt("commonmark").parse(format_prose(note, "markdown"))
                 for child in token.children or []}  # fmt: skip
        assert kinds <= {"text", "code_inline", "text_special"}, note


def test_texts_in_csv_are_no_formulas_and_numbers_stay_numbers():
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "a=1", "lr+a"]
    rows = list(csv.DictReader(io.StringIO(page("csv", *texts))))
    expected = ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\\t=1", "'\\r=1", "a=1", "lr+a"]
    assert [row["name"] for row in rows] == expected
    assert [row["all"] for row in rows] == [f"{text} b" for text in expected]
    assert {(row["value"], row["seeds"]) for row in rows} == {("-1.5", "-1.25 2.0")}


def test_latex_has_no_commands_of_others():
    text = r"\input{/etc/passwd} ^^5cinput 5% $x$ & #_~"
    for output in (page("latex", text), page("latex", "x", note=text), escape_latex(text)):
        assert r"\input" not in output
        assert "^^" not in output
    assert escape_latex("a\nb") == r"a\textbackslash{}nb"


def test_json_is_ascii_where_a_terminal_would_obey_and_reads_back_as_it_was():
    text = page("json", STEERING, "± é")
    assert not FORBIDDEN.search(text)
    assert "± é" in text
    rows = json.loads(text)
    assert [row["name"] for row in rows] == [STEERING, "± é"]
    assert rows[0]["value"] == -1.5


def test_a_line_break_in_a_text_makes_no_line_of_its_own():
    good = parse_result(packaged_results_folder() / "glyphs-5shot/lwof.seed-1.json")
    forged = msgspec.structs.replace(good, provenance={**good.provenance, "note": "x\ntask         another"})
    facts = describe_facts([forged]).splitlines()
    assert len(facts) == len(describe_facts([good]).splitlines()) + 1
    assert facts[-1] == r"note              x\ntask         another"
