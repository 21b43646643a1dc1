"""Episodes: which images are support and query, in batches.

Episode i of a stream (task, side, seed) is a pure function of these and the sizes of the classes. All draws come from
a counter-based generator in 64-bit integer arithmetic, so every batch size, device and machine gives the same episodes
and any slice can be recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from ifsl_bench.protocols.sampling.draws import (
    CLASS_DRAW_PURPOSE,
    ClassDraws,
    admissible_base_images,
    derive_stream_key,
    describe_sufficient_value,
    describe_too_few_images,
    digest_tensors,
    draw_distinct_integers,
    draw_random_words,
    to_int64_tensor,
    words_to_integers_below,
)
from ifsl_bench.protocols.tasks.task import EpisodeSpec, Side, Task
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_count

if TYPE_CHECKING:
    from ifsl_bench.protocols.sampling.sequences import SequenceSampler


@dataclass(frozen=True)
class EpisodeIndices:
    """Indices of a batch of E episodes.

    Attributes:
        classes: [E, N] novel classes, as labels of the novel pool.
        support: [E, N * shots] images of the novel pool, sorted by way.
        query: [E, Q] images; of the novel pool where ``query_is_novel``, else of the base pool.
        query_is_novel: [E, Q] bool.
        query_labels: [E, Q] joint labels: base 0..K-1, novel K..K+N-1 (way order of ``classes``).
        hidden_classes: [E, K] bool, base classes out of play.
        episode_numbers: [E] the episodes' numbers.
    """

    classes: Tensor
    support: Tensor
    query: Tensor
    query_is_novel: Tensor
    query_labels: Tensor
    hidden_classes: Tensor
    episode_numbers: Tensor

    def __len__(self) -> int:
        return len(self.episode_numbers)


class EpisodeSampler:
    """Draws the episodes of one stream.

    Args:
        stream: names the stream, e.g. ("glyphs-5shot", "test", 0).
        shape: ways and queries.
        shots: support images of a novel class.
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
        self.key = derive_stream_key(*stream)
        counts = np.diff(novel)
        need = shots + shape.novel_queries
        if len(counts) < shape.ways:
            raise UserError(
                f"episodes of {stream[0]} need {shape.ways:,} novel classes, {pools[0]} has {len(counts)}"
                f"{describe_sufficient_value('ways', len(counts))}"
            )
        if (least := int(counts.min())) < need:
            label = int(counts.argmin())
            raise UserError(
                f"episodes of {stream[0]} need {need:,} images of a novel class ({format_count(shots, 'shot')} + "
                f"{shape.novel_queries:,} queries), class {repr(classes[label]) if classes else f'number {label}'} of "
                f"{pools[0]} has {least}{describe_too_few_images(least, shots, shape.novel_queries)}"
            )
        if hide and len(novel) != len(base):
            raise UserError("classes can be hidden only where novel and base classes are the same")
        rows, labels = admissible_base_images(base, parity)
        allowed = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=len(base) - 1))])  # rows of each class
        worst = np.sort(np.diff(allowed))[: len(base) - 1 - (shape.ways if hide else 0)].sum()
        if worst < shape.base_queries:
            lack = f"{shape.base_queries:,} base queries, {pools[1]} has {worst} images for them"
            enough = int(worst * shape.novel_queries // shape.base_queries)  # both kinds change in proportion
            raise UserError(f"episodes of {stream[0]} need {lack}{describe_sufficient_value('queries', enough)}")
        self.novel_starts, self.novel_counts = to_int64_tensor(novel[:-1], device), to_int64_tensor(counts, device)
        self.base_rows, self.base_labels = to_int64_tensor(rows, device), to_int64_tensor(labels, device)
        self.base_starts, self.base_counts = (
            to_int64_tensor(allowed[:-1], device),
            to_int64_tensor(np.diff(allowed), device),
        )
        self.base_classes = len(base) - 1

    def _random_words(self, index: Tensor, purpose: int, count: int) -> Tensor:
        """Return 64-bit words [E, count] for the episodes ``index`` [E]."""
        return draw_random_words(self.key, index, purpose, count)

    def draw_integers(self, index: Tensor, purpose: int, count: int, limit: int) -> Tensor:
        """Return [E, count] numbers in 0..limit-1 for some episodes; each purpose has its own.

        Args:
            index: [E] the episodes' numbers.
            purpose: what the numbers are for.
            count: numbers for each episode.
            limit: above all numbers.
        """
        return words_to_integers_below(self._random_words(index, purpose, count), limit)

    def sample(self, start: int, count: int) -> EpisodeIndices:
        """Draw episodes ``start`` to ``start + count - 1`` of the stream.

        Args:
            start: the first episode.
            count: how many episodes.
        """
        spec, shots = self.shape, self.shots
        ways, each = spec.ways, shots + spec.novel_queries
        index = torch.arange(start, start + count, device=self.device)
        everything = torch.full((count,), len(self.novel_counts), device=self.device)
        classes = draw_distinct_integers(
            self._random_words(index, CLASS_DRAW_PURPOSE, ways), everything, ways
        )  # [E, N]
        words = self._random_words(index, 2, ways * each).view(count, ways, each)
        images = draw_distinct_integers(words, self.novel_counts[classes], each)  # [E, N, shots + queries]
        images = images + self.novel_starts[classes].unsqueeze(-1)
        support = images[..., :shots].reshape(count, -1)
        novel_query = images[..., shots:].reshape(count, -1)

        hidden = torch.zeros(count, self.base_classes, dtype=torch.bool, device=self.device)
        if self.hide:
            hidden.scatter_(1, classes, True)

        way = torch.arange(ways, device=self.device).repeat_interleave(spec.novel_queries)
        labels, query = (self.base_classes + way).expand(count, -1), novel_query
        if spec.base_queries:
            place = self._draw_base_places(index, classes)  # [E, B]
            labels = torch.cat([self.base_labels[place], labels], 1)
            query = torch.cat([self.base_rows[place], query], 1)
        order = self._random_words(index, 4, query.shape[1]).argsort(dim=1, stable=True)
        query, labels = query.gather(1, order), labels.gather(1, order)
        return EpisodeIndices(classes, support, query, labels >= self.base_classes, labels, hidden, index)

    def describe_novel_class_draws(self, count: int) -> ClassDraws:
        """Return the draws of novel classes for the first ``count`` episodes."""
        return ClassDraws(count, self.shape.ways, len(self.novel_counts), self.key)

    def _draw_base_places(self, index: Tensor, classes: Tensor) -> Tensor:
        """Draw places [E, B] in the list of admissible base images for episodes ``index`` [E] of ``classes`` [E, N]."""
        count = self.shape.base_queries
        total = torch.full((len(index),), len(self.base_rows), device=self.device)
        if self.hide:
            total = total - self.base_counts[classes].sum(1)
        place = draw_distinct_integers(self._random_words(index, 3, count), total, count)
        if self.hide:
            # Numbers count the admissible images that are left; step over each hidden class, lowest first.
            for label in classes.sort(1).values.unbind(1):
                beyond = place >= self.base_starts[label].unsqueeze(1)
                place = place + beyond * self.base_counts[label].unsqueeze(1)
        return place

    def digest(self, count: int, batch: int = 500) -> str:
        """Return the SHA-256 over class and image ids of the first episodes: equal digests, equal episodes.

        Args:
            count: how many episodes.
            batch: episodes drawn at once, which does not change the digest.
        """
        draws = (self.sample(start, min(batch, count - start)) for start in range(0, count, batch))
        return digest_tensors(torch.cat([d.classes, d.support, d.query, d.query_labels], 1) for d in draws)


def make_episode_sampler(
    task: Task,
    side: Side,
    seed: int,
    starts: Callable[[str], np.ndarray],
    device: torch.device | str,
    classes: Callable[[str], Sequence[str]],
) -> EpisodeSampler:
    """Return the sampler of a side's episodes, see :func:`make_side_sampler`.

    Args:
        task: that is sampled.
        side: "train", "val" or "test".
        seed: of training; the other sides have the task's own.
        starts: of a pool by name, int64 [C + 1]: images of class c are ``starts[c]:starts[c + 1]``.
        device: where the indices are made.
        classes: of a pool by name, what errors call its classes.

    Raises:
        UserError: the pools have too few classes or images.
    """
    novel = task.pool(side, "novel")
    base = task.pool(side, "base") if task.has_base else "base/train"  # for the number of base classes
    return EpisodeSampler(
        (task.name, side, seed if side == "train" else task.evaluation.seed),
        task.episode,
        task.shots,
        novel=starts(novel),
        base=starts(base),
        hide=task.hides_base_classes(side),
        parity=task.base_parity(side),
        device=device,
        pools=(f"{novel} of {task.novel_from}" if task.novel_from and side != "train" else novel, base),
        classes=classes(novel),
    )


def make_training_sampler(
    task: Task,
    sessions: int,
    seed: int,
    starts: Callable[[str], np.ndarray],
    device: torch.device | str = "cpu",
    classes: Callable[[str], Sequence[str]] = lambda pool: (),
) -> EpisodeSampler:
    """Return the sampler of training episodes, each with the novel classes and the base queries of several sessions.

    Args:
        task: that is trained on.
        sessions: of a training episode.
        seed: of training.
        starts: of a pool by name, int64 [C + 1]: images of class c are ``starts[c]:starts[c + 1]``.
        device: where the indices are made.
        classes: of a pool by name, what errors call its classes.

    Raises:
        UserError: the pools have too few classes or images; it names the number of sessions they have enough for.
    """
    shape, novel, base = task.episode, task.pool("train", "novel"), task.pool("train", "base")

    def of(count: int) -> EpisodeSampler:
        larger = msgspec.structs.replace(shape, ways=count * shape.ways, base_queries=count * shape.base_queries)
        return make_episode_sampler(
            msgspec.structs.replace(task, episode=larger), "train", seed, starts, device, classes
        )

    def enough(count: int) -> bool:
        with suppress(UserError):
            of(count)
            return True
        return False

    try:
        return of(sessions)
    except UserError as error:
        fewer = range(min(sessions - 1, (len(starts(novel)) - 1) // shape.ways), 0, -1)
        if (most := next(filter(enough, fewer), None)) is None:
            raise
        raise UserError(
            f"--train sessions={sessions} needs {sessions * shape.ways:,} novel classes of {novel} and "
            f"{sessions * shape.base_queries:,} base queries of {base}, more than {task.name} has; sessions={most} is "
            "the most"
        ) from error


def make_side_sampler(
    task: Task,
    side: Side,
    seed: int,
    starts: Callable[[str], np.ndarray],
    device: torch.device | str = "cpu",
    classes: Callable[[str], Sequence[str]] = lambda pool: (),
    order: np.ndarray | None = None,
) -> EpisodeSampler | SequenceSampler:
    """Return the stream of a task's side: its episodes, or its sequences of sessions; training is on episodes always.

    Training episodes follow the training seed, the others are the task's own.

    Args:
        task: that is sampled.
        side: "train", "val" or "test".
        seed: of training; the other sides have the task's own.
        starts: of a pool by name, int64 [C + 1]: images of class c are ``starts[c]:starts[c + 1]``.
        device: where the indices are made.
        classes: of a pool by name, what errors call its classes.
        order: [T N] labels of novel/test, as a published list orders them.

    Raises:
        UserError: the pools have too few classes or images.
    """
    if task.sessions is None or side == "train":
        return make_episode_sampler(task, side, seed, starts, device, classes)
    from ifsl_bench.protocols.sampling.sequences import make_sequence_sampler

    return make_sequence_sampler(task, side, task.sessions, starts, device, classes, order)
