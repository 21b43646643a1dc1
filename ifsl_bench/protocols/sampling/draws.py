"""Random draws that depend on a key and on numbers alone: splitmix64 in 64-bit integers.

:class:`ClassDraws` draws in NumPy, for tables, which import no torch; all else draws in PyTorch, on any device. Both
give the same numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Finaliser constants of splitmix64 (Steele, Lea and Flood 2014): products wrap at 64 bits.
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN, _MIX1, _MIX2 = (constant - (1 << 64) for constant in (GOLDEN, MIX1, MIX2))  # as signed integers
CLASS_DRAW_PURPOSE = 1  # the purpose of the words that choose classes
MOST_DRAW_STEPS = 1 << 27  # some seconds of drawing; a text of more is refused
_MOST_PAIRS_AT_ONCE = 1 << 24  # of draws that are compared at once
_CLASS_DRAWS_TEXT_PATTERN = re.compile(r"drawn ([0-9]{1,8}) x ([0-9]{1,8}) of ([0-9]{1,9}), key (-?[0-9]{1,19})")


def derive_seed(*parts: str | int) -> int:
    """Return a seed in 0..2^63-1 for a purpose, as ``derive_seed("order", seed, epoch)``; there is no hidden state."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def derive_stream_key(*stream: str | int, of: str = "episodes") -> int:
    """Return the number that all draws of a stream begin with, e.g. ``stream_key("glyphs-5shot", "test", 0)``.

    Args:
        *stream: names the stream.
        of: the kind of draws, "episodes" or "sequences"; each has its own numbers.
    """
    return derive_seed(of, *stream) - (1 << 62)


@dataclass(frozen=True)
class ClassDraws:
    """The draws of novel classes for the first episodes of a stream."""

    n_episodes: int  # how many episodes
    ways: int  # different classes of each
    n_classes: int  # how many classes there are to choose from
    stream_key: int  # of the stream, see stream_key

    def __str__(self) -> str:
        return f"drawn {self.n_episodes} x {self.ways} of {self.n_classes}, key {self.stream_key}"

    @classmethod
    def parse_text(cls, text: str) -> ClassDraws:
        """Read a text that ``str`` has written.

        Raises:
            ValueError: another text, more ways than classes, or draws that take too long.
        """
        match = _CLASS_DRAWS_TEXT_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError("it does not say how classes are drawn, as in 'drawn 2000 x 5 of 108, key 1'")
        draws = cls(*map(int, match.groups()))
        if not 0 < draws.ways <= draws.n_classes:
            raise ValueError(f"it draws {draws.ways} different classes of {draws.n_classes}")
        if draws.comparison_count > MOST_DRAW_STEPS:
            raise ValueError(f"it draws {draws.ways} classes in {draws.n_episodes:,} episodes, which takes too long")
        return draws

    def __len__(self) -> int:
        return self.n_episodes * self.ways

    @property
    def comparison_count(self) -> int:
        """The number of places that are compared to draw them."""
        return self.n_episodes * self.ways**2

    def to_array(self) -> np.ndarray:
        """Return the classes, int64 [episodes, ways].

        The array cannot be written to: results of one task share it.
        """
        return _draw_classes(self)


@lru_cache(maxsize=32)
def _draw_classes(draws: ClassDraws) -> np.ndarray:
    place = np.arange(draws.ways, dtype=np.uint64)
    with np.errstate(over="ignore"):
        index = np.arange(draws.n_episodes, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(draws.stream_key % 2**64)
        stream = _hash_array_by_splitmix(_hash_array_by_splitmix(index) + np.uint64(CLASS_DRAW_PURPOSE))
        words = _hash_array_by_splitmix(stream[:, None] + (place + np.uint64(1)) * np.uint64(GOLDEN))
    choices = np.uint64(draws.n_classes) - place
    picks = _fisher_yates_picks((place + ((words >> np.uint64(32)) * choices >> np.uint64(32))).astype(np.int64))
    picks.flags.writeable = False
    return picks


def _hash_array_by_splitmix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX2)
    return x ^ (x >> np.uint64(31))


def _fisher_yates_picks(targets: np.ndarray) -> np.ndarray:
    """Return the picks of the first steps of a Fisher-Yates shuffle of 0, 1, ...; step i takes ``targets[:, i]`` >= i.

    The shuffled array is never made: only places that an earlier step has swapped hold another number than their own.
    """
    put = np.zeros_like(targets)  # what step i leaves at its target: what lay at place i
    picks, rows = targets.copy(), np.arange(len(targets))
    for i in range(1, targets.shape[1]):
        for place, lay in ((np.full(len(targets), i), put), (targets[:, i], picks)):
            earlier = targets[:, :i] == place[:, None]
            last = i - 1 - earlier[:, ::-1].argmax(1)
            lay[:, i] = np.where(earlier.any(1), put[rows, last], place)
    return picks


