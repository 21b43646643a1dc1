"""What ``--cluster`` says: the address of a Dask scheduler, or a TOML file with a class of cluster and its arguments.

Reading and refusing only; :mod:`ifsl_bench.campaigns.cluster` starts what is described. Dask is imported where the
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
from ifsl_bench.common.limits import CLUSTER_FILE, read_text
from ifsl_bench.common.toml import parsed
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
        said: how errors call it: the address or the file.
        address: of a scheduler that runs; "" for a cluster to start.
        kind: an entry of :data:`CLASSES`; "" with an address.
        arguments: of the class.
        security: ``True`` for keys made for this one cluster; else files of keys by the names that
            ``distributed.Security`` has for them, empty for none.
    """

    said: str
    address: str = ""
    kind: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    security: bool | Mapping[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many workers it will have; 0 where others decide that."""
        if self.address:
            return 0
        return int(self.arguments["n_workers"])

    @property
    def accelerators(self) -> bool:
        """Whether its workers will declare one."""
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


def read_cluster(said: str) -> ClusterSpec:
    """What ``--cluster`` says.

    Args:
        said: ``tcp://host:port``, ``tls://host:port``, or the path of a TOML file.

    Raises:
        UserError: neither; no such file; an unknown class, key or argument; the extra is not installed.
    """
    if "://" in said:
        dask()
        return ClusterSpec(said, _address(said, "--cluster"))
    if not said.endswith(".toml"):
        raise UserError(f"--cluster takes tcp://HOST:PORT, tls://HOST:PORT or a file that ends in .toml, not {said!r}")
    raw = _toml(said)
    if found := [key for key in raw if key.replace("_", "-") in ("retries", "allowed-failures")]:
        whose = "it is its scheduler's own setting" if "address" in raw else "the command counts by itself"
        raise UserError(f"{said}: leave out {found[0]}: {whose}; a stage whose worker dies is given up the third time")
    _known(raw, TOP, "key", f"in {said}")
    if ("address" in raw) == ("class" in raw):
        raise UserError(f'{said}: give either address = "tcp://HOST:PORT" or class, one of {", ".join(CLASSES)}')
    dask()
    folder = Path(said).expanduser().absolute().parent
    if "address" in raw:
        if "arguments" in raw:
            raise UserError(f"{said}: a scheduler that runs takes no [arguments]; they are for a class")
        address = _address(raw["address"], f"{said}: address")
        security = _security(raw.get("security", {}), said, folder, started=False)
        if security and address.startswith("tcp://"):
            raise UserError(f"{said}: [security] is for an address that begins with tls://")
        return ClusterSpec(said, address, security=security)
    module, _, kind = str(raw["class"]).rpartition(".")
    if kind not in CLASSES or module not in ("", CLASSES[kind]):
        raise unknown("class", raw["class"] if kind in CLASSES else kind, CLASSES, where=f"in {said}")
    arguments = raw.get("arguments", {})
    if not isinstance(arguments, dict):
        raise UserError(f"{said}: arguments is a table, [arguments], not {arguments!r}")
    _known(arguments, arguments_of(kind), "argument", f"of {kind} in {said}")
    if type(count := arguments.get("n_workers")) is not int or not 0 < count <= MOST_WORKERS:
        raise UserError(f"{said}: say in [arguments] how many workers {kind} shall start: n_workers = 4")
    return ClusterSpec(
        said, kind=kind, arguments=arguments, security=_security(raw.get("security", {}), said, folder, started=True)
    )


def _toml(said: str) -> dict[str, Any]:
    try:
        text = read_text(Path(said).expanduser(), CLUSTER_FILE)
    except FileNotFoundError as error:
        raise UserError(f"--cluster: there is no file {said}") from error
    except (OSError, RuntimeError) as error:
        raise UserError(f"--cluster: cannot read {said}: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{said} is not valid TOML: it is not UTF-8") from error
    return parsed(text, said, CLUSTER_FILE)


def _known(given: Mapping[str, Any], known: Iterable[str], kind: str, where: str) -> None:
    for key in given:
        if key not in known:
            raise unknown(kind, key, known, where=where)


def _address(said: Any, where: str) -> str:
    found = ADDRESS.fullmatch(said) if isinstance(said, str) else None
    if not found or not 0 < int(found["port"]) < 1 << 16:
        raise UserError(f"{where}: a scheduler's address is tcp://HOST:PORT or tls://HOST:PORT, not {said!r}")
    return str(said)


def _security(said: Any, file: str, folder: Path, started: bool) -> bool | dict[str, str]:
    """Keys and certificates; relative paths are seen from the file's folder."""
    if said is True and started:
        if _lacks("cryptography"):
            raise UserError(f"{file}: security = true needs the package cryptography; to install it: {INSTALL}")
        return True
    if said is False:
        return {}
    names = [name for name in dask().Security.__slots__ if name.endswith(("_file", "_cert", "_key"))]
    if not started:
        names = [name for name in names if "scheduler" not in name and "worker" not in name]
    if not isinstance(said, dict):
        how = "true, or a table" if started else "a table"
        raise UserError(f"{file}: security is {how} with the files {', '.join(sorted(names))}, not {said!r}")
    _known(said, names, "key", f"of [security] in {file}")
    paths = {name: folder / Path(str(path)).expanduser() for name, path in said.items()}
    for name, path in paths.items():
        if not os.path.isfile(path):
            raise UserError(f"{file}: {name}: there is no file {path}")
    if said and (missing := {"tls_ca_file", *_pair("client"), *(_all_pairs() if started else ())} - said.keys()):
        raise UserError(f"{file}: [security] lacks {', '.join(sorted(missing))}")
    return {name: str(path) for name, path in paths.items()}


def _pair(role: str) -> tuple[str, str]:
    return f"tls_{role}_cert", f"tls_{role}_key"


def _all_pairs() -> tuple[str, ...]:
    return (*_pair("scheduler"), *_pair("worker"))


def _lacks(module: str) -> bool:
    try:
        dask(module)
    except UserError:
        return True
    return False


def arguments_of(kind: str) -> set[str]:
    """The arguments that a class of cluster takes, with those it hands on to its workers or jobs."""
    distributed, cluster = dask(), getattr(dask(CLASSES[kind]), kind)
    if kind == LOCAL:
        makers, not_ours = (cluster, distributed.Nanny, distributed.Worker), NOT_OURS | {"processes", "nanny"}
    else:
        jobs = (one for one in inspect.getmro(cluster.job_cls) if one.__module__.startswith("dask_jobqueue."))
        makers, not_ours = (dask("dask_jobqueue").JobQueueCluster, *jobs), NOT_OURS
    parameters = [p for one in makers for p in inspect.signature(one).parameters.values()]
    return {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - not_ours
