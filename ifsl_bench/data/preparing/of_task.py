"""The data of a task: its data set, some of the base classes, and perhaps the one that novel classes come from."""

from __future__ import annotations

from ifsl_bench.common.errors import unknown
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.crossed import crossed
from ifsl_bench.data.pools import Dataset
from ifsl_bench.data.preparing.prepare import ensure, is_prepared
from ifsl_bench.data.subset import some_base_classes
from ifsl_bench.plugin import registry
from ifsl_bench.protocol.task import DataSpec, Task
from ifsl_bench.protocol.task_files import own, packaged


def data_of(task: Task, home: Home) -> tuple[DataSpec, ...]:
    """The data sets that a task needs: its own, and the one that novel classes come from where that is another.

    Raises:
        UserError: there is no data set of that name.
    """
    name = task.novel_from
    if name is None:
        return (task.dataset,)
    specs = {other.dataset.name: other.dataset for other in packaged().values()}
    if name not in specs:
        specs |= {other.dataset.name: other.dataset for other in own(home).values()}
    known = registry.names(registry.DATASETS)
    if name not in specs and name not in known and not is_prepared(home, name):
        raise unknown("data set", name, {*known, *specs}, where=f"that {task.name!r} takes novel classes from",
                      see="ifsl-bench data list")  # fmt: skip
    return task.dataset, specs.get(name, DataSpec(name=name))


def ensure_of(task: Task, home: Home, reporter: Reporter) -> Dataset:
    """The data of a task, built now if they can be.

    Raises:
        UserError: as :func:`ensure`; or the task wants more base classes than there are, or novel classes of a data
            set that does not fit.
    """
    first, *other = (ensure(home, spec, reporter) for spec in data_of(task, home))
    kept = some_base_classes(first, task.base_classes) if task.base_classes else first
    return crossed(kept, *other) if other else kept
