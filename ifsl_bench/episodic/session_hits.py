"""Counts of sequences of sessions, from the margins of their queries; on any device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.protocol.calibration import Margins
from ifsl_bench.protocol.session_metrics import SessionCounts, triangle_rows


class Answers(NamedTuple):
    """Answers to the queries of E sequences, whatever is added to novel logits.

    The *margin* of a query after a session is its best base logit less its best logit among the novel classes met so
    far. Novel queries are by the session g that brings their class, M of each; after a session t < g they do not count.

    Attributes:
        first: [E, B] bool, base queries that are right in session 0.
        base: [E, B, T] margins of base queries after sessions 1 to T.
        base_right: [E, B, T] or [E, B, 1] bool, whether they are right among the base classes.
        base_there: [E, B] bool; base queries of hidden classes do not count.
        novel: [E, T, M, T] margins of novel queries, by g and t.
        novel_right: [E, T, M, T] bool, whether they are right among the novel classes met so far.
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
        """Margins that a bias on novel logits may move, after sessions 1 to T: [E, B T] and [E, T M T]."""
        met = torch.ones(self.novel.shape[1], self.novel.shape[3], dtype=torch.bool, device=self.novel.device).triu()
        base = self.base.masked_fill(~(self.base_right & self.base_there.unsqueeze(-1)), torch.nan)
        novel = self.novel.masked_fill(~(self.novel_right & self.novel_there.unsqueeze(-1)), torch.nan)
        novel = novel.masked_fill(~met[:, None], torch.nan)
        return Margins(*(part.flatten(1).cpu().numpy() for part in (base, novel)))


def count(answers: Answers, base_classes: int, ways: int, bias: float = 0.0) -> SessionCounts:
    """The counts with a bias on all novel logits; of equal logits the base class is the answer."""
    limit = _single(bias)
    base_taken = (answers.base >= limit) & answers.base_there.unsqueeze(-1)  # [E, B, t], answered with a base class
    novel_taken = (answers.novel >= limit) & answers.novel_there.unsqueeze(-1)  # [E, g, M, t]
    right = (answers.novel < limit) & answers.novel_right & answers.novel_there.unsqueeze(-1)
    sessions = answers.novel.shape[1]
    square = answers.base.new_zeros(len(answers.base), sessions + 1, sessions + 1, dtype=torch.int64)  # [E, t, g]
    square[:, 0, 0] = (answers.first & answers.base_there).sum(1)
    square[:, 1:, 0] = (base_taken & answers.base_right).sum(1)
    square[:, 1:, 1:] = right.sum(2).mT
    there = [answers.base_there.sum(1, keepdim=True), answers.novel_there.sum(2)]
    queries = torch.cat(there, 1)  # [E, T + 1]
    met = torch.ones(sessions, sessions, dtype=torch.int64, device=square.device).triu()  # [g, t]

    def array(part: Tensor) -> np.ndarray:
        return part.cpu().numpy()

    return SessionCounts(
        hits=array(square[:, *triangle_rows(sessions)]),
        novel_as_base=array((novel_taken.sum(2) * met).sum(1)),
        base_as_novel=array(queries[:, :1] - base_taken.sum(1)),
        queries=array(queries),
        base_classes=base_classes,
        ways=ways,
    ).compact()


def _single(bias: float) -> float:
    """The least single-precision number that is no less: single-precision margins are on the same side of both."""
    rounded = np.float32(bias)
    return float(rounded if rounded >= bias else np.nextafter(rounded, np.float32(np.inf)))
