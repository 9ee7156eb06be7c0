"""The block loop: observe a still unpruned block, prune it, apply, and compute the next block's input.

Statistics of a block come from one forward of the unpruned block over the outputs of the already pruned ones. The walk
knows no concrete pruner; it alone writes weights, and it counts what it wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compressx.architecture import Architecture, survey, text_config
from compressx.capture import capture_calls, replaced_forwards, replay
from compressx.errors import CompressxError, PluginError, UnsupportedModelError
from compressx.masks import MaskEntry, weight_sha256
from compressx.observe import observe
from compressx.patterns import FixedMask, Pattern, zeros_in
from compressx.planning import Plan, PlannedRule
from compressx.pruner import Block, Linear, Pruner, PruneResult, Statistic, sparsity_of
from compressx.report import BlockReport, LayerReport


class Blocks(Protocol):
    """How the walk reaches a block's weights; another implementation may read them from disk."""

    def materialise(self, fqn: str) -> AbstractContextManager[nn.Module]:
        """Give the block with its weights for the length of a `with`; what was changed in it stays changed."""


@dataclass(frozen=True, eq=False)
class BlocksInMemory:
    """Blocks of a model that is loaded whole."""

    modules: Mapping[str, nn.Module]

    @contextmanager
    def materialise(self, fqn: str) -> Iterator[nn.Module]:
        """Give the block as it stands."""
        yield self.modules[fqn]


@dataclass(frozen=True, eq=False)
class PrunedBlock:
    """What the walk did to one block: its report, and its masks by linear name."""

    report: BlockReport
    masks: Mapping[str, MaskEntry] = field(default_factory=dict)


def prune_model(
    model: Any, plan: Plan, batches: Sequence[Tensor], blocks: Blocks | None = None
) -> Iterator[PrunedBlock]:
    """Prune a model in place, block by block.

    Args:
        model: a transformers causal language model in evaluation mode, with its weights.
        plan: what to do.
        batches: calibration token ids, each [batch, tokens]; empty when the plan needs no calibration.
        blocks: how to reach the blocks' weights; in the loaded model when absent.

    Yields:
        One value for each block that the plan touches, after it was pruned, and at the end one for linears outside the
        blocks if the plan names any.

    Raises:
        PluginError: a pruner that returns what it must not; the message names it and the layer.
        UnsupportedModelError: a model whose blocks cannot be run one at a time, or whose numbers are not finite.
    """
    found = survey(model)
    reach = blocks or BlocksInMemory(found.blocks)
    batches = [b.to(model.device) for b in batches] if plan.needs_calibration else []
    states, calls = capture_calls(model, found.blocks, batches) if batches else ([], {f: [] for f in found.blocks})
    pruners = {rule: rule.build() for rule in plan.rules}
    last = max((i for i, fqn in enumerate([*found.blocks, ""]) if plan.in_block(fqn)), default=-1)
    for index, fqn in enumerate(found.blocks):
        if index > last:
            break
        started = time.perf_counter()
        with torch.no_grad(), reach.materialise(fqn) as module:
            linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")}
            block = Block(index, fqn, module, linears, tuple(calls[fqn]), text_config(model))
            passes = [lambda x=x, c=c, m=module: replay(m, x, c) for x, c in zip(states, calls[fqn], strict=True)]
            layers, masks = _prune_block(block, plan, pruners, passes)
            for i, call in enumerate(calls[fqn]):
                if index < last:
                    states[i] = _finite(replay(module, states[i], call), fqn)
        if layers:
            yield PrunedBlock(BlockReport(index, fqn, layers, time.perf_counter() - started), masks)
    if plan.in_block(""):
        yield _prune_outside(model, plan, pruners, found, states, batches)


def _prune_outside(
    model: Any, plan: Plan, pruners: _Built, found: Architecture, states: Sequence[Tensor], batches: Sequence[Tensor]
) -> PrunedBlock:
    """Prune what lies outside the blocks: run the model around them, the last block giving its recorded output."""
    started = time.perf_counter()
    block = Block(len(found.blocks), "", model, found.outside, (), text_config(model))
    first = next(iter(found.blocks))

    def around(ids: Tensor, state: Tensor) -> Any:
        with replaced_forwards(found.blocks, lambda fqn, hidden, _: state if fqn == first else hidden):
            return model(ids, use_cache=False)

    passes = [lambda ids=ids, state=state: around(ids, state) for ids, state in zip(batches, states, strict=True)]
    with torch.no_grad():
        layers, masks = _prune_block(block, plan, pruners, passes)
    return PrunedBlock(BlockReport(block.index, "", layers, time.perf_counter() - started), masks)


_Built = Mapping[PlannedRule, tuple[Pruner, Pruner | None]]
_ROLES = ("selects", "reconstructs")


