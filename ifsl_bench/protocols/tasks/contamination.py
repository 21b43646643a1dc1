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

SEEN_LEVELS = ("no", "may", "yes")  # the worse, the later
BASE_CORPUS = "base"  # base/train of the task, as whoever gives weights may declare
ROW_NOTE_OF_SEEN_LEVEL = {
    "no": "",
    "may": "novel classes perhaps seen in pretraining",
    "yes": "novel classes seen in pretraining",
}


@lru_cache(maxsize=1)
def load_seen_table() -> Mapping[str, Any]:
    """Return the table: ``corpora``, by name, each with what it ``contains``; ``pairs`` of a corpus and a data set."""
    text = resources.files("ifsl_bench.protocols.tasks").joinpath("contamination.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def seen_state_in_pretraining(corpora: Iterable[str] | None, dataset: str, base_order: int | None = None) -> str:
    """Return one of :data:`SEEN_LEVELS`: whether a pretraining had images of a data set's novel classes.

    Args:
        corpora: what the backbone was pretrained on elsewhere; None for one that has seen the task's data alone.
        dataset: its name.
        base_order: of the task. Weights for "base" may be for the list's own base classes; some are novel then.
    """
    if corpora is None:
        return "no"
    verdicts = [_seen_in_corpus(corpus, dataset) for corpus in corpora]
    return max([*verdicts, *(["may"] if base_order or not verdicts else [])], key=SEEN_LEVELS.index)


def _seen_in_corpus(corpus: str, dataset: str) -> str:
    """Return the worst that is known of a corpus and the corpora in it; "may" where the corpus has no entry."""
    if corpus == BASE_CORPUS:
        return "no"
    pairs = [pair for pair in load_seen_table()["pairs"] if dataset in pair["datasets"]]
    own = [pair["seen"] for pair in pairs if corpus in pair["corpora"]]
    inner = [
        _seen_in_corpus(part, dataset) for part in load_seen_table()["corpora"].get(corpus, {}).get("contains", ())
    ]
    return max([own[0] if own else "may", *inner], key=SEEN_LEVELS.index)
