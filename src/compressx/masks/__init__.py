"""Masks: in memory, on disk, and in `torch.ao.pruning`."""

from compressx.masks.maskset import MaskSet, apply, squash

__all__ = ["MaskSet", "apply", "squash"]
