"""Both losses against autograd through the whole layer, on every supported geometry, and their probes exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import pytest
import torch
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.drawn import normal, rotary
from tests.compressx_attnprune.signs import expected_outer_products, gauss_newton_matrix
from tests.pairs import pairs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compressx import Rows, find_projections
from compressx_attnprune import attention as attention_module
from compressx_attnprune import layer, losses
from compressx_attnprune.attention import (
    Attention,
    Norm,
    Pair,
    Projection,
    place,
    project,
    queries_and_keys,
    random_signs_,
    values,
)
from compressx_attnprune.losses import Loss, MatrixLoss, OutputLoss

HEAD_DIM, VALUE_DIM, WIDTH, OUT, TOKENS = 4, 3, 6, 5, 7
KINDS = ["matrix", "output"]


@pytest.fixture(autouse=True)
def _short_row_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_module, "ROWS", 12)


def geometry(name: str, tokens: int = TOKENS) -> Attention:
    """Describe a small layer: 4 query heads and 2 key heads of 4 features, unless the name says otherwise."""
    query, key = Projection(4, normal(16, seed=12)), Projection(2, normal(8, seed=13))
    plain = Attention(query, key, HEAD_DIM, scaling=0.8, rotary=rotary(tokens, HEAD_DIM))
    norms = [
        Norm(normal(h, 1, HEAD_DIM, seed=14), 1e-3, normal(h, 1, HEAD_DIM, seed=15), centered=True) for h in (4, 2)
    ]
    return {
        "grouped": plain,
        "own keys": replace(plain, query=replace(query, heads=2, bias=None), key=replace(key, bias=None)),
        "multi-query": replace(plain, key=Projection(1), rotary=rotary(tokens, 2, interleaved=True),
            rotary_interleaved=True),
        "window": replace(plain, window=3),
        "window of a row block": replace(plain, window=4),
        "softcap": replace(plain, softcap=2.0),
        "softcap and window": replace(plain, softcap=2.0, window=3),
        "sinks": replace(plain, sinks=normal(4, seed=16)),
        "sinks, softcap and window": replace(plain, sinks=normal(4, seed=16), softcap=1.5, window=5),
        "gates": replace(plain, gate=(normal(4 * VALUE_DIM, WIDTH, seed=17), normal(4 * VALUE_DIM, seed=18))),
        "norms": replace(plain, query=replace(query, norm=norms[0]), key=replace(key, norm=norms[1])),
        "norms over all heads": replace(plain, rotary=None, query=replace(query, norm=replace(norms[0], whole=True)),
            key=replace(key, norm=replace(norms[1], whole=True))),
    }[name]  # fmt: skip


GEOMETRIES = (
    "grouped", "own keys", "multi-query", "window", "window of a row block", "softcap", "softcap and window", "sinks",
    "sinks, softcap and window", "gates", "norms", "norms over all heads",
)  # fmt: skip


def weights(attention: Attention, seed: int) -> Pair:
    query, key = (normal(s.heads * HEAD_DIM, WIDTH, seed=seed + i) for i, s in enumerate(attention.sides))
    return query, key


def output_loss(attention: Attention, value_dim: int = VALUE_DIM) -> OutputLoss:
    h, h_kv = attention.query.heads, attention.key.heads
    return OutputLoss(
        attention,
        normal(h_kv * value_dim, WIDTH, seed=20),
        normal(h_kv * value_dim, seed=21),
        normal(OUT, h * value_dim, seed=22),
    )


def make(kind: str, attention: Attention) -> Loss:
    """Make a loss; the fused kernel is for values as wide as heads."""
    width = HEAD_DIM if "fused" in kind and attention.gate is None else VALUE_DIM
    return MatrixLoss(attention) if kind == "matrix" else output_loss(attention, width)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the same loss or geometry with tensors of another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype)
    if isinstance(value, tuple):
        return tuple(cast(x, dtype) for x in value)
    return replace(value, **{n: cast(x, dtype) for n, x in vars(value).items()}) if is_dataclass(value) else value


def compared(loss: Loss, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Compute what the loss compares the slow way: whole matrices, or what they make of the values, [batch, ...]."""
    attention = loss.attention
    p = attention_module.attention_matrices(attention, q, k)
    if isinstance(loss, MatrixLoss):
        return p
    assert isinstance(loss, OutputLoss)
    v = values(attention, x, loss.value_weight, loss.value_bias)
    mixed = (p @ v.repeat_interleave(attention.groups, dim=1)).transpose(1, 2).flatten(2)  # [b, tokens, h * value_dim]
    if attention.gate is not None:
        weight, bias = attention.gate
        mixed = mixed * torch.sigmoid(x @ weight.T + (0.0 if bias is None else bias))
    return mixed @ loss.output_weight.T


