"""``ifsl-bench cache``: what takes space in the home folder, and its removal by kind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench.cli.options import (
    SuggestingGroup,
    confirm_removal,
    format_examples,
    home_option,
    locate_folders,
    style_option,
)
from ifsl_bench.cli.output import TEXT_FORMAT, print_lines, print_tables_in_format

if TYPE_CHECKING:
    from ifsl_bench.reporting.table import Table
    from ifsl_bench.store.cache import CacheItem


@click.group(cls=SuggestingGroup, invoke_without_command=True, epilog=format_examples("cache", "cache prune --dry-run"))
@home_option
@style_option
@click.pass_context
def cache(context: click.Context, home: str | None, style: str) -> None:
    """List what takes space in the home folder; or prune it."""
    context.obj = home
    if context.invoked_subcommand is not None:
        return
    from ifsl_bench.store.cache import list_items

    folders = locate_folders(home)
    items = list_items(folders)
    print_tables_in_format([_cache_table(items, str(folders.cache))], style)
    if style == TEXT_FORMAT:
        print_lines(f"\nresults, which `ifsl-bench results` lists and removes: {folders.results}", style)
        if items:
            print_lines("to remove all of a kind: ifsl-bench cache prune KIND", style)


@cache.command("prune", epilog=format_examples("cache prune --dry-run", "cache prune features trials --yes"))
@click.argument("kinds", metavar="[KIND]...", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Only list what would go.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@home_option
@style_option
@click.pass_obj
def cache_prune(
    outer: str | None, kinds: tuple[str, ...], dry_run: bool, yes: bool, home: str | None, style: str
) -> None:
    """Remove what can be made again, by kind.

    A KIND is one of those that 'ifsl-bench cache' lists. Without any, removes what is left over. Lists what would be
    removed, and asks first.
    """
    from ifsl_bench.reporting.table import RECORD_FORMATTERS
    from ifsl_bench.store.cache import divide_into_removable_and_kept, remove_items

    going, staying = divide_into_removable_and_kept(locate_folders(home or outer), kinds)
    tell = partial(click.echo, err=style in RECORD_FORMATTERS)
    reasons: dict[str, list[CacheItem]] = {}
    for item, why in staying:
        reasons.setdefault(why, []).append(item)
    stay = "; ".join(f"{_format_total_size(items)} stay: {why}" for why, items in reasons.items())
    if going or style in RECORD_FORMATTERS:
        print_tables_in_format([_cache_table(going, "goes")], style)
    if not going:
        tell("; ".join(filter(None, ("nothing to remove", stay))))
        return
    if stay:
        tell(f"\n{stay}") if style in RECORD_FORMATTERS else print_lines(f"\n{stay}", style)
    if dry_run or not confirm_removal(f"Remove these, {_format_total_size(going)}?", yes, ", --dry-run only lists it"):
        return
    tell(f"removed {_format_bytes(remove_items(going, tell))}")


def _cache_table(items: Sequence[CacheItem], title: str) -> Table[Any]:
    """Return a table with a row for each kind and data set or task, and their sum."""
    from ifsl_bench.reporting.table import table_from_dicts

    groups: dict[tuple[str, str], list[CacheItem]] = {}
    for item in items:
        groups.setdefault((item.cache_kind, item.belongs_to), []).append(item)
    rows = [
        {
            "what": kind,
            "of": of,
            "count": f"{len(group):,}",
            "size": _format_total_size(group),
            "last used": time.strftime("%Y-%m-%d %H:%M", time.localtime(max(item.last_used for item in group))),
        }
        for (kind, of), group in groups.items()
    ]
    total = {"what": "all", "of": "", "count": f"{len(items):,}", "size": _format_total_size(items), "last used": ""}
    return table_from_dicts([*rows, total], title, min_fold_widths={"of": 16}, dropped_first=("last used", "count"))


def _format_total_size(items: Sequence[CacheItem]) -> str:
    return _format_bytes(sum(item.n_bytes for item in items))


def _format_bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
