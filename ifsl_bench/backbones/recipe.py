"""The contract of a recipe: how a backbone is trained on the base classes. The harness owns data, loop and checkpoints.

A recipe is a module with a loss. Its parameters are trained, and everything that a resumed training needs is in its
``state_dict()``: parameters, and buffers such as a queue of keys. All random numbers come from
:attr:`TrainingStep.random`, which the harness seeds anew for each step, so that a training that was killed goes on with
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.networks import LinearHead
from ifsl_bench.utils.deprecated import accept_old_names, rename_attributes
from ifsl_bench.utils.errors import UserError


@dataclass(frozen=True)
class View:
    """How an image is augmented, each time that it is seen. The default is the padding, crop and flip of the task.

    Attributes:
        scale: the least and largest share of the image's area that a crop has, which is resized; (1, 1) for the padding
            and crop of the task.
        flip: whether half of the images are mirrored; None where the task decides.
        jitter: j, by which colours vary in four fifths of the images: brightness, contrast and saturation by factors
            from 1 - j to 1 + j, the hue by up to a j/4 of the circle.
        grey: the probability with which an image loses its colours.
        side: height and width of the result, as a share of the image's.

    Example:
        >>> small = ifsl_bench.View(scale=(0.05, 0.2), jitter=0.4, side=0.5)
        >>> small.grey
        0.0
    """

    scale: tuple[float, float] = (1.0, 1.0)
    flip: bool | None = None
    jitter: float = 0.0
    grey: float = 0.0
    side: float = 1.0


@accept_old_names(looks="is_logged", shown="logged_values", done="progress")
@dataclass(frozen=True)
class TrainingStep:
    """A step of the training: its number, its random numbers and the values to log.

    Attributes:
        step: the number of the step, from 0.
        steps: the number of steps of the training.
        epoch: the number of the epoch, from 0.
        random: the source of random numbers of the step; it depends on the seed of the training and on the step alone.
        is_logged: whether the loss is read and shown after this step; a measure that is only shown need not be computed
            in others.
        logged_values: detached scalars to show beside the terms of the loss, such as an accuracy.
    """

    step: int
    steps: int
    epoch: int
    random: np.random.Generator
    is_logged: bool = True
    logged_values: dict[str, Tensor] = field(default_factory=dict)

    @property
    def progress(self) -> float:
        """The share of the training that is done, from 0 to 1."""
        return self.step / max(1, self.steps)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained alike.

    Attributes:
        parameters: of the network or the recipe.
        rate: a factor of the schedule's learning rate.
        decay: the weight decay; None for the task's, of parameters with two dimensions or more.

    Example:
        >>> import torch
        >>> from ifsl_bench import ParameterGroup
        >>> ParameterGroup(list(torch.nn.Linear(2, 3).parameters()), rate=0.1).decay is None
        True
    """

    parameters: Sequence[nn.Parameter]
    rate: float = 1.0
    decay: float | None = None