def reference(loss: Loss, x: Tensor, dense: Pair, pruned: Pair) -> tuple[Tensor, Tensor]:
    """Compute error and norm, differentiable."""
    before, after = (compared(loss, x, *queries_and_keys(loss.attention, x, w)) for w in (dense, pruned))
    return (after - before).square().sum(), before.square().sum()


def drop_some(pair: Pair) -> Pair:
    generator = torch.Generator().manual_seed(0)
    query, key = (w * (torch.rand(w.shape, generator=generator) < 0.6) for w in pair)
    return query, key


def check_gradients(loss: MatrixLoss, x: Tensor, dense: Pair, pruned: Pair) -> None:
    leaves = (pruned[0].clone().requires_grad_(), pruned[1].clone().requires_grad_())
    error, norm = reference(loss, x, dense, leaves)
    expected = torch.autograd.grad(error / norm / 2, leaves)
    value, gradients = loss.gradients(x, dense, pruned)
    assert float(value) == pytest.approx((error / norm).item(), rel=1e-10)
    assert value > 1e-3
    for got, wanted in zip(gradients, expected, strict=True):
        assert wanted.norm() > 1e-6
        assert (got - wanted).norm() <= 1e-10 * wanted.norm()


def check_probe(loss: OutputLoss, x: Tensor, dense: Pair) -> None:
    """Hold a probe of the output against autograd's gradient for the same signs."""
    attention = loss.attention
    projected = [p.requires_grad_() for p in project(attention, x, dense)]
    output = compared(loss, x, *place(attention, (projected[0], projected[1])))
    signs = random_signs_(torch.empty_like(output), torch.Generator().manual_seed(3))
    expected = torch.autograd.grad(output, projected, signs)
    for got, wanted in zip(loss.probe(x, dense, torch.Generator().manual_seed(3)), expected, strict=True):
        assert wanted.norm() > 1e-6
        assert (got - wanted).norm() <= 1e-10 * wanted.norm()


def recorded(architecture: str) -> tuple[Tensor, Pair, OutputLoss]:
    """Record a tiny model's last layer in float64: inputs, dense weights, the loss on its output."""
    record = blocks.record(architecture, index=2, sequences=2)
    projections = find_projections(record.block)
    bias = projections.value.bias
    loss = OutputLoss(
        cast(layer.describe(record.block), torch.float64),
        projections.value.weight.double(),
        None if bias is None else bias.double(),
        Rows(projections.output).weight.double(),
    )
    return record.x.double(), blocks.weights(record.block, torch.float64), loss


@pytest.mark.parametrize("architecture", blocks.EVERY)
def test_gradients_and_probes_equal_autograd_on_every_architecture(architecture: str):
    x, dense, output = recorded(architecture)
    check_gradients(MatrixLoss(output.attention), x, dense, drop_some(dense))
    check_probe(output, x, dense)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_and_probes_equal_autograd_in_every_geometry(name: str):
    attention = geometry(name, tokens=30)
    x, dense = normal(3, 30, WIDTH, seed=1), weights(attention, 2)
    check_gradients(MatrixLoss(attention), x, dense, weights(attention, 4))
    for value_dim in (VALUE_DIM, HEAD_DIM):
        if attention.gate is None or value_dim == VALUE_DIM:
            check_probe(output_loss(attention, value_dim), x, dense)


