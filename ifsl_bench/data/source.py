"""The interface of a data set plugin: register a subclass under the entry point group ``ifsl_bench.datasets``.

A data set that is made from users' files has a :class:`Layout` for each form of these files; the first that matches
builds the pools.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ifsl_bench.data.pools import ALL_POOL_NAMES
from ifsl_bench.data.read.archive import FileTree, escape_undecoded_bytes
from ifsl_bench.data.writer import DatasetWriter
from ifsl_bench.utils.deprecated import accept_old_names, rename_attributes
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.progress import Reporter


@dataclass(frozen=True)
class PoolSize:
    """Classes and images of a pool."""

    n_classes: int
    n_images: int

    def __str__(self) -> str:
        return f"{self.n_classes:,} classes with {self.n_images:,} images"


PoolCounts = Mapping[str, PoolSize]  # by pool


def count_files(pools: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, PoolSize]:
    """Return classes and images of pools, given as pool -> class -> images."""
    return {pool: PoolSize(len(files), sum(map(len, files.values()))) for pool, files in pools.items()}


class BuildContext:
    """The state of the build of a data set.

    Attributes:
        writer: Takes the pools; ``writer.has(pool)`` is true for a pool that an interrupted build completed.
        tree: The files of ``--from``; None for a data set made from nothing, or from objects in memory.
        origin: Name of the source in messages.
        reporter: Takes messages and progress.
        allow_partial: Whether the user accepts less than the source should hold.
        about: Record of the build in the manifest, JSON-able.
        bytes_read: Counted by the layout, for the reported speed.
    """

    writer: DatasetWriter  # set when building begins

    def __init__(
        self, tree: FileTree | None, reporter: Reporter, allow_partial: bool = False, origin: str = "made here"
    ) -> None:
        self.tree, self.reporter, self.allow_partial = tree, reporter, allow_partial
        self.origin = str(tree.path) if tree else origin
        self.about: dict[str, Any] = {
            "source": escape_undecoded_bytes(tree.path.name) if tree else origin,
            "partial": False,
        }
        self.bytes_read = 0

    @property
    def file_tree(self) -> FileTree:
        """The files of a data set that needs them."""
        if self.tree is None:
            raise UserError("this data set is made from files; say where they are with --from PATH")
        return self.tree

    @property
    def partial_option_text(self) -> str:
        """The option by which a user accepts less, on the command line or in Python."""
        return "--allow-partial" if self.tree else "allow_partial=True"

    def check_counts(self, what: str, expected: PoolCounts, counts: PoolCounts) -> None:
        """Compare the counts of the source with the published ones.

        Args:
            what: Name of the data set in messages.
            expected: Published counts.
            counts: Counts of the source.

        Raises:
            UserError: They differ, and the user has not allowed it.
        """
        none = PoolSize(0, 0)
        pairs = [(pool, expected.get(pool, none), counts.get(pool, none)) for pool in ALL_POOL_NAMES]
        wrong = "; ".join(f"{pool} should have {should} and has {has}" for pool, should, has in pairs if should != has)
        if wrong:
            refused = f"{self.origin} does not give all of {what}: {wrong}. Get the whole"
            self.require_complete_unless_partial(wrong, refused, "partial: ")

    def require_complete_unless_partial(self, missing: str, refused: str, kind: str = "") -> None:
        """Warn of something missing and mark the data set as partial, if the user allows it.

        Args:
            missing: What is missing.
            refused: The error without the option that allows it.
            kind: Put before ``missing`` in the warning.

        Raises:
            UserError: The user has not allowed it.
        """
        if not self.allow_partial:
            raise UserError(
                f"{refused}, or add {self.partial_option_text} for a data set that is marked partial wherever it is "
                "used"
            )
        self.reporter.warn(f"{kind}{missing}")
        self.mark_partial(missing)

    def mark_partial(self, reason: str) -> None:
        """Mark the data set as partial in its manifest, its fingerprint and every result on it."""
        self.about["partial"] = True
        self.about.setdefault("missing", []).append(reason)


class Layout(ABC):
    """A form in which users have the files of a data set.

    Attributes:
        title: The form in words, with the names of its files, for messages and the manifest.
    """

    title: ClassVar[str]

    @abstractmethod
    def matches(self, tree: FileTree) -> bool:
        """Return whether the tree has this form, by the names of its files."""

    @abstractmethod
    def build(self, context: BuildContext) -> None:
        """Write the pools from ``context.files``."""


@accept_old_names(expected_contents="expected_shape_and_counts")
class DatasetSource(ABC):
    """Makes a data set.

    Attributes:
        name: Name in tasks.
        summary: A line for ``ifsl-bench data list``.
        needs_source: False if it can be made from nothing, and therefore rebuilt at any time.
        layouts: Forms of its files, the likeliest first.
    """

    name: str
    summary: ClassVar[str]
    needs_source: ClassVar[bool] = True
    layouts: Sequence[Layout] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_attributes(cls)

    @abstractmethod
    def recipe(self) -> str:
        """Return an identity that changes whenever the content would."""

    def find_layout(self, tree: FileTree) -> Layout | None:
        """Return the layout that a tree has, or None."""
        return next((layout for layout in self.layouts if layout.matches(tree)), None)

    def find_required_layout(self, tree: FileTree) -> Layout:
        """Return the layout that a tree has; raise :class:`UserError` where it has none."""
        if (layout := self.find_layout(tree)) is not None:
            return layout
        wanted = "; or ".join(layout.title for layout in self.layouts)
        names = [entry.path for entry in tree.entries[:3]]
        holds = f"it holds {', '.join(names)}, ...;" if names else "it holds no files (hidden ones do not count);"
        raise UserError(
            f"{tree.path} ({tree.kind_in_words}) has none of the forms of data set {self.name!r}: {holds} known are: "
            f"{wanted}"
        )

    def build(self, context: BuildContext) -> None:
        """Write the pools.

        Raises:
            UserError: The files are not what they should be.
        """
        layout = self.find_required_layout(context.file_tree)
        context.reporter.say(f"{context.file_tree.path}: {layout.title} ({context.file_tree.kind_in_words})")
        context.about["form"] = layout.title
        layout.build(context)

    def expected_shape_and_counts(self) -> tuple[tuple[int, ...], PoolCounts] | None:
        """Return the shape of an image and the counts of each pool, if known before building."""
        return None


class Downloadable(DatasetSource):
    """A data set whose archive may be downloaded by a program."""

    @property
    @abstractmethod
    def archive_url(self) -> str:
        """The address of the archive."""

    @abstractmethod
    def download_archive(self, folder: Path) -> Path:
        """Download the archive into a folder and check it.

        Raises:
            OSError: The address cannot be reached.
            RuntimeError: The archive has another checksum.
        """
