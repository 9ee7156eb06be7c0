"""The recipe's `allocation` section: one model per method."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, StrictFloat, StrictInt, model_validator

from compressx.recipe.document import shown
from compressx.recipe.targets import Pattern
from compressx.recipe.validation import Strict, conflict
from compressx.runtime.errors import did_you_mean

UnitKind: TypeAlias = Literal["block", "rule", "linear"]
"""What gets one sparsity: a decoder block, the linears of one rule in it, or its linears of one kind."""
Scope: TypeAlias = Literal["model", "block"]

MAX_SPARSITY = 0.95
"""Highest sparsity of a unit."""

_TARGET = "fraction of zeros over all planned linears; 0.5 is 50%"
_METHOD = "how sparsities are chosen"
_WINDOWS = "the first calibration windows to measure with"


class UniformAllocation(Strict):
    """The target for every linear."""

    method: Literal["uniform"] = Field(description=_METHOD)
    target: StrictFloat = Field(gt=0, lt=1, description=_TARGET)

    measures: ClassVar[str] = ""
    unit: ClassVar[UnitKind] = "block"
    scope: ClassVar[Scope] = "model"


class ExplicitAllocation(Strict):
    """A sparsity for each linear."""

    method: Literal["explicit"] = Field(description=_METHOD)
    sparsities: dict[Pattern, Annotated[StrictFloat, Field(ge=0, lt=1)]] = Field(
        min_length=1,
        description="sparsity (0.5 is 50%) by glob, or re: and a regular expression, over fully qualified names; the "
        "first match wins",
    )
    target: StrictFloat | None = Field(
        None,
        gt=0,
        lt=1,
        description="fraction of zeros that they must add up to; 0.5 is 50%; not checked when absent",
    )

    measures: ClassVar[str] = ""
    unit: ClassVar[UnitKind] = "rule"
    scope: ClassVar[Scope] = "model"


class OwlAllocation(Strict):
    """Less sparsity for blocks with more outliers (arXiv 2310.05175)."""

    method: Literal["owl"] = Field(description=_METHOD)
    target: StrictFloat = Field(gt=0, lt=MAX_SPARSITY, description=_TARGET)
    outlier_threshold: StrictFloat = Field(
        5.0, gt=0, description="an outlier has a score above this multiple of the block's mean"
    )
    spread: StrictFloat = Field(0.08, ge=0, description="largest difference of a block's sparsity from the target")
    samples: StrictInt = Field(24, ge=1, description=_WINDOWS)

    measures: ClassVar[str] = "outliers"
    unit: ClassVar[UnitKind] = "block"
    scope: ClassVar[Scope] = "model"

    @model_validator(mode="after")
    def _within(self) -> OwlAllocation:
        room = min(self.target, MAX_SPARSITY - self.target)
        if self.spread > room + 1e-9:
            raise conflict(
                f"target {self.target:g} with spread {self.spread:g} ranges from {self.target - self.spread:g} to "
                f"{self.target + self.spread:g}, outside 0 to {MAX_SPARSITY:g}; expected a spread of at most {room:g}",
                ["spread"],
            )
        return self


class _Measuring(Strict):
    """Keys of the methods that measure divergences."""

    target: StrictFloat = Field(gt=0, lt=MAX_SPARSITY, description=_TARGET)
    scope: Scope = Field("model", description="what shares the target: the whole model, or each block by itself")
    sparsities: list[Annotated[StrictFloat, Field(gt=0, le=MAX_SPARSITY)]] = Field(
        default=[0.3, 0.5, 0.7, 0.9], min_length=2, description="sparsities to measure, increasing; 0.5 is 50%"
    )
    samples: StrictInt = Field(
        24,
        ge=1,
        description=f"{_WINDOWS}; divergences are measured on the last quarter, which the pruners do not see",
    )

    measures: ClassVar[str] = "divergences"

    @model_validator(mode="after")
    def _rising(self) -> _Measuring:
        if any(a >= b for a, b in pairwise(self.sparsities)):
            raise conflict(f"sparsities must increase; got {self.sparsities}", ["sparsities"])
        return self


class DivergenceAllocation(_Measuring):
    """More sparsity where the model's predictions diverge least, judged by the changes of the blocks' outputs."""

    method: Literal["divergence"] = Field(description=_METHOD)
    unit: UnitKind = Field(
        "block",
        description="what gets one sparsity: a block, the linears of one rule in it, or its linears of one kind",
    )

    @model_validator(mode="after")
    def _something_to_choose(self) -> DivergenceAllocation:
        if self.unit == self.scope == "block":
            raise conflict(
                "scope block gives each block the target, so unit block leaves nothing to choose; give unit rule or "
                "linear, or scope model",
                ["unit", "scope"],
            )
        return self


class AttentionAware(_Measuring):
    """Method `divergence` with unit `rule`: query and key apart from the rest of a block."""

    method: Literal["attention-aware"] = Field(description=_METHOD)

    unit: ClassVar[UnitKind] = "rule"


MeasuredAllocation: TypeAlias = OwlAllocation | DivergenceAllocation | AttentionAware
Allocation: TypeAlias = UniformAllocation | ExplicitAllocation | MeasuredAllocation

_NAMES = ("uniform", "owl", "divergence", "attention-aware", "explicit")


def _known_method(value: object) -> object:
    if isinstance(value, Mapping):
        if "method" not in value:
            raise conflict(f"missing key 'method': {_METHOD}; valid: {', '.join(sorted(_NAMES))}", [])
        if (method := value["method"]) == "error":
            raise conflict("method error was renamed; use divergence", ["method"])
        if method not in _NAMES:
            raise conflict(f"no method {shown(method)}; {did_you_mean(str(method), _NAMES)}", ["method"])
    return value


AllocationField = Annotated[Allocation, Field(discriminator="method"), BeforeValidator(_known_method)]
