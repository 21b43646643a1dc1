"""All rules of the contract of :class:`~ifsl_bench.plugin.method.Method`.

``ifsl-bench methods --check`` checks them on made-up episodes. The first line of a rule's docstring is what it prints.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.plugin.adapting import make_small_base_for_checks
from ifsl_bench.plugin.episode_contract import (
    RULES_IN_EVERY_RUN,
    ContractProbe,
    EpisodeRule,
    describe_ties,
    do_logits_differ,
    find_input_change_fault,
    rule_in_words,
)
from ifsl_bench.plugin.method import Base, Method, Query, Support, format_failure, name_method_in_errors
from ifsl_bench.plugin.options import add_example_extras, make_method, remake_method
from ifsl_bench.utils.errors import UserError, format_class_and_message

N_PARALLEL_COPIES = 3  # that answer at once, and twice as many answers


def find_hidden_class_fault(probe: ContractProbe) -> str | None:
    """Check that the values of a hidden base class change no answer about the others."""
    hidden = probe.support.hidden
    if not hidden.any():
        return None
    hidden_class = int(hidden.any(0).nonzero()[0])
    there = hidden[:, hidden_class]  # [E] episodes that hide it
    base = copy.deepcopy(probe.method.base)
    with torch.no_grad():
        for tensor in (base.weight, base.prototypes):
            tensor[hidden_class] += 5.0
        # Made anew, since it may keep what it has computed from the base classifier.
        method = remake_method(probe.method, base, probe.method.ways).double().eval()
        for parameter, before in zip(method.parameters(), probe.method.parameters(), strict=True):
            parameter.copy_(before)
            if parameter.shape == base.weight.shape:  # a row for each base class
                parameter[hidden_class] += 5.0
    shift = 5.0 * (torch.arange(hidden.shape[1]) == hidden_class)
    s = replace(probe.support, base_logits=probe.support.base_logits + shift)
    q = replace(probe.query, base_logits=probe.query.base_logits + shift)
    # What all logits of a query have in common tells nothing: the origin that features are seen from, for one.
    shifted = replace(probe, support=s, query=q, method=method)
    expected, found = (question.logits()[there].log_softmax(-1) for question in (probe, shifted))
    return (
        "a hidden base class leaves a trace in the answers"
        if do_logits_differ(found, expected, probe.has_inner_search)
        else None
    )


def find_support_order_fault(probe: ContractProbe) -> str | None:
    """Check that the images of a class come in no particular order."""
    s, ways = probe.support, probe.method.ways
    order = torch.arange(s.features.shape[1]).view(ways, -1).flip(1).flatten()
    turned = replace(s, features=s.features[:, order], base_logits=s.base_logits[:, order])
    broken = "the answer depends on the order of a class's support images"
    return (
        broken
        if do_logits_differ(replace(probe, support=turned).logits(), probe.logits(), probe.has_inner_search)
        else None
    )


def find_label_order_fault(probe: ContractProbe) -> str | None:
    """Check that the labels of an episode are in no particular order, unless the class declares label_slots."""
    if probe.method.label_slots or probe.has_inner_search:  # which may then find another minimum
        return None
    s, ways = probe.support, probe.method.ways
    order = torch.arange(s.features.shape[1]).view(ways, -1).flip(0).flatten()
    turned = replace(s, features=s.features[:, order], base_logits=s.base_logits[:, order])
    base, novel = replace(probe, support=turned).logits().tensor_split([-ways], -1)
    broken = "the answers about a class depend on which label it has"
    expected = probe.logits()
    return broken if do_logits_differ(torch.cat([base, novel.flip(-1)], -1), expected, searches=False) else None


def find_parallel_copies_fault(probe: ContractProbe) -> str | None:
    """Check that copies that answer at once, in threads, answer as one does, as the class declares."""
    if not probe.method.may_run_in_threads():
        return None
    expected = probe.logits()

    @torch.no_grad()  # a thread has this setting for itself
    def answer(mine: Method) -> list[Tensor]:
        return [replace(probe, method=mine).logits() for _ in range(2)]

    try:
        copies = [copy.deepcopy(probe.method) for _ in range(N_PARALLEL_COPIES)]
    except Exception as error:  # of anybody's code
        return f"it cannot be copied, against parallel_copies: {format_class_and_message(error)}"
    with ThreadPoolExecutor(N_PARALLEL_COPIES) as pool:
        copies_answers = pool.map(answer, copies)
        wrong = any(
            do_logits_differ(logits, expected, probe.has_inner_search)
            for answers in copies_answers
            for logits in answers
        )
    return "copies in several threads answer otherwise than one alone, against parallel_copies" if wrong else None


def find_missing_images_fault(probe: ContractProbe) -> str | None:
    """Check that without images of base classes the method works, or a UserError says that it needs them."""
    base, kind = replace(probe.method.base, images=None), type(probe.method)
    try:
        method = kind(base, probe.method.ways, **probe.method.__dict__.get("_made_with", {})).double().eval()
        method(probe.support, probe.query)
    except UserError:
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"it fails where Base.images is None, as of features that are given: {format_failure(error, kind, base)}"
    return None


def find_gradient_fault(probe: ContractProbe) -> str | None:
    """Check that every parameter gets a finite gradient."""
    method = probe.method.train()
    parameters = {name: p for name, p in method.named_parameters() if p.requires_grad}
    if not parameters:
        return None
    with torch.enable_grad():
        logits = replace(probe, method=method).logits()
        if not logits.requires_grad:
            return "no parameter gets a gradient: the logits are detached from all of them"
        classes = logits.shape[-1]
        shown = torch.isfinite(logits[:, 0]).int()  # [E, K + N]
        labels = (shown * torch.arange(1, classes + 1)).argmax(-1, keepdim=True).expand(logits.shape[:2])
        with name_method_in_errors(probe.name_in_errors, method):
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for name, parameter in parameters.items():
        if parameter.grad is None:
            return f"parameter {name} gets no gradient"
        if not torch.isfinite(parameter.grad).all():
            return f"the gradient of parameter {name} is not finite"
    return None


EPISODE_RULES: tuple[EpisodeRule, ...] = (
    *RULES_IN_EVERY_RUN,
    find_hidden_class_fault,
    find_support_order_fault,
    find_label_order_fault,
    find_parallel_copies_fault,
    find_missing_images_fault,
    find_gradient_fault,
)


def make_random_probe(
    name: str, kind: type[Method], options: Mapping[str, Any], shots: int, hide: bool, regular: bool
) -> ContractProbe:
    """Make a method with random parameters and random episodes, in double precision; always the same ones.

    Args:
        name: the method's name in errors.
        kind: its class.
        options: of its constructor.
        shots: support images of each class.
        hide: whether base classes are hidden, as in meta-training under the shared protocol.
        regular: whether no base class is in the softmax.
    """
    E, N, Q, D, K = 4, 5, 8, 24, 9
    if kind.sees != "features":
        return _make_image_probe(name, kind, options, shots, hide, regular)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weight, bias, prototypes = (torch.randn(K, *size, dtype=torch.float64) for size in ((D,), (), (D,)))
        within = torch.randn(3 * D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        moments = torch.full((K,), 100.0, dtype=torch.float64), within.T @ within / len(within)
        images = prototypes.repeat_interleave(len(within) // K, 0) + within[: len(within) // K * K]
        of_base = torch.arange(K).repeat_interleave(len(within) // K)
        base = Base(weight, 0.1 * bias, prototypes, 9.0, *moments, lambda: (images, of_base))
        base = add_example_extras(base, kind)
        method = make_method(kind, base, N, options).double().eval()
        means, labels = torch.randn(E, N, D, dtype=torch.float64), torch.arange(N).repeat_interleave(shots)
        of = labels, torch.arange(Q) % N
        x, q = (means[:, each] + 0.7 * torch.randn(E, len(each), D, dtype=torch.float64) for each in of)
        logits = [F.linear(rows, weight, 0.1 * bias) for rows in (x, q)]
        return _make_probe(name, method, (x, q), logits, hide, regular)


def _make_image_probe(
    name: str, kind: type[Method], options: Mapping[str, Any], shots: int, hide: bool, regular: bool
) -> ContractProbe:
    """Make a probe of a method that sees images or maps, in rows; arguments are those of :func:`make_random_probe`."""
    E, N, Q = 4, 5, 8
    base = make_small_base_for_checks().to(dtype=torch.float64)
    assert base.network is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = make_method(kind, base, N, options).double().eval()
        centres, of = (
            torch.randint(40, 216, (E, N, 64)),
            (torch.arange(N).repeat_interleave(shots), torch.arange(Q) % N),
        )
        rows = [(centres[:, each] + torch.randint(-40, 40, (E, len(each), 64))).byte() for each in of]
        features = [base.network.network(base.network.normalise(part.flatten(0, 1))) for part in rows]
        logits = [F.linear(part, base.weight, base.bias).unflatten(0, (E, -1)) for part in features]
        return _make_probe(name, method, (rows[0], rows[1]), logits, hide, regular)


def _make_probe(
    name: str, method: Method, rows: tuple[Tensor, Tensor], logits: Sequence[Tensor], hide: bool, regular: bool
) -> ContractProbe:
    """Make a probe from rows of supports and queries with their base logits; some base classes are hidden at random."""
    (supports, queries), (E, S, K) = rows, logits[0].shape
    hidden = torch.zeros(E, K, dtype=torch.bool)
    if hide:
        hidden.scatter_(1, torch.stack([torch.randperm(K)[:3] for _ in range(E)]), True)
    if regular:
        logits = [torch.full_like(part, -torch.inf) for part in logits]
    labels = torch.arange(method.ways).repeat_interleave(S // method.ways).expand(E, -1)
    masked = torch.ones_like(hidden) if regular else hidden
    return ContractProbe(name, method, Support(supports, labels, hidden, logits[0]), Query(queries, logits[1]), masked)


@torch.no_grad()
def check_contract(name: str, kind: type[Method], options: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield every rule that holds for the class, in words, and how the method breaks it on made-up episodes, or None.

    Args:
        name: the method's name in errors.
        kind: its class.
        options: of its constructor.

    Raises:
        UserError: the method gives no answers that could be checked; the message names the episodes.
    """
    breaches: dict[EpisodeRule, str | None] = {}
    for shots, hide, regular in ((1, False, False), (5, False, False), (5, True, False), (5, False, True)):
        case = shots, hide, regular
        try:
            if broken := find_input_change_fault(
                make_random_probe(name, kind, options, *case)
            ):  # it would spoil the other rules too
                yield rule_in_words(find_input_change_fault), broken
                return
            first = make_random_probe(name, kind, options, *case).with_search_flag()
        except UserError as error:
            with_base = "no base classes" if regular else "hidden base classes" if hide else "all base classes"
            raise UserError(f"{error}; asked with {shots} shot{'s' * (shots > 1)} and {with_base}") from error
        rules = [
            rule
            for rule in EPISODE_RULES
            if rule is not find_parallel_copies_fault or first.method.may_run_in_threads()
        ]
        for rule in rules:
            if breaches.setdefault(rule, None):
                continue
            try:  # with episodes of its own, since a method may write into them
                probe = replace(make_random_probe(name, kind, options, *case), has_inner_search=first.has_inner_search)
                with name_method_in_errors(name, probe.method):
                    breaches[rule] = rule(probe)
            except UserError as error:
                breaches[rule] = str(error)
    for rule, broken in breaches.items():
        yield rule_in_words(rule), broken


@torch.no_grad()
def describe_ties_of_method(name: str, kind: type[Method], options: Mapping[str, Any]) -> str | None:
    """Return a remark where a method's logits on made-up episodes are of low precision, or many are equal.

    Args:
        name: the method's name in errors.
        kind: its class.
        options: of its constructor.
    """
    logits = make_random_probe(name, kind, options, 5, False, False).logits()
    if logits.dtype in (torch.float16, torch.bfloat16):
        return f"its logits are {logits.dtype}, where classes tie and the first of them is taken; return float32"
    return describe_ties(logits)
