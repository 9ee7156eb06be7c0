"""What a pruner sees and returns: the contract between the host and every plugin.

The host observes, applies and writes; a plugin returns values. `prune` is given a *whole decoder block*: attention
pruning needs query and key together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from compressx.api.patterns import Group, Pattern, UnitKind
from compressx.runtime.errors import PluginError, blamed_on

Reduction: TypeAlias = Literal["sum", "max", "cat"]


@runtime_checkable
class Statistic(Protocol):
    """A running summary of a linear's input; it stores activations only if its name says so.

    Two *fresh* statistics that compare equal (`==`) and see the same input are computed once and shared, so a
    dataclass should leave its accumulators out of the comparison (`field(compare=False)`).

    A statistic that keeps only the first few calibration sequences may have a method `after(windows)`. Where several
    processes share the text it is called before the first batch, with the number of sequences that come before those
    of this process, and that other processes see.
    """

    def update(self, x: Tensor) -> None:
        """Take in one batch.

        Args:
            x: [batch, tokens, in_features] in the model's dtype or a narrower `compute_dtype`; [batch * tokens,
                in_features] where the model flattens it, and [tokens, in_features] behind a router.
        """

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """Return the accumulated tensors, each with its reduction across processes.

        `sum` and `max` are written into the returned tensor, which therefore has to be the accumulator itself; `cat`
        is handed to `update` of a fresh statistic, process by process.
        """


class RoutedStatistic(Protocol):
    """A `Statistic` of a fused expert's linear that is given the router's weights, too.

    Experts that no token reaches keep an empty one; for other statistics that is an error.
    """

    routed: bool  # True

    def update(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Take in the tokens that the router sends to the expert, x [tokens, in_features].

        Weights [tokens] are what the expert's output is multiplied with before it is added to the others'.
        """

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """As `Statistic.tensors`."""


@dataclass(frozen=True, eq=False)
class Linear:
    """One prunable weight, always seen as [out_features, in_features] however its module stores it.

    Attributes:
        name: fully qualified name in the model, such as `model.layers.0.self_attn.q_proj`; one of many fused experts
            ends in its parameter and number, as in `model.layers.0.mlp.experts.down_proj.3`.
        module: the module that owns the weight.
        parameter: name of the weight in the module.
        transposed: the module stores [in_features, out_features] (GPT-2's Conv1D, GPT-OSS's experts).
        expert: which part of a fused parameter, [experts, ...] or [experts * rows, ...], this is; None for a whole one.
        base: the same linear's weight in the base model [out_features, in_features], where the difference from it is
            pruned; else None.
        experts: how many a fused parameter holds; 0 for a whole one.
    """

    name: str
    module: nn.Module
    parameter: str = "weight"
    transposed: bool = False
    expert: int | None = None
    base: Tensor | None = None
    experts: int = 0

    @property
    def weight(self) -> Tensor:
        """What is pruned, [out_features, in_features]: the weight as a view, without autograd history.

        Of a fine-tuned model with a base it is the difference from the base's weight, a new float32 tensor each time.
        """
        if self.base is None:
            return self.held
        wide = torch.promote_types(self.held.dtype, torch.float32)
        return self.held.to(wide) - self.base.to(wide)

    @property
    def held(self) -> Tensor:
        """The module's weight as a view [out_features, in_features], without autograd history."""
        stored: Tensor = getattr(self.module, self.parameter).detach()  # also while masks are held on it
        return stored if self.expert is None and not self.transposed else self.part(stored)

    def part(self, stored: Tensor) -> Tensor:
        """Return this weight's part of a tensor in the layout of its parameter: a view [out_features, in_features]."""
        if self.expert is not None:
            stored = (stored if stored.dim() == 3 else stored.view(self.experts, -1, stored.shape[1]))[self.expert]
        return stored.T if self.transposed else stored

    @property
    def bias(self) -> Tensor | None:
        """The bias [out_features], or None."""
        fused = self.expert is not None
        bias: Tensor | None = getattr(self.module, f"{self.parameter}_bias" if fused else "bias", None)
        return None if bias is None else bias.detach() if self.expert is None else bias.detach()[self.expert]

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return self.held.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.held.shape[1]


