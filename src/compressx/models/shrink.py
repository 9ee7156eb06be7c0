"""The smaller dense model of one whose units were pruned whole: a changed config, and tensors without their zeros.

Nothing is taken for granted of an architecture. The smaller config is built into a model without weights, and every
tensor that is left after cutting must have its name and shape there; and in the end both models must compute the same.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.projections import find_projections, head_size, parent
from compressx.api.pruner import Block
from compressx.api.units import UnitKind, Units
from compressx.models.architecture import Architecture, survey, text_config
from compressx.models.loading import build_empty
from compressx.models.routing import router_of, rows_of
from compressx.models.units import find_units
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.quiet import quiet_libraries

_NEURONS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LAYERS = re.compile(r"layer|pattern")


@dataclass(frozen=True, eq=False)
class Kept:
    """Which units of one set stay.

    Attributes:
        units: the set.
        keep: bool [units], on the CPU.
    """

    units: Units
    keep: Tensor


@dataclass(frozen=True, eq=False)
class Smaller:
    """How a model becomes smaller.

    Attributes:
        config: of the smaller model.
        numbers: what changed in it: before and after, by name.
        cuts: the indices that stay, by parameter or buffer and dimension.
        within: of parameters that hold experts, the indices that stay in each of them, by parameter and dimension of
            one expert.
        blocks: the new number of each block that stays, by name.
    """

    config: Any
    numbers: Mapping[str, tuple[int, int]]
    cuts: Mapping[str, Mapping[int, Tensor]]
    within: Mapping[str, Mapping[int, Mapping[int, Tensor]]]
    blocks: Mapping[str, int] = field(default_factory=dict)

    def name(self, name: str) -> str | None:
        """Return a tensor's name in the smaller model; None if it is in a block that goes."""
        home = next(iter(self.blocks)).rpartition(".")[0]
        match = re.match(rf"{re.escape(home)}\.(\d+)\.", name)
        if match is None:
            return name
        new = self.blocks.get(f"{home}.{match[1]}")
        return None if new is None else f"{home}.{new}.{name[match.end() :]}"

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return what stays of a tensor of the larger model."""
        for dim, experts in self.within.get(name, {}).items():
            parts = [part.index_select(dim, experts[e].to(part.device)) for e, part in enumerate(tensor)]
            tensor = torch.stack(parts)
        for dim, index in self.cuts.get(name, {}).items():
            tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor


def smaller(model: Any, kept: Sequence[Kept], dropped: Sequence[str] = ()) -> Smaller:
    """Find the config and the cuts of the smaller model, and build it without weights to see that all fits.

    Args:
        model: the model; only shapes are read, so it may be on the meta device.
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
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    numbers: dict[str, tuple[int, int]] = {}
    for kind in dict.fromkeys(one.units.kind for one in kept):
        of = {one.units.fqn: one for one in kept if one.units.kind == kind}
        numbers |= _renumber(kind, text, *_counts(kind, left, of), left[0])
    if dropped:
        numbers |= _renumber_blocks(text, [i for i, block in enumerate(blocks) if block in left], len(blocks))
    cuts, within = _cuts(blocks, kept, found)
    names = {block.fqn: i for i, block in enumerate(left)}
    made = Smaller(config, numbers, cuts, within, names)
    _compare_shapes(model, made, build_like(model, made))
    return made


def shrunk(model: Any, made: Smaller) -> Any:
    """Build the smaller model, with the weights that stay.

    Args:
        model: the pruned model, with weights.
        made: what `smaller` returned.
    """
    small = build_like(model, made)
    tensors = {new: made.cut(n, x).detach().clone() for n, x in model.state_dict().items() if (new := made.name(n))}
    small.load_state_dict(tensors, strict=True, assign=True)
    small.tie_weights()
    small.generation_config = copy.deepcopy(model.generation_config)
    if (conversions := getattr(model, "_weight_conversions", None)) is not None:
        small._weight_conversions = conversions
    return small.eval()


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
        told = ", ".join(f"{name} {now} instead of {was}" for name, (was, now) in made.numbers.items())
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be built with {told}: {reason}; choose another sparsity, or leave out "
            "shrink"
        ) from error


def difference(model: Any, small: Any, tokens: Tensor) -> float:
    """Return how far the logits of two models are apart, relative to those of the first.

    Args:
        model: the pruned model.
        small: the smaller one.
        tokens: ids [batch, tokens].

    Returns:
        The norm of the difference over the norm of the logits, and `tolerance` of the dtype is what rounding explains.
    """
    with torch.no_grad():
        of = [m(tokens.to(next(m.parameters()).device), use_cache=False).logits.double() for m in (model, small)]
    return float((of[1] - of[0]).norm() / of[0].norm().clamp_min(torch.finfo(torch.float64).tiny))


def tolerance(dtype: torch.dtype) -> float:
    """Return what `difference` may be at most: products of fewer numbers are added up in another order."""
    return float(torch.finfo(dtype).eps ** 0.5)


def _counts(kind: UnitKind, blocks: Sequence[Block], kept: Mapping[str, Kept]) -> tuple[int, int]:
    """Return the numbers of units before and after, which have to be the same everywhere."""
    counts: dict[tuple[int, int], str] = {}
    for block in blocks:
        try:
            units = find_units(kind, block)
        except UnsupportedModelError:
            continue
        for one in units:
            now = int(kept[one.fqn].keep.sum()) if one.fqn in kept else one.count
            counts.setdefault((one.count, now), one.fqn)
    if len(counts) > 1:
        (first, where), (other, there), *_ = counts.items()
        raise UnsupportedModelError(
            f"the config has one number of {kind} for all blocks, but {where} would have {first[1]} of {first[0]} and "
            f"{there} {other[1]} of {other[0]}; prune all blocks alike, or leave out shrink"
        )
    return next(iter(counts))


