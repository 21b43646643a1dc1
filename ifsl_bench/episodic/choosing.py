"""Values of options, chosen on the validation episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.progress import Reporter
from ifsl_bench.episodic.evaluation import Evaluated
from ifsl_bench.plugin.settings import short


class Choice(NamedTuple):
    """The options that are best on the validation episodes, and each setting's accuracy there, in percent."""

    options: dict[str, Any]
    accuracies: dict[str, float]


def choose(
    name: str,
    tuned: Sequence[str],
    settings: Iterable[dict[str, Any]],
    beyond: Callable[[Mapping[str, Any]], Iterator[dict[str, Any]]],
    validate: Callable[[dict[str, Any]], Evaluated],
    reporter: Reporter,
) -> Choice:
    """Tries every setting; the first of equally good ones is taken.

    A best value at the end of a grid is no optimum: the search goes on beyond it for as long as accuracy rises.

    Args:
        name: the method's.
        tuned: the options that differ between settings.
        beyond: from the best setting to those that follow it beyond the end of a grid, nearest first.
        validate: a setting's hits on the validation episodes.
    """
    accuracies: dict[str, float] = {}

    def attempt(options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        setting = ", ".join(f"{key}={short(options[key])}" for key in tuned)
        found = validate(options)
        if remark := found.unconverged("validation episodes"):
            reporter.warn(f"{name}: {setting}: {remark}")
        reporter.say(f"{name}: {setting}: {found.accuracy:.2f}% on the validation episodes")
        accuracies[setting] = found.accuracy
        return found.accuracy, options

    best = max([attempt(options) for options in settings], key=lambda pair: pair[0])
    for options in beyond(best[1]):
        try:
            further = attempt(options)
        except UserError as error:  # the option's range ends here
            reporter.say(str(error))
            break
        if further[0] <= best[0]:
            break
        best = further
    return Choice(best[1], accuracies)
