"""The base classifier of a frozen backbone, by L-BFGS, beside a schedule of SGD: accuracy on images it has not seen.

    python tests/benchmarks/base_heads.py HOME [--markdown]

On the features of the glyphs under the pretrained backbones in HOME, both kinds of classifier, the tasks' weight decay;
SGD with Nesterov momentum 0.9, batches of 256 and a rate that follows a half cosine, at several rates and lengths. They
are made in HOME where it lacks them. Seconds are of one thread of the processor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from tabulate import tabulate

from ifsl_bench.backbone.base_head import fit_head
from ifsl_bench.backbone.networks import CosineHead, LinearHead, make_head
from ifsl_bench.campaigns.api import workspace
from ifsl_bench.episodic.prepared import PreparedTask
from ifsl_bench.protocol.task_files import find

POOLS = ("base/train", "base/val", "base/test")


def by_sgd(
    kind: str, rows: torch.Tensor, labels: torch.Tensor, decay: float, rate: float, steps: int
) -> LinearHead | CosineHead:
    torch.manual_seed(0)
    head = make_head(kind, rows.shape[1], int(labels.max()) + 1)
    optimiser = torch.optim.SGD(head.parameters(), rate, 0.9, nesterov=True, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        batch = torch.randint(len(labels), (256,))
        loss = F.cross_entropy(head(rows[batch]), labels[batch])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return head


def measured(home: str) -> Iterator[list[object]]:
    (task,) = find("glyphs-5shot")
    decay = task.pretraining.weight_decay
    for kind in ("linear", "cosine"):
        made = PreparedTask(task, kind, 0, workspace(home, device="cpu"))
        rows = {pool: torch.as_tensor(made.pool(pool).features).float() for pool in POOLS}
        labels = {pool: torch.from_numpy(made.dataset.pool(pool).labels.astype(np.int64)) for pool in POOLS}

        def line(what: str, head: LinearHead | CosineHead, seconds: float, rows=rows, labels=labels, kind=kind):
            with torch.no_grad():
                right = [float((head(rows[p]).argmax(1) == labels[p]).float().mean()) for p in POOLS[1:]]
            return [kind, what, *(f"{100 * share:.2f}%" for share in right), f"{seconds:.1f} s"]

        x, y = rows["base/train"], labels["base/train"]
        begun = time.thread_time()
        head, said = fit_head(kind, x.numpy(), y.numpy(), int(y.max()) + 1, decay, torch.device("cpu"))
        yield line(f"L-BFGS, {said['steps']} steps", head, time.thread_time() - begun)
        for rate in (0.02, 0.2, 1.0):
            for steps in (900, 4000):
                begun = time.thread_time()
                head = by_sgd(kind, x, y, decay, rate, steps)
                yield line(f"SGD, rate {rate:g}, {steps:,} steps", head, time.thread_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    headings = ["classifier", "by", "base/val", "base/test", "processor"]
    print(tabulate(list(measured(given.home)), headings, "github" if given.markdown else "simple"))


if __name__ == "__main__":
    main()
