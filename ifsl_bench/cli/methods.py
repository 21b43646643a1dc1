"""``ifsl-bench methods`` and ``cite``: what there is to run, and whom to cite for it."""

from __future__ import annotations

import click

from ifsl_bench.cli.completion import complete_methods, complete_rows_and_tasks
from ifsl_bench.cli.options import format_examples, home_option, locate_folders, style_option
from ifsl_bench.cli.output import print_lines, print_paragraphs, print_tables_in_format
from ifsl_bench.utils.errors import UserError, unknown_name_error

OPTION_NOTE_MEANINGS = {
    "tried": "'tried': the values to choose from on validation episodes, without --tune",
    "--tune": "'--tune': what a search tries",
}
PRINTED_METHOD_FIELDS = ("method", "what", "head", "trained", "paper", "package")  # to readers; programs get more


@click.command(epilog=format_examples("methods lr+a", "methods new my-method", "methods --check my_method.py:MyMethod"))
@click.argument("names", nargs=-1, metavar="[NAME | new NAME]", shell_complete=complete_methods)
@click.option(
    "--check",
    "checked",
    metavar="NAME",
    shell_complete=complete_methods,
    help="Check this method against the contract, on made-up episodes.",
)
@click.option("--package", is_flag=True, help="With 'new': a folder with an entry point and a test.")
@click.option("--images", is_flag=True, help="With 'new': a method that sees images and changes the network.")
@style_option
def methods(names: tuple[str, ...], checked: str | None, package: bool, images: bool, style: str) -> None:
    """List the methods; show one with its options and paper; or begin one of your own.

    NAME is what --method takes: a name of the list, or FILE.py:CLASS. What --tune tries is shown too. 'new NAME' writes
    a method that runs at once, NAME.py, or with --package a folder NAME to install.
    """
    if names and checked is not None:
        raise UserError("methods NAME shows a method, methods --check NAME checks it; say one of them")
    new = names[:1] == ("new",)
    if ((package or images) and not new) or (names and len(names) != 1 + new):
        raise UserError("methods takes one NAME, or 'new NAME', which alone has --package and --images")
    if checked is not None:
        _print_contract_check(checked, style)
    elif new:
        _create_method_file(names[1], package, images)
    elif names:
        _print_method(names[0], style)
    else:
        _print_methods(style)


def _create_method_file(name: str, package: bool, images: bool) -> None:
    from ifsl_bench.plugin.new_method import write_new_method

    path, data = write_new_method(name, package, images), "glyphs" if images else "tiny-features"
    then = f"pip install -e ./{path} && pytest {path}" if package else f"ifsl-bench methods --check {path}"
    click.echo(f"wrote {path}; next: {then} && ifsl-bench run --method {path} --task {data}-5shot")
    few = "+orders=4" if images else ""
    click.echo(f"in sessions: ifsl-bench run --method {path} --task {data}-sessions{few}")


def _print_methods(style: str) -> None:
    from ifsl_bench.plugin.listing import method_rows, methods_listed_by_shorthand
    from ifsl_bench.reporting.table import TABLE_FORMATTERS, table_from_dicts

    rows = method_rows()
    if style in TABLE_FORMATTERS:
        shown = [
            name for name in PRINTED_METHOD_FIELDS if name != "package" or len({row["package"] for row in rows}) > 1
        ]
        rows = [{name: row[name] for name in shown} for row in rows]
    print_tables_in_format(
        [table_from_dicts(rows, min_fold_widths={"what": 48}, dropped_first=("paper", "package", "trained"))], style
    )
    if style in TABLE_FORMATTERS:
        named = "; ".join(f"{name} is {' or '.join(also)}" for name, also in methods_listed_by_shorthand().items())
        print_lines(f"\nBy options: {named}", style)
        print_lines(
            "\nDetails of a method: ifsl-bench methods NAME; one of your own: ifsl-bench methods new NAME", style
        )


