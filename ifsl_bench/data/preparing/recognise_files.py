"""Says so where files make another data set than the one they were given for."""

from __future__ import annotations

from ifsl_bench.common.errors import UserError
from ifsl_bench.data import registered
from ifsl_bench.data.read.archive import FileTree
from ifsl_bench.data.source import DatasetSource
from ifsl_bench.plugin import registry


def check_form(source: DatasetSource, tree: FileTree) -> None:
    """Holds the form of files against those of all data sets.

    Raises:
        UserError: they are of no form of this data set, but of one of another; names every one that fits.
    """
    if not source.forms or source.form(tree) is not None:
        return
    names = [name for name in registry.names(registry.DATASETS) if not registry.load(registry.DATASETS, name).problem]
    others = [
        (source, form) for source in map(registered.dataset_source, names) if (form := source.form(tree)) is not None
    ]
    if others:
        titles = " and ".join(dict.fromkeys(form.title for _, form in others))
        choices = " or ".join(f"{source.name!r} ({source.summary})" for source, _ in others)
        commands = ", or ".join(f"ifsl-bench data prepare {source.name} --from {tree.path}" for source, _ in others)
        raise UserError(
            f"{tree.path} holds {titles}, which makes data set {choices}, not {source.name!r}; to prepare it: "
            f"{commands}"
        )
