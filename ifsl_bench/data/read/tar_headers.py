"""The headers of a tar archive: ustar, GNU's and POSIX.1-2001's (pax).

They are read here because the standard library's reader trusts them: a negative size makes it go round for ever, a
long name claims as much memory as it says, and a pax header takes time quadratic in its length.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from ifsl_bench.common.limits import EXTENDED_HEADER

BLOCK = 512
_ZEROS = bytes(BLOCK)
_NAME, _SIZE, _SUM, _LINK, _PREFIX = slice(0, 100), slice(124, 136), slice(148, 156), slice(157, 257), slice(345, 500)
_FILES, _LINKS, _EMPTY = b"\x000\x37", b"12", b"123456"  # by their types; directories and devices have no content
_SPARSE_RECORD = "GNU.sparse"  # what the names of records of sparse files begin with
_LONG_NAME, _LONG_LINK, _PAX, _GLOBAL, _SPARSE = b"L", b"K", b"xX", b"g", b"S"
_SAID = ("path", "linkpath", "size")  # by records of pax headers, of all that they may say
_EXTENDED = _LONG_NAME + _LONG_LINK + _PAX + _GLOBAL


class Damaged(tarfile.ReadError):
    """There is no header where one should be."""

    def __init__(self) -> None:
        super().__init__("it is damaged where a file should begin; get it again")


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive: its name as it stands there, and where its content lies."""

    name: str
    size: int
    start: int
    link: str | None = None
    sparse: bool = False
    regular: bool = True


class Stream:
    """Bytes of a file in order; ``at`` counts them."""

    def __init__(self, file: IO[bytes], size: int | None = None) -> None:
        """``size``: of the file, which can then seek; None for one that is read forward only."""
        self.file, self.size, self.at = file, size, 0

    def take(self, count: int) -> bytes:
        """So many bytes.

        Raises:
            EOFError: there are fewer.
        """
        content = self.file.read(count)
        self.at += len(content)
        if len(content) < count:
            raise EOFError
        return content

    def skip_to(self, place: int) -> None:
        """Goes on from a later place.

        Raises:
            EOFError: it ends before.
        """
        if self.size is None:
            while self.at < place:
                self.take(min(place - self.at, 1 << 20))
        elif place > self.size:
            raise EOFError
        else:
            self.file.seek(place - self.at, io.SEEK_CUR)
            self.at = place


def members(stream: Stream, where: str) -> Iterator[Member]:
    """The members of an archive, to its end mark. Of the content of each, what the caller has not read is skipped.

    Args:
        where: how errors call the archive.

    Raises:
        EOFError: it is cut short.
        Damaged: a header is none.
        tarfile.ReadError: a header says what cannot be.
        UserError: a header is longer than anything honest.
    """
    said: dict[str, str] = {}  # by extended headers, of the next member
    while (block := stream.take(BLOCK)) != _ZEROS:
        size, kind = _checked(block), block[156:157]
        if kind in _EXTENDED:
            EXTENDED_HEADER.check(size, where)
            content = stream.take(size)
            stream.skip_to(_filled(stream.at))
            if kind == _LONG_NAME:
                said["path"] = _text(content)
            elif kind == _LONG_LINK:
                said["linkpath"] = _text(content)
            elif kind == _GLOBAL:
                if set(_SAID) & _records(content).keys():
                    raise tarfile.ReadError("a header gives all its files one name or size; unpack it, give the folder")
            else:
                said |= _records(content)
            continue
        name = said.get("path", _name(block))
        if "size" in said:
            size = _decimal(said["size"])
        regular = kind in _FILES and not (kind == b"\0" and name.endswith("/"))
        sparse = kind == _SPARSE or _SPARSE_RECORD in said
        link = said.get("linkpath", _text(block[_LINK])) if kind in _LINKS else None
        start, length = stream.at, 0 if kind in _EMPTY else size
        yield Member(name, size, start, link, sparse, regular)
        stream.skip_to(start + _filled(length))
        said = {}
    if said:
        raise Damaged


def _checked(block: bytes) -> int:
    """The size in a header whose checksum is right."""
    said = _octal(block[_SUM])
    ours = sum(block) - sum(block[_SUM]) + 8 * ord(" ")
    if said != ours:
        # Some old archivers took bytes for signed numbers.
        high = sum(1 for byte in block[:148] + block[156:] if byte > 127)
        if said != ours - 256 * high:
            raise Damaged
    field = block[_SIZE]
    if field[0] < 0x80:
        if (size := _octal(field)) is None:
            raise Damaged
        return size
    size = int.from_bytes(field[1:], "big", signed=False)
    if field[0] != 0x80 or size >= 1 << 63:
        raise tarfile.ReadError(
            "a file of a size below zero, or beyond any disk; it is not to be trusted, get it again"
        )
    return size


def _octal(field: bytes) -> int | None:
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.strip(b"01234567"):
        return None
    return int(digits or b"0", 8)


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise tarfile.ReadError(f"a file whose size is {text[:30]!r}; it is not to be trusted, get it again")
    return int(text)


def _filled(count: int) -> int:
    """Up to the next whole block."""
    return -(-count // BLOCK) * BLOCK


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _name(block: bytes) -> str:
    name, prefix = _text(block[_NAME]), _text(block[_PREFIX])
    return f"{prefix}/{name}" if prefix and block[257:263] == b"ustar\0" else name  # GNU has other things there


def _records(content: bytes) -> dict[str, str]:
    """The records of a pax header, each "length key=value" and a line break; those alone that say what a file is, since
    there may be any number of headers before a file."""
    found, at = {}, 0
    while at < len(content) and content[at]:  # zeros fill up the end
        digits, space, _ = content[at : at + 9].partition(b" ")
        length = int(digits) if digits.isdigit() and space else 0
        record = content[at + len(digits) + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if not (length and key and equals and value.endswith(b"\n") and at + length <= len(content)):
            raise Damaged
        name = _SPARSE_RECORD if key.startswith(_SPARSE_RECORD.encode()) else key.decode("utf-8", "replace")
        if name in (*_SAID, _SPARSE_RECORD):
            found[name] = value[:-1].decode("utf-8", "surrogateescape")
        at += length
    return found
