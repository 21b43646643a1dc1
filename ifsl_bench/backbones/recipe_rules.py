"""The rules of a recipe, each tried on made-up images: ``ifsl-bench recipes --check NAME``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.find_recipe import RecipeChoice, make_recipe, naming_recipe_errors
from ifsl_bench.backbones.image_views import apply_augmentation, draw_augmentation
from ifsl_bench.backbones.networks import ResNetSmall
from ifsl_bench.backbones.recipe import Recipe, RecipeBackbone, TrainingStep
from ifsl_bench.utils.errors import UserError, format_class_and_message, format_error_location

CLASSES, NOVEL, IMAGES, SIZE, STEPS = 6, 4, 24, 32, 10


class RuleViolation(Exception):
    """A rule that does not hold, in words."""


def check_recipe(choice: RecipeChoice) -> list[tuple[str, str | None]]:
    """Try every rule; return each in words, and what broke it or None.

    Args:
        choice: the recipe and its options.

    Raises:
        UserError: it cannot be made.
    """
    results: list[tuple[str, str | None]] = []
    rules: dict[str, Callable[[Recipe], None]] = {**RULES, EXTRAS_RULE: partial(_check_extras, options=choice.options)}
    for words, rule in rules.items():
        broken: str | None = None
        try:
            rule(make_small_recipe(choice))
        except (RuleViolation, UserError) as error:
            broken = str(error)
        except (Exception, SystemExit) as error:
            broken = f"{format_error_location(error)}{format_class_and_message(error)}"
        results.append((words, broken))
    return results


def make_small_recipe(choice: RecipeChoice) -> Recipe:
    """Make a recipe for a small network and six classes.

    Raises:
        UserError: it cannot be made.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = ResNetSmall(channels=3, norm_momentum=0.1)
        return make_recipe(choice, backbone, CLASSES, NOVEL).train()


def passes_at_test(choice: RecipeChoice) -> float:
    """Return the passes of the backbone that a finished recipe takes to embed an image.

    Raises:
        UserError: the recipe cannot be made, or fails.
    """
    recipe, passed = make_small_recipe(choice).eval(), list[int]()
    recipe.backbone.register_forward_pre_hook(lambda _, given: passed.append(given[0].numel()))
    images = torch.zeros(1, 3, SIZE, SIZE)
    with naming_recipe_errors(choice), torch.no_grad():
        recipe.embed(images)
    return sum(passed) / images.numel()


