"""What is known of a task: measured rows, rows that are not comparable with them, published rows. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ifsl_bench.board.fitting import unfit
from ifsl_bench.board.measured import EVERY, PAPER, PARTIAL, STORED, Row, mismatch, rows_of
from ifsl_bench.board.published import PublishedRow, published
from ifsl_bench.board.ranking import Ranking
from ifsl_bench.board.result_file import Result
from ifsl_bench.board.result_folder import LEFT_OUT, packaged_root, stored
from ifsl_bench.common.errors import UserError
from ifsl_bench.protocol.task import Task
from ifsl_bench.protocol.task_files import packaged
from ifsl_bench.protocol.variants import changed, split


@dataclass(frozen=True)
class Board:
    """What is known of one task.

    Attributes:
        rows: measured rows of today's definition of the task, on all of its episodes; those to be shown.
        compared: all such rows, shown or not. Ranks are theirs, so that they do not depend on what is shown.
        others: measured rows on other episodes or data, or on a part of the data where the task is not of such a part;
            shown apart and never ranked with ``rows``.
        papers: published rows, of the same protocol or of a related one (their ``protocol`` then says so).
        remarks: on files and rows that are left out.
        setting: that rows are ranked in, see :class:`ifsl_bench.board.ranking.Ranking`.
    """

    task: Task
    rows: tuple[Row, ...]
    compared: tuple[Row, ...]
    others: tuple[Row, ...]
    papers: tuple[PublishedRow, ...]
    remarks: tuple[str, ...]
    setting: str = PAPER

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def empty(self) -> bool:
        return not (self.rows or self.others or self.papers)

    @cached_property
    def ranking(self) -> Ranking:
        """By accuracy."""
        return Ranking(self.compared, setting=self.setting)

    def in_setting(self, setting: str) -> Board:
        """The rows of a setting, to be ranked, and a remark on those of other settings."""
        rows = tuple(row for row in self.rows if row.setting in (setting, EVERY))
        counts = Counter(row.setting for row in self.rows if row not in rows)
        remarks = [f"`ifsl-bench table --rank --setting {other} {self.name}` has {count} more row{'s' * (count > 1)}"
                   for other, count in sorted(counts.items())]  # fmt: skip
        return replace(self, setting=setting, rows=rows, remarks=(*self.remarks, *remarks))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Of the remarks, those on what was found and is in no table."""
        return tuple(said for said in self.remarks if said.startswith(LEFT_OUT))

    @property
    def labels(self) -> set[str]:
        """Of all rows, measured and published."""
        return {row.label for row in (*self.rows, *self.others)} | {paper.label for paper in self.papers}

    def knows(self, label: str) -> bool:
        """Whether :meth:`only` finds something for a label."""
        papers = {paper.label.lower() for paper in self.papers}
        return label.lower() in papers.union(*(names_of(row) for row in (*self.rows, *self.others)))

    def only(self, labels: Collection[str]) -> Board:
        """The rows with these labels, or labels and origins as in "lr (stored)", whatever their case."""
        wanted = {label.lower() for label in labels}
        rows, others = (tuple(r for r in part if wanted & set(names_of(r))) for part in (self.rows, self.others))
        papers = tuple(paper for paper in self.papers if paper.label.lower() in wanted)
        return replace(self, rows=rows, others=others, papers=papers)

    def usual(self, labels: Collection[str]) -> Board:
        """Without the stored rows that differ from these labels' in how options were chosen, tuned ones beside those as
        published; and without those whose options somebody has changed. The rows of these labels stay. Where no stored
        row was tuned as they were, those as published stay too."""
        mine = {row.setting for row in self.rows if row.label in labels} - {EVERY} or {PAPER}
        plain = [row for row in self.rows if row.origin == STORED and not row.has_options]
        alike = any(row.setting in mine for row in plain)
        shown = {*mine, EVERY, *(() if alike else (PAPER,))}

        def stays(row: Row) -> bool:
            return row.origin != STORED or row.label in labels or (not row.has_options and row.setting in shown)

        remarks = []
        if not alike and PAPER in {row.setting for row in plain}:
            remarks.append(f"No stored row was tuned as yours was ({', '.join(sorted(mine))}): those as published are "
                           "shown beside it, and ranked apart")  # fmt: skip
        if out := [row for row in self.rows if not stays(row)]:
            kinds = Counter("with other options" if row.has_options else "as published" if row.setting == PAPER
                            else "tuned" for row in out)  # fmt: skip
            known = [kind for kind in ("as published", "tuned", "with other options") if kinds[kind]]
            rest = "1 more stored row" if len(out) == 1 else f"{len(out)} more stored rows"
            said = ", ".join(f"{kinds[kind]} {kind}" for kind in known)
            remarks.append(f"`ifsl-bench table {self.name}` has {rest} ({said})")
        rows = tuple(row for row in self.rows if stays(row))
        return replace(self, rows=rows, remarks=(*self.remarks, *remarks))

    def row(self, label: str) -> Row | None:
        """The row of that label: yours if there is one, else the stored one; "lr (stored)" is the stored one."""
        found = [row for row in (*self.rows, *self.others) if label.lower() in names_of(row)]
        return min(found, key=lambda row: row.origin == STORED, default=None)

    def apart(self, row: Row) -> str:
        """Why a row is one of ``others``; "" where there is nothing to hold it against."""
        if row.partial and not self.task.dataset.partial:
            return PARTIAL
        return mismatch(self.rows[0].results[0], row.results[0]) if self.rows else ""


