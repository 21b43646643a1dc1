"""A method's options: what its constructor declares, what a user set, and whether its class keeps the contract."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

import msgspec
import torch

from ifsl_bench.common.errors import UserError, unknown, where
from ifsl_bench.plugin.method import Base, Method
from ifsl_bench.plugin.space import RATE, Choices, Range
from ifsl_bench.protocol.task import Task


@dataclass(frozen=True)
class Option:
    """An option of a method: its name, type and default."""

    name: str
    kind: Any
    default: Any

    @property
    def spelled(self) -> str:
        """The type as a person would write it: ``int``, ``rbp|implicit``, ``float|none``."""
        kinds = _alternatives(self.kind)
        return "|".join(
            "none" if k is type(None) else "|".join(map(str, typing.get_args(k))) if _is_literal(k) else k.__name__
            for k in kinds
        )


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


def _readable(kind: Any) -> bool:
    """Whether a value of a command line can be made this, which is none of several types."""
    if _is_literal(kind):
        return not any(isinstance(choice, float) for choice in typing.get_args(kind))
    return kind in (int, float, bool, str, type(None))


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def options_of(method: type[Method]) -> dict[str, Option]:
    """The options that a method's constructor declares, in its order.

    Behind those of the base class where the constructor hands what it does not name to that, as in
    ``def __init__(self, base, ways, *, mine: int = 1, **shared)``.

    Raises:
        UserError: an option without annotation or default.
    """
    found: dict[str, Option] = {}
    for constructor, parameter in _parameters(method):
        name, kind = parameter.name, _annotation(method, constructor, parameter)
        if kind is None or parameter.default is inspect.Parameter.empty:
            raise UserError(f"option {name!r} of {method.__qualname__} needs an annotation and a default value")
        for one in _alternatives(kind):
            if not _readable(one):
                raise UserError(
                    f"option {name!r} of {method.__qualname__} is annotated {one!r}, which --set cannot read"
                )
        found[name] = Option(name, kind, parameter.default)
    return found


def _parameters(method: type[Method]) -> list[tuple[Any, inspect.Parameter]]:
    """Keyword-only parameters with the constructor that has them, the base class's first."""
    found: list[tuple[Any, inspect.Parameter]] = []
    for kind in method.__mro__:
        if "__init__" not in vars(kind):
            continue
        constructor = kind.__init__  # type: ignore[misc]
        parameters = inspect.signature(constructor).parameters.values()
        found[:0] = [(constructor, p) for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return found


def _annotation(method: type[Method], constructor: Any, parameter: inspect.Parameter) -> Any:
    """An option's type. Only options are resolved: other arguments may be annotated with names for type checkers."""
    kind = parameter.annotation
    if kind is inspect.Parameter.empty:
        return None
    if isinstance(kind, str):
        try:
            holder = type("Holder", (), {"__annotations__": {"kind": kind}})
            scope = getattr(constructor, "__globals__", {})
            return typing.get_type_hints(holder, globalns=scope)["kind"]
        except Exception as error:
            raise UserError(
                f"option {parameter.name!r} of {method.__qualname__} is annotated {kind!r}: {error}"
            ) from error
    return kind


def check_method(method: type[Method]) -> None:
    """Holds a plugin's class against the contract before anything is computed.

    Raises:
        UserError: abstract, an unknown head, options that cannot be set, or a space of options it does not have.
    """
    if missing := sorted(getattr(method, "__abstractmethods__", ())):
        raise UserError(f"{method.__qualname__} does not define {', '.join(missing)}")
    if method.head not in ("linear", "cosine"):
        raise UserError(f"{method.__qualname__}.head is {method.head!r}, expected 'linear' or 'cosine'")
    known = options_of(method)
    for shorthand, meant in method.shorthands.items():
        if unknown_names := sorted(meant.keys() - known.keys()):
            raise UserError(
                f"{method.__qualname__}.shorthands[{shorthand!r}] sets {unknown_names[0]!r}, no option of it"
            )
    _check_space(method, known)


def _check_space(method: type[Method], known: Mapping[str, Option]) -> None:
    called, space, grid = method.__qualname__, method.space, method.grid
    if hasattr(method, "tune"):
        raise UserError(f"{called}.tune is not read any more; give {called}.space a Range or Choices for each option")
    if not isinstance(space, Mapping) or not all(isinstance(one, (Range, Choices)) for one in space.values()):
        raise UserError(f"{called}.space is {space!r}, expected option -> ifsl_bench.Range or ifsl_bench.Choices")
    if strange := sorted(space.keys() - known.keys() - {RATE}):
        raise UserError(f"{called}.space names {strange[0]!r}, which is none of its options, nor {RATE!r}")
    if not isinstance(grid, Mapping) or not all(isinstance(one, Sequence) and len(one) for one in grid.values()):
        raise UserError(f"{called}.grid is {grid!r}, expected option -> values to try")
    if strange := sorted(grid.keys() - (space.keys() & known.keys())):
        raise UserError(f"{called}.grid names {strange[0]!r}, which is no option of its space")


def make_method(method: type[Method], base: Base, ways: int, options: Mapping[str, Any]) -> Method:
    """The method beside a base classifier.

    Raises:
        UserError: its constructor refuses an option, or fails; says where.
    """
    try:
        return method(base, ways, **options)
    except UserError:
        raise
    except Exception as error:
        said = f"{where(error)}{type(error).__name__}: {error}"
        raise UserError(f"method {method.__qualname__} cannot be made: {said}") from error


def trains(method: type[Method], options: Mapping[str, Any]) -> bool:
    """Whether a method with these options has parameters, hence anything to meta-train."""
    small = torch.ones(6, 8)
    with torch.random.fork_rng(devices=[]):
        made = make_method(method, Base(small, torch.zeros(6), small), 5, options)
    return any(parameter.requires_grad for parameter in made.parameters())


def _convert(kind: Any, value: Any) -> Any:
    """``value``, a string of the command line or a Python value, as ``kind``.

    Raises:
        ValueError, msgspec.ValidationError: it is none.
    """
    text = isinstance(value, str)
    if text and kind in (int, float):
        value = kind(value)  # what msgspec would refuse (.5, 1_000), and 1e3 for no int
    elif text and _is_literal(kind):
        value = {str(choice): choice for choice in typing.get_args(kind)}.get(value, value)
    elif text and kind in (bool, type(None)):
        value = {"yes": True, "no": False, "none": None}.get(value.lower(), value)
    elif isinstance(value, float):
        value = float(value)  # NumPy's float64 is one
    return msgspec.convert(value, kind, strict=not text)


def resolve_options(
    method: type[Method], name: str, given: Mapping[str, Any], task: Task, trials: int = 0
) -> dict[str, Any]:
    """Checks options against the constructor and converts them to the declared types.

    Args:
        method: the method's class.
        name: what the user called it.
        given: option -> value; strings (from ``--set``) or Python values.
        task: what the defaults may depend on.
        trials: of a search.

    Returns:
        The given options, converted, in the constructor's order and without those that are the default and would not be
        searched if they were not given.

    Raises:
        UserError: no such option (with the nearest names), or a value of another type.
    """
    known = options_of(method)
    resolved: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise unknown("option", key, known, where=f"of method {name!r}")
        for kind in _alternatives(known[key].kind):
            try:
                resolved[key] = _convert(kind, value)
                break
            except (ValueError, msgspec.ValidationError):
                continue
        else:
            raise UserError(f"option {key!r} of method {name!r} takes {known[key].spelled}, not {value!r}")
    return settled(method, resolved, task, trials)


def defaults(method: type[Method], task: Task) -> dict[str, Any]:
    """Every option's default, in the constructor's order; some may depend on the task.

    Raises:
        UserError: the method has a default for what is none of its options.
    """
    known, own = options_of(method), method.defaults(task)
    if strange := sorted(own.keys() - known.keys()):
        raise UserError(f"{method.__qualname__}.defaults names {strange[0]!r}, which is none of its options")
    return {key: option.default for key, option in known.items()} | own


def settled(method: type[Method], values: Mapping[str, Any], task: Task, trials: int = 0) -> dict[str, Any]:
    """Options in the constructor's order, without defaults (one setting, one label) that nothing would be tried for."""
    default, tried = defaults(method, task), method.space if trials else method.grid
    return {key: values[key] for key in default if key in values and (values[key] != default[key] or key in tried)}
