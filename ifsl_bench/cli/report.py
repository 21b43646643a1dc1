"""``ifsl-bench report``: results as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ifsl_bench.cli.completion import complete_tasks
from ifsl_bench.cli.options import add_folders_options, format_examples, recipe_option
from ifsl_bench.cli.output import print_warnings
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.text_format import format_count

if TYPE_CHECKING:
    from ifsl_bench.utils.files import Paths


@click.command(epilog=format_examples("report", "report glyphs-5shot --out glyphs.html"))
@click.argument("tasks", nargs=-1, metavar="[TASK...]", shell_complete=complete_tasks)
@click.option("--out", metavar="FILE", default="report.html", help="The file to write [report.html].")
@recipe_option
@add_folders_options
def report(tasks: tuple[str, ...], out: str, recipes: tuple[str, ...], folders: Paths) -> None:
    """Write results as one HTML page (by default, of every task that has rows).

    It has the ranked tables, plots, and where each number comes from, and opens in a browser without a network.
    """
    from ifsl_bench.protocols.tasks.task_files import load_tasks, own_tasks, packaged_tasks
    from ifsl_bench.reporting.page.data import collect_page, load_results_with_variants
    from ifsl_bench.reporting.page.page import render_page
    from ifsl_bench.utils.files import check_output_path, write_bytes

    path = Path(out).expanduser()
    check_output_path(path)
    chosen = [task for name in tasks for task in load_tasks(name, home=folders)]
    all_tasks = [*packaged_tasks().values(), *own_tasks(folders).values()]
    results_of_tasks = load_results_with_variants(chosen or all_tasks, folders.results, bool(chosen), recipes)
    if not results_of_tasks:
        raise UserError("nothing is stored yet; make a result with: ifsl-bench run --method NAME --task NAME")
    names = {task_results.task_name for task_results in results_of_tasks}
    page = collect_page(results_of_tasks)
    content = render_page(page).encode()
    write_bytes(path, content, "--out")
    click.echo(
        f"wrote {out}: {format_count(len(page.rows), 'row')} of {format_count(len(names), 'task')}, "
        f"{len(content) / 1e6:.1f} MB; open it in a browser"
    )
    print_warnings(note for task_results in results_of_tasks for note in task_results.remarks_on_left_out_rows)
