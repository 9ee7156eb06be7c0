"""Masks in memory, on disk and in torch.ao, and inspection of a model's zeros."""

from compressx.masks.maskset import MaskSet, apply, squash

__all__ = ["MaskSet", "apply", "squash"]
