"""What a model's blocks hand one another beside hidden states: keys and values that later blocks of Gemma 4 use again.

It is in a `UserDict` among a block's arguments, the same object for all blocks of a batch, which some blocks write and
others read.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compressx.api.pruner import BlockCall


def apart(call: BlockCall, copies: dict[int, Any] | None = None) -> BlockCall:
    """Return a call with copies of what is handed on in it; the tensors there are the same.

    Args:
        call: of a block.
        copies: by id of the original, so that several blocks' calls are given the same copy.
    """
    made = {} if copies is None else copies

    def own(value: Any) -> Any:
        return made.setdefault(id(value), copy.copy(value)) if isinstance(value, UserDict) else value

    return BlockCall(tuple(map(own, call.args)), {name: own(value) for name, value in call.kwargs.items()})


def handed_on(call: BlockCall) -> list[UserDict[Any, tuple[Tensor, ...]]]:
    """Return what is handed on in a call."""
    return [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, UserDict)]


class Backwards:
    """Blocks gone through from last to first, with the gradients that reach what they hand one another.

    A block that reads is a function of it, too. The gradients of all that read are added up, and go on into the block
    that wrote.
    """

    def __init__(self, call: BlockCall) -> None:
        self._kept = handed_on(call)
        self._leaves: list[dict[Any, tuple[Tensor, ...]]] = [{} for _ in self._kept]
        self._gradients: dict[int, Tensor] = {}  # by id of a leaf

    def run(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a block on its input, which requires a gradient."""
        for kept, leaves in zip(self._kept, self._leaves, strict=True):
            for key, tensors in [*kept.items()]:
                if key not in leaves:
                    leaves[key] = tuple(tensor.detach().requires_grad_(True) for tensor in tensors)
                kept[key] = leaves[key]
        return run(x)

    def gradient(self, out: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the input, of what `run` returned; with respect to activations only.

        Args:
            out: the block's output.
            x: its input.
            gradient: of the loss with respect to the output.
        """
        outputs, gradients = [out], [gradient.to(out.dtype)]
        read: list[Tensor] = []
        for kept, leaves in zip(self._kept, self._leaves, strict=True):
            for key in [*leaves]:
                if kept[key] is leaves[key]:
                    read += leaves[key]
                    continue
                for written, leaf in zip(kept.pop(key), leaves.pop(key), strict=True):  # nothing before has it
                    if (reached := self._gradients.pop(id(leaf), None)) is not None:
                        outputs.append(written)
                        gradients.append(reached)
        entered, *of_read = torch.autograd.grad(outputs, [x, *read], gradients, allow_unused=bool(read))
        for leaf, reached in zip(read, of_read, strict=True):
            if reached is not None:
                before = self._gradients.get(id(leaf))
                self._gradients[id(leaf)] = reached if before is None else before + reached
        return entered