@accept_old_names(dropped="training_only", passes_of_step="passes_per_step", groups="parameter_groups")
class Recipe(nn.Module):
    """A way to train a backbone.

    A subclass declares its options as keyword arguments with annotations and defaults, calls ``super().__init__``, and
    makes the modules that it trains beside the backbone.

    Attributes:
        views: the views of each image that a step sees; ``loss`` gets one batch of images for each.
        knows_classes: whether the recipe is given the number of base and novel classes, in its option ``total``. Rows
            say so, because most methods do not know how many classes will come.
        passes: the passes of the backbone that a step takes for each image of a batch, where they are not the number of
            views (a view with half of the side is a quarter of a pass). All recipes have the same number of passes in
            the whole training, so that one that takes more in a step has fewer epochs.
        training_only: the names of modules and buffers that the finished backbone does not need.
        revision: raised when the recipe begins to give other weights.

    Args:
        backbone: images [B, C, H, W] to features [B, D].
        classes: the number K of base classes.

    Example:
        >>> class Plain(ifsl_bench.Recipe):
        ...     def __init__(self, backbone, classes):
        ...         super().__init__(backbone, classes)
        ...         self.head = ifsl_bench.LinearHead(backbone.features, classes)
        ...
        ...     def loss(self, views, labels, at):
        ...         return {"ce": torch.nn.functional.cross_entropy(self.head(self.features(views[0])), labels)}
    """

    views: ClassVar[Sequence[View]] = (View(),)
    knows_classes: ClassVar[bool] = False
    passes: ClassVar[float | None] = None
    training_only: ClassVar[Sequence[str]] = ()
    revision: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rename_attributes(cls)

    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__()
        self.backbone, self.classes = backbone, classes
        self.autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # the harness sets the precision

    def loss(self, views: Sequence[Tensor], labels: Tensor, at: TrainingStep) -> dict[str, Tensor]:
        """Return the terms of the loss of a batch, scalars that are summed.

        Args:
            views: the images as the class attribute ``views`` augments them, float32 [B, C, H, W] each, in one order.
            labels: int64 [B].
            at: the step, and its random numbers.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no loss")

    def features(self, images: Tensor) -> Tensor:
        """Return the backbone's features [B, D], computed in the training's precision, and single at least.

        Args:
            images: [B, C, H, W].
        """
        with self.autocast():
            features = self.backbone(images)
        return to_single_or_double(features)

    @property
    def passes_per_step(self) -> float:
        """The passes of the backbone in a step for each image of a batch."""
        return float(sum(view.side**2 for view in self.views) if self.passes is None else self.passes)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the parameters to train; by default all that require gradients, alike."""
        return [ParameterGroup([parameter for parameter in self.parameters() if parameter.requires_grad])]

    def after_step(self, at: TrainingStep) -> None:
        """Follow a step of the optimiser, with a momentum encoder for example; its state is in buffers."""

    def after_epoch(self, at: TrainingStep, train: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Follow an epoch, with class means of all base images for example, in evaluation mode and without gradients.

        What is kept is in buffers. The time that it takes counts in the seconds of the training, not in its passes.

        Args:
            at: the last step of the epoch, with random numbers of its own.
            train: the images of base/train, not augmented, and their labels: batches float32 [B, C, H, W] and int64
                [B], which may be gone through more than once.
        """

    def embed(self, images: Tensor) -> Tensor:
        """Return the features [B, D'] that classifiers get, by default the backbone's.

        Args:
            images: [B, C, H, W], not augmented.
        """
        return self.features(images)

    def classifier(self) -> LinearHead | None:
        """Return the trained linear base classifier on :meth:`embed`; by default None, and the harness fits one.

        A cosine classifier is fitted always.
        """
        return None

    @classmethod
    def provides(cls, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the names of :meth:`extras`, up to the first dot of each, with these options.

        Methods that need others are refused before anything is trained.

        Args:
            options: of the constructor, without those that are the default.
        """
        return ()

    def extras(self) -> dict[str, Tensor]:
        """Return what the recipe learned beside features, by default nothing; methods get it as ``Base.extras``.

        It is made of parameters and buffers that are not ``training_only``, since weights are stored without those.
        """
        return {}


def to_single_or_double(x: Tensor) -> Tensor:
    """Return a tensor in single precision where autocast made it half, so that losses are computed in that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RecipeBackbone(Backbone):
    """The finished backbone of a recipe: images [B, C, H, W] to what the recipe embeds them as [B, D'].

    Args:
        recipe: the recipe.
        shape: (C, H, W) of an image.

    Raises:
        UserError: embedded images, or the classifier, have another shape than the harness expects.
    """

    def __init__(self, recipe: Recipe, shape: Iterable[int]) -> None:
        super().__init__()
        self.recipe = recipe.eval()
        with torch.no_grad():
            embedded = recipe.embed(torch.zeros(2, *shape, device=next(recipe.parameters()).device))
        if embedded.dim() != 2 or len(embedded) != 2:
            shape = list(embedded.shape)
            raise UserError(f"{type(recipe).__name__}: embed() of 2 images returned {shape}, expected [2, D]")
        self.features = embedded.shape[1]
        head, wanted = recipe.classifier(), [recipe.classes, self.features]
        if head is not None and (not isinstance(head, LinearHead) or list(head.weight.shape) != wanted):
            raise UserError(
                f"{type(recipe).__name__}: classifier() is no LinearHead with a weight {wanted}: {head!r:.60}"
            )

    @property
    def stages(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """Those of the backbone, where the recipe leaves its features as they are; else one."""
        return self.recipe.backbone.stages if type(self.recipe).embed is Recipe.embed else [self]

    def is_training_only(self, name: str) -> bool:
        """Return whether a tensor of the state is of no use after the training."""
        name = name.removeprefix("recipe.")
        return any(name == part or name.startswith(f"{part}.") for part in self.recipe.training_only)

    def forward(self, x: Tensor) -> Tensor:
        return self.recipe.embed(x)
