"""Episodes: which images are support and query, in batches.

Episode i of a stream (task, side, seed) is a pure function of these and the sizes of the classes. All draws come from
a counter-based generator in 64-bit integer arithmetic, so every batch size, device and machine gives the same episodes
and any slice can be recomputed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.common.errors import UserError
from ifsl_bench.protocol.class_draws import GOLDEN, MIX1, MIX2, OF_CLASSES, ClassDraws, stream_key
from ifsl_bench.protocol.task import EpisodeSpec, Side, Task

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


@dataclass(frozen=True)
class Episodes:
    """Indices of a batch of E episodes.

    Attributes:
        classes: [E, N] novel classes, as labels of the novel pool.
        support: [E, N * shots] images of the novel pool, sorted by way.
        query: [E, Q] images; of the novel pool where ``query_novel``, else of the base pool.
        query_novel: [E, Q] bool.
        query_labels: [E, Q] joint labels: base 0..K-1, novel K..K+N-1 (way order of ``classes``).
        hidden: [E, K] bool, base classes out of play.
        index: [E] the episodes' numbers.
    """

    classes: Tensor
    support: Tensor
    query: Tensor
    query_novel: Tensor
    query_labels: Tensor
    hidden: Tensor
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)


def _remedy(option: str, value: int) -> str:
    """Names the option that these data would do with, where any value of it would."""
    return f"; --{option} {value:,} would do here" if value > 0 else ""


class Sampler:
    """Draws the episodes of one stream.

    Args:
        stream: names the stream, e.g. ("glyphs-5shot", "test", 0).
        shape: ways and queries; ``shots`` beside it.
        novel: int64 [C + 1], images of novel class c are ``novel[c]:novel[c + 1]``.
        base: int64 [K + 1], the same for the pool of the base queries; of any base pool where there are none.
        hide: whether the novel classes are base classes and hidden as such (the two pools' labels agree).
        parity: base queries take only images of even or odd index within their class.
        device: where the indices are made.
        pools: what errors call the pools of novel classes and of base queries.
        classes: what errors call the novel classes; their numbers where there is nothing.

    Raises:
        UserError: too few classes, or too few images in a class.
    """

    def __init__(
        self,
        stream: tuple[str | int, ...],
        shape: EpisodeSpec,
        shots: int,
        novel: np.ndarray,
        base: np.ndarray,
        hide: bool = False,
        parity: str | None = None,
        device: torch.device | str = "cpu",
        pools: tuple[str, str] = ("the pool", "the pool"),
        classes: Sequence[str] = (),
    ) -> None:
        self.shape, self.shots, self.hide, self.device = shape, shots, hide, torch.device(device)
        self.key = stream_key(*stream)
        counts = np.diff(novel)
        need = shots + shape.novel_queries
        if len(counts) < shape.ways:
            raise UserError(f"episodes of {stream[0]} need {shape.ways:,} novel classes, {pools[0]} has {len(counts)}"
                            f"{_remedy('ways', len(counts))}")  # fmt: skip
        if (least := int(counts.min())) < need:
            label = int(counts.argmin())
            raise UserError(
                f"episodes of {stream[0]} need {need:,} images of a novel class ({shots:,} shots + "
                f"{shape.novel_queries:,} queries), class {repr(classes[label]) if classes else f'number {label}'} of "
                f"{pools[0]} has {least}{_remedy('queries', least - shots) or _remedy('shots', least - 1)}"
            )
        if hide and len(novel) != len(base):
            raise UserError("classes can be hidden only where novel and base classes are the same")
        # Base queries are drawn from a list of admissible images; class k has rows allowed[k]:allowed[k + 1] of it.
        first = {None: 0, "even": 0, "odd": 1}[parity]
        step = 1 if parity is None else 2
        rows = [np.arange(a + first, b, step) for a, b in itertools.pairwise(base)]
        allowed = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
        worst = np.sort(np.diff(allowed))[: len(rows) - (shape.ways if hide else 0)].sum()
        if worst < shape.base_queries:
            lack = f"{shape.base_queries:,} base queries, {pools[1]} has {worst} images for them"
            enough = int(worst * shape.novel_queries // shape.base_queries)  # both kinds change in proportion
            raise UserError(f"episodes of {stream[0]} need {lack}{_remedy('queries', enough)}")

        def table(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device)

        self.novel_starts, self.novel_counts = table(novel[:-1]), table(counts)
        self.base_rows, self.base_labels = (
            table(np.concatenate(rows)),
            table(np.repeat(np.arange(len(rows)), np.diff(allowed))),
        )
        self.base_starts, self.base_counts = table(allowed[:-1]), table(np.diff(allowed))
        self.base_classes = len(rows)

    def _random(self, index: Tensor, purpose: int, count: int) -> Tensor:
        """[E, count] 64-bit words for the episodes ``index`` [E]."""
        stream = _mix(_mix(index * _GOLDEN + self.key) + purpose)  # [E]
        counter = torch.arange(1, count + 1, device=self.device) * _GOLDEN
        return _mix(stream.unsqueeze(1) + counter)

    def integers(self, index: Tensor, purpose: int, count: int, below: int) -> Tensor:
        """[E, count] numbers in 0..below-1 for the episodes ``index`` [E]; each purpose has its own."""
        return (_shift(self._random(index, purpose, count), 32) * below) >> 32

    @staticmethod
    def _distinct(words: Tensor, total: Tensor, count: int) -> Tensor:
        """``count`` different numbers below ``total`` in random order: the first steps of a Fisher-Yates shuffle.

        The shuffled array is never made. Step i takes what lies at place t_i >= i and puts there what lies at place i,
        which no later step looks at. So only the places swapped so far differ from the identity. What lies at a place
        was put there by the last step with that target: step j, if any, which took it from place j, and so on down to
        a step whose place was untouched. All chains are followed at once, in steps of double length.
        Bias of a bounded number: below total / 2^32.

        Args:
            words: [..., count] random words.
            total: [...] the number of things to choose from.
        """
        at = torch.arange(count, device=words.device)
        targets = at + ((_shift(words, 32) * (total.unsqueeze(-1) - at)) >> 32)  # [..., count]
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

    def sample(self, start: int, count: int) -> Episodes:
        """Episodes ``start`` to ``start + count - 1`` of the stream."""
        spec, shots = self.shape, self.shots
        ways, each = spec.ways, shots + spec.novel_queries
        index = torch.arange(start, start + count, device=self.device)
        classes = self._classes(index)
        words = self._random(index, 2, ways * each).view(count, ways, each)
        images = self._distinct(words, self.novel_counts[classes], each)  # [E, N, shots + queries]
        images = images + self.novel_starts[classes].unsqueeze(-1)
        support = images[..., :shots].reshape(count, -1)
        novel_query = images[..., shots:].reshape(count, -1)

        hidden = torch.zeros(count, self.base_classes, dtype=torch.bool, device=self.device)
        if self.hide:
            hidden.scatter_(1, classes, True)

        way = torch.arange(ways, device=self.device).repeat_interleave(spec.novel_queries)
        labels, query = (self.base_classes + way).expand(count, -1), novel_query
        if spec.base_queries:
            place = self._base_places(index, classes)  # [E, B]
            labels = torch.cat([self.base_labels[place], labels], 1)
            query = torch.cat([self.base_rows[place], query], 1)
        order = self._random(index, 4, query.shape[1]).argsort(dim=1, stable=True)
        query, labels = query.gather(1, order), labels.gather(1, order)
        return Episodes(classes, support, query, labels >= self.base_classes, labels, hidden, index)

    def _classes(self, index: Tensor) -> Tensor:
        """[E, N] novel classes of the episodes ``index`` [E]."""
        everything = torch.full((len(index),), len(self.novel_counts), device=self.device)
        return self._distinct(self._random(index, OF_CLASSES, self.shape.ways), everything, self.shape.ways)

    def class_draws(self, count: int) -> ClassDraws:
        """How the novel classes of the first ``count`` episodes are drawn."""
        return ClassDraws(count, self.shape.ways, len(self.novel_counts), self.key)

    def classes(self, count: int) -> np.ndarray:
        """The novel classes of the first ``count`` episodes, int64 [count, N], as labels of the novel pool."""
        return self.class_draws(count).array()

    def _base_places(self, index: Tensor, classes: Tensor) -> Tensor:
        """[E, B] places in the list of admissible base images, for episodes ``index`` [E] of ``classes`` [E, N]."""
        count = self.shape.base_queries
        total = torch.full((len(index),), len(self.base_rows), device=self.device)
        if self.hide:
            total = total - self.base_counts[classes].sum(1)
        place = self._distinct(self._random(index, 3, count), total, count)
        if self.hide:
            # Numbers count the admissible images that are left; step over each hidden class, lowest first.
            for label in classes.sort(1).values.unbind(1):
                beyond = place >= self.base_starts[label].unsqueeze(1)
                place = place + beyond * self.base_counts[label].unsqueeze(1)
        return place

    def digest(self, count: int, batch: int = 500) -> str:
        """SHA-256 over class and image ids of the first ``count`` episodes: equal digests, equal episodes."""
        sha = hashlib.sha256()
        for start in range(0, count, batch):
            drawn = self.sample(start, min(batch, count - start))
            parts = (drawn.classes, drawn.support, drawn.query, drawn.query_labels)
            rows = torch.cat(parts, 1).to("cpu", torch.int64).numpy()
            sha.update(rows.astype("<i8").tobytes())
        return sha.hexdigest()


def task_sampler(
    task: Task,
    side: Side,
    seed: int,
    starts: Callable[[str], np.ndarray],
    device: torch.device | str = "cpu",
    classes: Callable[[str], Sequence[str]] = lambda pool: (),
) -> Sampler:
    """The episodes of a task's side: training episodes follow the training seed, the others are the task's own.

    Args:
        starts: of a pool by name, int64 [C + 1]: images of class c are ``starts[c]:starts[c + 1]``.
        classes: of a pool by name, what errors call its classes.

    Raises:
        UserError: the pools have too few classes or images.
    """
    novel = task.pool(side, "novel")
    base = "base/train" if task.regular else task.pool(side, "base")  # there, for the number of base classes alone
    return Sampler(
        (task.name, side, seed if side == "train" else task.evaluation.seed),
        task.episode,
        task.shots,
        novel=starts(novel),
        base=starts(base),
        hide=task.hides(side),
        parity=task.base_parity(side),
        device=device,
        pools=(f"{novel} of {task.novel_from}" if task.novel_from and side != "train" else novel, base),
        classes=classes(novel),
    )
