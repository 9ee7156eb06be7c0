"""What a run did, as values: written as `report.json`; `report/` shows them.

Its keys are those of these classes, and docs/recipe.md says of each what it holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from compressx.runtime.files import json_text

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LayerReport:
    """One pruned linear."""

    name: str  # fully qualified
    pruner: str  # which pruner selected, and after a `+` which one reconstructed
    pattern: str  # as in the recipe, such as `2:4` or `50% row`
    shape: tuple[int, int]  # [out_features, in_features]
    target: float  # fraction of zeros that was asked for
    sparsity: float  # fraction of zeros, counted in the mask
    seconds: float  # this linear's share, by weights, of the time its rule took in its block
    info: Mapping[str, float] = field(default_factory=dict)  # figures that the pruner gave
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # curves over its solver's steps, by name
    group: str = ""  # the first of the linears of which `info` and `history` are; empty if of this one alone


@dataclass(frozen=True)
class ReconstructionReport:
    """What training a block's kept weights did to the error of its output, on calibration text that it did not see.

    The error is that of the pruned block's output after pruned blocks from the dense one's after dense blocks: the mean
    over tokens of `numerics.output_error.relative_errors`, channels weighing as the dense model's loss reacts to them.
    """

    before: float
    after: float  # that of the weights that were kept
    history: tuple[float, ...]  # before the first pass, and after each
    seconds: float


@dataclass(frozen=True)
class BlockReport:
    """One pruned decoder block."""

    index: int  # position in the model
    fqn: str  # fully qualified name; empty for linears outside the blocks
    layers: tuple[LayerReport, ...]
    seconds: float  # for observing, pruning, training and computing the next block's input
    # Relative squared change of the block's output by its own pruning, with inputs from the pruned blocks before it,
    # before any reconstruction: the mean over the first tokens of the calibration text, which the pruner saw too. None
    # without such text and outside the blocks.
    output_error: float | None = None
    reconstruction: ReconstructionReport | None = None  # None when the recipe does not ask for it


@dataclass(frozen=True)
class UnitReport:
    """Linears of one block that were allocated one sparsity."""

    block: str  # fully qualified name; empty outside the blocks, where the target is kept
    pruner: str  # which pruner selects, and after a `+` which one reconstructs; several of several rules
    linears: tuple[str, ...]
    weights: int
    sparsity: float  # fraction of zeros that they were given
    divergence: float | None = None  # predicted for it from `divergences`; None outside the blocks, or without those
    sparsities: tuple[float, ...] = ()  # that were measured
    # Of the model's predictions from the dense model's at each of them, with these linears alone pruned:
    # Kullback-Leibler, to second order, in nats, the mean over tokens.
    divergences: tuple[float, ...] = ()
    outliers: float | None = None  # fraction of their scores that are outliers; None where those were not measured


@dataclass(frozen=True)
class AllocationReport:
    """How sparsities were chosen."""

    method: str
    target: float  # fraction of zeros that was asked for
    unit: str  # what was given one sparsity: a `block`, or what a `rule` took in one
    weights: int  # of all planned linears
    zeros: int  # that were given to them
    units: tuple[UnitReport, ...]  # what was given one sparsity, in the model's order
    budget: Mapping[str, float] = field(default_factory=dict)  # `parameters` or `bytes`, asked for in place of a target
    # Of the dense model, and those left without the units that were removed whole, counted from the masks; else None.
    parameters: tuple[int, int] | None = None


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss on text that fine-tuning does not train on, as in `FinetuneReport.losses`."""

    step: int  # optimizer steps before it was measured
    loss: float
    seconds: float = field(compare=False)  # of training before it was measured


@dataclass(frozen=True)
class FinetuneReport:
    """How a pruned model was fine-tuned."""

    teacher: str  # `dense`, `none`, or where another model comes from
    trained: int  # how many numbers: weights that are kept, and gains if these were trained too
    steps: int
    windows: tuple[int, int]  # how many sequences there were to train on, and tokens in each
    # Of every step, on its own batch, before the step: KL divergence from the teacher per token times the square of the
    # temperature, or negative log-likelihood per token.
    losses: tuple[float, ...]
    held_out: tuple[HeldOutLoss, ...] = ()  # from before the first step to after the last; the best weights were kept


@dataclass(frozen=True)
class Arithmetic:
    """The dtype of a run's matmuls, where blocks are run or trained."""

    dtype: str  # such as `bfloat16`
    reason: str  # why, in words
    rates: Mapping[str, float] = field(default_factory=dict)  # FLOP/s by dtype, if measured; of a CPU by one thread

    def __str__(self) -> str:
        measured = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in self.rates.items())
        return f"{self.dtype}, {self.reason}" + (f"; GFLOP/s: {measured}" if measured else "")


