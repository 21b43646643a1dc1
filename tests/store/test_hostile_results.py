"""Results from people one does not know: one that does not fit is left out, and texts are never more than texts."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt

from ifsl_bench.protocols.metrics import summarise
from ifsl_bench.protocols.tasks.metric_sets import COUNTS, MORE_COUNTS
from ifsl_bench.protocols.tasks.task_files import find
from ifsl_bench.reporting.detail_tables import facts_of
from ifsl_bench.reporting.render import FORMATS, READERS, escaped, prose, render
from ifsl_bench.reporting.table import Column, Table
from ifsl_bench.store.consistency import mismatch, unfit
from ifsl_bench.store.result_folder import packaged_root
from ifsl_bench.store.schema import Result, parse, summary_entry, write
from tests.store.result_fields import altered, listed

STEERING = "\x1b]0;owned\x07\x1b[2J\x9b1m\r\u202eabc\u2066\u2028\x7f\U000e0041"
FORBIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0041]"
)
LEFT_OUT = "left out: lwof, seed 1 (yours): it has 3 episodes, those of its digest 96eea890d608 are 2,000"


def cut(result: Result, n: int) -> Result:
    """The result with its first n episodes alone, its summary made anew and its digest kept."""
    entry = listed(result).episodes
    ways = len(entry.classes) // len(entry.base_joint)
    parts = {name: getattr(entry, name)[:n] for name in (*COUNTS, *MORE_COUNTS)}
    parts |= {"calibrated_base": [], "calibrated_novel": [], "classes": entry.classes[: n * ways]}
    shorter = msgspec.structs.replace(result, episodes=msgspec.structs.replace(entry, **parts), calibration=None)
    return msgspec.structs.replace(shorter, summary=summary_entry(summarise(shorter.counts().per_episode())))


@pytest.fixture
def results(tmp_path) -> Path:
    """A folder with three seeds of one row."""
    for seed in range(3):
        name = f"glyphs-5shot/lwof.seed-{seed}.json"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(packaged_root() / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def damaged(results) -> Path:
    """The same, one of them cut to three episodes."""
    write(results, cut(parse(results / "glyphs-5shot/lwof.seed-1.json"), 3))
    return results


@pytest.fixture
def said(call):
    """Runs a command line; its status and all that it prints."""

    def run(*command: str | Path) -> tuple[int, str]:
        status, out, err = call(*map(str, command))
        return status, out + err

    return run


def test_what_is_left_out_is_told_beside_what_programs_read_and_steers_no_terminal(results, call):
    (results / "glyphs-5shot" / "x\a\x1b]0;evil.seed-0.json").write_text("{}")
    status, out, err = call("table", "glyphs-5shot", "--results", str(results), "--format", "json")
    assert status == 0
    assert json.loads(out)
    assert "warning: left out: " in err
    assert not set("\a\x1b") & set(err)


@pytest.mark.parametrize("style", FORMATS)
@pytest.mark.parametrize("rank", [(), ("--rank",)], ids=["plain", "ranked"])
def test_a_result_cut_to_three_episodes_is_left_out_of_every_table(damaged, said, style, rank):
    status, text = said("table", "glyphs-5shot", "--results", damaged, "--format", style, *rank)
    assert status == 0
    assert "over 3 episodes" not in text
    if style in READERS:
        assert len(re.findall(re.escape(LEFT_OUT), text)) == 1
    if style == "text":
        assert "over 2,000 episodes" in text
    if style not in READERS:
        assert f"warning: {LEFT_OUT}" in text, "programs get no notes"
    if style == "json":
        rows = json.loads(text[: text.rindex("]") + 1])
        assert [row["seeds"] for row in rows if (row["method"], row["source"]) == ("lwof", "yours")] == [2]


def test_files_of_unequal_length_are_not_compared(damaged, said):
    files = [damaged / f"glyphs-5shot/lwof.seed-{seed}.json" for seed in (0, 1)]
    status, text = said("compare", *files)
    assert status == 2
    assert text.count("\n") == 1
    assert "cannot be compared: both say that their episodes are those of digest" in text
    assert "have 2000 and 3 of them" in text


def test_where_no_digest_is_pinned_most_results_say_how_many_episodes_it_has():
    (task,) = find("glyphs-5shot")
    whole = [parse(packaged_root() / f"glyphs-5shot/lwof.seed-{seed}.json") for seed in range(3)]
    some = [msgspec.structs.replace(cut(result, n), digest="d") for result, n in zip(whole, (50, 50, 3), strict=True)]
    assert list(unfit(task, [*whole, *some])) == [id(some[2])]
    assert unfit(task, [some[2], some[0], some[1]]).keys() == {id(some[2])}, "whatever their order"
    assert unfit(task, [some[0], some[2]]).keys() == {id(some[2])}, "of two the first is trusted"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_queries": 1000}, "episodes.base_queries is 1000, episodes of the task have"),
        ({"novel_queries": 1000}, "episodes.novel_queries is 1000, episodes of the task have"),
        ({"classes": list(range(2000))}, "episodes.classes has 2,000 entries"),
    ],
)
def test_episodes_that_are_not_the_tasks_do_not_fit(change, reason):
    (task,) = find("glyphs-5shot")
    good = parse(packaged_root() / "glyphs-5shot/lwof.seed-1.json")
    misfit = msgspec.structs.replace(good, episodes=msgspec.structs.replace(good.episodes, **change))
    assert unfit(task, [good, misfit])[id(misfit)].startswith(reason)
    assert unfit(task, [good]) == {}


def test_the_novel_classes_are_part_of_what_must_match():
    good = parse(packaged_root() / "glyphs-5shot/lwof.seed-1.json")
    a, b = (msgspec.structs.replace(good, episodes=msgspec.structs.replace(good.episodes, classes=c))
            for c in ([0, 1] * 2000, [1, 2] * 2000))  # fmt: skip
    assert mismatch(a, b) == "the novel classes of their episodes differ"
    assert mismatch(a, a) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["training"].update(solves=5),
        lambda v: v["training"].update(solves={"unconverged": -1, "episodes": 2}),
        lambda v: v["training"].update(solves={"adjoint_indefinite": "x", "adjoint_episodes": []}),
        lambda v: v["episodes"].update(base_queries=10**400),
    ],
)
def test_what_tables_cannot_use_is_left_out_in_one_line(results, said, change):
    path = altered(results / "glyphs-5shot/lwof.seed-1.json", change)
    status, text = said("table", "glyphs-5shot", "--results", results)
    assert status == 0
    assert len([line for line in text.splitlines() if line.startswith("left out: ")]) == 1
    assert not FORBIDDEN.search(text)
    status, text = said("show", path)
    assert (status, text.count("\n")) == (2, 1)


@pytest.fixture
def loud(results) -> Path:
    """A result that has every text it may have full of what steers a terminal."""
    path = results / "glyphs-5shot/lwof.seed-1.json"
    value = json.loads(path.read_text())
    value["provenance"] |= {"note": STEERING, STEERING: "<script>x</script>", "deep": {STEERING: [STEERING]}}
    value["pretraining"] |= {"key": STEERING, "accuracy": STEERING}
    value["cost"][STEERING] = 1.0
    value["solver"][STEERING] = {STEERING: 1.0}
    value["tuned"][STEERING] = {STEERING: 50.0}
    value["training"][STEERING] = STEERING
    value["setting"] = STEERING
    value["edge"] = [STEERING, "a | b ` <script>"]
    path.write_text(json.dumps(value))
    return results


@pytest.mark.parametrize("style", FORMATS)
def test_show_writes_out_what_would_steer_the_terminal(loud, said, style):
    status, text = said("show", loud / "glyphs-5shot/lwof.seed-1.json", "--format", style)
    assert status == 0
    assert not FORBIDDEN.search(text)
    text.encode()
    if style in ("text", "markdown"):
        note = r"\x1b]0;owned\x07\x1b[2J\x9b1m\r\u202eabc\u2066\u2028\x7f\U000e0041"
        note = re.sub(r"[][\\]", r"\\\g<0>", note) if style == "markdown" else note  # which reads it as the same text
        assert re.search(rf"^note +{re.escape(note)}$", text, re.M)
        assert ("<script>" in text) == (style == "text")


@pytest.mark.parametrize("style", FORMATS)
@pytest.mark.parametrize("options", [(), ("--rank", "--full")], ids=["plain", "ranked"])
def test_tables_write_out_what_would_steer_the_terminal(loud, said, style, options):
    for seed in (0, 2):
        (loud / f"glyphs-5shot/lwof.seed-{seed}.json").unlink()
    status, text = said("table", "glyphs-5shot", "--results", loud, "--format", style, *options)
    assert status == 0
    assert not FORBIDDEN.search(text)
    text.encode()
    if style == "markdown":
        assert "<script>" not in text
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}) == 1


def page(style: str, *texts: str, note: str = "") -> str:
    """A table of texts, a row each, beside a negative number."""
    name: Column[str] = Column("name", lambda text: text, lambda text: {"name": text, "all": [text, "b"]})
    value: Column[str] = Column("value", lambda _: "-1.50", lambda _: {"value": -1.5, "seeds": [-1.25, 2.0]})
    return render([Table([name, value], texts, note, [note])], style)


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
        kinds = {child.type for token in MarkdownIt("commonmark").parse(prose(note, "markdown"))
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
    for output in (page("latex", text), page("latex", "x", note=text), escaped(text)):
        assert r"\input" not in output
        assert "^^" not in output
    assert escaped("a\nb") == r"a\textbackslash{}nb"


def test_json_is_ascii_where_a_terminal_would_obey_and_reads_back_as_it_was():
    text = page("json", STEERING, "± é")
    assert not FORBIDDEN.search(text)
    assert "± é" in text
    rows = json.loads(text)
    assert [row["name"] for row in rows] == [STEERING, "± é"]
    assert rows[0]["value"] == -1.5


def test_a_line_break_in_a_text_makes_no_line_of_its_own(results):
    good = parse(results / "glyphs-5shot/lwof.seed-1.json")
    forged = msgspec.structs.replace(good, provenance={**good.provenance, "note": "x\ntask         another"})
    facts = facts_of([forged]).splitlines()
    assert len(facts) == len(facts_of([good]).splitlines()) + 1
    assert facts[-1] == r"note              x\ntask         another"
