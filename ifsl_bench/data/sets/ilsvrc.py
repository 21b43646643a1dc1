"""The training images of ILSVRC-2012: ``<wnid>/<wnid>_<number>.JPEG`` in any folder or archive, or its tar of tars."""

from __future__ import annotations

import re

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.read.archive import FileTree

TITLE = "the training images of ILSVRC-2012 (<wnid>/<wnid>_<number>.JPEG)"
_IMAGE = re.compile(r"(?:.*/)?(n[0-9]{8})/(\1_([0-9]+)\.jpe?g)", re.IGNORECASE)


def recognises(tree: FileTree) -> bool:
    return any(_IMAGE.fullmatch(entry.path) for entry in tree.entries)


def find_images(tree: FileTree) -> dict[str, dict[str, str]]:
    """wnid -> file name as published (``n01532829_28.JPEG``) -> path, both in order; images in order of their numbers.

    Raises:
        UserError: there are two files of one name.
    """
    found: dict[str, dict[int, str]] = {}
    for entry in tree.entries:
        if match := _IMAGE.fullmatch(entry.path):
            images, number = found.setdefault(match[1].lower(), {}), int(match[3])
            if number in images:
                raise UserError(
                    f"{tree.path} has {match[1]}_{number}.JPEG twice, {images[number]} and {entry.path}; "
                    f"give the folder of the training images alone"
                )
            images[number] = entry.path
    return {wnid: {f"{wnid}_{n}.JPEG": found[wnid][n] for n in sorted(found[wnid])} for wnid in sorted(found)}
