"""The contract of :class:`~ifsl_bench.plugin.method.Method`, held against a method's answers.

Every run looks at its first test episodes (:func:`check_answers`); ``ifsl-bench methods --check NAME`` goes through all
of :data:`ifsl_bench.plugin.rules.EPISODE_RULES` on made-up episodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ifsl_bench.plugin.method import (
    Method,
    Prediction,
    Query,
    Support,
    check_prediction,
    masked_logits,
    name_method_in_errors,
    named_tensors_of,
    predict_with_method,
)
from ifsl_bench.utils.errors import UserError

# Of the logits' spread in an episode: what two ways to one answer differ by at most, through rounding alone.
RELATIVE_TOLERANCE = 1e-4
# With a search that ends where its own tolerance says; and in some episodes it may find another minimum.
INNER_SEARCH_TOLERANCE = 0.05
MAX_DIFFERENT_SHARE = 0.5
SupportOrQuery = TypeVar("SupportOrQuery", Support, Query)
ALLOWED_ROUNDING_ERRORS = 32  # and so many roundings of the largest logit, which may be far above their spread


@dataclass(frozen=True)
class ContractProbe:
    """A method with episodes that it has to answer."""

    name_in_errors: str
    method: Method
    support: Support
    query: Query
    masked_base_classes: Tensor  # [E, K], the base classes without a logit
    # whether its answers have `solver_*` statistics: an inner search found them, to its own tolerance
    has_inner_search: bool = False

    def answer(self) -> Prediction:
        """Return the method's answer, checked for its form; see :func:`check_prediction`."""
        prediction = predict_with_method(self.method, self.name_in_errors, self.support, self.query)
        return check_prediction(
            self.name_in_errors, prediction, self.masked_base_classes, self.query.features.shape[1], self.method.ways
        )

    def logits(self) -> Tensor:
        """Return the joint logits [E, Q, K + N], -inf where ``masked_base_classes``."""
        return masked_logits(self.answer(), self.masked_base_classes)

    def as_float64(self) -> ContractProbe:
        """Return the same question in double precision."""
        support, query = map_tensors(self.support, to_float64), map_tensors(self.query, to_float64)
        return replace(self, method=method_to_float64(self.method), support=support, query=query)

    def with_search_flag(self) -> ContractProbe:
        """Return the same question with :attr:`has_inner_search` as one answer shows it.

        Raises:
            UserError: the method writes into what it is given, which may spoil that answer and all later ones.
        """
        if broken := find_input_change_fault(self):
            raise UserError(f"method {self.name_in_errors!r} breaks the contract: {broken}")
        return replace(self, has_inner_search=is_prediction_of_search(self.answer()))

    def select_episode(self, episode: int) -> ContractProbe:
        """Return the question with one episode alone."""
        at = slice(episode, episode + 1)
        support, query = map_tensors(self.support, lambda x: x[at]), map_tensors(self.query, lambda x: x[at])
        return replace(self, support=support, query=query, masked_base_classes=self.masked_base_classes[at])


def rule_in_words(rule: Callable[..., str | None]) -> str:
    """Return the rule that a function checks: its docstring behind "Check that"."""
    text = (rule.__doc__ or "").strip().split("\n")[0].rstrip(".").removeprefix("Check that ")
    return text[:1].upper() + text[1:]


def is_prediction_of_search(prediction: Prediction) -> bool:
    """Return whether an answer has `solver_*` statistics, so that an inner search has found it."""
    return any(key.startswith("solver_") for key in prediction.statistics)


def map_tensors(rows: SupportOrQuery, change: Callable[[Tensor], Tensor]) -> SupportOrQuery:
    """Return support or query with a change of each tensor.

    Args:
        rows: the support or the query.
        change: returns the new tensor for an old one.
    """
    return type(rows)(*map(change, vars(rows).values()))


def to_float64(x: Tensor) -> Tensor:
    """Return a tensor of numbers in double precision, labels and masks as they are."""
    return x.double() if x.is_floating_point() else x


def method_to_float64(method: Method) -> Method:
    """Return a copy of a method in double precision."""
    double = copy.deepcopy(method).double()
    double.base = double.base.to(dtype=torch.float64)
    return double


def do_logits_differ(logits: Tensor, expected: Tensor, searches: bool) -> bool:
    """Return whether logits differ beyond rounding, or in most episodes beyond a search's tolerance.

    Args:
        logits: [E, Q, C].
        expected: the logits to compare with, [E, Q, C].
        searches: whether an inner search found them, so that its tolerance counts.
    """
    there = torch.isfinite(expected)
    if not torch.equal(there, torch.isfinite(logits)):
        return True
    apart = (logits - expected).masked_fill(~there, 0.0).abs().flatten(1).amax(1)  # [E]
    count = there.flatten(1).sum(1).clamp_min(1)
    mean = expected.masked_fill(~there, 0.0).flatten(1).sum(1) / count
    centred = (expected - mean[:, None, None]).masked_fill(~there, 0.0).flatten(1)
    spread = (centred.square().sum(1) / count).sqrt().clamp_min(1e-6)
    if searches:
        return bool((apart > INNER_SEARCH_TOLERANCE * spread).float().mean() > MAX_DIFFERENT_SHARE)
    largest = expected.masked_fill(~there, 0.0).abs().flatten(1).amax(1)
    return bool(
        (
            apart > RELATIVE_TOLERANCE * spread + ALLOWED_ROUNDING_ERRORS * torch.finfo(expected.dtype).eps * largest
        ).any()
    )


