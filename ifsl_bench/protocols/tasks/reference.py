"""The reference of task files, from their schema and its limits, and task files with a comment on every key.

What a key means stands here; names, types, defaults and ranges are read from the code. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ifsl_bench.protocols.tasks import task_limits, variants
from ifsl_bench.protocols.tasks.task import MetaTraining
from ifsl_bench.protocols.tasks.task_files import TaskFile

# What each key means. A name of the user's own stands in brackets.
TASK_FILE_KEY_DESCRIPTIONS = {
    "dataset.name": "the data set, as in `ifsl-bench data list`",
    "dataset.fingerprint": "the data that results are measured on; a run on other data is refused",
    "dataset.mean": "images enter a network as (x / 255 - mean) / std, channel by channel",
    "dataset.std": "see mean; features enter as they are",
    "dataset.partial": "whether the data of this fingerprint are a part of their source",
    "dataset.obtain": "what to tell someone who lacks the data",
    "pretraining.backbone": "the network that makes features of images, or `none` where the data are features",
    "pretraining.steps": "of SGD, on images of base/train; with `none`, of the base classifier alone",
    "pretraining.schedule.rate": "the learning rate, at its highest",
    "pretraining.schedule.drops": "steps after which the rate is a tenth of what it was",
    "pretraining.schedule.shape": "by drops, or a cosine down to zero",
    "pretraining.schedule.warmup": "steps in which the rate grows to its highest",
    "pretraining.batch": "images per step",
    "pretraining.momentum": "of SGD",
    "pretraining.weight_decay": "of SGD",
    "pretraining.crop_padding": "pixels of zero padding, before a random crop of the original size",
    "pretraining.flip": "mirror half of the images, left to right; wrong where a mirror image is of another class, "
    "as of letters",
    "pretraining.norm_momentum": "of batch norms' running averages: the weight of the new batch",
    "pretraining.weights": "the checksum of the user's own file of weights; the backbone is frozen with them, not "
    "pretrained here",
    "pretraining.pretrained_on": "what these weights have seen, as their user says: `base` for images of "
    "this task's base/train alone; where absent, unknown",
    "pretraining.recipe": "how the backbone is trained, a name of `ifsl-bench recipes`, perhaps with options as "
    "`closer.beta=1`; plain cross-entropy by default",
    "pretraining.centre": "of a backbone that is not pretrained here: whether the mean of the features of base/train "
    "is subtracted from all; where absent, it is",
    "pretraining.seed": "one pretraining for all seeds of meta-training; where absent, each has its own",
    "tasks.[name].shots": "support images of each novel class",
    "tasks.[name].protocol": "meta-training samples classes of novel/train, or (shared) hides base classes in turn",
    "tasks.[name].digest": "of the test episodes; a run on others is refused",
    "tasks.[name].title": "what tables call it",
    "tasks.[name].variant_of": "the task whose protocol it departs from; tables keep the two apart",
    "tasks.[name].sessions.count": "sessions after the base session; with this table a task is in sessions",
    "tasks.[name].sessions.ways": "novel classes of a session",
    "tasks.[name].sessions.orders": "orders of the novel classes",
    "tasks.[name].sessions.supports": "support sets of each order",
    "tasks.[name].sessions.queries": "query images of each novel class; where absent, as many as a base class has",
    "tasks.[name].sessions.listed": "whether the classes are those of a published list",
    "tasks.[name].sessions.published": "the list to the letter: its order, its supports",
    "tasks.[name].sessions.memory": "none: methods that keep the supports of earlier sessions are refused",
    "episode.ways": "novel classes of an episode",
    "episode.novel_queries": "query images of each novel class",
    "episode.base_queries": "query images of base classes, in all; 0: regular few-shot learning, without base classes",
    "meta_training.steps": "of Adam, on episodes, for methods that are meta-trained",
    "meta_training.validate_every": "steps between two validations",
    "meta_training.schedule.rate": "the learning rate, at its highest",
    "meta_training.schedule.drops": "steps after which the rate is a tenth of what it was",
    "meta_training.schedule.shape": "by drops, or a cosine down to zero",
    "meta_training.schedule.warmup": "steps in which the rate grows to its highest",
    "evaluation.episodes": "test episodes",
    "evaluation.validation_episodes": "half of them choose options, the other half checkpoints",
    "evaluation.seed": "of the test and validation episodes, which are the same for all methods and training seeds",
    "evaluation.protocol": "a protocol that is registered in Python; where absent, sessions or episodes",
    "variants.[name].of": "the task that this one is made from; it may come with the package",
    "variants.[name].regular": "no base classes, in the softmax or among the queries",
    "variants.[name].base_classes": "use only this many of the base classes",
    "variants.[name].base_order": "of a published list of sessions: draw base and novel classes anew, by this number",
    "variants.[name].ways": "novel classes of an episode",
    "variants.[name].shots": "support images of each",
    "variants.[name].queries": "query images of each; those of base classes change in proportion",
    "variants.[name].pretraining_steps": "steps of pretraining; the schedule is scaled to fit",
    "variants.[name].novel_from": "the data set of the novel classes, in validation and testing; not in training",
    "variants.[name].backbone": "another backbone, as in [pretraining]",
    "variants.[name].weights": "as in [pretraining]",
    "variants.[name].pretrained_on": "as in [pretraining]",
    "variants.[name].centre": "as in [pretraining]",
}


@dataclass(frozen=True)
class TaskFileKey:
    """A key of a task file."""

    table_name: str  # what stands in brackets above it
    name: str
    type_in_words: str  # its type, in words
    default_value: str | None  # as TOML; None where the key is required or nothing stands for it
    is_required: bool  # whether its table must have it
    value_range: str  # what is possible, in words; empty where all of its type is

    @property
    def key_path(self) -> str:
        return f"{self.table_name}.{self.name}"

    @property
    def key_description(self) -> str:
        return (
            TASK_FILE_KEY_DESCRIPTIONS.get(self.key_path)
            or TASK_FILE_KEY_DESCRIPTIONS[self.key_path.replace("variants.", "tasks.")]
        )


def task_file_keys() -> list[TaskFileKey]:
    """Return every key that a task file may have, table by table."""
    return list(_struct_keys(TaskFile, ""))


def _struct_keys(struct: type[msgspec.Struct], table: str) -> Iterator[TaskFileKey]:
    fields = msgspec.inspect.type_info(struct).fields  # type: ignore[attr-defined]
    tables = []
    for field in fields:
        of = _without_none_type(field.type)
        if isinstance(of, msgspec.inspect.DictType):
            tables.append((of.value_type.cls, f"{field.name}.[name]"))  # type: ignore[attr-defined]
        elif isinstance(of, msgspec.inspect.StructType):
            tables.append((of.cls, f"{table}.{field.name}" if table else field.name))
        else:
            default = None if field.required or field.default is None else to_toml(field.default)
            path = f"{table}.{field.name}"
            yield TaskFileKey(table, field.name, _type_name(of), default, field.required, _value_range(path, of))
    for inner, name in tables:
        yield from _struct_keys(inner, name)


def _without_none_type(kind: Any) -> Any:
    """A table that may be left out, for what is a table or None; else the same."""
    parts = kind.types if isinstance(kind, msgspec.inspect.UnionType) else ()
    return next((part for part in parts if isinstance(part, msgspec.inspect.StructType)), kind)


_TYPE_NAMES: dict[Any, str] = {
    msgspec.inspect.IntType: "whole number",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.StrType: "text",
    msgspec.inspect.BoolType: "true or false",
}


def _type_name(of: Any) -> str:
    if isinstance(of, msgspec.inspect.UnionType):
        (of,) = (part for part in of.types if not isinstance(part, msgspec.inspect.NoneType))
    if isinstance(of, msgspec.inspect.VarTupleType):
        return f"list of {_type_name(of.item_type)}s"
    return "text" if isinstance(of, msgspec.inspect.LiteralType) else _TYPE_NAMES[type(of)]


# What of a task a key of a variant changes.
_VARIANT_KEYS = {
    "variants.[name].base_classes": "base_classes",
    "variants.[name].base_order": "base_order",
    "variants.[name].ways": "episode.ways",
    "variants.[name].shots": "shots",
    "variants.[name].queries": "episode.novel_queries",
    "variants.[name].pretraining_steps": "pretraining.steps",
}
# What a key of that name may be, in [pretraining] and of a variant.
_BACKBONE_KEYS = {
    "weights": task_limits.WEIGHTS_RULE,
    "pretrained_on": task_limits.CORPORA_RULE,
    "centre": '"mean" or "none"',
}


def _value_range(path: str, of: Any) -> str:
    """Return the values of a key in words, from the bounds that are checked."""
    if (name := path.rpartition(".")[2]) in _BACKBONE_KEYS:
        return _BACKBONE_KEYS[name]
    if isinstance(of, msgspec.inspect.LiteralType):
        return " or ".join(to_toml(value) for value in sorted(of.values, key=str))
    field = path.removeprefix("tasks.[name].")
    if path in _VARIANT_KEYS:
        least, most = task_limits.INTEGER_RANGES[_VARIANT_KEYS[path]]
        return f"{max(1, least)} to {min(variants.MAX_CHANGE_VALUE, most):,}"
    whole = task_limits.SESSION_INTEGER_RANGES | task_limits.INTEGER_RANGES
    if (field := field.removeprefix("variants.[name].") if ".sessions." in field else field) in whole:
        least, most = whole[field]
        return f"{least} or more" if most == task_limits.LARGEST_INTEGER else f"{least:,} to {most:,}"
    if field in task_limits.NUMBER_RULES:
        return task_limits.NUMBER_RULES[field][1].removeprefix("must be ").replace("must not be", "not")
    return task_limits.LIST_RULES.get(field, "")


def to_toml(value: object) -> str:
    """Return a value as TOML: a text, a truth value, a number, or a list of these."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(value) if isinstance(value, (str, bool)) else repr(value)