def _renumber(kind: UnitKind, text: Any, before: int, after: int, block: Block) -> dict[str, tuple[int, int]]:
    """Change the numbers of one kind in the config; return what changed."""
    if kind == "kv-groups":
        return _renumber_heads(text, before, after, block)
    names = [n for n in (_NEURONS if kind == "neurons" else _EXPERTS) if getattr(text, n, None) == before]
    if kind == "neurons" and not names and getattr(text, "n_inner", before) is None:
        names = ["n_inner"]  # GPT-2 and its like: four times the width if it is not said
    if not names:
        raise UnsupportedModelError(
            f"{type(text).__name__} has no number for its {before} {kind}, so it cannot describe a model with {after}; "
            "leave out shrink"
        )
    if kind == "experts" and (chosen := getattr(text, "num_experts_per_tok", 1)) > after:
        raise UnsupportedModelError(f"{after} experts are left, of which each token needs {chosen}; drop fewer")
    for name in names:
        setattr(text, name, after)
    return dict.fromkeys(names, (before, after))


def _renumber_heads(text: Any, before: int, after: int, block: Block) -> dict[str, tuple[int, int]]:
    size = head_size(block.submodule(find_projections(block).attention), block.config)
    heads = int(text.num_attention_heads)
    numbers = {"num_attention_heads": (heads, heads * after // before)}
    if getattr(text, "num_key_value_heads", None) is not None:
        numbers["num_key_value_heads"] = (before, after)
    for name, (_, now) in numbers.items():
        setattr(text, name, now)
    if not isinstance(getattr(type(text), "head_dim", None), property):  # as Falcon's, which computes it
        text.head_dim = size
    return numbers


def _renumber_blocks(text: Any, left: Sequence[int], depth: int) -> dict[str, tuple[int, int]]:
    """Change the number of blocks, and the lists that have an entry for each."""
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == depth and _LAYERS.search(name):
            setattr(text, name, [value[i] for i in left])
    text.num_hidden_layers = len(left)
    return {"num_hidden_layers": (depth, len(left))}


def _cuts(
    blocks: Sequence[Block], kept: Sequence[Kept], found: Architecture
) -> tuple[dict[str, dict[int, Tensor]], dict[str, dict[int, dict[int, Tensor]]]]:
    """Return what stays of each parameter and buffer, and of each expert in one that holds several."""
    cuts: dict[str, dict[int, Tensor]] = {}
    within: dict[str, dict[int, dict[int, Tensor]]] = {}
    for one in kept:
        block = next(b for b in blocks if one.units.fqn.startswith(f"{b.fqn}.") or one.units.fqn == b.fqn)
        for name, index in _beside(block, one):
            cuts.setdefault(name, {})[0] = index
        for name, own in one.units.owners.items():
            linear, index = found.linears[name], one.keep[own.unit].nonzero().flatten()
            if one.units.kind == "experts":
                cuts.setdefault(parent(name), {})[0] = one.keep.nonzero().flatten()
            elif linear.expert is not None:
                within.setdefault(parent(name), {}).setdefault(own.dim, {})[linear.expert] = index
            else:
                cuts.setdefault(f"{name}.weight", {})[1 - own.dim if linear.transposed else own.dim] = index
                if own.dim == 0 and linear.bias is not None:
                    cuts.setdefault(f"{name}.bias", {})[0] = index
    return cuts, within


def _beside(block: Block, one: Kept) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of tensors beside the linears that have a row for each unit, and the rows that stay."""
    if one.units.kind == "experts":
        name, router = router_of(block, one.units)
        for own in rows_of(router, one.units.count):
            yield f"{name}.{own}", one.keep.nonzero().flatten()
    if one.units.kind == "kv-groups":  # gains of a norm for each head, as Cohere has
        home = block.submodule(one.units.fqn)
        size = head_size(home, block.config)
        linears = {f"{n}.weight" for n in one.units.owners}
        for own, parameter in home.named_parameters():
            name = f"{one.units.fqn}.{own}"
            if name not in linears and parameter.dim() == 2 and parameter.shape[1] == size:
                heads = one.keep.repeat_interleave(parameter.shape[0] // one.units.count)
                yield name, heads.nonzero().flatten()


def _compare_shapes(model: nn.Module, made: Smaller, small: nn.Module) -> None:
    """Refuse a smaller model whose tensors are not those that are left."""
    theirs = {name: tuple(x.shape) for name, x in small.state_dict().items()}
    ours = {}
    for name, tensor in model.state_dict().items():
        new = made.name(name)
        if new is not None:
            shape = list(tensor.shape)
            for dim, experts in made.within.get(name, {}).items():
                shape[dim + 1] = len(next(iter(experts.values())))
            for dim, index in made.cuts.get(name, {}).items():
                shape[dim] = len(index)
            ours[new] = tuple(shape)
    told = ", ".join(f"{name} {now}" for name, (_, now) in made.numbers.items())
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise UnsupportedModelError(
                f"{type(model).__name__} with {told} has {name} {_shape(theirs.get(name))}, but "
                f"{_shape(ours.get(name))} is left of it; its config cannot describe the smaller model, so leave out "
                "shrink"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "of no shape" if shape is None else str([*shape])
