"""MLP: a small network on the support set beside the base classifier, the baseline of Ren et al. (NeurIPS 2019)."""

from __future__ import annotations

from ifsl_bench.learners.episodic import NetworkLearner
from ifsl_bench.learners.ridge_method import RidgeMethod


class MLP(RidgeMethod):
    """Novel logits h(x) = W tanh(W_2 x + b_2) + W_3 x + b with 40 hidden units, V = (W, b, W_2, b_2, W_3) minimising

        mean_i CE([W_a x_i + b_a ; h(x_i; V)], y_i)  +  weight_decay/2 |V|^2

    from the support set alone, over all base and novel classes; the base classifier stays as it is. No meta-training:
    the episodic objective of Ren, Liao, Fetaya & Zemel, Incremental Few-Shot Learning with Attention Attractor Networks
    (NeurIPS 2019), with R = 0. Not convex: a batched L-BFGS finds a minimum from a fixed small start; ours searches in
    dual numbers, so it may find another than a search in V would. Hidden base classes are left out.

    Options: ``weight_decay`` of all fast weights; chosen on the validation episodes unless given.
    """

    fast = NetworkLearner
