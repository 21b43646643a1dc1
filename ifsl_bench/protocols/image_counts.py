"""Hits of single test images, which the uncertainty over other test images is computed from. Imports no torch.

The queries of a task are drawn again and again from the same images. How well a method does on each image is stored
beside the counts of episodes or sequences, in at most :data:`MAX_STORED_CHARACTERS` of a result file: where there are
too many images for that, 2, 4, 8, ... neighbouring images of a class are counted together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np

from ifsl_bench.utils.serialization import pack_array

MAX_STORED_CHARACTERS = 9_500  # of packed arrays; with names and quotes 10 KB of a result file
SHARE_LEVELS = 255  # of stored shares


class ImageTally:
    """Sums over episodes or sequences, by name, that several threads add to."""

    def __init__(self) -> None:
        self.sums: dict[str, np.ndarray] = {}
        self._lock = Lock()

    def add_to_sum(self, name: str, values: np.ndarray) -> None:
        """Add an array of whole numbers to a sum.

        Args:
            name: of the sum.
            values: of one shape for each name.
        """
        with self._lock:
            self._get_or_create_sum(name, values.shape)[...] += values

    def add_counts_at_places(self, name: str, size: int, places: np.ndarray) -> None:
        """Add 1 at each of some places, as often as it is among them.

        Args:
            name: of the sum.
            size: of the sum, [size].
            places: whole numbers below ``size``.
        """
        with self._lock:
            np.add.at(self._get_or_create_sum(name, (size,)), places, 1)

    def _get_or_create_sum(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.sums:
            self.sums[name] = np.zeros(shape, np.int64)
        return self.sums[name]


@dataclass(frozen=True)
class PoolHits:
    """Hits of the images of a pool, or of groups of neighbouring images of one class.

    Attributes:
        images_per_class: [C] images of each class.
        images_per_group: images in a group; the last group of a class may have fewer.
        query_counts: [H, G] how often each group was a query, in each of H parts of the episodes.
        right_counts: name -> [H, G] how often it was right; or, in sessions, the share of its queries in 1 /
            ``SHARE_LEVELS``.
    """

    images_per_class: np.ndarray
    images_per_group: int
    query_counts: np.ndarray
    right_counts: dict[str, np.ndarray]

    @property
    def groups_per_class(self) -> np.ndarray:
        """The number of groups of each class, [C]."""
        return -(-self.images_per_class // self.images_per_group)

    def merge_neighbouring_groups(self, shares: bool) -> PoolHits:
        """Return the hits of pairs of neighbouring groups of each class.

        Args:
            shares: whether ``right`` has shares, of which the mean over queries is taken, and not counts.
        """
        first = np.concatenate(
            [
                start + np.arange(0, n, 2)
                for start, n in zip(self.first_group_of_class, self.groups_per_class, strict=True)
            ]
        )
        asked = np.add.reduceat(self.query_counts, first, axis=1)
        if not shares:
            right = {name: np.add.reduceat(values, first, axis=1) for name, values in self.right_counts.items()}
        else:
            sums = {
                name: np.add.reduceat(values * self.query_counts, first, axis=1)
                for name, values in self.right_counts.items()
            }
            right = {name: np.rint(values / np.maximum(asked, 1)).astype(np.int64) for name, values in sums.items()}
        return PoolHits(self.images_per_class, 2 * self.images_per_group, asked, right)

    @property
    def first_group_of_class(self) -> np.ndarray:
        """The first group of each class, [C]."""
        return np.cumsum(self.groups_per_class) - self.groups_per_class

    @property
    def packed_arrays(self) -> dict[str, str]:
        """The packed arrays, by name; ``asked`` is one of them."""
        return {
            name: pack_array(values.reshape(-1))
            for name, values in {"asked": self.query_counts, **self.right_counts}.items()
        }


@dataclass(frozen=True)
class ImageHits:
    """Hits of the test images of a task.

    Attributes:
        pools: "base" and "novel" -> the images that their queries are drawn from; without base queries the latter.
        right_counts_are_shares: whether :attr:`PoolHits.right_counts` has shares.
    """

    pools: dict[str, PoolHits]
    right_counts_are_shares: bool

    def right_shares(self, name: str) -> dict[str, np.ndarray]:
        """Return name -> the share of each image's queries that are right, [H, G]; NaN where it has none."""
        pool = self.pools[name]
        most = np.where(
            pool.query_counts > 0, SHARE_LEVELS if self.right_counts_are_shares else pool.query_counts, np.nan
        )
        return {what: right / most for what, right in pool.right_counts.items()}

    def group_images(self, name: str, step: int) -> ImageHits:
        """Return these hits with at least ``step`` neighbouring images of a pool in a group.

        Args:
            name: of the pool.
            step: a power of two.
        """
        pool = self.pools[name]
        while pool.images_per_group < step:
            pool = pool.merge_neighbouring_groups(self.right_counts_are_shares)
        return ImageHits({**self.pools, name: pool}, self.right_counts_are_shares)

    def group_to_fit_result_file(self) -> ImageHits:
        """Return these hits with images grouped as little as :data:`MAX_STORED_CHARACTERS` allow."""
        pools, lengths = dict(self.pools), {}
        while True:
            for name, pool in pools.items():
                if name not in lengths:
                    lengths[name] = sum(map(len, pool.packed_arrays.values()))
            largest = max(lengths, key=lambda name: lengths[name])
            if sum(lengths.values()) <= MAX_STORED_CHARACTERS or pools[largest].groups_per_class.max() == 1:
                return ImageHits(pools, self.right_counts_are_shares)
            pools[largest] = pools[largest].merge_neighbouring_groups(self.right_counts_are_shares)
            del lengths[largest]


