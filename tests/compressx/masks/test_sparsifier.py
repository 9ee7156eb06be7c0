from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.two_of_four import KINDS, out_in, two_of_four
from torch import nn
from torch.ao.pruning import BaseSparsifier, WeightNormSparsifier
from torch.nn.utils import parametrize

from compressx.masks.maskset import MaskEntry, MaskSet, squash
from compressx.masks.sparsifier import MaskedWeight
from compressx.runtime.errors import ArtifactError
from compressx.testing import tiny_model, tiny_tokens

everywhere = pytest.mark.parametrize(("architecture", "dtype"), KINDS, ids=str)


def loss_of(model: Any) -> torch.Tensor:
    tokens = tiny_tokens()
    loss: torch.Tensor = model(tokens, labels=tokens).loss
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def prepared_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if parametrize.is_parametrized(module)]


@everywhere
def test_squashing_gives_exactly_the_weights_that_applying_gives(architecture: str, dtype: torch.dtype) -> None:
    applied, held = tiny_model(architecture, dtype=dtype), tiny_model(architecture, dtype=dtype)
    masks = two_of_four(applied)
    masks.apply(applied)
    sparsifier = masks.to_torch_ao(held)
    assert isinstance(sparsifier, BaseSparsifier)
    assert masks.deviations(held) == {}
    assert torch.equal(held(tiny_tokens()).logits, applied(tiny_tokens()).logits)
    sparsifier.squash_mask()
    expected = applied.state_dict()
    assert held.state_dict().keys() == expected.keys()
    for name, tensor in held.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name])
        assert torch.equal(torch.signbit(tensor), torch.signbit(expected[name])), "-0.0 is not 0.0"
    assert (held.lm_head.weight is held.get_input_embeddings().weight) == (architecture != "llama")
    assert not prepared_names(held)


@pytest.mark.parametrize(
    ("architecture", "dtype", "kind"), [("llama", torch.bfloat16, "AdamW"), ("llama-tied", torch.float32, "SGD")]
)
def test_three_steps_of_training_change_survivors_and_leave_zeros(architecture, dtype, kind):
    model = tiny_model(architecture, dtype=dtype).train()
    masks = two_of_four(model)
    before = {name: out_in(model.get_submodule(name)).clone() for name in masks}
    sparsifier = masks.to_torch_ao(model)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        if kind == "AdamW"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    )
    loss_before = loss_of(model).item()
    for _ in range(3):
        train(model, optimizer, 1)
        sparsifier.step()
        assert masks.verify(model)
    assert loss_of(model).item() < loss_before
    squash(sparsifier)
    for name, entry in masks.items():
        weight = out_in(model.get_submodule(name))
        assert (weight[~entry.keep] == 0).all()
        changed = (weight != before[name])[entry.keep].float().mean().item()
        assert changed > (0.9 if dtype == torch.float32 else 0.1)  # bfloat16 rounds small steps away
        assert weight.dtype == dtype


def test_an_optimizer_made_before_preparing_still_trains_the_same_parameters_after_squashing() -> None:
    model = tiny_model("llama")
    parameters = [*model.parameters()]
    sparsifier = two_of_four(model).to_torch_ao(model)
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    squash(sparsifier)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(p.requires_grad for p in parameters)


def test_a_checkpoint_of_the_state_dict_and_the_masks_file_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    straight = tiny_model("llama")
    masks = two_of_four(straight)
    masks.to_torch_ao(straight)
    optimizer = torch.optim.AdamW(straight.parameters(), lr=0.01)
    train(straight, optimizer, 2)
    masks.save(tmp_path / "masks.safetensors")
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    train(straight, optimizer, 2)

    resumed = tiny_model("llama", seed=1)
    sparsifier = MaskSet.load(tmp_path / "masks.safetensors").to_torch_ao(resumed)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(checkpoint["model"], strict=True)
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.01)
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(resumed, optimizer, 2)
    squash(sparsifier)
    squash(straight)
    assert masks.verify(resumed)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), straight.parameters(), strict=True))


def test_moving_a_prepared_model_moves_its_masks_and_squashing_still_works() -> None:
    model = tiny_model("gpt2")
    masks = two_of_four(model)
    sparsifier = masks.to_torch_ao(model)
    model._apply(lambda tensor: tensor.clone())  # what `.to(device)` does: every buffer becomes another tensor
    model.to(torch.bfloat16)
    assert all(p.dtype == torch.bool for n, p in model.named_buffers() if n.endswith("mask"))
    assert torch.isfinite(loss_of(model))
    squash(sparsifier)
    assert masks.verify(model)
    assert model.dtype == torch.bfloat16


