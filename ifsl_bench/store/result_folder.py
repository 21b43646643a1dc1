"""Folders of results, the user's own and the one with the package, and which results belong together. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_limits import max_episodes_of_task
from ifsl_bench.store.schema import Result, parse_result, read_result, result_path
from ifsl_bench.utils.errors import UserError, unknown_name_error
from ifsl_bench.utils.files import translate_disk_errors
from ifsl_bench.utils.text_format import format_numbers

CLAIMS_FILE = "claims.toml"  # in the folder of the package: the sentences of README and docs on its rows
LEFT_OUT_PREFIX = "left out: "  # how remarks on such files and rows begin


def packaged_results_folder() -> Path:
    """Return the folder of the stored results that come with the package."""
    return Path(str(resources.files("ifsl_bench.results")))


def read_results(root: Path, tasks: Iterable[str] | None = None) -> tuple[list[Result], list[str]]:
    """Read results, with a remark on each file that is left out.

    A damaged file, or one that is not in its place (its path has another task, label or seed), is left out. That the
    summaries of the package's own files follow from their counts is not checked again: ``ifsl-bench check`` and the
    tests do so, and it takes longer than all the rest.

    Args:
        root: the folder of results.
        tasks: only of these; by default all.
    """
    if not root.is_dir():
        return [], []
    names = sorted(tasks) if tasks is not None else sorted(p.name for p in root.iterdir() if p.is_dir())
    results, remarks, paths = [], list[str](), list[Path]()
    for name in (name for name in names if name != "published"):
        try:
            paths += sorted(path for path in (root / name).iterdir() if path.match("*.seed-*.json"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            remarks.append(f"{LEFT_OUT_PREFIX}{root / name} cannot be read ({error.strerror})")
    reader = parse_result if root.resolve() == packaged_results_folder().resolve() else read_result
    for path in paths:
        try:
            result = reader(path)
        except UserError as error:
            remarks.append(f"{LEFT_OUT_PREFIX}{error}")
            continue
        if path != result_path(root, result):
            remarks.append(
                f"{LEFT_OUT_PREFIX}{path} holds {result.label}, seed {result.seed}, of {result.task}: not its place"
            )
        else:
            results.append(result)
    return results, remarks


def measurement_time(result: Result) -> datetime:
    """Return the time when a result was made; the beginning of 1970 where none is recorded."""
    try:
        time = datetime.fromisoformat(str(result.provenance.get("time", "")))
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def group_results_by_row(
    root: Path, tasks: Collection[str] = (), labels: Collection[str] = (), since: datetime | None = None
) -> tuple[list[list[Result]], list[str]]:
    """Return the results in a folder by task and label, each by seed, and a remark on each file that cannot be read.

    Args:
        root: the folder.
        tasks: only of these, if any.
        labels: only of these, if any.
        since: only results that were made then or later.

    Raises:
        UserError: a task or label of which there are no results.
    """
    results, remarks = read_results(root)
    for kind, names, here in (
        ("task", tasks, {result.task for result in results}),
        ("row", labels, {result.label for result in results}),
    ):
        if odd := [name for name in names if name not in here]:
            raise unknown_name_error(
                kind, odd[0], here, where=f"among the results in {root}", see="ifsl-bench results list"
            )
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        is_named = (not tasks or result.task in tasks) and (not labels or result.label in labels)
        if is_named and (since is None or measurement_time(result) >= since):
            groups.setdefault((result.task, result.label), []).append(result)
    return [sorted(groups[key], key=lambda result: result.seed) for key in sorted(groups)], remarks


def remove_files(paths: Sequence[Path]) -> None:
    """Remove files of results, and folders of tasks that are empty then."""
    for path in paths:
        with translate_disk_errors(path):
            path.unlink(missing_ok=True)
            if not any(path.parent.iterdir()):
                path.parent.rmdir()


def find_row_files(root: Path, task: str, label: str, seed: int | None) -> list[Path]:
    """Return the files of a row, or of one of its seeds.

    Args:
        root: the folder of results.
        task: of the row.
        label: of the row.
        seed: of training; None for all.

    Raises:
        UserError: there is none.
    """
    rows, _ = group_results_by_row(root, [task], [label])
    results = {result.seed: result_path(root, result) for row in rows for result in row}
    if not results:
        raise UserError(f"there are no results of {label} on {task} in {root}")
    if seed is not None and seed not in results:
        seeds = format_numbers(list(results))
        raise UserError(f"{label} on {task} has results of seeds {seeds} in {root}, and none of seed {seed}")
    return [results[seed]] if seed is not None else list(results.values())


def find_results_of_other_episodes(task: Task, results: Sequence[Result]) -> dict[int, str]:
    """Return the results whose episodes cannot belong to their task and digest: id of a result -> reason.

    A digest is of one number of episodes: that of the task where the task pins it, or where one of the results has as
    many; else that of most results with this digest, and of the first of them where it is a tie.

    Args:
        task: that the results are of.
        results: of this very definition of the task, the most trustworthy first.
    """
    reasons = {id(r): reason for r in results if (reason := _reason_episodes_do_not_fit(task, r))}
    counts: dict[str, list[int]] = {}
    for result in results:
        if id(result) not in reasons:
            counts.setdefault(result.digest, []).append(len(result.episodes))
    whole = task.evaluation.episodes
    for result in results:
        count, digest = len(result.episodes), result.digest
        if id(result) not in reasons:
            most = Counter(counts[digest]).most_common(1)[0][0]
            expected = whole if digest == task.digest or whole in counts[digest] else most
            if count != expected:
                reasons[id(result)] = f"it has {count:,} episodes, those of its digest {digest[:12]} are {expected:,}"
    return reasons


def _reason_episodes_do_not_fit(task: Task, result: Result) -> str | None:
    """Return why no episodes of the task are like a result's; None where they may be."""
    episodes, count = result.episodes, len(result.episodes)
    if count > (most := max_episodes_of_task(task)):
        return f"it has {count:,} episodes; this task allows at most {most:,}"
    shape, listed = protocol_of_task(task).expected_counts_shape(task, count)
    for name, expected in shape.items():
        if (number := getattr(episodes, name, None)) != expected:
            return f"episodes.{name} is {number}, episodes of the task have {expected}"
    used, half = (
        result.calibration and result.calibration.validation_episodes,
        len(task.evaluation.validation_halves[0]),
    )
    if used not in (None, half):
        return f"calibration.validation_episodes is {used}, the task has {half} for it"
    if (named := episodes.column_length("classes")) and named != listed:
        return f"episodes.classes has {named:,} entries, {count:,} episodes have {listed:,}"
    return None


