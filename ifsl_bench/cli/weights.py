"""``ifsl-bench weights``: weights of backbones as files to hand on, and a list of those that are here."""

from __future__ import annotations

from pathlib import Path

import click

from ifsl_bench.cli.completion import complete_tasks
from ifsl_bench.cli.options import (
    IntegerRange,
    SuggestingGroup,
    format_examples,
    home_option,
    locate_folders,
    make_reporter,
    style_option,
)
from ifsl_bench.cli.output import print_tables_in_format
from ifsl_bench.protocols.tasks.task_limits import LARGEST_SEED
from ifsl_bench.utils.errors import UserError


@click.group(cls=SuggestingGroup, epilog=format_examples("weights list", "weights export --task glyphs-5shot"))
def weights() -> None:
    """Export, import, fetch or list weights of backbones."""


@weights.command(
    "export",
    epilog=format_examples(
        "weights export --task glyphs-5shot", "weights export --task tiered-5shot --to w.safetensors"
    ),
)
@click.option("--task", shell_complete=complete_tasks, help="A task, or a TOML file of your own.")
@click.option("--head", default="linear", help="Head of the base classifier: linear or cosine [linear].")
@click.option("--seed", default=0, type=IntegerRange(0, LARGEST_SEED), help="The training seed [0].")
@click.option("--recipe", metavar="NAME", help="The recipe that trained it, with its options [the task's own].")
@click.option("--to", metavar="FILE", help="The file to write [KEY.safetensors in the current folder].")
@home_option
def weights_export(
    task: str | None, head: str, seed: int, recipe: str | None, to: str | None, home: str | None
) -> None:
    """Write a task's backbone and base classifier into one file.

    The file also says what made them.
    """
    if not task:
        raise UserError("say the weights of which task, e.g.: ifsl-bench weights export --task tiered-5shot")
    from ifsl_bench.experiments.pretraining import export_weights

    place = Path(to).expanduser() if to else None
    path, exported = export_weights(task, head, seed, locate_folders(home), place, recipe)
    click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB, weights {exported.sha256}")


@weights.command(
    "import", epilog=format_examples("weights import w.safetensors", "weights import *.safetensors --force")
)
@click.argument("files", metavar="FILE...", nargs=-1)
@click.option(
    "--force",
    is_flag=True,
    help="Replace other weights of the same pretraining; the old ones are kept under another name.",
)
@home_option
def weights_import(files: tuple[str, ...], force: bool, home: str | None) -> None:
    """Import files that 'weights export' wrote.

    Later runs on their tasks start from these weights.
    """
    if not files:
        raise UserError("say which file, e.g.: ifsl-bench weights import tiered.safetensors")
    from ifsl_bench.backbones.weights import import_weights

    for name in files:
        imported, new = import_weights(Path(name).expanduser(), locate_folders(home), make_reporter(False), force)
        click.echo(
            f"{imported.pretraining_key}: {imported.accuracies_in_words}, trained on "
            f"{imported.training_record['device']}" + ("" if new else "; there already")
        )
        click.echo(f"weights: {imported.sha256}")


@weights.command(
    "fetch",
    epilog=format_examples(
        "weights fetch KEY --from ~/ifsl_bench/results/weights",
        "weights fetch KEY --from https://example.org/weights",
    ),
)
@click.argument("keys", metavar="KEY...", nargs=-1)
@click.option(
    "--from",
    "source",
    metavar="URL|FOLDER",
    help="The folder with the files, KEY.safetensors [the project's address].",
)
@home_option
def weights_fetch(keys: tuple[str, ...], source: str | None, home: str | None) -> None:
    """Get weights of stored rows that are not in the wheel.

    A download that broke off goes on where it was. The files are checked by size and SHA-256.
    """
    if not keys:
        raise UserError("say which weights, by a key of: ifsl-bench weights list")
    from ifsl_bench.backbones.fetch_weights import fetch_weights
    from ifsl_bench.backbones.weights import has_other_weights, read_metadata

    folders, reporter = locate_folders(home), make_reporter(False)
    for key in keys:
        path, fetched = fetch_weights(key, folders, source, reporter)
        click.echo(f"{path}" if fetched else f"{path}: here already")
        if has_other_weights(folders, key, read_metadata(path).sha256):
            reporter.warn(f"this home has begun a training of {key}; to replace it: weights import {path} --force")


@weights.command("list", epilog=format_examples("weights list", "weights list --format csv"))
@home_option
@style_option
def weights_list(home: str | None, style: str) -> None:
    """List the finished pretrainings.

    Those in the home folder, those that come with the package, and those to be fetched.
    """
    from ifsl_bench.backbones.weights import list_weights
    from ifsl_bench.reporting.table import table_from_dicts

    rows = list_weights(locate_folders(home))
    print_tables_in_format(
        [table_from_dicts(rows, min_fold_widths={"pretraining": 30}, dropped_first=("weights", "trained on"))], style
    )
