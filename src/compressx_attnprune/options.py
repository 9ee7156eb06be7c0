"""The options of a recipe's `attnprune` rule."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

HELD_OUT = 0.125
"""Fraction of the sequences (at least one) that nothing is learned from: candidates are chosen and the report's errors
measured on them."""

_ONLY_WITH = {
    "steps": "mask",
    "regularization": "mask",
    "damping": "gauss-newton",
}
"""The mode in which an option has an effect."""


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
        "relaxed masks learned by gradient descent as published, kept weights unchanged",
    )
    refit: int = Field(
        0,
        ge=0,
        description="gradient steps that train the kept weights on the objective afterwards, each on four sequences; "
        "on SmolLM2 60 steps lower the error by 5% at 50% sparsity and by 25% at 90%, and triple the time of a run. "
        "kv-groups: query, key and value of the groups that stay",
    )
    sequences: int = Field(
        64,
        ge=2,
        description="number of calibration sequences used, all kept in memory; time is proportional to it and grows "
        "with the square of their length",
    )
    damping: float | None = Field(
        None,
        gt=0,
        description="added to the diagonal of each head's curvature, as a fraction of its mean, 0.003 when absent; a "
        "larger value relies less on the calibration text. kv-groups: to each mixed value's square, as a fraction of "
        "it; when absent, the best of 0.03, 0.1, 0.3 and 1 on the held-out sequences",
    )
    steps: int = Field(80, ge=1, description="mask: gradient steps, each on four sequences")
    regularization: float | None = Field(
        None,
        gt=0,
        description="mask: lambda, the weight of the masks' squared norm against the error; when absent, the best of "
        "0.03, 0.1, 0.3 and 1 on the held-out sequences, which takes four times as long",
    )

    @model_validator(mode="after")
    def _nothing_idle(self) -> AttnPruneOptions:
        for name, mode in _ONLY_WITH.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.mode != mode:
                raise ValueError(f"{name} has no effect with mode: {self.mode}; it needs mode: {mode}")
        return self
