"""The rules for methods that see images, held against what they learn and answer.

Every run looks at its first two episodes or sequences (:func:`check_adapting_method_on_probe`); ``ifsl-bench methods
--check NAME`` goes through all rules on made-up images (:func:`check_adapting_rules`). They are few, since each learns
a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.plugin.adapting import Adapting, make_small_base_for_checks
from ifsl_bench.plugin.episode_contract import ContractProbe, do_logits_differ, rule_in_words
from ifsl_bench.plugin.method import Query, State, Support, check_prediction, masked_logits, name_method_in_errors
from ifsl_bench.plugin.options import make_method, remake_method
from ifsl_bench.plugin.session_contract import first_image_of_each_class
from ifsl_bench.solvers.tree import list_leaves, tree_map
from ifsl_bench.utils.errors import UserError

ODD_BATCH_SIZE = 7  # images in a batch, where batches are compared


@dataclass(frozen=True)
class AdaptingLearner:
    """A method that sees images, with two sessions that it learns one after the other.

    Attributes:
        name_in_errors: the method's name in errors.
        support_of_both_sessions: of both sessions, of one sequence.
        first_session_query: of the classes of the first.
    """

    name_in_errors: str
    method: Adapting
    support_of_both_sessions: tuple[Support, Support]
    first_session_query: Query

    @cached_property
    def state_after_first_session(self) -> State:
        """The state after the first session."""
        return self.learn_session(0)

    @cached_property
    def state_after_second_session(self) -> State:
        """The state after the second session, learned from a copy of the first."""
        return self.learn_session(1, tree_map(torch.clone, self.state_after_first_session))

    def learn_session(self, session: int, before: State | None = None) -> State:
        """Return the state after a session, learned anew.

        Args:
            session: 0 or 1.
            before: the state before it.
        """
        return self.method.learn(self.support_of_both_sessions[session], before).state

    def logits(self, state: State) -> Tensor:
        """Return logits [1, Q, C], -inf for hidden base classes, and check their shape and that they are finite."""
        hidden, novel = self.support_of_both_sessions[0].hidden, len(state["sessions"]) * self.method.ways
        queries = self.first_session_query.features.shape[1]
        prediction = check_prediction(
            self.name_in_errors, self.method.answer(state, self.first_session_query), hidden, queries, novel
        )
        return masked_logits(prediction, hidden)


def find_state_or_logits_form_fault(learner: AdaptingLearner) -> str | None:
    """Check that states are trees of finite tensors, and logits are those of all classes met so far."""
    classes = learner.support_of_both_sessions[0].hidden.shape[1]
    before = learner.method.base_logits(learner.first_session_query)
    if before.shape[-1] != classes:
        return f"before any session it answers with {before.shape[-1]} classes, expected the {classes} base classes"
    for state in (learner.state_after_first_session, learner.state_after_second_session):
        learner.logits(state)
    return None


def find_state_change_fault(learner: AdaptingLearner) -> str | None:
    """Check that learning a session leaves the state before it as it is."""
    before = [x.clone() for x in list_leaves(learner.state_after_first_session) if x is not None]
    learner.learn_session(1, learner.state_after_first_session)
    changed = not _tensors_equal(before, list_leaves(learner.state_after_first_session))
    return "learning a session changes the state of the session before it" if changed else None


def find_repeat_fault(learner: AdaptingLearner) -> str | None:
    """Check that the same images, learned again, give the same state."""
    same = _tensors_equal(list_leaves(learner.learn_session(0)), list_leaves(learner.state_after_first_session))
    return None if same else "the same session, learned again, gives another state: it keeps or draws something else"


def find_batch_dependence_fault(learner: AdaptingLearner) -> str | None:
    """Check that the answer to an image does not depend on others in its batch, unless the class is transductive."""
    if learner.method.transductive:
        return None
    rows, state = learner.first_session_query.features[0], learner.state_after_first_session
    of_one = learner.method.state_of_sequence(state, 0)
    order = torch.arange(len(rows) - 1, -1, -1, device=rows.device)
    with torch.no_grad():
        turned = learner.method.logits_of_rows(of_one, rows[order], ODD_BATCH_SIZE)[order]
        plain = learner.method.logits_of_rows(of_one, rows, len(rows))
    if not do_logits_differ(turned[None], plain[None], searches=False):
        return None
    return (
        "the answer to an image depends on the others in its batch, as with batch norm in training mode; call eval() "
        "on the network, or declare transductive = True"
    )


def find_stale_state_fault(learner: AdaptingLearner) -> str | None:
    """Check that an answer comes from the state that is given, whatever was learned since."""
    before = learner.logits(learner.state_after_first_session)
    learner.learn_session(1, learner.state_after_first_session)
    differ = do_logits_differ(learner.logits(learner.state_after_first_session), before, searches=False)
    return "the answer from a state changes when another session is learned" if differ else None


def find_state_size_fault(learner: AdaptingLearner) -> str | None:
    """Check that the state is as large for one support image of a class as for more, unless the class keeps some."""
    if learner.method.keeps != "nothing":
        return None
    one = first_image_of_each_class(learner.support_of_both_sessions[0], learner.method.ways)
    states = learner.method.learn(one).state, learner.state_after_first_session
    sizes = [[None if x is None else x.shape for x in list_leaves(state)] for state in states]
    return None if sizes[0] == sizes[1] else 'its state grows with the number of support images, and keeps is "nothing"'


def find_hidden_class_fault(learner: AdaptingLearner) -> str | None:
    """Check that the values of a hidden base class change no answer about the others."""
    hidden = torch.zeros_like(learner.support_of_both_sessions[0].hidden)
    hidden[:, 1] = True
    answers = []
    for shift in (0.0, 5.0):
        base = learner.method.base
        rows = shift * hidden[0, :, None].to(base.weight)
        other = replace(base, weight=base.weight + rows, prototypes=base.prototypes + rows)
        method = remake_method(learner.method, other, learner.method.ways)
        method.load_state_dict(learner.method.state_dict())
        assert isinstance(method, Adapting)
        changed = replace(learner.support_of_both_sessions[0], hidden=hidden)
        shifted = replace(learner, method=method.eval(), support_of_both_sessions=(changed, changed))
        answers.append(shifted.logits(shifted.state_after_first_session).log_softmax(-1))
    differ = do_logits_differ(answers[1], answers[0], searches=False)
    return "a hidden base class leaves a trace in the answers" if differ else None


AdaptingRule = Callable[[AdaptingLearner], str | None]  # returns how a method breaks it; None where it does not
RULES_OF_A_RUN: tuple[AdaptingRule, ...] = (
    find_state_or_logits_form_fault,
    find_state_change_fault,
    find_repeat_fault,
    find_batch_dependence_fault,
    find_stale_state_fault,
)
RULES: tuple[AdaptingRule, ...] = (*RULES_OF_A_RUN, find_state_size_fault, find_hidden_class_fault)


def _tensors_equal(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    """Return whether tensors are equal, bit by bit, leaving out what is None."""
    ours, theirs = ([x for x in part if x is not None] for part in (first, second))
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@torch.no_grad()
def check_adapting_method_on_probe(probe: ContractProbe) -> Tensor:
    """Check a method that sees images on a run's first episodes, and return its answer to the first of them.

    Args:
        probe: with one or two episodes; the second stands for the second session of the first.

    Raises:
        UserError: it breaks a rule; the message names it.
    """
    assert isinstance(probe.method, Adapting)
    parts = probe.select_episode(0), probe.select_episode(len(probe.masked_base_classes) - 1)
    learner = AdaptingLearner(probe.name_in_errors, probe.method, (parts[0].support, parts[1].support), parts[0].query)
    with name_method_in_errors(probe.name_in_errors, probe.method, probe.method.base):
        for rule in RULES_OF_A_RUN:
            if broken := rule(learner):
                raise UserError(f"method {probe.name_in_errors!r} breaks the contract: {broken}")
    return parts[0].logits()


def make_random_learner(name: str, kind: type[Adapting], options: Mapping[str, Any]) -> AdaptingLearner:
    """Make a method with a small network and two sessions of made-up images; always the same ones.

    Args:
        name: the method's name in errors.
        kind: its class.
        options: of its constructor.
    """
    ways, shots, queries = 3, 4, 4 * ODD_BATCH_SIZE
    base = make_small_base_for_checks()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = make_method(kind, base, ways, options).eval()
        assert isinstance(method, Adapting)
        labels = torch.arange(ways).repeat_interleave(shots)
        centres = torch.randint(40, 216, (2, ways, 64))
        images = [centre[labels] + torch.randint(-40, 40, (len(labels), 64)) for centre in centres]
        asked = centres[0][torch.arange(queries) % ways] + torch.randint(-40, 40, (queries, 64))
    hidden = torch.zeros(1, len(base.weight), dtype=torch.bool)
    assert base.network is not None

    def base_logits(rows: Tensor) -> Tensor:
        assert base.network is not None
        with torch.no_grad():
            return F.linear(base.network.network(base.network.normalise(rows)), base.weight, base.bias)[None]

    first, second = (Support(rows.byte()[None], labels[None], hidden, base_logits(rows.byte())) for rows in images)
    return AdaptingLearner(name, method, (first, second), Query(asked.byte()[None], base_logits(asked.byte())))


@torch.no_grad()
def check_adapting_rules(
    name: str, kind: type[Adapting], options: Mapping[str, Any]
) -> Iterator[tuple[str, str | None]]:
    """Yield every rule for methods that see images, in words, and how the method breaks it on made-up images, or None.

    Args:
        name: the method's name in errors.
        kind: its class.
        options: of its constructor.

    Raises:
        UserError: it learns or answers nothing that could be checked.
    """
    learner = make_random_learner(name, kind, options)
    for rule in RULES:
        with name_method_in_errors(name, learner.method, learner.method.base):
            broken = rule(learner)
        yield rule_in_words(rule), broken
        if broken and rule is find_state_or_logits_form_fault:  # it would spoil the other rules too
            return
