"""Prepare a pruned model, or one of its blocks, for training, and restore it afterwards."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from compressx.masks.adapters import mask_adapters, merge_adapters
from compressx.masks.maskset import MaskSet
from compressx.models.architecture import linears_of
from compressx.numerics.masked import zeroed
from compressx.recipe.sections import Lora
from compressx.runtime.errors import ArtifactError, CalibrationError
from compressx.runtime.finite import first_damaged
from compressx.runtime.quiet import quiet_libraries

_CHECKPOINTING = (
    "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks",
)  # fmt: skip
"""Attributes of modules by which transformers keeps gradient checkpointing."""

_ADAPTER = ".lora_"
"""What is in the names that PEFT gives the parameters of adapters."""


@contextmanager
def trainable(
    model: Any, part: nn.Module, masks: MaskSet, *, norms: bool = False, biases: bool = False,
    lora: Lora | None = None, seed: int = 0,
) -> Iterator[Mapping[nn.Parameter, torch.dtype]]:  # fmt: skip
    """Hold masks, and require gradients only of the trained parameters.

    Args:
        model: the model; nothing outside `part` changes.
        part: the model itself, or one of its blocks; its parameters are at least float32 inside the `with`.
        masks: by name in the model, of weights inside the part. These are trained; dropped ones stay exactly zero.
        norms: whether to train the gains of norms too.
        biases: whether to train biases too, of norms and linears, without those of linears that keep no weight.
        lora: masked adapters to train in place of the weights of a transformers model, which they are merged into
            afterwards; their alpha is twice the rank.
        seed: of the adapters' first values.

    Yields:
        The trained parameters in the model's order, each with the dtype that it has afterwards.
    """
    with ExitStack() as stack:
        kept = masks.by_parameter(model) if lora is None else {}
        held = {model.get_parameter(name): keep for name, keep in kept.items()}
        wanted = {*held} | (_gains(part) if norms else set()) | (_biases(part, model, masks) if biases else set())
        dtypes = stack.enter_context(_only_trained(part, wanted))
        # Without a gradient, an optimizer without weight decay does not move a zero. A parametrization would multiply
        # every weight by its mask in every forward pass: a tenth of a training step.
        for parameter, keep in held.items():
            weight = parameter.detach()
            weight.copy_(zeroed(weight, keep))
            hook = parameter.register_hook(partial(zeroed, keep=keep))
            stack.callback(hook.remove)
        if lora is not None:
            stack.enter_context(_adapters(model, masks, lora, seed))
            for parameter in wanted:  # PEFT freezes everything, and does not restore it
                parameter.requires_grad_()
        yield {p: dtypes.get(p, p.dtype) for p in part.parameters() if p.requires_grad}


@contextmanager
def own_checkpointing_off(model: Any) -> Iterator[None]:
    """Turn off what a model's owner has set up for gradient checkpointing, and restore it afterwards.

    With checkpointing, transformers and PEFT also hook the embeddings, so that their output requires gradients, and
    leave the hooks there: even a frozen model would then build graphs.
    """
    kept = [(module, {name: vars(module)[name] for name in _CHECKPOINTING if name in vars(module)})
            for module in model.modules()]  # fmt: skip
    embeddings = model.get_input_embeddings()
    hooks = [*embeddings._forward_hooks]
    for module, own in kept:
        if own.get("gradient_checkpointing"):
            module.gradient_checkpointing = False
    try:
        yield
    finally:
        for hook in {*embeddings._forward_hooks} - {*hooks}:
            del embeddings._forward_hooks[hook]
        for module, own in kept:
            for name in _CHECKPOINTING:
                vars(module).pop(name, None)
            vars(module).update(own)


@contextmanager
def _adapters(model: Any, masks: MaskSet, lora: Lora, seed: int) -> Iterator[None]:
    """Add adapters, and merge them afterwards; after an error only remove them."""
    from peft import LoraConfig, get_peft_model

    names = [name for name in masks if any(fnmatchcase(name, target) for target in lora.targets)]
    transposed = not isinstance(model.get_submodule(names[0]), nn.Linear)
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(seed % 2**63)
        config = LoraConfig(r=lora.rank, lora_alpha=2 * lora.rank, target_modules=names, fan_in_fan_out=transposed)
        peft_model = get_peft_model(model, config)
    try:
        mask_adapters(peft_model, masks)
        yield
        merge_adapters(peft_model, masks)
    except BaseException:
        peft_model.unload()
        raise


@contextmanager
def _only_trained(part: nn.Module, wanted: set[nn.Parameter]) -> Iterator[Mapping[nn.Parameter, torch.dtype]]:
    """Convert parameters to at least float32, and require gradients of those that are wanted; yield the dtypes before.

    Both are restored, parameters that were not trained bit for bit.
    """
    before = {parameter: (parameter.dtype, parameter.requires_grad) for parameter in part.parameters()}
    for parameter, (dtype, _) in before.items():
        parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
        parameter.requires_grad_(parameter in wanted)
    try:
        yield {parameter: dtype for parameter, (dtype, _) in before.items()}
    finally:
        for parameter, (dtype, required) in before.items():
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(required)


def _gains(part: nn.Module) -> set[nn.Parameter]:
    """Return the gains of norms."""
    norms = [module for module in part.modules() if "norm" in type(module).__name__.lower()]
    return {p for norm in norms for name, p in norm.named_parameters(recurse=False) if "bias" not in name}


def _biases(part: nn.Module, model: nn.Module, masks: MaskSet) -> set[nn.Parameter]:
    """Return the biases of norms and linears, without those of linears that keep no weight: they would add to it."""
    linears = {x.name: x for name, module in model.named_modules() for x in linears_of(name, module)}
    emptied = {linears[n].module for n in masks if not masks[n].keep.any() and linears[n].expert is None}
    owners = [module for module in part.modules() if module not in emptied]
    return {p for owner in owners for name, p in owner.named_parameters(recurse=False) if "bias" in name}


def rms_of(parameters: Collection[nn.Parameter]) -> list[float]:
    """Return the RMS of each parameter's non-zero entries; for an all-zero one, the mean over the others.

    Adam's steps are of the learning rate's size whatever the weights are. As a fraction of these sizes one rate suits
    weights of all scales, as in Adafactor (arXiv 1804.04235, section 8).
    """
    entries = [p.detach()[p.detach() != 0] for p in parameters]
    found = [float(x.square().mean().sqrt()) if len(x) else 0.0 for x in entries]
    mean = math.fsum(found) / max(1, sum(size > 0 for size in found))
    return [size or mean for size in found]


def scales(trained: Mapping[str, nn.Parameter]) -> list[float]:
    """Return what multiplies the learning rate of each parameter, by name: its size.

    An adapter has none, because it begins at zero: its rate is Adam's own. What is trained beside it has its size, or
    Adam's own rate, too, if all of that is zero.
    """
    found = iter(rms_of([parameter for name, parameter in trained.items() if _ADAPTER not in name]))
    return [1.0 if _ADAPTER in name else next(found) or 1.0 for name in trained]


def check_trained(model: nn.Module, masks: MaskSet, learning_rate: float) -> None:
    """Check the weights that the last step left: its own loss was computed before it."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    damaged = first_damaged(parameters)
    if damaged is not None:
        raise CalibrationError(
            f"{names[damaged]} has NaN or infinite values after fine-tuning; learning_rate {learning_rate:g} is too "
            f"large, or {parameters[damaged].dtype} is too narrow for the trained weights"
        )
    for name, count in masks.deviations(model).items():
        raise ArtifactError(
            f"{name}: {count} weights that the mask drops are not zero after fine-tuning; expected none"
        )
