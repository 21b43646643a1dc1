"""The speed of the attractors' episodes in a table, with what bounds each row; on a CPU or a GPU.

    python tests/benchmarks/solve_table.py [--device cuda] [--threads 2] [--agreement] [--markdown]

Features are given, shapes are the attractor paper's: 512 features, 5 novel beside 200 base classes, 25 + 25 queries.
Evaluation is the shipped method from support and query to joint logits, in batches that fill the device; a step of
meta-training is all that a step is: forward pass, query loss, backward pass and Adam.

bound: how many episodes a second the device could do if nothing but the arithmetic of the large products (at the rate
of a product of 2,048 x 2,048 matrices, measured in the same run) and the traffic of features and logits (at the rate of
a copy, likewise) took time; the search itself, some tens of evaluations of the objective, is left out. In meta-training
on few episodes the calls bound the rate, and no figure is given.

The last table is the agreement with the CPU in double precision: the largest difference of a logit, relative to the
largest logit, and the share of queries whose prediction is the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from paper_shapes import D, Episodes, H, K, N, Q
from tabulate import tabulate
from torch import Tensor

from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Method, Query, Support


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    title: str
    learner: str
    shots: int
    gradient: str = ""  # of meta-training; empty for evaluation


ROWS = (
    Row("LR+A, evaluate, 5-shot", "lr", 5),
    Row("LR+A, evaluate, 1-shot", "lr", 1),
    Row("MLP+A, evaluate, 5-shot", "mlp", 5),
    Row("MLP+A, evaluate, 1-shot", "mlp", 1),
    Row("LR+A, meta-training, RBP", "lr", 5, "rbp"),
    Row("LR+A, meta-training, implicit", "lr", 5, "implicit"),
    Row("LR+A, meta-training, T-BPTT(20)", "lr", 5, "t-bptt"),
    Row("MLP+A, meta-training, RBP", "mlp", 5, "rbp"),
    Row("MLP+A, meta-training, implicit", "mlp", 5, "implicit"),
    Row("MLP+A, meta-training, T-BPTT(20)", "mlp", 5, "t-bptt"),
)


def method(learner: str, shots: int, device: torch.device, dtype: torch.dtype, gradient: str = "rbp") -> Method:
    """The shipped attractor with initial parameters, the same on every device."""
    attractor, _ = registry.get_method("attractor"), torch.manual_seed(0)
    base = Episodes(1, shots).base()
    options = {"learner": learner, "gradient": gradient, "gamma": 0.1 if shots == 1 else 0.01}
    return attractor(base.to(device, dtype), N, **options).to(device, dtype)


def inputs(episodes: Episodes, device: torch.device, dtype: torch.dtype) -> tuple[Support, Query, Tensor]:
    def move(x: Tensor) -> Tensor:
        return x.to(device, dtype if x.is_floating_point() else None)

    s, q = episodes.support(), episodes.queries()
    support = Support(move(s.features), move(s.labels), move(s.hidden), move(s.base_logits))
    return support, Query(move(q.features), move(q.base_logits)), move(episodes.target)


def evaluation(row: Row, batch: int, device: torch.device) -> Callable[[], object]:
    support, query, _ = inputs(Episodes(batch, row.shots), device, torch.float32)
    model = method(row.learner, row.shots, device, torch.float32).eval()

    def once() -> Tensor:
        with torch.no_grad():
            return model(support, query).logits

    return once


def training(row: Row, batch: int, device: torch.device) -> Callable[[], object]:
    support, query, target = inputs(Episodes(batch, row.shots), device, torch.float32)
    model = method(row.learner, row.shots, device, torch.float32, row.gradient).train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-3, fused=True)

    def once() -> None:
        loss = F.cross_entropy(model(support, query).logits.flatten(0, 1), target.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()

    return once


def seconds(once: Callable[[], object], device: torch.device, least: float = 2.0) -> float:
    """Median seconds of a call, over at least five calls and `least` seconds."""
    times: list[float] = []
    once()
    while len(times) < 5 or sum(times) < least:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def peaks(device: torch.device) -> tuple[float, float]:
    """Measured floating-point operations and bytes a second, float32."""
    a = torch.randn(2048, 2048, device=device)
    flops = 2 * 2048**3 / seconds(lambda: a @ a, device, 1.0)
    big = torch.randn(1 << 26, device=device)
    out = torch.empty_like(big)
    return flops, 2 * 4 * len(big) / seconds(lambda: out.copy_(big), device, 1.0)


def work(row: Row) -> tuple[float, float]:
    """Floating-point operations of the large products, and bytes that must move, of one evaluated episode."""
    s, heads = N * row.shots, 1 if row.learner == "lr" else 3
    flops = 2.0 * s * s * D * heads + 2 * s * D * N * 3 + 2 * Q * D * N  # kernels, scores, V, queries
    flops += 2 * N * K * D + 2 * N * K * 50 + 2 * N * 50 * D * heads  # attention and f_phi
    if row.learner == "mlp":
        flops += 2 * H * D * (2 * s + Q)
    numbers = (s + Q) * (D + K) + Q * (K + N)
    return flops, 4.0 * numbers


def table(device: torch.device) -> Iterator[list[object]]:
    flops, traffic = peaks(device)
    small = device.type == "cpu"
    for row in ROWS:
        if row.gradient:
            for batch in (1, 16, 64) if small else (1, 64, 1024):
                rate = batch / seconds(training(row, batch, device), device)
                yield [row.title, batch, rate, None, None]
            continue
        sizes = ((512, 2048) if row.learner == "lr" else (128, 512)) if small else (2048, 16384)
        rate, batch = max((size / seconds(evaluation(row, size, device), device), size) for size in sizes)
        needed, moved = work(row)
        bound = 1 / max(needed / flops, moved / traffic)
        yield [row.title, batch, rate, bound, rate / bound]


def agreement(device: torch.device) -> Iterator[list[object]]:
    for learner in ("lr", "mlp"):
        for shots in (1, 5):
            episodes, outputs = Episodes(64, shots), []
            for place, dtype in ((torch.device("cpu"), torch.float64), (device, torch.float32)):
                support, query, _ = inputs(episodes, place, dtype)
                with torch.no_grad():
                    logits = method(learner, shots, place, dtype).eval()(support, query).logits
                outputs.append(logits.double().cpu())
            exact, result = outputs
            same = (exact.argmax(-1) == result.argmax(-1)).double().mean()
            difference = (exact - result).abs().max() / exact.abs().max()
            yield [f"{learner.upper()}+A, {shots}-shot", float(difference), float(same)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--agreement", action="store_true", help="the last table alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, style = torch.device(arguments.device), "github" if arguments.markdown else "simple"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {arguments.threads} threads"
    print(f"{name}; PyTorch {torch.__version__}; episodes a second\n")
    if not arguments.agreement:
        heads = ["work", "episodes at once", "rate", "bound", "share of it"]
        print(tabulate(table(device), heads, style, floatfmt=("", "", ",.0f", ",.0f", ".2f"), missingval=""))
        print()
    heads = ["against the CPU in double precision", "largest relative difference", "same predictions"]
    print(tabulate(agreement(device), heads, style, floatfmt=("", ".1e", ".4f")))


if __name__ == "__main__":
    main()
