"""What several tests of data do to files and ask of pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ifsl_bench.data.pools import Pool
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import Reporter


def spoil(path: Path, at: int) -> None:
    """Changes a bit of the byte at a place; in a new file, since the old one may be shared by hard links."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.unlink()
    path.write_bytes(content)


def of_class(pool: Pool, name: str) -> np.ndarray:
    """The images of a class."""
    c = pool.class_names.index(name)
    return pool.images[pool.class_starts[c] : pool.class_starts[c + 1]]


def refused(home: Paths, name: str, path: Path, message: str, **options: Any) -> str:
    """Holds that a data set cannot be prepared and is not there then; returns what is said."""
    with pytest.raises(UserError, match=message) as caught:
        prepare_dataset(home, name, path, False, Reporter(), **options)
    assert not (home.data / name).exists()
    return str(caught.value)
