"""The citations of methods and tasks, held against the methods' own docstrings and the tasks that there are."""

from __future__ import annotations

import importlib
import re

import pytest

from ifsl_bench import __version__
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.bibliography import cite_method, cite_task, display_label_in_paper, papers_of_method
from ifsl_bench.plugin.display_names import display_names_by_row, read_papers, suite_methods
from ifsl_bench.protocols.tasks.task_files import packaged_tasks
from ifsl_bench.reporting.page.references import cite_paper
from ifsl_bench.store.published import read_paper_titles_by_source
from ifsl_bench.utils.errors import UserError

ENTRIES = [paper for folder in ("methods", "tasks") for paper in read_papers(folder)]
OURS = [registry.registered_entry_points(registry.METHOD_GROUP)[name] for name in sorted(suite_methods())]
NO_PAPER = "glyphs"
TABLES_ALONE = {"d-fscil", "arxiv2511"}  # of these papers a table alone is known


def rows_of(point) -> list[str]:
    """The names of a method that is registered; of its shorthands, where it has any. One may lack its package."""
    try:
        return list(vars(registry.get_method(point.name)).get("shorthands", {})) or [point.name]
    except UserError:
        return [point.name]


@pytest.mark.parametrize("point", OURS, ids=lambda point: point.name)
def test_every_method_has_papers_and_a_name_in_print(point):
    """The first paper's authors and year are those that the method's file names."""
    module = importlib.import_module(point.value.partition(":")[0])
    text = " ".join(
        [module.__doc__ or "", *(kind.__doc__ or "" for kind in vars(module).values() if isinstance(kind, type))]
    )
    for row in rows_of(point):
        named = display_names_by_row()[row]
        assert len(named.short_description) <= 50, "one line of the list at 80 columns"
        assert display_label_in_paper(row) == named.printed_name
        first = papers_of_method(row)[0]
        surname = re.sub(r"\{\\\"u\}", "ü", first.bibtex.partition("author")[2].partition("{")[2]).split(",")[0]
        assert re.search(rf"{surname}.*{first.read_bibtex_field('year')}", text, re.DOTALL), (row, surname)
        assert first.bibtex in cite_method(row)
    assert cite_method(point.name)


def test_no_row_is_of_a_method_that_there_is_not():
    own_rows = {row for point in OURS for row in rows_of(point)}
    assert set(display_names_by_row()) == own_rows
    shorthands = {name: point.name for name, ((point, *_),) in registry.list_shorthands_by_name().items()}
    assert {
        name: row.method_of_shorthand for name, row in display_names_by_row().items() if row.method_of_shorthand
    } == shorthands
    assert {name for paper in read_papers("methods") for name in paper.row_names} == own_rows


def test_every_source_of_published_rows_has_an_entry():
    for source in set(read_paper_titles_by_source()) - TABLES_ALONE:
        assert cite_paper(source).bibtex, source
    assert cite_paper("yoon2020").bibtex.startswith("@inproceedings{yoon2020xtarnet,")


def test_sources_of_published_rows_are_cited(call):
    others = {
        *display_names_by_row(),
        *registry.registered_entry_points(registry.METHOD_GROUP),
        *packaged_tasks(),
    }
    assert not others & set(read_paper_titles_by_source()), "one would hide the other"

    def words(text):
        return re.findall(r"[a-z]+", text.lower().replace("{", "").replace("}", ""))

    for source, title in read_paper_titles_by_source().items():
        status, out, _ = call("cite", source)
        assert (status, out.startswith(f"% {source}: {title}\n")) == (0, True)
        printed_title = re.search(r"^ *title *= *\{(.*?)\},$", out, re.M | re.S)
        assert (printed_title is None) == (source in TABLES_ALONE)
        assert not printed_title or " ".join(words(title)).startswith(" ".join(words(printed_title[1])))


@pytest.mark.parametrize("name", sorted(packaged_tasks()))
def test_every_task_has_its_data_and_the_protocol(name):
    task = packaged_tasks()[name]
    text = cite_task(task)
    assert "1810.07218" in text, "the protocol's paper"
    of_data = [paper for paper in read_papers("tasks") if task.dataset.name in paper.row_names]
    assert bool(of_data) != task.dataset.name.startswith(NO_PAPER)
    assert all(paper.bibtex in text for paper in of_data)


@pytest.mark.parametrize("paper", ENTRIES, ids=lambda paper: paper.bibtex_key)
def test_entries_are_whole(paper):
    assert paper.bibtex.count("{") == paper.bibtex.count("}")
    assert max(map(len, paper.bibtex.splitlines())) <= 80
    assert "keywords" not in paper.bibtex
    for field in ("title", "author", "year"):
        assert paper.read_bibtex_field(field), field
    assert re.fullmatch(r"(19|20)\d\d", paper.read_bibtex_field("year"))
    assert paper.read_bibtex_field("year") in paper.bibtex_key
    assert [entry.bibtex_key for entry in ENTRIES].count(paper.bibtex_key) == 1


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("lr+a", "LR+A"),
        ("lr+a+cal.gamma=0.001.gradient=t-bptt", "LR+A, calibrated (gamma = 0.001, gradient = t-bptt)"),
        ("lr@tuned-12.weight_decay=0.5", "LR, tuned in 12 trials (weight decay = 0.5)"),
        ("lr+a.steps=20.train.rate=0.001", "LR+A (steps = 20, training rate = 0.001)"),
        ("mine", "mine"),
    ],
)
def test_labels_in_print(label, shown):
    assert display_label_in_paper(label) == shown


def test_cite(call, tmp_path):
    status, out, _ = call("cite", "lr+a", "lr", "tiered-5shot+ways=10", "anil")
    assert status == 0
    keys = re.findall(r"^@\w+\{([^,]+),$", out, re.M)
    assert keys == ["ren2019incremental", "ren2018meta", "raghu2020rapid"], "each once"
    source = tmp_path / "mine.py"
    source.write_text(
        "from ifsl_bench import Method\nclass Mine(Method):\n    bibtex = '@misc{me, year = {2026}}'\n"
        "    def forward(self, support, query): ...\n"
        "class Silent(Method):\n    def forward(self, support, query): ...\n"
    )
    assert call("cite", f"{source}:Mine")[1] == "@misc{me, year = {2026}}\n"
    status, _, err = call("cite", f"{source}:Silent")
    assert status == 2
    assert "names no paper" in err
    status, _, err = call("cite", "lr+q")
    assert status == 2
    assert "did you mean 'lr+s' or 'lr+a'" in err


def test_without_a_name_the_suite_itself_is_cited_as_latex_can_print_it(call):
    status, out, _ = call("cite")
    assert status == 0
    assert out.startswith("@misc{ifsl_bench,")
    assert f"version = {{{__version__}}}" in out
    assert "ren2019incremental" in out
    fields = out.split("\n}", 1)[0].split("\n", 1)[1]
    assert "_" not in fields.replace("\\_", "")
