"""Whether all entries of a tensor are numbers, at the price of one sum, and what is said where they are not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressx.runtime.errors import ArtifactError, UnsupportedModelError


def all_finite(x: Tensor) -> bool:
    """Say whether no entry is NaN or infinite.

    A sum of finite entries may overflow and one with a NaN or an infinity is never finite, so that only a sum which is
    not finite needs a second look.
    """
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def refuse_damage(module: nn.Module, fqn: str) -> None:
    """Refuse a module with a parameter or buffer that is not finite.

    Args:
        module: those of its tensors that are on the meta device are not looked at.
        fqn: its name.

    Raises:
        ArtifactError: names the first of them.
    """
    for name, tensor in module.state_dict().items():
        if not tensor.is_meta and not all_finite(tensor):
            raise ArtifactError(
                f"{fqn}.{name}".removeprefix(".")
                + " has NaN or infinite values; the checkpoint is damaged, or its dtype too narrow for it"
            )


def finite(hidden: Tensor, fqn: str, module: nn.Module | None = None) -> Tensor:
    """Return a block's output, or refuse it.

    Args:
        hidden: [batch, tokens, width].
        fqn: the block's name.
        module: the block, where nobody has looked at its weights yet.

    Raises:
        ArtifactError: the output is not finite, and a weight of the block is not either.
        UnsupportedModelError: an entry that is NaN or infinite.
    """
    if not all_finite(hidden):
        if module is not None:
            refuse_damage(module, fqn)
        raise UnsupportedModelError(f"{fqn}: its output has NaN or infinite values on the calibration text")
    return hidden
