"""Run a block's attention by itself, with the arguments that its block was called with."""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from compressx import Block, Projections, UnsupportedModelError

INSTEAD = "leave it to a pruner of single linears, such as sparsegpt or wanda"


def attend(block: Block, projections: Projections, arguments: Mapping[str, Any], x: Tensor) -> Tensor:
    """Run the attention module in float32 on [1, tokens, in_features] with its block's arguments."""
    module = copy.deepcopy(block.submodule(projections.attention)).float()
    known = dict(list(inspect.signature(module.forward).parameters.items())[1:])
    given = {n: _first(v) for n, v in arguments.items() if n in known and "past" not in n}
    needed = [n for n, p in known.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if missing := [n for n in needed if n not in given]:
        raise UnsupportedModelError(
            f"{named(block, projections)} needs {', '.join(missing)} from within its block, so attnprune cannot run "
            f"it alone to verify that it is softmax attention; {INSTEAD}"
        )
    attended = module(x, **given)
    result: Tensor = attended[0] if isinstance(attended, tuple | list) else attended
    return result


def arguments(block: Block) -> dict[str, Any]:
    """Return the arguments of the block's first call by name, without the hidden states."""
    call = block.calls[0]
    names = list(inspect.signature(block.module.forward).parameters)[1:]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _first(value: Any) -> Any:
    """Return the first sequence of a call's tensor or tuple of tensors, in float32."""
    if isinstance(value, Tensor):
        return value[:1].float() if value.is_floating_point() else value[:1]
    if isinstance(value, UserDict):  # keys and values for later blocks: what is run here must not change them
        return type(value)({name: _first(kept) for name, kept in value.items()})
    return tuple(_first(v) for v in value) if isinstance(value, tuple) else value


def named(block: Block, projections: Projections) -> str:
    """Name the attention and its class, for messages."""
    return f"{projections.attention} ({type(block.submodule(projections.attention)).__name__})"
