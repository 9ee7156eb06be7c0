"""Reading a layer's attention off a decoder block, and refusing what this method cannot prune."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compressx import Block, BlockCall, Linear, Pattern, UnsupportedModelError
from compressx.errors import RecipeError
from compressx_attnprune.geometry import Attention, HeadNorm, Projection, queries_and_keys, rotate_half
from compressx_attnprune.objective import attention_matrices

_FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "W_pack")
_OUTPUTS = ("o_proj", "out_proj", "dense")
_AGREEMENT = 1e-3  # relative difference of two float32 outputs of one attention
_INSTEAD = "leave it to a pruner of single linears, such as sparsegpt or wanda"


def check(block: Block, patterns: Mapping[str, Pattern]) -> None:
    """Refuse a block, or a choice of its linears, that attention pruning cannot handle.

    Needs no weights: it is called on a skeleton while a recipe is planned.

    Args:
        block: the block; its weights may be on the meta device and its calls missing.
        patterns: what the recipe's rule took in this block, by linear name.

    Raises:
        UnsupportedModelError: no separate query and key projections, or scores that are not
            softmax(scale * q k^T + mask).
        RecipeError: targets that are not exactly the query and the key projection, or different patterns for the two.
    """
    query, key = find_projections(block, patterns)
    wanted = f'write targets: ["*.{_leaf(query.name)}", "*.{_leaf(key.name)}"]'
    if extra := [n for n in patterns if n not in (query.name, key.name)]:
        raise RecipeError(
            f"attnprune prunes the query and the key projection and nothing else, and this rule also takes "
            f"{', '.join(extra)}; {wanted} and give the others a rule of their own after it"
        )
    if missing := [n for n in (query.name, key.name) if n not in patterns]:
        raise RecipeError(
            f"attnprune prunes query and key together, and this rule does not take {missing[0]}; {wanted}, before any "
            "other rule that matches one of them"
        )
    if patterns[query.name] != patterns[key.name]:
        raise RecipeError(
            f"attnprune needs one pattern for {query.name} and {key.name}, got {patterns[query.name]} and "
            f"{patterns[key.name]}; give both the same sparsity"
        )
    _check_structure(block, query, key)


def find_projections(block: Block, taken: Mapping[str, object] | None = None) -> tuple[Linear, Linear]:
    """Find the block's query and key projection.

    Args:
        block: the block.
        taken: the linears that a rule took there, for the message when there are no such projections.

    Raises:
        UnsupportedModelError: when there is not exactly one of each, next to one another.
        RecipeError: when the linears taken lie outside the decoder blocks.
    """
    if not block.fqn:
        raise RecipeError(
            f"attnprune prunes attention, and this rule takes {', '.join(taken or block.linears)} outside the decoder "
            'blocks; write targets: ["*.q_proj", "*.k_proj"]'
        )
    queries = [x for n, x in block.linears.items() if _leaf(n) == "q_proj"]
    keys = [x for n, x in block.linears.items() if _leaf(n) == "k_proj"]
    if len(queries) == len(keys) == 1 and _parent(queries[0].name) == _parent(keys[0].name):
        return queries[0], keys[0]
    if fused := [n for n in block.linears if _leaf(n) in _FUSED]:
        raise UnsupportedModelError(
            f"{fused[0]} holds query, key and value in one weight, and attnprune needs separate q_proj and k_proj; "
            f"{_INSTEAD}"
        )
    raise UnsupportedModelError(
        f"{block.fqn} has {len(queries)} q_proj and {len(keys)} k_proj, and attnprune needs one of each in the same "
        f"attention; its linears: {', '.join(block.linears) or 'none'}; {_INSTEAD}"
    )


def describe(block: Block, dtype: torch.dtype = torch.float32) -> Attention:
    """Read the geometry of a block's attention, with the rotary embedding of its recorded calls.

    Args:
        block: a block with weights and at least one recorded call.
        dtype: of the geometry's tensors.

    Raises:
        UnsupportedModelError: as `check`.
    """
    query, key = find_projections(block)
    _check_structure(block, query, key)
    module = block.module.get_submodule(_parent(query.name)[len(block.fqn) + 1 :])
    head_dim = _head_dim(module, block.config)
    return Attention(
        query=Projection(query.out_features // head_dim, query.bias, _norm(module, "q_norm", head_dim)),
        key=Projection(key.out_features // head_dim, key.bias, _norm(module, "k_norm", head_dim)),
        head_dim=head_dim,
        scaling=float(getattr(module, "scaling", head_dim**-0.5)),
        rotary=_rotary(module, block),
        window=getattr(module, "sliding_window", None)
        if hasattr(module, "sliding_window")
        else getattr(block.config, "sliding_window", None),
        softcap=getattr(module, "attn_logit_softcapping", None),
    ).to(dtype)


@torch.no_grad()
def verify(block: Block, attention: Attention, x: Tensor) -> None:
    """Make sure that the geometry computes what the model computes, by the attention's output on one sequence.

    The module tree does not tell everything (gates, sinks, biases on the scores); the output does. Both sides run in
    float32, so that the rounding of the model's dtype is no excuse.

    Args:
        block: a block with weights and recorded calls.
        attention: its geometry, in float32.
        x: inputs of the query projection [batch, tokens, in_features].

    Raises:
        UnsupportedModelError: when the two outputs differ.
    """
    query, key = find_projections(block)
    name = _parent(query.name)
    module = copy.deepcopy(block.module.get_submodule(name[len(block.fqn) + 1 :])).float()
    value = getattr(module, "v_proj", None)
    output = next((getattr(module, n) for n in _OUTPUTS if hasattr(module, n)), None)
    if value is None or output is None:
        raise UnsupportedModelError(
            f"{name} has no v_proj, or no output projection named {', '.join(_OUTPUTS)}, so that attnprune cannot "
            f"verify that it is softmax attention; {_INSTEAD}"
        )
    x = x[:1].float()
    q, k = queries_and_keys(attention, x, query.weight.float(), key.weight.float())
    v = value(x).view(1, x.shape[1], attention.key.heads, -1).transpose(1, 2)  # [1, h_kv, tokens, value_dim]
    mixed = attention_matrices(attention, q, k) @ v.repeat_interleave(attention.groups, dim=1)
    ours = output(mixed.transpose(1, 2).flatten(2))
    theirs = _attend(module, block.calls[0], x)
    difference = float((ours - theirs).norm() / theirs.norm())
    if not difference <= _AGREEMENT:
        raise UnsupportedModelError(
            f"{name} ({type(module).__name__}) is not softmax(scale * q k^T + mask) as attnprune computes it: the "
            f"outputs differ by {difference:.2%} on a calibration sequence; {_INSTEAD}"
        )


def _attend(module: nn.Module, call: BlockCall, x: Tensor) -> Tensor:
    """Run the attention itself on inputs [1, tokens, in_features] with what its block was called with."""
    known = inspect.signature(module.forward).parameters
    given = {n: _first(v) for n, v in call.kwargs.items() if n in known and "past" not in n}
    attended = module(x, **given)
    result: Tensor = attended[0] if isinstance(attended, tuple) else attended
    return result


def _first(value: Any) -> Any:
    """Cut a call's tensors, or tuple of tensors, down to the first sequence of the batch, in float32."""
    if isinstance(value, Tensor):
        return value[:1].float() if value.is_floating_point() else value[:1]
    return tuple(_first(v) for v in value) if isinstance(value, tuple) else value


