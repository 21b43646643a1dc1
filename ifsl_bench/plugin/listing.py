"""The methods that are registered, as rows and in full: options, what is searched, papers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.bibliography import display_label_in_paper, papers_of_method
from ifsl_bench.plugin.display_names import display_names_by_row
from ifsl_bench.plugin.find_method import find_method
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.options import declared_option_grid, declared_options, declared_search_space, is_trainable
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Range
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_value

OPTIONS_HEADING = "Options:"  # what begins the section of a docstring that says what options mean


@dataclass(frozen=True)
class MethodDescription:
    """A method in full."""

    title: str
    named_facts: tuple[tuple[str, str], ...]  # what it is, name and text
    option_rows: tuple[dict[str, str], ...]  # a row for each option, with what is searched
    docstring_text: str  # the docstring without the section on options


def method_rows() -> list[dict[str, Any]]:
    """Return a row for each shorthand of a method, and for its defaults where no shorthand means these."""
    table: list[dict[str, Any]] = []
    for name in registry.registered_entry_points(registry.METHOD_GROUP):
        plugin = registry.load_plugin(registry.METHOD_GROUP, name)
        kind, problem = None, plugin.load_problem
        if not problem:
            try:
                kind = registry.get_method(name)
            except UserError as error:
                problem = f"broken: {error}"
        if kind is None:
            has_row = name in display_names_by_row()
            reason = f"needs {plugin.missing_module}" if plugin.missing_module else problem.partition(": ")[0]
            what = f"{display_names_by_row()[name].short_description} ({reason})" if has_row else problem
            paper = papers_of_method(name)[0].author_year if has_row else ""
            table.append(_method_row(name, name, plugin.distribution) | {"what": what, "paper": paper})
            continue
        meanings: dict[str, Mapping[str, Any]] = dict(vars(kind).get("shorthands", {}))
        usual = {option.name: option.default for option in declared_options(kind).values()}
        if not any(usual | dict(meant) == usual for meant in meanings.values()):
            meanings[name] = {}
        for row, meant in meanings.items():
            table.append(_method_row(row, name, plugin.distribution) | _usable_row(row, kind, meant))
    return sorted(table, key=lambda row: str(row["method"]))


def _method_row(row: str, name: str, package: str) -> dict[str, Any]:
    return {
        "method": row,
        "what": "",
        "head": "",
        "trained": "",
        "paper": "",
        "package": package,
        "of": name,
        "options": "",
    }


def _usable_row(row: str, kind: type[Method], meant: Mapping[str, Any]) -> dict[str, Any]:
    summary = (
        display_names_by_row()[row].short_description
        if row in display_names_by_row()
        else (kind.__doc__ or "").strip().split("\n")[0]
    )
    shown = [
        f"{o.name}={format_value(meant.get(o.name, o.default))} ({o.type_text})"
        for o in declared_options(kind).values()
    ]
    return {
        "what": summary,
        "head": kind.head,
        "trained": _training_text(kind, meant),
        "paper": ", ".join(paper.author_year for paper in papers_of_method(row)[:1]),
        "options": ", ".join(shown),
    }


def _training_text(kind: type[Method], options: Mapping[str, Any]) -> str:
    try:
        return "yes" if is_trainable(kind, options) else "no"
    except UserError:  # it refuses what it is tried on
        return ""


def describe_method(name: str) -> MethodDescription:
    """Describe a method by its name, a shorthand or ``path/to/file.py:Class``.

    Raises:
        UserError: there is no such method, or it cannot be used.
    """
    papers, title = papers_of_method(name), display_label_in_paper(name) if display_label_in_paper(name) != name else ""
    title = ": ".join(
        filter(
            None,
            [title or name, display_names_by_row()[name].short_description if name in display_names_by_row() else ""],
        )
    )
    of_papers = [("paper", f"{paper.read_bibtex_field('title')} ({paper.author_year})") for paper in papers]
    try:
        chosen, meant = find_method(name)
    except UserError as error:
        if name not in display_names_by_row():
            raise
        cite = [("cite", f"ifsl-bench cite {name}")] if papers else []
        return MethodDescription(title, (*of_papers, *cite, ("options", f"unknown here: {error}")), (), "")
    kind = chosen.method
    text, means = split_docstring((inspect.getdoc(kind) or "").replace("``", "`"))
    space, grid = declared_search_space(kind), declared_option_grid(kind)
    options = [
        {
            "option": option.name,
            "takes": option.type_text,
            "default": format_value(meant.get(option.name, option.default)),
            "tried": "; in sessions also ".join(
                ", ".join(map(format_value, values[option.name]))
                for values in (grid, kind.session_grid)
                if option.name in values
            ),
            "--tune": _format_range(space[option.name]) if option.name in space else "",
            "meaning": means.get(option.name, ""),
        }
        for option in declared_options(kind).values()
    ]
    if LEARNING_RATE_OPTION in space:
        rate = {"option": LEARNING_RATE_OPTION, "takes": "float", "default": "as published", "tried": ""}
        options.append(
            rate
            | {"--tune": _format_range(space[LEARNING_RATE_OPTION]), "meaning": "of meta-training (--train rate=...)"}
        )
    owner = chosen.distribution.get("name") or chosen.source_file or "this session"
    with_these = ", with " + ", ".join(f"{key}={format_value(value)}" for key, value in meant.items()) if meant else ""
    others = [shorthand for shorthand in vars(kind).get("shorthands", {}) if shorthand != name]
    facts = [("method", f"{chosen.name} of {owner}{with_these}")]
    facts += [("rows", f"{', '.join(others)}: the same method with other options")] if others else []
    facts += [("head", f"{kind.head}: of the base classifier that it starts from")]
    facts += [
        ("trained", {"yes": "meta-trained", "no": "nothing is meta-trained"}.get(_training_text(kind, meant), "?"))
    ]
    facts += [("sees", "; ".join([kind.sees, *kind.flags({})]))] if kind.sees != "features" else []
    facts += [("transductive", "an answer may depend on the other queries of its episode")] if kind.transductive else []
    facts += of_papers
    facts += [("cite", f"ifsl-bench cite {name}")] if papers or kind.bibtex else []
    return MethodDescription(title, tuple(facts), tuple(options), text)


def _format_range(values: Any) -> str:
    if isinstance(values, Range):
        return f"{format_value(values.low)} to {format_value(values.high)}{' (log)' if values.log else ''}"
    return ", ".join(map(format_value, values.values))


def split_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into the text without its section on options, and the meaning of each option."""
    before, marked, section = doc.partition(f"\n{OPTIONS_HEADING}\n")
    if not marked:
        return doc, {}
    meanings: dict[str, str] = {}
    rest: list[str] = []
    name = ""
    for line in section.split("\n"):
        if rest or (line and not line.startswith(" ")):
            rest.append(line)
        elif head := re.match(r" {4}(\w+): (.*)", line):
            name = head[1]
            meanings[name] = head[2]
        elif line.strip() and name:
            meanings[name] += f" {line.strip()}"
    return "\n".join([before.rstrip(), *(["", *rest] if rest else [])]), meanings


def methods_listed_by_shorthand() -> dict[str, list[str]]:
    """Return the methods that the list shows under their shorthands alone, with these."""
    shorthands: dict[str, list[str]] = {}
    for shorthand, ways in registry.list_shorthands_by_name().items():
        for point, _, _ in ways:
            shorthands.setdefault(point.name, []).append(shorthand)
    return dict(sorted(shorthands.items()))
