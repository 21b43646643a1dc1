"""A check whether a backbone that was pretrained elsewhere may have seen a data set's novel classes. No torch.

``contamination.toml`` next to this module lists what is known, with sources. What it does not list counts as "may have
seen": nobody knows what is in most of the large sets.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

SEEN = ("no", "may", "yes")  # the worse, the later
BASE = "base"  # base/train of the task, as whoever gives weights may declare
MARKS = {"no": "", "may": "novel classes perhaps seen in pretraining", "yes": "novel classes seen in pretraining"}


@lru_cache(maxsize=1)
def seen_facts() -> Mapping[str, Any]:
    """Return the table: ``corpora``, by name, each with what it ``contains``; ``pairs`` of a corpus and a data set."""
    text = resources.files("ifsl_bench.protocols.tasks").joinpath("contamination.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def seen(corpora: Iterable[str] | None, dataset: str, base_order: int | None = None) -> str:
    """Return whether images of a data set's novel classes were among the images of a pretraining: one of :data:`SEEN`.

    Args:
        corpora: what the backbone was pretrained on elsewhere; None for one that has seen the task's data alone.
        dataset: its name.
        base_order: of the task. Weights for "base" may be for the list's own base classes; some are novel then.
    """
    if corpora is None:
        return "no"
    verdicts = [_verdict(corpus, dataset) for corpus in corpora]
    return max([*verdicts, *(["may"] if base_order or not verdicts else [])], key=SEEN.index)


def _verdict(corpus: str, dataset: str) -> str:
    """The worst that is known of one corpus and of what it contains; "may" where it has no entry of its own."""
    if corpus == BASE:
        return "no"
    pairs = [pair for pair in seen_facts()["pairs"] if dataset in pair["datasets"]]
    own = [pair["seen"] for pair in pairs if corpus in pair["corpora"]]
    inner = [_verdict(part, dataset) for part in seen_facts()["corpora"].get(corpus, {}).get("contains", ())]
    return max([own[0] if own else "may", *inner], key=SEEN.index)
