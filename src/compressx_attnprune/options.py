"""The options of a recipe's `attnprune` rule."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

HELD_OUT = 0.125
"""Fraction of the sequences (at least one) that nothing is learned from: candidates are chosen and the report's errors
measured on them."""


class AttnPruneOptions(BaseModel):
    """Options of attention pruning."""

    model_config = ConfigDict(extra="forbid")

    objective: Literal["attention-output", "attention-matrix"] = Field(
        "attention-output",
        description="error to minimise: attention-output, the error of what the attention adds to the residual "
        "stream, gives the lowest perplexity; attention-matrix is the published one (arXiv 2410.11261)",
    )
    mode: Literal["gauss-newton", "mask"] = Field(
        "gauss-newton",
        description="gauss-newton: masks and weights in closed form, from a second-order model of the objective; mask: "
        "relaxed masks learned by gradient descent as published, kept weights unchanged; objective: attention-matrix",
    )
    sequences: int = Field(
        64,
        ge=2,
        description="number of calibration sequences used, all kept in memory; time is proportional to it and grows "
        "with the square of their length",
    )
    regularization: float | None = Field(
        None,
        gt=0,
        description="mask: lambda, the weight of the masks' squared norm against the error; when absent, the best of "
        "0.03, 0.1, 0.3 and 1 on the held-out sequences, which takes four times as long",
    )

    @model_validator(mode="after")
    def _mode_fits(self) -> AttnPruneOptions:
        if self.mode == "mask" and self.objective != "attention-matrix":
            raise ValueError("mode: mask is the published method; write objective: attention-matrix beside it")
        if self.mode != "mask" and self.regularization is not None:
            raise ValueError(f"regularization has no effect with mode: {self.mode}; it needs mode: mask")
        return self