@dataclass(frozen=True)
class RunReport:
    """A whole run."""

    compressx: str  # its version
    model: Mapping[str, Any]  # the model source as the recipe gives it
    sparsity: float  # fraction of zeros over all planned linears, counted; with a `base`, of the base's weights
    blocks: tuple[BlockReport, ...]  # every pruned one, in the model's order
    skipped: tuple[Mapping[str, str], ...]  # every linear or matrix that was not pruned, with the reason
    # `dense`, `pruned` and, after fine-tuning, `finetuned`, each from a number's full name to its value, and `sample`
    # with `prompt` and `text`; empty when the recipe evaluates nothing.
    evaluation: Mapping[str, Mapping[str, Any]]
    seconds: Mapping[str, float]  # by stage, in the order of the run, and their sum as `total`
    peak_memory_bytes: int  # highest resident memory of the process
    plugins: tuple[Mapping[str, str | None], ...] = ()  # name, version and source of every plugin that was loaded
    versions: Mapping[str, str] = field(default_factory=dict)  # of the libraries that decide the result
    figures: tuple[Mapping[str, str], ...] = ()  # `file`, inside the output folder, and `caption` of each
    allocation: AllocationReport | None = None  # None when the recipe's rules gave their own sparsities
    finetune: FinetuneReport | None = None
    date: str = ""  # when the report was made, ISO 8601 with the offset from UTC
    command: str = ""
    hardware: str = ""  # system, processor, cores, memory and device
    calibration: Mapping[str, int] = field(default_factory=dict)  # `samples`, `sequence_length` and `seed`, if any
    arithmetic: Arithmetic | None = None  # None where no block was run or trained
    # Of the smaller model `parameters` before and after, `config`, the numbers before and after by name, and
    # `difference` from the pruned model, relative: the largest of what embeddings, each block and the head compute.
    shrink: Mapping[str, Any] = field(default_factory=dict)
    peak_gpu_memory_bytes: int = 0  # highest memory of its tensors on GPUs, their peaks added up
    unread: tuple[str, ...] = ()  # tensors of the checkpoint, and keys of a GGUF file, that are not in the result
    # `format`, `folder` and `bytes` of each; of a file that was read again `zeros`, their fraction in the blocks'
    # linears, and `evaluation`, its perplexity.
    exports: tuple[Mapping[str, Any], ...] = ()
    base: str = ""  # the model whose difference from `model` was pruned; empty where weights were pruned to zero
    targeted: float = 1.0  # fraction of the weights in the blocks' matrices that rules took; the others stay dense

    @property
    def layers(self) -> tuple[LayerReport, ...]:
        """Every pruned linear."""
        return tuple(layer for block in self.blocks for layer in block.layers)

    def __repr__(self) -> str:
        """Return one line, for notebooks; `to_json` has everything."""
        measured = "".join(f"; {name} {of} {value:.4g}" for (name, of), value in self.measures().items())
        return f"RunReport({self.sparsity:.1%} of the weights in {self.linears} are {self.became}{measured})"

    @property
    def linears(self) -> str:
        """Say how many linears were pruned and, if others stay dense, how much of the blocks' matrices they are."""
        part = "" if self.targeted >= 0.995 else f" ({self.targeted:.0%} of the blocks' matrices)"
        return f"{len(self.layers)} linears{part}"

    @property
    def pruners(self) -> str:
        """Name the pruners that it used."""
        return ", ".join(dict.fromkeys(layer.pruner for layer in self.layers))

    @property
    def became(self) -> str:
        """What weights became that were dropped, in words."""
        return "the base's" if self.base else "zero"

    @property
    def share(self) -> str:
        """What the fraction of those weights is called in tables."""
        return "as base" if self.base else "sparsity"

    def to_json(self) -> str:
        """Return the content of `report.json`."""
        return json_text(dataclasses.asdict(self), indent=1) + "\n"

    def measures(self) -> dict[tuple[str, str], float]:
        """Return every number that was measured, by its name and by the model: `dense`, `pruned` or `finetuned`."""
        return {
            (name, of): value for of, values in self.evaluation.items() for name, value in numbers_in(values).items()
        }


def total_sparsity(layers: Iterable[LayerReport]) -> float:
    """Return the fraction of zeros over all weights of `layers`; 0 when there are none."""
    counts = [(x.shape[0] * x.shape[1], x.sparsity) for x in layers]
    weights = sum(n for n, _ in counts)
    return sum(n * sparsity for n, sparsity in counts) / weights if weights else 0.0


def grouped(
    values: Iterable[tuple[LayerReport, Mapping[str, _Value]]],
) -> list[tuple[list[LayerReport], Mapping[str, _Value]]]:
    """Join the linears of one group, with the values of its first, in order; what is empty is left out."""
    groups: dict[str, tuple[list[LayerReport], Mapping[str, _Value]]] = {}
    for layer, value in values:
        if value:
            groups.setdefault(layer.group or layer.name, ([], value))[0].append(layer)
    return list(groups.values())


def numbers_in(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers that an evaluation measured, each under its full name, such as `arc_easy acc`."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= numbers_in(value, f"{prefix}{name} ")
        elif isinstance(value, int | float):
            flat[f"{prefix}{name}"] = float(value)
    return flat
