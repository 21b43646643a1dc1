"""LR: logistic regression on the support set beside the base classifier, the baseline of Ren et al. (NeurIPS 2019)."""

from __future__ import annotations

from ifsl_bench.learners.episodic import LinearLearner
from ifsl_bench.learners.ridge_method import RidgeMethod


class LR(RidgeMethod):
    """Novel weights [W, b] that minimise, from the support set alone,

        mean_i CE([W_a x_i + b_a ; W x_i + b], y_i)  +  weight_decay/2 |[W, b]|^2

    over all base and novel classes; the base classifier stays as it is. No meta-training: the episodic objective of
    Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks (NeurIPS 2019), with
    R = 0. Convex, and solved to the minimum by a Newton method in dual numbers. Hidden base classes are left out.

    Options: ``weight_decay`` of the novel weights, the bias included; chosen on the validation episodes unless given.
    """

    fast = LinearLearner
