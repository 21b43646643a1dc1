"""Starts the cluster that ``--cluster`` describes, or connects to one that runs."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import shlex
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from tempfile import _TemporaryFileWrapper
from typing import Any

import psutil

from ifsl_bench.common.errors import UserError
from ifsl_bench.common.files import Home
from ifsl_bench.scheduler.cluster_file import ADDRESS, CLASSES, LOCAL, ClusterSpec, dask
from ifsl_bench.scheduler.worker_check import DAEMON

PATIENCE = 10.0  # seconds to wait for a scheduler's answer
GRACE = 2.0  # seconds that workers have to end by themselves
STATUS_PAGE = "127.0.0.1:0"  # of the scheduler: for this machine alone, at any free port
SHELL = (f"export {DAEMON}", "export OMP_WAIT_POLICY=PASSIVE")  # before a worker starts in a job


class Cluster:
    """A connection to a scheduler, and the cluster if it was started here.

    Attributes:
        client: of Dask.
        name: how messages call it.
        count: how many workers were asked for; 0 where others decide that.
    """

    def __init__(self, client: Any, name: str, started: Any = None, count: int = 0) -> None:
        self.client, self.name, self.count = client, name, count
        self._started, self._failures = started, getattr(started, "failures", [])

    def mend(self, alive: int) -> None:
        """Asks for workers in place of those that are gone, where the cluster is ours.

        Raises:
            UserError: the queueing system refuses jobs; with its own words.
        """
        if self._failures:
            raise UserError(f"{self.name}: {self._failures[-1]}")
        if self.count and alive < self.count:
            self._started.scale(self.count)  # what has been asked for already is not asked for again

    @property
    def alive(self) -> bool:
        """True while the scheduler can be reached."""
        return bool(self.client.status == "running")


@contextlib.contextmanager
def opened(spec: ClusterSpec, home: Home, warn: Callable[[str], None]) -> Iterator[Cluster]:
    """The cluster of a description; one that is started here is ended with the block.

    Args:
        warn: is told where anybody could send the scheduler work.

    Raises:
        UserError: the scheduler does not answer, or the cluster cannot be started.
    """
    distributed = dask()
    settings = {
        "distributed.worker.daemon": False,  # workers decode images in processes of their own
        "distributed.nanny.pre-spawn-environ": {},  # threads are the stages' business, see keep_freed_memory for malloc
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask("dask").config.set(settings))
        stack.enter_context(_silent("distributed", "tornado.application", "asyncio"))
        if spec.address:
            client = _connect(spec)
            stack.callback(client.close, timeout=2)
            _warn_of_open(spec.address, spec.address, warn)
            yield Cluster(client, spec.address)
            return
        started = _start(spec, home)
        stack.callback(_end, started)
        client = distributed.Client(started, timeout=PATIENCE, set_as_default=False)
        stack.callback(client.close, timeout=2)
        for listener in started.scheduler.listeners:
            _warn_of_open(listener.listen_address, f"the scheduler of {spec.name}", warn)
        yield Cluster(client, spec.name, started, spec.count)


def _connect(spec: ClusterSpec) -> Any:
    distributed = dask()
    security = distributed.Security(**spec.security, require_encryption=True) if spec.security else None  # type: ignore[arg-type]
    if spec.address.startswith("tls://") and not spec.security and not distributed.Security().tls_ca_file:
        raise UserError(f"{spec.address} needs keys: give --cluster a TOML file with address and [security], "
                        "see docs/cluster.md") from None  # fmt: skip
    match = ADDRESS.fullmatch(spec.address)
    assert match is not None, "checked when it was read"
    try:
        # Dask tries again until its time is up, even where nobody listens.
        socket.create_connection((match["host"].strip("[]"), int(match["port"])), PATIENCE).close()
    except OSError as error:
        raise UserError(f"no scheduler answers at {spec.address}: {error.strerror or error}") from error
    answer: Future[Any] = Future()

    def connect() -> None:
        try:
            answer.set_result(
                distributed.Client(spec.address, security=security, timeout=PATIENCE, set_as_default=False)
            )
        except Exception as error:
            answer.set_exception(error)

    # Dask waits for ever for what takes its greeting and says nothing, as a web server does.
    threading.Thread(target=connect, daemon=True).start()
    try:
        return answer.result(2 * PATIENCE)
    except TimeoutError:
        why = "it says nothing"
    except Exception as error:
        why = str(error.__cause__ or error).splitlines()[0]
    raise UserError(f"what listens at {spec.address} does not answer as a scheduler: {why}")


def _start(spec: ClusterSpec, home: Home) -> Any:
    """The cluster of a class and arguments."""
    distributed, kind = dask(), getattr(dask(CLASSES[spec.kind]), spec.kind)
    arguments: dict[str, Any] = dict(spec.arguments)
    if spec.kind == LOCAL:
        arguments = {"dashboard_address": STATUS_PAGE, "memory_limit": 0, "silence_logs": logging.CRITICAL} | arguments
    else:
        arguments = _for_jobs(spec, kind, home)
    if spec.security is True:
        arguments["security"] = distributed.Security.temporary()
    elif spec.security:
        arguments["security"] = distributed.Security(**spec.security, require_encryption=True)
    try:
        started = kind(**arguments)
    except (OSError, TypeError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{spec.name}: {spec.kind} cannot be started: {str(error).splitlines()[0]}") from error
    started.failures = getattr(arguments.get("job_cls"), "failures", [])
    return started


def _for_jobs(spec: ClusterSpec, kind: Any, home: Home) -> dict[str, Any]:
    """Arguments of a cluster of jobs, with what all of ours need: see :data:`SHELL`, and where logs and keys are."""
    command = shlex.split(kind.job_cls.submit_command)[0]
    if shutil.which(command) is None:
        raise UserError(f"{spec.name}: {spec.kind} needs the command {command}, which is not on this machine")

    class Job(kind.job_cls):
        """Remembers why a job could not be submitted; Dask would only log it."""

        failures: list[str] = []  # noqa: RUF012

        async def start(self) -> None:
            try:
                await super().start()
            except Exception as error:
                said = [line for line in str(error).splitlines() if line.strip()]
                self.failures.append(f"{command} refuses a job: {said[-1] if said else type(error).__name__}")
                raise

    arguments: dict[str, Any] = {"log_directory": str(home.logs / "cluster"), "job_cls": Job} | dict(spec.arguments)
    options: dict[str, Any] = arguments.get("scheduler_options", {})
    prologue: list[str] = arguments.get("job_script_prologue", [])
    arguments["scheduler_options"] = {"dashboard_address": STATUS_PAGE} | options
    arguments["job_script_prologue"] = [*SHELL, *prologue]
    if spec.security is True:  # keys made for this one cluster, in files that the jobs read
        arguments.setdefault("shared_temp_directory", str(_private(home.cache / "keys")))
    return arguments


def _private(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    return folder


def _end(started: Any) -> None:
    """Ends a cluster; worker processes that take longer than a moment are killed."""
    processes = [process for worker in list(started.workers.values()) for process in _processes(worker)]
    with contextlib.suppress(Exception):  # whatever it says, there is nobody left to hear it
        started.close(timeout=GRACE)
    started.shutdown_on_close = False  # at the end of Python Dask would wait again
    for file in _key_files(started):  # which would stay where this process ends before Python takes it apart
        file.close()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()  # which is known by its start too, not by a number that another may have by now


def _key_files(started: Any) -> list[Any]:
    """The open files of keys that a cluster of jobs has made for itself; to close one removes it."""
    return [value for value in vars(started).values() if isinstance(value, _TemporaryFileWrapper)]


def _processes(worker: Any) -> list[psutil.Process]:
    """Lists the processes of a worker on this machine."""
    try:
        process = psutil.Process(worker.pid)
        return [*process.children(recursive=True), process]
    except (AttributeError, TypeError, psutil.Error):
        return []


def _warn_of_open(address: str, name: str, warn: Callable[[str], None]) -> None:
    """A scheduler runs whatever it is sent."""
    match = ADDRESS.fullmatch(address)
    if match and match["protocol"] == "tcp" and not _is_loopback(match["host"].strip("[]")):
        warn(f"{name} listens at {address} without TLS: whoever reaches it runs programs as you; see docs/cluster.md")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _silent(*names: str) -> Iterator[None]:
    """Silences some loggers, and those below them, which have levels of their own."""
    there = [
        name for name in logging.root.manager.loggerDict if name.startswith(tuple(f"{parent}." for parent in names))
    ]
    before = {name: logging.getLogger(name).level for name in (*names, *there)}
    for name in before:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
