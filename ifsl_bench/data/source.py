"""The interface of a data set plugin. Register a subclass under the entry point group ``ifsl_bench.datasets``.

A data set that is made from users' files has a :class:`Layout` for each form in which they have them. The first that
matches what ``--from`` names builds the pools.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ifsl_bench.data.pools import EVERY_POOL
from ifsl_bench.data.read.archive import FileTree, printable
from ifsl_bench.data.writer import Writer
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import Reporter


class BuildContext:
    """An import on its way: what it reads, where it writes, whom it tells, and what it found.

    Attributes:
        writer: takes the pools; ``writer.has(pool)`` is true for one that an interrupted import had finished.
        tree: what ``--from`` names, opened; None for a data set made from nothing, or from objects in memory.
        origin: what it reads, as messages call it.
        reporter: hears of progress.
        allow_partial: whether the user accepts less than the source should hold.
        about: what the manifest records of the import, JSON-able. ``partial`` is in it, see :meth:`mark_partial`.
        bytes_read: counted by the form, for the speed that is reported.
    """

    writer: Writer  # there as soon as building begins

    def __init__(
        self, tree: FileTree | None, reporter: Reporter, allow_partial: bool = False, origin: str = "made here"
    ) -> None:
        self.tree, self.reporter, self.allow_partial = tree, reporter, allow_partial
        self.origin = str(tree.path) if tree else origin
        self.about: dict[str, Any] = {"source": printable(tree.path.name) if tree else origin, "partial": False}
        self.bytes_read = 0

    @property
    def files(self) -> FileTree:
        """The tree of a data set that needs one."""
        if self.tree is None:
            raise UserError("this data set is made from files; say where they are with --from PATH")
        return self.tree

    @property
    def partial_option(self) -> str:
        """The words by which a user accepts less: on the command line, or in the call that was given objects."""
        return "--allow-partial" if self.tree else "allow_partial=True"

    def check_counts(self, what: str, expected: PoolCounts, counts: PoolCounts) -> None:
        """Compares what was found with what ``what``, such as Tiny-ImageNet, should hold, as published.

        Raises:
            UserError: they differ, and the user has not allowed it; both counts stand in the message.
        """
        none = Count(0, 0)
        pairs = [(pool, expected.get(pool, none), counts.get(pool, none)) for pool in EVERY_POOL]
        wrong = "; ".join(f"{pool} should have {should} and has {has}" for pool, should, has in pairs if should != has)
        if wrong:
            self.require_complete(
                wrong, f"{self.origin} does not give all of {what}: {wrong}. Get the whole", "partial: "
            )

    def require_complete(self, told: str, refused: str, kind: str = "") -> None:
        """Warns of what is missing, and marks the data set as partial.

        Args:
            told: what it is; ``kind`` goes before it in the warning.
            refused: the error, up to what the user can do instead of allowing it.

        Raises:
            UserError: the user has not allowed it.
        """
        if not self.allow_partial:
            raise UserError(
                f"{refused}, or add {self.partial_option} for a data set that is marked partial wherever it is used"
            )
        self.reporter.warn(f"{kind}{told}")
        self.mark_partial(told)

    def mark_partial(self, why: str) -> None:
        """Marks the data set as partial: in its manifest, its fingerprint and every result on it."""
        self.about["partial"] = True
        self.about.setdefault("missing", []).append(why)


class Layout(ABC):
    """One of the forms in which people have a data set.

    Attributes:
        title: the form in words, with the names of its files; told to the user, and recorded.
    """

    title: ClassVar[str]

    @abstractmethod
    def matches(self, tree: FileTree) -> bool:
        """Returns whether the tree has this form, judged by the names of its files."""

    @abstractmethod
    def build(self, context: BuildContext) -> None:
        """Writes the pools from ``context.files``."""


class DatasetSource(ABC):
    """Makes a data set.

    Attributes:
        name: what tasks call it.
        summary: one line for ``ifsl-bench data list``.
        needs_source: False if it can be made from nothing, and therefore rebuilt at any time.
        forms: what it can be made from, the likeliest first.
    """

    name: str
    summary: ClassVar[str]
    needs_source: ClassVar[bool] = True
    layouts: Sequence[Layout] = ()

    @abstractmethod
    def recipe(self) -> str:
        """Identity of what is made: changes whenever the content would."""

    def layout(self, tree: FileTree) -> Layout | None:
        """The form that a tree has, None where it has none of this data set's."""
        return next((layout for layout in self.layouts if layout.matches(tree)), None)

    def build(self, context: BuildContext) -> None:
        """Writes the pools; by the form that is recognised, where the data set has forms.

        Raises:
            UserError: the files are not what they should be.
        """
        layout = self.layout(context.files)
        if layout is None:
            wanted = "; or ".join(layout.title for layout in self.layouts)
            names = [entry.path for entry in context.files.entries[:3]]
            holds = f"it holds {', '.join(names)}, ...;" if names else "it holds no files (hidden ones do not count);"
            raise UserError(
                f"{context.files.path} ({context.files.kind}) has none of the forms of data set {self.name!r}: {holds} "
                f"known are: {wanted}"
            )
        context.reporter.say(f"{context.files.path}: {layout.title} ({context.files.kind})")
        context.about["form"] = layout.title
        layout.build(context)

    def expected_contents(self) -> tuple[tuple[int, ...], PoolCounts] | None:
        """Shape of an image, classes and images of each pool, if known before building."""
        return None

    def rough_seconds(self) -> float | None:
        """About how long building takes here, measured quickly; None where nobody knows."""
        return None


class Downloadable(DatasetSource):
    """A data set whose archive may be downloaded by a program."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address from which :meth:`fetch` gets the archive."""

    @abstractmethod
    def fetch(self, folder: Path) -> Path:
        """Gets the archive into a folder and checks it.

        Raises:
            OSError: it cannot be reached.
            RuntimeError: what came has another checksum.
        """


@dataclass(frozen=True)
class Count:
    """Classes and images of a pool."""

    classes: int
    images: int

    def __str__(self) -> str:
        return f"{self.classes:,} classes with {self.images:,} images"


PoolCounts = Mapping[str, Count]  # by pool


def count_files(pools: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, Count]:
    """Classes and images of pools: pool -> class -> images."""
    return {pool: Count(len(files), sum(map(len, files.values()))) for pool, files in pools.items()}
