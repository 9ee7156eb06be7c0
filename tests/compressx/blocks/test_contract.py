"""What a pruner prepares and answers, and the answers that the host refuses."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.blocks.test_prune import Spy, pruned
from tests.compressx.plans import spec_of
from torch import nn

from compressx import (
    NM,
    Block,
    FeatureNorms,
    FixedMask,
    Linear,
    Owners,
    PluginError,
    PruneResult,
    Structured,
    Units,
    Unstructured,
    keep_mask,
    keep_masks,
)  # fmt: skip
from compressx.blocks.contract import Prepared, check_answer
from compressx.blocks.observe import SharedStatistic
from compressx.blocks.select import write
from compressx.testing import tiny_model

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
    check_answer("mine", block, patterns, results)


def torn(results: dict[str, PruneResult]) -> None:
    results["block.up"].keep[3, 2:4] = False


def only_columns(results: dict[str, PruneResult]) -> None:
    results["block.up"].keep[:] = True


def one_more(results: dict[str, PruneResult]) -> None:
    results["block.up"].keep[0] = False
    results["block.down"].keep[:, 0] = False


def biased(*numbers: float) -> Callable[[dict[str, PruneResult]], None]:
    return lambda results: results.update(
        {"block.down": replace(results["block.down"], bias=torch.tensor(numbers))}  # of 4 outputs
    )


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (torn, "pruner 'mine' on block.mlp: neurons go or stay whole, in all of block.up, block.down, but 2 weights"),
        (only_columns, "but 8 weights are dropped of units that are kept; make the masks by compressx.keep_masks"),
        (one_more, "on block.mlp: pattern 4 of 6 neurons means that 2 of 6 units go, got 3"),
        (biased(1.0, torch.inf, 1.0, 1.0), "on block.down: it returned a bias that is NaN or infinite"),
        (biased(1.0, 1.0), "on block.down: bias must be a float tensor [4], got torch.float32 [2]"),
    ],
)
def test_answers_that_break_the_contract_are_refused_with_module_and_numbers(broken, says):
    block, patterns, results = problem()
    broken(results)
    with pytest.raises(PluginError, match=re.escape(says)):
        check_answer("mine", block, patterns, results)


def test_a_bias_is_refused_where_the_linear_has_none():
    block, patterns, results = problem()
    block.module["down"].bias = None
    biased(1.0, 1.0, 1.0, 1.0)(results)
    with pytest.raises(PluginError, match=r"returned a bias, but the linear has none; leave bias out"):
        check_answer("mine", block, patterns, results)


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
    check_answer("mine", block, patterns, results | {"block.down": fitting})
    too_large = replace(fitting, **{part: torch.full_like(getattr(fitting, part), large)})
    with pytest.raises(PluginError, match=rf"block.down: it returned .*NaN or infinite in the model's {dtype}"):
        check_answer("mine", block, patterns, results | {"block.down": too_large})


# --- where the zeros are


def of_one(pattern: Unstructured | NM | FixedMask, keep: torch.Tensor, device: str = "cpu") -> tuple[Any, ...]:
    """Return the arguments of `check_answer` for a linear [out_features, in_features] of the mask's shape."""
    module = nn.ModuleDict({"up": nn.Linear(keep.shape[1], keep.shape[0])}).to(device)
    linears = {"block.up": Linear("block.up", module["up"])}
    return "mine", Block(0, "block", module, linears, (), None), {"block.up": pattern}, {"block.up": PruneResult(keep)}


SCORES = torch.rand(16, 16, generator=torch.Generator().manual_seed(0))


def test_a_two_of_four_mask_that_was_transposed_is_refused_with_its_first_wrong_group():
    keep = torch.tensor([True, True, False, False]).repeat(16, 4)
    check_answer(*of_one(NM(2, 4), keep))
    with pytest.raises(PluginError) as caught:
        check_answer(*of_one(NM(2, 4), keep.T))
    assert str(caught.value) == (
        "pruner 'mine' on block.up: pattern 2:4 means that 2 of 4 input features are kept, but 64 of 64 groups keep "
        "others: the first, row 0, columns 0 to 3, keeps 4; groups lie along in_features, the last dimension of masks"
    )
    one_group = keep.clone()
    one_group[5, 8:12] = torch.tensor([True, False, False, False])
    with pytest.raises(PluginError, match=r"1 of 64 groups keep others: the first, row 5, columns 8 to 11, keeps 1;"):
        check_answer(*of_one(NM(2, 4), one_group))


def test_rows_with_different_numbers_of_zeros_are_refused_though_there_are_as_many_in_all():
    keep = keep_mask(SCORES, Unstructured(0.25, "row"))
    check_answer(*of_one(Unstructured(0.25, "row"), keep))
    one_place = keep.clone()  # a zero goes from row 2 to row 9
    one_place[2, keep[2].int().argmin()], one_place[9, keep[9].int().argmax()] = True, False
    assert one_place.sum() == keep.sum()
    says = r"pattern 25% row means that 12 of 16 input features are kept, but 2 of 16 .* first, row 2, keeps 13;"
    with pytest.raises(PluginError, match=says):
        check_answer(*of_one(Unstructured(0.25, "row"), one_place))
    check_answer(*of_one(Unstructured(0.25, "layer"), one_place))


