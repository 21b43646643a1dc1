"""Results from unknown people, and damaged files of the cache: refused, or made again, in one printable line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ifsl_bench import api
from ifsl_bench.data.pools import open_dataset
from ifsl_bench.experiments.check_method import check_file
from ifsl_bench.experiments.search import TrialRecord, read_trial, write_trial
from ifsl_bench.protocols.metrics import COUNTS, OPTIONAL_COUNTS, summarise
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.reporting.table import FORMATS, READERS
from ifsl_bench.store import check
from ifsl_bench.store.result_folder import packaged_root, read_results, unfit_reasons
from ifsl_bench.store.schema import Result, parse, read, summary_entry, write
from ifsl_bench.utils.errors import CorruptFile, UserError, is_printable
from ifsl_bench.utils.files import read_json
from ifsl_bench.utils.limits import RESULT_FILE
from ifsl_bench.utils.serialization import read_checksummed, write_checksummed
from tests.fuzz.cache import FINISHED, Caches, make_caches, one_case
from tests.reporters import Messages
from tests.small_run import run
from tests.store.result_fields import altered, listed

NAME = "glyphs-5shot/lr.seed-1.json"  # it has options, what was tuned, a solver
BAD = ("\x1b[2J", "a\nb", "\u202eabc", "\u2066x", "\x9b1m", "\u200bx", "\ufeff", "\x00")


@pytest.fixture
def file(tmp_path) -> Path:
    """A stored result with its counts as lists, for a test to change."""
    path = tmp_path / NAME
    path.parent.mkdir()
    write(tmp_path, listed(parse(packaged_root() / NAME)))
    return path


def left_out(text: str) -> list[str]:
    return [line for line in text.splitlines() if "left out: " in line]


def cut(result: Result, n: int) -> Result:
    """The result with its first n episodes alone, its summary made for these and its digest kept."""
    entry = listed(result).episodes
    ways = len(entry.classes) // len(entry.base_joint)
    parts = {name: getattr(entry, name)[:n] for name in (*COUNTS, *OPTIONAL_COUNTS)}
    parts |= {"calibrated_base": [], "calibrated_novel": [], "classes": entry.classes[: n * ways]}
    shorter = msgspec.structs.replace(result, episodes=msgspec.structs.replace(entry, **parts), calibration=None)
    return msgspec.structs.replace(shorter, summary=summary_entry(summarise(shorter.counts().per_episode())))


# -- fields of result files


SECTIONS = ("provenance", "pretraining", "cost", "solver", "tuned", "training", "options", "train", "summary")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_name_that_cannot_be_printed_is_refused_in_every_section(file, section):
    value: dict[str, Any] = {"solver": {"mean": 1.0}, "tuned": {"x": 1.0}, "summary": {"mean": 1.0}}
    altered(file, lambda v: v[section].update({text: value.get(section, 1.0) for text in BAD}))
    failures = check_file(file).failures
    for text in BAD:
        assert f"{section}: the name {text!r} cannot be printed as it is" in failures
    assert all(is_printable(failure) for failure in failures)


UNPRINTABLE = [
    (lambda v: v["provenance"]["libraries"].update(torch=BAD[0]), "provenance.libraries.torch: {} cannot be printed"),
    (lambda v: v["pretraining"].update(device=BAD[0]), "pretraining.device: {} cannot be printed"),
    (lambda v: v["training"].update(solves={"a": [[{"b": [1, BAD[0]]}]]}), "training.solves.a.b: {} cannot be printed"),
    (lambda v: v["options"].update(weight_decay=BAD[0]), "options.weight_decay: {} cannot be printed"),
    (lambda v: v.update(setting=BAD[0]), "setting: {} cannot be printed"),
    (lambda v: v.update(edge=["x", BAD[0]]), "edge: {} cannot be printed"),
]
UNKNOWN = [
    (lambda v: v["provenance"].update(note="x"), "provenance: Object contains unknown field `note`"),
    (lambda v: v["provenance"]["libraries"].update({"a b": "1"}), "provenance.libraries: Expected the name of a"),
    (lambda v: v["provenance"].update(distribution={"url": "y"}), "provenance.distribution: Object contains unknown"),
    (lambda v: v["pretraining"].update(note="x"), "pretraining: Object contains unknown field `note`"),
    (lambda v: v["pretraining"]["accuracy"].update({"novel/test": 1.0}), "pretraining.accuracy: Invalid enum value"),
    (lambda v: v["cost"].update(dollars=1.0), "cost: Invalid enum value 'dollars'"),
    (lambda v: v["solver"]["solver_steps"].update(least=1.0), "solver[...]: Invalid enum value 'least'"),
    (lambda v: v["training"].update(note="x"), "training: Object contains unknown field `note`"),
    (lambda v: v["training"].update(solves={"good": 1}), "training.solves: Invalid enum value 'good'"),
]


@pytest.mark.parametrize(("change", "expected"), [*UNPRINTABLE, *UNKNOWN])
def test_check_refuses_what_no_run_writes_at_any_depth(file, change, expected):
    failures = check_file(altered(file, change)).failures
    assert any(failure.startswith(expected.format(repr(BAD[0]))) for failure in failures), failures


def test_what_people_write_can_be_printed(file):
    device = "Grüße 日本語 a\u3000b 👩\u200d🔬 ±"
    assert check_file(altered(file, lambda v: v["pretraining"].update(device=device))).failures == ()


def test_of_a_file_with_a_thousand_faults_few_short_lines_are_printed(file):
    altered(file, lambda v: v["cost"].update({"\n" * 10_000 + str(i): 1.0 for i in range(1000)}))
    failures = check_file(file).failures
    assert len(failures) == check.MAX_FAULTS + 1
    assert failures[-1] == "and 951 more"
    assert max(map(len, failures)) <= check.MAX_FAULT_LENGTH + 3


UNREADABLE = [
    ({"solves": 5}, "training: Expected `object`, got `int` - at `$.solves`"),
    ({"solves": {"unconverged": -1, "episodes": 2}}, "training: Expected `int` >= 0"),
    ({"solves": {"adjoint_indefinite": "x", "adjoint_episodes": []}}, "training: Expected `int`, got `"),
    ({"validation": [50.0]}, "training: Expected `object`, got `array` - at `$.validation`"),
    ({"validation": {"x": 50.0}}, "training: Expected `str` matching regex '^[0-9]{1,18}$'"),
    ({"validation": {"500": "x"}}, "training: Expected `float`, got `str` - at `$.validation[...]`"),
    ({"validation": {"500": 1e300}}, "training: Expected `float` <= 100.0 - at `$.validation[...]`"),
    ({"kept_step": None}, "training: Expected `int`, got `null` - at `$.kept_step`"),
]


def test_what_tables_and_figures_cannot_use_is_left_out_everywhere(file, call, tmp_path):
    for number, (change, message) in enumerate(UNREADABLE):
        path = file.with_name(file.name.replace("seed-1", f"seed-{number + 10}"))
        shutil.copy(file, path)
        altered(path, lambda v, change=change: v["training"].update(change))
        assert any(message in failure for failure in check_file(path).failures)
    altered(file, lambda v: v["episodes"].update(base_queries=10**400))
    status, out, err = call("show", str(file))
    assert (status, (out + err).count("\n")) == (2, 1)
    for command in (("table",), ("plot", "validation", "--out", str(tmp_path / "f.png"))):
        status, out, err = call(*command, file.parent.name, "--results", str(tmp_path))
        assert [message for _, message in UNREADABLE if message not in out + err] == [], command
        assert "Traceback" not in err
        assert status in (0, 2), err


# -- episodes that are not those of the task


def test_check_and_tables_agree_on_which_episodes_fit(file, call):
    write(file.parents[1], msgspec.structs.replace(cut(parse(file), 3), choice=None))
    (task,) = load_tasks("glyphs-5shot")
    (reason,) = unfit_reasons(task, [parse(file)]).values()
    assert reason == "it has 3 episodes, those of its digest 96eea890d608 are 2,000"
    assert reason in check_file(file).failures
    status, out, err = call("compare", str(file), str(packaged_root() / NAME))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "cannot be compared: both say that their episodes are those of digest" in err
    for style in FORMATS:
        status, out, err = call("table", "glyphs-5shot", "--results", str(file.parents[1]), "--format", style)
        text = out + err
        assert status == 0
        assert "over 3 episodes" not in text
        if style in READERS:
            assert text.count(f"left out: lr, seed 1 (yours): {reason}") == 1
        else:
            assert f"warning: left out: lr, seed 1 (yours): {reason}" in text, "programs get no notes"


def test_episodes_that_nobody_can_run_are_not_drawn_again(file, monkeypatch):
    monkeypatch.setattr(check, "_sampler", lambda *_: pytest.fail("more than a million episodes would be drawn"))
    altered(file, lambda v: v["episodes"].update({k: v["episodes"][k] * 500 + [0] for k in COUNTS}))
    assert "it has 1,000,001 episodes; this task allows at most 1,000,000" in check_file(file).failures


# -- bytes and sizes

HOSTILE = {
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


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_parser_should_see_is_one_line_for_check_and_for_tables(file, call, name):
    content, message = HOSTILE[name]
    file.write_bytes(content)
    status, out, err = call("check", str(file))
    assert (status, out, err.count("\n")) == (2, "", 2)
    assert message in err
    assert len(err) < 1000
    status, out, err = call("table", "glyphs-5shot", "--results", str(file.parents[1]))
    assert status == 0
    (line,) = left_out(out + err)
    assert message in line
    assert len(line) < 1000


def test_a_file_beyond_the_limit_is_not_read(file):
    os.truncate(file, 10**12)  # a hole: no disk has so much
    assert check_file(file).failures == (
        "it has more than 33,554,432 bytes; a result of 2,000 episodes has 20,000, is it the right file?",
    )
    with pytest.raises(CorruptFile, match="has more than 33,554,432 bytes"):
        read(file)
    assert len(read_results(file.parents[1])[1]) == 1
    sizes = [path.stat().st_size for path in packaged_root().glob("*/*.seed-*.json")]
    assert max(sizes) < RESULT_FILE.most / 100


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


DAMAGE = {
    "cut episode lists": lambda path: write(path.parents[1], cut(parse(path), 3)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:900]),
    "a folder": lambda path: path.unlink() or path.mkdir(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_run_among_damaged_results_stores_its_own_and_leaves_them_out(clusters_source, tmp_path, call, name):
    root = tmp_path / "clusters"
    shutil.copytree(clusters_source, root)
    home, task = root / "home", f"{root / 'clusters.toml'}:clusters-5shot"
    for method in ("imprint", "protonet"):
        api.run(method, task, work=api.workspace(home, device="cpu"))
    damaged, mine = (home / "results" / "clusters-5shot" / f"{m}.seed-0.json" for m in ("protonet", "imprint"))
    original = read(damaged)
    DAMAGE[name](damaged)
    mine.unlink()
    status, out, err = call("run", "--method", "imprint", "--task", task, "--home", str(home))
    assert status == 0, err
    assert read(mine).label == "imprint"
    (line,) = left_out(out)
    assert "protonet" in line
    status, out, err = call("table", task, "--home", str(home))
    assert (status, len(left_out(out + err)), "Traceback" in err) == (0, 1, False)
    assert call("check", str(damaged), "--task", task, "--home", str(home))[0] == 2
    status, _, err = call("run", "--method", "protonet", "--task", task, "--home", str(home))
    assert status == 0, err
    assert read(damaged).episodes == original.episodes, "the run of what is damaged makes it again"
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


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def of_another(path: Path) -> None:
    value = read_checksummed(path)
    name = next(key for key in ("file", "key", "task_hash", "of") if isinstance(value.get(key), str))
    write_checksummed(path, {**value, name: "another"})


def with_another_key(path: Path) -> None:
    altered(path, lambda value: value.update(x=value.pop(next(k for k in value if k != "format"))))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_step_ahead(path: Path) -> None:
    altered(path, lambda value: value.update(step=value["step"] + 2, history={"2": 1.0, "6": 2.0}, best=6))


@pytest.mark.parametrize(  # one reader reads them all, and each kind says whose it is
    ("start", "pattern", "damage"),
    [
        *((FINISHED, pattern, damage) for pattern in SEALED for damage in (halved, of_another)),
        (FINISHED, SEALED[0], with_another_key),
        (FINISHED, SEALED[0], a_folder),
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


def flipped(byte: int, bit: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:byte] + bytes([content[byte] ^ 1 << bit]) + content[byte + 1 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((flipped(*place), "") for place in ((0, 0), (8, 7), (40, 5), (127, 5))),  # magic, length, content, end
        (lambda content: content.replace(b"'fortran_order': False", b"'fortran_order': True "), "another header"),
    ],
)
def test_a_changed_header_of_a_prepared_array_is_named(cache, change, message):
    path = cache / "home" / "data" / "tiny-images" / "base-val.images.npy"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CorruptFile, match=rf"base-val\.images\.npy.*{message}"):
        open_dataset(path.parent).check_images("base/val")


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


@pytest.mark.parametrize(
    "change", [{"accuracy": 101.0}, {"accuracy": "high"}, {"episodes": 0}, {"unconverged": -1}, {"diverged": 1}]
)
def test_an_impossible_trial_is_tried_again(tmp_path, change):
    path, tried = tmp_path / "trial.json", TrialRecord(50.0, 10, hits={"base_joint": [3] * 10})
    write_trial(path, tried, "abc", "a job", {})
    assert read_trial(path, "abc", lambda _: True) == tried
    assert read_trial(path, "other weights", lambda _: True) is None
    write_checksummed(path, {**read_checksummed(path), **change})
    reporter = Messages()
    assert read_trial(path, "abc", lambda _: True) is None
    assert path.exists()
    assert read_trial(path, "abc", lambda _: True, reporter) is None
    assert not path.exists()
    assert "trial.json is damaged" in reporter.warned[0]


@pytest.mark.parametrize("start", STARTS)
def test_random_damage_ends_with_the_same_counts_or_in_one_line(whole, start):
    """A case of tests.fuzz.cache; without any damage nothing is warned of."""
    assert one_case(whole, {"start": start}) == "the same"
    with contextlib.suppress(UserError):  # it is one line by itself
        damaged = one_case(whole, {"start": start, "chance": STARTS.index(start)})
        assert damaged in ("the same", "made again", "unchanged")


def test_every_cache_to_begin_with_has_what_a_killed_run_leaves(whole):
    folders = {start: {path.name for path in (whole.root / start / "home").iterdir()} for start in STARTS}
    assert "pretrained" not in folders["data half made"]
    assert list((whole.root / "data half made").rglob(".partial-tiny-images/progress.json"))
    assert "features" not in folders["pretraining's next state written"]
    assert len(list((whole.root / STARTS[2]).rglob("state-*.safetensors"))) == 2
    assert "trained" in folders[STARTS[3]]
    assert not list((whole.root / STARTS[3]).rglob("results/*/*.json"))
