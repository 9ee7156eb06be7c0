"""The statistics of a plan, and what is in them once they have seen some text: known without a number, from shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compressx.api.pruner import Block, PrunerSpec, Reduction, Statistic
from compressx.api.work import Windows
from compressx.blocks.observe import is_routed, place_after

_DTYPES = {4: torch.float32, 8: torch.float64}
"""Of hidden states, by the bytes of a number; any of two bytes is as good as another."""

Tensors: TypeAlias = Mapping[str, tuple[Tensor, Reduction]]


@dataclass(frozen=True, eq=False)
class Gathered:
    """A statistic, and the linears that have it.

    Attributes:
        of: the first linear that is handed its input.
        statistic: fresh, on the meta device.
        spec: of the pruner that asked for it.
        names: of the linears.
        share: fraction of the tokens that reaches them.
    """

    of: str
    statistic: Statistic
    spec: PrunerSpec
    names: list[str]
    share: float


class Filled:
    """Fills statistics on the meta device; of those that are alike only the first."""

    def __init__(self) -> None:
        self._known: list[tuple[Gathered, tuple[Windows, int], Tensors | None]] = []

    def __call__(self, shared: Gathered, block: Block, text: Windows, before: int = 0) -> Tensors | None:
        """Return the tensors of a statistic that has seen some text, or None if it does not do without numbers.

        Args:
            shared: the statistic.
            block: with its linears.
            text: that a process sees.
            before: how many windows other processes see before it.
        """
        for other, seen, tensors in self._known:
            alike = type(other.statistic) is type(shared.statistic) and other.statistic == shared.statistic
            if alike and other.share == shared.share and seen == (text, before):
                return tensors
        found = _filled(shared, block.linears[shared.names[0]].in_features, text, before)
        self._known.append((shared, (text, before), found))
        return found


def _filled(shared: Gathered, features: int, text: Windows, before: int) -> Tensors | None:
    statistic: Any = copy.deepcopy(shared.statistic)
    place_after(statistic, before)
    shape = (text.count, text.length) if shared.share == 1.0 else (round(text.count * text.length * shared.share),)
    with torch.device("meta"):
        x = torch.empty(*shape, features, dtype=_DTYPES.get(text.itemsize, torch.bfloat16))
        try:
            if is_routed(statistic):
                statistic.update(x, torch.empty(*shape, dtype=x.dtype))
            else:
                statistic.update(x)
            return dict(statistic.tensors())
        except Exception:  # noqa: BLE001 - a plugin's code may read numbers, which there are none of
            return None
