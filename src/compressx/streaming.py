"""A model that stays on disk: its modules are there from the start, its weights a block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compressx import shards
from compressx.architecture import find_blocks
from compressx.errors import ArtifactError
from compressx.models import Checkpoint, load_empty, local_folder
from compressx.shards import OUTSIDE, Shards


@dataclass(frozen=True, eq=False)
class StreamedModel:
    """A model whose weights are loaded when they are asked for, and given up afterwards.

    Attributes:
        model: the transformers model in evaluation mode; parameters that are not loaded are on the `meta` device.
        blocks: its decoder blocks by fully qualified name.
        source: where the weights come from, by block; another folder's from when a block has been written there.
        device: where weights go.
    """

    model: Any
    blocks: Mapping[str, nn.Module]
    source: dict[str, Shards]
    device: torch.device

    @contextmanager
    def materialise(self, fqn: str) -> Iterator[nn.Module]:
        """Give a block with its weights for the length of a `with`; `OUTSIDE` is all but the blocks.

        What is changed is lost at the end unless it was written and `source` says where.
        """
        module = self.blocks[fqn] if fqn != OUTSIDE else self.model
        names = self.names(fqn)
        shards.load(self.model, self.source[fqn], fqn, self.device)
        try:
            if fqn == OUTSIDE:
                self.model.tie_weights(recompute_mapping=False)
            prefix = f"{fqn}." if fqn else ""
            known = self.model.state_dict()
            if missing := [name for name in names if known[prefix + name].is_meta]:
                raise ArtifactError(
                    f"{self.source[fqn].folder}: the checkpoint lacks {', '.join(prefix + n for n in missing[:3])}"
                )
            yield module
        finally:
            shards.unload(module, names)

    def names(self, fqn: str) -> list[str]:
        """Return the names, within the block, of the tensors that its checkpoint holds."""
        if fqn != OUTSIDE:
            return list(self.blocks[fqn].state_dict())
        return [n for n in self.model.state_dict() if not any(n.startswith(f"{block}.") for block in self.blocks)]


def open_streamed(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> StreamedModel:
    """Build a model without its weights, and find out where each block's lie.

    Raises:
        ArtifactError: a checkpoint that is missing or damaged.
        UnsupportedModelError: a GGUF file, which transformers only converts whole, or no decoder blocks.
    """
    folder = local_folder(checkpoint)
    model = load_empty(checkpoint)
    blocks = find_blocks(model)
    found = shards.find_shards(Path(folder), model, blocks)
    return StreamedModel(model, blocks, dict.fromkeys((OUTSIDE, *blocks), found), torch.device(device))
