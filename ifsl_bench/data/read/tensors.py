"""Tensors of .pt and .safetensors files, read without torch and without running anything; they stay in the file.

torch.load(..., weights_only=True) could be made to run code before torch 2.6 (CVE-2025-32434), and the safetensors
library reads a file whole or by its path. Here a file may lie in an archive, be large, and come from anybody.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.limits import TENSOR_HEADER
from ifsl_bench.data.read.archive import what_is
from ifsl_bench.data.read.file_tree import some
from ifsl_bench.data.read.stored_array import BAD_HEADER, BROKEN, Span, StoredArray
from ifsl_bench.data.read.unpickle import load
from ifsl_bench.data.read.unpickle_machine import Machine, Refused, described
from ifsl_bench.data.read.zipped import BAD_LIST, ZipMembers

BRAIN = "bfloat16"  # which NumPy lacks: the upper half of a float32
_TORCH = {"Double": "f8", "Float": "f4", "Half": "f2", "BFloat16": BRAIN, "Long": "i8", "Int": "i4", "Short": "i2",
          "Char": "i1", "Byte": "u1", "Bool": "?"}  # fmt: skip
_SAFETENSORS = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": BRAIN, "I64": "i8", "I32": "i4", "I16": "i2",
                "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?"}  # fmt: skip


@dataclass(frozen=True)
class Values:
    """An array or a tensor that is still in its file.

    Attributes:
        kind: NumPy's letter for its type: f, i, u, U, ...
        name: of its type.
        shape: its shape.
        read: gives it as an array; raises :class:`UserError` where the file is damaged.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def __str__(self) -> str:
        return f"{self.name}{list(self.shape)}"


def of_array(array: StoredArray) -> Values:
    """Those of a NumPy array."""
    return Values(array.dtype.kind, str(array.dtype), array.shape, array.read)