def names_of(row: Row) -> tuple[str, str]:
    """What a row is called, in lower case: by its label, and by its origin too."""
    return row.label.lower(), f"{row.label} ({row.origin})".lower()


def load_board(task: Task, results: Path) -> Board:
    """The measured rows of a task, yours first, then those that come with the package, and the published ones."""
    rows: list[Row] = []
    remarks: list[str] = []
    folders = [(origin, *stored(root, [task.name])) for root, origin in reversed(_roots(results))]
    reasons = unfit(task, [r for _, found, _ in folders for r in found if r.task_hash == task.hash])
    for origin, found, damaged in reversed(folders):
        today = [r for r in found if r.task_hash == task.hash and id(r) not in reasons]
        remarks += damaged
        remarks += [
            f"{LEFT_OUT}{r.label}, seed {r.seed} ({origin}): {reasons[id(r)]}; run it again"
            for r in found
            if id(r) in reasons
        ]
        remarks += [
            f"{LEFT_OUT}{r.label}, seed {r.seed} ({origin}) belongs to another definition of the task; run it again"
            for r in found
            if r.task_hash != task.hash
        ]
        grouped, odd = rows_of(today, origin)
        rows += grouped
        remarks += odd
    # Published rows are of whole data sets, and so is a task unless its file says otherwise.
    admitted = [row for row in rows if task.dataset.partial or not row.partial]
    reference = _reference(task, admitted)
    comparable = [row for row in admitted if reference is None or not mismatch(reference, row.results[0])]
    others = [row for row in rows if row not in comparable]
    shown = tuple(comparable)
    return Board(task, shown, shown, tuple(others), tuple(published(task.name)), tuple(remarks))


def _roots(results: Path) -> list[tuple[Path, str]]:
    """The folders of results, with what their rows are called."""
    own = packaged_root()
    return [(own, STORED)] if results.resolve() == own.resolve() else [(results, "yours"), (own, STORED)]


def _reference(task: Task, rows: Sequence[Row]) -> Result | None:
    """A result on all episodes of the task, and on its data: what the others are held against.

    Where the task pins no data, the rows that come with the package say which data are meant, if there are any.
    """
    found = [r for row in sorted(rows, key=lambda row: row.origin != STORED) for r in row.results]
    whole = [r for r in found if len(r.episodes) == task.evaluation.episodes]
    pinned = [r for r in whole if r.fingerprint == task.dataset.fingerprint]
    return next(iter(pinned or whole or found), None)


def load_variants(task: Task, results: Path) -> list[Board]:
    """The boards, where anything is in them or left out, of the tasks whose protocol departs from this one's.

    These are the packaged tasks that say so, and the task with changes (``glyphs-5shot+ways=10``) as far as results of
    it are stored.
    """
    variants = {name: other for name, other in packaged().items() if other.variant_of == task.name}
    folders = {path.name for root, _ in _roots(results) for path in root.glob(f"{task.name}+*") if path.is_dir()}
    for folder in sorted(folders):
        try:
            plain, change = split(folder)
            other = changed(task, change)
        except UserError:
            continue  # a folder that no run has made
        if plain == task.name and other.name == folder:
            variants[folder] = other
    boards = [load_board(other, results) for other in variants.values()]
    return [board for board in boards if not board.empty or board.left_out]


def telling(found: list[Board], boards: Iterable[Board]) -> list[Board]:
    """Those found, the last of which tells what was left out of the others: they have no table that would say it."""
    if not found:
        return found
    here = {id(board) for board in found}
    lost = [said for board in boards if id(board) not in here for said in board.left_out]
    return [*found[:-1], replace(found[-1], remarks=(*found[-1].remarks, *lost))]
