"""A pretend accelerator: its tensors report another device, compute on the CPU, and count what a real one is asked.

    with accelerator() as counts:
        x = torch.randn(3, 4).to(DEVICE)
        (x @ x.T).sum().item()
    assert counts.launches.total() == 2 and counts.waits.total() == 1

The device is called ``meta``, whose autograd needs no driver. Within :func:`accelerator` the suite's own table of
accelerators has it, so that ``--device auto`` finds it as it finds a GPU.

What it counts, as PyTorch does on CUDA (``torch.cuda.set_sync_debug_mode`` names the same waits):

launches: operations that make or change numbers; not views, not memory that is only reserved, not copies to and fro.
waits: the program reads what the device has computed, or the sizes of results depend on it: ``item``, ``bool``,
    ``nonzero``, boolean indices, ``unique``, copies to the CPU, ``linalg`` with checks; and copies to the device
    without ``non_blocking``, which end when the device has come to them.
bytes: that cross, each way.

What it refuses, with the operation's name: CPU tensors of one or more dimensions beside its own (CUDA takes some as
indices, and waits), ``.numpy()``, ``np.asarray``, operations that change a tensor's shape in place, and anything on it
outside of ``accelerator()``.

Autocast has no place for such a device: it says that it lacks bf16. Random numbers are the CPU's, so that dropout is
the same as there, and ``fork_rng`` needs to know nothing of it; which device's generator is passed is not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from pretend_counts import Counts, Plan, place, plan_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ifsl_bench.backbones import device as devices

DEVICE = torch.device("meta")
aten = torch.ops.aten


class Refused(RuntimeError):
    """A step that accelerators refuse."""


class Pretend(Tensor):
    """A tensor on the pretend accelerator; ``inner`` has its numbers, on the CPU."""

    inner: Tensor
    is_meta = False  # torch leaves numbers of meta tensors out; these have some

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretend:
        tensor = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        tensor.inner = inner
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Refused(f"{func}: the accelerator is gone, its tensors live within accelerator() alone")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Pretend:
        return Pretend(parts["inner"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretend(shape={list(self.shape)}, dtype={self.dtype})"

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
        dtype = dtype or (None if isinstance(data, Tensor) else self.dtype)
        return torch.tensor(data, dtype=dtype, device=device or DEVICE, **more)

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(at, Pretend) and at.dtype == torch.bool and isinstance(value, (bool, int, float)):
            self.masked_fill_(at.reshape(*at.shape, *(1,) * (self.dim() - at.dim())), value)  # as on CUDA
        else:
            super().__setitem__(at, value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("numpy: can't convert an accelerator's tensor, use Tensor.cpu() to copy it to the host first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("np.asarray: can't convert an accelerator's tensor, use Tensor.cpu() to copy it first")


class _Generator(torch.Generator):
    """A generator on the accelerator is one of the CPU."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return super().__new__(cls, "cpu" if torch.device(device).type == DEVICE.type else device)


def _leaves(values: Iterable[Any]) -> list[Any]:
    """Flattens an operation's arguments, which nest in lists alone."""
    leaves: list[Any] = []
    for x in values:
        leaves.extend(_leaves(x)) if isinstance(x, (list, tuple)) else leaves.append(x)
    return leaves


