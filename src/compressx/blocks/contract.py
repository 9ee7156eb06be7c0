"""Asking a pruner: what it prepared, its answer, and the contract of `compressx.Pruner`, which refuses a wrong one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from compressx.api.patterns import FixedMask, Pattern, Structured, competing, count_dropped, of_units
from compressx.api.pruner import AnyPruner, Block, Linear, PreparingPruner, PruneResult
from compressx.blocks.observe import SharedStatistic
from compressx.masks.file import MaskEntry
from compressx.models.access import in_its_dtype, new_weight
from compressx.numerics.masked import count_in_groups, misplaced_groups
from compressx.runtime.errors import ArtifactError, PluginError, blamed_on
from compressx.runtime.finite import all_finite, first_damaged
from compressx.runtime.transfer import to_device

_Key = TypeVar("_Key")


def ask(
    plugin: str, pruner: AnyPruner, block: Block, patterns: Mapping[str, Pattern],
    observed: Mapping[str, SharedStatistic], kept: dict[SharedStatistic, Any] | None = None,
) -> Mapping[str, PruneResult]:  # fmt: skip
    """Call a pruner, and refuse an answer that breaks its contract.

    Args:
        plugin: what messages call the pruner.
        pruner: to ask.
        block: the block.
        patterns: what each linear has to become, by name.
        observed: what the pruner asked for, by name; without those where it asked for nothing.
        kept: what the pruner has prepared in this block and will be handed again; nothing is kept when absent.

    Returns:
        One result for each name in `patterns`; new weights have the model's dtype, if they are no differences.
    """
    parameters = dict(block.module.named_parameters())
    # Counted by torch, without a look at the numbers. Through `.data` they change unseen: `plugins check` compares all.
    before = [x._version for x in parameters.values()]
    results = answer_of(plugin, pruner, block, patterns, observed, kept)
    for (name, parameter), version in zip(parameters.items(), before, strict=True):
        if parameter._version != version:
            raise PluginError(
                f"pruner {plugin!r} changed {name} of {block.fqn or 'the model'} itself; a pruner returns new weights, "
                "and compressx writes them"
            )
    return check_answer(plugin, block, patterns, results)


def check_answer(plugin: str, block: Block, patterns: Mapping[str, Pattern], results: Any) -> Mapping[str, PruneResult]:
    """Return an answer, with new weights in the model's dtype, if it is what a pruner may answer."""
    mistake = next(_mistakes_of_form(block, patterns, results), "")
    if not mistake:
        results = {
            n: r if r.weight is None else replace(r, weight=in_its_dtype(block.linears[n], r.weight))
            for n, r in results.items()
        }
        mistake = next(_mistakes_in_numbers(block, patterns, results), "")
    if mistake:
        raise PluginError(f"pruner {plugin!r} on {mistake}")
    return results  # type: ignore[no-any-return]


def _mistakes_of_form(block: Block, patterns: Mapping[str, Pattern], results: Any) -> Iterator[str]:
    """Yield where an answer has a wrong type or shape, and what. Ask for the first alone: others follow from it."""
    if not isinstance(results, Mapping):
        got = type(results).__name__
        yield f"{block.fqn}: prune must return a mapping from linear names to PruneResult, got {got}"
    if set(results) != set(patterns):
        yield f"{block.fqn}: expected results for {sorted(patterns)}, got {sorted(results)}"
    for name, result in results.items():
        if not isinstance(result, PruneResult):
            hint = "; write PruneResult(mask)" if isinstance(result, Tensor) else ""
            yield f"{name}: expected a PruneResult, got {type(result).__name__}{hint}"
        yield from (f"{name}: {x}" for x in _mistakes_of_tensors(block.linears[name], result))
        yield from (f"{name}: {x}" for x in _mistakes_of_figures(result))


def _mistakes_of_tensors(linear: Linear, result: PruneResult) -> Iterator[str]:
    held = linear.held
    shape, device = [*held.shape], held.device
    for part, expected in (("keep", shape), ("weight", shape), ("bias", shape[:1])):
        tensor = getattr(result, part)
        if tensor is None and part != "keep":
            continue
        if not isinstance(tensor, Tensor):
            yield f"{part} must be a torch.Tensor, got {type(tensor).__name__}"
        if part == "bias" and linear.bias is None:
            yield "it returned a bias, but the linear has none; leave bias out"
        fits = tensor.dtype == torch.bool if part == "keep" else tensor.is_floating_point()
        if not fits or [*tensor.shape] != expected:
            kind = "torch.bool" if part == "keep" else "a float tensor"
            yield f"{part} must be {kind} {expected}, got {tensor.dtype} {[*tensor.shape]}"
        if tensor.device != device:
            yield (
                f"{part} is on {tensor.device}, expected the weight's device, {device}; make new tensors with "
                "device=weight.device"
            )


