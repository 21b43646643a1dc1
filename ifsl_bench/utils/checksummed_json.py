"""JSON files of the cache that carry a checksum over themselves: the SHA-256 of everything else in the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import read_json, sha256_json, write_json

FORM = 2


def write_checksummed(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a JSON object with its format and checksum; returns it as :func:`read_checksummed` would."""
    whole: dict[str, Any] = json.loads(json.dumps({**value, "format": FORM}))
    write_json(path, {**whole, "checksum": sha256_json(whole)})
    return whole


def read_checksummed(path: Path) -> dict[str, Any]:
    """The JSON object in a file, without its checksum, which held.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, or of another format.
        UserError: it may not be read.
    """
    value: dict[str, Any] = read_json(path)
    if value.get("format") != FORM:
        raise CorruptFile(f"{path} is in format {value.get('format')!r:.40}, this version reads {FORM}")
    if value.pop("checksum", None) != sha256_json(value):
        raise CorruptFile(f"{path} is not what was written: its checksum differs")
    return value


def check_kinds(path: Path, value: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raises :class:`CorruptFile` where a key is missing or its value is of another type; a bool is no number.

    Args:
        kinds: key -> type, or a tuple of types.
    """
    for key, kind in kinds.items():
        content = value.get(key)
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if key not in value or not isinstance(content, allowed) or (isinstance(content, bool) and bool not in allowed):
            raise CorruptFile(f"{path} is damaged: {key} is {'missing' if key not in value else repr(content)[:40]}")
