"""The papers of methods and tasks, from the BibTeX files beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources


@dataclass(frozen=True)
class Paper:
    """An entry of a bibliography."""

    key: str
    of: tuple[str, ...]  # the rows or data sets that it is to be cited for
    bibtex: str  # the entry, without the field that says so

    def field(self, name: str) -> str:
        """Return a field's text without braces; "" if there is none."""
        match = re.search(rf"^\s*{name}\s*=\s*{{(.*?)}},?$", self.bibtex, re.MULTILINE | re.DOTALL)
        return re.sub(r"[{}]", "", " ".join(match[1].split())) if match else ""

    @property
    def short(self) -> str:
        """Authors and year in a few words: "Qi et al. 2018"."""
        names = [name.split(",")[0] for name in self.field("author").split(" and ")]
        names = [re.sub(r"\\[\"'~^`]?", "", name) for name in names]
        who = names[0] if len(names) == 1 else " and ".join(names) if len(names) == 2 else f"{names[0]} et al."
        return f"{who} {self.field('year')}"


@lru_cache(maxsize=2)
def papers(folder: str) -> tuple[Paper, ...]:
    """Return the papers of ``methods`` or ``tasks``, in the order of the file."""
    text = (resources.files(f"ifsl_bench.{folder}") / "papers.bib").read_text(encoding="utf-8")
    records = []
    for entry in re.findall(r"^@.*?^}$", text, re.MULTILINE | re.DOTALL):
        head = re.match(r"@\w+\{([^,\s]+),", entry)
        of = re.search(r"^ *keywords *= *\{(.*?)\},?\n", entry, re.MULTILINE | re.DOTALL)
        if head is None or of is None:
            raise RuntimeError(f"{folder}/papers.bib: an entry without a key or keywords: {entry[:60]}")
        names = tuple(name.strip() for name in of[1].split(","))
        records.append(Paper(head[1], names, entry.replace(of[0], "")))
    return tuple(records)
