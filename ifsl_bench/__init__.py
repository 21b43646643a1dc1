"""ifsl_bench: a benchmark suite for incremental few-shot learning.

``import ifsl_bench; result = ifsl_bench.run(method="imprint", task="glyphs-5shot")``

Names are imported when first used, so that ``import ifsl_bench`` costs nothing.

Example:
    >>> import ifsl_bench
    >>> frame = ifsl_bench.table("glyphs-5shot", methods=["imprint"])
    >>> frame.records()[0]["method"]
    'imprint'
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from ifsl_bench._version import __version__

if TYPE_CHECKING:
    from ifsl_bench.api import evaluate_checkpoint as evaluate_checkpoint
    from ifsl_bench.api import run as run
    from ifsl_bench.api import workspace as workspace
    from ifsl_bench.backbones.networks import LinearHead as LinearHead
    from ifsl_bench.backbones.recipe import ParameterGroup as ParameterGroup
    from ifsl_bench.backbones.recipe import Recipe as Recipe
    from ifsl_bench.backbones.recipe import View as View
    from ifsl_bench.experiments.learn2learn_exchange import from_learn2learn as from_learn2learn
    from ifsl_bench.experiments.learn2learn_exchange import to_learn2learn as to_learn2learn
    from ifsl_bench.plugin.adapting import Adapting as Adapting
    from ifsl_bench.plugin.method import AdditiveClassifier as AdditiveClassifier
    from ifsl_bench.plugin.method import Base as Base
    from ifsl_bench.plugin.method import Method as Method
    from ifsl_bench.plugin.method import Prediction as Prediction
    from ifsl_bench.plugin.method import Query as Query
    from ifsl_bench.plugin.method import SessionOutput as SessionOutput
    from ifsl_bench.plugin.method import Support as Support
    from ifsl_bench.plugin.space import Choices as Choices
    from ifsl_bench.plugin.space import Range as Range
    from ifsl_bench.protocols.tasks.task import MetaTraining as MetaTraining
    from ifsl_bench.protocols.tasks.task import Schedule as Schedule
    from ifsl_bench.protocols.tasks.task import Task as Task
    from ifsl_bench.reporting.figures import plot as plot
    from ifsl_bench.reporting.figures.confusions import class_accuracy as class_accuracy
    from ifsl_bench.reporting.frames import Results as Results
    from ifsl_bench.reporting.notebook import compare as compare
    from ifsl_bench.reporting.notebook import grid as grid
    from ifsl_bench.reporting.notebook import leaderboard as leaderboard
    from ifsl_bench.reporting.notebook import load as load
    from ifsl_bench.reporting.notebook import load_all as load_all
    from ifsl_bench.reporting.notebook import table as table
    from ifsl_bench.reporting.notebook import variance as variance
    from ifsl_bench.utils.errors import UserError as UserError

_HOMES = {
    "ifsl_bench.reporting.frames": ("Results",),
    "ifsl_bench.reporting.notebook": ("table", "leaderboard", "compare", "load", "load_all", "variance", "grid"),
    "ifsl_bench.api": ("run", "evaluate_checkpoint", "workspace"),
    "ifsl_bench.utils.errors": ("UserError",),
    "ifsl_bench.reporting.figures.confusions": ("class_accuracy",),
    "ifsl_bench.experiments.learn2learn_exchange": ("from_learn2learn", "to_learn2learn"),
    "ifsl_bench.backbones.networks": ("LinearHead",),
    "ifsl_bench.backbones.recipe": ("ParameterGroup", "Recipe", "View"),
    "ifsl_bench.plugin.adapting": ("Adapting",),
    "ifsl_bench.plugin.method": (
        "Base",
        "AdditiveClassifier",
        "Method",
        "SessionOutput",
        "Prediction",
        "Query",
        "Support",
    ),
    "ifsl_bench.plugin.space": ("Choices", "Range"),
    "ifsl_bench.protocols.tasks.task": ("MetaTraining", "Schedule", "Task"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = {"plot": "ifsl_bench.reporting.figures.plot"}

_RENAMED = {"GrowingMethod": "AdditiveClassifier", "Learned": "SessionOutput"}  # old names, for one release

__all__ = ["__version__", *_HOME_OF, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOME_OF:
        if name in _RENAMED:
            warnings.warn(
                f"ifsl_bench.{name} is now {_RENAMED[name]}; the old name goes in the next release",
                DeprecationWarning,
                stacklevel=2,
            )
            return __getattr__(_RENAMED[name])
        raise AttributeError(f"module 'ifsl_bench' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
