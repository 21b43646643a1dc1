"""``ifsl-bench cache``: what takes space in the home folder, and the removal of what nothing needs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.cli.options import Group, agreed, examples, folders_of, home_option, style_option
from ifsl_bench.cli.output import TEXT, say, show_tables
from ifsl_bench.common.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.board.table import Table
    from ifsl_bench.common.files import Home
    from ifsl_bench.running.cache import Item
    from ifsl_bench.running.job import Job


@click.group(
    cls=Group, invoke_without_command=True, epilog=examples("ifsl-bench cache", "ifsl-bench cache prune --dry-run")
)
@home_option
@style_option
@click.pass_context
def cache(context: click.Context, home: str | None, style: str) -> None:
    """List what takes space in the home folder; or prune it."""
    context.obj = home
    if context.invoked_subcommand is not None:
        return
    from ifsl_bench.running.cache import listed

    folders = folders_of(home)
    items = listed(folders)
    show_tables([_table([(item, "") for item in items], str(folders.cache))], style)
    if style == TEXT:
        say(f"\nresults, which no command removes: {folders.results}", style)
        if items:
            say("to remove what no result needs: ifsl-bench cache prune --dry-run", style)


@cache.command(
    "prune",
    epilog=examples("ifsl-bench cache prune --dry-run", "ifsl-bench cache prune --campaign campaign.toml --yes"),
)
@click.option(
    "--results", "results", multiple=True, metavar="DIR", help="A further folder of results; may be repeated."
)
@click.option("--campaign", "campaigns", multiple=True, metavar="FILE", help="Keep what this campaign needs; may be "
              "repeated.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would go, and what stays and why.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@home_option
@style_option
@click.pass_obj
def prune(
    outer: str | None,
    results: Sequence[str],
    campaigns: Sequence[str],
    dry_run: bool,
    yes: bool,
    home: str | None,
    style: str,
) -> None:
    """Remove what no stored result and no given campaign needs.

    Lists what would be removed, and asks first.
    """
    from ifsl_bench.running.pruning import RECENTLY, prune, verdicts
    from ifsl_bench.running.stored import results_folders

    folders = folders_of(home or outer)
    wanted = [_campaign(name, folders) for name in campaigns]
    given = [Path(name).expanduser().absolute() for name in results]
    if missing := [path for path in given if not os.path.isdir(path)]:
        raise UserError(f"there is no folder of results {missing[0]}")
    more = [where for _, where in wanted if where is not None]
    known = dict.fromkeys([*results_folders(folders, _warn), *given, *more])
    found = verdicts(folders, list(known), [job for jobs, _ in wanted for job in jobs], _warn)
    if dry_run:
        staying = [(one.item, one.why) for one in found if not one.goes]
        show_tables([_table(staying, "stays", "stays because")], style)
        click.echo()
    going = [(one.item, one.why) for one in found if one.goes]
    if not going:
        recent = sum(one.item.bytes for one in found if one.recent)
        click.echo(f"nothing to remove{f'; {_size(recent)} stay only because they were {RECENTLY}' if recent else ''}")
        return
    show_tables([_table(going, "goes", "goes because")], style)
    size = _size(sum(one.item.bytes for one in found if one.goes))
    if dry_run or not agreed(f"Remove these, {size}?", yes, ", --dry-run only lists it"):
        return
    freed = prune(found, click.echo)
    click.echo(f"removed {_size(freed)}")


def _campaign(name: str, home: Home) -> tuple[list[Job], Path | None]:
    """The jobs of a campaign, and where it stores results if it says so."""
    from ifsl_bench.campaigns.campaign_file import Said, asked
    from ifsl_bench.campaigns.jobs import jobs_of, with_tasks

    wanted, _ = with_tasks(asked(name, Said()), home)
    found = jobs_of(wanted, home, _warn, lambda text: None)
    for why, count in found.lacking.items():
        raise UserError(f"{name}: cannot tell what {count:,} of its jobs need: {why}")
    return found.jobs, wanted.results


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _table(items: Sequence[tuple[Item, str]], title: str, why: str = "") -> Table[Any]:
    from ifsl_bench.board.table import plain_table

    return plain_table(_rows(items, why), title, fold={"of": 16, "method": 12, why: 16}, drop=("last used", "count"))


def _rows(items: Sequence[tuple[Item, str]], why: str = "") -> list[dict[str, object]]:
    """A row for each kind, task and method, and reason; and their sum."""
    groups: dict[tuple[str, str, str, str], list[Item]] = {}
    for item, reason in items:
        groups.setdefault((item.kind, item.of, item.method, reason), []).append(item)
    rows = [_row(*group, some, why) for group, some in groups.items()]
    return [*rows, _row("all", "", "", "", [item for item, _ in items], why) | {"last used": ""}]


def _row(kind: str, of: str, method: str, reason: str, some: Sequence[Item], why: str) -> dict[str, object]:
    size, used = sum(item.bytes for item in some), max((item.used for item in some), default=0.0)
    row: dict[str, object] = {"what": kind, "of": of, "method": method, "count": f"{len(some):,}"}
    return row | {"size": _size(size), "last used": _when(used)} | ({why: reason} if why else {})


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def _when(used: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(used)) if used else ""