def _check_structure(block: Block, query: Linear, key: Linear) -> None:
    name = _parent(query.name)
    module = block.module.get_submodule(name[len(block.fqn) + 1 :])
    head_dim = _head_dim(module, block.config)
    heads, key_heads = query.out_features // head_dim, key.out_features // head_dim
    declared = getattr(block.config, "num_attention_heads", heads)
    if (heads * head_dim, key_heads * head_dim) != (query.out_features, key.out_features) or heads != declared:
        raise UnsupportedModelError(
            f"{query.name} and {key.name} have {query.out_features} and {key.out_features} outputs, which is not "
            f"{declared} query heads of {head_dim} features; attnprune knows no gated or compressed heads; {_INSTEAD}"
        )
    if key_heads == 0 or heads % key_heads:
        raise UnsupportedModelError(f"{name}: {heads} query heads cannot share {key_heads} key heads; {_INSTEAD}")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{name} is not causal, and attnprune prunes causal attention; {_INSTEAD}")
    turn = getattr(sys.modules[type(module).__module__], "rotate_half", None)
    probe = torch.arange(4.0, device="cpu")
    if turn is not None and not torch.equal(turn(probe), rotate_half(probe)):
        raise UnsupportedModelError(
            f"{name} ({type(module).__name__}) turns neighbouring features in its rotary embedding, and attnprune "
            f"knows the layout that turns features half a head apart; {_INSTEAD}"
        )
    for side in ("q_norm", "k_norm"):
        norm = getattr(module, side, None)
        if norm is not None and tuple(norm.weight.shape) != (head_dim,):
            raise UnsupportedModelError(
                f"{name}.{side} has a weight of shape {tuple(norm.weight.shape)}, and attnprune knows norms over one "
                f"head, ({head_dim},); {_INSTEAD}"
            )


def _head_dim(module: nn.Module, config: Any) -> int:
    stated = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def _norm(module: nn.Module, name: str, head_dim: int) -> HeadNorm | None:
    norm = getattr(module, name, None)
    if norm is None:
        return None
    eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))
    # Some norms scale by the weight and some by one plus the weight: a vector of ones tells which.
    with torch.no_grad():
        ones = norm(torch.ones(head_dim, device=norm.weight.device, dtype=norm.weight.dtype))
    return HeadNorm(ones.float() * (1.0 + eps) ** 0.5, eps)


def _rotary(module: nn.Module, block: Block) -> tuple[Tensor, Tensor] | None:
    embeddings = block.calls[0].kwargs.get("position_embeddings")
    # Layers without positions (SmolLM3) are handed the tables all the same.
    if embeddings is None or not getattr(module, "use_rope", True):
        return None
    cos, sin = embeddings  # [batch or 1, tokens, rotary_dim]
    return cos[0], sin[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
