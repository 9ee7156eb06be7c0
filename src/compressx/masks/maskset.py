"""The masks of a pruned model: a file, and what can be done with a model and that file.

The file is the artifact and torch.ao.pruning the interface. To fine-tune with the masks held::

    sparsifier = MaskSet.load("masks.safetensors").to_torch_ao(model)
    ...  # train; save and load checkpoints with model.state_dict(), which holds the unmasked weights
    squash(sparsifier)
    model.save_pretrained(folder)

A checkpoint and the masks' file are all that is needed to go on: load the file, call `to_torch_ao` on a model built
anew, then `model.load_state_dict(checkpoint)`. While the masks are held, `module.weight` is computed on each access
and what is written to it is lost; the parameter is `module.parametrizations.weight.original`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compressx.api.pruner import Linear
from compressx.masks.file import MaskEntry, PackedMasks, read_masks, weight_sha256, write_masks
from compressx.models.architecture import linears_of
from compressx.models.export import refuse_prepared
from compressx.runtime.errors import ArtifactError, did_you_mean

if TYPE_CHECKING:
    from torch.ao.pruning.sparsifier.base_sparsifier import BaseSparsifier

__all__ = ["Deviation", "MaskEntry", "MaskSet", "apply", "squash", "weight_sha256"]


class Deviation(NamedTuple):
    """How the zeros of one weight differ from its mask: counts of weights.

    Attributes:
        dropped_not_zero: the mask drops them, yet they are not zero.
        kept_zero: the mask keeps them, yet they are zero; a dense weight may hold a few of those by nature.
    """

    dropped_not_zero: int
    kept_zero: int


@dataclass(frozen=True, eq=False)
class MaskSet(Mapping[str, MaskEntry]):
    """The masks of a model by the fully qualified names of its linears.

    Attributes:
        entries: copied when the set is made; those of a file stay packed, and each is unpacked when it is asked for.
    """

    entries: Mapping[str, MaskEntry]

    def __post_init__(self) -> None:
        if not isinstance(self.entries, PackedMasks):
            object.__setattr__(self, "entries", dict(self.entries))

    def __getitem__(self, name: str) -> MaskEntry:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def sparsity(self) -> float:
        """Count the fraction of zeros over all masks; 0 when there is none."""
        total = sum(entry.keep.numel() for entry in self.values())
        kept = sum(int(torch.count_nonzero(entry.keep)) for entry in self.values())
        return (total - kept) / total if total else 0.0

    def save(self, path: Path | str) -> None:
        """Write the masks as one file (`compressx.masks.file` has its format), atomically.

        Raises:
            ArtifactError: when the file cannot be written; an older one is untouched then.
        """
        write_masks(Path(path), self)

    @classmethod
    def load(cls, path: Path | str) -> MaskSet:
        """Read what `save` wrote.

        Raises:
            ArtifactError: a file that cannot be read, or is anything but a whole and unchanged file of masks.
        """
        return cls(read_masks(Path(path)))

    def apply(self, model: nn.Module, *, original: bool = False) -> None:
        """Set the dropped weights of a model to zero, in place.

        Args:
            model: any model with linears of these names and shapes, on any device and in any dtype.
            original: also require that each weight is, byte for byte, the one that was pruned.

        Raises:
            ArtifactError: a name or shape that the model does not have, weights that are not loaded, a prepared
                model, a tied weight of which only some owners are named. Nothing is changed then.
        """
        linears = self._writable(model)
        if original:
            self._require_originals(linears)
        with torch.no_grad():
            for name, linear in linears.items():
                weight = linear.weight
                weight.masked_fill_(~self[name].keep.to(weight.device), 0.0)

    def deviations(self, model: nn.Module) -> dict[str, Deviation]:
        """Count, by name, where a model's zeros differ from the masks; names without a difference are left out.

        Raises:
            ArtifactError: a name or shape that the model does not have, or weights that are not loaded.
        """
        found = {}
        for name, linear in self._linears(model).items():
            weight = linear.weight
            keep, zero = self[name].keep.to(weight.device), weight == 0
            deviation = Deviation(int((~keep & ~zero).sum()), int((keep & zero).sum()))
            if any(deviation):
                found[name] = deviation
        return found

    def verify(self, model: nn.Module) -> bool:
        """Say whether every dropped weight of a model is zero, its masks held or squashed.

        Zeros among the kept weights are no fault: real checkpoints hold some. `deviations` counts those too.

        Raises:
            ArtifactError: as `deviations`.
        """
        return not any(deviation.dropped_not_zero for deviation in self.deviations(model).values())

    def to_torch_ao(self, model: nn.Module) -> BaseSparsifier:
        """Hold the masks on a model while it is trained, in place.

        The parameters stay the same objects, so an optimizer may be made before or after, and again after `squash`.
        `squash_mask()` of what is returned makes exact zeros, never -0.0, in the weight's dtype, and keeps ties.

        Args:
            model: as for `apply`.

        Returns:
            A prepared sparsifier whose `step` changes nothing.

        Raises:
            ArtifactError: as `apply`, and nothing is changed then.
        """
        from compressx.masks.sparsifier import HeldMasks, MaskedWeight

        linears = self._writable(model)  # first, since `prepare` would stop half-way
        masks: dict[str, Tensor] = {}  # by parameter: fused experts share one, and those without a mask are kept whole
        for name, linear in linears.items():
            stored = linear.module.get_parameter(linear.parameter)
            keep = self[name].keep.to(stored.device)
            if linear.expert is None:
                masks[f"{name}.weight"] = (keep.T if linear.transposed else keep).clone(
                    memory_format=torch.contiguous_format
                )
            else:
                fused = name.rpartition(".")[0]
                if fused not in masks:
                    masks[fused] = torch.ones(stored.shape, dtype=torch.bool, device=stored.device)
                masks[fused][linear.expert] = keep
        sparsifier = HeldMasks()
        sparsifier.prepare(
            model, [{"tensor_fqn": fqn, "mask": mask, "parametrization": MaskedWeight} for fqn, mask in masks.items()]
        )
        return sparsifier

    def _linears(self, model: nn.Module) -> dict[str, Linear]:
        """Find each name's weight, checking shapes."""
        weights = {x.name: x for n, m in model.named_modules(remove_duplicate=False) for x in _weights_of(n, m)}
        for name, entry in self.items():
            if name not in weights:
                hint = did_you_mean(name, weights)
                raise ArtifactError(f"the masks name {name!r}, which {type(model).__name__} does not have; {hint}")
            weight = weights[name].weight
            if weight.shape != entry.keep.shape:
                raise ArtifactError(
                    f"{name}: the mask is {[*entry.keep.shape]} [out_features, in_features], the weight "
                    f"{[*weight.shape]}; the masks were made for another model"
                )
            if weight.is_meta:
                raise ArtifactError(f"{name}: its weight is not loaded (device meta); load the whole model first")
        return {name: weights[name] for name in self}

    def _writable(self, model: nn.Module) -> dict[str, Linear]:
        """Find each name's weight, having made sure that changing it changes nothing unnamed."""
        refuse_prepared(model, "masked")
        linears = self._linears(model)
        whole = {name: linear for name, linear in linears.items() if linear.expert is None}
        name_of: dict[int, str] = {}
        for name, linear in whole.items():
            if (other := name_of.setdefault(id(linear.module), name)) != name:
                raise ArtifactError(f"{other} and {name} are one and the same module; keep only one of the two masks")
        owners: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(name_of.get(id(module), name))
        for name, linear in whole.items():
            keep = self[name].keep
            for owner in owners[id(linear.module.get_parameter(linear.parameter))]:
                if owner not in self or not torch.equal(self[owner].keep, keep):
                    raise ArtifactError(
                        f"{name}: its weight is tied to that of {owner}, and pruning one prunes both; give both names "
                        "the same mask, or untie them (tie_word_embeddings=False)"
                    )
        return linears

    def _require_originals(self, linears: Mapping[str, Linear]) -> None:
        for name, linear in linears.items():
            if (found := weight_sha256(linear.weight)) != self[name].sha256:
                raise ArtifactError(
                    f"{name}: its weight has sha256 {found[:12]}..., the masks were made for one with "
                    f"{self[name].sha256[:12]}...; load the model that was pruned, in the dtype it was pruned in"
                )


