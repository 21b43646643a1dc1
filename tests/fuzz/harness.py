"""Formats, changes of bytes, and processes that try cases: a case may hang, fill the memory or die."""

from __future__ import annotations

import lzma
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

PATIENCE = 10  # seconds after the time of a case, until its process is killed
MOST = 1 << 20  # bytes of a case
_BATCH = 200  # cases of a process
KEPT = Path(__file__).parent / "kept"  # FORMAT/NAME: cases that failed once; those that end in .xz are packed
NUMBERS = sorted({(1 << bit) + step for bit in (0, 7, 8, 15, 16, 31, 32, 40, 63, 64) for step in (-1, 0, 1)})


class Verdict(NamedTuple):
    """The end of a case: "good", "refused" or "failed", and the message."""

    how: str
    message: str


def number(random: Random, width: int) -> bytes:
    """Return a number near a power of two, or any, in ``width`` bytes of either order."""
    value = random.choice(NUMBERS) if random.random() < 0.7 else random.getrandbits(8 * width)
    return (value & ((1 << 8 * width) - 1)).to_bytes(width, random.choice(("little", "big")))


def once(random: Random, content: bytes) -> bytes:
    """Return a file with one change, often near its beginning or end."""
    at = random.randrange(len(content) + 1)
    if random.random() < 0.4:
        at = min(at, random.choice((16, 64, 512))) if random.random() < 0.7 else max(0, len(content) - at % 64)
    length = min(random.choice((1, 1, 2, 4, 8, 16, 100, 1000)), len(content) - at)
    before, piece, after = content[:at], content[at : at + length], content[at + length :]
    value = number(random, random.choice((1, 2, 4, 8)))
    ways = (
        lambda: before + bytes(byte ^ (1 << random.randrange(8)) for byte in piece[:1]) + piece[1:] + after,
        lambda: before + random.randbytes(length) + after,
        lambda: before + after,
        lambda: before + piece * random.choice((2, 3, 50)) + after,
        lambda: before + value + content[at + len(value) :],
        lambda: before + bytes([random.choice((0, 0xFF, 0x20, 0x30))]) * length + after,
        lambda: before + value + piece + after,
        lambda: before,
    )
    return random.choice(ways)()


def spoiled(random: Random, content: bytes) -> bytes:
    """Return a file with a few changes."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        content = once(random, content)
    return content[:MOST]


def spoiled_parts(random: Random, parts: Sequence[bytes], strange: Sequence[bytes]) -> bytes:
    """Return parts of a file left out, repeated, swapped or changed, with strange ones among them."""
    parts = list(parts)
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
            parts[at : at + 1] = [random.choice(strange)]
        else:
            parts.insert(at, random.choice(strange))
    return b"".join(parts)[:MOST]


def change_json(value: Any, random: Random, strange: Sequence[Any], names: Sequence[str]) -> None:
    """Change one part of a tree of dicts and lists in place."""
    while below := [v for v in (value.values() if isinstance(value, dict) else value) if isinstance(v, (dict, list))]:
        if random.random() < 0.35:
            break
        value = random.choice(below)
    way, other = random.random(), random.choice(strange)
    for _ in range(random.choice((3, 20, 500)) if way < 0.03 else 0):
        other = [other]
    if isinstance(value, list) and value:
        at = random.randrange(len(value))
        if way < 0.3:
            del value[at]
        elif way < 0.5:
            value[at:at] = value[: random.choice((1, 2, 50))] * random.choice((1, 2, 100))
        else:
            value[at] = other
    elif isinstance(value, dict) and value:
        name = random.choice(list(value))
        if way < 0.2:
            del value[name]
        elif way < 0.4:
            value[random.choice(names)] = other
        elif isinstance(value[name], int) and way < 0.6:
            value[name] += random.choice((-1, 1))
        else:
            value[name] = other


@dataclass(frozen=True)
class Format:
    """A format of files, and how it is attacked.

    Attributes:
        seeds: Makes valid files.
        read: Reads a file as the program does; it may change or remove the file.
        spoil: Makes a hostile file of a valid one.
        share: Cases in a round of all formats.
        prepare: Makes what reading needs, in the process that all cases are forks of.
        seconds: Time of a case.
        bytes: Memory of a case.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[Path], object]
    spoil: Callable[[Random, bytes], bytes] = spoiled
    share: int = 50
    prepare: Callable[[], object] = tuple
    seconds: float = 10
    bytes: int = 10**9


