"""Stage 3: hit counts of a method over a stream of episodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from ifsl_bench.backbone.device import free_memory
from ifsl_bench.common.processor import evaluating
from ifsl_bench.common.progress import Reporter
from ifsl_bench.episodic.hits import hits
from ifsl_bench.episodic.loader import Batch, EpisodeLoader
from ifsl_bench.plugin.method import Method, Prediction, ask, check_form, check_prediction
from ifsl_bench.protocol.calibration import Calibrated, Margins, calibrate
from ifsl_bench.protocol.metrics import COUNTS, Counts, estimate

MOST_UNCONVERGED = 0.001  # share of episodes above which a run says that solves failed
BATCH_BYTES = 1 << 25  # on the CPU: what its caches bear
MOST_ON_CPU = 1000  # episodes at once
SHARE = 1 / 8  # of an accelerator's free memory, for features and logits; the methods' peaks are about twice as much


@dataclass(frozen=True)
class Evaluated:
    """What was found in n episodes.

    Attributes:
        counts: hits.
        statistics: the method's own numbers, name -> [n].
        margins: of the queries, four bytes each; None in regular few-shot learning.
    """

    counts: Counts
    statistics: dict[str, np.ndarray]
    margins: Margins | None

    @property
    def accuracy(self) -> float:
        """The mean over episodes, in percent."""
        return estimate(self.counts.per_episode()["acc"]).mean

    @property
    def unconverged(self) -> int:
        """Episodes whose inner solve did not converge, or ended at NaN."""
        return int(np.count_nonzero(self.statistics.get("solver_unconverged", 0)))

    def remarks(self) -> Iterator[str]:
        """A line where more than ``MOST_UNCONVERGED`` of the inner solves did not converge."""
        if self.unconverged > MOST_UNCONVERGED * len(self.counts):
            yield f"the inner solve of {self.unconverged} of {len(self.counts)} episodes did not converge"

    def calibrated(self, validation: Evaluated, apply: bool) -> tuple[Counts, Calibrated]:
        """The counts with those of the bias that is best on validation episodes, as the joint hits too if ``apply``."""
        if self.margins is None or validation.margins is None:
            raise ValueError("without base classes there is nothing to calibrate")
        found = calibrate(validation.margins, self.margins)
        base, novel = found.base_joint, found.novel_joint
        counts = replace(self.counts, calibrated_base=base, calibrated_novel=novel)
        return replace(counts, base_joint=base, novel_joint=novel) if apply else counts, found

    def described(self) -> dict[str, dict[str, float]]:
        """Statistic -> mean, maximum and sum over the episodes where it is finite, and in how many it is not."""
        return {name: _describe(values) for name, values in self.statistics.items()}


def _describe(values: np.ndarray) -> dict[str, float]:
    finite = values[np.isfinite(values)].astype(np.float64)
    return {
        "mean": float(finite.mean()) if len(finite) else 0.0,
        "max": float(finite.max()) if len(finite) else 0.0,
        "total": float(finite.sum()),
        "episodes": len(values),
        "not_finite": len(values) - len(finite),
    }


def batch_size(loader: EpisodeLoader, queries: int) -> int:
    """Episodes at once: as many as stay in the cache's reach, or as an accelerator's free memory holds with ease."""
    images = queries + loader.ways * loader.sampler.shots
    each = 4 * images * (loader.novel.features.shape[1] + 2 * loader.classes + loader.ways)  # bytes
    free = free_memory(loader.novel.features.device)
    if free is None:
        return max(1, min(MOST_ON_CPU, BATCH_BYTES // each))
    return max(1, int(SHARE * free) // each)


def predict(method: Method, name: str, batch: Batch, numbers: bool = True) -> Prediction:
    """The method's checked answer to a batch; see :func:`check_prediction` for what is refused.

    Args:
        numbers: whether its logits are looked at too, for which an accelerator has to be waited for.
    """
    episodes, queries = batch.labels.shape
    classes = batch.support.hidden.shape[1] + method.ways
    prediction = ask(method, name, batch.support, batch.query)
    return (check_prediction if numbers else check_form)(name, prediction, episodes, queries, classes)


@torch.no_grad()
@evaluating()
def evaluate(
    method: Method, name: str, loader: EpisodeLoader, episodes: range, reporter: Reporter | None = None, title: str = ""
) -> Evaluated:
    """Counts hits over these episodes of the loader's stream; ``title`` is what the reporter calls it."""
    method.eval()
    spec = loader.sampler.shape
    base, count = spec.base_queries, spec.ways * spec.novel_queries
    size = batch_size(loader, base + count)
    counts: dict[str, list[np.ndarray]] = {key: [] for key in COUNTS}
    margins: list[Margins] = []
    pairs: list[np.ndarray] = []
    statistics: dict[str, list[np.ndarray]] = {}
    with (reporter or Reporter()).stage(title, len(episodes)) as stage:
        for batch in _ahead(loader, episodes, size):
            prediction = predict(method, name, batch, numbers=False)
            found = hits(name, prediction, batch, base)
            for key, value in found.counts.items():
                counts[key].append(value)
            if found.margins is not None and found.pairs is not None:
                margins.append(found.margins)
                pairs.append(found.pairs)
            for key, value in found.statistics.items():
                statistics.setdefault(key, []).append(value)
            stage.advance(len(batch))
    whole = {key: np.concatenate(value) for key, value in counts.items()}
    return Evaluated(
        Counts(**whole, base_queries=base, novel_queries=count, pairs=np.concatenate(pairs) if base else None),
        {key: np.concatenate(value) for key, value in statistics.items()},
        Margins(*(np.concatenate([getattr(m, side) for m in margins]) for side in ("base", "novel"))) if base else None,
    )


def _ahead(loader: EpisodeLoader, episodes: range, size: int) -> Iterator[Batch]:
    """Batches of `size` episodes. On the CPU a thread gathers the next one while the method looks at this one."""
    parts = [(start, min(size, episodes.stop - start)) for start in episodes[::size]]
    if loader.novel.features.device.type != "cpu":
        yield from itertools.starmap(loader.batch, parts)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="ifsl_bench loader") as thread:
        coming = [thread.submit(loader.batch, *part) for part in parts[:1]]
        for part in [*parts[1:], None]:
            batch = coming.pop().result()
            if part is not None:
                coming.append(thread.submit(loader.batch, *part))
            yield batch
