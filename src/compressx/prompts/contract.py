"""Check what a token selector asks for and returns."""

from __future__ import annotations

import torch
from torch import Tensor

from compressx.api.selector import AttentionRows, ModelFacts
from compressx.runtime.errors import PluginError


def checked_rows(asked: object, facts: ModelFacts, name: str) -> AttentionRows:
    """Return what `observe` asks for.

    Raises:
        PluginError: no `AttentionRows`, blocks that do not ascend, no query, or heads that the model does not have.
    """
    said = f"observe of token selector {name!r}"
    if not isinstance(asked, AttentionRows):
        raise PluginError(f"{said} must return AttentionRows, got {asked!r:.80}")
    blocks, heads = _whole(asked.blocks), None if asked.heads is None else _whole(asked.heads)
    queries = _whole((asked.queries,))
    if blocks is None or list(blocks) != sorted({*blocks}):
        raise PluginError(f"{said} must return blocks as whole numbers in ascending order, got {asked.blocks!r:.80}")
    if asked.heads is not None and not heads:
        raise PluginError(f"{said} must return heads as whole numbers, or None for all, got {asked.heads!r:.80}")
    if not queries or queries[0] < 1:
        raise PluginError(f"{said} must return at least one query, got {asked.queries!r:.80}")
    if missing := [head for head in heads or () if not 0 <= head < facts.heads]:
        raise PluginError(f"{said} asks for head {missing[0]}; expected 0 to {facts.heads - 1}")
    return AttentionRows(blocks, heads, queries[0], str(asked.reason))


def _whole(values: object) -> tuple[int, ...] | None:
    """Return numbers as a tuple of int, those of NumPy and torch too; None if they are none."""
    try:
        numbers = [value.__index__() for value in values]  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return None
    return tuple(numbers)


def checked_places(answer: object, n: int, keep: int, name: str) -> Tensor:
    """Return the places that `select` chose, on the CPU.

    Raises:
        PluginError: another number of places, another dtype, duplicates, another order, or places outside the prompt.
    """
    said = f"token selector {name!r}: expected {keep} different places from 0 to {n - 1} in ascending order"
    if not isinstance(answer, Tensor) or answer.dtype != torch.int64 or answer.shape != (keep,):
        kind = f"{answer.dtype} {[*answer.shape]}" if isinstance(answer, Tensor) else f"{answer!r:.80}"
        raise PluginError(f"{said}, int64 [{keep}]; got {kind}")
    places = answer.cpu()
    if bool((falls := places[1:] <= places[:-1]).any()):
        at = int(falls.nonzero()[0])
        raise PluginError(f"{said}; got {int(places[at])} followed by {int(places[at + 1])}")
    if int(places[0]) < 0 or int(places[-1]) >= n:
        raise PluginError(f"{said}; got {int(places[0])} to {int(places[-1])}")
    return places
