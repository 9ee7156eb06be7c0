"""PEFT adapters beside masked weights: what is trained is what is merged, and orders that would lose it are refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.two_of_four import out_in, pruned
from torch import Tensor
from torch.nn.utils import parametrize

from compressx.masks import MaskSet, mask_adapters, merge_adapters, squash
from compressx.masks.file import MaskEntry
from compressx.models.architecture import architecture_of
from compressx.runtime.errors import ArtifactError
from compressx.testing import tiny_model, tiny_tokens

peft = pytest.importorskip("peft")
TOKENS = tiny_tokens()


def adapted(model: Any, **given: Any) -> Any:
    """Give adapters to a model, which change what it computes from the start."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **given}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Conv1D, and about names that are deprecated
        return peft.get_peft_model(model, peft.LoraConfig(**settings))


def train(model: Any, steps: int = 5, rate: float = 1e-2) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("merge", ["ours", "peft"])
def test_the_model_that_is_trained_is_the_one_that_is_merged(architecture: str, merge: str) -> None:
    model, masks = pruned(architecture)
    before = {name: out_in(model.get_submodule(name)).clone() for name in masks}
    adapter = adapted(model, lora_dropout=0.1)
    mask_adapters(adapter, masks)
    losses = train(adapter)
    assert losses[-1] < losses[0]
    expected = logits(adapter)
    if merge == "ours":
        merged, outside = merge_adapters(adapter, masks)
        assert outside == 0.0
    else:
        merged = adapter.merge_and_unload()
    assert merged is model
    assert close(logits(merged), expected)
    for name, entry in masks.items():
        weight = out_in(model.get_submodule(name))
        assert (weight[~entry.keep] == 0).all()
        assert not torch.signbit(weight[~entry.keep]).any()
        assert (weight != before[name])[entry.keep].float().mean() > 0.9


def test_an_update_is_the_adapters_product_where_the_mask_keeps() -> None:
    model, masks = pruned()
    name = next(iter(masks))
    old = model.get_submodule(name).weight.double().clone()
    adapter = adapted(model)
    mask_adapters(adapter, masks)
    layer = model.get_submodule(name)
    a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    expected = old + torch.where(masks[name].keep, 2.0 * b @ a, 0.0)  # alpha / r = 2
    x = torch.randn(3, old.shape[1])
    assert close(layer(x).double(), x.double() @ expected.T)
    merge_adapters(adapter, masks)
    assert close(model.get_submodule(name).weight.double(), expected)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2"])
@pytest.mark.parametrize("masked", [True, False])
def test_the_bias_of_an_adapter_is_trained_scaled_and_merged_into_the_linears(architecture: str, masked: bool) -> None:
    model, masks = pruned(architecture)
    names = [name for name in masks if model.get_submodule(name).bias is not None]
    before = {name: model.get_submodule(name).bias.double().clone() for name in names}
    adapter = adapted(model, lora_bias=True, target_modules=names)
    if masked:
        mask_adapters(adapter, masks)
    losses = train(adapter)
    assert losses[-1] < losses[0]
    added = {name: model.get_submodule(name).lora_B["default"].bias.double().clone() for name in names}
    expected = logits(adapter)
    merged, outside = merge_adapters(adapter, masks)
    assert (outside == 0.0) == masked
    assert close(logits(merged), expected) == masked
    assert masks.verify(merged)
    for name in names:
        assert close(merged.get_submodule(name).bias.double(), before[name] + 2.0 * added[name])  # alpha / r = 2
        assert added[name].any()


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_that_were_trained_without_masks_lose_the_part_outside_and_it_is_counted(dora: bool) -> None:
    model, masks = pruned()
    old = {name: model.get_submodule(name).weight.detach().clone() for name in masks}
    adapter = adapted(model, use_dora=dora)
    train(adapter, steps=2)
    by_peft = copy.deepcopy(adapter).merge_and_unload()
    merged, outside = merge_adapters(adapter, masks)
    assert masks.verify(merged)
    update = {name: (by_peft.get_submodule(name).weight - old[name]).double().square() for name in masks}
    lost = sum(float(update[name][~entry.keep].sum()) for name, entry in masks.items())
    assert outside == pytest.approx(lost / sum(float(x.sum()) for x in update.values()), rel=1e-3)
    assert 0.2 < outside < 0.6


