"""``ifsl-bench tasks ...``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ifsl_bench.cli.completion import complete_data, complete_tasks
from ifsl_bench.cli.options import (
    SuggestingGroup,
    format_examples,
    home_option,
    locate_folders,
    locate_folders_to_read,
    make_reporter,
    quiet_option,
    results_option,
    style_option,
)
from ifsl_bench.cli.output import print_lines, print_tables_in_format
from ifsl_bench.utils.errors import UserError


class TaskGroup(SuggestingGroup):
    """Takes the name of a task too, without ``show`` before it."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(
    cls=TaskGroup,
    invoke_without_command=True,
    subcommand_metavar="[NAME | COMMAND ...]",
    epilog=format_examples("tasks", "tasks glyphs-5shot", "tasks new mine --data glyphs"),
)
@home_option
@style_option
@click.pass_context
def tasks(context: click.Context, home: str | None, style: str) -> None:
    """List the tasks; or show one, or write your own.

    The list is grouped by data set; tasks that can be run come first. NAME is a task or a task file.
    """
    if context.invoked_subcommand:
        return
    from ifsl_bench.data.preparing.catalogue import make_task_rows
    from ifsl_bench.protocols.tasks.task_files import packaged_tasks
    from ifsl_bench.reporting.table import TABLE_FORMATTERS, table_from_dicts

    rows = make_task_rows(locate_folders(home))
    if style not in TABLE_FORMATTERS:
        print_tables_in_format([table_from_dicts(rows)], style)
        return
    drop = ("backbone", "episodes", "protocol")
    tables = []
    for data in dict.fromkeys(row["data"] for row in rows):
        some = [{key: text for key, text in row.items() if key != "data"} for row in rows if row["data"] == data]
        table = table_from_dicts(some, "", {"what": 24}, drop, lambda row: row["task"] not in packaged_tasks())
        tables.append(replace(table, title=data))
    print_tables_in_format(tables, style)
    print_lines(
        "\nDetails of a task: ifsl-bench tasks NAME. To run one: ifsl-bench run --method imprint --task NAME", style
    )


@tasks.command("show", epilog=format_examples("tasks glyphs-5shot", "tasks glyphs-5shot+ways=10 --format json"))
@click.argument("name", shell_complete=complete_tasks)
@home_option
@results_option
@style_option
@click.pass_context
def tasks_show(context: click.Context, name: str, home: str | None, results_dir: str | None, style: str) -> None:
    """Show what a task is: its data, its episodes, its stages.

    NAME is what --task takes; 'show' may be left out.
    """
    from ifsl_bench.protocols.tasks.task_files import load_tasks
    from ifsl_bench.reporting.table import TABLE_FORMATTERS, table_from_dicts
    from ifsl_bench.reporting.task_sheet import describe_task

    above = context.parent.params if context.parent else {}  # options may stand before the name
    folders = locate_folders_to_read(home or above.get("home"), results_dir)
    sheets = [describe_task(task, folders) for task in load_tasks(name, home=folders)]
    if style == "text" and above.get("style"):
        style = above["style"]
    if style not in TABLE_FORMATTERS:
        print_tables_in_format([table_from_dicts(sheets)], style)
        return
    for i, facts in enumerate(sheets):
        print_lines("\n" * bool(i) + "\n".join(f"{key:15}{text}" for key, text in facts.items()), style)


@tasks.command(
    "new", epilog=format_examples("tasks new mine --data glyphs", "tasks new mine --data glyphs --out mine.toml")
)
@click.argument("name")
@click.option(
    "--data", required=True, metavar="DATASET", shell_complete=complete_data, help="The data set that the tasks are on."
)
@click.option("--out", metavar="FILE", help="The file to write [among your tasks in the home folder].")
@home_option
@quiet_option
@click.pass_context
def tasks_new(context: click.Context, name: str, data: str, out: str | None, home: str | None, quiet: bool) -> None:
    """Write tasks NAME-1shot, NAME-5shot and NAME-sessions on a data set.

    The data set must be prepared. The file explains each key. Changing most of them makes another task
    (docs/tasks.md).
    """
    from ifsl_bench.data.preparing.catalogue import write_new_tasks

    folders = locate_folders(home or (context.parent.params.get("home") if context.parent else None))
    path = Path(out).expanduser() if out else folders.tasks / f"{name}.toml"  # where names are found
    if path.suffix != ".toml":
        raise UserError(f"--out takes a file that ends in .toml, by which --task knows it, not {out}")
    names = write_new_tasks(folders, name, data, path, make_reporter(quiet))
    task = f"{path}:{names[1]}" if out else names[1]
    click.echo(f"wrote {path}, for you to change; try: ifsl-bench run --method imprint --task {task}")


@tasks.command("reference", epilog=format_examples("tasks reference", "tasks reference > keys.md"))
def tasks_reference() -> None:
    """Print every key of a task file, and the backbones; in Markdown."""
    from ifsl_bench.backbones.contract import describe_backbones
    from ifsl_bench.protocols.tasks.reference import reference_section
    from ifsl_bench.protocols.tasks.task import NO_BACKBONE

    none = {NO_BACKBONE: "The data are features: only the base classifier is trained."}
    click.echo(reference_section({**describe_backbones(), **none}), nl=False)
