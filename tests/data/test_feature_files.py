"""Frozen features as people write them: .npz, .pt and .safetensors files, in folders and archives."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ifsl_bench.data.pools import POOL_NAMES
from ifsl_bench.data.preparing.prepare import prepare_dataset
from ifsl_bench.data.read.arrays import read_npz_arrays
from ifsl_bench.data.sets.feature_files import mean_cosine_similarity
from ifsl_bench.data.suggested_tasks import list_infeasible_tasks
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.protocols.tasks.variants import TaskChanges, apply_task_changes
from ifsl_bench.utils.progress import Reporter
from tests.data.helpers import refused


def saved_as(folder: Path, suffix: str, label: Callable[[np.ndarray], object]) -> Path:
    """The same features in files of another kind, with labels as ``label`` makes them."""
    target = folder.with_name(f"{folder.name}{suffix}")
    target.mkdir()
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            features, labels = file["features"], label(file["labels"])
        if suffix == ".npz":
            np.savez(target / path.name, features=features, labels=labels)
            continue
        tensor = labels if isinstance(labels, list) else torch.from_numpy(labels)
        content = {"features": torch.from_numpy(features), "labels": tensor}
        (save_file if suffix == ".safetensors" else torch.save)(content, target / f"{path.stem}{suffix}")
    return target


def numbers(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda labels: labels.astype(kind)


@pytest.mark.parametrize(
    ("suffix", "label"),
    [
        (".npz", numbers("f4")),
        (".npz", numbers(">i2")),
        (".pt", numbers("i2")),
        (".pt", lambda labels: labels.tolist()),
        (".pt", lambda labels: [float(value) for value in labels]),
        (".safetensors", numbers("i4")),
    ],
)
def test_every_way_to_write_them_makes_the_same_data_set(suffix, label, features_folder, home):
    first = prepare_dataset(home, "first", features_folder, False, Reporter())
    again = prepare_dataset(home, "again", saved_as(features_folder, suffix, label), False, Reporter())
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_of_every_width_are_those_that_torch_reads(kind, suffix, features_folder, home):
    wide = torch.randn(60, 32, generator=torch.Generator().manual_seed(0)).to(kind)
    content = {"features": wide[:, 1::2].contiguous(), "labels": (torch.arange(70) % 5 + 900)[10:]}
    (features_folder / "novel-test.npz").unlink()
    path = features_folder / f"novel-test{suffix}"
    if suffix == ".pt":
        torch.save({**content, "features": wide[:, 1::2]}, path)  # with the strides of a part
    else:
        save_file(content, path)
    pool = prepare_dataset(home, "mine", features_folder, False, Reporter()).pool("novel/test")
    order = np.argsort(content["labels"].numpy(), kind="stable")
    np.testing.assert_array_equal(pool.images, content["features"].float().numpy()[order])


@pytest.mark.parametrize("kind", ["u1", ">f4", "U3"])
def test_arrays_of_numpy_in_a_pt_file_are_read(kind, features_folder, home):
    features, labels = np.random.default_rng(0).normal(size=(60, 16)), (np.arange(60) // 12 + 250).astype(kind)
    (features_folder / "novel-test.npz").unlink()
    torch.save({"features": features, "labels": labels}, features_folder / "novel-test.pt")
    pool = prepare_dataset(home, "mine", features_folder, False, Reporter()).pool("novel/test")
    np.testing.assert_array_equal(pool.images, features.astype(np.float32))


# -- files that are none


def holding(features: object, labels: object) -> Callable[[Path], None]:
    return lambda path: torch.save({"features": features, "labels": labels}, path)


class Evil:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (open, ("owned", "w"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(b"<html>sorry</html>"), "no readable .pt file but an HTML page"),
        (lambda p: p.write_bytes(pickle.dumps({})), "a Python pickle; get it again, or save it again by torch 1.6"),
        (lambda p: p.write_bytes(p.read_bytes()[:300]), "no readable .pt file: it is damaged"),
        (holding(Evil(), [1]), "is refused by torch.load.*GLOBAL .*open; save a dict"),
        (lambda p: torch.save([1, 2], p), "holds a list, expected a dict of tensors"),
        (lambda p: torch.save({"x": torch.zeros(2)}, p), "lacks 'features', 'labels'; it has x"),
        (holding(torch.zeros(3), [1, 2, 3]), r"features float32\[3\], lab"),
        (holding(torch.zeros(3, 16), [1, 2, "c"]), "a list of int and str"),
        (holding(torch.zeros(2, 16), ["a", "b" * 2000]), "2,000 characters"),
        (holding(torch.zeros(2, 16), torch.tensor([1, 2.5])), "2.5 in row 1"),
        (holding(torch.zeros(2, 16), torch.tensor([1, torch.nan])), "nan in row 1"),
        (holding(torch.zeros(1).expand(2, 16), [1, 2]), r"\[2, 16\] in a storage of 4 bytes"),
    ],
)  # fmt: skip
def test_a_pt_file_that_is_none_is_refused(damage, message, features_folder, home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = saved_as(features_folder, ".pt", numbers("i8"))
    path = folder / "novel-val.pt"
    content = torch.load(path)
    torch.save({"features": torch.zeros(105, 16), "labels": content["labels"].repeat(2)[:105]}, path)
    damage(path)
    refused(home, "mine", folder, message)
    assert not Path("owned").exists()


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "no readable .safetensors file: it is an HTML page"),
        (b"\xff" * 8 + b"{}", "header too large"),
        (headed(b"{}"), "lacks 'features', 'labels'; it has nothing"),
        (headed(b"{'a'}"), "invalid JSON in header"),
        (headed(b'{"a":' * 13107), r"novel-val\.safetensors is no readable \.safetensors file: it is damaged"),
        (headed(b'{"a":{"dtype":"F32","shape":[4,6],"data_offsets":[0,9600000]}}') + bytes(96), "it is damaged"),
        (headed(b'{"a":{"dtype":"F32","shape":[4,6],"data_offsets":[96,0]}}') + bytes(96), "it is damaged"),
    ],
)
def test_a_safetensors_file_that_is_none_is_refused(content, message, features_folder, home):
    folder = saved_as(features_folder, ".safetensors", numbers("i8"))
    (folder / "novel-val.safetensors").write_bytes(content)
    refused(home, "mine", folder, message)


# -- what an import finds, rather than a run

NEW = np.arange(60) % 5 + 1000  # labels of classes that no other pool has


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "base-val.npz").write_bytes(b"<html>"), "but an HTML page"),
        (lambda f: np.save(open(f / "base-val.npz", "wb"), np.zeros(3)), "no readable .npz"),  # noqa: SIM115
        (lambda f: np.savez(f / "base-val.npz", features=np.zeros((3, 16))), "lacks 'labels'"),
        (lambda f: np.savez(f / "base-val.npz", features=np.zeros((3, 9)), labels=np.arange(3)), "9 features a row"),
        (lambda f: np.savez(f / "base-val.npz", features=np.zeros((3, 16)), labels=np.arange(3)), "same classes"),
        (lambda f: np.savez(f / "novel-test.npz", features=np.full((60, 16), np.inf), labels=NEW), "in 60 rows"),
        (lambda f: (f / "base-test.npz").unlink(), "base-test.npz is missing; .* six files: .* each .npz or"),
        (lambda f: shutil.copy(f / "base-val.npz", f / "base-val.pt"), "holds base-val.npz and base-val.pt; leave one"),
        (lambda f: keep(f / "novel-val.npz", lambda y: y < 204), "5 novel classes, novel/val has 4"),
        (lambda f: keep(f / "novel-train.npz", lambda y: y < 104), "5 novel classes, novel/train has 4"),
        (lambda f: keep(f / "novel-test.npz", lambda y: (y != 301) | (np.cumsum(y == 301) < 8)), "need 10 images"),
        (lambda f: keep(f / "base-val.npz", lambda y: first_of_each(y, 4)), "25 base queries, base/val has 16"),
        (lambda f: shutil.copy(f / "novel-val.npz", f / "novel-test.npz"), "is in novel-val.npz and in novel-test"),
    ],
)  # fmt: skip
def test_bad_features_and_too_little_are_found_when_they_are_prepared(change, message, features_folder, home):
    change(features_folder)
    refused(home, "mine", features_folder, message)
    assert not home.tasks.exists()


# -- intact files of another type


@pytest.mark.parametrize(
    ("convert", "remedy"),
    [
        (
            lambda x, y: (x, y.astype(object)),
            r"'labels' of .* Python objects.* labels\.astype\(str\) .* labels\.astype\(int\)",
        ),
        (lambda x, y: (x.astype(object), y), r"'features' of .* features\.astype\('float32'\) for numbers"),
        (lambda x, y: (x, y.astype("M8[s]")), r"an array of type datetime64\[s\]; .* save labels"),
        (lambda x, y: (x.astype("f2").view("V2"), y), r"an array of type \|V2; .* save features"),
        (lambda x, y: (x, np.char.encode(y.astype(str))), r"found \|S\d+; save numpy\.char\.decode\(labels\)"),
        (lambda x, y: (x.astype(int), y), r"found features int64\[98, 16\], .* save features\.astype\('float32'\)"),
    ],
)
def test_arrays_of_another_type_are_refused_with_the_conversion(convert, remedy, features_folder, home):
    path = features_folder / "novel-test.npz"
    with np.load(path) as file:
        features, labels = convert(file["features"], file["labels"])
    np.savez(path, features=features, labels=labels)
    assert "damaged" not in refused(home, "mine", features_folder, remedy)


@pytest.mark.parametrize(
    ("features", "labels", "remedy"),
    [
        (torch.eye(5, 16).to_sparse(), [1, 2], r"'features' of .* a sparse tensor; save features\.to_dense\(\)"),
        (torch.eye(5, 16).to_sparse_csr(), [1, 2], r"a sparse tensor; save features\.to_dense\(\)"),
        (torch.quantize_per_tensor(torch.eye(5, 16), 0.1, 0, torch.qint8), [1], r"save features\.dequantize\(\)"),
        (torch.nested.nested_tensor([torch.eye(2)]), [1], r"a nested tensor; save features\.to_padded_tensor"),
        (torch.eye(5, 16, device="meta"), [1], "on the device 'meta', which has no numbers"),
        (torch.eye(5, 16).tolist(), [1, 2, 3, 4, 5], "features list.* save an array or a tensor"),
        (torch.eye(2, 16), [b"a", b"b"], r"a list of bytes; save \[label\.decode\(\)"),
        (
            torch.eye(2, 16),
            np.array(["a", "b"], object),
            "refused by torch.load.*: Can only build Tensor.*; save a dict",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch, on sparse and nested tensors
def test_tensors_of_another_type_are_refused_with_the_conversion(features, labels, remedy, features_folder, home):
    (features_folder / "novel-test.npz").unlink()
    torch.save({"features": features, "labels": labels}, features_folder / "novel-test.pt")
    assert "damaged" not in refused(home, "mine", features_folder, remedy)


@pytest.mark.filterwarnings("ignore")  # of torch, on what it deprecates
def test_a_program_of_torchscript_is_named(features_folder, home):
    (features_folder / "novel-test.npz").unlink()
    torch.jit.script(torch.nn.Linear(2, 2)).save(features_folder / "novel-test.pt")
    assert "damaged" not in refused(home, "mine", features_folder, "is a TorchScript program; save a dict of tensors")


def test_a_refusal_is_the_only_line(features_folder, home, recwarn):
    (features_folder / "novel-test.npz").unlink()
    content = {"features": torch.eye(5, 16).to_sparse(), "labels": torch.arange(5)}
    torch.save(content, features_folder / "novel-test.pt")
    refused(home, "mine", features_folder, "a sparse tensor")
    assert not recwarn.list


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("suffix", [".pth", ".PT", ".safetensors"])
def test_narrow_floats_and_other_suffixes_are_read(kind, suffix, features_folder, home):
    (features_folder / "novel-test.npz").unlink()
    content = {"features": torch.randn(60, 16).to(kind), "labels": torch.arange(60) // 12 + 900}
    (save_file if suffix == ".safetensors" else torch.save)(content, features_folder / f"novel-test{suffix}")
    pool = prepare_dataset(home, "mine", features_folder, False, Reporter()).pool("novel/test")
    np.testing.assert_array_equal(pool.images, content["features"].float().numpy())


def test_names_of_files_may_have_underscores_and_capitals(features_folder, home):
    first = prepare_dataset(home, "first", features_folder, False, Reporter())
    for path in features_folder.iterdir():
        path.rename(features_folder / path.name.replace("-", "_").title())
    assert prepare_dataset(home, "again", features_folder, False, Reporter()).fingerprint == first.fingerprint
    shutil.copy(features_folder / "Base_Val.Npz", features_folder / "base-val.npz")
    refused(home, "mine", features_folder, "holds Base_Val.Npz and base-val.npz; leave one of them there")


# -- numbers and labels that pass by the form of the files


@pytest.mark.parametrize(
    ("scale", "factor"),
    [(1e30, "2.0**-10"), (1e18, "2.0**-6"), (1e-20, "2.0**6"), (1e-60, "2.0**19"), (1e200, "2.0**-66")],
)
def test_features_whose_squares_float32_cannot_hold_are_refused(scale, factor, features_folder, home):
    for path in features_folder.glob("*.npz"):
        with np.load(path) as file:
            content = {"features": file["features"].astype(np.float64) * scale, "labels": file["labels"]}
        np.savez(path, **content)
    message = refused(home, "mine", features_folder, "base-train.npz: in 192 of 192 rows .* float32 cannot hold")
    assert factor in message
    power = float(message.partition("2.0**")[2].partition(",")[0])
    for path in features_folder.glob("*.npz"):
        with np.load(path) as file:
            content = {"features": file["features"] * 2.0**power, "labels": file["labels"]}
        np.savez(path, **content)
    prepare_dataset(home, "mine", features_folder, False, Reporter())


def test_rows_of_features_are_not_called_images(features_folder, home, messages):
    dataset = prepare_dataset(home, "mine", features_folder, False, messages)
    count = sum(len(dataset.pool(name)) for name in POOL_NAMES)
    (line,) = (line for line in messages.said if "MB/s written" in line)
    assert line.startswith(f"mine: {count:,} features, ")
    assert "image" not in line


def test_single_rows_beyond_float32_are_to_be_left_out(features_folder, home):
    with np.load(features_folder / "novel-test.npz") as file:
        features, labels = file["features"], file["labels"]
    features[3] *= 1e30
    np.savez(features_folder / "novel-test.npz", features=features, labels=labels)
    refused(home, "mine", features_folder, f"in 1 of {len(labels)} rows .* Leave these rows out; the others fit")


@pytest.mark.parametrize("exponent", [-49, 47])
def test_cosines_of_all_features_that_are_read_are_those_of_float64(exponent, features_folder, home):
    """The nearest class mean by cosine, in float32 as methods compute it and in float64 from the file."""
    path = features_folder / "novel-test.npz"
    with np.load(path) as file:
        features, labels = np.ldexp(file["features"].astype(np.float64), exponent), file["labels"]
    np.savez(path, features=features, labels=labels)
    pool = prepare_dataset(home, "mine", features_folder, False, Reporter()).pool("novel/test")
    order = np.argsort(labels, kind="stable")

    def nearest(rows: np.ndarray) -> np.ndarray:
        means = np.stack([rows[pool.labels == label].mean(0) for label in range(len(pool.class_names))])
        means = means / np.sqrt(np.square(means).sum(1, keepdims=True))
        return (rows / np.sqrt(np.square(rows).sum(1, keepdims=True)) @ means.T).argmax(1)

    assert pool.images.dtype == np.float32
    np.testing.assert_array_equal(nearest(np.asarray(pool.images)), nearest(features[order]))


def test_accents_may_be_written_in_two_ways(features_folder, home, messages):
    def written(forms: dict[str, tuple[str, str]]) -> None:
        for path in features_folder.glob("*.npz"):
            with np.load(path) as file:
                features, numbers = file["features"], [int(re.sub(r"\D", "", str(v))) for v in file["labels"]]
            pair = forms.get(path.stem, ("NFC", "NFC"))
            labels = [unicodedata.normalize(pair[row % 2], f"é{number}") for row, number in enumerate(numbers)]
            np.savez(path, features=features, labels=np.array(labels))

    written({})
    first = prepare_dataset(home, "first", features_folder, False, messages)
    written({"base-val": ("NFD", "NFD")})
    assert prepare_dataset(home, "again", features_folder, False, messages).fingerprint == first.fingerprint
    assert not messages.warned
    written({"base-train": ("NFC", "NFD")})
    assert prepare_dataset(home, "mixed", features_folder, False, messages).fingerprint == first.fingerprint
    (warning,) = messages.warned
    assert "base-train.npz: 8 of 16 labels differ from others only in how Unicode writes accents" in warning
    written({"novel-test": ("NFD", "NFD")})
    prepare_dataset(home, "apart", features_folder, False, messages)
    written({"novel-test": ("NFD", "NFD"), "novel-val": ("NFC", "NFC")})
    with np.load(features_folder / "novel-test.npz") as file:
        content = {"features": file["features"], "labels": np.char.replace(file["labels"], "300", "3")}
    np.savez(features_folder / "novel-test.npz", **content)
    refused(home, "twice", features_folder, r"'é3' is in base-train.npz and in novel-test.npz \(with accents that Uni")
    written({})
    keep(features_folder / "base-test.npz", lambda y: y != "é3")
    refused(home, "fewer", features_folder, "class 'é3' is in base-train.npz alone")


def test_rows_that_repeat_and_rows_of_zeros_are_counted(features_folder, home, messages):
    with np.load(features_folder / "base-train.npz") as file:
        features, labels = file["features"], file["labels"]
    features[:7] = 0
    np.savez(features_folder / "base-train.npz", features=features, labels=labels)
    np.savez(features_folder / "base-test.npz", features=features[5:], labels=labels[5:])
    prepare_dataset(home, "mine", features_folder, False, messages)
    repeated, zeros = messages.warned
    assert f"{len(labels) - 7} rows equal to another one number by number" in repeated
    assert f"{len(labels) - 7} in another pool and 0 on another side" in repeated
    assert "7 of base/train, 2 of base/test: rows of features that are all zero" in zeros


def test_rows_that_repeat_within_their_pool_too_are_counted_in_another(features_folder, home, messages):
    with np.load(features_folder / "base-train.npz") as file:
        features, labels = file["features"], file["labels"]
    for name, row in (("base-train", 0), ("base-test", 0), ("novel-test", 0)):
        with np.load(features_folder / f"{name}.npz") as file:
            own, labels = file["features"], file["labels"]
        own[:4] = features[row]
        np.savez(features_folder / f"{name}.npz", features=own, labels=labels)
    prepare_dataset(home, "mine", features_folder, False, messages)
    (warning,) = messages.warned
    assert "11 rows equal to another one number by number, 8 in another pool and 4 on" in warning


def test_fewer_sessions_are_suggested_only_where_they_can_be_drawn(tmp_path, write_features, home, messages):
    counts = {"base": 8, "novel/train": 9, "novel/val": 7, "novel/test": 6}
    dataset = prepare_dataset(home, "mine", write_features(tmp_path / "f", classes=counts), False, messages)
    (line,) = (line for line in messages.said if "mine-sessions is left out" in line)
    options = re.search(r"--task mine-5shot --sessions 2 --ways (\d+) --queries (\d+)$", line)
    assert options, line
    task = load_tasks("mine-5shot", home=home)[0]
    ways, queries = int(options[1]), int(options[2])
    assert ways == 3
    assert (
        list_infeasible_tasks(dataset, [apply_task_changes(task, TaskChanges(sessions=2, ways=ways, queries=queries))])
        == []
    )
    assert len(list_infeasible_tasks(dataset, [apply_task_changes(task, TaskChanges(sessions=2, ways=ways))])) == 1


def test_large_features_are_reported_before_a_classifier_fails_on_them(features_folder, home, messages):
    for path in features_folder.glob("*.npz"):
        with np.load(path) as file:
            content = {"features": file["features"] * 64, "labels": file["labels"]}
        np.savez(path, **content)
    prepare_dataset(home, "mine", features_folder, False, messages)
    (warning,) = messages.warned
    assert "multiply the features of all files by one number, such as 2.0**-6" in warning


def test_sessions_out_of_reach_name_options_that_suffice(tmp_path, write_features, home, messages):
    counts = {"base": 8, "novel/train": 9, "novel/val": 7, "novel/test": 10}
    dataset = prepare_dataset(home, "mine", write_features(tmp_path / "f", classes=counts), False, messages)
    (line,) = (line for line in messages.said if "mine-sessions is out of reach" in line)
    # Sessions have as many queries as a base class has images in base/test, 14; so many has a novel class in all.
    assert "need 19 images of a novel class (5 shots + 14 queries)" in line
    assert "within reach with --queries 9; it is left out" in line
    assert "--task mine-5shot --sessions 2" in line
    task = load_tasks("mine-5shot", home=home)[0]
    assert list_infeasible_tasks(dataset, [apply_task_changes(task, TaskChanges(sessions=2, queries=9))]) == []
    assert len(list_infeasible_tasks(dataset, [apply_task_changes(task, TaskChanges(sessions=2, queries=10))])) == 1


def test_less_is_taken_where_it_suffices_or_is_allowed(features_folder, home, messages):
    for part in ("val", "test"):
        keep(features_folder / f"base-{part}.npz", lambda y: np.arange(len(y)) % 3 > 0)
    assert not prepare_dataset(home, "fewer", features_folder, False, messages).is_partial
    keep(features_folder / "novel-val.npz", lambda y: y < 204)
    refused(home, "mine", features_folder, "make smaller episodes, of a task file of your own, or add --allow-partial")
    assert prepare_dataset(home, "mine", features_folder, False, messages, allow_partial=True).is_partial
    assert any("novel/val has 4" in line for line in messages.warned)


def keep(path: Path, chosen: Callable[[np.ndarray], np.ndarray]) -> None:
    """Leaves rows of a file out."""
    with np.load(path) as file:
        rows = chosen(file["labels"])
        content = {name: file[name][rows] for name in ("features", "labels")}
    np.savez(path, **content)


def first_of_each(labels: np.ndarray, count: int) -> np.ndarray:
    """Marks the rows among the first ``count`` of their label, bool [n]."""
    return np.array([(labels[:i] == label).sum() < count for i, label in enumerate(labels)])


def test_a_data_set_of_features_has_tasks_and_they_run(features_folder, home, call, monkeypatch):
    monkeypatch.setenv("IFSL_BENCH_HOME", str(home.cache))
    (features_folder / "novel-train.npz").unlink()
    status, out, err = call("data", "prepare", "mine", "--from", str(features_folder))
    assert status == 0, err
    assert "try: ifsl-bench run --method imprint --task mine-5shot" in err
    assert "mine has no novel/train: meta-training hides base classes in turn" in err
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("base/", "novel/"))}
    assert lines["base/train"][:3] == ["8", "192", "24"]
    assert lines["novel/train"] == ["=", "base/train"]
    assert lines["novel/test"][:3] == ["7", "98", "14"]
    assert "features per class" in out
    assert re.search(r"mine: \d+ features, .* features/s", err)
    assert "images" not in out + err
    assert "300, 301, 302 and 4 more" in out
    (task,) = load_tasks("mine-5shot")
    assert (task.shots, task.protocol, task.pretraining.backbone) == (5, "shared", "none")
    status, out, err = call("run", "--method", "imprint", "--task", "mine-5shot", "--dry-run")
    assert status == 0, err
    assert "pretraining, features, evaluation" in out or "pretraining, evaluation" in out


def test_features_on_one_side_of_the_origin_are_told(features_folder, home, messages):
    prepare_dataset(home, "centred", features_folder, False, messages)
    assert not messages.warned
    for path in features_folder.glob("*.npz"):
        with np.load(path) as file:
            content = {"features": file["features"] + 3, "labels": file["labels"]}
        np.savez(path, **content)
    prepare_dataset(home, "aside", features_folder, False, messages)
    (warning,) = messages.warned
    assert "not centred" in warning
    assert "Delta_a near -90" in warning


def test_the_mean_cosine_is_that_of_all_pairs():
    rows = np.random.default_rng(0).normal(0.4, 1, (30, 5)).astype(np.float32)
    rows[3] = 0
    units = [row / max(np.linalg.norm(row), 1e-12) for row in rows]
    pairs = [float(a @ b) for i, a in enumerate(units) for j, b in enumerate(units) if i != j]
    assert mean_cosine_similarity(rows) == pytest.approx(np.mean(pairs), abs=5.1e-5)  # four decimals
    assert mean_cosine_similarity(rows[:1]) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
@pytest.mark.parametrize("packed", [False, True])
def test_a_full_folder_for_temporary_files_is_named(packed, features_folder, home, monkeypatch):
    source = features_folder
    if packed:
        source = Path(shutil.make_archive(str(source), "gztar", source))
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda: open("/dev/full", "r+b"))  # noqa: SIM115
    refused(home, "mine", source, "cannot write /dev/full: the disk is full; .* another folder with TMPDIR")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_arrays_of_every_order_and_packing_are_read_as_numpy_reads_them(method, tmp_path):
    arrays = {
        "a": np.arange(12.0).reshape(4, 3),
        "b": np.asfortranarray(np.arange(12).reshape(4, 3)),
        "c": np.array(["é", "bc"]),
        "d": np.arange(3, dtype=">i2"),
        "e": np.float16([1.5]),
        "f": np.array([True, False]),
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(f"{name}.npy", buffer.getvalue())
    out.seek(0)
    result = read_npz_arrays(out, "x.npz", *arrays)
    for name, array in arrays.items():
        assert result[name].dtype == array.dtype
        assert (result[name] == array).all()
