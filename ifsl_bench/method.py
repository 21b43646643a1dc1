"""The contract between a method and the harness.

Shapes: E episodes at once, S support rows (ways x shots), Q queries, D features, K base classes, N novel classes.
"""

from __future__ import annotations

import inspect
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Union

import torch
from torch import Tensor, nn

from ifsl_bench.errors import UserError, unknown
from ifsl_bench.solve.linear import AdjointReport
from ifsl_bench.task import MetaTraining, Task


@dataclass(frozen=True)
class Base:
    """The frozen base classifier.

    Attributes:
        weight: [K, D], W_a.
        bias: [K], b_a; zeros for a cosine head.
        prototypes: [K, D], mean feature of every base/train image of each class.
        scale: the pretrained temperature of a cosine head, 1 for a linear one.
    """

    weight: Tensor
    bias: Tensor
    prototypes: Tensor
    scale: float = 1.0

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Base:
        def move(x: Tensor) -> Tensor:
            return x.to(device=device, dtype=dtype)

        return Base(move(self.weight), move(self.bias), move(self.prototypes), self.scale)


@dataclass(frozen=True)
class Support:
    """The labelled images of E episodes, sorted by label.

    Attributes:
        features: [E, S, D].
        labels: [E, S], int64 in 0..N-1.
        hidden: [E, K] bool; a hidden base class is out of play: no logit, no share in an attention.
        base_logits: [E, S, K] of the frozen linear base classifier, W_a x + b_a, computed once a pool by the harness.
            In regular few-shot learning no base class is in a softmax: all are -inf, and yet none is hidden for that,
            so an attention may read W_a. A loss over the support set takes its base logits from here.
    """

    features: Tensor
    labels: Tensor
    hidden: Tensor
    base_logits: Tensor

    def class_means(self, ways: int) -> Tensor:
        """Mean support feature of each novel class, [E, N, D]."""
        one_hot = nn.functional.one_hot(self.labels, ways).to(self.features.dtype)  # [E, S, N]
        return one_hot.mT @ self.features / one_hot.sum(-2).unsqueeze(-1)


@dataclass(frozen=True)
class Query:
    """The unlabelled images of E episodes, in random order.

    Attributes:
        features: [E, Q, D].
        base_logits: [E, Q, K], as in :class:`Support`.
    """

    features: Tensor
    base_logits: Tensor


@dataclass(frozen=True)
class Prediction:
    """What a method answers.

    Attributes:
        logits: [E, Q, K + N], base classes first. The harness sets base classes that are hidden, or not in the softmax
            at all, to -inf.
        statistics: numbers for each episode, name -> [E], that the result summarises (solver steps, ...). One called
            ``solver_unconverged`` is 1 for an episode whose inner solve did not converge; a run says how many.
        adjoint: how the backward pass through an inner solve goes (``Solution.adjoint``); read after it, in training.
    """

    logits: Tensor
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    adjoint: AdjointReport | None = None


class Method(nn.Module, ABC):
    """Subclass this, and register it under the entry point group ``ifsl_bench.methods``.

    The keyword-only arguments of the constructor are the method's options, set with ``--set name=value``: they need an
    annotation (int, float, bool, str, a Literal, or one of these | None) and a default. A method with parameters is
    meta-trained by the one loop there is, on the cross-entropy of ``logits``; one without is not.

    Attributes:
        head: the pretraining to start from.
        tune: option -> values to try; the best on the validation episodes is taken and recorded.
        schedule: replaces the task's meta-training schedule.
        shorthands: further names of the method, each with the options that it stands for.
        requires: top-level modules that the method imports when it is made, and that its package does not depend on,
            each with the command that installs it. Where one is missing the method is listed with that command, and
            refused before anything is computed.
    """

    head: ClassVar[Literal["linear", "cosine"]] = "linear"
    tune: ClassVar[Mapping[str, Sequence[Any]]] = {}
    schedule: ClassVar[MetaTraining | None] = None
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    requires: ClassVar[Mapping[str, str]] = {}

    def __init__(self, base: Base, ways: int) -> None:
        super().__init__()
        self.base = base
        self.ways = ways

    @classmethod
    def defaults(cls, task: Task) -> dict[str, Any]:
        """Options whose default depends on the task (its shots, say), in place of the constructor's defaults."""
        return {}

    @classmethod
    def label(cls, name: str, options: Mapping[str, Any]) -> tuple[str, set[str]]:
        """What tables call the method with these options (defaults included), and the options that the label says."""
        for shorthand, meant in cls.shorthands.items():
            if all(options[key] == value for key, value in meant.items()):
                return shorthand, set(meant)
        return name, set()

    @abstractmethod
    def forward(self, support: Support, query: Query) -> Prediction:
        """Joint logits of the queries. No state is kept between calls; an episode ignores the others in its batch."""


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


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def options_of(method: type[Method]) -> dict[str, Option]:
    """The options that a method's constructor declares, in its order.

    Raises:
        UserError: an option without annotation or default.
    """
    found = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        kind = _annotation(method, parameter)
        if kind is None or parameter.default is inspect.Parameter.empty:
            raise UserError(f"option {name!r} of {method.__qualname__} needs an annotation and a default value")
        for one in _alternatives(kind):
            if one not in (int, float, bool, str, type(None)) and not _is_literal(one):
                raise UserError(
                    f"option {name!r} of {method.__qualname__} is annotated {one!r}, which --set cannot read"
                )
        found[name] = Option(name, kind, parameter.default)
    return found


