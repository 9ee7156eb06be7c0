"""What attention pruning costs: the operations of `solver.py`, `losses.py`, `kronecker.py` and `groups.py`, counted."""

from __future__ import annotations

import math
from collections.abc import Iterable

from compressx import Block, Pattern, Structured, Windows, Work, find_projections
from compressx.numerics import work as numerics
from compressx_attnprune import memory
from compressx_attnprune.curvature import HALFWAY_PARTS, TOKENS
from compressx_attnprune.groups import DAMPINGS, MOST_SETS
from compressx_attnprune.kronecker import FEWEST, LEADING
from compressx_attnprune.losses import SEQUENCES
from compressx_attnprune.options import AttnPruneOptions
from compressx_attnprune.shape import F32, Shape
from compressx_attnprune.solver import REGULARIZATIONS

_CHECKS = 4
_SELECT, _POLISH, _RECONSTRUCT = 48, 10, 60
"""Iterations of `kronecker.select`, of its conjugate gradient, and of `kronecker.reconstruct` at most."""


def returned(block: Block, names: Iterable[str], *, solved_bias: bool) -> Work:
    """Count new weights, which are float32, and the output projection's bias where it is solved for, too."""
    bias = find_projections(block).output.bias if solved_bias else None
    kept = 0 if bias is None else bias.numel() * bias.element_size()
    return Work.of(returned=F32 * sum(block.linears[name].weight.numel() for name in names) + kept)


def prepare(shape: Shape, text: Windows, sequences: int) -> Work:
    """Count the comparison of one sequence with the block's own attention."""
    ours = shape.projections() + shape.values() + shape.matrix(products=1.0)
    mixed = Work.of(float32=2.0 * shape.heads * shape.pairs * shape.value)
    projected = Work.of(float32=2.0 * shape.tokens * shape.heads * shape.value * shape.outputs)
    theirs = shape.projections() + shape.values() + shape.output()
    done = ours + mixed + shape.gates() + projected + theirs
    return Work(done.counts, *memory.prepared(shape, text, sequences))


def prune(shape: Shape, options: AttnPruneOptions, pattern: Pattern, text: Windows, *, fixed: bool) -> Work:
    """Count one answer of `AttnPrune.prune`.

    Taken for granted: SparseGPT's start does not meet the budget by itself and is swept twice, the curvature needs no
    more damping than the options say, and a conjugate gradient of given masks runs to its last step.
    """
    sequences = min(text.count, options.sequences)
    held_out = max(1, round(options.held_out * sequences))
    train = max(1, sequences - held_out)
    n, tokens = shape.inputs, train * shape.tokens
    closed = fixed or options.mode == "gauss-newton"
    return (
        _starts(shape, pattern, tokens)
        + (
            _closed(shape, options, pattern, train, fixed=fixed)
            if closed
            else _learnt(shape, options, pattern, train, held_out)
        )
        + options.refit * _gradient(shape, options) * SEQUENCES
        + (_CHECKS * held_out * _judged(shape, 1, options) if options.refit else Work())
        + held_out * _errors(shape, 3)
        + Work.of(memory.pruned(shape, options, train, held_out, rank=_rank(n), fixed=fixed))
    )


