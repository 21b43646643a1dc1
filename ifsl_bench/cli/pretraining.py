"""``ifsl-bench pretrain``: trains a backbone and its base classifier, and nothing else."""

from __future__ import annotations

import click

from ifsl_bench.cli.completion import complete_tasks
from ifsl_bench.cli.options import (
    IntegerRange,
    device_option,
    format_examples,
    home_option,
    locate_folders,
    log_dir_option,
    log_option,
    make_reporter,
    quiet_option,
    verbose_option,
)
from ifsl_bench.protocols.tasks.task_limits import LARGEST_SEED
from ifsl_bench.utils.errors import UserError


@click.command(
    epilog=format_examples("pretrain --task mini-5shot --head cosine", "pretrain --task tiered-5shot --device cuda:1")
)
@click.option("--task", shell_complete=complete_tasks, help="A task, or a TOML file of your own.")
@click.option(
    "--head", default="linear", help="Head of the base classifier: linear or cosine [linear]; see 'ifsl-bench methods'."
)
@click.option("--seed", default=0, type=IntegerRange(0, LARGEST_SEED), help="Training seed [0].")
@click.option("--recipe", metavar="NAME", help="The recipe that trains it, or a file, with options [the task's own].")
@click.option("--compile", "compiled", is_flag=True, help="Use torch.compile; for accelerators.")
@click.option("--anew", is_flag=True, help="Train the weights here even if they come with the package.")
@log_option
@log_dir_option
@device_option
@home_option
@quiet_option
@verbose_option
def pretrain(
    task: str | None,
    head: str,
    seed: int,
    recipe: str | None,
    compiled: bool,
    anew: bool,
    log: str | None,
    log_dir: str | None,
    device: str,
    home: str | None,
    quiet: bool,
    verbose: bool,
) -> None:
    """Pretrain the backbone of a task; later runs find it done."""
    if not task:
        raise UserError("say what to pretrain for, e.g.: ifsl-bench pretrain --task glyphs-5shot")
    folders = locate_folders(home)
    from ifsl_bench.protocols.tasks.task_files import load_tasks

    load_tasks(task, home=folders)  # reports a wrong name before torch is imported
    from ifsl_bench.backbones.device import keep_freed_memory_in_allocator
    from ifsl_bench.experiments.pretraining import load_or_pretrain
    from ifsl_bench.experiments.training_curves import make_curve_logs

    keep_freed_memory_in_allocator()
    reporter, curves = (make_reporter(quiet, verbose), make_curve_logs(log, log_dir, folders))
    pretrained = load_or_pretrain(
        task,
        head=head,
        seed=seed,
        device=device,
        home=folders,
        reporter=reporter,
        compiled=compiled,
        anew=anew,
        curves=curves,
        recipe=recipe,
    )
    shown = ", ".join(f"{pool} {value:.2f}%" for pool, value in pretrained.result_entry()["accuracy"].items())
    click.echo(f"{pretrained.pretraining_key}: {shown}")
    click.echo(
        f"weights: {folders.pretrained / pretrained.pretraining_key / pretrained.training_record['tensors']['file']}"
    )
