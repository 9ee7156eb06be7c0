from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.mixtures import LAYOUTS, mixture
from tests.compressx.two_of_four import KINDS, out_in, two_of_four
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel
from transformers.pytorch_utils import Conv1D

from compressx.masks.callback import MaskCallback
from compressx.masks.maskset import MaskEntry, MaskSet, squash, weight_sha256
from compressx.models.architecture import linears_of
from compressx.runtime.errors import ArtifactError
from compressx.testing import tiny_model


def random_entry(rows: int, columns: int, seed: int = 0) -> MaskEntry:
    keep = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    return MaskEntry(keep, "50% layer", "magnitude", "0" * 64)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


def test_masks_say_how_many_linears_they_have_how_sparse_they_are_and_in_which_pattern() -> None:
    keep = torch.tensor([[True, False, True, False]])
    rows = MaskEntry(keep | torch.tensor([[False, True, False, False]]), "25% row", "wanda", "0" * 64)
    two = MaskEntry(keep, "2:4", "magnitude", "0" * 64)
    assert repr(MaskSet({"a": two, "b": rows, "c": two})) == "MaskSet(3 linears, 41.67% sparse: 2 x 2:4, 1 x 25% row)"
    assert repr(MaskSet({"a": two})) == "MaskSet(1 linear, 50.00% sparse: 1 x 2:4)"
    assert repr(MaskSet({})) == "MaskSet(0 linears)"


@pytest.mark.parametrize(("architecture", "dtype"), KINDS, ids=str)
def test_applied_masks_make_exact_zeros_where_they_drop_and_touch_nothing_else(architecture, dtype, tmp_path):
    model, dense = tiny_model(architecture, dtype=dtype), tiny_model(architecture, dtype=dtype)
    found = two_of_four(model)
    found.apply(model)
    for name, module in dense.named_modules():
        if name in found:
            now = out_in(model.get_submodule(name))
            assert torch.equal(now, torch.where(found[name].keep, out_in(module), 0.0))
            assert not torch.signbit(now[~found[name].keep]).any()
            assert now.dtype == dtype
    for name, parameter in dense.named_parameters():
        if name.removesuffix(".weight") not in found:
            assert torch.equal(model.get_parameter(name), parameter)
    assert found.sparsity() == 0.5
    assert found.deviations(model) == {}
    assert found.verify(model)
    assert not found.verify(dense)
    found.save(tmp_path / "masks.safetensors")
    MaskSet.load(tmp_path / "masks.safetensors").apply(dense, original=True)
    assert unchanged(dense, state_of(model)), "a file does the same to a model built anew"


def test_conv1d_weights_are_masked_along_their_inputs_even_when_square() -> None:
    model = tiny_model("gpt2")
    name = "transformer.h.0.attn.c_proj"  # [64, 64] either way, so no shape check could notice
    found = MaskSet({name: two_of_four(model)[name]})
    found.apply(model)
    stored = model.get_submodule(name).weight  # [in_features, out_features]
    assert ((stored == 0).view(16, 4, 64).sum(dim=1) == 2).all()


def test_a_mask_of_another_shape_names_the_layer_and_both_shapes_and_nothing_is_changed() -> None:
    model = tiny_model("gpt2")
    before = state_of(model)
    stored_shape = random_entry(64, 192)  # the module's own [in, out], which is not what a mask is
    bad = MaskSet({**two_of_four(model), "transformer.h.2.attn.c_attn": stored_shape})
    for use in (bad.apply, bad.to_torch_ao, bad.verify):
        with pytest.raises(ArtifactError, match=r"h\.2\.attn\.c_attn: its mask is \[64, 192\].*weight \[192, 64\]"):
            use(model)
    assert unchanged(model, before)


