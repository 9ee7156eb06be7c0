"""The recipe's sections `calibration`, `allocation`, `select_tokens`, `reconstruct_block` and `finetune`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
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
from compressx.recipe.validation import PLAIN_OR_MAPPING, Strict, exactly_one, refuse_if

SizeField = Annotated[ByteSize, Field(ge=1000), WithJsonSchema({"type": ["string", "integer"]})]


class Calibration(Draw):
    """The text whose activations guide pruning."""

    batch_size: StrictInt = Field(4, ge=1, description="sequences per forward pass; reconstruct_block depends on it")
    memory_limit: SizeField | None = Field(None, description="hidden states above it, such as 4GB, are kept in files")

    @model_validator(mode="after")
    def _some_text(self) -> Calibration:
        exactly_one(dict(self), "dataset", "datasets")
        return self


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

    parameters: StrictFloat | None = Field(None, gt=0, lt=1, description="fraction of all parameters to keep, at most")
    bytes: SizeField | None = Field(None, description="size of the GGUF file that is exported, at most, such as 120MB")

    @model_validator(mode="after")
    def _one(self) -> TargetBudget:
        exactly_one(dict(self), "parameters", "bytes")
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
    samples: StrictInt = Field(24, ge=2, description=f"{_MEASURED_ON}; the pruners do not see the last quarter")

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
        falling = any(a >= b for a, b in pairwise(self.sparsities))
        refuse_if(falling, f"sparsities must increase; got {self.sparsities}", "sparsities")
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


def _keep(value: object) -> object:
    if type(value) in (int, float) and not (0 < value < 1 or (value >= 1 and isinstance(value, int))):  # type: ignore[operator]
        raise ValueError("expected a number of tokens, 1 or more, or a fraction of them between 0 and 1")
    return value


Keep = Annotated[
    Annotated[StrictInt, Field(ge=1)] | Annotated[StrictFloat, Field(gt=0, lt=1, allow_inf_nan=False)],
    BeforeValidator(_keep),
]


class Protect(Strict):
    """Tokens that are kept whatever the selector says; they count among `keep`."""

    first: StrictInt = Field(4, ge=0, description="tokens at the beginning of a prompt")
    last: StrictInt = Field(32, ge=0, description="tokens at its end: the question")


class SelectTokens(Strict):
    """Which tokens of a prompt the model reads."""

    selector: str = Field(description="name of the token selector", examples=["retrieval-heads"])
    keep: Keep = Field(description="tokens of a prompt to keep: a number, or a fraction of it", examples=[0.125])
    options: dict[str, Any] = Field(default_factory=dict, description="the selector's own options")
    protect: Protect = Field(default_factory=Protect, description="tokens that are always kept")


class ReconstructBlock(Strict):
    """Training of each pruned block's kept weights to match the dense block's output."""

    passes: StrictInt = Field(4, ge=1, description="passes over the calibration text for each block")
    learning_rate: StrictFloat = Field(0.015, gt=0, le=1, description="relative to each tensor's root mean square")
    batch_size: StrictInt = Field(4, ge=1, description="sequences per step; a multiple of calibration.batch_size")


Teacher = Annotated[
    Annotated[Literal["dense", "none"], Tag("plain")] | Annotated[ModelSource, Tag("mapping")], PLAIN_OR_MAPPING
]

_DRAWING = ("samples", "sequence_length", "bos")
"""Keys about the sequences of `dataset` or `datasets`; `Draw` has their defaults."""


class Lora(Strict):
    """LoRA adapters, trained under the masks in place of the weights, and merged into them."""

    rank: StrictInt = Field(16, ge=1, description="rank of each adapter")
    targets: list[str] = Field(["*"], min_length=1, description="globs over names of pruned linears")


class Finetune(TextSources):
    """Training of the pruned model with its masks held."""

    steps: StrictInt | None = Field(None, ge=1, description="optimizer steps; 200 when absent, without minutes")
    minutes: StrictFloat | None = Field(None, gt=0, description="time to train, in place of a number of steps")
    learning_rate: StrictFloat = Field(4e-4, gt=0, description="as in reconstruct_block; of adapters absolute")
    teacher: Teacher = Field(
        "dense", description="dense: the recipe's model as it was; none: next-token prediction; or another model"
    )
    norms: StrictBool = Field(False, description="train the gains of norms")
    lora: Lora | None = Field(None, description="train adapters, merged at the end", examples=[{"rank": 16}])
    samples: StrictInt | None = Field(None, ge=1, description="sequences drawn from `dataset`; 128 when absent")
    sequence_length: StrictInt | None = Field(None, ge=2, description="tokens in a sequence; 2048 when absent")
    bos: Bos | None = Field(None, description="begin each sequence with the tokenizer's BOS token; auto when absent")
    batch_size: StrictInt = Field(4, ge=1, description="sequences per step")
    held_out: StrictInt = Field(8, ge=0, description="sequences, at most an eighth, that choose the best weights")
    seed: StrictInt = Field(0, ge=0, lt=2**63, description="seed of the draw, the order of the sequences and dropout")
    gradient_checkpointing: StrictBool = Field(True, description="compute activations again in the backward pass")

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
        given = {n: x for n in Draw.model_fields if (x := getattr(self, n)) is not None}
        return Draw(**given) if self.sources else None

    @model_validator(mode="after")
    def _nothing_idle(self) -> Finetune:
        stray = [n for n in _DRAWING if getattr(self, n) is not None]
        idle = f"{' and '.join(stray)} only goes with dataset; calibration has its own"
        refuse_if(stray and not self.sources, idle, *stray)
        both = "minutes takes the place of steps; remove one of them"
        refuse_if(self.minutes and self.steps, both, "minutes", "steps")
        return self
