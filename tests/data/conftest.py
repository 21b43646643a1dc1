"""Files in the layouts that people have, written small."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ifsl_bench.utils.files import Paths


def _python2(value: Any) -> bytes:
    """The operations by which Python 2 and its NumPy write a value in protocol 2."""
    if isinstance(value, np.ndarray):
        head = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        kind = b"cnumpy\ndtype\n" + _python2(value.dtype.str[1:]) + b"K\x00K\x01\x87R"
        kind += b"(K\x03" + _python2(value.dtype.str[0]) + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
        return head + b"(K\x01" + _python2(value.shape) + kind + b"\x89" + _python2(value.tobytes()) + b"tb"
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(k) + _python2(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_python2, value)) + b"t"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    text = value.encode("latin-1") if isinstance(value, str) else value
    return (b"U" + bytes([len(text)]) if len(text) < 256 else b"T" + struct.pack("<i", len(text))) + text


@pytest.fixture
def python2() -> Callable[[Any], bytes]:
    """Pickles dicts, lists, tuples, strings, whole numbers and arrays as Python 2 does, strings by their bytes."""
    return lambda value: b"\x80\x02" + _python2(value) + b"."


@pytest.fixture
def home(tmp_path: Path) -> Paths:
    """A cache with nothing in it."""
    return Paths.locate(tmp_path / "home")


@pytest.fixture
def ilsvrc() -> Path:
    """Photographs in ILSVRC-2012's layout: 60 classes of 30, 64x64 pixels."""
    path = Path(__file__).parents[3] / "shared" / "data" / "imagenet-mini-fixture.zip"
    if not path.exists():
        pytest.skip("the pack of photographs in ILSVRC-2012's layout is not here")
    return path


@pytest.fixture
def traced() -> Callable[[], contextlib.AbstractContextManager[SimpleNamespace]]:
    """Measures the most memory, in bytes, that Python and NumPy take at once: ``with traced() as memory: ...``."""

    @contextlib.contextmanager
    def trace() -> Iterator[SimpleNamespace]:
        memory = SimpleNamespace(peak=None)
        tracemalloc.start()
        try:
            yield memory
            _, memory.peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    return trace


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str, int], list[tuple]]:
    """Has the ``at``-th call of a module's function end by Ctrl-C; returns the list of arguments of all calls."""

    def interrupt(module: ModuleType, name: str, at: int) -> list[tuple]:
        original, calls = getattr(module, name), []

        def stopping(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == at:
                raise KeyboardInterrupt
            return original(*arguments)

        monkeypatch.setattr(module, name, stopping)
        return calls

    return interrupt
