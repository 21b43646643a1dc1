"""Backbones with weights from elsewhere: their files, their images, their classifier, what they may have seen."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from ifsl_bench.backbones.contract import BackboneInfo, check_backbone, pretraining_corpora
from ifsl_bench.backbones.features import ClassMoments, make_base_classifier, make_feature_pool
from ifsl_bench.backbones.frozen import FrozenPreprocessing, copy_weights_to_home, pretrain_frozen
from ifsl_bench.backbones.heads import fit_head_with_facts
from ifsl_bench.backbones.pretrained import make_features_key, make_pretraining_key
from ifsl_bench.backbones.torchvision_zoo import Torchvision
from ifsl_bench.backbones.weights import read_tensors
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.plugin.registry import is_installed
from ifsl_bench.protocols.tasks.contamination import load_seen_table, seen_state_in_pretraining
from ifsl_bench.protocols.tasks.task_files import load_tasks, parse_tasks
from ifsl_bench.protocols.tasks.variants import TaskChanges, apply_task_changes, make_task_changes
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from tests.reporters import Messages

CPU = torch.device("cpu")
HERE = is_installed("timm")
with_timm = pytest.mark.skipif(not HERE, reason='timm is not installed: pip install "ifsl_bench[backbones]"')


class Labelled(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.labels)


class Images:
    """A data set of 40 x 32 colour images, one colour a class, in memory."""

    fingerprint, shape = "f" * 64, (40, 32, 3)

    def __init__(self, classes: int = 4, each: int = 6) -> None:
        rng = np.random.default_rng(0)
        self.manifest = {"pools": {"base/train": {"classes": list(range(classes)), "shape": [classes * each]}}}
        labels = np.repeat(np.arange(classes), each)
        colours = rng.integers(0, 255, (classes, 1, 1, 3))[labels] + rng.integers(-20, 20, (len(labels), *self.shape))
        starts = np.arange(0, len(labels) + 1, each)
        self._pool = SimpleNamespace(images=colours.clip(0, 255).astype(np.uint8), labels=labels, class_starts=starts)

    def has_pool(self, name):
        return name.startswith("base/")

    def check_image_checksum(self, name):
        pass

    def fingerprint_prefix_of_pool(self, name):
        return ""

    def pool(self, name):
        return Labelled(**vars(self._pool), name=name)


def glyphs(backbone, weights=None):
    return load_tasks("glyphs-5shot", TaskChanges(backbone=backbone, weights=weights))[0]


@pytest.fixture
def home(tmp_path):
    return Paths.locate(tmp_path / "home")


@pytest.fixture
def small(home, tmp_path):
    """The task on a small network of timm's with random weights, which a file has."""
    timm = pytest.importorskip("timm", reason='pip install "ifsl_bench[backbones]"')
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False).eval()
    save_file(network.state_dict(), tmp_path / "some.safetensors")
    return glyphs("timm:test_resnet", copy_weights_to_home(home, tmp_path / "some.safetensors")), network


@pytest.mark.slow("timm is imported")
def test_the_features_of_a_file_are_those_that_timm_computes_image_by_image(home, small):
    from timm.data import create_transform, resolve_data_config

    (task, network), data, messages = small, Images(), Messages()
    model = pretrain_frozen(home, task, data, "linear", CPU, messages)
    transform = create_transform(**resolve_data_config(model=network))
    images = torch.stack([transform(Image.fromarray(image)) for image in data.pool("base/train").images])
    with torch.no_grad():
        theirs = network.forward_head(network.forward_features(images), pre_logits=True).numpy()
    bank = np.load(home.features / model.features_key / "base-train" / "features.npy")
    assert np.abs(bank - theirs).max() < 0.02 * np.abs(theirs).max()  # Pillow rounds each pass, torchvision once
    assert np.corrcoef(bank.ravel(), theirs.ravel())[0, 1] > 0.9999
    assert "enlarged" in messages.warned[0]
    assert model.result_entry()["seen"] == "may"
    assert model.result_entry()["pretrained_on"] == ["unknown"]


