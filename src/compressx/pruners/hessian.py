"""What the pruners that read the Hessian have in common."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from compressx import Block, Hessian


class HessianOptions(BaseModel):
    """Options of every pruner that reads the Hessian."""

    model_config = ConfigDict(extra="forbid")

    damping: float = Field(
        0.01,
        gt=0,
        description="added to the Hessian's diagonal, as a fraction of its mean; more trusts the calibration less",
    )


Options = TypeVar("Options", bound=HessianOptions)


class HessianPruner(Generic[Options]):
    """A pruner that observes X^T X of each linear's inputs X [tokens, in_features]."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def observe(self, block: Block, name: str) -> Hessian:
        return Hessian(block.linears[name].in_features)
