"""What gets one sparsity: the linears that one rule took in one decoder block; and how a total is spread over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compressx.allocation import Curve, cheapest, in_steps, shares
from compressx.patterns import Group, Unstructured
from compressx.planning import Plan, PlannedLinear, PlannedRule


@dataclass(frozen=True, eq=False)
class Unit:
    """The linears of one rule in one block.

    Attributes:
        block: fully qualified name of the block; empty outside the blocks.
        rule: the rule.
        group: what competes for the budget.
        linears: in the model's order.
    """

    block: str
    rule: PlannedRule
    group: Group
    linears: tuple[PlannedLinear, ...]

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(x.weights for x in self.linears)


def units_of(plan: Plan) -> tuple[Unit, ...]:
    """Return the units of a plan whose sparsities are to be allocated, in the model's order."""
    members: dict[tuple[str, PlannedRule, Group], list[PlannedLinear]] = {}
    for linear in plan.linears:
        assert isinstance(linear.pattern, Unstructured)  # noqa: S101 - allocation of N:M is refused with the recipe
        members.setdefault((linear.block, linear.rule, linear.pattern.group), []).append(linear)
    return tuple(Unit(*key, tuple(linears)) for key, linears in members.items())


def spread(
    units: Sequence[Unit], curves: Mapping[Unit, Curve], target: float, scope: Literal["model", "block"]
) -> dict[str, Unstructured]:
    """Give every linear its pattern, at the least summed error for the target.

    A unit without a curve keeps the target. The zeros are `round(target * weights)` in all; where every linear that
    could make up for it fills rows evenly, they are as near as its rows allow.

    Args:
        units: the units of a plan.
        curves: error against sparsity, of those that share the target.
        target: fraction of zeros.
        scope: whether all blocks share the target, or each has it by itself.

    Returns:
        Patterns by linear name.
    """
    # What can take any count comes last, here and within each group, to make up for what fills rows evenly.
    sharing = sorted(_sharing(units, curves, scope), key=lambda group: any(u.group != "row" for u in group))
    parts: list[_Part] = []
    for group, zeros in zip(sharing, shares([sum(u.weights for u in g) for g in sharing], target), strict=True):
        allotted = [zeros] if group[0] not in curves else cheapest([curves[u].points(u.weights) for u in group], zeros)
        mine = [part for unit, count in zip(group, allotted, strict=True) for part in _parts(unit, count)]
        parts += sorted(mine, key=lambda part: part.step == 1)
    counts = in_steps([p.zeros for p in parts], [p.weights for p in parts], [p.step for p in parts])
    return {
        name: Unstructured(count / part.weights, part.group)
        for part, count in zip(parts, counts, strict=True)
        for name in part.names
    }


def _sharing(units: Sequence[Unit], curves: Mapping[Unit, Curve], scope: str) -> list[list[Unit]]:
    """Group the units that share a target; one without a curve has it by itself."""
    groups: dict[object, list[Unit]] = {}
    for unit in units:
        key = unit if unit not in curves else unit.block if scope == "block" else None
        groups.setdefault(key, []).append(unit)
    return list(groups.values())


@dataclass(frozen=True)
class _Part:
    """Linears with one count of zeros, a multiple of `step`."""

    names: tuple[str, ...]
    group: Group
    weights: int
    zeros: int
    step: int


def _parts(unit: Unit, zeros: int) -> Iterator[_Part]:
    """Yield a unit that competes jointly as one, else its linears, each with its share of the zeros."""
    if unit.group == "joint":
        yield _Part(tuple(x.name for x in unit.linears), unit.group, unit.weights, zeros, step=1)
        return
    sizes = [x.weights for x in unit.linears]
    for linear, count in zip(unit.linears, shares(sizes, zeros / unit.weights), strict=True):
        step = linear.shape[0] if unit.group == "row" else 1
        yield _Part((linear.name,), unit.group, linear.weights, count, step)
