"""Tensors of .pt and .safetensors files, read by the libraries that write them, without running anything."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from ifsl_bench.data.read.file_tree import what_is
from ifsl_bench.data.read.npz import open_as, reading_file
from ifsl_bench.data.read.zipped import open_member
from ifsl_bench.utils.errors import UserError


def safetensors(file: BinaryIO, where: str) -> dict[str, np.ndarray]:
    """The tensors of a .safetensors file, by name.

    Args:
        file: read whole.
        where: how errors call it.

    Raises:
        UserError: it is none, or a damaged one.
    """
    from safetensors.torch import load

    head = file.read(512)
    if head[8:9] != b"{":
        raise UserError(f"{where} is no readable .safetensors file: it is {what_is(head)}; download or copy it again")
    with reading_file(".safetensors", where):
        return {name: _array(tensor) for name, tensor in load(head + file.read()).items()}


def torch_file(file: BinaryIO, where: str) -> dict[str, np.ndarray | list[Any]]:
    """The tensors, arrays and lists of a dict that torch.save has written, by name.

    Args:
        file: able to seek.
        where: how errors call it.

    Raises:
        UserError: it is none, a damaged one, or holds anything that torch.load(..., weights_only=True) would refuse.
    """
    import torch

    with reading_file(".pt", where):
        archive = open_as(".pt", file, where, "get it again, or save it again by torch 1.6 or later")
        for info in archive.infolist():
            open_member(archive, info, where).close()  # torch would expand it, whatever its size
        file.seek(0)
        try:
            with torch.serialization.safe_globals(_numpy()):
                value = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # whose first lines advise to trust the file
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition(" was not")[0]
            raise UserError(
                f"{where} is refused by torch.load(..., weights_only=True): {reason.splitlines()[0]:.100}; save a dict "
                f"of tensors, arrays, lists, texts and numbers"
            ) from error
        if not isinstance(value, Mapping):
            raise UserError(f"{where} holds a {type(value).__name__}, expected a dict of tensors")
        return {
            str(name): list(item) if isinstance(item, (list, tuple)) else _array(item)
            for name, item in value.items()
            if isinstance(item, (torch.Tensor, np.ndarray, list, tuple))
        }


def _numpy() -> list[Any]:
    """The names that NumPy's arrays of numbers and of texts have in a pickle."""
    types = {type(np.dtype(kind)) for kind in "?bhilqBHILQefdSU"}
    return [np.zeros(1).__reduce__()[0], np.ndarray, np.dtype, *types]


def _array(value: Any) -> np.ndarray:
    """A tensor as an array.

    Raises:
        ValueError: it has more numbers than its storage, as an expanded one has: written out it may fill the memory.
    """
    import torch

    if isinstance(value, np.ndarray):
        return value
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(f"a tensor {list(value.shape)} in a storage of {value.untyped_storage().nbytes():,} bytes")
    tensor = value.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16
