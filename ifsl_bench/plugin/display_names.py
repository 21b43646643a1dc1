"""The suite's methods, the rows that they give in tables and their papers, read without importing any method.

Each file of ``methods/`` holds classes with a literal ``name``, under which a class is registered, and a literal
``display``: how papers print each row of the method, and what the row is in a few words. The papers of methods and of
tasks are in the BibTeX files beside them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

LAZY_ROW_LABEL = "lazy"  # the row of a model that never answers with a novel class: computed from other rows, no method


class SuiteMethod(NamedTuple):
    """A method of the suite as its file declares it."""

    entry_point_target: str  # ``module:Class``, as an entry point has it
    display: Mapping[str, tuple[str, str]]  # row -> its name in print, and a few words on it


class DisplayName(NamedTuple):
    """A row's name in print, and what it is in a few words."""

    printed_name: str
    short_description: str
    method_of_shorthand: str = ""  # the method that has the row's name as a shorthand; "" for a method's own name


@lru_cache(maxsize=1)
def suite_methods() -> Mapping[str, SuiteMethod]:
    """Return the suite's methods by name."""
    methods: dict[str, SuiteMethod] = {}
    files = [file for file in resources.files("ifsl_bench.methods").iterdir() if file.name.endswith(".py")]
    for file in sorted(files, key=lambda file: file.name):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (declared := _literal_attributes(node, ("name", "display"))):
                target = f"ifsl_bench.methods.{file.name.removesuffix('.py')}:{node.name}"
                methods[declared["name"]] = SuiteMethod(target, declared["display"])
    return methods


def _literal_attributes(node: ast.ClassDef, names: tuple[str, ...]) -> dict[str, Any]:
    """Return attributes of a class that are assigned literals, if it has all of these names."""
    found: dict[str, Any] = {}
    for statement in node.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and target.id in names:
                found[target.id] = ast.literal_eval(statement.value)
    return found if len(found) == len(names) else {}


@dataclass(frozen=True)
class PaperEntry:
    """An entry of a bibliography."""

    bibtex_key: str
    row_names: tuple[str, ...]  # the rows or data sets that it is to be cited for
    bibtex: str  # the entry, without the field that says so

    def read_bibtex_field(self, name: str) -> str:
        """Return a field's text without braces; "" if there is none."""
        match = re.search(rf"^\s*{name}\s*=\s*{{(.*?)}},?$", self.bibtex, re.MULTILINE | re.DOTALL)
        return re.sub(r"[{}]", "", " ".join(match[1].split())) if match else ""

    @property
    def author_year(self) -> str:
        """Authors and year in a few words: "Qi et al. 2018"."""
        names = [name.split(",")[0] for name in self.read_bibtex_field("author").split(" and ")]
        names = [re.sub(r"\\[\"'~^`]?", "", name) for name in names]
        who = names[0] if len(names) == 1 else " and ".join(names) if len(names) == 2 else f"{names[0]} et al."
        return f"{who} {self.read_bibtex_field('year')}"


@lru_cache(maxsize=2)
def read_papers(folder: str) -> tuple[PaperEntry, ...]:
    """Return the papers of ``methods`` or ``tasks``, in the order of the file."""
    text = (resources.files(f"ifsl_bench.{folder}") / "papers.bib").read_text(encoding="utf-8")
    records = []
    for entry in re.findall(r"^@.*?^}$", text, re.MULTILINE | re.DOTALL):
        head = re.match(r"@\w+\{([^,\s]+),", entry)
        of = re.search(r"^ *keywords *= *\{(.*?)\},?\n", entry, re.MULTILINE | re.DOTALL)
        if head is None or of is None:
            raise RuntimeError(f"{folder}/papers.bib: an entry without a key or keywords: {entry[:60]}")
        names = tuple(name.strip() for name in of[1].split(","))
        records.append(PaperEntry(head[1], names, entry.replace(of[0], "")))
    return tuple(records)


