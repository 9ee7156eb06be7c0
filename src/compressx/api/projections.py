"""Find the query, key, value and output projections of a decoder block, fused or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressx.api.pruner import Block, Linear
from compressx.runtime.errors import UnsupportedModelError

_BLOCKED = ("c_attn", "qkv_proj", "Wqkv", "W_pack")  # all queries, then all keys, then all values
_GROUPED = ("query_key_value",)  # per key head: its queries, its key, its value
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a linear that form its queries, keys or values.

    Attributes:
        linear: the linear that holds them.
        index: row indices in head order, int64 [heads * head_dim] on the weight's device, on the CPU if that is meta;
            None for all rows.
    """

    linear: Linear
    index: Tensor | None = None

    @property
    def name(self) -> str:
        """Name of the linear."""
        return self.linear.name

    @property
    def count(self) -> int:
        """Number of rows, heads * head_dim."""
        return self.linear.out_features if self.index is None else len(self.index)

    @property
    def weight(self) -> Tensor:
        """Weight of the rows, float32 [heads * head_dim, in_features]; may share the module's memory."""
        return self._take(self.linear.weight)

    @property
    def bias(self) -> Tensor | None:
        """Bias of the rows, float32 [heads * head_dim], or None."""
        bias = self.linear.bias
        return None if bias is None else self._take(bias)

    def _take(self, tensor: Tensor) -> Tensor:
        return (tensor if self.index is None else tensor[self.index]).float()


@dataclass(frozen=True, eq=False)
class Projections:
    """The four projections of a block's attention.

    Attributes:
        query: rows of the queries.
        key: rows of the keys.
        value: rows of the values, with as many heads as the keys; their head size may differ.
        output: the output projection.
    """

    query: Rows
    key: Rows
    value: Rows
    output: Linear

    @property
    def fused(self) -> bool:
        """Whether one linear holds queries, keys and values."""
        return self.query.linear is self.key.linear

    @property
    def attention(self) -> str:
        """Fully qualified name of the attention module."""
        return parent(self.query.name)


def find_projections(block: Block) -> Projections:
    """Find the block's query, key, value and output projection, separate or in one fused weight.

    Args:
        block: the block; its weights may be on the meta device.

    Raises:
        UnsupportedModelError: the block does not have exactly one attention with all of them, or the layout of a fused
            weight is unknown.
    """
    queries, keys, fused = (_named(block, *names) for names in (["q_proj"], ["k_proj"], [*_BLOCKED, *_GROUPED]))
    if len(queries) == len(keys) == 1 and not fused and parent(queries[0].name) == parent(keys[0].name):
        values = _sibling(block, queries[0], ("v_proj",))
        return Projections(Rows(queries[0]), Rows(keys[0]), Rows(values), _sibling(block, queries[0], _OUTPUTS))
    if len(fused) == 1 and not queries and not keys:
        return Projections(*_split(block, fused[0]), _sibling(block, fused[0], _OUTPUTS))
    raise UnsupportedModelError(
        f"{block.fqn} has {len(queries)} q_proj and {len(keys)} k_proj; expected one of each in the same "
        f"attention, or one weight that fuses them ({', '.join((*_BLOCKED, *_GROUPED))}); its linears: "
        f"{', '.join(block.linears) or 'none'}"
    )


def head_size(module: Any, config: Any) -> int:
    """Return the number of features of a query or key head."""
    for owner, name in ((module, "head_dim"), (module, "head_size"), (config, "head_dim")):
        if size := getattr(owner, name, None):  # one after the other: Gemma 4's config refuses what differs by layer
            return int(size)
    return int(config.hidden_size // config.num_attention_heads)


def leaf(name: str) -> str:
    """Return the last part of a fully qualified name."""
    return name.rpartition(".")[2]


def parent(name: str) -> str:
    """Return a fully qualified name without its last part."""
    return name.rpartition(".")[0]


def _split(block: Block, fused: Linear) -> tuple[Rows, Rows, Rows]:
    """Return the query, key and value rows of a fused weight, whose size determines the number of key heads."""
    heads = int(block.config.num_attention_heads)
    module = block.submodule(parent(fused.name))
    head_dim = head_size(module, block.config)
    blocks, rest = divmod(fused.out_features, head_dim)
    key_heads, odd = divmod(blocks - heads, 2)
    if rest or odd or key_heads < 1 or heads % key_heads:
        raise UnsupportedModelError(
            f"{fused.name} has {fused.out_features} outputs, which is not {heads} query heads of {head_dim} features "
            "with as many keys as values"
        )
    device = fused.weight.device
    rows = torch.arange(fused.out_features, device="cpu" if device.type == "meta" else device)
    # The layout of StarCoder's c_attn depends on the number of key heads.
    if leaf(fused.name) in _GROUPED or getattr(module, "multi_query", None) is False:
        grouped = rows.view(key_heads, -1, head_dim)  # [h_kv, groups + 2, head_dim]
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
    else:
        ends = (heads * head_dim, (heads + key_heads) * head_dim)
        parts = (rows[: ends[0]], rows[ends[0] : ends[1]], rows[ends[1] :])
    query, key, value = (Rows(fused, part.reshape(-1)) for part in parts)
    return query, key, value


def _named(block: Block, *leaves: str) -> list[Linear]:
    return [x for n, x in block.linears.items() if leaf(n) in leaves]


def _sibling(block: Block, of: Linear, leaves: tuple[str, ...]) -> Linear:
    home = parent(of.name)
    for name in leaves:
        if (found := block.linears.get(f"{home}.{name}")) is not None:
            return found
    role = "value" if leaves == ("v_proj",) else "output"
    raise UnsupportedModelError(
        f"{home} has no {role} projection named {', '.join(leaves)} beside {leaf(of.name)}, as softmax attention has"
    )
