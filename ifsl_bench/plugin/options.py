"""A method's options: what its constructor declares, and what a user set."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ifsl_bench.plugin import option_types as kinds
from ifsl_bench.plugin.method import Base, Method
from ifsl_bench.plugin.space import RATE, Space
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.utils.errors import UserError, one_line, unknown, where


@dataclass(frozen=True)
class Option:
    """An option of a method: its name, type and default."""

    name: str
    kind: Any
    default: Any

    @property
    def spelled(self) -> str:
        """The type as a person would write it: ``int``, ``rbp|implicit``, ``float|none``."""
        return kinds.type_text(self.kind)


@lru_cache(maxsize=256)  # who looks for a name goes through the options of all methods
def options_of(method: type[Method]) -> Mapping[str, Option]:
    """The options that a method's constructor declares, in its order.

    Behind those of the base class where the constructor hands what it does not name to that, as in
    ``def __init__(self, base, ways, *, mine: int = 1, **shared)``.

    Raises:
        UserError: an option without annotation or default.
    """
    options: dict[str, Option] = {}
    for constructor, parameter in _parameters(method):
        name, kind = parameter.name, _annotation(method, constructor, parameter)
        if kind is None or parameter.default is inspect.Parameter.empty:
            raise UserError(f"option {name!r} of {method.__qualname__} needs an annotation and a default value")
        for alternative in kinds.alternatives(kind):
            if not kinds.readable(alternative):
                raise UserError(
                    f"option {name!r} of {method.__qualname__} is annotated {alternative!r}, which --set cannot read"
                )
        options[name] = Option(name, kind, parameter.default)
    return options


def _parameters(method: type[Method]) -> list[tuple[Any, inspect.Parameter]]:
    """Keyword-only parameters with the constructor that has them, the base class's first."""
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


def space_of(method: type[Method]) -> Space:
    """The method's space with every number as its option's type has it; learning rates are floats.

    Raises:
        UserError: values that the option does not take, or a range for one that is no number.
    """
    kind_of, space = {RATE: float, **{key: option.kind for key, option in options_of(method).items()}}, {}
    for key, values in method.space.items():
        try:
            space[key] = kinds.typed_spread(kind_of[key], values)
        except ValueError as error:
            raise UserError(f"{method.__qualname__}.space[{key!r}]: {error}") from None
    return space


def grid_of(method: type[Method], sessions: bool = False) -> dict[str, tuple[Any, ...]]:
    """The method's grid, of episodes or of sessions, with every value as its option's type has it.

    Raises:
        UserError: values that the option does not take.
    """
    options, grid = options_of(method), {}
    for key, values in method.grid.items():
        try:
            more = method.session_grid.get(key, ()) if sessions else ()
            grid[key] = kinds.typed(options[key].kind, (*values, *more))
        except ValueError as error:
            raise UserError(f"{method.__qualname__}.grid[{key!r}]: {error}") from None
    return grid


def make_method(method: type[Method], base: Base, ways: int, options: Mapping[str, Any]) -> Method:
    """The method beside a base classifier.

    Raises:
        UserError: its constructor refuses an option, or fails, and where; or it leaves out that of :class:`Method`.
    """
    try:
        instance = method(base, ways, **options)
    except UserError:
        raise
    except Exception as error:
        reason = f"{where(error, among=inspect.getsourcefile(method) or '')}{type(error).__name__}: {error}"
        raise UserError(f"method {method.__qualname__} cannot be made: {reason}") from error
    if not all(hasattr(instance, name) for name in ("_parameters", "base", "ways")):
        raise UserError(f"{method.__qualname__}.__init__ does not call super().__init__(base, ways)")
    instance.__dict__["_made_with"] = dict(options)
    return instance


def remade(method: Method, base: Base, ways: int) -> Method:
    """Another method with the same options, beside this base classifier and for so many ways, as initialised."""
    return make_method(type(method), base, ways, method.__dict__["_made_with"]).to(base.weight.device)


