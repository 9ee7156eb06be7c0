"""Identify the norms that a module applies to queries, keys and values by evaluating them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from compressx_attnprune.geometry import Norm

QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
VALUE_NORMS = ("v_norm",)
_LAST = ("query_layernorm", "key_layernorm")
"""Names of norms that come after the rotary embedding."""


def unknown_norm(module: nn.Module, names: tuple[str, ...], heads: int, head_dim: int) -> str | None:
    """Describe a norm that `read_norm` does not support, or return None; needs no weights.

    Args:
        module: the attention.
        names: possible names of the side's norm, `QUERY_NORMS`, `KEY_NORMS` or `VALUE_NORMS`.
        heads: of the side.
        head_dim: features of a head.
    """
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
    eps = _eps(norm)
    gain = (at_signs - at_zero) * signs * (1.0 + eps) ** 0.5
    own = (head_dim,) if shape == (head_dim,) else (heads, 1, head_dim)
    return Norm(
        gain.view(own),
        eps,
        shift=at_zero.view(own) if at_zero.any() else None,
        centered=bool((at_ones - at_zero).norm() < 0.5 * gain.norm()),  # ones without their mean are zero
        whole=over_all_heads(module, names, heads, head_dim),
        last=name in _LAST,
    )


def over_all_heads(module: nn.Module, names: tuple[str, ...], heads: int, head_dim: int) -> bool:
    """Return whether a side's norm is over all heads of a token at once; arguments as `unknown_norm`."""
    _, norm = _find(module, names)
    return norm is not None and heads > 1 and _input_shape(norm, heads, head_dim) == (heads * head_dim,)


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


def _eps(norm: nn.Module) -> float:
    """Return the epsilon of the norm or of its first part that has one."""
    stated = (getattr(part, name, None) for part in norm.modules() for name in ("variance_epsilon", "eps"))
    return float(next((eps for eps in stated if eps is not None), 0.0))
