"""The reference of task files, and the files that are written with a comment on every key."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ifsl_bench.protocols.tasks.reference import (
    TASK_FILE_KEY_DESCRIPTIONS,
    TASK_FILE_TABLE_DESCRIPTIONS,
    format_task_file,
    task_file_keys,
)
from ifsl_bench.protocols.tasks.task import (
    DataSpec,
    EpisodeSpec,
    Evaluation,
    MetaTraining,
    Pretraining,
    Schedule,
    SessionSpec,
)
from ifsl_bench.protocols.tasks.task_files import load_tasks, packaged_tasks, parse_tasks
from ifsl_bench.protocols.tasks.variants import TaskVariantEntry
from ifsl_bench.utils.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


@pytest.fixture
def reference(call) -> str:
    """What `ifsl-bench tasks reference` prints, and the site has on the page of tasks."""
    pytest.importorskip("timm", reason="the reference describes its backbones too")
    status, out, err = call("tasks", "reference")
    assert status == 0, err
    return out


def test_the_page_has_a_place_for_the_keys():
    assert "<!-- reference of task files -->" in PAGE.read_text(encoding="utf-8")


def test_every_key_of_the_structures_has_a_meaning_and_a_row(reference):
    assert TASK_FILE_KEY_DESCRIPTIONS.keys() <= {key.key_path for key in task_file_keys()}
    assert all(key.key_description for key in task_file_keys())
    assert TASK_FILE_TABLE_DESCRIPTIONS.keys() == {key.table_name for key in task_file_keys()}
    structures = {"dataset": DataSpec, "pretraining": Pretraining, "pretraining.schedule": Schedule,
                  "episode": EpisodeSpec, "meta_training": MetaTraining, "evaluation": Evaluation,
                  "variants.[name]": TaskVariantEntry, "tasks.[name].sessions": SessionSpec}  # fmt: skip
    for table, structure in structures.items():
        section = reference.split(f"### [{table}]\n")[1].split("\n### ")[0]
        named = set(re.findall(r"^\| `(\w+)` \|", section, re.M))
        assert named == set(structure.__struct_fields__) - {"schedule", "sessions"}
    for table, same in {"meta_training.schedule": "pretraining.schedule",
                        "variants.[name].sessions": "tasks.[name].sessions"}.items():  # fmt: skip
        assert f"The same keys as in [{same}].\n" in reference.split(f"### [{table}]\n")[1].split("\n### ")[0]


MINIMAL = {"dataset": {"name": "d"}, "pretraining": {"backbone": "none", "steps": 1, "schedule": {"rate": 0.1}},
           "episode": {}, "meta_training": {"schedule": {"rate": 1e-3}}, "evaluation": {},
           "tasks": {"d-1shot": {"shots": 1}}}  # fmt: skip


@pytest.mark.parametrize(
    "key", [key for key in task_file_keys() if not key.table_name.startswith("variants")], ids=lambda key: key.key_path
)
def test_a_range_ends_where_it_says(key):
    """The value at each end is taken, and the one beyond it is refused by the name of the key."""
    match = re.fullmatch(r"([\d,]+) to ([\d,]+)|(\d+) or more", key.value_range)
    if not match:
        return
    least, most = (int(end.replace(",", "")) if end else None for end in (match[1] or match[3], match[2]))
    for value, right in ((least, True), (least - 1, False), (most, True), (most and most + 1, False)):
        if value is None:
            continue
        content = msgspec.json.decode(msgspec.json.encode(MINIMAL))
        if key.key_path == "evaluation.episodes" and right:
            content["episode"] = {"ways": 1, "novel_queries": 1, "base_queries": 1}  # of more a file could hold fewer
        place = content
        for part in key.table_name.replace("[name]", "d-1shot").split("."):
            place = place.setdefault(part, {})
        if key.table_name.endswith(".sessions"):
            place |= {"count": 1, "ways": 1}  # neither has a default
        place[key.name] = value
        if right:
            (task,) = parse_tasks(format_task_file(content), "x.toml")
            assert task
        else:
            with pytest.raises(UserError, match=key.name):
                parse_tasks(format_task_file(content), "x.toml")


@pytest.mark.parametrize("name", ["glyphs-shared-5shot", "mini-1shot", "tiny-pack-5shot"])
def test_a_written_file_says_what_it_was_given(name):
    task = packaged_tasks()[name]
    fields = msgspec.to_builtins(task)
    tables = {table: fields[table] for table in ("dataset", "pretraining", "episode", "meta_training", "evaluation")}
    entry = {key: fields[key] for key in ("shots", "protocol", "title", "digest", "variant_of")}
    (again,) = parse_tasks(format_task_file({**tables, "tasks": {name: entry}}), "x.toml")
    assert again == task


def test_a_comment_is_the_default_of_its_key():
    """With '#' removed from every line that is at its default, the file says the same."""
    text = format_task_file(MINIMAL)
    named = re.sub(r"^# (\w+ = (?!\.\.\.))", r"\1", text, flags=re.M)
    assert named.count("\n") == text.count("\n")
    assert named != text
    assert parse_tasks(named, "x.toml") == parse_tasks(text, "x.toml")


def test_new_writes_a_file_that_runs_as_the_data_need_it(here, call):
    status, out, err = call("tasks", "new", "mine", "--data", "clusters")
    assert status == 0, err
    assert "--task mine-5shot" in out
    assert load_tasks("mine-5shot")[0].name == "mine-5shot", "found by its name"
    (first, second) = load_tasks("home/tasks/mine.toml")
    assert (first.name, second.name, second.shots, second.protocol) == ("mine-1shot", "mine-5shot", 5, "separate")
    assert second.pretraining.backbone == "none"
    assert second.dataset.fingerprint
    for arguments, message in (
        (("mine", "--data", "clusters"), "tasks/mine.toml is there already"),
        (("clusters", "--data", "clusters"), "clusters.toml is there already"),
        (("clusters", "--data", "clusters", "--out", "x.toml"), "there is a task 'clusters-1shot' already"),
        (("glyphs", "--data", "clusters"), "there is a task 'glyphs-1shot' already"),
        (("A b", "--data", "clusters"), "is no name for tasks"),
        (("more", "--data", "custers"), "did you mean 'clusters'"),
        (("more", "--data", "tiny"), "data prepare tiny"),
    ):
        status, _, err = call("tasks", "new", *arguments)
        assert status == 2
        assert message in err
    assert not Path("more.toml").exists()
