"""Units of structured pruning: pieces of an architecture that go whole, with all their rows and columns.

A unit owns rows of some linears and columns of others. A feed-forward neuron owns its row of the gate and of the up
projection and its column of the down projection; a key/value group its rows of key and value, those of the queries
that share them, and their columns of the output projection; an expert, and a decoder block, all rows of its linears.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

UnitKind: TypeAlias = Literal["neurons", "kv-groups", "experts", "blocks"]

UNIT_KINDS: tuple[UnitKind, ...] = get_args(UnitKind)


@dataclass(frozen=True, eq=False)
class Owners:
    """Which unit each row, or each column, of one linear belongs to.

    Attributes:
        dim: 0: rows (out_features), 1: columns (in_features).
        unit: int64 [rows or columns], on the CPU.
    """

    dim: int
    unit: Tensor

    def spread(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Give each weight the value of its unit.

        Args:
            values: [units].
            shape: of the linear, [out_features, in_features].

        Returns:
            [out_features, in_features], expanded: entries along the other dimension share memory.
        """
        each = values[self.unit.to(values.device)]
        return (each[:, None] if self.dim == 0 else each[None, :]).expand(shape)


@dataclass(frozen=True, eq=False)
class Units:
    """Units of one kind that compete for one budget.

    Attributes:
        kind: what they are.
        fqn: fully qualified name of the module that holds them, such as `model.layers.0.mlp`.
        count: number of units.
        owners: by fully qualified name of a linear, whose rows or columns are whose.
    """

    kind: UnitKind
    fqn: str
    count: int
    owners: Mapping[str, Owners]

    def summed(self, scores: Mapping[str, Tensor]) -> Tensor:
        """Add up the scores of each unit's weights.

        Args:
            scores: by linear name, [out_features, in_features]; linears that are left out count nothing.

        Returns:
            [units], on the device of the scores, in float32 at least.
        """
        total: Tensor | None = None
        for name, own in self.owners.items():
            if name not in scores:
                continue
            of = scores[name].sum(dim=1 - own.dim, dtype=torch.promote_types(scores[name].dtype, torch.float32))
            total = of.new_zeros(self.count) if total is None else total
            total.index_add_(0, own.unit.to(of.device), of)
        if total is None:
            raise ValueError(f"scores are for {sorted(scores)}, none of which belongs to {', '.join(self.owners)}")
        return total

    def masks(self, keep: Tensor, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
        """Turn the choice of units into the masks of their linears.

        Args:
            keep: bool [units], True = keep.
            shapes: by linear name, [out_features, in_features].

        Returns:
            By linear name, bool [out_features, in_features], True = keep.
        """
        return {name: own.spread(keep, shapes[name]).contiguous() for name, own in self.owners.items()}

    def kept(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Return which units have a weight that some mask keeps, bool [units]."""
        some = next(iter(masks.values()))
        kept = torch.zeros(self.count, dtype=torch.int32, device=some.device)
        for name, own in self.owners.items():
            of = masks[name].any(dim=1 - own.dim).int()
            kept.index_add_(0, own.unit.to(of.device), of)
        return kept > 0

    def __str__(self) -> str:
        return f"{self.count} {self.kind} of {self.fqn}"
