"""Stage 3: hit counts of a method over a stream of episodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.progress import Stage
from ifsl_bench.episodic.loader import Batch, EpisodeLoader
from ifsl_bench.plugin.method import Method, Prediction, check_prediction, masked_logits
from ifsl_bench.protocol.metrics import COUNTS, Counts

BATCH_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}


@dataclass(frozen=True)
class Evaluated:
    """Hit counts, and the method's own statistics of each episode (name -> [n])."""

    counts: Counts
    statistics: dict[str, np.ndarray]


def batch_size(loader: EpisodeLoader, queries: int) -> int:
    """Episodes at once, so that a batch's features and logits stay in the cache's reach."""
    images = queries + loader.ways * loader.sampler.shots
    numbers = images * (loader.novel.features.shape[1] + 2 * loader.classes + loader.ways)
    return max(1, min(1000, BATCH_BYTES[loader.novel.features.device.type] // (4 * numbers)))


def predict(method: Method, name: str, batch: Batch) -> Prediction:
    """The method's checked answer to a batch; see :func:`check_prediction` for what is refused."""
    episodes, queries = batch.labels.shape
    classes = batch.support.hidden.shape[1] + method.ways
    try:
        prediction = method(batch.support, batch.query)
    except ValueError as error:  # what solvers say of episodes that no solve can make sense of
        raise UserError(f"method {name!r} cannot work on these episodes: {error}") from error
    return check_prediction(name, prediction, episodes, queries, classes)


@torch.no_grad()
def evaluate(method: Method, name: str, loader: EpisodeLoader, episodes: int, stage: Stage) -> Evaluated:
    """Counts hits over episodes 0 to ``episodes - 1`` of the loader's stream."""
    method.eval()
    spec = loader.sampler.shape
    base, novel = spec.base_queries, spec.ways * spec.novel_queries
    size = batch_size(loader, base + novel)
    hits: dict[str, list[np.ndarray]] = {key: [] for key in COUNTS}
    statistics: dict[str, list[np.ndarray]] = {}
    for start in range(0, episodes, size):
        batch = loader.batch(start, min(size, episodes - start))
        prediction = predict(method, name, batch)
        for key, value in _hits(prediction, batch).items():
            hits[key].append(value.cpu().numpy())
        for key, value in prediction.statistics.items():
            statistics.setdefault(key, []).append(value.detach().cpu().numpy())
        stage.advance(len(batch))
    counts = {key: np.concatenate(value).astype(np.int64) for key, value in hits.items()}
    return Evaluated(
        Counts(**counts, base_queries=base, novel_queries=novel),
        {key: np.concatenate(value) for key, value in statistics.items()},
    )


def _hits(prediction: Prediction, batch: Batch) -> dict[str, torch.Tensor]:
    """The four counts of each episode, name -> [E]."""
    classes = batch.support.hidden.shape[1]
    logits = masked_logits(prediction, batch.masked)  # [E, Q, K + N]
    base, base_at = logits[..., :classes].max(-1)  # [E, Q]
    novel, novel_at = logits[..., classes:].max(-1)
    base_right = ~batch.novel & (base_at == batch.labels)
    novel_right = batch.novel & (novel_at + classes == batch.labels)
    return {
        "base_joint": (base_right & (base >= novel)).sum(1),
        "base_alone": base_right.sum(1),
        "novel_joint": (novel_right & (novel > base)).sum(1),
        "novel_alone": novel_right.sum(1),
    }
