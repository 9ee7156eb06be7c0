"""Checks for NaN and infinite values, at the cost of one sum per tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressx.runtime.errors import ArtifactError, UnsupportedModelError


def all_finite(x: Tensor) -> bool:
    """Return whether no entry is NaN or infinite.

    The sum of a tensor with a NaN or an infinity is never finite. A sum of finite entries may overflow, so only a
    non-finite sum needs the elementwise check.
    """
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def refuse_damage(module: nn.Module, fqn: str) -> None:
    """Refuse a module with a non-finite parameter or buffer.

    Args:
        module: tensors on the meta device are skipped.
        fqn: its name.

    Raises:
        ArtifactError: names the first such tensor.
    """
    for name, tensor in module.state_dict().items():
        if not tensor.is_meta and not all_finite(tensor):
            raise ArtifactError(
                f"{fqn}.{name}".removeprefix(".")
                + " has NaN or infinite values; the checkpoint is damaged, or its dtype is too narrow for it"
            )


def finite(hidden: Tensor, fqn: str, module: nn.Module | None = None) -> Tensor:
    """Return a block's output if it is finite.

    Args:
        hidden: [batch, tokens, width].
        fqn: the block's name.
        module: the block, if its weights have not been checked yet.

    Raises:
        ArtifactError: the output is not finite because a weight of `module` is not.
        UnsupportedModelError: the output is not finite.
    """
    if not all_finite(hidden):
        if module is not None:
            refuse_damage(module, fqn)
        raise UnsupportedModelError(f"{fqn}: its output has NaN or infinite values on the calibration text")
    return hidden
