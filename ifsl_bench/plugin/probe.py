"""Measures what a method computes: on small made-up episodes, the same ones on every machine.

E episodes of N novel classes beside K base ones, with Q queries and D features: joint ones of 1, 5 and the task's own
shots, where half of the episodes hide base classes, and regular ones. Three kinds of numbers are kept:

* initial values of the parameters, under one seed;
* what needs no search, in double precision: where a method solves, its objective and gradient *at given fast weights*,
  the logits that these give, and the gradient of a loss through the linear solve there;
* logits as they are, and one meta-gradient in training mode, in single and double precision, of many episodes at once
  and of one. Here another machine's rounding may end a search elsewhere. So all is done again with inputs changed by
  1e-7 (1e-12 in double precision), and ten times what that moves is no difference; nor is, in single precision, a
  quarter of the episodes elsewhere: which of two near minima a search finds hangs on rounding.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.seeds import seed_of
from ifsl_bench.plugin.behaviour import VERSION, Numbers, Probe
from ifsl_bench.plugin.contract import Asked
from ifsl_bench.plugin.method import Base, Method, Query, Support
from ifsl_bench.plugin.options import make_method
from ifsl_bench.solve.minimise import solvers_replaced
from ifsl_bench.solve.objective import Objective
from ifsl_bench.solve.outcome import Outcome, Solver, measured
from ifsl_bench.solve.tree import Tree, rebuild, tensors

E, N, K, D = 8, 5, 7, 16
QUERIES = 4
FEW = 2  # episodes that are looked at without a search
MOST = 30  # groups of parameters
OUT_OF_PLAY = -100.0  # what counts as the logit of a class without one
CHANGED = {torch.float32: 1e-7, torch.float64: 1e-12}  # by so much, relatively, inputs are changed
TIMES = 3  # so often
SPREADS = 10.0  # so many times what that moves is no difference
# And no less than this share of the numbers' own size: what another order of the same operations does.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-6}
INITIAL = 1e-4  # initial values are drawn in single precision

NAMES = {torch.float32: "float32", torch.float64: "float64"}
Found = tuple[list[float], list[float]]  # values, and the size of what each run of len(values) / len(sizes) is of


def probe(name: str, method: type[Method], options: Mapping[str, Any], shots: int) -> Probe | None:
    """What a method with these options computes, on a CPU.

    Args:
        shots: the task's own.

    Returns:
        None for a method that cannot work on such episodes: nothing is known of it then.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            numbers = _initial(method, options)
            for dtype in (torch.float64, torch.float32):
                try:
                    numbers |= _measured(name, method, options, shots, dtype)
                except Exception:
                    if dtype == torch.float32:  # which is what runs compute in
                        raise
    except Exception:  # whatever is wrong with the method, a run says it of real episodes
        return None
    return Probe(VERSION, _declared(method), numbers)


def _declared(method: type[Method]) -> dict[str, Any]:
    schedule = msgspec.json.decode(msgspec.json.encode(method.schedule))  # lists, as a file has them
    return {"head": method.head, "transductive": method.transductive, "schedule": schedule}


def _noise(what: str, *shape: int) -> Tensor:
    """Normal numbers in double precision, the same ones for the same words always and everywhere."""
    return torch.from_numpy(_drawn(what, shape).copy())


@functools.lru_cache(maxsize=1024)
def _drawn(what: str, shape: tuple[int, ...]) -> np.ndarray:
    # NumPy promises never to change this generator.
    return np.random.RandomState(seed_of("probe", what) % 2**32).standard_normal(shape)


def _signs(what: str, size: int) -> Tensor:
    """Two rows of signs, [2, size]."""
    return _noise(f"signs {what}", 2, size).sign()


@dataclass(frozen=True)
class _Case:
    """Made-up episodes, in double precision."""

    shots: int
    regular: bool

    @property
    def said(self) -> str:
        return f"{self.shots}-shot {'regular' if self.regular else 'joint'} episodes"

    def asked(self, name: str, method: Method, dtype: torch.dtype) -> Asked:
        """E episodes for a method, and after them the same ones with changed inputs, ``TIMES`` over."""
        labels = torch.arange(N).repeat_interleave(self.shots).expand(E, -1)
        hidden = torch.zeros(E, K, dtype=torch.bool)
        if not self.regular:
            hidden[::2] = _noise(f"hidden {self.said}", len(hidden[::2]), K).argsort(1) < 3
        means = _noise(f"means {self.said}", E, N, D)
        x, q = (
            means.gather(1, rows[..., None].expand(-1, -1, D)) + 0.7 * _noise(f"{what} {self.said}", *rows.shape, D)
            for what, rows in (("support", labels), ("query", torch.arange(QUERIES).expand(E, -1) % N))
        )
        logits = [F.linear(rows, 0.3 * _noise("weight", K, D), 0.1 * _noise("bias", K)) for rows in (x, q)]
        inputs = [torch.cat([_changed(rows, dtype, i) for i in range(1 + TIMES)]) for rows in (x, q, *logits)]
        if self.regular:
            inputs[2:] = [torch.full_like(rows, -torch.inf) for rows in inputs[2:]]
        x, q, *logits = (rows.to(dtype) for rows in inputs)
        labels, hidden = labels.repeat(1 + TIMES, 1), hidden.repeat(1 + TIMES, 1)
        masked = torch.ones_like(hidden) if self.regular else hidden
        return Asked(name, method, Support(x, labels, hidden, logits[0]), Query(q, logits[1]), masked)


