"""Means, counts and the pooled covariance of the base classes' features: computed once, kept beside the features."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from ifsl_bench.common import packed
from ifsl_bench.common.errors import CorruptFile, UserError
from ifsl_bench.common.files import set_aside
from ifsl_bench.common.progress import Reporter
from ifsl_bench.common.sealed import check_kinds, read_sealed, write_sealed


@dataclass(frozen=True)
class Moments:
    """What is known of the features of a pool's classes.

    Attributes:
        means: float64 [K, D], mean feature of each class.
        counts: int64 [K], images of each class.
        covariance: float64 [D, D], pooled within the classes: the mean over all images of (x - m)(x - m)^T, m being the
            mean of the image's class. Divided by the number of images, not less the number of classes.
    """

    means: np.ndarray
    counts: np.ndarray
    covariance: np.ndarray

    @staticmethod
    def of(features: np.ndarray, starts: np.ndarray) -> Moments:
        """Of features [n, D], class k's being ``features[starts[k]:starts[k + 1]]``; in float64."""
        counts = np.diff(starts).astype(np.int64)
        classes = list(pairwise(starts))
        means = np.stack([features[a:b].sum(0, dtype=np.float64) for a, b in classes]) / counts[:, None]
        covariance = np.zeros((features.shape[1],) * 2)
        for (a, b), mean in zip(classes, means, strict=True):
            apart = torch.from_numpy(features[a:b] - mean)  # float64
            covariance += (apart.T @ apart).numpy()
        return Moments(means, counts, covariance / counts.sum())


def class_moments(folder: Path, features: np.ndarray, starts: np.ndarray, reporter: Reporter) -> Moments:
    """The moments of a bank's features: from the file beside them, or into it.

    Args:
        folder: the bank. Features that the data set consists of have none; their moments are computed each time.
        features: [n, D], what the bank holds, checked.
        starts: [K + 1], where each class begins in them.
    """
    try:
        bank = str(read_sealed(folder / "bank.json")["sha256"])
    except FileNotFoundError:
        return Moments.of(features, starts)
    path = folder / "moments.json"
    try:
        return _read(path, bank, len(starts) - 1, features.shape[1])
    except FileNotFoundError:
        pass
    except CorruptFile as error:
        reporter.warn(f"{error}; they are computed again, the old file is {set_aside(path)}")
    found = Moments.of(features, starts)
    with suppress(UserError):  # a folder that is shared to be read
        arrays = {name: packed.pack(getattr(found, name).reshape(-1)) for name in _KINDS}
        write_sealed(path, {"features_sha256": bank, **arrays})
    return found


_KINDS = {"means": ("f8",), "counts": (*packed.COUNTS, "i8"), "covariance": ("f8",)}


def _read(path: Path, bank: str, classes: int, width: int) -> Moments:
    entry = read_sealed(path)
    check_kinds(path, entry, {"features_sha256": str, **dict.fromkeys(_KINDS, str)})
    if entry["features_sha256"] != bank:
        raise CorruptFile(f"{path} holds the moments of other features")
    shapes = {"means": (classes, width), "counts": (classes,), "covariance": (width, width)}
    arrays = {}
    for name, kinds in _KINDS.items():
        try:
            arrays[name] = packed.unpack(entry[name], int(np.prod(shapes[name])), kinds).reshape(shapes[name])
        except ValueError as error:
            raise CorruptFile(f"{path} is damaged: {name}: {error}") from error
    return Moments(**arrays)
