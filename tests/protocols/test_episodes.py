"""Episodes against a slow one-at-a-time version in plain integers, and against the protocol."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scipy import stats

from ifsl_bench.protocols.sampling.draws import ClassDraws, derive_seed, derive_stream_key
from ifsl_bench.protocols.sampling.episodes import EpisodeSampler
from ifsl_bench.protocols.tasks.task import EpisodeSpec
from ifsl_bench.utils.errors import UserError

MASK = (1 << 64) - 1
SIZES_NOVEL = np.concatenate([[0], np.cumsum([13, 20, 11, 40, 17, 12, 30])])
SIZES_BASE = np.concatenate([[0], np.cumsum([9, 31, 8, 15, 22, 12, 7])])


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def words(key: int, episode: int, purpose: int, count: int) -> list[int]:
    golden = 0x9E3779B97F4A7C15
    stream = mix((mix((episode * golden + key) & MASK) + purpose) & MASK)
    return [mix((stream + c * golden) & MASK) for c in range(1, count + 1)]


def shuffle_head(random: list[int], total: int) -> list[int]:
    """The first steps of a Fisher-Yates shuffle of 0..total-1, with the whole array."""
    array = list(range(total))
    for i, word in enumerate(random):
        j = i + (((word >> 32) * (total - i)) >> 32)
        array[i], array[j] = array[j], array[i]
    return array[: len(random)]


def slow_episode(stream, spec, shots, novel, base, hide, parity, i):
    key = derive_seed("episodes", *stream) - (1 << 62)
    classes = shuffle_head(words(key, i, 1, spec.ways), len(novel) - 1)
    each = shots + spec.novel_queries
    drawn = words(key, i, 2, spec.ways * each)
    support, query = [], []
    for way, c in enumerate(classes):
        rows = shuffle_head(drawn[way * each : (way + 1) * each], int(novel[c + 1] - novel[c]))
        rows = [int(novel[c]) + r for r in rows]
        support += rows[:shots]
        query += [(r, len(base) - 1 + way) for r in rows[shots:]]
    allowed = [
        (row, label)
        for label in range(len(base) - 1)
        if not (hide and label in classes)
        for row in range(base[label], base[label + 1])
        if parity is None or (row - base[label]) % 2 == {"even": 0, "odd": 1}[parity]
    ]
    picked = shuffle_head(words(key, i, 3, spec.base_queries), len(allowed))
    query = [allowed[p] for p in picked] + query
    order = np.argsort(np.array(words(key, i, 4, len(query)), dtype=np.uint64).astype(np.int64), kind="stable")
    return classes, support, [query[o] for o in order]


CASES = [
    (("t", "test", 0), EpisodeSpec(), 5, SIZES_NOVEL, SIZES_BASE, False, None),
    (("t", "train", 3), EpisodeSpec(), 1, SIZES_NOVEL, SIZES_BASE, False, "even"),
    (("t", "val", 0), EpisodeSpec(ways=2, novel_queries=3, base_queries=7), 4, SIZES_NOVEL, SIZES_BASE, False, "odd"),
    (("t", "train", 1), EpisodeSpec(base_queries=20), 5, SIZES_NOVEL, SIZES_NOVEL, True, None),
    (("t", "train", 1), EpisodeSpec(ways=1, base_queries=1), 1, SIZES_NOVEL, SIZES_NOVEL, True, "odd"),
]


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_slow_version(case):
    stream, spec, shots, novel, base, hide, parity = case
    drawn = EpisodeSampler(stream, spec, shots, novel, base, hide, parity).sample(7, 60)
    for e in range(60):
        classes, support, query = slow_episode(stream, spec, shots, novel, base, hide, parity, 7 + e)
        assert drawn.classes[e].tolist() == classes
        assert drawn.support[e].tolist() == support
        assert list(zip(drawn.query[e].tolist(), drawn.query_labels[e].tolist(), strict=True)) == query
        assert drawn.hidden_classes[e].nonzero().flatten().tolist() == (sorted(classes) if hide else [])


def test_draws_are_uniform():
    """Chi-square of classes, support images, base images and of the order of queries over many episodes."""
    base = np.arange(0, 41, 8)
    novel = np.arange(0, 85, 12)
    drawn = EpisodeSampler(("u", "test", 0), EpisodeSpec(base_queries=10), 5, novel, base).sample(0, 20_000)
    position = drawn.query_is_novel.float().mean(0).numpy() * 20_000
    counts = {
        "classes": np.bincount(drawn.classes[:, 0].numpy(), minlength=7),
        "last way": np.bincount(drawn.classes[:, 4].numpy(), minlength=7),
        "support": np.bincount(drawn.support[:, 0].numpy(), minlength=84),
        "base": np.bincount(drawn.query[~drawn.query_is_novel].numpy(), minlength=40),
        "novel first": position,
    }
    for name, observed in counts.items():
        assert stats.chisquare(observed).pvalue > 1e-4, name
    pairs = np.bincount((drawn.classes[:, 0] * 7 + drawn.classes[:, 1]).numpy(), minlength=49).reshape(7, 7)
    assert (np.diag(pairs) == 0).all()
    assert stats.chisquare(pairs[~np.eye(7, dtype=bool)]).pvalue > 1e-4


def test_known_digest():
    """Episodes must never change silently: stored results rest on them."""
    sampler = EpisodeSampler(("known", "test", 0), EpisodeSpec(), 5, SIZES_NOVEL, SIZES_BASE)
    assert sampler.digest(100) == "d2474ce47200bf4567ebbdac47e92ab6a833d301bcc6a0fa39d143e74689e1d6"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"novel": np.arange(0, 49, 12)}, "need 5 novel classes, the pool has 4"),
        ({"novel": np.arange(0, 64, 9)}, "need 10 images of a novel class .* has 9; --queries 4 would do here"),
        ({"novel": np.arange(0, 35, 5)}, "has 5; --shots 1 --queries 4 would do here"),
        ({"novel": np.arange(0, 7)}, "has 1$"),
        ({"base": np.array([0, 10, 20])}, "need 25 base queries, the pool has 20 images for them"),
        ({"hide": True, "base": np.arange(0, 100, 10)}, "same"),
    ],
)
def test_impossible_episodes_are_refused(change, message):
    arguments = {"novel": SIZES_NOVEL, "base": SIZES_BASE, **change}
    with pytest.raises(UserError, match=message) as refused:
        EpisodeSampler(("t", "test", 0), EpisodeSpec(), 5, **arguments)
    if least := re.search(r"--shots (\d+) --queries (\d+)", str(refused.value)):
        EpisodeSampler(("t", "test", 0), EpisodeSpec(novel_queries=int(least[2])), int(least[1]), **arguments)


@pytest.mark.parametrize(("ways", "classes"), [(1, 1), (5, 5), (5, 108), (20, 45), (200, 300)])
def test_classes_follow_from_a_line_of_text(ways, classes):
    stream = ("some-task", "test", ways)
    draws = ClassDraws.parse_text(str(ClassDraws(100, ways, classes, derive_stream_key(*stream))))
    key = derive_seed("episodes", *stream) - (1 << 62)
    assert draws.to_array().tolist() == [shuffle_head(words(key, i, 1, ways), classes) for i in range(100)]
    spec, rows = EpisodeSpec(ways=ways, novel_queries=1, base_queries=5), np.arange(classes + 1) * 2
    sampler = EpisodeSampler(stream, spec, 1, rows, SIZES_BASE)
    assert sampler.describe_novel_class_draws(100) == draws
    assert np.array_equal(sampler.sample(0, 100).classes.numpy(), draws.to_array())
