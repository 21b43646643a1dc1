"""Hits of single test images: a plain loop over predictions gives the same, for any block size and kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from ifsl_bench import api
from ifsl_bench.plugin.method import Method, Prediction
from ifsl_bench.protocols import loader as evaluation
from ifsl_bench.protocols.calibration import ValidationBias
from ifsl_bench.protocols.episode_loader import EpisodeLoader
from ifsl_bench.protocols.image_counts import MAX_STORED_CHARACTERS, SHARE_LEVELS, ImageHits, ImageTally, PoolHits
from ifsl_bench.protocols.loader import evaluate_method
from ifsl_bench.protocols.sampling.episodes import EpisodeSampler
from ifsl_bench.protocols.tasks.task import EpisodeSpec
from ifsl_bench.solvers import numba_code_cache
from ifsl_bench.store.schema import find_first_contradiction, read_result
from tests.experiments.test_sessions import K, base, loader_of, pool, seeded_method  # noqa: F401 -- a fixture

BIAS = ValidationBias(0.7, 10, np.array([0.0, 1.0]), np.linspace(-1, 1, 100))


class Nearest(Method):
    """Novel logits are minus the squared distance to the mean of a class."""

    def forward(self, support, query):
        means = support.features.unflatten(1, (self.ways, -1)).mean(2)
        novel = -torch.cdist(query.features, means).square()
        return Prediction(torch.cat([query.base_logits, novel + 5], -1))


def evaluated(method: Method, loader, episodes: range, biased: bool = False) -> ImageHits:
    loader.image_tally = ImageTally()
    evaluate_method(method, "m", loader, episodes, bias=BIAS)
    return loader.collect_image_hits(biased)


@pytest.fixture(params=[1, 2, 3], ids="blocks of {}".format)
def blocks(request, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "choose_block_size", lambda loader, method: request.param)


@torch.no_grad()
def test_episodes_count_the_hits_of_each_image_in_even_and_in_odd_ones(base, blocks):  # noqa: F811
    novel, of_base = (
        replace(doubles, features=doubles.features.float(), base_logits=doubles.base_logits.float())
        for doubles in (pool("novel/test", 9, 12, base, 1), pool("base/test", K, 7, base, 2))
    )
    spec = EpisodeSpec(ways=2, novel_queries=3, base_queries=5)
    sampler = EpisodeSampler(("t", "test", 0), spec, 2, novel.class_starts, of_base.class_starts)
    method = Nearest(base, 2)
    expected = {
        name: {what: np.zeros((2, pool.n_images), int) for what in ("asked", "joint", "alone", "calibrated")}
        for name, pool in (("base", of_base), ("novel", novel))
    }
    loader = EpisodeLoader(sampler, novel, of_base)
    for e in range(3, 40):
        drawn, batch = sampler.sample(e, 1), loader.load_batch(e, 1)
        logits = method(batch.support, batch.query).logits[0]
        for row, image, label in zip(logits, drawn.query[0].tolist(), drawn.query_labels[0].tolist(), strict=True):
            of_pool, part = ("novel", slice(K, None)) if label >= K else ("base", slice(K))
            biased = row + torch.cat([torch.zeros(K), torch.full((2,), BIAS.bias_on_novel_logits)])
            counts = expected[of_pool]
            counts["asked"][e % 2, image] += 1
            counts["joint"][e % 2, image] += int(row.argmax()) == label
            counts["alone"][e % 2, image] += int(row[part].argmax()) == label - (part.start or 0)
            counts["calibrated"][e % 2, image] += int(biased.argmax()) == label
    assert any((counts["joint"] < counts["alone"]).any() for counts in expected.values())
    plain = evaluated(method, loader, range(3, 40))
    with numba_code_cache.use_batched_solvers():
        in_torch = evaluated(method, loader, range(3, 40))
    biased = evaluated(method, loader, range(3, 40), biased=True)
    for name, counts in expected.items():
        asked = counts.pop("asked")
        assert 0 < counts["joint"].sum() <= counts["alone"].sum() < asked.sum()
        for hits in (plain, in_torch):
            assert (hits.pools[name].images_per_group, hits.right_counts_are_shares) == (1, False)
            np.testing.assert_array_equal(hits.pools[name].query_counts, asked)
            for what, right in counts.items():
                np.testing.assert_array_equal(hits.pools[name].right_counts[what], right)
        np.testing.assert_array_equal(biased.pools[name].right_counts["joint"], counts["calibrated"])


@torch.no_grad()
@pytest.mark.parametrize("name", ["protonet", "cec"], ids=["in one pass", "session by session"])
def test_sessions_weigh_the_hits_of_each_image_as_the_average_does(name, base, blocks):  # noqa: F811
    method, loader = seeded_method(name, base), loader_of(base)
    sessions, ways, count = 3, 2, 5
    base_images, each = len(loader.base.features[0]), loader.sampler.queries
    asked = {"base": np.zeros((sessions + 1, base_images)), "novel": np.zeros((sessions + 1, loader.novel.n_images))}
    right = {
        bias: {pool: np.zeros_like(values) for pool, values in asked.items()}
        for bias in (0.0, BIAS.bias_on_novel_logits)
    }
    for e in range(count):
        batch, state = loader.load_batch(e, 1), None
        images = [*range(base_images), *batch.novel_rows[0].tolist()]
        labels = [*batch.base_labels.tolist(), *(K + n // each for n in range(batch.novel_rows.shape[1]))]
        for t in range(sessions + 1):
            state = method.learn(batch.supports_by_session[t - 1], state).state if t else None
            logits = (
                method.answer(state, batch.queries_after_sessions(t)).logits
                if t
                else method.base_logits(batch.queries_after_sessions(0))
            )[0]
            for q in range(base_images + t * ways * each):
                of_pool = "base" if q < base_images else "novel"
                asked[of_pool][t, images[q]] += 1
                for bias, counts in right.items():
                    row = torch.cat([logits[q, :K], logits[q, K:] + bias])
                    counts[of_pool][t, images[q]] += int(row.argmax()) == labels[q]
    hits = evaluated(method, loader, range(count))
    queries = [(asked["base"] + 0)[t].sum() + asked["novel"][t].sum() for t in range(sessions + 1)]
    average = 1 / np.array(queries)
    share = np.array([math.log(1 + K / ways / t) / (K / ways) for t in range(1, sessions + 1)])
    gacc = {"base": np.r_[1, 1 - share * [1, 2, 3]], "novel": np.r_[0, share]}
    for of_pool, found in hits.pools.items():
        weights = {"acc": average, "last": np.eye(4)[3], "gacc": gacc[of_pool], "first": np.eye(4)[0]}
        weights["calibrated"] = average
        assert found.right_counts.keys() == weights.keys() - ({"first"} if of_pool == "novel" else set())
        np.testing.assert_array_equal(found.query_counts[0], asked[of_pool][-1])
        for what, values in found.right_counts.items():
            of_bias = right[BIAS.bias_on_novel_logits if what == "calibrated" else 0.0][of_pool]
            weight = weights[what][:, None]
            sums = (weight * of_bias).sum(0), (weight * asked[of_pool]).sum(0)
            expected = np.divide(*sums, out=np.zeros_like(sums[0]), where=sums[1] > 0)
            assert np.abs(values[0] / SHARE_LEVELS - expected).max() <= 0.5 / SHARE_LEVELS + 1e-9
        assert (found.right_counts["acc"] != found.right_counts["last"]).any()
    biased = evaluated(method, loader, range(count), biased=True)
    np.testing.assert_array_equal(
        biased.pools["base"].right_counts["acc"], hits.pools["base"].right_counts["calibrated"]
    )


def test_groups_of_neighbours_are_of_one_class_and_add_up():
    generator = np.random.default_rng(0)
    sizes = np.array([5, 1, 8, 3])
    asked = generator.integers(0, 9, (2, 17))
    right = generator.binomial(asked, 0.4)
    whole = PoolHits(sizes, 1, asked, {"joint": right})
    four = whole.merge_neighbouring_groups(shares=False).merge_neighbouring_groups(shares=False)
    assert four.groups_per_class.tolist() == [2, 1, 2, 1]
    parts = [slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 10), slice(10, 14), slice(14, 17)]
    for ours, theirs in ((four.query_counts, asked), (four.right_counts["joint"], right)):
        assert ours.T.tolist() == [theirs[:, part].sum(1).tolist() for part in parts]
    shares = PoolHits(sizes, 1, asked[:1], {"acc": generator.integers(0, SHARE_LEVELS + 1, (1, 17))})
    found = shares.merge_neighbouring_groups(shares=True).right_counts["acc"][0]
    first = np.average(shares.right_counts["acc"][0, :2], weights=asked[0, :2])
    assert abs(found[0] - first) <= 0.5


def test_many_images_are_grouped_until_they_fit():
    generator = np.random.default_rng(1)
    asked = generator.poisson(8, (2, 200_000))
    right = {name: generator.binomial(asked, 0.6) for name in ("joint", "alone", "calibrated")}
    small = PoolHits(np.full(10, 20), 1, asked[:, :200], {name: values[:, :200] for name, values in right.items()})
    hits = ImageHits(
        {"base": PoolHits(np.full(160, 1250), 1, asked, right), "novel": small}, right_counts_are_shares=False
    ).group_to_fit_result_file()
    length = {name: sum(map(len, pool.packed_arrays.values())) for name, pool in hits.pools.items()}
    assert sum(length.values()) <= MAX_STORED_CHARACTERS < 2.5 * sum(length.values())
    assert hits.pools["novel"].images_per_group == 1 < hits.pools["base"].images_per_group
    assert hits.pools["base"].right_counts["joint"].sum() == right["joint"].sum()


@pytest.mark.parametrize("calibrate", [False, True])
def test_results_have_them_and_they_add_up_to_the_counts(calibrate, clusters, work):
    label = api.run("imprint", f"{clusters / 'clusters.toml'}:clusters-1shot", work=work, calibrate=calibrate).label
    (path,) = work.home.results.rglob(f"{label}.seed-0.json")
    result = read_result(path)
    hits = result.images.to_image_hits()
    for side in ("base", "novel"):
        counts, pool = result.to_hit_counts(), hits.pools[side]
        assert pool.query_counts.sum() == len(counts) * getattr(counts, f"{side}_queries")
        assert pool.right_counts["joint"].sum() == counts.count_array(f"{side}_joint").sum()
        assert pool.right_counts["calibrated"].sum() == counts.count_array(f"calibrated_{side}").sum()
    broken = msgspec.structs.replace(result.images.pools["base"], asked=result.images.pools["base"].right["joint"])
    images = msgspec.structs.replace(result.images, pools={**result.images.pools, "base": broken})
    assert "images: base" in find_first_contradiction(msgspec.structs.replace(result, images=images))
    assert find_first_contradiction(msgspec.structs.replace(result, images=None)) is None, "older files have none"
    frame = result.images_to_pandas()
    hits = frame[frame.pool == "base"]
    assert (hits.asked * hits.joint).sum() / 100 == pytest.approx(
        result.to_hit_counts().count_array("base_joint").sum()
    )
    last = frame[(frame.pool == "novel") & (frame.half == 1)].iloc[-1]
    pool = result.images.pools["novel"]
    sizes = result.images.to_image_hits().pools["novel"].images_per_class
    assert (last["class"], last.image + last.images) == (len(sizes) - 1, sizes.sum())
    assert last.image % pool.step == (sizes[:-1].sum()) % pool.step