@pytest.mark.slow("whole runs")
def test_both_heads_use_one_bank_of_features_and_a_second_run_computes_nothing(home, small, monkeypatch):
    task, data = small[0], Images()
    first = pretrain_frozen(home, task, data, "linear", CPU, Messages())
    monkeypatch.setattr("ifsl_bench.backbones.features._compute_batches", lambda *_: pytest.fail("computed again"))
    again = pretrain_frozen(home, task, data, "linear", CPU, Messages())
    torch.testing.assert_close(again.base_classifier.weight, first.base_classifier.weight)
    assert again.sha256 == first.sha256
    cosine_model = pretrain_frozen(home, task, data, "cosine", CPU, Messages())
    assert cosine_model.features_key == first.features_key == make_features_key(task, data.fingerprint, "cosine", 7)
    assert (
        cosine_model.pretraining_key
        != first.pretraining_key
        == make_pretraining_key(task, data.fingerprint, "linear", 7)
    )


@pytest.mark.slow("timm is imported")
def test_other_weights_at_the_same_place_are_other_features(home, small, tmp_path):
    task, data = small[0], Images()
    first = pretrain_frozen(home, task, data, "linear", CPU, Messages())
    (file,) = home.weights.iterdir()
    from safetensors.torch import load_file, save_file

    save_file({k: v * 1.5 if v.is_floating_point() else v for k, v in load_file(file).items()}, file)
    second = pretrain_frozen(home, task, data, "linear", CPU, Messages())
    assert second.training_record["weights"] != first.training_record["weights"]
    assert second.sha256 != first.sha256
    assert (second.base_classifier.weight - first.base_classifier.weight).abs().max() > 0


@with_timm
def test_the_weights_of_another_network_are_refused_and_nothing_is_listed(home, small, tmp_path, capfd):
    renamed = {f"part.{name}": value for name, value in small[1].state_dict().items()}
    for file, tensors, begins in (("a.pth", {"a": torch.zeros(3)}, r"a \[3\]"), ("b.pth", renamed, r"part\.conv")):
        torch.save(tensors, tmp_path / file)
        task = glyphs("timm:test_resnet", copy_weights_to_home(home, tmp_path / file))
        with pytest.raises(UserError, match=rf"holds the weights of another network .* the file with {begins}"):
            pretrain_frozen(home, task, Images(), "linear", CPU, Messages())
    assert not list(home.weights.glob("[0-9a-f]*.pth")), "no copy of what nothing can be made with"
    assert len("".join(capfd.readouterr())) < 500, "timm lists every tensor"


@with_timm
def test_weights_that_a_network_of_the_home_uses_stay_when_another_network_refuses_them(home, small, tmp_path):
    torch.save(small[1].state_dict(), tmp_path / "a.pth")
    digits = copy_weights_to_home(home, tmp_path / "a.pth")
    pretrain_frozen(home, glyphs("timm:test_resnet", digits), Images(), "linear", CPU, Messages())
    with pytest.raises(UserError, match="holds the weights of another network"):
        pretrain_frozen(home, glyphs("timm:test_efficientnet", digits), Images(), "linear", CPU, Messages())
    assert (home.weights / f"{digits}.pth").exists()


