"""Masks: in memory, on disk, in torch.ao, and what the masks of a run's output look like."""

from compressx.masks.maskset import MaskSet, apply, squash

__all__ = ["MaskSet", "apply", "squash"]
