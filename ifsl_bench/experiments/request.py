"""Requests, as commands, campaign files and notebooks make them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifsl_bench.protocols.tasks.variants import Change, make_change
from ifsl_bench.utils.errors import UserError

if TYPE_CHECKING:
    from ifsl_bench.plugin.method import Method

MOST_JOBS = 10_000  # of a campaign: all are listed, and their results looked for, before the first begins


@dataclass(frozen=True)
class Request:
    """A request to run methods on tasks with seeds, which multiply; None, or empty, where nothing is said."""

    methods: Sequence[str | type[Method]] = ()  # names, globs and sets; a call may have classes too
    tasks: Sequence[str] = ()  # names, globs and sets
    options: Mapping[str, Any] = field(default_factory=dict)  # of the methods, name -> value
    train: Mapping[str, Any] = field(default_factory=dict)  # changes of meta-training, see Training
    trials: int | None = None  # how many settings of each method to choose from; 0 for the methods as published
    seed: int | None = None  # the first training seed
    seeds: int | Sequence[int] | None = None  # how many there are, or all of them
    episodes: int | None = None  # the first so many test episodes
    calibrate: bool = False  # whether rows have the bias on novel logits that is best on validation episodes
    change: Change = field(default_factory=Change)  # of every task, beside what their names say
    where: str = ""  # how errors begin; "" for what a command or a call says

    @property
    def all_seeds(self) -> Sequence[int]:
        """Every training seed; 0 alone where nothing is said."""
        if isinstance(self.seeds, Sequence):
            return self.seeds
        first = self.seed or 0
        return range(first, first + (1 if self.seeds is None else self.seeds))

    def over(self, base: Request) -> Request:
        """Another request, of a file, with what this one says in place of it; methods and tasks stay the file's."""
        more: dict[str, Any] = {
            key: value for key in ("trials", "episodes") if (value := getattr(self, key)) is not None
        }
        if self.seed is not None or self.seeds is not None:
            first = min(base.all_seeds, default=0) if self.seed is None else self.seed
            more |= {"seed": first, "seeds": self.seeds}
        return replace(
            base,
            options={**base.options, **self.options},
            train={**base.train, **self.train},
            calibrate=base.calibrate or self.calibrate,
            change=make_change({**base.change.parts(), **self.change.parts()}),
            **more,
        )

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Errors inside say where in a file they come from."""
        try:
            yield
        except UserError as error:
            if not self.where:
                raise
            raise UserError(f"{self.where}: {error}") from error


@dataclass(frozen=True)
class Campaign:
    """The requests of one command."""

    requests: Sequence[Request]
    results: Path | None = None  # where results go; None for the usual place
    data: Mapping[str, Path] = field(default_factory=dict)  # data set -> the path that it is made from
    # Its methods and tasks select some of the campaign's; all are run where it names none.
    only: Request = field(default_factory=Request)
