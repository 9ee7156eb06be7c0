"""Access to a model's weights, all in memory or one block at a time from disk, and to those of its base."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from compressx.api.pruner import Linear
from compressx.models import shards
from compressx.models.architecture import architecture_of, find_blocks
from compressx.models.shards import OUTSIDE, save_model
from compressx.numerics.masked import zeroed
from compressx.runtime.errors import ArtifactError, CompressxError
from compressx.runtime.transfer import begin_to_host


class WriteBehind:
    """Writes one block at a time, in a thread of its own, while the next one is read and worked on.

    A streamed model takes the memory of one block more. Tensors must not change until they are on disk.
    """

    def __init__(self) -> None:
        self._fqn: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._written: Future[None] | None = None

    def begin(
        self, fqn: str, path: Path, tensors: Callable[[], Mapping[str, Tensor]], then: Callable[[], None] | None = None
    ) -> None:
        """Begin to write what `tensors` returns, copied to the host; `then` is called in the thread when it is on disk.

        An `ArtifactError` says that the block before could not be written.
        """
        self.end()
        copies = {name: begin_to_host(tensor) for name, tensor in tensors().items()}
        for _, arrived in copies.values():
            arrived()
        held = {name: copied for name, (copied, _) in copies.items()}

        def write() -> None:
            shards.write_tensors(path, held)
            if then is not None:
                then()

        # A program that ends waits for the thread of a pool, and so leaves no part of a file.
        self._fqn, self._pool = fqn, ThreadPoolExecutor(1, f"write {path.name}")
        self._written = self._pool.submit(write)
        self._pool.shutdown(wait=False)  # there is no more

    def end(self, fqn: str | None = None) -> None:
        """Wait until a block is written, or whichever was begun if none is named.

        An `ArtifactError` says that this block or one before could not be written, and nothing is left of its file. It
        is raised by every further call, because the file is still missing.
        """
        if self._pool is None or self._written is None:
            return
        if fqn in (None, self._fqn) or self._written.done():
            self._pool.shutdown()
            self._written.result()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Wait at the end of a `with` for what was begun in it, also when it is left by an error, which then counts."""
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self.end()
            raise
        self.end()


Device: TypeAlias = str
"""`auto`, or a device as torch names it: `cpu`, `cuda`, `cuda:1`."""


