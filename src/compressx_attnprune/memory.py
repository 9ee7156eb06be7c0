"""The most bytes that attention pruning holds at once, by the steps of the modules that do it.

Sizes are those of float32 tensors, and of moments float64. A step is what is alive beside its inputs while it takes the
most. Single weights are chosen by `solver.py`, `losses.py` and `kronecker.py`; groups by `groups.py` and `moments.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressx import Windows
from compressx_attnprune.losses import SEQUENCES
from compressx_attnprune.objective import ROWS
from compressx_attnprune.shape import F32, Shape

if TYPE_CHECKING:
    from compressx_attnprune.options import AttnPruneOptions

_F64 = 8


@dataclass(frozen=True)
class _Batch:
    """Bytes of what some sequences are turned into.

    Attributes:
        x: inputs.
        q: queries.
        k: keys.
        v: values.
        mixed: what heads mix.
        ungated: the same before the gates, where there are any.
        out: the attention's output.
        p: a row block of one sequence's attention matrix.
        rows: that block's rows of the queries.
    """

    x: float
    q: float
    k: float
    v: float
    mixed: float
    ungated: float
    out: float
    p: float
    rows: float

    @classmethod
    def of(cls, shape: Shape, sequences: int) -> _Batch:
        number = F32 * sequences * shape.tokens
        block = F32 * shape.heads * min(ROWS, shape.tokens)
        heads, shared = number * shape.heads, number * shape.shared
        return cls(
            number * shape.inputs, heads * shape.size, shared * shape.size, shared * shape.value, heads * shape.value,
            shape.gated * heads * shape.value, number * shape.outputs, block * shape.tokens, block * shape.size,
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
        return self.v + candidates * self.out + self.fused

    @property
    def fused(self) -> float:
        """Inputs, a key and value head for each query head, what is mixed, and the same, heads beside each other."""
        return self.x + 2 * self.q + self.k + 3 * self.mixed

    @property
    def trained(self) -> float:
        """The gradients of queries, keys and values by what is missing of the output that is wanted."""
        return self.probed(of_output=True) + self.ungated + self.out + self.v


def prepared(shape: Shape, text: Windows, sequences: int) -> tuple[float, float]:
    """Return the most bytes while a layer is read and compared with the model's, and those that stay.

    Args:
        shape: of the layer.
        text: calibration windows.
        sequences: at most so many are kept.
    """
    sample = float(min(text.count, sequences) * shape.tokens * shape.inputs * text.itemsize)
    of_values = shape.value * (shape.shared * shape.inputs + shape.heads * shape.outputs)
    of_values += shape.gated * shape.heads * shape.value * shape.inputs
    weights = F32 * (shape.rows * shape.inputs + of_values)
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
    numbers, weight = shape.rows * n, float(F32 * shape.rows * n)
    query, answer = float(F32 * shape.heads * shape.size * n), 5.0 * numbers
    square = float(F32 * n * n)
    of_output = options.objective == "attention-output"
    closed = fixed or options.mode == "gauss-newton"
    seen, unseen = (_Batch.of(shape, min(SEQUENCES, count)) for count in (train, held_out))

    found = max(24.0 * numbers, answer + square + 33.0 * numbers)  # of Wanda, and of SparseGPT beside it
    starts = 2 * answer + square
    curvature = heads * (square + F32 * shape.size**2) if closed or options.mode == "joint" else 0.0
    steps = [found, starts + curvature + seen.probed(of_output=of_output) * bool(curvature)]
    sides = 0.0
    if fixed:
        steps.append(starts + curvature + weight + 7 * query)
    elif closed:
        vectors, of_query = (F32 * float(n) * rank * h for h in (heads, shape.heads))
        sides = 2.25 * weight + vectors + F32 * heads * shape.size**2
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


def without_groups(
    shape: Shape, options: AttnPruneOptions, sequences: int, *, gone: int, dampings: int, chosen: bool
) -> float:
    """Return the most bytes of `groups.prune` beside what was prepared.

    Args:
        shape: of the layer.
        options: of the rule.
        sequences: that were kept.
        gone: features of the output projection whose groups go.
        dampings: that are compared.
        chosen: whether groups are chosen, and not given.
    """
    n, out = shape.heads * shape.value, shape.outputs
    square, cross = float(_F64 * n * n), float(_F64 * n * out)
    moments = square + cross  # of one text
    weights = float(F32 * (shape.rows + shape.shared * shape.value) * shape.inputs)
    held_out = max(1, round(options.held_out * sequences))
    train = max(1, sequences - held_out)
    seen, unseen = (_Batch.of(shape, min(SEQUENCES, count)) for count in (train, held_out))

    # Sums, the products of the batch before, and what it has mixed. Or sums, new products and the new sums. With a bias
    # products are float64, and of copies less their means.
    wide, copies = 0.5 * shape.bias, 1 + shape.bias
    further = ((1.5 + wide) * square + seen.mixed) * (train > SEQUENCES)
    dense = max(seen.fused + further, (2.5 + wide) * square + copies * seen.mixed, square + 3 * cross)
    summed = max((2.5 + wide) * square + copies * unseen.mixed, square + 3 * cross)
    steps = [dense, moments + unseen.fused, moments + summed]
    if chosen:
        own = float(_F64 * gone * gone)
        compared = 2 * square + cross + _F64 * out * gone + 4 * own
        steps.append(2 * moments + square * shape.bias + max(3 * square, 2 * (square + cross), compared))
    stays = n - gone
    kept, of_kept = float(_F64 * stays * stays), float(_F64 * stays * out)
    centred = moments * shape.bias
    solved = centred + max(3 * kept + 2 * of_kept, 2 * kept + 4 * of_kept)
    # Of each damping there is a solution, and the weight as it is.
    best = dampings * cross + max(solved, 4 * cross)
    steps.append(2 * moments + best)
    # Other weights mix otherwise: the dense outputs and theirs are gathered, beside what is known of the dense ones.
    again = 2 * moments + 2 * weights + cross / 2
    other = [
        again + seen.fused + seen.out + seen.mixed + (1.5 + wide) * moments,
        again + (2.5 + wide) * moments + copies * (seen.mixed + seen.out),
        again + 2 * moments + best,
    ]
    if not shape.apart:
        steps += other
    if options.refit:
        # Weights, two moments of Adam, gradients; those of a step come before the last ones go.
        steps.append(2 * moments + 5 * weights + cross / 2 + max(seen.trained, 4 * weights))
        steps += [size + weights for size in other]  # gradients
    return max(steps)
