"""The block loop: a model's decoder blocks in turn, each with its weights for as long as it is at work.

Hidden states enter at the first block (`capture`), go through each block (`each_block`, `advance`), and come out of the
last (`capture.run_around`). It is the same loop for a model in memory and for one that stays on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from compressx.api.pruner import Block, BlockCall
from compressx.models.access import Access
from compressx.models.architecture import Architecture, text_config
from compressx.models.capture import capture_calls, replay
from compressx.models.hidden import Keep, in_memory
from compressx.models.shards import OUTSIDE
from compressx.runtime.finite import finite

Run: TypeAlias = Callable[[Tensor], Tensor]
"""Computes what leaves a block, as it now is, from what enters it on one batch; both [batch, tokens, width]."""


def capture(
    access: Access, found: Architecture, batches: Sequence[Tensor], keep: Keep = in_memory
) -> tuple[list[Tensor], dict[str, list[BlockCall]]]:
    """Return the hidden states that enter the first block and the arguments of every block, as `capture_calls` does."""
    if not batches:
        return [], {fqn: [] for fqn in found.blocks}
    with access.materialise(OUTSIDE):
        return capture_calls(access.model, found.blocks, [ids.to(access.device) for ids in batches], keep)


def each_block(
    access: Access, found: Architecture, calls: Mapping[str, Sequence[BlockCall]], names: Iterable[str] | None = None
) -> Iterator[tuple[Block, list[Run]]]:
    """Give one decoder block after the other; the weights of each are there until the next is asked for.

    Args:
        access: the model.
        found: its blocks and linears.
        calls: with which arguments each block is called, as `capture` returned them.
        names: of the blocks wanted, in any order; all from the first to the last when absent.

    Yields:
        A block, and for each batch how to run it, wherever its input is kept.

    Raises:
        ArtifactError: weights that cannot be read.
    """
    order = list(found.blocks)
    config = text_config(access.model)
    for fqn in order if names is None else names:
        linears = {name: linear for name, linear in found.linears.items() if name.startswith(f"{fqn}.")}
        with access.materialise(fqn) as module:
            block = Block(order.index(fqn), fqn, module, linears, tuple(calls[fqn]), config)
            yield block, [partial(_run, module, access.device, call) for call in calls[fqn]]


def passes(runs: Sequence[Run], states: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    """Return, for each batch, how to run a block on the states that enter it."""
    return [partial(run, state) for run, state in zip(runs, states, strict=True)]


def advance(fqn: str, runs: Sequence[Run], states: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> None:
    """Replace what enters a block by what leaves it.

    Args:
        fqn: the block's name.
        runs: of the block, from `each_block`.
        states: what enters it, of each batch; overwritten unless `into` is there.
        into: where what leaves goes.

    Raises:
        UnsupportedModelError: an output that is not finite.
    """
    for run, state, room in zip(runs, states, states if into is None else into, strict=True):
        room.copy_(finite(run(state), fqn))


def _run(module: nn.Module, device: torch.device, call: BlockCall, state: Tensor) -> Tensor:
    return replay(module, state.to(device), call)
