"""What training costs: the steps of `reconstruct.py` and `finetune.py`, counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compressx.api.work import Windows, Work
from compressx.costs.forward import LOGIT_BYTES, Forward, Passed, backwards
from compressx.recipe.schema import ReconstructBlock
from compressx.recipe.tuning import Finetune
from compressx.training.schedule import split_windows

_F32 = 4
_ADAM = 12
"""How often each weight's number is read or written in a step: gradient, its norm, two moments, the weight."""


def steps_of(settings: ReconstructBlock, text: Windows, batches: int, processes: int) -> int:
    """Return how many steps one pass over a process's batches takes, those held out left aside."""
    held_out = min(math.ceil(batches * settings.held_out), batches - 1)
    return math.ceil((batches - held_out) / max(1, settings.batch_size // (text.batch * processes)))


def reconstruction(
    settings: ReconstructBlock, passed: Passed, text: Windows, batches: int, size: int, width: int, processes: int = 1
) -> Work:
    """Count the training of one block.

    Args:
        settings: the recipe's `reconstruct_block` section.
        passed: one calibration batch through the block.
        text: the calibration windows.
        batches: of them.
        size: parameters of the block.
        width: of the hidden states.
        processes: that share a step.

    Returns:
        Counts, and the memory of weights, gradients, optimizer and activations.
    """
    held_out = min(math.ceil(batches * settings.held_out), batches - 1)
    seen = batches - held_out
    compared = Work.of(moved=_F32 * 12.0 * text.batch * text.length * width)
    masked = Work.of(moved=13.0 * size, launches=3 * 7)  # gradient times mask
    step = passed.work + backwards(passed.work, weights=True) + compared + masked
    steps = steps_of(settings, text, batches, processes)
    each = seen * step + steps * Work.of(moved=_F32 * 1.5 * _ADAM * size, launches=300)
    checked = held_out * (passed.work + compared) + Work.of(moved=_F32 * 6.0 * size)
    # Weights, gradients masked and not, two moments, the best ones, those before rounding.
    memory = _F32 * 7.0 * size + 2 * passed.kept * (_F32 / text.itemsize)
    return settings.passes * each + (1 + settings.passes) * checked + Work.of(memory)


@dataclass(frozen=True)
class Trained:
    """A model to fine-tune.

    Attributes:
        passed: one step's windows through it.
        parameters: how many.
        width: of the hidden states.
        vocabulary: number of tokens.
    """

    passed: Forward
    parameters: int
    width: int
    vocabulary: int


@dataclass(frozen=True)
class Tuning:
    """The work of one step of fine-tuning and of one look at what is held out, and the bytes of activations."""

    step: Work
    check: Work
    kept: float


def finetuning(settings: Finetune, model: Trained, windows: int, length: int, *, narrow: bool) -> Tuning:
    """Count fine-tuning.

    Args:
        settings: the recipe's `finetune` section.
        model: the model; its teacher is taken to be as large.
        windows: drawn.
        length: tokens in a window.
        narrow: whether products are in fewer bits than the trained weights.
    """
    one, at_once = model.passed, settings.batch_size
    logits = at_once * length * model.vocabulary
    _, held_out = split_windows(windows, settings.held_out)
    forwards = one.work + Work.of(moved=float(LOGIT_BYTES * logits))
    taught = one.work if settings.teacher != "none" else Work()
    blocks = sum((b.work for b in one.blocks.values()), Work())
    again = blocks if settings.gradient_checkpointing else Work()
    optimizer = Work.of(moved=float(_F32 * _ADAM * model.parameters), launches=20)
    if narrow:  # copies of both models' weights
        optimizer = optimizer + Work.of(moved=2 * 6.0 * model.parameters)
    if settings.lora is None:  # gradients times masks
        optimizer = optimizer + Work.of(moved=13.0 * model.parameters, launches=3 * 7 * len(one.blocks))
    # Embeddings and the head are not trained.
    behind = backwards(blocks, weights=settings.lora is None) + backwards(one.outside.work, weights=False)
    step = forwards + behind + again + taught + optimizer
    kept = sum(b.kept for b in one.blocks.values()) + one.outside.kept
    if settings.gradient_checkpointing:
        entered = len(one.blocks) * at_once * length * model.width * _F32
        kept = max(b.kept for b in one.blocks.values()) + entered
    return Tuning(step, held_out / at_once * (forwards + taught), kept)
