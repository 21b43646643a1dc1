"""Arrays and pickles made to run code, to fill the memory or to end in a traceback: each ends in one line."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from ifsl_bench.data.pickle_pools import text
from ifsl_bench.data.read.archive import open_tree
from ifsl_bench.data.read.pickles import load
from ifsl_bench.data.sets.tiered import read_labels
from ifsl_bench.utils import limits
from ifsl_bench.utils.errors import UserError
from tests.data.helpers import refused
from tests.data.test_hostile_archives import zeros_deflated, zipped

MB = 1 << 20


def npy(header: str, data: bytes = b"", length: int | None = None) -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x02\0" + struct.pack("<I", len(text) if length is None else length) + text + data


def _said(descr: str = "'<f4'", shape: str = "(4, 3)", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n"


HEADERS = {
    "no .npy at all": (b"PK\x03\x04 what is this", "the magic string is not correct"),
    "shape of 10^18": (npy(_said(shape="(1000000000, 1000000000)"), b"x" * 48), "greater than file size"),
    "shape below zero": (npy(_said(shape="(-4, -3)"), b"x" * 48), "negative dimensions"),
    "shape of 5,000 digits": (npy(_said(shape=f"({'9' * 5000}, 1)")), "Exceeds the limit|damaged"),
    "shape that is a number": (npy(_said(shape="12"), b"x" * 48), "shape is not valid"),
    "nested deep": (npy("(" * 9000), "damaged"),
    "a long sum": (npy("-" * 9000 + "1"), "damaged"),
    "a call": (npy("__import__('os').system('true')"), "damaged"),
    "objects": (npy(_said("'|O'"), b"x" * 96), "Python objects"),
    "records": (npy(_said("[('a', '<f4')]"), b"x" * 48), "of records"),
    "no columns": (npy(_said(shape="(4, 0)")), r"found features float32\[4, 0\]"),
    "one axis": (npy(_said(shape="(12,)"), b"x" * 48), r"found features float32\[12\]"),
}


def features(folder: Path, content: bytes, labels: np.ndarray | None = None) -> Path:
    """The first of six files, with that as features.npy."""
    folder.mkdir()
    out = io.BytesIO()
    np.save(out, np.arange(4) if labels is None else labels)
    with zipfile.ZipFile(folder / "base-train.npz", "w") as archive:
        archive.writestr("features.npy", content)
        archive.writestr("labels.npy", out.getvalue())
    return folder


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_of_arrays_are_refused_in_one_line(name, tmp_path, home, traced):
    content, message = HEADERS[name]
    with traced() as memory:
        refused(home, "own", features(tmp_path / "f", content), rf"base-train\.npz.*({message})")
    assert memory.peak < 20e6


def test_a_bomb_in_an_npz_file_is_refused(tmp_path, home, traced):
    megabytes = 300
    start = npy(_said(shape=f"({megabytes * MB // 16}, 4)"))
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed_head = machine.compress(start) + machine.flush(zlib.Z_FULL_FLUSH)
    content = zipped(
        [
            (b"features.npy", 8, packed_head + zeros_deflated(megabytes), len(start) + megabytes * MB, 0),
            (b"labels.npy", 0, b"", 0, 0),
        ]
    )
    (tmp_path / "base-train.npz").write_bytes(content)
    with traced() as memory:
        refused(home, "own", tmp_path, "expands to more than 200 times its size")
    assert memory.peak < 50e6


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0x110000, 1, 2, 3], np.uint32).view("<U1"), "a label is no text"),
        (np.array([[65, 1], [65, 0xD800], [66, 66], [67, 67]], ">u4").view(">U2")[:, 0], "a label is no text"),
        (np.arange(4) + 0.5, "labels must be integers or strings"),
        (np.array([b"a", b"b", b"c", b"d"]), "labels must be integers or strings"),
        (np.arange(5), r"labels int64\[5\]"),
    ],
)
def test_labels_that_are_none_are_refused(labels, message, tmp_path, home):
    out = io.BytesIO()
    np.save(out, np.zeros((4, 3), np.float32))
    refused(home, "own", features(tmp_path / "f", out.getvalue(), labels), rf"base-train\.npz.*{message}")


@pytest.mark.parametrize(
    "content", [b"\x80\x02]" + b"]" * 3_000, b"\x80\x02" + b"(" * 3_000, b"\x80\x02" + b"N0" * 1_500]
)
def test_a_pickle_of_endless_values_is_refused(content, monkeypatch):
    monkeypatch.setattr("ifsl_bench.data.read.pickles.PICKLE_STEPS", limits.Limit(2_000, limits.PICKLE_STEPS.error))
    with pytest.raises(UserError, match=r"x\.pkl makes more than 2,000 values"):
        load(content, "x.pkl")


def test_a_pickle_of_endless_strings_is_refused_and_one_of_large_arrays_is_not(monkeypatch):
    monkeypatch.setattr("ifsl_bench.data.read.pickles.PICKLE_BYTES", limits.Limit(50_000, limits.PICKLE_BYTES.error))
    strings = [f"{i:0200}" for i in range(1_000)]
    with pytest.raises(UserError, match=r"x\.pkl holds more than 50,000 bytes of names and numbers"):
        load(pickle.dumps(strings), "x.pkl")
    arrays = [np.zeros(100_000, np.uint8) for _ in range(300)]
    assert len(load(pickle.dumps(arrays, 4), "x.pkl")) == 300


def test_a_name_that_no_terminal_can_show_is_written_out():
    with pytest.raises(UserError, match=r"it holds the name x\\ud800\._frombuffer"):
        load(b"\x80\x04Vx\\ud800\n\x8c\x0b_frombuffer\x93.", "x.pkl")


class Runs:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])  # names are lines, and from 4 on texts
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda path: Runs(os.system, f"touch {path}"), f"{os.system.__module__}.system"),
        (lambda path: Runs(eval, f"open({str(path)!r}, 'w')"), r"builtins\.eval|__builtin__\.eval"),
        (lambda path: {"data": np.zeros(3), "labels": [Runs(open, str(path), "w")]}, r"io\.open"),
        (lambda path: Path(path), r"pathlib\.|pathlib\._local\."),
        (lambda path: collections.OrderedDict(a=1), r"collections\.OrderedDict"),
        (lambda path: np.ma.masked_array([1, 2], [0, 1]), r"numpy\.ma\."),
    ],
)
def test_whatever_else_a_pickle_names_is_refused_by_name(value, named, protocol, tmp_path):
    target = tmp_path / "made"
    content = pickle.dumps(value(target), protocol)
    with pytest.raises(UserError, match=rf"evil\.pkl is refused: it holds .*({named})"):
        load(content, "evil.pkl")
    assert not target.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"(S'touch x'\nios\nsystem\n.", r"the name os\.system"),  # INST, as Python 2 wrote objects
        (b"cos\nsystem\n(S'touch x'\ntR.", r"the name os\.system"),
        (b"\x80\x02(cos\nsystem\nU\x01xo.", r"the name os\.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.", r"the name os\.system"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.", r"the name numpy\.dtype\.__class__"),
        (b"\x80\x02\x82\x01.", "unregistered extension"),
        (b"\x80\x02U\x01xQ.", "a reference to something outside"),
        (b"\x80\x05\x97.", "out-of-band data"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "not a type object"),
        (b"\x80\x02cnumpy\nndarray\nK\x02\x85R.", r"a call of numpy\.ndarray"),
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x03\x00\x00\x00hex\x86R.", "encoded as 'hex'"),
        (b"\x80\x02cnumpy\nndarray\n}U\x01xK\x01sb.", "a state for"),
        (b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.", "an array of type 'O8'"),
        (b"\x80\x09K\x01.", "no pickle but a file of no known kind|protocol 9"),
    ],
)
def test_hand_made_pickles_are_refused(content, message):
    with pytest.raises(UserError, match=message):
        load(content, "x.pkl")


DEEP = b")" + 2_000 * b"\x85"  # a tuple in a tuple in a tuple ...; a million would end the interpreter


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"}" + DEEP + b"K\x01s.", "a tuple among keys"),
        (b"}(" + DEEP + b"K\x01u.", "a tuple among keys"),
        (b"(" + DEEP + b"K\x01d.", "a tuple among keys"),
        (b"}" + DEEP + b"K\x01sU\x04datas.", "a tuple among keys"),
        (b"\x8f(" + DEEP + b"\x90.", "a set"),
        (b"(" + DEEP + b"\x91.", "a set"),
        (b"cnumpy\ndtype\n" + DEEP + b"\x85R.", "an array of type a tuple"),
        (b"c_codecs\nencode\nU\x01x" + DEEP + b"\x86R.", "text to be encoded as a tuple"),
        (b"}U\x01aK\x01sG?\xe0\x00\x00\x00\x00\x00\x00K\x01s.", "a float among keys"),
    ],
)
def test_values_that_would_exhaust_the_stack_are_refused(content, message):
    with pytest.raises(UserError, match=rf"x\.pkl is refused: it holds {message}"):
        load(b"\x80\x04" + content, "x.pkl")


def test_a_deep_value_that_nobody_looks_at_is_read():
    content = b"\x80\x04}U\x04data)" + 200_000 * b"\x85" + b"s."
    assert isinstance(load(content, "x.pkl")[b"data"], tuple)
    shape = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + DEEP
    with pytest.raises(UserError, match=r"damaged .*an array whose shape"):
        load(b"\x80\x02" + shape + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89U\x01xtb.", "x.pkl")


def test_a_name_that_is_something_nested_deeply_is_no_name(tmp_path):
    """Written out, it would exhaust the stack."""
    labels = b"U\x0elabel_specific]K\x00aU\x12label_specific_str](I1\nt" + 200_000 * b"\x85" + b"a"
    (tmp_path / "train_labels.pkl").write_bytes(b"\x80\x02}(" + labels + b"u.")
    with open_tree(tmp_path) as tree, pytest.raises(UserError, match="has a class 'a tuple', which is none of"):
        read_labels(tree, tree.by_path["train_labels.pkl"], {})
    names = ["a", b"\xe9", np.str_("b"), np.bytes_(b"c"), 7, np.int64(8), True, 1.5, None, [["x"]], {}]
    texts = ["a", "é", "b", "c", "7", "8", "True", "a float", "a NoneType", "a list", "a dict"]
    assert list(map(text, names)) == texts


@pytest.mark.parametrize(
    "array", [np.array([1, "a"], object), np.zeros(2, [("x", "i4")]), np.array(["2020-01-01"], "M8[D]")]
)
def test_arrays_of_objects_records_and_dates_are_refused(array):
    with pytest.raises(UserError, match="refused: it holds an array of"):
        load(pickle.dumps(array), "x.pkl")


@pytest.mark.parametrize("protocol", range(6))
def test_a_file_cut_anywhere_is_said_to_be_cut(protocol):
    content = pickle.dumps({"data": np.arange(12, dtype=np.uint8), "labels": [1, 2], "names": ["é", b"x"]}, protocol)
    for length in range(len(content)):
        with pytest.raises(UserError, match=r"x\.pkl is (cut short|damaged|no pickle but)"):
            load(content[:length], "x.pkl")


@pytest.mark.parametrize("start", [b"\x8b\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 6 + b"\x00\x00", b"T\xff\xff\xff\x7f",
                                   b"X\xff\xff\xff\x7f", b"\x96" + b"\xff" * 6 + b"\x00\x00", b"]S'"])  # fmt: skip
def test_a_false_length_claims_no_memory(start, traced):
    content = b"\x80\x02" + start + b"x" * 100_000
    with traced() as memory, pytest.raises(UserError, match=r"is (cut short|damaged)"):
        load(content, "x.pkl")
    assert memory.peak < 4e6


def test_functions_of_the_reader_cannot_be_changed_by_a_pickle():
    state = b"}U\x0c__defaults__K\x01s"
    for names in (b"c_codecs\nencode\n", b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\nscalar\n"):
        with pytest.raises(UserError, match="refused: it holds a state for a function"):
            load(b"\x80\x02" + names + b"N" + state + b"\x86b.", "x.pkl")
