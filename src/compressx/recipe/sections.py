"""The recipe's sections `calibration`, `allocation`, `select_tokens`, `reconstruct_block` and `finetune`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    ByteSize,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    Tag,
    WithJsonSchema,
    model_validator,
)

from compressx.recipe.sources import Bos, Draw, ModelSource, TextSources
from compressx.recipe.validation import PLAIN_OR_MAPPING, Strict, conflict

SizeField = Annotated[ByteSize, Field(ge=1000), WithJsonSchema({"type": ["string", "integer"]})]


class Calibration(TextSources):
    """The text whose activations guide pruning."""

    samples: StrictInt = Field(128, ge=1, description="sequences drawn")
    sequence_length: StrictInt = Field(2048, ge=2, description="tokens in a sequence")
    bos: Bos = Field("auto", description="begin each sequence with the tokenizer's BOS token; auto: for Gemma only")
    seed: StrictInt = Field(0, ge=0, lt=2**63, description="seed of the draw")
    batch_size: StrictInt = Field(
        4, ge=1, description="sequences per forward pass; with reconstruct_block it affects the result"
    )
    memory_limit: SizeField | None = Field(
        None,
        description="size, such as 4GB, above which hidden states (and the gradients of an allocation) are kept in "
        "files beside the output; null keeps them in memory",
    )

    @model_validator(mode="after")
    def _some_text(self) -> Calibration:
        if not self.sources:
            raise conflict("give dataset, or datasets for several", [])
        return self

    @property
    def draw(self) -> Draw:
        """The draw of the sequences."""
        return Draw(self.sources, self.samples, self.sequence_length, self.seed, self.bos)


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
_MEASURED_ON = "the first calibration sequences to measure with"


class TargetBudget(Strict):
    """How small the model has to become, in place of a fraction of zeros; with rules of units only."""

    parameters: StrictFloat | None = Field(
        None, gt=0, lt=1, description="fraction of all the model's parameters that are kept, at most; 0.8 is 80%"
    )
    bytes: SizeField | None = Field(None, description="size of the GGUF file that is exported, at most, such as 120MB")

    @model_validator(mode="after")
    def _one(self) -> TargetBudget:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise conflict("give exactly one of parameters, bytes", sorted(self.model_fields_set))
        return self


class OwlAllocation(Strict):
    """Less sparsity for blocks with more outliers (arXiv 2310.05175)."""

    method: Literal["owl"] = Field(description=_METHOD)
    target: StrictFloat = Field(ge=SPREAD, le=MAX_SPARSITY - SPREAD, description=_TARGET)
    samples: StrictInt = Field(24, ge=1, description=_MEASURED_ON)

    measures: ClassVar[str] = "outliers"
    budget: ClassVar[Mapping[str, float]] = {}

    @property
    def fraction(self) -> float:
        """The target."""
        return self.target

    unit: ClassVar[Sharing] = "block"


class _Measuring(Strict):
    """Keys of the methods that measure divergences."""

    target: Annotated[
        Annotated[StrictFloat, Field(gt=0, lt=MAX_SPARSITY), Tag("plain")] | Annotated[TargetBudget, Tag("mapping")],
        PLAIN_OR_MAPPING,
    ] = Field(description=f"{_TARGET}; or a budget, {{parameters: 0.8}} or {{bytes: 120MB}}")
    sparsities: list[Annotated[StrictFloat, Field(gt=0, le=MAX_SPARSITY)]] = Field(
        default=[0.3, 0.5, 0.7, 0.9], min_length=2, description="sparsities to measure, increasing; 0.5 is 50%"
    )
    samples: StrictInt = Field(
        24,
        ge=2,
        description=f"{_MEASURED_ON}; divergences are measured on the last quarter, which the pruners do not see",
    )

    measures: ClassVar[str] = "divergences"

    @property
    def budget(self) -> dict[str, float]:
        """The budget's number by its key; empty of a fraction of zeros."""
        return self.target.model_dump(exclude_none=True) if isinstance(self.target, TargetBudget) else {}

    @property
    def fraction(self) -> float:
        """The target; of a budget, which is none before the model is known, a half."""
        return 0.5 if isinstance(self.target, TargetBudget) else self.target

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

AllocationField = Annotated[Allocation, Field(discriminator="method")]


Keep = Annotated[StrictInt, Field(ge=1)] | Annotated[StrictFloat, Field(gt=0, lt=1, allow_inf_nan=False)]


class Protect(Strict):
    """Tokens that are kept whatever the selector says; they count among `keep`."""

    first: StrictInt = Field(4, ge=0, description="tokens at the beginning of a prompt")
    last: StrictInt = Field(32, ge=0, description="tokens at its end: the question")


class SelectTokens(Strict):
    """Which tokens of a prompt the model reads."""

    selector: str = Field(description="name of the token selector", examples=["retrieval-heads"])
    keep: Keep = Field(
        description="tokens of a prompt to keep: a number, or a fraction of it, but never fewer than are protected",
        examples=[0.125],
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the selector's own options")
    protect: Protect = Field(default_factory=Protect, description="tokens that are always kept")


class ReconstructBlock(Strict):
    """Training of each pruned block's kept weights to match the dense block's output."""

    passes: StrictInt = Field(4, ge=1, description="passes over the calibration text for each block")
    learning_rate: StrictFloat = Field(
        0.015,
        gt=0,
        le=1,
        description="about the largest step of a weight, as a fraction of its tensor's root mean square; it rises, "
        "then falls as a cosine",
    )
    batch_size: StrictInt = Field(4, ge=1, description="sequences per step; a multiple of calibration.batch_size")


Teacher = Annotated[
    Annotated[Literal["dense", "none"], Tag("plain")] | Annotated[ModelSource, Tag("mapping")], PLAIN_OR_MAPPING
]

_DRAWING = ("samples", "sequence_length", "bos")
"""Keys about the sequences of `dataset` or `datasets`, by their names in `Draw`, which has their defaults."""


class Lora(Strict):
    """LoRA adapters, trained under the masks in place of the weights, and merged into them."""

    rank: StrictInt = Field(16, ge=1, description="rank of each adapter")
    targets: list[str] = Field(["*"], min_length=1, description="globs over names of pruned linears")


class Finetune(TextSources):
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
    samples: StrictInt | None = Field(None, ge=1, description="sequences drawn from `dataset`; 128 when absent")
    sequence_length: StrictInt | None = Field(
        None, ge=2, description="tokens in a sequence of `dataset`; 2048 when absent"
    )
    bos: Bos | None = Field(
        None, description="begin each sequence of `dataset` with the tokenizer's BOS token; auto when absent"
    )
    batch_size: StrictInt = Field(4, ge=1, description="sequences per step")
    held_out: StrictInt = Field(
        8,
        ge=0,
        description="sequences, at most an eighth of all, that are not trained on and decide which weights are kept",
    )
    seed: StrictInt = Field(0, ge=0, lt=2**63, description="seed of the draw, the order of the sequences and dropout")
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
        """The draw of the sequences, or None if they are the calibration sequences."""
        drawing = {n: getattr(self, n) for n in _DRAWING if getattr(self, n) is not None}
        return Draw(self.sources, seed=self.seed, **drawing) if self.sources else None

    @model_validator(mode="after")
    def _nothing_idle(self) -> Finetune:
        stray = [n for n in _DRAWING if getattr(self, n) is not None]
        if not self.sources and stray:
            raise conflict(f"{' and '.join(stray)} only goes with dataset; calibration has its own", stray)
        if self.minutes is not None and self.steps is not None:
            raise conflict("minutes takes the place of steps; remove one of them", ["minutes", "steps"])
        return self
