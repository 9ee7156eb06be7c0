"""What operators and calls do on the pretended device: what CUDA refuses is refused, and the rest is the CPU's."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from tests.accelerator import Record, pretended_accelerator
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CUDA = torch.device("cuda", 0)
MIXED = "Expected all tensors to be on the same device"


@pytest.fixture
def device() -> Iterator[Record]:
    with pretended_accelerator() as record:
        yield record


def there(*shape: int) -> torch.Tensor:
    return torch.rand(*shape).to("cuda")


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: there(3) + torch.ones(3),
        lambda: torch.ones(3) * there(3),
        lambda: there(()) * torch.ones(3),
        lambda: there(2, 3) @ torch.ones(3, 2),
        lambda: there(3).add_(torch.ones(3)),
        lambda: torch.ones(3).add_(there(3)),
        lambda: torch.ones(()).add_(there(())),
        lambda: torch.where(torch.ones(3, dtype=torch.bool), there(3), 0.0),
        lambda: torch.cat([there(3), torch.ones(3)]),
        lambda: torch.mm(there(2, 2), there(2, 2), out=torch.empty(2, 2)),
        lambda: there(3).masked_fill(torch.ones(3, dtype=torch.bool), 0.0),
        lambda: torch.ones(3)[torch.zeros(2, dtype=torch.int64, device="cuda")],
        lambda: there(3).index_select(0, torch.zeros(2, dtype=torch.int64)),
        lambda: there(3).gather(0, torch.zeros((), dtype=torch.int64)),
        lambda: functional.embedding(torch.zeros(2, dtype=torch.int64), there(4, 3)),
        lambda: functional.linear(there(2, 3), torch.ones(4, 3)),
        lambda: functional.mse_loss(there(3), torch.ones(3)),
        lambda: nn.Linear(3, 3)(there(2, 3)),
        lambda: torch.equal(there(3), torch.ones(3)),
        lambda: there(3) + torch.ones(3, device="meta"),
    ],
)
def test_tensors_of_different_devices_are_refused(device, mixed):
    with pytest.raises(RuntimeError, match=MIXED):
        mixed()


@pytest.mark.parametrize(
    "allowed",
    [
        lambda: there(3) + torch.tensor(2.0),
        lambda: torch.tensor(2.0) * there(3),
        lambda: torch.where(there(3) > 0.5, there(3), torch.tensor(0.0)),
        lambda: there(3)[torch.tensor([0, 2])],
        lambda: there(3)[torch.tensor([True, False, True])],
        lambda: there(3).index_put_((torch.tensor([0]),), there(1)),
        lambda: there(3).copy_(torch.ones(3)),
        lambda: there(3).masked_fill(there(3) > 0.5, torch.tensor(0.0)),
    ],
)
def test_numbers_and_indices_of_the_host_are_taken_as_cuda_takes_them(device, allowed):
    assert allowed().device == CUDA


def test_a_generator_of_another_device_is_refused(device):
    here, own = torch.Generator().manual_seed(0), torch.Generator("cuda").manual_seed(0)
    assert (here.device.type, own.device) == ("cpu", CUDA)
    for draw in (
        lambda: torch.rand(3, device="cuda", generator=here),
        lambda: torch.randperm(3, device="cuda", generator=here),
        lambda: there(3).normal_(generator=here),
        lambda: torch.rand(3, generator=own),
    ):
        with pytest.raises(RuntimeError, match="device type for generator but found"):
            draw()
    first = torch.rand(3, device="cuda", generator=own)
    again = torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    assert torch.equal(first, again)


def test_the_device_draws_from_a_generator_of_its_own(device):
    torch.cuda.manual_seed(3)
    host = torch.get_rng_state()
    first = functional.dropout(torch.ones(50, device="cuda")), torch.rand(4, device="cuda")
    assert torch.equal(host, torch.get_rng_state())
    torch.cuda.manual_seed(3)
    assert torch.equal(functional.dropout(torch.ones(50, device="cuda")), first[0])
    state = torch.cuda.get_rng_state()
    assert torch.equal(torch.rand(4, device="cuda"), first[1])
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first[1])
    torch.manual_seed(5)  # seeds every device
    first = torch.rand(4, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device="cuda"), first)


def test_tensors_say_where_they_are(device):
    x = torch.zeros(2, 3, device="cuda:0")
    assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (CUDA, True, False, 0)
    for made in (
        x.new_zeros(3), x.new_tensor([1.0]), torch.empty_like(x), torch.tensor([1, 2], device="cuda"),
        torch.as_tensor([1.0], device=CUDA), torch.arange(3, device=x.device), x.double(), x.T[0], x.to("cuda"),
        torch.ones(3).cuda(), torch.as_tensor(torch.ones(3), device="cuda"), torch.ones(3).to(x), x.clone(),
    ):  # fmt: skip
        assert made.device == CUDA
    for made in (torch.zeros(3), x.cpu(), x.to("cpu"), torch.zeros_like(x, device="cpu"), torch.tensor([1.0])):
        assert (made.device.type, type(made)) == ("cpu", torch.Tensor)
    assert x.to("cuda") is x
    with torch.device("cuda"):
        assert torch.zeros(3).device == CUDA
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(3, device="cuda:1")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()


def test_hooks_of_a_parameter_outlive_new_data() -> None:
    with pretended_accelerator():
        parameter, seen = torch.nn.Parameter(torch.ones(3, device="cuda")), []
        for number in range(2):
            parameter.data = parameter.data * 2
            hook = parameter.register_hook(lambda gradient, number=number: seen.append(number))
            parameter.sum().backward()
            hook.remove()
    assert seen == [0, 1]


def test_a_module_goes_to_the_device_and_back_with_its_parameters_the_same_objects(device):
    layer = nn.Linear(3, 2)
    held, before = layer.weight, layer.weight.detach().clone()
    layer.to("cuda")
    assert layer.weight is held
    assert (held.device, isinstance(held, nn.Parameter), held.requires_grad) == (CUDA, True, True)
    layer.to(torch.bfloat16)
    assert (held.device, held.dtype) == (CUDA, torch.bfloat16)
    copied = copy.deepcopy(layer)
    copied.weight.data.zero_()
    assert copied.weight.device == CUDA
    assert isinstance(copied.weight, nn.Parameter)
    layer.cpu()
    assert layer.weight is held
    assert (held.device.type, type(held)) == ("cpu", nn.Parameter)
    assert torch.equal(held, before.to(torch.bfloat16))
    layer.weight.data = torch.ones(2, 3, device="cuda")
    assert (layer.weight is held, held.device) == (True, CUDA)


def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = (x @ w).view(2, 8, 4, 4).transpose(1, 2)
    out = functional.scaled_dot_product_attention(q, q[:, :2], q[:, 2:], is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2).reshape(2, 8, 16)
    return functional.cross_entropy(
        functional.layer_norm(out[:, ::2], (16,)).flatten(0, 1), torch.arange(8).to(x.device)
    )


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_those_of_the_cpu(device, recomputed):
    x, w = torch.randn(2, 8, 16), torch.randn(16, 16)
    found = []
    for where in ("cpu", "cuda"):
        weight, given = w.clone().to(where).requires_grad_(), x.to(where)
        torch.manual_seed(7)
        loss = checkpoint(attend, given, weight, use_reentrant=False) if recomputed else attend(given, weight)
        loss.backward()
        (again,) = torch.autograd.grad(attend(given, weight), [weight])
        assert weight.grad.device.type == where
        found.append((loss.detach().cpu(), weight.grad.cpu(), again.cpu()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_hooks_of_a_backward_pass_may_name_the_device(device):
    x = there(3).requires_grad_()
    x.register_hook(lambda gradient: gradient * torch.tensor([1.0, 0.0, 2.0], device="cuda"))
    x.sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 2.0]


def test_autocast_narrows_the_products_of_the_device_as_the_cpu_narrows_its_own(device):
    a, b = torch.randn(4, 64), torch.randn(64, 4)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = a @ b
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        product = a.to("cuda") @ b.to("cuda")
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("cuda")
            wide = a.to("cuda") @ b.to("cuda")
    assert torch.equal(product.cpu(), narrow)
    assert torch.equal(wide.cpu(), a @ b)
    assert not torch.is_autocast_enabled("cuda")


def test_products_of_halves_may_be_summed_in_float32_as_on_cuda(device):
    a = torch.randn(3, 8).to("cuda", torch.bfloat16)
    product = torch.mm(a, a.T, out_dtype=torch.float32)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.cpu(), a.cpu().float() @ a.cpu().float().T)


def test_views_and_writing_in_place_reach_the_same_numbers(device):
    x = torch.zeros(4, 4, device="cuda")
    x[1].view(2, 2)[0] = 3.0
    x[:, 0][x[:, 1] > 0] = torch.tensor([7.0], device="cuda")
    x.T[2:].fill_(1.0)
    expected = torch.zeros(4, 4)
    expected[1, :2] = 3.0
    expected[1, 0] = 7.0
    expected[:, 2:] = 1.0
    assert torch.equal(x.cpu(), expected)


def test_a_tensor_outlives_its_device_unusable_and_says_so():
    with pretended_accelerator():
        x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="of a pretended accelerator that is off; use it within its `with`"):
        x + 1
