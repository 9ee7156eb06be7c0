"""What the numerical methods cost, counted by the formulas of the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise

from compressx.api.patterns import NM, FixedMask, Pattern, Unstructured, competing
from compressx.api.pruner import Block
from compressx.api.work import Work
from compressx.numerics import ziplm
from compressx.numerics.admm import CHECK
from compressx.numerics.obs import BLOCK_COLUMNS, CHUNK, PANEL, STEP

_F32 = 4

_PAIRS = 4
"""Numbers of an N:M group up to which all are compared with all."""


def of_each(
    block: Block, patterns: Mapping[str, Pattern], count: Callable[[int, int, Pattern], Work], *, updated: bool = False
) -> Work:
    """Sum `count(out_features, in_features, pattern)` over some linears of a block.

    Args:
        block: the block.
        patterns: by name of the linear.
        count: counts the work of one.
        updated: whether new weights are returned, in the dtype of the old ones. Answers are held until the last one.
    """
    done, held = Work(), 0.0
    for name, pattern in patterns.items():
        weight = block.linears[name].weight
        one = count(weight.shape[0], weight.shape[1], pattern)
        returned = weight.numel() * weight.element_size() if updated else 0
        done += Work(one.counts, held + one.memory, one.returned + returned)
        held += weight.numel() + returned
    return done


def of_scores(block: Block, patterns: Mapping[str, Pattern], *, passes: float) -> Work:
    """Sum `scored` over some linears of a block, whose scores are all made before the first selection."""
    done = of_each(block, patterns, partial(scored, passes=passes))
    all_of_them = largest = memory = 0.0
    for name, pattern in patterns.items():
        rows, columns = block.linears[name].weight.shape
        memory = max(memory, all_of_them + selection(rows, columns, pattern).memory)  # beside the masks before it
        all_of_them, largest = all_of_them + rows * columns, max(largest, float(rows * columns))
    joint = float(sum(block.linears[name].weight.numel() for name in competing(patterns)))
    memory = max(memory, _F32 * joint + selection(1, joint, Unstructured(0.5, "joint")).memory)  # in one row
    return Work(done.counts, max(_F32 * (all_of_them + largest), _F32 * all_of_them + memory))


def scored(rows: int, columns: int, pattern: Pattern, *, passes: float) -> Work:
    """Count float32 scores of a weight [rows, columns], made in `passes` over its numbers, and their selection."""
    scores = elementwise(rows * columns, passes=passes, memory=2.0 * _F32 * rows * columns)
    chosen = selection(rows, columns, pattern)
    return scores + Work(chosen.counts, _F32 * rows * columns + chosen.memory)


def elementwise(numbers: float, *, passes: float = 1.0, itemsize: int = _F32, memory: float = 0.0) -> Work:
    """Count operations that read or write every number `passes` times in all."""
    return Work.of(memory, moved=passes * itemsize * numbers, launches=1)


def selection(rows: float, columns: float, pattern: Pattern) -> Work:
    """Count `keep_mask` of scores [rows, columns]: nothing for a mask that is given."""
    if isinstance(pattern, FixedMask):
        return Work()
    few = isinstance(pattern, NM)
    # Of a few numbers all pairs are compared; of a row there are a mask, the ties, their running sum, and what is left.
    each = max(3 * pattern.of, pattern.of + 9) if isinstance(pattern, NM) and pattern.of <= _PAIRS else 7
    return Work.of(
        memory=float(each * rows * columns),
        moved=(28.0 if few else 12.0) * rows * columns,
        selected=0.0 if few else rows * columns,
        launches=20,
    )


def inverse_cholesky(n: int) -> Work:
    """Count `obs.inverse_cholesky_of` of an [n, n] Hessian: (1/3) n^3 FLOPs for the factor, as many for its inverse."""
    products = solved = 0.0
    edges = [*range(0, n, PANEL), n]
    for number, (start, stop) in enumerate(pairwise(edges)):
        height = stop - start
        solved += height**3
        products += 2 * height * height * start
        products += sum(2 * height * (start - left) * (right - left) for left, right in pairwise(edges[: number + 1]))
    panels = len(edges) - 1
    return Work.of(
        # Beside it a panel, or what is turned round.
        memory=_F32 * (n * n + 2 * max(PANEL * n, min(n * n // 2, CHUNK))),
        returned=_F32 * n * n,
        float32=products, factor=n**3 / 3 + solved, moved=_F32 * 9.0 * n * n, launches=panels * (panels + 6) + 20,
    )  # fmt: skip


def assembled(n: int) -> Work:
    """Count `Hessian.assembled`: float64 panels become one float32 matrix."""
    return Work.of(memory=_F32 * n * n, moved=12.0 * n * n, launches=2 * (n // PANEL + 1))


def sweep(rows: int, columns: int, pattern: Pattern) -> Work:
    """Count `obs.sweep` of a weight [rows, columns]: about rows * columns^2 FLOPs, and two launches for each column.

    Args:
        rows: out_features.
        columns: in_features.
        pattern: what to keep.
    """
    products = vectors = 0.0
    launches = 0
    grouped = isinstance(pattern, NM)
    step = pattern.of if isinstance(pattern, NM) else STEP
    blocks = list(_column_blocks(columns, pattern))
    for width, left in blocks:
        products += 2 * rows * width * left
        for first in range(0, width, step):
            last = min(first + step, width)
            products += 2 * rows * first * (last - first)
            vectors += rows * (last - first) * (last - first - 1) / 2
            launches += 6 + 2 * (last - first) + (12 if grouped else 0)
        launches += 30
    # Of each block of columns: scores, two transposes, errors; every number is read or written some twelve times.
    moved = _F32 * (vectors + 12.0 * rows * columns) + 2.0 * _F32 * rows * sum(left for _, left in blocks)
    # Of a block of columns: the block, its errors, and the scores, the mask or what is written back.
    beside = 17.0 if isinstance(pattern, FixedMask) else 16.25 if grouped else 20.0
    memory = (_F32 + 1) * rows * columns + beside * rows * min(BLOCK_COLUMNS, columns)
    swept = Work.of(memory, float32=products, moved=moved, launches=launches)
    return swept + Work(selection(rows, columns, pattern).counts)


def _column_blocks(columns: int, pattern: Pattern) -> Iterator[tuple[int, int]]:
    """Yield the width of each block of columns, and how many columns follow it."""
    span = BLOCK_COLUMNS
    if isinstance(pattern, NM):
        span = max(pattern.of, span // pattern.of * pattern.of)
    for start in range(0, columns, span):
        stop = min(start + span, columns)
        yield stop - start, columns - stop


def metric(n: int) -> Work:
    """Count `least_squares.Metric.of` of an [n, n] Hessian."""
    return Work.of(memory=_F32 * n * n, returned=_F32 * n * n, moved=_F32 * 6.0 * n * n, launches=20)


def admm(rows: int, n: int, pattern: Pattern, *, steps: float, solver_steps: float) -> Work:
    """Count `admm.prune` of a weight [rows, n].

    Args:
        rows: out_features.
        n: in_features.
        pattern: what to keep; of a given mask only the weights are solved for.
        steps: of ADMM.
        solver_steps: of the conjugate gradient, all calls together.
    """
    weight = rows * n
    product = Work.of(float32=2.0 * weight * n, launches=1)
    # Right-hand side, and the norms of change and target.
    solving = (3 + solver_steps) * product + Work.of(
        moved=_F32 * (14.0 * solver_steps + 20) * weight, launches=14 * solver_steps
    )
    if isinstance(pattern, FixedMask):
        return solving + Work.of(28.0 * weight)
    # In ADMM beside the inverse of the penalised Hessian; then in the conjugate gradient on two supports.
    memory = max(33.0 * weight, (31.0 if isinstance(pattern, NM) else 29.0) * weight + _F32 * float(n) * n)
    inverse = Work.of(factor=float(n) ** 3, moved=_F32 * 4.0 * n * n, launches=8)
    step = product + selection(rows, n, pattern) + Work.of(moved=_F32 * 12.0 * weight, launches=12)
    # Near the support the residual takes a product, and what was reached is compared with the start by two.
    around = 3 * product + 2 * selection(rows, n, pattern)
    return solving + around + steps * step + max(min(steps, 1.0), steps / CHECK) * inverse + Work.of(memory)


def side_by_side(block: Block, patterns: Mapping[str, Pattern], *, steps: float, solver_steps: float) -> Work:
    """Count `admm.prune` of some linears of a block at once, as `admm` does for one.

    Args:
        block: the block.
        patterns: by name of the linear.
        steps: of ADMM.
        solver_steps: of the conjugate gradient, of each linear.
    """
    done = of_each(block, patterns, partial(admm, steps=steps, solver_steps=solver_steps), updated=True)
    sizes = [block.linears[name].weight.shape for name in patterns]
    all_of_them, largest = sum(rows * n for rows, n in sizes), max(rows * n for rows, n in sizes)
    hessians = _F32 * sum(float(n) * n for _, n in sizes)
    # In ADMM beside the inverses of all penalised Hessians; then in one conjugate gradient after the other.
    most = max(25.0 * all_of_them + hessians, 13.0 * all_of_them + 20.0 * largest)
    return Work(done.counts, most + hessians, done.returned)


def removal(rows: int, columns: int, size: int, dropped: int) -> Work:
    """Count `ziplm.remove_units` of a weight [rows, columns], of whose units of `size` columns some are dropped."""
    units, gone = columns // size, dropped * size
    stay = columns - gone
    products = solved = launches = 0.0
    for start in range(0, columns, PANEL):
        stop = min(start + PANEL, columns)
        products += 2 * stop * (stop - start) * (columns - start)
    at_once, among = max(ziplm.ROUND // size, 1), max(ziplm.CANDIDATES // size, 1)
    for start in range(0, dropped, at_once):
        take = min(at_once, dropped - start)
        few = size * min(max(among, take), units - start)
        products += 2 * rows * (size * columns + few**2) + take * (4 * size * few**2 + 2 * size**2 * few)
        products += 2 * take * size * columns * (rows + columns)
        solved += (
            3 * size**3 * (units + take * few / size) + take * 3 * size**2 * few + 2 * (take * size) ** 2 * columns
        )
        launches += 30 + 20 * take
    products += 2 * rows * (gone * stay + 2 * columns**2)
    solved += stay**3 / 3 + 2 * rows * stay**2
    moved = _F32 * (8.0 * columns**2 + 12.0 * rows * columns)
    # The inverse, the weight twice, what is looked at of both; the Hessian, parts of it that stay, and weights.
    choosing = _F32 * (columns**2 + 4.0 * min(ziplm.CANDIDATES, columns) ** 2 + 4.0 * rows * columns)
    solving = _F32 * (2.0 * columns**2 + 2.0 * stay**2 - stay * columns + 6.0 * rows * columns)
    removed = Work.of(
        max(choosing, solving), float32=products, factor=solved, moved=moved,
        launches=launches + 4 * units / PANEL + 60,
    )  # fmt: skip
    factored = inverse_cholesky(columns) + 3 * assembled(columns) + removed
    return Work(factored.counts, factored.memory)  # the factor is not handed back
