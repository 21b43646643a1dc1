"""TOML from a stranger, held against a schema: what is wrong is told in one line. Imports no torch."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import TOML_LINE, Limit, read_text

T = TypeVar("T")


def text_of(path: Path, what: str, limit: Limit) -> str:
    """A file's text.

    Args:
        what: how errors call such a file, "task file".

    Raises:
        UserError: it cannot be read, is no text, or is longer than the limit.
    """
    try:
        return read_text(path, limit)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the {what} {path}: {reason}") from error


def parsed(text: str, where: str, limit: Limit) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        UserError: not TOML, or larger than is parsed; ``where`` names it.
    """
    limit.check(len(text), where)
    TOML_LINE.check(max((line.count(".") for line in text.split("\n")), default=0), where)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and what Python raises for a number of thousands of digits
        raise UserError(f"{where} is not valid TOML: {str(error)[:200]}") from error
    except RecursionError as error:
        raise UserError(f"{where} is not valid TOML: tables or lists are nested too deep") from error


def held(raw: Mapping[str, Any], kind: type[T], where: str, keys: Iterable[str]) -> T:
    """The tables as a ``msgspec.Struct``.

    Args:
        keys: that such a file may have, of which the nearest ones to an unknown key are suggested.

    Raises:
        UserError: an unknown or missing key, or a value of another type; it is named.
    """
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        message = str(error).replace("Object contains", "it contains").replace("$.", "").replace("`$`", "its top level")
        if field := re.search(r"unknown field `(.*?)`", message):
            near = difflib.get_close_matches(field[1], set(keys), n=2, cutoff=0.6)
            message += f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        raise UserError(f"{where}: {message[:300]}") from error
