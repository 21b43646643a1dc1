"""Find a recipe by its name or file, with its options, and make it for a backbone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.recipe import Recipe
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.display_names import split_off_recipe
from ifsl_bench.plugin.find_method import load_class_from_file
from ifsl_bench.plugin.method_source import hash_source_of_class
from ifsl_bench.plugin.options import Option, declared_options, parse_value
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.utils.errors import UserError, format_class_and_message, format_error_location, unknown_name_error
from ifsl_bench.utils.text_format import format_value

PASSES_OPTION = "passes"  # an option of every recipe: the multiple of the task's passes of the backbone
SELECT_OPTION = "select"  # an option of every recipe: the epoch whose weights are taken
HARNESS_OPTIONS = {  # of every recipe, and what they are
    Option(PASSES_OPTION, float, 1.0): "the multiple of the task's own passes of the backbone",
    Option(SELECT_OPTION, Literal["last", "best"], "last"): "the epoch whose weights are taken: the last, or the one "
    "whose base classifier is best on base/val",
}
TOTAL_OPTION = "total"  # the option of recipes that know how many classes will come


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe that a user named, with its options.

    Attributes:
        name: in rows: the registered name, or the class's own.
        recipe_class: its class.
        options: of its constructor, without defaults.
        passes_multiple: the multiple of the task's passes of the backbone, 1 by default.
        selects_best: whether the weights are those of the epoch whose base classifier is best on base/val.
        file: ``/path/to/file.py:Class`` where the class comes from a file; "" elsewhere.
    """

    name: str
    recipe_class: type[Recipe]
    options: dict[str, Any]
    passes_multiple: float
    selects_best: bool
    file: str

    def _format_with_options(self, name: str) -> str:
        options = {**self.options, **({PASSES_OPTION: self.passes_multiple} if self.passes_multiple != 1 else {})}
        options |= {SELECT_OPTION: "best"} if self.selects_best else {}
        return ".".join([name, *(f"{key}={format_value(value)}" for key, value in options.items())])

    @property
    def label(self) -> str:
        """The recipe in the names of rows, as ``closer.beta=1``."""
        return self._format_with_options(self.name)

    @property
    def recipe_reference(self) -> str:
        """The text that :func:`find_recipe` finds the same recipe by."""
        return self._format_with_options(self.file or self.name)

    @property
    def knows_classes(self) -> bool:
        """Whether the harness gives the recipe the number of classes that will come."""
        return self.recipe_class.knows_classes and TOTAL_OPTION not in self.options

    @property
    def provided_extras_names(self) -> Sequence[str]:
        """The names of what it learns beside features, see :meth:`ifsl_bench.Recipe.provides`."""
        return self.recipe_class.provides(self.options)

    def definition(self, task: Task) -> dict[str, Any]:
        """Return everything of the recipe that determines weights, for JSON.

        Args:
            task: gives the number of novel classes, which some recipes know.
        """
        points = [] if self.file else registry.find_owning_entry_points(registry.RECIPE_GROUP, self.name)
        own = bool(points) and registry.distribution_name(points[0]) == registry.OWN_PACKAGE
        plugin: Any = self.recipe_class  # for mypy, which takes no class of modules for hashable
        code = {
            "revision": self.recipe_class.revision,
            **({} if own else {"source": hash_source_of_class(plugin, (Recipe,))}),
        }
        known = {"novel_classes": count_novel_classes_of_task(task)} if self.knows_classes else {}
        taken = {SELECT_OPTION: "best"} if self.selects_best else {}
        return {
            "name": self.name,
            "options": self.options,
            PASSES_OPTION: self.passes_multiple,
            **taken,
            **code,
            **known,
        }


def count_novel_classes_of_task(task: Task) -> int:
    """Return the number of novel classes that a model of a task meets beside the base classes."""
    return task.sessions.n_novel_classes if task.sessions else task.episode.ways


def find_recipe(reference: str) -> RecipeChoice:
    """Find a recipe and check its options; a file is read anew, since it may have changed.

    Args:
        reference: ``NAME`` or ``path/to/file.py:Class``, perhaps with options, as ``closer.beta=1.alpha=0.2``. Every
            recipe has :data:`HARNESS_OPTIONS`, too.

    Raises:
        UserError: no such recipe or option, with the nearest names; or a file that cannot be run.
    """
    return (_find_recipe if registry.refers_to_file(split_off_recipe(reference)[0]) else _find_registered_recipe)(
        reference
    )


