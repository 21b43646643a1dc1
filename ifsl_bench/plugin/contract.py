"""The contract of :class:`~ifsl_bench.plugin.method.Method`, held against a method's answers.

Every run looks at its first test episodes (:func:`check_answers`); ``ifsl-bench methods --check NAME`` goes through all
of :data:`RULES` on made-up episodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.common.errors import UserError
from ifsl_bench.plugin.method import (
    Base,
    Method,
    Prediction,
    Query,
    Support,
    ask,
    check_prediction,
    masked_logits,
)
from ifsl_bench.plugin.options import make_method

# Of the logits' spread in an episode: what two ways to one answer differ by at most, through rounding alone.
TOLERANCE = 1e-4
# With a search that ends where its own tolerance says; and in some episodes it may find another minimum.
SEARCHED = 0.05
MOST_OTHERWISE = 0.5
Rows = TypeVar("Rows", Support, Query)
COPIES = 3  # that answer at once, and twice as many answers
ROUNDINGS = 32  # and so many roundings of the largest logit, which may be far above their spread


@dataclass(frozen=True)
class Asked:
    """A method with episodes that it has to answer.

    Attributes:
        masked: [E, K], the base classes without a logit.
        searches: whether its answers have ``solver_*`` statistics: an inner search found them, to its own tolerance.
        make: makes such a method on another base classifier.
    """

    name: str
    method: Method
    support: Support
    query: Query
    masked: Tensor
    searches: bool = False
    make: Callable[[Base], Method] | None = None

    def answer(
        self, support: Support | None = None, query: Query | None = None, method: Method | None = None
    ) -> Prediction:
        """Checked for its form, see :func:`check_prediction`."""
        support, query = support or self.support, query or self.query
        prediction = ask(method or self.method, self.name, support, query)
        (episodes, queries), classes = query.features.shape[:2], self.masked.shape[1] + self.method.ways
        return check_prediction(self.name, prediction, episodes, queries, classes)

    def logits(
        self, support: Support | None = None, query: Query | None = None, method: Method | None = None
    ) -> Tensor:
        """[E, Q, K + N]; -inf where ``masked``."""
        return masked_logits(self.answer(support, query, method), self.masked)

    def exactly(self) -> Asked:
        """The same in double precision."""
        method = copy.deepcopy(self.method).double()
        method.base = method.base.to(dtype=torch.float64)
        return replace(self, method=method, support=_each(self.support, _double), query=_each(self.query, _double))

    def looked_at(self) -> Asked:
        """With what one answer says of :attr:`searches`."""
        return replace(self, searches=any(key.startswith("solver_") for key in self.answer().statistics))

    def part(self, episode: int) -> Asked:
        """One episode."""

        def cut(x: Tensor) -> Tensor:
            return x[episode : episode + 1]

        return replace(self, support=_each(self.support, cut), query=_each(self.query, cut), masked=cut(self.masked))


def _each(rows: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    """Support or query with a change of each tensor."""
    return type(rows)(*map(change, vars(rows).values()))


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def differs(asked: Asked, logits: Tensor, expected: Tensor) -> bool:
    """Returns whether logits [E, Q, C] differ beyond rounding, or in most episodes beyond a search's tolerance."""
    there = torch.isfinite(expected)
    if not torch.equal(there, torch.isfinite(logits)):
        return True
    apart = (logits - expected).masked_fill(~there, 0.0).abs().flatten(1).amax(1)  # [E]
    count = there.flatten(1).sum(1).clamp_min(1)
    mean = expected.masked_fill(~there, 0.0).flatten(1).sum(1) / count
    centred = (expected - mean[:, None, None]).masked_fill(~there, 0.0).flatten(1)
    spread = (centred.square().sum(1) / count).sqrt().clamp_min(1e-6)
    if asked.searches:
        return bool((apart > SEARCHED * spread).float().mean() > MOST_OTHERWISE)
    largest = expected.masked_fill(~there, 0.0).abs().flatten(1).amax(1)
    return bool((apart > TOLERANCE * spread + ROUNDINGS * torch.finfo(expected.dtype).eps * largest).any())


def repeats(asked: Asked) -> str:
    """A second call gives the same answer, whatever was asked between."""
    first = asked.logits()
    asked.part(0).logits()
    broken = "a second call gives another answer: it draws at random or keeps something between calls"
    return broken if differs(asked, asked.logits(), first) else ""


def leaves_its_input(asked: Asked) -> str:
    """What a method is given is as it was after the call."""
    holders = {"support": asked.support, "query": asked.query, "base": asked.method.base}
    named = {f"{holder}.{name}": x for holder, tensors in holders.items() for name, x in vars(tensors).items()}
    parts = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    before = {name: value.detach().clone() for name, value in parts.items()}
    asked.logits()
    changed = [name for name, value in parts.items() if not torch.equal(value, before[name])]
    return f"it writes into {changed[0]}" if changed else ""