@pytest.mark.parametrize("kind", [*KINDS, "output by the fused kernel"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_errors_of_several_candidates_are_those_of_whole_matrices_and_values(name: str, kind: str):
    attention = geometry(name)
    loss, x, dense = make(kind, attention), normal(3, TOKENS, WIDTH, seed=1), weights(attention, 2)
    candidates = [weights(attention, 4), drop_some(dense), dense]
    errors, norm = loss.errors(x, dense, candidates)
    expected = [reference(loss, x, dense, c) for c in candidates]
    assert errors.tolist() == pytest.approx([float(e) for e, _ in expected], rel=1e-10)
    assert float(norm) == pytest.approx(float(expected[0][1]), rel=1e-10)
    assert errors[2] == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_outer_products_of_probes_are_the_gauss_newton_matrices_of_each_token(name: str, kind: str):
    """In expectation over all signs, exactly, back through rotary embedding and norm to what a weight makes.

    Of the Jacobian of all that is compared by all queries or all keys these are the blocks of one token of one head
    with itself; what two tokens or two heads do together is dropped.
    """
    attention = geometry(name)
    loss, x, dense = make(kind, attention), normal(1, TOKENS, WIDTH, seed=1), weights(attention, 2)

    def function(query: Tensor, key: Tensor) -> Tensor:
        return compared(loss, x, *place(attention, (query[None], key[None])))[0]

    query, key = project(attention, x, dense)
    expected = gauss_newton_matrix(function, query[0], key[0])
    got = expected_outer_products(lambda: loss.probe(x, dense, torch.Generator()))
    for matrices, wanted in zip(got, expected, strict=True):
        assert wanted.norm() > 1e-2
        torch.testing.assert_close(matrices[0], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_relative_errors_in_parts_are_those_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch):
    attention = geometry("grouped")
    loss, x = cast(make(kind, attention), torch.float32), normal(7, TOKENS, WIDTH, seed=1).float()
    dense, *candidates = (cast(weights(attention, seed), torch.float32) for seed in (2, 4, 6))
    in_parts = losses.relative_errors(loss, x, dense, candidates)
    monkeypatch.setattr(losses, "SEQUENCES", 7)
    whole, norm = loss.errors(x, dense, candidates)
    assert in_parts == pytest.approx((whole / norm).tolist(), rel=1e-5)
    assert losses.relative_errors(loss, x, dense, candidates) == pytest.approx(in_parts, rel=1e-5)
    assert len(set(in_parts)) == 2


def test_dense_weights_that_give_nothing_at_all_have_no_relative_error():
    attention = geometry("grouped")
    loss = cast(replace(output_loss(attention), output_weight=torch.zeros(OUT, 4 * VALUE_DIM)), torch.float32)
    x, dense = torch.ones(2, TOKENS, WIDTH), cast(weights(attention, 2), torch.float32)
    assert losses.relative_errors(loss, x, dense, [dense, dense]) == [0.0, 0.0]


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes, in elements; what a kernel holds in itself is not seen."""

    of_any = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.of_any = max(self.of_any, made.untyped_storage().nbytes() // made.element_size())
        return result


DRAWS: dict[str, Callable[[Loss, Tensor, Pair], object]] = {
    "errors": lambda loss, x, w: loss.errors(x, w, [w]),
    "gradients": lambda loss, x, w: MatrixLoss(loss.attention).gradients(x, w, w),
    "probe": lambda loss, x, w: loss.probe(x, w, torch.Generator()),
}


@pytest.mark.parametrize(
    ("draw", "name", "kind", "value_dim"), pairs(DRAWS, ["grouped", "window", "softcap"], KINDS, [HEAD_DIM, VALUE_DIM])
)
def test_memory_grows_with_the_tokens_and_not_with_their_square(draw: str, name: str, kind: str, value_dim: int):
    for tokens in (128, 256):
        attention = geometry(name, tokens)
        loss = output_loss(attention, value_dim) if kind == "output" else MatrixLoss(attention)
        with Largest() as largest:
            DRAWS[draw](loss, normal(2, tokens, WIDTH, seed=1), weights(attention, 2))
        # Of all heads; whole matrices take 4 * tokens^2.
        assert 0 < largest.of_any <= 4 * attention_module.ROWS * tokens


class NoSharedKeys(TorchFunctionMode):
    """Lets fused attention in float32 be what it is on CUDA in some versions of torch: for shared keys, not fused."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args
        shared = not q.shape[1] == k.shape[1] == v.shape[1]
        with sdpa_kernel(SDPBackend.MATH if shared else SDPBackend.FLASH_ATTENTION):
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["grouped", "own keys", "multi-query"])
def test_memory_grows_with_the_tokens_where_fused_attention_takes_no_shared_keys(name: str):
    tokens = 256
    loss, x = cast(output_loss(geometry(name, tokens), HEAD_DIM), torch.float32), normal(2, tokens, WIDTH, seed=1)
    pair = cast(weights(loss.attention, 2), torch.float32)
    with NoSharedKeys(), Largest() as largest:
        loss.errors(x.float(), pair, [pair])
    assert 0 < largest.of_any <= 4 * attention_module.ROWS * tokens
