"""What a run holds in memory and on disk, by arithmetic, and what takes less memory.

No weight is read. Memory is a lower bound, without activations and what a pruner computes with, which `pipeline.timed`
measures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from compressx.api.pruner import Block, statistic_of
from compressx.models.architecture import architecture_of, find_blocks, text_config
from compressx.models.export import room_for
from compressx.models.streaming import is_larger_than_memory
from compressx.pipeline.inputs import needing_all_weights
from compressx.planning.plan import Plan
from compressx.runtime.errors import ArtifactError, OutOfMemoryError, memory_named
from compressx.stages.state import RunState
from compressx.training.stage import LESS_MEMORY, checkpoint_bytes

_OF_CALIBRATION = "lower calibration.batch_size, samples or sequence_length, or set calibration.memory_limit: 4GB"
_LESS = {
    **dict.fromkeys(("calibrate", "allocate", "prune"), _OF_CALIBRATION),
    "evaluate": "lower batch_size or sequence_length of the evaluator",
    **LESS_MEMORY,
}
"""What takes less memory, by the first word of the stage in which it ran out."""


def memory_bytes(state: RunState) -> dict[str, int]:
    """Return what a planned run holds on its device, at least: while it prunes or, if that is more, compares."""
    itemsize, blocks = state.dtype.itemsize, find_blocks(state.skeleton)
    sizes = {fqn: itemsize * sum(p.numel() for p in block.parameters()) for fqn, block in blocks.items()}
    streaming, checkpoint = state.recipe.model.streaming, state.checkpoint
    assert checkpoint is not None  # noqa: S101 - of a recipe with a model
    if streaming is True or (streaming == "auto" and is_larger_than_memory(checkpoint, state.device)):
        found = {"two blocks' weights": 2 * max(sizes.values())}  # the next one is read ahead
    else:
        found = {"weights": itemsize * sum(p.numel() for p in state.skeleton.parameters())}
    beside = {"the dense model's": sum(found.values())} if state.compared_with else {}
    return max(found | _calibration_bytes(state), found | beside, key=lambda parts: sum(parts.values()))


def _calibration_bytes(state: RunState) -> dict[str, int]:
    """Return what calibration text takes while blocks are pruned, by part."""
    plan, text, blocks, found = state.plan, state.recipe.calibration, find_blocks(state.skeleton), dict[str, int]()
    if text is None or not plan.needs_calibration:
        return found
    states = state.hidden_bytes(plan.hidden_copies * text.samples)
    if not state.in_files(states):
        found["hidden states"] = states
    largest = max(blocks, key=lambda fqn: sum(x.weights for x in plan.linears if x.block == fqn))
    linears = architecture_of(state.skeleton).inside(largest)
    block = Block(0, largest, blocks[largest], linears, (), text_config(state.skeleton))
    statistics: dict[object, int] = {}
    with torch.device("meta"):
        for rule, built in plan.build().items():
            for name, pruner in product(plan.decided_in(largest).get(rule, ()), built):
                linear, statistic = block.linears[name], statistic_of(rule.label, pruner, block, name)
                held = () if statistic is None else vars(statistic).values()
                # Linears of one width mostly share their input, such as queries, keys and values.
                statistics[type(statistic), linear.in_features, linear.expert] = sum(
                    x.numel() * x.element_size() for x in held if isinstance(x, Tensor)
                )
    return {**found, "statistics of the largest block": sum(statistics.values())}


def disk_bytes(state: RunState, plan: Plan) -> dict[str, int]:
    """Return what a run needs on its output's disk: parts that last, and the largest of those that replace one another.

    Finished blocks, and their masks twice, last. One after the other there are hidden states, with those of an earlier
    block and those that `memory_limit` keeps in files; two checkpoints of fine-tuning; the model, with a checkpoint.
    """
    recipe, itemsize = state.recipe, state.dtype.itemsize
    whole = itemsize * sum(p.numel() for p in state.skeleton.parameters())
    blocks = [block for fqn, block in find_blocks(state.skeleton).items() if plan.in_block(fqn)]
    states = 0
    if recipe.calibration is not None and plan.needs_calibration:
        once = state.hidden_bytes(plan.hidden_copies * recipe.calibration.samples)
        states = once * (3 if state.in_files(once) else 2)
    tuned = checkpoint_bytes(recipe, plan)
    label = "one checkpoint with the model" if tuned else "the model"
    in_turn = {"hidden states": states, "two checkpoints of fine-tuning": 2 * tuned, label: tuned + whole}
    most = max(in_turn, key=in_turn.__getitem__)
    return {
        "finished blocks": itemsize * sum(p.numel() for block in blocks for p in block.parameters()),
        "masks": 2 * sum(x.weights for x in plan.linears) // 8,
        most: in_turn[most],
    }


def refuse_full_disk(state: RunState, plan: Plan) -> None:
    """Refuse an output for which the disk has no room. What earlier runs left for the same output counts as free."""
    needed, output = disk_bytes(state, plan), state.recipe.output
    folder, free = room_for(output)
    if free < sum(needed.values()):
        listed = ", ".join(f"{name} {size}" for name, size in needed.items())
        raise ArtifactError(
            f"output {output} needs {sum(needed.values())} bytes: {listed}; {folder} has {free} bytes free. Free some "
            "space there, or choose another disk"
        )


@contextlib.contextmanager
def memory_advised(state: RunState) -> Iterator[None]:
    """Name the stage in the error of memory that ran out, and the keys of the recipe to change."""
    try:
        with memory_named("an array"):
            yield
    except OutOfMemoryError as error:
        name = state.timing.stage
        advice = [less] if (less := _LESS.get(name.partition(" ")[0])) else []
        folder = state.checkpoint is not None and state.checkpoint.file is None  # else nothing is streamed
        if folder and state.recipe.model.streaming is not True and not any(needing_all_weights(state.recipe)):
            advice.append("set model.streaming: true")
        what = ", or ".join(advice) or "free some memory, or use a machine with more"
        raise OutOfMemoryError(f"{name}: {error}; {what}") from error
