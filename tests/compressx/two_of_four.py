"""Masks by magnitude for every linear of a tiny model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from compressx.api.patterns import NM, keep_mask
from compressx.masks.maskset import MaskEntry, MaskSet, weight_sha256
from compressx.testing import tiny_model

KINDS = [("llama", torch.bfloat16), ("llama-tied", torch.float32), ("gpt2", torch.bfloat16), ("opt", torch.float32)]
"""Architectures and dtypes that masks are tried with."""


def out_in(module: nn.Module) -> torch.Tensor:
    """Return a weight [out_features, in_features], whichever way it is stored."""
    weight = module.get_parameter("weight").detach()
    return weight.T if isinstance(module, Conv1D) else weight


def two_of_four(model: nn.Module) -> MaskSet:
    """Give every linear but the head its mask, along in_features."""
    linears = {n: out_in(m) for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and n != "lm_head"}
    return MaskSet(
        {
            name: MaskEntry(keep_mask(w.abs().float(), NM(2, 4)), "2:4", "magnitude", weight_sha256(w))
            for name, w in linears.items()
        }
    )


def pruned(architecture: str = "llama", **given: Any) -> tuple[Any, MaskSet]:
    """Return a tiny model with its masks applied, and them."""
    model = tiny_model(architecture, **given)
    masks = two_of_four(model)
    masks.apply(model)
    return model, masks
