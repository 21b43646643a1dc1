"""The rows of tables by name, from ``methods/rows.toml``: how papers print them. Imports no torch and no method."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

import msgspec

LAZY = "lazy"  # the row of a model that never answers with a novel class: computed from other rows, no method


class DisplayName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row's name as papers print it, and what it is in a few words."""

    printed: str
    says: str
    of: str = ""  # the method that has the name as a shorthand; "" for a method's own name
    here: bool = True  # whether its method comes with the package


_OPTION = re.compile(r"(?<!\.train)\.(?=[A-Za-z_][\w.-]*=)")  # where the next option begins; values have dots too


class Label(NamedTuple):
    """A row's label in its parts."""

    name: str  # of the method, or a shorthand
    calibrated: bool  # whether the bias of its calibration is part of the row
    setting: str  # what is behind `@`, as `tuned-12`; "" for a method as published
    options: tuple[str, ...]  # `key=value`, with `train.` before a change of the training

    def __str__(self) -> str:
        name = self.name + "+cal" * self.calibrated + f"@{self.setting}" * bool(self.setting)
        return ".".join([name, *self.options])

    @property
    def typed(self) -> list[str]:
        """The words that make the row on the command line, behind ``ifsl-bench run``."""
        words = ["--method", self.name]
        if trials := self.setting.removeprefix("tuned-"):
            words += ["--tune", trials]
        for option in self.options:
            if option.startswith("train."):
                words += ["--train", option.removeprefix("train.")]
            elif option.startswith("episodes="):
                words += ["--episodes", option.removeprefix("episodes=")]
            else:
                words += ["--set", option]
        return words + ["--calibrate"] * self.calibrated


def parse_label(label: str) -> Label:
    """The parts of a label: ``lr+a+cal@tuned-12.gamma=1e-05``."""
    head, *options = _OPTION.split(label)
    name, _, setting = head.partition("@")
    return Label(name.removesuffix("+cal"), name.endswith("+cal"), setting, tuple(options))


def rows() -> Mapping[str, DisplayName]:
    """The rows of the package's methods, by the names that ``--method`` takes."""
    return {name: named for name, named in _named().items() if named.here}


def printed_alone() -> list[str]:
    """Rows that are known from papers alone: no method of the package gives them."""
    return [name for name, named in _named().items() if not named.here]


@lru_cache(maxsize=1)
def _named() -> Mapping[str, DisplayName]:
    where = resources.files("ifsl_bench.methods") / "rows.toml"
    return msgspec.convert(tomllib.loads(where.read_text(encoding="utf-8")), dict[str, DisplayName])


def in_print(name: str) -> str:
    """The label by which papers print a row; what nobody has said how to print stays as it is."""
    return _named()[name].printed if name in _named() else name
