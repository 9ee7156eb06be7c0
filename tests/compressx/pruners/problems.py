"""One linear with correlated inputs, and what each built-in pruner makes of it."""

from __future__ import annotations

import torch
from tests.compressx.built_in import BUILT_IN
from torch import nn

from compressx import Block, Linear
from compressx.blocks.contract import answer_of
from compressx.blocks.observe import SharedStatistic

SPECS = {name: BUILT_IN[name] for name in ("magnitude", "wanda", "sparsegpt", "alps")}


def one_linear(rows: int = 24, columns: int = 48, seed: int = 0, **names: tuple[int, int]) -> Block:
    generator = torch.Generator().manual_seed(seed)
    shapes = names or {"fc": (rows, columns)}
    modules = {n: nn.Linear(s[1], s[0]) for n, s in shapes.items()}
    for module in modules.values():
        with torch.no_grad():
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
    return Block(0, "block", nn.ModuleDict(modules), {n: Linear(n, m) for n, m in modules.items()}, (), None)


def correlated_inputs(columns: int = 48, tokens: int = 600, seed: int = 1) -> torch.Tensor:
    """Few directions carry most of the variance and features differ in scale: [1, tokens, columns]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, columns // 4, generator=generator)
    mix = torch.randn(columns // 4, columns, generator=generator)
    scale = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    return ((hidden @ mix + 0.3 * torch.randn(tokens, columns, generator=generator)) * scale)[None]


def prune(name: str, block: Block, pattern, x: torch.Tensor, **options):
    spec = SPECS[name]
    pruner = spec.build(spec.options(**options))
    stats = {}
    for linear in block.linears:
        statistic = pruner.observe(block, linear)
        if statistic is not None:
            for part in x.split(1):
                statistic.update(part)
            stats[linear] = SharedStatistic(statistic)
    patterns = pattern if isinstance(pattern, dict) else dict.fromkeys(block.linears, pattern)
    return answer_of(name, pruner, block, patterns, stats)


def output_error(block: Block, result, x: torch.Tensor, name: str = "fc") -> float:
    weight = block.linears[name].weight
    new = torch.where(result.keep, weight if result.weight is None else result.weight.to(weight.dtype), 0.0)
    y = x @ weight.T
    return float((x @ new.T - y).square().sum() / y.square().sum())
