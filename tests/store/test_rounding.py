"""The differences that another processor explains, on a stored result and others made of it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from ifsl_bench.protocols.tasks.metric_sets import COUNTS
from ifsl_bench.store.result_folder import packaged_root
from ifsl_bench.store.rounding import changes, unexplained
from ifsl_bench.store.schema import Choice, read


@pytest.fixture(scope="module")
def stored():
    return read(packaged_root() / "glyphs-1shot" / "lr.seed-0.json")


def elsewhere(result, training=False, **added):
    """As if it came from another processor, with hits added to columns of counts."""
    columns = {name: (result.episodes.column(name) + more).tolist() for name, more in added.items()}
    return msgspec.structs.replace(
        result,
        episodes=msgspec.structs.replace(result.episodes, **columns),
        provenance=result.provenance | {"device": "another processor"},
        training={"kept_step": 1} if training else {},
    )


def flips(generator, share: float, up: float = 0.5, episodes: int = 2000) -> np.ndarray:
    """A hit more, or less, in a share of the episodes."""
    signs = np.where(generator.random(episodes) < up, 1, -1)
    return signs * (generator.random(episodes) < share)


def test_flips_of_ties_are_explained_and_what_has_a_side_or_is_everywhere_is_not(stored):
    draw = np.random.default_rng(0)
    assert not unexplained(stored, elsewhere(stored, novel_joint=flips(draw, 0.02)), [stored])
    (why,) = unexplained(stored, elsewhere(stored, novel_joint=flips(draw, 0.02, up=0.95)), [stored])
    assert why == "novel joint goes to one side"
    (why,) = unexplained(stored, elsewhere(stored, base_joint=flips(draw, 0.3)), [stored])
    assert why == "base joint differs in more than 10% of the episodes"
    local = msgspec.structs.replace(elsewhere(stored, novel_joint=flips(draw, 0.01)), provenance=stored.provenance)
    assert unexplained(stored, local, [stored]) == ("on the same device with the same libraries nothing differs",)


def test_flips_of_ties_are_taken_for_something_else_in_a_twentieth_of_cases_at_most(stored):
    """Counts alarms in 400 pairs; at 5% each, they exceed 33 in one of a thousand times."""
    draw, names = np.random.default_rng(1), ("base_joint", "base_alone", "novel_joint", "novel_alone", "pairs")
    alarms = [
        bool(unexplained(stored, elsewhere(stored, **{name: flips(draw, 0.02) for name in names}), [stored]))
        for _ in range(400)
    ]
    assert sum(alarms) <= 33


def test_differences_are_counted_in_points_of_their_queries(stored):
    added = np.zeros(2000, int)
    added[:3] = 2, -1, 1
    change = changes(stored, elsewhere(stored, novel_joint=added))["novel_joint"]
    percent = 100 * added / stored.episodes.novel_queries
    assert (change.episodes, change.hits, change.points) == (3, 2, pytest.approx(percent.mean()))
    assert change.interval == pytest.approx(2.69 * percent.std(ddof=1) / 2000**0.5, rel=1e-2), "95% for seven at once"


def test_calibrated_accuracy_may_move_as_another_choice_of_the_bias_moves_it(stored):
    mask = np.arange(2000) % 10 < 2  # 0.4 points of 50 queries
    moved = elsewhere(stored, calibrated_base=3 * mask, calibrated_novel=-1 * mask)
    assert not unexplained(stored, moved, [stored])
    (why,) = unexplained(stored, elsewhere(stored, calibrated_novel=np.full(2000, -2)), [stored])
    assert why.startswith("calibrated Acc. moves by -"), "a bias that has nothing to do with validation"


def test_a_training_may_end_as_far_away_as_another_seed(stored):
    """Differences of two draws with a deviation of s have sqrt(2) s."""
    draw = np.random.default_rng(2)
    seeds = [elsewhere(stored, novel_joint=flips(draw, 0.5, up)) for up in (0.45, 0.5, 0.55)]
    assert not unexplained(stored, elsewhere(stored, training=True, novel_joint=flips(draw, 0.5, 0.55)), seeds)
    far = elsewhere(stored, training=True, novel_joint=np.full(2000, -1))
    (why,) = unexplained(stored, far, seeds)
    assert why.startswith("novel joint is further away than other seeds are (± ")
    (why,) = unexplained(stored, far, seeds[:1])
    assert why == "one stored seed does not say how far another training ends"


def test_a_training_of_sessions_may_end_as_far_away_as_another_seed():
    seeds = [read(packaged_root() / "glyphs-sessions" / f"lwof.seed-{seed}.json") for seed in range(3)]
    counts = [seed.counts() for seed in seeds]
    totals = [float(c.hits.sum(1).mean()) for c in counts]
    other = elsewhere(seeds[0], training=True)
    one_more = msgspec.structs.replace(other, episodes=seeds[1].episodes)
    assert changes(seeds[0], one_more)["hits"].hits == round((totals[1] - totals[0]) * len(counts[0]))
    assert not unexplained(seeds[0], one_more, seeds)
    half = (other.episodes.column("hits") // 2).tolist()
    far = msgspec.structs.replace(other, episodes=msgspec.structs.replace(other.episodes, hits=half))
    (why,) = unexplained(seeds[0], far, seeds)
    assert why.startswith("right answers is further away than other seeds are (± ")


def with_choice(result, hits, chosen, rivals=(), test_hits=()):
    """A result whose options are one of three settings, with these joint hits on 300 validation episodes."""
    counts = {name: [first, *more] for name, first, more in test_hits}
    choice = Choice(validation_episodes=300, chosen=chosen, winners=[0, 1] * 50, rivals=[*rivals], test_episodes=1000,
                    hits={"base_joint": hits, "novel_joint": [0, 0, 0]}, test_hits=counts)  # fmt: skip
    tuned = {"a": {f"a={i}": 1.0 for i in range(3)}}
    return msgspec.structs.replace(result, tuned=tuned, options={"a": chosen}, choice=choice)


def test_a_near_tie_of_settings_is_explained_and_a_choice_far_behind_is_not(stored):
    counts = stored.counts()
    totals = [(name, 0, [int(getattr(counts, name)[:1000].sum())]) for name in COUNTS]
    then = with_choice(stored, [500, 498, 400], 0, [1], totals)
    now = with_choice(elsewhere(stored), [499, 500, 400], 1)
    assert not unexplained(then, now, [then])
    (why,) = unexplained(then, with_choice(elsewhere(stored), [500, 498, 402], 2), [then])
    assert why == "the options were 100 validation hits behind, and rounding moved no setting's by more than 2"
    worse = with_choice(elsewhere(stored, novel_joint=-np.ones(2000, int)), [499, 500, 400], 1)
    (why,) = unexplained(then, worse, [then])
    assert why == "novel joint has -1,000 hits against the same setting's in the stored result"
    (why,) = unexplained(msgspec.structs.replace(then, choice=None), now, [then])
    assert why == "the options are others, and not by a choice among the same settings"


def test_a_training_anew_may_choose_what_other_validation_episodes_would_have(stored):
    then = with_choice(stored, [500, 498, 400], 0)
    seeds = [then, then]
    assert not unexplained(then, with_choice(elsewhere(stored, training=True), [500, 498, 400], 1), seeds)
    (why,) = unexplained(then, with_choice(elsewhere(stored, training=True), [0, 0, 400], 2), seeds)
    assert why == "no other validation episodes would have chosen these options"
