"""What a model feeds its decoder blocks, recorded without running them.

A model's own forward computes embeddings, rotary tables and masks, and hands each block its arguments. Here that
forward runs once per batch with every block replaced by one that notes its arguments and passes its input on, so that
each block can later be replayed alone.
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
    """What a block returns, for a model to take as its own blocks return it: alone, or as the first of a tuple."""

    alone: Tensor
    # Whatever is computed of it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        raise UnsupportedModelError(
            "the model unpacks what its blocks return; supported are models that take it whole, or its first part ([0])"
        )

    def __getitem__(self, index: Any) -> Tensor:
        return self.alone if isinstance(index, int) else self.alone[index]


class _AllBlocksReachedError(Exception):
    """Leaves the model's forward once the last block has its arguments; what follows is not wanted."""


def capture_calls(
    model: nn.Module, blocks: Mapping[str, nn.Module], batches: Sequence[Tensor], keep: Keep = in_memory
) -> tuple[list[Tensor], dict[str, list[BlockCall]]]:
    """Record what enters the first block, and with which further arguments each block is called.

    Args:
        model: a causal language model in evaluation mode.
        blocks: its decoder blocks in order, by fully qualified name.
        batches: token ids, each [batch, tokens].
        keep: where the hidden states are kept.

    Returns:
        The hidden states that enter block 0, one [batch, tokens, width] for each batch, and by block one call for each
        batch. Equal tensors (rotary tables, masks) are one object over all batches and blocks.

    Raises:
        UnsupportedModelError: when a block is not called exactly once, in order, on the previous block's output.
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
            if reached and hidden is not passed[-1]:
                raise UnsupportedModelError(
                    f"{fqn}: the model changes the hidden states between {reached[-1]} and this block, so blocks "
                    "cannot be pruned one at a time"
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

    Hidden states that are float32 where the model is not take tensors among the arguments (ALiBi, masks that are added)
    with them, unless autocast sees to that.
    """
    if hidden.dtype == torch.float32 and not torch.is_autocast_enabled(hidden.device.type):
        call = BlockCall(_in_float32(call.args), _in_float32(dict(call.kwargs)))
    output = block(hidden, *call.args, **call.kwargs)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def run_around(model: Any, blocks: Mapping[str, nn.Module], ids: Tensor, state: Tensor) -> Any:
    """Run a model on token ids without its blocks, as if the last of them had given `state`."""
    first = next(iter(blocks))
    with replaced_forwards(blocks, lambda fqn, hidden, _: state if fqn == first else hidden):
        return model(ids, use_cache=False)


@contextlib.contextmanager
def replaced_forwards(
    blocks: Mapping[str, nn.Module], forward: Callable[[str, Tensor, BlockCall], Tensor]
) -> Iterator[None]:
    """Replace the forward of every block by `forward(fqn, hidden_states, call)`, and put them back whatever happens."""

    def stand_in(fqn: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            hidden, further = (kwargs.pop("hidden_states"), args) if "hidden_states" in kwargs else (args[0], args[1:])
            if isinstance(hidden, _Output):
                hidden = hidden.alone
            given = forward(fqn, hidden, BlockCall(further, kwargs))
            output = given.as_subclass(_Output)
            output.alone = given
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


def _in_float32(value: Any) -> Any:
    """Widen tensors of fewer bits."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, tuple | list):
        return type(value)(map(_in_float32, value))
    return {k: _in_float32(v) for k, v in value.items()} if isinstance(value, dict) else value


def _shared(value: Any, known: list[Tensor]) -> Any:
    """Replace tensors by equal ones seen before: rotary tables and masks are the same for every batch of one shape."""
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
