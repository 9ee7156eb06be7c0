"""The most bytes that attention pruning holds at once, by the steps of `solver.py`, `losses.py` and `kronecker.py`.

Sizes are those of float32 tensors. A step is what is alive beside its inputs while it takes the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressx import Windows
from compressx_attnprune.losses import SEQUENCES
from compressx_attnprune.objective import ROWS

if TYPE_CHECKING:
    from compressx_attnprune.options import AttnPruneOptions
    from compressx_attnprune.work import Shape

_F32 = 4


@dataclass(frozen=True)
class _Batch:
    """Bytes of what some sequences are turned into.

    Attributes:
        x: inputs.
        q: queries.
        k: keys.
        v: values.
        mixed: what heads mix.
        out: the attention's output.
        p: a row block of one sequence's attention matrix.
        rows: that block's rows of the queries.
    """

    x: float
    q: float
    k: float
    v: float
    mixed: float
    out: float
    p: float
    rows: float

    @classmethod
    def of(cls, shape: Shape, sequences: int) -> _Batch:
        number = _F32 * sequences * shape.tokens
        block = _F32 * shape.heads * min(ROWS, shape.tokens)
        heads, shared = number * shape.heads, number * shape.shared
        return cls(
            number * shape.inputs, heads * shape.size, shared * shape.size, shared * shape.value, heads * shape.value,
            number * shape.outputs, block * shape.tokens, block * shape.size,
        )  # fmt: skip

    def probed(self, *, of_output: bool) -> float:
        """Signs backpropagated to queries and keys: projected, placed, gradients; keys centred, three row blocks."""
        given = self.v + self.out + self.mixed if of_output else 0.0
        return self.x + given + 3 * (self.q + self.k) + self.k + 3 * self.p + self.rows

    def differentiated(self, *, of_output: bool) -> float:
        """The gradient of the objective, for which the dense result is there, too."""
        return self.probed(of_output=of_output) + (self.out if of_output else self.q + self.k + self.p)

    def judged(self, candidates: int, *, of_output: bool) -> float:
        """Errors of candidates beside the dense result."""
        if not of_output:
            return self.x + (1 + candidates) * (self.q + self.k) + 3 * self.p + self.rows
        # A key and value head for each query head, what is mixed, and the same with heads beside each other.
        last = 2 * self.q + self.k + 3 * self.mixed
        return self.x + self.v + candidates * self.out + last


def prepared(shape: Shape, text: Windows, sequences: int) -> tuple[float, float]:
    """Return the most bytes while a layer is read and compared with the model's, and those that stay.

    Args:
        shape: of the layer.
        text: calibration windows.
        sequences: at most so many are kept.
    """
    sample = float(min(text.count, sequences) * shape.tokens * shape.inputs * text.itemsize)
    of_values = shape.value * (shape.shared * shape.inputs + shape.heads * shape.outputs)
    weights = _F32 * (shape.rows * shape.inputs + of_values)
    one = _Batch.of(shape, 1)
    ours = one.q + one.k + one.v + one.mixed + one.out
    theirs = weights + 2 * (one.q + one.k + one.v) + one.out
    return sample + max(weights, ours + theirs), sample + weights


def pruned(shape: Shape, options: AttnPruneOptions, train: int, held_out: int, *, rank: int, fixed: bool) -> float:
    """Return the most bytes of one answer beside what was prepared.

    Args:
        shape: of the layer.
        options: of the rule.
        train: training sequences.
        held_out: the others.
        rank: leading eigenvectors of each input factor.
        fixed: whether masks are given.
    """
    n, heads = shape.inputs, shape.heads + shape.shared
    numbers, weight = shape.rows * n, float(_F32 * shape.rows * n)
    query, answer = float(_F32 * shape.heads * shape.size * n), 5.0 * numbers
    square = float(_F32 * n * n)
    of_output = options.objective == "attention-output"
    closed = fixed or options.mode == "gauss-newton"
    seen, unseen = (_Batch.of(shape, min(SEQUENCES, count)) for count in (train, held_out))

    found = max(24.0 * numbers, answer + square + 33.0 * numbers)  # of Wanda, and of SparseGPT beside it
    starts = 2 * answer + square
    curvature = heads * (square + _F32 * shape.size**2) if closed or options.mode == "joint" else 0.0
    steps = [found, starts + curvature + seen.probed(of_output=of_output) * bool(curvature)]
    sides = 0.0
    if fixed:
        steps.append(starts + curvature + weight + 7 * query)
    elif closed:
        vectors, of_query = (_F32 * float(n) * rank * h for h in (heads, shape.heads))
        sides = 2.25 * weight + vectors + _F32 * heads * shape.size**2
        selecting = max(4.25 * weight + 5 * query, 7.0 * weight)
        decomposed = weight + max(3 * of_query, of_query + 3 * (vectors - of_query))
        steps.append(starts + curvature + max(sides + selecting, decomposed))
    else:
        steps.append(starts + curvature + 8 * weight + seen.differentiated(of_output=of_output))
    done = starts + curvature + sides + answer
    steps += [done + unseen.judged(3, of_output=each) for each in (False, True)]
    if options.refit:
        steps.append(done + 6 * weight + seen.differentiated(of_output=of_output))
    return max(steps)
