"""A planned recipe and its model without weights, and the counts that several stages of its estimate share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from compressx.api.pruner import Block
from compressx.api.work import Windows, Work
from compressx.costs.block import BlockCost, Costs, Task
from compressx.costs.exchanged import Exchanged, OfStatistics, windows_of
from compressx.costs.forward import Forward, Passed, forward
from compressx.costs.machine import Machine
from compressx.models.architecture import survey, text_config
from compressx.models.arithmetic import candidates, worthwhile
from compressx.models.gguf_header import Contents
from compressx.models.shards import OUTSIDE
from compressx.planning.plan import Plan, PlannedRule
from compressx.recipe.schema import Recipe
from compressx.runtime.ranks import assign
from compressx.runtime.rates import name_of

_SLOWER = 6
"""Times that a kernel of a GPU takes to start as long as an operation of torch on the processor."""


@dataclass
class Basis:
    """What an estimate is made of.

    Attributes:
        recipe: the recipe.
        planned: its plan.
        model: on the meta device, in the dtype of its weights.
        machine: decides between dtypes of products, and how many steps fit into a time.
        dtype: name of that of the weights.
        itemsize: its bytes.
        gguf: what is in the checkpoint's GGUF file, if it is one.
        stored: bytes of a number in the checkpoint's safetensors.
        processes: that share the work. What is counted is that of the one that takes longest.
        unknown: what could not be counted, filled while stages are.
        notes: what was assumed, likewise.
        exchanged: between processes, likewise.
    """

    recipe: Recipe
    planned: Plan
    model: Any
    machine: Machine
    dtype: str
    itemsize: int
    gguf: Contents | None = None
    stored: int = 4
    processes: int = 1
    unknown: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exchanged: Exchanged = field(default_factory=Exchanged)

    def __post_init__(self) -> None:
        self.found = survey(self.model)
        self.costs = Costs(self.planned)
        sizes = {name: p.numel() for name, p in self.model.named_parameters()}
        self.sizes = {
            fqn: sum(n for name, n in sizes.items() if name.startswith(f"{fqn}.")) for fqn in self.found.blocks
        }
        self.parameters = sum(sizes.values())
        self.width = text_config(self.model).hidden_size
        self.vocabulary = text_config(self.model).vocab_size

    @cached_property
    def products(self) -> str:
        """The dtype of matrix products where blocks are run or trained."""
        asked = self.recipe.compute_dtype
        if asked != "auto":
            return str(asked)
        training = self.recipe.reconstruct_block is not None or self.recipe.finetune is not None
        if self.dtype == "float64":
            self.notes.append("products in float64 are taken to be as fast as in float32")
            return "float32"
        among = candidates(getattr(torch, self.dtype), training=training)
        return name_of(worthwhile(among, lambda dtype: self.machine.rates[name_of(dtype)]))

    @cached_property
    def streamed(self) -> bool:
        """Whether one block's weights are in memory at a time; `auto` is taken to find room for all."""
        return self.recipe.model.streaming is True

    @property
    def weights(self) -> float:
        """Bytes of the weights in memory while blocks are run: of a streamed model those of the largest one."""
        return float(self.itemsize * (max(self.sizes.values()) if self.streamed else self.parameters))

    @property
    def around(self) -> float:
        """Bytes of the weights in memory while the embedding and the head are run, which are streamed like a block."""
        inside = sum(self.sizes.values()) if self.streamed else 0
        return float(self.itemsize * (self.parameters - inside))

    @property
    def pending(self) -> float:
        """Bytes of a streamed block that is written while the next one is pruned, where both are in main memory."""
        pruned = {x.block for x in self.planned.linears if x.block}
        waits = self.streamed and not self.machine.gpu
        return float(self.itemsize * max((self.sizes[fqn] for fqn in pruned), default=0)) if waits else 0.0

    @cached_property
    def alone(self) -> Basis:
        """What one process does while the others wait."""
        return self if self.processes == 1 else replace(self, processes=1)

    @property
    def shares(self) -> list[int]:
        """The calibration windows of each process; the first has no fewer than the others."""
        return windows_of(self.processes, 0 if self.recipe.calibration is None else self.recipe.calibration.samples)

    @cached_property
    def text(self) -> Windows:
        """The calibration text of the first process; a batch of it."""
        given = self.recipe.calibration
        if given is None:
            return Windows(0, 1, 1, self.itemsize)
        at_once = min(given.batch_size, self.shares[0])
        return Windows(self.shares[0], given.sequence_length, at_once, self.itemsize, gpu=self.machine.gpu)

    @cached_property
    def of_statistics(self) -> OfStatistics:
        """Counts what processes exchange of statistics."""
        return OfStatistics(self.shares, self.text, self.unknown)

    @cached_property
    def batch(self) -> Forward:
        """One calibration batch through the model."""
        return self.passed(self.text.batch, self.text.length, self.products)

    @cached_property
    def graphs(self) -> Mapping[str, float]:
        """Bytes that each block keeps of one calibration batch for its backward pass, its output included."""
        found = forward(self.model, self.found, self.text.batch, self.text.length, self.products, graph=True)
        return {fqn: block.left for fqn, block in found.blocks.items()}

    def passed(self, windows: int, length: int, products: str) -> Forward:
        """Return a batch's forward pass."""
        return forward(self.model, self.found, windows, length, "float32" if products == "float64" else products)

    def python(self, operations: float) -> Work:
        """Count time of Python itself: that in which a processor starts so many operations of torch."""
        return Work.of(launches=operations / (_SLOWER if self.machine.gpu else 1))

    def states(self, tokens: float) -> float:
        """Bytes of the hidden states of so many tokens."""
        return float(tokens * self.width * self.itemsize)

    def hidden(self, windows: float) -> float:
        """Bytes of the hidden states of so many calibration windows, of those that are kept in memory."""
        size = self.states(windows * self.text.length)
        limit = None if self.recipe.calibration is None else self.recipe.calibration.memory_limit
        return size if limit is None or size <= limit else 0.0

    def slowest(self, cost: BlockCost) -> list[Task]:
        """Return what the process decides whose share of a block's decisions takes longest."""
        owners = assign([task.weights for task in cost.tasks], self.processes)
        own = [[t for t, owner in zip(cost.tasks, owners, strict=True) if owner == r] for r in range(self.processes)]

        def seconds(tasks: list[Task]) -> float:
            works = (work for task in tasks for work in (*task.prepared.values(), *task.pruned.values()))
            return self.machine.seconds(sum(works, Work()))

        return max(own, key=seconds)

    def block(self, index: int, fqn: str) -> Block:
        """Return a block, or what lies outside them, as pruners see it in a plan."""
        linears = self.found.inside(fqn) if fqn else self.found.outside
        module = self.found.blocks[fqn] if fqn else self.model
        return Block(index, fqn, module, dict(linears), (), text_config(self.model))

    def cost(self, index: int, fqn: str, wanted: Mapping[PlannedRule, Any], text: Windows) -> BlockCost:
        """Return what rules cost in a block, the text being that of the first process, or less of it by one process."""
        passed = self.batch.blocks.get(fqn, Passed()) if text.count else Passed()
        shared_out = text.count and self.processes > 1
        whole = replace(text, count=sum(self.shares)) if shared_out else text
        return self.costs.block(self.block(index, fqn), passed, text, whole, wanted)

    @cached_property
    def last(self) -> int:
        """Index of the last block that is pruned; what lies outside comes after all."""
        order = [*self.found.blocks, OUTSIDE]
        return max((i for i, fqn in enumerate(order) if self.planned.in_block(fqn)), default=-1)
