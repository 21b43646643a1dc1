"""Cases that failed once, kept as files: made as small as they fail with, and tried again by every test run.

``tests/fuzz/kept/FORMAT/`` holds them. A file is the case itself, one that ends in ``.xz`` packed; a case that is too
large to keep is a recipe, ``.recipe``, which makes it again as long as what makes cases stays as it is.
"""

from __future__ import annotations

import json
import lzma
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz.formats import Format, case
from tests.fuzz.runner import Failure, Verdict, tried

FOLDER = Path(__file__).parent / "kept"
_PLAIN, _MOST = 4096, 1 << 16  # bytes up to which a case is kept as it is, or packed


def ended(form: Format, contents: Sequence[bytes]) -> list[Verdict]:
    """How each of these files of a format ends."""
    found = dict(tried(form, contents.__getitem__, range(len(contents))))
    return [found[i] for i in range(len(contents))]


def kind(what: str) -> str:
    """What two failures share where they are the same: the words up to the first number or quotation."""
    return re.split(r"['\"0-9]", what)[0] + " ".join(re.findall(r"at (\w+\.py:\d+)", what))


def minimised(form: Format, content: bytes, what: str, seconds: float = 20) -> bytes:
    """A shorter file that fails in the same way: pieces are left out, large ones first, as long as there is time."""
    end, piece = time.monotonic() + seconds, max(1, len(content) // 2)
    while time.monotonic() < end:
        at = 0
        while at < len(content) and time.monotonic() < end:
            shorter = content[:at] + content[at + piece :]
            (one,) = ended(form, [shorter])
            if one.how == "failed" and kind(one.told) == kind(what):
                content = shorter
            else:
                at += piece
        if piece == 1:
            break
        piece //= 2
    return content


def keep(form: Format, failure: Failure, folder: Path = FOLDER) -> Path:
    """Writes a failing case into its folder, as small as it can be made in a while; returns where."""
    content = case(form, form.seeds(), failure.seed, failure.number)
    if form.seconds < 60:  # a recipe has nothing to leave out
        content = minimised(form, content, failure.what)
    name = "-".join(re.findall("[A-Za-z]+", kind(failure.what)))[:60]
    path = folder / form.name / f"{name}-{failure.seed}-{failure.number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(content)
    if len(content) <= _PLAIN:
        path.write_bytes(content)
        return path
    if len(packed) <= _MOST:
        path = path.with_name(f"{path.name}.xz")
        path.write_bytes(packed)
        return path
    path = path.with_name(f"{path.name}.recipe")
    path.write_text(json.dumps({"seed": failure.seed, "number": failure.number}))
    return path


def content_of(form: Format, path: Path) -> bytes:
    """The case that a kept file holds."""
    if path.suffix == ".recipe":
        recipe = json.loads(path.read_text())
        return case(form, form.seeds(), recipe["seed"], recipe["number"])
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content


def kept(folder: Path = FOLDER) -> Iterator[tuple[str, Path]]:
    """(format, file) of every kept case."""
    for path in sorted(folder.glob("*/*")):
        yield path.parent.name, path
