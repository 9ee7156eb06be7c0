"""Read the attention geometry of a decoder block, and refuse what attention pruning does not support."""

from __future__ import annotations

import copy
import inspect
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from compressx import (
    Block,
    FixedMask,
    Pattern,
    Projections,
    RecipeError,
    Rows,
    UnsupportedModelError,
    find_projections,
    head_size,
)
from compressx_attnprune.attention import (
    Attention,
    Norm,
    Projection,
    gated,
    mixed_by_rows,
    quarter_turn,
    queries_and_keys,
    values,
)

_AGREEMENT = 1e-3  # relative difference of two float32 outputs of one attention


def projections_of(block: Block, taken: Mapping[str, object] | None = None) -> Projections:
    """Find the projections of a block's attention, and say what to do where there are none.

    Needs no weights. `taken` has the linears that a rule selects there, for messages.
    """
    if not block.fqn:
        raise RecipeError(
            f"attnprune prunes attention, and this rule targets {', '.join(taken or block.linears)} outside the "
            'decoder blocks; write targets: ["*.q_proj", "*.k_proj"]'
        )
    try:
        return find_projections(block)
    except UnsupportedModelError as error:
        _refuse(str(error))


def check(block: Block, patterns: Mapping[str, Pattern]) -> None:
    """Refuse a block, or a selection of its linears, that attention pruning does not support.

    A rule must target the query and the key projection. Where one weight fuses query, key and value it must target that
    weight alone. Query and key rows are then pruned for the attention matrix. Value rows of a fused weight and gate
    rows of a query projection, which do not affect that matrix, are pruned by an ordinary second-order update, all
    within the pattern of the weight.

    Needs neither weights nor calls: it is called on a skeleton when a recipe is planned.
    """
    projections = projections_of(block, patterns)
    names = list(dict.fromkeys((projections.query.name, projections.key.name)))  # one when fused
    targets = ", ".join(f'"*.{n.rpartition(".")[2]}"' for n in names)
    wanted = f"write targets: [{targets}]"
    which = "the weight that holds queries and keys" if projections.fused else "the query and the key projection"
    fault = ""
    if extra := [n for n in patterns if n not in names]:
        fault = (
            f"only {which}, but this rule also targets {', '.join(extra)}; {wanted} and add another rule for the rest "
            "after it"
        )
    elif missing := [n for n in names if n not in patterns]:
        fault = (
            f"{which} together, but this rule does not target {missing[0]}; {wanted}, before any other rule that "
            "matches one of them"
        )
    elif len({patterns[n] for n in names if not isinstance(patterns[n], FixedMask)}) > 1:  # fixed masks always differ
        given = " and ".join(f"{n} {patterns[n]}" for n in names)
        fault = f"{which} with the same pattern, but {given} were asked for; give both the same sparsity"
    if fault:
        raise RecipeError(f"attnprune prunes {fault}")
    _check_structure(block, projections)


