"""The class of a method: the options that its constructor declares, their values, and the rules that it keeps to."""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Union
from weakref import WeakKeyDictionary

import msgspec
import torch

from ifsl_bench.plugin.method import AdditiveClassifier, Base, Method, forbid_writes, format_failure
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Choices, Range, SearchSpace
from ifsl_bench.protocols.tasks.task import MetaTraining, Task
from ifsl_bench.utils.errors import (
    UserError,
    escape_controls,
    format_class_and_message,
    format_error_location,
    unknown_name_error,
)

# -- types of options, and values that are converted to them


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


def is_settable(kind: Any) -> bool:
    """Return whether ``--set`` can read a value of a type, which is no union."""
    if _is_literal(kind):
        return not any(isinstance(choice, float) for choice in typing.get_args(kind))
    return kind in (int, float, bool, str, type(None))


def union_types(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union; the type alone where it is none."""
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def format_type(kind: Any) -> str:
    """Write a type for people: ``int``, ``rbp|implicit``, ``float|none``."""
    return "|".join(
        "none" if k is type(None) else "|".join(map(str, typing.get_args(k))) if _is_literal(k) else k.__name__
        for k in union_types(kind)
    )


def parse_value(kind: Any, value: Any) -> Any:
    """Convert a value to the first of a type's alternatives that it can be.

    Args:
        kind: the type.
        value: a string of the command line, or a Python value.

    Raises:
        ValueError: it can be none of them.
    """
    for alternative in union_types(kind):
        try:
            return _parse_text(alternative, value)
        except (ValueError, msgspec.ValidationError):
            continue
    raise ValueError(f"{value!r} is not {format_type(kind)}")


def _parse_text(kind: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return _parse_strictly(kind, value)
    if kind in (int, float):
        value = kind(value)  # what msgspec would refuse (.5, 1_000), and 1e3 for no int
    elif _is_literal(kind):
        value = {str(choice): choice for choice in typing.get_args(kind)}.get(value, value)
    elif kind in (bool, type(None)):
        value = {"yes": True, "no": False, "none": None}.get(value.lower(), value)
    return msgspec.convert(value, kind, strict=False)


def _parse_strictly(kind: Any, value: Any) -> Any:
    return msgspec.convert(float(value) if isinstance(value, float) else value, kind)  # NumPy's float64 is a float


def convert_values(kind: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Convert values that a method's class lists to a type: 1 becomes 1.0 for a float.

    Args:
        kind: the type of the option.
        values: numbers, texts or None as the class lists them; text is not parsed.

    Raises:
        ValueError: one is of another type.
    """
    typed_values = []
    for value in values:
        try:
            typed_values.append(_parse_strictly(kind, value))
        except msgspec.ValidationError:
            raise ValueError(f"{value!r} is not {format_type(kind)}") from None
    return tuple(typed_values)


def convert_range_bounds(kind: Any, offer: Range | Choices) -> Range | Choices:
    """Convert a range or choices to a type, so that a whole number is tried where the option is one.

    Args:
        kind: the type.
        offer: the range or choices.

    Raises:
        ValueError: as :func:`convert_values`; or the type has no numbers, or none at the range's ends.
    """
    if isinstance(offer, Choices):
        return Choices(convert_values(kind, offer.values))
    low, high = offer.low, offer.high
    if float not in union_types(kind) and all(float(end).is_integer() for end in (low, high)):
        low, high = int(low), int(high)
    try:
        low, high = convert_values(kind, (low, high))
        return Range(low, high, offer.log)
    except ValueError:
        raise ValueError(f"{offer} is no range of {format_type(kind)}") from None


# -- options of a method


@dataclass(frozen=True)
class Option:
    """An option of a method: its name, type and default."""

    name: str
    value_type: Any
    default: Any

    @property
    def type_text(self) -> str:
        """The type as :func:`format_type` writes it."""
        return format_type(self.value_type)


@lru_cache(maxsize=256)  # looking up a name reads the options of all methods
def declared_options(method: type[Method]) -> Mapping[str, Option]:
    """Return the options that a method's constructor declares, in its order.

    They follow the base class's options if the constructor passes on what it does not name, as in
    ``def __init__(self, base, ways, *, mine: int = 1, **shared)``.

    Raises:
        UserError: an option without annotation or default.
    """
    options: dict[str, Option] = {}
    for constructor, parameter in _constructor_parameters(method):
        name, kind = parameter.name, _option_type(method, constructor, parameter)
        if kind is None or parameter.default is inspect.Parameter.empty:
            raise UserError(f"option {name!r} of {method.__qualname__} needs an annotation and a default value")
        for alternative in union_types(kind):
            if not is_settable(alternative):
                raise UserError(
                    f"option {name!r} of {method.__qualname__} is annotated {alternative!r}, which --set cannot read"
                )
        options[name] = Option(name, kind, parameter.default)
    return options


def _constructor_parameters(method: type[Method]) -> list[tuple[Any, inspect.Parameter]]:
    """Return keyword-only parameters with the constructor that has them, the base class's first."""
    pairs: list[tuple[Any, inspect.Parameter]] = []
    passes_on = ""  # the last class whose constructor hands on what it does not name
    for kind in method.__mro__:
        if "__init__" not in vars(kind):
            continue
        constructor = kind.__init__  # type: ignore[misc]
        parameters = inspect.signature(constructor).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if more := [p.name for p in parameters if p.kind in positional][3:]:  # behind self, base and ways
            raise UserError(f"{kind.__qualname__}.__init__ takes {more[0]!r} by position; put * before it")
        named = [(constructor, p) for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        passes_on = "" if named else passes_on
        pairs[:0] = named
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
        passes_on = kind.__qualname__
    if passes_on:
        raise UserError(f"{passes_on}.__init__ takes **, but no base class of it has options; name its options instead")
    return pairs


def _option_type(method: type[Method], constructor: Any, parameter: inspect.Parameter) -> Any:
    """Return an option's type. Other arguments are not resolved: they may have names for type checkers alone."""
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


def declared_search_space(method: type[Method]) -> SearchSpace:
    """Return the method's space with every number converted to its option's type; learning rates are floats.

    Raises:
        UserError: values that the option does not take, or a range for one that is no number.
    """
    kind_of, space = (
        {LEARNING_RATE_OPTION: float, **{key: option.value_type for key, option in declared_options(method).items()}},
        {},
    )
    for key, values in method.space.items():
        try:
            space[key] = convert_range_bounds(kind_of[key], values)
        except ValueError as error:
            raise UserError(f"{method.__qualname__}.space[{key!r}]: {error}") from None
    return space


def declared_option_grid(method: type[Method], sessions: bool = False) -> dict[str, tuple[Any, ...]]:
    """Return the method's grid with every value converted to its option's type.

    Args:
        method: the method's class.
        sessions: whether to add the values of its ``session_grid``.

    Raises:
        UserError: values that the option does not take.
    """
    options, grid = declared_options(method), {}
    for key, values in method.grid.items():
        try:
            more = method.session_grid.get(key, ()) if sessions else ()
            grid[key] = convert_values(options[key].value_type, (*values, *more))
        except ValueError as error:
            raise UserError(f"{method.__qualname__}.grid[{key!r}]: {error}") from None
    return grid


def make_method(method: type[Method], base: Base, ways: int, options: Mapping[str, Any]) -> Method:
    """Construct a method.

    Args:
        method: the class.
        base: the base classifier.
        ways: novel classes of an episode or session.
        options: of the constructor.

    Raises:
        UserError: the constructor refuses an option, fails, or does not call :class:`Method`'s.
    """
    try:
        with forbid_writes(method.__qualname__, base):
            instance = method(base, ways, **options)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(
            f"method {method.__qualname__} cannot be made: {format_failure(error, method, base)}"
        ) from error
    if not all(hasattr(instance, name) for name in ("_parameters", "base", "ways")):
        raise UserError(f"{method.__qualname__}.__init__ does not call super().__init__(base, ways)")
    if not isinstance(instance.base, Base):
        kind = type(instance.base).__name__
        raise UserError(f"{method.__qualname__}.__init__ sets self.base to {kind}; leave it the ifsl_bench.Base")
    if instance.ways != ways:
        raise UserError(f"{method.__qualname__}.__init__ sets self.ways to {instance.ways!r:.80}; leave it {ways}")
    instance.__dict__["_made_with"] = dict(options)
    return instance


def remake_method(method: Method, base: Base, ways: int) -> Method:
    """Construct a method again with the options of another one.

    Args:
        method: whose class and options are taken; its parameters are not.
        base: the base classifier.
        ways: novel classes.
    """
    return make_method(type(method), base, ways, method.__dict__["_made_with"]).to(base.weight.device)


def remake_method_for_ways(method: Method, ways: int) -> Method:
    """Return a copy of a method, parameters included, for episodes of another number of ways.

    Args:
        method: the method.
        ways: novel classes of an episode.

    Raises:
        UserError: its parameters depend on the number of ways, or as :func:`make_method`.
    """
    instance = remake_method(method, method.base, ways)
    own, others = method.state_dict(), instance.state_dict()
    shapes = [{(name, getattr(value, "shape", None)) for name, value in state.items()} for state in (own, others)]
    if different := sorted({name for name, _ in shapes[0] ^ shapes[1]}):
        raise UserError(
            f"{type(method).__qualname__} has parameters for {method.ways} ways alone "
            f"({escape_controls(', '.join(different))}), and the supports of all sessions so far are of {ways}"
        )
    instance.load_state_dict(own)
    return instance.train(method.training)


_is_trainable_cache: WeakKeyDictionary[type[Method], dict[str, bool]] = (
    WeakKeyDictionary()
)  # class -> options -> the answer


def is_trainable(method: type[Method], options: Mapping[str, Any]) -> bool:
    """Return whether a method with these options has parameters to meta-train; the answer is cached.

    Args:
        method: the class.
        options: of the constructor.
    """
    answers, key = _is_trainable_cache.setdefault(method, {}), repr(sorted(options.items()))
    if key not in answers:
        answers[key] = any(parameter.requires_grad for parameter in _make_small_method(method, options).parameters())
    return answers[key]


def accepts_options(method: type[Method], options: Mapping[str, Any]) -> bool:
    """Return whether the method's constructor takes options of these values.

    Args:
        method: the class.
        options: of the constructor, and perhaps ``train.rate``.
    """
    try:
        _make_small_method(method, {key: value for key, value in options.items() if key != LEARNING_RATE_OPTION})
    except UserError:
        return False
    return True


def _make_small_method(method: type[Method], options: Mapping[str, Any]) -> Method:
    """Construct the method with a small base classifier."""
    if method.sees != "features":
        from ifsl_bench.plugin.adapting import make_small_base_for_checks

        with torch.random.fork_rng(devices=[]):
            return make_method(method, make_small_base_for_checks(), 5, options)
    small, counts = torch.ones(6, 8), torch.full((6,), 2)
    with torch.random.fork_rng(devices=[]):
        images = torch.rand(12, 8), torch.arange(6).repeat_interleave(2)  # classes vary, as covariances need it
        base = Base(small, torch.zeros(6), small, 1.0, counts, torch.eye(8), lambda: images)
        return make_method(method, add_example_extras(base, method), 5, options)


def add_example_extras(base: Base, method: type[Method]) -> Base:
    """Return a made-up base classifier with the extras that a method needs, made up as well.

    Args:
        base: the base classifier.
        method: the class.

    Raises:
        UserError: its ``example_extras`` are not what it needs.
    """
    made = method.example_extras(*base.weight.shape)
    if missing := list_missing_extras(method, made):
        raise UserError(f"{method.__qualname__}.example_extras makes no {missing[0]!r}, which the method needs")
    return replace(base, extras={name: x.to(base.weight) for name, x in made.items()})


def list_missing_extras(method: type[Method], names: Iterable[str]) -> list[str]:
    """Return the extras of a recipe that a method needs and lacks.

    Args:
        method: the class, which declares ``needs``.
        names: of the extras that a recipe provides; only the part before the first dot counts.
    """
    given = {name.partition(".")[0] for name in names}
    return [name for name in method.needs if name not in given]


def resolve_options(
    method: type[Method], name: str, values: Mapping[str, Any], task: Task, trials: int = 0
) -> dict[str, Any]:
    """Check options against the constructor and convert them to the declared types.

    Args:
        method: the method's class.
        name: its name in errors.
        values: option -> value; strings (from ``--set``) or Python values.
        task: the defaults may depend on it.
        trials: of a search; 0 for none.

    Returns:
        The given options, converted, in the constructor's order and without those that are the default and would not be
        searched if they were not given.

    Raises:
        UserError: no such option (with the nearest names), or a value of another type.
    """
    options = declared_options(method)
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        if key not in options:
            raise unknown_name_error("option", key, options, where=f"of method {name!r}")
        try:
            resolved[key] = parse_value(options[key].value_type, value)
        except ValueError:
            raise UserError(
                f"option {key!r} of method {name!r} takes {options[key].type_text}, not {value!r}"
            ) from None
    return drop_default_values(method, resolved, task, trials)


def default_options(method: type[Method], task: Task) -> dict[str, Any]:
    """Return every option's default, in the constructor's order; some may depend on the task.

    Args:
        method: the class.
        task: the task.

    Raises:
        UserError: the method's own defaults are no dict, or name something that is no option of it.
    """
    options = declared_options(method)
    try:
        own = method.defaults(task)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        reason = f"{format_error_location(error)}{format_class_and_message(error)}"
        raise UserError(f"{method.__qualname__}.defaults failed: {reason}") from error
    if not isinstance(own, dict):
        raise UserError(f"{method.__qualname__}.defaults returned {own!r}, expected a dict of options, {{}} for none")
    if strange := [key for key in own if key not in options]:
        raise UserError(f"{method.__qualname__}.defaults names {strange[0]!r}, which is none of its options")
    return {key: option.default for key, option in options.items()} | own


def drop_default_values(method: type[Method], values: Mapping[str, Any], task: Task, trials: int = 0) -> dict[str, Any]:
    """Return options in the constructor's order, without defaults that would not be searched if they were left out.

    So one setting has one label.

    Args:
        method: the class.
        values: option -> value, of the declared types.
        task: the defaults may depend on it.
        trials: of a search; 0 for none.
    """
    default, tried = default_options(method, task), method.space if trials else method.grid
    return {key: values[key] for key in default if key in values and (values[key] != default[key] or key in tried)}


# -- the rules that a class keeps to, checked before anything is computed


def _is_mapping_of_valid_entries(value: Any, of: type, to: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, of) and to(entry) for key, entry in value.items())


def _is_filled_list(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes)) and len(values) > 0


