"""Frozen features as .pt and .safetensors files."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Sequence
from functools import cache, partial
from random import Random

import torch
from safetensors.torch import save

from tests.fuzz.archives import spoiled_zip
from tests.fuzz.arrays import EVIL, read_features, spoiled_pickle
from tests.fuzz.formats import Format
from tests.fuzz.mutation import NUMBERS, change_json, once, spoiled

FEATURES = torch.arange(12, dtype=torch.float32).reshape(4, 3)


# -- .pt


@cache
def pts() -> Sequence[bytes]:
    values = [
        {"features": FEATURES, "labels": torch.arange(4)},
        {"features": FEATURES.T.contiguous().T, "labels": ["a", "b", "é", "d"]},
        {"features": FEATURES.bfloat16()[:, 1:], "labels": [1.0, 2.0, 3.0, 3.0], "more": {"of": (1, None)}},
        {"features": FEATURES.half(), "labels": torch.arange(4.0), "none": torch.zeros(0)},
    ]
    contents = []
    for value in values:
        out = io.BytesIO()
        torch.save(value, out)
        contents.append(out.getvalue())
    return contents


NAMES = (b"ctorch\nFloatStorage\n", b"ctorch\nLongStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
         b"ccollections\nOrderedDict\n", b"ctorch\nload\n", b"Q", b")R", b"K\x07", b"M\xff\xff", b"J\xff\xff\xff\xff",
         b"X\x01\x00\x00\x009", b"(X\x07\x00\x00\x00storagetQ")  # fmt: skip


def spoiled_pt(random: Random, content: bytes) -> bytes:
    """Other operations in the pickle, other storages, other members; or any bytes changed."""
    if random.random() < 0.25:
        return spoiled_zip(random, content)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data, name, way = old.read(info), info.filename, random.random()
            if name.endswith("data.pkl") and way < 0.8:
                data = spoiled_pickle(random, data)
                if random.random() < 0.5:
                    at = random.randrange(len(data) + 1)
                    data = data[:at] + random.choice(NAMES + EVIL) + data[at:]
            elif way < 0.1:
                continue
            elif way < 0.3:
                data = once(random, data)
            elif way < 0.35:
                name = random.choice(("archive/data/0", "data.pkl", "x/data.pkl", "byteorder"))
            elif name.endswith("byteorder") and way < 0.5:
                data = b"big"
            if name not in new.namelist():
                method = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
                new.writestr(zipfile.ZipInfo(name), data, method)  # of 1980, not of now
    return out.getvalue()[: 1 << 20]


# -- .safetensors


@cache
def safetensors() -> Sequence[bytes]:
    return [
        save({"features": FEATURES, "labels": torch.arange(4)}),
        save({"features": FEATURES.bfloat16(), "labels": torch.arange(4.0)}, {"made": "here"}),
        save({"features": FEATURES.double(), "labels": torch.arange(4, dtype=torch.uint8), "more": torch.zeros(2, 2)}),
    ]


ODD = (None, True, "F32", [], {}, [0, 0], [0], ["x"], [1.5], 1e308, -1, "é\ud800", [[0]], [48, 0], *NUMBERS, 10**30,
       "BF16", "F8_E4M3", "I64", [4, 3, 1], [12, 1], [0, 3], [2**40, 2**40], [4.0, 3], [-4, -3])  # fmt: skip


def spoiled_safetensors(random: Random, content: bytes) -> bytes:
    """A header that says something else; or any bytes changed."""
    if random.random() < 0.3:
        return spoiled(random, content)
    (size,) = struct.unpack("<Q", content[:8])
    head, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    for _ in range(random.choice((1, 1, 2, 4))):
        change_json(head, random, ODD, ("features", "labels", "more", "__metadata__", "dtype", "shape", "data_offsets"))
    text = json.dumps(head).encode("utf-8", "surrogatepass")
    text = random.choice((text,) * 8 + (b"[" * 5000, b"{" + b'"a":' * 3000, text + text, text[:-1]))
    length = len(text) if random.random() < 0.8 else random.choice(NUMBERS)
    return struct.pack("<Q", length & ((1 << 64) - 1)) + text + data[: random.choice((None, None, None, 5, 0))]


FORMATS = [
    Format("pt", pts, partial(read_features, suffix=".pt"), spoiled_pt, 10),
    Format("safetensors", safetensors, partial(read_features, suffix=".safetensors"), spoiled_safetensors, 10),
]
