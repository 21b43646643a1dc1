"""``ifsl-bench plot KIND ...``: figures for papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from ifsl_bench.cli.completion import complete_methods, complete_options, complete_rows, complete_tasks
from ifsl_bench.cli.options import (
    IntegerRange,
    SuggestingGroup,
    device_option,
    format_examples,
    home_option,
    make_reporter,
    parse_name_values,
    parse_names,
    quiet_option,
    recipe_option,
    results_option,
    verbose_option,
)
from ifsl_bench.protocols.tasks.task_limits import MOST_SEEDS
from ifsl_bench.utils.errors import UserError


class FigureGroup(SuggestingGroup):
    """The commands of ``ifsl-bench plot``, one for each kind of figure."""

    command_noun = "kind of figure"


@click.group(
    cls=FigureGroup,
    epilog=format_examples(
        "plot tradeoff glyphs-5shot --out tradeoff.pdf", "plot ranks glyphs-1shot glyphs-5shot --wide --out ranks.svg"
    ),
)
def plot() -> None:
    """Draw a figure for a paper, as PDF, SVG or PNG.

    Figures are one column of a two-column paper wide (3.3 inches), or two with --wide (6.8 inches), with text of 7
    points and more: include them as they are. A method has the same colour and marker in all of them.
    """


def _parse_output_path(_: click.Context, __: click.Parameter, value: str) -> Path:
    from ifsl_bench.reporting.figures.style import figure_format

    path = Path(value).expanduser()
    figure_format(path)  # a wrong name is an error before anything is computed
    return path


def _parse_whole_numbers(_: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Parse whole numbers from 1, comma-separated."""
    words = [word.strip() for word in value.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and int(word[:9]) > 0 for word in words):
        raise UserError(f"--{parameter.name} takes whole numbers from 1, as in 5,20, not {value!r}")
    return tuple(sorted({int(word) for word in words}))


output_file_option = click.option(
    "--out", required=True, callback=_parse_output_path, metavar="FILE", help="x.pdf, x.svg or x.png."
)
wide_option = click.option("--wide", is_flag=True, help="Two columns wide.")
episode_count_option = click.option("--episodes", type=IntegerRange(), help="Use only the first N test episodes [500].")
episode_index_option = click.option("--index", type=IntegerRange(), default=0, help="Which test episode [0].")
results_figure_options = (
    output_file_option,
    click.option(
        "--method",
        "methods",
        multiple=True,
        callback=parse_names,
        metavar="LABEL",
        shell_complete=complete_rows,
        help="Only rows with these labels, comma-separated or repeated [the best without own options].",
    ),
    click.option("--setting", metavar="NAME", help="Rows that are not tuned (paper), or tuned ones (tuned-12)."),
    recipe_option,
    wide_option,
    home_option,
    results_option,
)
step_curve_options = (
    click.option(
        "--steps",
        default="1,2,5,10,20,50,100,200,500",
        callback=_parse_whole_numbers,
        metavar="N,...",
        help="After which gradient steps to stop [1,2,5,10,20,50,100,200,500].",
    ),
    click.option(
        "--unrolled",
        default="20",
        callback=_parse_whole_numbers,
        metavar="N,...",
        help="Numbers of steps that T-BPTT is trained with; one line each [20].",
    ),
    click.option(
        "--seeds", type=IntegerRange(1, MOST_SEEDS), default=1, help="How many training seeds to average over [1]."
    ),
    episode_count_option,
)


def _model_options(default_method: str = "") -> tuple[Callable[..., Any], ...]:
    """Return the options of figures of trained models.

    Args:
        default_method: of a figure for which the user names none.
    """
    return (
        output_file_option,
        click.option(
            "--method",
            "methods",
            multiple=True,
            callback=parse_names,
            required=not default_method,
            metavar="TEXT",
            shell_complete=complete_methods,
            help="Methods, comma-separated or repeated" + (f" [{default_method}]." if default_method else "."),
        ),
        click.option(
            "--set",
            "options",
            multiple=True,
            callback=parse_name_values,
            metavar="NAME=VALUE",
            shell_complete=complete_options,
            help="An option of the methods.",
        ),
        click.option("--train", is_flag=True, help="Train what is not trained yet, as 'run' does."),
        wide_option,
        device_option,
        home_option,
        quiet_option,
        verbose_option,
    )


class FigureKind(NamedTuple):
    """A kind of figure."""

    help_text: str  # of its command
    examples: tuple[str, str]  # arguments of two commands
    # those of its command, by the names of its function's arguments
    options: tuple[Callable[..., Any], ...] = results_figure_options
    takes_several_tasks: bool = False  # whether it takes several tasks


