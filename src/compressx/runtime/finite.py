"""Checks for NaN and infinite values, at the cost of one sum per tensor and one look at an accelerator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compressx.runtime.errors import ArtifactError, UnsupportedModelError


def all_finite(*tensors: Tensor) -> bool:
    """Return whether no entry of some tensors is NaN or infinite."""
    return first_damaged(tensors) is None


def looks_finite(x: Tensor) -> Tensor:
    """Return whether the sum of a tensor is finite, as a bool on its device, for `first_damaged` to look at.

    The sum of a tensor with a NaN or an infinity is never finite. A sum of finite entries may overflow.
    """
    return x.sum().isfinite()


def first_damaged(tensors: Sequence[Tensor], fine: Sequence[Tensor] | None = None) -> int | None:
    """Return the number of the first tensor with an entry that is NaN or infinite; None if there is none.

    Only a tensor whose sum is not finite needs the elementwise check. The sums are looked at together, since each look
    waits for the device.

    Args:
        tensors: any.
        fine: `looks_finite` of each, or of the same numbers elsewhere; computed when absent.
    """
    if not tensors:
        return None
    fine = [looks_finite(x) for x in tensors] if fine is None else fine
    sums = torch.stack([x.to(fine[0].device) for x in fine])
    suspected = (number for number, fine in enumerate(sums.tolist()) if not fine)
    return next((number for number in suspected if not torch.isfinite(tensors[number]).all()), None)


def refuse_damage(module: nn.Module, fqn: str) -> None:
    """Refuse a module with a non-finite parameter or buffer, by an `ArtifactError` that names the first."""
    tensors = {name: tensor for name, tensor in module.state_dict().items() if not tensor.is_meta}
    damaged = first_damaged(list(tensors.values()))
    if damaged is not None:
        raise ArtifactError(
            f"{fqn}.{list(tensors)[damaged]}".removeprefix(".")
            + " has NaN or infinite values; the checkpoint is damaged, or its dtype is too narrow for it"
        )


def finite(hidden: Tensor, fqn: str, module: nn.Module | None = None) -> Tensor:
    """Return a block's output if it is finite.

    Args:
        hidden: [batch, tokens, width].
        fqn: the block's name.
        module: the block, if its weights have not been checked yet.
    """
    if not all_finite(hidden):
        if module is not None:
            refuse_damage(module, fqn)
        raise not_finite(fqn)
    return hidden


def not_finite(fqn: str) -> UnsupportedModelError:
    """Return the error of a block whose output is not finite."""
    return UnsupportedModelError(f"{fqn}: its output has NaN or infinite values on the calibration text")
