"""The dtype of matmuls: which is taken, and what it changes."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from compressx.blocks.fisher import gradients
from compressx.blocks.observe import linears_watched
from compressx.models import arithmetic
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.arithmetic import matmuls_in, rates, run_arithmetic
from compressx.models.blockwise import capture, each_block
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens

CPU = torch.device("cpu")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WITH = {"float32": 90e9, "bfloat16": 400e9, "float16": 10e9}
WITHOUT = {"float32": 90e9, "bfloat16": 10e9, "float16": 10e9}
MODERN_GPU = {"float32": 50e12, "bfloat16": 700e12, "float16": 700e12}
OLD_GPU = {"float32": 8e12, "bfloat16": 3e12, "float16": 60e12}


class Products(TorchDispatchMode):
    """Collects the dtypes of factors of matmuls; outer products, as of rotary angles, are none."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in function.name() for word in ("mm", "attention")) and args[0].shape[-1] > 1:
            self.seen |= {x.dtype for x in args[:2] if isinstance(x, torch.Tensor) and x.dtype.is_floating_point}
        return function(*args, **(kwargs or {}))


@pytest.fixture
def measured(monkeypatch):
    """Return a function that decides what the device was measured to do."""
    return lambda products: monkeypatch.setattr(arithmetic, "rates", lambda _: products)


@pytest.mark.parametrize(
    ("products", "weights", "training", "expected"),
    [
        (WITH, F32, True, "bfloat16"),
        (WITH, BF16, True, "bfloat16"),
        (WITH, BF16, False, "bfloat16"),
        (WITH, F16, True, "bfloat16"),
        (WITH, F16, False, "float32"),
        (WITHOUT, F32, True, "float32"),
        (WITHOUT, BF16, True, "float32"),
        (WITHOUT, BF16, False, "float32"),
        (MODERN_GPU, F16, False, "float16"),
        (MODERN_GPU, F16, True, "bfloat16"),
        (OLD_GPU, F16, False, "float16"),
        (OLD_GPU, F16, True, "float32"),
        (OLD_GPU, F32, True, "float32"),
        ({"float32": 10.0, "bfloat16": 14.9}, F32, True, "float32"),
        ({"float32": 10.0, "bfloat16": 15.1}, F32, True, "bfloat16"),
        ({"float32": 14.9, "bfloat16": 10.0}, BF16, False, "bfloat16"),
    ],
)
def test_another_dtype_is_taken_where_the_device_multiplies_it_half_again_as_fast(
    measured, products, weights, training, expected
):
    measured(products)
    chosen = run_arithmetic("auto", weights, CPU, training=training)
    assert chosen.dtype == expected
    assert chosen.rates.keys() == products.keys()


def test_nothing_is_measured_where_there_is_no_choice(monkeypatch):
    monkeypatch.setattr(arithmetic, "rates", None)
    assert run_arithmetic("auto", torch.float64, CPU, training=True).dtype == "float64"
    assert run_arithmetic("auto", F32, CPU, training=False).dtype == "float32", "masks are the same on every machine"
    chosen = run_arithmetic("float32", BF16, CPU, training=True)
    assert (chosen.dtype, chosen.reason, chosen.rates) == ("float32", "as the recipe says", {})


def test_rates_are_those_of_a_product_of_ones_own_and_measuring_leaves_threads_and_random_numbers_as_they_are():
    threads, state, x, weight, times = torch.get_num_threads(), torch.get_rng_state(), torch.ones(64, 1024), None, []
    weight = torch.ones(1024, 1024)
    found = rates.__wrapped__(CPU)
    assert found.keys() == WITH.keys()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    for _ in range(10):
        started = time.thread_time()
        functional.linear(x, weight)
        times.append(time.thread_time() - started)
    assert 1 / 4 < found["float32"] / (2 * 64 * 2**20 / min(times)) < 4


def test_a_dtype_that_a_device_cannot_multiply_has_the_rate_0_and_other_processes_do_not_count(monkeypatch):
    def without_bfloat16(x, weight):
        time.sleep(0.001)
        if x.dtype == BF16:
            raise RuntimeError("not implemented for 'BFloat16'")

    monkeypatch.setattr(functional, "linear", without_bfloat16)
    found = rates.__wrapped__(CPU)
    assert found["bfloat16"] == 0.0
    assert found["float32"] > 2 * 64 * 2**20 / 0.001, "the time that it sleeps is not its own"


