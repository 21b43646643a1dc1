"""Files that cannot be read, lead nowhere, or are not what was written."""

from __future__ import annotations

import errno
import os
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from ifsl_bench.data.read.arrays import translate_library_errors
from ifsl_bench.data.read.images import ImageSpec, decode_image
from ifsl_bench.utils.errors import CorruptFile, UserError, format_error
from ifsl_bench.utils.files import read_json, translate_read_errors
from ifsl_bench.utils.serialization import open_array, read_checksummed, write_checksummed
from tests.store.result_fields import altered

if os.name == "posix":
    import resource


def test_a_file_without_its_checksum_or_of_another_format_is_refused(tmp_path):
    path = tmp_path / "x.json"
    write_checksummed(path, {"a": 1})
    assert read_checksummed(path) == {"a": 1, "format": 2}
    altered(path, lambda value: value.pop("checksum"))
    with pytest.raises(CorruptFile, match="its checksum differs"):
        read_checksummed(path)
    for form in (1, 3, 0, True, "2", None):
        altered(path, lambda value, form=form: value.update(format=form))
        with pytest.raises(CorruptFile, match="this version reads 2"):
            read_checksummed(path)


@pytest.mark.parametrize("kind", [errno.EACCES, errno.EIO])
def test_what_cannot_be_read_is_not_taken_for_damaged(tmp_path, kind):
    """It may be sound: nothing is set aside, nothing made again."""
    with (
        pytest.raises(UserError, match=r"cannot read .*x\.json: ") as error,
        translate_read_errors(tmp_path / "x.json"),
    ):
        raise OSError(kind, os.strerror(kind))
    assert not isinstance(error.value, CorruptFile)


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_lack_of_open_files_or_memory_is_no_damage(tmp_path):
    """So nothing is set aside or made again, and no download is advised."""
    np.save(tmp_path / "a.npy", rows := np.zeros((4, 4), np.float32))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError, match="open files"):
            open_array(tmp_path / "a.npy", rows.shape, "<f4")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    Image.new("L", (4, 4)).save(png := BytesIO(), "png")
    with pytest.raises(MemoryError):  # at once: a line would have more bytes than Pillow counts
        decode_image(png.getvalue(), ImageSpec(1 << 30, fit_mode="stretch"))
    for library in (np, torch):
        with (
            pytest.raises((MemoryError, RuntimeError), match="allocate") as error,
            translate_library_errors("a.pt is damaged"),
        ):
            library.empty(1 << 45)
        assert format_error(error.value).startswith("not enough memory: end other programs, or take fewer --jobs; ")


def test_links_to_nowhere_and_to_themselves_are_one_line_or_made_again(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CorruptFile, match="is not a file"):
        read_json(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        read_checksummed(tmp_path / "dangling")
    write_checksummed(tmp_path / "dangling", {"a": 1})
    assert not (tmp_path / "dangling").is_symlink()