def _print_method(name: str, style: str) -> None:
    from ifsl_bench.plugin.listing import describe_method
    from ifsl_bench.reporting.table import TABLE_FORMATTERS, table_from_dicts

    description = describe_method(name)
    table = table_from_dicts(
        description.option_rows,
        min_fold_widths={"takes": 12, "default": 7, "tried": 12, "--tune": 12, "meaning": 24},
        dropped_first=("tried",),
    )
    if style not in TABLE_FORMATTERS:
        print_tables_in_format([table], style)
        return
    print_lines(description.title, style)
    print_lines("\n" + "\n".join(f"{key:13}{text}" for key, text in description.named_facts) + "\n", style)
    if description.option_rows:
        print_tables_in_format([table], style)
        meant = {
            key: text
            for key, text in OPTION_NOTE_MEANINGS.items()
            if any(option[key] for option in description.option_rows)
        }
        print_lines("\n" + (f"{'; '.join(meant.values())}.\n" if meant else ""), style)
    print_paragraphs(description.docstring_text, style)


def _print_contract_check(name: str, style: str) -> None:
    from ifsl_bench.plugin.adapting import Adapting
    from ifsl_bench.plugin.adapting_contract import check_adapting_rules
    from ifsl_bench.plugin.find_method import find_method
    from ifsl_bench.plugin.rules import check_contract, describe_ties_of_method
    from ifsl_bench.plugin.session_contract import check_session_rules
    from ifsl_bench.reporting.table import table_from_dicts

    chosen, meant = find_method(name)
    arguments = chosen.name, chosen.method, meant
    if issubclass(chosen.method, Adapting):
        checks = list(check_adapting_rules(chosen.name, chosen.method, meant))
    else:
        checks = [*check_contract(*arguments), *check_session_rules(*arguments)]
    rules = [{"rule": rule, "found": broken or "ok"} for rule, broken in checks]
    print_tables_in_format([table_from_dicts(rules, min_fold_widths={"rule": 40, "found": 20})], style)
    if failed := [rule for rule, broken in checks if broken]:
        raise UserError(f"method {chosen.name!r} breaks {len(failed)} of {len(checks)} rules")
    if not issubclass(chosen.method, Adapting) and (remark := describe_ties_of_method(*arguments)):
        print_lines(f"\nRemark: {remark}", style)


@click.command(epilog=format_examples("cite", "cite lr+a lin2024", "cite mini-5shot >> paper.bib"))
@click.argument("names", nargs=-1, metavar="[METHOD|TASK|SOURCE]...", shell_complete=complete_rows_and_tasks)
@home_option
def cite(names: tuple[str, ...], home: str | None) -> None:
    """Print BibTeX for methods and tasks, or for the suite itself.

    For a task: the papers of its data and of the protocol. For a source, as tables of published rows name it: the paper
    that they are copied from. Each paper appears once. Without a name: the entry of the suite, and the paper whose
    protocol it follows.
    """
    from ifsl_bench.plugin.bibliography import cite_method, cite_suite, cite_task, unique_entries
    from ifsl_bench.plugin.display_names import display_names_by_row
    from ifsl_bench.plugin.registry import METHOD_GROUP, list_shorthands_by_name, refers_to_file
    from ifsl_bench.plugin.registry import registered_entry_points as registered
    from ifsl_bench.protocols.tasks.task_files import is_task_name, load_tasks, own_tasks, packaged_tasks
    from ifsl_bench.reporting.page.references import cite_paper
    from ifsl_bench.store.published import read_paper_titles_by_source

    folders, keys = locate_folders(home), list[str]() if names else [cite_suite()]
    for name in names:
        if name in [*display_names_by_row(), *registered(METHOD_GROUP)] or refers_to_file(name):
            keys.append(cite_method(name))
            continue
        tasks = {**packaged_tasks(), **own_tasks(folders)}
        if name.partition("+")[0] in tasks or ".toml" in name or (is_task_name(name) and "=" in name):
            keys += [cite_task(task) for task in load_tasks(name, home=folders)]
        elif name in list_shorthands_by_name():
            keys.append(cite_method(name))
        elif name in read_paper_titles_by_source():
            paper = cite_paper(name)
            keys += [f"% {name}: {paper.text}", paper.bibtex or f"% source {name}: no entry"]
        else:
            raise unknown_name_error(
                "method, task or source",
                name,
                [*registered(METHOD_GROUP), *list_shorthands_by_name(), *tasks, *read_paper_titles_by_source()],
                see="ifsl-bench methods, ifsl-bench tasks, column source of ifsl-bench table",
            )
    click.echo("\n\n".join(unique_entries(keys)))