def _prune_block(
    block: Block, plan: Plan, pruners: _Built, passes: Sequence[Callable[[], Any]]
) -> tuple[tuple[LayerReport, ...], dict[str, MaskEntry]]:
    """Observe and prune one block."""
    by_rule = plan.in_block(block.fqn)
    wanted: dict[str, dict[str, Statistic]] = {}
    for rule, names in by_rule.items():
        for name in names:
            asked = {role: p.observe(block, name) for role, p in zip(_ROLES, pruners[rule], strict=True) if p}
            wanted[name] = {role: s for role, s in asked.items() if s is not None}
    observe(block.linears, wanted, passes)
    decided: dict[str, tuple[PlannedRule, PruneResult, float]] = {}
    for rule, names in by_rule.items():
        started = time.perf_counter()
        results = _decide(rule, pruners[rule], block, names, wanted)
        seconds = time.perf_counter() - started
        weights = sum(block.linears[n].weight.numel() for n in names)
        for name in names:
            decided[name] = (rule, results[name], seconds * block.linears[name].weight.numel() / weights)
    layers, masks = [], {}
    for name, (rule, result, seconds) in decided.items():
        linear = block.linears[name]
        masks[name] = MaskEntry(result.keep.cpu(), str(rule.pattern), rule.label, weight_sha256(linear.weight))
        _apply(linear, result)
        shape = (linear.out_features, linear.in_features)
        layers.append(
            LayerReport(
                name, rule.label, str(rule.pattern), shape, rule.pattern.sparsity, sparsity_of(result.keep), seconds,
                dict(result.info),
            )
        )  # fmt: skip
    return tuple(layers), masks


def _decide(
    rule: PlannedRule, built: tuple[Pruner, Pruner | None], block: Block, names: list[str],
    stats: Mapping[str, Mapping[str, Statistic]],
) -> Mapping[str, PruneResult]:  # fmt: skip
    """Ask the rule's selector, then its reconstructor if it has one, and check each answer."""
    selector, reconstructor = built
    patterns: dict[str, Pattern] = dict.fromkeys(names, rule.pattern)
    selected = _ask(rule.pruner.name, selector, block, patterns, {n: s.get("selects") for n, s in stats.items()})
    if reconstructor is None:
        return selected
    fixed: dict[str, Pattern] = {n: FixedMask(r.keep, rule.pattern) for n, r in selected.items()}
    assert rule.reconstructor is not None  # noqa: S101 - built together
    rebuilt = _ask(
        rule.reconstructor.name, reconstructor, block, fixed, {n: s.get("reconstructs") for n, s in stats.items()}
    )
    return {n: PruneResult(r.keep, r.weight, {**selected[n].info, **r.info}) for n, r in rebuilt.items()}


def _ask(
    plugin: str, pruner: Pruner, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic | None]
) -> Mapping[str, PruneResult]:
    """Call a pruner, and refuse an answer that breaks its contract."""
    try:
        results = pruner.prune(block, patterns, {n: s for n in patterns if (s := stats[n]) is not None})
    except CompressxError:
        raise
    except Exception as error:
        raise PluginError(f"pruner {plugin!r} failed on {block.fqn}: {type(error).__name__}: {error}") from error
    if set(results) != set(patterns):
        raise PluginError(
            f"pruner {plugin!r} on {block.fqn}: expected results for {sorted(patterns)}, got {sorted(results)}"
        )
    for name, result in results.items():
        _check_result(plugin, block.linears[name], patterns[name], result)
    _check_joint_total(plugin, block, patterns, results)
    return results


def _check_result(plugin: str, linear: Linear, pattern: Pattern, result: PruneResult) -> None:
    """Refuse a result of another shape or type, with other zeros than the pattern's, or with numbers that are none."""
    shape = (linear.out_features, linear.in_features)
    who = f"pruner {plugin!r} on {linear.name}"
    if result.keep.dtype != torch.bool or tuple(result.keep.shape) != shape:
        got = f"{result.keep.dtype} {list(result.keep.shape)}"
        raise PluginError(f"{who}: keep must be torch.bool {list(shape)}, got {got}")
    zeros, expected = int((~result.keep).sum()), zeros_in(pattern, *shape)
    if expected is not None and zeros != expected:
        raise PluginError(f"{who}: pattern {pattern} means {expected} zeros of {result.keep.numel()}, got {zeros}")
    if isinstance(pattern, FixedMask) and not torch.equal(result.keep, pattern.keep):
        raise PluginError(f"{who}: a reconstructing pruner must return the mask that it was given")
    if result.weight is not None:
        if tuple(result.weight.shape) != shape or not result.weight.is_floating_point():
            got = f"{result.weight.dtype} {list(result.weight.shape)}"
            raise PluginError(f"{who}: weight must be a float tensor {list(shape)}, got {got}")
        if not torch.isfinite(result.weight[result.keep]).all():
            raise PluginError(f"{who}: it returned weights that are NaN or infinite")


def _check_joint_total(
    plugin: str, block: Block, patterns: Mapping[str, Pattern], results: Mapping[str, PruneResult]
) -> None:
    joint = [n for n, p in patterns.items() if zeros_in(p, *block.linears[n].weight.shape) is None]
    weights = sum(results[n].keep.numel() for n in joint)
    expected = round(patterns[joint[0]].sparsity * weights) if joint else 0
    zeros = sum(int((~results[n].keep).sum()) for n in joint)
    if zeros != expected:
        raise PluginError(
            f"pruner {plugin!r} on {block.fqn}: {patterns[joint[0]]} means {expected} zeros over {', '.join(joint)}, "
            f"got {zeros}"
        )


def _apply(linear: Linear, result: PruneResult) -> None:
    """Write the surviving weights in the model's dtype, and plain zeros (never -0.0) everywhere else."""
    weight = linear.weight
    new = weight if result.weight is None else result.weight.to(weight.device, weight.dtype)
    weight.copy_(
        torch.where(result.keep.to(weight.device), new, torch.zeros((), dtype=weight.dtype, device=weight.device))
    )


def _finite(hidden: Tensor, fqn: str) -> Tensor:
    if not torch.isfinite(hidden).all():
        raise UnsupportedModelError(f"{fqn}: its output has NaN or infinite values on the calibration text")
    return hidden
