"""The error of a block's output: its definition in float64, and what it sees where a plain sum of squares does not."""

from __future__ import annotations

import pytest
import torch
from tests.compressx.references import channel_weights_reference, relative_errors_reference

from compressx.numerics.output_error import channel_weights, relative_errors


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def residual_stream(*shape: int) -> torch.Tensor:
    """As in Gemma 3: one channel is hundreds of times larger than the others, and so is one token."""
    x = normal(*shape)
    x[..., 3] = 300.0 + x[..., 3]
    x[0, 0] *= 1000.0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_that_of_its_definition_in_float64(dtype):
    target = residual_stream(2, 5, 8).to(dtype)
    output = (target.double() * (1 + 0.1 * normal(2, 5, 8, seed=1))).to(dtype)
    channels = channel_weights([target[:1], target[1:]])
    expected = channel_weights_reference(target)
    torch.testing.assert_close(channels.double(), expected, rtol=1e-5, atol=0)
    errors = relative_errors_reference(output, target, expected)
    torch.testing.assert_close(relative_errors(output, target, channels).double(), errors, rtol=1e-5, atol=0)


def test_the_error_and_its_gradient_are_those_of_float32_while_products_are_bfloat16():
    target = normal(2, 5, 8).float()
    output = (1.001 * target).requires_grad_(True)
    channels = channel_weights([target])
    told = []
    for narrow in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            errors = relative_errors(output, target, channels)
            (gradient,) = torch.autograd.grad(errors.mean(), output)
        told.append((errors.detach(), gradient))
    assert told[1][0].dtype == torch.float32
    assert torch.equal(told[0][0], told[1][0])
    assert torch.equal(told[0][1], told[1][1])


def test_a_channel_hundreds_of_times_larger_than_the_others_is_not_all_that_is_seen():
    target = residual_stream(4, 64, 8)
    plain, weighted = [], []
    for channel in range(8):
        output = target.clone()
        output[..., channel] = 0.0
        plain.append(float(relative_errors(output, target, torch.ones(8)).mean()))
        weighted.append(float(relative_errors(output, target, channel_weights([target])).mean()))
    assert sum(plain) == pytest.approx(1.0)
    assert sum(weighted) == pytest.approx(1.0)
    assert max(plain) > 10_000 * min(plain)
    assert max(weighted) < 1_000 * min(weighted)


def test_what_a_channel_counts_does_not_depend_on_the_sizes_of_tokens():
    target = residual_stream(4, 64, 8)
    sizes = normal(4, 64, 1, seed=1).exp()
    torch.testing.assert_close(channel_weights([target * sizes]), channel_weights([target]))


def test_tokens_and_channels_without_any_size_have_finite_errors():
    target = residual_stream(2, 5, 8)
    target[0, 1], target[..., 5] = 0.0, 0.0
    channels = channel_weights([target])
    assert channels.isfinite().all()
    assert relative_errors(target + 1.0, target, channels).isfinite().all()
    assert (relative_errors(target, target, channels) == 0.0).all()
    nothing = channel_weights([torch.zeros(1, 2, 4)])
    assert relative_errors(torch.ones(1, 2, 4), torch.zeros(1, 2, 4), nothing).isfinite().all()


def test_the_shares_are_those_of_all_processes_tokens():
    target, theirs = residual_stream(2, 6, 8), torch.zeros(8, dtype=torch.float64)
    channel_weights([target[:, :2]], theirs.add_)
    torch.testing.assert_close(channel_weights([target[:, 2:]], lambda x: x.add_(theirs)), channel_weights([target]))


def test_a_token_without_size_counts_as_it_is():
    target = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])
    errors = relative_errors(target + 1.0, target, torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(errors, torch.tensor([[3.0, 3 / 41]]))
