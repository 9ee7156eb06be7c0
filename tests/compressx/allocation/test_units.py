"""Spreading a total over units: exact counts whatever the groups and patterns, by model and by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compressx.built_in import BUILT_IN

from compressx.allocation.units import Curve, Unit, cheapest, check_allocation, shares, spread, units_of, zeros_of
from compressx.api.patterns import NM, Unstructured
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.recipe.sections import AttentionAware, OwlAllocation
from compressx.runtime.errors import RecipeError

GRID = (0.3, 0.5, 0.7, 0.9)
SPEC, WHOLE = BUILT_IN["magnitude"], BUILT_IN["attnprune"]
SHAPES = ((48, 32), (16, 32), (40, 64), (7, 11))
EVEN = ((48, 32), (16, 32), (40, 64), (24, 96))  # whose input features 4 and 8 divide

Pattern = Unstructured | NM


def rule(index: int, spec: Any = SPEC) -> PlannedRule:
    return PlannedRule(index, ((spec, spec.options()),))


def plan(*kinds: Any, blocks: int = 3, outside: Any = None, shapes: Any = SHAPES, spec: Any = SPEC) -> Plan:
    """Plan a rule for each group or pattern, with linears of all shapes in each block, and one for a head outside."""
    rules = tuple(rule(i, spec) for i in range(len(kinds) + bool(outside)))

    def pattern(kind: Any) -> Pattern:
        return kind if isinstance(kind, NM) else Unstructured(0.5, kind)

    linears = [
        PlannedLinear(f"b{b}.{r.index}.kind_{'abcd'[i]}", f"b{b}", shape, r, pattern(kind))
        for b in range(blocks)
        for r, kind in zip(rules, kinds, strict=False)
        for i, shape in enumerate(shapes)
    ]
    if outside:
        linears.append(PlannedLinear("head", "", (101, 32), rules[-1], pattern(outside)))
    return Plan(tuple(linears), {}, rules, needs_calibration=True)


def curves_of(units: Any, *scales: float) -> dict[Unit, Curve]:
    """Curves of rising cost, dearer by the block and by the rule."""
    scales = scales or (1.0,)
    inside = [u for u in units if u.block]
    return {
        u: Curve(GRID, tuple(scales[u.linears[0].rule.index % len(scales)] * (1 + i) * s**3 for s in GRID))
        for i, u in enumerate(inside)
    }


def zeros(planned: Plan, patterns: Mapping[str, Pattern], block: str | None = None) -> float:
    return sum(patterns[x.name].sparsity * x.weights for x in planned.linears if block in (None, x.block))


def by_cost(planned: Plan, target: float, kind: Any = "rule", *scales: float) -> Any:
    units = units_of(planned, kind)
    curves = curves_of(units, *scales)
    return spread(units, target, lambda g, z: cheapest([u.points(curves[u]) for u in g], z))


def allocated(planned: Plan, target: float, kind: Any = "rule") -> Any:
    return planned, by_cost(planned, target, kind)


def evenly(units: Any, zeros: int) -> list[int]:
    """Give every unit the same sparsity."""
    weights = [u.weights for u in units]
    return shares(weights, zeros / sum(weights))


quick = settings(max_examples=40)
TARGETS = st.floats(0.01, 0.94)
KINDS = st.sampled_from(["block", "rule"])


@pytest.mark.slow
@quick
@given(TARGETS, st.sampled_from(["row", "layer", "joint"]), KINDS)
def test_the_total_is_exact_when_any_rule_can_take_any_count(target: float, other: Any, kind: Any) -> None:
    planned, patterns = allocated(plan(other, "layer", outside="row"), target, kind)
    weights = sum(x.weights for x in planned.linears)
    assert round(zeros(planned, patterns), 6) == round(target * weights)


def test_what_lies_outside_the_blocks_keeps_the_target_and_what_its_rows_cannot_express_is_made_up_for_within() -> None:
    planned, patterns = allocated(plan("layer", outside="layer"), 0.25)
    assert patterns["head"] == Unstructured(101 * 32 // 4 / (101 * 32), "layer")
    assert [u.block for u in units_of(planned, "rule")] == ["b0", "b1", "b2", ""]
    planned, patterns = allocated(plan("layer", outside="row"), 0.3)
    assert patterns["head"].sparsity == 10 / 32
    assert zeros(planned, patterns) == pytest.approx(round(0.3 * sum(x.weights for x in planned.linears)))


def test_the_dearer_rule_of_a_block_is_pruned_less_and_stays_dense_if_it_is_dear_enough() -> None:
    patterns = by_cost(plan("layer", "layer"), 0.5, "rule", 1.0, 100.0)
    for b in range(3):
        assert patterns[f"b{b}.0.kind_a"].sparsity > 0.8
        assert patterns[f"b{b}.1.kind_a"].sparsity < 0.2
    patterns = by_cost(plan(NM(2, 4), NM(2, 4), shapes=EVEN), 0.25, "rule", 1.0, 1e6)
    assert {str(p) for n, p in patterns.items() if ".1." in n} == {"4:4"}


# --- what a unit is


def test_a_unit_is_a_block_or_what_a_rule_took_in_it() -> None:
    planned = plan("layer", "row", blocks=2, outside="layer")
    assert [len(u.linears) for u in units_of(planned, "block")] == [8, 8, 1]
    assert [len(u.linears) for u in units_of(planned, "rule")] == [4, 4, 4, 4, 1]


@pytest.mark.parametrize(("kind", "spec"), [("joint", SPEC), ("layer", WHOLE), (NM(2, 4), WHOLE)])
def test_linears_that_a_rule_decides_together_get_one_pattern(kind: Any, spec: Any) -> None:
    """Attnprune takes query and key with one pattern, and rounding must not part them."""
    units = units_of(plan(kind, spec=spec, shapes=EVEN), "rule")
    for target in (0.3, 0.41, 0.7123):
        patterns = spread(units, target, evenly)
        for unit in units:
            assert len({patterns[x.name] for x in unit.linears}) == 1


# --- N:M


def of(*sizes: int) -> Any:
    return st.sampled_from([NM(1, m) for m in sizes])


@quick
@given(st.floats(0.05, 0.7), of(4, 8), st.sampled_from(["layer", "joint"]), KINDS)
def test_what_n_m_cannot_express_is_made_up_for_by_the_others(
    target: float, pattern: NM, other: Any, kind: Any
) -> None:
    planned, patterns = allocated(plan(pattern, other, shapes=EVEN), target, kind)
    weights = sum(x.weights for x in planned.linears)
    final = planned.allocated(patterns)
    assert zeros_of(final.linears) == round(target * weights)
    for x in final.linears:
        if x.rule.index == 0:
            assert isinstance(x.pattern, NM)
            assert x.pattern.of == pattern.of
            assert 1 <= x.pattern.keep <= pattern.of


@quick
@given(st.floats(0.0, 0.74), of(4, 8, 16), KINDS)
def test_of_n_m_alone_the_total_is_within_half_a_step(target: float, pattern: NM, kind: Any) -> None:
    planned = plan(pattern, shapes=EVEN)
    total = round(target * sum(x.weights for x in planned.linears))
    steps = [x.weights // pattern.of for x in planned.linears]
    assert abs(zeros(planned, by_cost(planned, target, kind)) - total) <= max(steps) / 2
    patterns = spread(units_of(planned, kind), target, evenly)
    left = total - zeros(planned, patterns)
    finest = {patterns[x.name].keep for x in planned.linears if x.weights // pattern.of == min(steps)}
    # The finest make up for the others while they have room: from dense to one of M kept.
    assert abs(left) <= min(steps) / 2 or finest == {1 if left > 0 else pattern.of}


def test_a_sparsity_is_measured_at_the_nearest_that_the_patterns_of_a_unit_have() -> None:
    unit = units_of(plan(NM(2, 4), "layer", shapes=((10, 8),)), "block")[0]
    reached, patterns = unit.at(0.6)
    assert [p for names in patterns.values() for p in names.values()] == [NM(2, 4), Unstructured(0.6, "layer")]
    assert reached == pytest.approx(0.55)
    (only,) = units_of(plan(NM(2, 4), shapes=((10, 8),), blocks=1), "block")
    assert [only.at(s)[0] for s in (0.01, 0.3, 0.5, 0.7, 0.9)] == [0.25, 0.25, 0.5, 0.75, 0.75]


# --- what is refused


@pytest.mark.parametrize(
    ("planned", "target", "message"),
    [(plan(NM(2, 4), "layer", shapes=EVEN), 0.86, r"the patterns allow at most 0\.8\d+; N:M .*, .* allocation 5%"),
     (plan("layer", "layer", outside=NM(2, 4), shapes=EVEN), 0.8, r"the patterns of head allow at most 0\.75"),
     (plan("layer", shapes=EVEN, blocks=1), 0.5, "nothing to choose, because each of the 1 targets applies to a ")],
    ids=["in all", "outside the blocks", "nothing to choose"],
)  # fmt: skip
def test_a_target_out_of_reach_is_refused(planned: Plan, target: float, message: str) -> None:
    check_allocation(replace(plan(NM(2, 4), "layer", shapes=EVEN), allocation=OwlAllocation(method="owl", target=0.84)))
    settings = AttentionAware(method="attention-aware", target=target)
    with pytest.raises(RecipeError, match=message):
        check_allocation(replace(planned, allocation=settings))


def test_zeros_are_counted_as_masks_will_have_them() -> None:
    """A third of a row of 32 is eleven; of what competes jointly only the total is whole."""
    linears = [replace(x, pattern=Unstructured(1 / 3, x.pattern.group)) for x in plan("row", "joint", blocks=2).linears]  # type: ignore[union-attr]
    rows = sum(x.pattern.zeros(*x.shape) or 0 for x in linears if x.rule.index == 0)
    joint = round(sum(a * b for a, b in SHAPES) / 3)
    assert zeros_of(linears) == rows + 2 * joint
