"""Loss, accuracy and learning rate of trainings, as CSV files or TensorBoard logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any

from ifsl_bench.utils.errors import MissingDependencyError, UserError, unknown_name_error
from ifsl_bench.utils.files import Paths, translate_disk_errors, write_bytes
from ifsl_bench.utils.progress import LEARNING_RATE, ProgressTask, Reporter

CSV_COLUMNS = ("step", "loss", "accuracy", LEARNING_RATE, "validation accuracy")  # of CSV files; accuracy is in percent
INSTALL_TENSORBOARD = 'pip install "ifsl_bench[tensorboard]"'


class CsvWriter:
    """A file with a line for each step that has figures.

    Args:
        path: without its ending. Lines beyond the step ``done`` that a training goes on from are removed, and so is a
            last one that a killed process wrote half of.
    """

    def __init__(self, path: Path, done: int) -> None:
        path = path.with_name(f"{path.name}.csv")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[1:] if path.exists() else []
        steps = [line.partition(",")[0] if line.endswith("\n") else "" for line in lines]
        lines = [line for line, step in zip(lines, steps, strict=True) if step.isdigit() and int(step) <= done]
        write_bytes(path, "".join([",".join(CSV_COLUMNS) + "\n", *lines]).encode(), "--log-dir")
        self.file = FileIO(path, "r+")
        self.line_start, self.line = self.file.seek(0, 2), dict[str, float]()

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step; the last step's line is written again if it gets more figures.

        Args:
            step: number of the step.
            figures: by column.
        """
        if self.line.get("step") != step:
            self.line_start, self.line = self.file.seek(0, 2), {"step": step}
        self.line |= figures
        self.file.seek(self.line_start)
        values = (f"{self.line[name]:.9g}" if name in self.line else "" for name in CSV_COLUMNS)
        self.file.write((",".join(values) + "\n").encode())
        self.file.truncate()

    def close(self) -> None:
        self.file.close()


class TensorBoardWriter:
    """A TensorBoard log, which hides points beyond the step that a training goes on from."""

    def __init__(self, path: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(path), purge_step=done + 1)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


WRITER_OF_KIND: Mapping[str, Callable[[Path, int], CsvWriter | TensorBoardWriter]]
WRITER_OF_KIND = {"csv": CsvWriter, "tensorboard": TensorBoardWriter}


@dataclass(frozen=True)
class CurveLogs:
    """The kind and folder of the logs that a run writes.

    Attributes:
        curve_kind: one of ``WRITER_OF_KIND``.
        curve_folder: where trainings have a file or a folder each, by their names.
    """

    curve_kind: str
    curve_folder: Path


def make_curve_logs(log: str | None, folder: str | Path | None, home: Paths) -> CurveLogs | None:
    """Return kind and folder of the logs of trainings; None where none are to be written.

    Args:
        log: "csv", "tensorboard" or None.
        folder: one of the kind's name among the logs of the home by default.
        home: folders.

    Raises:
        UserError: another kind of log, a folder without a kind, or a package that is not installed.
    """
    if log is None:
        if folder is not None:
            raise UserError("--log-dir says where logs go, and --log which: add --log csv or --log tensorboard")
        return None
    if log not in WRITER_OF_KIND:
        raise unknown_name_error("kind of log", log, WRITER_OF_KIND)
    if log == "tensorboard" and find_spec("tensorboard") is None:
        raise MissingDependencyError(
            f"--log tensorboard needs an extra (tensorboard is not installed): {INSTALL_TENSORBOARD}"
        )
    return CurveLogs(log, Path(folder).expanduser().absolute() if folder is not None else home.logs / log)


class CurveReporter(Reporter):
    """Writes the figures of trainings, the stages with a loss, by step; hands everything on.

    A training that is resumed goes on in the same log, and each step beyond the checkpoint is logged once.
    """

    def __init__(self, logs: CurveLogs, training: str, to: Reporter) -> None:
        self.open, self.path, self.to = WRITER_OF_KIND[logs.curve_kind], logs.curve_folder / training, to

    def say(self, text: str) -> None:
        self.to.say(text)

    def warn(self, text: str) -> None:
        self.to.warn(text)

    @contextmanager
    def report_stage(self, title: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        writer: CsvWriter | TensorBoardWriter | None = None

        def advance(amount: int, figures: Mapping[str, float]) -> None:
            nonlocal writer
            shown.advance(amount, **figures)
            if writer is None and "loss" in figures:
                with translate_disk_errors(self.path, "--log-dir"):
                    writer = self.open(self.path, done)
            if writer and figures:
                writer.add(stage.done, figures)

        with self.to.report_stage(title, total, done) as shown:
            stage = ProgressTask(title, total, done, advance)
            try:
                yield stage
            finally:
                if writer is not None:
                    writer.close()