# The functions of these names in ifsl_bench.reporting.figures.plot draw them.
FIGURE_KINDS: Mapping[str, FigureKind] = {
    "tradeoff": FigureKind(
        """Base against novel accuracy, with bias curves.

        Each row is the curve that one bias on all novel logits traces, with a point where the bias is 0 and a hollow
        one where validation puts it; grey lines join equal Acc., dashed ones an equal harmonic mean.
        """,
        ("glyphs-5shot --out tradeoff.pdf", "glyphs-5shot --method lr,lr+a --out x.svg"),
    ),
    "ranks": FigureKind(
        "The ranks that each method can have.",
        ("glyphs-5shot --out ranks.pdf", "glyphs-1shot glyphs-5shot --wide --out ranks.pdf"),
        takes_several_tasks=True,
    ),
    "pairs": FigureKind(
        """Paired differences of all methods, a heat map.

        What is not significant is hatched. Cells show numbers where there is room: with --wide, or few methods. Rows
        with fewer than three seeds are left out unless --method names them.
        """,
        ("glyphs-5shot --wide --out pairs.pdf", "glyphs-5shot --method lr,lr+s,lr+a --out x.pdf"),
    ),
    "seeds": FigureKind(
        "The accuracy of every training seed.",
        ("glyphs-5shot --out seeds.pdf", "glyphs-5shot --method lr,lr+a --out seeds.svg"),
    ),
    "validation": FigureKind(
        "Validation accuracy while meta-training.",
        ("glyphs-5shot --out validation.pdf", "glyphs-5shot --method lr+a --out x.pdf"),
    ),
    "base-classes": FigureKind(
        """Accuracy by the number of base classes.

        From results of TASK and of TASK+base-classes=N, which ``run --base-classes N`` makes.
        """,
        ("glyphs-5shot --method lr --out x.pdf", "glyphs-5shot --method lr,lr+a --out x.pdf"),
    ),
    "recipes": FigureKind(
        """Recipes and classifiers, each with each.

        A line for each recipe of the backbone, the best first, with a mark for each classifier; of all recipes unless
        --recipe names some.
        """,
        ("glyphs-sessions --out recipes.pdf", "glyphs-sessions --recipe ce,closer --out x.pdf"),
    ),
    "sessions": FigureKind(
        """Accuracy after each session.

        Mean over orders and seeds, in a band that holds 95% of the orders of the classes. Dotted lines are models with
        the rows' A_0 that never answer with a novel class. Without --method all published rows are drawn, faint and
        dashed; with it, those of the same names, dashed with hollow marks.
        """,
        ("tiny-features-sessions --out sessions.pdf", "glyphs-sessions --method ncm,lr --out x.pdf"),
    ),
    "forgetting": FigureKind(
        """What becomes of each session's classes.

        Accuracy on the classes of each session, after it and each later one: a triangle for each row.
        """,
        ("glyphs-sessions --wide --out forgetting.pdf", "glyphs-sessions --method ncm,lr --out x.pdf"),
    ),
    "variance": FigureKind(
        """What rows in sessions depend on.

        Shares of order, support set and training seed in the variance of a single value, of rows and of the difference
        of each to the next, as in the command 'variance'.
        """,
        ("glyphs-sessions --out variance.pdf", "glyphs-sessions --method teen,protonet --out x.pdf"),
    ),
    "inner-steps": FigureKind(
        """Accuracy by inner steps, of RBP and T-BPTT.

        Models trained with either are evaluated after a number of gradient steps on the inner problem, and at
        convergence.
        """,
        ("glyphs-5shot --train --out steps.pdf", "glyphs-5shot --unrolled 5,20 --out x.pdf"),
        (*step_curve_options, *_model_options("lr+a")),
        takes_several_tasks=True,
    ),
    "episode-pca": FigureKind(
        """An episode before and after the fast weights.

        In the plane of its first two principal components, with the regions where the method answers with each class.
        """,
        ("glyphs-5shot --train --out pca.pdf", "glyphs-5shot --index 3 --out pca.pdf"),
        (episode_index_option, *_model_options("lr+a")),
    ),
    "attractors": FigureKind(
        "Base weights and the attractors they produce.",
        ("glyphs-5shot --train --out x.pdf", "glyphs-5shot --index 3 --out x.pdf"),
        (episode_index_option, *_model_options("lr+a")),
    ),
    "confusions": FigureKind(
        """Which base classes take novel queries.

        The pairs with the largest shares of a novel class's queries that a base class takes; in sessions, after the
        last one, of 100 sequences.
        """,
        ("tiny-features-5shot --method imprint --out x.pdf", "glyphs-5shot --method lr,lr+a --train --out x.pdf"),
        (episode_count_option, *_model_options()),
    ),
}


def _draw_and_save(name: str, out: Path, **arguments: Any) -> None:
    """Draw a figure, write it, and print its notes."""
    from ifsl_bench.reporting.figures import plot as figures

    if "results_dir" in arguments:
        arguments |= {"results": arguments.pop("results_dir"), "recipe": arguments.pop("recipes")}
    else:
        from ifsl_bench import api
        from ifsl_bench.backbones.device import keep_freed_memory_in_allocator

        keep_freed_memory_in_allocator()
        reporter = make_reporter(arguments.pop("quiet"), arguments.pop("verbose"))
        arguments["work"] = api.workspace(arguments.pop("home"), None, arguments.pop("device"), reporter)
        arguments["methods"] = arguments["methods"] or ("lr+a",)
    tasks = arguments.pop("tasks") if FIGURE_KINDS[name].takes_several_tasks else [arguments.pop("task")]
    drawing = getattr(figures, name.replace("-", "_"))(*tasks, **arguments)
    drawing.save(out)
    click.echo(f"wrote {out}")
    for note in drawing.notes:
        click.echo(note)


def _make_command(name: str, kind: FigureKind) -> click.Command:
    def draw(**arguments: Any) -> None:
        _draw_and_save(name, **arguments)

    draw.__doc__ = kind.help_text
    for option in reversed(kind.options):
        draw = option(draw)
    if kind.takes_several_tasks:
        tasks = click.argument("tasks", nargs=-1, required=True, metavar="TASK...", shell_complete=complete_tasks)
    else:
        tasks = click.argument("task", shell_complete=complete_tasks)
    draw = tasks(draw)
    commands = (f"plot {name} {arguments}" for arguments in kind.examples)
    return click.command(name, epilog=format_examples(*commands))(draw)


for _name, _kind in FIGURE_KINDS.items():
    plot.add_command(_make_command(_name, _kind))
