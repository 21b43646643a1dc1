"""Sequences of sessions against a slow one-at-a-time version in plain integers, and against the protocol."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from ifsl_bench.protocols.sampling.draws import derive_seed
from ifsl_bench.protocols.sampling.sequences import SequencePoolStarts, SequenceSampler
from ifsl_bench.protocols.tasks.task import SessionSpec
from ifsl_bench.utils.errors import UserError
from tests.protocols.test_episodes import shuffle_head, words


def starts(*counts: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


NOVEL, BASE = starts(13, 20, 11, 40, 17, 12, 30), starts(9, 3, 8, 4, 6)
SUPPORT = starts(5, 7, 6, 5, 9, 5, 8)
SPEC = SessionSpec(count=3, ways=2, orders=6, supports=3)
STREAM = ("t-sessions", "test", 0)
ORDER = np.array([3, 1, 6, 0, 2, 5])
CASES = {
    "drawn": {"pools": SequencePoolStarts(NOVEL, BASE)},
    "odd": {"pools": SequencePoolStarts(NOVEL, BASE), "parity": "odd"},
    "hidden": {"pools": SequencePoolStarts(NOVEL, NOVEL), "hide": True},
    "apart": {"pools": SequencePoolStarts(NOVEL, BASE, SUPPORT)},
    "listed": {"pools": SequencePoolStarts(NOVEL, BASE, SUPPORT), "order": ORDER},
}
SHOTS = 5


def slow_sequence(number, pools, hide=False, parity=None, order=None):
    """Classes, supports and queries of each class, and the base queries with their labels."""
    key = derive_seed("sequences", *STREAM) - (1 << 62)
    count = SPEC.count * SPEC.ways
    base = [
        (row, label)
        for label, (a, b) in enumerate(itertools.pairwise(pools.base_starts))
        for row in range(a, b)
        if parity is None or (row - a) % 2 == {"even": 0, "odd": 1}[parity]
    ]
    if order is None:
        order = shuffle_head(words(key, number // SPEC.supports, 1, count), len(pools.novel_starts) - 1)
    source = pools.novel_starts if pools.support_starts is None else pools.support_starts
    queries = len(base) // (len(pools.base_starts) - 1)
    if hide:
        base = [(row, label) for row, label in base if label not in order]
        queries = min(queries, 11 - SHOTS)  # 11 images has the smallest class
    each = SHOTS + (queries if pools.support_starts is None else 0)
    drawn, support, query = words(key, number, 2, count * each), [], []
    for way, c in enumerate(order):
        rows = shuffle_head(drawn[way * each : (way + 1) * each], int(source[c + 1] - source[c]))
        if CASES["listed"]["order"] is order:
            rows = list(range(SHOTS))
        rows = [int(source[c]) + r for r in rows]
        support.append(rows[:SHOTS])
        query.append(
            rows[SHOTS:]
            if pools.support_starts is None
            else list(range(pools.novel_starts[c], pools.novel_starts[c + 1]))
        )
    return list(order), support, query, base


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_slow_version(name):
    sampler = SequenceSampler(STREAM, SPEC, SHOTS, **CASES[name])
    drawn = sampler.sample(2, 14)
    for e in range(14):
        classes, support, query, base = slow_sequence(2 + e, **CASES[name])
        assert drawn.classes[e].tolist() == classes
        assert drawn.support[e].tolist() == support
        assert [[row for row in rows if row >= 0] for rows in drawn.query[e].tolist()] == query
        mask = ~drawn.hidden_classes[e][sampler.base_labels]
        mine = zip(sampler.base_query[mask].tolist(), sampler.base_labels[mask].tolist(), strict=True)
        assert list(mine) == base


def test_an_order_comes_with_several_support_sets():
    sampler = SequenceSampler(STREAM, SPEC, SHOTS, SequencePoolStarts(NOVEL, BASE))
    drawn = sampler.sample(0, SPEC.n_sequences)
    orders = drawn.classes.view(SPEC.orders, SPEC.supports, -1)
    assert (orders == orders[:, :1]).all()
    assert len(orders[:, 0].unique(dim=0)) == SPEC.orders
    assert len(drawn.support.flatten(1).unique(dim=0)) == SPEC.n_sequences
    assert (orders[:, 0].numpy() == sampler.describe_novel_class_draws(SPEC.n_sequences).to_array()).all(), (
        "the NumPy version of the draws"
    )
    for e in range(SPEC.n_sequences):
        assert len(set(drawn.classes[e].tolist())) == 6
        images = torch.cat([drawn.support[e].flatten(), drawn.query[e].flatten()]).tolist()
        assert len(set(images)) == len(images), "a query is no support"


def test_digest():
    """Over base queries and labels, then classes, supports and queries of each sequence, as little-endian int64."""
    sampler = SequenceSampler(STREAM, SPEC, SHOTS, **CASES["apart"])
    sha = hashlib.sha256()
    for rows in (sampler.base_query, sampler.base_labels):
        sha.update(np.array(rows.tolist(), "<i8").tobytes())
    for e in range(7):
        classes, support, query, _ = slow_sequence(e, **CASES["apart"])
        query = [rows + [-1] * (40 - len(rows)) for rows in query]
        sha.update(np.array([*classes, *np.ravel(support), *np.ravel(query)], "<i8").tobytes())
    assert sampler.digest(7, batch=3) == sampler.digest(7) == sha.hexdigest()
    assert SequenceSampler(("t-sessions", "test", 1), SPEC, SHOTS, **CASES["apart"]).digest(7) != sha.hexdigest()


def test_validation_takes_fewer_sessions_where_classes_are_few():
    spec = SessionSpec(count=8, ways=5)
    assert spec.limited_to_classes(22).count == 4, "of tiny-features' 22 classes"
    assert spec.limited_to_classes(1000) == spec
    assert spec.hiding_base_classes(60).count == 4, "60 base and 40 novel classes: 24 of 60 may hide"
    assert SessionSpec(count=10, ways=10).hiding_base_classes(100).count == 5, "CUB"


NAMES = tuple("abcdefg")
NAMED = SequencePoolStarts(NOVEL, BASE, pool_names=("novel/test", "base/test", "novel/support"), novel_classes=NAMES)


@pytest.mark.parametrize(
    ("spec", "pools", "message"),
    [
        ({"count": 4}, {},
         r"t-sessions need 8 novel classes \(4 sessions of 2\), novel/test has 7; --sessions 3 would do here"),
        ({"queries": 7}, {},
         r"need 12 images of a novel class \(5 shots \+ 7 queries\), class 'c' of novel/test has 11; --queries 6"),
        ({}, {"novel_starts": starts(13, 20, 4, 40, 17, 12, 30)},
         r"class 'c' .* has 4; --shots 1 --queries 3 would do here$"),
        ({}, {"support_starts": starts(5, 7, 6, 4, 9, 5, 8)},
         r"need 5 images of a novel class for supports, class 'd' of novel/support has 4; --shots 4"),
        ({"queries": 0}, {}, "have no queries of novel classes; --queries must be at least 1"),
        ({}, {"base_starts": starts(9, 0, 3), "base_classes": ("x", "y", "z")},
         "need queries of every class, class 'y' of base/test has none"),
        ({}, {"novel_starts": starts(9, 1, 3, 4, 5, 0, 7), "support_starts": SUPPORT},
         "need queries of every class, class 'f' of novel/test has none"),
        ({}, {"base_classes": ("x", "b", "z", "u", "v")},
         r"class 'b' of t-sessions is both a base class \(base/test\) and a novel one \(novel/test\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_said_in_one_line(spec, pools, message):
    with pytest.raises(UserError, match=message) as raised:
        SequenceSampler(STREAM, msgspec.structs.replace(SPEC, **spec), SHOTS, replace(NAMED, **pools))
    assert "\n" not in str(raised.value)


def test_hidden_classes_leave_base_classes():
    pools = SequencePoolStarts(starts(*[20] * 6), starts(*[20] * 6))
    with pytest.raises(UserError, match=r"hide 6 of 6 base classes, and none is left; --sessions 1 would do here"):
        SequenceSampler(STREAM, SPEC, SHOTS, pools, hide=True)
