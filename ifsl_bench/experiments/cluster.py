"""Clusters for ``--cluster``: a Dask scheduler's address, or a TOML file with a class of cluster and its arguments.

Also checks that a worker has the folders, versions and methods of the command, before it gets work. Dask is imported
where a cluster is named and not before; on a worker nothing heavy is imported before versions are compared.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import platform
import re
import secrets
import shlex
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import _TemporaryFileWrapper
from types import ModuleType
from typing import Any, Literal

import msgspec
import psutil

from ifsl_bench.protocols.tasks.task_limits import MOST_WORKERS
from ifsl_bench.utils.errors import UserError, escape_controls
from ifsl_bench.utils.files import PARTIAL_MARK, Paths, source_sha256
from ifsl_bench.utils.toml import convert_tables, parse_toml, read_user_file

ACCELERATOR_RESOURCE = "GPU"  # the resource that a worker with one declares
VERSIONED_PACKAGES = (
    "ifsl_bench",
    "torch",
    "numpy",
    "numba",
    "distributed",
)  # that decide digits, or whether messages arrive
INSTALL_CLUSTER = 'pip install "ifsl_bench[cluster]"'
LOCAL_CLUSTER = "LocalCluster"
LOCAL_CLUSTER_ARGUMENTS = (
    "n_workers",
    "threads_per_worker",
    "memory_limit",
    "host",
    "interface",
    "preload",
    "local_directory",
)
RESERVED_ARGUMENTS = ("asynchronous", "job_cls", "loop", "protocol", "scheduler_cls", "security")  # of clusters of jobs
CONNECT_SECONDS = 10.0  # seconds to wait for a scheduler's answer
SHUTDOWN_SECONDS = 2.0  # seconds that workers have to end by themselves
ADDRESS_PATTERN = re.compile(r"(tcp|tls)://[^/?]+:[1-9][0-9]{0,4}")
DASHBOARD_ADDRESS = "127.0.0.1:0"  # of the scheduler: for this machine alone, at any free port
WORKER_SHELL_LINE = "export OMP_WAIT_POLICY=PASSIVE"  # before a worker starts in a job


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster that runs, or one to start."""

    scheduler_address: str = msgspec.field(
        name="address", default=""
    )  # of a scheduler that runs; "" for a cluster to start
    cluster_class_name: Literal[
        "", "LocalCluster", "SLURMCluster", "PBSCluster", "SGECluster", "LSFCluster", "OARCluster", "MoabCluster",
        "HTCondorCluster",
    ] = msgspec.field(name="class", default="")  # fmt: skip
    cluster_arguments: dict[str, Any] = msgspec.field(name="arguments", default_factory=dict)  # of the class
    security: bool = False  # keys are made for this one cluster; else it has those of Dask's own settings, if any

    @property
    def name(self) -> str:
        """The cluster as messages call it."""
        return self.scheduler_address or self.cluster_class_name

    @property
    def n_workers(self) -> int:
        """The number of workers to start; 0 where others decide it."""
        return int(self.cluster_arguments.get("n_workers", 0))

    @property
    def uses_accelerators(self) -> bool:
        """True where the workers of a cluster to start declare an accelerator."""
        return f"{ACCELERATOR_RESOURCE}=" in " ".join(map(str, self.cluster_arguments.get("worker_extra_args", ())))


