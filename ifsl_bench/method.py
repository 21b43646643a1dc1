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
from ifsl_bench.task import MetaTraining


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
        logits: [E, Q, K + N], base classes first. The harness sets hidden base classes to -inf.
        statistics: numbers for each episode, name -> [E], that the result summarises (solver steps, ...).
    """

    logits: Tensor
    statistics: Mapping[str, Tensor] = field(default_factory=dict)


class Method(nn.Module, ABC):
    """Subclass this, and register it under the entry point group ``ifsl_bench.methods``.

    The keyword-only arguments of the constructor are the method's options, set with ``--set name=value``: they need an
    annotation (int, float, bool, str, a Literal, or one of these | None) and a default. A method with parameters is
    meta-trained by the one loop there is, on the cross-entropy of ``logits``; one without is not.

    Attributes:
        head: the pretraining to start from.
        tune: option -> values to try; the best on the validation episodes is taken and recorded.
        schedule: replaces the task's meta-training schedule.
    """

    head: ClassVar[Literal["linear", "cosine"]] = "linear"
    tune: ClassVar[Mapping[str, Sequence[Any]]] = {}
    schedule: ClassVar[MetaTraining | None] = None

    def __init__(self, base: Base, ways: int) -> None:
        super().__init__()
        self.base = base
        self.ways = ways

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
    hints = typing.get_type_hints(method.__init__)
    found = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if name not in hints or parameter.default is inspect.Parameter.empty:
            raise UserError(f"option {name!r} of {method.__qualname__} needs an annotation and a default value")
        found[name] = Option(name, hints[name], parameter.default)
    return found


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


def resolve_options(method: type[Method], name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks options against the constructor and converts them to the declared types.

    Args:
        method: the method's class.
        name: what the user called it.
        given: option -> value; strings (from ``--set``) or Python values.

    Returns:
        The given options only, converted.

    Raises:
        UserError: no such option (with the nearest names), or a value of another type.
    """
    known = options_of(method)
    resolved = {}
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
    return resolved


def check_prediction(name: str, prediction: Any, episodes: int, queries: int, classes: int) -> Prediction:
    """Holds a method's answer against the contract.

    Raises:
        UserError: no :class:`Prediction`, the wrong shape, or logits that are NaN; says what was expected.
    """
    if not isinstance(prediction, Prediction):
        raise UserError(f"method {name!r} returned {type(prediction).__name__}, expected ifsl_bench.Prediction")
    shape, expected = tuple(prediction.logits.shape), (episodes, queries, classes)
    if shape != expected:
        raise UserError(
            f"method {name!r} returned logits of shape {list(shape)}, expected {list(expected)} "
            f"(episodes, queries, base + novel classes)"
        )
    if torch.isnan(prediction.logits).any():
        bad = int(torch.isnan(prediction.logits).flatten(1).any(1).sum())
        raise UserError(f"method {name!r} returned NaN logits in {bad} of {episodes} episodes of a batch")
    return prediction


def masked_logits(prediction: Prediction, hidden: Tensor) -> Tensor:
    """Joint logits [E, Q, K + N] with hidden base classes at -inf (``hidden`` is [E, K])."""
    return torch.cat(
        [prediction.logits[..., : hidden.shape[-1]].masked_fill(hidden.unsqueeze(1), -torch.inf),
         prediction.logits[..., hidden.shape[-1] :]], dim=-1,
    )  # fmt: skip