def describe_ties(logits: Tensor) -> str | None:
    """Return a remark where several classes share a query's highest logit, None where none do.

    Args:
        logits: the joint logits of some queries, [E, Q, C].
    """
    shared = int(((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).sum())
    if not shared:
        return None
    share = f"in {shared} of {logits[..., 0].numel()} queries that the contract is checked on"
    precise = "" if logits.dtype in (torch.float32, torch.float64) else "; float32 would tell most of them apart"
    return f"{share} several classes have the highest logit ({logits.dtype}), and the first of them is taken{precise}"


def find_repeat_fault(probe: ContractProbe) -> str | None:
    """Check that a second call gives the same answer, whatever was answered between."""
    first = probe.logits()
    probe.select_episode(0).logits()
    broken = "a second call gives another answer: it draws at random or keeps something between calls"
    return broken if do_logits_differ(probe.logits(), first, probe.has_inner_search) else None


def find_input_change_fault(probe: ContractProbe) -> str | None:
    """Check that the call changes nothing that the method is given."""
    given = (probe.support, probe.query, probe.method.base)
    parts = {f"{type(of).__name__.lower()}.{name}": x for of in given for name, x in named_tensors_of(of).items()}
    before = {name: value.detach().clone() for name, value in parts.items()}
    with name_method_in_errors(probe.name_in_errors, probe.method):
        probe.method(probe.support, probe.query)
    changed = [name for name, value in parts.items() if not torch.equal(value, before[name])]
    return f"it writes into {changed[0]}" if changed else None


def find_episode_dependence_fault(probe: ContractProbe) -> str | None:
    """Check that an episode's answer does not depend on the other episodes of its batch."""
    whole = probe.logits()
    alone = torch.cat([probe.select_episode(episode).logits() for episode in range(len(whole))])
    broken = "the answer to an episode depends on the other episodes in its batch"
    return broken if do_logits_differ(alone, whole, probe.has_inner_search) else None


def find_query_order_fault(probe: ContractProbe) -> str | None:
    """Check that queries in another order get the same answers in that order."""
    turned = replace(probe, query=map_tensors(probe.query, lambda x: x.flip(1))).logits()
    broken = "the answer to a query depends on its place among the queries"
    return broken if do_logits_differ(turned.flip(1), probe.logits(), probe.has_inner_search) else None


def find_query_dependence_fault(probe: ContractProbe) -> str | None:
    """Check that a query's answer does not depend on the other queries, unless the class is declared transductive."""
    if probe.method.transductive:
        return None
    alone = replace(probe, query=map_tensors(probe.query, lambda x: x[:, :1])).logits()
    broken = "the answer to a query depends on the other queries"
    return broken if do_logits_differ(alone, probe.logits()[:, :1], probe.has_inner_search) else None


EpisodeRule = Callable[[ContractProbe], str | None]  # returns how a method breaks it; None where it does not
RULES_IN_EVERY_RUN: tuple[EpisodeRule, ...] = (
    find_input_change_fault,
    find_repeat_fault,
    find_episode_dependence_fault,
    find_query_order_fault,
    find_query_dependence_fault,
)


@torch.no_grad()
def check_answers(probe: ContractProbe) -> Tensor:
    """Check a method's answers against the rules of every run, and return them, for :func:`check_answer_is_repeated`.

    Raises:
        UserError: it breaks one; the message names it.
    """
    for rule in RULES_IN_EVERY_RUN:
        exact = rule in (find_input_change_fault, find_repeat_fault)
        if (broken := rule(probe)) and (exact or not holds_in_float64(rule, probe)):
            raise UserError(f"method {probe.name_in_errors!r} breaks the contract: {broken}")
    return probe.logits()


@torch.no_grad()
def check_answer_is_repeated(probe: ContractProbe, answers: Tensor) -> None:
    """Check, after other episodes, that the method answers as it did in :func:`check_answers`.

    Args:
        probe: the method and the same episodes as before.
        answers: what :func:`check_answers` returned, [E, Q, C].

    Raises:
        UserError: the answers are others: the method keeps something between calls.
    """
    if do_logits_differ(probe.logits(), answers, probe.has_inner_search):
        raise UserError(
            f"method {probe.name_in_errors!r} breaks the contract: after the evaluation it answers its first "
            "episodes otherwise than before; it keeps something between calls"
        )


def holds_in_float64(rule: Callable[[Any], str | None], probe: Any) -> bool:
    """Return whether a rule that is broken in single precision holds in double.

    Then large numbers cancelled in the logits, or rounding led a search whose objective is not convex elsewhere.

    Args:
        rule: returns how a method breaks it; None where it does not.
        probe: the question that breaks the rule; ``probe.as_float64()`` has it in double precision.
    """
    try:
        with name_method_in_errors("", probe.method):
            return not rule(probe.as_float64())
    except UserError:
        return False  # a method that works in single precision alone
