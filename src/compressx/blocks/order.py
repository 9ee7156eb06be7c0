"""The order in which a block uses its linears: what true-sequential pruning goes through.

GPTQ's and SparseGPT's published code prune query, key and value first, observe the attention's output projection after
that, and so on: each linear is fitted to inputs that the pruned ones before it give.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from compressx.api.pruner import Linear
from compressx.blocks.hooks import inputs_watched


def stages(
    linears: Mapping[str, Linear], run: Callable[[], Any], together: Iterable[Collection[str]] = ()
) -> list[list[str]]:
    """Group linears in the order in which a block calls them.

    Those that are handed one tensor (query, key and value; gate and up) are one stage, and so are all experts' slices
    of one parameter. What is never called comes last.

    Args:
        linears: by name, as the model orders them.
        run: runs the block on one batch.
        together: names that must be in one stage, the earliest of theirs.

    Returns:
        The names of each stage; within a stage in the model's order.
    """
    stage_of: dict[str, int] = {}
    held: list[Tensor] = []  # so that no two inputs are ever one address
    families: dict[str, int] = {}

    def take(name: str, x: Tensor) -> None:
        if linears[name].expert is not None:
            stage_of.setdefault(name, families.setdefault(name.rpartition(".")[0], len(held)))
            held.append(x)
            return
        seen = next((i for i, other in enumerate(held) if other is x), None)
        stage_of.setdefault(name, len(held) if seen is None else seen)
        if seen is None:
            held.append(x)

    with inputs_watched(linears, take):
        run()
    last = len(held)
    for name in linears:
        stage_of.setdefault(name, families.get(name.rpartition(".")[0], last))
    for names in together:
        earliest = min(stage_of[name] for name in names)
        stage_of |= dict.fromkeys(names, earliest)
    return [[n for n in linears if stage_of[n] == stage] for stage in sorted(set(stage_of.values()))]
