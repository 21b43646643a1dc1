"""Task files: strict reading, identity, and what the packaged ones say."""

from __future__ import annotations

import pytest

from ifsl_bench.data import datasets
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task import Schedule
from ifsl_bench.protocols.tasks.task_files import load_tasks, packaged_tasks, parse_tasks
from ifsl_bench.utils.errors import UserError


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("shots = 1", "shots = 1\nshot = 2", "unknown field `shot`"),
        ("shots = 1", "shotz = 1", "did you mean 'shots'"),
        ("[tasks.d-1shot]", "[episodes]\nways = 5\n[tasks.d-1shot]", "field `episodes`; did you mean 'episode'?"),
        ("shots = 1", 'shots = 1\n[tasks.b-2]\nshots = "one"', "Expected `int`, got `str` - at `tasks.b-2.shots`"),
        ("rate = 0.1", "rate = -0.1", "rate must be positive"),
        ("[tasks.d-1shot]\nshots = 1", "[tasks]", "defines no task"),
        ("shots = 1", 'shots = 1\nprotocol = "mixed"', "'mixed', which is none of 'separate', 'shared'"),
        ("tasks.d-1shot", 'tasks."D 1"', "a name is lower-case"),
        ('name = "d"', 'name = "../d"', "dataset.name '../d': a name is lower-case"),
        ("steps = 1", "steps = 1\nmomentum = -1.0", "momentum must be in [0, 1)"),
        ("rate = 0.1", "rate = 0.1\ndrops = [3, 2]", "drops must ascend"),
        ("rate = 0.1", 'rate = 0.1\ndrops = [3]\nshape = "cosine"', "no place in a cosine"),
    ],
)
def test_mistakes_are_named(old, new, message, minimal_task):
    assert old in minimal_task
    with pytest.raises(UserError, match=r"x\.toml") as error:
        parse_tasks(minimal_task.replace(old, new), "x.toml")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_hash_changes_with_what_matters_and_nothing_else(minimal_task):
    (task,) = parse_tasks(minimal_task, "x")
    same = minimal_task.replace("shots = 1", 'shots = 1\ntitle = "T"\ndigest = "x"')
    same = same.replace('name = "d"', 'name = "d"\nobtain = "somewhere"\nfingerprint = "f"')
    assert parse_tasks(same, "x")[0].hash == task.hash
    for old, new in (("steps = 1", "steps = 2"), ("shots = 1", "shots = 2"), ("rate = 0.1", "rate = 0.2")):
        assert parse_tasks(minimal_task.replace(old, new), "x")[0].hash != task.hash


def test_find_suggests_names_and_reads_files(tmp_path, minimal_task):
    with pytest.raises(UserError, match="did you mean 'glyphs-5shot'"):
        load_tasks("glyphs-5sht")
    path = tmp_path / "my.toml"
    path.write_text(minimal_task + "[tasks.d-5shot]\nshots = 5\n")
    assert [t.name for t in load_tasks(str(path))] == ["d-1shot", "d-5shot"]
    assert [t.shots for t in load_tasks(f"{path}:d-5shot")] == [5]
    with pytest.raises(UserError, match="unknown task 'd-2shot' in"):
        load_tasks(f"{path}:d-2shot")
    with pytest.raises(UserError, match="cannot read the task file"):
        load_tasks(str(tmp_path / "none.toml"))


def test_protocols_choose_pools():
    separate, shared = packaged_tasks()["tiered-5shot"], packaged_tasks()["mini-5shot"]
    assert separate.pool("train", "novel") == "novel/train"
    assert separate.pool("train", "base") == "base/val"
    sides = ("train", "val", "test")
    assert [separate.base_parity(side) for side in sides] == ["even", "odd", None]
    assert shared.pool("train", "novel") == shared.pool("train", "base") == "base/train"
    assert [shared.base_parity(side) for side in sides] == [None, None, None]
    for task in (separate, shared):
        assert [task.pool("val", "novel"), task.pool("val", "base")] == ["novel/val", "base/val"]
        assert [task.pool("test", "novel"), task.pool("test", "base")] == ["novel/test", "base/test"]


def test_papers_schedules():
    """Ren et al. 2019 and their released code."""
    mini, tiered = packaged_tasks()["mini-1shot"], packaged_tasks()["tiered-1shot"]
    assert (mini.pretraining.backbone, tiered.pretraining.backbone) == ("resnet10", "resnet18-gn")
    for task, steps in ((mini, (0, 19999, 20000, 25000)), (tiered, (0, 13999, 14000, 18000))):
        rates = [task.pretraining.schedule.rate_at(step, task.pretraining.steps) for step in steps]
        assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001])
    assert (mini.pretraining.steps, tiered.pretraining.steps) == (30000, 20000)
    assert [255 * v for v in mini.dataset.mean] == pytest.approx([120.39586422, 115.59361427, 104.54012653])
    assert [255 * v for v in mini.dataset.std] == pytest.approx([70.68188272, 68.27635443, 72.54505529])
    for task in (mini, tiered):
        assert (task.pretraining.batch, task.pretraining.weight_decay, task.pretraining.momentum) == (256, 5e-4, 0.9)
        assert (task.pretraining.crop_padding, task.pretraining.flip) == (8, True)
        assert [task.meta_training.schedule.rate_at(s, 8000) for s in (3999, 4000)] == pytest.approx([1e-3, 1e-4])


def test_cosine_schedule_warms_up_and_ends_near_zero():
    schedule = Schedule(rate=1.0, shape="cosine", warmup=10)
    values = [schedule.rate_at(step, 110) for step in range(110)]
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert values[60] == pytest.approx(0.5)
    assert values[109] < 1e-3
    assert values[10:] == sorted(values[10:], reverse=True)


@pytest.mark.parametrize("name", sorted(packaged_tasks()))
def test_every_packaged_task_is_complete(name):
    task = packaged_tasks()[name]
    assert task.title
    assert task.evaluation.episodes == (task.sessions.n_sequences if task.sessions else 2000)
    embedded = task.dataset.name in registry.registered_entry_points(registry.DATASET_GROUP)
    if embedded and not datasets.find_dataset_source(task.dataset.name).needs_source:
        assert task.dataset.fingerprint, "the content of embedded data is pinned"
        assert task.digest, "and so are the test episodes"
    else:
        assert task.dataset.obtain, "data that must be obtained need directions"
