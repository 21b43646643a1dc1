"""``ifsl-bench data ...``."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ifsl_bench.cli.completion import complete_data
from ifsl_bench.cli.options import (
    IntegerRange,
    SuggestingGroup,
    confirm_removal,
    format_examples,
    home_option,
    locate_folders,
    make_reporter,
    quiet_option,
    style_option,
    verbose_option,
)
from ifsl_bench.cli.output import print_tables_in_format, print_warnings
from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.data.pools import Dataset
    from ifsl_bench.utils.files import Paths
    from ifsl_bench.utils.progress import Reporter

SPEED_MEASUREMENT_SECONDS = 20  # seconds of pretraining in a rehearsal


@click.group(
    cls=SuggestingGroup,
    epilog=format_examples(
        "data list", "data prepare tiny --from tiny-imagenet-200.zip", "data show glyphs --out letters.png"
    ),
)
def data() -> None:
    """Data sets: list, prepare, verify, stats, show, remove."""


@data.command("list", epilog=format_examples("data list", "data list --format json"))
@home_option
@style_option
def data_list(home: str | None, style: str) -> None:
    """List known and prepared data sets."""
    from ifsl_bench.data.preparing import catalogue
    from ifsl_bench.reporting.table import table_from_dicts

    rows = catalogue.make_dataset_rows(locate_folders(home))
    print_tables_in_format(
        [table_from_dicts(rows, min_fold_widths={"state": 12, "what": 24}, dropped_first=("fingerprint",))], style
    )


@data.command(
    "prepare",
    epilog=format_examples(
        "data prepare tiny --from tiny-imagenet-200.zip",
        "data prepare cifar-fs --download",
        "data prepare birds --from photographs/ --split birds.csv",
    ),
)
@click.argument("name", shell_complete=complete_data)
@click.option("--from", "source", metavar="PATH", help="The folder or archive to make it from.")
@click.option("--download", is_flag=True, help="Fetch the files it is made from (cifar-fs: CIFAR-100, 169 MB).")
@click.option("--allow-partial", is_flag=True, help="Accept less than there should be; the data set is marked partial.")
@click.option("--split", metavar="CSV", help="Images of your own: the side of each class, columns class and split.")
@click.option("--split-seed", type=IntegerRange(0), help="Images of your own: divide the classes at random [0].")
@click.option("--size", type=IntegerRange(16, 512), help="Images of your own: height and width [84].")
@click.option("--depth", type=IntegerRange(1, 9), help="Images of your own: nested folders that name a class [1].")
@click.option(
    "--white", type=IntegerRange(1), help="Images of your own, over 8 bits: the number that is white [65535]."
)
@click.option("--force", is_flag=True, help="Build it again even if it is there.")
@home_option
@quiet_option
@verbose_option
def data_prepare(
    name: str,
    source: str | None,
    download: bool,
    allow_partial: bool,
    split: str | None,
    split_seed: int | None,
    size: int | None,
    depth: int | None,
    white: int | None,
    force: bool,
    home: str | None,
    quiet: bool,
    verbose: bool,
) -> None:
    """Make a data set available: a known one, or your own.

    NAME is one of 'data list', or for your own data a name of your choice.

    Your own data are a folder or archive of images, <root>/<class>/<image> (or <root>/<side>/<class>/<image>, the sides
    called train, val and test, or base, novel-train, novel-val and novel-test); or six files of frozen features, as
    .npz, .safetensors or .pt. Tasks NAME-1shot, NAME-5shot and NAME-sessions are written too.
    """
    from ifsl_bench.data.datasets import open_prepared
    from ifsl_bench.data.preparing.catalogue import make_pool_rows
    from ifsl_bench.data.preparing.prepare import download_archive, find_downloadable, prepare_dataset
    from ifsl_bench.data.sets.folder import OwnOptions
    from ifsl_bench.reporting.table import table_from_dicts

    if split and split_seed is not None:
        raise UserError("--split says which class is on which side, and so does --split-seed; leave one of them out")
    own = OwnOptions(Path(os.path.expanduser(split)) if split else None, split_seed, size, depth, white)
    if download and source:
        raise UserError("--download fetches the files, --from says where they are; leave one of them out")
    folders, reporter = locate_folders(home), make_reporter(quiet, verbose)
    given = Path(os.path.expanduser(source)) if source else None
    if download and not force and find_downloadable(name) and (there := open_prepared(folders, name)) is not None:
        dataset = there
        reporter.say(f"{name} is prepared already (--force fetches and builds it again)")
    else:
        with download_archive(folders, name, reporter) if download else nullcontext(given) as path:
            dataset = prepare_dataset(folders, name, path, force, reporter, allow_partial, own)
    mark = " (partial)" if dataset.is_partial else ""
    click.echo(f"{name}{mark}: {dataset.folder}\nfingerprint {dataset.fingerprint}\n")
    print_tables_in_format([table_from_dicts(make_pool_rows(dataset), min_fold_widths={"first classes": 16})])
    if dataset.is_partial:
        from ifsl_bench.data.suggested_tasks import list_infeasible_tasks
        from ifsl_bench.protocols.tasks.task_files import packaged_tasks

        tasks = [task for task in packaged_tasks().values() if task.dataset.name == name and task.novel_from is None]
        print_warnings(list_infeasible_tasks(dataset, tasks))
    if not quiet and dataset.has_images:
        _print_pretraining_estimate(folders, dataset, reporter)


def _print_pretraining_estimate(folders: Paths, dataset: Dataset, reporter: Reporter) -> None:
    """Say how long the pretraining of the user's own tasks takes on this machine, and how to rehearse a run."""
    from ifsl_bench.protocols.tasks.task_files import own_tasks

    task = own_tasks(folders).get(f"{dataset.name}-5shot")
    if task is None:
        return
    from ifsl_bench.backbones.device import choose_device, describe_device
    from ifsl_bench.backbones.trainer import measure_seconds_per_step

    device, steps = choose_device("auto"), task.pretraining.steps
    pace = measure_seconds_per_step(task, dataset, device)
    line = (
        f"a run on {task.name} first pretrains {task.pretraining.backbone}: about {_format_duration(steps * pace)} on "
        f"{describe_device(device)} ({steps:,} steps of {pace:.2g} s, as just measured)"
    )
    few = max(1, round(SPEED_MEASUREMENT_SECONDS / pace))
    if few < steps // 2:
        line += (
            f"; to rehearse a run in {_format_duration(few * pace)} of pretraining: ifsl-bench run --method imprint "
            f"--task {task.name} --pretraining-steps {few}"
        )
    reporter.say(line)