def remove_groups(shape: Shape, options: AttnPruneOptions, pattern: Structured, text: Windows, *, fixed: bool) -> Work:
    """Count `groups.prune`; its products in float64 count like those in float32."""
    if not pattern.dropped:
        return Work()
    n, out, count = shape.heads * shape.value, shape.outputs, pattern.units.count
    stays = n - pattern.dropped * n // count
    sequences, dampings = min(text.count, options.sequences), len(DAMPINGS) if options.damping is None else 1
    mixing = shape.projections() + shape.values() + shape.mixed()
    squares = Work.of(float32=2.0 * shape.tokens * n * n, launches=8)
    # Of the dense layer y^T m comes from m^T m; of another one it is gathered.
    gathered = sequences * (mixing + squares) + 2 * Work.of(float32=2.0 * n * n * out)
    again = sequences * (2 * mixing + squares + 2 * shape.projected())
    solved = Work.of(
        float32=2.0 * out * stays**2, factor=stays**3 / 3 + 2.0 * stays**2 * out, moved=8.0 * 20.0 * n * n, launches=40
    )
    judged = 2 * Work.of(float32=2.0 * out * n * n + (2.0 * out * n if shape.bias else 0.0), launches=20)
    best = dampings * (solved + judged)
    chosen = Work() if fixed else dampings * _sets(n, out, count, pattern.dropped)
    held = memory.without_groups(shape, options, sequences, gone=n - stays, dampings=dampings, chosen=not fixed)
    total = gathered + chosen + best + Work.of(held)
    if not shape.apart:
        total = total + again + best
    if options.refit:
        weights = Work.of(float32=2.0 * shape.tokens * (shape.rows + shape.shared * shape.value) * shape.inputs)
        of_values = Work.of(float32=2.0 * shape.heads * shape.pairs * shape.value)
        step = 2 * mixing + 2 * shape.projected() + shape.projections() + shape.values() + shape.backward() + of_values
        total = total + options.refit * SEQUENCES * (step + weights) + again + best
    return total


def _sets(n: int, out: int, count: int, dropped: int) -> Work:
    """Count `groups.choose` with one damping."""
    sets = {dropped: math.comb(count, dropped)}
    if sets[dropped] > MOST_SETS:
        sets = {gone: count - gone + 1 for gone in range(1, dropped + 1)}
    work = Work.of(factor=float(n) ** 3, moved=8.0 * 8.0 * n * n, launches=20)
    for gone, compared in sets.items():
        own = gone * n // count
        work += compared * Work.of(float32=2.0 * own * own * out, factor=8.0 / 3.0 * own**3, launches=8)
    return work


def _starts(shape: Shape, pattern: Pattern, tokens: float) -> Work:
    """Wanda and SparseGPT on the same inputs."""
    n, rows = shape.inputs, shape.rows
    hessian = Work.of(memory=F32 * n * n, float32=2.0 * tokens * n * n, moved=F32 * 5.0 * tokens * n)
    ranks = Work.of(moved=16.0 * rows * n * 12, selected=8.0 * rows * n, launches=20)
    swept = 2 * numerics.sweep(rows, n, pattern)
    found = hessian + numerics.inverse_cholesky(n) + ranks + swept + 2 * numerics.selection(rows, n, pattern)
    return Work(found.counts, found.memory)  # the factor is not handed back


def _closed(shape: Shape, options: AttnPruneOptions, pattern: Pattern, train: int, *, fixed: bool) -> Work:
    """Count the curvature, its leading eigenvectors, and ADMM with them."""
    n, heads = shape.inputs, shape.heads + shape.shared
    measured = _curvature(shape, options, train) + Work.of(moved=F32 * 4.0 * heads * n * n, launches=20)  # damped
    applied = _metric(shape)  # by the conjugate gradient
    if fixed:
        return measured + (1 + _RECONSTRUCT) * applied
    chosen = numerics.selection(shape.rows, n, pattern)
    selected = _leading(shape) + _SELECT * (_step(shape) + chosen) + 2 * chosen
    return measured + selected + (1 + _POLISH) * applied


def _curvature(shape: Shape, options: AttnPruneOptions, train: int) -> Work:
    """Count `curvature.measure`: a probe of each sequence, of some again at half of the scores, and both factors."""
    n, d, heads = shape.inputs, shape.size, shape.heads + shape.shared
    parts = math.ceil(train / SEQUENCES)
    again, of_part = math.ceil(parts / HALFWAY_PARTS), min(SEQUENCES, train)
    parts, train = parts + again, train + again * of_part
    sampled = math.ceil(TOKENS * of_part * shape.tokens) * parts
    probe = shape.matrix(products=3.0, passes=14.0)
    if options.objective == "attention-output":
        probe = shape.values() + shape.backward()
    factors = Work.of(
        float32=2.0 * heads * (train * shape.tokens * d * d + sampled * n * n),
        moved=F32 * heads * (4.0 * sampled * n + 2.0 * parts * n * n),
        selected=float(heads * train * shape.tokens), launches=4 * heads * parts,
    )  # fmt: skip
    return train * (shape.projections() + probe) + factors


