"""``ifsl-bench recipes``: ways to train a backbone."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import click

from ifsl_bench.cli.options import format_examples, style_option
from ifsl_bench.cli.output import print_lines, print_paragraphs, print_tables_in_format
from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.backbones.find_recipe import RecipeChoice


@click.command(epilog=format_examples("recipes closer", "recipes new my-recipe", "recipes --check my_recipe.py"))
@click.argument("names", nargs=-1, metavar="[NAME | new NAME]")
@click.option("--check", "checked", metavar="NAME", help="Check this recipe against the contract, on made-up images.")
@style_option
def recipes(names: tuple[str, ...], checked: str | None, style: str) -> None:
    """List the recipes of backbones; show one with its options; or begin your own.

    NAME is what --recipe takes: a name of the list, or FILE.py:CLASS, perhaps with options as closer.beta=1. 'new NAME'
    writes a recipe that runs at once, NAME.py.
    """
    if names and checked is not None:
        raise UserError("recipes NAME shows a recipe, recipes --check NAME checks it; say one of them")
    new = names[:1] == ("new",)
    if names and len(names) != 1 + new:
        raise UserError("recipes takes one NAME, or 'new NAME'")
    if checked is not None:
        _print_recipe_check(checked, style)
    elif new:
        from ifsl_bench.backbones.new_recipe import write_recipe_file

        path = write_recipe_file(names[1])
        click.echo(f"wrote {path}; next: ifsl-bench recipes --check {path}")
        click.echo(f"then: ifsl-bench run --method ncm --task glyphs-sessions --recipe ce,{path}")
    elif names:
        _print_recipe(names[0], style)
    else:
        _print_recipes(style)


def _count_passes_per_image(choice: RecipeChoice) -> float:
    """Return the passes of a step for each image; some recipes know them when they are made."""
    from ifsl_bench.backbones.recipe_rules import make_small_recipe

    return make_small_recipe(choice).passes_per_step


def _print_recipes(style: str) -> None:
    from ifsl_bench.backbones.find_recipe import find_recipe
    from ifsl_bench.plugin import registry
    from ifsl_bench.reporting.table import table_from_dicts

    rows = []
    for name in registry.registered_entry_points(registry.RECIPE_GROUP):
        try:
            choice = find_recipe(name)
        except UserError as error:
            rows.append({"recipe": name, "what": str(error), "passes": "", "knows classes": ""})
            continue
        summary = (inspect.getdoc(choice.recipe_class) or "").partition("\n")[0]
        knows = "yes" if choice.recipe_class.knows_classes else ""
        rows.append(
            {"recipe": name, "what": summary, "passes": f"{_count_passes_per_image(choice):g}", "knows classes": knows}
        )
    print_tables_in_format([table_from_dicts(rows, min_fold_widths={"what": 60})], style)
    print_lines("\npasses: of the backbone in a step, for each image. All recipes have the same passes in all.", style)


def _print_recipe(name: str, style: str) -> None:
    from ifsl_bench.backbones.find_recipe import HARNESS_OPTIONS, find_recipe
    from ifsl_bench.plugin.options import declared_options
    from ifsl_bench.reporting.table import table_from_dicts
    from ifsl_bench.utils.text_format import format_value

    choice = find_recipe(name)
    own = declared_options(choice.recipe_class).values()  # type: ignore[arg-type]  # constructors are alike
    options = [
        {"option": option.name, "takes": option.type_text, "default": format_value(option.default)}
        for option in [*own, *HARNESS_OPTIONS]
    ]
    print_paragraphs(inspect.getdoc(choice.recipe_class) or "", style)
    print_lines("", style)
    print_tables_in_format([table_from_dicts(options)], style)
    notes = "".join(f"\n{option.name}: {what}." for option, what in HARNESS_OPTIONS.items())
    print_lines(notes, style)


def _print_recipe_check(name: str, style: str) -> None:
    from ifsl_bench.backbones.find_recipe import find_recipe
    from ifsl_bench.backbones.recipe_rules import check_recipe
    from ifsl_bench.reporting.table import table_from_dicts

    choice = find_recipe(name)
    checks = check_recipe(choice)
    rules = [{"rule": rule, "found": broken or "ok"} for rule, broken in checks]
    print_tables_in_format([table_from_dicts(rules, min_fold_widths={"rule": 40, "found": 20})], style)
    if failed := [rule for rule, broken in checks if broken]:
        raise UserError(f"recipe {choice.label!r} breaks {len(failed)} of {len(checks)} rules")
