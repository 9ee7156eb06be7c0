"""How the stages of a run reach a model's weights: all there, or from disk a block at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from compressx.models import shards
from compressx.models.architecture import find_blocks
from compressx.models.export import save_model
from compressx.models.shards import OUTSIDE
from compressx.runtime.errors import CompressxError

Device: TypeAlias = Literal["auto", "cpu", "cuda"]


class Access(Protocol):
    """A model whose weights are there when they are asked for."""

    @property
    def model(self) -> Any:
        """The transformers model; what is not materialised may be on the `meta` device."""

    @property
    def device(self) -> torch.device:
        """Where weights are while they are there."""

    def materialise(self, fqn: str) -> AbstractContextManager[nn.Module]:
        """Give a block, or the model around its blocks (`shards.OUTSIDE`), with weights for the length of a `with`."""

    def logits(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Run the whole model on batches of token ids [batch, tokens]; yields [batch, tokens, vocabulary] for each."""

    def whole(self) -> AbstractContextManager[Any]:
        """Give a model that can be called on anything, as slow as that may be."""

    def write(self, fqn: str, folder: Path) -> None:
        """Write a materialised block's weights into a folder, in the names of its checkpoint."""

    def read(self, fqn: str, folder: Path) -> None:
        """Take a block's weights from where `write` put them."""

    def save(self, tokenizer: Any | None, written: Path, folder: Path) -> None:
        """Save the model as transformers loads it; `written` is where `write` put the blocks that were changed."""


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

    def write(self, fqn: str, folder: Path) -> None:
        """Write a block's weights, so that an interrupted run can go on.

        Raises:
            ArtifactError: when they cannot be written.
        """
        tensors = shards.tensors_of(self.model, find_blocks(self.model), fqn)
        shards.write(block_file(folder, fqn), shards.checkpoint_tensors(self.model, tensors))

    def read(self, fqn: str, folder: Path) -> None:
        """Load what `write` wrote.

        Raises:
            ArtifactError: a file that is missing or damaged.
        """
        conversions = getattr(self.model, "_weight_conversions", None)
        shards.load(self.model, shards.of_file(block_file(folder, fqn), fqn), fqn, self.device)
        self.model._weight_conversions = conversions  # those of the whole model, for `save`
        if fqn == shards.OUTSIDE:
            self.model.tie_weights()  # the embedding is another parameter now

    def save(self, tokenizer: Any | None, written: Path, folder: Path) -> None:  # noqa: ARG002 - all is in memory
        """Save the model.

        Raises:
            ArtifactError: when it cannot be written.
        """
        save_model(self.model, tokenizer, folder)


def block_file(folder: Path, fqn: str) -> Path:
    """Return where a block's weights are written."""
    return folder / f"{fqn or 'outside'}.safetensors"


def weights_fingerprint(access: Access) -> str:
    """Hash every parameter and stored buffer with its name, dtype and shape: sha256, hexadecimal."""
    digest = hashlib.sha256()
    blocks = find_blocks(access.model)
    for fqn in (OUTSIDE, *blocks):
        with access.materialise(fqn):
            for name, tensor in shards.tensors_of(access.model, blocks, fqn).items():
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def config_fingerprint(model: Any) -> str:
    """Hash a model's config, wherever the model was loaded from: sha256, hexadecimal."""
    told = json.loads(model.config.to_json_string(use_diff=False))
    return hashlib.sha256(json.dumps({k: v for k, v in told.items() if k != "_name_or_path"}).encode()).hexdigest()


def device_for(wanted: Device) -> torch.device:
    """Return where the model runs: `auto` is CUDA when there is some; of several processes each has its own GPU.

    Raises:
        CompressxError: CUDA is asked for and there is none, or fewer GPUs than processes.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if not gpus:
        raise CompressxError(
            f"device cuda: torch {torch.__version__} finds no CUDA GPU here; give --device cpu, or leave it out, which "
            "takes a GPU where there is one"
        )
    if index >= gpus:
        raise CompressxError(
            f"device cuda: process {index} of this machine needs a GPU of its own, and torch finds {gpus}; start at "
            f"most {gpus} processes (torchrun --nproc-per-node {gpus}), or give --device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
