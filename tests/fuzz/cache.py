"""Damage to a small finished cache, file by file: a resumed run ends with the same counts, or in one line.

``python -m tests.fuzz.cache --cases 2000 --seed 0`` says how many cases of which file ended how, and every case that
ended otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home
from ifsl_bench.common.progress import Reporter
from ifsl_bench.data.writer import Writer, build
from ifsl_bench.running import api

TASKS = """
[dataset]
name = "tiny-images"
mean = [0.5]
std = [0.25]
[pretraining]
backbone = "resnet-small"
steps = 4
batch = 16
[pretraining.schedule]
rate = 0.05
[meta_training]
steps = 8
validate_every = 2
[meta_training.schedule]
rate = 1e-2
[evaluation]
episodes = 12
validation_episodes = 8
[episode]
ways = 3
novel_queries = 4
base_queries = 4
[tasks.tiny-images-1shot]
shots = 1
"""
METHOD = "lwof"


class Told(Reporter):
    """Keeps what a run warns of."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def make_data(home: Home) -> None:
    """Six pools of noisy images, 16 x 16, that a network tells apart a little."""
    generator = np.random.default_rng(0)
    sides = {"base": 5, "novel/train": 6, "novel/val": 5, "novel/test": 5}
    centres = {side: generator.integers(60, 196, (classes, 16, 16, 1)) for side, classes in sides.items()}

    def fill(writer: Writer) -> None:
        for pool in ("base/train", "base/val", "base/test", "novel/train", "novel/val", "novel/test"):
            side = pool if pool in sides else "base"
            labels = np.repeat(np.arange(sides[side]), 10)
            names = tuple(f"{side}-{label}" for label in range(sides[side]))
            with writer.pool(pool, labels, names, (16, 16, 1)) as images:
                noise = generator.integers(-60, 60, images.shape)
                images[:] = np.clip(centres[side][labels] + noise, 0, 255).astype(np.uint8)

    home.data.mkdir(parents=True, exist_ok=True)
    build(home.data / "tiny-images", "tiny-images", "made of noise", fill, {})


def run(root: Path, reporter: Reporter | None = None) -> dict[str, Any]:
    """The counts, the training and what was chosen, by the cache in ``root/home``; no result of it is there."""
    shutil.rmtree(root / "home" / "results", ignore_errors=True)
    file = root / "tiny.toml"
    file.write_text(TASKS)
    work = api.workspace(root / "home", device="cpu", reporter=reporter or Told())
    result = api.run(METHOD, f"{file}:tiny-images-1shot", tune=2, train={"steps": 8}, work=work)
    value = json.loads(next((root / "home" / "results").glob("*/*.json")).read_text())
    assert result.label
    return {key: value[key] for key in ("episodes", "calibration", "options", "tuned")} | {
        "training": {k: v for k, v in value["training"].items() if k != "seconds"}
    }


def make_cache(root: Path) -> dict[str, Any]:
    """A finished cache below ``root``; returns what every later run must end with."""
    make_data(Home.locate(root / "home"))
    return run(root)


# -- damage ----------------------------------------------------------------------------------------------------------


def _flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    # Headers are a small part of most files, and the part that says what the rest is.
    end = min(len(content), 140) if chance.random() < 0.5 else len(content)
    for _ in range(chance.choice((1, 1, 1, 3, 8))):
        changed[chance.randrange(end)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _overwrite(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content))
    piece = chance.choice((b"\0" * 16, b"\xff" * 8, b"9", b"(((((", b"\n", os.urandom(0) + b"{", b"NaN", b"null"))
    return content[:start] + piece + content[start + len(piece) :]


