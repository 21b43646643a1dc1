"""Files of the cache that are not what was written: noticed, set aside and made again, with the same counts."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import weakref

import pytest

from ifsl_bench.data.pools import open_dataset
from ifsl_bench.experiments import api
from ifsl_bench.experiments import workspace as prepared
from ifsl_bench.experiments.selection_bootstrap import Tried, read_trial, write_trial
from ifsl_bench.experiments.stages import MetaTrain
from ifsl_bench.utils.checksummed_json import read_checksummed, write_checksummed
from ifsl_bench.utils.errors import CorruptFile, UserError
from ifsl_bench.utils.files import Paths, read_errors, read_json
from tests.fuzz.cache import FINISHED, Caches, make_caches, one_case
from tests.reporters import Messages
from tests.small_run import TASKS, run
from tests.store.result_fields import altered

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
    shutil.copytree(whole.root / FINISHED, tmp_path / "copy")
    return tmp_path / "copy", whole.wanted


def interrupted(folder, monkeypatch, home):
    """A meta-training of 40 steps that is interrupted at its third validation."""
    calls, validate = [], MetaTrain.validate

    def stop(self, work, method):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return validate(self, work, method)

    with monkeypatch.context() as patch:
        patch.setattr(MetaTrain, "validate", stop)
        with pytest.raises(KeyboardInterrupt):
            result(folder, home)
    (path,) = home.trained.glob("*/checkpoint.json")
    return path


def result(folder, home, reporter=None):
    work = api.workspace(home.cache, device="cpu", reporter=reporter or Messages())
    return api.run("lwof", f"{folder / 'clusters.toml'}:clusters-1shot", train={"steps": 40}, work=work)


def test_a_step_moved_ahead_in_an_unfinished_training_is_noticed(here, monkeypatch):
    """The counts are those of an undisturbed run, not of one that skips steps."""
    shutil.copytree(here / "home", here / "other")
    expected = result(here, Paths.locate(here / "other")).episodes
    home = Paths.locate(here / "home")
    path = interrupted(here, monkeypatch, home)

    def ahead(value):
        assert value["step"] == 8
        value |= {"step": 36, "history": {"4": 1.0, "36": 2.0}, "best": 36}

    altered(path, ahead)
    reporter = Messages()
    assert result(here, home, reporter).episodes == expected
    assert any("starts anew" in text and path.parent.name in text for text in reporter.warned)
    assert list(home.trained.glob("*.corrupt-0"))


@pytest.mark.parametrize(  # one reader reads them all, and each kind says whose it is
    ("pattern", "how"),
    [(pattern, how) for pattern in SEALED for how in ("cut", "other artefact's")]
    + [(SEALED[0], how) for how in ("renamed key", "folder")],
)
def test_what_is_damaged_is_named_set_aside_and_made_again(cache, pattern, how):
    root, expected = cache
    path = min((root / "home").glob(pattern))
    content = path.read_bytes()
    if how == "renamed key":
        altered(path, lambda value: value.update(x=value.pop(next(k for k in value if k != "format"))))
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "other artefact's":
        value = json.loads(content)
        value.pop("checksum")
        name = next(key for key in ("key", "task_hash", "of") if isinstance(value.get(key), str))
        name = "file" if "file" in value else name
        write_checksummed(path, {**value, name: "another"})
    else:
        path.write_bytes(content[: len(content) // 2])
    reporter = Messages()
    assert run(root, reporter=reporter) == expected
    assert any(str(path.parent) in text for text in reporter.warned), reporter.warned
    assert list((root / "home").rglob("*.corrupt-0"))


def test_a_stray_file_in_a_training_is_left_alone(here, monkeypatch):
    home = Paths.locate(here / "home")
    path = interrupted(here, monkeypatch, home)
    stray = path.parent / "model.safetensors"
    stray.write_bytes(b"mine")
    reporter = Messages()
    result(here, home, reporter)
    assert stray.read_bytes() == b"mine"
    assert reporter.warned == []


@pytest.mark.parametrize(("byte", "bit"), [(0, 0), (8, 7), (40, 5), (127, 5)])  # magic, length, content, end
def test_one_flipped_bit_in_the_header_of_a_prepared_array_is_named(cache, byte, bit):
    root, _ = cache
    folder = root / "home" / "data" / "tiny-images"
    content = bytearray((folder / "base-val.images.npy").read_bytes())
    content[byte] ^= 1 << bit
    (folder / "base-val.images.npy").write_bytes(content)
    with pytest.raises(CorruptFile, match=r"base-val\.images\.npy"):
        open_dataset(folder).check_images("base/val")


def test_an_array_by_columns_is_no_array_by_rows(cache):
    """A header that is right in form and size: other pixels."""
    root, _ = cache
    path = root / "home" / "data" / "tiny-images" / "base-val.images.npy"
    path.write_bytes(path.read_bytes().replace(b"'fortran_order': False", b"'fortran_order': True "))
    with pytest.raises(CorruptFile, match="another header"):
        open_dataset(path.parent)


def test_changed_images_are_noticed_before_anything_is_made_of_them(cache):
    root, _ = cache
    path = root / "home" / "data" / "tiny-images" / "novel-test.images.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    (bank,) = (root / "home" / "features").glob("*/novel-test")
    shutil.rmtree(bank)
    with pytest.raises(CorruptFile, match=r"novel-test\.images\.npy .* make it again with ifsl-bench data prepare"):
        run(root)
    assert not bank.exists()


def test_changed_frozen_features_are_noticed(here):
    path = here / "home" / "data" / "clusters" / "novel-test.images.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CorruptFile, match=r"novel-test\.images\.npy is not what was written"):
        result(here, Paths.locate(here / "home"))


@pytest.mark.parametrize("change", ["about", "dtype", "classes"])
def test_a_manifest_says_what_was_written(here, change):
    path = here / "home" / "data" / "clusters" / "manifest.json"

    def change_manifest(value):
        if change == "about":
            value["about"]["partial"] = not value["about"].get("partial")
        elif change == "dtype":
            value["pools"]["base/val"]["statistics"]["images"] += 1
        else:
            value["pools"]["novel/val"]["classes"].reverse()

    altered(path, change_manifest)
    with pytest.raises(CorruptFile, match="its checksum differs"):
        open_dataset(path.parent)
    value = read_json(path)
    del value["checksum"]
    write_checksummed(path, value)
    if change != "dtype":
        with pytest.raises(CorruptFile, match="fingerprint is not that of the pools"):
            open_dataset(path.parent)


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


@pytest.mark.parametrize(
    "change", [{"accuracy": 101.0}, {"accuracy": "high"}, {"episodes": 0}, {"unconverged": -1}, {"diverged": 1}]
)
def test_an_impossible_trial_is_tried_again(tmp_path, change):
    path, tried = tmp_path / "trial.json", Tried(50.0, 10, hits={"base_joint": [3] * 10})

    def read(weights="abc", *reporter):
        return read_trial(path, weights, lambda _: True, *reporter)

    write_trial(path, tried, "abc", "a job", {})
    assert read() == tried
    assert read("other weights") is None
    write_checksummed(path, {**read_checksummed(path), **change})
    reporter = Messages()
    assert read() is None
    assert path.exists()
    assert read("abc", reporter) is None
    assert not path.exists()
    assert "trial.json is damaged" in reporter.warned[0]


@pytest.mark.parametrize("kind", [errno.EACCES, errno.EIO])
def test_what_cannot_be_read_is_not_taken_for_damaged(tmp_path, kind):
    """It may be sound: nothing is set aside, nothing made again."""
    with pytest.raises(UserError, match=r"cannot read .*x\.json: ") as error, read_errors(tmp_path / "x.json"):
        raise OSError(kind, os.strerror(kind))
    assert not isinstance(error.value, CorruptFile)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("pattern", ["pretrained/*/checkpoint.json", "data/*/base-val.labels.npy", "trials/*.json"])
def test_a_file_without_permission_is_one_line(cache, pattern):
    root, _ = cache
    path = min((root / "home").glob(pattern))
    path.chmod(0)
    with pytest.raises(UserError, match=f"cannot read {path}: no permission"):
        run(root)


def test_links_to_nowhere_and_to_themselves_are_one_line_or_made_again(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CorruptFile, match="is not a file"):
        read_json(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        read_checksummed(tmp_path / "dangling")
    write_checksummed(tmp_path / "dangling", {"a": 1})
    assert not (tmp_path / "dangling").is_symlink()


@pytest.mark.parametrize(("case", "start"), list(enumerate(STARTS)))
def test_random_damage_ends_with_the_same_counts_or_in_one_line(whole, case, start):
    """A few of the cases of tests.fuzz.cache."""
    with contextlib.suppress(UserError):  # it is one line by itself
        assert one_case(whole, {"start": start, "chance": case}) in ("the same", "made again", "unchanged")


@pytest.mark.parametrize("start", STARTS)
def test_an_undamaged_cache_is_used_without_a_warning(whole, start):
    assert one_case(whole, {"start": start}) == "the same"


def test_what_a_run_had_open_is_freed_with_it(cache, monkeypatch):
    """By itself, not when Python next looks for circles: after a hundred runs that would be a hundred networks."""
    root, _ = cache
    (root / "tiny.toml").write_text(TASKS)
    references = []

    class Seen(prepared.PreparedTask):
        def __init__(self, *of):
            super().__init__(*of)
            references.append(weakref.ref(self))

    monkeypatch.setattr(prepared, "PreparedTask", Seen)
    work = api.workspace(root / "home", device="cpu", reporter=Messages())
    gc.collect()
    gc.disable()
    try:
        api.run("lwof", f"{root / 'tiny.toml'}:tiny-images-1shot", train={"steps": 8}, tune=2, work=work)
        (reference,) = references
        del work
        assert reference() is None
    finally:
        gc.enable()


def test_every_cache_to_begin_with_has_what_a_killed_run_leaves(whole):
    """Or the cases would all be those of a finished one."""
    folders = {start: {path.name for path in (whole.root / start / "home").iterdir()} for start in STARTS}
    assert "pretrained" not in folders["data half made"]
    assert list((whole.root / "data half made").rglob(".partial-tiny-images/progress.json"))
    assert "features" not in folders["pretraining's next state written"]
    assert len(list((whole.root / STARTS[2]).rglob("state-*.safetensors"))) == 2
    assert "trials" not in folders["meta-training saved twice"]
