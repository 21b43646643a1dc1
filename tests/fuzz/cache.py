"""Damage to small caches, finished ones and such as a killed run leaves: the next run ends with the same counts, or in
one line.

A case is a recipe: which cache it begins with, and a number that says which of its files is damaged and how.
"""

from __future__ import annotations

import atexit
import json
import random
import shutil
import signal
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.harness import Format, change_json, spoiled
from tests.reporters import Messages
from tests.small_run import Disturbance, fork, run, undisturbed

# How far a run has got where it is killed: the path of a file that it writes then, and how often it has done so.
KILLED = {
    "data half made": ("/.partial-tiny-images/progress.json", 6),
    "data made, its progress not removed": ("/data/tiny-images/progress.json", 1),
    "digest half written": ("/digests/.partial", 2),
    "pretraining saved once": ("/.partial-state-2.safetensors", 2),
    "pretraining's next state written": ("/state-2.safetensors", 2),
    "features half written": ("/.partial-novel-test/.partial-bank.json", 2),
    "meta-training saved twice": ("/state-3.safetensors", 2),
    "meta-training over": ("/trials/.partial", 2),
    "second meta-training begun": ("/state-2.safetensors", 8),
    "no result yet": ("/results/", 6),
}
FINISHED = "finished"

# -- damage


STRANGE = (None, True, 0, -1, 9000, 10**30, 1e308, 0.5, "", "x", "../../x", [], [1], {}, {"a": 1})


def damage(path: Path, chance: random.Random) -> str:
    """Changes a file in place; returns how."""
    content = path.read_bytes()
    kind = chance.random()
    if kind < 0.04:
        path.unlink()
        replacement = chance.choice(("gone", "folder", "dangling", "loop"))
        if replacement == "folder":
            path.mkdir()
        elif replacement != "gone":
            path.symlink_to("nowhere" if replacement == "dangling" else path.name)
        return replacement
    if path.suffix == ".json" and kind < 0.6:
        value = json.loads(content)
        change_json(value, chance, STRANGE, ("x", "time"))
        path.write_text(json.dumps(value))
        return "json"
    path.write_bytes(spoiled(chance, content) if content else chance.randbytes(5))
    return "bytes"


def files_of(home: Path) -> list[Path]:
    """Every file of a cache but locks and results, relative to it."""
    paths = [path.relative_to(home) for path in sorted(home.rglob("*")) if path.is_file()]
    return [path for path in paths if path.suffix != ".lock" and path.parts[0] != "results"]


def kind_of(path: Path) -> str:
    """A file's name in the report: its folder, and its name without what differs."""
    name = path.name if path.parts[0] not in ("trials", "digests") else "*.json"
    return f"{path.parts[0]}/{'.'.join(name.split('.')[1:]) if path.parts[0] == 'data' and 'npy' in name else name}"


# -- the run


@dataclass(frozen=True)
class Caches:
    """Caches to begin with, each in a folder below ``root``; and what every run on one ends with."""

    root: Path
    wanted: dict[str, Any]


def make_caches(root: Path, names: Sequence[str] = (FINISHED, *KILLED)) -> Caches:
    """Makes caches below ``root``."""
    torch.set_num_threads(1)
    expected, _, _ = undisturbed(root)
    shutil.move(root / "plain", root / FINISHED)
    for name in names:
        if name != FINISHED:
            (root / name).mkdir()
            status = fork(root / name, Disturbance(signal.SIGKILL, *KILLED[name]))
            assert status == -signal.SIGKILL, f"{name}: {status}: {(root / name / 'stderr').read_text()}"
    for name in names:
        shutil.rmtree(root / name / "home" / "results", ignore_errors=True)  # a stored one would be all that is read
    return Caches(root, expected)


@cache
def caches() -> Caches:
    """All of them, until this process ends."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-caches-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return make_caches(root)


def one_case(whole: Caches, recipe: dict[str, Any]) -> str:
    """The end of the run on a damaged cache: "the same" counts, "made again" with a warning, or on a file that the
    damage left as it was ("unchanged"). Raises AssertionError where it ended wrongly.

    Args:
        recipe: "start", a name of a cache; "chance", a number, without which nothing is damaged.
    """
    chance = random.Random(recipe.get("chance"))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(whole.root / recipe["start"], root, dirs_exist_ok=True)
        files = files_of(root / "home")
        chosen, how, before = Path("nothing"), "", b""
        if "chance" in recipe:
            kind = chance.choice(sorted({kind_of(path) for path in files}))
            chosen = root / "home" / chance.choice([path for path in files if kind_of(path) == kind])
            before = chosen.read_bytes()
            how = damage(chosen, chance)
        unchanged = chosen.is_file() and chosen.read_bytes() == before
        messages, expected = Messages(), whole.wanted
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results = run(root, reporter=messages)
        different = [key for key in expected if results.get(key) != expected[key]]
        damaged = f"{chosen.relative_to(root) if how else chosen} ({how})"
        assert not different, f"{damaged}: other {', '.join(different)}, after {messages.warned}"
        if how == "" or unchanged:
            assert not messages.warned, f"{damaged}: {messages.warned}"
        return "made again" if messages.warned else "unchanged" if unchanged else "the same"


# -- the format


def recipes() -> Sequence[bytes]:
    return [json.dumps({"start": name}).encode() for name in (FINISHED,) * len(KILLED) + tuple(KILLED)]


def damaged(chance: random.Random, content: bytes) -> bytes:
    return json.dumps(json.loads(content) | {"chance": chance.getrandbits(32)}).encode()


def read(path: Path) -> str:
    return one_case(caches(), json.loads(path.read_bytes()))


FORMAT = Format("cache", recipes, read, damaged, share=15, prepare=caches, seconds=60)
