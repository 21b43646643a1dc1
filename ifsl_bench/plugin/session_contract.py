"""The rules for methods that learn session by session, held against a method's states and answers.

Every run in sessions looks at its first sequences (:func:`check_sessions`); ``ifsl-bench methods --check NAME`` goes
through all rules on made-up sequences (:func:`check_session_rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ifsl_bench.plugin.episode_contract import (
    do_logits_differ,
    holds_in_float64,
    is_prediction_of_search,
    map_tensors,
    method_to_float64,
    rule_in_words,
    to_float64,
)
from ifsl_bench.plugin.method import (
    AdditiveClassifier,
    Method,
    Prediction,
    Query,
    SessionOutput,
    State,
    Support,
    call_method,
    check_prediction,
    name_method_in_errors,
)
from ifsl_bench.plugin.rules import make_random_probe
from ifsl_bench.solvers.tree import concatenate_trees, list_leaves
from ifsl_bench.utils.errors import UserError


@dataclass(frozen=True)
class SessionLearner:
    """A method with sessions that it has to learn one after the other."""

    method: Method
    support_by_session: Sequence[Support]  # of two sessions at least
    all_queries: Query  # of classes of the first two
    has_inner_search: bool  # whether an inner search finds its answers, to its own tolerance

    def learn_sessions(self, supports: Sequence[Support] | None = None) -> State:
        """Return the state that the method carries on after these sessions, the first two where not given."""
        state: State = None
        for support in supports or self.support_by_session[:2]:
            state = call_method(SessionOutput, self.method.learn, support, state).state
        return state

    def logits(self, supports: Sequence[Support] | None = None) -> Tensor:
        """Return the logits [E, Q, C] after these sessions."""
        return call_method(Prediction, self.method.answer, self.learn_sessions(supports), self.all_queries).logits

    def select_sequence(self, sequence: int) -> SessionLearner:
        """Return the sessions of one sequence alone."""
        return self._map_all_tensors(lambda x: x[sequence : sequence + 1])

    def as_float64(self) -> SessionLearner:
        """Return the same sessions in double precision."""
        return replace(self._map_all_tensors(to_float64), method=method_to_float64(self.method))

    def _map_all_tensors(self, change: Callable[[Tensor], Tensor]) -> SessionLearner:
        return replace(
            self,
            support_by_session=[map_tensors(x, change) for x in self.support_by_session],
            all_queries=map_tensors(self.all_queries, change),
        )


def find_state_change_fault(learner: SessionLearner) -> str | None:
    """Check that learning a session leaves the state before it as it is."""
    first = learner.learn_sessions(learner.support_by_session[:1])
    before = [x.clone() for x in list_leaves(first) if x is not None]
    learner.method.learn(learner.support_by_session[1], first)
    after = [x for x in list_leaves(first) if x is not None]
    changed = not all(map(torch.equal, before, after))
    return "learning a session changes the state of the sessions before it" if changed else None


def find_state_size_fault(learner: SessionLearner) -> str | None:
    """Check that the state is as large for one support image of a class as for more."""
    lean = learner.learn_sessions(
        [first_image_of_each_class(support, learner.method.ways) for support in learner.support_by_session]
    )
    states = lean, learner.learn_sessions(learner.support_by_session)
    sizes = [[None if x is None else x.shape for x in list_leaves(state)] for state in states]
    return None if sizes[0] == sizes[1] else "its state grows with the number of support images"


def find_stale_state_fault(learner: SessionLearner) -> str | None:
    """Check that an answer comes from the state that is given, whatever was learned since."""
    state = learner.learn_sessions()
    before = learner.method.answer(state, learner.all_queries).logits
    learner.learn_sessions(learner.support_by_session[1::-1])
    after = learner.method.answer(state, learner.all_queries).logits
    broken = "the answer from a state changes when other sessions are learned: it keeps something beside the state"
    return broken if do_logits_differ(after, before, learner.has_inner_search) else None


def find_sequence_dependence_fault(learner: SessionLearner) -> str | None:
    """Check that the answer to a sequence does not depend on the others in its batch."""
    whole = learner.logits()
    alone = torch.cat([learner.select_sequence(n).logits() for n in range(len(whole))])
    broken = "the answer to a sequence depends on the other sequences in its batch"
    return broken if do_logits_differ(alone, whole, learner.has_inner_search) else None


def find_first_session_fault(learner: SessionLearner) -> str | None:
    """Check that one session is answered as the episode of the same support set."""
    episode = learner.method(learner.support_by_session[0], learner.all_queries).logits
    broken = "one session is answered otherwise than the same episode"
    return (
        broken
        if do_logits_differ(learner.logits(learner.support_by_session[:1]), episode, learner.has_inner_search)
        else None
    )


def find_session_order_fault(learner: SessionLearner) -> str | None:
    """Check that a method that declares so answers alike in whatever order sessions come."""
    if not learner.method.order_free:
        return None
    ways = learner.method.ways
    turned = learner.logits(learner.support_by_session[1::-1])
    base, first, second = turned.split([turned.shape[-1] - 2 * ways, ways, ways], -1)
    broken = "the answer depends on the order of sessions, against order_free"
    return (
        broken
        if do_logits_differ(torch.cat([base, second, first], -1), learner.logits(), learner.has_inner_search)
        else None
    )


def find_one_pass_fault(learner: SessionLearner) -> str | None:
    """Check that an AdditiveClassifier learns and answers sessions at once, as it declares, as it does one by one."""
    method = learner.method
    if not isinstance(method, AdditiveClassifier):
        return None
    query, states = method.transform_query(learner.all_queries), learner.learn_sessions()
    expected = torch.cat([method.class_logits(state, query) for state in states], -1)
    if not method.uses_earlier_logits:
        states = [
            call_method(SessionOutput, method.learn_classes, support, None).state
            for support in learner.support_by_session[:2]
        ]
    parts = [concatenate_trees(states)] if method.per_class_state else states
    at_once = torch.cat([method.class_logits(state, query) for state in parts], -1)
    broken = "sessions learned and answered at once have other logits than one by one, against what it declares"
    return broken if do_logits_differ(at_once, expected, learner.has_inner_search) else None


STATELESS_ANSWER_RULES = (
    find_stale_state_fault,
    find_sequence_dependence_fault,
    find_first_session_fault,
    find_session_order_fault,
    find_one_pass_fault,
)
FIRST_SEQUENCES_TEXT = "first sequences"
SESSION_RULES = (find_state_change_fault, find_state_size_fault, *STATELESS_ANSWER_RULES)


@torch.no_grad()
def check_sessions(name: str, method: Method, supports: Sequence[Support], query: Query) -> None:
    """Check a method that learns session by session against the rules of sessions.

    Args:
        name: the method's name in errors.
        method: to be checked.
        supports: of the sessions, two at least.
        query: of the first two.

    Raises:
        UserError: it breaks one; the message names it.
    """
    with name_method_in_errors(name, method):
        episode = method(supports[0], query)
        hidden, queries = supports[0].hidden, query.features.shape[1]
        check_prediction(name, episode, hidden, queries, method.ways, FIRST_SEQUENCES_TEXT)
        learner = SessionLearner(method, supports, query, is_prediction_of_search(episode))
        answer = call_method(Prediction, method.answer, learner.learn_sessions(), query)
        check_prediction(name, answer, hidden, queries, 2 * method.ways, f"{FIRST_SEQUENCES_TEXT} after session 2")
        for rule in SESSION_RULES:
            if (broken := rule(learner)) and not (rule in STATELESS_ANSWER_RULES and holds_in_float64(rule, learner)):
                raise UserError(f"method {name!r} breaks the contract: {broken}")


@torch.no_grad()
def check_session_rules(name: str, kind: type[Method], options: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield every rule of sessions, in words, and how the method breaks it on made-up sequences, or None.

    There are none where the method only defines how it answers an episode.

    Args:
        name: the method's name in errors.
        kind: its class.
        options: of its constructor.

    Raises:
        UserError: it gives no answers that could be checked.
    """
    if kind.keeps_supports():
        return
    probe = make_random_probe(name, kind, options, 5, False, False)
    whole = probe.support
    sessions = [map_tensors(whole, partial(torch.roll, shifts=t, dims=0)) for t in range(len(whole.features))]
    applies = {
        find_session_order_fault: probe.method.order_free,
        find_one_pass_fault: isinstance(probe.method, AdditiveClassifier),
    }
    with name_method_in_errors(name, probe.method):
        learner = SessionLearner(probe.method, sessions, probe.query, is_prediction_of_search(probe.answer()))
        found = {rule: rule(learner) for rule in SESSION_RULES if applies.get(rule, True)}
    for rule, broken in found.items():
        yield rule_in_words(rule), broken


def first_image_of_each_class(support: Support, ways: int) -> Support:
    """Return the first image of each class.

    Args:
        support: of a session, the images of a class one after the other.
        ways: number of its classes.
    """
    at = torch.arange(0, support.features.shape[1], support.features.shape[1] // ways)
    return Support(support.features[:, at], support.labels[:, at], support.hidden, support.base_logits[:, at])
