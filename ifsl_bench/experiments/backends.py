"""The choice of the back end that jobs run on: this process, workers of this machine, or workers of a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ifsl_bench.experiments.job import Job
from ifsl_bench.experiments.runner import Backend
from ifsl_bench.experiments.worker_pools import LokyPool, check_sendable, visible_name
from ifsl_bench.experiments.workspace import Workspace
from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.experiments.cluster import ClusterSpec


def backend_for(
    jobs: Iterable[Job],
    work: Workspace,
    device: str,
    count: int | None = None,
    devices: str | None = None,
    cluster: ClusterSpec | None = None,
) -> Backend:
    """Choose the back end; its workers start with the first item.

    Args:
        jobs: whose methods the workers must be able to load.
        work: folders and reporter.
        device: as the user typed it.
        count: of processes of this machine; one for each device by default.
        devices: numbers of accelerators, ``0-7`` or ``0,2``.
        cluster: in place of these processes.

    Raises:
        UserError: no such devices, or more of them than workers; a method that other processes cannot load.
    """
    if cluster:
        from ifsl_bench.experiments.dask_pool import DaskPool  # Dask is an extra

        check_sendable(jobs)
        return DaskPool(cluster, work, device, jobs)
    if (count or 1) == 1 and not devices:
        return Backend()
    check_sendable(jobs)
    numbers = numbers_in(devices) if devices else None
    if numbers and device not in ("auto", "cuda"):
        raise UserError(
            f"--devices says which accelerators there are, and --device {device} which one to use: "
            "leave one of them out"
        )
    if numbers and count and count < len(numbers):
        raise UserError(f"--jobs {count} leaves some of --devices {devices} without a worker: leave --jobs out, for "
                        "one worker each, or name fewer devices")  # fmt: skip
    if numbers is None and work.device.type == "cuda" and work.device.index is None and count:
        numbers = list(range(min(count, torch.cuda.device_count())))
    names = [visible_name(number) for number in numbers or ()]
    return LokyPool(work.reporter, count or len(names), names)


def numbers_in(listed: str) -> list[int]:
    """Read ``0-2,5`` as [0, 1, 2, 5]; raises :class:`UserError` for what is no such list."""
    parts = [re.fullmatch(r"\s*([0-9]{1,4})\s*(?:-\s*([0-9]{1,4})\s*)?", part) for part in listed.split(",")]
    ranges = [part and range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts]
    numbers = [number for numbers in ranges for number in numbers or ()]
    if not all(ranges) or len(set(numbers)) != len(numbers):
        raise UserError(f"--devices takes numbers, each once, as in 0-7 or 0,2, not {listed!r}")
    return numbers