# A check of each attribute of a class, and the expected value in words.
FLAG_RULE: tuple[Callable[[Any], bool], str] = (lambda flag: isinstance(flag, bool), "True or False")
ATTRIBUTE_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "head": (lambda head: head in ("linear", "cosine"), "'linear' or 'cosine'"),
    "schedule": (lambda schedule: isinstance(schedule, MetaTraining | None), "ifsl_bench.MetaTraining(...) or None"),
    **dict.fromkeys(("transductive", "label_slots", "uses_all_images", "order_free", "parallel_copies"), FLAG_RULE),
    **dict.fromkeys(("revision", "class_bytes"), (lambda number: type(number) is int, "a whole number")),
    "sees": (
        lambda sees: bool(re.fullmatch("features|images|maps:-?[1-9][0-9]?", str(sees))),
        "'features', 'images' or 'maps:N', the maps behind N stages of the backbone (below 0: all but so many)",
    ),
    "keeps": (lambda keeps: bool(re.fullmatch("nothing|images:[1-9][0-9]*", str(keeps))), "'nothing' or 'images:N'"),
    "bibtex": (lambda text: isinstance(text, str), "the text of a BibTeX entry"),
    "needs": (
        lambda names: isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names),
        "a tuple of names of a recipe's extras",
    ),
    "requires": (
        lambda needs: _is_mapping_of_valid_entries(needs, str, lambda command: isinstance(command, str)),
        "module -> the command that installs it",
    ),
    "shorthands": (
        lambda names: _is_mapping_of_valid_entries(names, str, lambda options: isinstance(options, Mapping)),
        "name -> the options that it stands for",
    ),
    "space": (
        lambda space: _is_mapping_of_valid_entries(space, object, lambda values: isinstance(values, (Range, Choices))),
        "option -> ifsl_bench.Range or ifsl_bench.Choices",
    ),
    **dict.fromkeys(
        ("grid", "session_grid"),
        (lambda grid: _is_mapping_of_valid_entries(grid, object, _is_filled_list), "option -> values to try"),
    ),
}

