"""Choices on validation episodes, of a bias and options, and how far a result rests on their draw. No torch.

Each bootstrap resample of the validation episodes would have chosen a bias of its own, and perhaps other options. The
test hits with each such bias are counted. Options that more than one resample would have chosen are tried on test
episodes, and what they have more there than the chosen ones is added to the hits of these. For the rest, it is what
they have more on the validation episodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ifsl_bench.protocols.calibration import RESAMPLES, Calibrated
from ifsl_bench.protocols.metrics import Counts
from ifsl_bench.protocols.tasks.metric_sets import COUNTS, MORE_COUNTS

if TYPE_CHECKING:
    from ifsl_bench.protocols.session_metrics import SessionCounts

Hits = Annotated[int, Meta(ge=0, lt=1 << 31)]  # products of two fit into 64 bits
Episodes = Annotated[int, Meta(ge=1)]
Place = Annotated[int, Meta(ge=0)]
OF_BIAS = ("acc", "last", "pd", "gain", "base", "novel", "harmonic", "gacc")  # in sessions, what resamples are known of


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a result file, which nobody may add to."""


class Curve(Part, frozen=True):
    bias: list[float]
    base_joint: list[Hits]
    novel_joint: list[Hits]


class Calibration(Part, frozen=True):
    """The bias found on validation episodes; see :class:`ifsl_bench.protocols.calibration.Calibrated`.

    Attributes:
        bias: on the novel logits, of ``episodes.calibrated_base`` and ``calibrated_novel``.
        validation_episodes: how many it was found on.
        curve: the base-novel curve: ascending biases, and the base and novel queries that are right among all classes
            with each, over all test episodes.
        applied: whether the bias is part of the row, so that ``episodes.base_joint`` and ``novel_joint`` have it too.
        resampled_base, resampled_novel: the base and novel queries that are right over all test episodes with the bias
            that each bootstrap resample of the validation episodes would have chosen; in sessions after each of
            sessions 1 to T, one resample after the other. Empty in older files.
    """

    bias: float
    validation_episodes: Episodes
    curve: Curve
    applied: bool
    resampled_base: list[Hits] = []
    resampled_novel: list[Hits] = []

    @classmethod
    def of(cls, calibrated: Calibrated, applied: bool) -> Calibration:
        """Makes it of a calibration; the hits of each episode are among the counts."""
        bias, base, novel = calibrated.curve.T
        return cls(
            bias=calibrated.bias,
            validation_episodes=calibrated.validation_episodes,
            curve=Curve(
                bias=bias.tolist(), base_joint=base.astype(int).tolist(), novel_joint=novel.astype(int).tolist()
            ),
            applied=applied,
            resampled_base=calibrated.resampled[:, 0].ravel().tolist(),
            resampled_novel=calibrated.resampled[:, 1].ravel().tolist(),
        )


class Choice(Part, frozen=True):
    """The firmness of a choice of options by validation episodes.

    Attributes:
        validation_episodes: how many the settings were tried on.
        chosen: the place, in the order of ``tuned``, of the setting that was chosen.
        winners: the place of the one that each bootstrap resample of the validation episodes would have chosen.
        hits: a count of :class:`ifsl_bench.protocols.metrics.Counts` -> its sum over these episodes with each setting;
            in ``calibrated_base`` and ``calibrated_novel`` with the bias that is best for the setting.
        rivals: places of the settings that were tried on test episodes too, as
            :func:`ifsl_bench.experiments.selection_bootstrap.firmness` has them.
        test_episodes: the first so many.
        test_hits: a count -> its sum over these episodes with the chosen setting, then with each rival; empty where
            there is no rival.
    """

    validation_episodes: Episodes
    chosen: Place
    winners: Annotated[list[Place], Meta(min_length=RESAMPLES, max_length=RESAMPLES)]
    hits: dict[str, list[Hits]]
    rivals: list[Place] = []
    test_episodes: Place = 0
    test_hits: dict[str, list[Hits]] = {}


def odd_choice(choice: Choice, settings: int, counts: Counts, calibrated: bool) -> Iterator[str]:
    """Yields why one of so many settings was not chosen like this, for a result with these counts."""
    if max(choice.chosen, *choice.winners, *choice.rivals) >= settings:
        yield f"has a place that none of {settings} settings has"
    for hits, count in ((choice.hits, settings), (choice.test_hits, 1 + len(choice.rivals))):
        if hits.keys() - {*COUNTS, *MORE_COUNTS} or any(len(each) != count for each in hits.values()):
            yield f"has hits of something else, or of other than {count} settings"
    if not bool(choice.rivals) <= choice.test_episodes <= len(counts):
        yield f"has {choice.test_episodes:,} test episodes, the result {len(counts):,}"
    for name in choice.test_hits.keys() - ({"base_joint", "novel_joint"} if calibrated else set()):
        hits = counts.columns().get(name, np.zeros(0, int))[: choice.test_episodes].sum()
        if choice.test_hits[name][0] != hits:
            yield f"has {choice.test_hits[name][0]:,} test hits {name} of the chosen setting, its counts give {hits:,}"


