"""A pruned model, or a block of it, made ready for training, and an ordinary one again afterwards, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from compressx.masks.maskset import MaskSet, squash


@contextmanager
def trainable(
    model: nn.Module, part: nn.Module, masks: MaskSet, *, norms: bool, biases: bool
) -> Iterator[Mapping[nn.Parameter, torch.dtype]]:
    """Hold masks on a model by torch.ao's parametrization, and let gradients reach what is trained and nothing else.

    Args:
        model: the model; outside of `part` nothing changes.
        part: the model itself, or a block of it. All of it is float32 at least for the length of the `with`.
        masks: by name in the model, of weights inside the part. They are trained, and dropped ones stay exactly zero.
        norms: whether the gains of norms are trained too.
        biases: whether biases are trained too, of norms and linears alike.

    Yields:
        The trained parameters, in the model's order, each with the dtype that it came in and will have again.
    """
    with ExitStack() as stack:
        dtypes = stack.enter_context(_in_float32(part))
        wanted = {*stack.enter_context(_held(masks, model)), *_small(part, norms=norms, biases=biases)}
        stack.enter_context(_only_trained(part, wanted))
        yield {parameter: dtypes[parameter] for parameter in part.parameters() if parameter in wanted}


@contextmanager
def _in_float32(part: nn.Module) -> Iterator[dict[nn.Parameter, torch.dtype]]:
    """Hold every parameter in float32 at least, and afterwards in its own dtype: what was not trained to the bit."""
    dtypes = {parameter: parameter.dtype for parameter in part.parameters()}
    for parameter, dtype in dtypes.items():
        parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
    try:
        yield dtypes
    finally:
        for parameter, dtype in dtypes.items():
            parameter.data = parameter.data.to(dtype)


@contextmanager
def _held(masks: MaskSet, model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Hold the masks, give the parameters under them, and make the zeros permanent afterwards."""
    sparsifier = masks.to_torch_ao(model)
    try:
        yield [group["module"].parametrizations[group["tensor_name"]].original for group in sparsifier.groups]
    finally:
        squash(sparsifier)


@contextmanager
def _only_trained(part: nn.Module, wanted: set[nn.Parameter]) -> Iterator[None]:
    asked_before = {parameter: parameter.requires_grad for parameter in part.parameters()}
    for parameter in asked_before:
        parameter.requires_grad_(parameter in wanted)
    try:
        yield
    finally:
        for parameter, asked in asked_before.items():
            parameter.grad = None
            parameter.requires_grad_(asked)


def _small(part: nn.Module, *, norms: bool, biases: bool) -> Iterator[nn.Parameter]:
    for module in part.modules():
        norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            bias = "bias" in name
            if (biases and bias) or (norms and norm and not bias):
                yield parameter
