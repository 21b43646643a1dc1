"""The manual as a site: ``sphinx-build -W --keep-going -n docs build/manual``. It needs ``pip install -e ".[docs]"``.

Pages are Markdown, and readable as they are. Nothing is loaded from a network, neither by the build nor by the site.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]  # what is beside this file, and its package

from method_pages import MARK, all_methods  # noqa: E402
from tables import printed  # noqa: E402

from ifsl_bench._version import __version__  # noqa: E402

project = "ifsl_bench"
author = "The ifsl_bench authors"
version = release = __version__
project_copyright = author

extensions = ["myst_parser", "mathml"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
exclude_patterns = ["example-method", "simulations", "_build"]
nitpicky = True

html_theme = "furo"
html_title = f"ifsl_bench {__version__}"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_search_scorer = str(DOCS / "search_scores.js")
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"  # MathJax, the default, would be loaded from a network

# Files of the repository's root that the page about.md ends with on the site, each as a section.
INCLUDED = ("CHANGELOG.md", "BENCHMARKS.md", "SECURITY.md", "DATA_LICENSES.md")
INCLUDED_MARK = f"<!-- files: {' '.join(INCLUDED)} -->"
# Where the page tasks.md has the keys of task files.
REFERENCE_MARK = "<!-- reference of task files -->"
# The leaderboard as `ifsl-bench report` makes it: a page by itself.
BOARD = "leaderboard.html"
html_extra_path = [BOARD] if (DOCS / BOARD).is_file() else []


def _read_section(app: Any, name: str) -> str:
    """A file of the repository's root as a section of a page in docs/: its headings are one level lower."""
    app.env.note_dependency(str(ROOT / name))
    text = re.sub(r"^#(?=#* )", "##", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    linked = re.sub(r"\]\((?!\w+:|#)", "](../", text)
    return linked.replace("](../docs/", "](")


def _link_inward(text: str) -> str:
    """Links of a page in docs/ to files of the repository's root that are parts of the manual, as links to those."""
    titles = {name: (ROOT / name).read_text(encoding="utf-8").partition("\n")[0] for name in INCLUDED}
    parts = {name: f"about.md#{title.removeprefix('# ').lower().replace(' ', '-')}" for name, title in titles.items()}
    parts |= {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}

    def link(match: re.Match[str]) -> str:
        to = parts.get(match[1], f"../{match[1]}")
        return f"]({to.partition('#')[0]}{match[2]}" if match[2] else f"]({to}"

    return re.sub(r"\]\(\.\./([\w-]+\.md)(#[\w-]+)?(?=\))", link, text)


def _read(app: Any, page: str, source: list[str]) -> None:
    text = source[0]
    if page == "about":
        text = text.replace(INCLUDED_MARK, "\n\n".join(_read_section(app, name) for name in INCLUDED))
    elif page == "tasks":
        _, _, keys = printed("ifsl-bench tasks reference").partition("\n### ")
        text = text.replace(REFERENCE_MARK, f"### {keys}")
    elif page == "methods":
        text = text.replace(MARK, all_methods())
    if not html_extra_path:
        text = re.sub(rf'<a href="{BOARD}">(.*?)</a>', r"\1", text)
    source[0] = _link_inward(text)


NAME = 24  # the longest name that a table keeps on one line; what is longer is a command, a path or a checksum


def _keep_whole(_: Any, document: Any, __: str) -> None:
    """In a table a number stays on one line with its ±, and a short name too."""
    for entry in document.findall(nodes.entry):
        for text in list(entry.findall(nodes.Text)):
            if " ± " in text:
                text.parent.replace(text, nodes.Text(text.replace(" ± ", "\u00a0±\u00a0")))
        for code in entry.findall(nodes.literal):
            if len(code.astext()) <= NAME:
                code["classes"].append("name")


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _read)
    app.connect("doctree-resolved", _keep_whole)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
