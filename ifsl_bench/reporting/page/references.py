"""Citations of rows: of their methods and of the papers that print them. Imports no torch for packaged methods."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.bibliography import cite_method
from ifsl_bench.plugin.display_names import display_names_by_row, read_papers
from ifsl_bench.reporting.plot_styles import method_name_of_label
from ifsl_bench.store.published import read_bibtex_by_source, read_paper_titles_by_source
from ifsl_bench.utils.errors import UserError


@dataclass(frozen=True)
class Citation:
    """A citation of a method or of a paper."""

    text: str  # what it is and where it was published, a paragraph for readers
    bibtex: str  # entries for a bibliography; "" where there are none


def cite_measured_row(method: str, label: str) -> Citation:
    """Return the citation of a measured row.

    Args:
        method: the method's name in its results.
        label: the row's; ``lr+a`` of it tells papers apart where a method is of several.
    """
    name = method_name_of_label(label)
    return Citation(_first_paragraph(method), _method_bibtex(name) or _method_bibtex(method))


def cite_published_method(label: str) -> Citation:
    """Return the citation of a published row's method, as far as it is installed or known."""
    return Citation("", _method_bibtex(method_name_of_label(label)))


def cite_paper(source: str) -> Citation:
    """Return the citation of a paper, by the name of the file with its rows."""
    text = read_paper_titles_by_source().get(source, source)
    of_methods = [
        p.bibtex for p in read_papers("methods") if text.lower().startswith(p.read_bibtex_field("title").lower())
    ]
    return Citation(text, "\n\n".join(of_methods) or read_bibtex_by_source().get(source, ""))


def _method_bibtex(name: str) -> str:
    """Return the BibTeX of ``ifsl-bench cite`` for an installed method; "" where it has none.

    Results may name any file as their method's; none is run for a page.
    """
    if name not in display_names_by_row() and not registry.find_owning_entry_points(registry.METHOD_GROUP, name):
        return ""
    try:
        return cite_method(name)
    except UserError:
        return ""


@lru_cache(maxsize=256)
def _first_paragraph(method: str) -> str:
    """Return the first paragraph of the docstring of a registered method's module; "" where it cannot be read.

    Runs no code of the module.
    """
    points = registry.find_owning_entry_points(registry.METHOD_GROUP, method)
    if len(points) != 1:
        return ""
    try:
        spec = find_spec(points[0].module)
        source = spec.loader.get_source(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]
        docstring = ast.get_docstring(ast.parse(source or "")) or ""
    except Exception:  # an installed package, whatever is wrong with it
        return ""
    return inspect.cleandoc(docstring).split("\n\n")[0].replace("\n", " ")