def sees_one_episode(asked: Asked) -> str:
    """An episode's answer does not depend on the other episodes of its batch."""
    whole = asked.logits()
    alone = torch.cat([asked.part(episode).logits() for episode in range(len(whole))])
    return "the answer to an episode depends on the other episodes in its batch" if differs(asked, alone, whole) else ""


def follows_the_queries(asked: Asked) -> str:
    """Queries in another order get the same answers in that order."""
    q, count = asked.query, asked.query.features.shape[1]
    order = torch.arange(count - 1, -1, -1, device=q.features.device)
    turned = asked.logits(query=Query(q.features[:, order], q.base_logits[:, order]))
    broken = "the answer to a query depends on its place among the queries"
    return broken if differs(asked, turned[:, order], asked.logits()) else ""


def sees_one_query(asked: Asked) -> str:
    """A query's answer does not depend on the other queries, unless the class declares that it is transductive."""
    q = asked.query
    if asked.method.transductive:
        return ""
    alone = asked.logits(query=Query(q.features[:, :1], q.base_logits[:, :1]))
    return "the answer to a query depends on the other queries" if differs(asked, alone, asked.logits()[:, :1]) else ""


def keeps_hidden_classes_out(asked: Asked) -> str:
    """What a hidden base class is like changes no answer about the others."""
    s, q, hidden = asked.support, asked.query, asked.support.hidden
    if not hidden.any():
        return ""
    hidden_class = int(hidden.any(0).nonzero()[0])
    there = hidden[:, hidden_class]  # [E] episodes that hide it
    base = copy.deepcopy(asked.method.base)
    with torch.no_grad():
        for tensor in (base.weight, base.prototypes):
            tensor[hidden_class] += 5.0
        method = _on(base, asked)
        for parameter in method.parameters():
            if parameter.shape == base.weight.shape:  # a row for each base class
                parameter[hidden_class] += 5.0
    shifted = [x.clone() for x in (s.base_logits, q.base_logits)]
    for x in shifted:
        x[..., hidden_class] += 5.0
    shifted_logits = asked.logits(replace(s, base_logits=shifted[0]), Query(q.features, shifted[1]), method)
    # What all logits of a query have in common tells nothing: the origin that features are seen from, for one.
    before, after = (logits[there].log_softmax(-1) for logits in (asked.logits(), shifted_logits))
    return "a hidden base class leaves a trace in the answers" if differs(asked, after, before) else ""


def _on(base: Base, asked: Asked) -> Method:
    """The method with its parameters on another base classifier: made anew, if that can be done, since it may keep
    what it has computed from the base classifier."""
    if asked.make is None:
        method = copy.deepcopy(asked.method)
        method.base = base
        return method
    method = asked.make(base)
    for mine, theirs in zip(method.parameters(), asked.method.parameters(), strict=True):
        mine.copy_(theirs)
    return method


def ignores_the_order_of_support(asked: Asked) -> str:
    """The images of a class come in no particular order."""
    s, ways = asked.support, asked.method.ways
    order = torch.arange(s.features.shape[1]).view(ways, -1).flip(1).flatten()
    turned = replace(s, features=s.features[:, order], base_logits=s.base_logits[:, order])
    broken = "the answer depends on the order of a class's support images"
    return broken if differs(asked, asked.logits(turned), asked.logits()) else ""


def copies_do_not_meet(asked: Asked) -> str:
    """Copies that answer at once, in threads, answer as one does, as the class declares."""
    if not asked.method.may_run_in_threads():
        return ""
    expected = asked.logits()

    @torch.no_grad()  # a thread has this setting for itself
    def answer(mine: Method) -> list[Tensor]:
        return [asked.logits(method=mine) for _ in range(2)]

    with ThreadPoolExecutor(COPIES) as pool:
        copies_answers = pool.map(answer, [copy.deepcopy(asked.method) for _ in range(COPIES)])
        wrong = any(differs(asked, logits, expected) for answers in copies_answers for logits in answers)
    return "copies in several threads answer otherwise than one alone, against parallel_copies" if wrong else ""


def learns(asked: Asked) -> str:
    """Every parameter gets a finite gradient."""
    method = copy.deepcopy(asked.method).train()
    parameters = {name: p for name, p in method.named_parameters() if p.requires_grad}
    if not parameters:
        return ""
    with torch.enable_grad():
        logits = asked.logits(method=method)
        if not logits.requires_grad:
            return "no parameter gets a gradient: the logits are detached from all of them"
        classes = logits.shape[-1]
        shown = torch.isfinite(logits[:, 0]).int()  # [E, K + N]
        labels = (shown * torch.arange(1, classes + 1)).argmax(-1, keepdim=True).expand(logits.shape[:2])
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for name, parameter in parameters.items():
        if parameter.grad is None:
            return f"parameter {name} gets no gradient"
        if not torch.isfinite(parameter.grad).all():
            return f"the gradient of parameter {name} is not finite"
    return ""


