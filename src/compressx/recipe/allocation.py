"""The recipe's `allocation` section: one model per method."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, StrictFloat, StrictInt, model_validator

from compressx.recipe.document import shown
from compressx.recipe.validation import Strict, conflict
from compressx.runtime.errors import did_you_mean

Sharing: TypeAlias = Literal["block", "rule"]
"""What gets one sparsity: a decoder block, or the linears of one rule in it."""

MAX_SPARSITY = 0.95
"""Highest sparsity of a unit."""
OUTLIER_THRESHOLD = 5.0
"""An outlier has a score above this multiple of the block's mean; M of the OWL paper."""
SPREAD = 0.08
"""Largest difference of a block's sparsity from OWL's target; lambda of the paper."""

_TARGET = "fraction of zeros over all planned linears; 0.5 is 50%"
_METHOD = "how sparsities are chosen"
_WINDOWS = "the first calibration windows to measure with"


class OwlAllocation(Strict):
    """Less sparsity for blocks with more outliers (arXiv 2310.05175)."""

    method: Literal["owl"] = Field(description=_METHOD)
    target: StrictFloat = Field(ge=SPREAD, le=MAX_SPARSITY - SPREAD, description=_TARGET)
    samples: StrictInt = Field(24, ge=1, description=_WINDOWS)

    measures: ClassVar[str] = "outliers"
    unit: ClassVar[Sharing] = "block"


class _Measuring(Strict):
    """Keys of the methods that measure divergences."""

    target: StrictFloat = Field(gt=0, lt=MAX_SPARSITY, description=_TARGET)
    sparsities: list[Annotated[StrictFloat, Field(gt=0, le=MAX_SPARSITY)]] = Field(
        default=[0.3, 0.5, 0.7, 0.9], min_length=2, description="sparsities to measure, increasing; 0.5 is 50%"
    )
    samples: StrictInt = Field(
        24,
        ge=2,
        description=f"{_WINDOWS}; divergences are measured on the last quarter, which the pruners do not see",
    )

    measures: ClassVar[str] = "divergences"

    @model_validator(mode="after")
    def _rising(self) -> _Measuring:
        if any(a >= b for a, b in pairwise(self.sparsities)):
            raise conflict(f"sparsities must increase; got {self.sparsities}", ["sparsities"])
        return self


class DivergenceAllocation(_Measuring):
    """More sparsity for blocks whose changed outputs change the model's predictions least."""

    method: Literal["divergence"] = Field(description=_METHOD)

    unit: ClassVar[Sharing] = "block"


class AttentionAware(_Measuring):
    """The same for the linears of one rule in a block: query and key apart from the rest."""

    method: Literal["attention-aware"] = Field(description=_METHOD)

    unit: ClassVar[Sharing] = "rule"


Allocation: TypeAlias = OwlAllocation | DivergenceAllocation | AttentionAware

_NAMES = ("owl", "divergence", "attention-aware")


def _known_method(value: object) -> object:
    if isinstance(value, Mapping):
        if "method" not in value:
            raise conflict(f"missing key 'method': {_METHOD}; valid: {', '.join(sorted(_NAMES))}", [])
        if (method := value["method"]) not in _NAMES:
            raise conflict(f"no method {shown(method)}; {did_you_mean(str(method), _NAMES)}", ["method"])
    return value


AllocationField = Annotated[Allocation, Field(discriminator="method"), BeforeValidator(_known_method)]
