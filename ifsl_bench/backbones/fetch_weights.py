"""Weights that stored rows start from and that are not in the wheel: their list, and their way into a home.

The files lie in ``results/weights`` of the repository, and ``weights.toml`` lists them. In a clone they are used there.
Elsewhere :func:`fetch_weights` gets them into the home, where they are used as if they came with the package.
"""

from __future__ import annotations

import os
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec

from ifsl_bench.backbones.pretrained import find_packaged_file
from ifsl_bench.utils.errors import UserError, escape_controls, unknown_name_error
from ifsl_bench.utils.files import Paths, sha256_file, translate_disk_errors
from ifsl_bench.utils.locks import hold_lock, unfinished_path
from ifsl_bench.utils.progress import Reporter

WEIGHTS_LIST_FILE = Path(__file__).with_name("weights.toml")
TIMEOUT_SECONDS = 30.0  # seconds that a server may be silent
BLOCK_BYTES = 1 << 20  # bytes


class ListedWeightsFile(msgspec.Struct):
    """A file of weights: its bytes and their checksum."""

    size: int
    sha256: str


class WeightsList(msgspec.Struct):
    """The content of ``weights.toml``."""

    address: str
    files: dict[str, ListedWeightsFile]


def read_weights_list() -> WeightsList:
    """Return the list of the weights that are not in the wheel."""
    return msgspec.toml.decode(WEIGHTS_LIST_FILE.read_bytes(), type=WeightsList)


def fetch_weights(key: str, home: Paths, source: str | None, reporter: Reporter) -> tuple[Path, bool]:
    """Get a listed file of weights into the home, where runs find it.

    Args:
        key: of the pretraining.
        home: where the file is kept.
        source: URL or path of the folder that has the file; by default the project's address.
        reporter: hears where it comes from.

    Returns:
        The file, and whether it was fetched: it may be here already.

    Raises:
        UserError: it is not listed, cannot be had or written, or is another file than the listed one.
    """
    listed = read_weights_list()
    if key not in listed.files:
        raise unknown_name_error("weights", key, listed.files, see="ifsl-bench weights list")
    target, file, address = home.weights / f"{key}.safetensors", listed.files[key], source or listed.address
    with hold_lock(target, reporter.warn, state=""):
        here = find_packaged_file(home, key)
        if here is not None and sha256_file(here) == file.sha256:
            return here, False
        if not address:
            raise UserError(
                f"no address of the project is known to get {key} from; say where it is with --from URL|FOLDER, "
                "such as the folder results/weights of a clone"
            )
        folder = address if "://" in address else Path(address).expanduser().absolute().as_uri()
        _download_to_file(f"{folder.rstrip('/')}/{target.name}", target, file, reporter)
    return target, True


def _download_to_file(url: str, target: Path, file: ListedWeightsFile, reporter: Reporter) -> None:
    """Download a file, from where an earlier download broke off if the server can, and check it.

    Args:
        url: address of the file.
        target: the file to write; the part before an interruption stays beside it for the next download.
        file: size and checksum that the file must have.
        reporter: receives the progress.
    """
    reporter.say(f"{url}: {file.size / 1e6:.1f} MB")
    partial = unfinished_path(target)
    start = partial.stat().st_size if partial.exists() else 0
    start = start if start < file.size else 0
    why: object = "the connection broke off"
    try:
        with urlopen(
            Request(url, headers={"Range": f"bytes={start}-"} if start else {}), timeout=TIMEOUT_SECONDS
        ) as response:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                start = 0  # the server sends the whole file
            length = response.headers.get("Content-Length")
            if length is not None and start + int(length) != file.size:
                raise UserError(f"{url} has {start + int(length):,} bytes, expected {file.size:,}: it is another file")
            with translate_disk_errors(target), open(partial, "ab" if start else "wb") as out:
                while block := response.read(min(BLOCK_BYTES, file.size + 1 - out.tell())):
                    out.write(block)
                out.flush()
                os.fsync(out.fileno())
    except HTTPError as error:
        why = error
    except (OSError, HTTPException, ValueError) as error:  # no connection, no file, no address
        why = getattr(error, "reason", error)
    size = partial.stat().st_size if partial.exists() else 0
    if size < file.size:
        kept = f"; {size:,} of {file.size:,} bytes are kept, and the same command goes on from there" if size else ""
        raise UserError(f"{url} cannot be fetched ({escape_controls(str(why)).strip()[:200]}){kept}")
    if size != file.size or sha256_file(partial) != file.sha256:
        partial.unlink()
        raise UserError(f"{url} is another file than the listed one: its SHA-256 is not {file.sha256}; nothing is kept")
    with translate_disk_errors(target):
        os.replace(partial, target)