def import_dask(module: str = "distributed") -> ModuleType:
    """Import a module of the extra; raises :class:`UserError` where it is not installed."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return import_module(module)
    except ImportError as error:
        problem = f"--cluster needs {module}, which cannot be imported ({error})"
        raise UserError(f"{problem}; to install it: {INSTALL_CLUSTER}") from error
    finally:  # dask_jobqueue has the whole process exit, with status 0, at Ctrl-C
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def parse_cluster(name: str) -> ClusterSpec:
    """Read what follows ``--cluster``.

    Args:
        name: ``tcp://host:port``, ``tls://host:port``, or the path of a TOML file.

    Raises:
        UserError: neither; no such file; an unknown class or key; the extra is not installed.
    """
    import_dask()
    if "://" in name:
        spec, where = ClusterSpec(name), "--cluster"
    elif name.endswith(".toml"):
        where = name
        raw = parse_toml(read_user_file(Path(os.path.expanduser(name)), "cluster file"), name)
        if isinstance(kind := raw.get("class"), str):
            raw["class"] = kind.rpartition(".")[2]
        spec = convert_tables(raw, ClusterSpec, name, [key.encode_name for key in msgspec.structs.fields(ClusterSpec)])
    else:
        raise UserError(f"--cluster takes tcp://HOST:PORT, tls://HOST:PORT or a file that ends in .toml, not {name!r}")
    if problem := _find_cluster_spec_fault(spec):
        raise UserError(f"{where}: {problem}")
    if spec.cluster_class_name not in ("", LOCAL_CLUSTER):
        import_dask("dask_jobqueue")
    return spec


def _find_cluster_spec_fault(spec: ClusterSpec) -> str | None:
    """Return the fault of a description; None where there is none."""
    if bool(spec.scheduler_address) == bool(spec.cluster_class_name):
        return 'give either address = "tcp://HOST:PORT" or class, such as "SLURMCluster"'
    if spec.scheduler_address and not ADDRESS_PATTERN.fullmatch(spec.scheduler_address):
        return f"a scheduler's address is tcp://HOST:PORT or tls://HOST:PORT, not {spec.scheduler_address!r}"
    if spec.scheduler_address and spec != ClusterSpec(spec.scheduler_address):
        return "a scheduler that runs takes no [arguments], and has keys already"
    if spec.scheduler_address:
        return None
    for argument in spec.cluster_arguments:
        if (
            argument not in LOCAL_CLUSTER_ARGUMENTS
            if spec.cluster_class_name == LOCAL_CLUSTER
            else argument in RESERVED_ARGUMENTS
        ):
            return f"{argument} is no argument of {spec.cluster_class_name} that a file can give"
    if type(count := spec.cluster_arguments.get("n_workers")) is not int or not 0 < count <= MOST_WORKERS:
        return f"say in [arguments] how many workers {spec.cluster_class_name} shall start: n_workers = 4"
    return None


def connect_to_scheduler(spec: ClusterSpec, home: Paths, stack: ExitStack, failures: list[str]) -> tuple[Any, Any]:
    """Connect to the scheduler of a description; a cluster that is started for it ends with the stack.

    Args:
        spec: the description of the cluster.
        home: folders.
        stack: closes the client and the cluster, and restores the settings of Dask and of logging.
        failures: receives the messages with which the queueing system refuses jobs.

    Returns:
        Dask's client, and the cluster that was started, if any.

    Raises:
        UserError: the scheduler does not answer, or the cluster cannot be started.
    """
    distributed, started = import_dask(), None
    # Threads and malloc are the stages' business.
    stack.enter_context(import_dask("dask").config.set({"distributed.nanny.pre-spawn-environ": {}}))
    stack.callback(logging.disable, logging.root.manager.disable)
    logging.disable(logging.CRITICAL)
    try:
        security = distributed.Security.temporary() if spec.security else distributed.Security()
        security = security if security.tls_ca_file else None
        if spec.scheduler_address:
            asyncio.run(_check_scheduler_answers(spec.scheduler_address, security))
        else:
            started = _start_cluster(spec, home, security, failures)
            stack.callback(_shut_down_cluster, started)
        options = {"security": security, "timeout": CONNECT_SECONDS, "set_as_default": False}
        client = distributed.Client(started or spec.scheduler_address, **options)
    except (OSError, TypeError, ValueError, RuntimeError, ImportError) as error:
        what = "no scheduler answers at" if spec.scheduler_address else "no cluster can be started of class"
        why = failures[-1] if failures else str(error.__cause__ or error) or type(error).__name__
        raise UserError(f"{what} {spec.name}: {why.splitlines()[0]}") from error
    stack.callback(client.close, timeout=2)
    return client, started


async def _check_scheduler_answers(address: str, security: Any) -> None:
    """Ask a scheduler for its identity. A client would wait for ever where something listens and never answers."""
    arguments = security.get_connection_args("client") if security else None
    async with import_dask().rpc(address, connection_args=arguments, timeout=CONNECT_SECONDS) as scheduler:
        await asyncio.wait_for(scheduler.identity(), CONNECT_SECONDS)


def _start_cluster(spec: ClusterSpec, home: Paths, security: Any, failures: list[str]) -> Any:
    """Start the cluster of a class and arguments."""
    arguments = {**spec.cluster_arguments, "security": security} if security else spec.cluster_arguments
    if spec.cluster_class_name == LOCAL_CLUSTER:
        defaults = {"dashboard_address": DASHBOARD_ADDRESS, "memory_limit": 0, "silence_logs": logging.CRITICAL}
        return import_dask().LocalCluster(**{**defaults, **arguments})
    kind = getattr(import_dask("dask_jobqueue"), spec.cluster_class_name)
    if spec.security:  # keys made for this one cluster, in files that the jobs read
        folder = home.cache / "keys"
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        arguments = {"shared_temp_directory": str(folder), **arguments}
    arguments = {
        "log_directory": str(home.logs / "cluster"),
        **arguments,
        "job_cls": _make_job_class_that_records_failures(kind.job_cls, failures),
        "scheduler_options": {"dashboard_address": DASHBOARD_ADDRESS, **arguments.get("scheduler_options", {})},
        "job_script_prologue": [WORKER_SHELL_LINE, *arguments.get("job_script_prologue", ())],
    }
    return kind(**arguments)


def _make_job_class_that_records_failures(job: Any, failures: list[str]) -> type[Any]:
    """Return a class of jobs that records why one could not be submitted; Dask would only log it."""

    class ReportingJob(job):
        async def start(self) -> None:
            try:
                await super().start()
            except Exception as error:
                lines = [line for line in str(error).splitlines() if line.strip()]
                command = shlex.split(job.submit_command)[0]
                failures.append(f"{command} refuses a job: {lines[-1] if lines else type(error).__name__}")
                raise

    return ReportingJob


def _shut_down_cluster(started: Any) -> None:
    """End a cluster; worker processes that take longer than a moment are killed."""
    processes: list[psutil.Process] = []
    for worker in started.workers.values():
        with suppress(AttributeError, TypeError, psutil.Error):  # a job's worker has no process here
            process = psutil.Process(worker.pid)
            processes += [*process.children(recursive=True), process]
    with suppress(Exception):  # the run is over
        started.close(timeout=SHUTDOWN_SECONDS)
    started.shutdown_on_close = False  # at the end of Python Dask would wait again
    for value in vars(started).values():
        if isinstance(value, _TemporaryFileWrapper):  # a key, which goes with it; Python may end before it would
            value.close()
    for process in processes:
        with suppress(psutil.Error):
            process.kill()  # which is known by its start too, not by a number that another may have by now


def is_reachable_from_network(address: str) -> bool:
    """Return whether other machines could send work to a scheduler, which runs whatever it is sent."""
    return re.match(r"tls:|tcp://(127\.|\[::1\]|localhost:)", address) is None


# -- requirements of workers


@dataclass(frozen=True)
class WorkerRequirements:
    """The folders, versions and code that every worker must have.

    Attributes:
        home_tokens: files in the home and results folders, and their contents.
        package_versions: of Python, packages and this package's code.
        method_files: name, pickled description and identity of the code of each method.
    """

    home_tokens: Mapping[str, str]
    package_versions: Mapping[str, str]
    method_files: tuple[tuple[str, bytes, str], ...] = field(default=(), repr=False)


@contextmanager
def write_shared_requirements(
    home: Paths, methods: Iterable[tuple[str, bytes, str]] = ()
) -> Iterator[WorkerRequirements]:
    """Yield the requirements; while the block runs, files in the folders let workers check that they see the same ones.

    Args:
        home: the folders.
        methods: name, pickled description and identity of the code of each method.
    """
    tokens = {}
    try:
        for folder in (home.cache, home.results):
            with suppress(OSError):  # a read-only home that has all that is needed is a good one
                folder.mkdir(parents=True, exist_ok=True)
                file, token = folder / f"{PARTIAL_MARK}token-{secrets.token_hex(8)}", secrets.token_hex(8)
                try:
                    file.write_text(token)
                except OSError:  # such as a full disk
                    file.unlink(missing_ok=True)
                    raise
                tokens[str(file)] = token
        yield WorkerRequirements(tokens, environment_versions(), tuple(methods))
    finally:
        for path in tokens:
            Path(path).unlink(missing_ok=True)


def environment_versions() -> dict[str, str]:
    """Return the versions that decide digits in this process, and the digest of this package's code."""
    installed = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in VERSIONED_PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return {**installed, "code of ifsl_bench": source_sha256()[:12]}