def odd_calibration(calibration: Calibration | None, counts: Counts) -> Iterator[str]:
    """Yields why no method has these hits at these biases on the novel logits."""
    base, novel = counts.calibrated_base, counts.calibrated_novel
    if calibration is None or base is None or novel is None:
        if bool(calibration) != (base is not None):
            yield "and episodes.calibrated_base are not both there"
        return
    curve, resampled = calibration.curve, (calibration.resampled_base, calibration.resampled_novel)
    if len({len(curve.bias), len(curve.base_joint), len(curve.novel_joint)}) > 1:
        yield "has a curve whose parts differ in length"
    if {*map(len, resampled)} not in ({0}, {RESAMPLES}):
        yield f"has other than {RESAMPLES} resamples"
    joint = counts.base_joint, counts.novel_joint
    if calibration.applied and not all(map(np.array_equal, joint, (base, novel))):
        yield "is applied, and yet joint hits and calibrated ones differ"
    if (np.diff(curve.bias) <= 0).any():
        yield "has a curve whose biases do not ascend"
    of_counts = [
        (calibration.bias, base.sum(), novel.sum()),
        (calibration.bias if calibration.applied else 0.0, joint[0].sum(), joint[1].sum()),
    ]
    on_curve = np.array([curve.bias, curve.base_joint, curve.novel_joint], dtype=np.float64).T
    points = np.concatenate([on_curve, of_counts])
    points = points[np.lexsort((-points[:, 1], points[:, 0]))]
    if (np.diff(points[:, 1]) > 0).any() or (np.diff(points[:, 2]) < 0).any():
        yield "has base hits that rise, or novel hits that fall, as the bias grows"
    hits = np.concatenate([points[:, 1:], np.array(resampled).T.reshape(-1, 2)])
    if (hits > [counts.base_alone.sum(), counts.novel_alone.sum()]).any():
        yield "has more hits than there are alone"


def odd_bias_of_sessions(calibration: Calibration, counts: SessionCounts) -> Iterator[str]:
    """Yields why no method has these hits with biases on the novel logits after each session."""
    for name, most in (("base", counts.queries[:, 0]), ("novel", counts.queries[:, 1:])):
        hits = getattr(calibration, f"resampled_{name}")
        if len(hits) not in (0, RESAMPLES * counts.sessions):
            yield f"has other than {RESAMPLES} resamples of {counts.sessions} sessions"
        elif max(hits, default=0) > most.sum(dtype=np.int64):
            yield f"has more {name} hits than there are {name} queries"


def resampled_sequences(calibration: Calibration | None, counts: SessionCounts) -> SessionCounts | None:
    """Hits over all test sequences with the bias of each resample, as if each were a sequence; for :data:`OF_BIAS`.

    All novel hits are those of session 1. None where no bias was chosen, or where an older result does not say it.
    """
    from ifsl_bench.protocols.session_metrics import SessionCounts, triangle_rows

    if calibration is None or not calibration.resampled_base:
        return None
    sessions = counts.sessions
    _, group = triangle_rows(sessions)
    base, novel = (
        np.reshape(hits, (RESAMPLES, sessions)) for hits in (calibration.resampled_base, calibration.resampled_novel)
    )
    hits = np.zeros((RESAMPLES, len(group)), np.int64)
    first = np.full((RESAMPLES, 1), counts.hits[:, 0].sum(dtype=np.int64))
    hits[:, group == 0], hits[:, group == 1] = np.concatenate([first, base], 1), novel
    queries = np.tile(counts.queries.sum(0, dtype=np.int64), (RESAMPLES, 1))
    return SessionCounts(hits, np.zeros_like(base), np.zeros_like(base), queries, counts.base_classes, counts.ways)


def resampled_sums(calibration: Calibration | None, choice: Choice | None, counts: Counts) -> Counts | None:
    """A result's hits over all test episodes with what each resample would have chosen, as if each were an episode.

    Pairs are multiplied by the number of episodes, as their share of all pairs is made of two sums. None where nothing
    was chosen, or where an older result does not say it.
    """
    resampled = {
        "calibrated_base": calibration.resampled_base if calibration else [],
        "calibrated_novel": calibration.resampled_novel if calibration else [],
    }
    if not any(resampled.values()) and not choice:
        return None
    n = len(counts)
    sums: dict[str, Any] = {}
    for name, values in counts.columns().items():
        sums[name] = np.asarray(resampled.get(name) or [values.sum(dtype=np.int64)], dtype=np.float64)
        if choice and name in choice.hits:
            sums[name] = sums[name] + n * gains(choice, name)[choice.winners]
    if calibration and calibration.applied:
        sums |= {"base_joint": sums["calibrated_base"], "novel_joint": sums["calibrated_novel"]}
    if "pairs" in sums:
        sums["pairs"] = n * sums["pairs"]
    whole = {name: np.round(values) for name, values in zip(sums, np.broadcast_arrays(*sums.values()), strict=True)}
    return Counts(**whole, base_queries=n * counts.base_queries, novel_queries=n * counts.novel_queries)


def gains(choice: Choice, count: str) -> np.ndarray:
    """Hits that each setting has more than the chosen one, a mean over episodes: on the test where it was tried."""
    hits = np.array(choice.hits[count])
    gains = (hits - hits[choice.chosen]) / choice.validation_episodes
    if choice.rivals and count in choice.test_hits:
        chosen, *tested = choice.test_hits[count]
        gains[choice.rivals] = (np.array(tested) - chosen) / choice.test_episodes
    return gains
