"""``ifsl-bench data ...``."""

from __future__ import annotations

from pathlib import Path

import click

from ifsl_bench.cli_options import (
    Group,
    folders_of,
    home_option,
    quiet_option,
    reporter_for,
    style_option,
    verbose_option,
)


@click.group(cls=Group)
def data() -> None:
    """Data sets: list, prepare, verify, stats, show."""


@data.command("list")
@home_option
@style_option
def data_list(home: str | None, style: str) -> None:
    """List known and prepared data sets."""
    from ifsl_bench import data_commands, report

    click.echo(report.render(data_commands.listing(folders_of(home)), style))


@data.command("prepare")
@click.argument("name")
@click.option("--from", "source", metavar="PATH", help="What to make it from; a folder of six .npz files, say.")
@click.option("--force", is_flag=True, help="Build it again even if it is there.")
@home_option
@quiet_option
@verbose_option
def data_prepare(name: str, source: str | None, force: bool, home: str | None, quiet: bool, verbose: bool) -> None:
    """Make a data set available."""
    from ifsl_bench.data.prepare import prepare

    dataset = prepare(folders_of(home), name, Path(source) if source else None, force, reporter_for(quiet, verbose))
    click.echo(f"{name}: {dataset.folder}\nfingerprint {dataset.fingerprint}")


@data.command("verify")
@click.argument("names", nargs=-1)
@home_option
@quiet_option
@verbose_option
def data_verify(names: tuple[str, ...], home: str | None, quiet: bool, verbose: bool) -> None:
    """Compare the full checksums of prepared data sets (all where none is named)."""
    from ifsl_bench import data_commands

    for line in data_commands.verify_all(folders_of(home), names, reporter_for(quiet, verbose)):
        click.echo(line)


@data.command("stats")
@click.argument("name")
@home_option
@style_option
@quiet_option
def data_stats(name: str, home: str | None, style: str, quiet: bool) -> None:
    """Print the data set's pools as in the paper's table, and what else it has to say."""
    from ifsl_bench import data_commands, report

    for title, rows in data_commands.statistics(folders_of(home), name, reporter_for(quiet)):
        click.echo(report.render([{"table": title, **r} for r in rows], style) if style == "csv"
                   else f"{title}\n\n{report.render(rows, style)}\n")  # fmt: skip


@data.command("show")
@click.argument("name")
@click.option("--out", default=None, metavar="FILE", help="The PNG to write [NAME.png].")
@click.option("--classes", default=12, show_default=True, type=click.IntRange(min=1), help="Classes of each pool.")
@click.option("--images", default=8, show_default=True, type=click.IntRange(min=1), help="Images of each class.")
@home_option
@quiet_option
def data_show(name: str, out: str | None, classes: int, images: int, home: str | None, quiet: bool) -> None:
    """Write a contact sheet of a data set as a PNG."""
    from ifsl_bench import data_commands

    path = Path(out or f"{name}.png")
    data_commands.contact_sheet(folders_of(home), name, path, classes, images, reporter_for(quiet))
    click.echo(f"wrote {path}")
