"""Counts what tensor operations do, from their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_SCALARS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
_ATTENTION = nn.functional.scaled_dot_product_attention


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operations do; bytes that are alive, too.

    Attributes:
        counts: by kind.
        alive: bytes of what was computed and is still needed.
        peak: the most of them since it was last reset.
        outside: the most of them outside the blocks.
        course: what was alive after each allocation since the block began.
        until: of tensors that were looked at, by name: how far the course was when the model let go of them.
        products, attention, itemsize: the kinds of products and of attention, and the bytes of their factors.
        kept: bytes of all that was computed.
        given: bytes of what blocks are given beside hidden states, by where it is.
    """

    def __init__(self, products: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = products
        self.attention = "attention" if products == "float32" else "attention16"
        self.itemsize = 4 if products == "float32" else 2
        self.counts: dict[str, float] = {}
        self.alive = self.peak = self.outside = self.kept = 0.0
        self.course: list[float] = []
        self.until: dict[str, int] = {}
        self.given: dict[int, float] = {}
        self._known: set[int] = set()
        self._names: dict[int, list[str]] = {}
        self._graph: list[Tensor] = []  # what autograd would keep of what it does not see

    def add(self, kind: str, count: float) -> None:
        """Count some more."""
        self.counts[kind] = self.counts.get(kind, 0.0) + count

    def of(self, counts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Sum counts by kind."""
        return {kind: sum(each.get(kind, 0.0) for each in counts.values()) for kind in self.counts}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in _SCALARS:
            return True  # models ask whether something holds for all tokens: no padding, no packed windows
        result = operation(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(result)
        sources = {x.untyped_storage()._cdata for x in given}
        if all(x.untyped_storage()._cdata in sources for x in made) and not operation._schema.is_mutable:
            return result  # a view
        for x in made:
            self.allocated(x)
        self.add("launches", 1)
        if (packet := operation._overloadpacket) in flop_registry:
            self.add(self.products, flop_registry[packet](*args, **(kwargs or {}), out_val=result))
            # Factors and results of another dtype are converted, which is a copy.
            converted = (x for x in (*given, *made) if x.element_size() != self.itemsize)
            self.add("moved", sum(x.numel() * (x.element_size() + self.itemsize) for x in converted))
        else:
            self.add("moved", sum(map(_bytes, (*given, *made))))
        return result

    def allocated(self, x: Tensor) -> None:
        """Count a tensor's memory until nothing holds it."""
        storage = x.untyped_storage()
        if (key := storage._cdata) in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.alive += size
        self.kept += size
        self.peak = max(self.peak, self.alive)
        self.course.append(self.alive)
        finalize(storage, self._freed, key, size)

    def made(self, like: Tensor, *shape: int) -> Tensor:
        """Return an empty tensor of which only the memory is counted."""
        with _disable_current_modes():
            x = like.new_empty(shape)
        self.allocated(x)
        if torch.is_grad_enabled():
            self._graph.append(x)
        return x

    def enter(self) -> None:
        """Begin a block, or end one."""
        self._names.clear()
        self.peak, self.course, self.until = self.alive, [], {}

    def look(self, x: Tensor, name: str) -> None:
        """Note when a tensor is let go of."""
        self._names.setdefault(x.untyped_storage()._cdata, []).append(name)

    def _freed(self, key: int, size: float) -> None:
        self._known.discard(key)
        self.alive -= size
        self.until |= dict.fromkeys(self._names.pop(key, ()), len(self.course))  # its address may be another's next


class FusedAttention(TorchFunctionMode):
    """Counts fused attention as one operation, which on the meta device would be several."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not _ATTENTION:
            return function(*args, **(kwargs or {}))
        q, k, v = args[:3] if len(args) > 2 else (kwargs[name] for name in ("query", "key", "value"))
        result: Tensor = _Attended.apply(q, k, v)  # type: ignore[no-untyped-call]
        pairs = q.shape[:-1].numel() * k.shape[-2]
        self.counting.add(self.counting.attention, 2.0 * pairs * (q.shape[-1] + v.shape[-1]))
        self.counting.add("moved", sum(map(_bytes, (q, k, v, result))))
        return result


class _Attended(torch.autograd.Function):
    """An empty result; a graph keeps what fused kernels need again: queries, keys, values and the result."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = q.new_empty(*q.shape[:-1], v.shape[-1])
        context.save_for_backward(q, k, v, result)
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _bytes(x: Tensor) -> int:
    """Return how many bytes of a tensor are read: those of an expanded one once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
