"""The masks of a pruned model: save, load, apply, verify, and hold them during training.

To fine-tune with the masks held, by torch.ao.pruning::

    sparsifier = MaskSet.load("masks.safetensors").to_torch_ao(model)
    ...  # train; save and load checkpoints with model.state_dict(), which holds the unmasked weights
    squash(sparsifier)
    model.save_pretrained(folder)

To resume from a checkpoint, load the masks file, call `to_torch_ao` on a new model, then
`model.load_state_dict(checkpoint)`. While the masks are held, `module.weight` is computed on each access and writes to
it are lost; the parameter is `module.parametrizations.weight.original`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compressx.api.pruner import Linear
from compressx.masks.adapters import refuse_adapted
from compressx.masks.file import MaskEntry, PackedMasks, misfit, read_masks, weight_sha256, write_masks
from compressx.models.architecture import linears_of, refuse_prepared
from compressx.runtime.errors import ArtifactError, did_you_mean

if TYPE_CHECKING:
    from torch.ao.pruning.sparsifier.base_sparsifier import BaseSparsifier

__all__ = ["MaskEntry", "MaskSet", "squash", "weight_sha256"]


@dataclass(frozen=True, eq=False)
class MaskSet(Mapping[str, MaskEntry]):
    """The masks of a model by the fully qualified names of its linears.

    Attributes:
        entries: copied on construction; those of a file stay packed and are unpacked on access.
    """

    entries: Mapping[str, MaskEntry]

    def __post_init__(self) -> None:
        if not isinstance(self.entries, PackedMasks):
            object.__setattr__(self, "entries", dict(self.entries))

    def __getitem__(self, name: str) -> MaskEntry:
        if name not in self.entries:
            raise KeyError(f"no mask of {name!r}; {did_you_mean(name, self.entries) or 'there are no masks'}")
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __repr__(self) -> str:
        listed = ", ".join(f"{n} x {pattern}" for pattern, n in Counter(x.pattern for x in self.values()).items())
        linears = f"{len(self)} linear{'' if len(self) == 1 else 's'}"
        return f"MaskSet({linears}, {self.sparsity():.2%} sparse: {listed})" if self else "MaskSet(0 linears)"

    def sparsity(self) -> float:
        """Return the fraction of zeros over all masks; 0 without masks."""
        total = sum(entry.keep.numel() for entry in self.values())
        kept = sum(int(torch.count_nonzero(entry.keep)) for entry in self.values())
        return (total - kept) / total if total else 0.0

    @property
    def of_difference(self) -> bool:
        """Whether dropped weights become those of a base instead of zeros."""
        return any(entry.base is not None for entry in self.values())

    def save(self, path: Path | str) -> None:
        """Write the masks to a file, atomically. The format is described in `compressx.masks.file`."""
        write_masks(Path(path), self)

    @classmethod
    def load(cls, path: Path | str) -> MaskSet:
        """Read what `save` wrote; an `ArtifactError` refuses what is not a complete and unchanged masks file."""
        return cls(read_masks(Path(path)))

    def apply(self, model: nn.Module, *, original: bool = False, base: nn.Module | None = None) -> None:
        """Set the dropped weights of a model to zero, or to the base's, in place.

        Args:
            model: any model with linears of these names and shapes, on any device and in any dtype.
            original: also require that each weight equals the one that was pruned, byte for byte.
            base: the model whose weights dropped ones become, if the masks are of a difference.

        Raises:
            ArtifactError: a missing name or different shape, weights that are not loaded, a prepared model, a tied
                weight of which only some owners have a mask, or another base. The model is left unchanged.
        """
        linears, based = self._writable(model), self._base_weights(base)
        if original:
            self._require_sha256({n: x.weight for n, x in linears.items()}, "its weight", lambda entry: entry.sha256)
        with torch.no_grad():
            for name, linear in linears.items():
                weight = linear.weight
                drop = ~self[name].keep.to(weight.device)
                weight.copy_(torch.where(drop, based[name].to(weight.device) if name in based else 0.0, weight))

    def deviations(self, model: nn.Module, *, base: nn.Module | None = None) -> dict[str, int]:
        """Count each linear's dropped weights that are not zero, or not the base's; linears without any are omitted.

        Arguments and errors are those of `apply`, but masks may be held on the model.
        """
        based, found = self._base_weights(base), {}
        for name, linear in self._linears(model).items():
            weight = linear.weight
            if count := int((~self[name].keep.to(weight.device) & (weight != based.get(name, 0))).sum()):
                found[name] = count
        return found

    def verify(self, model: nn.Module, *, base: nn.Module | None = None) -> bool:
        """Return whether there are no `deviations`; kept weights may be zero, as some of real checkpoints are."""
        return not self.deviations(model, base=base)

    def to_torch_ao(self, model: nn.Module) -> BaseSparsifier:
        """Hold the masks on a model during training, in place.

        Parameters keep their identity, so an optimizer may be created before or after, and after `squash`. The
        sparsifier's `step` changes nothing, and its `squash_mask()` makes exact zeros, never -0.0, in the weight's
        dtype, and keeps ties. Errors are those of `apply`.
        """
        from compressx.masks.sparsifier import HeldMasks, MaskedWeight

        sparsifier, masks = HeldMasks(), self.by_parameter(model)
        held = [{"tensor_fqn": fqn, "mask": x, "parametrization": MaskedWeight} for fqn, x in masks.items()]
        sparsifier.prepare(model, held)
        return sparsifier

    def by_parameter(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a mask for each masked parameter of a model, by its name, in its layout and on its device.

        Fused experts share a parameter; those without a mask are kept. Errors are those of `apply`.
        """
        if self.of_difference:
            raise ArtifactError(
                "these masks drop weights to a base's, and only zeros can be held; fine-tune without them, then prune "
                "the difference again"
            )
        masks: dict[str, Tensor] = {}
        for name, linear in self._writable(model).items():
            stored = linear.module.get_parameter(linear.parameter)
            fqn = f"{name}.weight" if linear.expert is None else name.rpartition(".")[0]
            if fqn not in masks:
                masks[fqn] = torch.ones(stored.shape, dtype=torch.bool, device=stored.device)
            linear.part(masks[fqn]).copy_(self[name].keep)
        return masks

    def _linears(self, model: nn.Module) -> dict[str, Linear]:
        """Return the linear of each mask; check its shape, and that the weights are the model's own."""
        refuse_adapted(model)
        refuse_prepared(model, "compared with masks", allowed="FakeSparsity")
        weights = {x.name: x for n, m in model.named_modules(remove_duplicate=False) for x in _weights_of(n, m)}
        for name, entry in self.items():
            if name not in weights:
                hint = did_you_mean(name, weights) or "it has no linears"
                wrong = f"there is a mask for {name!r}, which {type(model).__name__} does not have; {hint}"
            elif wrong := misfit(name, entry, weights[name].weight.shape):
                wrong += "; give the masks of this model"
            elif weights[name].weight.is_meta:
                wrong = f"{name}: its weight is not loaded (device meta); load the whole model first"
            if wrong:
                raise ArtifactError(wrong + shrunk_note(model))
        return {name: weights[name] for name in self}

    def _writable(self, model: nn.Module) -> dict[str, Linear]:
        """Return the linear of each mask; check that no weight is shared with a module without the same mask."""
        refuse_prepared(model, "masked")
        linears = self._linears(model)
        whole = {name: linear for name, linear in linears.items() if linear.expert is None}
        name_of: dict[int, str] = {}
        for name, linear in whole.items():
            if (other := name_of.setdefault(id(linear.module), name)) != name:
                raise ArtifactError(f"{other} and {name} are the same module; keep only one of the two masks")
        owners: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(name_of.get(id(module), name))
        for name, linear in whole.items():
            keep = self[name].keep
            for owner in owners[id(linear.module.get_parameter(linear.parameter))]:
                if owner not in self or not torch.equal(self[owner].keep, keep):
                    raise ArtifactError(
                        f"{name}: its weight is tied to that of {owner}, and pruning one prunes both; give both the "
                        "same mask, or untie them (tie_word_embeddings=False)"
                    )
        return linears

    def _base_weights(self, base: nn.Module | None) -> dict[str, Tensor]:
        """Return the base's weight for each mask made with one; check that it is the same weight."""
        if self.of_difference != (base is not None):
            raise ArtifactError(
                "these masks drop weights to zero; leave the base out"
                if base is not None
                else "these masks drop weights to those of a base model; give it, by base= or --base"
            )
        if base is None:
            return {}
        found = {name: linear.weight for name, linear in self._linears(base).items() if self[name].base is not None}
        self._require_sha256(found, "the base's weight", lambda entry: entry.base)
        return found

    def _require_sha256(
        self, weights: Mapping[str, Tensor], what: str, sha256_of: Callable[[MaskEntry], str | None]
    ) -> None:  # fmt: skip
        for name, weight in weights.items():
            if (found := weight_sha256(weight)) != (wanted := sha256_of(self[name])):
                raise ArtifactError(
                    f"{name}: {what} has sha256 {found[:12]}..., but its mask was made with {str(wanted)[:12]}...; "
                    "load that model, in the dtype that it had"
                )


