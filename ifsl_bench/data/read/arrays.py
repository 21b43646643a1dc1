"""Arrays and tensors of .npz, .safetensors and .pt files, read without running anything in them."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, BinaryIO

import numpy as np

from ifsl_bench.data.read.archive import describe_file_kind, format_first_names, open_member, open_zip
from ifsl_bench.utils.errors import UserError, is_refused_by_machine
from ifsl_bench.utils.files import append_to_temporary_file, open_temporary_file


@contextmanager
def translate_library_errors(failed: str, remedy: str = "") -> Iterator[None]:
    """Convert any exception of a library into a :class:`UserError` of one line.

    Args:
        failed: What failed.
        remedy: What to do, after the reason.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_refused_by_machine(error):
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{failed} ({type(error).__name__}: {reason:.200}){remedy}") from error


def _translate_file_errors(kind: str, where: str) -> AbstractContextManager[None]:
    return translate_library_errors(f"{where} is no readable {kind} file: it is damaged", "; download or copy it again")


def _open_archive(kind: str, file: BinaryIO, where: str, hint: str = "download or copy it again") -> zipfile.ZipFile:
    """Open a zip archive with another suffix; raise UserError if it is none, or two members have one name."""
    head = file.read(512)
    if not head.startswith(b"PK"):
        raise UserError(f"{where} is no readable {kind} file but {describe_file_kind(head)}; {hint}")
    archive = open_zip(file, where)
    if len({info.filename for info in archive.infolist()}) < len(archive.infolist()):
        raise UserError(f"{where} holds two arrays of one name; get it again")
    return archive


def read_npz_arrays(file: BinaryIO, where: str, *names: str) -> dict[str, np.ndarray]:
    """Return arrays of a .npz file, each mapped from a temporary copy.

    Args:
        file: Seekable.
        where: Name of the file in messages.
        *names: Names of the arrays.

    Raises:
        UserError: The file is damaged, or an array is missing, or neither of numbers nor of strings.
    """
    with _translate_file_errors(".npz", where):
        archive = _open_archive(".npz", file, where)
        infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if missing := sorted(set(names) - infos.keys()):
            has = format_first_names([info.filename[:40] for info in archive.infolist()], 6) or "nothing"
            raise UserError(f"{where} lacks {', '.join(map(repr, missing))}; it has {has}")
        arrays: dict[str, np.ndarray] = {}
        for name in names:
            what = f"{name!r} of {where}"
            # The copy's name is gone afterwards, its mapped content is not.
            with open_member(archive, infos[name], what) as member, open_temporary_file() as copy:
                while block := member.read(1 << 20):
                    append_to_temporary_file(copy, block)
                try:
                    array = np.lib.format.open_memmap(copy.name, mode="r")
                    kind = None if array.dtype.kind in "biufcSU" else f"type {array.dtype}"
                except (ValueError, MemoryError) as error:  # the second of Python's parser, from a long header
                    if "Python objects" not in str(error):
                        raise ValueError(f"its header cannot be read: {error}") from error
                    kind = "Python objects, as pandas keeps texts"
            if kind is not None:
                raise UserError(
                    f"{what} is an array of {kind}; only numbers and texts are read: save {name}.astype(str) for "
                    f"texts, {name}.astype({'int' if name == 'labels' else repr('float32')}) for numbers"
                )
            arrays[name] = array
    return arrays


def read_safetensors_arrays(file: BinaryIO, where: str) -> dict[str, np.ndarray]:
    """Return the tensors of a .safetensors file by name.

    Args:
        file: Read whole.
        where: Name of the file in messages.

    Raises:
        UserError: The file is damaged, or of another kind.
    """
    from safetensors.torch import load

    head = file.read(512)
    if head[8:9] != b"{":
        raise UserError(
            f"{where} is no readable .safetensors file: it is {describe_file_kind(head)}; download or copy it again"
        )
    with _translate_file_errors(".safetensors", where):
        return {name: _to_array(tensor, name, where) for name, tensor in load(head + file.read()).items()}


def read_torch_arrays(file: BinaryIO, where: str) -> dict[str, np.ndarray | list[Any]]:
    """Return the tensors, arrays and lists of a dict that ``torch.save`` wrote, by name.

    Args:
        file: Seekable.
        where: Name of the file in messages.

    Raises:
        UserError: The file is damaged, or holds what ``torch.load(..., weights_only=True)`` refuses.
    """
    import torch

    with _translate_file_errors(".pt", where):
        archive = _open_archive(".pt", file, where, "get it again, or save it again by torch 1.6 or later")
        for info in archive.infolist():
            open_member(archive, info, where).close()  # torch would expand it, whatever its size
        if any(info.filename.endswith("/constants.pkl") for info in archive.infolist()):
            raise UserError(f"{where} is a TorchScript program; save a dict of tensors by torch.save")
        file.seek(0)
        # The names of NumPy's arrays of numbers and texts in a pickle.
        types = {type(np.dtype(kind)) for kind in "?bhilqBHILQefdSU"}
        names: list[Any] = [np.zeros(1).__reduce__()[0], np.ndarray, np.dtype, *types]
        try:
            with torch.serialization.safe_globals(names), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of types that are refused below
                value = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # its first lines advise to trust the file
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition(" was not")[0].strip()
            raise UserError(
                f"{where} is refused by torch.load(..., weights_only=True): {reason.splitlines()[0]:.100}; save a dict "
                f"of tensors, arrays of numbers or texts, lists, texts and Python's own numbers, as tolist() gives them"
            ) from error
        if not isinstance(value, Mapping):
            raise UserError(f"{where} holds a {type(value).__name__}, expected a dict of tensors")
        return {
            str(name): list(item) if isinstance(item, (list, tuple)) else _to_array(item, str(name), where)
            for name, item in value.items()
            if isinstance(item, (torch.Tensor, np.ndarray, list, tuple))
        }


def _to_array(value: Any, name: str, where: str) -> np.ndarray:
    """Return a tensor as an array; floating-point types that NumPy lacks become float32.

    Args:
        value: A tensor or an array.
        name: Of the tensor in the file.
        where: Name of the file in messages.

    Raises:
        UserError: It has no plain numbers in memory.
    """
    import torch

    if isinstance(value, np.ndarray):
        return value
    kinds = {
        f"a nested tensor; save {name}.to_padded_tensor(0.0)": value.is_nested,
        f"a sparse tensor; save {name}.to_dense()": value.layout != torch.strided,
        f"a quantized tensor; save {name}.dequantize()": value.is_quantized,
        "a tensor on the device 'meta', which has no numbers; save it from another device": value.is_meta,
    }
    for kind, applies in kinds.items():
        if applies:
            raise UserError(f"{name!r} of {where} is {kind}")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():  # written out it may fill the memory
        raise ValueError(f"a tensor {list(value.shape)} in a storage of {value.untyped_storage().nbytes():,} bytes")
    tensor = value.detach().resolve_conj().resolve_neg()
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).numpy()
