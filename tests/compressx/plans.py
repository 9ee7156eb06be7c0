"""Plans made by hand: one rule over a model's linears."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from compressx import PrunerSpec
from compressx.api.patterns import RulePattern
from compressx.models.architecture import architecture_of
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule


class NoOptions(BaseModel):
    pass


def spec_of(pruner: object, name: str = "other", **fields: Any) -> PrunerSpec:
    return PrunerSpec(name, "for a test", NoOptions, lambda _: pruner, **fields)  # type: ignore[arg-type,return-value]


def plan_all(
    model: Any, spec: PrunerSpec, pattern: RulePattern, *, only: str = "", reconstructor: PrunerSpec | None = None,
    outside: bool = False, **planned: Any,
) -> Plan:  # fmt: skip
    """Plan one rule over every linear whose name contains `only`."""
    found = architecture_of(model)
    rule = PlannedRule(0, tuple((x, x.options()) for x in (spec, reconstructor) if x))
    every = {**found.linears, **(found.outside if outside else {})}
    linears = tuple(
        PlannedLinear(n, found.block_of(n) if n in found.linears else "", tuple(x.weight.shape), rule, pattern)
        for n, x in every.items()
        if only in n
    )
    return Plan(linears, {}, (rule,), needs_calibration=True, **planned)