# -- the section of the manual

REFERENCE_INTRODUCTION = """\
## Task files

A task file is TOML: one data set, how its backbone is trained, how episodes are drawn, and one or more tasks on them.
Give its path anywhere a task name is accepted (`--task mine.toml` for all of its tasks, `--task mine.toml:mine-5shot`
for one), or put it into `tasks/` below the home folder, where every command finds its tasks by name.

    ifsl-bench tasks new mine --data DATASET

writes one that explains each key. A key that is not listed here is an error, and so is a value of another type. Keys
without a default must be given, if their table is there; a table whose keys all have defaults may be left out. Changing
anything but `title`, `obtain`, `fingerprint`, `partial`, `digest` and `variant_of` makes another task: its results are
not compared with those from before.

Names of tasks and data sets consist of lower-case letters, digits, `.`, `_` and `-`. In the tables below, which
`ifsl-bench tasks reference` prints, [name] stands for a name of your own, in quotation marks if it contains a dot.
"""
TASK_FILE_TABLE_DESCRIPTIONS = {
    "dataset": "The data, and how images enter a network.",
    "pretraining": "Stage 1: backbone and base classifier, by cross-entropy on base/train; then both are frozen.",
    "pretraining.schedule": "Its learning rate.",
    "episode": "The shape of an episode.",
    "meta_training": "Stage 2, for methods that are meta-trained; a method may bring a schedule of its own.",
    "meta_training.schedule": "Its learning rate. Where the table is absent: rate {rate}, drops {drops}.",
    "evaluation": "Stage 3.",
    "tasks.[name]": "A task. Each task in a file has its own table.",
    "tasks.[name].sessions": "Validation and testing on [sequences of sessions](protocol.md#sequences-of-sessions).",
    "variants.[name]": "A task made from another one. A file may hold these alone.",
    "variants.[name].sessions": "Sessions of the task that is made.",
}


