"""How many solves of MLP+A stop at saddles in meta-training, and what escapes from them cost.

    python tests/benchmarks/saddles.py glyphs-5shot implicit --escapes 8

on one thread. What is missing of the data set, its pretraining and its features is made first, as in a run.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F

from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.learners import network_learner
from ifsl_bench.plugin.method import masked_logits
from ifsl_bench.plugin.registry import method
from ifsl_bench.protocol.task_files import find


def main() -> None:
    """Train for a while, one episode a step, and print counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("gradient", choices=["implicit", "rbp"])
    parser.add_argument("--escapes", type=int, default=network_learner.ESCAPES)
    parser.add_argument("--steps", type=int, default=400)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    network_learner.ESCAPES, solver = asked.escapes, network_learner.NetworkLearner.solver
    # For a series too, which the suite leaves alone.
    network_learner.NetworkLearner.solver = lambda self, *how: self.past_saddles(solver(self, *how))
    (task,) = find(asked.task)
    prepared = Workspace().prepared(task, "linear", 0)
    kind = method("attractor")
    torch.manual_seed(0)
    model = kind(prepared.base, task.episode.ways, gradient=asked.gradient, **kind.defaults(task)).train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    losses, norms = [], []
    counts = dict.fromkeys(("episodes", "indefinite", "failed", "diverged"), 0)
    loader, begin = prepared.loader("train"), time.process_time()
    for step in range(asked.steps):
        batch = loader.batch(step, 1)
        prediction = model(batch.support, batch.query)
        loss = F.cross_entropy(masked_logits(prediction, batch.masked).flatten(0, 1), batch.labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        for key in counts:
            counts[key] += getattr(prediction.adjoint, key)
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()))
        losses.append(loss.item())
        optimiser.step()
    spent, late = time.process_time() - begin, losses[asked.steps // 2 :]
    print(f"{asked.task} {asked.gradient}, {asked.escapes} escapes: {counts}")
    print(f"gradient median {sorted(norms)[len(norms) // 2]:.3g}, largest {max(norms):.3g}")
    print(f"loss {sum(late) / len(late):.4f} in the second half; {1e3 * spent / asked.steps:.1f} ms of CPU time a step")


if __name__ == "__main__":
    main()
