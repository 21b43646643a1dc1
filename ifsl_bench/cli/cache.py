"""``ifsl-bench cache``: what takes space in the home folder, and the removal of what the user chooses of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.cli.options import Group, agreed, examples, folders_of, home_option, style_option
from ifsl_bench.cli.output import TEXT, say, show_tables

if TYPE_CHECKING:
    from ifsl_bench.reporting.table import Table
    from ifsl_bench.store.cache import Item


@click.group(cls=Group, invoke_without_command=True, epilog=examples("cache", "cache prune --dry-run"))
@home_option
@style_option
@click.pass_context
def cache(context: click.Context, home: str | None, style: str) -> None:
    """List what takes space in the home folder; or prune it."""
    context.obj = home
    if context.invoked_subcommand is not None:
        return
    from ifsl_bench.store.cache import listed

    folders = folders_of(home)
    items = listed(folders)
    show_tables([_table(items, str(folders.cache))], style)
    if style == TEXT:
        say(f"\nresults, which `ifsl-bench results` lists and removes: {folders.results}", style)
        if items:
            say("to remove what has not been used for a month: ifsl-bench cache prune --unused 30", style)


@cache.command(
    "prune",
    epilog=examples("cache prune --unused 30 --dry-run", "cache prune --most 20", "cache prune features glyphs --yes"),
)
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--unused", type=click.FloatRange(0), metavar="DAYS", help="Only what has not been used for so long.")
@click.option("--most", type=click.FloatRange(0), metavar="GB", help="What was used longest ago, until that is left.")
@click.option("--dry-run", is_flag=True, help="Only list what would go.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@home_option
@style_option
@click.pass_obj
def prune(
    outer: str | None, names: tuple[str, ...], unused: float | None, most: float | None, dry_run: bool, yes: bool,
    home: str | None, style: str,
) -> None:  # fmt: skip
    """Remove what can be made again, by name, age or size.

    A NAME is a kind as 'ifsl-bench cache' lists them, or a data set, task, backbone or method. Without a choice,
    removes what is left over. Lists what would be removed, and asks first.
    """
    from ifsl_bench.reporting.render import PROGRAMS
    from ifsl_bench.store.cache import DAY, prune, pruning

    seconds, size = (None if given is None else given * unit for given, unit in ((unused, DAY), (most, 1e9)))
    going, staying = pruning(folders_of(home or outer), names, seconds, size)
    tell = partial(click.echo, err=style in PROGRAMS)
    reasons: dict[str, list[Item]] = {}
    for item, why in staying:
        reasons.setdefault(why, []).append(item)
    stay = "; ".join(f"{_size(items)} stay: {why}" for why, items in reasons.items())
    if not going:
        if style in PROGRAMS:
            show_tables([_table(going, "goes")], style)
        tell("; ".join(filter(None, ("nothing to remove", stay))))
        return
    show_tables([_table(going, "goes")], style)
    if stay:
        tell(f"\n{stay}") if style in PROGRAMS else say(f"\n{stay}", style)
    if dry_run or not agreed(f"Remove these, {_size(going)}?", yes, ", --dry-run only lists it"):
        return
    freed = prune(going, tell)
    tell(f"removed {_shown(freed)}")


def _table(items: Sequence[Item], title: str) -> Table[Any]:
    """A row for each kind and what it is of, and their sum."""
    from ifsl_bench.reporting.table import plain_table

    groups: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        groups.setdefault((item.kind, item.of), []).append(item)
    rows = [
        {
            "what": kind,
            "of": of,
            "count": f"{len(group):,}",
            "size": _size(group),
            "last used": time.strftime("%Y-%m-%d %H:%M", time.localtime(max(item.used for item in group))),
        }
        for (kind, of), group in groups.items()
    ]
    total = {"what": "all", "of": "", "count": f"{len(items):,}", "size": _size(items), "last used": ""}
    return plain_table([*rows, total], title, fold={"of": 16}, drop=("last used", "count"))


def _size(items: Sequence[Item]) -> str:
    return _shown(sum(item.bytes for item in items))


def _shown(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
