"""The loop over decoder blocks, for models in memory and for streamed ones.

Hidden states are captured at the first block (`capture`), run through each block (`each_block`, `advance`), and passed
to the rest of the model (`capture.run_around`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from compressx.api.pruner import Block, BlockCall
from compressx.models.access import Access
from compressx.models.architecture import Architecture, text_config
from compressx.models.arithmetic import products_in
from compressx.models.capture import capture_calls, replay
from compressx.models.handed import apart
from compressx.models.hidden import Keep, in_memory
from compressx.models.shards import OUTSIDE
from compressx.runtime.finite import first_damaged, looks_finite, not_finite
from compressx.runtime.transfer import to_device, written_behind


@dataclass(frozen=True, eq=False)
class Run:
    """Runs a block, with its current weights, on the hidden states of one batch.

    What the model's blocks hand one another beside the hidden states, such as the keys and values that later blocks of
    Gemma 4 use again, is changed by it as in the model.

    Attributes:
        module: the block.
        access: its model.
        call: the batch's other arguments.
    """

    module: nn.Module
    access: Access
    call: BlockCall

    def __call__(self, state: Tensor) -> Tensor:
        """Return the output of the block; both [batch, tokens, width], on any device."""
        with products_in(self.access.products, self.module, self.access.device):
            return replay(self.module, to_device(state, self.access.device), self.call)

    def apart(self, state: Tensor) -> Tensor:
        """Return the output, and leave what blocks hand one another as it is."""
        return Run(self.module, self.access, apart(self.call))(state)


def capture(
    access: Access, found: Architecture, batches: Sequence[Tensor], keep: Keep = in_memory
) -> tuple[list[Tensor], dict[str, list[BlockCall]]]:
    """Return the hidden states before the first block and the arguments of every block (see `capture_calls`)."""
    if not batches:
        return [], {fqn: [] for fqn in found.blocks}
    with access.materialise(OUTSIDE):
        return capture_calls(access.model, found.blocks, [ids.to(access.device) for ids in batches], keep)


def each_block(
    access: Access, found: Architecture, calls: Mapping[str, Sequence[BlockCall]], names: Iterable[str] | None = None
) -> Iterator[tuple[Block, list[Run]]]:
    """Yield the decoder blocks one after the other; each one's weights are loaded until the next iteration.

    Args:
        access: the model.
        found: its blocks and linears.
        calls: the arguments of each block, from `capture`.
        names: blocks to yield, in this order; None for all.

    Yields:
        A block, and for each batch a function that runs it; inputs may be on any device.

    Raises:
        ArtifactError: weights that cannot be read.
    """
    order = list(found.blocks)
    config = text_config(access.model)
    wanted = order if names is None else list(names)
    for fqn, following in zip(wanted, [*wanted[1:], None], strict=False):
        linears = found.inside(fqn)
        with access.materialise(fqn) as module:
            if following is not None:
                access.read_ahead(following)
            block = Block(order.index(fqn), fqn, module, linears, tuple(calls[fqn]), config)
            yield block, [Run(module, access, call) for call in calls[fqn]]


def passes(runs: Sequence[Run], states: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    """Bind each batch's hidden states to its run of a block, which changes nothing that other blocks are handed."""
    return [partial(run.apart, state) for run, state in zip(runs, states, strict=True)]


def advance(fqn: str, runs: Sequence[Run], states: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> None:
    """Replace a block's input by its output, and change what the blocks after it are handed.

    Args:
        fqn: the block's name.
        runs: of the block, from `each_block`.
        states: the block's input, for each batch; overwritten if `into` is None.
        into: where to write the output.

    Raises:
        UnsupportedModelError: an output that is not finite; found when all have been written.
    """
    rooms, fine = states if into is None else into, []
    with written_behind() as put:
        for run, state, room in zip(runs, states, rooms, strict=True):
            output = run(state)
            fine.append(looks_finite(output))
            put(room, output)
    if first_damaged(rooms, fine) is not None:
        raise not_finite(fqn)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore the mode of every module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