@lru_cache(maxsize=1)
def display_names_by_row() -> Mapping[str, DisplayName]:
    """Return the rows of the suite's methods, by the names that ``--method`` takes, in the order of ``papers.bib``."""
    named = {
        row: DisplayName(*display, method_of_shorthand="" if row == name else name)
        for name, method in suite_methods().items()
        for row, display in method.display.items()
    }
    listed = dict.fromkeys(row for paper in read_papers("methods") for row in paper.row_names if row in named)
    return {row: named[row] for row in [*listed, *(row for row in named if row not in listed)]}


def format_display_label(name: str) -> str:
    """Return the label by which papers print a row; a row of another package keeps its name."""
    named = display_names_by_row().get(name)
    return named.printed_name if named else name


# Where the next option begins; values have dots, too.
_OPTION_START = re.compile(r"(?<!\.train)(?<!\.recipe)\.(?=[A-Za-z_][\w.-]*=)")
_RECIPE_OPTION_START = re.compile(r"\.(?=[A-Za-z_]\w*=)")


def split_off_recipe(text: str) -> list[str]:
    """Split ``closer.beta=1`` into the name of the recipe, or its file, and the options, ``key=value`` each."""
    return _RECIPE_OPTION_START.split(text)


class RowLabel(NamedTuple):
    """A row's label in its parts."""

    method_name: str  # of the method, or a shorthand
    is_calibrated: bool  # whether the bias of its calibration is part of the row
    setting: str  # what is behind `@`, as `tuned-12`; "" for a method as published
    option_texts: tuple[str, ...]  # `key=value`, with `train.` or `recipe.` before one of the training or the recipe

    def __str__(self) -> str:
        name = self.method_name + "+cal" * self.is_calibrated + f"@{self.setting}" * bool(self.setting)
        return ".".join([name, *self.option_texts])

    @property
    def recipe(self) -> str:
        """The recipe that trained the backbone, with its options, as ``closer.beta=1``; "" for the task's own."""
        parts = [option for option in self.option_texts if option.startswith(("recipe=", "recipe."))]
        return ".".join(option[len("recipe") + 1 :] for option in parts)

    @property
    def without_recipe(self) -> str:
        """The label that the row has where the task's own recipe trains."""
        options = tuple(option for option in self.option_texts if not option.startswith(("recipe=", "recipe.")))
        return str(self._replace(option_texts=options))

    @property
    def command_line_words(self) -> list[str]:
        """The words that make the row on the command line, behind ``ifsl-bench run``."""
        words = ["--method", self.method_name]
        if trials := self.setting.removeprefix("tuned-"):
            words += ["--tune", trials]
        for option in self.option_texts:
            if option.startswith("train."):
                words += ["--train", option.removeprefix("train.")]
            elif option.startswith("episodes="):
                words += ["--episodes", option.removeprefix("episodes=")]
            elif option.startswith("recipe="):
                words += ["--recipe", self.recipe]
            elif option.startswith("recipe."):
                continue  # with its recipe, above
            else:
                words += ["--set", option]
        return words + ["--calibrate"] * self.is_calibrated


def format_recipe_for_print(recipe: str) -> str:
    """Return a recipe and its options as names of rows have them: ``closer, beta 1`` for ``closer.beta=1``."""
    name, *options = split_off_recipe(recipe)
    return ", ".join([name, *(option.replace("=", " ", 1).replace("_", " ") for option in options)])


def display_name_of_label(label: str) -> str:
    """Return a row's name in tables: its label, and behind a bar the recipe, as in ``ncm | closer, beta 1``."""
    if ".recipe=" not in label:
        return label
    parts = parse_label(label)
    return f"{parts.without_recipe} | {format_recipe_for_print(parts.recipe)}"


def parse_label(label: str) -> RowLabel:
    """Return the parts of a label: ``lr+a+cal@tuned-12.gamma=1e-05``."""
    head, *options = _OPTION_START.split(label)
    name, _, setting = head.partition("@")
    return RowLabel(name.removesuffix("+cal"), name.endswith("+cal"), setting, tuple(options))
