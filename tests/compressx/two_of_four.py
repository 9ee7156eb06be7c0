"""Masks by magnitude for every linear of a tiny model."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from compressx.api.patterns import NM, keep_mask
from compressx.masks.maskset import MaskEntry, MaskSet, weight_sha256


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
