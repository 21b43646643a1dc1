"""The feature bank against the network itself."""

from __future__ import annotations

import io
import os
import threading

import msgspec
import numpy as np
import pytest
import torch

from ifsl_bench.backbones import features as features_module
from ifsl_bench.backbones.features import (
    ClassMoments,
    compute_class_moments,
    compute_features,
    make_base_classifier,
    make_feature_pool,
)
from ifsl_bench.backbones.trainer import pretrain
from ifsl_bench.data.preparing.prepare import open_or_build
from ifsl_bench.protocols.episode_loader import EpisodeLoader
from ifsl_bench.protocols.sampling.episodes import EpisodeSampler
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.utils.checkpoint import CheckpointFolder
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.progress import LogReporter, Reporter
from ifsl_bench.utils.serialization import write_checksummed

CPU = torch.device("cpu")


@pytest.fixture
def few(hues, monkeypatch):
    """(home, task, dataset, pretraining) of colour images, 20 in base/val, in batches of eight."""
    monkeypatch.setattr(features_module, "BATCH_SIZE", 8)
    home, task = Paths.locate(hues / "home"), load_tasks("hues.toml")[0]
    dataset = open_or_build(home, task.dataset, Reporter())
    return home, task, dataset, pretrain(home, task, dataset, "linear", 0, CPU, Reporter())


def test_bank_holds_the_networks_outputs(few):
    home, task, dataset, pretrained = few
    bank = compute_features(home, task, dataset, pretrained, "base/val", CPU, Reporter())
    pool = dataset.pool("base/val")
    assert bank.shape == (20, 256)
    assert bank.dtype == np.float32
    assert isinstance(bank, np.memmap)
    rows = [0, 5, 7, 8, 19]
    with torch.no_grad():
        images = (torch.from_numpy(pool.images[rows]).float() / 255 - 0.5) / 0.2
        expected = pretrained.network(images.permute(0, 3, 1, 2))
    # float32 sums of up to 1,728 terms (192 channels of 3x3), in another order in a batch of another size
    np.testing.assert_allclose(bank[rows], expected.numpy(), atol=2e-4)


def test_bank_is_reused_and_rebuilt_when_damaged(few):
    home, task, dataset, pretrained = few
    first = np.array(compute_features(home, task, dataset, pretrained, "base/val", CPU, Reporter()))
    log = io.StringIO()
    compute_features(home, task, dataset, pretrained, "base/val", CPU, LogReporter(log))
    assert log.getvalue() == ""
    path = home.features / pretrained.pretraining_key / "base-val" / "features.npy"
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    again = compute_features(home, task, dataset, pretrained, "base/val", CPU, LogReporter(log))
    assert "features.npy is not what was written" in log.getvalue()
    np.testing.assert_array_equal(first, again)


def test_views_are_augmented_copies(few):
    """Without crops each view of an image is the image or its mirror image; row v * n + i is a view of image i."""
    home, task, dataset, pretrained = few
    task = msgspec.structs.replace(task, pretraining=msgspec.structs.replace(task.pretraining, flip=True))
    plain = compute_features(home, task, dataset, pretrained, "base/val", CPU, Reporter())
    views = compute_features(home, task, dataset, pretrained, "base/val", CPU, Reporter(), n_views=2)
    assert views.shape == (40, 256)
    images = np.ascontiguousarray(dataset.pool("base/val").images[:, :, ::-1])
    with torch.no_grad():
        mirrored = pretrained.network(pretrained.normalise_images(torch.from_numpy(images))).numpy()
    # float32 sums in batches of another size, as above
    same = [np.abs(views - np.tile(features, (2, 1))).max(1) < 2e-4 for features in (plain, mirrored)]
    assert (same[0] ^ same[1]).all()
    assert 5 < same[0].sum() < 35
    assert not np.array_equal(same[0][:20], same[0][20:]), "each view is drawn by itself"


