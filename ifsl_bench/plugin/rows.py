"""The rows of tables by name, from ``methods/rows.toml``: how papers print them. Imports no torch and no method."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources

import msgspec

from ifsl_bench.common.limits import TASK_FILE
from ifsl_bench.common.toml import held, parsed


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How papers print a row, and what it is in a few words; ``here``: its method comes with the package."""

    printed: str
    says: str
    here: bool = True


def rows() -> Mapping[str, Named]:
    """The rows of the package's methods, by the names that ``--method`` takes."""
    return {name: named for name, named in _named().items() if named.here}


def printed_alone() -> list[str]:
    """Rows that are known from papers alone: no method of the package gives them."""
    return [name for name, named in _named().items() if not named.here]


@lru_cache(maxsize=1)
def _named() -> Mapping[str, Named]:
    where = resources.files("ifsl_bench.methods") / "rows.toml"
    raw = parsed(where.read_text(encoding="utf-8"), str(where), TASK_FILE)
    return held(raw, dict[str, Named], str(where), ("printed", "says", "here"))


def in_print(name: str) -> str:
    """How papers print a row; what nobody has said how to print stays as it is."""
    return _named()[name].printed if name in _named() else name
