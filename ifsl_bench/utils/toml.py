"""TOML files of users, checked against a schema; errors name the file and the key. Imports no torch."""

from __future__ import annotations

import difflib
import functools
import operator
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect

from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.limits import TOML_FILE_CHARACTERS, TOML_LINE_DOTS, Limit, read_text

T = TypeVar("T")


def read_user_file(path: Path, what: str, limit: Limit = TOML_FILE_CHARACTERS) -> str:
    """Return a file's text, without the byte order mark that some editors put before it.

    Args:
        path: the file.
        what: the kind of file in errors, "task file".
        limit: the most characters.

    Raises:
        UserError: it cannot be read, is no UTF-8 text, or is too long.
    """
    try:
        return read_text(path, limit, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the {what} {path}: {reason}") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Args:
        text: of the file.
        where: its name in errors.

    Raises:
        UserError: not TOML, or larger than is parsed.
    """
    TOML_FILE_CHARACTERS.check(len(text), where)
    TOML_LINE_DOTS.check(max((line.count(".") for line in text.split("\n")), default=0), where)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and what Python raises for a number of thousands of digits
        raise UserError(f"{where} is not valid TOML: {str(error)[:200]}") from error
    except RecursionError as error:
        raise UserError(f"{where} is not valid TOML: tables or lists are nested too deep") from error


def convert_tables(raw: Mapping[str, Any], kind: type[T], where: str, keys: Iterable[str]) -> T:
    """Convert tables to a ``msgspec.Struct``.

    Args:
        raw: the tables.
        kind: the class to make.
        where: the file's name in errors.
        keys: that such a file may have, of which the nearest ones to an unknown key are suggested.

    Raises:
        UserError: an unknown or missing key, or a value of another type; it is named.
    """
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        path = _error_path(str(error), raw, kind)
        message = re.sub(r" - at `.*`$", "", str(error)).replace("Object contains", "it contains")
        if field := re.search(r"unknown field `(.*?)`", message):
            near = difflib.get_close_matches(field[1], set(keys) - {field[1]}, n=2, cutoff=0.6)
            message += f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        if message.startswith("Invalid enum value") and (allowed := _allowed_values(kind, path)):
            message += f", which is none of {', '.join(map(repr, allowed))}"
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        raise UserError(f"{where}: {message[:300]} - at `{place or 'its top level'}`"[:600]) from error


def _error_path(message: str, raw: Any, kind: Any) -> list[str | int]:
    """Return the keys that lead to the place of a msgspec message, which has ``[...]`` for a key of a dict."""
    place = re.search(r" - at `\$(.*)`$", message)
    parts: list[str | int] = []
    for key, number, _ in re.findall(r"\.([\w-]+)|\[(\d+)\]|(\[\.\.\.\])", place[1] if place else ""):
        if key or number:
            parts.append(key or int(number))
            continue
        table = functools.reduce(operator.getitem, parts, raw)
        for name in table if isinstance(table, Mapping) else ():
            try:
                msgspec.convert(_replace_at(raw, parts, {name: table[name]}), kind, strict=True)
            except msgspec.ValidationError as error:
                if str(error) == message:
                    parts.append(name)
                    break
        else:
            parts.append("...")
    return parts


def _replace_at(raw: Any, path: Sequence[str | int], value: Any) -> Any:
    """Return a copy with another value at a path."""
    if not path:
        return value
    copy: Any = list(raw) if isinstance(raw, list) else dict(raw)
    copy[path[0]] = _replace_at(raw[path[0]], path[1:], value)
    return copy


def _allowed_values(kind: Any, path: Sequence[str | int]) -> tuple[Any, ...]:
    """Return the values that a key may have, if these are few."""
    described = msgspec.inspect.type_info(kind)
    for part in path:
        if isinstance(described, msgspec.inspect.StructType):
            described = next(field.type for field in described.fields if field.encode_name == part)
        elif isinstance(described, msgspec.inspect.DictType):
            described = described.value_type
        elif isinstance(described, msgspec.inspect.ListType):
            described = described.item_type
        else:
            return ()
    return described.values if isinstance(described, msgspec.inspect.LiteralType) else ()