def test_of_two_runs_at_once_that_keep_moments_neither_takes_the_others_half_written_file(tmp_path, monkeypatch):
    bank, starts = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), np.array([0, 3, 6])
    write_checksummed(tmp_path / "bank.json", {"sha256": "0" * 64})
    replace_file, second_ended, seconds = os.replace, threading.Event(), []

    def wait_for_the_second(*paths):
        if not seconds:
            seconds.append(threading.Thread(target=keep_at_once))
            seconds[0].start()
            second_ended.wait(0.5)  # in vain where the second waits for the first
        replace_file(*paths)

    def keep_at_once():
        compute_class_moments(tmp_path, bank, starts, Reporter())
        second_ended.set()

    monkeypatch.setattr(os, "replace", wait_for_the_second)
    first = compute_class_moments(tmp_path, bank, starts, Reporter())
    seconds[0].join()
    assert torch.equal(CheckpointFolder(tmp_path / "moments").load().tensors["means"], torch.from_numpy(first.means))


def test_base_covariance_is_that_of_images_about_their_class_means_and_is_kept(few):
    home, task, dataset, pretrained = few
    bank = compute_features(home, task, dataset, pretrained, "base/val", CPU, Reporter())
    pool, folder, log = dataset.pool("base/val"), home.features / pretrained.pretraining_key / "base-val", io.StringIO()
    first = compute_class_moments(folder, bank, pool.class_starts, LogReporter(log))
    labels = np.asarray(pool.labels)
    apart = np.concatenate([bank[labels == k] - bank[labels == k].mean(0, dtype=np.float64) for k in range(5)])
    # float64 sums over all images, which lose their number times eps, and a hundred times that where terms cancel
    np.testing.assert_allclose(first.covariance, np.cov(apart, rowvar=False, bias=True), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(first.counts, np.bincount(labels))
    base = make_base_classifier(pretrained, first)
    assert base.covariance.dtype == torch.float32
    assert base.to(dtype=torch.float64).covariance.dtype == torch.float64
    # What is kept is not computed again, bit by bit the same, and not taken for another bank's.
    again = compute_class_moments(folder, np.zeros_like(bank), pool.class_starts, LogReporter(log))
    assert all(np.array_equal(x, vars(again)[name]) for name, x in vars(first).items())
    assert log.getvalue() == ""
    for pattern in ("*.json", "*.safetensors"):
        (path,) = (folder / "moments").glob(pattern)
        path.write_bytes(path.read_bytes()[:-30])
        repaired = compute_class_moments(folder, bank, pool.class_starts, LogReporter(log))
        assert np.array_equal(repaired.covariance, first.covariance)
        assert "computed again" in log.getvalue()
        log.truncate(0)
    store = CheckpointFolder(folder / "moments")
    store.write_tensors(
        {name: value + 1 for name, value in store.load().tensors.items()}, {"features_sha256": "another"}
    )
    assert np.array_equal(compute_class_moments(folder, bank, pool.class_starts, LogReporter(log)).means, first.means)


def test_views_in_episodes_stay_with_their_image(few):
    _, task, dataset, pretrained = few
    pool = dataset.pool("base/val")
    numbered = np.repeat(np.arange(len(pool), dtype=np.float32)[:, None], 256, 1)
    base = make_base_classifier(pretrained, ClassMoments.from_features(numbered, pool.class_starts))
    stacked = np.concatenate([numbered, numbered, numbered])
    stacked[:, 1] = np.repeat([0, 1, 2], len(pool))
    features = make_feature_pool(stacked, pool, base, CPU)
    assert features.n_views == 3
    sampler = EpisodeSampler(("x", "train", 0), task.episode, 1, pool.class_starts, pool.class_starts, hide=True)
    batch, drawn = EpisodeLoader(sampler, features, features).load_batch(0, 40), sampler.sample(0, 40)
    assert torch.equal(batch.support.features[..., 0].long(), drawn.support)
    assert torch.equal(batch.query.features[..., 0].long(), drawn.query)
    assert set(batch.query.features[..., 1].flatten().tolist()) == {0.0, 1.0, 2.0}
