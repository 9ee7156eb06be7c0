"""A model that stays on disk: all modules exist, but weights are loaded one block at a time."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from compressx.models import shards
from compressx.models.access import Access, InMemory, WriteBehind, block_file
from compressx.models.architecture import architecture_of, find_blocks, text_config
from compressx.models.blockwise import StateFiles, capture, each_block, in_memory, run_around
from compressx.models.checkpoint import Checkpoint, find_checkpoint, local_folder
from compressx.models.layout import layout_of
from compressx.models.loading import load_empty, load_model, load_offloaded, untie_own_head
from compressx.models.shards import OUTSIDE, Shards, save_model
from compressx.recipe.sources import ModelSource, Streaming
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.runtime.machine import free_main_memory
from compressx.runtime.modes import return_freed_memory
from compressx.runtime.transfer import to_device, written_behind

_CHUNK = 2**22
"""Bytes of one read; a request of the disk is smaller."""


def ranges(shards: Shards, fqn: str) -> Iterator[tuple[Path, int, int]]:
    """Yield file, first byte and end of each tensor of a block, in the order of the files."""
    wanted = {*shards.members[fqn]}
    for file in sorted({shards.files[name] for name in wanted}):
        layout = layout_of(shards.folder / file)
        for name, tensor in layout.tensors.items():
            if name in wanted and shards.files[name] == file:
                start, end = tensor.data_offsets
                yield layout.path, layout.start + start, layout.start + end


def _read(places: Iterable[tuple[Path, int, int]]) -> None:
    """Read bytes into the system's file cache, which is no memory of the process, and the system can have it back."""
    buffer = memoryview(bytearray(_CHUNK))
    with contextlib.suppress(OSError):  # loading the block says what is wrong
        for path, start, end in places:
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

    Unloaded parameters of `model` are on the `meta` device. `source` has the files of the weights of each of its
    `blocks` and of `OUTSIDE`; `write` changes it.
    """

    checkpoint: Checkpoint
    model: Any
    blocks: Mapping[str, nn.Module]
    source: dict[str, Shards]
    device: torch.device
    matmul_dtype: torch.dtype | None = None
    base: Access | None = None
    _ahead: list[Thread] = field(default_factory=list)
    _behind: WriteBehind = field(default_factory=WriteBehind)

    @contextmanager
    def materialise(self, fqn: str) -> Iterator[nn.Module]:
        # Changes are lost at the end unless they were written. A block that is still being written is waited for.
        module = self.model.get_submodule(fqn)
        self._end_ahead()
        self._behind.end(fqn)
        shards.load(self.model, self.source[fqn], fqn, self.device)
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
        if self.base is not None:
            self.base.read_ahead(fqn)
        with contextlib.suppress(ArtifactError):  # `materialise` says what is wrong
            places = [*ranges(self.source[fqn], fqn)]
            free = free_memory(torch.device("cpu"), local_processes())
            if sum(end - start for _, start, end in places) <= _AHEAD_SHARE * free:
                self._end_ahead()
                self._ahead.append(Thread(target=_read, args=(places,), name="read ahead", daemon=True))
                self._ahead[-1].start()

    def _end_ahead(self) -> None:
        while self._ahead:
            self._ahead.pop().join()

    def tensors(self, fqn: str) -> dict[str, Tensor]:
        """Return a block's parameters and persistent buffers by their names in the model."""
        return shards.tensors_of(self.model, self.blocks, fqn)

    def logits(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        # The hidden states of all batches are kept, in temporary files if they would take too much memory.
        width = text_config(self.model).hidden_size * self.model.dtype.itemsize
        room = _HIDDEN_SHARE * free_memory(self.device, local_processes())
        large = width * sum(batch.numel() for batch in batches) > room
        with tempfile.TemporaryDirectory(prefix="compressx-") as folder:
            keep = StateFiles(Path(folder)) if large else in_memory
            found = architecture_of(self.model)
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
        with tempfile.TemporaryDirectory(prefix="compressx-") as folder:
            yield load_offloaded(self.checkpoint, self.blocks, self.device, Path(folder))

    def write(self, fqn: str, folder: Path, then: Callable[[], None] | None = None) -> None:
        path = block_file(folder, fqn)

        def read_from_there() -> None:
            self.source[fqn] = shards.of_file(path, fqn)
            if then is not None:
                then()

        own = shards.own_tensors(self.model, self.blocks, fqn)
        self._behind.begin(fqn, path, lambda: shards.checkpoint_tensors(self.model, own), read_from_there)

    def written(self) -> None:
        self._behind.end()

    def read(self, fqn: str, folder: Path) -> None:
        self._behind.end(fqn)
        self.source[fqn] = shards.of_file(block_file(folder, fqn), fqn)

    def save(self, tokenizer: Any | None, written: Path, folder: Path) -> None:
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
    """Load a model, or stream it if the recipe says so or it is too large."""
    if streaming is True or (streaming == "auto" and is_larger_than_memory(checkpoint, device)):
        return open_streamed(checkpoint, device)
    return InMemory(load_model(checkpoint).to(device))


def open_base(source: ModelSource, device: torch.device) -> Access:
    """Open the model that another was fine-tuned from, streamed unless its source says no or it has to be converted."""
    checkpoint = find_checkpoint(source)
    return open_model(checkpoint, bool(source.streaming) and checkpoint.file is None, device)


def open_streamed(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> StreamedModel:
    """Build a model without weights, and locate the weights of each block."""
    folder = local_folder(checkpoint)
    model = load_empty(checkpoint)
    for module in model.modules():  # computed buffers belong on the device of the weights
        module._buffers.update({n: b.to(device) for n, b in module._buffers.items() if b is not None and not b.is_meta})
    blocks = find_blocks(model)
    for name, source in model.all_tied_weights_keys.items():
        if any(name.startswith(f"{fqn}.") and not source.startswith(f"{fqn}.") for fqn in blocks):
            raise UnsupportedModelError(
                f"{checkpoint.location} cannot be streamed: its blocks share weights, {name} those of {source}; leave "
                "out model.streaming"
            )
    found = shards.find_shards(folder, model, blocks)
    return StreamedModel(checkpoint, model, blocks, dict.fromkeys((OUTSIDE, *blocks), found), torch.device(device))


def is_larger_than_memory(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Return whether a model that can be streamed would take more than half of the free memory."""
    if checkpoint.file is not None:
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