@pytest.mark.parametrize("narrow", [BF16, F16], ids=str)
def test_a_wider_product_is_the_exact_one_rounded_once(narrow):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, 40, 40, generator=generator).to(narrow) for _ in range(2))
    part, bias = torch.nn.Linear(40, 40).to(narrow), torch.randn(40, generator=generator).to(narrow)
    exact = [x.double(), y.double()]
    with matmuls_in(F32, part, CPU):
        products = {
            "@": x @ y,
            "linear": functional.linear(x, y[0, 0], bias),
            "einsum": torch.einsum("abij,abjk->abik", x, y),
            "attention": functional.scaled_dot_product_attention(x, y, y, attn_mask=x),
            "module": part(x),
        }
    expected = {
        "@": exact[0] @ exact[1],
        "linear": functional.linear(exact[0], exact[1][0, 0], bias.double()),
        "einsum": exact[0] @ exact[1],
        "attention": functional.scaled_dot_product_attention(exact[0], exact[1], exact[1], attn_mask=exact[0]),
        "module": copy.deepcopy(part).double()(exact[0]),
    }
    for name, product in products.items():
        assert product.dtype == narrow, name
        torch.testing.assert_close(product.double(), expected[name], rtol=torch.finfo(narrow).eps, atol=1e-6)


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_a_16_bit_block_multiplies_in_float32_forwards_and_backwards(architecture):
    model = tiny_model(architecture, dtype=BF16)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found, batches = architecture_of(model), [tiny_tokens()]
    outputs = {}
    for products in (None, F32):
        access = InMemory(model, products)
        states, calls = capture(access, found, batches)
        block, (run,) = next(each_block(access, found, calls))
        x = states[0].clone().requires_grad_(True)
        with Products() as counted:
            out = run(x)
            (gradient,) = torch.autograd.grad(out.float().square().sum(), x)
        outputs[products] = out.detach().float(), gradient.float()
        assert out.dtype == gradient.dtype == BF16
    assert counted.seen == {F32}
    # They may be equal to the bit: 16-bit products are summed in float32, too. What was multiplied is in `seen`.
    for narrow, wide in zip(*outputs.values(), strict=True):
        assert float((narrow - wide).norm() / wide.norm()) < 0.02
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert block.module is next(iter(found.blocks.values()))


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
@pytest.mark.parametrize(("weights", "products"), [(F16, BF16), (BF16, F16)], ids=str)
def test_a_block_that_multiplies_in_the_other_dtype_of_16_bits_keeps_its_own(architecture, weights, products):
    model = tiny_model(architecture, dtype=weights)
    found = architecture_of(model)
    outputs = []
    for dtype in (None, products):
        access = InMemory(model, dtype)
        states, calls = capture(access, found, [tiny_tokens()])
        for _, (run,) in each_block(access, found, calls):
            with torch.no_grad(), Products() as counted:
                states = [run(*states)]
            assert states[0].dtype == weights
            assert (counted.seen & {BF16, F16}) == {dtype or weights}  # Falcon has products in float32 of its own
        outputs.append(states[0].float())
    apart = (outputs[0] - outputs[1]).norm(dim=-1) / outputs[0].norm(dim=-1)
    assert float(apart.median()) < 0.03  # rounding sends a few tokens to other experts


def test_the_gradient_of_the_loss_is_measured_with_the_same_products():
    model = tiny_model("llama", dtype=BF16)
    found = architecture_of(model)
    for products in (BF16, F32):
        with Products() as counted:
            gradients(InMemory(model, products), found, list(found.blocks), [tiny_tokens()])
        assert counted.seen == {products}


def test_fused_experts_are_observed_while_their_products_are_wider():
    model = tiny_model("mixtral", dtype=BF16)
    found = architecture_of(model)
    counts = []
    for products in (None, F32):
        access, seen = InMemory(model, products), {}
        states, calls = capture(access, found, [tiny_tokens()])
        block, (run,) = next(each_block(access, found, calls))
        with torch.no_grad(), linears_watched(block.linears, lambda name, x, seen=seen: seen.setdefault(name, x.shape)):
            run(states[0])
        counts.append(seen)
    assert counts[0] == counts[1]
    assert any("experts" in name for name in counts[1])


def test_weights_in_the_dtype_of_the_products_are_left_alone():
    for weights, products in ((BF16, BF16), (F32, F32), (F16, F16), (F32, None), (torch.float64, F32)):
        part = torch.nn.Linear(4, 4).to(weights)
        with matmuls_in(products, part, CPU), Products() as counted:
            part(torch.ones(2, 4, dtype=weights))
            assert not torch.is_autocast_enabled("cpu")
        assert counted.seen == {weights}
    part = torch.nn.Sequential(torch.nn.Linear(4, 4).to(BF16), torch.nn.Linear(4, 4))  # as a router in float32
    with matmuls_in(BF16, part, CPU):
        assert not torch.is_autocast_enabled("cpu")
