"""The protocols that there are: which one a task has, and how another one is made known."""

from __future__ import annotations

from collections.abc import Mapping

from ifsl_bench.protocols.episode_protocol import EPISODES_PROTOCOL, REGULAR_PROTOCOL
from ifsl_bench.protocols.protocol import Protocol, StoredCounts
from ifsl_bench.protocols.session_protocol import SESSIONS_PROTOCOL
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.utils.errors import unknown_name_error

_registered: dict[str, Protocol] = {
    "episodes": EPISODES_PROTOCOL,
    "regular": REGULAR_PROTOCOL,
    "sessions": SESSIONS_PROTOCOL,
}


def register_protocol(protocol: Protocol) -> None:
    """Make a protocol known to all commands of this process; one of the same name is replaced."""
    _registered[protocol.name] = protocol


def registered_protocols() -> tuple[Protocol, ...]:
    """Return all protocols, the package's own first."""
    return tuple(_registered.values())


def protocol_of_task(task: Task) -> Protocol:
    """Return the protocol of a task: the one it names; else sessions, or episodes with or without base classes.

    Raises:
        UserError: it names one that is not registered.
    """
    name = task.evaluation.protocol
    if name is None:
        name = "sessions" if task.sessions else "episodes" if task.has_base else "regular"
    if name not in _registered:
        raise unknown_name_error("protocol", name, _registered, where=f"of task {task.name}")
    return _registered[name]


def stored_counts_type_of_fields(fields: object) -> type[StoredCounts]:
    """Return the form of the counts that a result file has, by the names of their fields.

    Args:
        fields: the content of ``episodes``; anything, if the file is damaged.
    """
    names = fields.keys() if isinstance(fields, Mapping) else ()
    forms = [protocol.stored_counts_type for protocol in _registered.values()]
    return next((form for form in reversed(forms) if form.MARKER_FIELD in names), forms[0])


def title_by_metric() -> dict[str, str]:
    """Return the heading of each metric of any protocol; of one of several protocols, the heading of the first."""
    columns = [column for protocol in reversed(registered_protocols()) for column in protocol.metric_columns]
    return {column.name: column.title for column in columns}


def all_metric_names() -> tuple[str, ...]:
    """Return the metrics of all protocols, each once."""
    return tuple(
        dict.fromkeys(
            name for protocol in registered_protocols() for name in (*protocol.metrics, *protocol.optional_metrics)
        )
    )
