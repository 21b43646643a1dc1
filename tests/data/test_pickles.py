"""The pickle reader: what data files hold is read as the standard library reads it, everything else is refused."""

from __future__ import annotations

import base64
import pickle
import zlib

import numpy as np
import pytest

from ifsl_bench.data.pickle_pools import decode_text
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.pickles import load_pickle
from ifsl_bench.data.sets.tiered import read_label_rows
from ifsl_bench.utils.errors import UserError

# Written by Python 2.7.18 with NumPy 1.16.6, cPickle.dumps(value, protocol), then zlib and base64; value = {
#   'data': np.arange(48, dtype=np.uint8).reshape(2, 2, 4, 3), 'labels': [7, 3L], 'catname2label': {'n01': 3, 'n02': 7},
#   'ids': np.array([1, -2], dtype='<i4'), 'name': 'caf\\xe9\\n\\'"\\\\', 'text': u'\\u20ac',
#   'flags': (True, False, None), 'x': np.float64(0.5)}
PYTHON2 = {
    0: """
eNp1kt1q4zAQhe/nKfovb7tNNbKTOFDYa0PJxQZ6JVhkWQ4BxxW2DA704XvktKFLW/BnsDTHM+dISeWZNqJuzLYX5BUlhWQqpKR18Cn1G9Gavc
NOhipraj26lW61uNAai/NYMAqy7bD3h5l96dxsPzRhZ7rOHKi3pjEd+QUlxwqqwsE78ktK0DMXaEQFU/jrczRO0eJR0Hq9Lu4xQ0RSKDdCj1J+
j5N/RJSv4iDWhDisakzpGkzHkhLYi/5ayXFBUXH0JFX8TKlYUo/v4MYQFzJ61oOSxsai6TcxFJ5T0nhexGrzlD6RwW5lgol7y5/M/+ucfWn70A
02oC4/ZdBWxwLPq5g2hY0oJxMK8yKNpMCYeLI4bNhOWQ38KSvF72G9fg0rntwpMAYKpCADc7AAS5DrgHMcZQms7vB2AOfLUDKUDCVDyVAylAwl
Q8k5WAEDoGYLKgA912fnF5dX1zdaJL9u737fzx7grERcu2q6Xoq2MYntF+vpyfq741322XH28/U4Oeb/r0aNeer6g2mM2RtaCdA5
    """,
    2: """
eNp1kMtqwkAUhjNJ1Bi13rX3i72Y3qxKF10Uuu9AFsJAFy1ljLEKMXqSCShUKAVr7bP0oUp3fYm2YxS6KJ6B4QxnDt///0/iEJBGAk2LPrggvk
70MZFt2jFBIopBm19qsXALMkF9w/Y6vUHJ6DpmqeNZrE0dhw5U16AWdVQIzOZqgw16pgpBIjYvsIDRuAYhDUsEXeq6fv3Dy7+wwOpEEfz6uHqp
gUJiBmVTctWiddOC8BBUjUh2uQIRvs+bKkRxyCMyM/sMYjcSX/18fidB/78LS3cQ13DoDUkmkRuUUUgs0HzvmEbXdpnjGUyF5Fy53ZhNIYWFEU
F1rjytYaRhkR8ZS6zFTXmVuamMb+rxn6kJKQtIlORAMKSE1Ug0thRPJFPpTDaXX15ZXVvf2Nza3ins7u0fFLXDo+OT09IZT0JqN1zItpKtP3aO
s7E4mkLb53NofkGSE6IgnsY3f7K6V/oFrIeUKw==
    """,
}


def python2(protocol: int) -> bytes:
    return zlib.decompress(base64.b64decode(PYTHON2[protocol]))


