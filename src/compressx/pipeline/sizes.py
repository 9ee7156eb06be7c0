"""What a run holds in memory and on disk, in bytes, by arithmetic: no weight is read.

The interpreter with its libraries, the activations of one batch, and what a pruner computes with are not counted.
`pipeline.timed` measures those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compressx.models.architecture import find_blocks
from compressx.models.streaming import is_larger_than_memory
from compressx.pipeline.saving import disk_bytes
from compressx.pipeline.stages import STAGES
from compressx.stages.state import RunState


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
    weights, memory = _weights(state), dict[str, dict[str, int]]()
    for stage in STAGES:
        if (parts := stage.memory(state)) or stage.during == "prune":
            memory.setdefault(stage.during, {} if "weights" in parts else {**weights}).update(parts)
    throughout, beside = disk_bytes(state, state.plan)
    largest = max(beside, key=lambda part: beside[part])
    return RunSizes(memory, {**throughout, largest: beside[largest]})


def _weights(state: RunState) -> dict[str, int]:
    """Return the bytes of the weights: all, or those of the largest block and the next one, which is read ahead."""
    streaming, itemsize = state.recipe.model.streaming, state.dtype.itemsize
    assert state.checkpoint is not None  # noqa: S101 - of a recipe with a model
    if streaming is True or (streaming == "auto" and is_larger_than_memory(state.checkpoint, state.device)):
        blocks = find_blocks(state.skeleton).values()
        return {"two blocks' weights": 2 * itemsize * max(sum(p.numel() for p in x.parameters()) for x in blocks)}
    return {"weights": itemsize * sum(p.numel() for p in state.skeleton.parameters())}
