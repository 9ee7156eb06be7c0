"""What is left of a model whose units were pruned whole: the config of a smaller dense one, and cuts of its tensors.

Of a config the numbers of neurons, heads, experts and blocks change. Nothing is taken for granted of an architecture:
the smaller config is built into a model without weights, where every tensor that is left after cutting must have its
name and shape, and every setting of a module must be what it was.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.patterns import UnitKind, Units
from compressx.api.projections import count_of, find_projections, head_size, parent
from compressx.api.pruner import Block
from compressx.models.architecture import Architecture, architecture_of, text_config
from compressx.models.loading import build_empty
from compressx.models.units import find_units, router_of, rows_of
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.quiet import quiet_libraries

_NOT_SETTINGS = ("training", "gradient_checkpointing")
_NEURONS = re.compile(r"(.*_)?intermediate_size|ffn_dim|n_inner|ffn_hidden_size")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_OF_EACH_LAYER = re.compile(r"layer|pattern")
_LEADING = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")
_NUMBERS_OF_LAYERS = ("mlp_only_layers",)


@dataclass(frozen=True, eq=False)
class RemainingUnits:
    """Which units of one set are kept.

    Attributes:
        units: the set.
        keep: bool [units], on the CPU.
    """

    units: Units
    keep: Tensor

    @property
    def index(self) -> Tensor:
        """The numbers of the kept units, int64."""
        return self.keep.nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Cuts:
    """What is kept of the tensors of a model.

    Attributes:
        whole: the kept indices, by parameter or buffer and dimension.
        experts: of parameters that hold experts, the kept indices of each, by parameter and dimension of one expert.
        lists: of lists of modules that become shorter, the new number of each kept module, by its old one.
    """

    whole: dict[str, dict[int, Tensor]]
    experts: dict[str, dict[int, dict[int, Tensor]]]
    lists: dict[str, dict[int, int]]

    def name(self, name: str) -> str | None:
        """Return the name of a tensor or module in the smaller model; None if it is removed."""
        parts = name.split(".")
        for i, part in enumerate(name.split(".")):
            if (numbers := self.lists.get(".".join(name.split(".")[:i]))) is not None:
                if int(part) not in numbers:
                    return None
                parts[i] = str(numbers[int(part)])
        return ".".join(parts)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return what is kept of a tensor of the larger model; it is the tensor itself if that is all of it."""
        for dim, experts in self.experts.get(name, {}).items():
            parts = [part.index_select(dim, experts[e].to(part.device)) for e, part in enumerate(tensor)]
            tensor = torch.stack(parts)
        for dim, index in self.whole.get(name, {}).items():
            tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor

    def all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is kept of some tensors, by name in the smaller model."""
        return {new: self.cut(n, x).detach() for n, x in tensors.items() if (new := self.name(n)) is not None}


@dataclass(frozen=True, eq=False)
class Smaller:
    """How a model becomes smaller.

    Attributes:
        config: of the smaller model.
        numbers: what changed in it: before and after, by name.
        cuts: what is kept of its tensors.
        blocks: the names in the larger model of the kept decoder blocks.
    """

    config: Any
    numbers: Mapping[str, tuple[int, int]]
    cuts: Cuts
    blocks: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {now} instead of {was}" for name, (was, now) in self.numbers.items())


def smaller(model: Any, kept: Sequence[RemainingUnits], dropped: Sequence[str] = ()) -> Smaller:
    """Find the config and the cuts of the smaller model, and build it without weights to see that all fits.

    Args:
        model: the model; only shapes and settings are read, so it may be on the meta device.
        kept: of each set of units that was pruned, which are kept.
        dropped: names of the removed decoder blocks.
    """
    found, blocks = _surveyed(model)
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
    theirs = {name: [*x.shape] for name, x in small.state_dict().items()}
    ours = {name: [*x.shape] for name, x in cuts.all(_empty(model)).items()}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            has = f"it has {name} {theirs.get(name, 'nowhere')}, and {ours.get(name, 'nothing')} is left"
            raise _undescribed(model, made, has)
    _compare_settings(model, made, small)
    return made


def remaining_tensors(model: Any, kept: Sequence[RemainingUnits]) -> dict[str, Tensor]:
    """Return what is left of each tensor of a model, by name and without values, whether or not a config can say it."""
    found, blocks = _surveyed(model)
    return _cuts(blocks, kept, found).all(_empty(model))


def _empty(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.empty_like(x, device="meta") for name, x in model.state_dict().items()}


def _surveyed(model: Any) -> tuple[Architecture, list[Block]]:
    found, config = architecture_of(model), text_config(model)
    blocks = enumerate(found.blocks.items())
    return found, [Block(i, fqn, module, found.inside(fqn), (), config) for i, (fqn, module) in blocks]


def build_like(model: Any, made: Smaller) -> Any:
    """Build the smaller model with parameters on the meta device and computed buffers filled."""
    try:
        with quiet_libraries():
            config = type(made.config).from_dict(made.config.to_dict())
            theirs = not type(model).__module__.startswith("transformers.")
            return build_empty(config, model.dtype, trust_remote_code=theirs)
    except Exception as error:  # validators of transformers raise many kinds
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(f"{type(model).__name__} cannot be built with {made}: {reason}") from error


def _cuts(blocks: Sequence[Block], kept: Sequence[RemainingUnits], found: Architecture) -> Cuts:
    cuts = Cuts({}, {}, {})
    for one in kept:
        block = next(b for b in blocks if f"{one.units.fqn}.".startswith(f"{b.fqn}."))
        if one.units.kind == "experts":
            fqn, router = router_of(block, one.units)
            for row in rows_of(router, one.units.count):
                cuts.whole[f"{fqn}.{row}"] = {0: one.index}
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


def _cut_by_head(cuts: Cuts, block: Block, one: RemainingUnits) -> None:
    """Cut what an attention has for each head beside its linears: gains [heads, head_dim] (Cohere), sinks [heads]."""
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


def _compare_settings(model: nn.Module, made: Smaller, small: nn.Module) -> None:
    """Refuse a smaller model whose blocks differ in more than numbers of units: in scales, windows or tables."""
    for fqn in made.blocks:
        for name, module in model.get_submodule(fqn).named_modules(prefix=fqn):
            if (new := made.cuts.name(name)) is None:
                continue
            ours, theirs = _settings(module), _settings(small.get_submodule(new))
            if differ := sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)):
                was, now = ours.get(differ[0]), theirs.get(differ[0])
                raise _undescribed(
                    model, made, f"{new} has {differ[0]} {now}, and in the larger model {name} has {was}"
                )
    tables, stored = dict(small.named_buffers()), model.state_dict().keys()
    for name, table in model.named_buffers():
        new = made.cuts.name(name)
        if new not in tables or name in stored or table.is_meta:  # no layer may be left that needs it
            continue
        if not torch.equal(made.cuts.cut(name, table).cpu(), tables[new].cpu()):
            raise _undescribed(model, made, f"its buffer {new} has other values")


def _undescribed(model: nn.Module, made: Smaller, has: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the config of {type(model).__name__} cannot describe what is left: with {made} {has}; leave out shrink"
    )


def _settings(module: nn.Module) -> dict[str, float | str | bool]:
    """Return what decides how a module computes, but for whole numbers, which count units or blocks."""
    found = {n: x for n, x in vars(module).items() if not n.startswith("_") and n not in _NOT_SETTINGS}
    return {n: x for n, x in found.items() if isinstance(x, float | str | bool)}


def renumber(
    config: Any, blocks: Sequence[Block], left: Sequence[Block], remaining: Mapping[UnitKind, Mapping[str, int]]
) -> dict[str, tuple[int, int]]:
    """Change a config in place, so that it describes what is left; return the numbers before and after, by name.

    Args:
        config: of the model's text part.
        blocks: all decoder blocks.
        left: those that are kept.
        remaining: by kind and by the name of a set of units that was pruned, how many of them are kept.
    """
    numbers: dict[str, tuple[int, int]] = {}
    for kind, now in remaining.items():
        counts = _counts(kind, left, now)
        if kind == "neurons":
            numbers |= _renumber_neurons(config, counts)
            continue
        if len(counts) > 1:
            raise UnsupportedModelError(
                f"blocks differ: they have {' and '.join(map(str, counts))} units of one kind; leave out shrink"
            )
        ((before, after),) = counts.items()
        if kind == "experts":
            names = [n for n in _EXPERTS if getattr(config, n, None) == before]
            numbers |= _changed(config, names, before, after) or _refused(config, kind, before, after)
        else:
            attending = next(block for block in left if any(_sets(kind, block)))  # in hybrids not every one
            numbers |= _renumber_heads(config, before, after, attending)
    if len(left) < len(blocks):
        numbers |= _renumber_blocks(config, [i for i, block in enumerate(blocks) if block in left], len(blocks))
    return numbers


def _counts(kind: UnitKind, blocks: Sequence[Block], remaining: Mapping[str, int]) -> dict[int, int]:
    """Return how many units are kept, by how many there were: one number in the config, so the same everywhere."""
    counts: dict[int, tuple[int, str]] = {}
    for block in blocks:
        for fqn, count in _sets(kind, block):
            now = remaining.get(fqn, count)
            other, there = counts.setdefault(count, (now, fqn))
            if other != now:
                raise UnsupportedModelError(
                    f"the config has one number of {kind} for all blocks, but {there} would have {other} of {count} "
                    f"and {fqn} {now}; prune all blocks alike, or leave out shrink"
                )
    return {count: now for count, (now, _) in counts.items()}


def _sets(kind: UnitKind, block: Block) -> Iterator[tuple[str, int]]:
    try:
        for units in find_units(kind, block):
            yield units.fqn, units.count
    except UnsupportedModelError:  # dense blocks of a mixture have no experts
        return


def _renumber_neurons(config: Any, counts: Mapping[int, int]) -> dict[str, tuple[int, int]]:
    """Change every width of a feed-forward part that is one of the counts; shapes tell later whether that is enough."""
    numbers: dict[str, tuple[int, int]] = {}
    mapped = [own for known, own in config.attribute_map.items() if _NEURONS.fullmatch(known)]
    widths = {n: value for n, value in config.to_dict().items() if _NEURONS.fullmatch(n) or n in mapped}  # as yet
    for before, after in counts.items():
        names = [n for n, value in widths.items() if value == before]
        if not names and getattr(config, "n_inner", before) is None:
            names = ["n_inner"]  # GPT-2 and its like: four times the width if it is not said
        numbers |= _changed(config, names, before, after)
    return numbers or _refused(config, "neurons", *next(x for x in counts.items() if x[0] != x[1]))


def _renumber_heads(config: Any, before: int, after: int, block: Block) -> dict[str, tuple[int, int]]:
    """Change the numbers of heads; their size, which many configs leave to be divided out, is said from now on."""
    size = head_size(block.submodule(find_projections(block).attention), block.config)
    heads = count_of(config, "num_attention_heads")
    names = [n for n in _KEY_HEADS if getattr(config, n, None) == before]
    numbers = _changed(config, ["num_attention_heads"], heads, heads * after // before)
    try:
        config.head_dim = size
    except AttributeError as error:  # a property, as Falcon's
        raise UnsupportedModelError(
            f"{type(config).__name__} divides the size of a head out of the width, so it cannot describe a model with "
            f"{heads * after // before} heads of {size} features; leave out shrink, or prune neurons"
        ) from error
    return numbers | _changed(config, names, before, after)


def _renumber_blocks(config: Any, left: Sequence[int], depth: int) -> dict[str, tuple[int, int]]:
    """Change the number of blocks, the lists with an entry for each, and what counts or names some of them."""
    for name, value in config.to_dict().items():
        if name in _NUMBERS_OF_LAYERS and isinstance(value, list):
            setattr(config, name, [new for new, old in enumerate(left) if old in value])
        elif name in _LEADING and isinstance(value, int):
            setattr(config, name, sum(old < value for old in left))
        elif isinstance(value, list) and len(value) == depth and _OF_EACH_LAYER.search(name):
            setattr(config, name, [value[old] for old in left])
    return _changed(config, ["num_hidden_layers"], depth, len(left))


def _changed(config: Any, names: Sequence[str], before: int, after: int) -> dict[str, tuple[int, int]]:
    if before == after:
        return {}
    for name in names:
        setattr(config, name, after)
    return dict.fromkeys(names, (before, after))


def _refused(config: Any, kind: UnitKind, before: int, after: int) -> dict[str, tuple[int, int]]:
    raise UnsupportedModelError(
        f"{type(config).__name__} has no number for its {before} {kind}, so it cannot describe a model with {after}; "
        "leave out shrink, or map a name that compressx knows to its own in attribute_map"
    )
