"""Changes that a user may make: to a task, which make another task, and to meta-training.

A change of a task is another number of ways, shots, queries or base classes (or none of these in the softmax), of
steps of pretraining, novel classes of another data set, or another backbone. It is part of the task's name,
``glyphs-5shot+ways=10+shots=3``, and through the name and the definition part of its hash, its episodes, their digest
and its folder of results. A name has only what differs from the task before the first ``+``, in the order of
:class:`TaskChanges`, so that one task has one name. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ifsl_bench.protocols.tasks.task import (
    INCLUDED_BACKBONE,
    MEAN_CENTRED,
    NO_BACKBONE,
    MetaTraining,
    Pretraining,
    SessionSpec,
    Task,
)
from ifsl_bench.protocols.tasks.task_limits import (
    BACKBONE_PATTERN,
    CORPORA_PATTERN,
    CORPORA_RULE,
    MAX_ITEMS_AT_ONCE,
    MOST_STEPS,
    NAME_PATTERN,
    NAME_RULE,
    WEIGHTS_PATTERN,
    WEIGHTS_RULE,
)
from ifsl_bench.utils.errors import UserError, unknown_name_error


class TaskChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Changes to a task; None leaves a part as it is.

    Attributes:
        base_classes: how many base classes of the data set, see :mod:`ifsl_bench.data.dataset_views`; the backbone is
            trained on these alone.
        base_order: the number of a draw of the base classes, among all classes of a published list of sessions, see
            :mod:`ifsl_bench.data.dataset_views`; the backbone is trained on these alone.
        ways: novel classes of an episode.
        shots: support images of each.
        queries: query images of each. Base queries change in proportion, so that the shares of base and novel
            queries stay what they were.
        pretraining_steps: of the backbone, whose schedule is stretched to them; a few try out a whole run.
        novel_from: a data set whose classes are the novel ones of validation and testing, see
            :mod:`ifsl_bench.data.dataset_views`; all training stays on the task's own.
        backbone: the name of another one.
        weights: the first digits of the checksum of weights that the user gives it.
        pretrained_on: what these weights have seen.
        centre: of a backbone with weights from elsewhere: "mean" subtracts the mean of the features of base/train from
            all, "none" leaves them as they are.
        sessions: the number of sessions after the base session, each of the task's ways; of a task in episodes it
            makes one in sessions.
        orders: the number of orders of the novel classes in sequences of sessions, with one support set each, in
            testing and in each half of validation; for methods that take minutes for an order.
    """

    base_classes: int | None = None
    base_order: int | None = None
    ways: int | None = None
    shots: int | None = None
    queries: int | None = None
    pretraining_steps: int | None = None
    novel_from: str | None = None
    backbone: str | None = None
    weights: str | None = None
    pretrained_on: str | None = None
    centre: str | None = None
    sessions: int | None = None
    orders: int | None = None

    def changes_by_key(self) -> dict[str, int | str]:
        """Return the changes that are not None, as they are spelled in names: ``{"base-classes": 50}``."""
        fields = msgspec.structs.fields(self)
        return {f.encode_name: value for f in fields if (value := getattr(self, f.name)) is not None}


class TaskVariantEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task of a task file: another one, ``of``, with a change, or without base classes (``regular``)."""

    of: str
    regular: bool = False
    base_classes: int | None = None
    base_order: int | None = None
    ways: int | None = None
    shots: int | None = None
    queries: int | None = None
    pretraining_steps: int | None = None
    novel_from: str | None = None
    backbone: str | None = None
    weights: str | None = None
    pretrained_on: str | None = None
    centre: str | None = None
    sessions: SessionSpec | None = None
    digest: str | None = None
    title: str = ""


MAX_CHANGE_VALUE = 1_000_000  # of anything; no data set comes near
TASK_CHANGE_KEYS = tuple(f.encode_name for f in msgspec.structs.fields(TaskChanges))
# Those whose value is a text: what it must look like, what it is, and the rule in words.
TEXT_CHANGE_RULES = {
    "novel-from": (NAME_PATTERN, "the name of a data set", NAME_RULE),
    "backbone": (BACKBONE_PATTERN, "the name of a backbone", "NAME or NAME:MODEL"),
    "weights": (WEIGHTS_PATTERN, "part of a checksum", WEIGHTS_RULE),
    "pretrained-on": (CORPORA_PATTERN, "what weights have seen", CORPORA_RULE),
    "centre": ("mean|none", "mean or none", "the mean of base/train is subtracted from features, or nothing"),
}


def make_task_changes(values: Mapping[str, int | str | None]) -> TaskChanges:
    """Return a change from names as they are spelled, values checked.

    Raises:
        UserError: an unknown name, a value that is no whole number from 1 to :data:`MAX_CHANGE_VALUE`, or no text of
            its kind where it should be one.
    """
    for key, value in values.items():
        if key not in TASK_CHANGE_KEYS:
            raise unknown_name_error("change of a task", key, TASK_CHANGE_KEYS)
        if key in TEXT_CHANGE_RULES:
            pattern, what, rule = TEXT_CHANGE_RULES[key]
            if value is not None and not (isinstance(value, str) and re.fullmatch(pattern, value)):
                raise UserError(f"{key} must be {what}, not {value!r:.80}: {rule}")
            continue
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(f"{key} must be a whole number from 1, not {value!r}")
        if isinstance(value, int) and value > MAX_CHANGE_VALUE:
            raise UserError(f"{key} must be {MAX_CHANGE_VALUE:,} at most")
    return msgspec.convert(dict(values), TaskChanges)


def split_task_name(name: str) -> tuple[str, TaskChanges]:
    """Split the name of a task into the name without changes and the change.

    ``my.toml:mine-5shot+ways=10`` gives ``("my.toml:mine-5shot", Change(ways=10))``; a path may hold a ``+`` itself.

    Raises:
        UserError: a part after ``+`` that is no change of a task, or one that is there twice.
    """
    start = 1 + max(name.rfind(mark) for mark in ("/", "\\", ".toml"))
    plus = name.find("+", start)
    if plus < 0:
        return name, TaskChanges()
    values: dict[str, int | str | None] = {}
    for part in name[plus + 1 :].split("+"):
        key, separator, text = part.partition("=")
        if key not in TASK_CHANGE_KEYS:
            raise unknown_name_error("change of a task", key, TASK_CHANGE_KEYS, where=f"in {name!r}")
        if key in TEXT_CHANGE_RULES:
            _, what, rule = TEXT_CHANGE_RULES[key]
            if not text:
                raise UserError(f"in {name!r}: {key} takes {what}: {rule}")
            number: int | str = text
        elif separator and text.isdecimal():
            number = (
                int(text) if len(text) < 100 else MAX_CHANGE_VALUE + 1
            )  # Python refuses to read thousands of digits
        else:
            raise UserError(f"in {name!r}: {key} takes a whole number from 1, as in +{key}=10, not {text!r}")
        if key in values:
            raise UserError(f"in {name!r}: {key} is there twice")
        values[key] = number
    return name[:plus], make_task_changes(values)


def merge_task_changes(name: str, change: TaskChanges) -> tuple[str, TaskChanges]:
    """Return a task's name without its changes, and these together with further ones.

    Args:
        name: of the task, perhaps with changes.
        change: the further ones.

    Raises:
        UserError: the name and ``change`` both set the same value.
    """
    plain, own = split_task_name(name)
    for key in own.changes_by_key().keys() & change.changes_by_key().keys():
        raise UserError(f"{name!r} says {key}={own.changes_by_key()[key]} already; leave one of the two out")
    return plain, make_task_changes({**own.changes_by_key(), **change.changes_by_key()})


def apply_task_changes(task: Task, change: TaskChanges) -> Task:
    """Return the task with a change, under a name that has the change; the task itself where nothing differs.

    Each name has its own episodes, so a digest pinned for the original does not apply.

    Args:
        task: that is changed.
        change: of its settings.

    Raises:
        UserError: novel classes of another data set are asked for, and the task is on that one, or on a published list
            of sessions; or other base classes of a task whose classes are not of such a list, or that has its order.
    """
    if change.base_order and not (task.sessions and task.sessions.listed and not task.sessions.published):
        raise UserError(
            f"base-order draws base classes among those of a list of sessions in any order, as of mini-sessions, "
            f"cifar100-sessions and cub-sessions; {task.name!r} is no such task"
        )
    if change.orders and (task.sessions.published if task.sessions else change.sessions is None):
        raise UserError(
            f"orders is the number of orders of the novel classes in sequences of sessions; {task.name!r} has "
            f"{'the one of its list' if task.sessions else 'episodes'}"
        )
    if change.novel_from == task.dataset.name:
        raise UserError(
            f"task {task.name!r} is on data set {change.novel_from!r} already; novel-from takes another data set"
        )
    if change.novel_from and task.sessions and task.sessions.listed:
        raise UserError(
            f"the novel classes of {task.name!r} are those of a published list; for sessions with classes of another "
            f"data set name a task in episodes: --task mini-5shot --novel-from {change.novel_from} --sessions 8"
        )
    old = task.episode
    ways, queries = change.ways or old.ways, change.queries or old.novel_queries
    base_queries = old.base_queries * ways * queries / (old.ways * old.novel_queries)
    variant = msgspec.structs.replace(
        task,
        shots=change.shots or task.shots,
        base_classes=change.base_classes or task.base_classes,
        base_order=change.base_order or task.base_order,
        novel_from=change.novel_from or task.novel_from,
        episode=msgspec.structs.replace(
            old, ways=ways, novel_queries=queries, base_queries=max(round(base_queries), min(1, old.base_queries))
        ),
        pretraining=_pretraining_with_backbone_changes(
            task.pretraining.with_number_of_steps(change.pretraining_steps or task.pretraining.steps), change
        ),
    )
    if spec := _sessions_with_changes(task, change):
        variant = with_sessions(variant, spec)
    if change.orders:
        halves = min(variant.evaluation.validation_episodes, 2 * change.orders)
        evaluation = msgspec.structs.replace(variant.evaluation, validation_episodes=halves)
        variant = msgspec.structs.replace(variant, evaluation=evaluation)

    def settings(of: Task) -> tuple[int | str | None, ...]:
        shape, spec = of.episode, of.pretraining
        queries = of.sessions.queries if of.sessions else shape.novel_queries
        changes = of.base_classes, of.base_order, shape.ways, of.shots, queries, spec.steps
        sessions = of.sessions.count if of.sessions else None
        orders = of.sessions.orders if of.sessions and of.sessions.supports == 1 else None
        source = spec.weights, spec.pretrained_on
        return *changes, of.novel_from, spec.backbone, *source, spec.centre or MEAN_CENTRED, sessions, orders

    differs = [
        f"{key}={new}"
        for key, new, was in zip(TASK_CHANGE_KEYS, settings(variant), settings(task), strict=True)
        if new not in (was, None)
    ]
    if not differs:
        return task
    return msgspec.structs.replace(
        variant,
        name="+".join([task.name, *differs]),
        title=f"{task.title or task.name}, with {', '.join(differs)}",
        digest=None,
        variant_of=task.variant_of or task.name,
    )


VALIDATION_SEQUENCES = 100  # half of them for options and the bias, half for checkpoints


def with_sessions(task: Task, spec: SessionSpec) -> Task:
    """Return the task, validated and tested on sequences of sessions.

    Args:
        task: in episodes or in sessions.
        spec: of the sessions.
    """
    return msgspec.structs.replace(
        task,
        sessions=spec,
        episode=msgspec.structs.replace(task.episode, ways=spec.ways),
        evaluation=msgspec.structs.replace(
            task.evaluation,
            episodes=spec.n_sequences,
            validation_episodes=min(task.evaluation.validation_episodes, VALIDATION_SEQUENCES),
        ),
    )


def _sessions_with_changes(task: Task, change: TaskChanges) -> SessionSpec | None:
    """Return the sessions of a task with a change."""
    if task.sessions is None and change.sessions is None:
        return None
    new = {"count": change.sessions, "ways": change.ways, "queries": change.queries, "orders": change.orders}
    new["supports"] = 1 if change.orders else None
    spec = task.sessions or SessionSpec(count=1, ways=task.episode.ways)
    return msgspec.structs.replace(spec, **{name: value for name, value in new.items() if value is not None})


def _pretraining_with_backbone_changes(spec: Pretraining, change: TaskChanges) -> Pretraining:
    """Return another backbone, or other weights for it.

    Weights belong to one backbone and are dropped with it, and with them the record of what they have seen.

    Raises:
        UserError: a backbone for data that are features.
    """
    if change.backbone not in (None, spec.backbone) and spec.backbone in (NO_BACKBONE, INCLUDED_BACKBONE):
        raise UserError(f"backbone {change.backbone!r} is for images, and the data are features: leave it out")
    spec = msgspec.structs.replace(spec, centre=change.centre or spec.centre)
    if change.backbone not in (None, spec.backbone):
        spec = msgspec.structs.replace(spec, backbone=change.backbone, weights=None, pretrained_on=None)
    if change.weights not in (None, spec.weights):
        spec = msgspec.structs.replace(spec, weights=change.weights, pretrained_on=None)
    return msgspec.structs.replace(spec, pretrained_on=change.pretrained_on or spec.pretrained_on)


def derive_variant(task: Task, name: str, entry: TaskVariantEntry) -> Task:
    """Return the task that a task file derives from another one.

    Args:
        task: that it is derived from.
        name: what the file calls it.
        entry: of the file.

    Raises:
        UserError: an impossible change.
    """
    if entry.sessions:
        task = with_sessions(task, entry.sessions)
    names = (name for name in TaskChanges.__struct_fields__ if name not in ("sessions", "orders"))
    change = {key: getattr(entry, name) for key, name in zip(TASK_CHANGE_KEYS, names, strict=False)}
    variant = apply_task_changes(task, make_task_changes(change))
    return msgspec.structs.replace(
        variant,
        name=name,
        title=entry.title,
        digest=entry.digest,
        variant_of="",
        episode=msgspec.structs.replace(variant.episode, base_queries=0) if entry.regular else variant.episode,
    )


TRAINING_VALUE_TYPES = {
    "episodes_per_step": "a whole number",
    "select": "last or best",
    "rate": "a number",
    "views": "a whole number",
    "steps": "a whole number",
    "sessions": "a whole number",
}


class TrainingChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that a user may make to meta-training (``--train name=value``).

    Attributes:
        episodes_per_step: episodes whose mean loss makes one step; the paper uses 1.
        select: "last" keeps the final parameters, as Ren et al. (2019); "best" those with the best validation accuracy.
        rate: the learning rate to begin with; 0 for the schedule's own.
        views: augmented views of each meta-training image; 1 means the plain images.
        sessions: of a training episode. More than 1 make it a sequence: this many groups of as many novel classes as
            the task's episodes have, learned one after the other; the loss is the mean of the losses after each.
        steps: 0 for the schedule of the method or task; otherwise the schedule is stretched to this many steps.
    """

    episodes_per_step: int = 1
    select: Literal["last", "best"] = "last"
    rate: float = 0.0
    views: int = 1
    steps: int = 0
    sessions: int = 1

    @classmethod
    def parse_values(cls, values: Mapping[str, Any]) -> TrainingChanges:
        """Read the changes from strings or values.

        Raises:
            UserError: unknown name (with the nearest ones), or an impossible value.
        """
        for key in values:
            if key not in TRAINING_VALUE_TYPES:
                raise unknown_name_error("training option", key, TRAINING_VALUE_TYPES)
            if isinstance(values[key], bool):
                raise UserError(f"--train: {key} is not {values[key]}")
        for key, value in values.items():
            try:
                msgspec.convert({key: value}, cls, strict=False)
            except (msgspec.ValidationError, UnicodeError) as error:  # the latter for half a character
                raise UserError(f"--train: {key} takes {TRAINING_VALUE_TYPES[key]}, not {value!r}") from error
        training = msgspec.convert(dict(values), cls, strict=False)
        if "steps" in values and training.steps < 1:
            raise UserError("--train: steps must be at least 1; leave it out for the task's own")
        counts = training.episodes_per_step, training.views, training.sessions
        if min(counts) < 1:
            raise UserError("--train: episodes_per_step, views and sessions must be at least 1")
        if max(counts) > MAX_ITEMS_AT_ONCE or training.steps > MOST_STEPS:
            raise UserError(
                f"--train: episodes_per_step, views and sessions must be at most {MAX_ITEMS_AT_ONCE:,}, "
                f"steps at most {MOST_STEPS:,}"
            )
        if not 0 <= training.rate < math.inf:
            raise UserError(f"--train: rate must be positive and finite (or 0 for the schedule's), not {training.rate}")
        return training

    def non_default_values(self) -> dict[str, Any]:
        """Return the values that are not the default."""
        return {
            f.name: getattr(self, f.name) for f in msgspec.structs.fields(self) if getattr(self, f.name) != f.default
        }

    def apply_to(self, spec: MetaTraining) -> MetaTraining:
        """Return the schedule with ``rate`` and ``steps``."""
        if self.rate:
            spec = msgspec.structs.replace(spec, schedule=msgspec.structs.replace(spec.schedule, rate=self.rate))
        if not self.steps:
            return spec
        factor = self.steps / spec.steps
        every = max(1, round(spec.validate_every * factor))
        schedule = spec.schedule.stretched(factor)
        return msgspec.structs.replace(spec, steps=self.steps, schedule=schedule, validate_every=every)
