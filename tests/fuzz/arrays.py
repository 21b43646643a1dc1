"""Pickles, .npy headers and .npz files."""

from __future__ import annotations

import codecs
import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ifsl_bench.data.pickle_pools import integers
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.npz import npz_arrays
from ifsl_bench.data.read.unpickle import load
from ifsl_bench.data.sets.feature_files import _features, _labels, _read
from ifsl_bench.utils.errors import UserError
from tests.fuzz.archives import spoiled_zip
from tests.fuzz.formats import Format
from tests.fuzz.mutation import NUMBERS, once, spoiled

# -- pickles


@cache
def pickles() -> Sequence[bytes]:
    images = np.arange(2 * 7 * 7 * 3, dtype=np.uint8).reshape(2, 7, 7, 3)
    large = np.zeros(70_000, np.uint8)
    value = {"data": images, "labels": [0, 1], "catname2label": {"n01": 0, "n02": 1}, b"more": (1.5, None, True, "é")}
    rows = [images[0].ravel(), images[1].ravel()]
    values = [value, rows, {"a": large, "b": images.T}, {"s": (1, 2), "n": np.float32(2)}]
    return [pickle.dumps(v, protocol) for v in values for protocol in range(6)]


@cache
def _operations(content: bytes) -> list[bytes]:
    places = [at for _, _, at in pickletools.genops(content)]
    return [content[a:b] for a, b in zip(places, [*places[1:], len(content)], strict=True)]


EVIL = (
    b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"cbuiltins\neval\n", b"R", b"b", b"\x81", b"o",
    b"ios\nsystem\n", b"\x8a\xff" + b"\xff" * 255, b"\x8b\xff\xff\xff\x7f", b"I" + b"9" * 5000 + b"\n",
    b"T\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8, b"(" * 3000, b"]" * 3000, b"\x85" * 3000,
    b"2" * 3000, b"q\x00", b"h\x00", b"h\xff", b"p-1\n", b"g99999999999\n", b"r\xff\xff\xff\xff", b"t", b"l", b"d",
    b"\x90", b"\x91", b"e", b"u", b"a", b"s", b"0", b"1", b"\x94", b"\x95" + b"\xff" * 8, b"Vx\\ud800\n", b"S'\\x'\n",
    b"S'", b"Fnan\n", b"F1e999\n", b"Pid\n", b"Q", b"\x97", b"\x98", b"N", b".", b"\x80\x05", b"\x80\xff",
    b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\nscalar\n",
    b"cnumpy.core.numeric\n_frombuffer\n", b"K\x00", b"J\xff\xff\xff\xff", b"U\x02O8", b"\x8c\x02O8", b"\x8c\x03V99",
)  # fmt: skip


def spoiled_pickle(random: Random, content: bytes) -> bytes:
    """Operations left out, repeated, changed places, or hostile ones added; or any bytes changed."""
    if random.random() < 0.35:
        return spoiled(random, content)
    parts = list(_operations(content))
    for _ in range(random.choice((1, 1, 2, 4, 10))):
        at, source = random.randrange(len(parts) + 1), random.randrange(len(parts) or 1)
        way = random.randrange(5)
        if way == 0:
            parts[at : at + 1] = []
        elif way == 1:
            parts[at:at] = parts[source : source + random.choice((1, 3, 9))] * random.choice((1, 2, 50))
        elif way == 2 and at < len(parts):
            parts[at] = once(random, parts[at])
        elif way == 3:
            parts[at : at + 1] = [random.choice(EVIL)]
        else:
            parts.insert(at, random.choice(EVIL))
    return b"".join(parts)[: 1 << 20]


def read_pickle(path: Path) -> None:
    arrays: list[np.ndarray] = []
    _collect(load(path.read_bytes(), path.name), arrays)
    for array in arrays[:50]:
        if array.dtype.kind in "iu" and len(array.shape) == 1:
            integers(array, "it", path.name)
        array.tobytes()


def _collect(value: Any, arrays: list[np.ndarray]) -> None:
    waiting, visited = [value], set()
    while waiting:
        value = waiting.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, np.ndarray):
            arrays.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value


# -- .npz


def header(literal: str, version: int = 1, length: int | None = None) -> bytes:
    text = literal.encode("utf-8", "surrogatepass") + b"\n"
    size = len(text) if length is None else length
    said_size = struct.pack("<H", size & 0xFFFF) if version == 1 else struct.pack("<I", size & 0xFFFFFFFF)
    return b"\x93NUMPY" + bytes([version & 255, 0]) + said_size + text


