"""Says so where files make another data set than the one they were given for."""

from __future__ import annotations

from collections.abc import Iterator

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data import registered
from ifsl_bench.data.read.archive import FileTree
from ifsl_bench.data.sets.folder import ImageFolder
from ifsl_bench.data.sets.own import OwnData
from ifsl_bench.data.source import DatasetSource, Form
from ifsl_bench.plugin import registry


def check_form(source: DatasetSource, tree: FileTree, reporter: Reporter) -> None:
    """Holds the form of files against those of all data sets.

    Warns of a data set of the user's own that is made of a registered one's images: a name that seems right, but is
    not, would give them another division. Not where the user says how to divide them.

    Raises:
        UserError: they are of no form of this data set, but of one of another; names every one that fits.
    """
    if not source.forms:
        return
    mine = source.form(tree)
    at_random = isinstance(source, OwnData) and isinstance(mine, ImageFolder) and not mine.divided(tree)
    if mine is not None and not at_random:
        return
    others = list(_others(source, tree))
    if not others:
        return
    titles = " and ".join(dict.fromkeys(form.title for _, form in others))
    made = " or ".join(f"{other.name!r} ({other.summary})" for other, _ in others)
    commands = ", or ".join(f"ifsl-bench data prepare {other.name} --from {tree.path}" for other, _ in others)
    told = f"{tree.path} holds {titles}, which makes data set {made}"
    if mine is None:
        raise UserError(f"{told}, not {source.name!r}; to prepare it: {commands}")
    reporter.warn(
        f"{told}; as {source.name!r} it becomes a data set of your own, with classes divided at random. To have it "
        f"divided as it is published: {commands}"
    )


def _others(source: DatasetSource, tree: FileTree) -> Iterator[tuple[DatasetSource, Form]]:
    """Registered data sets that the files make, and the form that they have for them."""
    for name in registry.names(registry.DATASETS):
        if name == source.name or registry.load(registry.DATASETS, name).problem:
            continue
        other = registered.dataset_source(name)
        if (form := other.form(tree)) is not None:
            yield other, form
