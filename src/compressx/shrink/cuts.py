"""What is left of a model whose units were pruned whole: the config of a smaller dense one, and cuts of its tensors.

Nothing is taken for granted of an architecture. The smaller config is built into a model without weights. Every tensor
that is left after cutting must have its name and shape there, and every setting of a module must be what it was.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.patterns import UnitKind, Units
from compressx.api.projections import head_size, parent
from compressx.api.pruner import Block
from compressx.models.architecture import Architecture, survey, text_config
from compressx.models.loading import build_empty
from compressx.models.units import router_of, rows_of
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.quiet import quiet_libraries
from compressx.shrink.config import renumber

_NOT_SETTINGS = ("training", "gradient_checkpointing")


@dataclass(frozen=True, eq=False)
class Kept:
    """Which units of one set stay.

    Attributes:
        units: the set.
        keep: bool [units], on the CPU.
    """

    units: Units
    keep: Tensor

    @property
    def index(self) -> Tensor:
        """The numbers of those that stay, int64."""
        return self.keep.nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Cuts:
    """What stays of the tensors of a model.

    Attributes:
        whole: the indices that stay, by parameter or buffer and dimension.
        experts: of parameters that hold experts, the indices that stay of each of them, by parameter and dimension of
            one expert.
        lists: of lists of modules that become shorter, the new number of each module that stays, by its old one.
    """

    whole: dict[str, dict[int, Tensor]]
    experts: dict[str, dict[int, dict[int, Tensor]]]
    lists: dict[str, dict[int, int]]

    def name(self, name: str) -> str | None:
        """Return the name of a tensor or module in the smaller model; None if it goes."""
        parts = name.split(".")
        for i, part in enumerate(name.split(".")):
            if (numbers := self.lists.get(".".join(name.split(".")[:i]))) is not None:
                if int(part) not in numbers:
                    return None
                parts[i] = str(numbers[int(part)])
        return ".".join(parts)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return what stays of a tensor of the larger model; it is the tensor itself if that is all of it."""
        for dim, experts in self.experts.get(name, {}).items():
            parts = [part.index_select(dim, experts[e].to(part.device)) for e, part in enumerate(tensor)]
            tensor = torch.stack(parts)
        for dim, index in self.whole.get(name, {}).items():
            tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor

    def all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what stays of some tensors, by name in the smaller model."""
        return {new: self.cut(n, x).detach() for n, x in tensors.items() if (new := self.name(n)) is not None}


@dataclass(frozen=True, eq=False)
class Smaller:
    """How a model becomes smaller.

    Attributes:
        config: of the smaller model.
        numbers: what changed in it: before and after, by name.
        cuts: what stays of its tensors.
        blocks: the names in the larger model of the decoder blocks that stay.
    """

    config: Any
    numbers: Mapping[str, tuple[int, int]]
    cuts: Cuts
    blocks: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {now} instead of {was}" for name, (was, now) in self.numbers.items())


def smaller(model: Any, kept: Sequence[Kept], dropped: Sequence[str] = ()) -> Smaller:
    """Find the config and the cuts of the smaller model, and build it without weights to see that all fits.

    Args:
        model: the model; only shapes and settings are read, so it may be on the meta device.
        kept: of each set of units that was pruned, which stay.
        dropped: names of the decoder blocks that go.

    Raises:
        UnsupportedModelError: the config cannot say it, with the reason.
    """
    found = survey(model)
    blocks = [
        Block(i, fqn, module, found.inside(fqn), (), text_config(model))
        for i, (fqn, module) in enumerate(found.blocks.items())
    ]
    left = [block for block in blocks if block.fqn not in dropped]
    remaining: dict[UnitKind, dict[str, int]] = {}
    for one in kept:
        remaining.setdefault(one.units.kind, {})[one.units.fqn] = int(one.keep.sum())
    config = copy.deepcopy(model.config)
    numbers = renumber(config.get_text_config(decoder=True), blocks, left, remaining)
    cuts = _cuts(blocks, kept, found)
    if dropped:
        cuts.lists[parent(blocks[0].fqn)] = {block.index: new for new, block in enumerate(left)}
    made = Smaller(config, numbers, cuts, tuple(block.fqn for block in left))
    small = build_like(model, made)
    _compare_tensors(model, made, small)
    _compare_settings(model, made, small)
    return made


def build_like(model: Any, made: Smaller) -> Any:
    """Build the smaller model with parameters on the meta device and computed buffers filled.

    Raises:
        UnsupportedModelError: transformers refuses the config.
    """
    try:
        with quiet_libraries():
            config = type(made.config).from_dict(made.config.to_dict())
            theirs = not type(model).__module__.startswith("transformers.")
            return build_empty(config, model.dtype, trust_remote_code=theirs)
    except Exception as error:  # validators of transformers raise many kinds
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(f"{type(model).__name__} cannot be built with {made}: {reason}") from error


def _cuts(blocks: Sequence[Block], kept: Sequence[Kept], found: Architecture) -> Cuts:
    cuts = Cuts({}, {}, {})
    for one in kept:
        block = next(b for b in blocks if f"{one.units.fqn}.".startswith(f"{b.fqn}."))
        if one.units.kind == "experts":
            _cut_router(cuts, block, one)
        if one.units.kind == "kv-groups":
            _cut_by_head(cuts, block, one)
        for name, own in one.units.owners.items():
            linear, index = found.linears[name], one.keep[own.unit].nonzero().flatten()
            if one.units.kind == "experts":
                if linear.expert is not None:
                    cuts.whole[parent(name)] = {0: one.index}
                else:
                    cuts.lists[one.units.fqn] = {old: new for new, old in enumerate(one.index.tolist())}
            elif linear.expert is not None:
                cuts.experts.setdefault(parent(name), {}).setdefault(own.dim, {})[linear.expert] = index
            else:
                cuts.whole[f"{name}.weight"] = {1 - own.dim if linear.transposed else own.dim: index}
                if own.dim == 0 and linear.bias is not None:
                    cuts.whole[f"{name}.bias"] = {0: index}
    return cuts


def _cut_router(cuts: Cuts, block: Block, one: Kept) -> None:
    name, router = router_of(block, one.units)
    for own in rows_of(router, one.units.count):
        cuts.whole[f"{name}.{own}"] = {0: one.index}


def _cut_by_head(cuts: Cuts, block: Block, one: Kept) -> None:
    """Cut what an attention has for each head beside its linears: gains [heads, head_dim] (Cohere), sinks [heads].

    Raises:
        UnsupportedModelError: a norm over the features of all heads, which would be divided by another mean.
    """
    home, count = block.submodule(one.units.fqn), one.units.count
    size = head_size(home, block.config)
    features = {own.unit.numel() for own in one.units.owners.values() if own.dim == 0}
    for fqn, module in home.named_modules(prefix=one.units.fqn):
        for own, x in module.named_parameters(recurse=False) if fqn not in one.units.owners else ():
            gains = x.dim() == 2 and x.shape[1] == size and len(x) % count == 0
            if gains or (module is home and x.dim() == 1 and len(x) * size in features):
                cuts.whole[f"{fqn}.{own}"] = {0: one.keep.repeat_interleave(len(x) // count).nonzero().flatten()}
            if x.dim() == 1 and len(x) > size and len(x) in features:
                raise UnsupportedModelError(
                    f"{fqn} is a norm over the {len(x)} features of all heads together, whose mean would be over fewer "
                    "if heads go; leave out shrink, or prune neurons"
                )


def _compare_tensors(model: nn.Module, made: Smaller, small: nn.Module) -> None:
    """Refuse a smaller model whose tensors are not those that are left."""
    theirs = {name: [*x.shape] for name, x in small.state_dict().items()}
    empty = {name: torch.empty_like(x, device="meta") for name, x in model.state_dict().items()}
    ours = {name: [*x.shape] for name, x in made.cuts.all(empty).items()}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise UnsupportedModelError(
                f"the config of {type(model).__name__} cannot describe what is left: with {made} it has {name} "
                f"{theirs.get(name, 'nowhere')}, and {ours.get(name, 'nothing')} is left; leave out shrink"
            )


def _compare_settings(model: nn.Module, made: Smaller, small: nn.Module) -> None:
    """Refuse a smaller model whose blocks differ in more than numbers of units: in scales, windows or tables."""
    for fqn in made.blocks:
        for name, module in model.get_submodule(fqn).named_modules(prefix=fqn):
            if (new := made.cuts.name(name)) is None:
                continue
            ours, theirs = _settings(module), _settings(small.get_submodule(new))
            if differ := sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)):
                raise UnsupportedModelError(
                    f"the config of {type(model).__name__} cannot describe what is left: with {made} {new} has "
                    f"{differ[0]} {theirs.get(differ[0])}, and in the larger model {name} has {ours.get(differ[0])}; "
                    "leave out shrink"
                )
    tables, stored = dict(small.named_buffers()), model.state_dict().keys()
    for name, table in model.named_buffers():
        new = made.cuts.name(name)
        if new not in tables or name in stored or table.is_meta:  # no layer may be left that needs it
            continue
        if not torch.equal(made.cuts.cut(name, table).cpu(), tables[new].cpu()):
            raise UnsupportedModelError(
                f"the config of {type(model).__name__} cannot describe what is left: with {made} its buffer {new} has "
                "other values; leave out shrink"
            )


def _settings(module: nn.Module) -> dict[str, float | str | bool]:
    """Return what decides how a module computes, but for whole numbers, which count units or blocks."""
    found = {n: x for n, x in vars(module).items() if not n.startswith("_") and n not in _NOT_SETTINGS}
    return {n: x for n, x in found.items() if isinstance(x, float | str | bool)}