def test_a_deep_copy_of_the_model_alone_holds_its_masks_and_is_squashed_by_itself() -> None:
    model = tiny_model("gpt2")
    masks = two_of_four(model)
    sparsifier = masks.to_torch_ao(model)
    copied = copy.deepcopy(model)
    train(copied, torch.optim.AdamW(copied.parameters(), lr=0.01), 1)
    squash(copied)
    assert masks.verify(copied)
    assert not prepared_names(copied)
    assert set(prepared_names(model)) == set(masks)
    assert torch.isfinite(loss_of(model))  # the original still runs, and is squashed by itself
    squash(sparsifier)
    assert masks.verify(model)
    assert torch.isfinite(loss_of(copied))


def test_a_second_prepare_is_refused_however_it_is_tried_and_stacks_nothing() -> None:
    model = tiny_model("llama")
    masks = two_of_four(model)
    sparsifier = masks.to_torch_ao(model)
    with pytest.raises(ArtifactError, match="cannot be masked while its weights are parametrized"):
        masks.to_torch_ao(model)
    with pytest.raises(ArtifactError, match="these masks are already on a model"):
        sparsifier.prepare(model, [{"tensor_fqn": "lm_head.weight"}])
    with pytest.raises(ArtifactError, match="held masks are fixed; load others with"):
        sparsifier.load_state_dict(sparsifier.state_dict())
    assert set(prepared_names(model)) == set(masks)
    assert all(len(model.get_submodule(name).parametrizations.weight) == 1 for name in masks)


@pytest.mark.parametrize(("architecture", "dtype"), KINDS[1:3], ids=str)
def test_a_tied_weight_named_by_both_owners_is_held_in_both_and_stays_tied(architecture, dtype):
    model = tiny_model(architecture, dtype=dtype)
    embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    entry = MaskEntry(torch.rand(128, 64) < 0.5, "50% layer", "magnitude", "0" * 64)
    masks = MaskSet({"lm_head": entry, embedding: entry})
    sparsifier = masks.to_torch_ao(model)
    assert masks.verify(model)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), 3)
    held = model(tiny_tokens()).logits
    squash(sparsifier)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight == 0, ~entry.keep)
    assert torch.equal(model(tiny_tokens()).logits, held)
    assert len([*model.state_dict()]) == len([*tiny_model(architecture).state_dict()])


def test_squashing_twice_is_an_error_and_so_is_a_model_that_holds_none() -> None:
    model = tiny_model("llama")
    sparsifier = two_of_four(model).to_torch_ao(model)
    squash(sparsifier)
    with pytest.raises(ArtifactError, match="HeldMasks holds no masks"):
        squash(sparsifier)
    with pytest.raises(ArtifactError, match="LlamaForCausalLM holds no masks"):
        squash(model)


def test_squashing_a_sparsifier_of_torch_aos_own_leaves_no_negative_zeros() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    sparsifier = WeightNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 1))
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    assert torch.signbit(model[0].weight[model[0].weight == 0]).any()
    squash(sparsifier)
    zeros = model[0].weight == 0
    assert zeros.sum() == 128
    assert not torch.signbit(model[0].weight[zeros]).any()
    assert not prepared_names(model)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(torch.float64, "rows"), (torch.float32, "transposed"), (torch.bfloat16, "strided")],
    ids=str,
)  # fmt: skip
def test_a_masked_weight_is_selected_to_the_bit_whatever_was_dropped(dtype, layout):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 10, generator=generator, dtype=torch.float64).to(dtype)
    weight[:, ::3] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1.0], dtype=dtype)[:, None]
    weight = {"rows": weight, "transposed": weight.T, "strided": weight[:, ::2]}[layout]
    mask = torch.rand(weight.shape, generator=generator) > 0.5
    assert not torch.isfinite(weight[~mask]).all()
    held = MaskedWeight(mask)
    assert_same_bits(held(weight), torch.where(mask, weight, 0.0))
    leaf = weight.clone().requires_grad_()
    gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(dtype)
    held(leaf).backward(gradient)
    assert_same_bits(leaf.grad, torch.where(mask, gradient, 0.0))


def test_a_masked_weight_has_derivatives_of_every_order():
    mask = torch.tensor([[True, False, True], [False, True, True]])
    weight = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(MaskedWeight(mask), weight)
    assert torch.autograd.gradgradcheck(lambda w: MaskedWeight(mask)(w).pow(3), weight)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(bits), expected.view(bits))


# --- torch.compile and checkpointing while masks are held


def two_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for i in (0, 2):
        parametrize.register_parametrization(model[i], "weight", MaskedWeight(torch.rand_like(model[i].weight) < 0.5))
    return model


@pytest.mark.slow  # imports the compiler
def test_a_model_that_holds_masks_is_compiled_whole():
    torch.manual_seed(0)
    model = two_layers()
    x, compiled = torch.randn(4, 6).double(), torch.compile(model, fullgraph=True, backend="aot_eager")
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled(x).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
        assert torch.equal(parameter.grad == 0, gradient == 0)
