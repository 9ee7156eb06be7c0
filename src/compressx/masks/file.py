"""The masks file: safetensors with bit-packed masks and a digest.

Tensor `<name>.mask` is uint8 [ceil(out_features * in_features / 8)]. Bit `i` (the least significant is 0) of byte `b`
is element `8 b + i` of the row-major mask [out_features, in_features]; the bits after the last element are 0. The
metadata key `compressx` holds JSON: `format`, `version`, `masks` (shape, pattern, pruner, sha256 and, where what is
dropped becomes a base's weight, the sha256 `base` of that, by name) and `digest`, the sha256 over the masks' metadata
and bits. A file that cannot be read or written, or is not complete and unchanged, is an `ArtifactError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, WrapValidator
from torch import Tensor

from compressx.api.pruner import Linear
from compressx.models.layout import Described, Sha256, layout_of, one_by_one
from compressx.numerics.masked import pattern_mismatch
from compressx.runtime.errors import ArtifactError, one_line
from compressx.runtime.files import written_whole
from compressx.runtime.transfer import begin_to_host


@dataclass(frozen=True, eq=False)
class MaskEntry:
    """The mask of one linear.

    Attributes:
        keep: bool [out_features, in_features], True = keep, also if the module stores its weight transposed.
        pattern: the requested pattern, such as `2:4` or `50% row`.
        pruner: name of the pruner that selected the weights.
        sha256: `weight_sha256` of the weight before pruning.
        base: that of the base's weight, which dropped weights become; None where they become zero.
    """

    keep: Tensor
    pattern: str
    pruner: str
    sha256: str
    base: str | None = None

    def __post_init__(self) -> None:
        if self.keep.dtype != torch.bool or self.keep.dim() != 2 or self.keep.numel() == 0:
            raise ValueError(
                f"expected a bool mask [out_features, in_features], got {self.keep.dtype} {[*self.keep.shape]}"
            )


def misfit(name: str, entry: MaskEntry, shape: Sequence[int]) -> str:
    """Say why a mask is not that of a weight with a shape, or not of the pattern that it says; empty if it is."""
    if [*entry.keep.shape] != [*shape]:
        return f"{name}: its mask is {[*entry.keep.shape]} [out_features, in_features], the weight {[*shape]}"
    unlike = pattern_mismatch(entry.keep, entry.pattern)
    return unlike and f"{name}: its mask is called {entry.pattern}, but is none: {unlike}"


_AT_ONCE = 2
"""Weights of a GPU that are hashed at the same time; each has a copy on the host."""

_SHOWN = r"^[^\p{Cc}\p{Cf}]{0,1000}$"


class _StoredMask(Described):
    """The metadata of one mask."""

    shape: Annotated[list[Annotated[int, Field(ge=1, lt=2**63)]], Field(min_length=2, max_length=2)]
    pattern: str = Field(pattern=_SHOWN)
    pruner: str = Field(pattern=_SHOWN)
    sha256: Sha256
    base: Sha256 | None = None


class _MasksHeader(Described):
    """The JSON under the metadata key `compressx`; one key, because safetensors writes several in no fixed order."""

    format: Literal["masks"] = "masks"
    version: Literal[1] = 1
    digest: Sha256
    masks: Annotated[dict[str, _StoredMask], WrapValidator(one_by_one)]


def write_masks(path: Path, entries: Mapping[str, MaskEntry]) -> None:
    """Write masks, by the names of their linears, atomically; equal masks give equal bytes."""
    masks = PackedMasks.of(entries)
    _write(path, masks._stored, lambda: [masks._packed])


def join_masks(path: Path, parts: Sequence[Path]) -> None:
    """Concatenate masks files in order, with one of them in memory at a time."""
    stored = {name: mask for part in parts for name, mask in _read(part)[0].items()}
    _write(path, stored, lambda: (_read(part)[1] for part in parts))


def _write(
    path: Path, stored: Mapping[str, _StoredMask], packed: Callable[[], Iterable[Mapping[str, Tensor]]]
) -> None:  # fmt: skip
    """Write a safetensors file piece by piece, its header padded with spaces to a multiple of eight bytes.

    `packed` returns the bits in the order of the metadata; it is called twice, because the header has their digest.
    """
    header = _MasksHeader(digest=_digest(stored, packed()), masks=dict(stored))
    described: dict[str, Any] = {"__metadata__": {"compressx": header.model_dump_json(exclude_none=True)}}
    end = 0
    for name, mask in stored.items():
        begin, end = end, end + _length(mask)
        described[f"{name}.mask"] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written_whole(path) as beside, beside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in packed():
            for name in bits:
                file.write(bits[name].numpy().data)


class PackedMasks(Mapping[str, MaskEntry]):
    """Bit-packed masks, unpacked on access; an eighth of the size of bool masks."""

    def __init__(self, stored: Mapping[str, _StoredMask], packed: Mapping[str, Tensor]) -> None:
        self._stored, self._packed = stored, packed

    @classmethod
    def of(cls, entries: Mapping[str, MaskEntry]) -> PackedMasks:
        """Pack masks, by the names of their linears."""
        stored = {
            name: _StoredMask(shape=[*e.keep.shape], pattern=e.pattern, pruner=e.pruner, sha256=e.sha256, base=e.base)
            for name, e in entries.items()
        }
        bits = {name: np.packbits(entry.keep.cpu().numpy(), bitorder="little") for name, entry in entries.items()}
        return cls(stored, {name: torch.from_numpy(x) for name, x in bits.items()})

    @classmethod
    def joined(cls, parts: Iterable[PackedMasks]) -> PackedMasks:
        """Return the masks of several parts, in order, without unpacking them."""
        listed = list(parts)
        stored = {name: mask for part in listed for name, mask in part._stored.items()}
        return cls(stored, {name: bits for part in listed for name, bits in part._packed.items()})

    def __getitem__(self, name: str) -> MaskEntry:
        mask = self._stored[name]
        rows, columns = mask.shape
        flat = np.unpackbits(self._packed[name].numpy(), count=rows * columns, bitorder="little")
        keep = torch.from_numpy(flat).bool().view(rows, columns)
        return MaskEntry(keep, mask.pattern, mask.pruner, mask.sha256, mask.base)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # without unpacking it


def read_masks(path: Path) -> PackedMasks:
    """Read what `write_masks` wrote."""
    return PackedMasks(*_read(path))


def _read(path: Path) -> tuple[dict[str, _StoredMask], dict[str, Tensor]]:
    """Read and check a file; return the metadata and the bits of each mask."""
    if path.is_dir():
        inside = path / "masks.safetensors"
        raise ArtifactError(
            f"{path} is a folder, expected a masks file" + (f", such as {inside}" if inside.is_file() else "")
        )
    layout = layout_of(path)
    header = layout.said(_MasksHeader, "a masks file")
    if odd := sorted({*layout.tensors} ^ {f"{name}.mask" for name in header.masks}):
        raise ArtifactError(f"{path}: its tensors and its metadata disagree about {one_line(', '.join(odd[:5])[:200])}")
    packed = {}
    for name, mask in header.masks.items():
        stored, last = layout.tensors[f"{name}.mask"], mask.shape[0] * mask.shape[1] % 8
        if (stored.dtype, stored.shape) != ("U8", [_length(mask)]):
            wrong = f"is stored as {stored}, expected U8 {[_length(mask)]} for shape {mask.shape}"
        else:
            bits = np.concatenate([*layout.elements(f"{name}.mask")])
            packed[name] = torch.from_numpy(bits)
            wrong = "has bits set after its last element" if last and int(bits[-1]) >> last else ""
        if wrong:
            raise ArtifactError(f"{path}: the mask of {one_line(name)[:200]} {wrong}")
    if _digest(header.masks, [packed]) != header.digest:
        raise ArtifactError(f"{path} was changed after it was written (its digest differs); use another copy")
    return header.masks, packed


def weight_sha256(weight: Tensor) -> str:
    """Hash the bytes of a weight [out_features, in_features], row-major, in its own dtype: sha256, hexadecimal."""
    flat = weight.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


class WeightHashes:
    """`weight_sha256` of weights that change right afterwards, by the names of their linears.

    Those of a GPU are copied behind its work and hashed in threads: a block of Llama 3 8B would wait .6 s for copies
    and hashes, as long as Wanda takes.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, Callable[[], str]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def add(self, linear: Linear) -> None:
        """Hash a linear's weight, and its base's, as they are now."""
        self._add(linear.name, linear.held)
        if linear.base is not None:
            self._add(f"{linear.name} of the base", linear.base)

    def _add(self, name: str, weight: Tensor) -> None:
        if not weight.is_cuda:
            found = weight_sha256(weight)
            self._hashes[name] = lambda: found
            return
        copied, arrived = begin_to_host(weight.detach())

        def hashed() -> str:
            arrived()
            return weight_sha256(copied)

        if len(self._hashes) >= _AT_ONCE:  # at most one copy more than threads that read them
            [*self._hashes.values()][-_AT_ONCE]()
        self._hashes[name] = self._threads.submit(hashed).result

    def __getitem__(self, name: str) -> tuple[str, str | None]:
        base = self._hashes.get(f"{name} of the base")
        return self._hashes[name](), None if base is None else base()


def _length(mask: _StoredMask) -> int:
    return -(-mask.shape[0] * mask.shape[1] // 8)


def _digest(stored: Mapping[str, _StoredMask], packed: Iterable[Mapping[str, Tensor]]) -> str:
    described = json.dumps([[name, mask.model_dump(exclude_none=True)] for name, mask in stored.items()])
    digest = hashlib.sha256(described.encode())
    for bits in packed:
        for name in bits:
            digest.update(bits[name].numpy().data)
    return digest.hexdigest()
