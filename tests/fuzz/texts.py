"""CSV files that divide classes, task files and campaigns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path

from ifsl_bench.data.sets.folder import read_sides
from ifsl_bench.experiments.expansion import asked, with_tasks
from ifsl_bench.experiments.request import Request
from ifsl_bench.protocols.tasks.task_files import find, parse
from ifsl_bench.store.result_folder import CLAIMS
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from tests.fuzz.formats import Format
from tests.fuzz.mutation import spoiled_text

WORDS = (
    "-1", "0", "1000000000000", "9" * 30, "9" * 5000, "0x" + "f" * 5000, "1e999", "nan", "inf", "-inf", "true",
    "1979-05-27", "07:32:00", '"', "'", '"""', "'''", "\\", "\\u001b", "\\ud800", "\x1b[2J", "\0", "\udc80", "é",
    "\u2028", "[" * 2000, "{a=" * 2000, "a." * 150 + "a", "a." * 3000 + "a", "[[", "]]", "{", "}", "=", ",", "\n",
    "\r", "#", "[tasks.x]", '[tasks.""]', "shots", "[variants.y]", 'of = "glyphs-5shot"', "ways = 3", "[evaluation]",
    "episodes", "seed", "x" * 70_000, "novel/test", "base", "class", "split",
)  # fmt: skip


@cache
def csvs() -> Sequence[bytes]:
    lines = [f"class {i},{side}" for i, side in enumerate(["base", "val", "test", "novel/train", "novel/val"] * 3)]
    return [
        "\n".join(["class,split", *lines]).encode(),
        ("\ufeff" + "\r\n".join(["split,name", *('"val","a ""b"""',)])).encode(),
    ]


def read_csv(path: Path) -> None:
    for name in read_sides(path):
        name.encode()


@cache
def tomls() -> Sequence[bytes]:
    files = sorted(resources.files("ifsl_bench.tasks").iterdir(), key=lambda file: file.name)
    return [file.read_bytes() for file in files if file.name.endswith(".toml")]


def read_toml(path: Path) -> None:
    path = path.rename(path.with_suffix(".toml"))
    tasks = find(str(path))
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8") from error
    again = parse(text.replace("\r\n", "\n").replace("\r", "\n"), str(path))
    assert [task.hash for task in again] == [task.hash for task in tasks]


@cache
def campaigns() -> Sequence[bytes]:
    files = sorted(resources.files("ifsl_bench.results").iterdir(), key=lambda file: file.name)
    more = b"""results = "x"
[data]
glyphs = "y"
[[run]]
methods = ["lr+a", "mlp*", "x.py:Y"]
tasks = ["glyphs-*shot+ways=3", "paper", "all", "glyphs-1shot"]
seeds = [0, 5]
set = { gamma = [1e-3, 1], gradient = "rbp", converge = false }
train = { steps = [5, 6] }
tune = 4
episodes = 20
calibrate = true
queries = [2, 3]
"""
    return [*(file.read_bytes() for file in files if file.name.endswith(".toml") and file.name != CLAIMS), more]


def read_campaign(path: Path) -> None:
    path = path.rename(path.with_suffix(".toml"))
    campaign, tasks = with_tasks(asked(str(path), Request()), Paths.locate(path.parent / "home"))
    assert tasks
    assert all(request.tasks for request in campaign.requests)


FORMATS = [
    Format("csv", csvs, read_csv, partial(spoiled_text, words=WORDS), 5),
    Format("toml", tomls, read_toml, partial(spoiled_text, words=WORDS), 10),
    Format("campaign", campaigns, read_campaign, partial(spoiled_text, words=WORDS), 5),
]