@pytest.mark.slow("whole runs")
def test_features_of_a_frozen_backbone_are_centred_unless_the_task_says_not(home, small):
    task, data = small[0], Images()
    plain = apply_task_changes(task, TaskChanges(centre="none"))
    assert plain.name == f"{task.name}+centre=none"
    assert plain.hash != task.hash
    assert apply_task_changes(task, TaskChanges(centre="mean")) is task, "what it does anyway has no name of its own"
    centred, raw = (pretrain_frozen(home, variant, data, "linear", CPU, Messages()) for variant in (task, plain))
    assert centred.features_key == raw.features_key, "one bank for both"
    assert centred.pretraining_key != raw.pretraining_key
    bank = np.load(home.features / raw.features_key / "base-train" / "features.npy")
    assert bank.mean() > 0, "of a ReLU"
    # kept as float32, of float64 sums in another order
    np.testing.assert_allclose(centred.base_feature_mean, bank.mean(0, dtype=np.float64), rtol=1e-6)
    assert raw.base_feature_mean is None
    assert (centred.result_entry()["centre"], raw.result_entry()["centre"]) == ("mean", "none")
    again = pretrain_frozen(home, task, data, "linear", CPU, Messages())
    np.testing.assert_array_equal(again.base_feature_mean, centred.base_feature_mean)
    pool = data.pool("base/train")
    moments = ClassMoments.from_features(bank, pool.class_starts)
    base = make_base_classifier(centred, moments)
    centred_pool = make_feature_pool(bank, pool, base, CPU, centred.base_feature_mean)
    # float32 means lose the number of images times eps
    torch.testing.assert_close(centred_pool.features.mean(0), torch.zeros(bank.shape[1]), rtol=0, atol=1e-5)
    of_class = torch.stack([centred_pool.features[a:b].mean(0) for a, b in itertools.pairwise(pool.class_starts)])
    torch.testing.assert_close(base.prototypes, of_class, rtol=1e-4, atol=1e-5)
    logits = centred_pool.features @ centred.base_classifier.weight.T + centred.base_classifier.bias
    torch.testing.assert_close(centred_pool.base_logits, logits)


def test_centring_is_for_frozen_backbones_and_leaves_other_tasks_as_they_are():
    usual = load_tasks("glyphs-5shot")[0]
    assert "centre" not in usual.definition()["pretraining"]
    assert "centre" not in usual.pretraining.definition_of_weights()
    for centre in ("mean", "none"):
        with pytest.raises(UserError, match="centre is for frozen backbones, and 'resnet-small' is pretrained here"):
            make_jobs(RunConfig(["imprint"], ["glyphs-5shot"], change=TaskChanges(centre=centre)))
    with pytest.raises(UserError, match="centre must be mean or none"):
        make_task_changes({"centre": "median"})


class _Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(("name", "content"), [
    ("a.pth", pickle.dumps(_Evil(), 2)), ("b.safetensors", b"\xff" * 64), ("c.pth", b""), ("d.bin", b"PK\x03\x04"),
    ("e.pth", b"name, value"),
])  # fmt: skip
def test_a_file_that_holds_no_weights_is_named_and_runs_nothing(tmp_path, capsys, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} holds no weights") as error:
        read_tensors(tmp_path / name)
    assert "weights_only" not in str(error.value), "advice that would run code"
    assert not capsys.readouterr().out


def test_where_a_source_cannot_be_reached_one_line_says_which_file_goes_where(home, monkeypatch):
    monkeypatch.setattr(Torchvision, "download_weights", lambda *_: (_ for _ in ()).throw(OSError("no route")))
    task = glyphs("torchvision:resnet18.IMAGENET1K_V1")
    with pytest.raises(UserError) as error:
        pretrain_frozen(home, task, Images(), "linear", CPU, Messages())
    message = str(error.value)
    assert "https://download.pytorch.org/models/resnet18-f37072fd.pth" in message
    assert f"put it at {home.weights}/torchvision:resnet18.IMAGENET1K_V1.pth" in message
    assert "\n" not in message


@pytest.mark.slow("a ResNet-18, and torchvision is imported")
def test_torchvisions_features_are_what_its_classifier_takes(home):
    import torchvision.models as zoo

    torch.manual_seed(0)
    network = zoo.get_model("resnet18", weights=None).eval()
    home.weights.mkdir(parents=True)
    torch.save(network.state_dict(), home.weights / "torchvision:resnet18.IMAGENET1K_V1.pth")
    data = Images(2, 3)
    model = pretrain_frozen(home, glyphs("torchvision:resnet18.IMAGENET1K_V1"), data, "linear", CPU, Messages())
    images = torch.from_numpy(data.pool("base/train").images).permute(0, 3, 1, 2)
    with torch.no_grad():
        theirs = network(zoo.ResNet18_Weights.IMAGENET1K_V1.transforms()(images))
        ours = network.fc(model.network(model.normalise_images(images.permute(0, 2, 3, 1))))
    # float32 sums of up to 4,608 terms (512 channels of 3x3), in another layout of memory
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert model.result_entry()["pretrained_on"] == ["imagenet-1k"]


