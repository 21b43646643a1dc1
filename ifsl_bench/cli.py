"""The command line: parses, calls one function of the library for each command, and prints.

Nothing heavy is imported before a command needs it; ``--help`` and ``tasks`` come without torch.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ifsl_bench._version import __version__
from ifsl_bench.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.reporter import Reporter
    from ifsl_bench.store import Home


class _Group(click.Group):
    """Suggests the nearest command for an unknown one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            from ifsl_bench.errors import unknown

            raise unknown("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


def _names(_: click.Context, __: click.Parameter, values: Sequence[str]) -> list[str]:
    """Repeated options and comma-separated lists alike."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def _pairs(_: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, separator, text = value.partition("=")
        if not separator or not key.strip():
            raise UserError(f"--{parameter.name} takes name=value, not {value!r}")
        pairs[key.strip()] = text.strip()
    return pairs


def _format(_: click.Context, __: click.Parameter, value: str) -> str:
    from ifsl_bench.errors import unknown
    from ifsl_bench.report import FORMATS

    if value not in FORMATS:
        raise unknown("format", value, FORMATS)
    return value


_home = click.option("--home", metavar="DIR", help="Folder of caches and results [IFSL_BENCH_HOME, or the platform's].")
_results = click.option("--results", "results_dir", metavar="DIR", help="Folder of result files [below the home].")
_style = click.option("--format", "style", default="text", callback=_format, help="text, markdown, latex or csv.")
_quiet = click.option("-q", "--quiet", is_flag=True, help="No progress, only results and warnings.")
_verbose = click.option("-v", "--verbose", is_flag=True, help="Plain progress lines with more detail.")
_device = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")


def _folders(home: str | None, results_dir: str | None = None) -> Home:
    from ifsl_bench.store import Home

    return Home.locate(home, results_dir)


def _reporter(quiet: bool, verbose: bool = False) -> Reporter:
    from ifsl_bench.reporter import LogReporter, RichReporter

    if quiet:
        return LogReporter(verbose=False)
    if verbose or not sys.stderr.isatty():
        return LogReporter(every=2.0 if verbose else 10.0)
    return RichReporter()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ifsl-bench")
def cli() -> None:
    """A benchmark suite for incremental few-shot learning."""


@cli.command()
@click.option("--method", "methods", multiple=True, callback=_names, help="Methods, comma-separated or repeated.")
@click.option("--task", "tasks", multiple=True, callback=_names, help="Tasks, or TOML files of your own.")
@click.option("--set", "options", multiple=True, callback=_pairs, metavar="NAME=VALUE", help="An option of the method.")
@click.option("--train", multiple=True, callback=_pairs, metavar="NAME=VALUE",
              help="episodes_per_step, select=best|last, views, steps.")  # fmt: skip
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of training; the first of --seeds."
)
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(min=1), help="How many training seeds.")
@click.option("--episodes", type=int, help="Only the first so many test episodes.")
@click.option("--checkpoint", metavar="DIR", help="Evaluate this meta-trained model; nothing is trained or stored.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, what is cached, and a rough time.")
@click.option("--rerun", is_flag=True, help="Evaluate again even if the result is stored.")
@click.option("--full", is_flag=True, help="Tables with the joint and alone accuracies too.")
@_device
@_home
@_results
@_style
@_quiet
@_verbose
def run(
    methods: list[str],
    tasks: list[str],
    options: dict[str, str],
    train: dict[str, str],
    seed: int,
    seeds: int,
    episodes: int | None,
    checkpoint: str | None,
    dry_run: bool,
    rerun: bool,
    full: bool,
    device: str,
    home: str | None,
    results_dir: str | None,
    style: str,
    quiet: bool,
    verbose: bool,
) -> None:
    """Train and evaluate methods on tasks, and show them among the stored rows."""
    if not tasks or (not methods and not checkpoint):
        raise UserError("say what to run, e.g.: ifsl-bench run --method imprint --task glyphs-5shot")
    from ifsl_bench.task import find

    found = [task for name in tasks for task in find(name)]  # a wrong name is told before torch is imported
    from ifsl_bench import api, pipeline, report
    from ifsl_bench.training import Training

    reporter = _reporter(quiet, verbose)
    work = api.workspace(home, results_dir, device, reporter)
    command = shlex.join(["ifsl-bench", *sys.argv[1:]])
    if checkpoint:
        if len(tasks) != 1 or methods or options or train or seeds != 1:
            raise UserError("--checkpoint takes one --task, and method, options and seed from the model itself")
        result = api.evaluate_checkpoint(Path(checkpoint), tasks[0], episodes=episodes, work=work, command=command)
        click.echo(f"{result.label} on {result.task}, seed {result.seed}\n\n{report.result_table(result, style)}")
        return
    training = Training.parse(train)
    jobs = pipeline.make_jobs(methods, tasks, options, training, range(seed, seed + seeds), episodes)
    if dry_run:
        from ifsl_bench.plan import plan

        click.echo(report.render(plan(jobs, work, rerun), style))
        return
    made = api.run_jobs(jobs, work, rerun=rerun, command=command)
    for task in dict.fromkeys(found):
        rows = report.load_rows(task.name, work.home.results)
        click.echo("\n" + report.task_table(task.name, rows, style, full))
        if style != "csv":
            for label in dict.fromkeys(r.label for r in made if r.task == task.name):
                click.echo("\n" + "\n".join(report.standing(rows, label)))


@cli.command()
@_style
def methods(style: str) -> None:
    """List the methods, with their options and where they come from."""
    from ifsl_bench import registry, report
    from ifsl_bench.method import Method, options_of

    rows = []
    for name in registry.names(registry.METHODS):
        plugin = registry.load(registry.METHODS, name)
        kind = plugin.value
        row = {"method": name, "package": plugin.package, "head": "", "options": "", "what": plugin.problem}
        if not plugin.problem and not (isinstance(kind, type) and issubclass(kind, Method)):
            row["what"] = "broken: it is not a subclass of ifsl_bench.Method"
        elif not plugin.problem:
            try:
                shown = [f"{o.name}={_plain(o.default)} ({o.spelled})" for o in options_of(kind).values()]
            except UserError as error:
                row["what"] = f"broken: {error}"
            else:
                row |= {
                    "head": kind.head,
                    "options": ", ".join(shown),
                    "what": (kind.__doc__ or "").strip().split("\n")[0],
                }
        rows.append(row)
    click.echo(report.render(rows, style))


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


@cli.command()
@_home
@_style
def tasks(home: str | None, style: str) -> None:
    """List the tasks, and whether their data are there."""
    from ifsl_bench import registry, report
    from ifsl_bench.task import packaged

    folders = _folders(home)
    known = registry.names(registry.DATASETS)
    rows = []
    for task in packaged().values():
        prepared = (folders.data / task.dataset.name / "manifest.json").exists()
        embedded = task.dataset.name in known
        rows.append(
            {
                "task": task.name,
                "what": task.title,
                "protocol": task.protocol,
                "shots": str(task.shots),
                "episodes": f"{task.evaluation.episodes:,}",
                "backbone": task.pretraining.backbone,
                "data": f"{task.dataset.name}: "
                + ("prepared" if prepared else "made when first used" if embedded else "to be obtained"),
            }
        )
    click.echo(report.render(rows, style))


@cli.command()
@click.argument("names", nargs=-1, metavar="TASK...")
@click.option("--full", is_flag=True, help="The joint and alone accuracies too.")
@_home
@_results
@_style
def table(names: tuple[str, ...], full: bool, home: str | None, results_dir: str | None, style: str) -> None:
    """Print the stored and published rows of tasks (of every task that has any, where none is named)."""
    from ifsl_bench import report
    from ifsl_bench.task import find, packaged

    folders = _folders(home, results_dir)
    chosen = [task.name for name in names for task in find(name)]
    if not chosen:
        from ifsl_bench.result import published

        chosen = [n for n in packaged() if published(n) or report.load_rows(n, folders.results)]
    texts = [report.task_table(name, report.load_rows(name, folders.results), style, full) for name in chosen]
    if style == "csv":  # one header for all tasks
        texts = [texts[0], *(text.split("\n", 1)[1] for text in texts[1:])] if texts else []
        click.echo("\n".join(texts))
    else:
        click.echo("\n\n".join(texts))


@cli.command()
@click.argument("a")
@click.argument("b")
@click.option("--task", "task", help="The task, where A and B are labels of stored rows.")
@_home
@_results
@_style
def compare(a: str, b: str, task: str | None, home: str | None, results_dir: str | None, style: str) -> None:
    """Paired difference A - B: two labels of a task, or two result files."""
    from ifsl_bench import report
    from ifsl_bench.compare import Row
    from ifsl_bench.compare import compare as compare_rows
    from ifsl_bench.errors import unknown
    from ifsl_bench.result import read

    rows = []
    if task:
        from ifsl_bench.task import find

        (found, *more) = find(task)
        if more:
            raise UserError(f"{task} defines several tasks; choose one as {task}:NAME")
        stored = report.load_rows(found.name, _folders(home, results_dir).results)
        for name in (a, b):
            row = next((row for row in stored if row.label == name), None)
            if row is None:
                raise unknown("row", name, {row.label for row in stored}, where=f"of task {found.name}")
            rows.append(row)
    else:
        for name in (a, b):
            path = Path(name)
            if not path.exists():
                raise UserError(f"there is no result file {name}; to compare labels of a task, add --task TASK")
            result = read(path)
            rows.append(Row(f"{result.label}.seed-{result.seed}", "file", (result,)))
    click.echo(report.comparison_table(compare_rows(*rows), style))


@cli.command()
@click.argument("file", type=click.Path())
@_style
def show(file: str, style: str) -> None:
    """Print one result file in full."""
    from ifsl_bench import report
    from ifsl_bench.result import read

    result = read(Path(file))
    click.echo(report.result_table(result, style))
    if style in ("text", "markdown"):
        click.echo("\n" + report.result_facts(result))


@cli.group(cls=_Group)
def data() -> None:
    """Data sets: list, prepare, verify, stats, show."""


@data.command("list")
@_home
@_style
def data_list(home: str | None, style: str) -> None:
    """List known and prepared data sets."""
    from ifsl_bench import data_commands, report

    click.echo(report.render(data_commands.listing(_folders(home)), style))


@data.command("prepare")
@click.argument("name")
@click.option("--from", "source", metavar="PATH", help="What to make it from; a folder of six .npz files, say.")
@click.option("--force", is_flag=True, help="Build it again even if it is there.")
@_home
@_quiet
@_verbose
def data_prepare(name: str, source: str | None, force: bool, home: str | None, quiet: bool, verbose: bool) -> None:
    """Make a data set available."""
    from ifsl_bench.data.prepare import prepare

    dataset = prepare(_folders(home), name, Path(source) if source else None, force, _reporter(quiet, verbose))
    click.echo(f"{name}: {dataset.folder}\nfingerprint {dataset.fingerprint}")


@data.command("verify")
@click.argument("names", nargs=-1)
@_home
@_quiet
@_verbose
def data_verify(names: tuple[str, ...], home: str | None, quiet: bool, verbose: bool) -> None:
    """Compare the full checksums of prepared data sets (all where none is named)."""
    from ifsl_bench import data_commands

    for line in data_commands.verify_all(_folders(home), names, _reporter(quiet, verbose)):
        click.echo(line)


@data.command("stats")
@click.argument("name")
@_home
@_style
@_quiet
def data_stats(name: str, home: str | None, style: str, quiet: bool) -> None:
    """Print the data set's pools as in the paper's table, and what else it has to say."""
    from ifsl_bench import data_commands, report

    for title, rows in data_commands.statistics(_folders(home), name, _reporter(quiet)):
        click.echo(report.render([{"table": title, **r} for r in rows], style) if style == "csv"
                   else f"{title}\n\n{report.render(rows, style)}\n")  # fmt: skip


@data.command("show")
@click.argument("name")
@click.option("--out", default=None, metavar="FILE", help="The PNG to write [NAME.png].")
@click.option("--classes", default=12, show_default=True, type=click.IntRange(min=1), help="Classes of each pool.")
@click.option("--images", default=8, show_default=True, type=click.IntRange(min=1), help="Images of each class.")
@_home
@_quiet
def data_show(name: str, out: str | None, classes: int, images: int, home: str | None, quiet: bool) -> None:
    """Write a contact sheet of a data set as a PNG."""
    from ifsl_bench import data_commands

    path = Path(out or f"{name}.png")
    data_commands.contact_sheet(_folders(home), name, path, classes, images, _reporter(quiet))
    click.echo(f"wrote {path}")


def _guarded(call: Callable[[], Any]) -> int:
    """Runs the program; every mistake of the user's is one line and status 2."""
    try:
        call()
    except UserError as error:
        click.echo(f"ifsl-bench: {error}", err=True)
        return 2
    except click.exceptions.Abort:
        click.echo("ifsl-bench: interrupted; the same command goes on from where it stopped", err=True)
        return 130
    except click.ClickException as error:
        click.echo(f"ifsl-bench: {error.format_message()} (ifsl-bench --help lists what there is)", err=True)
        return 2
    except KeyboardInterrupt:
        click.echo("ifsl-bench: interrupted; the same command goes on from where it stopped", err=True)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except MemoryError:
        click.echo("ifsl-bench: not enough memory", err=True)
        return 2
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        click.echo(f"ifsl-bench: the system refused{where}: {error.strerror or error}", err=True)
        return 2
    return 0


def main() -> None:
    """The entry point of ``ifsl-bench``."""
    sys.exit(_guarded(lambda: cli(standalone_mode=False)))
