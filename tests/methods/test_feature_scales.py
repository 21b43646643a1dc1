"""Features far from 1 in size: the answers of double precision, or a refusal in one line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ifsl_bench.backbones.features import ClassMoments
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.method import Base, Query, Support
from ifsl_bench.utils.cosine import cosine_similarities, normalise_exactly, normalise_with_epsilon
from ifsl_bench.utils.errors import UserError

K, N, SHOTS, D = 12, 5, 5, 64
SCALES = (1.0, 1e18, 1e30, 1e37, 1e-10, 1e-20, 1e-30, 1e-37)


def problem(scale: float, dtype: torch.dtype) -> tuple[Base, Support, Query]:
    """Classes around random centres, all multiplied by `scale` and rounded to float32, then of a precision."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(K + N, 1, D))
    images = scale * (centres + 1.5 * generator.normal(size=(K + N, 20, D)))
    x = torch.from_numpy(images.astype(np.float32)).to(dtype)
    moments = ClassMoments.from_features(x[:K].reshape(-1, D).numpy(), np.arange(0, 20 * K + 1, 20))
    means, counts, covariance = (torch.from_numpy(v).to(dtype) for v in vars(moments).values())
    base = Base(means, torch.zeros(K, dtype=dtype), means, 10.0, counts, covariance)
    support, queries = x[K:, :SHOTS].reshape(1, -1, D), x[:, SHOTS:].reshape(1, -1, D)
    hidden, labels = torch.zeros(1, K, dtype=torch.bool), torch.arange(N).repeat_interleave(SHOTS)[None]
    base_logits = (F.linear(part, means) for part in (support, queries))
    return base, Support(support, labels, hidden, next(base_logits)), Query(queries, next(base_logits))


def answers(name: str, scale: float, dtype: torch.dtype) -> torch.Tensor:
    base, support, query = problem(scale, dtype)
    return registry.get_method(name)(base, N)(support, query).logits[0].argmax(-1)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["ncm", "imprint", "teen"])
def test_methods_of_angles_do_not_see_the_scale(name, scale):
    """Of 255 queries one may have two logits that rounding tells apart."""
    expected = answers(name, 1.0, torch.float64)
    assert expected.unique().numel() == K + N  # no answer is that of numbers that are lost
    assert (answers(name, scale, torch.float32) != expected).sum() <= 1


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["protonet", "lda"])
def test_methods_of_distances_answer_as_in_double_precision_or_refuse(name, scale):
    if not 1e-12 < scale < 1e19:  # squares beyond float32, or of so few digits that answers would change
        with pytest.raises(UserError, match=f"{name} squares features.*multiply all features by"):
            answers(name, scale, torch.float32)
        return
    assert (answers(name, scale, torch.float32) != answers(name, scale, torch.float64)).sum() <= 1


@pytest.mark.parametrize("scale", SCALES)
def test_unit_vectors_are_those_of_double_precision(scale):
    generator = torch.Generator().manual_seed(0)
    v = scale * torch.randn(7, D, generator=generator)
    v[2], v[3] = 0, torch.randn(D, generator=generator)  # beside a zero vector and one of ordinary size
    for function in (normalise_with_epsilon, normalise_exactly):
        # Rounding to float32 of a length and a quotient; of features near 1e-37 some elements have lost digits before.
        torch.testing.assert_close(function(v).double(), function(v.double()), rtol=1e-6, atol=1e-12)
        assert torch.equal(function(v)[3], function(v[3:4])[0])
    assert torch.equal(normalise_exactly(v)[2], torch.zeros(D))
    torch.testing.assert_close(
        cosine_similarities(v, v), cosine_similarities(v.double(), v.double()).float(), rtol=0, atol=1e-6
    )


def test_the_gradient_of_unit_vectors_is_that_of_double_precision():
    v = torch.tensor([[3e25, -4e25], [3e-25, -4e-25], [3.0, -4.0]], requires_grad=True)
    w = v.detach().double().requires_grad_()
    for x in (v, w):
        (normalise_exactly(x) * torch.tensor([2.0, 1.0])).sum().backward()
    torch.testing.assert_close(v.grad.double(), w.grad, rtol=1e-6, atol=0)


def test_prototypes_that_are_zero_are_no_reason_to_refuse():
    base, support, query = problem(1.0, torch.float32)
    base = replace(base, prototypes=torch.zeros(K, D))
    assert registry.get_method("protonet")(base, N)(support, query).logits.isfinite().all()
