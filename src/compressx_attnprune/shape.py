"""The sizes of one layer's attention, and what a pass of one sequence through its parts costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compressx import Block, Work, find_projections, head_size
from compressx_attnprune.norms import KEY_NORMS, QUERY_NORMS, over_all_heads
from compressx_attnprune.objective import ROWS

F32 = 4
"""Bytes of a number."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer's attention.

    Attributes:
        heads: of the queries.
        shared: heads of keys and values.
        size: features of a query or key head.
        value: features of a value head.
        inputs: in_features of query, key and value.
        outputs: out_features of the output projection.
        tokens: in a sequence.
        apart: whether no norm is over all heads of queries or keys.
        bias: whether the output projection has one.
        gated: whether gates multiply what the heads mix.
    """

    heads: int
    shared: int
    size: int
    value: int
    inputs: int
    outputs: int
    tokens: int
    apart: bool = True
    bias: bool = False
    gated: bool = False

    @classmethod
    def of(cls, block: Block, tokens: int) -> Shape:
        """Read the sizes off a block without weights."""
        found = find_projections(block)
        query, key, value = found.query.count, found.key.count, found.value.count
        module = block.submodule(found.attention)
        size = head_size(module, block.config)
        heads, shared = query // size, key // size
        inputs, outputs = found.query.linear.in_features, found.output.out_features
        sides = ((QUERY_NORMS, heads), (KEY_NORMS, shared))
        apart = not any(over_all_heads(module, names, count, size) for names, count in sides)
        bias = found.output.bias is not None
        gated = found.gate is not None
        return cls(heads, shared, size, value // shared, inputs, outputs, tokens, apart, bias, gated)

    @property
    def rows(self) -> int:
        """Rows of query and key together."""
        return (self.heads + self.shared) * self.size

    @property
    def pairs(self) -> int:
        """Entries of an attention matrix that row blocks compute: up to the last row's own token, for every row."""
        return sum(
            min(ROWS, self.tokens - start) * min(start + ROWS, self.tokens) for start in range(0, self.tokens, ROWS)
        )

    def projections(self) -> Work:
        """Queries and keys of one sequence, placed."""
        numbers = self.tokens * self.rows
        return Work.of(float32=2.0 * numbers * self.inputs, moved=F32 * 12.0 * numbers, launches=16)

    def values(self) -> Work:
        """Values of one sequence."""
        return Work.of(float32=2.0 * self.tokens * self.inputs * self.shared * self.value, launches=1)

    def gates(self) -> Work:
        """The gates of one sequence, and their product with what the heads mix, or its gradient."""
        numbers = float(self.gated * self.tokens * self.heads * self.value)
        return Work.of(float32=2.0 * numbers * self.inputs, moved=F32 * 6.0 * numbers, launches=3 * self.gated)

    def mixed(self) -> Work:
        """Mixed values of one sequence, by the fused kernel, gated."""
        attended = 2.0 * self.tokens**2 * self.heads * (self.size + self.value)
        moved = F32 * 8.0 * self.tokens * self.heads * self.value
        return Work.of(attention=attended, moved=moved, launches=7) + self.gates()

    def projected(self) -> Work:
        """The output projection of one sequence."""
        flops = 2.0 * self.tokens * self.heads * self.value * self.outputs
        return Work.of(float32=flops, moved=F32 * 4.0 * self.tokens * self.outputs, launches=1)

    def output(self) -> Work:
        """The attention's output of one sequence, by the fused kernel."""
        return self.mixed() + self.projected()

    def matrix(self, products: float = 1.0, passes: float = 6.0) -> Work:
        """Count a pass over the attention matrix of one sequence in row blocks."""
        entries = self.heads * self.pairs
        blocks = math.ceil(self.tokens / ROWS)
        return Work.of(
            memory=F32 * 4.0 * self.heads * ROWS * self.tokens,
            float32=2.0 * products * entries * self.size, moved=F32 * passes * entries, launches=10 * blocks,
        )  # fmt: skip

    def backward(self) -> Work:
        """Backpropagate a gradient of one sequence's output to projected queries and keys."""
        of_heads = Work.of(float32=2.0 * self.tokens * self.outputs * self.heads * self.value)
        # Scores, the gradient by the values, and the two products of the gradients.
        values = Work.of(float32=2.0 * self.heads * self.pairs * self.value)
        return of_heads + self.gates() + values + self.matrix(products=3.0, passes=14.0)
