"""Counts of sequences of sessions, from the margins of their queries; on any device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.protocols.calibration import Margins
from ifsl_bench.protocols.session_metrics import SessionCounts, triangle_rows


class Answers(NamedTuple):
    """Answers to the queries of E sequences, whatever is added to novel logits.

    The *margin* of a query after a session is its best base logit less its best logit among the novel classes met so
    far. Novel queries are by the session g that brings their class, M of each; after a session t < g they do not count.

    Attributes:
        first: [E, B] bool, base queries that are right in session 0.
        base: [E, T, B] margins of base queries after sessions 1 to T.
        base_right: [E, T, B] or [E, 1, B] bool, whether they are right among the base classes.
        base_there: [E, B] bool; base queries of hidden classes do not count.
        novel: [E, T, T, M] margins of novel queries, by t and g.
        novel_right: [E, T, T, M] bool, whether they are right among the novel classes met so far.
        novel_there: [E, T, M] bool; false beyond the last query of a class that has fewer than others.
    """

    first: Tensor
    base: Tensor
    base_right: Tensor
    base_there: Tensor
    novel: Tensor
    novel_right: Tensor
    novel_there: Tensor

    def margins(self) -> Margins:
        """Margins that a bias on novel logits may move, after sessions 1 to T: [E, T B] and [E, T T M]."""
        base = self.base.masked_fill(~(self.base_right & self.base_there.unsqueeze(1)), torch.nan)
        counted = self.novel_right & self.novel_there.unsqueeze(1) & _met(self.novel).unsqueeze(-1)
        novel = self.novel.masked_fill(~counted, torch.nan)
        return Margins(*(part.flatten(1).cpu().numpy() for part in (base, novel)))


def _met(novel: Tensor) -> Tensor:
    """Tells which sessions' classes have been met, [t, g] bool, of margins [E, t, g, M]."""
    return torch.ones(novel.shape[1:3], dtype=torch.bool, device=novel.device).tril()


def count(answers: Answers, base_classes: int, ways: int, bias: float = 0.0) -> SessionCounts:
    """The counts with a bias on all novel logits; of equal logits the base class is the answer."""
    limit = _single(bias)
    base_taken = (answers.base >= limit) & answers.base_there.unsqueeze(1)  # [E, t, B], answered with a base class
    novel_there = answers.novel_there.unsqueeze(1)
    novel_taken = (answers.novel >= limit) & novel_there  # [E, t, g, M]
    right = (answers.novel < limit) & answers.novel_right & novel_there
    sessions = answers.novel.shape[1]
    square = answers.base.new_zeros(len(answers.base), sessions + 1, sessions + 1, dtype=torch.int64)  # [E, t, g]
    square[:, 0, 0] = (answers.first & answers.base_there).sum(1)
    square[:, 1:, 0] = (base_taken & answers.base_right).sum(2)
    square[:, 1:, 1:] = right.sum(3)
    there = [answers.base_there.sum(1, keepdim=True), answers.novel_there.sum(2)]
    queries = torch.cat(there, 1)  # [E, T + 1]

    def array(part: Tensor) -> np.ndarray:
        return part.cpu().numpy()

    return SessionCounts(
        hits=array(square[:, *triangle_rows(sessions)]),
        novel_as_base=array((novel_taken.sum(3) * _met(answers.novel)).sum(2)),
        base_as_novel=array(queries[:, :1] - base_taken.sum(2)),
        queries=array(queries),
        base_classes=base_classes,
        ways=ways,
    ).compact()


def _single(bias: float) -> float:
    """The least single-precision number that is no less: single-precision margins are on the same side of both."""
    rounded = np.float32(bias)
    return float(rounded if rounded >= bias else np.nextafter(rounded, np.float32(np.inf)))