def test_another_models_weights_are_refused_when_the_original_is_asked_for_and_nothing_is_changed() -> None:
    model = tiny_model("llama")
    found = two_of_four(model)
    other = tiny_model("llama")
    with torch.no_grad():
        other.get_submodule([*found][-1]).weight[0, 0] += 1
    before = state_of(other)
    with pytest.raises(ArtifactError, match=rf"{[*found][-1]}: its weight has sha256 .* but its mask was made with"):
        found.apply(other, original=True)
    assert unchanged(other, before)
    found.apply(other)
    assert found.verify(other)


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2"])
def test_a_tied_weight_is_refused_until_all_its_owners_are_named_with_one_mask(architecture: str) -> None:
    model = tiny_model(architecture)
    embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    before = state_of(model)
    one, other = random_entry(128, 64), random_entry(128, 64, seed=1)
    for bad in ({"lm_head": one}, {embedding: one}, {"lm_head": one, embedding: other}):
        for use in (MaskSet(bad).apply, MaskSet(bad).to_torch_ao):
            with pytest.raises(ArtifactError, match=r"weight is tied to that of .*; give both the same mask"):
                use(model)
    assert unchanged(model, before)
    MaskSet({"lm_head": one, embedding: one}).apply(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight == 0, ~one.keep)


def test_two_names_of_one_module_are_refused() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, shared)
    entry = random_entry(4, 4)
    with pytest.raises(ArtifactError, match="0 and 1 are the same module"):
        MaskSet({"0": entry, "1": entry}).to_torch_ao(model)
    MaskSet({"1": entry}).apply(model)
    assert torch.equal(model[0].weight == 0, ~entry.keep)


def test_deviations_count_dropped_weights_that_live_and_kept_ones_may_be_zero() -> None:
    model = tiny_model("llama")
    found = two_of_four(model)
    found.apply(model)
    first, second, *_ = found
    with torch.no_grad():
        weight = model.get_submodule(first).weight
        weight[0, torch.nonzero(~found[first].keep[0])[:3, 0]] = torch.tensor([1.0, -1.0, torch.nan])
        kept = torch.nonzero(found[second].keep[0])[:2, 0]
        model.get_submodule(second).weight[0, kept] = torch.tensor([0.0, -0.0])
    assert found.deviations(model) == {first: 3}
    assert not found.verify(model)
    found.apply(model)
    assert found.verify(model), "kept weights may be zero by nature"


def test_masks_that_say_two_of_four_and_were_transposed_are_refused_by_all_that_uses_them(tmp_path: Path) -> None:
    model = tiny_model("llama")
    before, found = state_of(model), two_of_four(model)
    name = "model.layers.1.self_attn.o_proj"
    turned = replace(found[name], keep=found[name].keep.T.contiguous())
    MaskSet({**found, name: turned}).save(tmp_path / "masks.safetensors")
    loaded = MaskSet.load(tmp_path / "masks.safetensors")
    says = rf"^{name}: its mask is called 2:4, but is none: 2 of 4 input features are kept, but \d+ of 1024 groups keep"
    for use in (loaded.apply, loaded.verify, loaded.deviations, loaded.to_torch_ao, loaded.by_parameter):
        with pytest.raises(ArtifactError, match=says):
            use(model)
    assert unchanged(model, before)
    MaskSet({name: replace(turned, pattern="50% layer")}).apply(model)


def test_experts_without_a_mask_are_left_as_they_were() -> None:
    model, untouched = (tiny_model("gpt-oss").model.layers[1].mlp for _ in range(2))
    masks = masks_of(model, "experts.gate_up_proj.0", "experts.down_proj.3")
    masks.apply(model)
    assert masks.verify(model)
    assert not masks.verify(untouched)
    for name, masked in (("gate_up_proj", 0), ("down_proj", 3)):
        for expert in {*range(4)} - {masked}:
            assert torch.equal(getattr(model.experts, name)[expert], getattr(untouched.experts, name)[expert])


# --- modules of every kind: masks do their work, or a line says what to pass instead


class Failing(nn.Module):
    """A module whose `weight` is no tensor, and fails when it is looked at."""

    @property
    def weight(self) -> Tensor:
        raise RuntimeError("packed")