def test_grey_images_get_three_equal_channels():
    describe = BackboneInfo((8, 8), 8, "bilinear", (0.5,) * 3, (0.25,) * 3, ())
    images = torch.randint(0, 256, (2, 8, 8, 1), dtype=torch.uint8)
    output = FrozenPreprocessing(describe, CPU)(images)
    torch.testing.assert_close(output, ((images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25).expand(2, 3, 8, 8))


def test_the_linear_classifier_is_the_minimum_that_scikit_learn_finds():
    from sklearn.linear_model import LogisticRegression

    rng, decay = np.random.default_rng(0), 5e-3
    labels = np.repeat(np.arange(5), 30)
    rows = rng.normal(size=(5, 12))[labels] + rng.normal(size=(150, 12))
    rows = (rows * np.logspace(-2, 2, 12) + 3).astype(np.float32)
    head, report = fit_head_with_facts("linear", rows, labels, 5, decay, CPU)
    theirs = LogisticRegression(C=1 / (decay * len(rows)), solver="newton-cg", tol=1e-10, max_iter=10_000).fit(
        rows.astype(np.float64), labels
    )
    assert report["converged"]
    with torch.no_grad():
        p = head(torch.from_numpy(rows)).softmax(1).numpy()
    # where the solver stops: a gradient of 1e-5, over the curvature that the decay gives, 5e-3
    np.testing.assert_allclose(p, theirs.predict_proba(rows.astype(np.float64)), atol=2e-3)


def test_the_cosine_classifier_fits_what_can_be_told_apart():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(5), 30)
    rows = (rng.normal(size=(5, 12))[labels] * 2 + rng.normal(size=(150, 12))).astype(np.float32)
    head, report = fit_head_with_facts("cosine", rows, labels, 5, 5e-4, CPU)
    with torch.no_grad():
        assert (head(torch.from_numpy(rows)).argmax(1).numpy() == labels).mean() > 0.95
    head = head.double()

    def value(scale: float) -> float:
        with torch.no_grad():
            head.scale.fill_(scale)
            return float(torch.nn.functional.cross_entropy(head(torch.from_numpy(rows).double()), torch.tensor(labels)))

    scale = head.scale.item()
    slope = (value(scale + 1e-3) - value(scale - 1e-3)) / 2e-3
    # the solver stops at a gradient of 1e-5, and differences over 1e-3 are off by about 1e-6
    assert abs(slope + 5e-4 * scale) < 2e-5, "decay holds the temperature"
    # float32 sums over 150 images, of a loss of order one
    assert abs(value(scale) + 5e-4 * scale**2 / 2 - report["loss"]) < 1e-4


@with_timm
@pytest.mark.parametrize(("name", "corpora"), [
    ("timm:vit_small_patch14_dinov2.lvd142m", ("lvd-142m",)),
    ("timm:resnet50.a1_in1k", ("imagenet-1k",)),
    ("timm:vit_base_patch16_clip_224.openai", ("unknown",)),
    ("timm:vit_base_patch16_clip_224.laion2b_ft_in12k_in1k", ("laion-2b", "imagenet-12k", "imagenet-1k")),
    ("timm:resnet50.fb_swsl_ig1b_ft_in1k", ("instagram", "imagenet-1k", "unknown")),
    ("timm:eva_giant_patch14_224.clip_ft_in1k", ("imagenet-1k", "unknown")),
    ("torchvision:resnet50.IMAGENET1K_V2", ("imagenet-1k",)),
    ("torchvision:regnet_y_16gf.IMAGENET1K_SWAG_LINEAR_V1", ("unknown",)),
    ("resnet-small", None),
])  # fmt: skip
def test_what_a_backbone_was_pretrained_on(name, corpora):
    assert pretraining_corpora(glyphs(name).pretraining) == corpora