def with_ways(method: Method, ways: int) -> Method:
    """The method with its parameters, for episodes of so many ways.

    Raises:
        UserError: its parameters depend on the number of ways, or as :func:`make_method`.
    """
    instance = remade(method, method.base, ways)
    own, others = method.state_dict(), instance.state_dict()
    shapes = [{(name, getattr(value, "shape", None)) for name, value in state.items()} for state in (own, others)]
    if different := sorted({name for name, _ in shapes[0] ^ shapes[1]}):
        raise UserError(
            f"{type(method).__qualname__} has parameters for {method.ways} ways alone "
            f"({one_line(', '.join(different))}), and the supports of all sessions so far are of {ways}"
        )
    instance.load_state_dict(own)
    return instance.train(method.training)


_trains: WeakKeyDictionary[type[Method], dict[str, bool]] = WeakKeyDictionary()  # class -> options -> what was found


def trains(method: type[Method], options: Mapping[str, Any]) -> bool:
    """Returns whether a method with these options has parameters, hence anything to meta-train; looked at once."""
    answers, key = _trains.setdefault(method, {}), repr(sorted(options.items()))
    if key not in answers:
        answers[key] = any(parameter.requires_grad for parameter in _small(method, options).parameters())
    return answers[key]


def accepts(method: type[Method], options: Mapping[str, Any]) -> bool:
    """Returns whether the method's constructor takes options of these values."""
    try:
        _small(method, {key: value for key, value in options.items() if key != RATE})
    except UserError:
        return False
    return True


def _small(method: type[Method], options: Mapping[str, Any]) -> Method:
    """The method beside a small base classifier."""
    small, counts = torch.ones(6, 8), torch.full((6,), 2)
    with torch.random.fork_rng(devices=[]):
        images = torch.rand(12, 8), torch.arange(6).repeat_interleave(2)  # classes vary, as covariances need it
        base = Base(small, torch.zeros(6), small, 1.0, counts, torch.eye(8), lambda: images)
        return make_method(method, base, 5, options)


def resolve_options(
    method: type[Method], name: str, values: Mapping[str, Any], task: Task, trials: int = 0
) -> dict[str, Any]:
    """Checks options against the constructor and converts them to the declared types.

    Args:
        method: the method's class.
        name: what the user called it.
        values: option -> value; strings (from ``--set``) or Python values.
        task: what the defaults may depend on.
        trials: of a search.

    Returns:
        The given options, converted, in the constructor's order and without those that are the default and would not be
        searched if they were not given.

    Raises:
        UserError: no such option (with the nearest names), or a value of another type.
    """
    options = options_of(method)
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        if key not in options:
            raise unknown("option", key, options, where=f"of method {name!r}")
        try:
            resolved[key] = kinds.read(options[key].kind, value)
        except ValueError:
            raise UserError(f"option {key!r} of method {name!r} takes {options[key].spelled}, not {value!r}") from None
    return settled(method, resolved, task, trials)


def defaults(method: type[Method], task: Task) -> dict[str, Any]:
    """Every option's default, in the constructor's order; some may depend on the task.

    Raises:
        UserError: the method's own are no dict, or name what is none of its options.
    """
    options = options_of(method)
    try:
        own = method.defaults(task)
    except UserError:
        raise
    except Exception as error:
        reason = f"{where(error)}{type(error).__name__}: {error}"
        raise UserError(f"{method.__qualname__}.defaults failed: {reason}") from error
    if not isinstance(own, dict):
        raise UserError(f"{method.__qualname__}.defaults returned {own!r}, expected a dict of options, {{}} for none")
    if strange := [key for key in own if key not in options]:
        raise UserError(f"{method.__qualname__}.defaults names {strange[0]!r}, which is none of its options")
    return {key: option.default for key, option in options.items()} | own


def settled(method: type[Method], values: Mapping[str, Any], task: Task, trials: int = 0) -> dict[str, Any]:
    """Options in the constructor's order, without defaults (one setting, one label) that nothing would be tried for."""
    default, tried = defaults(method, task), method.space if trials else method.grid
    return {key: values[key] for key in default if key in values and (values[key] != default[key] or key in tried)}
