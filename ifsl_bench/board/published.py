"""Rows that papers print, ``results/published/*.json``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ifsl_bench.board.result_folder import packaged_root
from ifsl_bench.common.files import read_json


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as printed in a paper; never measured here, never in a significance test.

    ``protocol`` says how its protocol differs from the task's, "" where it does not. ``band`` is by how many points of
    accuracy a row measured here may differ and count as reproduced; None where nobody has said.
    """

    label: str
    values: dict[str, float]
    source: str
    protocol: str = ""
    note: str = ""
    band: float | None = None

    @property
    def said(self) -> str:
        """All that a reader should know of it."""
        return "; ".join(part for part in (self.protocol, self.note) if part)


class _PublishedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    source: str
    columns: list[str]
    rows: dict[str, dict[str, list[float]]]
    interval: str
    protocol: str = ""
    remark: str = ""
    notes: dict[str, str] = {}  # label -> what to know of its rows
    flags: dict[str, str] = {}  # "task label column" -> what is wrong with the number
    bands: dict[str, dict[str, float]] = {}  # task -> label -> points of accuracy that count as reproduced
    set: str = ""  # what commands call all of these rows and tasks together


def _files() -> Iterator[tuple[str, _PublishedFile]]:
    for path in sorted((packaged_root() / "published").glob("*.json")):
        yield path.stem, msgspec.convert(read_json(path), _PublishedFile, strict=True)


def published_sets() -> dict[str, tuple[list[str], list[str]]]:
    """Sets of published rows that commands know by a name: their labels, and the tasks that they are of."""
    return {
        file.set: (list(dict.fromkeys(label for rows in file.rows.values() for label in rows)), list(file.rows))
        for _, file in _files()
        if file.set
    }


def published_tasks() -> list[str]:
    """The tasks for which papers print rows."""
    return list(dict.fromkeys(task for _, file in _files() for task in file.rows))


def published(task: str) -> list[PublishedRow]:
    """Rows that papers print for a task, with the reference and what is doubtful about them."""
    rows = []
    for stem, file in _files():
        for label, values in file.rows.get(task, {}).items():
            flags = [file.flags.get(f"{task} {label} {column}", "") for column in file.columns]
            note = "; ".join(part for part in (file.remark, file.notes.get(label, ""), *flags) if part)
            named, band = dict(zip(file.columns, values, strict=False)), file.bands.get(task, {}).get(label)
            about = {"source": stem, "protocol": file.protocol, "note": note}
            rows.append(PublishedRow(label=label, values=named, band=band, **about))
    return rows


def titles() -> dict[str, str]:
    """The papers that rows are printed from, by the name that tables have as their source: title, and what was read."""
    return {stem: f"{file.title}. {file.source}." for stem, file in _files()}
