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

from ifsl_bench.data.published_splits import (
    COUNTS_60_40,
    HELD_OUT,
    ListedImage,
    SessionSource,
    check_pools,
    report_missing,
    rows,
    session_pools,
)
from ifsl_bench.data.sets.cifar_fs import PARTS, Cifar100, CifarFS, sides
from ifsl_bench.data.source import BuildContext
from ifsl_bench.utils.errors import UserError

LISTS = "cifar100-fscil.csv.xz"
WHAT = "CIFAR-100's session lists"


class SessionArrays(Cifar100):
    def pools(
        self, context: BuildContext, names: Sequence[str], train: np.ndarray, test: np.ndarray
    ) -> dict[str, dict[str, Sequence[int]]]:
        images: dict[str, dict[str, int]] = {name: {} for name in names}
        for start, part, labels in ((0, PARTS[0], train), (len(train), PARTS[1], test)):
            for row, label in enumerate(labels):
                images[names[label]][f"{part}[{row}]"] = start + row
        pools: dict[str, dict[str, Sequence[int]]] = session_pools(
            WHAT, _listed(context, names, train, test), images, HELD_OUT, "cifar100-sessions"
        )
        check_pools(context, WHAT, COUNTS_60_40, pools)
        return pools


def _listed(context: BuildContext, names: Sequence[str], train: np.ndarray, test: np.ndarray) -> Iterator[ListedImage]:
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
                f"{context.origin}: {part}[{index}] is of class {names[int(label)]!r}, in {WHAT} it is of another; get "
                f"cifar-100-python.tar.gz again"
            )
        yield ListedImage(f"{part}[{index}]", names[int(label)], int(session), part == PARTS[1])
    if missing:
        report_missing(context, missing, f"images of {WHAT}")


class CifarSessions(CifarFS, SessionSource):
    """The classes and images of the common session lists, with base/val held out of base/train."""

    name = "cifar100-sessions"
    summary: ClassVar[str] = (
        "CIFAR-100, 60 base and 40 novel classes of the session lists; from cifar-100-python.tar.gz"
    )
    layouts = (SessionArrays(),)
    counts, lists = COUNTS_60_40, (LISTS,)

    def sessions(self) -> dict[str, int]:
        names = sorted(sides())  # a class's label is its place
        return {names[int(row["fine_label"])]: int(row["session"]) for row in rows(LISTS) if row["fine_label"]}