def describe(block: Block) -> Attention:
    """Read the geometry of a block's attention in float32, with the rotary embedding of its recorded calls."""
    projections = projections_of(block)
    _check_structure(block, projections)
    module = block.submodule(projections.attention)
    head_dim = head_size(module, block.config)
    query, key = (
        Projection(rows.count // head_dim, rows.bias, read_norm(module, names, rows.count // head_dim, head_dim))
        for rows, names in ((projections.query, QUERY_NORMS), (projections.key, KEY_NORMS))
    )
    interleaved = bool(_turns_neighbours(module))
    rotary, sinks = _rotary(block, projections, interleaved), getattr(module, "sinks", None)
    return Attention(
        query=query,
        key=key,
        head_dim=head_dim,
        scaling=float(getattr(module, "scaling", head_dim**-0.5)),
        rotary=None if rotary is None else (rotary[0].float(), rotary[1].float()),
        window=_window(module, block.config),
        softcap=getattr(module, "attn_logit_softcapping", None),
        rotary_interleaved=interleaved,
        sinks=None if sinks is None else sinks.detach().float(),  # by the name that all of transformers' models use
        value_norm=read_norm(module, VALUE_NORMS, key.heads, projections.value.count // key.heads),
        gate=None if (gate := projections.gate) is None else (gate.weight.clone(), gate.bias),
    )


@torch.no_grad()
def verify(block: Block, attention: Attention, x: Tensor) -> None:
    """Check that the geometry reproduces the model's attention output on one sequence.

    The module tree does not show everything (layout of a fused weight, what gates do, biases on the scores), but the
    output does. Both sides run in float32, so that rounding in the model's dtype does not matter. Inputs of the query
    projection are [batch, tokens, in_features].
    """
    projections = projections_of(block)
    x = x[:1].float()
    q, k = queries_and_keys(attention, x, (projections.query.weight, projections.key.weight))
    v = values(attention, x, projections.value.weight, projections.value.bias)  # [1, h_kv, tokens, value_dim]
    attended = gated(attention, x, mixed_by_rows(attention, q, k, v).transpose(1, 2).flatten(2))
    output = Rows(projections.output)
    ours = nn.functional.linear(attended, output.weight, output.bias)
    theirs = attend(block, projections, arguments(block), x)
    # Outputs may be zero for zero inputs.
    difference = float((ours - theirs).norm() / theirs.norm().clamp_min(torch.finfo(torch.float32).tiny))
    if not difference <= _AGREEMENT:
        layout = f", or {projections.query.name} has an unsupported row order" if projections.fused else ""
        _refuse(
            f"{_named(block, projections)} is not softmax(scale * q k^T + mask) as attnprune computes it{layout}: "
            f"the outputs differ by {difference:.2%} on a calibration sequence"
        )


def _check_structure(block: Block, projections: Projections) -> None:
    name, query, key = projections.attention, projections.query, projections.key
    module = block.submodule(name)
    head_dim = head_size(module, block.config)
    heads, key_heads = query.count // head_dim, key.count // head_dim
    declared = getattr(block.config, "num_attention_heads", heads)
    mixed, value = projections.output.in_features, projections.value.count
    sinks = getattr(module, "sinks", None)
    faults = {
        f"{query.name} and {key.name} have {query.count} and {key.count} outputs, which is not {declared} query heads "
        f"of {head_dim} features; attnprune supports no compressed heads":
            (heads * head_dim, key_heads * head_dim) != (query.count, key.count) or heads != declared,
        f"{name}: {heads} query heads cannot share {key_heads} key heads": key_heads == 0 or heads % key_heads,
        f"{name}: {value} value features in {key_heads} heads, shared by {heads} query heads, do not match the {mixed} "
        f"inputs of {projections.output.name}": mixed * key_heads != value * heads,
        f"{name} is not causal; attnprune supports only causal attention": not getattr(module, "is_causal", True),
        f"{_named(block, projections)} adds {(bias := _score_bias(module, block.config))} to its scores; attnprune "
        "supports rotary and learned positions": bias,
        f"{_named(block, projections)} has a rotary embedding that rotates neither adjacent features nor features half "
        "a head apart": _turns_neighbours(module) is None,
        f"{name}.sinks has shape {tuple(getattr(sinks, 'shape', ()))}, not one for each of {heads} heads":
            sinks is not None and sinks.shape != (heads,),
        **{f"{name}.{wrong}": wrong for wrong in (unknown_norm(module, QUERY_NORMS, heads, head_dim),
                                                 unknown_norm(module, KEY_NORMS, key_heads, head_dim))},
    }  # fmt: skip
    if fault := next((sentence for sentence, holds in faults.items() if holds), None):
        _refuse(fault)


def _score_bias(module: nn.Module, config: Any) -> str | None:
    """Describe what the attention adds to its scores, judging by the parameters of its forward."""
    taken = inspect.signature(module.forward).parameters
    if "alibi" in taken and getattr(config, "alibi", True):  # Falcon exists with and without it
        return "ALiBi"
    return "a position bias" if "position_bias" in taken else None


def _window(module: nn.Module, config: Any) -> int | None:
    """Return the layer's sliding window from the module if it has one, otherwise from the config; None without one."""
    home = module if hasattr(module, "sliding_window") else config
    window: int | None = getattr(home, "sliding_window", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    stated = kinds is None or index is None or home is module or kinds[index] == "sliding_attention"
    return window if stated and getattr(module, "is_sliding", True) else None


def _turns_neighbours(module: nn.Module) -> bool | None:
    """Return whether the rotary embedding rotates adjacent features; None if it is neither of the known kinds."""
    turn = _turn(module)
    probe = torch.arange(4.0, device="cpu").view(1, 1, 1, 4)
    if turn is None or torch.equal(turn(probe), quarter_turn(probe, interleaved=False)):
        return False
    return True if torch.equal(turn(probe), quarter_turn(probe, interleaved=True)) else None


def _turn(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the function by which the rotary embedding turns pairs; None where it has no such function."""
    home = sys.modules[type(module).__module__]
    return getattr(home, "rotate_half", getattr(home, "rotate_every_two", None))


def _rotary(block: Block, projections: Projections, interleaved: bool) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine [tokens, rotary_dim], aligned with the features that they multiply."""
    given = arguments(block)
    embeddings = given.get("position_embeddings")
    table = getattr(block.submodule(projections.attention), "embed_positions", None)
    if embeddings is None and isinstance(table, Tensor):  # GPT-J: sines and cosines in one table, one entry per pair
        sin, cos = table[given["position_ids"][0]].repeat_interleave(2, dim=-1).chunk(2, dim=-1)
        return cos, sin
    if embeddings is None:
        return None
    if not isinstance(embeddings, tuple | list) or len(embeddings) != 2:
        _refuse(
            f"{_named(block, projections)} takes its rotary embedding as {type(embeddings).__name__}; attnprune "
            "supports a pair of cosine and sine"
        )
    if _ignores_positions(block, projections):
        return None
    cos, sin = (table[0] for table in embeddings)  # [batch or 1, tokens, rotary_dim]
    if _turn(block.submodule(projections.attention)) is None:  # GPT-OSS: one entry per pair
        return cos.repeat(1, 2), sin.repeat(1, 2)
    if interleaved and not torch.equal(cos[:, 0::2], cos[:, 1::2]):
        # GLM's tables repeat each entry in their second half; only the first is used.
        cos, sin = (table.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for table in (cos, sin))
    return cos, sin


@torch.no_grad()
def _ignores_positions(block: Block, projections: Projections) -> bool:
    """Return whether this layer ignores the position embeddings that it is passed, where layers differ."""
    module = block.submodule(projections.attention)
    if hasattr(module, "use_rope"):  # SmolLM3
        return not module.use_rope
    if len(set(getattr(block.config, "layer_types", None) or ())) < 2:
        return False
    # Cohere 2 and EXAONE 4 have no attribute for it: compare outputs with and without rotation.
    given = arguments(block)
    cos, sin = given["position_embeddings"]
    x = torch.randn(1, cos.shape[1], projections.query.linear.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(cos.device)
    still = {**given, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
    return torch.equal(attend(block, projections, given, x), attend(block, projections, still, x))


def attend(block: Block, projections: Projections, arguments: Mapping[str, Any], x: Tensor) -> Tensor:
    """Run the attention module in float32 on [1, tokens, in_features] with its block's arguments."""
    module = copy.deepcopy(block.submodule(projections.attention)).float()
    known = dict(list(inspect.signature(module.forward).parameters.items())[1:])
    given = {n: _first(v) for n, v in arguments.items() if n in known and "past" not in n}
    needed = [n for n, p in known.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if missing := [n for n in needed if n not in given]:
        _refuse(
            f"{_named(block, projections)} needs {', '.join(missing)} from within its block, so attnprune cannot run "
            "it alone to verify that it is softmax attention"
        )
    attended = module(x, **given)
    result: Tensor = attended[0] if isinstance(attended, tuple | list) else attended
    return result


def arguments(block: Block) -> dict[str, Any]:
    """Return the arguments of the block's first call by name, without the hidden states."""
    call = block.calls[0]
    names = list(inspect.signature(block.module.forward).parameters)[1:]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _first(value: Any) -> Any:
    """Return the first sequence of a call's tensor or tuple of tensors, in float32."""
    if isinstance(value, Tensor):
        return value[:1].float() if value.is_floating_point() else value[:1]
    if isinstance(value, UserDict):  # keys and values for later blocks: what is run here must not change them
        return type(value)({name: _first(kept) for name, kept in value.items()})
    return tuple(_first(v) for v in value) if isinstance(value, tuple) else value


def _refuse(fault: str) -> NoReturn:
    raise UnsupportedModelError(f"{fault}; leave it to a pruner of single linears, such as sparsegpt or wanda")


def _named(block: Block, projections: Projections) -> str:
    """Name the attention and its class, for messages."""
    return f"{projections.attention} ({type(block.submodule(projections.attention)).__name__})"


QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
VALUE_NORMS = ("v_norm",)
_LAST = ("query_layernorm", "key_layernorm")
"""Names of norms that come after the rotary embedding."""


def unknown_norm(module: nn.Module, names: tuple[str, ...], heads: int, head_dim: int) -> str | None:
    """Describe a side's norm that `read_norm` does not support, or return None; needs no weights."""
    name, norm = _find(module, names)
    if norm is None or _input_shape(norm, heads, head_dim) is not None:
        return None
    shapes = ", ".join(str(s) for s in _weight_shapes(norm)) or "none"
    return (
        f"{name} has weights of shape {shapes}; attnprune supports norms over one head, ({head_dim},), or over all "
        f"{heads} together, ({heads * head_dim},)"
    )


@torch.no_grad()
def read_norm(module: nn.Module, names: tuple[str, ...], heads: int, head_dim: int) -> Norm | None:
    """Measure a side's norm in float32; None when the module has none.

    Norms may scale by the weight or by one plus the weight, subtract the mean, or cover all heads at once. The weight's
    shape and the outputs for three vectors determine which.
    """
    name, found = _find(module, names)
    shape = None if found is None else _input_shape(found, heads, head_dim)
    if found is None or shape is None:
        return None
    norm = copy.deepcopy(found).float()
    ones = torch.ones(shape, device=next(module.parameters()).device)
    signs = ones.clone()
    signs[..., 1::2] = -1.0  # mean 0 and mean square 1, so subtracting the mean has no effect
    at_zero, at_ones, at_signs = (norm(u) for u in (torch.zeros_like(ones), ones, signs))
    stated = (getattr(part, name, None) for part in norm.modules() for name in ("variance_epsilon", "eps"))
    eps = float(next((eps for eps in stated if eps is not None), 0.0))
    gain = (at_signs - at_zero) * signs * (1.0 + eps) ** 0.5
    own = (head_dim,) if shape == (head_dim,) else (heads, 1, head_dim)
    return Norm(
        gain.view(own),
        eps,
        shift=at_zero.view(own) if at_zero.any() else None,
        centered=bool((at_ones - at_zero).norm() < 0.5 * gain.norm()),  # ones without their mean are zero
        whole=heads > 1 and shape == (heads * head_dim,),
        last=name in _LAST,
    )


def _find(module: nn.Module, names: tuple[str, ...]) -> tuple[str, nn.Module | None]:
    found = ((n, getattr(module, n, None)) for n in names)
    return next(((n, x) for n, x in found if x is not None and not isinstance(x, nn.Identity)), ("", None))


def _weight_shapes(norm: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for n, p in norm.named_parameters() if n.rpartition(".")[2] == "weight"]


def _input_shape(norm: nn.Module, heads: int, head_dim: int) -> tuple[int, ...] | None:
    """Return the input shape of the norm for one token; None if it is not supported."""
    shapes = _weight_shapes(norm) or [(head_dim,)]  # one without weights is taken for one of each head
    for known in ((head_dim,), (heads, head_dim), (heads * head_dim,)):
        if shapes == [known]:
            return known
    return (1, heads, 1, head_dim) if shapes == [(head_dim,)] * heads else None  # StableLM: one module per head