class Access(Protocol):
    """A model whose weights can be materialised block by block."""

    @property
    def model(self) -> Any:
        """The transformers model; weights that are not materialised may be on the `meta` device."""

    @property
    def device(self) -> torch.device:
        """Device of materialised weights."""

    @property
    def matmul_dtype(self) -> torch.dtype | None:
        """Dtype of matmuls while blocks are run one at a time; None: that of the weights."""

    @property
    def base(self) -> Access | None:
        """The model that this one was fine-tuned from, where the difference is pruned; its blocks match this one's."""

    def materialise(self, fqn: str) -> AbstractContextManager[nn.Module]:
        """Return a context manager that yields a block, or the whole model for `shards.OUTSIDE`, with its weights.

        For `OUTSIDE`, only the weights outside the blocks are guaranteed to be loaded.
        """

    def read_ahead(self, fqn: str) -> None:
        """Begin to read the weights of the block that is materialised next, also of the base, if that saves time."""

    def logits(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Run the model on batches of token ids [batch, tokens]; yield [batch, tokens, vocabulary] for each."""

    def whole(self) -> AbstractContextManager[Any]:
        """Return a context manager that yields a model callable on any input, possibly slow."""

    def write(self, fqn: str, folder: Path, then: Callable[[], None] | None = None) -> None:
        """Begin to write a materialised block's weights to a folder, under their checkpoint names.

        They must not be changed until `written` has returned. One block is written at a time. `then` is called, in
        another thread, when they are on disk. An `ArtifactError` says that a block before could not be written; nothing
        is left of its file.
        """

    def written(self) -> None:
        """Wait until all blocks that `write` was given are on disk; raises as the next `write` would."""

    def read(self, fqn: str, folder: Path) -> None:
        """Use the weights of a block that `write` wrote."""

    def save(self, tokenizer: Any | None, written: Path, folder: Path) -> None:
        """Save the model in transformers' format; `written` is the folder that changed blocks were written to."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """A model with all weights in memory."""

    model: Any
    matmul_dtype: torch.dtype | None = None
    base: Access | None = None
    _behind: WriteBehind = field(default_factory=WriteBehind)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    @contextmanager
    def materialise(self, fqn: str) -> Iterator[nn.Module]:
        yield self.model.get_submodule(fqn)

    def read_ahead(self, fqn: str) -> None:
        if self.base is not None:
            self.base.read_ahead(fqn)

    def logits(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        for batch in batches:
            yield self.model(batch.to(self.device), use_cache=False).logits

    @contextmanager
    def whole(self) -> Iterator[Any]:
        yield self.model

    def write(self, fqn: str, folder: Path, then: Callable[[], None] | None = None) -> None:
        tensors = shards.own_tensors(self.model, find_blocks(self.model), fqn)
        self._behind.begin(fqn, block_file(folder, fqn), lambda: shards.checkpoint_tensors(self.model, tensors), then)

    def written(self) -> None:
        self._behind.end()

    def read(self, fqn: str, folder: Path) -> None:
        self._behind.end(fqn)
        conversions = getattr(self.model, "_weight_conversions", None)
        shards.load(self.model, shards.of_file(block_file(folder, fqn), fqn), fqn, self.device)
        self.model._weight_conversions = conversions  # `save` needs those of the whole model
        self.model.tie_weights(recompute_mapping=False)  # loading replaced parameters that are shared

    def save(self, tokenizer: Any | None, written: Path, folder: Path) -> None:  # noqa: ARG002 - all is in memory
        save_model(self.model, tokenizer, folder)


def block_file(folder: Path, fqn: str) -> Path:
    """Return the file of a block's weights."""
    return folder / f"{fqn or 'outside'}.safetensors"


@contextmanager
def differences(access: Access, fqn: str, linears: Mapping[str, Linear]) -> Iterator[dict[str, Linear]]:
    """Yield linears of a block, or outside the blocks; their `weight` is the difference from a base if there is one."""
    if access.base is None:
        yield {**linears}
        return
    with access.base.materialise(fqn):
        found = architecture_of(access.base.model)
        based = {name: x.held for name, x in {**found.linears, **found.outside}.items()}
        for name, linear in linears.items():
            if name not in based or based[name].shape != linear.held.shape:
                shape = [*based[name].shape] if name in based else "no linear of its own"  # such as a tied head
                raise ArtifactError(f"base: {name} is {shape}, and {[*linear.held.shape]} in the model")
        yield {name: replace(linear, base=based[name]) for name, linear in linears.items()}


def in_place_of(access: Access, fqn: str) -> nn.Module | None:
    """Return what a block that is dropped becomes: the base's, or None where it is left out."""
    return None if access.base is None else access.base.model.get_submodule(fqn)


def new_weight(linear: Linear, keep: Tensor, weight: Tensor | None) -> Tensor:
    """Return what a linear's module holds after pruning, in its dtype; `weight` is the new `linear.weight`, if any.

    What the mask `keep`, bool [out_features, in_features], drops is 0.0, never -0.0, or the base's to the bit. What was
    kept as it was stays the model's own: the sum of base and difference would round it.
    """
    held, base = linear.held, linear.base
    keep, new = keep.to(held.device), None if weight is None else weight.to(held.device)
    if base is None:
        return zeroed(held if new is None else new.to(held.dtype), keep)
    if new is not None:
        difference = linear.weight
        new = new.to(difference.dtype)
        held = torch.where(new == difference, held, (base.to(difference.dtype) + new).to(held.dtype))
    return torch.where(keep, held, base)


def in_its_dtype(linear: Linear, weight: Tensor) -> Tensor:
    """Return a new weight in the dtype of the module's; a difference, which is added to the base's first, as it is."""
    return weight if linear.base is not None else weight.to(linear.held.dtype)


def weights_fingerprint(access: Access) -> str:
    """Return the sha256 (hexadecimal) of every parameter and stored buffer with its name, dtype and shape."""
    digest = hashlib.sha256()
    blocks = find_blocks(access.model)
    for fqn in (OUTSIDE, *blocks):
        with access.materialise(fqn):
            for name, tensor in shards.tensors_of(access.model, blocks, fqn).items():
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def config_fingerprint(model: Any) -> str:
    """Return the sha256 (hexadecimal) of a model's config without the place it was loaded from."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    return hashlib.sha256(json.dumps({k: v for k, v in config.items() if k != "_name_or_path"}).encode()).hexdigest()


def device_for(wanted: Device) -> torch.device:
    """Return the device of the model; `auto` is CUDA if available. Each process gets its own GPU."""
    try:
        device = torch.device("cuda" if wanted == "auto" else wanted)
    except RuntimeError:
        raise CompressxError(f"device {wanted}: unknown; expected auto, cpu, cuda or cuda:N, such as cuda:1") from None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    own, chosen = int(os.environ.get("LOCAL_RANK", "0")), device != torch.device("cuda")
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    refusals = {
        "pruning sums in float64, which Apple GPUs lack; use --device cpu, or leave it out": device.type == "mps",
        "compressx runs on cpu and cuda only; choose one of them": device.type != "cuda",
        f"torch {torch.__version__} finds no CUDA GPU; use --device cpu, or leave it out to use a GPU only if there is "
        "one": not gpus,
        f"process {own} of this machine needs its own GPU, but torch finds {gpus}; start at most {gpus} processes "
        f"(torchrun --nproc-per-node {gpus}), or use --device cpu": not chosen and own >= gpus,
        "every process needs its own GPU; use --device cuda, and CUDA_VISIBLE_DEVICES to choose among them": (
            chosen and not alone
        ),
        f"torch finds {gpus}, cuda:0 to cuda:{gpus - 1}; choose one of them": chosen and (device.index or 0) >= gpus,
    }
    for why, refused in refusals.items():
        if refused:
            raise CompressxError(f"device {device}: {why}")
    device = device if chosen else torch.device("cuda", own)
    torch.cuda.set_device(device)
    return device
