"""The paper's rows: what is measured beside what is printed, and the whole way there on a few photographs."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ifsl_bench.analysis.published_comparison import pair_with_published_rows
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.data.published_splits import read_mapping_of_columns
from ifsl_bench.protocols.tasks.task_files import load_tasks, packaged_tasks
from ifsl_bench.reporting.comparison_tables import published_comparison_tables
from ifsl_bench.store.result_folder import packaged_results_folder

FIXTURE = Path(__file__).parents[3] / "shared" / "data" / "imagenet-mini-fixture.zip"
FEW = ("--task", "tiered-5shot", "--pretraining-steps", "1", "--train", "steps=2", "--queries", "2", "--episodes", "4",
       "--seeds", "1")  # fmt: skip


def test_the_page_has_the_order_of_measured_rows_as_it_is_printed():
    page = (Path(__file__).parents[2] / "docs" / "paper.md").read_text()
    for task in ("mini-pack-1shot", "mini-pack-5shot"):
        (table,) = published_comparison_tables([load_task_results(load_tasks(task)[0], packaged_results_folder())])
        (order,) = (note for note in table.notes if note.startswith("Pairs of rows"))
        assert order.partition(" (")[0] in page


@pytest.fixture
def printed(tmp_path, monkeypatch):
    """Published rows of a task whose measured ones are stored: one near, one far, one without a band."""
    of_methods = {"lr": [80.0, 0.2, -7.0], "lwof": [70.0], "imprint": [79.0], "protonet": [95.0], "other": [99.0]}
    bands = {"glyphs-5shot": {"lr": 1.5, "lwof": 1.5, "protonet": 1.5}}
    (tmp_path / "published").mkdir()
    content = {"title": "t", "source": "s", "columns": ["acc", "plus_minus_as_printed", "delta"]}
    content["rows"] = {"glyphs-5shot": of_methods}
    (tmp_path / "published" / "theirs.json").write_text(json.dumps({**content, "bands": bands, "interval": "unknown"}))
    monkeypatch.setattr("ifsl_bench.store.published.packaged_results_folder", lambda: tmp_path)


def test_measured_rows_stand_beside_printed_ones_and_within_or_outside_the_band(printed, call):
    board = load_task_results(load_tasks("glyphs-5shot")[0], packaged_results_folder())
    pairs = {pair.measured_row.label: pair for pair in pair_with_published_rows(board)}
    assert list(pairs) == ["lr", "lwof", "imprint", "protonet"]
    mean = np.mean([result.summary["acc"]["mean"] for result in board.find_row("lr").results])
    assert pairs["lr"].difference == pytest.approx(mean - 80.0)
    assert [pair.tolerance_verdict for pair in pairs.values()] == ["within", "outside", None, "outside"]
    status, out, _ = call("table", "--beside", "glyphs-5shot")
    assert status == 0
    assert "1 of 3 rows are within the band" in out
    assert "outside: lwof, protonet" in out
    # Printed: ProtoNet, LR, Imprint, LwoF. Measured: LwoF and LR nearly equal, then Imprint, ProtoNet last.
    expected = "Pairs of rows: 6; in the printed order 1, in the opposite order 4, not told apart here 1"
    assert expected in " ".join(out.split())
    status, out, _ = call("table", "--beside", "glyphs-5shot", "--format", "json")
    rows = {row["method"]: row for row in json.loads(out)}
    assert (rows["lr"]["printed"], rows["lr"]["band"], rows["lr"]["verdict"]) == (80.0, 1.5, "within")
    assert call("table", "--beside", "glyphs-1shot")[0] == 2
    status, _, err = call("table", "--beside", "mini-sessions")
    assert (status, "printed rows in sessions are of other backbones" in err) == (2, True)


def test_a_variant_is_shown_beside_its_tasks_rows_and_never_judged(printed, call, tmp_path):
    for path in (packaged_results_folder() / "glyphs-5shot").glob("lr.seed-*.json"):
        target = tmp_path / "results" / "glyphs-5shot+pretraining-steps=800" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        raw = json.loads(path.read_text())
        task = load_tasks("glyphs-5shot+pretraining-steps=800")[0]
        target.write_text(json.dumps({**raw, "task": task.name, "task_hash": task.hash}))
    (pair,) = pair_with_published_rows(load_task_results(task, tmp_path / "results"))
    assert (pair.measured_row.label, pair.tolerance_verdict) == ("lr", None)
    assert pair.incompatibility_reason == "a variant of glyphs-5shot"


def write_tiered(path: Path) -> None:
    """The photographs of tiered-ImageNet's classes, few of each pool, as ILSVRC-2012 has them."""
    phases = read_mapping_of_columns("tiered-imagenet-train-a-images.csv.xz", "image", "phase")
    counts: Counter[tuple[str, str]] = Counter()
    with zipfile.ZipFile(FIXTURE) as photographs, zipfile.ZipFile(path, "w") as archive:
        for name in sorted(photographs.namelist()):
            wnid, _, file = name.partition("/")
            phase = phases.get(file, "")
            counts[wnid, phase] += 1
            if counts[wnid, phase] <= {"": 7, "train": 2}.get(phase, 3):
                archive.writestr(name, photographs.read(name))


@pytest.mark.timeout(1500)
@pytest.mark.slow("pretrains the paper's network on photographs with both heads, and trains its nine methods")
def test_the_whole_campaign_runs_on_a_few_photographs_from_the_users_files_to_the_table(call, tmp_path, monkeypatch):
    if not FIXTURE.exists():
        pytest.skip("the photographs in ILSVRC-2012's layout are not here")
    task = packaged_tasks()["tiered-5shot"]  # what no option of the command makes smaller:
    slow = msgspec.structs.replace(task.pretraining.schedule, rate=1e-3)  # or one step's features are huge
    step = msgspec.structs.replace(task.pretraining, batch=16, schedule=slow)
    episodes = msgspec.structs.replace(task.evaluation, validation_episodes=6)
    monkeypatch.setitem(
        packaged_tasks(), task.name, msgspec.structs.replace(task, pretraining=step, evaluation=episodes)
    )
    photographs = tmp_path / "tiered.zip"
    write_tiered(photographs)
    monkeypatch.setenv("IFSL_BENCH_HOME", str(tmp_path / "home"))
    command = ("run", "paper", "--data", f"tiered-imagenet={photographs}", *FEW, "-q", "--device", "cpu")
    status, _, err = call(*command)
    assert status == 2, "a part of the images is not taken for the whole"
    assert "--allow-partial" in err
    assert call("data", "prepare", "tiered-imagenet", "--from", str(photographs), "--allow-partial", "-q")[0] == 0
    status, out, err = call(*command)
    # On features of one step of pretraining the problem of a network may have no solution, which is told.
    failed = [line for line in err.splitlines() if line.startswith("  ")]
    assert status == bool(failed), err
    assert all(line.startswith("  mlp") for line in failed), err
    assert len(list((tmp_path / "home" / "results").glob("*/*.json"))) == 9 - len(failed)
    name = "tiered-5shot+queries=2+pretraining-steps=1"
    pairs = pair_with_published_rows(load_task_results(load_tasks(name)[0], tmp_path / "home" / "results"))
    assert {"protonet", "imprint", "lwof", "lr", "lr+s", "lr+a"} <= {pair.published_row.label for pair in pairs}
    assert {pair.tolerance_verdict for pair in pairs} == {None}, "a variant, on a part of the data"
    assert f"{name}, measured here beside what is printed" in out
    status, out, _ = call("status", "paper", *FEW)
    assert status == 0
    assert f"9 jobs: {9 - len(failed)} stored" in out