def test_adapters_of_a_file_are_masked_and_merged_as_those_that_were_trained(tmp_path: Path) -> None:
    adapter = adapted(pruned()[0])
    masks = pruned()[1]
    mask_adapters(adapter, masks)
    train(adapter)
    adapter.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(pruned()[0], tmp_path)
    mask_adapters(loaded, masks)
    assert torch.equal(logits(loaded), logits(adapter))
    assert merge_adapters(loaded, masks).outside == 0.0


def test_experts_with_adapters_are_masked_when_merged() -> None:
    model = tiny_model("mixtral")
    experts = {name: x.weight for name, x in architecture_of(model).linears.items() if x.expert is not None}
    masks = MaskSet(
        {n: MaskEntry(w.abs() > w.abs().median(), "50% layer", "magnitude", "0") for n, w in experts.items()}
    )
    masks.apply(model)
    fused = next(iter(masks)).rpartition(".")[0]
    adapter = adapted(model, target_modules=["q_proj"], target_parameters=[".".join(fused.split(".")[-3:])])
    with pytest.raises(ArtifactError, match=r"its adapter is tuners.lora.layer.ParamWrapper.*plain LoRA"):
        mask_adapters(adapter, masks)
    merged, outside = merge_adapters(adapter, masks)
    assert masks.verify(merged)
    assert 0.2 < outside < 0.8


# --- orders that cannot work


def test_an_adapter_over_held_masks_is_refused_because_its_training_would_be_lost() -> None:
    """PEFT merges into a weight that is computed on each access."""
    model, masks = pruned()
    sparsifier = masks.to_torch_ao(model)
    with pytest.raises(
        ArtifactError, match=r"training would be lost.*squash\(sparsifier\).*get_peft_model.*mask_adapters"
    ):
        adapted(model)
    squash(sparsifier)
    adapted(model)


def half_merged() -> tuple[Any, MaskSet]:
    model, masks = pruned()
    adapter = adapted(model)
    mask_adapters(adapter, masks)
    adapter.merge_adapter()
    return adapter, masks


def held_under_adapters() -> tuple[Any, MaskSet]:
    model, masks = pruned()
    adapter = adapted(model)
    layer = next(m for m in model.modules() if hasattr(m, "base_layer")).base_layer
    parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    return adapter, masks


def not_finite() -> tuple[Any, MaskSet]:
    adapter = adapted(pruned()[0])
    next(p for p in adapter.parameters() if p.requires_grad).data.fill_(torch.nan)
    return adapter, pruned()[1]


def given(architecture: str = "llama", **settings: Any) -> Callable[[], tuple[Any, MaskSet]]:
    """Return what gives adapters with these settings to a pruned model."""
    return lambda: (adapted(pruned(architecture)[0], **settings), pruned(architecture)[1])


BOTH = (mask_adapters, merge_adapters)


@pytest.mark.parametrize(
    ("made", "acts", "message"),
    [
        (held_under_adapters, BOTH, "given adapters while its weights are parametrized"),
        (given(target_modules=["lm_head"]), BOTH[:1], r"none of the 21 masked linears has an adapter.*target_modules"),
        (lambda: (adapted(pruned()[0]), pruned("gpt2")[1]), BOTH, r"transformer.h.0.*which LlamaForCausalLM does not"),
        (lambda: (adapted(tiny_model("llama")), pruned()[1]), BOTH,
         r"q_proj: \d+ weights that the mask drops are not zero.*masks.apply\(model\)"),
        (given(init_lora_weights="pissa"), BOTH, r"not zero under the adapters.*init_lora_weights"),
        (lambda: (adapted(pruned()[0]).merge_and_unload(), pruned()[1]), BOTH,
         r"LlamaForCausalLM: expected the peft.PeftModel.*masks.apply\(model\)"),
        (half_merged, BOTH, r"q_proj: its adapter is merged already; call model.unmerge_adapter\(\)"),
        (given(lora_bias=True), BOTH, r"q_proj: its adapter has a bias, .* train without lora_bias"),
        (given("qwen2", lora_bias=True, target_modules=["q_proj", "o_proj"]), BOTH,
         r"o_proj: its adapter has a bias, .* out of target_modules"),
        (not_finite, BOTH[1:], r"q_proj: NaNs detected.*smaller learning rate"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_to_do(made, acts, message) -> None:
    adapter, masks = made()
    for act in acts:
        with pytest.raises(ArtifactError, match=message):
            act(adapter, masks)
