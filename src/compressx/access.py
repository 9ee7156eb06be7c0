"""How the stages of a run reach a model's weights: all there, or from disk a block at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compressx.architecture import find_blocks

OUTSIDE = ""
"""Stands for everything outside the decoder blocks where a block's name is asked for."""


class Access(Protocol):
    """A model whose weights are there when they are asked for."""

    @property
    def model(self) -> Any:
        """The transformers model; what is not materialised may be on the `meta` device."""

    @property
    def device(self) -> torch.device:
        """Where weights are while they are there."""

    def materialise(self, fqn: str) -> AbstractContextManager[nn.Module]:
        """Give a block, or the model around its blocks (`OUTSIDE`), with weights for the length of a `with`."""

    def logits(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Run the whole model on batches of token ids [batch, tokens]; yields [batch, tokens, vocabulary] for each."""

    def whole(self) -> AbstractContextManager[Any]:
        """Give a model that can be called on anything, as slow as that may be."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """A model that is loaded whole.

    Attributes:
        model: the transformers model.
    """

    model: Any

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @contextmanager
    def materialise(self, fqn: str) -> Iterator[nn.Module]:
        """Give the block as it stands; what is changed in it stays changed."""
        yield self.model.get_submodule(fqn)

    def logits(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Run the model on each batch."""
        for batch in batches:
            yield self.model(batch.to(self.device), use_cache=False).logits

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Give the model."""
        yield self.model


def tensors_of(model: nn.Module, blocks: Iterable[str], fqn: str) -> dict[str, Tensor]:
    """Return the parameters and stored buffers of a block, or of what lies outside the blocks, by name in the model."""
    held = model.get_submodule(fqn).state_dict(prefix=f"{fqn}." if fqn else "")
    if fqn != OUTSIDE:
        return held
    return {name: tensor for name, tensor in held.items() if not any(name.startswith(f"{b}.") for b in blocks)}


def weights_fingerprint(access: Access) -> str:
    """Hash every parameter and stored buffer with its name, dtype and shape: sha256, hexadecimal."""
    digest = hashlib.sha256()
    blocks = find_blocks(access.model)
    for fqn in (OUTSIDE, *blocks):
        with access.materialise(fqn):
            for name, tensor in tensors_of(access.model, blocks, fqn).items():
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
