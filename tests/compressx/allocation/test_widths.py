"""Widths of their own: what allocations choose for units that are removed whole, in models of each geometry."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.compressx.depths import planned
from tests.compressx.mixtures import mixture

from compressx import RecipeError, Structured
from compressx.allocation import methods
from compressx.allocation.units import Curve, check_allocation, units_of, zeros_of
from compressx.planning.plan import Plan
from compressx.testing import tiny_model

NEURONS: dict[str, Any] = {"targets": ["*"], "pruner": "ziplm", "pattern": "neurons", "multiple": 16}
GROUPS: dict[str, Any] = {"targets": ["*"], "pruner": "ziplm", "pattern": "kv-groups"}
GRID = (0.1, 0.3, 0.6, 0.9)
HALF = {"method": "attention-aware", "target": 0.5}


def plan(architecture: str, *rules: dict[str, Any], target: float = 0.5) -> Plan:
    with torch.device("meta"):
        model = mixture(architecture) if architecture == "qwen3-moe" else tiny_model(architecture)
    return planned(model, *(rules or (NEURONS,)), allocation=HALF | {"target": target})


def chosen(open_plan: Plan, curves: dict[str, Any]) -> Plan:
    """Return the final plan by curves that were measured."""
    assert open_plan.allocation is not None
    return methods.chosen(open_plan, open_plan.allocation, curves)[0]


def widths(final: Plan) -> dict[str, set[int]]:
    """Return how many units go, by block, and check that the linears of a block's sets agree."""
    dropped: dict[str, set[int]] = defaultdict(set)
    for x in final.linears:
        assert isinstance(x.pattern, Structured)
        dropped[x.block].add(x.pattern.dropped)
        assert x.pattern.dropped % x.pattern.multiple == 0
    return dropped


@settings(max_examples=12)
@example([(1.0, 1.0), (1.0, 1.0), (1.0, 2.0)], 0.25)  # half a multiple more than four
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(1.0, 4.0)), min_size=3, max_size=3), st.floats(0.1, 0.8))
def test_no_other_widths_with_as_many_zeros_cost_less(kinds: list[tuple[float, float]], target: float) -> None:
    """Six multiples of 16 in each of three blocks, of which one stays at least; powers of the sparsity are convex."""
    open_plan = plan("llama", target=target)
    units = units_of(open_plan, "rule")
    curves = {u.linears[0].name: (GRID, [a * s**p for s in GRID]) for u, (a, p) in zip(units, kinds, strict=True)}
    final = chosen(open_plan, curves)
    mine = [widths(final)[u.block].pop() // 16 for u in units]
    assert sum(mine) == round(target * 18)
    assert zeros_of(final.linears) == 16 * sum(mine) * 3 * 64

    def cost(dropped: Any) -> float:
        drawn = [Curve(tuple(at), tuple(of)) for at, of in curves.values()]
        return sum(c.error(n / 6) for c, n in zip(drawn, dropped, strict=True))

    least = min(cost(n) for n in product(range(6), repeat=3) if sum(n) == sum(mine))
    assert cost(mine) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "opt", "mixtral", "qwen3-moe"])
def test_a_dear_block_keeps_more_and_all_experts_of_a_block_as_many(architecture: str) -> None:
    open_plan = plan(architecture)
    units = units_of(open_plan, "rule")
    curves = {u.linears[0].name: (GRID, [10.0**i * s**2 for s in GRID]) for i, u in enumerate(units)}
    dropped = widths(chosen(open_plan, curves))
    assert all(len(of) == 1 for of in dropped.values()), "experts of one weight have one width"
    counts = [of.pop() for of in dropped.values()]
    assert counts[0] > counts[-1]
    assert counts == sorted(counts, reverse=True)
    (one,) = {x.pattern.units.count for x in open_plan.linears if isinstance(x.pattern, Structured)}
    assert sum(counts) == round(0.5 * len(counts) * one / 16) * 16


@pytest.mark.parametrize("dear", ["neurons", "kv-groups"])
def test_neurons_and_groups_compete_at_one_price(dear: str) -> None:
    open_plan = plan("llama-mha", NEURONS, GROUPS, target=0.3)
    units = units_of(open_plan, "rule")
    kinds = {u: u.linears[0].pattern.unit for u in units if isinstance(u.linears[0].pattern, Structured)}
    curves = {u.linears[0].name: (GRID, [(100.0 if kinds[u] == dear else 1.0) * s**2 for s in GRID]) for u in units}
    final = chosen(open_plan, curves)
    zeros = {
        kind: zeros_of(x for x in final.linears if ("mlp" in x.name) == (kind == "neurons")) for kind in kinds.values()
    }
    assert zeros[dear] <= 4096 < max(zeros.values()), "a step of one of them may make up what is left"
    wanted = round(0.3 * sum(x.weights for x in final.linears))
    assert abs(zeros_of(final.linears) - wanted) <= 16 * 3 * 64 / 2, "half of the finest step"


def test_a_block_with_a_single_group_keeps_it() -> None:
    open_plan = plan("llama-mqa", NEURONS, GROUPS, target=0.3)
    measured = [u.linears[0].name for u in units_of(open_plan, "rule")]
    curves = {n: ((GRID, [s**2 for s in GRID]) if "mlp" in n else ((), ())) for n in measured}
    final = chosen(open_plan, curves)
    assert all(x.pattern.dropped == 0 for x in final.linears if "attn" in x.name and isinstance(x.pattern, Structured))
    with pytest.raises(
        RecipeError, match=r"target 0\.8 cannot be reached: the patterns allow at most 0\.\d+; N:M .*, units "
    ):
        check_allocation(plan("llama-mqa", NEURONS, GROUPS, target=0.8))


def test_a_shared_expert_of_another_width_has_a_width_of_its_own_at_the_sparsity_of_its_block() -> None:
    model = mixture("qwen2-moe", shared_expert_intermediate_size=96)
    open_plan = planned(model, NEURONS, allocation=HALF)
    curves = {u.linears[0].name: (GRID, [s**2 for s in GRID]) for u in units_of(open_plan, "rule")}
    final = chosen(open_plan, curves)
    for name in ("model.layers.0", "model.layers.2"):
        sets = {p.units.fqn: p for x in final.linears if x.block == name and isinstance(p := x.pattern, Structured)}
        assert len(sets) == 5
        assert {(p.units.count, p.dropped) for p in sets.values()} in ({(48, 16), (96, 32)}, {(48, 32), (96, 64)})
