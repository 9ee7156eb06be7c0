"""The numbers of a pruner's answer: counts of zeros, whole units, finite weights. All are fetched in one transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from compressx.api.patterns import FixedMask, Pattern, Structured, competing, count_dropped, zeros_in
from compressx.api.pruner import Block, PruneResult
from compressx.numerics.masked import zeroed
from compressx.runtime.errors import PluginError
from compressx.runtime.finite import all_finite

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

    Args:
        plugin: what messages call the pruner.
        block: the block.
        patterns: what each linear has to become, by name.
        results: the answer, by the same names, of the right shapes.

    Raises:
        PluginError: the message names plugin and linear, or the module of units.
    """
    structured = {p.units.fqn: p for p in patterns.values() if isinstance(p, Structured)}
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
    if joint := competing(patterns):
        _check_joint_total(f"pruner {plugin!r} on {block.fqn}", {n: patterns[n] for n in joint}, results, found)


def _counted(pattern: Pattern, result: PruneResult, dtype: torch.dtype) -> dict[str, Tensor]:
    asked = {"zeros": result.keep.numel() - torch.count_nonzero(result.keep)}  # a sixth of the time of a sum
    if isinstance(pattern, FixedMask):
        asked["others"] = (result.keep != pattern.keep).sum()
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
    zeros = found["zeros", name]
    if isinstance(pattern, FixedMask):
        if found["others", name]:
            raise PluginError(f"{who}: a reconstructing pruner must return the mask that it was given")
    elif (expected := zeros_in(pattern, *result.keep.shape)) is not None and zeros != expected:
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
