"""Arrays and pickles made to hang, to fill the memory or to end in a traceback: each ends in one line."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from ifsl_bench.common import limits
from ifsl_bench.common.errors import UserError
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.preparing.prepare import prepare
from ifsl_bench.data.read.npz import npz_arrays
from ifsl_bench.data.read.unpickle import load
from tests.data.test_hostile import zeros_deflated, zipped

MB = 1 << 20


def npy(said: str, data: bytes = b"", length: int | None = None) -> bytes:
    text = said.encode()
    return b"\x93NUMPY\x02\0" + struct.pack("<I", len(text) if length is None else length) + text + data


def _said(descr: str = "'<f4'", shape: str = "(4, 3)", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n"


HEADERS = {
    "no .npy at all": (b"PK\x03\x04 what is this", "the magic string is not correct"),
    "empty": (b"", "EOF: reading magic string"),
    "shape of 10^18": (
        npy(_said(shape="(1000000000, 1000000000)"), b"x" * 48),
        "greater than file size",
    ),
    "shape below zero": (npy(_said(shape="(-4, -3)"), b"x" * 48), "negative dimensions"),
    "shape of 5,000 digits": (npy(_said(shape=f"({'9' * 5000}, 1)")), "Exceeds the limit|damaged"),
    "shape that is a number": (npy(_said(shape="12"), b"x" * 48), "shape is not valid"),
    "nested deep": (npy("(" * 9000), "damaged"),
    "a long sum": (npy("-" * 9000 + "1"), "damaged"),
    "a call": (npy("__import__('os').system('true')"), "damaged"),
    "objects": (npy(_said("'|O'"), b"x" * 96), "Python objects"),
    "records": (npy(_said("[('a', '<f4')]"), b"x" * 48), "of records"),
    "no columns": (npy(_said(shape="(4, 0)")), r"found features float32\[4, 0\]"),
    "no rows": (npy(_said(shape="(0, 3)")), r"found features float32\[0, 3\]"),
    "one axis": (npy(_said(shape="(12,)"), b"x" * 48), r"found features float32\[12\]"),
}


def features(folder: Path, content: bytes, labels: np.ndarray | None = None) -> Path:
    """The first of six files, with that as features.npy."""
    folder.mkdir()
    out = io.BytesIO()
    np.save(out, np.arange(4) if labels is None else labels)
    with zipfile.ZipFile(folder / "base-train.npz", "w") as archive:
        archive.writestr("features.npy", content)
        archive.writestr("labels.npy", out.getvalue())
    return folder


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_of_arrays_are_refused_in_one_line(name, tmp_path, home, traced):
    content, message = HEADERS[name]
    with traced() as memory, pytest.raises(UserError, match=rf"base-train\.npz.*({message})"):
        prepare(home, "own", features(tmp_path / "f", content), False, Reporter())
    assert memory.peak < 20e6


def test_a_bomb_in_an_npz_file_is_refused(tmp_path, home, traced):
    megabytes = 300
    start = npy(_said(shape=f"({megabytes * MB // 16}, 4)"))
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed_head = machine.compress(start) + machine.flush(zlib.Z_FULL_FLUSH)
    content = zipped(
        [
            (b"features.npy", 8, packed_head + zeros_deflated(megabytes), len(start) + megabytes * MB, 0),
            (b"labels.npy", 0, b"", 0, 0),
        ]
    )
    (tmp_path / "base-train.npz").write_bytes(content)
    with traced() as memory, pytest.raises(UserError, match="expands to more than 200 times its size"):
        prepare(home, "own", tmp_path, False, Reporter())
    assert memory.peak < 50e6


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_arrays_of_every_order_and_packing_are_read_as_numpy_reads_them(method, tmp_path):
    arrays = {
        "a": np.arange(12.0).reshape(4, 3),
        "b": np.asfortranarray(np.arange(12).reshape(4, 3)),
        "c": np.array(["é", "bc"]),
        "d": np.arange(3, dtype=">i2"),
        "e": np.float16([1.5]),
        "f": np.array([True, False]),
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, array in arrays.items():
            one = io.BytesIO()
            np.save(one, array)
            archive.writestr(f"{name}.npy", one.getvalue())
    out.seek(0)
    read = npz_arrays(out, "x.npz", *arrays)
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        assert (read[name] == array).all()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0x110000, 1, 2, 3], np.uint32).view("<U1"), "a label is no text"),
        (np.array([[65, 1], [65, 0xD800], [66, 66], [67, 67]], np.uint32).view("<U2")[:, 0], "a label is no text"),
        (np.array([[65, 1], [65, 0xD800], [66, 66], [67, 67]], ">u4").view(">U2")[:, 0], "a label is no text"),
        (np.arange(4) + 0.5, "labels must be integers or strings"),
        (np.arange(4) > 1, "labels must be integers or strings"),
        (np.array([b"a", b"b", b"c", b"d"]), "labels must be integers or strings"),
        (np.arange(5), r"labels int64\[5\]"),
        (np.arange(8).reshape(4, 2), r"labels int64\[4, 2\]"),
    ],
)
def test_labels_that_are_none_are_refused(labels, message, tmp_path, home):
    out = io.BytesIO()
    np.save(out, np.zeros((4, 3), np.float32))
    with pytest.raises(UserError, match=rf"base-train\.npz.*{message}"):
        prepare(home, "own", features(tmp_path / "f", out.getvalue(), labels), False, Reporter())


@pytest.mark.parametrize(
    "content", [b"\x80\x02]" + b"]" * 3_000, b"\x80\x02" + b"(" * 3_000, b"\x80\x02" + b"N0" * 1_500]
)
def test_a_pickle_of_endless_values_is_refused(content, monkeypatch):
    monkeypatch.setattr(
        "ifsl_bench.data.read.unpickle.PICKLE_STEPS", limits.Limit(2_000, limits.PICKLE_STEPS.error, "")
    )
    with pytest.raises(UserError, match=r"x\.pkl makes more than 2,000 values"):
        load(content, "x.pkl")


def test_a_pickle_of_endless_strings_is_refused_and_one_of_large_arrays_is_not(monkeypatch):
    monkeypatch.setattr(
        "ifsl_bench.data.read.unpickle.PICKLE_BYTES", limits.Limit(50_000, limits.PICKLE_BYTES.error, "")
    )
    strings = [f"{i:0200}" for i in range(1_000)]
    with pytest.raises(UserError, match=r"x\.pkl holds more than 50,000 bytes of names and numbers"):
        load(pickle.dumps(strings), "x.pkl")
    arrays = [np.zeros(100_000, np.uint8) for _ in range(300)]
    assert len(load(pickle.dumps(arrays, 4), "x.pkl")) == 300


def test_a_name_that_no_terminal_can_show_is_written_out():
    with pytest.raises(UserError, match=r"it holds the name x\\ud800\._frombuffer"):
        load(b"\x80\x04Vx\\ud800\n\x8c\x0b_frombuffer\x93.", "x.pkl")