def _changed(rows: Tensor, dtype: torch.dtype, change: int) -> Tensor:
    """Changed a little in one of ``TIMES`` ways; as they are for 0."""
    return rows * (1 + CHANGED[dtype] * _noise(f"change {change}", *rows.shape)) if change else rows


def _fresh(method: type[Method], options: Mapping[str, Any], dtype: torch.dtype) -> Method:
    weight, bias = 0.3 * _noise("weight", K, D), 0.1 * _noise("bias", K)
    torch.default_generator.manual_seed(0)  # the CPU's alone: fork_rng gives no other one back
    prototypes, within, scale = (
        _noise("prototypes", K, D),
        _noise("within", 3 * D, D),
        1.0 if method.head == "linear" else 9.0,
    )
    base = Base(weight, bias, prototypes, scale, torch.full((K,), 100.0), within.T @ within / len(within))
    return make_method(method, base.to(dtype=dtype), N, options).to(dtype)


def _initial(method: type[Method], options: Mapping[str, Any]) -> dict[str, Numbers]:
    found = _of_parameters({name: p.detach() for name, p in _fresh(method, options, torch.float32).named_parameters()})
    if not found[0]:
        return {}
    return {"initial values of the parameters": _numbers(*found, [0.0] * len(found[1]), INITIAL)}


