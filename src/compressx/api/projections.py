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
    """The projections of a block's attention.

    Attributes:
        query: rows of the queries.
        key: rows of the keys.
        value: rows of the values, with as many heads as the keys; their head size may differ.
        output: the output projection.
        gate: rows of the gates, whose sigmoids multiply what the heads mix, feature by feature, before the output
            projection; in the query's linear (Qwen3-Next, Qwen3.5) or one of their own (AFMoE). None without.
    """

    query: Rows
    key: Rows
    value: Rows
    output: Linear
    gate: Rows | None = None

    @property
    def inward(self) -> tuple[Rows, ...]:
        """All rows that see the attention's input, head by head: queries, keys, values and gates."""
        rows = (self.query, self.key, self.value)
        return rows if self.gate is None else (*rows, self.gate)

    @property
    def fused(self) -> bool:
        """Whether one linear holds queries, keys and values."""
        return self.query.linear is self.key.linear

    @property
    def attention(self) -> str:
        """Fully qualified name of the attention module."""
        return parent(self.query.name)


def find_projections(block: Block) -> Projections:
    """Find the block's query, key, value and output projection, separate or in one fused weight, and gates.

    Args:
        block: the block; its weights may be on the meta device.

    Raises:
        UnsupportedModelError: the block does not have exactly one attention with all of them, or the layout of a fused
            weight is unknown.
    """
    queries, keys, fused = (_named(block, *names) for names in (["q_proj"], ["k_proj"], [*_BLOCKED, *_GROUPED]))
    if len(queries) == len(keys) == 1 and not fused and parent(queries[0].name) == parent(keys[0].name):
        values, output = _sibling(block, queries[0], ("v_proj",)), _sibling(block, queries[0], _OUTPUTS)
        query, gate = _gated(block, queries[0], output)
        return Projections(query, Rows(keys[0]), Rows(values), output, gate)
    if len(fused) == 1 and not queries and not keys:
        return Projections(*_split(block, fused[0]), _sibling(block, fused[0], _OUTPUTS))
    raise UnsupportedModelError(
        f"{block.fqn} has {len(queries)} q_proj and {len(keys)} k_proj; expected one of each in the same "
        f"attention, or one weight that fuses them ({', '.join((*_BLOCKED, *_GROUPED))}); its linears: "
        f"{', '.join(block.linears) or 'none'}"
    )


def head_size(module: Any, config: Any) -> int:
    """Return the number of features of a query or key head; UnsupportedModelError where nothing says it."""
    for owner, name in ((module, "head_dim"), (module, "head_size"), (config, "head_dim")):
        if size := getattr(owner, name, None):  # one after the other: Gemma 4's config refuses what differs by layer
            return int(size)
    return count_of(config, "hidden_size") // count_of(config, "num_attention_heads")


def count_of(config: Any, name: str) -> int:
    """Return a count of the config's; UnsupportedModelError if a config of its own class has it under another name."""
    if type(number := getattr(config, name, None)) is int and number > 0:
        return number
    told = f'if it has it under another name, write attribute_map = {{"{name}": "..."}} with that name in the class'
    raise UnsupportedModelError(f"{type(config).__name__} has no whole number {name}; {told}")


def leaf(name: str) -> str:
    """Return the last part of a fully qualified name."""
    return name.rpartition(".")[2]


def parent(name: str) -> str:
    """Return a fully qualified name without its last part."""
    return name.rpartition(".")[0]


def _gated(block: Block, query: Linear, output: Linear) -> tuple[Rows, Rows | None]:
    """Return the rows of queries and of gates, which a query projection of twice the size holds head by head."""
    own = block.linears.get(f"{parent(query.name)}.gate_proj")
    if own is not None and own.out_features == output.in_features:
        return Rows(query), Rows(own)
    size = head_size(block.submodule(parent(query.name)), block.config)
    heads, odd = divmod(query.out_features, 2 * size)
    # Values of half the size of queries would look alike but for the number of heads.
    if odd or heads * size != output.in_features or heads != getattr(block.config, "num_attention_heads", None):
        return Rows(query), None
    queries, gates = _numbers(query).view(heads, 2, size).unbind(1)
    return Rows(query, queries.reshape(-1)), Rows(query, gates.reshape(-1))


def _numbers(linear: Linear) -> Tensor:
    """Return the numbers of a linear's rows, on its device."""
    device = linear.weight.device
    return torch.arange(linear.out_features, device="cpu" if device.type == "meta" else device)


def _split(block: Block, fused: Linear) -> tuple[Rows, Rows, Rows]:
    """Return the query, key and value rows of a fused weight, whose size determines the number of key heads."""
    heads = count_of(block.config, "num_attention_heads")
    module = block.submodule(parent(fused.name))
    head_dim = head_size(module, block.config)
    blocks, rest = divmod(fused.out_features, head_dim)
    key_heads, odd = divmod(blocks - heads, 2)
    if rest or odd or key_heads < 1 or heads % key_heads:
        raise UnsupportedModelError(
            f"{fused.name} has {fused.out_features} outputs, which is not {heads} query heads of {head_dim} features "
            "with as many keys as values"
        )
    rows = _numbers(fused)
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
