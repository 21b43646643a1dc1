"""A pretend accelerator: tensors that report another device, compute on the CPU, and count what a real one would wait for.

    with accelerator() as counts:
        x = torch.randn(3, 4).to(DEVICE)
        (x @ x.T).sum().item()
    assert counts.launches.total() == 2 and counts.waits.total() == 1

The device is called ``meta``, whose autograd needs no driver. Within :func:`accelerator` the suite's own table of
accelerators has it, so that ``--device auto`` finds it as it finds a GPU.

What it counts, as PyTorch does on CUDA (``torch.cuda.set_sync_debug_mode`` names the same waits):

launches: operations that make or change numbers; not views, not memory that is only reserved, not copies to and fro.
waits: the program reads what the device has computed, or the sizes of results depend on it: ``item``, ``bool``,
    ``nonzero``, boolean indices, ``unique``, copies to the CPU, ``linalg`` with checks; and copies to the device without
    ``non_blocking``, which end when the device has come to them.
bytes: that cross, each way; and those that launches read and write. flops: of matrix products and convolutions.

What it refuses, with the operation's name: CPU tensors of one or more dimensions beside its own (CUDA takes some as
indices, and waits), generators of the CPU, ``.numpy()``, ``np.asarray``, operations that change a tensor's shape in
place, and anything on it outside of ``accelerator()``.

Autocast has no place for such a device: it says that it lacks bf16. Random numbers are the CPU's, so that dropout is the
same as there; ``fork_rng`` needs to know nothing of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry

from ifsl_bench.backbone import device as devices

DEVICE = torch.device("meta")
ROOT = Path(__file__).parents[2]
OURS = (str(ROOT / "ifsl_bench"), str(ROOT / "methods"))

aten = torch.ops.aten
FREE = {  # memory is reserved or shared, nothing is computed
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.empty_permuted,
    aten._unsafe_view, aten._reshape_alias, aten.lift, aten.lift_fresh, aten.set_, aten.resize_,
    aten.is_same_size, aten.sym_size, aten.sym_numel, aten.sym_stride, aten.record_stream,
}  # fmt: skip
WAITS = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.unique_dim,
    aten._unique, aten._unique2, aten.unique_consecutive, aten.unique_dim_consecutive, aten.bincount, aten.histc,
    aten._linalg_check_errors, aten.linalg_lstsq, aten._linalg_eigh, aten._linalg_eigvals,
    aten.linalg_eig, aten._linalg_svd,
}  # fmt: skip


class Refused(RuntimeError):
    """What an accelerator would not do."""


@dataclass
class Counts:
    """What was asked of the accelerator; places are ``file:line`` of the suite's own code.

    Attributes:
        launches: name of the operation -> how many.
        launched_at: place -> how many.
        waits: "operation at place" -> how many.
        uploads, downloads: place -> copies to and from the device.
        bytes_up, bytes_down: that crossed.
        traffic: bytes that launches read and wrote.
        flops: of matrix products and convolutions.
    """

    launches: Counter[str] = field(default_factory=Counter)
    launched_at: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    downloads: Counter[str] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0
    traffic: int = 0
    flops: int = 0

    def clear(self) -> None:
        """Begins anew."""
        self.__init__()  # type: ignore[misc]

    @property
    def total(self) -> tuple[int, int]:
        """Launches and waits."""
        return self.launches.total(), self.waits.total()


def place() -> str:
    """The innermost line of the suite's own code that is being run, else of the caller's."""
    frame = sys._getframe(1)
    outer = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
        if not outer and name.startswith(str(ROOT)) and name != __file__:
            outer = f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return outer


class Pretend(Tensor):
    """A tensor on the pretend accelerator; ``inner`` has its numbers, on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretend:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

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

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("numpy: can't convert an accelerator's tensor, use Tensor.cpu() to copy it to the host first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("np.asarray: can't convert an accelerator's tensor, use Tensor.cpu() to copy it first")


class PretendGenerator(torch.Generator):
    """A generator on the pretend accelerator; its numbers are those of a CPU's."""


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return super().__new__(PretendGenerator if torch.device(device).type == DEVICE.type else cls)


def _is_pretend(x: Any) -> bool:
    return isinstance(x, Pretend)


def _size(x: Tensor) -> int:
    """Bytes of memory that a tensor's elements take; of an expanded one, those that are there."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * x.element_size()


class _Dispatch(TorchDispatchMode):
    """Takes every operation on the way to its kernel, runs those of the accelerator on the CPU, and counts them."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        ours = [x for x in flat if isinstance(x, Pretend)]
        packet, target = func.overloadpacket, kwargs.get("device")
        if packet is aten._to_copy or packet is aten.copy_:
            return self._copy(func, args, kwargs)
        here = torch.device(target).type == DEVICE.type if target is not None else bool(ours)
        if not ours and not here:
            return func(*args, **kwargs)
        self._check(func, flat)
        if not here:  # such as empty_like(x, device="cpu")
            if packet not in FREE:
                raise Refused(f"{func}: makes a CPU tensor from one of the accelerator's")
        inner_args, inner_kwargs = tree_unflatten(
            [x.inner if isinstance(x, Pretend) else torch.device("cpu") if isinstance(x, torch.device) else x
             for x in flat], spec,
        )  # fmt: skip
        inner_kwargs.pop("pin_memory", None)
        found = func(*inner_args, **inner_kwargs)
        if not here:
            return found
        self._count(func, flat, inner_args, inner_kwargs, found)
        return self._wrapped(func, args, kwargs, found)

    @staticmethod
    def _check(func: Any, flat: list[Any]) -> None:
        for x in flat:
            if isinstance(x, Tensor) and not isinstance(x, Pretend) and x.dim():
                raise Refused(f"{func}: a CPU tensor of shape {list(x.shape)} beside those of the accelerator")
            if isinstance(x, torch.Generator) and not isinstance(x, PretendGenerator):
                raise Refused(f"{func}: a generator of the CPU for numbers on the accelerator")

    def _count(self, func: Any, flat: list[Any], args: Any, kwargs: Any, found: Any) -> None:
        counts, packet = self.counts, func.overloadpacket
        if packet in WAITS or _indexes_by_mask(packet, args) or _sized_by_numbers(func, args, kwargs):
            counts.waits[f"{packet.__name__} at {place()}"] += 1
            if packet in (aten._local_scalar_dense, aten.is_nonzero, aten.equal):
                counts.bytes_down += 8
                if packet is not aten.equal:
                    return
        returns = func._schema.returns
        if packet in FREE or any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return
        counts.launches[packet.__name__] += 1
        counts.launched_at[place()] += 1
        outputs = [x for x in tree_flatten(found)[0] if isinstance(x, Tensor)]
        counts.traffic += sum(_size(x) for x in flat if isinstance(x, Pretend)) + sum(map(_size, outputs))
        if packet in flop_registry:
            counts.flops += flop_registry[packet](*args, **kwargs, out_val=found)

    @staticmethod
    def _wrapped(func: Any, args: Any, kwargs: Any, found: Any) -> Any:
        """Results as the accelerator's; what was changed in place as the tensors that were given."""
        schema, given = func._schema, []
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name) if argument.kwarg_only else (args[i] if i < len(args) else None)
                for x in tree_flatten(value)[0]:
                    if isinstance(x, Pretend) and (x.shape != x.inner.shape or x.stride() != x.inner.stride()):
                        raise Refused(f"{func}: changes the shape of a tensor in place")
                given.append(value)
        results = found if isinstance(found, (tuple, list)) else (found,)
        written = iter(given)
        made = [
            next(written) if r.alias_info is not None and r.alias_info.is_write
            else tree_map(lambda x: Pretend(x) if isinstance(x, Tensor) else x, value)
            for r, value in zip(schema.returns, results, strict=False)
        ] if len(schema.returns) == len(results) else [
            tree_map(lambda x: Pretend(x) if isinstance(x, Tensor) else x, value) for value in results
        ]  # fmt: skip
        if isinstance(found, tuple):
            return tuple(made)
        return made if isinstance(found, list) else made[0] if made else None

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``to`` and ``copy_``, the two that may cross."""
        counts = self.counts
        if func.overloadpacket is aten.copy_:
            target, source = args[0], args[1]
            waits_not = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            up, down = _is_pretend(target) and not _is_pretend(source), _is_pretend(source) and not _is_pretend(target)
            if up and source.dim() == 0 and target.dim():
                up = False  # a number, handed over with the launch
            if not up and not down:
                if _is_pretend(target):
                    inner = source.inner if _is_pretend(source) else source
                    target.inner.copy_(inner)
                    self._count(func, [target, source], (target.inner, inner), {}, target.inner)
                    return target
                return func(*args, **kwargs)
            where, there = (target.inner if up else target), (source.inner if down else source)
            where.copy_(there)
            self._crossed(up, there, bool(waits_not), "copy_")
            return target
        source, to = args[0], kwargs.get("device")
        to_ours = torch.device(to).type == DEVICE.type if to is not None else _is_pretend(source)
        inner = source.inner if _is_pretend(source) else source
        rest = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        found = func(inner, **rest)
        if _is_pretend(source) and to_ours:
            self._count(func, [source], (inner,), rest, found)
        elif _is_pretend(source) or to_ours:
            self._crossed(to_ours, inner if to_ours else found, bool(rest.get("non_blocking")), "to")
        else:
            return func(*args, **kwargs)
        return Pretend(found) if to_ours else found

    def _crossed(self, up: bool, x: Tensor, non_blocking: bool, name: str) -> None:
        counts, at = self.counts, place()
        (counts.uploads if up else counts.downloads)[at] += 1
        if up:
            counts.bytes_up += x.numel() * x.element_size()
        else:
            counts.bytes_down += x.numel() * x.element_size()
        if not up or not non_blocking:
            counts.waits[f"{name} {'the device' if up else 'the CPU'} at {at}"] += 1


def _indexes_by_mask(packet: Any, args: Any) -> bool:
    """Whether boolean indices are made into places."""
    if packet not in (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_):
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _sized_by_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    return func.overloadpacket is aten.repeat_interleave and kwargs.get("output_size") is None


class _Functions(TorchFunctionMode):
    """``torch.tensor(..., device=...)`` and its like, which build their tensor where no dispatch sees it."""

    MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.MAKERS:
            data, to = args[0], kwargs.get("device")
            if to is not None and torch.device(to).type == DEVICE.type:
                grad = kwargs.pop("requires_grad", False)
                made = func(*args, **{**kwargs, "device": "cpu"}) if not _is_pretend(data) else data
                return made.to(DEVICE).requires_grad_(grad)
        elif func is Tensor.new_tensor and _is_pretend(args[0]) and kwargs.get("device") is None:
            like, data = args[0], args[1]
            dtype = kwargs.get("dtype") or (data.dtype if isinstance(data, Tensor) else like.dtype)
            return torch.tensor(data, dtype=dtype).to(DEVICE)
        elif func is Tensor.__setitem__ and _is_pretend(args[0]) and isinstance(args[2], (bool, int, float)):
            x, mask, value = args  # a number put where a mask is true is a fill, as on CUDA
            if _is_pretend(mask) and mask.dtype == torch.bool and mask.dim():
                x.masked_fill_(mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim())), value)
                return None
        return func(*args, **kwargs)


class PretendAccelerator(devices.Accelerator):
    """What the suite asks a kind of accelerator."""

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
def accelerator(memory: int = 1 << 30) -> Iterator[Counts]:
    """A machine with one accelerator, for as long as the context lasts; yields what is asked of it.

    Args:
        memory: bytes that are free on it.
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
        stack.enter_context(_Functions())
        stack.enter_context(_Dispatch(counts))
        yield counts
