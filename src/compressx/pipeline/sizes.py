"""What a run holds in memory and on disk, in bytes, by arithmetic: no weight is read.

One function for each part of a run; each returns bytes by name. Not counted: the interpreter with its libraries, the
activations of one batch, and what a pruner computes with. `pipeline.timed` measures those.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressx.allocation.methods import windows_kept
from compressx.api.pruner import AnyPruner, Block, Linear, Statistic, statistic_of
from compressx.blocks.hooks import inputs_watched
from compressx.blocks.observe import is_routed
from compressx.models.architecture import find_blocks, survey, text_config
from compressx.models.streaming import is_larger_than_memory
from compressx.planning.plan import Plan
from compressx.recipe.schema import Recipe
from compressx.stages.state import RunState
from compressx.training.memory import CHECKPOINT, finetuning_bytes, teacher_weights, trained_weights

_TRAINED = 5 * 4
"""Bytes of a weight while its block is trained in float32: itself, its gradient, two moments, its best value."""


@dataclass(frozen=True)
class RunSizes:
    """What a run holds at least, in bytes.

    Attributes:
        memory: by stage, then by part.
        disk: by part.
    """

    memory: Mapping[str, Mapping[str, int]]
    disk: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {"memory_bytes": {stage: dict(parts) for stage, parts in self.memory.items()}, "disk_bytes": self.disk}


def sizes_of(state: RunState) -> RunSizes:
    """Return what a planned run will hold on its device, at least."""
    recipe, planned, skeleton, device = state.recipe, state.plan, state.skeleton, state.device
    checkpoint, itemsize = state.checkpoint, state.dtype.itemsize
    assert checkpoint is not None  # noqa: S101 - of a recipe with a model
    inputs = recipe, planned, skeleton, itemsize
    streaming = recipe.model.streaming
    streamed = streaming is True or (streaming == "auto" and is_larger_than_memory(checkpoint, device))
    weights = weight_bytes(skeleton, itemsize, streamed=streamed)
    found = {
        "calibrate": gradient_bytes(*inputs),
        "allocate": allocation_bytes(*inputs),
        "prune": {
            **hidden_state_bytes(*inputs), **statistics_bytes(recipe, planned, skeleton),
            **reconstruction_bytes(planned, skeleton),
        },
    }  # fmt: skip
    memory = {stage: {**weights, **parts} for stage, parts in found.items() if parts or stage == "prune"}
    if (tuning := recipe.finetune) is not None:
        teacher = teacher_weights(tuning, skeleton)
        memory["finetune"] = finetuning_bytes(recipe, tuning, planned, skeleton, itemsize, teacher)
    throughout, beside = disk_bytes(*inputs)
    largest = max(beside, key=lambda part: beside[part])
    return RunSizes(memory, {**throughout, largest: beside[largest]})


def weight_bytes(skeleton: Any, itemsize: int, *, streamed: bool) -> dict[str, int]:
    """Return the bytes of the weights: all, or those of the largest block and the next one, which is read ahead."""
    sizes = block_sizes(skeleton)
    if streamed:
        return {"two blocks' weights": 2 * itemsize * max(sizes.values())}
    return {"weights": itemsize * sum(p.numel() for p in skeleton.parameters())}


def block_sizes(skeleton: Any) -> dict[str, int]:
    """Return the number of parameters of each decoder block, by name."""
    return {fqn: sum(p.numel() for p in block.parameters()) for fqn, block in find_blocks(skeleton).items()}


def hidden_state_bytes(recipe: Recipe, planned: Plan, skeleton: Any, itemsize: int) -> dict[str, int]:
    """Return the bytes of the calibration text's hidden states between two blocks, if they are kept in memory."""
    text = recipe.calibration
    if text is None or not planned.needs_calibration:
        return {}
    size = _stream_bytes(recipe, planned, skeleton, itemsize)
    return {} if text.memory_limit is not None and size > text.memory_limit else {"hidden states": size}


def gradient_bytes(recipe: Recipe, planned: Plan, skeleton: Any, itemsize: int) -> dict[str, int]:
    """Return the bytes of one batch's hidden states between all blocks, through which a gradient goes back."""
    text = recipe.calibration
    if text is None or not (planned.sensitive or planned.reconstruct_block is not None):
        return {}
    windows = min(text.batch_size, text.samples) * (1 + len(find_blocks(skeleton)))
    return {"hidden states between all blocks": windows * _window_bytes(recipe, skeleton, itemsize)}


def allocation_bytes(recipe: Recipe, planned: Plan, skeleton: Any, itemsize: int) -> dict[str, int]:
    """Return the bytes of hidden states and of all blocks' gradients while an allocation measures, if in memory."""
    text, settings = recipe.calibration, planned.allocation
    if text is None or settings is None:
        return {}
    size = windows_kept(planned, settings, text.samples) * _window_bytes(recipe, skeleton, itemsize)
    kept = {} if text.memory_limit is not None and size > text.memory_limit else {"hidden states and gradients": size}
    return {**kept, **statistics_bytes(recipe, planned, skeleton)}