TEXT_OF_MISSING_METHODS = {  # by the missing ones of the two that a method without forward needs
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
        raise UserError(f"{called} defines {TEXT_OF_MISSING_METHODS[lacking]}")
    if issubclass(method, AdditiveClassifier):
        for name in ("learn", "answer"):
            if getattr(method, name) is not getattr(AdditiveClassifier, name):
                raise UserError(
                    f"{called} is an AdditiveClassifier, which sessions never ask to {name}; define learn_classes and "
                    f"class_logits, or make it an ifsl_bench.Method"
                )
    for name, (is_sound, expected) in ATTRIBUTE_RULES.items():
        if not is_sound(value := getattr(method, name)):
            raise UserError(f"{called}.{name} is {value!r}, expected {expected}")
    if method.sees != "features" and not isinstance(changes := getattr(method, "changes", ""), str):
        raise UserError(f"{called}.changes is {changes!r}, expected what it changes in the network, in a few words")
    options, space = declared_options(method), method.space
    if "episodes" in options:  # labels say that of the evaluation
        raise UserError(f"option 'episodes' of {called} would look like the number of episodes in labels; rename it")
    for name, option in options.items():
        try:
            convert_values(option.value_type, (option.default,))
        except ValueError as error:
            raise UserError(f"option {name!r} of {called}: its default {error}") from None
    for shorthand, meant in method.shorthands.items():
        if strange := [key for key in meant if key not in options]:
            raise UserError(f"{called}.shorthands[{shorthand!r}] sets {strange[0]!r}, no option of it")
    if strange := [key for key in space if key not in options and key != LEARNING_RATE_OPTION]:
        raise UserError(
            f"{called}.space names {strange[0]!r}, which is none of its options, nor {LEARNING_RATE_OPTION!r}"
        )
    if strange := [key for key in method.grid if key not in space or key not in options]:
        raise UserError(f"{called}.grid names {strange[0]!r}, which is no option of its space")
    rate = declared_search_space(method).get(LEARNING_RATE_OPTION)
    if rate and not all(0 < value < math.inf for value in ((rate.low,) if isinstance(rate, Range) else rate.values)):
        raise UserError(f"{called}.space[{LEARNING_RATE_OPTION!r}] is {rate}, but a learning rate is positive")
    if strange := [key for key in method.session_grid if key not in method.grid]:
        raise UserError(f"{called}.session_grid names {strange[0]!r}, which is no option of its grid")
    declared_option_grid(method, sessions=True)
    default = {name: option.default for name, option in options.items()}
    for name in ("label", "keeps_supports", "gpu_min_episodes"):
        try:
            getattr(method, name)(*[called] * (name == "label"), default)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise UserError(
                f"{called}.{name} failed: {format_error_location(error)}{format_class_and_message(error)}"
            ) from error
