"""The rules that the class of a method keeps to, checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ifsl_bench.plugin.method import AdditiveClassifier, Method
from ifsl_bench.plugin.options import grid_of, options_of, space_of
from ifsl_bench.plugin.space import RATE, Choices, Range
from ifsl_bench.protocols.tasks.task import MetaTraining
from ifsl_bench.utils.errors import UserError


def _is_mapping(value: Any, of: type, to: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, of) and to(entry) for key, entry in value.items())


def _is_filled(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes)) and len(values) > 0


# A check of each attribute of a class, and the expected value in words.
FLAG: tuple[Callable[[Any], bool], str] = (lambda flag: isinstance(flag, bool), "True or False")
ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "head": (lambda head: head in ("linear", "cosine"), "'linear' or 'cosine'"),
    "schedule": (lambda schedule: isinstance(schedule, MetaTraining | None), "ifsl_bench.MetaTraining(...) or None"),
    **dict.fromkeys(("transductive", "uses_all_images", "order_free", "parallel_copies"), FLAG),
    **dict.fromkeys(("revision", "class_bytes"), (lambda number: type(number) is int, "a whole number")),
    "bibtex": (lambda text: isinstance(text, str), "the text of a BibTeX entry"),
    "requires": (
        lambda needs: _is_mapping(needs, str, lambda command: isinstance(command, str)),
        "module -> the command that installs it",
    ),
    "shorthands": (
        lambda names: _is_mapping(names, str, lambda options: isinstance(options, Mapping)),
        "name -> the options that it stands for",
    ),
    "space": (
        lambda space: _is_mapping(space, object, lambda values: isinstance(values, (Range, Choices))),
        "option -> ifsl_bench.Range or ifsl_bench.Choices",
    ),
    **dict.fromkeys(
        ("grid", "session_grid"), (lambda grid: _is_mapping(grid, object, _is_filled), "option -> values to try")
    ),
}

DEFINED = {  # by the missing ones of the two that a method without forward needs
    ("learn", "answer"): "neither forward nor learn and answer",
    ("learn",): "answer, but not learn",
    ("answer",): "learn, but not answer",
}


def check_method(method: Any, called_in_error: str = "") -> None:
    """Check a method's class against the contract before anything is computed.

    Args:
        method: the class.
        called_in_error: its name in errors.

    Raises:
        UserError: no subclass of :class:`Method`, abstract, options that cannot be set, a space of options it does not
            have, or an attribute of another type than :class:`Method` declares.
    """
    if not (isinstance(method, type) and issubclass(method, Method)) or method is Method:
        raise UserError(f"{called_in_error or repr(method)} is not a subclass of ifsl_bench.Method")
    called = method.__qualname__
    if missing := sorted(getattr(method, "__abstractmethods__", ())):
        raise UserError(f"{called} does not define {', '.join(missing)}")
    lacking = tuple(name for name in ("learn", "answer") if getattr(method, name) is getattr(Method, name))
    if lacking and method.forward is Method.forward:
        raise UserError(f"{called} defines {DEFINED[lacking]}")
    if issubclass(method, AdditiveClassifier):
        for name in ("learn", "answer"):
            if getattr(method, name) is not getattr(AdditiveClassifier, name):
                raise UserError(
                    f"{called} is an AdditiveClassifier, which sessions never ask to {name}; define learn_classes and "
                    f"class_logits, or make it an ifsl_bench.Method"
                )
    for name, (is_sound, expected) in ATTRIBUTES.items():
        if not is_sound(value := getattr(method, name)):
            raise UserError(f"{called}.{name} is {value!r}, expected {expected}")
    options, space = options_of(method), method.space
    if "episodes" in options:  # labels say that of the evaluation
        raise UserError(f"option 'episodes' of {called} would look like the number of episodes in labels; rename it")
    for shorthand, meant in method.shorthands.items():
        if strange := [key for key in meant if key not in options]:
            raise UserError(f"{called}.shorthands[{shorthand!r}] sets {strange[0]!r}, no option of it")
    if strange := [key for key in space if key not in options and key != RATE]:
        raise UserError(f"{called}.space names {strange[0]!r}, which is none of its options, nor {RATE!r}")
    if strange := [key for key in method.grid if key not in space or key not in options]:
        raise UserError(f"{called}.grid names {strange[0]!r}, which is no option of its space")
    rate = space_of(method).get(RATE)
    if rate and not all(0 < value < math.inf for value in ((rate.low,) if isinstance(rate, Range) else rate.values)):
        raise UserError(f"{called}.space[{RATE!r}] is {rate}, but a learning rate is positive")
    if strange := [key for key in method.session_grid if key not in method.grid]:
        raise UserError(f"{called}.session_grid names {strange[0]!r}, which is no option of its grid")
    grid_of(method, sessions=True)