def _brains(read: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    return lambda: (read().astype(np.uint32) << 16).view(np.float32)


# -- .safetensors


def safetensors(file: BinaryIO, where: str) -> dict[str, Values]:
    """The tensors of a .safetensors file, by name.

    Args:
        file: able to seek; it stays open as long as they are used.
        where: how errors call it.

    Raises:
        UserError: it is none, or a damaged one.
    """
    damaged = f"{where} is no readable .safetensors file: "
    try:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        begin = head[8:] or file.read(1)
        if begin != b"{":
            raise UserError(f"{damaged}it is {what_is(head + begin + file.read(500))}; download or copy it again")
        TENSOR_HEADER.check(size, f"the header of {where}")
        said = json.loads(begin + file.read(size - 1))
        return {
            name: _safetensor(file, where, 8 + size, entry) for name, entry in said.items() if name != "__metadata__"
        }
    except (*BROKEN, *BAD_HEADER, AttributeError) as error:
        raise UserError(
            f"{damaged}it is damaged ({type(error).__name__}: {str(error)[:100]}); download or copy it again"
        ) from error


def _safetensor(file: BinaryIO, where: str, start: int, entry: Mapping[str, Any]) -> Values:
    kind, shape, (first, end) = _SAFETENSORS[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if not (type(first) is int and type(end) is int and 0 <= first <= end):
        raise ValueError("a tensor that lies nowhere")
    array = StoredArray(file, where, {})
    dtype = np.dtype("<u2" if kind == BRAIN else kind).newbyteorder("<")
    array.define(dtype, shape, "C", Span(start + first, end - first, "bytes"))
    return Values("f", BRAIN, shape, _brains(array.read)) if kind == BRAIN else of_array(array)


# -- .pt


@dataclass(frozen=True)
class _Storage:
    """Where a tensor's numbers lie: ``count`` numbers of a type in the member ``key``."""

    kind: str
    key: str
    count: int


@dataclass(frozen=True)
class _Tensor:
    """A part of a storage: numbers from ``offset`` on, with a stride for each axis."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Kind:
    """The name of a type of storage."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


_REBUILD, _PARAMETER, _ORDERED = object(), object(), object()


class _TorchMachine(Machine):
    """Knows tensors besides."""

    def named(self, module: str, attribute: str) -> None:
        full = f"{module}.{attribute}"
        if full == "torch._utils._rebuild_tensor_v2":
            self.stack.append(_REBUILD)
        elif full == "torch._utils._rebuild_parameter":
            self.stack.append(_PARAMETER)
        elif full == "collections.OrderedDict":
            self.stack.append(_ORDERED)
        elif module == "torch" and attribute.removesuffix("Storage") in _TORCH and attribute.endswith("Storage"):
            self.stack.append(_Kind(_TORCH[attribute.removesuffix("Storage")]))
        else:
            super().named(module, attribute)

    def reduce(self) -> None:
        args, function = self.stack[-1], self.stack[-2]
        if function is _REBUILD:
            storage, offset, shape, strides = args[:4]
            self.stack[-2:] = [_tensor(storage, offset, shape, strides)]
        elif function is _PARAMETER and args and isinstance(args[0], _Tensor):  # and whether it wants a gradient
            self.stack[-2:] = [args[0]]
        elif function is _ORDERED and args == ():
            self.stack[-2:] = [{}]
        else:
            super().reduce()

    def persistent(self) -> None:
        what, kind, key, _, count = self.stack.pop()
        if not (what == "storage" and isinstance(kind, _Kind) and isinstance(key, str) and type(count) is int):
            raise Refused("a reference to something outside the file")
        self.stack.append(_Storage(kind.kind, key, count))


def _tensor(storage: object, offset: object, shape: Any, strides: Any) -> _Tensor:
    """A tensor that lies in its storage.

    Raises:
        ValueError: it does not, or has more numbers than that, as an expanded one has.
    """
    if not (isinstance(storage, _Storage) and isinstance(shape, tuple) and isinstance(strides, tuple)):
        raise ValueError("a tensor without storage or shape")
    numbers = (offset, *shape, *strides)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) or len(shape) != len(strides) or len(shape) > 32:
        raise ValueError("a tensor whose shape or strides are no whole numbers")
    count, first = math.prod(shape), cast(int, offset)
    last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if count and (count > storage.count or last >= storage.count):
        raise ValueError(f"a tensor {list(shape)} in a storage of {storage.count:,}")
    return _Tensor(storage, first, shape, strides)


def torch_file(file: BinaryIO, where: str) -> dict[str, Values | list[Any]]:
    """The tensors, arrays and lists of a dict that torch.save has written, by name.

    Args:
        file: able to seek; it stays open as long as they are used.
        where: how errors call it.

    Raises:
        UserError: it is none, a damaged one, or holds anything that torch.load(..., weights_only=True) would refuse.
    """
    damaged = f"{where} is no readable .pt file: "
    try:
        head = file.read(512)
        if not head.startswith(b"PK"):
            older = "; one saved before torch 1.6 has to be saved again" if head.startswith(b"\x80") else ""
            raise UserError(f"{damaged}it is {what_is(head)}{older}; download or copy it again")
        members = ZipMembers(file, where)
        infos = {info.filename: info for info in members.infos}
        pickles = [name for name in infos if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or len(infos) < len(members.infos):
            raise UserError(
                f"{damaged}it holds {some([name[:40] for name in infos]) or 'nothing'}, not what torch saves"
            )
        folder = pickles[0].removesuffix("data.pkl")
        order = "<"
        if info := infos.get(f"{folder}byteorder"):
            order = ">" if members.open(info, where).read(8) == b"big" else "<"
        value = load(members.open(infos[pickles[0]], where), where, _TorchMachine)

        def values(tensor: _Tensor) -> Values:
            storage = tensor.storage
            member = members.open(infos[f"{folder}data/{storage.key}"], where)
            dtype = np.dtype("u2" if storage.kind == BRAIN else storage.kind).newbyteorder(order)  # type: ignore[arg-type]
            whole = StoredArray(member, where, {})
            whole.define(dtype, (storage.count,), "C", Span(0, storage.count * dtype.itemsize, "bytes"))
            if infos[f"{folder}data/{storage.key}"].file_size != whole.nbytes:
                raise ValueError(f"a storage of {storage.count:,} numbers that has another size")

            def read() -> np.ndarray:
                count, flat = math.prod(tensor.shape), whole.read()[tensor.offset :]
                if tensor.strides == tuple(math.prod(tensor.shape[i + 1 :]) for i in range(len(tensor.shape))):
                    return flat[:count].reshape(tensor.shape)
                steps = tuple(stride * dtype.itemsize for stride in tensor.strides)
                return np.lib.stride_tricks.as_strided(flat, tensor.shape, steps, writeable=False).copy()

            if storage.kind == BRAIN:
                return Values("f", BRAIN, tensor.shape, _brains(read))
            return Values(dtype.kind, str(dtype), tensor.shape, read)

        if not isinstance(value, dict):
            raise UserError(f"{where} holds {described(value)}, expected a dict of tensors")
        found: dict[str, Values | list[Any]] = {}
        for name, item in value.items():
            if isinstance(item, _Tensor):
                found[str(name)] = values(item)
            elif isinstance(item, StoredArray) and item.defined:
                found[str(name)] = of_array(item)
            elif isinstance(item, (list, tuple)):
                found[str(name)] = list(item)
        return found
    except (*BAD_LIST, *BAD_HEADER, AttributeError) as error:
        raise UserError(
            f"{damaged}it is damaged ({type(error).__name__}: {str(error)[:100]}); download or copy it again"
        ) from error
