"""An upper bound: one linear classifier, trained on all images of all classes at once."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.plugin.method import Base, Method, Prediction, Query, Support
from ifsl_bench.plugin.space import Range, SearchSpace
from ifsl_bench.solvers import LBFGS, Solution, minimise, solve_statistics
from ifsl_bench.utils.errors import UserError

FeatureMeanAndSolution = tuple[Tensor, Solution]


def regression_loss(v: Tensor, args: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return L(V), [1].

    Args:
        v: weights [1, C, D + 1].
        args: images [1, n, D + 1], their labels [1, n], and the weight decay [].
    """
    x, labels, decay = args
    return F.cross_entropy((x @ v.mT).mT, labels, reduction="none").mean(1) + decay / 2 * v.square().sum((1, 2))


class UpperBound(Method):
    """Softmax regression on the images of all classes together, base and novel: what no session could forget.

        L(V) = mean_i CE(V [x_i - m ; 1], y_i) + weight_decay/2 |V|^2,    logits(h) = V [h - m ; 1]

    x_i are the features of all training images, and m is their mean. Joint training is the usual upper bound of
    learning one task after the other (Li & Hoiem, Learning without Forgetting, TPAMI 2018). It keeps the images of
    base/train, so a data set that has only their means is refused.

    In sessions it is no few-shot method: of each novel class it is given all training images, not its k supports. These
    are the images of its pool of supports, or, where there is none, those of novel/test that are not queries of the
    sequence. One classifier is trained for all classes of a sequence, and after each session the classes met so far
    have a logit. In an episode the images of novel classes are its supports. Images of hidden base classes are left
    out.

    Options:
        weight_decay: as in L(V); unless given, the best of 0.01, 0.001 and 0.0001 on validation sequences of
            glyphs-sessions.
    """

    name = "upper-bound"
    display: ClassVar = {"upper-bound": ("Upper bound", "softmax regression on all images of all classes")}
    uses_all_images: ClassVar[bool] = True
    space: ClassVar[SearchSpace] = {"weight_decay": Range(1e-6, 1e-1, log=True)}

    def __init__(self, base: Base, ways: int, *, weight_decay: float = 1e-3) -> None:
        super().__init__(base, ways)
        if not 0 < weight_decay < math.inf:
            raise UserError(f"weight_decay must be positive and finite, not {weight_decay}")
        if base.images is None:
            raise UserError("upper-bound trains on the images of base/train, and this data set has only their means")
        self.images, self.weight_decay = base.images, weight_decay
        self.last: tuple[Tensor, Tensor, FeatureMeanAndSolution] | None = (
            None  # images, labels, and what was fitted to them
        )

    def forward(self, support: Support, query: Query) -> Prediction:
        features, labels = (part.to(support.labels.device) for part in self.images())
        logits, numbers = [], []
        for at, (x, novel) in enumerate(zip(support.features, support.labels, strict=True)):  # images differ in number
            shown = ~support.hidden[at]  # [K]
            there, count = shown[labels], int(shown.sum())
            place = _reorder_classes(x, novel, self.ways)  # [N]
            by_place = place[novel].argsort(stable=True)
            images = torch.cat([features[there].to(x), x[by_place]])
            y = torch.cat([(shown.cumsum(0) - 1)[labels[there]], count + place[novel[by_place]]])
            mean, solution = self._fit_classifier(images, y, count + self.ways)
            columns = torch.cat([shown.cumsum(0) - 1, count + place])  # of each class [K + N], where it is shown
            of_all = append_ones_column(query.features[at] - mean) @ solution.value[0, columns].mT
            logits.append(of_all.masked_fill(F.pad(~shown, (0, self.ways)), -torch.inf))
            numbers.append(solve_statistics(solution))
        return Prediction(torch.stack(logits), {name: torch.cat([of[name] for of in numbers]) for name in numbers[0]})

    def _fit_classifier(self, images: Tensor, y: Tensor, classes: int) -> FeatureMeanAndSolution:
        """Return the mean [D] and the solution [1, C, D + 1] on images [n, D] with labels [n].

        Sequences of a list hold the same images in other orders, so these are fitted once.
        """
        if self.last is None or not (torch.equal(self.last[0], images) and torch.equal(self.last[1], y)):
            mean = images.mean(0)
            args = append_ones_column(images - mean).unsqueeze(0), y.unsqueeze(0), images.new_tensor(self.weight_decay)
            v0 = images.new_zeros(1, classes, images.shape[1] + 1)
            self.last = images, y, (mean, minimise(regression_loss, LBFGS(), v0, args))
        return self.last[2]


def _reorder_classes(x: Tensor, novel: Tensor, ways: int) -> Tensor:
    """Return the place [N] of each novel class in the order of their sums of features, whatever order they come in."""
    sums = x.new_zeros(ways, dtype=torch.float64).index_add_(0, novel, x.double().sum(1))
    return sums.argsort().argsort()


def append_ones_column(x: Tensor) -> Tensor:
    """Return images [n, D] with a constant feature more, [n, D + 1]."""
    return F.pad(x, (0, 1), value=1.0)
