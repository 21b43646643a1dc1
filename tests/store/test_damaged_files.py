"""Results from unknown people, and damaged files of the cache: refused, or made again, in one printable line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from ifsl_bench import api
from ifsl_bench.data.pools import open_dataset
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.store.result_folder import packaged_results_folder, read_results
from ifsl_bench.store.schema import parse_result, read_result, write_result
from ifsl_bench.utils.errors import CorruptFile
from ifsl_bench.utils.files import read_json
from ifsl_bench.utils.limits import RESULT_FILE_BYTES
from ifsl_bench.utils.serialization import read_checksummed, write_checksummed
from tests.data.helpers import spoil
from tests.fuzz.cache import FINISHED, Caches, make_caches, one_case
from tests.reporters import Messages
from tests.small_run import run
from tests.store.result_fields import altered, listed

NAME = "glyphs-5shot/lr.seed-1.json"  # it has options, what was tuned, a solver


@pytest.fixture
def file(tmp_path) -> Path:
    """A stored result with its counts as lists, for a test to change."""
    path = tmp_path / NAME
    path.parent.mkdir()
    write_result(tmp_path, listed(parse_result(packaged_results_folder() / NAME)))
    return path


def left_out(text: str) -> list[str]:
    return [line for line in text.splitlines() if "left out: " in line]


# -- result files

TRAINING = [
    ({"solves": 5}, "training: Expected `object`, got `int` - at `$.solves`"),
    ({"solves": {"unconverged": -1, "episodes": 2}}, "training: Expected `int` >= 0"),
    ({"solves": {"adjoint_indefinite": "x", "adjoint_episodes": []}}, "training: Expected `int`, got `"),
    ({"validation": [50.0]}, "training: Expected `object`, got `array` - at `$.validation`"),
    ({"validation": {"x": 50.0}}, "training: Expected `str` matching regex '^[0-9]{1,18}$'"),
    ({"validation": {"500": "x"}}, "training: Expected `float`, got `str` - at `$.validation[...]`"),
    ({"validation": {"500": 1e300}}, "training: Expected `float` <= 100.0 - at `$.validation[...]`"),
    ({"kept_step": None}, "training: Expected `int`, got `null` - at `$.kept_step`"),
]


BYTES = {
    "a number of 5,000 digits": (b'{"schema": ' + b"9" * 5000 + b"}", "is not valid JSON ("),
    "not a number": (b'{"schema": NaN}', "is not valid JSON ("),
    "beyond all bounds": (b'{"schema": 1e999}', "is not valid JSON (Number out of range"),
    "half a character": (b'{"schema": "\\ud800"}', "is not valid JSON ("),
    "nested too deep for the parser": (b'{"schema": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is not valid JSON"),
    "a byte order mark": (b'\xef\xbb\xbf{"schema": 1}', "is not valid JSON ("),
    "UTF-16": ('{"schema": 1}'.encode("utf-16"), "is not valid JSON ("),
    "a list": (b"[1]", "holds list where a JSON object was expected"),
    "no schema but 10 MB": (b'{"schema": "' + b"x" * 10_000_000 + b'"}', "is no result of schema 1 (it says 'xxx"),
}


def test_what_tables_and_figures_cannot_use_is_left_out_everywhere_in_one_line(file, call, tmp_path):
    paths, messages = [], []
    for number, (change, message) in enumerate([*TRAINING, *BYTES.values()]):
        path = Path(shutil.copy(file, file.with_name(f"lr.seed-{number + 10}.json")))
        if isinstance(change, bytes):
            path.write_bytes(change)
        else:
            altered(path, lambda v, change=change: v["training"].update(change))
        paths, messages = [*paths, str(path)], [*messages, message]
    status, out, err = call("check", *paths)
    assert (status, out) == (2, "")
    for path, message in zip(paths, messages, strict=True):
        assert any(line.startswith(path) and message in line for line in err.splitlines()), (path, err)
    assert max(map(len, err.splitlines())) < 1000
    altered(file, lambda v: v["episodes"].update(base_queries=10**400))
    status, out, err = call("show", str(file))
    assert (status, (out + err).count("\n")) == (2, 1)
    for command in (("table",), ("plot", "validation", "--out", str(tmp_path / "f.png"))):
        status, out, err = call(*command, file.parent.name, "--results", str(tmp_path))
        assert [message for message in messages if message not in out + err] == [], command
        assert "Traceback" not in err
        assert status in (0, 2), err
        assert len(left_out(out + err)) == len(paths) + 1
        assert max(map(len, left_out(out + err))) < 1000


def test_a_file_beyond_the_limit_is_not_read(file):
    os.truncate(file, 10**12)  # a hole: no disk has so much
    assert check_file(file).failures == (
        "it has more than 33,554,432 bytes; a result of 2,000 episodes has 20,000, is it the right file?",
    )
    with pytest.raises(CorruptFile, match="has more than 33,554,432 bytes"):
        read_result(file)
    assert len(read_results(file.parents[1])[1]) == 1
    sizes = [path.stat().st_size for path in packaged_results_folder().glob("*/*.seed-*.json")]
    assert max(sizes) < RESULT_FILE_BYTES.maximum / 100


# -- lists and runs


@pytest.mark.slow("three commands that read all stored results")
def test_lists_of_all_tasks_name_what_is_left_out_of_tasks_with_no_other_row(file, call, tmp_path):
    """Also of a task that has no measured row, and so no table."""
    shutil.copytree(file.parent, tmp_path / "mini-1shot")
    altered(file, lambda v: v["summary"]["acc"].update(mean=99.0))
    for command in (("leaderboard",), ("table",), ("table", "--format", "csv")):
        status, out, err = call(*command, "--results", str(tmp_path))
        assert status == 0, err
        for path in (file, tmp_path / "mini-1shot" / file.name):
            assert sum(f"left out: {path}" in line for line in left_out(out + err)) == 1, (command, path)


def test_a_run_among_damaged_results_stores_its_own_and_leaves_them_out(here, call):
    task, folder = "clusters.toml:clusters-5shot", here / "home" / "results" / "clusters-5shot"
    for method in ("imprint", "protonet", "ncm"):
        api.run(method, task, work=api.workspace(here / "home", device="cpu"))
    mine, cut, replaced = (folder / f"{method}.seed-0.json" for method in ("imprint", "protonet", "ncm"))
    original = read_result(cut)
    cut.write_bytes(cut.read_bytes()[:900])
    mine.unlink()
    replaced.unlink()
    replaced.mkdir()
    status, out, err = call("run", "--method", "imprint", "--task", task)
    assert status == 0, err
    assert read_result(mine).label == "imprint"
    assert [name in line for name, line in zip(("ncm", "protonet"), sorted(left_out(out)), strict=True)] == [True] * 2
    status, out, err = call("table", task)
    assert (status, len(left_out(out + err)), "Traceback" in err) == (0, 2, False)
    for damaged in (cut, replaced):
        assert call("check", str(damaged), "--task", task)[0] == 2
    status, _, err = call("run", "--method", "protonet,ncm", "--task", task)
    assert status == 0, err
    assert read_result(cut).episodes == original.episodes, "the run of what is damaged makes it again"
    for damaged in (cut, replaced):
        assert damaged.with_name(f"{damaged.name}.old-0").exists(), "and keeps what was there"


# -- the cache

SEALED = ("pretrained/*/checkpoint.json", "features/*/base-train/bank.json", "trials/*.json", "digests/*.json")
STARTS = (FINISHED, "data half made", "pretraining's next state written", "meta-training saved twice")


@pytest.fixture(scope="session")
def whole(made_once):
    """A finished cache with every kind of file, and some that a killed run left; what every later run must end with."""

    def fill(root):
        (root / "wanted.json").write_text(json.dumps(make_caches(root, STARTS).wanted))

    root = made_once("caches", fill)
    return Caches(root, json.loads((root / "wanted.json").read_text()))


@pytest.fixture
def cache(whole, tmp_path):
    """A copy of the finished cache, to damage."""
    return shutil.copytree(whole.root / FINISHED, tmp_path / "copy")


def of_another(path: Path) -> None:
    value = read_checksummed(path)
    name = next(key for key in ("file", "key", "task_hash", "of") if isinstance(value.get(key), str))
    write_checksummed(path, {**value, name: "another"})


def a_step_ahead(path: Path) -> None:
    altered(path, lambda value: value.update(step=value["step"] + 2, history={"2": 1.0, "6": 2.0}, best=6))


@pytest.mark.slow("whole runs")
@pytest.mark.parametrize(  # one reader reads them all, and each kind says whose it is
    ("start", "pattern", "damage"),
    [
        *((FINISHED, pattern, of_another) for pattern in SEALED),
        (FINISHED, SEALED[0], lambda path: path.write_bytes(path.read_bytes()[:99])),
        (STARTS[3], "trained/*/checkpoint.json", a_step_ahead),
    ],
)
def test_what_is_damaged_is_named_set_aside_and_made_again(whole, tmp_path, start, pattern, damage):
    """The counts are those of an undisturbed run."""
    root = shutil.copytree(whole.root / start, tmp_path / "copy")
    path = min((root / "home").glob(pattern))
    damage(path)
    reporter = Messages()
    assert run(root, reporter=reporter) == whole.wanted
    assert any(path.parent.name in text for text in reporter.warned), reporter.warned
    assert list((root / "home").rglob("*.corrupt-0"))


def test_a_changed_header_of_a_prepared_array_is_named(cache):
    path = cache / "home" / "data" / "tiny-images" / "base-val.images.npy"
    good = path.read_bytes()
    for at in (0, 8, 40, 127):  # its magic number, the length of the header, its content, its end
        spoil(path, at)
        with pytest.raises(CorruptFile, match=r"base-val\.images\.npy"):
            open_dataset(path.parent).check_image_checksum("base/val")
        path.write_bytes(good)
    path.write_bytes(good.replace(b"'fortran_order': False", b"'fortran_order': True "))
    with pytest.raises(CorruptFile, match=r"base-val\.images\.npy.*another header"):
        open_dataset(path.parent).check_image_checksum("base/val")


@pytest.mark.parametrize(
    ("change", "told"),  # the last is part of no fingerprint
    [
        (lambda value: value["about"].update(partial=not value["about"].get("partial")), True),
        (lambda value: value["pools"]["novel/val"]["classes"].reverse(), True),
        (lambda value: value["pools"]["base/val"]["statistics"].update(images=0), False),
    ],
)
def test_a_changed_manifest_is_noticed(cache, change, told):
    path = altered(cache / "home" / "data" / "tiny-images" / "manifest.json", change)
    with pytest.raises(CorruptFile, match="its checksum differs"):
        open_dataset(path.parent)
    write_checksummed(path, {key: value for key, value in read_json(path).items() if key != "checksum"})
    with pytest.raises(CorruptFile, match="fingerprint is not that") if told else contextlib.nullcontext():
        open_dataset(path.parent)


def test_changed_images_and_features_are_noticed_before_anything_is_made_of_them(cache, here):
    for folder in (cache / "home" / "data" / "tiny-images", here / "home" / "data" / "clusters"):
        path = folder / "novel-test.images.npy"
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    (bank,) = (cache / "home" / "features").glob("*/novel-test")
    shutil.rmtree(bank)
    with pytest.raises(CorruptFile, match=r"novel-test\.images\.npy .* make it again with ifsl-bench data prepare"):
        run(cache)
    assert not bank.exists()
    with pytest.raises(CorruptFile, match=r"novel-test\.images\.npy is not what was written"):
        api.run("imprint", "clusters.toml:clusters-1shot", work=api.workspace(here / "home", device="cpu"))


@pytest.mark.slow("whole runs")
@pytest.mark.parametrize("start", STARTS)
def test_a_run_on_what_a_killed_one_left_ends_with_the_same_counts(whole, start):
    assert one_case(whole, {"start": start}) == "the same"