@pytest.mark.parametrize(
    "pattern", [NM(3, 4), NM(1, 2), NM(3, 8), NM(5, 16), Unstructured(0.3, "row"), Unstructured(0.3, "layer")], ids=str
)
@pytest.mark.parametrize("fixed", [False, True])
def test_every_pattern_takes_its_own_masks_and_no_transposed_one_of_another_count(pattern, fixed):
    keep = keep_mask(SCORES, pattern)
    wrong = keep.T.contiguous() if pattern != Unstructured(0.3, "layer") else keep | (SCORES[~keep].min() < SCORES)
    check_answer(*of_one(FixedMask(keep, pattern) if fixed else pattern, keep))
    with pytest.raises(PluginError, match=r"block.up: pattern .* means"):
        # A reconstructing pruner that changes the mask that it was given, in place, and returns it.
        check_answer(*of_one(FixedMask(wrong, pattern) if fixed else pattern, wrong))


def test_a_reconstructing_pruner_that_returns_another_mask_of_as_many_zeros_is_refused():
    keep = keep_mask(SCORES, pattern := Unstructured(0.5, "layer"))
    check_answer(*of_one(FixedMask(keep, pattern), keep))
    with pytest.raises(PluginError, match="a reconstructing pruner must return the mask that it was given"):
        check_answer(*of_one(FixedMask(keep, pattern), keep.T))


def test_units_that_a_reconstructing_pruner_tears_in_place_are_refused():
    block, patterns, results = problem()
    fixed = {n: FixedMask(results[n].keep, p) for n, p in patterns.items()}
    check_answer("mine", block, fixed, results)
    torn(results)
    with pytest.raises(PluginError, match="neurons go or stay whole"):
        check_answer("mine", block, fixed, results)


@pytest.mark.parametrize("pattern", [NM(2, 4), Unstructured(0.5, "row"), Unstructured(0.5, "layer")], ids=str)
def test_groups_are_counted_in_the_transfer_that_all_numbers_take(pattern):
    keep = keep_mask(SCORES, pattern)
    with pretended_accelerator() as device:
        given = of_one(pattern, keep.to("cuda"), "cuda")
        with device.counted() as counts:
            check_answer(*given)
    assert counts.synchronisations == 1, counts.places()


class Norms:
    """What is prepared, so that it can be counted and seen to go."""

    def __init__(self, norms: torch.Tensor) -> None:
        self.norms = norms


class Preparing(Spy):
    """Wanda, its norms prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[str] = []
        self.held: list[int] = []
        self._made: list[weakref.ref[Norms]] = []

    def prepare(self, block, name, statistic):
        self.prepared.append(name.rpartition(".")[2])
        self.held.append(sum(of() is not None for of in self._made))
        made = Norms(statistic.norms)
        self._made.append(weakref.ref(made))
        return made

    def prune(self, block, patterns, stats, prepared):
        scores = {n: block.linears[n].weight.abs() * of.norms for n, of in prepared.items()}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}


@pytest.mark.parametrize("separable", [True, False])
def test_each_statistic_of_a_block_is_prepared_once_and_one_is_held_at_a_time(separable):
    pruner = Preparing()
    pruned(tiny_model("llama"), spec_of(pruner, separable=separable), only="layers.0.")
    assert pruner.prepared == ["q_proj", "o_proj", "gate_proj", "down_proj"]
    assert max(pruner.held) == int(not separable)  # that of the loop, when the next one is asked for
    assert pruner._made[-1]() is None


def observed(**statistics: int) -> dict[str, SharedStatistic]:
    of = {size: SharedStatistic(FeatureNorms(size)) for size in statistics.values()}
    return {name: of[size] for name, size in statistics.items()}


def test_what_is_kept_is_not_prepared_again_and_what_is_not_is():
    pruner, stats, kept = Preparing(), observed(q=4, o=5), {}
    for _ in range(2):
        assert len(list(Prepared("mine", pruner, None, stats, kept).values())) == 2
    assert pruner.prepared == ["q", "o"]
    alone = Prepared("mine", pruner, None, stats)
    for name in "qoq":
        assert alone[name] is alone[name]
    assert pruner.prepared == ["q", "o", *"qoq"]


def test_a_failure_to_prepare_names_the_plugin_the_linear_and_the_line():
    class Broken(Preparing):
        def prepare(self, block, name, statistic):
            raise ZeroDivisionError("boom")

    with pytest.raises(
        PluginError,
        match=r"^prepare of pruner 'other' failed on model\.layers\.0\.self_attn\.q_proj: "
        r"ZeroDivisionError: boom \(.*test_contract\.py, line \d+\)$",
    ):
        pruned(tiny_model("llama"), spec_of(Broken()))