def reference_section(backbones: Mapping[str, str]) -> str:
    """Return the reference, in Markdown: a section of docs/tasks.md.

    Args:
        backbones: what ``pretraining.backbone`` may be -> its description.
    """
    schedule = MetaTraining().schedule
    parts, table_with = [REFERENCE_INTRODUCTION], dict[str, str]()
    for table, about in TASK_FILE_TABLE_DESCRIPTIONS.items():
        about = about.format(rate=to_toml(schedule.rate), drops=to_toml(schedule.drops))
        rows = "\n".join(
            f"| `{key.name}` | {key.type_in_words} | {_default_text(key)} | {key.value_range} | {key.key_description} |"
            for key in task_file_keys()
            if key.table_name == table
        )
        if (same := table_with.setdefault(rows, table)) == table:
            keys = f"| key | type | default | range | meaning |\n|---|---|---|---|---|\n{rows}"
        else:
            keys = f"The same keys as in [{same}]."
        parts.append(f"### [{table}]\n\n{about}\n\n{keys}\n")
    listed = [f"| `{name}` | {what} |" for name, what in backbones.items()]
    parts.append("\n".join(["### Backbones", "", "| `backbone` | what it is |", "|---|---|", *listed, ""]))
    return "\n".join(parts)


def _default_text(key: TaskFileKey) -> str:
    return f"`{key.default_value}`" if key.default_value is not None else "required" if key.is_required else "none"


# -- a file

TASK_FILE_HEADER = (
    "# Above each key stands what it means. One with '#' in front of it is at its default. See docs/tasks.md.\n"
)


def format_task_file(content: Mapping[str, Any], head: str = "") -> str:
    """Return a task file with a comment on every key.

    Args:
        content: its values, as tables in tables; a key that is left out stands there as a comment, if it has a default.
        head: lines above it, each a comment.
    """
    by_table: dict[str, list[TaskFileKey]] = {}
    for key in task_file_keys():
        by_table.setdefault(key.table_name, []).append(key)
    lines = [head + TASK_FILE_HEADER]
    explained: set[str] = set()
    for general, table, own in _iterate_tables(content, by_table):
        lines.append(f"[{table}]")
        if general in explained:
            lines += [
                f"{key.name} = {to_toml(own[key.name])}" for key in by_table[general] if own.get(key.name) is not None
            ]
            lines.append("")
            continue
        explained.add(general)
        for key in by_table[general]:
            lines.append(
                f"# {key.key_description}; {key.value_range}" if key.value_range else f"# {key.key_description}"
            )
            if own.get(key.name) is not None:
                lines.append(f"{key.name} = {to_toml(own[key.name])}")
            else:
                lines.append(f"# {key.name} = {key.default_value or '...'}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _iterate_tables(content: Mapping[str, Any], table_names: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield the tables of a file in the order of the reference: ``tasks.[name]``, ``tasks."mine-5shot"``; content."""
    for general in table_names:
        first, *parts = general.split(".")
        tables = [(first, content.get(first, {}))]
        for part in parts:
            if part == "[name]":
                tables = [(f"{path}.{json.dumps(name)}", own) for path, table in tables for name, own in table.items()]
            else:
                tables = [(f"{path}.{part}", own) for path, table in tables if (own := table.get(part)) is not None]
        yield from ((general, path, own) for path, own in tables)
