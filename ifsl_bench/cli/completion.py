"""Shell completion of tasks, methods, stored rows, data sets and options of methods.

Names are listed without importing torch, but for the options of methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from urllib.parse import unquote

import click

from ifsl_bench.utils.errors import UserError


def complete_tasks(_: click.Context, __: click.Parameter, word: str) -> list[str]:
    """Return the names of packaged tasks and of the user's own that complete a word.

    Args:
        word: the word as typed so far.
    """
    from ifsl_bench.protocols.tasks.task_files import own_tasks, packaged_tasks
    from ifsl_bench.utils.files import Paths

    return _complete_from(word, [*packaged_tasks(), *own_tasks(Paths.locate(None, None))])


def complete_methods(_: click.Context, __: click.Parameter, word: str) -> list[str]:
    """Return the rows and the registered methods that complete a word.

    Args:
        word: the word as typed so far.
    """
    from ifsl_bench.plugin.display_names import display_names_by_row
    from ifsl_bench.plugin.registry import METHOD_GROUP, registered_entry_points

    return _complete_from(word, [*display_names_by_row(), *registered_entry_points(METHOD_GROUP)])


def complete_rows(context: click.Context, parameter: click.Parameter, word: str) -> list[str]:
    """Return the methods and the labels of stored rows that complete a word.

    Args:
        context: of the command, from click.
        parameter: to complete, from click.
        word: the word as typed so far.
    """
    from ifsl_bench.utils.files import Paths

    folders = (resources.files("ifsl_bench.results"), Paths.locate(None, None).results)
    files = {
        file.name
        for folder in folders
        if folder.is_dir()
        for task in folder.iterdir()
        if task.is_dir()
        for file in task.iterdir()
    }
    labels = sorted(unquote(name.partition(".seed-")[0]) for name in files if ".seed-" in name)
    return list(dict.fromkeys([*complete_methods(context, parameter, word), *_complete_from(word, labels)]))


def complete_rows_and_tasks(context: click.Context, parameter: click.Parameter, word: str) -> list[str]:
    """Return the methods, the labels of stored rows and the tasks that complete a word.

    Args:
        context: of the command, from click.
        parameter: to complete, from click.
        word: the word as typed so far.
    """
    return [*complete_rows(context, parameter, word), *complete_tasks(context, parameter, word)]


def complete_data(_: click.Context, __: click.Parameter, word: str) -> list[str]:
    """Return the prepared and the registered data sets that complete a word.

    Args:
        word: the word as typed so far.
    """
    from ifsl_bench.plugin.registry import DATASET_GROUP, registered_entry_points
    from ifsl_bench.utils.files import Paths

    prepared = {folder.name for folder in Paths.locate(None, None).data.glob("[!.]*")}
    return _complete_from(word, sorted(prepared.union(registered_entry_points(DATASET_GROUP))))


def complete_options(context: click.Context, _: click.Parameter, word: str) -> list[str]:
    """Return the options of the methods that the command line has named so far; of all where it has named none.

    Args:
        context: of the command, with the methods named so far.
        word: the word as typed so far.
    """
    from ifsl_bench.plugin.display_names import display_names_by_row
    from ifsl_bench.plugin.find_method import find_method
    from ifsl_bench.plugin.options import declared_options

    options: dict[str, None] = {}
    for method in context.params.get("methods") or display_names_by_row():
        try:
            options |= dict.fromkeys(declared_options(find_method(method)[0].method))
        except UserError:
            continue
    return _complete_from(word, [f"{option}=" for option in options])


def _complete_from(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin like a word; behind a comma, like its last part."""
    before, comma, last = word.rpartition(",")
    return [before + comma + name for name in dict.fromkeys(names) if name.startswith(last)]
