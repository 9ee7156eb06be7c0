"""The methods of allocation: what a recipe's `allocation` may say."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, StrictFloat, StrictInt, model_validator

from compressx.recipe.document import shown
from compressx.recipe.validation import Strict, conflict
from compressx.runtime.errors import did_you_mean

UnitKind: TypeAlias = Literal["block", "rule", "linear"]
"""What gets one sparsity: a decoder block, what one rule takes in it, or its linears of one kind."""
Scope: TypeAlias = Literal["model", "block"]

MAX_SPARSITY = 0.95
"""The most that a unit gets, whatever the others cost."""

_TARGET = "fraction of zeros over all planned linears; 0.5 is 50%"
_METHOD = "how sparsities are chosen"
_WINDOWS = "calibration windows to measure with, the first so many"


class UniformAllocation(Strict):
    """The target everywhere."""

    method: Literal["uniform"] = Field(description=_METHOD)
    target: StrictFloat = Field(gt=0, lt=1, description=_TARGET)

    measures: ClassVar[str] = ""
    unit: ClassVar[UnitKind] = "block"
    scope: ClassVar[Scope] = "model"


class ExplicitAllocation(Strict):
    """A sparsity for each linear."""

    method: Literal["explicit"] = Field(description=_METHOD)
    sparsities: dict[str, Annotated[StrictFloat, Field(ge=0, lt=1)]] = Field(
        min_length=1,
        description="sparsity (0.5 is 50%) by glob over fully qualified names; the first that matches takes a linear",
    )
    target: StrictFloat | None = Field(
        None,
        gt=0,
        lt=1,
        description="fraction of zeros that they have to come to, 0.5 being 50%; not checked when absent",
    )

    measures: ClassVar[str] = ""
    unit: ClassVar[UnitKind] = "rule"
    scope: ClassVar[Scope] = "model"


class OwlAllocation(Strict):
    """Less sparsity for the blocks with more outliers (arXiv 2310.05175)."""

    method: Literal["owl"] = Field(description=_METHOD)
    target: StrictFloat = Field(gt=0, lt=MAX_SPARSITY, description=_TARGET)
    outlier_threshold: StrictFloat = Field(
        5.0, gt=0, description="what counts as an outlier: a score above so many times its block's mean"
    )
    spread: StrictFloat = Field(0.08, ge=0, description="the most by which a block's sparsity differs from the target")
    samples: StrictInt = Field(24, ge=1, description=_WINDOWS)

    measures: ClassVar[str] = "outliers"
    unit: ClassVar[UnitKind] = "block"
    scope: ClassVar[Scope] = "model"

    @model_validator(mode="after")
    def _within(self) -> OwlAllocation:
        room = min(self.target, MAX_SPARSITY - self.target)
        if self.spread > room + 1e-9:
            raise conflict(
                f"target {self.target:g} with spread {self.spread:g} reaches from {self.target - self.spread:g} to "
                f"{self.target + self.spread:g}, and a sparsity lies within 0 and {MAX_SPARSITY:g}; a spread of at "
                f"most {room:g} fits",
                ["spread"],
            )
        return self


class _Measuring(Strict):
    """What the methods have in common that measure what sparsity costs."""

    target: StrictFloat = Field(gt=0, lt=MAX_SPARSITY, description=_TARGET)
    scope: Scope = Field("model", description="what shares the target: all blocks, or each block by itself")
    sparsities: list[Annotated[StrictFloat, Field(gt=0, le=MAX_SPARSITY)]] = Field(
        default=[0.3, 0.5, 0.7, 0.9], min_length=2, description="sparsities to measure, rising; 0.5 is 50%"
    )
    samples: StrictInt = Field(
        24,
        ge=1,
        description=f"{_WINDOWS}; what sparsity costs is measured on the last quarter, which the pruners do not see",
    )

    measures: ClassVar[str] = "divergences"

    @model_validator(mode="after")
    def _rising(self) -> _Measuring:
        if any(a >= b for a, b in pairwise(self.sparsities)):
            raise conflict(f"sparsities rise from each to the next; got {self.sparsities}", ["sparsities"])
        return self


class DivergenceAllocation(_Measuring):
    """Sparsity where the model's predictions diverge least for it, by the changes of its decoder blocks' outputs."""

    method: Literal["divergence"] = Field(description=_METHOD)
    unit: UnitKind = Field(
        "block",
        description="what gets one sparsity: a block, what one rule takes in a block, or a block's linears of one kind",
    )

    @model_validator(mode="after")
    def _something_to_choose(self) -> DivergenceAllocation:
        if self.unit == self.scope == "block":
            raise conflict(
                "with scope block each block has the target by itself, and with unit block nothing is left to choose; "
                "give unit rule or linear, or scope model",
                ["unit", "scope"],
            )
        return self


class AttentionAware(_Measuring):
    """Method `divergence` with units of what one rule takes in a block: query and key apart from the rest."""

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
