"""A model that stays on disk: all modules exist, but weights are loaded one block at a time."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from compressx.models import shards
from compressx.models.access import Access, InMemory, WriteBehind, block_file
from compressx.models.architecture import find_blocks, survey, text_config
from compressx.models.blockwise import InFiles, capture, each_block, in_memory, run_around
from compressx.models.checkpoint import Checkpoint, find_checkpoint, local_folder
from compressx.models.loading import load_empty, load_model, load_offloaded, untie_own_head
from compressx.models.shards import OUTSIDE, Shards, save_model
from compressx.recipe.sources import ModelSource, Streaming
from compressx.runtime.errors import ArtifactError
from compressx.runtime.machine import free_main_memory
from compressx.runtime.modes import return_freed_memory
from compressx.runtime.transfer import to_device, written_behind

_CHUNK = 2**22
"""Bytes of one read; a request of the disk is smaller."""


class ReadAhead:
    """Reads one block at a time, in a thread of its own, while the one before is worked on.

    The bytes go into the system's file cache and nowhere else: the process needs no more memory, and the system can
    have it back.
    """

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def begin(self, shards: Shards, fqn: str) -> None:
        """Begin to read a block, after the one before is read."""
        self.end()
        self._thread = Thread(target=_read, args=(shards, fqn), name="read ahead", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until a block that was begun is read."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def ranges(shards: Shards, fqn: str) -> Iterator[tuple[Path, int, int]]:
    """Yield file, first byte and end of each tensor of a block, in the order of the files.

    Raises:
        OSError, ValueError, KeyError: a file that is missing or no safetensors file.
    """
    for file in sorted({shards.files[name] for name in shards.members[fqn]}):
        path = shards.folder / file
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError(f"{path} has a header of {length} bytes, more than the file")
            header = json.loads(opened.read(length))
        places = [header[name]["data_offsets"] for name in shards.members[fqn] if shards.files[name] == file]
        yield from ((path, 8 + length + start, 8 + length + end) for start, end in sorted(places))


def _read(shards: Shards, fqn: str) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    with contextlib.suppress(OSError, ValueError, KeyError):  # loading the block says what is wrong
        for path, start, end in ranges(shards, fqn):
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                left = end - start
                while left > 0 and (count := file.readinto(buffer[:left])):
                    left -= count


_HIDDEN_SHARE = 0.25
"""Fraction of the free memory above which the hidden states of an evaluation are kept in files."""

_AHEAD_SHARE = 0.5
"""Fraction of the free memory above which the next block is not read ahead, since its pages would be lost again."""


@dataclass(frozen=True, eq=False)
class StreamedModel:
    """A model whose weights are loaded on demand and unloaded afterwards.

    Attributes:
        checkpoint: the model's source.
        model: the transformers model in evaluation mode; unloaded parameters are on the `meta` device.
        blocks: its decoder blocks by fully qualified name.
        source: files of the weights of each block and of `OUTSIDE`; `write` changes it.
        stored: those of the checkpoint.
        device: of loaded weights.
        products, base: as for `Access`.
    """

    checkpoint: Checkpoint
    model: Any
    blocks: Mapping[str, nn.Module]
    source: dict[str, Shards]
    stored: Shards
    device: torch.device
    products: torch.dtype | None = None
    base: Access | None = None
    _ahead: ReadAhead = field(default_factory=ReadAhead)
    _behind: WriteBehind = field(default_factory=WriteBehind)

    @contextmanager
    def materialise(self, fqn: str) -> Iterator[nn.Module]:
        """Yield a block with its weights loaded; for `OUTSIDE`, the model with all weights but the blocks'.

        Changes are lost at the end unless they were written. A block that is still being written is waited for.

        Raises:
            ArtifactError: weights that cannot be read or are missing, or a block that could not be written.
        """
        module = self.model.get_submodule(fqn)
        self._ahead.end()
        self._behind.end(fqn)
        shards.borrow(self.model, self.stored, fqn, self.device)
        shards.load(self.model, self.source[fqn], fqn, self.device)  # the last, since `write` needs its conversions
        try:
            if fqn == OUTSIDE:
                absent = {name for name, tensor in self.tensors(fqn).items() if tensor.is_meta}
                self.model.tie_weights(missing_keys=absent, recompute_mapping=False)
                untie_own_head(self.model)
            if missing := [name for name, tensor in self.tensors(fqn).items() if tensor.is_meta]:
                raise ArtifactError(f"{self.source[fqn].folder}: the checkpoint lacks {', '.join(missing[:3])}")
            yield module
        finally:
            shards.unload(self.model, self.tensors(fqn))
            return_freed_memory()  # it would grow from block to block

    def read_ahead(self, fqn: str) -> None:
        """Begin to read a block into the system's file cache, unless that would be most of the free memory."""
        try:
            size = sum(end - start for _, start, end in ranges(self.source[fqn], fqn))
        except (OSError, ValueError, KeyError):
            return  # `materialise` says what is wrong
        if size <= _AHEAD_SHARE * free_memory(torch.device("cpu"), local_processes()):
            self._ahead.begin(self.source[fqn], fqn)

    def tensors(self, fqn: str) -> dict[str, Tensor]:
        """Return a block's parameters and persistent buffers by their names in the model."""
        return shards.tensors_of(self.model, self.blocks, fqn)

    def logits(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Run the model on all batches, block by block, and yield the logits of each.

        The hidden states of all batches are kept meanwhile, in temporary files if they would take too much memory.

        Raises:
            ArtifactError: as for `materialise`, or not enough disk space for the files.
        """
        width = text_config(self.model).hidden_size * self.model.dtype.itemsize
        room = _HIDDEN_SHARE * free_memory(self.device, local_processes())
        large = width * sum(batch.numel() for batch in batches) > room
        with tempfile.TemporaryDirectory(prefix="compressx-") as folder:
            keep = InFiles(Path(folder)) if large else in_memory
            found = survey(self.model)
            states, calls = capture(self, found, batches, keep)
            for _, runs in each_block(self, found, calls):
                with torch.no_grad(), written_behind() as put:
                    for state, run in zip(states, runs, strict=True):
                        put(state, run(state))
            with self.materialise(OUTSIDE):
                for batch, state in zip(batches, states, strict=True):
                    ids = batch.to(self.device)
                    yield run_around(self.model, self.blocks, ids, to_device(state, self.device)).logits

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Yield the model with its blocks offloaded to disk; every call reads all of them."""
        with tempfile.TemporaryDirectory(prefix="compressx-") as folder:
            yield load_offloaded(self.checkpoint, self.blocks, self.device, Path(folder))

    def write(self, fqn: str, folder: Path, then: Callable[[], None] | None = None) -> None:
        """Begin to write a materialised block to a file under its checkpoint names; later loads read that file.

        Its weights must not be changed any more; they may be unloaded.
        """
        path = block_file(folder, fqn)

        def read_from_there() -> None:
            self.source[fqn] = shards.of_file(path, fqn)
            if then is not None:
                then()

        own = shards.own_tensors(self.model, self.blocks, fqn)
        self._behind.begin(fqn, path, lambda: shards.checkpoint_tensors(self.model, own), read_from_there)

    def written(self) -> None:
        """Wait for all that `write` was given."""
        self._behind.end()

    def read(self, fqn: str, folder: Path) -> None:
        """Make later loads of a block read the file that `write` wrote."""
        self._behind.end(fqn)
        self.source[fqn] = shards.of_file(block_file(folder, fqn), fqn)

    def save(self, tokenizer: Any | None, written: Path, folder: Path) -> None:
        """Save a checkpoint of the blocks in `written` and of everything unchanged, one file per block.

        Raises:
            ArtifactError: it cannot be written.
        """
        self.written()  # which changes `source`
        with self._behind.ended():
            for fqn in self.blocks:
                if self.source[fqn].folder != written:
                    with self.materialise(fqn):
                        self.write(fqn, written)
            with self.materialise(OUTSIDE):
                save_model(self.model, tokenizer, folder, shards.own_tensors(self.model, self.blocks, OUTSIDE))
        shards.join(folder, [self.source[fqn] for fqn in self.blocks])


def open_model(checkpoint: Checkpoint, streaming: Streaming, device: torch.device) -> Access:
    """Load a model, or stream it if the recipe says so or it is too large.

    Raises:
        CompressxError: as for `load_model` and `open_streamed`.
    """
    if streaming is True or (streaming == "auto" and is_larger_than_memory(checkpoint, device)):
        return open_streamed(checkpoint, device)
    return InMemory(load_model(checkpoint).to(device))


def open_base(source: ModelSource, device: torch.device) -> Access:
    """Open the model that another was fine-tuned from, streamed unless its source says no or it has to be converted.

    Raises:
        CompressxError: as for `open_model`.
    """
    checkpoint = find_checkpoint(source)
    return open_model(checkpoint, bool(source.streaming) and checkpoint.gguf_file is None, device)


def open_streamed(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> StreamedModel:
    """Build a model without weights, and locate the weights of each block.

    Raises:
        ArtifactError: the checkpoint is missing or damaged.
        UnsupportedModelError: a GGUF file, which transformers can only convert as a whole, or no decoder blocks.
    """
    folder = local_folder(checkpoint)
    model = load_empty(checkpoint)
    for module in model.modules():  # computed buffers belong on the device of the weights
        module._buffers.update({n: b.to(device) for n, b in module._buffers.items() if b is not None and not b.is_meta})
    blocks = find_blocks(model)
    found = shards.find_shards(folder, model, blocks)
    return StreamedModel(
        checkpoint, model, blocks, dict.fromkeys((OUTSIDE, *blocks), found), found, torch.device(device)
    )


def is_larger_than_memory(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Return whether a model would take more than half of the free memory; always false for a GGUF file."""
    if checkpoint.gguf_file is not None:
        return False
    skeleton = load_empty(checkpoint)
    skeleton.tie_weights(recompute_mapping=False)  # a tied embedding and head are loaded once
    size = sum(p.numel() * p.element_size() for p in skeleton.parameters())
    return bool(size > free_memory(device, local_processes()) / 2)


def free_memory(device: torch.device, processes: int = 1) -> int:
    """Return the free memory in bytes for each of several processes; a model for a GPU passes through main memory."""
    free = free_main_memory() // processes
    return int(min(free, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free)


def local_processes() -> int:
    """Return the number of processes that `torchrun` started here; each loads its own copy."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
