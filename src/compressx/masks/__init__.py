"""Masks in memory, on disk, in torch.ao and in PEFT, and inspection of a model's zeros."""

from compressx.masks.adapters import Merged, mask_adapters, merge_adapters
from compressx.masks.maskset import MaskSet, squash

__all__ = ["MaskSet", "Merged", "mask_adapters", "merge_adapters", "squash"]
