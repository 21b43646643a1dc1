"""The description of a task that ``ifsl-bench tasks NAME`` prints. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from ifsl_bench.analysis.task_results import TaskResults, load_task_results
from ifsl_bench.backbones.contract import is_frozen, pretraining_corpora
from ifsl_bench.data.preparing.catalogue import describe_availability
from ifsl_bench.data.preparing.metadata import load_task_metadata
from ifsl_bench.protocols.registry import protocol_of_task
from ifsl_bench.protocols.tasks.contamination import ROW_NOTE_OF_SEEN_LEVEL, seen_state_in_pretraining
from ifsl_bench.protocols.tasks.task import INCLUDED_BACKBONE, NO_BACKBONE, Task
from ifsl_bench.reporting.notes import HIDDEN_CLASSES_NOTE
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.text_format import format_count

META_TRAINING_PROTOCOL_TEXTS = {
    "separate": "the novel classes of meta-training are a pool of their own",
    "shared": "the novel classes of meta-training are base classes, which an episode hides from the base classifier",
}


def describe_task(task: Task, folders: Paths) -> dict[str, str]:
    """Return names and texts: the data, what an episode is, the three stages, and the results.

    Args:
        task: the task.
        folders: where data and results are.
    """
    return {name: text for name, text in _describe_task_lines(task, folders) if text}


def _describe_task_lines(task: Task, folders: Paths) -> Iterator[tuple[str, str]]:
    data = task.dataset.name
    yield "task", f"{task.name}: {task.title}"
    yield "variant of", task.variant_of and f"{task.variant_of}; rows of the two are not compared"
    yield "data", f"{data}: {describe_availability(folders, data)}"
    if task.novel_from:
        yield "novel data", f"{task.novel_from}: {describe_availability(folders, task.novel_from)}"
    if task.has_base:
        yield "base", _describe_base_classes(task, folders)
    yield protocol_of_task(task).describe_drawn_items(task)
    yield "protocol", f"{task.protocol}: {META_TRAINING_PROTOCOL_TEXTS[task.protocol]}"
    yield "backbone", _describe_backbone(task)
    yield (
        "seen",
        ROW_NOTE_OF_SEEN_LEVEL[
            seen_state_in_pretraining(pretraining_corpora(task.pretraining), task.novel_data, task.base_order)
        ],
    )
    stage = task.meta_training
    yield "meta-training", f"{stage.steps:,} steps, validation every {stage.validate_every:,}"
    counts = task.evaluation
    hidden = f"; {HIDDEN_CLASSES_NOTE}" if task.hides_base_classes("val") else ""
    yield (
        "evaluation",
        f"{counts.episodes:,} test and {counts.validation_episodes:,} validation "
        f"{protocol_of_task(task).drawn_items_noun}{hidden}",
    )
    yield "definition", task.hash
    yield "digest", task.digest or ""
    task_results = load_task_results(task, folders.results)
    yield "results", _describe_results(task_results)
    yield "run", f"ifsl-bench run --method imprint --task {task.name}"
    yield "cite", f"ifsl-bench cite {task.name}"


def _describe_base_classes(task: Task, folders: Paths) -> str:
    try:
        count = load_task_metadata(task, folders, published_counts=True).n_base_classes
    except UserError:
        count = 0
    return f"{count} classes" if count else "as many classes as its data have"


def _describe_backbone(task: Task) -> str:
    name, spec = task.pretraining.backbone, task.pretraining
    if name == NO_BACKBONE:
        return "none: the data are features, and a base classifier is trained on them"
    if name == INCLUDED_BACKBONE:
        return "included: features and base classifiers come with the package"
    if is_frozen(spec):
        seen_by = f", pretrained on {spec.pretrained_on}, as its user says" if spec.pretrained_on else ""
        return f"{name}, frozen{seen_by}; a base classifier is trained on its features"
    own = "one for each training seed" if spec.seed is None else "the same for all training seeds"
    return f"{name}, pretrained on the base classes for {spec.steps:,} steps, {own}"


def _describe_results(task_results: TaskResults) -> str:
    measured = len({(row.label, row.results_origin) for row in task_results.measured_rows})
    counts = {"measured": measured, "published": len(task_results.published_rows)}
    text = " and ".join(format_count(count, f"{kind} row") for kind, count in counts.items() if count)
    return (
        f"{text}: ifsl-bench {'leaderboard' if measured else 'table'} {task_results.task_name}" if text else "none yet"
    )