def find_unmet_requirement(required: WorkerRequirements, dask_worker: Any = None) -> str | None:
    """Return in one line the requirement that this process does not meet; None where it meets all.

    Args:
        required: folders, versions and methods of the command.
        dask_worker: of this process, set by Dask.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command itself has it; read when torch is imported
    here, there = environment_versions(), required.package_versions
    if differing := [
        f"{name} {here[name]} (the command: {there[name]})" for name in there if here[name] != there[name]
    ]:
        return f"has {', '.join(differing)}: install the same on both"
    for name, token in required.home_tokens.items():
        with suppress(OSError):
            if Path(name).read_text() == token:
                continue
        return (
            f"lacks the folder {Path(name).parent} of this machine, or has another one there; mount the same one, or "
            "choose another with --home or --results"
        )
    from ifsl_bench.backbones.device import choose_device
    from ifsl_bench.plugin.method_source import hash_method_source

    for name, description, source in required.method_files:
        try:
            method = pickle.loads(description).method
        except (ImportError, AttributeError, UserError) as error:
            return (
                f"cannot load method {name} ({escape_controls(str(error))}); install it there as it is installed here"
            )
        if hash_method_source(method) != source:
            return f"has other code of method {name} than this machine; install the same there"
    accelerated = dask_worker is not None and dask_worker.state.total_resources.get(ACCELERATOR_RESOURCE, 0) >= 1
    if accelerated and choose_device("auto").type == "cpu":
        return f"declares {ACCELERATOR_RESOURCE}=1, but PyTorch sees none there"
    return None
