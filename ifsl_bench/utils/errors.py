"""Errors of users.

Every mistake a user can make ends as a :class:`UserError`: one line with the mistake, its place, and what to do. The
command line prints it and exits with status 2.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import traceback
from collections.abc import Iterable

# Characters that end a line, steer a terminal or turn the direction of writing, invisible ones, by which two
# names look alike, and halves of characters, which no terminal can show; the name of a file, and what a file holds, may
# have them. The joiners U+200C and U+200D are not among them: Persian, and the signs for people, are written with them.
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def escape_controls(text: str) -> str:
    r"""Return text with line breaks and other :data:`CONTROL_CHARACTERS` written as in Python, ``\n``, ``\x1b``."""
    return CONTROL_CHARACTERS.sub(lambda match: repr(match[0])[1:-1], text)


def is_printable(text: str) -> bool:
    """Return whether :func:`escape_controls` leaves a text as it is."""
    return CONTROL_CHARACTERS.search(text) is None


class UserError(Exception):
    """A mistake of the user's, or a state of the machine that the user can change.

    Example:
        >>> try:
        ...     ifsl_bench.table("glyphs-6shot")
        ... except ifsl_bench.UserError as error:
        ...     print(str(error).partition(";")[0])
        unknown task 'glyphs-6shot'
    """

    def __str__(self) -> str:
        return escape_controls(super().__str__())


def format_error(error: BaseException) -> str:
    """Format an error in one line, with its class unless it is the user's mistake or the machine's refusal."""
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        where, other = (
            ("", "") if type(error).__name__ != "OutOfMemoryError" else (" on the accelerator", ", or --device cpu")
        )
        return (
            f"not enough memory{where}: end other programs, or take fewer --jobs{other}; the same command goes on from "
            "where it stopped"
        )
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return escape_controls(f"the system refused{where}: {error.strerror or error}")
    return escape_controls(format_class_and_message(error))


MACHINE_ERRNOS = (
    *(errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was short, here or on an accelerator, whose error PyTorch defines."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator: " in str(error)


def is_refused_by_machine(error: BaseException) -> bool:
    """Return whether memory, open files, permission or the disk failed, so that the file that was read may be sound."""
    return is_out_of_memory(error) or (isinstance(error, OSError) and error.errno in MACHINE_ERRNOS)


MAX_MESSAGE_CHARACTERS = 1000  # characters of another library's message


def format_class_and_message(error: BaseException) -> str:
    """Return "ValueError: its message", cut if long, or the class alone where there is none that can be had."""
    try:
        message = str(error)
    except Exception:  # of a class of the user's own
        message = ""
    message = (
        f"{message[:MAX_MESSAGE_CHARACTERS]} ..." if len(message) > MAX_MESSAGE_CHARACTERS else message
    )  # of a whole tensor, say
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class MissingDependencyError(UserError):
    """A package that has to be installed first."""


class CorruptFile(UserError):
    """A file of this package that is cut short, changed, or of another version."""


MAX_LISTED_NAMES = 12  # names; more are no help in a line


def unknown_name_error(kind: str, name: object, choices: Iterable[str], where: str = "", see: str = "") -> UserError:
    """Return the error for a name that is not in a list, with the nearest three names, or all where they are few.

    Args:
        kind: of the thing.
        name: that is unknown.
        choices: all names.
        where: the list in words.
        see: the command that shows all of them, if they are many.
    """
    names = sorted(set(choices))
    lower = {choice.lower(): choice for choice in reversed(names)}  # LR+A means lr+a
    near = [lower[choice] for choice in difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.5)]
    near = near[:1] if near and near[0].lower() == str(name).lower() else near
    shown = repr(name[:80] if isinstance(name, str) else name)
    hint = f" did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    if len(names) <= MAX_LISTED_NAMES:
        listed = f"available: {', '.join(names) or 'none'}"
    else:
        some = "" if near else f"{', '.join(names[:3])}, ... "
        listed = f"all of them: {see}" if see else f"available: {some}({len(names):,})"
    return UserError(f"unknown {kind} {shown}{f' {where}' if where else ''};{hint} {listed}")


def format_error_location(error: BaseException, file: str = "", among: str = "") -> str:
    """Return the place of an exception: "line 3: " in ``file``, or "x.py line 3: " in the innermost file.

    Args:
        error: an exception with a traceback.
        file: whose line is sought; "" for any.
        among: a file; where the exception went through its folder, the innermost place there is returned, not one in a
            library that was called.
    """
    if isinstance(error, SyntaxError) and error.filename == file and error.lineno:
        return f"line {error.lineno}: "
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not file or f.filename == file]
    if not frames:
        return ""
    frames = [f for f in frames if among and os.path.dirname(f.filename) == os.path.dirname(among)] or frames
    return f"line {frames[-1].lineno}: " if file else f"{frames[-1].filename} line {frames[-1].lineno}: "
