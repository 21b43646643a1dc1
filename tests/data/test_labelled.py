"""Labelled images behind Python objects, as data sets of one's own: what comes out is what went in, or is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

import ifsl_bench
from ifsl_bench.data.pools import verify_checksums
from ifsl_bench.utils.errors import UserError
from tests.data.helpers import of_class

CLASSES, EACH, SIZE = {"train": 12, "val": 5, "test": 6}, 30, 10
UNIT, WHOLE = (lambda image: image.float() / 255), (lambda image: image.float())


class Pairs(Dataset):
    """(image, label) pairs; ``show`` makes the image of a tensor [C, H, W] uint8."""

    def __init__(self, images, labels, show=UNIT, **attributes) -> None:
        self.images, self.labels, self.show = images, labels, show
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i):
        return self.show(self.images[i]), self.labels[i]


def make(show=UNIT, channels: int = 3, **labels) -> list[Pairs]:
    """Three data sets of random images, classes in turn."""
    datasets = []
    for seed, (side, count) in enumerate(CLASSES.items()):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(0, 256, (count * EACH, channels, SIZE, SIZE + 2), generator=generator, dtype=torch.uint8)
        names = labels.get(side, range(count))
        datasets.append(Pairs(images, [names[i % count] for i in range(count * EACH)], show))
    return datasets


@pytest.fixture
def work(tmp_path):
    return ifsl_bench.workspace(tmp_path / "home", device="cpu")


def check(dataset, sides, filed=None) -> None:
    """Holds every pool against the images of its classes, in the order that the objects have them."""
    verify_checksums(dataset)
    parts = {"base/train": (0, 0.8), "base/val": (0.8, 0.9), "base/test": (0.9, 1)}
    for pool_name, entry in dataset.manifest["pools"].items():
        pool, side = dataset.pool(pool_name), "train" if pool_name.startswith("base") else pool_name[6:]
        data = sides[list(CLASSES).index(side)]
        first, last = parts.get(pool_name, (0, 1))
        labels = {f"{side}-{label}": label for label in data.labels}
        for name in entry["classes"]:
            rows = [i for i, label in enumerate(data.labels) if label == labels[name]]
            expected = data.images[rows[round(first * len(rows)) : round(last * len(rows))]]
            np.testing.assert_array_equal(of_class(pool, name), expected.permute(0, 2, 3, 1).numpy())


SHOWN = {
    "255ths": UNIT,
    "whole": WHOLE,
    "bfloat16": lambda image: image.bfloat16(),
    "int64": lambda image: image.long(),
    "graph": lambda image: image.float().requires_grad_(),
    "sparse": lambda image: image.float().to_sparse(),
    "tensor last": lambda image: image.permute(1, 2, 0),
    "array": lambda image: image.permute(1, 2, 0).numpy(),
    "array first": lambda image: image.numpy(),
    "Pillow": lambda image: Image.fromarray(image.permute(1, 2, 0).numpy()),
}


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_images_come_out_as_they_went_in(work, show):
    sides = make(show)
    dataset = ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    assert dataset.shape == (SIZE, SIZE + 2, 3)
    assert {name: len(dataset.pool(name)) for name in dataset.manifest["pools"]} == {
        "base/train": 12 * 24, "base/val": 12 * 3, "base/test": 12 * 3, "novel/val": 5 * 30, "novel/test": 6 * 30,
    }  # fmt: skip
    check(dataset, sides)


GREY = {
    "tensor": lambda image: image / 255,
    "flat": lambda image: image[0] / 255,
    "Pillow": lambda image: Image.fromarray(image[0].numpy()),
}


@pytest.mark.parametrize("show", GREY.values(), ids=GREY)
def test_grey_images_have_one_channel(work, show):
    sides = make(show, channels=1)
    dataset = ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    assert dataset.shape == (SIZE, SIZE + 2, 1)
    check(dataset, sides)


@pytest.mark.parametrize("show", [lambda i: i > 127, lambda i: (i > 127).float(), lambda i: (i > 127).byte()])
def test_one_is_white_where_nothing_is_brighter(work, show):
    sides = make(show, channels=1)
    dataset = ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    for side in sides:
        side.images = (side.images > 127) * torch.tensor(255, dtype=torch.uint8)
    check(dataset, sides)


def test_labels_are_anything_and_sides_have_classes_of_their_own(work):
    mixed = ["a", "b", 7, "7", 2.5, None, (1, 2), True, np.int64(40), torch.tensor(41), "c", "d"]
    sides = make(train=mixed, val=[10, 30, 20, 50, 40])
    dataset = ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    assert dataset.pool("novel/val").class_names == ("val-10", "val-20", "val-30", "val-40", "val-50")
    assert {"train-'7'", "train-7", "train-40", "train-41", "train-(1, 2)"} <= set(
        dataset.pool("base/test").class_names
    )
    assert len(dataset.pool("base/train").class_names) == 12
    sides[0].labels[5] = ["no key"]
    with pytest.raises(UserError, match=r"the label of image 5 of the train data set cannot be read \(TypeError"):
        ifsl_bench.from_learn2learn(sides, name="mine", work=work, force=True)


def test_other_objects_are_not_taken_for_those_a_data_set_was_made_from(work):
    sides = make()
    first = ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    assert ifsl_bench.from_learn2learn(make(), name="mine", work=work).manifest == first.manifest
    sides[1].images[3, 0, 0, 0] ^= 1
    with pytest.raises(UserError, match=r"from something else than these objects .*; force=True replaces it"):
        ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    sides[1].images[3, 0, 0, 0] ^= 1
    sides[2].labels[0], sides[2].labels[1] = sides[2].labels[1], sides[2].labels[0]
    with pytest.raises(UserError, match="from something else than these objects"):
        ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    again = ifsl_bench.from_learn2learn(sides, name="mine", work=work, force=True)
    assert again.fingerprint != first.fingerprint


def test_a_part_is_marked_and_never_given_for_the_whole(work):
    sides = make()
    for i in range(EACH - 9):
        sides[0].labels[i * 12] = 1  # of class 0, which keeps 9
    few = r"1 of 23 classes have fewer than 10 images: train-0 \(9\).*allow_partial=True"
    with pytest.raises(UserError, match=few):
        ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    dataset = ifsl_bench.from_learn2learn(sides, name="mine", work=work, allow_partial=True)
    assert dataset.is_partial
    assert "train-0" not in dataset.pool("base/train").class_names
    there = r"prepared already \(partial\) .*; allow_partial=True accepts that, force=True"
    with pytest.raises(UserError, match=there):
        ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    again = ifsl_bench.from_learn2learn(sides, name="mine", work=work, allow_partial=True)
    assert again.manifest == dataset.manifest


def test_an_interrupted_import_goes_on(work, monkeypatch):
    sides = make()
    whole = ifsl_bench.from_learn2learn(sides, name="whole", work=work)
    reads = []

    def stop(image):
        reads.append(1)
        if len(reads) == 2 * 23 * EACH - 10:
            raise KeyboardInterrupt
        return image / 255

    for side in sides:
        side.show = stop
    with pytest.raises(KeyboardInterrupt):
        ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    reads.clear()
    dataset = ifsl_bench.from_learn2learn(sides, name="mine", work=work)
    assert len(reads) == 23 * EACH + 6 * EACH  # all are looked at, those of novel/test are written
    assert dataset.fingerprint == whole.fingerprint


def changed(change) -> list:
    sides = make()
    return change(sides) or sides


WRONG = {
    "normalised": (lambda s: setattr(s[1], "show", lambda i: (i / 255 - 0.5) / 0.25), "image 0 of the val data set has "
                   "values from .*; images that were normalised, or resized as floats, cannot be undone"),
    "positive but normalised": (lambda s: setattr(s[1], "show", lambda i: i / 255 / 1.7), "has values from 0.* to 0.*, "
                                "expected whole numbers from 0 to 255, or 255ths from 0 to 1"),
    "two ranges": (lambda s: setattr(s[2], "show", WHOLE), "give all images one range"),
    "sizes": (lambda s: setattr(s[2], "images", s[2].images[..., :SIZE]), "image 0 of the test data set is 10 x 10 "
              "pixels of 3 channels, image 0 of the train data set is 12 x 10 pixels of 3 channels; images must be"),
    "features": (lambda s: setattr(s[0], "show", lambda i: i.flatten() / 255), r"is a torch.Tensor float32\[360\], e"),
    "meta": (lambda s: setattr(s[0], "show", lambda i: i.to("meta")), r"cannot be read \(NotImplementedError"),
    "no pair": (lambda s: [list(range(40))] * 3, r"image 0 of the train data set is a builtins.int, expected a pair"),
    "broken": (lambda s: setattr(s[0], "show", lambda i: 1 / 0), r"0 of the train data set cannot be read \(Zero"),
    "random": (lambda s: setattr(s[0], "show", lambda i: random.choice([i, i.flip(2), i.flip(1)]) / 255),
               "another one each time it is read; leave random steps out"),
    "few classes": (lambda s: [Subset(s[0], [i for i in range(360) if i % 12 < 9]), *s[1:]],
                    r"10 on base, .*; there are \d+: 9 on base, .*, by what was given"),
    "two": (lambda s: s[:2], "a list of three, .*; this one has 2"),
    "one object": (lambda s: s[0], "given as a list, .*, not as a .*Pairs"),
    "None": (lambda s: [None, *s[1:]], r"the train data set is a builtins.NoneType which cannot be read"),
    "order": (lambda s: [Pairs(d.images, d.labels, mode=m) for d, m in zip(s, ("test", "validation", "train"),
                         strict=True)], r"by their modes its objects are \['test', 'val', 'train'\]"),
    "a row too far": (lambda s: setattr(s[0], "labels_to_indices", {0: [360]}), "names image 360, it has 360"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_right_is_refused_in_one_line(work, change, message):
    random.seed(0)
    with pytest.raises(UserError, match=message) as caught:
        ifsl_bench.from_learn2learn(changed(change), name="mine", work=work)
    assert "\n" not in str(caught.value)
    assert not (work.home.data / "mine").exists()


# -- learn2learn's own wrappers


def test_what_wrappers_of_learn2learn_hold_is_what_is_taken(learn2learn, work):
    data = learn2learn.data
    sides = make()
    plain = ifsl_bench.from_learn2learn(sides, name="plain", work=work)
    tensors = [TensorDataset(UNIT(side.images), torch.tensor(side.labels)) for side in sides]
    wrapped = [
        data.Taskset(data.MetaDataset(tensors[0])),
        data.MetaDataset(data.OnDeviceDataset(tensors[1])),
        data.UnionMetaDataset([data.MetaDataset(tensors[2])]),
    ]
    dataset = ifsl_bench.from_learn2learn(wrapped, name="wrapped", work=work)
    assert dataset.fingerprint == plain.fingerprint
    filtered = [data.FilteredMetaDataset(data.MetaDataset(tensors[0]), list(range(10))), *tensors[1:]]
    dataset = ifsl_bench.from_learn2learn(filtered, name="filtered", work=work)
    assert dataset.pool("base/train").class_names == tuple(f"train-{c}" for c in range(10))
    whole = plain.pool("base/train")
    np.testing.assert_array_equal(dataset.pool("base/train").images, whole.images[: whole.class_starts[10]])
    union = [*tensors[:2], data.UnionMetaDataset([data.MetaDataset(tensors[2]), filtered[0]])]
    dataset = ifsl_bench.from_learn2learn(union, name="union", work=work)
    assert dataset.pool("novel/test").class_names == tuple(f"test-{c}" for c in range(16))
