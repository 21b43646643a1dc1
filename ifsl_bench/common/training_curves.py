"""Loss, accuracy and learning rate of trainings as TensorBoard logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ifsl_bench.common.errors import Lacking, UserError, unknown
from ifsl_bench.common.files import Home, disk_errors
from ifsl_bench.common.progress import Relay, Reporter, Stage

KINDS = ("tensorboard",)
INSTALL = 'pip install "ifsl_bench[tensorboard]"'


def curves_folder(log: str | None, folder: str | Path | None, home: Home) -> Path | None:
    """Finds the folder for the logs of trainings; None where no logs are asked for.

    Args:
        log: "tensorboard" or None.
        folder: ``tensorboard`` among the logs of the home by default.

    Raises:
        UserError: another kind of log, a folder without a kind, or a package that is not installed.
    """
    if log is None:
        if folder is not None:
            raise UserError("--log-dir says where logs go, and --log which: add --log tensorboard")
        return None
    if log not in KINDS:
        raise unknown("kind of log", log, KINDS)
    if find_spec("tensorboard") is None:
        raise Lacking(f"--log tensorboard needs an extra (tensorboard is not installed): {INSTALL}")
    return Path(folder).expanduser().absolute() if folder is not None else home.logs / "tensorboard"


class Curves(Relay):
    """Writes the figures of trainings, stages that tell a loss, as scalars by step; hands everything on.

    A training that is resumed goes on in the same folder, and TensorBoard then hides what was written beyond the
    checkpoint that it goes on from.
    """

    def __init__(self, folder: Path, to: Reporter) -> None:
        super().__init__(to)
        self.folder = folder

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[Stage]:
        writer: Any = None

        def hear(amount: int, figures: Mapping[str, float]) -> None:
            nonlocal writer
            told.advance(amount, **figures)
            if writer is None and "loss" in figures:
                from torch.utils.tensorboard import SummaryWriter

                with disk_errors(self.folder):
                    writer = SummaryWriter(str(self.folder), purge_step=done + 1)
            for name, value in figures.items() if writer else ():
                writer.add_scalar(name, value, stage.done)

        with super().stage(title, total, done) as told:
            stage = Stage(title, total, done, hear)
            try:
                yield stage
            finally:
                if writer is not None:
                    writer.close()
