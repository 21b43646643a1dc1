"""The manual builds without a warning, its links lead somewhere, it loads nothing, and it says what the code does."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote, urlsplit

import msgspec
import pytest
from click import ClickException

from ifsl_bench._version import RELEASED, __version__
from ifsl_bench.cli import main as cli
from ifsl_bench.plugin.options import declared_options, declared_search_space
from ifsl_bench.protocols.episode_protocol import EpisodeCounts
from ifsl_bench.store import schema as result_file
from tests.cli.test_command_line import parse_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.glob("*.md")) if path.is_file()]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "audio": "src", "video": "src"}


def module(name: str) -> ModuleType:
    """A file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


class Links(HTMLParser):
    """The links of a page, what a browser loads for it, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values.get("id", ""), values.get("name", "")}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "shortcut icon", "preload", "prefetch"):
            self.loaded.append(values["href"])
        elif LOADED.get(tag, "") in values:
            self.loaded.append(values[LOADED[tag]])
        self.loaded += re.findall(r"url\(([^)]*)\)", values.get("style", ""))


BUILT = pytest.mark.slow("the whole manual is built")


@pytest.fixture(scope="module")
def site(made_once) -> Path:
    for needed in ("sphinx", "myst_parser", "furo", "latex2mathml"):
        pytest.importorskip(needed, reason='the manual is built with: pip install -e ".[docs]"')
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}

    def fill(out: Path) -> None:
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", str(DOCS), str(out)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")

    return made_once("manual", fill)


@pytest.fixture(scope="module")
def read(site) -> dict[Path, Links]:
    return {path: Links(path) for path in sorted(site.glob("*.html"))}


@BUILT
def test_there_is_a_page_for_each_file(read):
    assert {path.stem for path in read} >= {path.stem for path in PAGES} >= {"index", "tutorial", "methods", "faq"}


@BUILT
def test_every_link_within_the_site_leads_somewhere(read):
    lost, count = [], 0
    for path, page in read.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            count += 1
            anchors = read[target].anchors if target in read else ()
            # The leaderboard's page keeps what it shows in the fragment: #task=...&setting=...
            anchored = parts.fragment in ("", *anchors) or target.name == "leaderboard.html"
            if not target.is_file() or not anchored:
                lost.append(f"{path.name}: {link}")
    assert lost == []
    assert count > 1000


@BUILT
def test_a_browser_loads_nothing_from_elsewhere(site, read):
    loaded = {f"{path.name}: {link}" for path, page in read.items() for link in page.loaded}
    assert len(loaded) > len(read), "style sheets at least"
    styles = [*site.rglob("*.css")]
    assert styles
    for style in styles:
        text = style.read_text(encoding="utf-8")
        loaded |= {f"{style.name}: {link}" for link in re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]*)", text)}
    assert [link for link in sorted(loaded) if re.match(r"\S+: (https?:)?//", link)] == []


@BUILT
@pytest.mark.parametrize(("page", "count"), [("protocol", 20), ("solve", 15)])
def test_formulas_are_drawn_without_a_script(site, page, count):
    text = (site / f"{page}.html").read_text(encoding="utf-8")
    assert text.count("<math") > count
    assert "MathJax" not in text
    assert "\\frac" not in re.sub(r"<annotation.*?</annotation>", "", text, flags=re.DOTALL)


@BUILT
def test_numbers_in_tables_stay_on_one_line_with_their_interval(site):
    text = (site / "results.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td>(.*?)</td>", text, re.DOTALL)
    assert sum("\u00a0±\u00a0" in cell for cell in cells) > 500
    assert not any(re.search(r"\d ± \d", cell) for cell in cells)


@BUILT
def test_no_table_or_formula_is_cut_on_a_desk(read, chromium):
    page = chromium.new_page()
    wide = "[...document.querySelectorAll('.table-wrapper, .formula')].map(box => box.scrollWidth - box.clientWidth)"
    boxes, cut = 0, {}
    for path in [path for path in read if path.name != "leaderboard.html"]:
        page.goto(path.as_uri())
        for width in (1280, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            beyond = page.evaluate(wide)
            boxes += len(beyond)
            if max(beyond, default=0) > 0 or page.evaluate("document.documentElement.scrollWidth") > width:
                cut[path.name, width] = beyond
    page.close()
    assert not cut, {k: [(i, v) for i, v in enumerate(c) if v] for k, c in cut.items()}
    assert boxes > 200


@BUILT
@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("own images", "data.html#your-own-images"),
        ("own method", "tutorial.html#your-own-method"),
        ("cluster", "running.html#a-cluster"),
    ],
)
def test_the_search_finds_the_page_that_is_about_it_first(site, chromium, question, first):
    page = chromium.new_page()
    page.goto(f"{(site / 'search.html').as_uri()}?q={quote(question)}")
    link = page.locator("ul.search > li > a").first
    assert re.sub(r"\?[^#]*", "", link.get_attribute("href") or "") == first
    page.close()


@BUILT
def test_each_method_is_described_from_its_class(site):
    text = re.sub(r"<[^>]+>", "", (site / "methods.html").read_text(encoding="utf-8"))
    methods = module("method_pages").packaged()
    assert len(methods) > 8
    for name, kind in methods.items():
        section = module("method_pages").section(name, kind)
        words = [name, *kind.shorthands, *declared_options(kind), *declared_search_space(kind)]
        assert [word for word in words if word not in section] == [], name
        assert [word for word in words if word not in text] == [], name
        last = (kind.__doc__ or "").split("Options:")[0].split()[-1]
        assert last.strip(".`*") in section, "the docstring is there to its end"


PYTHON_PAGE = (DOCS / "python.md").read_text(encoding="utf-8")


def fields_of(heading: str) -> list[str]:
    """The first column of the table below a heading of the page that has the format of results."""
    _, _, section = PYTHON_PAGE.partition(f"\n### {heading}\n")
    assert section
    return re.findall(r"^\| `(\w+)` \|", section.partition("\n### ")[0], re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Fields", result_file.Result),
        ("Counts of episodes", EpisodeCounts),
        ("Calibration", result_file.StoredCalibration),
    ],
)
def test_every_field_of_a_result_file_is_explained(heading, kind):
    fields = fields_of(heading)
    assert len(fields) == len(set(fields))
    assert set(fields) == {field.encode_name for field in msgspec.structs.fields(kind)}


def test_the_program_that_reads_a_result_without_the_suite_prints_its_accuracy(monkeypatch, capsys):
    (program,) = (text for text in re.findall(r"```python\n(.*?)```", PYTHON_PAGE, re.DOTALL) if "zlib" in text)
    monkeypatch.chdir(ROOT)
    exec(program, {})
    computed, stored = map(float, capsys.readouterr().out.split())
    assert abs(computed - stored) < 1e-9


COMMAND = re.compile(r"`(ifsl-bench [a-z](?:[^`\n]|\n(?!\n))*)`|^(?:\$ |    )(ifsl-bench [a-z][^\n]*)$", re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_commands_of_pages_are_taken_with_their_options(page):
    for pair in COMMAND.findall(page.read_text(encoding="utf-8")):
        if " ..." not in (line := "".join(pair).replace("\n", " ")):
            try:
                parse_command(line)
            except ClickException as error:
                pytest.fail(f"{line}: {error.message}")


def test_links_of_pages_lead_somewhere_in_the_repository_too():
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for link in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            target = page.parent / link
            assert target.exists(), f"{page.name}: {link}"


def test_a_transcript_has_what_commands_print_now(tmp_path):
    transcripts = module("transcripts")
    python = "```python\n# said.py\nprint('two')\n```\n"
    page = python + "```console\n$ echo one\nold\n$ python said.py\n$ echo $PWD\n```\n"
    new = python + "```console\n$ echo one\none\n$ python said.py\ntwo\n$ echo $PWD\n~\n```\n"
    assert transcripts.transcribed(page, tmp_path) == new
    with pytest.raises(transcripts.Failed, match="nosuch"):
        transcripts.transcribed("```console\n$ ifsl-bench nosuch | head -1\n```\n", tmp_path)


def test_the_numbers_of_the_tutorials_sentences_are_those_of_its_outputs():
    transcripts, text = module("transcripts"), (DOCS / "tutorial.md").read_text(encoding="utf-8")
    assert transcripts.numbered(text) == text
    assert transcripts.numbered(text.replace(" is 2.", " is 3.")) == text, "a wrong number is written anew"
    with pytest.raises(transcripts.Failed, match="no output above"):
        transcripts.numbered("1.5<!-- output: ^Acc (.+) -->\n\n```console\n$ echo\nAcc 2.5\n```\n")
    prose = re.sub(r"^```.*?^```$|`[^`]*`", "", transcripts.NUMBER.sub("", text), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\d+\.\d+", prose) == ["3.11"], "of Python; any other decimal comes from an output, by a mark"
    shown = re.findall(r"\d[\d,]*", "".join(re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)))
    assert set(re.findall(r"(?<![\w.,])\d[\d,]*\d", prose)) - set(shown) == {"2018"}, "the year of a paper"


def comparable(page: str) -> list[str]:
    """Return the lines of a page's outputs: those of stored rows whole, of others the words without numbers."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    # Of the cache's sizes and times, and of what the number of seeds changes, nothing stays.
    lines = [line for of in blocks if not {"cache", "--seeds"} & set(of.split()) for line in of.splitlines()]
    words = [" ".join(re.sub(r"[\d.,±+-]+(?:e-\d+)?", " ", line).split()) for line in lines]
    return [line if line.endswith(" stored") else word for line, word in zip(lines, words, strict=True)]


