"""What importers read of objects that another library has loaded: nothing of that library is imported for it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ifsl_bench.common.errors import UserError
from ifsl_bench.data.pickle_pools import SHAPE


def is_exactly(value: Any, library: str, *names: str) -> bool:
    """Whether a value's class is one of that library, known by name. A subclass is none: it may give other images."""
    return type(value).__module__.partition(".")[0] == library and type(value).__name__ in names


def kind_of(value: Any) -> str:
    """A value's class as people know it, "library.Class"."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Makes one sentence of whatever another library raises meanwhile."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{what} cannot be read ({type(error).__name__}: {reason:.200})") from error


def as_array(value: Any) -> np.ndarray:
    """A tensor, wherever and however it is kept, or whatever else NumPy takes, as an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().to_dense()
        if value.is_floating_point():
            value = value.float()  # NumPy has no bfloat16
    return np.asarray(value)


def attribute(loaded: Any, name: str, where: str) -> Any:
    """What an object holds under that name.

    Raises:
        UserError: nothing; some people delete it to save memory.
    """
    if not hasattr(loaded, name):
        raise UserError(f"{where} has no {name!r}, which its library gives it; load it again")
    return getattr(loaded, name)


def rows_by_name(value: Any) -> Any:
    """A mapping of rows whose numbers may be NumPy's; anything else comes back as it is, for its reader to refuse."""
    return {name: _rows(rows) for name, rows in value.items()} if isinstance(value, Mapping) else value


def _rows(rows: Any) -> Any:
    try:
        array = as_array(rows)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # ragged, or a tensor without content
        return rows
    return array if array.ndim and array.size else rows


class LoadedImages:
    """Images in memory as floats, channels first: [n, 3, 84, 84] of whole numbers from 0 to 255."""

    def __init__(self, x: Any, where: str) -> None:
        shape = tuple(getattr(x, "shape", ()))
        if shape[1:] != (SHAPE[2], *SHAPE[:2]):
            raise UserError(f"'x' of {where} is a {type(x).__name__} {list(shape)}, expected a tensor [n, 3, 84, 84]")
        self.x, self.where, self.nbytes = x, where, shape[0] * math.prod(SHAPE)

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """uint8 [rows, 84, 84, 3] after another.

        Raises:
            UserError: a value is no whole number from 0 to 255.
        """
        for start in range(0, len(self), rows):
            with reading(f"'x' of {self.where}"):
                given = as_array(self.x[start : start + rows])
            with np.errstate(invalid="ignore"):
                block = given.astype(np.uint8)
            if not (block == given).all():
                raise UserError(
                    f"'x' of {self.where} has values that are no whole numbers from 0 to 255; give the object as its "
                    f"library loads it"
                )
            yield block.transpose(0, 2, 3, 1)

    def digest(self, advance: Callable[[int], None]) -> str:
        """SHA-256 over the images as :meth:`blocks` gives them; ``advance`` is called with numbers of images read."""
        sha = hashlib.sha256()
        for block in self.blocks(256):
            sha.update(np.ascontiguousarray(block).data)
            advance(len(block))
        return sha.hexdigest()
