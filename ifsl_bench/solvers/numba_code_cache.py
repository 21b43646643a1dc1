"""The store of compiled code: a folder of the home, named after the source it was made from.

Numba writes the files and knows by itself for which processor and which version of itself they are. Here they get
checksums: machine code with a flipped bit would be run. What does not hold is removed, and compiled again.

Processes that compile at once share the folder. Numba writes each file by one rename, and each machine code gets a name
of its own, so that an index names only what was compiled for it; of two indices written at once one may be lost, and
what it named is compiled again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ifsl_bench.utils.checksummed_json import read_checksummed, write_checksummed
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, mark_used, own_code, sha256_file
from ifsl_bench.utils.locks import locked
from ifsl_bench.utils.tempnames import unique_name

SUMS = "checksums.json"
_wanted: Path | None = None
_say: Callable[[str], None] = lambda text: None  # noqa: E731
_announced = False


def keep_in(folder: Path, say: Callable[[str], None]) -> None:
    """Keeps compiled code from now on; too late for what is loaded already. ``say`` is told of a compilation."""
    global _wanted, _say
    _wanted, _say = folder, say


def code_folder() -> Path | None:
    """The folder, made and looked through; None where it cannot be, or cannot be written: every process compiles."""
    try:
        folder = _place()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / unique_name(".writable")
        probe.touch()
        probe.unlink()
        with alone(folder):  # else what another process has compiled, and not recorded yet, would go
            _remove_damaged(folder)
    except (OSError, UserError):
        return None
    mark_used(folder / SUMS)
    return folder


def sources_folder() -> str:
    """The name of the folder of today's kernels: numba looks at the file of the function called, not at its parts'."""
    return own_code(Path(__file__).parent)[:16]


def _place() -> Path:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    return (Path(chosen) if chosen else _wanted or Paths.locate().cache / "compiled") / sources_folder()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.nb[ic]"))


def _sums(folder: Path) -> dict[str, str]:
    try:
        sums = read_checksummed(folder / SUMS).get("files")
    except (CorruptFile, FileNotFoundError):
        return {}
    return sums if isinstance(sums, dict) else {}


def _remove_damaged(folder: Path) -> None:
    sums = _sums(folder)
    for path in _files(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            continue
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            if not path.is_file() or sums.get(str(path.relative_to(folder))) != sha256_file(path):
                path.unlink()


def record(folder: Path) -> None:
    """Notes the checksums of what is there.

    Of two processes that do so at once one may lose; its code is then made again.
    """
    sums = {}
    for path in _files(folder):
        with contextlib.suppress(OSError, UserError):  # another process may have removed it
            sums[str(path.relative_to(folder))] = sha256_file(path)
    with contextlib.suppress(OSError, UserError):
        write_checksummed(folder / SUMS, {"files": sums})


@contextlib.contextmanager
def alone(folder: Path | None) -> Iterator[None]:
    """Inside, no other process compiles what is kept in the folder, as far as there are locks: it would do it twice."""
    with contextlib.ExitStack() as held:
        if folder is not None:
            with contextlib.suppress(OSError, UserError):
                held.enter_context(locked(folder))
        yield


def announce(on_disk: bool) -> None:
    """Says, once, that kernels are being compiled, and whether the machine code is kept."""
    global _announced
    if not _announced:
        _announced = True
        often = "once" if on_disk else "and again in every process, for the home folder cannot be written"
        with contextlib.suppress(ValueError):  # who was to be told may have closed the stream since
            _say(f"compiling the solvers for this processor, {often}: 10 to 30 seconds")