def make_session_image_hits(
    sums: Mapping[str, np.ndarray], biased: bool, base_sizes: np.ndarray, novel_sizes: np.ndarray, ways: int
) -> ImageHits:
    """Return the shares of the queries of each image that are right, in sequences of T sessions.

    In the average accuracy a query after session t has the weight of one over all queries after it, and in gAcc the
    weight that :func:`ifsl_bench.protocols.session_metrics._generalized_accuracy_after_sessions` gives to its class.
    Each share is a
    mean with these weights over sequences and sessions: ``acc`` and ``gacc``; ``first`` is of session 0, ``last`` of
    session T, and ``calibrated`` is ``acc`` with the bias.

    Args:
        sums: over sequences: "base asked" [B], "base" [T + 1, B] right after each session, "novel asked" [T images] by
            the session that brings the class, "novel" [T, images] right after sessions 1 to T; with the bias
            "calibrated base" and "calibrated novel".
        biased: whether the bias is part of the row, so that all shares are with it.
        base_sizes: images of each base class.
        novel_sizes: images of each novel class.
        ways: novel classes of a session.
    """
    base_asked, novel_asked = sums["base asked"], sums["novel asked"].reshape(sums["novel"].shape).cumsum(0)
    sessions = 1 + np.arange(len(novel_asked))
    queries = base_asked.sum() + np.concatenate([[0], novel_asked.sum(1)])  # after each session, of all sequences
    most = len(base_sizes) / ways
    novel_weight = np.log1p(most / sessions) / most  # of a session's accuracy in gAcc
    at_end = np.eye(len(queries))[-1]
    weights = {"acc": 1 / queries, "last": at_end, "gacc": np.concatenate([[1], 1 - sessions * novel_weight])}
    of_novel = {"acc": 1 / queries[1:], "last": at_end[1:], "gacc": novel_weight}
    kind = "calibrated " if biased else ""

    def shares(right: np.ndarray, asked: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Return weighted shares [1, images], in 1 / SHARE_LEVELS; 0 where an image was never a query."""
        there = np.broadcast_to(asked, right.shape) * weight[:, None]
        total = there.sum(0)
        share = np.divide((right * weight[:, None]).sum(0), total, out=np.zeros_like(total), where=total > 0)
        return np.rint(SHARE_LEVELS * share).astype(np.int64)[None]

    base = {name: shares(sums[f"{kind}base"], base_asked, weight) for name, weight in weights.items()}
    base["first"] = shares(sums["base"], base_asked, np.eye(len(queries))[0])
    novel = {name: shares(sums[f"{kind}novel"], novel_asked, weight) for name, weight in of_novel.items()}
    if "calibrated base" in sums:
        base["calibrated"] = shares(sums["calibrated base"], base_asked, weights["acc"])
        novel["calibrated"] = shares(sums["calibrated novel"], novel_asked, of_novel["acc"])
    pools = {
        "base": PoolHits(base_sizes, 1, base_asked[None], base),
        "novel": PoolHits(novel_sizes, 1, novel_asked[-1:], novel),
    }
    return ImageHits(pools, right_counts_are_shares=True).group_to_fit_result_file()
