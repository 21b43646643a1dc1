"""The rules of a recipe, each tried on made-up images: ``ifsl-bench recipes --check NAME``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ifsl_bench.backbones.find_recipe import RecipeChoice, make_recipe, naming_recipe_errors
from ifsl_bench.backbones.image_views import apply_augmentation, draw_augmentation
from ifsl_bench.backbones.networks import ResNetSmall
from ifsl_bench.backbones.recipe import Recipe, RecipeBackbone, TrainingStep
from ifsl_bench.utils.errors import UserError

CLASSES, NOVEL, IMAGES, SIZE, STEPS = 6, 4, 24, 32, 10


class RuleViolation(UserError):
    """A rule that does not hold, in words."""


def check_recipe(choice: RecipeChoice) -> list[tuple[str, str | None]]:
    """Try every rule; return each in words, and what broke it or None.

    Args:
        choice: the recipe and its options.
    """
    results: list[tuple[str, str | None]] = []
    for words, rule in RULES.items():
        broken: str | None = None
        try:
            with naming_recipe_errors(choice):
                rule(choice)
        except UserError as error:
            broken = str(error)
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


def _make_images(seed: int = 0) -> Tensor:
    """Make noise around a colour of each image's own, uint8 [B, H, W, C]."""
    random = np.random.default_rng(seed)
    noisy = random.integers(0, 256, (IMAGES, 1, 1, 3)) + random.integers(-60, 61, (IMAGES, SIZE, SIZE, 3))
    return torch.from_numpy(noisy.clip(0, 255).astype(np.uint8))


def _normalise_images(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.5).permute(0, 3, 1, 2)