def _logical_right_shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _hash_by_splitmix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: a bijection of 64-bit integers whose output bits look independent."""
    x = (x ^ _logical_right_shift(x, 30)) * _MIX1
    x = (x ^ _logical_right_shift(x, 27)) * _MIX2
    return x ^ _logical_right_shift(x, 31)


def draw_random_words(key: int, index: Tensor, purpose: int, count: int) -> Tensor:
    """Return [E, count] 64-bit words for some numbers of a stream; each purpose has its own.

    Args:
        key: of the stream, see :func:`derive_stream_key`.
        index: [E] the numbers, of episodes or sequences.
        purpose: what the words are for.
        count: words for each number.
    """
    import torch

    stream = _hash_by_splitmix(_hash_by_splitmix(index * _GOLDEN + key) + purpose)  # [E]
    counter = torch.arange(1, count + 1, device=index.device) * _GOLDEN
    return _hash_by_splitmix(stream.unsqueeze(1) + counter)


def words_to_integers_below(words: Tensor, limit: int | Tensor) -> Tensor:
    """Return a number in 0..limit-1 for each word; its bias is below limit / 2^32.

    Args:
        words: [...] random words.
        limit: one for all words, or a tensor that broadcasts with them.
    """
    return (_logical_right_shift(words, 32) * limit) >> 32


def _draw_swap_targets(words: Tensor, total: Tensor) -> Tensor:
    """Draw the place >= i that step i of a Fisher-Yates shuffle swaps with place i, [..., count]."""
    import torch

    at = torch.arange(words.shape[-1], device=words.device)
    return at + words_to_integers_below(words, total.unsqueeze(-1) - at)


def draw_distinct_integers(words: Tensor, total: Tensor, count: int) -> Tensor:
    """Return ``count`` different numbers below ``total`` in random order: the first steps of a Fisher-Yates shuffle.

    The shuffled array is never made. Step i takes what lies at place t_i >= i and puts there what lies at place i,
    which no later step looks at. So only the places swapped so far differ from the identity. What lies at a place
    was put there by the last step with that target: step j, if any, which took it from place j, and so on down to
    a step whose place was untouched. All chains are followed at once, in steps of double length.

    Args:
        words: [..., count] random words.
        total: [...] the number of things to choose from.
        count: how many numbers.
    """
    import torch

    at = torch.arange(count, device=words.device)
    targets = _draw_swap_targets(words, total)
    earlier, short = at.unsqueeze(1) > at, at.to(torch.int16)

    def last(places: Tensor, targets: Tensor) -> Tensor:
        """The last step before each whose target was its place, [E, count]; -1 where there is none."""
        hit = (targets.unsqueeze(-2) == places.unsqueeze(-1)) & earlier  # [E, count, count]
        return torch.where(hit, short, -1).amax(-1).long()

    picks = []
    for some in targets.flatten(0, -2).split(max(1, _MOST_PAIRS_AT_ONCE // count**2)):
        before = last(at.expand_as(some), some)
        root = torch.where(before < 0, at, before)
        for _ in range((count - 1).bit_length()):
            root = root.gather(1, root)
        put = last(some, some)
        picks.append(torch.where(put < 0, some, root.gather(1, put.clamp_min(0))))
    return torch.cat(picks).view(targets.shape)


def draw_distinct_integers_by_shuffling(words: Tensor, total: Tensor) -> Tensor:
    """Return the numbers of :func:`draw_distinct_integers`, by shuffling: faster for many draws from few numbers.

    Args:
        words: [..., count] random words.
        total: [...] the number of things to choose from.
    """
    import torch

    targets = _draw_swap_targets(words, total).flatten(0, -2)  # [R, count]
    places = torch.arange(int(total.max()), device=words.device, dtype=torch.int32).repeat(len(targets), 1)
    for i, target in enumerate(targets.split(1, 1)):
        pick = places.gather(1, target)
        places.scatter_(1, target, places[:, i : i + 1].clone())
        places[:, i : i + 1] = pick
    return places[:, : words.shape[-1]].long().reshape(words.shape)


def admissible_base_images(base: np.ndarray, parity: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the images that base queries may be, and their labels, int64 [n] each, by class.

    Args:
        base: int64 [K + 1], images of class k are ``base[k]:base[k + 1]``.
        parity: "even" or "odd" for images with such an index within their class; None for all.
    """
    labels = np.repeat(np.arange(len(base) - 1), np.diff(base))
    rows = np.arange(base[-1])
    if parity is not None:
        taken = (rows - base[labels]) % 2 == {"even": 0, "odd": 1}[parity]
        rows, labels = rows[taken], labels[taken]
    return rows, labels


def to_int64_tensor(values: np.ndarray, device: torch.device | str) -> Tensor:
    """Return whole numbers as a tensor of 64-bit integers on a device.

    Args:
        values: the numbers.
        device: where the tensor is made.
    """
    import torch

    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def digest_tensors(parts: Iterable[Tensor]) -> str:
    """Return the SHA-256 over the whole numbers of all parts, in their order."""
    import torch

    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.to("cpu", torch.int64).numpy().astype("<i8").tobytes())
    return sha.hexdigest()


def describe_sufficient_value(option: str, value: int) -> str:
    """Return the end of a message that names a value with which these data would suffice; empty where none would.

    Args:
        option: of the command line, without its dashes.
        value: the largest that would do; 0 or less where none would.
    """
    return f"; --{option} {value:,} would do here" if value > 0 else ""


def describe_too_few_images(least: int, shots: int, queries: int) -> str:
    """Return the end of a message that a class has too few images, with shots and queries that would suffice.

    Args:
        least: images of the smallest class, fewer than ``shots + queries``.
        shots: of an episode.
        queries: of a novel class.
    """
    one = describe_sufficient_value("queries", least - shots) or describe_sufficient_value("shots", least - queries)
    return one or (f"; --shots 1 --queries {least - 1:,} would do here" if least > 1 else "")
