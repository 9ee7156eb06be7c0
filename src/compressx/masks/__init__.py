"""Masks in memory, on disk, in torch.ao and in PEFT, inspection of a model's zeros, and 2:4 products on a GPU."""

from compressx.masks.adapters import Merged, mask_adapters, merge_adapters
from compressx.masks.maskset import MaskSet, apply, squash
from compressx.masks.tensor_cores import Converted, semi_structured

__all__ = ["Converted", "MaskSet", "Merged", "apply", "mask_adapters", "merge_adapters", "semi_structured", "squash"]
