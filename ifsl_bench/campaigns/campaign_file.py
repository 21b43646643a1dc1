"""Campaign files: what to run, in TOML. Imports no torch.

A file has a table ``[[run]]`` for each group of jobs. A run's methods, tasks and seeds multiply, and so does every
other value that is a list. Names, globs and sets are as on the command line; paths are relative to the file's folder.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from ifsl_bench.board.result_folder import CLAIMS
from ifsl_bench.common.errors import UserError, is_printable, unknown
from ifsl_bench.common.limits import CAMPAIGN_FILE
from ifsl_bench.common.toml import held, parsed, text_of
from ifsl_bench.plugin import registry
from ifsl_bench.protocol import task_files
from ifsl_bench.protocol.limits import LARGEST_SEED, MOST_SEEDS
from ifsl_bench.protocol.training import Training
from ifsl_bench.protocol.variants import KEYS, Change, make_change

MOST_JOBS = 10_000  # of a campaign: all are listed, and their results looked for, before the first begins
NO_CHANGE = Change()
Value = str | int | float | bool
Many = Value | list[Value]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="kebab"):
    pass


class _Run(_Table, frozen=True):
    """One ``[[run]]``; the keys are the options of ``ifsl-bench run``."""

    methods: str | list[str]
    tasks: str | list[str]
    seeds: int | list[int] = 1
    seed: int | None = None
    set: dict[str, Many] = {}
    train: dict[str, Many] = {}
    tune: int | list[int] = 0
    episodes: int | list[int] | None = None
    calibrate: bool | list[bool] = False
    base_classes: int | list[int] | None = None
    ways: int | list[int] | None = None
    shots: int | list[int] | None = None
    queries: int | list[int] | None = None
    pretraining_steps: int | list[int] | None = None
    novel_from: str | list[str] | None = None
    backbone: str | list[str] | None = None
    weights: str | list[str] | None = None
    centre: str | list[str] | None = None


class _File(_Table, frozen=True):
    run: list[_Run]
    results: str = ""
    data: dict[str, str] = {}


@dataclass(frozen=True)
class Wanted:
    """Jobs that differ in method, task and seed alone: what :func:`ifsl_bench.running.job.make_jobs` is asked for.

    Attributes:
        methods, tasks: names, globs and sets.
        where: how errors begin; "" for what the command line says.
    """

    methods: Sequence[str]
    tasks: Sequence[str]
    seeds: Sequence[int] = (0,)
    options: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    trials: int = 0
    episodes: int | None = None
    calibrate: bool = False
    change: Change = NO_CHANGE
    where: str = ""


@dataclass(frozen=True)
class Said:
    """What a command line says beside, or in place of, a file; None and nothing where it says nothing.

    Attributes:
        methods, tasks: without a file, what to run; with one, what of it.
        seed, seeds: the first, and how many.
    """

    methods: Sequence[str] = ()
    tasks: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    trials: int | None = None
    seed: int | None = None
    seeds: int | None = None
    episodes: int | None = None
    calibrate: bool = False
    change: Change = NO_CHANGE

    def of_jobs(self) -> bool:
        """Whether it says what a stored model knows by itself: anything of methods, their options, and seeds."""
        numbers = (self.trials, self.seed, self.seeds)
        return bool(self.methods or self.options or self.calibrate) or any(number is not None for number in numbers)

    def over(self, wanted: Wanted) -> Wanted:
        """What a file wants, with what is said here in place of it."""
        seeds = wanted.seeds
        if self.seed is not None or self.seeds is not None:
            first = min(seeds, default=0) if self.seed is None else self.seed
            seeds = range(first, first + (1 if self.seeds is None else self.seeds))
        return replace(
            wanted,
            seeds=seeds,
            options={**wanted.options, **self.options},
            train={**wanted.train, **self.train},
            trials=wanted.trials if self.trials is None else self.trials,
            episodes=wanted.episodes if self.episodes is None else self.episodes,
            calibrate=wanted.calibrate or self.calibrate,
            change=make_change({**wanted.change.said(), **self.change.said()}),
        )


@dataclass(frozen=True)
class Campaign:
    """What is to be run.

    Attributes:
        results: where results go; None for the usual place.
        data: data set -> the path that it is made from.
        only_methods, only_tasks: what of it; all where empty.
    """

    wanted: Sequence[Wanted]
    results: Path | None = None
    data: Mapping[str, Path] = field(default_factory=dict)
    only_methods: Sequence[str] = ()
    only_tasks: Sequence[str] = ()


def asked(file: str | None, said: Said) -> Campaign:
    """What a command line asks for, of a file or without one.

    Args:
        file: a path that ends in ``.toml``, or the name of a campaign that comes with the package.

    Raises:
        UserError: no such file, or one that is wrong; the message names it and the key.
    """
    if file is None:
        return Campaign([said.over(Wanted(said.methods, said.tasks))])
    path = _located(file)
    campaign = parse(text_of(path, "campaign", CAMPAIGN_FILE), file, path.absolute().parent)
    here = Path.cwd()
    return replace(
        campaign,
        wanted=[said.over(one) for one in campaign.wanted],
        only_methods=[_named(here, name, "--method", ".py") for name in said.methods],
        only_tasks=[_named(here, name, "--task", ".toml") for name in said.tasks],
    )


def _located(file: str) -> Path:
    if file.endswith(".toml"):
        return Path(file)
    ours = {path.name.removesuffix(".toml"): path for path in Path(str(resources.files("ifsl_bench.results"))).iterdir()
            if path.name.endswith(".toml") and path.name != CLAIMS}  # fmt: skip
    if file not in ours:
        raise unknown("campaign", file, ours, where="(a file's name ends in .toml)")
    return ours[file]


def parse(text: str, where: str, folder: Path) -> Campaign:
    """A campaign file's content.

    Args:
        where: how errors name the file.
        folder: that its paths are relative to.

    Raises:
        UserError: not TOML, an unknown or missing key, a wrong type, an impossible value, or too many jobs.
    """
    keys = {f.encode_name for kind in (_File, _Run) for f in msgspec.structs.fields(kind)}
    try:
        file = held(parsed(text, where, CAMPAIGN_FILE), _File, where, keys)
    except UserError as error:  # other errors count runs from 1 as well
        raise UserError(re.sub(r"`run\[(\d+)\]", lambda m: f"`run {int(m[1]) + 1}", str(error))) from error
    if not file.run:
        raise UserError(f"{where}: it runs nothing; add a table [[run]] with methods and tasks")
    wanted: list[Wanted] = []
    jobs = 0
    for number, run in enumerate(file.run, 1):
        place = f"{where}: run {number}"
        jobs += _count(run, place)
        if jobs > MOST_JOBS:
            raise UserError(f"{where}: it asks for {jobs:,} jobs or more, {MOST_JOBS:,} at most; make several files")
        wanted += _wanted(run, place, folder)
    data = {name: beside(folder, path, f"{where}: data.{name}") for name, path in file.data.items()}
    results = Path(beside(folder, file.results, f"{where}: results")) if file.results else None
    return Campaign(wanted, results, {name: Path(path) for name, path in data.items()})


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _choices(run: _Run) -> dict[tuple[str, str], list[Any]]:
    """Everything that multiplies beside methods, tasks and seeds: (table or "", key) -> values."""
    found = {("set", key): _listed(value) for key, value in run.set.items()}
    found |= {("train", key): _listed(value) for key, value in run.train.items()}
    plain = ("tune", "episodes", "calibrate", *Change.__struct_fields__)
    return found | {("", key): _listed(getattr(run, key)) for key in plain}


def _seeds(run: _Run, where: str) -> Sequence[int]:
    first, seeds = run.seed or 0, run.seeds
    if isinstance(seeds, list):
        if run.seed is not None:
            raise UserError(f"{where}: seeds lists them all, so leave seed out")
        if not seeds or not all(0 <= seed <= LARGEST_SEED for seed in seeds):
            raise UserError(f"{where}: seeds are whole numbers from 0 to {LARGEST_SEED}, at least one")
        seeds, count = list(dict.fromkeys(seeds)), len(seeds)
    else:
        count = seeds
    if not 1 <= count <= MOST_SEEDS:
        raise UserError(f"{where}: seeds: from 1 to {MOST_SEEDS:,} of them, not {count:,}")
    if not 0 <= first <= LARGEST_SEED:
        raise UserError(f"{where}: seed is a whole number from 0 to {LARGEST_SEED}")
    return seeds if isinstance(seeds, list) else range(first, first + seeds)


def _count(run: _Run, where: str) -> int:
    """How many jobs a run asks for, each glob and set counted once."""
    lists = {"methods": _listed(run.methods), "tasks": _listed(run.tasks)}
    lists |= {".".join(filter(None, key)).replace("_", "-"): values for key, values in _choices(run).items()}
    if empty := [key for key, values in lists.items() if not values]:
        raise UserError(f"{where}: {empty[0]} is an empty list, so nothing would be run")
    return math.prod(map(len, lists.values())) * len(_seeds(run, where))


def _wanted(run: _Run, where: str, folder: Path) -> Iterator[Wanted]:
    methods = [_named(folder, name, f"{where}: methods", ".py") for name in _listed(run.methods)]
    tasks = [_named(folder, name, f"{where}: tasks", ".toml") for name in _listed(run.tasks)]
    choices, seeds = _choices(run), _seeds(run, where)
    for values in itertools.product(*choices.values()):
        point = dict(zip(choices, values, strict=True))
        tables = {
            table: {key: value for (of, key), value in point.items() if of == table} for table in ("set", "train", "")
        }
        rest = tables[""]
        try:
            Training.parse(tables["train"])
            change = make_change({key: rest[name] for key, name in zip(KEYS, Change.__struct_fields__, strict=True)})
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        yield Wanted(
            methods, tasks, seeds, tables["set"], tables["train"], rest["tune"], rest["episodes"], rest["calibrate"],
            change, where,
        )  # fmt: skip


def _named(folder: Path, name: str, where: str, ending: str) -> str:
    """A name as it is; a path, to a file with this ending and perhaps something of it, from the file's folder."""
    is_path = (registry if ending == ".py" else task_files).names_file(name)
    return beside(folder, name, where) if is_path else _printable(name, where)


def beside(folder: Path, path: str, where: str) -> str:
    """A path that a file says, from the file's folder unless it is absolute or of a user's home."""
    path = _printable(path, where)
    return path if path.startswith("~") else str(folder / path)


def _printable(text: str, where: str) -> str:
    if not text or not is_printable(text):
        raise UserError(f"{where}: {text[:80]!r} is no name that can be printed")
    return text
