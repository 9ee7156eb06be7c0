"""Record the inputs of a model's decoder blocks without running them.

A model's forward computes embeddings, rotary tables and masks, and calls each block with them. Here it runs once per
batch with every block replaced by one that records its arguments and returns its input, so that each block can later be
replayed alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.pruner import BlockCall
from compressx.models.hidden import Keep, in_memory
from compressx.runtime.errors import UnsupportedModelError


class _Output(Tensor):
    """Output of a replaced block, usable as a tensor or as a tuple whose first item is the tensor."""

    alone: Tensor
    # Operations on it return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        raise UnsupportedModelError(
            "the model unpacks the output of its blocks; supported are models that use it whole or index it with [0]"
        )

    def __getitem__(self, index: Any) -> Tensor:
        return self.alone if isinstance(index, int) else self.alone[index]


class _AllBlocksReachedError(Exception):
    """Stops the model's forward once the last block has been called."""


def capture_calls(
    model: nn.Module, blocks: Mapping[str, nn.Module], batches: Sequence[Tensor], keep: Keep = in_memory
) -> tuple[list[Tensor], dict[str, list[BlockCall]]]:
    """Record the hidden states before the first block, and each block's further arguments.

    Args:
        model: a causal language model in evaluation mode.
        blocks: its decoder blocks in order, by fully qualified name.
        batches: token ids, each [batch, tokens].
        keep: how to store the hidden states.

    Returns:
        The input of block 0, [batch, tokens, width] for each batch; and for each block, one call per batch. Equal
        tensors (rotary tables, masks) are one object for all batches and blocks.

    Raises:
        UnsupportedModelError: a block is not called exactly once, in order, on the previous block's output.
    """
    states: list[Tensor] = []
    calls: dict[str, list[BlockCall]] = {fqn: [] for fqn in blocks}
    known: list[Tensor] = []
    order = list(blocks)
    for batch in batches:
        reached: list[str] = []
        passed: list[Tensor] = []

        def record(
            fqn: str, hidden: Tensor, call: BlockCall, reached: list[str] = reached, passed: list[Tensor] = passed
        ) -> Tensor:
            if reached and not _same(hidden, passed[-1]):
                raise UnsupportedModelError(
                    f"{fqn}: the model changes the hidden states between {reached[-1]} and this block, so blocks "
                    "cannot be pruned one at a time"
                )
            if hidden.dim() != 3:
                raise UnsupportedModelError(
                    f"{fqn} takes hidden states {[*hidden.shape]}, expected [batch, tokens, width]; a model with "
                    "several residual streams can only be pruned without calibration, such as by magnitude"
                )
            reached.append(fqn)
            passed.append(hidden)
            calls[fqn].append(BlockCall(_shared(call.args, known), _shared(dict(call.kwargs), known)))
            if fqn == order[-1]:
                raise _AllBlocksReachedError
            return hidden

        with replaced_forwards(blocks, record), torch.no_grad(), contextlib.suppress(_AllBlocksReachedError):
            model(batch, use_cache=False)
        if reached != order:
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected its {len(order)} blocks to be called once each, in order; "
                f"called: {', '.join(reached) or 'none'}"
            )
        states.append(keep(passed[0]))
    return states, calls


def replay(block: nn.Module, hidden: Tensor, call: BlockCall) -> Tensor:
    """Run one block on hidden states [batch, tokens, width] with recorded arguments.

    For float32 hidden states, tensors of fewer bits among the arguments (ALiBi, additive masks) are converted to
    float32 too, unless autocast is enabled.
    """
    if hidden.dtype == torch.float32 and not torch.is_autocast_enabled(hidden.device.type):
        call = BlockCall(_in_float32(call.args), _in_float32(dict(call.kwargs)))
    output = block(hidden, *call.args, **call.kwargs)
    result: Tensor = output[0] if isinstance(output, tuple | list) else output
    return result


def run_around(model: Any, blocks: Mapping[str, nn.Module], ids: Tensor, state: Tensor) -> Any:
    """Run a model on token ids with its blocks skipped and `state` as the last block's output."""
    first = next(iter(blocks))
    with replaced_forwards(blocks, lambda fqn, hidden, _: state if fqn == first else hidden):
        return model(ids, use_cache=False)


@contextlib.contextmanager
def skipped(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Pass hidden states by blocks that add nothing to them, within a `with`, also in training."""
    with replaced_forwards(blocks, lambda _fqn, hidden, _call: hidden):
        yield


@contextlib.contextmanager
def replaced_forwards(
    blocks: Mapping[str, nn.Module], forward: Callable[[str, Tensor, BlockCall], Tensor]
) -> Iterator[None]:
    """Replace the forward of every block by `forward(fqn, hidden_states, call)` within a `with`."""

    def stand_in(fqn: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            hidden, further = (kwargs.pop("hidden_states"), args) if "hidden_states" in kwargs else (args[0], args[1:])
            if isinstance(hidden, _Output):
                hidden = hidden.alone
            result = forward(fqn, hidden, BlockCall(further, kwargs))
            output = result.as_subclass(_Output)
            output.alone = result
            return output

        return run

    own = {fqn: vars(module)["forward"] for fqn, module in blocks.items() if "forward" in vars(module)}
    try:
        for fqn, module in blocks.items():
            module.forward = stand_in(fqn)
        yield
    finally:
        for fqn, module in blocks.items():
            vars(module).pop("forward", None)
            if fqn in own:
                module.forward = own[fqn]


def _same(hidden: Tensor, passed: Tensor) -> bool:
    """Return whether hidden states are what the block before put out, or all of it under another name."""
    return hidden is passed or (
        hidden.data_ptr() == passed.data_ptr()
        and (hidden.shape, hidden.stride(), hidden.dtype) == (passed.shape, passed.stride(), passed.dtype)
    )


def _in_float32(value: Any) -> Any:
    """Convert float16 and bfloat16 tensors in a nested value to float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, tuple | list):
        return type(value)(map(_in_float32, value))
    return {k: _in_float32(v) for k, v in value.items()} if isinstance(value, dict) else value


def _shared(value: Any, known: list[Tensor]) -> Any:
    """Replace tensors by equal ones in `known`: rotary tables and masks repeat for batches of one shape."""
    if isinstance(value, Tensor):
        if any(other is value for other in known):
            return value
        for other in known:
            if other.shape == value.shape and other.dtype == value.dtype and torch.equal(other, value):
                return other
        known.append(value)
        return value
    if isinstance(value, tuple | list):
        return type(value)(_shared(v, known) for v in value)
    if isinstance(value, dict):
        return {k: _shared(v, known) for k, v in value.items()}
    return value
