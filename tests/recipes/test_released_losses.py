"""Losses against the numbers of their authors' released code, where its licence allows running it.

SAVC's and CLOSER's repositories (github.com/zysong0113/SAVC at 1543c9c9, github.com/JungHunOh/CLOSER_ECCV2024 at
d6ef526f) are under the MIT licence. Their losses were computed on the CPU in double precision, on the batch and the
weights that are made here by formula. The repositories of ALICE, FACT, NC-FSCIL and OrCo have no licence; the losses of
these recipes are held to plain loops in ``test_losses.py`` alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ifsl_bench.backbones.recipe import Recipe
from ifsl_bench.recipes.closer import Closer
from ifsl_bench.recipes.savc import Savc
from tests.recipes.test_losses import IMAGES, LABELS, SIZE, at, made

QUEUED = [0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -1, -1]  # label and turn of each key; -1 where none was put in yet
RELEASED = {
    "savc": {"ce": 4.095726730152196, "contrast": 2.3522641694242425, "crops": 9.262444584151108},
    "closer": {"ce": 6.894522625055206, "contrast": 0.11432177021072926, "closeness": 0.10148884057860655},
}


def waves(*size: int, phase: float) -> Tensor:
    """Numbers that no generator draws: the same with every version of PyTorch."""
    return torch.sin(1.7 * torch.arange(torch.Size(size).numel(), dtype=torch.float64) + phase).reshape(size)


def images(count: int) -> list[Tensor]:
    return [waves(IMAGES, 3, SIZE, SIZE, phase=0.1 * (1 + view)) for view in range(count)]


def filled(recipe: Recipe) -> Recipe:
    """Give a recipe parameters by formula, each matrix divided by the root of its columns."""
    with torch.no_grad():
        for number, (_, value) in enumerate(sorted(recipe.named_parameters())):
            value.copy_(2 * waves(*value.shape, phase=number) / value.shape[-1] ** 0.5)
    return recipe


def savc() -> Savc:
    recipe = filled(made(Savc, queue=len(QUEUED), width=5, crops="released"))
    recipe.keys.copy_(torch.nn.functional.normalize(waves(len(QUEUED), 5, phase=0.5), dim=1))
    recipe.key_labels.copy_(torch.tensor(QUEUED))
    return recipe


@pytest.mark.parametrize(
    ("name", "make", "views"),
    [("savc", savc, 7), ("closer", lambda: filled(made(Closer, alpha=0.1, beta=0.5)), 3)],
)
def test_a_loss_is_that_of_the_released_code(name, make, views):
    terms = {key: float(term.detach()) for key, term in make().loss(images(views), LABELS, at()).items()}
    assert terms == pytest.approx(RELEASED[name], abs=1e-6)
