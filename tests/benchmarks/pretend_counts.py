"""The counts of a pretend accelerator, and facts on PyTorch's operations for them."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

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


@dataclass
class Counts:
    """The work asked of the accelerator; places are ``file:line`` of the suite's own code.

    Attributes:
        launches: name of the operation -> how many.
        launched_at: place -> how many, where they are asked for.
        waits: "operation at place" -> how many.
        uploads: place -> copies to the device.
        bytes_up, bytes_down: that crossed.
    """

    launches: Counter[str] = field(default_factory=Counter)
    launched_at: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0

    def clear(self) -> None:
        """Begins anew."""
        self.__init__()  # type: ignore[misc]

    @property
    def total(self) -> tuple[int, int]:
        """Launches and waits."""
        return self.launches.total(), self.waits.total()


@lru_cache
def _of_the_suite(file: str) -> tuple[bool, str]:
    """Tells if a file is the suite's own code, and its path in the repository; "" elsewhere."""
    path = Path(file)
    inside = path.is_relative_to(ROOT) and "site-packages" not in path.parts and not path.name.startswith("pretend")
    return file.startswith(OURS), str(path.relative_to(ROOT)) if inside else ""


def place() -> str:
    """The innermost line of the suite's own code that is being run, else of the caller's."""
    frame: Any = sys._getframe(1)
    outer = ""
    while frame is not None:
        ours, path = _of_the_suite(frame.f_code.co_filename)
        if path and (ours or not outer):
            outer = f"{path}:{frame.f_lineno}"
        if ours:
            break
        frame = frame.f_back
    return outer


class Plan:
    """An operation's traits, by its schema."""

    def __init__(self, func: Any) -> None:
        packet, schema = func.overloadpacket, func._schema
        writes = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
        views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
        self.name, self.packet = packet.__name__, packet
        self.launches = packet not in FREE and not any(views)
        self.reads = packet in (aten._local_scalar_dense, aten.is_nonzero)
        self.waits = packet in WAITS
        self.indexes = packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
        self.repeats = packet is aten.repeat_interleave
        self.copies = packet in (aten.copy_, aten._to_copy)
        self.changed = [
            (argument.name, None if argument.kwarg_only else i)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.returns_changed = writes
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        self.composite = has(func.name(), "CompositeImplicitAutograd")


plan_of = lru_cache(maxsize=None)(Plan)
