"""Reads ``--cluster``: the address of a Dask scheduler, or a TOML file with a class of cluster and its arguments.

Reading and refusing only; :mod:`ifsl_bench.scheduler.cluster` starts what is described. Dask is imported where the
arguments of a class are looked up and not before.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ifsl_bench.common.errors import UserError, unknown
from ifsl_bench.common.limits import CLUSTER_FILE
from ifsl_bench.common.toml import parsed, text_of
from ifsl_bench.protocol.limits import MOST_WORKERS

INSTALL = 'pip install "ifsl_bench[cluster]"'
LOCAL = "LocalCluster"
ACCELERATOR = "GPU"  # the resource that a worker with one declares
CLASSES = {LOCAL: "distributed"} | {  # class -> the module that has it; a file may name both, with a dot
    f"{name}Cluster": "dask_jobqueue" for name in ("SLURM", "PBS", "SGE", "LSF", "OAR", "Moab", "HTCondor")
}
ADDRESS = re.compile(r"(?P<protocol>tcp|tls)://(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
TOP = ("address", "class", "arguments", "security")
# What only a caller from Python could give, or that is decided elsewhere: [security], one stage at a time in a process.
NOT_OURS = {"self", "loop", "asynchronous", "security", "protocol", "job_cls", "scheduler_cls", "worker_class", "ip",
            "start", "scheduler", "scheduler_ip", "scheduler_file", "executor", "data", "extensions", "metrics",
            "plugins", "startup_information", "WorkerStateClass", "validate", "services", "worker_services", "nthreads",
            "config", "reconnect", "transition_counter_max"}  # fmt: skip


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster that runs, or one to start.

    Attributes:
        name: in errors: the address or the file.
        address: of a scheduler that runs; "" for a cluster to start.
        kind: an entry of :data:`CLASSES`; "" with an address.
        arguments: of the class.
        security: ``True`` for keys made for this one cluster; else files of keys by the names that
            ``distributed.Security`` has for them, empty for none.
    """

    name: str
    address: str = ""
    kind: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    security: bool | Mapping[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of workers; 0 where others decide it."""
        if self.address:
            return 0
        return int(self.arguments["n_workers"])

    @property
    def accelerators(self) -> bool:
        """True where its workers declare an accelerator."""
        if self.kind == LOCAL:
            return self.arguments.get("resources", {}).get(ACCELERATOR, 0) >= 1
        return f"{ACCELERATOR}=" in " ".join(map(str, self.arguments.get("worker_extra_args", ())))


def dask(module: str = "distributed") -> ModuleType:
    """A module of the extra; raises :class:`UserError` where it is not installed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"--cluster needs {module}, which cannot be imported ({error}); to install it: {INSTALL}"
        ) from error
    finally:  # dask_jobqueue has the whole process exit, with status 0, at Ctrl-C
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def read_cluster(name: str) -> ClusterSpec:
    """Reads and checks what ``--cluster`` names.

    Args:
        name: ``tcp://host:port``, ``tls://host:port``, or the path of a TOML file.

    Raises:
        UserError: neither; no such file; an unknown class, key or argument; the extra is not installed.
    """
    if "://" in name:
        dask()
        return ClusterSpec(name, _address(name, "--cluster"))
    if not name.endswith(".toml"):
        raise UserError(f"--cluster takes tcp://HOST:PORT, tls://HOST:PORT or a file that ends in .toml, not {name!r}")
    path = Path(os.path.expanduser(name))
    raw = parsed(text_of(path, "cluster file", CLUSTER_FILE), name, CLUSTER_FILE)
    _check_keys(raw, TOP, "key", f"in {name}")
    if ("address" in raw) == ("class" in raw):
        raise UserError(f'{name}: give either address = "tcp://HOST:PORT" or class, one of {", ".join(CLASSES)}')
    dask()
    return _running(raw, name, path) if "address" in raw else _to_start(raw, name, path)


def _running(raw: Mapping[str, Any], name: str, path: Path) -> ClusterSpec:
    if "arguments" in raw:
        raise UserError(f"{name}: a scheduler that runs takes no [arguments]; they are for a class")
    address = _address(raw["address"], f"{name}: address")
    if raw.get("security") is True:
        raise UserError(f"{name}: security is a table with files of keys for a scheduler that runs")
    security = _security(raw.get("security", {}), name, path, ("client",))
    if security and address.startswith("tcp://"):
        raise UserError(f"{name}: [security] is for an address that begins with tls://")
    return ClusterSpec(name, address, security=security)


def _to_start(raw: Mapping[str, Any], name: str, path: Path) -> ClusterSpec:
    module, _, kind = str(raw["class"]).rpartition(".")
    if kind not in CLASSES or module not in ("", CLASSES[kind]):
        raise unknown("class", raw["class"] if kind in CLASSES else kind, CLASSES, where=f"in {name}")
    arguments = raw.get("arguments", {})
    if not isinstance(arguments, dict):
        raise UserError(f"{name}: arguments is a table, [arguments], not {arguments!r}")
    _check_keys(arguments, arguments_of(kind), "argument", f"of {kind} in {name}")
    if type(count := arguments.get("n_workers")) is not int or not 0 < count <= MOST_WORKERS:
        raise UserError(f"{name}: say in [arguments] how many workers {kind} shall start: n_workers = 4")
    security = raw.get("security", {})
    if security is True:
        dask("cryptography")
    else:
        security = _security(security, name, path, ("client", "scheduler", "worker"))
    return ClusterSpec(name, kind=kind, arguments=arguments, security=security)


def _check_keys(table: Mapping[str, Any], keys: Iterable[str], kind: str, where: str) -> None:
    for key in table:
        if key not in keys:
            raise unknown(kind, key, keys, where=where)


def _address(address: Any, where: str) -> str:
    match = ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if not match or not 0 < int(match["port"]) < 1 << 16:
        raise UserError(f"{where}: a scheduler's address is tcp://HOST:PORT or tls://HOST:PORT, not {address!r}")
    return str(address)


def _security(table: Any, name: str, file: Path, roles: Iterable[str]) -> dict[str, str]:
    """The files of keys and certificates for some roles, whose relative paths are seen from the file's folder."""
    keys = ["tls_ca_file", *(f"tls_{role}_{what}" for role in roles for what in ("cert", "key"))]
    if not isinstance(table, dict):
        raise UserError(f"{name}: security is true or a table with the files {', '.join(keys)}, not {table!r}")
    if not table:
        return {}
    _check_keys(table, keys, "key", f"of [security] in {name}")
    paths = {key: file.absolute().parent / os.path.expanduser(str(path)) for key, path in table.items()}
    for key, path in paths.items():
        if not os.path.isfile(path):
            raise UserError(f"{name}: {key}: there is no file {path}")
    if missing := [key for key in keys if key not in table]:
        raise UserError(f"{name}: [security] lacks {', '.join(missing)}")
    return {key: str(path) for key, path in paths.items()}


def arguments_of(kind: str) -> set[str]:
    """The arguments that a class of cluster takes, with those it hands on to its workers or jobs."""
    distributed, cluster = dask(), getattr(dask(CLASSES[kind]), kind)
    if kind == LOCAL:
        makers, not_ours = (cluster, distributed.Nanny, distributed.Worker), NOT_OURS | {"processes", "nanny"}
    else:
        jobs = (maker for maker in inspect.getmro(cluster.job_cls) if maker.__module__.startswith("dask_jobqueue."))
        makers, not_ours = (dask("dask_jobqueue").JobQueueCluster, *jobs), NOT_OURS
    parameters = [p for maker in makers for p in inspect.signature(maker).parameters.values()]
    return {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - not_ours
