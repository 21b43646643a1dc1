"""Random episodes in the shapes of the attractor paper, for the benchmarks of the inner solvers."""

from __future__ import annotations

import math

import torch

from ifsl_bench.plugin.method import Base, Query, Support
from ifsl_bench.solvers import NetworkArgs, RegressionArgs, to_prior

D, K, N, Q, H = 512, 200, 5, 50, 40


class Episodes:
    """Random episodes whose classes overlap as those of a trained backbone do; features of norm 12."""

    def __init__(self, count: int, shots: int) -> None:
        g = torch.Generator().manual_seed(0)

        def unit(*shape: int) -> torch.Tensor:
            return torch.nn.functional.normalize(torch.randn(*shape, generator=g), dim=-1)

        base, novel, common = unit(K, D), unit(count, N, D), unit(D)
        self.weight = base
        self.labels = torch.arange(N).repeat_interleave(shots).expand(count, -1).contiguous()
        x = 0.75 * novel.repeat_interleave(shots, 1) + 0.65 * unit(count, N * shots, D) + 0.3 * common
        self.figures_and_tables = 12 * torch.nn.functional.normalize(x, dim=-1)
        classes = torch.randint(K, (count, Q // 2), generator=g)
        means = torch.cat([base[classes], novel.repeat_interleave(Q // 2 // N, 1)], 1)
        q = 0.75 * means + 0.65 * unit(count, Q, D) + 0.3 * common
        self.query = 12 * torch.nn.functional.normalize(q, dim=-1)
        self.target = torch.cat([classes, K + torch.arange(N).repeat_interleave(Q // 2 // N).expand(count, -1)], 1)
        self.base_logits = self.figures_and_tables @ base.T
        self.query_base_logits = self.query @ base.T
        gamma = 0.1 if shots == 1 else 0.01
        self.log_gamma = math.log(gamma) + 0.3 * torch.randn(D + 1, generator=g)
        self.centres = 0.5 * torch.randn(count, N, D + 1, generator=g) / D**0.5

    def regression(self) -> RegressionArgs:
        c, p = to_prior(self.centres, self.log_gamma, 1e-5, N)
        return RegressionArgs(self.figures_and_tables, self.labels, self.base_logits.logsumexp(-1), c, p)

    def network(self) -> NetworkArgs:
        c1, p1 = to_prior(torch.zeros(N, H + 1), torch.full((H + 1,), math.log(0.01)), 1e-5, N)
        c3, p3 = to_prior(self.centres[..., :-1], self.log_gamma[:-1], 1e-5, N)
        c2, p2 = to_prior(self.centres[:, :1], self.log_gamma, 1e-5, H)
        return NetworkArgs(self.figures_and_tables, self.labels, self.base_logits.logsumexp(-1), c1, p1, c3, p3, c2, p2)

    def base(self) -> Base:
        return Base(self.weight, torch.zeros(K), self.weight)

    def support(self) -> Support:
        hidden = torch.zeros(len(self.figures_and_tables), K, dtype=torch.bool)
        return Support(self.figures_and_tables, self.labels, hidden, self.base_logits)

    def queries(self) -> Query:
        return Query(self.query, self.query_base_logits)