def _format_duration(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@data.command("verify", epilog=format_examples("data verify", "data verify glyphs"))
@click.argument("names", nargs=-1, shell_complete=complete_data)
@home_option
@quiet_option
@verbose_option
def data_verify(names: tuple[str, ...], home: str | None, quiet: bool, verbose: bool) -> None:
    """Compare the checksums of prepared data sets.

    Checks all of them if none is named.
    """
    from ifsl_bench.data.preparing import catalogue

    for line in catalogue.verify_datasets(locate_folders(home), names, make_reporter(quiet, verbose)):
        click.echo(line)


@data.command("stats", epilog=format_examples("data stats glyphs", "data stats glyphs --format latex"))
@click.argument("name", shell_complete=complete_data)
@home_option
@style_option
@quiet_option
def data_stats(name: str, home: str | None, style: str, quiet: bool) -> None:
    """Print how many classes and images a data set has.

    By pool, as in the paper's table, with any further facts about the data set.
    """
    from ifsl_bench.data.preparing import catalogue
    from ifsl_bench.reporting.table import table_from_dicts

    tables = catalogue.make_statistics_tables(locate_folders(home), name, make_reporter(quiet))
    fold = {"mean": 12, "std": 12, "classes": 16}
    print_tables_in_format([table_from_dicts(rows, title, fold) for title, rows in tables], style)


@data.command(
    "show", epilog=format_examples("data show glyphs", "data show glyphs --out letters.jpg --classes 20 --images 4")
)
@click.argument("name", shell_complete=complete_data)
@click.option("--out", default=None, metavar="FILE", help="The picture to write, .png, .jpg or .webp [NAME.png].")
@click.option("--classes", default=12, type=IntegerRange(1), help="Classes of each pool [12].")
@click.option("--images", default=8, type=IntegerRange(1), help="Images of each class [8].")
@home_option
@quiet_option
def data_show(name: str, out: str | None, classes: int, images: int, home: str | None, quiet: bool) -> None:
    """Write a contact sheet: images of some classes of each pool."""
    from ifsl_bench.data.preparing import catalogue

    path = Path(out or f"{name}.png")
    catalogue.write_contact_sheet(locate_folders(home), name, path, classes, images, make_reporter(quiet))
    click.echo(f"wrote {path}")


@data.command("remove", epilog=format_examples("data remove mine", "data remove mine --yes"))
@click.argument("name", shell_complete=complete_data)
@click.option("--yes", is_flag=True, help="Do not ask.")
@home_option
def data_remove(name: str, yes: bool, home: str | None) -> None:
    """Remove a prepared data set or an unfinished import.

    Its task file goes too if it is your own and no result needs it to be read. Lists what would be removed, and
    asks first. 'ifsl-bench cache' lists what was computed from it.
    """
    from ifsl_bench.data.preparing import catalogue

    folders = locate_folders(home)
    for path in catalogue.list_removable_paths(folders, name):
        click.echo(f"to be removed: {path}")
    if not confirm_removal("Remove this?", yes):
        return
    catalogue.remove_data(folders, name)
    click.echo("removed; 'ifsl-bench cache' lists features and models made from it, 'cache prune KIND' removes them")
