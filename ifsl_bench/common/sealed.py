"""JSON files of the cache that carry a checksum over themselves.

From form 2 on, ``"checksum"`` is the SHA-256 of everything else in the file. Files of form 1, from before, have none.
Hours may be in them, so they are used where something else vouches for them: a data set its fingerprint, features and
finished trainings the checksum of their tensors, an unfinished meta-training the steps that its optimiser has counted.
Nothing vouches for the epoch of an unfinished pretraining, nor for what a finished training says of its validations.
There what cannot have been is refused: validations at other steps than there are, a kept step that is not the first of
the best, or not that of the tensors. A changed accuracy that leaves the best one the best is not noticed. Trials and
probes, which are made again in seconds to minutes, are not used. All get the new form when they are next saved. The two
cannot be taken for each other: form 2 without a checksum is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ifsl_bench.common.errors import CorruptFile
from ifsl_bench.common.files import open_file, read_json, sha256_json, write_json

FORM = 2
SECONDS = 1e10  # three hundred years; whoever says more was not timed


def write_sealed(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a JSON object with its form and checksum; returns it as :func:`read_sealed` would."""
    whole: dict[str, Any] = json.loads(json.dumps({**value, "format": FORM}))
    write_json(path, {**whole, "checksum": sha256_json(whole)})
    return whole


def read_sealed(path: Path) -> dict[str, Any]:
    """The JSON object in a file, without its checksum, which held.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, or of a form that is not known here.
        UserError: it may not be read.
    """
    open_file(path).close()
    value: dict[str, Any] = read_json(path)
    checksum, form = value.pop("checksum", None), value.get("format", 1)
    if type(form) is not int or not 1 <= form <= FORM:
        raise CorruptFile(f"{path} is in format {form!r}, this version reads 1 to {FORM}")
    if (form > 1 or checksum is not None) and checksum != sha256_json(value):
        raise CorruptFile(f"{path} is not what was written: its checksum differs")
    return value


def check_kinds(path: Path, value: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raises :class:`CorruptFile` where a key is missing or its value is of another type; a bool is no number.

    Args:
        kinds: key -> type, or a tuple of types.
    """
    for key, kind in kinds.items():
        found = value.get(key)
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if key not in value or not isinstance(found, allowed) or (isinstance(found, bool) and bool not in allowed):
            raise CorruptFile(f"{path} is damaged: {key} is {'missing' if key not in value else repr(found)[:40]}")


def check_range(path: Path, value: Mapping[str, Any], keys: Iterable[str], least: float, most: float) -> None:
    """Raises :class:`CorruptFile` where a number is out of bounds, so that arithmetic with it overflows nowhere."""
    for key in keys:
        if not least <= value[key] <= most:
            raise CorruptFile(f"{path} is damaged: {key} is {value[key]!r:.40}, not between {least:g} and {most:g}")
