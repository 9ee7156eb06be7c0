"""PEFT adapters on a pruned model: the masks apply to their updates, in training and in merging.

LoRA adds a dense `s B A` to a sparse weight. `mask_adapters` makes PEFT add `s B A` where the mask keeps and zero
elsewhere, so the model that is trained is the model that is merged::

    model = get_peft_model(pruned, LoraConfig(r=16, target_modules="all-linear"))
    mask_adapters(model, masks)
    ...  # train
    model, outside = merge_adapters(model, masks)

The masks must not be held by `MaskSet.to_torch_ao`: PEFT freezes the weights anyway, and could not merge into them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressx.models.architecture import linears_of, refuse_prepared
from compressx.runtime.errors import ArtifactError, did_you_mean

if TYPE_CHECKING:
    from compressx.api.pruner import Linear
    from compressx.masks.file import MaskEntry


class Merged(NamedTuple):
    """The transformers model, without adapters, its zeros as the masks say; and what of the update is lost.

    That is the fraction in [0, 1] of the update's squared norm, over all masked weights, that fell on dropped entries;
    0 after `mask_adapters`.
    """

    model: Any
    outside: float


def mask_adapters(model: Any, masks: Mapping[str, MaskEntry]) -> None:
    """Apply masks to the updates of a model's LoRA adapters, in place, for training, merging and inference.

    The adapters' files are not changed by it: call it again after loading them.

    Args:
        model: what `peft.get_peft_model` returned for the pruned model.
        masks: of the pruned model.

    Raises:
        ArtifactError: no adapter is on a masked linear; an adapter on one is not plain LoRA; a weight under one is not
            zero where its mask drops; `lora_bias` on a linear without bias; masks of another model, or held by
            `MaskSet.to_torch_ao`.
    """
    from peft.tuners.lora.layer import Linear as LoraLinear

    adapted = {name: found for name, found in _adapted(model, masks) if found[1]}
    if not adapted:
        raise ArtifactError(
            f"none of the {len(masks)} masked linears has an adapter; name them in LoraConfig(target_modules=...), "
            'which takes "all-linear" for all'
        )
    for name, (layer, _) in adapted.items():
        variants = {type(v).__name__ for v in getattr(layer, "lora_variant", {}).values()} - {_MaskedUpdate.__name__}
        if type(layer) is not LoraLinear or variants:
            kind = (
                ", ".join(sorted(variants)) or f"{type(layer).__module__.removeprefix('peft.')}.{type(layer).__name__}"
            )
            raise ArtifactError(
                f"{name}: its adapter is {kind}, whose update cannot be masked during training; expected plain LoRA "
                "on a linear (no use_dora, no target_parameters). merge_adapters alone masks any adapter after training"
            )
    for name, (layer, _) in adapted.items():
        stored = layer.get_base_layer().weight
        keep = masks[name].keep.T if layer.fan_in_fan_out else masks[name].keep
        layer.register_buffer("kept", keep.to(stored.device, copy=True), persistent=False)
        layer.lora_variant.update(dict.fromkeys(layer.lora_A, _MaskedUpdate()))


def merge_adapters(model: Any, masks: Mapping[str, MaskEntry]) -> Merged:
    """Merge a model's active adapters into its weights, under the masks, in place.

    Any adapter that PEFT can merge is accepted, also one that was trained without `mask_adapters`; then a part of its
    update is lost. `model` is what `peft.get_peft_model` or `peft.PeftModel.from_pretrained` returned for the pruned
    model.

    Raises:
        ArtifactError: as `mask_adapters`, but for adapters of other kinds; and values that are not finite.
    """
    total = lost = 0.0
    for name, (layer, linears) in _adapted(model, masks):
        before = [linear.weight.clone() for linear in linears]
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            raise ArtifactError(f"{name}: {error}; train with a smaller learning rate") from error
        for linear, old in zip(linears, before, strict=True):
            drop = ~masks[linear.name].keep.to(old.device)
            update = (linear.weight - old).double().square()
            total += float(update.sum())
            lost += float(update[drop].sum())
            with torch.no_grad():
                linear.weight.masked_fill_(drop, 0.0)
    return Merged(model.unload(), lost / total if total else 0.0)


def refuse_adapted(model: nn.Module) -> None:
    """Refuse a model with adapters, whose weights are not those that its forward pass uses."""
    if (first := next(_layers(model), None)) is not None:
        raise ArtifactError(
            f"{first[0]} has a PEFT adapter; merge it first: compressx.masks.merge_adapters(model, masks). To train "
            "adapters under the masks: compressx.masks.mask_adapters(model, masks)"
        )


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT's adapters are on a model."""
    return next(_layers(model), None) is not None


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each layer of PEFT by the name of the module under it."""
    peft = sys.modules.get("peft.tuners.tuners_utils")  # without it there are none
    for name, module in model.named_modules() if peft is not None else ():
        if isinstance(module, peft.BaseTunerLayer):  # type: ignore[union-attr]
            yield name.replace(".base_layer", ""), module  # adapters of fused experts are nested


def _adapted(model: Any, masks: Mapping[str, MaskEntry]) -> list[tuple[str, tuple[Any, list[Linear]]]]:
    """Return each layer of PEFT with the masked linears under it; check the weights and masks."""
    wrapped: Any = model.get_base_model() if hasattr(model, "get_base_model") else None
    layers = [] if wrapped is None else [*_layers(wrapped)]
    if not layers:
        raise ArtifactError(
            f"{type(model).__name__}: expected the peft.PeftModel with adapters on linears that get_peft_model or "
            "PeftModel.from_pretrained returned. If PEFT merged the adapters already, zero what fell outside the masks "
            "by masks.apply(model)"
        )
    refuse_prepared(wrapped, "given adapters")
    linears = {x.name: x for n, m in wrapped.named_modules() for x in linears_of(n.replace(".base_layer", ""), m)}
    for name, entry in masks.items():
        kind = f"there is a mask for {name!r}, which {type(wrapped).__name__} does not have as a plain linear"
        if wrong := _misfit(linears[name], entry.keep) if name in linears else f"{kind}; {did_you_mean(name, linears)}":
            raise ArtifactError(wrong)
    found = []
    for name, layer in layers:
        base_layer = layer.get_base_layer()
        wrong = "is merged already; call model.unmerge_adapter() first" if layer.merged else ""
        if any(getattr(layer, "lora_bias", {}).values()) and getattr(base_layer, "bias", None) is None:
            wrong = (
                "has a bias, which a linear without one cannot take when they are merged; train without lora_bias, or "
                "leave this linear out of target_modules"
            )
        if wrong:
            raise ArtifactError(f"{name}: its adapter {wrong}")
        under = linears_of(name, base_layer)
        found.append((name, (layer, [linear for linear in under if linear.name in masks])))
    return found


def _misfit(linear: Linear, keep: Tensor) -> str:
    """Say why adapters over a weight cannot be masked; empty if they can."""
    weight = linear.weight
    if not weight.dtype.is_floating_point or weight.element_size() < 2 or weight.shape != keep.shape:
        return (
            f"{linear.name}: its weight is {weight.dtype} {[*weight.shape]}, its mask {[*keep.shape]} [out_features, "
            "in_features]; expected the weight of the pruned model, not quantized"
        )
    count = int(torch.count_nonzero(weight[~keep.to(weight.device)]))
    return (
        f"{linear.name}: {count} weights that the mask drops are not zero under the adapters; give get_peft_model the "
        "pruned model, or call masks.apply(model) before it, and use no init_lora_weights that changes weights"
        if count
        else ""
    )


class _MaskedUpdate:
    """A variant of LoRA, with the methods of `peft.tuners.lora.layer.LoraVariant`: no update where a mask drops."""

    def init(self, module: Any, adapter_name: str, **_: Any) -> None:
        pass  # there are no further parameters

    def supports_lora_conversion(self) -> bool:
        return False  # what is added is not of low rank

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        update, bias = _update(module, active_adapter), module.lora_B[active_adapter].bias
        added = functional.linear(
            module.lora_dropout[active_adapter](x),  # [..., in_features]
            update.T if module.fan_in_fan_out else update,
            None if bias is None else bias * module.scaling[active_adapter],
        )
        return result + added

    def merge_safe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight + _update(module, active_adapter).to(orig_weight.dtype)

    def merge_unsafe(self, module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data = self.merge_safe(module, active_adapter, orig_weight.data)

    def unmerge(self, module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight.data - _update(module, active_adapter).to(orig_weight.dtype)


def _update(module: Any, adapter: str) -> Tensor:
    """Return the masked update of a layer, in the layout of its weight."""
    from compressx.masks.sparsifier import keep_entries

    return keep_entries(module.get_delta_weight(adapter), module.kept)
