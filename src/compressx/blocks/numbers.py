"""The numbers of a pruner's answer: counts of zeros, whole units, finite weights. All are fetched in one transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from compressx.api.patterns import FixedMask, Pattern, Structured, competing, count_dropped, groups_of, zeros_in
from compressx.api.pruner import Block, PruneResult
from compressx.masks.file import MaskEntry
from compressx.numerics.masked import kept_in_groups, told_misplaced, zeroed
from compressx.runtime.errors import ArtifactError, PluginError
from compressx.runtime.finite import all_finite
from compressx.runtime.transfer import to_device

_Key = TypeVar("_Key")
_Found = Mapping[tuple[str, str], int]


def fetched(numbers: Mapping[_Key, Tensor]) -> dict[_Key, int]:
    """Return whole numbers from the device of the first, in one transfer: the host waits for each."""
    if not numbers:
        return {}
    device = next(iter(numbers.values())).device
    values = torch.stack([x.to(device, torch.int64) for x in numbers.values()])
    return dict(zip(numbers, values.tolist(), strict=True))


def check_numbers(
    plugin: str, block: Block, patterns: Mapping[str, Pattern], results: Mapping[str, PruneResult]
) -> None:
    """Refuse masks with other zeros than the patterns', or other masks than were fixed, and weights that are none.

    Raises:
        PluginError: the message names plugin and linear, or the module of units.
    """
    # Of a mask that was fixed, too: a pruner could change it in place.
    chosen = {n: p.chosen_as if isinstance(p, FixedMask) else p for n, p in patterns.items()}
    structured = {p.units.fqn: p for p in chosen.values() if isinstance(p, Structured)}
    asked: dict[tuple[str, str], Tensor] = {}
    for name, result in results.items():
        dtype = block.linears[name].weight.dtype
        asked |= {(what, name): x for what, x in _counted(patterns[name], result, dtype).items()}
    for fqn, pattern in structured.items():
        asked |= {(what, fqn): x for what, x in _counted_units(pattern, results).items()}
    found = fetched(asked)
    for name, result in results.items():
        dtype = block.linears[name].weight.dtype
        _check_linear(f"pruner {plugin!r} on {name}", name, patterns[name], result, dtype, found)
    for fqn, pattern in structured.items():
        _check_units(f"pruner {plugin!r} on {fqn}", pattern, found)
    if joint := competing(chosen):
        _check_joint_total(f"pruner {plugin!r} on {block.fqn}", {n: chosen[n] for n in joint}, results, found)


def refuse_lost_zeros(block: Block, masks: Mapping[str, MaskEntry]) -> None:
    """Refuse weights of a block that has run again, or was trained, and that are not zero where its masks drop them.

    Raises:
        ArtifactError: the message names a linear.
    """
    weights = {name: block.linears[name].weight for name in masks}
    lost = fetched({n: torch.count_nonzero((x != 0) > to_device(masks[n].keep, x.device)) for n, x in weights.items()})
    for name, count in lost.items():
        if count:
            raise ArtifactError(
                f"{name}: {count} weights that its mask drops are not zero after pruning; look for hooks that write it"
            )


def _counted(pattern: Pattern, result: PruneResult, dtype: torch.dtype) -> dict[str, Tensor]:
    asked = {}
    if isinstance(pattern, FixedMask):
        asked["others"], pattern = (result.keep != pattern.keep).sum(), pattern.chosen_as
    if groups := groups_of(pattern, result.keep.shape[1]):
        least, most = kept_in_groups(result.keep, groups[0]).aminmax()
        asked["misplaced"] = (least != groups[1]) | (most != groups[1])
    else:
        asked["zeros"] = result.keep.numel() - torch.count_nonzero(result.keep)  # a sixth of the time of a sum
    if result.weight is not None:
        asked["finite"] = _written(result, dtype).sum(dtype=torch.float32).isfinite()
    if result.bias is not None:
        asked["finite bias"] = result.bias.to(dtype).isfinite().all()
    return asked


def _written(result: PruneResult, dtype: torch.dtype) -> Tensor:
    """Return the new weights as they will be written: float16 has no numbers above 65504."""
    assert result.weight is not None  # noqa: S101 - checked by the callers
    return zeroed(result.weight, result.keep).to(dtype)


def _check_linear(
    who: str, name: str, pattern: Pattern, result: PruneResult, dtype: torch.dtype, found: _Found
) -> None:  # fmt: skip
    if isinstance(pattern, FixedMask):
        if found["others", name]:
            raise PluginError(f"{who}: a reconstructing pruner must return the mask that it was given")
        pattern = pattern.chosen_as
    if groups := groups_of(pattern, result.keep.shape[1]):
        if found["misplaced", name]:
            raise PluginError(f"{who}: pattern {pattern} means that {told_misplaced(result.keep, *groups)}")
    elif (expected := zeros_in(pattern, *result.keep.shape)) not in (None, zeros := found["zeros", name]):
        raise PluginError(f"{who}: pattern {pattern} means {expected} zeros of {result.keep.numel()}, got {zeros}")
    # A sum that is not finite may have overflowed.
    if result.weight is not None and not found["finite", name] and not all_finite(_written(result, dtype)):
        raise PluginError(f"{who}: it returned weights that are NaN or infinite in the model's {dtype}")
    if not found.get(("finite bias", name), True):
        raise PluginError(f"{who}: it returned a bias that is NaN or infinite in the model's {dtype}")


def _counted_units(pattern: Structured, results: Mapping[str, PruneResult]) -> dict[str, Tensor]:
    """Count the weights whose masks differ from those of their unit, and the units that go."""
    units = pattern.units
    masks = {n: results[n].keep for n in units.owners}
    kept = units.kept(masks)
    whole = units.masks(kept, {n: (len(x), x.shape[1]) for n, x in masks.items()})
    return {"torn": torch.stack([(whole[n] != x).sum() for n, x in masks.items()]).sum(), "dropped": (~kept).sum()}


def _check_units(who: str, pattern: Structured, found: _Found) -> None:
    """Refuse masks that keep parts of units, or another number of them."""
    units = pattern.units
    if torn := found["torn", units.fqn]:
        raise PluginError(
            f"{who}: {units.kind} go or stay whole, in all of {', '.join(units.owners)}, but {torn} weights are "
            "dropped of units that are kept; make the masks by compressx.keep_masks or pattern.units.masks"
        )
    if (dropped := found["dropped", units.fqn]) != pattern.dropped:
        raise PluginError(
            f"{who}: pattern {pattern} means that {pattern.dropped} of {units.count} units go, got {dropped}"
        )


def _check_joint_total(
    who: str, joint: Mapping[str, Pattern], results: Mapping[str, PruneResult], found: _Found
) -> None:
    """Refuse another number of zeros over all linears that share a budget."""
    pattern, zeros = next(iter(joint.values())), sum(found["zeros", name] for name in joint)
    expected = count_dropped(pattern.sparsity, sum(results[name].keep.numel() for name in joint))
    if zeros != expected:
        raise PluginError(f"{who}: {pattern} means {expected} zeros over {', '.join(joint)}, got {zeros}")
