"""Answers about units that the host refuses: torn ones, another number of them, a bias that is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from compressx import Block, Linear, Owners, PluginError, PruneResult, Structured, Units
from compressx.blocks.contract import Checksums, ask
from compressx.blocks.numbers import check_numbers
from compressx.blocks.select import write

NAMES = ("block.up", "block.down")


def problem() -> tuple[Block, dict[str, Structured], dict[str, PruneResult]]:
    """Six neurons of which two go, and an answer in which units 1 and 4 do."""
    module = nn.ModuleDict({"up": nn.Linear(5, 6), "down": nn.Linear(6, 4)})
    linears = {f"block.{n}": Linear(f"block.{n}", module[n]) for n in ("up", "down")}
    block = Block(0, "block", module, linears, (), None)
    owners = {"block.up": Owners(0, torch.arange(6)), "block.down": Owners(1, torch.arange(6))}
    units = Units("neurons", "block.mlp", 6, owners)
    pattern = Structured("neurons", 1 / 3, units)
    keep = torch.tensor([True, False, True, True, False, True])
    masks = units.masks(keep, {n: (x.out_features, x.in_features) for n, x in linears.items()})
    return block, dict.fromkeys(NAMES, pattern), {n: PruneResult(m) for n, m in masks.items()}


def test_whole_units_in_the_number_that_was_asked_for_are_taken():
    block, patterns, results = problem()
    results["block.down"] = replace(results["block.down"], weight=torch.ones(4, 6), bias=torch.ones(4))
    check_numbers("mine", block, patterns, results)


def torn(results: dict[str, PruneResult]) -> None:
    results["block.up"].keep[3, 2:4] = False


def only_columns(results: dict[str, PruneResult]) -> None:
    results["block.up"].keep[:] = True


def one_more(results: dict[str, PruneResult]) -> None:
    results["block.up"].keep[0] = False
    results["block.down"].keep[:, 0] = False


def no_bias(results: dict[str, PruneResult]) -> None:
    results["block.down"] = replace(results["block.down"], bias=torch.tensor([1.0, torch.inf, 1.0, 1.0]))


def longer_bias(results: dict[str, PruneResult]) -> None:
    results["block.down"] = replace(results["block.down"], bias=torch.ones(6))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (torn, "pruner 'mine' on block.mlp: neurons go or stay whole, in all of block.up, block.down, but 2 weights"),
        (only_columns, "but 8 weights are dropped of units that are kept; make the masks by compressx.keep_masks"),
        (one_more, "on block.mlp: pattern 33.3333% of neurons means that 2 of 6 units go, got 3"),
        (no_bias, "on block.down: it returned a bias that is NaN or infinite"),
        (longer_bias, r"on block.down: bias must be a float tensor [4], got torch.float32 [6]"),
    ],
)
def test_answers_that_break_the_contract_are_refused_with_module_and_numbers(
    broken: Callable[[dict[str, PruneResult]], None], says: str
) -> None:
    block, patterns, results = problem()
    broken(results)

    class Answers:
        def observe(self, block: Block, name: str) -> None: ...

        def prune(self, block: Block, patterns: object, stats: object) -> dict[str, PruneResult]:
            return results

    with pytest.raises(PluginError) as caught:
        ask("mine", Answers(), block, patterns, {}, Checksums(block, ["mine"]))
    assert says in str(caught.value)


def test_a_bias_is_refused_where_the_linear_has_none():
    block, patterns, results = problem()
    block.module["down"].bias = None
    results["block.down"] = replace(results["block.down"], bias=torch.ones(4))

    class Answers:
        def observe(self, block: Block, name: str) -> None: ...

        def prune(self, block: Block, patterns: object, stats: object) -> dict[str, PruneResult]:
            return results

    with pytest.raises(PluginError, match=r"returned a bias, but the linear has none; leave bias out"):
        ask("mine", Answers(), block, patterns, {}, Checksums(block, ["mine"]))


def test_a_new_bias_is_written_beside_the_weights_and_none_leaves_it():
    block, _, results = problem()
    down = block.linears["block.down"]
    before = down.bias.clone()
    write(down, results["block.down"])
    assert torch.equal(down.bias, before)
    assert not down.weight[:, [1, 4]].any()
    write(down, replace(results["block.down"], bias=torch.arange(4.0)))
    assert down.bias.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 7e4), (torch.bfloat16, 3.4e38)], ids=str)
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_numbers_that_the_models_dtype_does_not_have_are_refused(part, dtype, large):
    block, patterns, results = problem()
    block.module.to(dtype)
    fitting = replace(results["block.down"], weight=torch.full((4, 6), 6e4), bias=torch.full((4,), 6e4))
    check_numbers("mine", block, patterns, results | {"block.down": fitting})
    too_large = replace(fitting, **{part: torch.full_like(getattr(fitting, part), large)})
    with pytest.raises(PluginError, match=rf"block.down: it returned .*NaN or infinite in the model's {dtype}"):
        check_numbers("mine", block, patterns, results | {"block.down": too_large})


def test_experts_of_an_odd_size_are_asked_about_like_others():
    module = nn.Module()
    module.down_proj = nn.Parameter(torch.randn(3, 3, 5, dtype=torch.bfloat16))
    linears = {f"block.{i}": Linear(f"block.{i}", module, "down_proj", expert=i) for i in range(3)}
    untouched = Checksums(Block(0, "block", module, linears, (), None), ["mine"])
    untouched.before_asking(["block.1"])
    untouched.refuse_changes()
    untouched.before_asking(["block.2"])
    with torch.no_grad():
        module.down_proj[1, 2, 4] += 1
    with pytest.raises(PluginError, match=r"pruner 'mine' changed 1.weight of block itself"):
        untouched.refuse_changes()
