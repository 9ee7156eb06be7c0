"""The memory that fine-tuning takes, and the refusal of what cannot fit."""

from __future__ import annotations

import os
from typing import Any

import torch

from compressx.models.architecture import text_config
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_skeleton
from compressx.models.streaming import free_memory
from compressx.planning.plan import Plan
from compressx.recipe.rules import matches
from compressx.recipe.schema import LoadedRecipe, Recipe
from compressx.recipe.sources import ModelSource
from compressx.recipe.training import Finetune, Lora
from compressx.runtime.errors import RecipeError
from compressx.training.schedule import split_windows

_WIDE = 4
"""Bytes of a float32: weights are trained in it, whatever their dtype."""

CHECKPOINT = 4 * _WIDE
"""Bytes of a trained weight in a checkpoint: its value, two moments and its best value."""


def trained_weights(settings: Finetune, planned: Plan) -> int:
    """Count the weights that fine-tuning trains, dropped ones included; without gains of norms and biases."""
    if settings.lora is None:
        return sum(x.weights for x in planned.linears)
    adapted = [x for x in planned.linears if any(matches(target, x.name) for target in settings.lora.targets)]
    return settings.lora.rank * sum(sum(x.shape) for x in adapted)


def teacher_weights(settings: Finetune, skeleton: Any) -> int:
    """Count the weights of the model that fine-tuning learns from; 0 without one."""
    if isinstance(settings.teacher, ModelSource):
        skeleton = load_skeleton(find_checkpoint(settings.teacher))
    return 0 if settings.teacher == "none" else sum(p.numel() for p in skeleton.parameters())


def finetuning_bytes(
    recipe: Recipe, settings: Finetune, planned: Plan, skeleton: Any, itemsize: int, teacher: int
) -> dict[str, int]:
    """Return the bytes that fine-tuning takes at the same time, by part; a lower bound, without most activations.

    Args:
        recipe: the recipe.
        settings: its `finetune` section.
        planned: its plan.
        skeleton: the model without its weights.
        itemsize: bytes of one weight as the model is loaded.
        teacher: number of weights of the teacher; 0 without.
    """
    draw, calibration = settings.draw, recipe.calibration
    drawn = (draw.samples, draw.sequence_length) if draw is not None else (0, 0)
    if draw is None and calibration is not None:
        drawn = (calibration.samples, calibration.sequence_length)
    held_out = split_windows(drawn[0], settings.held_out)[1]
    trained = trained_weights(settings, planned)
    logits = settings.batch_size * drawn[1] * text_config(skeleton).vocab_size
    adapters = 0 if settings.lora is None else trained
    parts = {
        "weights": _WIDE * (sum(p.numel() for p in skeleton.parameters()) + adapters),
        "gradients": _WIDE * trained,
        "moments": 2 * _WIDE * trained,
        "best weights": _WIDE * trained if held_out else 0,
        "masks": sum(x.weights for x in planned.linears),
        "teacher": itemsize * teacher,
        "logits": 2 * logits * (3 if teacher else 2),  # both models' and their gradient, of two bytes each or more
    }
    return {name: size for name, size in parts.items() if size}


def refuse_large_finetuning(
    loaded: LoadedRecipe, planned: Plan, skeleton: Any, dtype: torch.dtype, device: torch.device, *,
    present: bool = False,
) -> None:  # fmt: skip
    """Refuse fine-tuning that cannot fit in the free memory, before anything is pruned; a `present` model is in it.

    Raises:
        RecipeError: with the bytes by part, the free memory, and what takes less.
    """
    recipe, settings = loaded.recipe, loaded.recipe.finetune
    if settings is None:
        return
    own, teacher = sum(p.numel() for p in skeleton.parameters()), teacher_weights(settings, skeleton)

    def needed(settings: Finetune, teacher: int = teacher) -> dict[str, int]:
        return finetuning_bytes(recipe, settings, planned, skeleton, dtype.itemsize, teacher)

    parts, free = needed(settings), free_memory(device) + (own * dtype.itemsize if present else 0)
    if device.type == "cpu" and (others := int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1):
        parts["models of the other processes"] = others * own * dtype.itemsize
    total = sum(parts.values())
    if total <= free:
        return
    smaller = {}
    if settings.lora is None:
        smaller["finetune.lora: {rank: 16}"] = needed(settings.model_copy(update={"lora": Lora()}))
    if teacher:
        smaller["finetune.teacher: none"] = needed(settings, 0)
    if settings.batch_size > 1:
        smaller["finetune.batch_size: 1"] = needed(settings.model_copy(update={"batch_size": 1}))
    told = ", ".join(f"{key} ({_gb(sum(sizes.values()))})" for key, sizes in smaller.items())
    by_part = ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
    raise RecipeError(
        f"{loaded.where('finetune')}: fine-tuning needs at least {_gb(total)} of memory ({by_part}), but {device} has "
        f"{_gb(free)}. Less is needed by {told or 'a smaller model'}; or remove finetune"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
