"""Campaign files: runs in TOML. Imports no torch.

A file has a table ``[[run]]`` for each group of jobs. A run's methods, tasks and seeds multiply, and so does every
other value that is a list. Names, globs and sets are as on the command line; paths are relative to the file's folder.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ifsl_bench.experiments.run_config import MAX_JOBS, RunConfig
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.display_names import split_off_recipe
from ifsl_bench.protocols.tasks import task_files
from ifsl_bench.protocols.tasks.task_limits import MOST_SEEDS
from ifsl_bench.protocols.tasks.variants import TASK_CHANGE_KEYS, TaskChanges, TrainingChanges, make_task_changes
from ifsl_bench.store.result_folder import CLAIMS_FILE
from ifsl_bench.utils.errors import UserError, is_printable, unknown_name_error
from ifsl_bench.utils.toml import convert_tables, parse_toml, read_user_file

OptionValue = str | int | float | bool
OptionValues = OptionValue | list[OptionValue]
# Keys of a run beside names, seeds and tables: type and default.
UNMULTIPLIED_FIELDS = [
    ("tune", int, 0),
    ("episodes", int | None, None),
    ("recipe", str | None, None),
    ("calibrate", bool, False),
    *((name, kind, None) for name, kind in get_type_hints(TaskChanges).items()),
]


_Run = msgspec.defstruct(
    "_Run",
    [
        ("methods", str | list[str]),
        ("tasks", str | list[str]),
        ("seeds", int | list[int], 1),
        ("seed", int | None, None),
        ("set", dict[str, OptionValues], {}),
        ("train", dict[str, OptionValues], {}),
        *((key, kind | list[kind], default) for key, kind, default in UNMULTIPLIED_FIELDS),  # type: ignore[valid-type]
    ],
    frozen=True,
    forbid_unknown_fields=True,
    rename="kebab",
)
"""One ``[[run]]``; the keys are the options of ``ifsl-bench run``, and a list of values multiplies."""


class _CampaignFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: list[_Run]  # type: ignore[valid-type]  # its fields are made above
    results: str = ""
    data: dict[str, str] = {}


def read_campaign(file: str) -> list[RunConfig]:
    """Read a campaign file.

    Args:
        file: a path that ends in ``.toml``, or the name of a campaign that comes with the package.

    Raises:
        UserError: no such file, or one that is wrong; the message names it and the key.
    """
    path = _campaign_path(file)
    return parse_campaign(read_user_file(path, "campaign"), file, path.absolute().parent)


def resolve_names(names: Sequence[object], option: str, ending: str) -> list[str]:
    """Return names that choose among the names of a file, with paths in the same form as in the file.

    Args:
        names: of the command line, with paths relative to the current folder.
        option: the name of the option with these names, for errors.
        ending: of files.
    """
    return [_resolve_name(Path.cwd(), str(name), option, ending) for name in names]


def _campaign_path(file: str) -> Path:
    if file.endswith(".toml"):
        return Path(file)
    folder = Path(str(resources.files("ifsl_bench.results")))
    ours = {path.stem: path for path in folder.glob("*.toml") if path.name != CLAIMS_FILE}
    if file not in ours:
        raise unknown_name_error("campaign", file, ours, where="(a file's name ends in .toml)")
    return ours[file]


def parse_campaign(text: str, where: str, folder: Path) -> list[RunConfig]:
    """Parse the content of a campaign file.

    Args:
        text: the content.
        where: how errors name the file.
        folder: that its paths are relative to.

    Raises:
        UserError: not TOML, an unknown or missing key, a wrong type, an impossible value, or too many jobs.
    """
    keys = {f.encode_name for kind in (_CampaignFile, _Run) for f in msgspec.structs.fields(kind)}
    try:
        file = convert_tables(parse_toml(text, where), _CampaignFile, where, keys)
    except UserError as error:  # other errors count runs from 1 as well
        raise UserError(re.sub(r"`run\[(\d+)\]", lambda m: f"`run {int(m[1]) + 1}", str(error))) from error
    if not file.run:
        raise UserError(f"{where}: it runs nothing; add a table [[run]] with methods and tasks")
    configs: list[RunConfig] = []
    jobs = 0
    for number, run in enumerate(file.run, 1):
        place = f"{where}: run {number}"
        jobs += _job_count(run, place)
        if jobs > MAX_JOBS:
            raise UserError(f"{where}: it asks for {jobs:,} jobs or more, {MAX_JOBS:,} at most; make several files")
        configs += _run_configs(run, place, folder)
    data = {name: resolve_path(folder, path, f"{where}: data.{name}") for name, path in file.data.items()}
    results = Path(resolve_path(folder, file.results, f"{where}: results")) if file.results else None
    return [replace(config, data=data, results_dir=results) for config in configs]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _multiplied_values(run: Any) -> dict[tuple[str, str], list[Any]]:
    """Collect the values that multiply beside methods, tasks and seeds: (table or "", key) -> values."""
    choices = {("set", key): _as_list(value) for key, value in run.set.items()}
    choices |= {("train", key): _as_list(value) for key, value in run.train.items()}
    return choices | {("", key): _as_list(getattr(run, key)) for key, *_ in UNMULTIPLIED_FIELDS}


def _parse_seeds(run: Any, where: str) -> Sequence[int]:
    if not isinstance(run.seeds, list):
        if run.seeds > MOST_SEEDS:  # a range may even be longer than len can say
            raise UserError(f"{where}: seeds is {run.seeds:,}, {MOST_SEEDS:,} at most")
        return range(run.seed or 0, (run.seed or 0) + run.seeds)
    if run.seed is not None:
        raise UserError(f"{where}: seeds lists them all, so leave seed out")
    return list(dict.fromkeys(run.seeds))


def _job_count(run: Any, where: str) -> int:
    """Count the jobs of a run, each glob and set once."""
    lists = {"methods": _as_list(run.methods), "tasks": _as_list(run.tasks)}
    for (table, key), values in _multiplied_values(run).items():
        lists[f"{table}.{key}" if table else key.replace("_", "-")] = values
    counts = {key: len(values) for key, values in lists.items()} | {"seeds": len(_parse_seeds(run, where))}
    if empty := [key for key, count in counts.items() if not count]:
        raise UserError(f"{where}: {empty[0]} is empty, so nothing would be run")
    return math.prod(counts.values())


def _run_configs(run: Any, where: str, folder: Path) -> Iterator[RunConfig]:
    methods = [_resolve_name(folder, name, f"{where}: methods", ".py") for name in _as_list(run.methods)]
    tasks = [_resolve_name(folder, name, f"{where}: tasks", ".toml") for name in _as_list(run.tasks)]
    choices, seeds = _multiplied_values(run), _parse_seeds(run, where)
    for values in itertools.product(*choices.values()):
        tables: dict[str, dict[str, Any]] = {"set": {}, "train": {}, "": {}}
        for (table, key), value in zip(choices, values, strict=True):
            tables[table][key] = value
        plain = tables[""]
        try:
            TrainingChanges.parse_values(tables["train"])
            change = make_task_changes(
                {key: plain[name] for key, name in zip(TASK_CHANGE_KEYS, TaskChanges.__struct_fields__, strict=True)}
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        more = {key: plain[key] for key in ("episodes", "calibrate")}
        yield RunConfig(
            methods,
            tasks,
            tables["set"],
            tables["train"],
            plain["tune"],
            seeds=seeds,
            change=change,
            place_in_campaign_file=where,
            recipes=() if plain["recipe"] is None else (_resolve_recipe(folder, plain["recipe"], where),),
            **more,
        )


def _resolve_recipe(folder: Path, text: str, where: str) -> str:
    """Return a recipe with its options; the path of a file is from the campaign file's folder."""
    name = split_off_recipe(text)[0]
    return _resolve_name(folder, name, f"{where}: recipe", ".py") + text[len(name) :]


