"""The formats: archives, images, pickles, features, texts and results, each with good files and hostile changes."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import pickletools
import re
import shutil
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.images import ImageSpec, UnusableImageError, decode_image
from ifsl_bench.data.read.pickles import load_pickle
from ifsl_bench.data.sets.feature_files import _check_labels, _load_features, _read_features_and_labels
from ifsl_bench.data.sets.folder import OwnOptions, read_sides
from ifsl_bench.protocols.tasks.task_files import load_tasks, parse_tasks
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import LogReporter
from tests.data.test_archive import add_files
from tests.fuzz.harness import NUMBERS, Format, change_json, number, read_archive, spoiled, spoiled_parts

OUTSIDE = ("a/../../b", "/etc/passwd", "C:x")
NAMES = (*OUTSIDE, "a" * 101, "9" * 5000, "\udc80", "\n\x1b[2J", "", ".", "a//b", "a/b.tar", "\0")

# -- archives, and images in them


def encoded(form: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (9, 7), **options: object) -> bytes:
    """Return a small image of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels, "RGBA").convert(mode).save(out, form, **options)
    return out.getvalue()


def tarred(content: dict[str, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        add_files(archive, content)
    return out.getvalue()


def zipped(content: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)  # of 1980, not of now
    return out.getvalue()


@cache
def files(classes: int = 3, images: int = 2) -> dict[str, bytes]:
    return {f"top/class_{c}/{i}.png": encoded(size=(8 + c, 8 + i)) for c in range(classes) for i in range(images)}


@cache
def tars() -> Sequence[bytes]:
    long = {f"top/{'long' * 30}/{'é' * 40}.png": b"x" * 700, **files()}
    plain = [tarred(long, form) for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    return [tarred(files(), tarfile.USTAR_FORMAT), *plain, tarred({"top/a.tar": plain[0], "top/b.tar": plain[1]})]


def tar_field(block: bytes, at: int, value: bytes) -> bytes:
    """Return a header with a field changed and its checksum right."""
    block = (block[:at] + value + block[at + len(value) :])[:512].ljust(512, b"\0")
    block = block[:148] + b" " * 8 + block[156:]
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def base256(value: int) -> bytes:
    """Return a size as GNU tar writes large ones."""
    return (value & ((1 << 96) - 1) | (1 << 95)).to_bytes(12, "big")


def spoiled_tar(random: Random, content: bytes) -> bytes:
    """Change fields of headers, add extended headers, or change any blocks."""
    blocks = [content[i : i + 512] for i in range(0, len(content), 512)]
    heads = [i for i, block in enumerate(blocks) if block[257:262] == b"ustar"]
    if random.random() < 0.3 or not heads:
        return spoiled_parts(random, blocks, [bytes(512)])
    i, value = random.choice(heads), random.choice(NUMBERS) * random.choice((1, -1, 1 << 20))
    name = random.choice(NAMES).encode("utf-8", "surrogateescape")
    octal = b"%011o\0" % (value & ((1 << 33) - 1))
    size = random.choice((octal, base256(value), b"-0000000777\0", b"9" * 12, b"\xff" * 12))
    way = random.randrange(4)
    if way == 0:
        blocks[i] = tar_field(blocks[i], 124, size)
    elif way == 1:
        blocks[i] = tar_field(blocks[i], 156, bytes([random.choice(b"0\x001257LKxgSXDMV")]))
    elif way == 2:
        blocks[i] = tar_field(blocks[i], 0, name[:100].ljust(100, b"\0"))
    else:
        key = random.choice((b"path", b"size", b"linkpath", b"GNU.sparse.map", b"GNU.sparse.size", b"hdrcharset", b""))
        record = b" " + key + b"=" + random.choice((name, b"%d" % value, b"9" * 5000)) + b"\n"
        record = b"%d" % random.choice((len(record) + len(str(len(record))), 0, 10**20)) + record
        body = random.choice((record, name + b"\0"))
        said = size if random.random() < 0.2 else b"%011o\0" % len(body)
        extended = tar_field(tar_field(blocks[i], 124, said), 156, random.choice((b"x", b"g", b"L", b"K")))
        blocks[i:i] = [extended, body + bytes(-len(body) % 512)]
    return b"".join(blocks)[: 1 << 20]


@cache
def zips() -> Sequence[bytes]:
    methods = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    return [*(zipped(files(), method) for method in methods), zipped({"top/zeros.png": bytes(1 << 20)})]


_FIELDS = {  # offsets of fields of 2 and of 4 bytes in zip's records
    b"PK\x01\x02": ((4, 6, 8, 10, 28, 30, 32), (16, 20, 24, 38, 42)),
    b"PK\x03\x04": ((4, 6, 8, 26, 28), (14, 18, 22)),
    b"PK\x05\x06": ((4, 6, 8, 10, 20), (12, 16)),
}


def spoiled_zip(random: Random, content: bytes) -> bytes:
    """Change fields of the records, a stored member with its checksum made right, or any bytes."""
    if random.random() < 0.4:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = random.choice(list(members))
        spoil = spoiled_pickle if name.endswith("data.pkl") else spoiled
        return zipped(members | {name: spoil(random, members[name])}, random.choice((0, 8)))
    data = bytearray(content)
    for _ in range(0 if random.random() < 0.3 else random.choice((1, 1, 2, 4, 9))):
        mark, width = random.choice(tuple(_FIELDS)), random.choice((2, 4))
        if places := [match.start() for match in re.finditer(re.escape(mark), data)]:
            at = random.choice(places) + random.choice(_FIELDS[mark][width // 4])
            data[at : at + width] = number(random, width)
    return bytes(data) if data != content else spoiled(random, content)


def spoiled_inside(pack: Callable[[bytes], bytes], random: Random, content: bytes) -> bytes:
    """Spoil a tar archive, or its compressed bytes."""
    return pack(spoiled_tar(random, content)) if random.random() < 0.6 else spoiled(random, pack(content))


@cache
def folders() -> Sequence[bytes]:
    return [zipped(files(24, 20)), tarred(files(24, 20), tarfile.USTAR_FORMAT)]


def spoiled_folder(random: Random, content: bytes) -> bytes:
    return (spoiled_zip if content.startswith(b"PK") else spoiled_tar)(random, content)


def read_folder(path: Path) -> None:
    home = Path(tempfile.mkdtemp(dir=path.parent))
    try:
        quiet = LogReporter(io.StringIO())
        prepare_dataset(Paths.locate(home), "own", path, False, quiet, allow_partial=True, own=OwnOptions(size=8))
    finally:
        shutil.rmtree(home, ignore_errors=True)


@cache
def images() -> Sequence[bytes]:
    modes = {"PNG": ("RGB", "P", "LA"), "JPEG": ("RGB", "CMYK"), "GIF": ("P",), "BMP": ("RGB",), "TIFF": ("RGB",)}
    modes["WEBP"] = ("RGB",)
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0"
    return [
        *(encoded(form, mode) for form in modes for mode in modes[form]),
        encoded("JPEG", "L", progressive=True),
        encoded("JPEG", exif=exif),
        encoded("TIFF", "1", compression="group4"),
    ]


def read_image(path: Path) -> None:
    refused = []
    specs = (ImageSpec(8, "crop", applies_exif_orientation=True), ImageSpec(8, "stretch", "cubic-opencv"), ImageSpec(9))
    for spec in specs:
        try:
            decode_image(path.read_bytes(), spec)
        except UnusableImageError as error:
            refused.append(str(error))
    if len(refused) == len(specs):
        raise UserError(refused[0])


# -- pickles and features


@cache
def pickles() -> Sequence[bytes]:
    rows = np.arange(2 * 7 * 7 * 3, dtype=np.uint8).reshape(2, 7, 7, 3)
    labels = {"data": rows, "labels": [0, 1], "catname2label": {"n01": 0}, b"more": (1.5, None, True, "é")}
    values = [labels, [*rows], {"a": np.zeros(70_000, np.uint8), "b": rows.T}, {"s": (1, 2), "n": np.float32(2)}]
    return [pickle.dumps(value, protocol) for value in values for protocol in range(6)]


EVIL = (
    b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"cbuiltins\neval\n", b"R", b"b", b"\x81", b"o",
    b"ios\nsystem\n",
    b"\x8a\xff" + b"\xff" * 255, b"\x8b\xff\xff\xff\x7f", b"I" + b"9" * 5000 + b"\n", b"T\xff\xff\xff\x7f",
    b"\x8e" + b"\xff" * 8, b"(" * 3000, b"]" * 3000, b"\x85" * 3000, b"2" * 3000, b"q\x00", b"h\xff", b"g99999999999\n",
    b"t", b"l", b"d", b"\x90", b"\x91", b"e", b"u", b"s", b"\x95" + b"\xff" * 8, b"Vx\\ud800\n", b"S'", b"Pid\n", b"Q",
    b"\x97", b".", b"\x80\xff", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\nscalar\n",
    b"cnumpy.core.numeric\n_frombuffer\n", b"J\xff\xff\xff\xff", b"\x8c\x02O8", b"ctorch\nFloatStorage\n",
    b"ctorch\nload\n",
)  # fmt: skip


@cache
def _operations(content: bytes) -> list[bytes]:
    places = [at for _, _, at in pickletools.genops(content)]
    return [content[a:b] for a, b in zip(places, [*places[1:], len(content)], strict=True)]


def spoiled_pickle(random: Random, content: bytes) -> bytes:
    """Change operations, or any bytes."""
    return spoiled_parts(random, _operations(content), EVIL) if random.random() < 0.65 else spoiled(random, content)


def read_pickle(path: Path) -> None:
    waiting, seen = [load_pickle(path.read_bytes(), path.name)], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, np.ndarray):
            value.tobytes()
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value


FEATURES = torch.arange(12, dtype=torch.float32).reshape(4, 3)


@cache
def npzs() -> Sequence[bytes]:
    contents = []
    for labels in (np.arange(4), np.array(["a", "b", "é", "d"])):
        out = io.BytesIO()
        np.savez(out, features=FEATURES.numpy(), labels=labels)
        contents.append(out.getvalue())
    return contents


@cache
def pts() -> Sequence[bytes]:
    contents = []
    for labels in (torch.arange(4), ["a", "b", "é", "d"], [1.0, 2.0, 3.0, 3.0]):
        out = io.BytesIO()
        torch.save({"features": FEATURES.bfloat16(), "labels": labels}, out)
        contents.append(out.getvalue())
    return contents


@cache
def safetensors() -> Sequence[bytes]:
    floats = {"features": FEATURES.bfloat16(), "labels": torch.arange(4.0)}
    return [save({"features": FEATURES, "labels": torch.arange(4)}), save(floats, {"made": "here"})]


ODD = (None, True, "F32", "BF16", "F8_E4M3", [], {}, [0, 0], ["x"], 1e308, -1, "é\ud800", [48, 0], *NUMBERS,
    10**30, [4, 3, 1],
       [0, 3], [2**40, 2**40], [-4, -3], "", "../../x", float("nan"), "\x1b[2J", "x" * 5000, [[]])  # fmt: skip


def spoiled_safetensors(random: Random, content: bytes) -> bytes:
    """Change the header, or any bytes."""
    if random.random() < 0.3:
        return spoiled(random, content)
    (size,) = struct.unpack("<Q", content[:8])
    head = json.loads(content[8 : 8 + size])
    change_json(head, random, ODD, ("features", "labels", "__metadata__", "dtype", "shape", "data_offsets"))
    text = random.choice((json.dumps(head).encode("utf-8", "surrogatepass"),) * 8 + (b"[" * 5000, b'{"a":' * 3000))
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def read_features(suffix: str, path: Path) -> None:
    path = path.rename(path.with_suffix(suffix))
    with open_tree(path.parent) as tree:
        entry = tree.entry_by_path[path.name]
        labels = _check_labels(_read_features_and_labels(tree, entry)[1], path.name)
        assert len(_load_features(tree, entry)) == len(labels)
        "".join(map(str, np.unique(labels))).encode()


# -- texts

WORDS = [word.encode("utf-8", "surrogatepass") for word in (
    "-1", "0", "9" * 30, "9" * 5000, "0x" + "f" * 5000, "1e999", "nan", "inf", "true", "1979-05-27", '"', '"""',
    "\\", "\\ud800",
    "\x1b[2J", "\0", "\udc80", "\u2028", "[" * 2000, "{a=" * 2000, "a." * 150 + "a", "a." * 3000 + "a", "[[", "}",
    "=", ",", "\n",
    "#", "[tasks.x]", '[tasks.""]', "shots", "[variants.y]", 'of = "glyphs-5shot"', "episodes", "x" * 70_000,
    "novel/test", "class",
)]  # fmt: skip


def spoiled_text(random: Random, content: bytes) -> bytes:
    """Change words, or any bytes."""
    words = re.findall(rb"\w+|\s+|[^\w\s]", content)
    return spoiled(random, content) if random.random() < 0.2 else spoiled_parts(random, words, WORDS)


@cache
def csvs() -> Sequence[bytes]:
    lines = [f"class {i},{side}" for i, side in enumerate(["base", "val", "test", "novel/train", "novel/val"] * 3)]
    return ["\n".join(["class,split", *lines]).encode(), '\ufeffsplit,name\r\n"val","a ""b"""'.encode()]


@cache
def tomls() -> Sequence[bytes]:
    folder = resources.files("ifsl_bench.tasks").iterdir()
    return [file.read_bytes() for file in sorted(folder, key=str) if file.name.endswith(".toml")]


def read_toml(path: Path) -> None:
    path = path.rename(path.with_suffix(".toml"))
    tasks = load_tasks(str(path))
    text = path.read_text(encoding="utf-8")
    assert [task.hash for task in parse_tasks(text, str(path))] == [task.hash for task in tasks]


FORMATS = {
    form.name: form
    for form in (
        Format("tar", tars, read_archive, spoiled_tar, 100),
        Format("tar.gz", tars, read_archive, partial(spoiled_inside, partial(gzip.compress, compresslevel=1, mtime=0))),
        Format("tar.xz", tars, read_archive, partial(spoiled_inside, partial(lzma.compress, preset=0)), 20),
        Format("zip", zips, read_archive, spoiled_zip, 100),
        Format("folder", folders, read_folder, spoiled_folder, 15),
        Format("image", images, read_image, share=100),
        Format("pickle", pickles, read_pickle, spoiled_pickle, 150),
        Format("npz", npzs, partial(read_features, ".npz"), spoiled_zip, 100),
        Format("pt", pts, partial(read_features, ".pt"), spoiled_zip),
        Format("safetensors", safetensors, partial(read_features, ".safetensors"), spoiled_safetensors),
        Format("csv", csvs, read_sides, spoiled_text, 25),
        Format("toml", tomls, read_toml, spoiled_text),
    )
}
