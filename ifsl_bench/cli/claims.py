"""``ifsl-bench claims``: what README and docs say of rows, computed."""

from __future__ import annotations

from pathlib import Path

import click

from ifsl_bench.cli.completion import complete_claims
from ifsl_bench.cli.options import examples, style_option
from ifsl_bench.cli.output import show_tables
from ifsl_bench.utils.errors import UserError, unknown


@click.command(epilog=examples("claims", "claims attention-gains", "claims --format csv"))
@click.argument("chosen", nargs=-1, metavar="[NAME...]", shell_complete=complete_claims)
@click.option(
    "--results", "results_dir", metavar="DIR", help="Take the rows of this folder in place of the stored ones."
)
@style_option
def claims(chosen: tuple[str, ...], results_dir: str | None, style: str) -> None:
    """Compute what README and docs say of the stored rows.

    \b
    supported              every difference is as the sentence says
    equivalent within m    every difference is shown to be smaller than m points
    not told apart         the data do not say which row is better
    not shown              nor that they are equivalent
    contradicted           a difference is shown to be otherwise

    Exit status 1 if a claim does not hold.
    """
    from ifsl_bench.reporting.claims import claim_table, judged, summary

    root = Path(results_dir).expanduser() if results_dir else None
    if root and not root.is_dir():
        raise UserError(f"--results: there is no folder {root}")
    judgements = {judgement.name: judgement for judgement in judged(root)}
    for name in chosen:
        if name not in judgements:
            raise unknown("claim", name, judgements, see="ifsl-bench claims")
    shown = [judgements[name] for name in chosen or judgements]
    show_tables([claim_table(judgement) for judgement in shown], style, summary(shown))
    if not all(judgement.holds for judgement in shown):
        click.get_current_context().exit(1)
