"""Makes data sets available: opens, builds, rebuilds or refuses them."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np

from ifsl_bench import registry
from ifsl_bench.data.pools import POOLS, Dataset, Writer, build, open_dataset
from ifsl_bench.data.source import DatasetSource
from ifsl_bench.errors import CorruptFile, UserError, unknown
from ifsl_bench.reporter import Reporter
from ifsl_bench.store import Home, locked, set_aside
from ifsl_bench.task import NAME, DataSpec

FEATURES_RECIPE = "frozen features, six .npz files, 1"


def dataset_folder(home: Home, name: str) -> Path:
    return home.data / name


def is_prepared(home: Home, name: str) -> bool:
    return (dataset_folder(home, name) / "manifest.json").exists()


def ensure(home: Home, spec: DataSpec, reporter: Reporter) -> Dataset:
    """The data set of a task, built now if it can be.

    Raises:
        UserError: the data have to be obtained first, or are not the ones that the task is pinned to.
        CorruptFile: the cached copy is damaged and cannot be rebuilt without its source.
    """
    dataset = _ensure(home, spec, reporter)
    if spec.fingerprint and dataset.fingerprint != spec.fingerprint:
        raise UserError(
            f"data set {spec.name!r} in {dataset.folder} has fingerprint {dataset.fingerprint[:16]}, the task is "
            f"pinned to {spec.fingerprint[:16]}: results on it would not be comparable. Rebuild it with "
            f"'ifsl-bench data prepare {spec.name} --force', or give your own task file without a fingerprint"
        )
    return dataset


def _ensure(home: Home, spec: DataSpec, reporter: Reporter) -> Dataset:
    name, folder = spec.name, dataset_folder(home, spec.name)
    source = registry.dataset_source(name) if name in registry.names(registry.DATASETS) else None
    if source is None or source.needs_source:
        if is_prepared(home, name):
            return open_dataset(folder)
        raise UserError(not_prepared(home, spec))
    with locked(folder, reporter.say):
        if is_prepared(home, name):
            try:
                dataset = open_dataset(folder)
                if dataset.manifest["recipe"] == source.recipe():
                    return dataset
                reporter.warn(f"{folder} was made by another version; building it again")
            except CorruptFile as error:
                reporter.warn(f"{error}; building it again, the damaged copy is in {set_aside(folder)}")
        return _build(home, source, None, reporter)


def not_prepared(home: Home, spec: DataSpec) -> str:
    """What to tell someone who lacks a data set: how to get it, and what to do then."""
    then = f"Then: ifsl-bench data prepare {spec.name} --from PATH"
    if spec.obtain and spec.name not in registry.names(registry.DATASETS):
        then = (
            "This version has no importer for them yet; frozen features of your own work with a task file of your own"
        )
    needs = f"It needs {spec.obtain}. {then}" if spec.obtain else then.replace("Then:", "To prepare it:")
    return f"data set {spec.name!r} is not prepared in {home.data}. {needs}"


def _build(home: Home, source: DatasetSource, path: Path | None, reporter: Reporter) -> Dataset:
    about = {"source": path.name if path else "made here", "partial": False}
    return build(
        dataset_folder(home, source.name),
        source.name,
        source.recipe(),
        lambda writer: source.build(writer, path, reporter),
        about,
    )


def prepare(home: Home, name: str, path: Path | None, force: bool, reporter: Reporter) -> Dataset:
    """``ifsl-bench data prepare``: builds a data set, from ``path`` where it needs one.

    Args:
        path: what the data are made from; a folder of six .npz files makes a data set of frozen features under any
            name that no plugin has.
        force: build again even if a good copy is there.

    Raises:
        UserError: unknown name, nothing to build from, or unusable content.
    """
    known = registry.names(registry.DATASETS)
    if not re.fullmatch(NAME, name):
        raise UserError(f"{name!r} is no name for a data set: use lower-case letters, digits, '-', '_', '.'")
    folder = dataset_folder(home, name)
    if name not in known and path is None:
        if is_prepared(home, name):
            return open_dataset(folder)
        raise unknown("data set", name, known, where="(for frozen features of your own, add --from FOLDER)")
    source = registry.dataset_source(name) if name in known else None
    if source and not source.needs_source and path is not None:
        raise UserError(f"data set {name!r} is made from nothing; leave --from out")
    if source and source.needs_source and path is None:
        raise UserError(f"data set {name!r} is made from files of yours; say where they are with --from PATH")
    if path is not None and not path.exists():
        raise UserError(f"there is no {path}")
    with locked(folder, reporter.say):
        if is_prepared(home, name) and not force:
            try:
                dataset = open_dataset(folder)
                if source is None or dataset.manifest["recipe"] == source.recipe():
                    reporter.say(f"{name} is prepared already in {folder} (--force builds it again)")
                    return dataset
            except CorruptFile as error:
                reporter.warn(f"{error}; building it again")
        if source:
            return _build(home, source, path, reporter)
        if path is None:  # excluded above
            raise UserError(f"say where the files of {name!r} are with --from PATH")
        about = {"source": path.name, "partial": False}
        return build(folder, name, FEATURES_RECIPE, lambda writer: _features(writer, path, reporter), about)


def _features(writer: Writer, folder: Path, reporter: Reporter) -> None:
    """Six files ``base-train.npz`` ... ``novel-test.npz`` with ``features`` [n, D] and ``labels`` [n] each.

    Labels may be any integers or strings; a class is the same in two pools if its label is. novel-train may be missing
    for tasks with the shared protocol, where it is base/train.
    """
    width = None
    base_classes: list[str] | None = None
    with reporter.stage(f"importing features from {folder.name}", len(POOLS)) as stage:
        for pool in POOLS:
            path = folder / f"{pool.replace('/', '-')}.npz"
            if not path.exists():
                if pool == "novel/train":
                    continue
                wanted = ", ".join(f"{p.replace('/', '-')}.npz" for p in POOLS)
                raise UserError(f"{path} is missing; a data set of frozen features is six files: {wanted}")
            features, labels = _read_npz(path)
            if width is not None and features.shape[1] != width:
                raise UserError(f"{path} has {features.shape[1]} features a row, the files before it have {width}")
            width = features.shape[1]
            names, ids = np.unique(labels, return_inverse=True)
            classes = [str(n) for n in names]
            if pool.startswith("base/"):
                if base_classes is not None and classes != base_classes:
                    raise UserError(f"{path} does not have the same classes as base-train.npz")
                base_classes = classes
            order = np.argsort(ids, kind="stable")
            with writer.pool(pool, ids[order], tuple(classes), (width,), "float32") as out:
                out[:] = features[order]
            stage.advance(1)


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with open(path, "rb") as raw:
        start = raw.read(40)
    if not start.startswith(b"PK"):
        raise UserError(f"{path} is no readable .npz file: it begins with {start!r}")
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = {"features", "labels"} - set(file.files)
            if missing:
                raise UserError(
                    f"{path} lacks {', '.join(sorted(missing))}; it has {', '.join(file.files) or 'nothing'}"
                )
            features, labels = file["features"], file["labels"]
    except (ValueError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"{path} is no readable .npz file ({error})") from error
    if features.ndim != 2 or labels.shape != (len(features),) or features.dtype.kind != "f":
        found = f"features {features.dtype}{list(features.shape)}, labels {labels.dtype}{list(labels.shape)}"
        raise UserError(f"{path}: expected floating features [n, D] and labels [n], found {found}")
    if labels.dtype.kind not in "iuU":
        raise UserError(f"{path}: labels must be integers or strings, found {labels.dtype}")
    with np.errstate(over="ignore"):
        features = features.astype(np.float32)
    if not np.isfinite(features).all():
        rows = int((~np.isfinite(features)).any(1).sum())
        raise UserError(f"{path}: features contain NaN or infinity (as float32) in {rows} rows")
    return features, labels
