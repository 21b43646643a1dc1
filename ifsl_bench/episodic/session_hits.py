"""Counts of sequences of sessions, from logits or from answers; on any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.protocol.session_metrics import SessionCounts, triangle_rows


def best_of_sessions(logits: Tensor, labels: Tensor, base_classes: int, ways: int) -> tuple[Tensor, Tensor]:
    """The highest logit among the classes of each session, and whether a query is right within its own.

    For methods whose sessions leave earlier logits as they are: all that :func:`count_logits` needs of them.

    Args:
        logits: [E, Q, K + T N].
        labels: [E, Q] joint labels; -1 for a query that does not count.

    Returns:
        [E, Q, T + 1] logits, and [E, Q] bool.
    """
    base = logits[..., :base_classes].max(-1, keepdim=True)
    novel = logits[..., base_classes:].unflatten(-1, (-1, ways)).max(-1)
    starts = base_classes + ways * torch.arange(novel.indices.shape[-1], device=logits.device)
    answers = torch.cat([base.indices, novel.indices + starts], -1)
    own = answers.gather(-1, session_of(labels, base_classes, ways).clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.cat([base.values, novel.values], -1), own == labels


def session_of(labels: Tensor, base_classes: int, ways: int) -> Tensor:
    """The session that brings the class of each joint label, 0 for base classes; -1 for the label -1."""
    novel = torch.div(labels - base_classes, ways, rounding_mode="floor") + 1
    return torch.where(labels < 0, -1, torch.where(labels < base_classes, 0, novel))


def count_logits(best: Tensor, right: Tensor, session: Tensor, base_classes: int, ways: int) -> SessionCounts:
    """Counts where a session leaves the logits of earlier classes as they are: one pass over the sessions.

    Of equal logits, the class of the earlier session is the answer.

    Args:
        best: [E, Q, T + 1] the highest logit among the classes of each session.
        right: [E, Q] bool, whether the highest logit within the query's own session is that of its class.
        session: [E, Q] which session brings the query's class; -1 for a query that does not count.
    """
    highest = best.cummax(-1).values  # of the sessions so far
    own = session.clamp_min(0).unsqueeze(-1)
    value = best.gather(-1, own)
    before = highest.gather(-1, (own - 1).clamp_min(0))
    right = right & ((value > before) | (own == 0)).squeeze(-1)
    hits = right.unsqueeze(-1) & (value == highest)  # [E, Q, T + 1], by session; true before its own for no query
    as_base = best[..., :1] == highest
    return _counts(hits, as_base, session, base_classes, ways)


def count_answers(answers: Tensor, labels: Tensor, base_classes: int, ways: int) -> SessionCounts:
    """Counts of any method.

    Args:
        answers: [E, T + 1, Q] joint labels, those that are answered after each session.
        labels: [E, Q] joint labels of the queries; -1 for a query that does not count.
    """
    answers = answers.mT
    hits = answers == labels.unsqueeze(-1)
    return _counts(hits, answers < base_classes, session_of(labels, base_classes, ways), base_classes, ways)


def _counts(hits: Tensor, as_base: Tensor, session: Tensor, base_classes: int, ways: int) -> SessionCounts:
    """Sums [E, Q, T + 1] bool, whether a query is right, and whether it is answered with a base class."""
    sessions = hits.shape[-1]
    groups = torch.nn.functional.one_hot(session + 1, sessions + 1)[..., 1:].float()  # [E, Q, T + 1]; sums are exact
    summed = hits.float().mT @ groups  # [E, t, g]
    base_taken = as_base.float().mT @ groups
    t, g = triangle_rows(sessions - 1)
    queries = groups.sum(1)
    met = torch.ones(sessions, sessions, device=hits.device).tril()[1:, 1:]

    def array(part: Tensor) -> np.ndarray:
        return part.to("cpu", torch.int64).numpy()

    return SessionCounts(
        hits=array(summed[:, t, g]),
        novel_as_base=array((base_taken[:, 1:, 1:] * met).sum(2)),
        base_as_novel=array(queries[:, :1] - base_taken[:, 1:, 0]),
        queries=array(queries),
        base_classes=base_classes,
        ways=ways,
    ).compact()