def _metric(shape: Shape) -> Work:
    """Count one product of all weights with both factors of the metric, and what goes with it."""
    weight = shape.rows * shape.inputs
    return Work.of(float32=2.0 * weight * (shape.inputs + shape.size), moved=F32 * 16.0 * weight, launches=24)


def _step(shape: Shape) -> Work:
    """Count one iteration of `kronecker.select`: two turns, the leading eigenvectors twice, the input factor once."""
    weight = shape.rows * shape.inputs
    flops = 2.0 * weight * (2 * shape.size + 2 * _rank(shape.inputs) + shape.inputs)
    return Work.of(float32=flops, moved=F32 * 40.0 * weight, launches=60)


def _leading(shape: Shape) -> Work:
    """Count the leading eigenvectors of the input factors, and all of the row factors."""
    n, heads, rank = shape.inputs, shape.heads + shape.shared, _rank(shape.inputs)
    products = 2.0 * heads * (2 * n * n * rank + 2 * n * rank**2) + 2.0 * shape.rows * shape.size * n
    # A QR decomposition takes 4 n rank^2 FLOPs, its factor Q included.
    decomposed = heads * (8.0 * n * rank**2 + 9.0 * rank**3 + 9.0 * shape.size**3)
    return Work.of(float32=products, eigen=decomposed, moved=F32 * 12.0 * heads * n * rank, launches=40)


def _rank(n: int) -> int:
    """Return how many leading eigenvectors of a factor [n, n] are looked for."""
    return math.ceil(n / max(1, min(round(1 / LEADING), n // FEWEST)))


def _learnt(shape: Shape, options: AttnPruneOptions, pattern: Pattern, train: int, held_out: int) -> Work:
    """Masks by gradient descent, or masks and weights."""
    tries = len(REGULARIZATIONS) if options.mode == "mask" and options.regularization is None else 1
    step = SEQUENCES * _gradient(shape, options) + Work.of(moved=F32 * 20.0 * shape.rows * shape.inputs, launches=30)
    chosen = numerics.selection(shape.rows, shape.inputs, pattern)
    each = options.steps * (step + (chosen if options.mode == "joint" else Work()))
    if options.mode == "joint":
        each = each + _curvature(shape, options, train) + (_CHECKS - 1) * held_out * _judged(shape, 1, options)
    return tries * (each + chosen + held_out * _judged(shape, 1, options))


def _gradient(shape: Shape, options: AttnPruneOptions) -> Work:
    """The gradient of the objective on one sequence."""
    weights = Work.of(float32=2.0 * shape.tokens * shape.rows * shape.inputs)
    if options.objective == "attention-matrix":
        return 2 * shape.projections() + shape.matrix(products=4.0, passes=20.0) + weights
    return 2 * shape.projections() + shape.values() + 2 * shape.output() + shape.backward() + weights


def _judged(shape: Shape, candidates: int, options: AttnPruneOptions) -> Work:
    """The error of some candidates by the objective on one sequence."""
    if options.objective == "attention-matrix":
        return (1 + candidates) * (shape.projections() + shape.matrix())
    return shape.values() + (1 + candidates) * (shape.projections() + shape.output())


def _errors(shape: Shape, candidates: int) -> Work:
    """The errors of all candidates by both objectives on one sequence."""
    matrices = (1 + candidates) * (shape.projections() + shape.matrix())
    return matrices + shape.values() + (1 + candidates) * (shape.projections() + shape.output())
