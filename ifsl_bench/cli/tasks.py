"""``ifsl-bench tasks ...``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ifsl_bench.cli.options import (
    Group,
    examples,
    folders_of,
    home_option,
    quiet_option,
    readable,
    reporter_for,
    style_option,
)
from ifsl_bench.cli.output import say, show_tables


@click.group(
    cls=Group,
    invoke_without_command=True,
    epilog=examples("ifsl-bench tasks", "ifsl-bench tasks new mine --data glyphs"),
)
@home_option
@style_option
@click.pass_context
def tasks(context: click.Context, home: str | None, style: str) -> None:
    """List the tasks by data set, those that can be run first.

    Or write a task file of your own (new), or print what may be in one (reference).
    """
    if context.invoked_subcommand:
        return
    from ifsl_bench.board.render import READERS
    from ifsl_bench.board.table import plain_table
    from ifsl_bench.data.preparing.catalogue import task_listing
    from ifsl_bench.protocol.task_files import packaged

    rows = task_listing(readable(folders_of(home)))
    if style not in READERS:
        show_tables([plain_table(rows)], style)
        return
    drop = ("backbone", "episodes", "protocol")
    tables = []
    for data in dict.fromkeys(row["data"] for row in rows):
        some = [{key: text for key, text in row.items() if key != "data"} for row in rows if row["data"] == data]
        table = plain_table(some, "", {"what": 24}, drop, lambda row: row["task"] not in packaged())
        tables.append(replace(table, title=data))
    show_tables(tables, style)
    say("\nRun one: ifsl-bench run --method imprint --task TASK", style)


@tasks.command(
    "new",
    epilog=examples(
        "ifsl-bench tasks new mine --data glyphs", "ifsl-bench tasks new mine --data glyphs --out mine.toml"
    ),
)
@click.argument("name")
@click.option("--data", "data", required=True, metavar="DATASET", help="The data set that the tasks are on.")
@click.option("--out", metavar="FILE", help="The file to write [among your tasks in the home folder].")
@home_option
@quiet_option
def tasks_new(name: str, data: str, out: str | None, home: str | None, quiet: bool) -> None:
    """Write tasks NAME-1shot and NAME-5shot on a data set.

    The data set must be prepared. The file has a word on each key; every change to it makes another task.
    """
    from ifsl_bench.data.preparing.new_tasks import write_new

    folders = folders_of(home)
    path = Path(out) if out else folders.tasks / f"{name}.toml"  # where names are found
    made = write_new(folders, name, data, path, reporter_for(quiet))
    task = f"{path}:{made[-1]}" if out else made[-1]
    click.echo(f"wrote {path}, for you to change; try: ifsl-bench run --method imprint --task {task}")


@tasks.command("reference", epilog=examples("ifsl-bench tasks reference", "ifsl-bench tasks reference > task-file.md"))
def tasks_reference() -> None:
    """Print every key of a task file, and the backbones; in Markdown."""
    from ifsl_bench.backbone.registered import described
    from ifsl_bench.protocol.reference import page
    from ifsl_bench.protocol.task import NO_BACKBONE

    none = {NO_BACKBONE: "The data are features: only the base classifier is trained."}
    click.echo(page({**described(), **none}), nl=False)