def _make_views(recipe: Recipe, count: int = IMAGES, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Make views of images, and their labels."""
    random = np.random.default_rng(seed)
    images = torch.from_numpy(random.integers(0, 256, (count, SIZE, SIZE, 3), np.uint8))
    seen = [apply_augmentation(images, view, draw_augmentation(view, count, 2, True, random)) for view in recipe.views]
    return [(x.float() / 255 - 0.5).permute(0, 3, 1, 2) for x in seen], torch.arange(count) % CLASSES


def _make_step(step: int) -> TrainingStep:
    return TrainingStep(step, STEPS, 0, np.random.default_rng(step))


def _compute_loss(recipe: Recipe, views: list[Tensor], labels: Tensor, step: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step)
        terms = recipe.loss(views, labels, _make_step(step))
    if not isinstance(terms, dict) or not terms:
        raise RuleViolation(f"loss() returned {terms!r:.80}, expected a dict of scalars")
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.dim():
            raise RuleViolation(f"term {name!r} is {term!r:.60}, no scalar tensor")
        if not bool(torch.isfinite(term)):
            raise RuleViolation(f"term {name!r} is {float(term.detach()):g}")
    return torch.stack([term.float() for term in terms.values()]).sum()


def _check_training(recipe: Recipe) -> None:
    """The loss is a dict of finite scalars in every step, and moves the backbone."""
    optimiser = torch.optim.SGD([{"params": list(group.parameters)} for group in recipe.parameter_groups()], 1e-3)
    before = copy.deepcopy(recipe.backbone.state_dict())
    for step in range(STEPS):
        views, labels = _make_views(recipe, seed=step)
        loss = _compute_loss(recipe, views, labels, step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        recipe.after_step(_make_step(step))
    moved = [name for name, x in recipe.backbone.named_parameters() if not torch.equal(x, before[name])]
    if not moved:
        raise RuleViolation("after ten steps no parameter of the backbone has changed")


def _check_repeatability(recipe: Recipe) -> None:
    """The same images and random numbers give the same loss."""
    views, labels = _make_views(recipe)
    twin = copy.deepcopy(recipe)
    first, second = (float(_compute_loss(r, views, labels, 5).detach()) for r in (recipe, twin))
    if first != second:
        raise RuleViolation(f"{first!r} and {second!r}: take random numbers from at.random")


def _check_resumption(recipe: Recipe) -> None:
    """The state of the recipe is whole: a copy that loads it gives the same loss."""
    views, labels = _make_views(recipe)
    twin = copy.deepcopy(recipe)
    _compute_loss(recipe, views, labels, 0)
    recipe.after_step(_make_step(0))
    twin.load_state_dict(recipe.state_dict())
    first, second = (float(_compute_loss(r, views, labels, 5).detach()) for r in (recipe, twin))
    if first != second:
        raise RuleViolation(f"{first!r} and {second!r}: keep what a resumed training needs in parameters and buffers")


def _check_features(recipe: Recipe) -> None:
    """Features are finite, one row an image, and do not depend on the other images of the batch."""
    recipe.eval()
    images, _ = _make_views(recipe)
    images = [x for x in images if x.shape[-1] == SIZE]
    with torch.inference_mode():
        whole = recipe.embed(images[0])
        if whole.dim() != 2 or len(whole) != IMAGES:
            raise RuleViolation(
                f"embed() of {IMAGES} images returned a tensor {list(whole.shape)}, expected [{IMAGES}, D]"
            )
        if not bool(torch.isfinite(whole).all()):
            raise RuleViolation("embed() returned numbers that are not finite")
        halves = torch.cat([recipe.embed(half) for half in images[0].chunk(2)])
    if not torch.allclose(whole, halves, rtol=1e-3, atol=1e-4):  # products of other sizes round differently
        raise RuleViolation("the features of an image change with the other images of its batch")


def _check_training_only(recipe: Recipe) -> None:
    """The features do not need what the recipe drops, and the classifier fits them."""
    recipe.eval()
    images, _ = _make_views(recipe)
    images = [x for x in images if x.shape[-1] == SIZE]
    embedding = RecipeBackbone(recipe, images[0].shape[1:])
    names = [name for name, _ in recipe.named_children()] + [name for name, _ in recipe.named_parameters(recurse=False)]
    names += [name for name, _ in recipe.named_buffers(recurse=False)]
    if unknown := sorted(set(recipe.training_only) - set(names)):
        raise RuleViolation(f"dropped names {unknown[0]!r}, which the recipe does not have")
    twin = copy.deepcopy(embedding)
    with torch.no_grad():
        for name, value in twin.state_dict().items():
            if twin.is_training_only(name) and value.is_floating_point():
                value.fill_(torch.nan)
        same = torch.equal(embedding(images[0]), twin(images[0]))
        extras, of_twin = recipe.extras(), twin.recipe.extras()
    if not same:
        raise RuleViolation("the features depend on what is dropped")
    if changed := [name for name, x in extras.items() if not torch.equal(x, of_twin[name])]:
        raise RuleViolation(f"extra {changed[0]!r} depends on what is dropped")
    head = recipe.classifier()
    if head is not None and head.weight.shape != (CLASSES, embedding.features):
        shape = [CLASSES, embedding.features]
        raise RuleViolation(
            f"the classifier's weight is {list(head.weight.shape)}, expected {shape} for {CLASSES} classes"
        )


EXTRAS_RULE = "Extras are finite tensors, those that it says it provides"


def _check_extras(recipe: Recipe, options: Mapping[str, Any]) -> None:
    extras = recipe.extras()
    for name, x in extras.items():
        if not isinstance(x, Tensor) or not bool(torch.isfinite(x).all()):
            raise RuleViolation(f"extra {name!r} is no tensor of finite numbers")
    named, provided = {name.partition(".")[0] for name in extras}, set(recipe.provides(options))
    if named != provided:
        raise RuleViolation(f"extras() has {sorted(named)}, and provides() says {sorted(provided)}")


RULES: dict[str, Callable[[Recipe], None]] = {
    str(rule.__doc__).rstrip("."): rule
    for rule in (_check_training, _check_repeatability, _check_resumption, _check_features, _check_training_only)
}