TYPES = (
    "'<f4'", "'<f8'", "'<f2'", "'|O'", "'<U3'", "'<U0'", "'<U999999'", "'>i8'", "'|b1'", "'<c16'", "'<M8[s]'", "'V8'",
    "[('a', '<f4')]", "'|S4'", "('<f4', (2,))", "'f4,f4'", "1", "None", "'" + "f" * 300 + "'", "'<f99'", "'\\ud800'",
    "'<u8'",
)  # fmt: skip
SHAPES = (
    "(4, 3)", "(4,)", "()", "(4, 0)", "(0, 3)", "(-4, -3)", "(-1,)", "(1000000000, 1000000000)", f"({1 << 63}, 1)",
    "(4, 3, 1)", "(True, 3)", "(4.0, 3)", "4", "[4, 3]", "('4',)", "(4, 3,", "(" * 300 + ")" * 300, f"({'9' * 5000},)",
    "(" + "1, " * 100 + ")",
)  # fmt: skip


FEATURES = np.arange(12, dtype=np.float32).reshape(4, 3)
ODD_FEATURES = (
    FEATURES, FEATURES * np.nan, np.full((4, 3), 1e300), FEATURES[:, :0], FEATURES[:0], np.zeros((4, 3), np.longdouble),
)  # fmt: skip
ODD_LABELS = (
    np.arange(4), np.array(list("abcd")), np.array([0x110000, 0xD800, 1, 2], np.uint32).view("<U1"),
    np.arange(4) + 0.5, np.array([-(1 << 63), (1 << 63) - 1, 0, 0]), np.full(4, (1 << 64) - 1, np.uint64),
)  # fmt: skip


def _npy(random: Random, array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    content = out.getvalue()
    way = random.random()
    if way < 0.3:
        return once(random, content)
    if way < 0.5:
        return content
    descr = random.choice(TYPES) if random.random() < 0.6 else repr(array.dtype.str)
    shape = random.choice(SHAPES) if random.random() < 0.6 else repr(array.shape)
    order = random.choice(("False", "True", "False", "0", "None"))
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    text = random.choice(
        (text, text, text, text.replace("}", "'x': 1}"), text * 2, "[" * 5000, "-" * 9000 + "1", "lambda: 0", "")
    )
    length = None if random.random() < 0.9 else random.choice(NUMBERS)
    data = array.tobytes()[: random.choice((None, None, 3, 0))]
    return header(text, random.choice((1, 1, 2, 3, 0, 9)), length) + data + bytes(random.choice((0, 0, 0, 7)))


def spoiled_npz(random: Random, content: bytes) -> bytes:
    if random.random() < 0.4:
        return spoiled_zip(random, content)
    features, labels = random.choice(ODD_FEATURES), random.choice(ODD_LABELS)
    out = io.BytesIO()
    method = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in (("features.npy", features), ("labels.npy", labels), ("images.npy", features)):
            name = random.choice((name,) * 9 + ("features", "x.npy", "labels"))
            if name not in archive.namelist():
                archive.writestr(zipfile.ZipInfo(name), _npy(random, array), method)  # of 1980, not of now
    return out.getvalue()


@cache
def npzs() -> Sequence[bytes]:
    archives = []
    for save in (np.savez, np.savez_compressed):
        for labels in (np.arange(4), np.array(["a", "b", "é", "d"])):
            out = io.BytesIO()
            save(out, features=FEATURES, labels=labels, images=np.zeros((2, 3), np.uint8))
            archives.append(out.getvalue())
    return archives


def read_features(path: Path, suffix: str) -> None:
    """A file of frozen features, as an import reads it."""
    path = path.rename(path.with_suffix(suffix))
    with open_tree(path.parent) as tree:
        entry = tree.by_path[path.name]
        labels = _labels(_read(tree, entry)[1], path.name)
        assert len(_features(tree, entry)) == len(labels)
        for name in np.unique(labels):
            codecs.encode(str(name), "utf-8")


def read_npz(path: Path) -> None:
    with open_tree(path.parent) as tree:
        entry = tree.by_path[path.name]
        refused = None
        try:
            with tree.open(entry) as file:
                npz_arrays(file, path.name, "images")["images"].tobytes()
        except UserError as error:  # there may be none, and what is below is another reader
            refused = error
    read_features(path, ".npz")
    if refused:
        raise refused


FORMATS = [Format("pickle", pickles, read_pickle, spoiled_pickle, 30), Format("npz", npzs, read_npz, spoiled_npz, 20)]