def _mistakes_of_figures(result: Any) -> Iterator[str]:
    """Yield what cannot be reported or drawn."""
    for part in ("info", "images", "history"):
        if not isinstance(shown := getattr(result, part), Mapping):
            yield f"{part} must be a mapping from names, got {type(shown).__name__}"
    for name, value in result.info.items():
        if not _is_finite(value):
            hint = "; write float(...)" if isinstance(value, Tensor) and value.numel() == 1 else ""
            yield f"info {name!r} must be a finite number, got {value!r:.80}{hint}"
    for name, image in result.images.items():
        if not isinstance(image, Tensor) or image.dim() != 2 or not image.numel() or image.is_complex():
            got = f"{image.dtype} {[*image.shape]}" if isinstance(image, Tensor) else type(image).__name__
            yield f"image {name!r} must be a real tensor [rows, columns], got {got}"
    if result.images and (damaged := first_damaged([*result.images.values()])) is not None:
        yield f"image {[*result.images][damaged]!r} has entries that are NaN or infinite"
    for name, values in result.history.items():
        yield from (f"history {name!r} {mistake}" for mistake in _mistakes_of_curve(values))


def _mistakes_of_curve(values: Any) -> Iterator[str]:
    if isinstance(values, str) or not hasattr(values, "__len__"):
        yield f"must be a sequence of numbers, got {values!r:.80}"
    if len(values) == 0:
        yield "is empty; leave it out when there were no steps"
    for step, value in enumerate(values, start=1):
        if not _is_finite(value):
            yield f"must be finite numbers, got {value!r} at step {step}"


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _mistakes_in_numbers(
    block: Block, patterns: Mapping[str, Pattern], results: Mapping[str, PruneResult]
) -> Iterator[str]:
    """Yield masks with other zeros than the patterns', or other masks than were fixed, and weights that are none."""
    # Of a mask that was fixed, too: a pruner could change it in place.
    chosen = {n: p.asked for n, p in patterns.items()}
    structured = {p.units.fqn: p for p in of_units(chosen.values())}
    counted: dict[tuple[str, str], Tensor] = {}
    for name, result in results.items():
        if isinstance(fixed := patterns[name], FixedMask):
            counted["others", name] = (result.keep != fixed.keep).sum()
        counted |= {(what, name): x for what, x in _counted(chosen[name], block.linears[name], result).items()}
    for fqn, one in structured.items():
        counted |= {(what, fqn): x for what, x in _counted_units(one, results).items()}
    found = fetched(counted)
    for name, result in results.items():
        yield from (f"{name}: {x}" for x in _mistakes_in(block.linears[name], chosen[name], result, found))
    for fqn, one in structured.items():
        kind, owners = one.units.kind, ", ".join(one.units.owners)
        if torn := found["torn", fqn]:
            yield (
                f"{fqn}: {kind} go or stay whole, in all of {owners}, but {torn} weights are dropped of units that are "
                "kept; make the masks by compressx.keep_masks or pattern.units.masks"
            )
        if (dropped := found["dropped", fqn]) != one.dropped:
            yield f"{fqn}: pattern {one} means that {one.dropped} of {one.units.count} units go, got {dropped}"
    if joint := competing(chosen):
        pattern, zeros = chosen[joint[0]], sum(found["zeros", name] for name in joint)
        expected = count_dropped(pattern.sparsity, sum(results[name].keep.numel() for name in joint))
        if zeros != expected:
            yield f"{block.fqn}: {pattern} means {expected} zeros over {', '.join(joint)}, got {zeros}"


def _mistakes_in(
    linear: Linear, pattern: Pattern, result: PruneResult, found: Mapping[tuple[str, str], int]
) -> Iterator[str]:
    name, keep = linear.name, result.keep
    if found.get(("others", name)):
        yield "a reconstructing pruner must return the mask that it was given"
    if found.get(("misplaced", name)) and (groups := _within_rows(pattern, keep)):
        yield f"pattern {pattern} means that {misplaced_groups(keep, *groups)}"
    zeros = found.get(("zeros", name))
    if zeros is not None and (expected := pattern.zeros(*keep.shape)) not in {None, zeros}:
        yield f"pattern {pattern} means {expected} zeros of {keep.numel()}, got {zeros}"
    # A sum may have overflowed, or met what the mask drops.
    if not found.get(("finite", name), 1) and not all_finite(new_weight(linear, keep, result.weight)):
        yield f"it returned weights that are NaN or infinite in the model's {linear.held.dtype}"
    if not found.get(("finite bias", name), 1):
        yield f"it returned a bias that is NaN or infinite in the model's {linear.held.dtype}"


