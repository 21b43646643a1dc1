"""The embedded data set as a plugin: letters rendered from the DejaVu faces, no download."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ifsl_bench.data.sets import glyphs
from ifsl_bench.data.source import Count, Counts, DatasetSource, Import


class Glyphs(DatasetSource):
    """Letters of eight scripts in twelve DejaVu faces, 32x32, one channel; no script on two sides."""

    name = "glyphs"
    summary: ClassVar[str] = "letters rendered from the DejaVu faces, 32x32; embedded, no download"
    needs_source: ClassVar[bool] = False

    def recipe(self) -> str:
        return glyphs.recipe()

    def outline(self) -> tuple[tuple[int, ...], Counts]:
        pools = glyphs.pools().items()
        return glyphs.IMAGE_SHAPE, {n: Count(len(p.letters), p.per_class * len(p.letters)) for n, p in pools}

    def rough_seconds(self) -> float:
        return 10.0

    def build(self, to: Import) -> None:
        pools = glyphs.pools()
        total = sum(count.images for count in self.outline()[1].values())
        with to.reporter.stage("rendering glyphs", total) as stage:
            for name, pool in pools.items():
                labels = np.repeat(np.arange(len(pool.letters)), pool.per_class)
                classes = tuple(letter.label for letter in pool.letters)
                with to.writer.pool(name, labels, classes, glyphs.IMAGE_SHAPE) as images:
                    glyphs.fill(pool, images, stage.advance)