def same(result, expected):
    if isinstance(expected, np.ndarray):
        assert isinstance(result, np.ndarray)
        assert result.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")
        assert result.shape == expected.shape
        if expected.size:  # NumPy 1 cannot compare empty arrays of the largest shapes
            np.testing.assert_array_equal(result, expected)
    elif isinstance(expected, dict):
        assert list(result) == list(expected)
        for key in expected:
            same(result[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(result) is type(expected)
        assert len(result) == len(expected)
        for a, b in zip(result, expected, strict=True):
            same(a, b)
    else:
        expected = expected.item() if isinstance(expected, np.generic) else expected
        assert type(result) is type(expected)
        assert result == expected


def loaded(content: bytes):
    return load_pickle(content, "x.pkl")


@pytest.mark.parametrize("protocol", PYTHON2)
def test_files_of_python_2_are_read_as_the_standard_library_reads_them(protocol):
    content = python2(protocol)
    expected = pickle.loads(content, encoding="bytes")
    assert expected[b"name"] == b"caf\xe9\n'\"\\"
    np.testing.assert_array_equal(expected[b"data"].reshape(-1), np.arange(48))
    same(loaded(content), expected)


VALUES = {
    "arrays": {
        "rows": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        "columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "part": np.arange(40)[::3],
        "axes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4).transpose(0, 2, 1),
        "big-endian": np.arange(5, dtype=">i4"),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(7, np.int16),
        "text": np.array(["ab", "cde"]),
        "bytes": np.array([b"ab", b"cde"]),
        "flags": np.array([True, False]),
        "none": np.array([], np.uint8),
    },
    "containers": [1, -1, 255, 256, 65536, 2**31, -(2**40), 10**400, 1.5, "", "é€😀", b"", b"\x00\xff" * 200, None,
                   True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [[1], [2]], {}, {1: {b"k": "v"}},
                   ["x"] * 2500],
    "scalars": [np.int32(7), np.float64(0.25), np.bool_(True), np.str_("ab"), np.uint8(3)],
}  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", VALUES)
def test_all_protocols_are_read_as_the_standard_library_reads_them(name, protocol):
    content = pickle.dumps(VALUES[name], protocol)
    same(loaded(content), pickle.loads(content))


def array_pickle(shape: tuple, dtype: str = "i8", raw: bytes = b"") -> bytes:
    """An array as Python 2 writes it, of a shape that no array need have."""
    parts = b"".join(pickle.dumps(n, 2)[2:-1] for n in shape)
    head = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01(" + parts + b"t"
    kind = b"cnumpy\ndtype\nU" + bytes([len(dtype)]) + dtype.encode() + b"K\x00K\x01\x87R"
    return head + kind + b"\x89U" + bytes([len(raw)]) + raw + b"tb."


@pytest.mark.parametrize(
    ("shape", "dtype", "raw"),
    [
        ((10**16, 0, 10**10), "i8", b""),
        ((0, 2**60), "i8", b""),
        ((0, 2**63 - 1), "u1", b""),
        ((0, 2**63), "u1", b""),
        ((0,) * 70, "i8", b""),
        ((1,) * 70, "u1", b"x"),
        ((1,) * 32, "u1", b"x"),
        ((2, 3), "U0", b""),
        ((3, 0, 5), "<i4", b""),
    ],
)
def test_shapes_are_read_that_numpy_can_have_and_others_refused(shape, dtype, raw):
    content = array_pickle(shape, dtype, raw)
    try:
        expected = np.frombuffer(raw, dtype).reshape(shape) if raw else np.empty(0, dtype).reshape(shape)
        expected = expected if expected.itemsize and expected.dtype == np.dtype(dtype) else None
    except (ValueError, OverflowError):
        expected = None
    if expected is None:
        with pytest.raises(UserError, match=r"x\.pkl is damaged "):
            loaded(content)
    else:
        same(loaded(content), expected)


class OneBatch(pickle._Pickler):
    """Writes all items of a list after a single mark, as other programs do."""

    _BATCHSIZE = 10**9


@pytest.mark.parametrize(
    ("pickler", "protocol"), [(pickle._Pickler, 3), (pickle._Pickler, 4), (OneBatch, 4), (pickle._Pickler, 5)]
)
def test_long_arrays_stay_in_the_file(pickler, protocol, tmp_path, traced):
    arrays = [np.random.default_rng(i).integers(0, 256, 1_000_000, np.uint8) for i in range(24)]
    with open(tmp_path / "x.pkl", "wb") as file:
        pickler(file, protocol).dump(arrays)
    sums = [int(array.sum()) for array in arrays]
    with open_tree(tmp_path) as tree, traced() as memory:
        assert [int(array.sum()) for array in load_pickle(tree.memory_map(tree.entry_by_path["x.pkl"]), "x")] == sums
    assert memory.peak < 8e6  # the file has 24


@pytest.mark.parametrize("protocol", [0, 2])
@pytest.mark.parametrize("rows", [299, 301])
def test_a_long_array_of_other_bytes_than_its_shape_is_damaged(rows, protocol):
    content = pickle.dumps([np.zeros((300, 300), np.uint8)], protocol)
    pattern, replacement = (
        (b"I300\n", b"I%d\n" % rows) if protocol == 0 else (b"M,\x01M,", b"M" + rows.to_bytes(2, "little") + b"M,")
    )
    wrong = content.replace(pattern, replacement, 1)
    assert wrong != content
    with pytest.raises(UserError, match=r"damaged.*90,000 bytes for an array uint8"):
        load_pickle(wrong, "x.pkl")


def test_what_is_nested_deeply_is_read_but_is_no_name(tmp_path):
    """Written out, it would exhaust the stack."""
    content = b"\x80\x04}U\x04data)" + 200_000 * b"\x85" + b"s."
    assert isinstance(load_pickle(content, "x.pkl")[b"data"], tuple)
    labels = b"U\x0elabel_specific]K\x00aU\x12label_specific_str](I1\nt" + 200_000 * b"\x85" + b"a"
    (tmp_path / "train_labels.pkl").write_bytes(b"\x80\x02}(" + labels + b"u.")
    with open_tree(tmp_path) as tree, pytest.raises(UserError, match="has a class 'a tuple', which is none of"):
        read_label_rows(tree, tree.entry_by_path["train_labels.pkl"], {})
    names = ["a", b"\xe9", np.str_("b"), np.bytes_(b"c"), 7, np.int64(8), True, 1.5, None, [["x"]], {}]
    texts = ["a", "é", "b", "c", "7", "8", "True", "a float", "a NoneType", "a list", "a dict"]
    assert list(map(decode_text, names)) == texts


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_cut_anywhere_is_said_to_be_cut(protocol):
    content = pickle.dumps({"data": np.arange(12, dtype=np.uint8), "labels": [1, 2], "names": ["é", b"x"]}, protocol)
    for length in range(len(content)):
        with pytest.raises(UserError, match=r"x\.pkl is (cut short|damaged|no pickle but)"):
            load_pickle(content[:length], "x.pkl")