def _make_views(recipe: Recipe, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Make views of images, and their labels."""
    random, images = np.random.default_rng(seed), _make_images(seed)
    seen = [apply_augmentation(images, view, draw_augmentation(view, IMAGES, 2, True, random)) for view in recipe.views]
    return [_normalise_images(x) for x in seen], torch.arange(IMAGES) % CLASSES


def _make_training_step(step: int) -> TrainingStep:
    return TrainingStep(step, STEPS, 0, np.random.default_rng(step))


def _compute_loss(recipe: Recipe, views: list[Tensor], labels: Tensor, at: TrainingStep) -> Tensor:
    """Return the loss of a step, whose terms are finite scalars."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(at.step)
        terms = recipe.loss(views, labels, at)
    if not isinstance(terms, dict) or not terms:
        raise RuleViolation(f"loss() returned {terms!r:.80}, expected a dict of scalars")
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.dim():
            raise RuleViolation(f"term {name!r} is {term!r:.60}, no scalar tensor")
        if not bool(torch.isfinite(term)):
            raise RuleViolation(f"term {name!r} is {float(term.detach()):g}")
    return torch.stack([term.float() for term in terms.values()]).sum()


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Return whether numbers are equal but for rounding, as sums in another order and products of other sizes are."""
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def _call_after_step_and_after_epoch(recipe: Recipe, step: int) -> None:
    """Let a recipe follow a step, and the epoch that ends with it."""
    recipe.after_step(_make_training_step(step))
    with torch.no_grad():
        recipe.eval().after_epoch(
            _make_training_step(step), [(_normalise_images(_make_images()), torch.arange(IMAGES) % CLASSES)]
        )
    recipe.train()


def _check_loss_moves_backbone(choice: RecipeChoice) -> None:
    """The loss is a dict of finite scalars in every step, and moves the backbone."""
    recipe = make_small_recipe(choice)
    optimiser = torch.optim.SGD([{"params": list(group.parameters)} for group in recipe.parameter_groups()], 1e-3)
    before = copy.deepcopy(recipe.backbone.state_dict())
    for step in range(STEPS):
        views, labels = _make_views(recipe, seed=step)
        loss = _compute_loss(recipe, views, labels, _make_training_step(step))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        _call_after_step_and_after_epoch(recipe, step)
    moved = [name for name, x in recipe.backbone.named_parameters() if not torch.equal(x, before[name])]
    if not moved:
        raise RuleViolation("after ten steps no parameter of the backbone has changed")


def _check_loss_is_repeatable(choice: RecipeChoice) -> None:
    """The same images and random numbers give the same loss."""
    recipe = make_small_recipe(choice)
    views, labels = _make_views(recipe)
    first, second = (
        float(_compute_loss(r, views, labels, _make_training_step(5)).detach()) for r in (copy.deepcopy(recipe), recipe)
    )
    if first != second:
        raise RuleViolation(f"{first!r} and {second!r}: take random numbers from at.random")


def _check_batch_order(choice: RecipeChoice) -> None:
    """Images keep their labels, and without random numbers the loss does not change with the order of the batch."""
    recipe = make_small_recipe(choice)
    views, labels = _make_views(recipe)
    kept, kept_labels, twin = [view.clone() for view in views], labels.clone(), copy.deepcopy(recipe)
    at = _make_training_step(0)
    first = _compute_loss(recipe, views, labels, at)
    if not torch.equal(labels, kept_labels) or not all(map(torch.equal, views, kept)):
        raise RuleViolation("loss() changed the labels or the images that it was given; change copies")
    if at.random.bit_generator.state != _make_training_step(0).random.bit_generator.state:
        return  # images are paired, or mixed, at random
    order = torch.from_numpy(np.random.default_rng(1).permutation(IMAGES))
    second = _compute_loss(twin, [view[order] for view in kept], labels[order], _make_training_step(0))
    if not _are_close(first, second):
        values = f"{float(first.detach()):g}, and {float(second.detach()):g} in another order"
        raise RuleViolation(f"{values}: each image keeps its own label; pairs are drawn by at.random")


def _check_training_can_be_resumed(choice: RecipeChoice) -> None:
    """The state is whole: a new recipe that loads it goes on in the same way."""
    recipe, twin = make_small_recipe(choice), make_small_recipe(choice)
    views, labels = _make_views(recipe)
    _compute_loss(recipe, views, labels, _make_training_step(0))
    _call_after_step_and_after_epoch(recipe, 0)
    twin.load_state_dict(recipe.state_dict())
    for step in (1, 5):
        first, second = (
            float(_compute_loss(r, views, labels, _make_training_step(step)).detach()) for r in (recipe, twin)
        )
        if first != second:
            values = f"{first!r} and {second!r} in a later step"
            raise RuleViolation(f"{values}: keep what a resumed training needs in parameters and buffers")
        _call_after_step_and_after_epoch(recipe, step)
        _call_after_step_and_after_epoch(twin, step)


def _check_feature_form(choice: RecipeChoice) -> None:
    """Features are finite, one row an image, and do not depend on the other images of the batch."""
    recipe, images = make_small_recipe(choice).eval(), _normalise_images(_make_images())
    with torch.inference_mode():
        whole = recipe.embed(images)
        if whole.dim() != 2 or len(whole) != IMAGES:
            raise RuleViolation(
                f"embed() of {IMAGES} images returned a tensor {list(whole.shape)}, expected [{IMAGES}, D]"
            )
        if not bool(torch.isfinite(whole).all()):
            raise RuleViolation("embed() returned numbers that are not finite")
        order = torch.from_numpy(np.random.default_rng(1).permutation(IMAGES))
        parts = torch.cat([recipe.embed(images[part]) for part in order.chunk(2)])
    if not _are_close(whole[order], parts):
        raise RuleViolation("the features of an image change with the other images of its batch")


def _check_training_only_parts(choice: RecipeChoice) -> None:
    """Features and extras do not need what is training_only, the rest is finite, and the classifier fits."""
    recipe, images = make_small_recipe(choice), _normalise_images(_make_images())
    embedding = RecipeBackbone(recipe, images.shape[1:])
    names = {name.partition(".")[0] for name in recipe.state_dict()} | {name for name, _ in recipe.named_children()}
    if unknown := sorted(set(recipe.training_only) - names):
        raise RuleViolation(f"training_only names {unknown[0]!r}, which the recipe does not have")
    for name, value in embedding.state_dict().items():
        if not embedding.is_training_only(name) and not bool(torch.isfinite(value).all()):
            raise RuleViolation(f"{name.removeprefix('recipe.')!r} is not finite; name it in training_only")
    twin = copy.deepcopy(embedding)
    with torch.no_grad():
        for name, value in twin.state_dict().items():
            if twin.is_training_only(name) and value.is_floating_point():
                value.fill_(torch.nan)
        same = torch.equal(embedding(images), twin(images))
        extras, of_twin = recipe.extras(), twin.recipe.extras()
    if not same:
        raise RuleViolation("the features depend on what is named in training_only")
    if changed := [name for name, x in extras.items() if not torch.equal(x, of_twin[name])]:
        raise RuleViolation(f"extra {changed[0]!r} depends on what is named in training_only")


def _check_provided_extras(choice: RecipeChoice) -> None:
    """Extras are finite tensors, those that it says it provides."""
    recipe = make_small_recipe(choice)
    extras = recipe.extras()
    for name, x in extras.items():
        if not isinstance(x, Tensor) or not bool(torch.isfinite(x).all()):
            raise RuleViolation(f"extra {name!r} is no tensor of finite numbers")
    named, provided = {name.partition(".")[0] for name in extras}, set(recipe.provides(choice.options))
    if named != provided:
        raise RuleViolation(f"extras() has {sorted(named)}, and provides() says {sorted(provided)}")


RULES: dict[str, Callable[[RecipeChoice], None]] = {
    str(rule.__doc__).rstrip("."): rule
    for rule in (
        _check_loss_moves_backbone,
        _check_loss_is_repeatable,
        _check_batch_order,
        _check_training_can_be_resumed,
        _check_feature_form,
        _check_training_only_parts,
        _check_provided_extras,
    )
}
