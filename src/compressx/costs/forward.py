"""What one forward pass of a model costs, counted by running it on the meta device: every operation, no number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compressx.api.pruner import Linear
from compressx.api.work import Work
from compressx.costs.operations import Counting, FusedAttention
from compressx.models.architecture import Architecture
from compressx.runtime.errors import UnsupportedModelError

LOGIT_BYTES = 40
"""Moved for each logit by a likelihood or a divergence and its gradient, in chunks of float32."""


@dataclass(frozen=True)
class Input:
    """What a linear is handed.

    Attributes:
        of: name of the first linear of its block that is handed the same tensor.
        share: fraction of the tokens that reaches it, below 1 behind a router.
        before: the work of the block up to it.
        size: bytes of it.
        alive: bytes of what the block has computed by then and still holds.
        at: how far the block's `course` is by then.
        until: how far it is when the block lets go of the input.
    """

    of: str
    share: float = 1.0
    before: Work = field(default_factory=Work)
    size: float = 0.0
    alive: float = 0.0
    at: int = 0
    until: int = 0


@dataclass(frozen=True)
class Passed:
    """The cost of a forward pass of a part of a model.

    Attributes:
        work: of the pass.
        kept: bytes of everything that it computes, most of which a backward pass needs again.
        inputs: of a block, by linear name.
        course: bytes that a block has computed and still holds, after each allocation.
        left: bytes of them that it holds when it has run: its output, and what a graph keeps.
    """

    work: Work = field(default_factory=Work)
    kept: float = 0.0
    inputs: Mapping[str, Input] = field(default_factory=dict)
    course: tuple[float, ...] = ()
    left: float = 0.0

    def holding(self, names: Iterable[str], temporary: Mapping[str, float], *, leave: bool) -> float:
        """Return the most bytes at once while inputs of some linears are observed, and held until the batch has run.

        Args:
            names: of the linears; of those with the same input one.
            temporary: bytes that take in the input of a linear, by name.
            leave: whether the block is left once it was seen what is observed.
        """
        held = {name: self.inputs[name] for name in names if name in self.inputs}

        def beside(i: int) -> float:
            return sum(x.size for x in held.values() if x.until <= i)

        end = max((x.at for x in held.values()), default=0) if leave else len(self.course)
        seen = [x.alive + beside(x.at) + temporary.get(name, 0.0) for name, x in held.items()]
        return max([0.0, *(self.course[i] + beside(i) for i in range(end)), *seen])


@dataclass(frozen=True)
class Forward:
    """The cost of a forward pass of a model on one batch.

    Attributes:
        blocks: by name.
        outside: embeddings, masks, the last norm and the head.
        arguments: bytes of what blocks are given beside hidden states: rotary tables, masks.
    """

    blocks: Mapping[str, Passed]
    outside: Passed
    arguments: float = 0.0

    @property
    def work(self) -> Work:
        """Of the whole pass."""
        return sum((block.work for block in self.blocks.values()), self.outside.work)


def forward(
    model: Any, found: Architecture, windows: int, length: int, products: str, *, graph: bool = False
) -> Forward:
    """Count a forward pass.

    Args:
        model: a transformers causal language model on the meta device, in evaluation mode.
        found: its blocks and linears.
        windows: in the batch.
        length: tokens in a window.
        products: dtype of matrix products, one of `KINDS`.
        graph: whether autograd keeps what a backward pass needs again.

    Raises:
        UnsupportedModelError: a model in which numbers decide what is computed.
    """
    counting = Counting(products)
    blocks = {fqn: _Block(counting, fqn, module) for fqn, module in found.blocks.items()}
    owner = {name: blocks[found.block_of(name)] for name in found.linears}
    with ExitStack() as stack:
        for block in blocks.values():
            stack.enter_context(block.watched())
        for name, linear in found.linears.items():
            if linear.expert is None:
                hook = linear.module.register_forward_pre_hook(owner[name].take(name))
                stack.callback(hook.remove)
        for experts in _experts(found):
            stack.enter_context(_counted_experts(experts, counting, owner[experts[0].name]))
        ids = torch.zeros(windows, length, dtype=torch.long, device="meta")
        stack.enter_context(FusedAttention(counting))
        stack.enter_context(torch.set_grad_enabled(graph))
        try:
            with counting:
                model(ids, use_cache=False)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__}: its forward pass cannot be counted without numbers ({error!s:.200})"
            ) from error
    counting.outside = max(counting.outside, counting.peak)  # of what comes after the last block
    passed = {fqn: block.passed() for fqn, block in blocks.items()}
    inside = Work(counting.of({fqn: b.whole for fqn, b in blocks.items()}))
    rest = {kind: count - inside[kind] for kind, count in counting.counts.items()}
    kept = counting.kept - sum(block.kept for block in passed.values())
    return Forward(passed, Passed(Work(rest, counting.outside), kept), sum(counting.given.values()))


def backwards(work: Work, *, weights: bool) -> Work:
    """Count the backward pass of what was counted forwards.

    A product has two gradients, of its input and of its weight; only the first is needed where no weight is trained.
    Fused attention computes its scores again: five products to the two of the forward pass.
    """
    factors = {"attention": 2.5, "moved": 2.0, "launches": 2.0}
    counts = {kind: count * factors.get(kind, 2.0 if weights else 1.0) for kind, count in work.counts.items()}
    return Work(counts, work.memory)


class _Block:
    """Notes what is counted while one block runs."""

    def __init__(self, counting: Counting, fqn: str, module: nn.Module) -> None:
        self.counting, self.fqn, self.module = counting, fqn, module
        self.inputs: dict[str, Input] = {}
        self.whole: dict[str, float] = {}
        self.memory = self.kept = self.before = self.left = 0.0
        self.course: tuple[float, ...] = ()
        self.seen: list[tuple[ref[Tensor], str]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note where the block begins and ends, inside the `with`."""
        counting = self.counting

        def begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
            given = [x.untyped_storage() for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
            counting.given |= {x._cdata: float(x.nbytes()) for x in given}
            counting.outside = max(counting.outside, counting.peak)
            self.start, self.before, self.kept = dict(counting.counts), counting.alive, counting.kept
            counting.enter()

        def end(_module: nn.Module, _args: Any, _output: Any) -> None:
            self.whole = self._since()
            self.memory, self.kept = counting.peak - self.before, counting.kept - self.kept
            self.left = counting.alive - self.before
            self.course = tuple(alive - self.before for alive in counting.course)
            ends = len(self.course)
            self.inputs = {n: replace(x, until=counting.until.get(n, ends)) for n, x in self.inputs.items()}
            counting.enter()
            self.seen.clear()

        hooks = [self.module.register_forward_pre_hook(begin, with_kwargs=True), self.module.register_forward_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, name: str) -> Callable[..., None]:
        """Return a hook that notes the input of a linear."""

        def note(_module: nn.Module, args: tuple[Any, ...]) -> None:
            x: Tensor = args[0]
            first = next((of for seen, of in self.seen if seen() is x), name)
            size = float(x.numel() * x.element_size())
            alive = self.counting.alive - self.before
            self.inputs[name] = Input(first, 1.0, Work(self._since()), size, alive, len(self.counting.course))
            self.counting.look(x, name)
            if first == name:
                self.seen.append((ref(x), name))

        return note

    def routed(self, linears: list[Linear], tokens: float, share: float, itemsize: int) -> None:
        """Note the inputs of fused experts, which run one after the other while they are observed."""
        alive, at = self.counting.alive - self.before, len(self.counting.course)
        for x in linears:
            size = share * tokens * x.in_features * itemsize
            self.inputs[x.name] = Input(x.name, share, Work(self._since()), size, alive, at)
            self.counting.until[x.name] = at

    def passed(self) -> Passed:
        """Return what was noted."""
        return Passed(Work(self.whole, self.memory), self.kept, self.inputs, self.course, self.left)

    def _since(self) -> dict[str, float]:
        return {kind: count - self.start.get(kind, 0.0) for kind, count in self.counting.counts.items()}


def _experts(found: Architecture) -> list[list[Linear]]:
    """Group fused experts by their module."""
    groups: dict[int, list[Linear]] = {}
    for linear in found.linears.values():
        if linear.expert is not None:
            groups.setdefault(id(linear.module), []).append(linear)
    return list(groups.values())


def _held_by_experts(counting: Counting, hidden: Tensor, linears: list[Linear], rows: int) -> None:
    """Take the memory that transformers' grouped products take, one step after the other.

    Args:
        counting: counts it.
        hidden: [tokens, width].
        linears: of one expert, in their order.
        rows: pairs of a token and an expert.
    """
    width, inner = hidden.shape[-1], linears[-1].in_features
    projected = sum(x.out_features for x in linears[:-1])
    gathered = counting.made(hidden, rows, width)
    up = counting.made(hidden, rows, projected)
    activated = counting.made(hidden, rows, inner)
    entering = counting.made(hidden, rows, inner) if projected > inner else activated  # times the gate
    del up, activated
    down = counting.made(hidden, rows, width)
    del entering
    with torch.no_grad():  # no graph keeps these
        weighted = counting.made(hidden, rows, width)
        ordered = counting.made(hidden, rows, width)
    del gathered, down, weighted, ordered


@contextmanager
def _counted_experts(linears: list[Linear], counting: Counting, block: _Block) -> Iterator[None]:
    """Count fused experts as products of equal shares of the tokens: which expert gets which is known at run time."""
    module = linears[0].module
    experts = 1 + max(x.expert or 0 for x in linears)

    def run(hidden: Tensor, chosen: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        tokens, share = hidden.shape[:-1].numel(), chosen.shape[-1] / experts
        for x in linears:
            counting.add(counting.products, 2.0 * share * tokens * x.in_features * x.out_features)
            counting.add("moved", 2.0 * share * tokens * (x.in_features + x.out_features) * hidden.element_size())
            counting.add("launches", 3)
        _held_by_experts(counting, hidden, [x for x in linears if x.expert == linears[0].expert], chosen.numel())
        block.routed(linears, tokens, share, hidden.element_size())
        return torch.empty_like(hidden)

    module.forward = run
    try:
        yield
    finally:
        del module.forward
