"""The numbers of a config that change when units go: how many neurons, heads, experts and blocks there are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compressx.api.patterns import UnitKind
from compressx.api.projections import count_of, find_projections, head_size
from compressx.api.pruner import Block
from compressx.models.units import find_units
from compressx.runtime.errors import UnsupportedModelError

_NEURONS = re.compile(r"(.*_)?intermediate_size|ffn_dim|n_inner|ffn_hidden_size")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_OF_EACH_LAYER = re.compile(r"layer|pattern")
_LEADING = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")
_NUMBERS_OF_LAYERS = ("mlp_only_layers",)


def renumber(
    config: Any, blocks: Sequence[Block], left: Sequence[Block], remaining: Mapping[UnitKind, Mapping[str, int]]
) -> dict[str, tuple[int, int]]:
    """Change a config in place, so that it describes what is left.

    Args:
        config: of the model's text part.
        blocks: all decoder blocks.
        left: those that stay.
        remaining: by kind and by the name of a set of units that was pruned, how many of them stay.

    Returns:
        By name, the numbers before and after.

    Raises:
        UnsupportedModelError: the config has no such number, or one for blocks that are no longer alike.
    """
    numbers: dict[str, tuple[int, int]] = {}
    for kind, now in remaining.items():
        counts = _counts(kind, left, now)
        if kind == "kv-groups":
            attending = next(block for block in left if any(_sets(kind, block)))  # in hybrids not every one
            numbers |= _renumber_heads(config, *_only(counts), attending)
        elif kind == "experts":
            numbers |= _renumber_experts(config, *_only(counts))
        else:
            numbers |= _renumber_neurons(config, counts)
    if len(left) < len(blocks):
        numbers |= _renumber_blocks(config, [i for i, block in enumerate(blocks) if block in left], len(blocks))
    return numbers


def _counts(kind: UnitKind, blocks: Sequence[Block], remaining: Mapping[str, int]) -> dict[int, int]:
    """Return how many units stay, by how many there were: one number in the config, so the same everywhere."""
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


def _only(counts: Mapping[int, int]) -> tuple[int, int]:
    if len(counts) > 1:
        raise UnsupportedModelError(
            f"blocks differ: they have {' and '.join(map(str, counts))} units of one kind; leave out shrink"
        )
    return next(iter(counts.items()))


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


def _renumber_experts(config: Any, before: int, after: int) -> dict[str, tuple[int, int]]:
    names = [n for n in _EXPERTS if getattr(config, n, None) == before]
    return _changed(config, names, before, after) or _refused(config, "experts", before, after)


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
