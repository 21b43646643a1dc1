"""What a data set plugin provides. Register a subclass under the entry point group ``ifsl_bench.datasets``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from ifsl_bench.data.pools import Dataset, Writer
from ifsl_bench.reporter import Reporter


class DatasetSource(ABC):
    """Makes a data set.

    Attributes:
        name: what tasks call it.
        summary: one line for ``ifsl-bench data list``.
        needs_source: False if it can be made from nothing, and therefore rebuilt at any time.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs_source: ClassVar[bool] = True

    @abstractmethod
    def recipe(self) -> str:
        """Identity of what is made: changes whenever the content would."""

    @abstractmethod
    def build(self, writer: Writer, source: Path | None, reporter: Reporter) -> None:
        """Writes the pools. ``source`` is what the user gave as ``--from``, None where nothing is needed."""

    def outline(self) -> tuple[tuple[int, ...], dict[str, int], int] | None:
        """Shape of an image, images in each pool and number of base classes, if known before building."""
        return None

    def rough_seconds(self) -> float | None:
        """About how long building takes here, measured quickly; None where nobody knows."""
        return None

    def details(self, dataset: Dataset) -> list[tuple[str, list[dict[str, object]]]]:
        """Further tables (title, rows) for ``ifsl-bench data stats``."""
        return []
