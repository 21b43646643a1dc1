"""Task files from strangers: what is nested, long or beyond all measure is refused in one line."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from ifsl_bench.protocols.tasks.task_files import load_tasks, parse_tasks
from ifsl_bench.utils.errors import UserError

HOSTILE = {
    "lists nested deep": ("a = " + "[" * 100_000 + "]" * 100_000, "nested too deep"),
    "tables nested deep": ("a = " + "{a=" * 50_000 + "1" + "}" * 50_000, "nested too deep"),
    "a key of 100,000 parts": (".".join("a" * 100_000) + " = 1", "a line with 99,999 dots"),
    "a table of 100,000 parts": ("[" + ".".join("a" * 100_000) + "]", "a line with 99,999 dots"),
    "a key of 30,000 parts with line breaks that are none": (("a." * 100 + '"\u2028".') * 300 + "a = 1", "30,300 dots"),
    "a number of 5,000 digits": ("a = " + "9" * 5_000, "not valid TOML"),
    "a hexadecimal number of 5,000": ("a = 0x" + "f" * 5_000, "unknown field"),
    "a string without end": ('a = "' + "x" * 200_000, "not valid TOML"),
    "a million characters": ("#" * 1_000_000, "more than 262,144 characters"),
    "a key that steers the terminal": ('"\\u001b[2J" = 1', r"unknown field `\\x1b\[2J`"),
}


def test_a_byte_order_mark_is_no_part_of_a_task_file(tmp_path):
    text = '[dataset]\nname = "mine"\n[pretraining]\nbackbone = "none"\nsteps = 1\n[pretraining.schedule]\nrate = 0.1\n'
    (tmp_path / "t.toml").write_text(f"{text}[tasks.mine-5shot]\nshots = 5\n", encoding="utf-8-sig")
    assert [task.name for task in load_tasks(str(tmp_path / "t.toml"))] == ["mine-5shot"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_toml_is_refused_in_one_line(name):
    text, message = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=message) as error:
            parse_tasks(text, "x.toml")
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert str(error.value).startswith("x.toml")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[evaluation]\nseed = 9223372036854775808", "evaluation.seed must be at most 9,223,372,036,854,775,807"),
        ("[evaluation]\nseed = 1979-05-27", "Expected `int`, got `date`"),
        ("[evaluation]\nseed = 1\nseed = 2", "is not valid TOML: Cannot overwrite a value"),
        ("[episode]\nways = 1001", "episode.ways must be at most 1,000"),
        ("[meta_training.schedule]\nrate = nan", "meta_training.schedule.rate must be positive"),
        ("[meta_training.schedule]\nrate = 0.1\nwarmup = 99999999999", "meta_training.schedule.warmup must be at most"),
        ("[meta_training.schedule]\nrate = 1\ndrops = [99999999999]", "meta_training.schedule.drops must be at most"),
        ('[tasks.x]\nshots = 1\ntitle = "\\u001b[2J"', "title must be one line"),
    ],
)
def test_values_that_no_machine_can_meet_are_refused_by_name(lines, message, minimal_task):
    with pytest.raises(UserError, match=rf"^x\.toml.*{re.escape(message)}"):
        parse_tasks(minimal_task + "\n" + lines, "x.toml")


@pytest.mark.parametrize(("key", "value"), [("mean", "[nan]"), ("mean", "[inf]"), ("std", "[nan]"), ("std", "[inf]")])
def test_means_and_deviations_are_finite(key, value, minimal_task):
    text = minimal_task.replace('name = "d"', f'name = "d"\n{key} = {value}')
    with pytest.raises(UserError, match=rf"dataset\.{key} must be"):
        parse_tasks(text, "x.toml")


def test_a_task_file_without_end_is_not_read_to_its_end(tmp_path):
    (tmp_path / "x.toml").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="more than 262,144 characters"):
        load_tasks(str(tmp_path / "x.toml"))