def _annotation(method: type[Method], parameter: inspect.Parameter) -> Any:
    """An option's type. Only options are resolved: other arguments may be annotated with names for type checkers."""
    kind = parameter.annotation
    if kind is inspect.Parameter.empty:
        return None
    if isinstance(kind, str):
        try:
            holder = type("Holder", (), {"__annotations__": {"kind": kind}})
            scope = getattr(method.__init__, "__globals__", {})
            return typing.get_type_hints(holder, globalns=scope)["kind"]
        except Exception as error:
            raise UserError(
                f"option {parameter.name!r} of {method.__qualname__} is annotated {kind!r}: {error}"
            ) from error
    return kind


def check_method(method: type[Method]) -> None:
    """Holds a plugin's class against the contract before anything is computed.

    Raises:
        UserError: abstract, an unknown head, options that cannot be set, or ``tune`` of an option it does not have.
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
    for name, grid in method.tune.items():
        if name not in known:
            raise UserError(f"{method.__qualname__}.tune names {name!r}, which is none of its options")
        if not grid:
            raise UserError(f"{method.__qualname__}.tune[{name!r}] has no values to try")


def trains(method: type[Method], options: Mapping[str, Any]) -> bool:
    """Whether a method with these options has parameters, hence anything to meta-train."""
    small = torch.ones(6, 8)
    with torch.random.fork_rng(devices=[]):
        made = method(Base(small, torch.zeros(6), small), 5, **options)
    return any(parameter.requires_grad for parameter in made.parameters())


def _convert(kind: Any, value: Any) -> Any:
    """``value``, a string of the command line or a Python value, as ``kind``; ValueError if it is none."""
    text = value if isinstance(value, str) else None
    if kind is type(None):
        if value is None or (text and text.lower() == "none"):
            return None
    elif _is_literal(kind):
        for choice in typing.get_args(kind):
            if value == choice or text == str(choice):
                return choice
    elif kind is bool:
        table = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, bool):
            return value
        if text and text.lower() in table:
            return table[text.lower()]
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if text is not None:
            return int(text)
    elif kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if text is not None:
            return float(text)
    elif kind is str and text is not None:
        return text
    raise ValueError


def resolve_options(method: type[Method], name: str, given: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Checks options against the constructor and converts them to the declared types.

    Args:
        method: the method's class.
        name: what the user called it.
        given: option -> value; strings (from ``--set``) or Python values.
        task: what the defaults may depend on.

    Returns:
        The given options, converted, in the constructor's order and without those that are the default.

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
            except ValueError:
                continue
        else:
            raise UserError(f"option {key!r} of method {name!r} takes {known[key].spelled}, not {value!r}")
    # In the constructor's order, without defaults: one setting, one label. What is tuned unless given stays.
    default = {key: option.default for key, option in known.items()} | method.defaults(task)
    return {
        key: resolved[key] for key in known if key in resolved and (resolved[key] != default[key] or key in method.tune)
    }


class NonFinite(UserError):
    """A method answered with NaN or +inf."""


def check_prediction(name: str, prediction: Any, episodes: int, queries: int, classes: int) -> Prediction:
    """Holds a method's answer against the contract.

    Raises:
        NonFinite: logits that are NaN or +inf.
        UserError: no :class:`Prediction`, or the wrong shape; says what was expected.
    """
    if not isinstance(prediction, Prediction):
        raise UserError(f"method {name!r} returned {type(prediction).__name__}, expected ifsl_bench.Prediction")
    shape, expected = tuple(prediction.logits.shape), (episodes, queries, classes)
    if shape != expected:
        raise UserError(
            f"method {name!r} returned logits of shape {list(shape)}, expected {list(expected)} "
            f"(episodes, queries, base + novel classes)"
        )
    if not (prediction.logits < torch.inf).all():  # False for NaN too
        bad = int((~(prediction.logits < torch.inf)).flatten(1).any(1).sum())
        raise NonFinite(
            f"method {name!r} returned NaN or +inf logits in {bad} of {episodes} episodes of a batch, "
            f"expected finite ones (or -inf for a class that is out of play)"
        )
    for key, value in prediction.statistics.items():
        if not isinstance(value, Tensor) or tuple(value.shape) != (episodes,):
            raise UserError(f"method {name!r} returned statistic {key!r} as {_shape(value)}, expected [{episodes}]")
    return prediction


def _shape(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def masked_logits(prediction: Prediction, masked: Tensor) -> Tensor:
    """Joint logits [E, Q, K + N] with the base classes that are out of the softmax at -inf (``masked`` is [E, K])."""
    return torch.cat(
        [prediction.logits[..., : masked.shape[-1]].masked_fill(masked.unsqueeze(1), -torch.inf),
         prediction.logits[..., masked.shape[-1] :]], dim=-1,
    )  # fmt: skip
