"""``ifsl-bench recipes new``: the first file of a recipe of one's own."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ifsl_bench.plugin.registry import RECIPE_GROUP, registered_entry_points
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import translate_disk_errors

RECIPE_TEMPLATE = '''\
"""$name: supervised contrastive learning, to be changed. How such a file works: docs/backbones.md of ifsl_bench."""

import torch
from torch import nn
from torch.nn.functional import normalize

from ifsl_bench import Recipe, View

STRONG = View(scale=(0.2, 1.0), jitter=0.4, grey=0.2)  # crops, colours; the default View() is the task's own


class $kind(Recipe):
    """Two views of each image; features of one class are drawn together. The projector is dropped at test."""

    views = (STRONG, STRONG)
    training_only = ("projector",)

    def __init__(self, backbone, classes, *, temperature: float = 0.2):  # --recipe $file.temperature=0.1
        super().__init__(backbone, classes)
        self.temperature = temperature
        width = backbone.features
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))

    def loss(self, views, labels, at):  # views: two tensors [B, C, H, W]; labels: [B]; at.random: random numbers
        z = normalize(self.projector(self.features(torch.cat(views))), dim=1)  # [2 B, 128]
        labels = labels.repeat(2)
        logits = (z @ z.T / self.temperature).fill_diagonal_(-torch.inf)  # an image is not its own partner
        same = (labels[:, None] == labels).fill_diagonal_(False)
        shares = logits - logits.logsumexp(1, keepdim=True)
        return {"contrast": -(shares.masked_fill(~same, 0).sum(1) / same.sum(1)).mean()}
'''


def write_recipe_file(name: str) -> Path:
    """Write a recipe that runs at once into the current folder, and return its file.

    Args:
        name: of the recipe.

    Raises:
        UserError: something of that name is there, a recipe or module has it, or it is no name.
    """
    module, kind = name.replace("-", "_"), "".join(word[:1].upper() + word[1:] for word in re.split("[-_]", name))
    if not re.fullmatch("[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?", name) or kind in ("Recipe", "View", *keyword.kwlist):
        raise UserError(f"recipes new: {name[:80]!r} is no name for a recipe; choose letters and digits, as my-recipe")
    path = Path(f"{module}.py")
    if path.exists() or path.is_symlink():
        raise UserError(f"recipes new: {path} is there already; remove it, or choose another name")
    if name.lower() in {taken.lower() for taken in registered_entry_points(RECIPE_GROUP)}:
        raise UserError(f"recipes new: there is a recipe {name!r} ('ifsl-bench recipes'); choose another name")
    if module in sys.stdlib_module_names or find_spec(module):  # the new file would be imported in its place
        raise UserError(f"recipes new: there is a Python module {module!r}; choose another name")
    with translate_disk_errors(path, "cd"), open(path, "x", encoding="utf-8") as written:
        written.write(Template(RECIPE_TEMPLATE).substitute(name=name, kind=kind, file=path))
    return path