def _filled(method: type[Method], options: Mapping[str, Any], dtype: torch.dtype) -> Method:
    """With parameters of the size of their initial values, none of them zero or equal to its neighbours."""
    drawn, made = dict(_fresh(method, options, torch.float32).named_parameters()), _fresh(method, options, dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            first = drawn[name].double()
            # Two digits of mean and deviation alone, for the draws themselves differ in their last digits by machine.
            mean, deviation = (float(f"{float(x):.2g}") for x in (first.mean(), first.std(correction=0)))
            size = max(deviation, 0.1 * abs(mean), 0.01)
            parameter.copy_(mean + size * _noise(f"parameter {name}", *first.shape))
    return made


def _measured(
    name: str, method: type[Method], options: Mapping[str, Any], shots: int, dtype: torch.dtype
) -> dict[str, Numbers]:
    made, numbers = _filled(method, options, dtype), {}
    for count, regular in dict.fromkeys([(1, False), (5, False), (shots, False), (5, True)]):
        case = _Case(count, regular)
        for what, (first, *others) in _looks(case.asked(name, made.eval(), dtype), f"{case.said}, {NAMES[dtype]}"):
            values, sizes = first
            each, spread = len(values) // len(sizes), [0.0] * len(sizes)
            for other, _ in others:
                for i, (a, b) in enumerate(zip(values, other, strict=True)):
                    spread[i // each] = max(spread[i // each], abs(a - b))
            if "gradient" in what:  # tensors of one size move alike, and some happen to have moved little
                share = max(moved / max(size, 1e-300) for moved, size in zip(spread, sizes, strict=True))
                spread = [share * size for size in sizes]
            few = len(sizes) // 4 if dtype == torch.float32 and what.startswith("logits") else 0
            numbers[what] = _numbers(values, sizes, spread, ROUNDING[dtype], few)
    return numbers


def _numbers(values: list[float], sizes: list[float], spread: list[float], share: float, few: int = 0) -> Numbers:
    largest = max(sizes)
    pairs = zip(spread, sizes, strict=True)
    within = [max(SPREADS * moved, share * max(size, 1e-3 * largest)) for moved, size in pairs]
    if not all(math.isfinite(value) for value in (*values, *within)):
        raise UserError("numbers that are not finite")
    return Numbers([float(f"{value:.9g}") for value in values], [float(f"{value:.2g}") for value in within], few)


def _looks(given: Asked, of: str) -> Iterator[tuple[str, list[Found]]]:
    """All that is looked at, in words; found for the episodes as they are and then for each change of them."""
    changes = [range(E * i, E * (i + 1)) for i in range(1 + TIMES)]
    if given.query.features.dtype == torch.float64:
        looks = [_without_search(_some(given, at[:FEW])) for at in changes]
        yield from ((f"{what} at given fast weights of {of}", [look[what] for look in looks]) for what in looks[0])
    with torch.no_grad():
        logits = given.logits()
        yield f"logits of {of}, many at once", [_of_logits(logits[at[0] : at[-1] + 1]) for at in changes]
        if not of.startswith("5-shot joint"):
            return
        yield f"logits of {of}, one alone", [_of_logits(_some(given, at[:1]).logits()) for at in changes]
    for count, said in ((E, "many at once"), (1, "one alone")):
        if (found := [_gradient(_some(given, at[:count])) for at in changes])[0]:
            yield f"meta-gradient of {of}, {said}", [_of_parameters(gradient) for gradient in found]


def _some(given: Asked, at: range) -> Asked:
    """The episodes in a range."""
    rows, s, q = slice(at.start, at.stop), given.support, given.query
    support = Support(s.features[rows], s.labels[rows], s.hidden[rows], s.base_logits[rows])
    return replace(
        given, support=support, query=Query(q.features[rows], q.base_logits[rows]), masked=given.masked[rows]
    )


def _gradient(given: Asked) -> dict[str, Tensor]:
    """Of a loss in the parameters, in training mode; empty where there are none."""
    if not any(parameter.requires_grad for parameter in given.method.parameters()):
        return {}
    torch.default_generator.manual_seed(0)  # for dropout
    return _loss_of(given, copy.deepcopy(given.method).train())[1]


def _loss_of(given: Asked, method: Method) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of their cross-entropy in each parameter, one novel class after the other as labels."""
    parameters = {name: p for name, p in method.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        logits = given.logits(method=method)  # [E, Q, K + N]
        if not parameters or not logits.requires_grad:  # the latter is refused in training
            return logits.detach(), {name: torch.zeros_like(p) for name, p in parameters.items()}
        labels = K + torch.arange(QUERIES).expand(len(logits), -1) % N
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return logits.detach(), dict(zip(parameters, found, strict=True))


class _AtGivenWeights:
    """In place of a solver: goes to fast weights that depend on their shape alone, and notes the objective there."""

    def __init__(self, solver: Solver, seen: list[tuple[Tensor, list[Tensor]]]) -> None:
        self.solver, self.seen = solver, seen

    def run(self, objective: Objective, v0: Tree, args: Tree) -> Outcome:
        like = self.shaped(objective, v0, args)
        parts = [0.1 * _noise(f"fast weights {i}", *part.shape).to(part) for i, part in enumerate(tensors(like))]
        v, count = rebuild(like, parts), len(parts[0])
        slope = [part.detach() for part in tensors(objective.gradient(v, args))]
        self.seen.append((objective.value(v, args).detach(), slope))
        return measured(objective, v, args, torch.ones(count, dtype=torch.bool), torch.zeros(count))

    def shaped(self, objective: Objective, v0: Tree, args: Tree) -> Tree:
        """Some fast weights, for their shapes: those of the start, or of what is found where there is none."""
        if v0 is None and (space_of := getattr(objective, "space", None)) is not None:
            space = space_of(None, args)
            return space.expand(space.initial())
        return self.solver.run(objective, v0, args).v if v0 is None else v0


def _without_search(given: Asked) -> dict[str, Found]:
    """What a method that solves computes at given fast weights; empty for another one, or one with its own solver."""
    seen: list[tuple[Tensor, list[Tensor]]] = []
    with solvers_replaced(lambda solver: _AtGivenWeights(solver, seen)):
        logits, hyper = _loss_of(given, given.method)
    if not seen:
        return {}
    values = [float(value) for each, _ in seen for value in each]
    slopes = {f"{i}.{j}": part for i, (_, slope) in enumerate(seen) for j, part in enumerate(slope)}
    found = {
        "objective": (values, [abs(value) for value in values]),
        "gradient of the objective": _of_parameters(slopes),
        "logits": _of_logits(logits),
    }
    return found | ({"hypergradient": _of_parameters(hyper)} if hyper else {})


def _of_logits(logits: Tensor) -> Found:
    """Two numbers an episode for logits [E, Q, C], whatever is added to all logits of a query."""
    logits = logits.detach().double()
    there = torch.isfinite(logits)
    mean = logits.masked_fill(~there, 0.0).sum(-1, keepdim=True) / there.sum(-1, keepdim=True)
    centred = (logits - mean).masked_fill(~there, OUT_OF_PLAY).flatten(1)  # [E, Q * C]
    size = (logits - mean).masked_fill(~there, 0.0).flatten(1).square().mean(1).sqrt()  # [E]
    values = centred @ _signs("logits", centred.shape[1]).T / math.sqrt(centred.shape[1])  # [E, 2]
    return values.flatten().tolist(), size.tolist()


def _of_parameters(found: Mapping[str, Tensor]) -> Found:
    """Two numbers for each tensor, or, where there are many, for each group of neighbours."""
    names = list(found)
    each = max(1, math.ceil(len(names) / MOST))
    values, sizes = [], []
    for start in range(0, len(names), each):
        group = names[start : start + each]
        rows = [found[name].detach().double().flatten() for name in group]
        sums: Callable[[int], float] = lambda i: sum(  # noqa: E731
            float(_signs(name, len(row))[i] @ row)
            for name, row in zip(group, rows, strict=True)  # noqa: B023
        )
        values += [sums(0), sums(1)]
        sizes.append(math.sqrt(sum(float(row.square().sum()) for row in rows)))
    return values, sizes
