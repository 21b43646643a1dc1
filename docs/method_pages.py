"""What the manual says of each method, from its class; made when the site is built, so it never falls behind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.bibliography import papers_of_method
from ifsl_bench.plugin.listing import split_docstring
from ifsl_bench.plugin.method import Method
from ifsl_bench.plugin.options import declared_option_grid, declared_options, declared_search_space
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Range
from ifsl_bench.utils.text_format import format_value

MARK = "<!-- methods -->"  # where docs/methods.md has them


def all_methods() -> str:
    """A section of Markdown for each registered method of this package, by name."""
    return "\n\n".join(section(name, kind) for name, kind in packaged().items())


def packaged() -> dict[str, type[Method]]:
    """The methods of this package, those too that need an optional package to run."""
    points = (
        point
        for name in registry.registered_entry_points(registry.METHOD_GROUP)
        for point in registry.find_owning_entry_points(registry.METHOD_GROUP, name)
    )
    return {point.name: point.load() for point in points if registry.distribution_name(point) == registry.OWN_PACKAGE}


def section(name: str, kind: type[Method]) -> str:
    """What there is to know of a method, below a heading."""
    facts = [f"Starts from the {kind.head} head."]
    if kind.shorthands:
        meant = "; ".join(f"`{row}` is `{name}` with {_settings(of)}" for row, of in kind.shorthands.items())
        facts.append(f"Shorthands: {meant}.")
    if kind.schedule is not None:
        facts.append("Has a schedule of meta-training of its own.")
    for module, install in kind.requires.items():
        facts.append(f"Needs {module}: `{install}`.")
    text, meanings = split_docstring(inspect.getdoc(kind) or "")
    parts = [f"## {name}", " ".join(facts), prose(text), options_table(kind, meanings)]
    return "\n\n".join(part for part in [*parts, *cited([name, *kind.shorthands])] if part)


def _settings(options: Mapping[str, Any]) -> str:
    return " ".join(f"`--set {key}={format_value(value)}`" for key, value in options.items())


def prose(doc: str) -> str:
    """A docstring as Markdown: indented blocks, formulas mostly, as they are, and its signs escaped elsewhere."""
    output: list[str] = []
    code: list[str] = []
    for line in doc.split("\n"):
        if line.startswith("    ") or (code and not line.strip()):
            code.append(line)
            continue
        output += _fenced(code)
        code = []
        output.append(re.sub(r"(`+)(.+?)\1|([*<|\[\]_$])", _escaped, line))
    return "\n".join([*output, *_fenced(code)])


def _escaped(match: re.Match[str]) -> str:
    return f"`{match[2]}`" if match[1] else f"\\{match[3]}"


def _fenced(lines: list[str]) -> list[str]:
    return ["", "```text", *"\n".join(line[4:] for line in lines).rstrip().split("\n"), "```", ""] if lines else []


def options_table(kind: type[Method], meanings: Mapping[str, str]) -> str:
    """Options with type, default, meaning, the grid that is tried without ``--tune``, and what ``--tune`` searches."""
    space, grid = declared_search_space(kind), declared_option_grid(kind)
    rows = [
        (f"`{o.name}`", f"`{o.type_text}`", f"`{format_value(o.default)}`", _values(grid.get(o.name, ())),
         _spread(space.get(o.name)), prose(meanings.get(o.name, "")).replace("\\|", "|"))
        for o in declared_options(kind).values()
    ]  # fmt: skip
    if LEARNING_RATE_OPTION in space:
        rows.append(
            (
                f"`{LEARNING_RATE_OPTION}`",
                "`float`",
                "the schedule's",
                "",
                _spread(space[LEARNING_RATE_OPTION]),
                "learning rate of training",
            )
        )
    if not rows:
        return "It has no options."
    heads = ("option", "takes", "default", "tried on validation episodes", "searched by `--tune`", "meaning")
    columns = [i for i in range(len(heads)) if i < 3 or any(row[i] for row in rows)]
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line[i].replace("|", "\\|") for i in columns) + " |" for line in lines)


def _spread(values: Any) -> str:
    if isinstance(values, Range):
        return f"{format_value(values.low)} to {format_value(values.high)}{', logarithmic' if values.log else ''}"
    return _values(values.values) if values else ""


def _values(values: Iterable[Any]) -> str:
    return ", ".join(f"`{format_value(value)}`" for value in values)


def cited(names: Iterable[str]) -> list[str]:
    """The papers of a method's rows, as Markdown with BibTeX; what ``ifsl-bench cite`` prints."""
    papers = {paper.bibtex_key: paper for name in names for paper in papers_of_method(name)}
    return [
        f"*{p.read_bibtex_field('title')}* ({p.author_year})\n\n```bibtex\n{p.bibtex.strip()}\n```"
        for p in papers.values()
    ]
