"""Random draws that depend on a key and on numbers alone: splitmix64 in 64-bit integers, on any device; and what
may be drawn.

:mod:`ifsl_bench.protocols.class_draws` has the same in NumPy, for classes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.protocols.class_draws import GOLDEN, MIX1, MIX2

_GOLDEN, _MIX1, _MIX2 = (constant - (1 << 64) for constant in (GOLDEN, MIX1, MIX2))  # as signed integers
_PAIRS = 1 << 24  # of draws that are compared at once


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: a bijection of 64-bit integers whose output bits look independent."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def random_words(key: int, index: Tensor, purpose: int, count: int) -> Tensor:
    """[E, count] 64-bit words for the numbers ``index`` [E] of a stream; each purpose has its own."""
    stream = _mix(_mix(index * _GOLDEN + key) + purpose)  # [E]
    counter = torch.arange(1, count + 1, device=index.device) * _GOLDEN
    return _mix(stream.unsqueeze(1) + counter)


def below(words: Tensor, limit: int | Tensor) -> Tensor:
    """A number in 0..limit-1 for each word; its bias is below limit / 2^32."""
    return (_shift(words, 32) * limit) >> 32


def _targets(words: Tensor, total: Tensor) -> Tensor:
    """The place >= i that step i of a Fisher-Yates shuffle swaps with place i, [..., count]."""
    at = torch.arange(words.shape[-1], device=words.device)
    return at + below(words, total.unsqueeze(-1) - at)


def distinct(words: Tensor, total: Tensor, count: int) -> Tensor:
    """``count`` different numbers below ``total`` in random order: the first steps of a Fisher-Yates shuffle.

    The shuffled array is never made. Step i takes what lies at place t_i >= i and puts there what lies at place i,
    which no later step looks at. So only the places swapped so far differ from the identity. What lies at a place
    was put there by the last step with that target: step j, if any, which took it from place j, and so on down to
    a step whose place was untouched. All chains are followed at once, in steps of double length.

    Args:
        words: [..., count] random words.
        total: [...] the number of things to choose from.
    """
    at = torch.arange(count, device=words.device)
    targets = _targets(words, total)
    earlier, short = at.unsqueeze(1) > at, at.to(torch.int16)

    def last(places: Tensor, targets: Tensor) -> Tensor:
        """The last step before each whose target was its place, [E, count]; -1 where there is none."""
        hit = (targets.unsqueeze(-2) == places.unsqueeze(-1)) & earlier  # [E, count, count]
        return torch.where(hit, short, -1).amax(-1).long()

    picks = []
    for some in targets.flatten(0, -2).split(max(1, _PAIRS // count**2)):
        before = last(at.expand_as(some), some)
        root = torch.where(before < 0, at, before)
        for _ in range((count - 1).bit_length()):
            root = root.gather(1, root)
        put = last(some, some)
        picks.append(torch.where(put < 0, some, root.gather(1, put.clamp_min(0))))
    return torch.cat(picks).view(targets.shape)


def distinct_of_few(words: Tensor, total: Tensor) -> Tensor:
    """The numbers of :func:`distinct`, by shuffling: faster for many draws from totals that are not much larger.

    Args:
        words: [..., count] random words.
        total: [...] the number of things to choose from.
    """
    targets = _targets(words, total).flatten(0, -2)  # [R, count]
    places = torch.arange(int(total.max()), device=words.device, dtype=torch.int32).repeat(len(targets), 1)
    for i, target in enumerate(targets.split(1, 1)):
        pick = places.gather(1, target)
        places.scatter_(1, target, places[:, i : i + 1].clone())
        places[:, i : i + 1] = pick
    return places[:, : words.shape[-1]].long().reshape(words.shape)


def admissible(base: np.ndarray, parity: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The images that base queries may be, and their labels, int64 [n] each, by class.

    Args:
        base: int64 [K + 1], images of class k are ``base[k]:base[k + 1]``.
        parity: those of "even" or "odd" index within their class; None for all.
    """
    labels = np.repeat(np.arange(len(base) - 1), np.diff(base))
    rows = np.arange(base[-1])
    if parity is not None:
        taken = (rows - base[labels]) % 2 == {"even": 0, "odd": 1}[parity]
        rows, labels = rows[taken], labels[taken]
    return rows, labels


def table(values: np.ndarray, device: torch.device | str) -> Tensor:
    """Whole numbers as a tensor of 64-bit integers on a device."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def digest_of(parts: Iterable[Tensor]) -> str:
    """SHA-256 over the whole numbers of all parts, in their order."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.to("cpu", torch.int64).numpy().astype("<i8").tobytes())
    return sha.hexdigest()


def remedy(option: str, value: int) -> str:
    """Names the option that these data would do with, where any value of it would."""
    return f"; --{option} {value:,} would do here" if value > 0 else ""
