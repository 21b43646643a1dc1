"""Rows that papers print, ``results/published/*.json``. Imports no torch."""

from __future__ import annotations

import msgspec

from ifsl_bench.board.result_file import packaged_root
from ifsl_bench.common.files import read_json


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as printed in a paper; never measured here, never in a significance test.

    ``protocol`` says how its protocol differs from the task's, "" where it does not.
    """

    label: str
    values: dict[str, float]
    source: str
    protocol: str = ""
    note: str = ""

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


def published(task: str) -> list[PublishedRow]:
    """Rows that papers print for a task, with the reference and what is doubtful about them."""
    rows = []
    for path in sorted((packaged_root() / "published").glob("*.json")):
        file = msgspec.convert(read_json(path), _PublishedFile, strict=True)
        for label, values in file.rows.get(task, {}).items():
            flags = [file.flags.get(f"{task} {label} {column}", "") for column in file.columns]
            note = "; ".join(part for part in (file.remark, file.notes.get(label, ""), *flags) if part)
            named = dict(zip(file.columns, values, strict=False))
            row = PublishedRow(label=label, values=named, source=path.stem, protocol=file.protocol, note=note)
            rows.append(row)
    return rows
