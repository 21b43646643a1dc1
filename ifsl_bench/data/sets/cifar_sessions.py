"""CIFAR-100 for few-shot class-incremental learning: the session lists that TOPIC (Tao et al., CVPR 2020), CEC (Zhang
et al., CVPR 2021) and most papers after them use. 60 base classes, 40 novel ones, in the order of their labels.

The lists name all 500 training images of a base class, five of a novel class, and all 100 test images of both. Of a
base class, 50 training images are held out here as base/val, drawn by a hash: options and biases are chosen on them.
Novel classes have their test images in novel/test and the others in novel/support, those of the lists first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.published_splits import check_pools, digest, report_missing, rows
from ifsl_bench.data.session_lists import ListedImage, SessionList, SessionSource
from ifsl_bench.data.sets.cifar_fs import PARTS, SHAPE, Cifar100, CifarFS, sides
from ifsl_bench.data.source import Count, Counts, Import

LISTS = "cifar100-fscil.csv.xz"
HELD_OUT = 50  # training images of a base class in base/val
WHAT = "CIFAR-100's session lists"
COUNTS = {
    "base/train": Count(60, 60 * 450),
    "base/val": Count(60, 60 * HELD_OUT),
    "base/test": Count(60, 60 * 100),
    "novel/support": Count(40, 40 * 500),
    "novel/test": Count(40, 40 * 100),
}


class SessionArrays(Cifar100):
    def pools(
        self, to: Import, names: Sequence[str], train: np.ndarray, test: np.ndarray
    ) -> dict[str, dict[str, Sequence[int]]]:
        listed = SessionList.of(WHAT, _listed(to, names, train, test))
        named = {image for images in listed.train.values() for image in images}
        others: dict[str, list[str]] = {}
        for row, label in enumerate(train):
            if (image := f"{PARTS[0]}[{row}]") not in named:
                others.setdefault(names[label], []).append(image)
        pools: dict[str, dict[str, Sequence[int]]] = {
            pool: {name: [_row(image, len(train)) for image in images] for name, images in groups.items()}
            for pool, groups in listed.pools(others, HELD_OUT, "cifar100-sessions").items()
        }
        check_pools(to, WHAT, COUNTS, pools)
        return pools


def _row(image: str, train: int) -> int:
    """The row of ``train[i]`` or ``test[i]`` in both files, one after the other."""
    part, _, index = image[:-1].partition("[")
    return int(index) + (train if part == PARTS[1] else 0)


def _listed(to: Import, names: Sequence[str], train: np.ndarray, test: np.ndarray) -> Iterator[ListedImage]:
    """The rows of the list that the files have, with the class that the files say.

    Raises:
        UserError: rows are missing, where the user has not allowed it; a label of the files is not the list's.
    """
    labels, missing = {PARTS[0]: train, PARTS[1]: test}, []
    session_of = {row["fine_label"]: row["session"] for row in rows(LISTS) if row["role"] == PARTS[1]}
    for row in rows(LISTS):
        part, index, session = row["role"], int(row["index"]), row["session"]
        if index >= len(labels[part]):
            missing.append(f"{part}[{index}]")
            continue
        label = str(labels[part][index])
        if session_of.get(label) != session or row["fine_label"] not in ("", label):
            raise UserError(
                f"{to.origin}: {part}[{index}] is of class {names[int(label)]!r}, in {WHAT} it is of another; get "
                f"cifar-100-python.tar.gz again"
            )
        yield ListedImage(f"{part}[{index}]", names[int(label)], int(session), part == PARTS[1])
    if missing:
        report_missing(to, missing, f"images of {WHAT}")


class CifarSessions(CifarFS, SessionSource):
    """The classes and images of the common session lists, with base/val held out of base/train."""

    name = "cifar100-sessions"
    summary: ClassVar[str] = (
        "CIFAR-100, 60 base and 40 novel classes of the session lists; from cifar-100-python.tar.gz"
    )
    forms = (SessionArrays(),)

    def sessions(self) -> dict[str, int]:
        names = sorted(sides())  # a class's label is its place
        return {names[int(row["fine_label"])]: int(row["session"]) for row in rows(LISTS) if row["fine_label"]}

    def recipe(self) -> str:
        return f"{self.name}, 1, {digest(LISTS)}"

    def outline(self) -> tuple[tuple[int, ...], Counts]:
        return SHAPE, COUNTS