def _within_rows(pattern: Pattern, keep: Tensor) -> tuple[int, int] | None:
    """Return how many consecutive weights of a row compete, and how many are kept of them; None where others do."""
    groups = pattern.groups(keep.shape[0], keep.shape[1])
    return (groups[0], groups[0] - groups[1]) if groups and groups[0] <= keep.shape[1] else None


def _counted(pattern: Pattern, linear: Linear, result: PruneResult) -> dict[str, Tensor]:
    """Count what a mask keeps and drops, and look whether numbers are finite, on their device."""
    counted = {}
    if groups := _within_rows(pattern, result.keep):
        least, most = count_in_groups(result.keep, groups[0]).aminmax()
        counted["misplaced"] = (least != groups[1]) | (most != groups[1])
    else:
        counted["zeros"] = result.keep.numel() - torch.count_nonzero(result.keep)  # a sixth of the time of a sum
    if result.weight is not None:
        same = result.weight.dtype == linear.held.dtype
        new = result.weight if same else new_weight(linear, result.keep, result.weight)
        counted["finite"] = new.sum(dtype=torch.float32).isfinite()
    if result.bias is not None:
        counted["finite bias"] = result.bias.to(linear.held.dtype).isfinite().all()
    return counted


def _counted_units(pattern: Structured, results: Mapping[str, PruneResult]) -> dict[str, Tensor]:
    """Count the weights whose masks differ from those of their unit, and the units that are dropped."""
    units = pattern.units
    masks = {n: results[n].keep for n in units.owners}
    kept = units.kept(masks)
    whole = units.masks(kept, {n: (len(x), x.shape[1]) for n, x in masks.items()})
    return {"torn": torch.stack([(whole[n] != x).sum() for n, x in masks.items()]).sum(), "dropped": (~kept).sum()}


def fetched(numbers: Mapping[_Key, Tensor]) -> dict[_Key, int]:
    """Return whole numbers from the device of the first, in one transfer: the host waits for each."""
    if not numbers:
        return {}
    device = next(iter(numbers.values())).device
    values = torch.stack([x.to(device, torch.int64) for x in numbers.values()])
    return dict(zip(numbers, values.tolist(), strict=True))


def refuse_lost_zeros(block: Block, masks: Mapping[str, MaskEntry]) -> None:
    """Refuse weights of a block that has run again, or was trained, and that are not zero where its masks drop them."""
    weights = {name: block.linears[name].weight for name in masks}
    lost = fetched({n: torch.count_nonzero((x != 0) > to_device(masks[n].keep, x.device)) for n, x in weights.items()})
    for name, count in lost.items():
        if count:
            raise ArtifactError(
                f"{name}: {count} weights that its mask drops are not zero after pruning; look for hooks that write to "
                "it"
            )


def answer_of(
    plugin: str, pruner: AnyPruner, block: Block, patterns: Mapping[str, Pattern],
    observed: Mapping[str, SharedStatistic], kept: dict[SharedStatistic, Any] | None = None,
) -> Any:  # fmt: skip
    """Call a pruner's `prune`, without a look at what it returns. Without `kept` it holds one prepared value."""
    stats = {name: of.statistic for name, of in observed.items()}
    with blamed_on(f"pruner {plugin!r} failed on {block.fqn}"):
        if isinstance(pruner, PreparingPruner):
            return pruner.prune(block, patterns, stats, Prepared(plugin, pruner, block, observed, kept))
        return pruner.prune(block, patterns, stats)


class Prepared(Mapping[str, Any]):
    """By linear name, what a pruner prepared of the linear's statistic.

    Iterates over linears that share a statistic in turn. The arguments are those of `answer_of`.
    """

    def __init__(
        self, plugin: str, pruner: PreparingPruner, block: Block, observed: Mapping[str, SharedStatistic],
        kept: dict[SharedStatistic, Any] | None = None,
    ) -> None:  # fmt: skip
        self._plugin, self._pruner, self._block = plugin, pruner, block
        order = list(dict.fromkeys(observed.values()))
        self._observed = dict(sorted(observed.items(), key=lambda item: order.index(item[1])))
        self._made, self._keeps = ({}, False) if kept is None else (kept, True)

    def __getitem__(self, name: str) -> Any:
        """Return a value, computed now unless it is kept."""
        of = self._observed[name]
        if of not in self._made:
            if not self._keeps:
                self._made.clear()  # before the next takes as much room
            with blamed_on(f"prepare of pruner {self._plugin!r} failed on {name}"):
                self._made[of] = self._pruner.prepare(self._block, name, of.statistic)
        return self._made[of]

    def __iter__(self) -> Iterator[str]:
        return iter(self._observed)

    def __len__(self) -> int:
        return len(self._observed)