def _resolve_name(folder: Path, name: str, where: str, ending: str) -> str:
    """Return a name as it is; a path to a file with this ending, and perhaps a name in it, from the file's folder."""
    is_path = registry.refers_to_file(name) if ending == ".py" else task_files.is_task_file_name(name)
    return resolve_path(folder, name, where) if is_path else _check_printable(name, where)


def resolve_path(folder: Path, path: str, where: str) -> str:
    """Return a path of a campaign file: from the file's folder, unless it is absolute or in a user's home.

    Args:
        folder: of the campaign file.
        path: as written in the file.
        where: the place in the file, for errors.

    Raises:
        UserError: the path is empty or cannot be printed.
    """
    path = _check_printable(path, where)
    return path if path.startswith("~") else str(folder / path)


def _check_printable(text: str, where: str) -> str:
    if not text or not is_printable(text):
        raise UserError(f"{where}: {text[:80]!r} is no name that can be printed")
    return text


def load_configs(file: str | None, config: RunConfig) -> list[RunConfig]:
    """Return the configs of the campaign file that a command names, or the command's own.

    Args:
        file: a path that ends in ``.toml``, the name of a campaign that comes with the package, or None.
        config: of the command line. Its values replace the file's.

    Raises:
        UserError: see :func:`read_campaign`.
    """
    if file is None:
        return [config]
    return [config.override_config(run) for run in read_campaign(file)]
