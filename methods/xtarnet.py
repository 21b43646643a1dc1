"""TapNet (Yoon, Seo and Moon, ICML 2019) and XtarNet (Yoon, Kim, Seo and Moon, ICML 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ifsl_bench.plugin.adapting import stage_parameters
from ifsl_bench.plugin.method import Base, Method, Prediction, Query, Support
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION, Range, SearchSpace
from ifsl_bench.utils.cosine import normalise_exactly
from ifsl_bench.utils.errors import UserError

PHI_DEVIATION, CONDITIONING = 0.01, 0.1
INITIAL_SQUARED_DISTANCE = 20.0  # squared, between base classes on average, where class means give usual logits
# Of the second stage, beside all else; at the same pace it knows the images of base/train by heart
SECOND_STAGE_RATE_FACTOR = 0.03
MAPS_PER_BATCH = 512


class SkipLayers(nn.Module):
    """Three linear layers of one width, ReLU behind each sum of a layer's output and its input.

    Args:
        width: of all layers.
        skips_first: whether the first layer has such a sum, too.
    """

    def __init__(self, width: int, skips_first: bool = True) -> None:
        super().__init__()
        self.layers, self.skips_first = nn.ModuleList(nn.Linear(width, width) for _ in range(3)), skips_first

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = F.relu(x + layer(x) if number or self.skips_first else layer(x))
        return x


class TapNet(Method):
    """Distances to learned vectors of the novel classes, in the space where these point as the class means do.

    With c_k the mean of z(x) over the supports of novel class k, c* the mean of all c_k, w_i the mean feature of base
    class i, and z(x) = f(x), the backbone's feature:

        w*_i   = (1 + 0.1 gamma(c*)) w_i + 0.1 beta(c*)
        phi'_k = phi_k - sum_i softmax_i(r((c_k . w*_j)_j)) w*_i
        e_k    = phi'_k / |phi'_k| - c_k / |c_k|
        logit  = -(|z - w|^2 - |V' (z - w)|^2),  w in [w* ; phi'],  V an orthonormal basis of the e_k

    gamma, beta and r are three linear layers with ReLU and skips, phi_k are vectors, N(0, 0.01^2) at first; all are
    meta-learned, and so is one number that multiplies all features: at first the squared distances between base classes
    are 20 on average. A vector phi_k belongs to a label: answers change when the classes of an episode swap their
    labels, and rows say so. It answers episodes alone. Hidden base classes have no share in phi'.

    Yoon, Seo & Moon, TapNet: Neural Network Augmented with Task-Adaptive Projection for Few-Shot Learning (ICML 2019),
    with base classes as in XtarNet (Yoon, Kim, Seo & Moon, ICML 2020): it is ``xtarnet`` without its second feature.
    Differences: the number that multiplies features, since our backbone is not pretrained on distances; and Adam as for
    all methods here, where the paper has momentum and weight decay.
    """

    name = "tapnet"
    display: ClassVar = {"tapnet": ("TapNet", "learned class vectors in a projected space")}
    label_slots: ClassVar[bool] = True
    space: ClassVar[SearchSpace] = {LEARNING_RATE_OPTION: Range(1e-5, 1e-1, log=True)}

    def __init__(self, base: Base, ways: int) -> None:
        super().__init__(base, ways)
        classes, features = base.weight.shape
        apart = torch.pdist(base.prototypes).square().mean().clamp_min(torch.finfo(base.weight.dtype).tiny)
        self.log_unit = nn.Parameter((INITIAL_SQUARED_DISTANCE / apart).log() / 2)
        self.phi = nn.Parameter(PHI_DEVIATION * torch.randn(ways, features).to(base.weight))
        self.gamma, self.beta = SkipLayers(features), SkipLayers(features)
        self.relation = SkipLayers(classes, skips_first=False)  # r

    def compute_representations(self, support: Support, query: Query) -> tuple[Tensor, Tensor]:
        """Return the representations z of supports and queries.

        Args:
            support: [E, S, D] features of the supports.
            query: [E, Q, D] features of the queries.

        Returns:
            z of the supports, [E, S, D], and of the queries, [E, Q, D].
        """
        return support.features, query.features

    def forward(self, support: Support, query: Query) -> Prediction:
        unit = self.log_unit.exp()
        supports, queries = (unit * z for z in self.compute_representations(support, query))
        means = replace(support, features=supports).class_means(self.ways)  # [E, N, D]
        whole = means.mean(1, keepdim=True)  # c*, [E, 1, D]
        scale, shift = 1 + CONDITIONING * self.gamma(whole), CONDITIONING * self.beta(whole)
        base = scale * (unit * self.base.prototypes) + shift  # w*, [E, K, D]
        hidden = support.hidden.unsqueeze(1)  # [E, 1, K]
        relations = self.relation((means @ base.mT).masked_fill(hidden, 0.0))
        shares = relations.masked_fill(hidden, -torch.inf).softmax(-1)  # [E, N, K]
        novel = self.phi - shares @ base.masked_fill(hidden.mT, 0.0)  # phi', [E, N, D]
        span, _ = torch.linalg.qr((normalise_exactly(novel) - normalise_exactly(means)).mT)  # V, [E, D, N]
        return Prediction(-squared_distances_outside(queries, torch.cat([base, novel], 1), span))


def squared_distances_outside(z: Tensor, w: Tensor, span: Tensor) -> Tensor:
    """Return the squared distances of all pairs, without their parts in a subspace, [E, Q, C].

    Args:
        z: queries, [E, Q, D].
        w: classes, [E, C, D].
        span: an orthonormal basis of the subspace, [E, D, N].
    """
    z, w = (x - (x @ span) @ span.mT for x in (z, w))
    return z.square().sum(-1, keepdim=True) - 2 * z @ w.mT + w.square().sum(-1).unsqueeze(1)


def make_feature_share_layers(features: int) -> nn.Sequential:
    """Make h1 or h2: four linear layers, 2 D to D, with ReLU between and a sigmoid at the end."""
    layers: list[nn.Module] = []
    for width in (2 * features, features, features, features):
        layers += [nn.Linear(width, features), nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.Sigmoid())


class XtarNet(TapNet):
    """TapNet on a mixture of the backbone's feature with a second one, in shares that depend on the episode.

    Beside the frozen feature f there is g, the output of a second last stage on the same maps, which is meta-learned.
    With c the mean over the novel classes of the mean of [f ; g] over their supports, and h1, h2 four linear layers
    each:

        z(x) = h1(c) * f(x) + h2(c) * g(x)

    All else is as in ``tapnet``, from z. Yoon, Kim, Seo & Moon, XtarNet: Learning to Extract Task-Adaptive
    Representation for Incremental Few-Shot Learning (ICML 2020). Differences: g begins as the pretrained last stage,
    and its batch norms keep the pretrained running averages, so that an answer does not depend on other queries; it
    learns at 0.03 of the rate of all else, and nothing decays, where the paper has one rate and weight decay.
    """

    name = "xtarnet"
    display: ClassVar = {"xtarnet": ("XtarNet", "a representation that adapts to each episode")}
    sees: ClassVar[str] = "maps:-1"

    def __init__(self, base: Base, ways: int) -> None:
        super().__init__(base, ways)
        if base.network is None or base.network.images is None:
            raise UserError("XtarNet sees maps, and its base has no network")
        rows, _ = base.network.images()
        self.names = stage_parameters(base.network.network, base.network.normalise(rows[:2]), 0)
        first = (base.network.network.get_parameter(name) for name in self.names)
        self.second_stage = nn.ParameterList(torch.zeros_like(value) for value in first)  # how far g is from f
        features = base.weight.shape[1]
        self.first_share, self.second_share = (
            make_feature_share_layers(features),
            make_feature_share_layers(features),
        )  # h1, h2

    def compute_representations(self, support: Support, query: Query) -> tuple[Tensor, Tensor]:
        sizes = [support.features.shape[1], query.features.shape[1]]
        first, second = self.compute_both_features(
            torch.cat([support.features, query.features], 1)
        )  # [E, S + Q, D] each
        both = torch.cat([first, second], -1)[:, : sizes[0]]
        means = replace(support, features=both).class_means(self.ways)
        task = means.mean(1, keepdim=True)  # c, [E, 1, 2 D]
        mixed = self.first_share(task) * first + self.second_share(task) * second
        supports, queries = mixed.split(sizes, 1)
        return supports, queries

    def compute_both_features(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return f and g of maps in rows [E, R, P], [E, R, D] each."""
        assert self.base.network is not None
        network = self.base.network.network
        changes = zip(self.names, self.second_stage, strict=True)
        own = {name: network.get_parameter(name) + SECOND_STAGE_RATE_FACTOR * change for name, change in changes}
        first, second = [], []
        for part in rows.flatten(0, 1).split(MAPS_PER_BATCH):
            maps = self.base.network.normalise(part)
            with torch.no_grad():
                first.append(network(maps))
            second.append(functional_call(network, own, (maps,)))
        return torch.cat(first).unflatten(0, rows.shape[:2]), torch.cat(second).unflatten(0, rows.shape[:2])