def _find_recipe(reference: str) -> RecipeChoice:
    name, *settings = split_off_recipe(reference)
    file = ""
    if registry.refers_to_file(name):
        path, _, wanted = name.rpartition(".py:") if ".py:" in name else (name.removesuffix(".py"), "", "")
        source = Path(f"{path}.py").expanduser().absolute()
        kind = load_class_from_file(source, wanted, Recipe, "recipes")
        name, file = kind.__name__, f"{source}:{kind.__name__}"
    else:
        kind = registry.get_registered(registry.RECIPE_GROUP, "recipe", name)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)) or kind is Recipe:
        raise UserError(f"recipe {name!r} is {kind!r}, no subclass of ifsl_bench.Recipe")
    options = _parse_options(name, kind, settings)
    passes, select = options.pop(PASSES_OPTION, 1.0), options.pop(SELECT_OPTION, "last")
    if not 0 < passes <= 1000:
        raise UserError(f"passes of recipe {name!r} must be above 0 and 1,000 at most, not {passes:g}")
    return RecipeChoice(name, kind, options, passes, select == "best", file)


def _parse_options(name: str, kind: type[Recipe], settings: Sequence[str]) -> dict[str, Any]:
    """Return the options of ``key=value`` texts, those of the recipe in the order of its constructor, without defaults.

    Raises:
        UserError: an unknown option, a value of another kind, or an option that has the name of one of the harness.
    """
    declared = dict(declared_options(kind))  # type: ignore[arg-type]  # constructors are alike
    for option in HARNESS_OPTIONS:
        if option.name in declared:
            raise UserError(f"recipe {name!r} has an option {option.name!r}, as every recipe has already; rename it")
        declared[option.name] = option
    options: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in declared:
            raise unknown_name_error("option", key, [*declared], where=f"of recipe {name!r}")
        try:
            options[key] = parse_value(declared[key].value_type, text)
        except ValueError:
            raise UserError(
                f"option {key!r} of recipe {name!r} takes {declared[key].type_text}, not {text!r}"
            ) from None
    return {key: options[key] for key, option in declared.items() if options.get(key, option.default) != option.default}


_find_registered_recipe = lru_cache(maxsize=64)(_find_recipe)


def recipes_that_provide(names: Sequence[str]) -> list[str]:
    """Return the registered recipes that learn all of these extras, each with its one option where it takes one.

    Args:
        names: of extras.
    """
    found = []
    for name in registry.registered_entry_points(registry.RECIPE_GROUP):
        kind = registry.load_plugin(registry.RECIPE_GROUP, name).loaded_object
        if not (isinstance(kind, type) and issubclass(kind, Recipe)):
            continue
        settings: list[dict[str, Any]] = [{}]
        for option in declared_options(kind).values():  # type: ignore[arg-type]  # constructors are alike
            settings += [{option.name: value} for value in get_args(option.value_type) if isinstance(value, str)]
        fitting = [setting for setting in settings if set(names) <= set(kind.provides(setting))]
        if fitting:
            found.append(".".join([name, *(f"{key}={value}" for key, value in fitting[0].items())]))
    return found


@contextmanager
def naming_recipe_errors(choice: RecipeChoice) -> Iterator[None]:
    """Re-raise errors of a recipe as :class:`UserError` that names it, and the place in its file."""
    try:
        yield
    except (UserError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        if isinstance(error, ValueError) and not choice.file:  # an option or data that a recipe of the suite refuses
            raise UserError(f"recipe {choice.name}: {error}") from error
        place = format_error_location(error, among=inspect.getsourcefile(choice.recipe_class) or "")
        raise UserError(f"recipe {choice.name} failed: {place}{format_class_and_message(error)}") from error


def make_recipe(choice: RecipeChoice, backbone: Backbone, classes: int, novel: int) -> Recipe:
    """Make a recipe for a backbone.

    Args:
        choice: the class and its options.
        backbone: images to features.
        classes: the number K of base classes.
        novel: the number of novel classes to come, for recipes that know it.

    Raises:
        UserError: the constructor refuses an option, or fails; or there is nothing to train.
    """
    options = dict(choice.options)
    if choice.knows_classes:
        options[TOTAL_OPTION] = classes + novel
    with naming_recipe_errors(choice):
        recipe = choice.recipe_class(backbone, classes, **options)
    if not hasattr(recipe, "_parameters") or not hasattr(recipe, "backbone"):
        raise UserError(
            f"{choice.recipe_class.__qualname__}.__init__ does not call super().__init__(backbone, classes)"
        )
    with naming_recipe_errors(choice):
        parameters = [parameter for group in recipe.parameter_groups() for parameter in group.parameters]
    if not parameters:
        raise UserError(f"recipe {choice.name} has no parameters to train")
    if len(set(map(id, parameters))) < len(parameters):
        raise UserError(f"recipe {choice.name}: parameter_groups() returned a parameter twice")
    return recipe
