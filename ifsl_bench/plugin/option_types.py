"""Types of options, as annotations have them, and values that are made these."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, Union

import msgspec

from ifsl_bench.plugin.space import Choices, Range


def is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


def readable(kind: Any) -> bool:
    """Returns whether a value of a command line can be made this, which is none of several types."""
    if is_literal(kind):
        return not any(isinstance(choice, float) for choice in typing.get_args(kind))
    return kind in (int, float, bool, str, type(None))


def alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def type_text(kind: Any) -> str:
    """Spells a type as a person would write it: ``int``, ``rbp|implicit``, ``float|none``."""
    return "|".join(
        "none" if k is type(None) else "|".join(map(str, typing.get_args(k))) if is_literal(k) else k.__name__
        for k in alternatives(kind)
    )


def read(kind: Any, value: Any) -> Any:
    """``value``, a string of the command line or a Python value, as the first of a type's alternatives that it can be.

    Raises:
        ValueError: it can be none.
    """
    for alternative in alternatives(kind):
        try:
            return _read(alternative, value)
        except (ValueError, msgspec.ValidationError):
            continue
    raise ValueError(f"{value!r} is not {type_text(kind)}")


def _read(kind: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return _strictly(kind, value)
    if kind in (int, float):
        value = kind(value)  # what msgspec would refuse (.5, 1_000), and 1e3 for no int
    elif is_literal(kind):
        value = {str(choice): choice for choice in typing.get_args(kind)}.get(value, value)
    elif kind in (bool, type(None)):
        value = {"yes": True, "no": False, "none": None}.get(value.lower(), value)
    return msgspec.convert(value, kind, strict=False)


def _strictly(kind: Any, value: Any) -> Any:
    return msgspec.convert(float(value) if isinstance(value, float) else value, kind)  # NumPy's float64 is a float


def typed(kind: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Values that a method's class lists, each as the type has it: 1 becomes 1.0 for a float.

    Raises:
        ValueError: one is of another type; text is read as nothing else here.
    """
    typed_values = []
    for value in values:
        try:
            typed_values.append(_strictly(kind, value))
        except msgspec.ValidationError:
            raise ValueError(f"{value!r} is not {type_text(kind)}") from None
    return tuple(typed_values)


def typed_spread(kind: Any, offer: Range | Choices) -> Range | Choices:
    """A range or choices with every value as the type has it, so that a whole number is tried where the option is one.

    Raises:
        ValueError: as :func:`typed`; or the type has no numbers, or none at the range's ends.
    """
    if isinstance(offer, Choices):
        return Choices(typed(kind, offer.values))
    low, high = offer.low, offer.high
    if float not in alternatives(kind) and all(float(end).is_integer() for end in (low, high)):
        low, high = int(low), int(high)
    try:
        low, high = typed(kind, (low, high))
        return Range(low, high, offer.log)
    except ValueError:
        raise ValueError(f"{offer} is no range of {type_text(kind)}") from None