class Wrapped(nn.Module):
    """As frameworks wrap models."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def masks_of(model: nn.Module, *names: str) -> MaskSet:
    """Return a mask of every other input for each linear of a model, or for some."""
    found = [x for n, m in model.named_modules() for x in linears_of(n, m) if not names or x.name in names]
    keep = {x.name: torch.arange(x.in_features).expand(x.out_features, -1) % 2 == 0 for x in found}
    return MaskSet({x.name: MaskEntry(keep[x.name], "50% row", "wanda", weight_sha256(x.weight)) for x in found})


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def with_convolution() -> nn.Module:
    return nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "turned": Conv1D(8, 8), "straight": nn.Linear(8, 8)})


WORK: dict[str, Callable[[], nn.Module]] = {
    "Sequential": small,
    "a linear": lambda: nn.Linear(8, 8),
    "Conv1D": with_convolution,
    "ModuleList": lambda: nn.ModuleList([nn.Linear(8, 8)]),
    "attention of torch": lambda: nn.MultiheadAttention(8, 2),
    "a weight that fails": lambda: nn.Sequential(nn.Linear(8, 8), Failing()),
    "frozen": lambda: small().requires_grad_(False),
    "a block": lambda: tiny_model("llama").model.layers[0],
    "without head": lambda: tiny_model("gpt2").transformer,
    "wrapped": lambda: Wrapped(small()),
    **{name: partial(mixture, name, tie_word_embeddings=False) for name in (*LAYOUTS, "mixtral")},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("about", WORK)
def test_masks_are_applied_verified_held_and_squashed_on_any_module(about, dtype):
    model = WORK[about]()
    found = masks_of(model)
    model = model.to(dtype)
    assert not found.verify(model)
    sparsifier = found.to_torch_ao(model)
    assert found.verify(model)
    squash(sparsifier)
    assert found.deviations(model) == {}
    again = WORK[about]().to(dtype)
    found.apply(again)
    assert found.deviations(again) == {}
    for name, keep in found.by_parameter(model).items():
        assert not model.get_parameter(name)[~keep].any()


def scripted() -> nn.Module:
    found: nn.Module = torch.jit.script(small())
    return found


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(small(), {nn.Linear})


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), LoraConfig(target_modules=["0"]))


def configured() -> nn.Module:
    module: Any = nn.Sequential()
    module.config = {}
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other names": (lambda: nn.ModuleDict({"a": nn.Linear(8, 8)}), "'0', which ModuleDict does not have; valid: a$"),
    "other shapes": (lambda: nn.Sequential(nn.Linear(8, 4)), r"^0: its mask is \[8, 8\] .* the weight \[4, 8\]"),
    "no linears": (nn.Module, "a mask for '0', which Module does not have; it has no linears$"),
    "a config of its own": (configured, "Sequential does not have; it has no linears$"),
    "DataParallel": (lambda: nn.DataParallel(small()), "wrapped in DataParallel .*; pass its `module`"),
    "compiled": (lambda: torch.compile(small()), "wrapped in OptimizedModule .*; pass its `_orig_mod`"),
    "a compiled part": (lambda: nn.Sequential(torch.compile(nn.Linear(8, 8))), r"wrapped in OptimizedModule \(0\)"),
    "another wrapper": (lambda: Wrapped(small()), "Wrapped does not have; valid: module.0, module.2$"),
    "averaged": (lambda: AveragedModel(small()), "AveragedModel does not have; valid: module.0, module.2$"),
    "normalised": (lambda: nn.Sequential(weight_norm(nn.Conv1d(4, 4, 3))), "parametrized by _WeightNorm"),
    "scripted": (scripted, "compiled by torch.jit .*; pass the module that was compiled, first$"),
    "quantized": (quantized, "a mask for '0', which Sequential does not have; it has no linears$"),
    "adapters": (adapted, "has a PEFT adapter; merge it first"),
    "meta": (lambda: small().to("meta"), r"^0: its weight is not loaded \(device meta\)"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(8)), "UninitializedParameter"),
    "a block": (lambda: tiny_model("llama").model.layers[0], "LlamaDecoderLayer does not have; valid: mlp.down_proj"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("about", REFUSED)
def test_a_module_without_these_weights_is_refused_in_one_line(about):
    build, said = REFUSED[about]
    found = masks_of(small())
    asked: list[Callable[[nn.Module], Any]] = [found.apply, found.verify, found.deviations, found.to_torch_ao,
        found.by_parameter, lambda m: found.apply(m, original=True)]  # fmt: skip
    if about != "adapters":  # whose updates the callback masks
        asked.append(lambda m: MaskCallback(found).on_train_begin(model=m))
    for ask in asked:
        with pytest.raises(ArtifactError, match=said) as refused:
            ask(build())
        assert "\n" not in str(refused.value)