IN_EVERY_RUN: tuple[Callable[[Asked], str], ...] = (
    leaves_its_input,
    repeats,
    sees_one_episode,
    follows_the_queries,
    sees_one_query,
)
RULES = (*IN_EVERY_RUN, keeps_hidden_classes_out, ignores_the_order_of_support, copies_do_not_meet, learns)


@torch.no_grad()
def check_answers(asked: Asked) -> Tensor:
    """Holds a method's answers against the rules of every run, and returns them, for :func:`check_repeated`.

    Raises:
        UserError: it breaks one; says which.
    """
    asked = asked.looked_at()
    for rule in IN_EVERY_RUN:
        if (broken := rule(asked)) and not _rounding(rule, asked):
            raise UserError(f"method {asked.name!r} breaks the contract: {broken}")
    return asked.logits()


@torch.no_grad()
def check_repeated(asked: Asked, answers: Tensor) -> None:
    """Asks again, after other episodes, what :func:`check_answers` has asked before.

    Raises:
        UserError: the answers are others: the method keeps something between calls.
    """
    asked = asked.looked_at()
    if differs(asked, asked.logits(), answers):
        raise UserError(f"method {asked.name!r} breaks the contract: after the evaluation it answers its first "
                        f"episodes otherwise than before; it keeps something between calls")  # fmt: skip


def _rounding(rule: Callable[[Asked], str], asked: Asked) -> bool:
    """Returns whether a rule that is broken in single precision is kept in double.

    Then large numbers cancelled in the logits, or rounding led a search whose objective is not convex elsewhere.
    """
    try:
        return rule not in (leaves_its_input, repeats) and not rule(asked.exactly())
    except UserError:
        return False  # a method that works in single precision alone


def made_up(name: str, kind: type[Method], options: Mapping[str, Any], shots: int, hide: bool, regular: bool) -> Asked:
    """A method with random parameters and random episodes, in double precision; always the same ones.

    Args:
        hide: whether base classes are hidden, as in meta-training under the shared protocol.
        regular: whether no base class is in the softmax.
    """
    E, N, Q, D, K = 4, 5, 8, 24, 9
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weight, bias, prototypes = (torch.randn(K, *size, dtype=torch.float64) for size in ((D,), (), (D,)))
        within = torch.randn(3 * D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        moments = torch.full((K,), 100.0, dtype=torch.float64), within.T @ within / len(within)
        images = prototypes.repeat_interleave(len(within) // K, 0) + within[: len(within) // K * K]
        of_base = torch.arange(K).repeat_interleave(len(within) // K)

        def make(base: Base) -> Method:
            return make_method(kind, base, N, options).double().eval()

        method = make(Base(weight, 0.1 * bias, prototypes, 9.0, *moments, lambda: (images, of_base)))
        means, labels = torch.randn(E, N, D, dtype=torch.float64), torch.arange(N).repeat_interleave(shots)
        of = labels, torch.arange(Q) % N
        x, q = (means[:, each] + 0.7 * torch.randn(E, len(each), D, dtype=torch.float64) for each in of)
        hidden = torch.zeros(E, K, dtype=torch.bool)
        if hide:
            hidden.scatter_(1, torch.stack([torch.randperm(K)[:3] for _ in range(E)]), True)
    labels = labels.expand(E, -1)
    logits = [F.linear(rows, weight, 0.1 * bias) for rows in (x, q)]
    if regular:
        logits = [torch.full_like(rows, -torch.inf) for rows in logits]
    masked = torch.ones_like(hidden) if regular else hidden
    return Asked(name, method, Support(x, labels, hidden, logits[0]), Query(q, logits[1]), masked, make=make)


@torch.no_grad()
def check_contract(name: str, kind: type[Method], options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every rule that holds for the class, on made-up episodes: what it says, and how the method breaks it, or "".

    Raises:
        UserError: the method gives no answers that could be held against a rule, and for which episodes.
    """
    breaches: dict[Callable[[Asked], str], str] = {}
    for shots, hide, regular in ((1, False, False), (5, False, False), (5, True, False), (5, False, True)):
        case = shots, hide, regular
        try:
            first = made_up(name, kind, options, *case).looked_at()
        except UserError as error:
            with_base = "no base classes" if regular else "hidden base classes" if hide else "all base classes"
            raise UserError(f"{error}; asked with {shots} shot{'s' * (shots > 1)} and {with_base}") from error
        rules = [rule for rule in RULES if rule is not copies_do_not_meet or first.method.may_run_in_threads()]
        for rule in rules:
            if breaches.setdefault(rule, ""):
                continue
            try:  # with episodes of its own, since a method may write into them
                breaches[rule] = rule(replace(made_up(name, kind, options, *case), searches=first.searches))
            except UserError as error:
                breaches[rule] = str(error)
    for rule, broken in breaches.items():
        yield (rule.__doc__ or "").strip().split("\n")[0].rstrip("."), broken
