"""A torch.ao sparsifier that holds fixed masks on a model during fine-tuning. Used by `MaskSet.to_torch_ao`.

Import this module only where it is used, because it imports torch.ao.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.ao.pruning.sparsifier.base_sparsifier import BaseSparsifier
from torch.ao.pruning.sparsifier.utils import FakeSparsity
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrize

from compressx.numerics.masked import zeroed
from compressx.runtime.errors import ArtifactError


class _SelectEntries(torch.autograd.Function):
    """`zeroed` of a weight and a mask of its shape, and of gradients; `torch.where` takes four times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return zeroed(x, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return keep_entries(gradients[0], ctx.saved_tensors[0]), None


def keep_entries(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` (of the mask's shape) with zeros, and zero gradients, where the mask is False."""
    selected: Tensor = _SelectEntries.apply(x, mask)  # type: ignore[no-untyped-call]
    return selected


@final
class MaskedWeight(FakeSparsity):
    """Parametrization that sets the dropped entries of a weight to zero.

    The parent class multiplies, which leaves -0.0 and NaN and fails for different dtypes of mask and weight. It also
    leaves the mask out of the state dict, where strict loading expects it. Here the mask is bool, selects, and is a
    non-persistent buffer.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask)  # type: ignore[no-untyped-call]
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (of the mask's shape) with zeros, and zero gradients, where the mask is False."""
        return keep_entries(x, self.mask)


def _refuse_adapters(_parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuse to put an adapter over a weight whose mask is held.

    PEFT would merge the adapter into `module.weight`, which is computed on each access, and so lose all training.
    """
    if name != "base_layer" or module is None or not parametrize.is_parametrized(module, "weight"):
        return
    if any(isinstance(p, MaskedWeight) for p in module.parametrizations.weight):  # type: ignore[union-attr]
        raise ArtifactError(
            "an adapter over held masks cannot be merged, and its training would be lost; make the masks permanent by "
            "compressx.masks.squash(sparsifier) before get_peft_model, and call compressx.masks.mask_adapters(model, "
            "masks) after it"
        )


register_module_module_registration_hook(_refuse_adapters)


def part_from_copies(module: nn.Module) -> None:
    """Give a parametrized module its own class.

    torch puts the weight of a parametrized module on a new class, and removes it at the end. `copy.deepcopy` shares
    that class, so the copy would lose its weight too.
    """
    shared = type(module)
    members = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, members)


@final
class HeldMasks(BaseSparsifier):
    """Sparsifier with fixed masks: `step` changes nothing.

    A deep copy of the model alone keeps its masks; squash it with `compressx.masks.squash(model)`. To copy the
    sparsifier too, copy both at once: `copy.deepcopy((model, sparsifier))`.
    """

    enable_mask_update = False  # on the class, because `step` reads it and copies are made without __init__

    def prepare(self, model: nn.Module, config: list[dict[str, Any]]) -> None:
        """Parametrize the tensors in `config` with their masks."""
        if self.groups:  # torch.ao would stack a second parametrization on the first
            raise ArtifactError("these masks are already on a model; call MaskSet.to_torch_ao for another one")
        super().prepare(model, config)  # type: ignore[no-untyped-call]

    def squash_mask(self, *args: Any, **kwargs: Any) -> None:
        """Make the masks permanent, as the parent class does, without affecting copies of the model."""
        for group in self.groups:
            part_from_copies(group["module"])
        super().squash_mask(*args, **kwargs)

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Do nothing: the masks are fixed."""

    def load_state_dict(self, *_: object, **__: object) -> None:
        """Refuse masks of elsewhere, over which the parent class checks nothing."""
        raise ArtifactError("held masks are fixed; load others with MaskSet.load, and call to_torch_ao on a new model")
