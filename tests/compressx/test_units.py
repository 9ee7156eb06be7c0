"""Spreading a total over units: exact counts whatever the groups, by model and by block."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressx.allocation import MAX_SPARSITY, Curve
from compressx.patterns import Unstructured
from compressx.planning import Plan, PlannedLinear, PlannedRule
from compressx.pruners import magnitude
from compressx.units import Unit, spread, units_of

GRID = (0.3, 0.5, 0.7, 0.9)
(SPEC,) = magnitude.compressx_pruners()
SHAPES = ((48, 32), (16, 32), (40, 64), (7, 11))


def rule(index: int) -> PlannedRule:
    return PlannedRule(index, SPEC, SPEC.options(), None, None)


def plan(*groups: Any, blocks: int = 3, outside: Any = None) -> Plan:
    """Plan a rule for each group, which takes linears of all shapes in each block, and one for a head outside."""
    linears = [
        PlannedLinear(f"b{b}.{r.index}.{i}", f"b{b}", shape, r, Unstructured(0.5, group))
        for b in range(blocks)
        for r, group in zip(map(rule, range(len(groups))), groups, strict=True)
        for i, shape in enumerate(SHAPES)
    ]
    if outside:
        linears.append(PlannedLinear("head", "", (101, 32), rule(len(groups)), Unstructured(0.5, outside)))
    # Rules are compared by identity, so each block has to name the same ones.
    rules = {x.rule.index: x.rule for x in linears}
    linears = [PlannedLinear(x.name, x.block, x.shape, rules[x.rule.index], x.pattern) for x in linears]
    return Plan(tuple(linears), {}, tuple(rules.values()), needs_calibration=True)


def curves_of(planned: Plan, *scales: float) -> dict[Unit, Curve]:
    """Curves of rising cost, dearer by the block and by the rule."""
    inside = [u for u in units_of(planned) if u.block]
    return {
        u: Curve(GRID, tuple((scales or (1.0,))[u.rule.index % len(scales or (1,))] * (1 + i) * s**3 for s in GRID))
        for i, u in enumerate(inside)
    }


def zeros(planned: Plan, patterns: dict[str, Unstructured], block: str | None = None) -> float:
    return sum(patterns[x.name].sparsity * x.weights for x in planned.linears if block in (None, x.block))


def allocated(
    planned: Plan, target: float, scope: Literal["model", "block"] = "model"
) -> tuple[Plan, dict[str, Unstructured]]:
    curves = curves_of(planned)
    units = [*curves, *(u for u in units_of(planned) if not u.block)]
    return planned, spread(units, curves, target, scope)


TARGETS = st.floats(0.01, 0.94)


@given(TARGETS, st.sampled_from(["model", "block"]), st.sampled_from(["row", "layer", "joint"]))
def test_the_total_is_exact_when_any_rule_can_take_any_count(target: float, scope: Any, other: Any) -> None:
    planned, patterns = allocated(plan(other, "layer", outside="row"), target, scope)
    weights = sum(x.weights for x in planned.linears)
    assert round(zeros(planned, patterns), 6) == round(target * weights)


@given(TARGETS, st.sampled_from(["model", "block"]))
def test_the_total_is_within_half_a_row_group_when_all_rows_are_filled_evenly(target: float, scope: Any) -> None:
    planned, patterns = allocated(plan("row", "row", outside="row"), target, scope)
    weights = sum(x.weights for x in planned.linears)
    if target < 0.85:  # beyond that, rows of eleven are full before the rest is
        assert abs(zeros(planned, patterns) - round(target * weights)) <= 101 / 2
    for linear in planned.linears:
        in_a_row = patterns[linear.name].sparsity * linear.shape[1]
        assert in_a_row == pytest.approx(round(in_a_row))
        assert patterns[linear.name].sparsity <= MAX_SPARSITY


@given(TARGETS)
def test_by_block_each_block_has_the_target_by_itself(target: float) -> None:
    planned, patterns = allocated(plan("layer", "joint"), target, "block")
    for block in ("b0", "b1", "b2"):
        weights = sum(x.weights for x in planned.linears if x.block == block)
        assert abs(zeros(planned, patterns, block) - target * weights) <= 1


def test_by_model_the_dear_blocks_are_pruned_less_and_each_unit_evenly() -> None:
    planned, patterns = allocated(plan("layer"), 0.5)
    by_block = [zeros(planned, patterns, f"b{b}") for b in range(3)]
    assert all(a > b * 1.1 for a, b in pairwise(by_block))
    first = [x for x in planned.linears if x.block == "b0"]
    counts = [patterns[x.name].sparsity * x.weights for x in first]
    shared = sum(counts) / sum(x.weights for x in first)
    assert all(abs(c - shared * x.weights) <= 1 for c, x in zip(counts, first, strict=True))


def test_linears_that_compete_jointly_get_one_pattern() -> None:
    planned, patterns = allocated(plan("joint", "layer"), 0.37)
    jointly = {patterns[x.name] for x in planned.linears if x.block == "b1" and x.rule.index == 0}
    assert len(jointly) == 1
    assert jointly.pop().group == "joint"


def test_what_lies_outside_the_blocks_keeps_the_target() -> None:
    planned, patterns = allocated(plan("layer", outside="layer"), 0.25)
    assert patterns["head"] == Unstructured(101 * 32 // 4 / (101 * 32), "layer")
    assert [u.block for u in units_of(planned)] == ["b0", "b1", "b2", ""]


def test_the_dearer_rule_of_a_block_is_pruned_less() -> None:
    planned = plan("layer", "layer")
    curves = curves_of(planned, 1.0, 100.0)
    patterns = spread(list(curves), curves, 0.5, "block")
    for b in range(3):
        assert patterns[f"b{b}.0.0"].sparsity > 0.8
        assert patterns[f"b{b}.1.0"].sparsity < 0.2
