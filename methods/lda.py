"""Linear discriminants from class means and the base classes' covariance, after deep SLDA (2020) and FeCAM (2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.plugin.method import AdditiveClassifier, Base, Query, SessionOutput, State, Support
from ifsl_bench.plugin.space import Choices, Range, SearchSpace
from ifsl_bench.utils.cosine import check_squares_are_finite, linear_logits, normalise_exactly
from ifsl_bench.utils.errors import UserError


class LDA(AdditiveClassifier):
    """The nearest class mean in the Mahalanobis distance of one covariance, that of the base classes. Closed form.

    With S the covariance of base/train features within the base classes, mu_k the mean of class k (of all base/train
    images of a base class, of the support images of a novel one) and L below, logits are, up to a term that depends on
    the query alone,

        -1/2 (h - mu_k)^T L (h - mu_k) :    h . L mu_k - 1/2 mu_k . L mu_k

    ``slda``: L = [(1 - shrinkage) S' + shrinkage 1]^-1, S' being S shrunk towards its mean variance by the oracle
    approximating rule (OAS; Chen, Wiesel, Eldar & Hero 2010). Hayes & Kanan, Lifelong Machine Learning with Deep
    Streaming Linear Discriminant Analysis (CVPR workshops 2020), as its released code initialises it on base classes,
    with the covariance fixed from there on (S': ``fit_base`` of SLDA_Model.py, L and the logits: ``predict``).

    ``fecam``: h and mu_k are made unit vectors first, and L is the inverse of the correlation matrix of

        S + shrinkage v 1 + shrinkage w (J - 1)

    v being the mean of S's diagonal, w that of its other entries which are not 0, and J all ones. Goswami, Liu,
    Twardowski & van de Weijer, FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free Continual
    Learning (NeurIPS 2023), shrinkage, normalisation and distance of its released code, with its two gammas as one
    (``shrink_cov``, ``normalize_cov`` and ``_mahalanobis`` of models/base.py; shrinkage and normalisation are equations
    8 and 7 of arXiv 2309.14062v3 according to a secondary source). Two more parts of it are options, which read the
    images of base/train. ``tukey`` is the exponent p of Tukey's ladder of powers: images x and means m become unit(x^p)
    and unit(m^p), and S is that of the x^p. With ``per_class``, S and so L are of the class alone, S = sum_i (x_i - m)
    (x_i - m)^T / (n - 1) over its n images, supports included, and a query's logit is minus half its distance. One
    image alone has L = 1. Differences: the common covariance is within classes, theirs is of all images about one mean;
    their code shrinks twice, here once; features below 0, which their networks have none of, become -|x|^p.

    ``corrected``, the default: as ``slda``, but 1/2 tr(L S) / n_k is added to the logit of class k, n_k being the
    images behind mu_k. Without it the noise of a mean of few images lengthens all distances to it, by that much on
    average, and base classes win; the more so the more features there are. Neither paper has it. It is the correction
    of Moran & Murphy, A Closer Look at Two Alternative Methods of Statistical Discrimination (Applied Statistics 1979).

    A base class that an episode hides takes no part, but its images are among those of S.

    Options:
        form: ``corrected``, ``slda`` or ``fecam``, as described in the text.
        shrinkage: 1e-4 in the code of ``slda``, 1 in that of ``fecam``; chosen from a grid on validation episodes
            unless given.
        tukey: the exponent of features in ``fecam``, 0.5 in its code; 1 leaves them as they are.
        per_class: whether each class has a covariance of its own in ``fecam``, as in its code.
    """

    name = "lda"
    display: ClassVar = {"lda": ("LDA", "class means under the base classes' covariance")}
    parallel_copies: ClassVar[bool] = True
    order_free: ClassVar[bool] = True
    uses_earlier_logits = False
    space: ClassVar[SearchSpace] = {
        "shrinkage": Range(1e-4, 1.0, log=True),
        "form": Choices(("corrected", "slda", "fecam")),
    }
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {
        "shrinkage": (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0)
    }

    def __init__(
        self,
        base: Base,
        ways: int,
        *,
        form: Literal["corrected", "slda", "fecam"] = "corrected",
        shrinkage: float = 0.1,
        tukey: float = 1.0,
        per_class: bool = False,
    ) -> None:
        super().__init__(base, ways)
        if not 0 < tukey < math.inf:
            raise UserError(f"tukey must be positive and finite, not {tukey}")
        if (tukey != 1 or per_class) and form != "fecam":
            raise UserError(f"tukey and per_class are parts of form=fecam, not of form={form}")
        self.form, self.shrinkage, self.tukey, self.per_class = form, shrinkage, tukey, per_class
        most = math.inf if form == "fecam" else 1.0
        if not 0 <= shrinkage <= most or shrinkage == math.inf:
            allowed = "between 0 and 1" if most == 1 else "0 or positive, and finite"
            raise UserError(f"shrinkage must be {allowed}, not {shrinkage}")
        if base.covariance is None or base.counts is None:
            raise UserError(
                "this base classifier comes without the covariance of its features and the counts of its images, which "
                "lda needs: give Base both"
            )
        check_squares_are_finite(base.prototypes, self.name)
        covariance, counts = base.covariance.double(), base.counts.double()
        means = self.transform_features(base.prototypes.double())
        if tukey != 1 or per_class:
            if base.images is None:
                raise UserError(
                    "tukey and per_class take covariances of the images of base/train, and this data set has only "
                    "their means"
                )
            features, labels = (part.to(base.weight.device) for part in base.images())
            images = [tukey_transform(features[labels == k].double(), tukey) for k in range(len(means))]
            if per_class:
                self.register_buffer("means", means.to(base.weight.dtype), persistent=False)
                metrics = torch.stack(
                    [fit_metric_of_one_class(x, shrinkage).to(base.weight.dtype) for x in images]
                )  # [K, D, D]
                self.register_buffer("metrics", metrics, persistent=False)
                self.class_bytes = metrics[0].nbytes
                return
            covariance = sum((x - x.mean(0)).T @ (x - x.mean(0)) for x in images) / counts.sum()
        shrunk = (
            shrink_to_correlation(covariance, shrinkage)
            if form == "fecam"
            else shrink_by_oas(covariance, counts.sum(), shrinkage)
        )
        if not bool(shrunk.isfinite().all()):
            raise UserError(
                "the covariance of the base features has no inverse: some feature never varies, or is not finite"
            )
        metric = invert_covariance(shrunk)  # L
        excess = 0.5 * (metric * covariance).sum() if form == "corrected" else covariance.new_zeros(())
        centre = means.mean(0)  # taken off everywhere, which changes no distance and keeps digits
        seen, offset = linear_discriminant_logits(means - centre, metric)
        buffers = {"metric": metric, "centre": centre, "seen": seen, "excess": excess}
        buffers["offset"] = offset + excess / counts
        for name, value in buffers.items():
            self.register_buffer(name, value.to(base.weight.dtype), persistent=False)

    def transform_features(self, x: Tensor) -> Tensor:
        """Return features [..., D] as distances are taken between them."""
        return normalise_exactly(tukey_transform(x, self.tukey)) if self.form == "fecam" else x

    def learn_classes(self, support: Support, earlier: Tensor | None) -> SessionOutput:
        if self.per_class:
            placed = tukey_transform(support.features.double(), self.tukey)
            own = [
                fit_metric_of_one_class(x[of == n], self.shrinkage)
                for x, of in zip(placed, support.labels, strict=True)
                for n in range(self.ways)
            ]
            metrics = torch.stack(own).to(support.features).unflatten(0, (-1, self.ways))  # [E, N, D, D]
            return SessionOutput({"means": self.transform_features(support.class_means(self.ways)), "metrics": metrics})
        means = self.transform_features(support.class_means(self.ways)) - self.get_buffer("centre")
        weight, offset = linear_discriminant_logits(means, self.get_buffer("metric"))  # [E, N, D], [E, N]
        images = F.one_hot(support.labels, self.ways).sum(1)  # [E, N]
        return SessionOutput({"weight": weight, "offset": offset + self.get_buffer("excess") / images})

    def base_logits(self, query: Query) -> Tensor:
        h = self.transform_query(query).features  # [E, Q, D]
        if self.per_class:
            return logits_of_class_metrics(
                h, self.get_buffer("means").unsqueeze(0), self.get_buffer("metrics").unsqueeze(0)
            )
        return h @ self.get_buffer("seen").T + self.get_buffer("offset")

    def class_logits(self, state: State, query: Query) -> Tensor:
        if self.per_class:
            return logits_of_class_metrics(query.features, state["means"], state["metrics"])
        return linear_logits(query.features, state["weight"]) + state["offset"].unsqueeze(-2)

    def transform_query(self, query: Query) -> Query:
        placed = self.transform_features(query.features)
        return Query(placed if self.per_class else placed - self.get_buffer("centre"), query.base_logits[..., :0])


def invert_covariance(shrunk: Tensor) -> Tensor:
    """Return the inverse of a covariance [D, D] in float64.

    Where rounding would be most of an inverse it is the pseudo-inverse, as in both papers' code.
    """
    root, failed = torch.linalg.cholesky_ex(shrunk)
    pivots = root.diagonal().square()
    if bool(failed) or bool(pivots.min() <= len(shrunk) * torch.finfo(shrunk.dtype).eps * pivots.max()):
        return torch.linalg.pinv(shrunk, hermitian=True)
    return torch.cholesky_inverse(root)


def linear_discriminant_logits(means: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return L mu [..., D] and -1/2 mu . L mu [...] of each mean mu.

    Args:
        means: [..., D].
        metric: L, [D, D].
    """
    weight = means @ metric
    return weight, -0.5 * (weight * means).sum(-1)


def shrink_by_oas(s: Tensor, images: Tensor, epsilon: float) -> Tensor:
    """Return a covariance shrunk by the rule of OAS, which needs the number of images, and by epsilon, [D, D].

    Args:
        s: the covariance [D, D].
        images: their number [].
        epsilon: the weight of the identity.
    """
    size, variance, square = len(s), s.diagonal().mean(), s.square().mean()
    share = ((square + variance**2) / ((images + 1) * (square - variance**2 / size)).clamp_min(1e-300)).clamp_max(1)
    identity = torch.eye(size, dtype=s.dtype, device=s.device)
    return (1 - epsilon) * ((1 - share) * s + share * variance * identity) + epsilon * identity


def shrink_to_correlation(s: Tensor, gamma: float) -> Tensor:
    """Return the correlation matrix of the shrunk covariance, [D, D].

    Args:
        s: the covariance [D, D].
        gamma: the shrinkage.
    """
    identity = torch.eye(len(s), dtype=s.dtype, device=s.device)
    others = s * (1 - identity)
    mean = others.sum() / (others != 0).sum().clamp_min(1)
    shrunk = s + gamma * s.diagonal().mean() * identity + gamma * mean * (1 - identity)
    deviation = shrunk.diagonal().sqrt()
    return shrunk / (deviation[:, None] * deviation)


def tukey_transform(x: Tensor, exponent: float) -> Tensor:
    """Return Tukey's transformation x^exponent, of the absolute value where x is negative, with the sign of x.

    Args:
        x: features [..., D].
        exponent: 1 leaves them as they are.
    """
    return x if exponent == 1 else x.sign() * x.abs() ** exponent


def fit_metric_of_one_class(x: Tensor, gamma: float) -> Tensor:
    """Return L [D, D] of one class; 1 where its images do not differ.

    Args:
        x: the class's images [n, D] in float64.
        gamma: the shrinkage.

    Raises:
        UserError: the covariance has no inverse.
    """
    apart = x - x.mean(0)
    if not bool(apart.any()):
        return torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    shrunk = shrink_to_correlation(apart.T @ apart / (len(x) - 1), gamma)
    if not bool(shrunk.isfinite().all()):
        raise UserError(
            "the covariance of a class has no inverse: some feature never varies in it; give a shrinkage above 0"
        )
    return invert_covariance(shrunk)


def logits_of_class_metrics(h: Tensor, means: Tensor, metrics: Tensor) -> Tensor:
    """Return -1/2 (h - mu_k)^T L_k (h - mu_k), [E, Q, N].

    Args:
        h: the queries [E, Q, D].
        means: mu, [E, N, D].
        metrics: L, [E, N, D, D].
    """
    logits = []
    for mean, metric in zip(means.unbind(1), metrics.unbind(1), strict=True):  # [E, Q, N, D] would be too much at once
        apart = h - mean.unsqueeze(1)
        logits.append(-0.5 * (apart @ metric * apart).sum(-1))
    return torch.stack(logits, -1)
