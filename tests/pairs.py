"""Pairwise testing: every two values of two axes meet in a case, instead of all combinations of all axes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return cases, one value of each axis in each, such that every pair of values of two axes is in one.

    There are about as many as the two longest axes have combinations. The same axes give the same cases.
    """
    values = [list(axis) for axis in axes]
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(values)), 2)
        for i, j in product(range(len(values[a])), range(len(values[b])))
    }
    cases = []
    for first in sorted(missing):
        if first not in missing:
            continue
        case = dict(first)
        for axis in (a for a in range(len(values)) if a not in case):
            case[axis] = max(range(len(values[axis])), key=lambda i: len(_met({**case, axis: i}) & missing))
        missing -= _met(case)
        cases.append(tuple(values[axis][case[axis]] for axis in range(len(values))))
    return cases


def _met(case: dict[int, int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return {(one, other) for one, other in combinations(sorted(case.items()), 2)}
