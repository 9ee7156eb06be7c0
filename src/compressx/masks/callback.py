"""Masks in transformers' Trainer, and in those built on it, such as TRL's SFTTrainer.

Import this module only where it is used, because it imports transformers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from compressx.masks.adapters import has_adapters, mask_adapters
from compressx.masks.maskset import MaskSet
from compressx.numerics.masked import zeroed


@final
class MaskCallback(TrainerCallback):  # type: ignore[misc]
    """Hold masks during `Trainer.train`, for full weights or for LoRA adapters.

    Weights: dropped ones are set to zero at the start, get no gradient, and are set to zero after each step, for
    optimizers that move them nevertheless. Nothing is parametrized, so checkpoints are plain ones.
    Adapters: `mask_adapters` is called; merge them afterwards with `merge_adapters`.

    Args:
        masks: of the model, or the path of their file.

    Raises:
        ArtifactError: no such file; when training starts, as for `MaskSet.apply` or `mask_adapters`.
    """

    def __init__(self, masks: MaskSet | str | Path) -> None:
        self._masks = masks if isinstance(masks, MaskSet) else MaskSet.load(masks)
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self._release()
        if has_adapters(model):
            mask_adapters(model, self._masks)
            return
        self._masks.apply(model)
        self._kept = {model.get_parameter(name): keep for name, keep in self._masks.by_parameter(model).items()}
        for parameter, keep in self._kept.items():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(partial(zeroed, keep=keep)))  # type: ignore[no-untyped-call]

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            for parameter, keep in self._kept.items():
                parameter.masked_fill_(~keep, 0.0)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._release()

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._kept = [], {}
