"""The options of a recipe's `attnprune` rule."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_ONLY_WITH = {
    "steps": ("mask", "joint"),
    "learning_rate": ("mask", "joint"),
    "regularization": ("mask",),
    "damping": ("gauss-newton",),
}
"""The modes in which an option changes anything."""


class AttnPruneOptions(BaseModel):
    """Options of attention pruning."""

    model_config = ConfigDict(extra="forbid")

    objective: Literal["attention-output", "attention-matrix"] = Field(
        "attention-output",
        description="what pruned queries and keys are held to: attention-output, what the attention adds to the "
        "residual stream, lowers perplexity most; attention-matrix is the published one (arXiv 2410.11261)",
    )
    mode: Literal["gauss-newton", "mask", "joint"] = Field(
        "gauss-newton",
        description="gauss-newton: masks and weights from the objective's second order, in closed form; mask: relaxed "
        "masks learnt by gradient descent as published, survivors untouched; joint: weights trained while the masks "
        "close in",
    )
    refit: int = Field(
        0,
        ge=0,
        description="gradient steps that train the survivors on the objective afterwards, each on four sequences; on "
        "SmolLM2 60 lower the error by a twentieth at 50% and a quarter at 90%, and a run takes three times as long",
    )
    refit_learning_rate: float = Field(
        0.01, gt=0, le=1, description="refit: largest step of a weight, as a fraction of the weights' root mean square"
    )
    sequences: int = Field(
        64,
        ge=2,
        description="calibration sequences that are used, the first so many, each kept whole in memory; time grows "
        "with them and with the square of their length",
    )
    held_out: float = Field(
        0.125,
        gt=0,
        lt=1,
        description="fraction of those sequences (one at least) that nothing is learnt from: they decide between "
        "candidates, and the report's errors are theirs",
    )
    damping: float = Field(
        0.003,
        gt=0,
        description="added to the diagonal of each head's curvature, as a fraction of its mean; more trusts the "
        "calibration less",
    )
    steps: int = Field(80, ge=1, description="mask and joint: gradient steps, each on four sequences")
    learning_rate: float | None = Field(
        None,
        gt=0,
        le=1,
        description="mask: largest step of a mask entry, 0.05 when absent; joint: that of a weight, as a fraction of "
        "the weights' root mean square, 0.03 when absent",
    )
    regularization: float | None = Field(
        None,
        gt=0,
        description="mask: lambda, the pull of all mask entries towards zero against the error; when absent the best "
        "of 0.03, 0.1, 0.3 and 1 on the held-out sequences, at four times the time",
    )
    heat_map: bool = Field(
        True, description="whether the report shows one head's dense and pruned attention matrix for each layer"
    )

    @model_validator(mode="after")
    def _nothing_idle(self) -> AttnPruneOptions:
        for name, goes_with in _ONLY_WITH.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.mode not in goes_with:
                raise ValueError(
                    f"{name} does nothing with mode: {self.mode}; it goes with mode: {' or '.join(goes_with)}"
                )
        if not self.refit and self.refit_learning_rate != type(self).model_fields["refit_learning_rate"].default:
            raise ValueError("refit_learning_rate does nothing without refit steps; set refit, too")
        return self
