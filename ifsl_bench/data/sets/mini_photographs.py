"""mini-ImageNet's 60,000 JPEGs, 84x84, in any folders, under the names of Ravi and Larochelle (ICLR 2017)."""

from __future__ import annotations

import re
from typing import ClassVar

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.published_splits import columns, report_missing
from ifsl_bench.data.read.archive import FileTree
from ifsl_bench.data.source import Form, Import

NAMES = "mini-imagenet-original-names.csv.xz"
_IMAGE = re.compile(r"(?:.*/)?((n[0-9]{8})[0-9]{8}\.jpe?g)", re.IGNORECASE)


class Photographs(Form):
    """The form; what its images are used for is the data set's."""

    title: ClassVar[str] = "the 60,000 images of mini-ImageNet (n0153282900000005.jpg, ...)"

    def recognises(self, tree: FileTree) -> bool:
        return any(_IMAGE.fullmatch(entry.path) for entry in tree.entries)


def find_images(to: Import) -> dict[str, dict[str, str]]:
    """wnid -> file name -> path in ``to.files``, both in the order of the published list.

    Raises:
        UserError: a file of the list is missing, where the user has not allowed it, or is there twice.
    """
    tree, paths = to.files, dict[str, str]()
    for entry in tree.entries:
        if match := _IMAGE.fullmatch(entry.path):
            name = match[1].lower().replace(".jpeg", ".jpg")
            if name in paths:
                raise UserError(
                    f"{tree.path} has {name} twice, {paths[name]} and {entry.path}; give the folder of the images alone"
                )
            paths[name] = entry.path
    names = columns(NAMES, "filename", "original")
    if missing := [name for name in names if name not in paths]:
        report_missing(to, missing, "of the 60,000 images of mini-ImageNet")
    images: dict[str, dict[str, str]] = {}
    for name in names:
        if name in paths:
            images.setdefault(name[:9], {})[name] = paths[name]
    return images