@pytest.mark.parametrize(("corpora", "dataset", "verdict"), [
    (None, "mini-imagenet", "no"), (("imagenet-1k",), "mini-imagenet", "yes"),
    (("lvd-142m",), "tiered-imagenet", "yes"), (("lvd-142m",), "glyphs", "may"), (("lvd-1689m",), "cub-64", "yes"),
    (("merged-38m",), "cifar-fs", "yes"), (("merged-2b",), "mini-imagenet", "may"), (("jft-300m",), "tiny", "may"),
    (("unknown",), "mini-imagenet", "may"), (("laion-2b",), "cub", "may"), (("imagenet-21k",), "cub", "yes"),
    (("imagenet-1k",), "glyphs", "no"), (("imagenet-1k", "unknown"), "glyphs", "may"), ((), "glyphs", "may"),
    (("imagenet-1k",), "photos-of-mine", "may"),
])  # fmt: skip
def test_what_may_have_been_seen(corpora, dataset, verdict):
    assert seen_state_in_pretraining(corpora, dataset) == verdict


def test_the_table_of_what_was_seen_names_corpora_that_it_describes_with_sources():
    corpora = load_seen_table()["corpora"]
    for pair in load_seen_table()["pairs"]:
        assert set(pair["corpora"]) <= corpora.keys()
        assert pair["why"]
        assert pair["source"]
        assert pair["seen"] in ("yes", "no")
    assert all(set(entry.get("contains", ())) <= corpora.keys() for entry in corpora.values())


@with_timm
def test_every_name_of_timm_is_of_a_set_that_the_table_describes_and_a_strange_one_may_have_seen_anything():
    import timm

    from ifsl_bench.backbones.timm_zoo import corpora_of_tag

    for name in timm.list_models(pretrained=True):
        assert set(corpora_of_tag(name)) <= load_seen_table()["corpora"].keys()
    for tag in ("no_such_tag", "x_in1k", "clip_in1k", ""):
        assert corpora_of_tag(f"resnet50.{tag}")[-1] == "unknown"
        assert seen_state_in_pretraining(corpora_of_tag(f"resnet50.{tag}"), "glyphs") == "may"


def test_another_backbone_is_another_task():
    plain, resnet_task, timm_task = glyphs(None), glyphs("resnet10"), glyphs("timm:test_resnet", "0123456789abcdef")
    assert resnet_task.name == "glyphs-5shot+backbone=resnet10"
    assert timm_task.name == "glyphs-5shot+backbone=timm:test_resnet+weights=0123456789abcdef"
    assert load_tasks(timm_task.name)[0] == timm_task
    assert len({plain.hash, resnet_task.hash, timm_task.hash}) == 3
    assert timm_task.variant_of == "glyphs-5shot"
    assert load_tasks("glyphs-5shot+backbone=resnet-small")[0] == plain


@pytest.mark.parametrize("change", ["backbone=../up", "backbone=", "weights=xyz", "backbone=a/b"])
def test_names_that_are_no_backbones_are_refused(change):
    with pytest.raises(UserError):
        load_tasks(f"glyphs-5shot+{change}")


def test_features_take_no_other_backbone(minimal_task):
    for backbone in ("none", "included"):
        (task,) = parse_tasks(minimal_task.replace('"none"', f'"{backbone}"'), "x.toml")
        assert task.pretraining.backbone == backbone
        assert check_backbone(task.pretraining) is None
        assert apply_task_changes(task, TaskChanges(backbone=backbone)) == task
        with pytest.raises(UserError, match="'resnet10' is for images, and the data are features"):
            apply_task_changes(task, TaskChanges(backbone="resnet10"))


def test_what_was_seen_is_asked_of_the_data_set_that_novel_classes_are_from(home, small, monkeypatch):
    """And is not kept with the base classifier, which is that of both tasks."""
    monkeypatch.setattr("ifsl_bench.backbones.frozen.pretraining_corpora", lambda spec: ("imagenet-1k",))
    for novel_from, expected in ((None, "no"), ("cub", "yes"), (None, "no")):
        task = msgspec.structs.replace(small[0], novel_from=novel_from)
        assert pretrain_frozen(home, task, Images(), "linear", CPU, Messages()).result_entry()["seen"] == expected
    assert len(list(home.pretrained.glob("glyphs-*"))) == 1