def squash(prepared: BaseSparsifier | nn.Module) -> None:
    """Make held masks permanent: weights become ordinary parameters again, with dropped entries exactly 0.0.

    `prepared` is any torch.ao sparsifier; or the model, because a deep copy has no sparsifier. An `ArtifactError` says
    that no masks are held, for example after an earlier squash.
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
        raise ArtifactError(f"this {type(prepared).__name__} holds no masks; it may be squashed already")
    for module, name in masked:
        part_from_copies(module)
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)
        weight = getattr(module, name).detach()
        weight.masked_fill_(weight == 0, 0.0)  # torch.ao's own parametrization leaves -0.0


def _weights_of(name: str, module: nn.Module) -> list[Linear]:
    """Return the linears of a module, or its weight matrix: an embedding may be tied to a linear."""
    own = "weight" in module._parameters or parametrize.is_parametrized(module, "weight")
    weight: Any = getattr(module, "weight", None) if own else None  # a property or a method may fail
    return linears_of(name, module) or ([Linear(name, module)] if weight is not None and weight.dim() == 2 else [])


def shrunk_note(model: Any) -> str:
    """Return the end of a message about a model that `shrink` has made smaller; empty for another model."""
    numbers = (getattr(getattr(model, "config", None), "compressx", None) or {}).get("shrunk")
    if not numbers:
        return ""
    sizes = ", ".join(f"{name} {now} of {was}" for name, (was, now) in numbers.items())
    return f"; shrink has made the model smaller ({sizes}), and masks of the original do not fit it"
