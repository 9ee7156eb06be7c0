"""Masks held on a model while it is fine-tuned: torch.ao.pruning's interface without its traps.

Import this module only when it is used: it loads torch.ao. `MaskSet.to_torch_ao` prepares a model with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.ao.pruning.sparsifier.base_sparsifier import BaseSparsifier
from torch.ao.pruning.sparsifier.utils import FakeSparsity

from compressx.runtime.errors import ArtifactError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes."""


class _Selected(torch.autograd.Function):
    """What `torch.where(mask, x, 0.0)` is, to the bit, by integers: x's bits times one or zero.

    On a CPU `where` branches at every entry, which a mask without order mispredicts at every other one: it took 40% of
    the time of training a block.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return (x.view(_BITS[x.element_size()]) * mask).view(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return _Selected.apply(gradients[0], mask), None  # type: ignore[no-untyped-call]


@final
class MaskedWeight(FakeSparsity):
    """Parametrization that shows a weight with its dropped entries zero.

    Its parent multiplies, which leaves -0.0 and NaN and fails when mask and weight differ in dtype; and it keeps the
    mask out of the state dict while strict loading asks for it. Here the mask is bool, selects, and is not persistent.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask)  # type: ignore[no-untyped-call]
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [any shape, that of the mask] with zeros where the mask is False; no gradient reaches those."""
        selected: Tensor = _Selected.apply(x, self.mask)  # type: ignore[no-untyped-call]
        return selected


def part_from_copies(module: nn.Module) -> None:
    """Give a parametrized module a class of its own.

    torch makes one when it parametrizes and takes the weight off it when that ends; `copy.deepcopy` shares it, so that
    the copy would lose its weight, too.
    """
    shared = type(module)
    members = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, members)


@final
class HeldMasks(BaseSparsifier):
    """Sparsifier whose masks are given and stay: `step` changes nothing.

    A deep copy of the model alone keeps its masks and is squashed with `compressx.masks.squash(model)`; to copy the
    sparsifier as well, copy both at once: `copy.deepcopy((model, sparsifier))`.
    """

    enable_mask_update = False  # copies are made without __init__, and `step` asks for it

    def prepare(self, model: nn.Module, config: list[dict[str, Any]]) -> None:
        """Parametrize the tensors that `config` names with the masks that it holds; once only.

        Raises:
            ArtifactError: when called again, since torch.ao would stack a second parametrization on the first.
        """
        if self.groups:
            raise ArtifactError("these masks are already on a model; call MaskSet.to_torch_ao for another one")
        super().prepare(model, config)  # type: ignore[no-untyped-call]

    def squash_mask(self, *args: Any, **kwargs: Any) -> None:
        """Make the masks permanent, as the base class does, and leave copies of the model as they are."""
        for group in self.groups:
            part_from_copies(group["module"])
        super().squash_mask(*args, **kwargs)

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Leave the mask as it is."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over the masks of a state dict, in place; the dict keeps them too.

        Args:
            state_dict: what `state_dict()` returned.
            strict: also require the same tensor names.

        Raises:
            ArtifactError: names or shapes that differ; nothing is changed then.
        """
        given = {fqn: state["mask"] for fqn, state in state_dict["state"].items()}
        held = {g["tensor_fqn"]: g["module"].parametrizations[g["tensor_name"]][0].mask for g in self.groups}
        if strict and (odd := sorted(given.keys() ^ held.keys())):
            raise ArtifactError(f"the state dict and the prepared model mask different tensors: {', '.join(odd[:5])}")
        for fqn in given.keys() & held.keys():
            if given[fqn].shape != held[fqn].shape:
                raise ArtifactError(f"{fqn}: its mask is {[*held[fqn].shape]}, the state dict's {[*given[fqn].shape]}")
        for fqn in given.keys() & held.keys():
            held[fqn].copy_(given[fqn])
            self.state[fqn]["mask"] = held[fqn]  # `.to()` may have made the model's mask another tensor