def _inner(x: Any) -> Any:
    if isinstance(x, Pretend):
        return x.inner
    if isinstance(x, (list, tuple)):
        return [_inner(y) for y in x]
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _outer(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pretend(x)
    return type(x)(_outer(y) for y in x) if isinstance(x, (list, tuple)) else x


class _Dispatch(TorchDispatchMode):
    """Takes every operation on the way to its kernel, runs those of the accelerator on the CPU, and counts them."""

    def __init__(self, counts: Counts, places: bool) -> None:
        super().__init__()
        self.counts, self.places = counts, places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("device")
        names_device = target is not None and torch.device(target).type == DEVICE.type
        if not names_device and Pretend not in types:
            return func(*args, **kwargs)  # the CPU's own business
        plan = plan_of(func)
        if plan.composite:  # which inference mode hands over whole
            with self:
                return func.decompose(*args, **kwargs)
        if plan.copies:
            return self._copy(func, plan, args, kwargs)
        for x in _leaves((*args, *kwargs.values())):
            if isinstance(x, Tensor) and not isinstance(x, Pretend) and x.dim():
                raise Refused(f"{func}: a CPU tensor of shape {list(x.shape)} beside those of the accelerator")
        result = func(*map(_inner, args), **{k: _inner(x) for k, x in kwargs.items() if k != "pin_memory"})
        if target is not None and not names_device:  # empty_like(x, device="cpu"), of which only the shape is taken
            return result
        self._count(plan, args, kwargs)
        return self._wrapped(func, plan, args, kwargs, result)

    def _count(self, plan: Plan, args: Any = (), kwargs: Any = None) -> None:
        counts = self.counts
        by_mask = plan.indexes and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if plan.waits or by_mask or (plan.repeats and kwargs.get("output_size") is None):
            counts.waits[f"{plan.name} at {place()}"] += 1
            counts.bytes_down += 8  # a number, or how many there are
        if not plan.launches or plan.reads:
            return
        counts.launches[plan.name] += 1
        if self.places:
            counts.launched_at[place()] += 1

    @staticmethod
    def _wrapped(func: Any, plan: Plan, args: Any, kwargs: Any, result: Any) -> Any:
        """Results as the accelerator's; what was changed in place as the tensors that were given."""
        if not plan.changed:
            return _outer(result)
        targets = [kwargs.get(name) if i is None else args[i] if i < len(args) else None for name, i in plan.changed]
        for x in _leaves(targets):
            if isinstance(x, Pretend) and x.shape != x.inner.shape:
                raise Refused(f"{func}: changes the shape of a tensor in place")
        changed, iterator = plan.returns_changed, iter(targets)
        if len(changed) > 1:
            return tuple(next(iterator) if ours else _outer(x) for ours, x in zip(changed, result, strict=True))
        return (targets[0] if changed[0] else _outer(result)) if changed else None

    def _copy(self, func: Any, plan: Plan, args: Any, kwargs: Any) -> Any:
        """``copy_`` and ``to``, the two that may cross."""
        source = args[1] if plan.packet is aten.copy_ else args[0]
        from_ours, number = isinstance(source, Pretend), False
        if plan.packet is aten.copy_:
            target, to_ours = args[0], isinstance(args[0], Pretend)
            waits_not = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            _inner(target).copy_(_inner(source))
            number = not from_ours and not source.dim() and target.dim()  # handed over with the launch
        else:
            to = kwargs.get("device")
            to_ours = from_ours if to is None else torch.device(to).type == DEVICE.type
            waits_not = kwargs.get("non_blocking", False)
            target = func(_inner(source), **{k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")})
            target = Pretend(target) if to_ours else target
        if to_ours and (from_ours or number):
            self._count(plan)
        elif to_ours:
            self.counts.uploads[place()] += 1
            self.counts.bytes_up += source.nbytes
            if not waits_not:
                self.counts.waits[f"{plan.name} to the device at {place()}"] += 1
        elif from_ours:
            self.counts.bytes_down += source.nbytes
            self.counts.waits[f"{plan.name} to the CPU at {place()}"] += 1
        return target


def _maker(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor(..., device=...)`` and its like build their tensor where no dispatch sees it."""

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != DEVICE.type:
            return build(data, *args, device=device, **kwargs)
        grad = kwargs.pop("requires_grad", False)
        tensor = data if isinstance(data, Pretend) else build(data, *args, device="cpu", **kwargs)
        return tensor.to(DEVICE).requires_grad_(grad)

    return make


class PretendAccelerator(devices.Accelerator):
    """Answers what the suite asks an accelerator."""

    def __init__(self, memory: int) -> None:
        self.memory = memory

    def count(self) -> int:
        return 1

    def name(self, device: torch.device) -> str:
        return "a pretend accelerator"

    def has_bf16(self, device: torch.device) -> bool:
        return False

    def free_memory(self, device: torch.device) -> int:
        return self.memory


def _with_ours(supported: Callable[[], list[str]]) -> Callable[[], list[str]]:
    return lambda: [*supported(), DEVICE.type]


@contextmanager
def accelerator(memory: int = 1 << 30, places: bool = False) -> Iterator[Counts]:
    """A machine with one accelerator, for as long as the context lasts; yields what is asked of it.

    Args:
        memory: bytes that are free on it.
        places: whether to note where each launch is made, which takes time.
    """
    counts = Counts()
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith(("torch.optim", "torch.utils._foreach_utils")):
                for name in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"):
                    if name in vars(module):
                        stack.enter_context(mock.patch.object(module, name, _with_ours(vars(module)[name])))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        ours = {DEVICE.type: PretendAccelerator(memory)}
        stack.enter_context(mock.patch.dict(devices.ACCELERATORS, ours))
        for name in ("tensor", "as_tensor", "asarray"):
            stack.enter_context(mock.patch.object(torch, name, _maker(getattr(torch, name))))
        stack.enter_context(_Dispatch(counts, places))
        yield counts
