"""docs/data.md, for someone who has the files: every data set and task is in it, its numbers and commands are right."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import distribution
from pathlib import Path

import click
import pytest

from ifsl_bench.cli import main as cli
from ifsl_bench.data import datasets
from ifsl_bench.data.sets import mini, tiered
from ifsl_bench.plugin import registry
from ifsl_bench.protocols.tasks.task_files import packaged_tasks

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
OURS = sorted(p.name for p in distribution("ifsl_bench").entry_points if p.group == registry.DATASET_GROUP)
COMMANDS = re.findall(r"^    ifsl-bench (.*)$", DOCUMENT, re.M)


def ticked(text: str) -> set[str]:
    """Texts between backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_data_set_every_task_and_a_command_for_each_importer_are_in_the_document():
    tasks = packaged_tasks()
    assert {*OURS, *tasks, *(task.dataset.name for task in tasks.values())} <= ticked(DOCUMENT)
    for name in OURS:
        shown = any(command.startswith(f"data prepare {name} --from ") for command in COMMANDS)
        assert shown or not datasets.find_dataset_source(name).layouts, name


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_ones_that_there_are(command):
    words = shlex.split(command)
    group: click.Command = cli.cli
    while isinstance(group, click.Group):
        child = group.get_command(click.Context(group), words.pop(0))
        assert child is not None, command
        group = child
    # Parsed as typed, but for the files, which are the reader's.
    arguments = ["." if before == "--from" else word for before, word in zip(["", *words], words, strict=False)]
    context = group.make_context(group.name, arguments)
    own = re.findall(r"data prepare ([\w-]+) --from (?:photos|features|digits/\w+|101_\w+)\b", DOCUMENT, re.M)
    assert own[0] == "birds"
    if group.name == "prepare":
        assert context.params["name"] in {*OURS, *own}
    else:
        tasks = {*packaged_tasks(), *(f"{name}-{kind}" for name in own for kind in ("1shot", "5shot", "sessions"))}
        assert tasks >= {*context.params["tasks"]}


def section(title: str) -> str:
    """The text below the heading that begins so, up to the next of its level."""
    level = len(title.partition(" ")[0])
    _, text = DOCUMENT.split(f"\n{title}")  # once
    return re.split(rf"\n#{{2,{level}}} ", text)[0]


def counts_by_data_set() -> dict[str, tuple[str, dict[str, tuple[int, int]]]]:
    """Data set -> pixels; pool -> classes and images, from the table."""
    lines = [line.strip("|").split("|") for line in section("## Classes and images").splitlines() if line[:1] == "|"]
    (_, _, *pools), _, *rows = ([cell.strip(" `") for cell in line] for line in lines)
    counts = {}
    for name, pixels, *cells in rows:
        numbers = {pool: cell.replace(",", "").split(": ") for pool, cell in zip(pools, cells, strict=True) if cell}
        counts[name] = pixels, {pool: (int(classes), int(images)) for pool, (classes, images) in numbers.items()}
    return counts


def test_counts_are_those_that_imports_are_held_against():
    shown = counts_by_data_set()
    assert len(shown) == 14
    for name, (pixels, pools) in shown.items():
        shape, counts = datasets.find_dataset_source(name).expected_shape_and_counts()
        assert pools == {pool: (count.n_classes, count.n_images) for pool, count in counts.items()}, name
        assert pixels == f"{shape[0]}x{shape[1]}", name


@pytest.mark.parametrize(
    ("title", "files"),
    [
        ("### `mini-imagenet`: LwoF's", set(mini.LwofPickles.file_name_of_pool.values())),
        ("### `mini-imagenet-held-out`", {names[0] for names in mini.Learn2learnCaches.file_names_of_side.values()}),
        (
            "### `tiered-imagenet`: the paper's",
            {*tiered.Ren2019Pickles.sides_of_prefix, "class_names.txt", "synsets.txt"},
        ),
        (
            "### `tiered-imagenet-2018`",
            {
                f"{prefix}_{part}.pkl"
                for prefix in tiered.Ren2018Pickles.sides_of_prefix
                for part in ("images_png", "labels")
            }
            | {"class_names.txt", "synsets.txt"},
        ),
    ],
)
def test_all_files_of_a_form_are_named_in_its_section(title, files):
    assert files <= ticked(section(title))


def test_the_readme_lists_the_tasks_of_every_data_set():
    table = ticked(README[README.index("| task, each with `-1shot` and `-5shot` |") :].partition("\n\n")[0])
    families = {task.dataset.name.partition("-imagenet")[0].partition("-64")[0] for task in packaged_tasks().values()}
    assert {name for name in families if not name.endswith("-sessions")} <= table
