"""Each recipe's loss against a plain loop in double precision, and the traps of each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifsl_bench.backbones.contract import Backbone
from ifsl_bench.backbones.recipe import Recipe, TrainingStep, View
from ifsl_bench.recipes.alice import Alice, number_class_pairs
from ifsl_bench.recipes.closer import Closer
from ifsl_bench.recipes.cross_entropy import CrossEntropy
from ifsl_bench.recipes.etf import Etf, make_simplex
from ifsl_bench.recipes.fact import Fact
from ifsl_bench.recipes.losses import simclr_loss, supervised_contrastive_loss
from ifsl_bench.recipes.rotation import Rotation
from ifsl_bench.recipes.savc import Savc
from ifsl_bench.recipes.supcon import SupCon

CLASSES, IMAGES, SIZE = 4, 10, 6
EXACT = 1e-10  # double precision, sums of a few hundred terms
LABELS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 0])


class Small(Backbone):
    """Three stages: a linear map, a tanh, a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 7
        self.first, self.last = nn.Linear(3 * SIZE * SIZE, 9), nn.Linear(9, 7)

    @property
    def stages(self):
        return [lambda x: self.first(x.flatten(1)), torch.tanh, self.last]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1))))


def made(kind: type[Recipe], **options) -> Recipe:
    """A recipe in double precision on a small network."""
    torch.manual_seed(3)
    return kind(Small(), CLASSES, **options).double()


def views(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(count)]


def at(step: int = 5) -> TrainingStep:
    return TrainingStep(step, 10, 0, np.random.default_rng(step))


def log_share(scores: list[float], own: int) -> float:
    """-log softmax of one of some scores, the largest taken off."""
    top = max(scores)
    return math.log(sum(math.exp(s - top) for s in scores)) - (scores[own] - top)


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.detach(), b.detach()
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def value(terms: dict[str, Tensor]) -> float:
    return float(sum(terms.values()).detach())


def test_cross_entropy() -> None:
    recipe, (images,) = made(CrossEntropy, smoothing=0.1), views(1)
    logits = recipe.head(recipe.backbone(images)).tolist()
    expected = 0.0
    for row, y in zip(logits, LABELS.tolist(), strict=True):
        target = [0.1 / CLASSES + 0.9 * (k == y) for k in range(CLASSES)]
        expected += sum(share * log_share(row, k) for k, share in enumerate(target)) / IMAGES
    assert value(recipe.loss([images], LABELS, at())) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("margin", [0.3, -0.2])
def test_cosine_with_a_margin(margin: float) -> None:
    recipe, (images,) = made(CrossEntropy, head="cosine", temperature=16.0, margin=margin), views(1)
    features, expected = recipe.backbone(images), 0.0
    for h, y in zip(features, LABELS.tolist(), strict=True):
        scores = [16 * (cosine(h, w) - margin * (k == y)) for k, w in enumerate(recipe.head.weight)]
        expected += log_share(scores, y) / IMAGES
    assert value(recipe.loss([images], LABELS, at())) == pytest.approx(expected, abs=EXACT)
    assert not recipe.head.scale.requires_grad


def mixed_loss(logits: list[list[float]], partners: np.ndarray, share: float, smoothing: float) -> float:
    """Cross-entropy of images that are mixed with others, label by label."""
    expected = 0.0
    for row, y, partner in zip(logits, LABELS.tolist(), partners, strict=True):
        for k in range(CLASSES):
            own = share * (k == y) + (1 - share) * (k == int(LABELS[partner]))
            expected += (smoothing / CLASSES + (1 - smoothing) * own) * log_share(row, k)
    return expected / IMAGES


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_mixup(smoothing: float) -> None:
    recipe, (images,), random = made(CrossEntropy, mixup=0.4, smoothing=smoothing), views(1), np.random.default_rng(5)
    partners = random.permutation(IMAGES)
    share = random.beta(0.4, 0.4)
    logits = recipe.head(recipe.backbone(share * images + (1 - share) * images[partners])).tolist()
    expected = mixed_loss(logits, partners, share, smoothing)
    assert value(recipe.loss([images], LABELS, at())) == pytest.approx(expected, abs=EXACT)


def test_cutmix_counts_the_pixels_that_it_covers() -> None:
    recipe, (images,) = made(CrossEntropy, cutmix=1.0), views(1)
    for step in range(20):
        mixed, partners, share = recipe._mix_images(images, at(step).random)
        covered = (mixed != images).all(1) | (partners == torch.arange(IMAGES))[:, None, None]
        for i, partner in enumerate(partners.tolist()):
            assert bool((mixed[i] == torch.where(covered[i], images[partner], images[i])).all())
            if partner != i:
                assert 1 - float(covered[i].double().mean()) == pytest.approx(share, abs=EXACT)