def reason_not_to_pair(a: Result, b: Result) -> str | None:
    """Return why two results cannot be compared episode by episode; None where they can.

    Args:
        a: one result.
        b: another one.
    """
    if a.task != b.task:
        return f"the tasks differ ({a.task} and {b.task})"
    if a.task_hash != b.task_hash:
        return f"the task's definition differs (hash {a.task_hash} and {b.task_hash})"
    if a.fingerprint != b.fingerprint:
        return f"the data differ (fingerprint {a.fingerprint[:12]} and {b.fingerprint[:12]})"
    if a.novel_fingerprint != b.novel_fingerprint:
        sides = f"{a.novel_fingerprint[:12] or 'none'} and {b.novel_fingerprint[:12] or 'none'}"
        return f"the data of novel classes differ (fingerprint {sides})"
    n, m = len(a.episodes), len(b.episodes)
    if a.digest != b.digest:
        count = f", {n} and {m} of them" if n != m else ""
        return f"the episodes differ (digest {a.digest[:12]} and {b.digest[:12]}{count})"
    if n != m:
        return f"both say that their episodes are those of digest {a.digest[:12]}, and have {n} and {m} of them"
    for name, value in a.episodes.shape_values.items():
        if value != getattr(b.episodes, name):
            return f"the episodes differ ({name} {value} and {getattr(b.episodes, name)})"
    if not a.episodes.has_same_numbers(b.episodes, a.episodes.DRAWN_COLUMNS):
        return "the novel classes of their episodes differ"
    return None