@pytest.mark.slow("runs the tutorial's commands, a minute")
def test_the_tutorials_outputs_are_those_of_its_commands(glyphs_source, tmp_path):
    """With two seeds where it has three, on letters that are rendered already; digits differ between processors."""
    shutil.copytree(glyphs_source / "home", tmp_path / "ifsl")
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    assert text.count(" --seeds 3 > ") == 1
    new = module("transcripts").transcribed(text.replace(" --seeds 3 > ", " --seeds 2 > "), tmp_path)
    assert comparable(new) == comparable(text)


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml", reason="PyYAML, which comes with the extra docs, reads it")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert str(cited["version"]) == __version__
    assert str(cited["date-released"]) == RELEASED
    assert f"## {__version__} ({RELEASED})\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert cited["license"] == "MIT"
    (paper,) = cited["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Ren", "Liao", "Fetaya", "Zemel"]


def test_workflows_run_what_there_is():
    yaml = pytest.importorskip("yaml", reason="PyYAML, which comes with the extra docs, reads it")
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [file.name for file in files] == ["manual.yml", "results.yml", "tests.yml"]
    for file in files:
        workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert workflow[True], "what starts it; YAML reads `on` as a truth value"
        assert workflow["permissions"] == {"contents": "read"}
        commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
        named = [name for command in commands for name in re.findall(r"ifsl-bench (\w+)", command)]
        assert set(named) <= set(cli.MODULE_OF_COMMAND)
        for command in commands:
            subprocess.run(["bash", "-n", "-c", command], check=True)


def test_the_workflow_checks_contributed_files_alone(tmp_path):
    """The workflow's own script, on a repository where a result is added, one removed and a published row changed."""
    yaml = pytest.importorskip("yaml", reason="PyYAML, which comes with the extra docs, reads it")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "results.yml").read_text(encoding="utf-8"))
    (script,) = (s["run"] for s in workflow["jobs"]["check"]["steps"] if "ifsl-bench check" in s.get("run", ""))

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        process = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return process.stdout.strip()

    git("init", "-q")
    for name in ("published/p", "t/gone", "t/kept"):
        (tmp_path / "results" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"results/{name}.json").write_text("1")
    git("add", "-A")
    git("commit", "-qm", "before")
    before = git("rev-parse", "HEAD")
    (tmp_path / "results/t/gone.json").unlink()
    (tmp_path / "results/published/p.json").write_text("2")
    (tmp_path / "results/t/a row.json").write_text("1")
    git("add", "-A")
    git("commit", "-qm", "after")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ifsl-bench").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bin" / "ifsl-bench").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "BASE": before, "RUNNER_TEMP": str(tmp_path)}
    process = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert process.stdout == "check\n--\nresults/t/a row.json\n"
