"""Rows that papers print, ``results/published/*.json``. Imports no torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ifsl_bench.protocols.metrics import harmonic_mean_by_episode
from ifsl_bench.protocols.tasks.contamination import ROW_NOTE_OF_SEEN_LEVEL
from ifsl_bench.store.result_folder import packaged_results_folder
from ifsl_bench.utils.files import read_json

SET_SUFFIX = "-published"  # what the name of a task that takes a list to the letter ends in
ONE_ORDER_NOTE = "one order of the classes, one support set"  # how a list departs from the task that it is of
FLAG_LETTERS = {
    "t": "something was chosen on test images",
    "i": "images of earlier sessions are kept",
    "c": "the number of classes is known beforehand",
    "p": "the pretraining has, or may have, seen the novel classes",
}
SOURCE_KINDS = {
    "paper": "paper",
    "readme": "authors' README",
    "log": "authors' log",
    "cited": "cited",
    "rerun": "rerun",
}


class PublishedSequence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Printed numbers of one sequence of sessions, in percent.

    Attributes:
        after: A_0 ... A_T.
        base: after each session; None where nothing is printed.
        novel: the same of novel classes.
        kind: one of :data:`SOURCE_KINDS`.
        chosen_on_test: whether anything, such as the epoch, was chosen on test images; None where no source says so.
        images: of earlier sessions that the method keeps, in words.
        knows_classes: whether the method knows the number of classes beforehand; None where no source says so.
        novel_seen: whether novel classes were, or may have been, in pretraining; None where no source says so.
        seeds: how many training seeds; None where no source says so.
    """

    after: list[float]
    kind: Literal["paper", "readme", "log", "cited", "rerun"]
    base: list[float | None] = []
    novel: list[float | None] = []
    backbone: str = ""
    chosen_on_test: bool | None = None
    images: str = ""
    knows_classes: bool | None = None
    novel_seen: Literal["no", "may", "yes"] | None = None
    seeds: int | None = None
    note: str = ""

    @property
    def flags_in_words(self) -> str:
        """In words, how it departs from a row that knows nothing beforehand."""
        marks = [
            "chosen on test images" if self.chosen_on_test else "",
            f"keeps {self.images} images" if self.images else "",
            "knows the number of classes" if self.knows_classes else "",
            ROW_NOTE_OF_SEEN_LEVEL[self.novel_seen or "no"],
        ]
        return "; ".join(filter(None, marks))

    @property
    def source_remark(self) -> str:
        """The kind of its source, with its backbone and :attr:`flags_in_words`."""
        return "; ".join(filter(None, [SOURCE_KINDS[self.kind], self.backbone, self.flags_in_words]))

    @property
    def flag_letters(self) -> str:
        """The flags as letters of :data:`FLAG_LETTERS`."""
        holds = (self.chosen_on_test, bool(self.images), self.knows_classes, self.novel_seen in ("may", "yes"))
        return "".join(letter for letter, held in zip(FLAG_LETTERS, holds, strict=True) if held)

    def summarise(self, queries: np.ndarray) -> dict[str, float]:
        """Return the summary that measured rows have, as far as it follows; ``queries`` [T + 1] are of each session."""
        acc = np.array(self.after)
        lazy = acc[0] * queries[0] / queries.cumsum()
        values = {"first": acc[0], "last": acc[-1], "acc": acc.mean(), "pd": acc[0] - acc[-1]}
        values["gain"] = values["acc"] - lazy.mean()
        if self.base and self.novel and self.base[-1] is not None and self.novel[-1] is not None:
            base, novel = np.array([self.base[-1]]), np.array([self.novel[-1]])
            values |= {"base": base[0], "novel": novel[0], "harmonic": harmonic_mean_by_episode(base, novel)[0]}
        return {name: float(value) for name, value in values.items()}


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as printed in a paper; never measured here, never in a significance test.

    ``protocol`` says how its protocol differs from the task's, "" where it does not. ``tolerance_band`` is by how many
    points of accuracy a row measured here may differ and count as reproduced; None where none is stated. ``sequence``
    is there in sessions alone.
    """

    label: str
    values: dict[str, float]
    source: str
    protocol: str = ""
    note: str = ""
    tolerance_band: float | None = None
    sequence: PublishedSequence | None = None

    @property
    def joined_notes(self) -> str:
        """All notes on it."""
        of_sequence = self.sequence.source_remark if self.sequence else ""
        return "; ".join(part for part in (self.protocol, of_sequence, self.note) if part)


class _PublishedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    source: str
    columns: list[str] = []
    rows: dict[str, dict[str, list[float]]] = {}
    interval: str = "unknown"
    protocol: str = ""
    remark: str = ""
    notes: dict[str, str] = {}  # label -> what to know of its rows
    flags: dict[str, str] = {}  # "task label column" -> what is wrong with the number
    bands: dict[str, dict[str, float]] = {}  # task -> label -> points of accuracy that count as reproduced
    set: str = ""  # what commands call all of these rows and tasks together
    bibtex: list[str] = []  # lines; of a paper that no method of the package is from
    queries: dict[str, list[int]] = {}  # task -> test images of the classes of each session
    sequences: dict[str, dict[str, PublishedSequence]] = {}  # task -> label -> what is printed


def _read_published_files() -> list[tuple[str, _PublishedFile]]:
    return _read_published_files_in(packaged_results_folder() / "published")


@cache
def _read_published_files_in(folder: Path) -> list[tuple[str, _PublishedFile]]:
    paths = sorted(folder.glob("*.json"))
    return [(path.stem, msgspec.convert(read_json(path), _PublishedFile, strict=True)) for path in paths]


def read_published_sets() -> dict[str, tuple[list[str], list[str]]]:
    """Return the named sets of published rows: name -> labels, and their tasks."""
    return {
        file.set: (list(dict.fromkeys(label for rows in file.rows.values() for label in rows)), list(file.rows))
        for _, file in _read_published_files()
        if file.set
    }


def published_task_names() -> list[str]:
    """Return the tasks for which papers print rows."""
    return list(dict.fromkeys(task for _, file in _read_published_files() for task in (*file.rows, *file.sequences)))


def read_published_rows(task: str) -> list[PublishedRow]:
    """Return the rows that papers print for a task, with the reference and doubts about them.

    Rows of a list of sessions are also of the task that draws the order of its classes.
    """
    rows = []
    for stem, file in _read_published_files():
        for label, values in file.rows.get(task, {}).items():
            flags = [file.flags.get(f"{task} {label} {column}", "") for column in file.columns]
            note = "; ".join(part for part in (file.remark, file.notes.get(label, ""), *flags) if part)
            named, band = dict(zip(file.columns, values, strict=False)), file.bands.get(task, {}).get(label)
            rows.append(
                PublishedRow(
                    label=label, values=named, source=stem, protocol=file.protocol, note=note, tolerance_band=band
                )
            )
        listed = task if task in file.sequences else task + SET_SUFFIX
        for label, sequence in file.sequences.get(listed, {}).items():
            values_here = sequence.summarise(np.array(file.queries[listed]))
            of_all = file.source.partition("; ")[2]  # such as "means of 10 runs"
            note = "; ".join(filter(None, [of_all, sequence.note]))
            protocol = "" if listed == task else ONE_ORDER_NOTE
            rows.append(
                PublishedRow(
                    label=label, values=values_here, source=stem, note=note, sequence=sequence, protocol=protocol
                )
            )
    return rows


def read_paper_titles_by_source() -> dict[str, str]:
    """Return the papers that rows are printed from: source in tables -> title, and the part that was read."""
    return {stem: f"{file.title}. {file.source}." for stem, file in _read_published_files()}


def read_bibtex_by_source() -> dict[str, str]:
    """Return source -> BibTeX of papers that no method of the package is from; :func:`read_paper_titles_by_source`."""
    return {stem: "\n".join(file.bibtex) for stem, file in _read_published_files() if file.bibtex}
