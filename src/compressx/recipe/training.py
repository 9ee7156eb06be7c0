"""The recipe's sections `reconstruct_block` and `finetune`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, model_validator

from compressx.recipe.sources import (
    Bos,
    DatasetField,
    DatasetsField,
    Draw,
    ModelSource,
    weighted,
)
from compressx.recipe.validation import Strict, conflict
from compressx.runtime.errors import did_you_mean


class ReconstructBlock(Strict):
    """Training of each pruned block's surviving weights to match the dense block's output."""

    passes: StrictInt = Field(4, ge=1, description="passes over the calibration text for each block")
    learning_rate: StrictFloat = Field(
        0.015,
        gt=0,
        le=1,
        description="about the largest step of a weight, as a fraction of its tensor's root mean square; it rises, "
        "then falls as a cosine",
    )
    batch_size: StrictInt = Field(4, ge=1, description="windows per step; a multiple of calibration.batch_size")


_TEACHERS = ("dense", "none")


def _known_teacher(value: object) -> object:
    if not isinstance(value, dict | ModelSource) and value not in _TEACHERS:
        raise conflict(f"{did_you_mean(str(value), _TEACHERS)}; or a model, such as {{path: FOLDER}}", [])
    return value


Teacher = Annotated[Literal["dense", "none"] | ModelSource, BeforeValidator(_known_teacher)]

_DRAWING = ("samples", "sequence_length", "bos")
"""Keys about the windows of `dataset` or `datasets`, by their names in `Draw`, which has their defaults."""


class Lora(Strict):
    """LoRA adapters, trained under the masks in place of the weights, and merged into them."""

    rank: StrictInt = Field(16, ge=1, description="rank of each adapter")
    targets: list[str] = Field(["*"], min_length=1, description="globs over names of pruned linears")


class Finetune(Strict):
    """Training of the pruned model with its masks held."""

    steps: StrictInt | None = Field(None, ge=1, description="optimizer steps; 200 when absent, without minutes")
    minutes: StrictFloat | None = Field(
        None, gt=0, description="time to train, in place of steps; the number of steps then depends on the machine"
    )
    learning_rate: StrictFloat = Field(
        4e-4,
        gt=0,
        description="about the largest step of a weight, as a fraction of its tensor's root mean square, or of an "
        "adapter itself; reached at the end of the warmup, then a cosine decreases it to 0",
    )
    teacher: Teacher = Field(
        "dense",
        description="dense: distillation from the recipe's model as it was; none: next-token prediction; another model "
        "with the same vocabulary, such as {path: FOLDER}, if the recipe's is pruned already",
    )
    norms: StrictBool = Field(False, description="train the gains of norms")
    lora: Lora | None = Field(
        None, description="train LoRA adapters instead of the weights, merged at the end", examples=[{"rank": 16}]
    )
    dataset: DatasetField | None = Field(None, description="text to train on; the calibration windows when absent")
    datasets: DatasetsField | None = Field(None, description="several sources of text, mixed by their weights")
    samples: StrictInt | None = Field(None, ge=1, description="windows drawn from `dataset`; 128 when absent")
    sequence_length: StrictInt | None = Field(
        None, ge=2, description="tokens in a window of `dataset`; 2048 when absent"
    )
    bos: Bos | None = Field(
        None, description="begin each window of `dataset` with the tokenizer's BOS token; auto when absent"
    )
    batch_size: StrictInt = Field(4, ge=1, description="windows per step")
    held_out: StrictInt = Field(
        8,
        ge=0,
        description="windows, at most an eighth of all, that are not trained on and decide which weights are kept",
    )
    seed: StrictInt = Field(0, ge=0, lt=2**63, description="seed of the draw, the order of the windows and dropout")
    gradient_checkpointing: StrictBool = Field(
        True, description="compute each block again in the backward pass instead of keeping its activations"
    )

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps, when it is not the time that is given."""
        return self.steps or 200

    @property
    def taught_by(self) -> str:
        """The teacher's name for people: `dense`, `none`, or where a model comes from."""
        source = self.teacher
        return source if isinstance(source, str) else str(source.id or source.path or source.package)

    @property
    def draw(self) -> Draw | None:
        """The draw of the windows, or None if they are the calibration windows."""
        sources = weighted(self.dataset, self.datasets)
        drawing = {n: getattr(self, n) for n in _DRAWING if getattr(self, n) is not None}
        return Draw(sources, seed=self.seed, **drawing) if sources else None

    @model_validator(mode="after")
    def _nothing_idle(self) -> Finetune:
        stray = [n for n in _DRAWING if getattr(self, n) is not None]
        if not weighted(self.dataset, self.datasets) and stray:
            raise conflict(f"{' and '.join(stray)} only goes with dataset; calibration has its own", stray)
        if self.minutes is not None and self.steps is not None:
            raise conflict("minutes takes the place of steps; remove one of them", ["minutes", "steps"])
        return self
