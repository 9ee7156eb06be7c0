"""Masks on modules of every kind: they do their work, or a line says what to pass instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.compressx.mixtures import LAYOUTS, mixture
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel
from transformers.pytorch_utils import Conv1D

from compressx.masks import MaskSet, squash
from compressx.masks.callback import MaskCallback
from compressx.masks.maskset import MaskEntry, weight_sha256
from compressx.models.architecture import linears_of
from compressx.runtime.errors import ArtifactError
from compressx.testing import tiny_model


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
    found = [x for n, m in model.named_modules() for x in linears_of(n, m) if not names or n in names]
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
