"""``ifsl-bench plot KIND ...``: figures for papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ifsl_bench.cli.completion import complete_tasks
from ifsl_bench.cli.options import Group, Whole, examples
from ifsl_bench.cli.plot_options import index_option, numbers, of_models, of_results, written
from ifsl_bench.common.errors import unknown
from ifsl_bench.protocol.limits import MOST_SEEDS


class Kinds(Group):
    """Suggests the nearest kind for an unknown one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise unknown("kind of figure", args[0], self.commands)
        return super().resolve_command(ctx, args)


@click.group(
    cls=Kinds,
    epilog=examples(
        "ifsl-bench plot tradeoff glyphs-5shot --out tradeoff.pdf",
        "ifsl-bench plot ranks glyphs-1shot glyphs-5shot --wide --out ranks.svg",
    ),
)
def plot() -> None:
    """Draw a figure for a paper, as PDF, SVG or PNG.

    Figures are one column of a two-column paper wide (3.3 inches), or two with --wide (6.8 inches), with text of 7
    points and more: include them as they are. A method has the same colour and marker in all of them.
    """


@plot.command(
    epilog=examples(
        "ifsl-bench plot tradeoff glyphs-5shot --out tradeoff.pdf",
        "ifsl-bench plot tradeoff glyphs-5shot --method lr,lr+a --out x.svg",
    )
)
@click.argument("task", shell_complete=complete_tasks)
@of_results
def tradeoff(task: str, out: Path, **asked: Any) -> None:
    """Base against novel accuracy, with bias curves.

    Each row is the curve that one bias on all novel logits traces, with a point where the bias is 0 and a hollow one
    where validation puts it; grey lines join equal Acc., dashed ones an equal harmonic mean.
    """
    from ifsl_bench.figures import plot

    written(plot.tradeoff(task, **asked), out)


@plot.command(
    epilog=examples(
        "ifsl-bench plot ranks glyphs-5shot --out ranks.pdf",
        "ifsl-bench plot ranks glyphs-1shot glyphs-5shot --wide --out ranks.pdf",
    )
)
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...", shell_complete=complete_tasks)
@of_results
def ranks(tasks: tuple[str, ...], out: Path, **asked: Any) -> None:
    """The ranks that each method can have."""
    from ifsl_bench.figures import plot

    written(plot.ranks(*tasks, **asked), out)


@plot.command(
    epilog=examples(
        "ifsl-bench plot pairs glyphs-5shot --wide --out pairs.pdf",
        "ifsl-bench plot pairs glyphs-5shot --method lr,lr+s,lr+a --out x.pdf",
    )
)
@click.argument("task", shell_complete=complete_tasks)
@of_results
def pairs(task: str, out: Path, **asked: Any) -> None:
    """Paired differences of all methods, a heat map.

    What is not significant is hatched. Cells show numbers where there is room: with --wide, or few methods. Rows with
    fewer than three seeds are left out unless --method names them.
    """
    from ifsl_bench.figures import plot

    written(plot.pairs(task, **asked), out)


@plot.command(
    epilog=examples(
        "ifsl-bench plot seeds glyphs-5shot --out seeds.pdf",
        "ifsl-bench plot seeds glyphs-5shot --method lr,lr+a --out seeds.svg",
    )
)
@click.argument("task", shell_complete=complete_tasks)
@of_results
def seeds(task: str, out: Path, **asked: Any) -> None:
    """The accuracy of every training seed."""
    from ifsl_bench.figures import plot

    written(plot.seeds(task, **asked), out)


@plot.command(
    epilog=examples(
        "ifsl-bench plot validation glyphs-5shot --out validation.pdf",
        "ifsl-bench plot validation glyphs-5shot --method lr+a --out x.pdf",
    )
)
@click.argument("task", shell_complete=complete_tasks)
@of_results
def validation(task: str, out: Path, **asked: Any) -> None:
    """Validation accuracy while meta-training."""
    from ifsl_bench.figures import plot

    written(plot.validation(task, **asked), out)


@plot.command(
    "base-classes",
    epilog=examples(
        "ifsl-bench run --method lr --task glyphs-5shot --base-classes 50",
        "ifsl-bench plot base-classes glyphs-5shot --method lr --out x.pdf",
    ),
)
@click.argument("task", shell_complete=complete_tasks)
@of_results
def base_classes(task: str, out: Path, **asked: Any) -> None:
    """Accuracy by the number of base classes.

    From results of TASK and of TASK+base-classes=N, which ``run --base-classes N`` makes.
    """
    from ifsl_bench.figures import plot

    written(plot.base_classes(task, **asked), out)


@plot.command(
    "inner-steps",
    epilog=examples(
        "ifsl-bench plot inner-steps glyphs-5shot --train --out steps.pdf",
        "ifsl-bench plot inner-steps glyphs-5shot --unrolled 5,20 --out x.pdf",
    ),
)
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...", shell_complete=complete_tasks)
@click.option("--steps", default="1,2,5,10,20,50,100,200,500", callback=numbers, metavar="N,...",
              help="After which gradient steps to stop [1,2,5,10,20,50,100,200,500].")  # fmt: skip
@click.option("--unrolled", default="20", callback=numbers, metavar="N,...",
              help="Numbers of steps that T-BPTT is trained with; one line each [20].")  # fmt: skip
@click.option("--seeds", type=Whole(1, MOST_SEEDS), default=1,
              help="How many training seeds to average over [1].")  # fmt: skip
@click.option("--episodes", type=Whole(), help="Use only the first N test episodes [500].")
@of_models("lr+a")
def inner_steps(tasks: tuple[str, ...], out: Path, **asked: Any) -> None:
    """Accuracy by inner steps, of RBP and T-BPTT.

    Models trained with either are evaluated after a number of gradient steps on the inner problem, and at convergence.
    """
    from ifsl_bench.figures import plot

    written(plot.inner_steps(*tasks, **asked), out)


@plot.command(
    "episode-pca",
    epilog=examples(
        "ifsl-bench plot episode-pca glyphs-5shot --train --out pca.pdf",
        "ifsl-bench plot episode-pca glyphs-5shot --index 3 --out pca.pdf",
    ),
)
@click.argument("task", shell_complete=complete_tasks)
@index_option
@of_models("lr+a")
def episode_pca(task: str, out: Path, **asked: Any) -> None:
    """An episode before and after the fast weights.

    In the plane of its first two principal components, with the regions where the method answers with each class.
    """
    from ifsl_bench.figures import plot

    written(plot.episode_pca(task, **asked), out)


@plot.command(
    epilog=examples(
        "ifsl-bench plot attractors glyphs-5shot --train --out x.pdf",
        "ifsl-bench plot attractors glyphs-5shot --index 3 --out x.pdf",
    )
)
@click.argument("task", shell_complete=complete_tasks)
@index_option
@of_models("lr+a")
def attractors(task: str, out: Path, **asked: Any) -> None:
    """Base weights and the attractors they produce."""
    from ifsl_bench.figures import plot

    written(plot.attractors(task, **asked), out)


@plot.command(
    epilog=examples(
        "ifsl-bench plot episode glyphs-5shot --method imprint --out x.pdf",
        "ifsl-bench plot episode glyphs-5shot --index 3 --method lr --out x.pdf",
    )
)
@click.argument("task", shell_complete=complete_tasks)
@index_option
@of_models()
def episode(task: str, out: Path, **asked: Any) -> None:
    """The contact sheet of an episode.

    Support images above, queries below, with what the methods predict: a tick is right, a cross wrong.
    """
    from ifsl_bench.figures import plot

    written(plot.episode(task, **asked), out)