def apply(model: nn.Module, path: Path | str, *, original: bool = False) -> None:
    """Set the weights that a masks file drops to zero, in place: `MaskSet.load(path).apply(model)`."""
    MaskSet.load(path).apply(model, original=original)


def squash(prepared: BaseSparsifier | nn.Module) -> None:
    """Make held masks permanent: every weight becomes an ordinary parameter again, its dropped entries exactly 0.0.

    Args:
        prepared: the sparsifier, any of torch.ao's; or the model, for a deep copy has no sparsifier of its own.

    Raises:
        ArtifactError: when no masks are held, as after an earlier squash.
    """
    from torch.ao.pruning.sparsifier.utils import FakeSparsity

    from compressx.masks.sparsifier import part_from_copies

    if isinstance(prepared, nn.Module):
        masked = [
            (module, name)
            for module in prepared.modules()
            if parametrize.is_parametrized(module)
            for name, chain in module.parametrizations.items()  # type: ignore[union-attr, operator]
            if any(isinstance(p, FakeSparsity) for p in chain)
        ]
    else:
        masked = [(group["module"], group["tensor_name"]) for group in prepared.groups]
    if not masked or not all(parametrize.is_parametrized(*tensor) for tensor in masked):
        raise ArtifactError(f"this {type(prepared).__name__} holds no masks (any more); it may be squashed already")
    for module, _ in masked:
        part_from_copies(module)
    if isinstance(prepared, nn.Module):
        for module, name in masked:
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    else:
        prepared.squash_mask()
    with torch.no_grad():
        for module, name in masked:
            weight = getattr(module, name)
            weight.masked_fill_(weight == 0, 0.0)  # torch.ao's own parametrization leaves -0.0


def _weights_of(name: str, module: nn.Module) -> list[Linear]:
    """Return the linears of a module, or the matrix of another one: an embedding may be tied to a linear."""
    weight = getattr(module, "weight", None)
    matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return linears_of(name, module) or ([Linear(name, module)] if matrix else [])