def case(form: Format, seed: int, index: int) -> bytes:
    """Return case ``index`` of a format; always the same bytes."""
    random = Random(f"{form.name}/{seed}/{index}")
    return form.spoil(random, random.choice(form.seeds()))


class _TooLong(BaseException):
    """The time is up; no ``except Exception`` catches it."""


def _stop(*_: object) -> None:
    raise _TooLong


def judged(form: Format, path: Path) -> Verdict:
    """Read a file in this process."""
    from ifsl_bench.utils.errors import UserError

    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, form.seconds)
    try:
        end = form.read(path)
        return Verdict("good", end if isinstance(end, str) else "")
    except _TooLong:
        return Verdict("failed", f"it took more than {form.seconds:g} s")
    except UserError as error:
        message = str(error)
        plain = message.strip() and not {unicodedata.category(letter) for letter in message} & {"Cc", "Cs", "Zl", "Zp"}
        return Verdict("refused", message) if plain else Verdict("failed", f"not one line: {message!r:.300}")
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return Verdict("failed", f"{type(error).__name__}: {str(error)[:1000]!r} at {place}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()  # ru_maxrss may be the parent's
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _work(form: Format, make: Callable[[int], bytes], numbers: range, folder: str, line: Connection) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries in C print
    resource.setrlimit(resource.RLIMIT_AS, (16 * 10**9,) * 2)  # so that the machine survives
    base = peak()
    for index in numbers:
        path = Path(folder) / "case"
        path.write_bytes(make(index))
        before, verdict = peak(), judged(form, path)
        if before < peak() > base + form.bytes:
            verdict = Verdict("failed", f"it took {(peak() - base) / 1e9:.1f} GB")
        line.send((index, verdict))
        if peak() > base + form.bytes:
            return  # the next case needs a process without this peak


def tried(
    form: Format, make: Callable[[int], bytes], numbers: range, until: float = float("inf")
) -> Iterator[tuple[int, Verdict]]:
    """Yield (number, verdict) of cases, tried in other processes; none begins after ``until`` (time.monotonic())."""
    form.prepare()
    form.seeds()  # made once, for all processes
    context = multiprocessing.get_context("fork")
    index = numbers.start
    while index < numbers.stop and time.monotonic() < until:
        theirs, ours = context.Pipe(duplex=False)
        batch = range(index, min(numbers.stop, index + _BATCH))
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            child = context.Process(target=_work, args=(form, make, batch, folder, ours))
            child.start()
            ours.close()
            try:
                while theirs.poll(form.seconds + PATIENCE):
                    done, verdict = theirs.recv()
                    yield done, verdict
                    index = done + 1
                child.kill()
                message = f"it ignored the signal after {form.seconds:g} s"
            except EOFError:
                child.join()
                message = f"the process died ({child.exitcode})" if child.exitcode else ""
            child.join()
            if message:
                yield index, Verdict("failed", message)
                index += 1
        theirs.close()


def read_archive(path: Path) -> None:
    from ifsl_bench.data.read.archive import natural_sort_key, open_tree
    from ifsl_bench.utils.errors import UserError

    with open_tree(path) as tree:
        sorted(tree.entries, key=lambda entry: natural_sort_key(entry.path))
        tree.content_hashes()
        refused = []
        for entry in tree.entries[:4]:
            try:
                with tree.translate_read_errors(entry), tree.open(entry) as file:
                    file.read(10)
                    file.seek(0)
                    while file.read(1 << 20):
                        pass
                tree.read_bytes(entry)
            except UserError as error:  # the others may be read
                refused.append(error)
        if refused:
            raise refused[0]


def keep(form: Format, content: bytes, message: str, folder: Path = KEPT) -> Path:
    """Write a case that failed into a folder of cases; return its path."""
    name = "-".join(re.findall("[A-Za-z]+", re.split(r"['\"0-9]", message)[0]))[:60]
    path = folder / form.name / f"{name}-{abs(hash(content)) % 10**6}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(content) > 4096:
        path, content = path.with_name(f"{path.name}.xz"), lzma.compress(content)
    path.write_bytes(content)
    return path


def content_of(path: Path) -> bytes:
    """Return the case in a kept file."""
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content
