"""Cases that failed once, kept as files in ``tests/fuzz/kept/FORMAT/`` and tried again by every test run.

A file is the case itself; one that ends in ``.xz`` is packed.
"""

from __future__ import annotations

import lzma
import re
from pathlib import Path

from tests.fuzz.formats import Format, case
from tests.fuzz.runner import Failure, Verdict, tried

FOLDER = Path(__file__).parent / "kept"


def ended(form: Format, content: bytes) -> Verdict:
    """The verdict on a file of a format."""
    ((_, verdict),) = tried(form, lambda _: content, range(1))
    return verdict


def kind(message: str) -> str:
    """The part that equal failures share: the words up to the first number or quotation."""
    return re.split(r"['\"0-9]", message)[0] + " ".join(re.findall(r"at (\w+\.py:\d+)", message))


def keep(form: Format, failure: Failure, folder: Path = FOLDER) -> Path:
    """Writes a failing case into its folder; returns where."""
    content = case(form, form.seeds(), failure.seed, failure.number)
    name = "-".join(re.findall("[A-Za-z]+", kind(failure.what)))[:60]
    path = folder / form.name / f"{name}-{failure.seed}-{failure.number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(content) > 4096:
        path, content = path.with_name(f"{path.name}.xz"), lzma.compress(content)
    path.write_bytes(content)
    return path


def content_of(path: Path) -> bytes:
    """The case that a kept file holds."""
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content


def kept(folder: Path = FOLDER) -> list[Path]:
    """The files of all kept cases, each in a folder named as its format."""
    return sorted(folder.glob("*/*"))
