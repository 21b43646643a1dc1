"""``ifsl-bench tasks ...``."""

from __future__ import annotations

from pathlib import Path

import click

from ifsl_bench.cli.options import Group, folders_of, home_option, quiet_option, reporter_for, style_option


@click.group(cls=Group, invoke_without_command=True)
@home_option
@style_option
@click.pass_context
def tasks(context: click.Context, home: str | None, style: str) -> None:
    """List the tasks, and whether their data are there; or write a task file (new), or their reference."""
    if context.invoked_subcommand:
        return
    from ifsl_bench.board.render import render
    from ifsl_bench.board.table import plain_table
    from ifsl_bench.data.preparing import catalogue as data_commands

    click.echo(render([plain_table(data_commands.task_listing(folders_of(home)))], style))


@tasks.command("new")
@click.argument("name")
@click.option("--data", "data", required=True, metavar="DATASET", help="The data set that the tasks are on.")
@click.option("--out", metavar="FILE", help="The file to write [NAME.toml].")
@home_option
@quiet_option
def tasks_new(name: str, data: str, out: str | None, home: str | None, quiet: bool) -> None:
    """Write a task file with a word on each key: tasks NAME-1shot and NAME-5shot, on a data set that is prepared."""
    from ifsl_bench.data.preparing.new_tasks import write_new

    path = Path(out or f"{name}.toml")
    made = write_new(folders_of(home), name, data, path, reporter_for(quiet))
    click.echo(f"wrote {path}; try: ifsl-bench run --method imprint --task {path}:{made[-1]}")


@tasks.command("reference")
def tasks_reference() -> None:
    """Print every key of a task file, with defaults and ranges, and the backbones; in Markdown."""
    from ifsl_bench.backbone.registered import described
    from ifsl_bench.protocol.reference import page
    from ifsl_bench.protocol.task import NO_BACKBONE

    none = {NO_BACKBONE: "The data are features: only the base classifier is trained."}
    click.echo(page({**described(), **none}), nl=False)
