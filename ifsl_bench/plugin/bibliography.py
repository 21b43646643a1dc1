"""Papers to cite for a method or a task, and how papers print a row's label. Imports no torch for what is packaged.

Papers of the package are in ``papers.bib`` beside its methods and its tasks; the field ``keywords`` says of which rows
or data sets each is. A method of another package has its BibTeX in :attr:`ifsl_bench.Method.bibtex`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ifsl_bench._version import RELEASED, __version__
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.display_names import (
    PaperEntry,
    display_names_by_row,
    format_display_label,
    format_recipe_for_print,
    parse_label,
    read_papers,
)
from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.protocols.tasks.task import Task

PROTOCOL_PAPER_KEY = "ren2019incremental"  # the paper whose protocol all tasks follow
_TRAINING_PREFIX = re.compile(r"^train\.")


def display_label_in_paper(label: str) -> str:
    """Return a row's label as papers print it: "LR+A, calibrated (gamma = 1e-05)" for ``lr+a+cal.gamma=1e-05``.

    The recipe of its backbone is behind a bar: "NCM | closer, beta 1". What nobody has said how to print stays as it
    is.
    """
    recipe = parse_label(label).recipe
    name, calibrated, setting, options = parse_label(parse_label(label).without_recipe)
    parts = [format_display_label(name), *(["calibrated"] if calibrated else [])]
    if setting:
        trials = setting.removeprefix("tuned-")
        parts.append(f"tuned in {trials} trials" if trials.isdigit() else setting)
    option_text = ", ".join(
        _TRAINING_PREFIX.sub("training ", option).replace("=", " = ", 1).replace("_", " ") for option in options
    )
    text = ", ".join(parts) + (f" ({option_text})" if option_text else "")
    return f"{text} | {format_recipe_for_print(recipe)}" if recipe else text


def papers_of_method(name: str) -> list[PaperEntry]:
    """Return the package's papers of a row, or of all rows of a method; the first is the method's own."""
    names = {name}
    if name not in display_names_by_row() and registry.find_owning_entry_points(registry.METHOD_GROUP, name):
        names |= set(vars(registry.get_method(name)).get("shorthands", {}))
    return [paper for paper in read_papers("methods") if names & set(paper.row_names)]


def cite_method(name: str) -> str:
    """Return BibTeX for a method: a registered name, a shorthand, or ``path/to/file.py:Class``.

    Raises:
        UserError: no such method, or one that names no paper.
    """
    if own_papers := papers_of_method(name):
        return "\n\n".join(paper.bibtex for paper in own_papers)
    from ifsl_bench.plugin.find_method import find_method

    chosen, _ = find_method(name)
    if text := chosen.method.bibtex.strip():
        return text
    raise UserError(f"method {name!r} names no paper; whoever wrote it can: bibtex, an attribute of its class")


def cite_suite() -> str:
    """Return BibTeX for this package, of this version, and for the paper whose protocol it follows."""
    fields = {
        "title": "{ifsl\\_bench}: a benchmark suite for incremental few-shot learning",
        "author": "{The ifsl\\_bench authors}",
        "year": RELEASED[:4],
        "version": __version__,
        "note": "Python package",
    }
    suite = ",\n".join(f"  {name} = {{{text}}}" for name, text in fields.items())
    return f"@misc{{ifsl_bench,\n{suite}\n}}\n\n{_protocol_paper().bibtex}"


def _protocol_paper() -> PaperEntry:
    return next(paper for paper in read_papers("methods") if paper.bibtex_key == PROTOCOL_PAPER_KEY)


def cite_task(task: Task) -> str:
    """Return BibTeX for a task: of its data sets, and of the protocol."""
    names = [task.dataset.name, *([task.novel_from] if task.novel_from else [])]
    parts = []
    for name in dict.fromkeys(names):
        entries = [paper.bibtex for paper in read_papers("tasks") if name in paper.row_names]
        parts += entries or [f"% data set {name}: no paper"]
    return "\n\n".join([*parts, _protocol_paper().bibtex])


def unique_entries(texts: Iterable[str]) -> list[str]:
    """Return the entries and remarks of several texts, each once."""
    return list(dict.fromkeys(part.strip() for text in texts for part in text.split("\n\n") if part.strip()))
