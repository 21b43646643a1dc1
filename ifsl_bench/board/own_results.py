"""What is in the user's folder of results: which rows, how old, in which files. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from ifsl_bench.board.result_file import Result, path_of
from ifsl_bench.board.result_folder import stored
from ifsl_bench.common.errors import UserError, unknown
from ifsl_bench.common.files import disk_errors
from ifsl_bench.common.wording import numbers_in_words


@dataclass(frozen=True)
class OwnRow:
    """The results of one label on one task, by seed; they need not belong together, as those of a table's row do."""

    results: tuple[Result, ...]

    def record(self) -> dict[str, str]:
        """Tells of it in a list."""
        first = self.results[0]
        return {
            "task": first.task,
            "method": first.label,
            "Acc.": f"{fmean(result.summary['acc']['mean'] for result in self.results):.2f}",
            "seeds": numbers_in_words([result.seed for result in self.results]),
            "measured": f"{max(map(measured, self.results)):%Y-%m-%d %H:%M}",
        }


def measured(result: Result) -> datetime:
    """When a result was made, as it says; long ago where it says nothing that is a time."""
    try:
        time = datetime.fromisoformat(str(result.provenance.get("time", "")))
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def own_rows(
    root: Path, tasks: Collection[str] = (), labels: Collection[str] = (), since: datetime | None = None
) -> tuple[list[OwnRow], list[str]]:
    """The rows in a folder of results, by task and label, and a remark on each file that cannot be read.

    Args:
        tasks, labels: of these alone, where any are given.
        since: only results that were made then or later.

    Raises:
        UserError: a task or label of which there are no results.
    """
    results, remarks = stored(root)
    for kind, names, here in (
        ("task", tasks, {result.task for result in results}),
        ("row", labels, {result.label for result in results}),
    ):
        if odd := [name for name in names if name not in here]:
            raise unknown(kind, odd[0], here, where=f"among the results in {root}", see="ifsl-bench results list")
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        is_named = (not tasks or result.task in tasks) and (not labels or result.label in labels)
        if is_named and (since is None or measured(result) >= since):
            groups.setdefault((result.task, result.label), []).append(result)
    rows = [OwnRow(tuple(sorted(groups[key], key=lambda result: result.seed))) for key in sorted(groups)]
    return rows, remarks


def remove(paths: Sequence[Path]) -> None:
    """Removes files of results, and folders of tasks that are empty then."""
    for path in paths:
        with disk_errors(path):
            path.unlink(missing_ok=True)
            if not any(path.parent.iterdir()):
                path.parent.rmdir()


def to_remove(root: Path, task: str, label: str, seed: int | None) -> list[Path]:
    """The files of a row, or of one of its seeds; raises :class:`UserError` where there is none."""
    rows, _ = own_rows(root, [task], [label])
    results = {result.seed: path_of(root, result) for row in rows for result in row.results}
    if not results:
        raise UserError(f"there are no results of {label} on {task} in {root}")
    if seed is not None and seed not in results:
        seeds = numbers_in_words(list(results))
        raise UserError(f"{label} on {task} has results of seeds {seeds} in {root}, and none of seed {seed}")
    return [results[seed]] if seed is not None else list(results.values())
