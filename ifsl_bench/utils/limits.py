"""Limits on untrusted files, each with its error, and its reason above it.

A limit is far above what honest files hold, and low enough that reading up to it takes seconds and well under 1 GB.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ifsl_bench.utils.errors import UserError

IMAGE_BYTES_VARIABLE = "IFSL_BENCH_LARGEST_IMAGE"  # environment variable; in MB (10^6 bytes)


@dataclass(frozen=True)
class Limit:
    """A largest value, and the message for what exceeds it."""

    maximum: int  # the largest value that passes
    error_template: str  # the text behind the name of the thing; `{value}` and `{most}` are filled in

    def check(self, value: int, where: str, kind: type[Exception] = UserError) -> None:
        """Raise an error if a value is beyond the limit.

        Args:
            value: what was counted or measured, in the unit of the limit.
            where: the name of the thing in the error.
            kind: the class of the error.
        """
        if value > self.maximum:
            numbers = {"value": _format_large_number(value), "most": _format_large_number(self.maximum)}
            raise kind(f"{where} {self.error_template.format(**numbers)}")


def _format_large_number(number: int) -> str:
    """Return a number with commas; one beyond any real size by its power of two."""
    return f"{number:,}" if number < 1 << 64 else f"2^{number.bit_length() - 1} or more"


def read_text(path: Path, limit: Limit, encoding: str = "utf-8") -> str:
    """Return a text file that is at most as long as a limit.

    Args:
        path: of the file.
        limit: in characters.
        encoding: of the text.

    Raises:
        UserError: it is longer.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    with open(path, encoding=encoding) as file:
        text = file.read(limit.maximum + 1)
    limit.check(len(text), str(path))
    return text


# -- archives

# ILSVRC-2012 has 1.43 million. The list of members is in memory, 600 bytes for each at the most.
ARCHIVE_MEMBERS = Limit(1_500_000, "holds {value} files, more than {most}; give a smaller folder or archive")
# PATH_MAX of Linux; no tool could unpack a longer one.
ARCHIVE_PATH_CHARACTERS = Limit(
    4096,
    "holds a file whose path has {value} characters, more than {most}; it is damaged or not to be trusted, get another "
    "copy",
)
# 1.5 million entries of 170 bytes. Python's reader has it in memory whole, whatever is in it.
ZIP_DIRECTORY_BYTES = Limit(
    1 << 28,
    "has a list of files of {value} bytes, more than {most}; give a smaller archive, or unpack it and give the folder",
)
# It holds a path, and perhaps what macOS adds to a file. Python before 3.11.10 takes time quadratic in its length.
TAR_EXTENDED_HEADER_BYTES = Limit(
    1 << 14,
    "holds an extended header of {value} bytes, more than {most}; it is damaged or not to be trusted, get another copy",
)
# Images and features expand 1 to 20 times; deflate can 1,032 times, bzip2 a million times.
EXPANSION_RATIO = Limit(
    200,
    "expands to more than {most} times its size, so it seems made to fill the memory; get another copy, or unpack it "
    "yourself and give the folder",
)
HARMLESS_EXPANDED_BYTES = (
    1 << 28
)  # bytes up to which anything may expand as it likes: a file of zeros is small and harmless

# -- files that are read whole

# A line of 50 characters for each of 20,000 classes is 1 MB. All lines are in memory.
SPLIT_FILE_CHARACTERS = Limit(
    1 << 22, "has more than {most} characters; a list of classes is shorter, is it the right file?"
)
# It is parsed whole, in Python.
TOML_FILE_CHARACTERS = Limit(
    1 << 18, "has more than {most} characters; such a file has a few thousand, is it the right one?"
)
# Python's parser takes memory that is quadratic in the parts of a key; 100,000 of them fill a machine.
TOML_LINE_DOTS = Limit(200, "has a line with {value} dots, more than {most}; break it into several")
# It is parsed whole. Whole numbers of 2 bytes make objects of 40: read up to here, a file of them takes 0.5 GB.
RESULT_FILE_BYTES = Limit(
    1 << 25, "has more than {most} bytes; a result of 2,000 episodes has 20,000, is it the right file?"
)
# It is read whole, twice as large in memory. In half precision that is 500 million parameters.
WEIGHTS_FILE_BYTES = Limit(
    1 << 30,
    "has {value} bytes, more than {most}; the weights of a backbone have 2 to 50 million, is it the right file?",
)
# A tensor takes 100 bytes there, a backbone has a few hundred. It is parsed whole, in Python.
WEIGHTS_HEADER_BYTES = Limit(
    1 << 22, "has a header of {value} bytes, more than {most}; it is damaged or not to be trusted, get another copy"
)
# The largest vision transformers have 6 billion parameters, in half precision 12 GB; those in use have 1 to 2.
FOREIGN_WEIGHTS_FILE_BYTES = Limit(
    8 << 30, "has {value} bytes, more than {most}; no network that fits one accelerator is that large"
)
# Networks have thousands.
FOREIGN_WEIGHTS_TENSORS = Limit(100_000, "holds {value} tensors, more than {most}; it is no file of weights")
# NumPy gives every text of an array the room of the longest.
ROW_LABEL_CHARACTERS = Limit(
    1000, "has {value} characters, more than {most}; a label is shorter, is it the right file?"
)
# Beside those that belong to long arrays. A byte of a pickle makes an object of 50 to 250 bytes.
PICKLE_VALUES = Limit(
    3_500_000,
    "makes more than {most} values, which no data set has; it is damaged or not to be trusted, get another copy",
)
# Of strings up to 4 KiB and of lines of text, which are copied into memory.
PICKLE_BYTES = Limit(
    1 << 28,
    "holds more than {most} bytes of names and numbers beside its arrays; it is damaged, not to be trusted, or in the "
    "text protocol (0), whose arrays are in memory whole: write it again in protocol 2 or later",
)

# -- images

# A pixel takes 4 to 20 bytes.
IMAGE_PIXELS = Limit(1 << 26, "has {value} pixels, too many to decode (more than {most})")
# A progressive JPEG has about 10. Each is a pass over all pixels: 20,000 of 14 bytes, on 49 million, took 98 s.
JPEG_SCANS = Limit(500, "has {value} scans, more than {most}; it is made to take hours to decode")
# An image of 65,536 rows has two for each at the most. Pillow makes an object of each: 10 million took 25 s.
TIFF_VALUES = Limit(1_000_000, "has {value} values in its header, more than {most}; it is made to take minutes to open")
# JPEG has no longer ones. Pillow takes 8 bytes a row: 2.4 GB for an image of 1 x 67 million.
IMAGE_SIDE = Limit(1 << 16, "has a side of {value} pixels, too many to decode (more than {most})")


def image_bytes_limit() -> Limit:
    """Return the limit on an encoded image and other files that are read whole: 256 MB, unless the environment sets it.

    Raises:
        UserError: the environment variable is no whole number of MB.
    """
    setting = os.environ.get(IMAGE_BYTES_VARIABLE, "256")
    if not (setting.isascii() and setting.isdigit() and int(setting[:9]) >= 1 and len(setting) < 10):
        raise UserError(f"{IMAGE_BYTES_VARIABLE} is {setting[:40]!r}, expected a whole number of MB, 1 or more")
    # An encoded image is in memory whole, several at a time; photographs have 0.1 to 50 MB.
    return Limit(
        int(setting) * 10**6,
        "has {value} bytes, more than {most}: too large for an encoded image; if it is one, set the environment "
        f"variable {IMAGE_BYTES_VARIABLE} to more MB",
    )
