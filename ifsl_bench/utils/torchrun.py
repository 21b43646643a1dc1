"""Reads what torchrun tells its processes in the environment. Imports no torch."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from ifsl_bench.utils.errors import UserError

PATIENCE = 5.0  # seconds; torchrun ends the other processes within 0.2 s of the first that fails


@dataclass(frozen=True)
class Launch:
    """A process among several."""

    rank: int  # its number among all of them, from 0
    size: int  # how many there are
    local_rank: int  # its number among those of this machine
    local_size: int  # how many there are on this machine
    restarts: int = 0  # how often torchrun has replaced all of them (`--max-restarts`)


def launch() -> Launch | None:
    """This process among those that torchrun started; None where it is the only one.

    Raises:
        UserError: the environment says what cannot be.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    values = [os.environ.get(name, "0" if name == names[-1] else "") for name in names]
    if not values[0] or values[1] in ("", "0", "1"):
        return None
    if not all(value.isascii() and value.isdigit() for value in values):
        spelled = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        raise UserError(f"the environment has {spelled}, where torchrun sets numbers; use torchrun, or unset RANK")
    return Launch(*map(int, values))


def check_alone(command: str) -> None:
    """Ends a command that several processes were started for, though it is for one: the first of them says so.

    Raises:
        UserError: in the first process.
        SystemExit: in the others, once the first has had the time to speak.
    """
    started = launch()
    if started is None:
        return
    if started.rank > 0:
        time.sleep(PATIENCE)
        sys.exit(2)
    raise UserError(
        f"{command} is for one process, and torchrun started {started.size}: pretrain first, with torchrun "
        f"--nproc-per-node {started.local_size} -m ifsl_bench pretrain --task TASK, then {command} without torchrun"
    )