@dataclass(frozen=True)
class BlockCall:
    """The arguments, besides the hidden states, with which the model calls a block for one batch.

    Attributes:
        args: positional arguments after the hidden states.
        kwargs: keyword arguments: attention mask, rotary embeddings, position ids, cache flags.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Block:
    """One decoder block.

    Attributes:
        index: position in the model, from 0.
        fqn: fully qualified name, such as `model.layers.0`.
        module: the block. A plugin reads it and never changes it.
        linears: the block's prunable linears by fully qualified name.
        calls: the block's other arguments, one entry for each calibration batch. Empty while a recipe is planned.
        config: the transformers text config of the model.
        sensitivities: by linear name, how strongly the dense model's likelihood reacts to each of its outputs: the
            mean over tokens of the squared gradient, float32 [out_features]. There for pruners that read them
            (`PrunerSpec.reads_sensitivities`), and not while a recipe is planned.
    """

    index: int
    fqn: str
    module: nn.Module
    linears: Mapping[str, Linear]
    calls: Sequence[BlockCall]
    config: Any
    sensitivities: Mapping[str, Tensor] = field(default_factory=dict)

    def submodule(self, name: str) -> Any:
        """Return a module of the block by its fully qualified name."""
        return self.module.get_submodule(name.removeprefix(self.fqn).removeprefix("."))


@dataclass(frozen=True, eq=False)
class PruneResult:
    """What a pruner decided for one linear.

    Attributes:
        keep: bool [out_features, in_features], True = keep.
        weight: the kept weights' new values [out_features, in_features] in any float dtype; None leaves them.
        bias: the bias's new values [out_features], where the linear has one; None leaves them.
        info: figures for the report, such as the damping that was needed. `error`, `error.wanda` and `error.dense`
            are one family, which is drawn over the blocks; the bare name is the pruner's own.
        images: small matrices [rows, columns] that a person should see, such as an attention matrix dense and pruned.
        history: curves, one value for each of the solver's steps, such as its loss.
        group: a common name for linears of a block whose figures belong together, such as query and key. `info`,
            `images` and `history` of the first of them are shown, once.
    """

    keep: Tensor
    weight: Tensor | None = None
    info: Mapping[str, float] = field(default_factory=dict)
    images: Mapping[str, Tensor] = field(default_factory=dict)
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    bias: Tensor | None = None
    group: str = ""


class Pruner(Protocol):
    """Selects which weights of a block are kept, and may give them new values."""

    def observe(self, block: Block, name: str) -> Statistic | None:
        """Return a fresh statistic for the linear `name`, or None when no calibration is needed for it."""

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> Mapping[str, PruneResult]:
        """Decide for every linear named in `patterns`.

        Args:
            block: the block; others of its linears may be pruned already where `separable`.
            patterns: what each linear has to become, by name.
            stats: the statistics that `observe` asked for, by name, filled; not to be changed, since `prune` may
                be called again with other patterns.

        Returns:
            One result for each name in `patterns`.
        """


@runtime_checkable
class PreparingPruner(Protocol):
    """A `Pruner` that computes something from a statistic once, for all sparsities: the factor of a Hessian.

    `prune` may be called for the same linears at several sparsities, and linears with one input share one statistic.
    """

    def observe(self, block: Block, name: str) -> Statistic | None:
        """As `Pruner.observe`."""

    def prepare(self, block: Block, name: str, statistic: Any, /) -> Any:
        """Compute from a filled statistic, which is not to be changed, what `prune` needs for any patterns.

        The name is for messages. It is that of the first linear with the statistic; what is returned serves all of
        them. Other linears of the block may be pruned already.
        """

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],
        prepared: Mapping[str, Any],
    ) -> Mapping[str, PruneResult]:  # fmt: skip
        """Decide as `Pruner.prune` does, with what `prepare` returned, by name, and which is not to be changed.

        The host calls `prepare` when a value is first looked up. Unless `prune` will be called again it holds one value
        at a time; iteration yields linears that share a value one after the other.
        """


Divergences: TypeAlias = Callable[[Sequence[Collection[str]]], list[float]]
"""From sets of blocks, by name, the mean divergence KL(dense || without them) of the model's predictions, in nats."""