def test_the_share_of_cutmix_weighs_both_labels() -> None:
    recipe, (images,) = made(CrossEntropy, cutmix=1.0), views(1)
    mixed, partners, share = recipe._mix_images(images, at().random)
    expected = mixed_loss(recipe.head(recipe.backbone(mixed)).tolist(), partners, share, 0.0)
    assert 0 < share < 1
    assert value(recipe.loss([images], LABELS, at())) == pytest.approx(expected, abs=EXACT)


def test_jitter_is_of_the_views() -> None:
    assert made(CrossEntropy, jitter=0.4).views == (View(jitter=0.4),)
    assert made(CrossEntropy).views == Recipe.views == (View(),)
    with pytest.raises(ValueError, match="jitter is from 0 to 1"):
        made(CrossEntropy, jitter=2.0)


@pytest.mark.parametrize("angles", [2, 4])
def test_rotation(angles: int) -> None:
    recipe, (images,) = made(Rotation, angles=angles), views(1)
    expected = 0.0
    for image, y in zip(images, LABELS.tolist(), strict=True):
        for r in range(angles):
            turned = torch.from_numpy(np.rot90(image.numpy(), r * 4 // angles, (1, 2)).copy())
            logits = recipe.head(recipe.backbone(turned[None]))[0].tolist()
            expected += log_share(logits, y * angles + r) / (IMAGES * angles)
    assert value(recipe.loss([images], LABELS, at())) == pytest.approx(expected, abs=EXACT)
    # The cosine of two embedded images is the mean over turns of the cosines.
    embedded = recipe.embed(images[:2])
    turns = [recipe.backbone(torch.rot90(images[:2], r * 4 // angles, (2, 3))) for r in range(angles)]
    assert cosine(*embedded) == pytest.approx(np.mean([cosine(*features) for features in turns]), abs=EXACT)
    assert embedded.norm(dim=1).tolist() == pytest.approx([1, 1], abs=EXACT)
    assert made(Rotation, turns=False).embed(images).shape == (IMAGES, 7)


def test_images_that_are_not_square_cannot_be_turned() -> None:
    with pytest.raises(ValueError, match="not square"):
        made(Rotation).rotate_images(torch.zeros(1, 3, 4, 6))
    assert made(Rotation, angles=2).rotate_images(torch.zeros(1, 3, 4, 6)).shape == (2, 3, 4, 6)


def contrast(z: Tensor, same: np.ndarray, temperature: float) -> float:
    """Supervised contrastive loss of rows [n, D] of length one, pair by pair."""
    total, anchors = 0.0, 0
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        scores = [float(z[i] @ z[j]) / temperature for j in others]
        positive = [n for n, j in enumerate(others) if same[i, j]]
        if positive:
            total += sum(log_share(scores, n) for n in positive) / len(positive)
            anchors += 1
    return total / anchors


def test_contrastive_losses() -> None:
    z = F.normalize(torch.randn(3, IMAGES, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64), dim=2)
    labels, images = LABELS.repeat(3).numpy(), np.tile(np.arange(IMAGES), 3)
    expected = contrast(z.flatten(0, 1), labels[:, None] == labels, 0.2)
    assert float(supervised_contrastive_loss(z, LABELS, 0.2)) == pytest.approx(expected, abs=EXACT)
    expected = contrast(z.flatten(0, 1), images[:, None] == images, 0.07)
    assert float(simclr_loss(z, 0.07)) == pytest.approx(expected, abs=EXACT)


def test_closer() -> None:
    recipe, seen = made(Closer, alpha=0.3, beta=0.7), views(3)
    features, labels = recipe.backbone(torch.cat(seen)), LABELS.repeat(3).tolist()
    ce = sum(
        log_share([32 * cosine(h, w) for w in recipe.weight], y) for h, y in zip(features, labels, strict=True)
    ) / len(labels)
    pairs = [
        cosine(features[i], features[j])
        for i in range(len(labels)) for j in range(len(labels)) if labels[i] != labels[j]
    ]  # fmt: skip
    unit, images = F.normalize(features, dim=1), np.tile(np.arange(IMAGES), 3)
    terms = recipe.loss(seen, LABELS, at())
    assert float(terms["ce"]) == pytest.approx(ce, abs=EXACT)
    assert float(terms["contrast"]) == pytest.approx(0.3 * contrast(unit, images[:, None] == images, 1 / 32), abs=EXACT)
    assert float(terms["closeness"]) == pytest.approx(-0.7 * np.mean(pairs), abs=EXACT)


def test_pairs_are_numbered_each_once() -> None:
    pairs = [(i, j) for i in range(6) for j in range(i + 1, 6)]
    first, second = torch.tensor(pairs).T
    assert (
        number_class_pairs(first, second, 6).tolist()
        == list(range(15))
        == number_class_pairs(second, first, 6).tolist()
    )


def test_alice() -> None:
    recipe, seen, random = made(Alice, projector=False, mixing=2), views(2), np.random.default_rng(5)
    assert len(recipe.weight) == CLASSES + CLASSES * (CLASSES - 1) // 2
    numbers = {
        pair: CLASSES + n for n, pair in enumerate((i, j) for i in range(CLASSES) for j in range(i + 1, CLASSES))
    }
    images, targets = list(torch.cat(seen)), LABELS.tolist() * 2
    for _ in range(2):
        for view in seen:
            partners, shares = random.permutation(IMAGES), None
            shares = random.beta(20, 20, IMAGES)
            for i, partner in enumerate(partners):
                a, b = int(LABELS[i]), int(LABELS[partner])
                if a != b:
                    images.append(shares[i] * view[i] + (1 - shares[i]) * view[partner])
                    targets.append(numbers[min(a, b), max(a, b)])
    expected = 0.0
    for h, y in zip(recipe.backbone(torch.stack(images)), targets, strict=True):
        scores = [30 * (cosine(h, w) - 0.4 * (k == y)) for k, w in enumerate(recipe.weight)]
        expected += log_share(scores, y) / len(targets)
    assert value(recipe.loss(seen, LABELS, at())) == pytest.approx(expected, abs=EXACT)


def test_alice_has_a_projector_that_is_dropped_at_test() -> None:
    recipe, seen = made(Alice, mixing=0), views(2)
    assert [(layer.in_features, layer.out_features) for layer in recipe.projector if isinstance(layer, nn.Linear)] == [
        (7, 2048), (2048, 2048)
    ]  # fmt: skip
    features = recipe.backbone(torch.cat(seen))
    hidden = features @ recipe.projector[0].weight.T + recipe.projector[0].bias
    first = ((hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()).clamp_min(0)
    hidden = first @ recipe.projector[3].weight.T + recipe.projector[3].bias
    projected = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    expected = sum(
        log_share([30 * (cosine(h, w) - 0.4 * (k == y)) for k, w in enumerate(recipe.weight)], y)
        for h, y in zip(projected, LABELS.tolist() * 2, strict=True)
    )
    assert len(recipe.weight) == CLASSES  # none are mixed
    assert value(recipe.loss(seen, LABELS, at())) == pytest.approx(expected / (2 * IMAGES), abs=EXACT)
    assert torch.equal(recipe.eval().embed(seen[0]), recipe.backbone(seen[0]))


def test_simplex() -> None:
    corners = make_simplex(20, 24).double()
    expected = torch.full((20, 20), -1 / 19, dtype=torch.float64).fill_diagonal_(1)
    torch.testing.assert_close(corners @ corners.T, expected, atol=1e-6, rtol=0)  # single precision
    with pytest.raises(ValueError, match="25 classes need as many features"):
        make_simplex(25, 24)


def test_etf() -> None:
    recipe, (images,) = made(Etf, total=6), views(1)
    h = recipe.neck(recipe.backbone(images))
    expected = sum(
        10 * 0.5 * (cosine(row, recipe.corners[y]) - 1) ** 2 for row, y in zip(h, LABELS.tolist(), strict=True)
    )
    # The corners are of length one to single precision.
    assert value(recipe.loss([images], LABELS, at())) == pytest.approx(expected / IMAGES, abs=1e-6)
    assert torch.equal(recipe.embed(images), h)  # the neck stays at test, or is an extra
    apart = made(Etf, total=6, neck="apart")
    assert torch.equal(apart.embed(images), apart.backbone(images))
    with pytest.raises(ValueError, match="total=3 is fewer than the 4 base classes"):
        made(Etf, total=3)


@pytest.mark.parametrize("mask", ["written", "released"])
def test_fact(mask: str) -> None:
    recipe, (images,) = made(Fact, total=7, mask=mask, balance=0.5, start=0.2), views(1)
    assert recipe.mask.sum(0).tolist() == [3, 3, 3]
    inner = [recipe.backbone.stages[1](recipe.backbone.stages[0](image[None]))[0] for image in images]
    first = second = virtual = back = 0.0
    for x, y in zip(inner, LABELS.tolist(), strict=True):
        scores = [16 * cosine(recipe.backbone.last(x), w) for w in recipe.weight]
        first += log_share(scores[:CLASSES], y) / IMAGES
        allowed = recipe.mask[y].tolist()
        worst = -math.inf if mask == "written" else 0.0
        choice = [s if ok else worst for s, ok in zip(scores[CLASSES:], allowed, strict=True)]
        others = [s for k, s in enumerate(scores) if k != y]
        second += log_share(others, CLASSES - 1 + int(np.argmax(choice))) / IMAGES
    random = np.random.default_rng(5)
    partners, share = random.permutation(IMAGES), random.beta(0.5, 0.5)
    pairs = [(i, j) for i, j in enumerate(partners) if LABELS[i] != LABELS[j]]
    for i, j in pairs:
        mixed = recipe.backbone.last(share * inner[i] + (1 - share) * inner[j])
        scores = [16 * cosine(mixed, w) for w in recipe.weight]
        nearest = CLASSES + int(np.argmax(scores[CLASSES:]))
        virtual += log_share(scores, nearest) / len(pairs)
        base = int(np.argmax(scores[:CLASSES]))
        back += log_share([s for k, s in enumerate(scores) if k != nearest], base) / len(pairs)
    terms = {name: float(term) for name, term in recipe.loss([images], LABELS, at()).items()}
    expected = {"ce": first, "second choice": 0.5 * second, "virtual": 0.5 * virtual, "back": 0.5 * back}
    assert terms == pytest.approx(expected, abs=EXACT)
    assert set(recipe.loss([images], LABELS, at(1))) == {"ce"}


def test_fact_trains_virtual_rows_on_mixed_images_alone() -> None:
    recipe, (images,) = made(Fact, total=7, start=0.0), views(1)
    terms = recipe.loss([images], LABELS, at())
    for name, moved in (("second choice", False), ("virtual", True), ("back", True)):
        (gradient,) = torch.autograd.grad(terms[name], recipe.weight, retain_graph=True, allow_unused=True)
        assert bool(gradient[CLASSES:].abs().sum() > 0) == moved, name


def test_supcon() -> None:
    recipe, seen = made(SupCon, hidden=11, width=5), views(2)
    features, labels = recipe.backbone(torch.cat(seen)), LABELS.repeat(2).numpy()
    z, images = F.normalize(recipe.projector(features), dim=1), np.tile(np.arange(IMAGES), 2)
    terms = recipe.loss(seen, LABELS, at())
    expected = 0.9 * contrast(z, labels[:, None] == labels, 0.2)
    assert float(terms["supcon"]) == pytest.approx(expected, abs=EXACT)
    expected = 0.1 * contrast(z, images[:, None] == images, 0.2)
    assert float(terms["simclr"]) == pytest.approx(expected, abs=EXACT)
    (gradient,) = torch.autograd.grad(terms["ce"], recipe.backbone.last.weight, allow_unused=True)
    assert gradient is None  # the classifier does not move the backbone


@pytest.mark.parametrize("crops", ["right", "released"])
def test_savc(crops: str) -> None:
    recipe, seen = made(Savc, queue=12, width=5, crops=crops), views(7)
    recipe.key_labels[:8] = torch.arange(8)
    with torch.no_grad():
        recipe.key_projector[0].weight.add_(0.1)  # no longer the trained one

    def turned(image: Tensor, r: int) -> Tensor:
        return image.flip(1, 2) if r else image

    def query(image: Tensor) -> Tensor:
        return F.normalize(recipe.projector(recipe.backbone(image[None])), dim=1)[0]

    def key(image: Tensor) -> Tensor:
        return F.normalize(recipe.key_projector(recipe.key_backbone(image[None])), dim=1)[0]

    def pull(q: Tensor, own: Tensor, label: int) -> float:
        """The loss of a query with its key, and with a queue."""
        positive = [float(q @ own) / 0.07]
        negative = []
        for other, its_label in zip(recipe.keys, recipe.key_labels.tolist(), strict=True):
            (positive if its_label == label else negative).append(float(q @ other) / 0.07)
        apart = sum(math.exp(s) for s in negative)
        return sum(math.log(1 + apart * math.exp(-s)) for s in positive) / len(positive)

    ce = large = small = 0.0
    for i, y in enumerate(LABELS.tolist()):
        for r in range(2):
            label, own = 2 * y + r, key(turned(seen[2][i], r))
            h = recipe.backbone(turned(seen[0][i], r)[None])[0]
            ce += log_share([16 * cosine(h, w) for w in recipe.weight], label) / (2 * IMAGES)
            large += pull(query(turned(seen[1][i], r)), own, label) / (2 * IMAGES)
            for crop in range(4):
                turn = r if crops == "right" else crop // 2  # released: two crops with each turn, whichever they have
                own = key(turned(seen[2][i], turn))
                small += pull(query(turned(seen[3 + crop][i], r)), own, 2 * y + turn) / (8 * IMAGES)
    terms = {name: float(term) for name, term in recipe.loss(seen, LABELS, at()).items()}
    assert terms == pytest.approx({"ce": ce, "contrast": 0.2 * large, "crops": 0.8 * small}, abs=EXACT)


def test_savc_means_cosines_over_turns_at_test() -> None:
    recipe, (images, *_) = made(Savc, queue=12, width=5), views(7)
    turns = [recipe.backbone(turned) for turned in (images[:2], images[:2].flip(2, 3))]
    embedded = recipe.embed(images[:2])
    assert cosine(*embedded) == pytest.approx(np.mean([cosine(*rows) for rows in turns]), abs=EXACT)
    assert embedded.norm(dim=1).tolist() == pytest.approx([1, 1], abs=EXACT)


def test_savc_refuses_a_queue_that_is_shorter_than_a_step() -> None:
    recipe = made(Savc, queue=2 * IMAGES - 1, width=5)
    recipe.loss(views(7), LABELS, at())
    with pytest.raises(ValueError, match="queue=19 is fewer than the 20 keys of a step"):
        recipe.after_step(at())


def test_savc_replaces_the_oldest_keys_and_follows_slowly() -> None:
    recipe, seen = made(Savc, queue=30, width=5), views(7)
    slow, fast = (module[0].weight.detach().clone() for module in (recipe.key_projector, recipe.projector))
    with torch.no_grad():
        recipe.projector[0].weight.add_(1.0)
    pushed = []
    for step in range(2):  # 20 keys a step
        recipe.loss(seen, LABELS, at(step))
        pushed.append(recipe.pending[0])
        recipe.after_step(at(step))
    assert int(recipe.next_key) == 10
    torch.testing.assert_close(recipe.keys, torch.cat([pushed[1][10:], pushed[0][10:], pushed[1][:10]]))
    expected = fast + 1.0
    for _ in range(2):
        slow = 0.995 * slow + 0.005 * expected
    torch.testing.assert_close(recipe.key_projector[0].weight, slow)


RECIPES = [Alice, Closer, CrossEntropy, Etf, Fact, Rotation, Savc, SupCon]


@pytest.mark.parametrize("kind", RECIPES)
def test_a_copy_of_the_state_gives_the_same_bits(kind: type[Recipe]) -> None:
    options = {"total": 7} if kind.knows_classes else {}
    recipe, seen = made(kind, **options), views(len(kind.views))
    recipe.loss(seen, LABELS, at(0))
    recipe.after_step(at(0))
    torch.manual_seed(99)  # initial values of the copy differ
    copy = kind(Small(), CLASSES, **options).double()
    copy.load_state_dict(recipe.state_dict())
    first, second = (r.loss(seen, LABELS, at(7)) for r in (recipe, copy))
    assert {name: float(term) for name, term in first.items()} == {name: float(term) for name, term in second.items()}


@pytest.mark.parametrize("kind", RECIPES)
def test_passes_are_those_that_are_made(kind: type[Recipe]) -> None:
    recipe = made(kind, **({"total": 7} if kind.knows_classes else {}))
    seen = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal seen
        seen += len(inputs[0])

    for name, module in recipe.named_modules():
        if name in ("backbone.last", "key_backbone.last"):
            module.register_forward_hook(count)
    labels = torch.arange(IMAGES) % CLASSES
    recipe.loss(views(len(kind.views)), labels, at(9))
    most = IMAGES * recipe.passes_per_step
    if kind is Savc:  # the made-up crops are as large as the images
        most *= 14 / recipe.passes_per_step
    assert seen <= most  # pairs of one class are not mixed
    assert seen > 0.7 * most