OF_NORMS = ("running_mean", "running_var", "weight", "bias")


def by_lee(tensors, x):
    """The network of Lee et al. (CVPR 2019, MetaOptNet) in evaluation, from the tensors of a file of their code."""

    def normed(name, y):
        mean, var, scale, shift = (tensors[f"{name}.{part}"] for part in OF_NORMS)
        return ((y.movedim(1, -1) - mean) / (var + 1e-5).sqrt() * scale + shift).movedim(-1, 1)

    for layer in ("layer1.0", "layer2.0", "layer3.0", "layer4.0"):
        y = x
        for i in (1, 2, 3):
            y = normed(f"{layer}.bn{i}", F.conv2d(y, tensors[f"{layer}.conv{i}.weight"], padding=1))
            y = F.leaky_relu(y, 0.1) if i < 3 else y
        y = y + normed(f"{layer}.downsample.1", F.conv2d(x, tensors[f"{layer}.downsample.0.weight"]))
        x = F.max_pool2d(F.leaky_relu(y, 0.1), 2)
    return x.mean((2, 3))


@pytest.fixture(scope="module")
def lees():
    """Tensors as their code names them, with statistics of batch norm that are not those of a new network."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for i, (inner, outer) in enumerate(itertools.pairwise((3, 64, 160, 320, 640)), 1):
        shapes = (("conv1", inner, 3), ("conv2", outer, 3), ("conv3", outer, 3), ("downsample.0", inner, 1))
        for part, wide, size in shapes:
            weight = torch.randn(outer, wide, size, size, generator=generator) * (2 / (wide * size**2)) ** 0.5
            tensors[f"layer{i}.0.{part}.weight"] = weight
            norm = f"layer{i}.0." + {"downsample.0": "downsample.1"}.get(part, part.replace("conv", "bn"))
            for name in OF_NORMS:
                tensors[f"{norm}.{name}"] = 0.5 + torch.rand(outer, generator=generator)
    return tensors


@pytest.mark.slow("large networks are made")
@pytest.mark.parametrize("wrap", [
    lambda tensors: {"embedding": tensors, "head": {"scale": torch.ones(1)}},  # Lee et al.
    lambda tensors: {"params": {f"module.encoder.{k}": v for k, v in tensors.items()} | {"fc.weight": torch.ones(2)}},
])  # fmt: skip
def test_a_registered_network_takes_the_weights_of_the_code_that_it_follows(home, tmp_path, lees, wrap):
    torch.save(wrap(lees), tmp_path / "lee.pth")
    task, data = glyphs("resnet12", copy_weights_to_home(home, tmp_path / "lee.pth")), Images(2, 3)
    model = pretrain_frozen(home, task, data, "linear", CPU, Messages())
    images = torch.from_numpy(data.pool("base/train").images).permute(0, 3, 1, 2)
    theirs = by_lee(lees, (images / 255 - task.dataset.mean[0]) / task.dataset.std[0]).numpy()
    bank = np.load(home.features / model.features_key / "base-train" / "features.npy")
    # float32 sums of up to 5,760 terms (640 channels of 3x3), twelve in a row
    np.testing.assert_allclose(bank, theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max())
    assert model.features_key == make_features_key(task, data.fingerprint, "cosine", 3)
    other_task = msgspec.structs.replace(task, dataset=msgspec.structs.replace(task.dataset, mean=(0.4,)))
    assert make_features_key(other_task, data.fingerprint, "linear", 0) != model.features_key, "images enter otherwise"


@pytest.mark.parametrize(("change", "named"), [
    (lambda v: v.pop("layer3.0.bn2.running_var"), "missing: 1, such as layer3.0.bn2.running_var"),
    (lambda v: v.update({"layer1.0.conv1.weight": torch.ones(64, 1, 3, 3)}), "shape: 1, such as layer1.0.conv1"),
    (lambda v: v.update({"layer2.1.conv1.weight": torch.ones(1)}), "too many: 1, such as layer2.1.conv1.weight"),
    (lambda v: v.update({f"ema.{name}": x for name, x in v.items()}), "the network 2 times, under '' and 'ema.'"),
    (lambda v: [v.update({f"x{name}": v.pop(name)}) for name in list(v)], "missing: 80, .* the file with xlayer1.0"),
])  # fmt: skip
def test_tensors_that_do_not_fit_a_registered_network_are_named_in_one_line(home, tmp_path, lees, change, named):
    tensors = dict(lees)
    change(tensors)
    torch.save(tensors, tmp_path / "other.pth")
    task = glyphs("resnet12", copy_weights_to_home(home, tmp_path / "other.pth"))
    with pytest.raises(UserError, match=named) as error:
        pretrain_frozen(home, task, Images(), "linear", CPU, Messages())
    assert "weights of another network than resnet12" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_the_weights_of_a_file_have_seen_is_what_their_user_declares():
    digits = "0123456789abcdef"

    def marked(backbone, corpora):
        task = load_tasks("mini-5shot", TaskChanges(backbone=backbone, weights=digits, pretrained_on=corpora))[0]
        assert load_tasks(task.name)[0] == task
        return seen_state_in_pretraining(pretraining_corpora(task.pretraining), task.novel_data)

    for backbone in ("resnet12", "torchvision:resnet18"):
        answers = [
            marked(backbone, corpora) for corpora in (None, "base", "imagenet-1k", "base:photos-of-mine", "unknown")
        ]
        assert answers == ["may", "no", "yes", "may", "may"]
    plain, declared = (
        load_tasks("mini-5shot", TaskChanges(weights=digits, pretrained_on=x))[0] for x in (None, "base")
    )
    assert declared.name == f"mini-5shot+weights={digits}+pretrained-on=base"
    assert declared.hash != plain.hash
    assert make_pretraining_key(declared, "f", "linear", 0) == make_pretraining_key(plain, "f", "linear", 5), (
        "the same features"
    )
    assert "pretrained_on" not in plain.definition()["pretraining"]
    of = f'[variants.mine]\nof = "mini-5shot"\nweights = "{digits}"\npretrained_on = "base"\ncentre = "none"'
    (mine,) = parse_tasks(of, "x.toml")
    spec = mine.pretraining
    assert (spec.backbone, spec.weights, spec.pretrained_on, spec.centre) == ("resnet10", digits, "base", "none")
    with pytest.raises(UserError, match="pretrained-on must be"):
        parse_tasks(of.replace('"base"', '"of base classes"'), "x.toml")
    other_task = apply_task_changes(declared, TaskChanges(weights="f" * 16))
    assert other_task.pretraining.pretrained_on is None, "what is said of one file is not said of another"
    with pytest.raises(UserError, match="give it with --weights"):
        check_backbone(load_tasks("mini-5shot", TaskChanges(pretrained_on="base"))[0].pretraining)
    with pytest.raises(UserError, match=r"pretrained-on must be .* not 'Base classes'"):
        make_task_changes({"pretrained-on": "Base classes"})


def test_weights_are_not_for_features(minimal_task):
    (task,) = parse_tasks(minimal_task.replace('"none"', '"none"\nweights = "0123456789abcdef"'), "x.toml")
    with pytest.raises(UserError, match="is for features and takes no weights"):
        check_backbone(task.pretraining)
    with pytest.raises(UserError, match=r"pretraining\.pretrained_on 'all of it': base, a set such as imagenet-1k"):
        parse_tasks(minimal_task.replace('"none"', '"none"\npretrained_on = "all of it"'), "x.toml")


@with_timm
def test_a_frozen_network_must_say_which_weights():
    with pytest.raises(UserError, match=r"does not say which weights, e\.g\. timm:resnet50"):
        check_backbone(glyphs("timm:resnet50").pretraining)
    with pytest.raises(UserError, match="did you mean"):
        check_backbone(glyphs("timm:resnet50.a1_in2k").pretraining)