def _insert(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    return content[:start] + chance.choice((b" ", b"0", b"\0", b'"', b",", b"}", b"\xc3")) + content[start:]


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.choice((0, 1, len(content) // 2, len(content) - 1, chance.randrange(len(content))))]


def _longer(content: bytes, chance: random.Random) -> bytes:
    return content + chance.choice((b"\0", b"\n{}", content[:100]))


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (_flip, _flip, _overwrite, _insert, _cut, _longer)
STRANGE = (None, True, 0, -1, 9000, 10**30, 1e308, 0.5, "", "x", "../../x", [], [1], {}, {"a": 1})


def _older(content: bytes, chance: random.Random) -> bytes:
    """As :func:`_json`, in a file from before there was a checksum."""
    value = json.loads(content)
    del value["checksum"]
    return _json(json.dumps(value | {"format": 1}).encode(), chance)


def _json(content: bytes, chance: random.Random) -> bytes:
    """A key renamed or removed, or a value of another kind, somewhere in the tree."""
    value = json.loads(content)
    at: Any = value
    while True:
        below = [one for one in (at.values() if isinstance(at, dict) else at) if isinstance(one, dict | list) and one]
        if not below or chance.random() < 0.4:
            break
        at = chance.choice(below)
    key = chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
    if isinstance(at, dict) and chance.random() < 0.4:
        old = at.pop(key)
        if chance.random() < 0.5:
            at[key + "x"] = old
    else:
        old = at[key]
        near = [old + 1, old - 1, old * 2] if isinstance(old, int | float) and not isinstance(old, bool) else []
        at[key] = chance.choice([*STRANGE, *near])
    return json.dumps(value).encode()


def damage(path: Path, chance: random.Random) -> str:
    """Changes a file in place; returns how."""
    content = path.read_bytes()
    kind = chance.random()
    if kind < 0.04:
        path.unlink()
        what = chance.choice(("gone", "folder", "dangling", "loop"))
        if what == "folder":
            path.mkdir()
        elif what != "gone":
            path.symlink_to("nowhere" if what == "dangling" else path.name)
        return what
    how = chance.choice((_json, _older)) if path.suffix == ".json" and kind < 0.6 else chance.choice(BYTES)
    path.unlink()
    path.write_bytes(how(content, chance))
    return how.__name__.lstrip("_")


# -- the run ---------------------------------------------------------------------------------------------------------


def files_of(home: Path) -> list[Path]:
    """Every file of a cache but locks and results, relative to it."""
    found = [path.relative_to(home) for path in sorted(home.rglob("*")) if path.is_file()]
    return [path for path in found if path.suffix != ".lock" and path.parts[0] != "results"]


def kind_of(path: Path) -> str:
    """What a file is called in the report: its folder, and its name without what differs."""
    name = path.name if path.parts[0] not in ("trials", "digests", "probes") else "*.json"
    return f"{path.parts[0]}/{'.'.join(name.split('.')[1:]) if path.parts[0] == 'data' and 'npy' in name else name}"


def one_case(whole: Path, wanted: dict[str, Any], case: int, seed: int, only: str = "") -> tuple[str, str, str]:
    """(kind of file, how it was damaged, how the run ended); raises AssertionError where it ended wrongly."""
    chance = random.Random(f"{seed}/{case}")
    files = [path for path in files_of(whole / "home") if only in path.as_posix()]
    kinds = sorted({kind_of(path) for path in files})
    kind = chance.choice(kinds)
    chosen = chance.choice([path for path in files if kind_of(path) == kind])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(whole, root, dirs_exist_ok=True, copy_function=os.link)  # what is damaged is written anew
        how = damage(root / "home" / chosen, chance)
        unchanged = how not in ("gone", "folder", "dangling", "loop") and (
            (root / "home" / chosen).read_bytes() == (whole / "home" / chosen).read_bytes()
        )
        told = Told()
        said = f"case {case} of seed {seed}: {chosen} ({how})"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = run(root, reporter=told)
        except UserError as error:
            if "\n" in str(error):
                raise AssertionError(f"{said}: {error}") from error
            return kind, how, "one line"
        except Exception:
            raise AssertionError(f"{said}:\n{traceback.format_exc(limit=-4)}") from None
        if how == "older":  # what nothing vouches for is what a finished training says of its own course
            found, wanted = ({k: v for k, v in one.items() if k != "training"} for one in (found, wanted))
        assert found == wanted, f"{said}: other counts, after {told.warnings}"
        if told.warnings:
            return kind, how, "made again"
        return kind, how, "unchanged" if unchanged else "same"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", default="", help="files whose path contains this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ends: dict[str, Counter[str]] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        wanted = make_cache(Path(folder))
        for case in range(given.first, given.first + given.cases):
            try:
                kind, _, end = one_case(Path(folder), wanted, case, given.seed, given.only)
                ends.setdefault(kind, Counter())[end] += 1
            except AssertionError as error:
                failed += 1
                print(error, flush=True)
    for kind, counts in sorted(ends.items()):
        print(f"{kind}: {sum(counts.values())} cases: {', '.join(f'{n} {end}' for end, n in counts.most_common())}")
    print(f"{given.cases} cases, {failed} ended wrongly")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