def statistics_bytes(recipe: Recipe, planned: Plan, skeleton: Any) -> dict[str, int]:
    """Return the bytes of the statistics of the largest block, of whatever pruners.

    Statistics are made and updated on the meta device, where tensors have no numbers; of one that cannot be updated
    there, what it has when it is made is counted. Linears that the model gives the same input share one.
    """
    text = recipe.calibration
    if text is None or not planned.needs_calibration or not planned.linears:
        return {}
    blocks = find_blocks(skeleton)
    fqn = max(blocks, key=lambda name: sum(x.weights for x in planned.linears if x.block == name))
    linears = survey(skeleton).inside(fqn)
    block = Block(list(blocks).index(fqn), fqn, blocks[fqn], linears, (), text_config(skeleton))
    windows = (text.samples, text.sequence_length)
    inputs, size = _inputs(skeleton, linears, text.sequence_length), 0
    with torch.device("meta"):
        fresh: dict[str, list[Statistic]] = {}  # by input
        for plugin, pruner, name in _asking(planned, fqn):
            statistic, seen = statistic_of(plugin, pruner, block, name), fresh.setdefault(inputs[name], [])
            if statistic is not None and statistic not in seen:
                seen.append(statistic)
                size += _held(statistic, (*windows, linears[name].in_features), skeleton.dtype)
    return {"statistics of the largest block": size} if size else {}


def _asking(planned: Plan, fqn: str) -> Iterator[tuple[str, AnyPruner, str]]:
    """Yield the pruners of a block, each with its plugin's name and a linear that it is asked about."""
    built = planned.build()
    for rule, patterns in planned.asked(fqn).items():
        for spec, pruner in zip((rule.pruner, rule.reconstructor), built[rule], strict=True):
            if spec is not None and pruner is not None:
                yield from ((spec.name, pruner, name) for name in patterns)


def reconstruction_bytes(planned: Plan, skeleton: Any) -> dict[str, int]:
    """Return the bytes of the largest block while it is trained: all its weights in float32, and Adam's state."""
    if planned.reconstruct_block is None:
        return {}
    trained = max(sum(x.weights for x in planned.linears if x.block == fqn) for fqn in block_sizes(skeleton))
    rest = max(block_sizes(skeleton).values()) - trained
    return {"training a block": _TRAINED * trained + 4 * max(rest, 0)}


def disk_bytes(recipe: Recipe, planned: Plan, skeleton: Any, itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return what a run needs on its output's disk throughout, and parts of which it needs the largest beside that.

    Throughout: finished blocks, and their masks twice. Beside that: hidden states, with those of an earlier block and
    those that `memory_limit` keeps in files; two checkpoints of fine-tuning; at the end the model, with the last one.
    """
    whole = itemsize * sum(p.numel() for p in skeleton.parameters())
    finished = itemsize * sum(size for fqn, size in block_sizes(skeleton).items() if planned.in_block(fqn))
    masks = 2 * sum(x.weights for x in planned.linears) // 8
    states = 0
    if (text := recipe.calibration) is not None and planned.needs_calibration:
        once = _stream_bytes(recipe, planned, skeleton, itemsize)
        states = once * (2 if text.memory_limit is None or once <= text.memory_limit else 3)
    tuned = 0 if recipe.finetune is None else CHECKPOINT * trained_weights(recipe.finetune, planned)
    return (
        {"finished blocks": finished, "masks": masks},
        {"hidden states": states, "two checkpoints of fine-tuning": 2 * tuned, "one with the model": tuned + whole},
    )


def _stream_bytes(recipe: Recipe, planned: Plan, skeleton: Any, itemsize: int) -> int:
    """Return the bytes of the calibration text's hidden states, twice where dense and pruned ones are kept."""
    assert recipe.calibration is not None  # noqa: S101 - callers have looked
    streams = 1 if planned.reconstruct_block is None else 2
    return streams * recipe.calibration.samples * _window_bytes(recipe, skeleton, itemsize)


def _window_bytes(recipe: Recipe, skeleton: Any, itemsize: int) -> int:
    """Return the bytes of the hidden states of one calibration window."""
    assert recipe.calibration is not None  # noqa: S101 - callers have looked
    width: int = text_config(skeleton).hidden_size
    return recipe.calibration.sequence_length * width * itemsize


def _inputs(skeleton: Any, linears: Mapping[str, Linear], length: int) -> dict[str, str]:
    """Return for each linear the first linear that has the same input; itself, where the model cannot say so."""
    first: list[tuple[Tensor, str]] = []
    found = {name: name for name in linears}

    def take(name: str, x: Tensor) -> None:
        found[name] = next((other for seen, other in first if seen is x), name)
        first.append((x, found[name]))

    # Without a mask most models look at numbers, which the meta device has not; with one some do not run. Routers
    # always look at numbers: what was seen before them counts.
    for given in ({"attention_mask": torch.zeros(1, 1, length, length, device="meta")}, {}):
        with suppress(Exception), torch.no_grad(), inputs_watched(linears, take):
            skeleton(torch.zeros(1, length, dtype=torch.int64, device="meta"), use_cache=False, **given)
        if first:
            break
    return found


def _held(statistic: Statistic, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a copy of a statistic after inputs of a shape."""
    statistic = copy.copy(statistic)  # the one that is compared with others stays fresh
    with suppress(Exception):  # one of a third party may look at numbers
        if not is_routed(statistic):
            statistic.update(torch.empty(shape, dtype=dtype))
        return _total(x for x, _ in statistic.tensors().values())
    return _total(x for x in vars(statistic).values() if isinstance(x, Tensor))


def _total(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