@runtime_checkable
class DepthSearch(Protocol):
    """Chooses decoder blocks by trial, for rules with `pattern: blocks`.

    The host runs the model without the blocks that the pruner asks about, or with the base's in their place. If the
    pruner has the attribute `solves = True`, and there is no base, the last linear of the block before the removed ones
    is then solved for, so that it adds what they would have added.
    """

    windows: int  # how many calibration sequences trials run on, from the first

    def choose(self, blocks: Sequence[str], count: int, divergences: Divergences) -> Sequence[str]:
        """Return `count` different names, of the blocks to remove.

        Args:
            blocks: the names of those that may be removed, in the model's order.
            count: how many to remove.
            divergences: measures trials on the calibration text. Trials of one call share their common
                part, so ask about many at a time; sets that were tried before cost nothing. Infinite for blocks that
                cannot be removed together.
        """


AnyPruner: TypeAlias = Pruner | PreparingPruner


class NoOptions(BaseModel):
    """The `options` of a plugin that has none."""


@dataclass(frozen=True)
class PrunerSpec:
    """How a plugin offers a pruner to recipes.

    Attributes:
        name: what a recipe writes after `pruner:`.
        summary: one line for people.
        options: pydantic model of the recipe's `options:`; unknown options are refused whatever its own config says.
        build: makes the pruner from validated options.
        groups: the budgets that it supports for unstructured sparsity, the first being its default.
        nm: whether it supports N:M.
        units: the units of `Structured` patterns that it supports; with `blocks` it is a `DepthSearch`.
        reconstructs: whether it accepts `FixedMask`, so that a recipe can name it after `reconstruct:`.
        selecting_options: names of the options that change nothing for given masks, and are refused there.
        separable: whether each linear is decided from its own weight and statistics, so that a block's linears can be
            decided one at a time, or by several processes. Others may be pruned already then.
        reads_sensitivities: whether it reads `Block.sensitivities`, which are then measured before anything is pruned.
        check: raises `UnsupportedModelError` when a block (without weights) cannot be pruned this way, and
            `RecipeError` when the rule's options do not go with its patterns; called while the recipe is planned, with
            the patterns of the linears that the rule targets in that block, and with its options.
    """

    name: str
    summary: str
    options: type[BaseModel]
    build: Callable[[Any], AnyPruner | DepthSearch]
    groups: tuple[Group, ...] = ("row", "layer", "joint")
    nm: bool = True
    units: tuple[UnitKind, ...] = ()
    reconstructs: bool = False
    selecting_options: tuple[str, ...] = ()
    separable: bool = False
    reads_sensitivities: bool = False
    check: Callable[[Block, Mapping[str, Pattern], Any], None] | None = None


def statistic_of(plugin: str, pruner: AnyPruner, block: Block, name: str) -> Statistic | None:
    """Ask a pruner what it wants to observe of a linear.

    Raises:
        PluginError: `observe` raised an exception that is not for users, or returned what is no statistic.
    """
    with blamed_on(f"observe of pruner {plugin!r} failed on {name}"):
        found = pruner.observe(block, name)
    if found is not None and (isinstance(found, type) or not callable(getattr(found, "update", None))):
        raise PluginError(
            f"observe of pruner {plugin!r} on {name} must return a statistic, such as "
            f"FeatureNorms(block.linears[name].in_features), or None; got {found!r:.80}"
        )
    return found
